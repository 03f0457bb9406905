"""What people are told: lines at the terminal, and what they did wrong; the check of a value's type that configs and JSON share."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import types
import typing
from typing import Any, Literal


class ThinpipeError(ValueError):
    """Something the user can mend: one or two lines that name the field or file and the remedy."""

    status = 2  # of the command that ends with it: bad input


class Stopped(Exception):
    """The run was asked to stop and has saved."""


def tell(line: str) -> None:
    """A line for the person at the terminal, if that is still there; stdout is for results."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def describe(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(json.dumps(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe(k) for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        return f"a list of {describe(typing.get_args(kind)[0])}"
    return {int: "a whole number", float: "a finite number", str: "a string", bool: "true or false"}[kind]


def _fits(value: Any, kind: Any) -> bool:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return value in args and isinstance(value, str)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, k) for k in args)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        return (
            len(value) == len(args) and all(map(_fits, value, args)) if args[-1] is not Ellipsis else all(_fits(v, args[0]) for v in value)
        )
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        return number and (abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value))
    return isinstance(value, kind) and not (kind is str and "\0" in value)  # no file's name has a NUL


def check_type(value: Any, kind: Any, name: str) -> None:
    if not _fits(value, kind):
        raise ThinpipeError(f"{name} = {_shown(value)} can't be used; give {describe(kind)}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]} ..."
