"""thinpipe: train transformer language models in pipeline parallel over thin links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import Config, ThinpipeError, load

if TYPE_CHECKING:
    from .model import build_stages
    from .run import Result
    from .runner import train

__all__ = ["Config", "Result", "ThinpipeError", "build_stages", "load", "train"]

_LATER = {"build_stages": "model", "train": "runner", "Result": "run"}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for, so that `thinpipe --help` answers at once."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
