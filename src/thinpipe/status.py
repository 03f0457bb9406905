"""`thinpipe status`: how a run stands, from its folder (on the first stage's machine, or wherever it is shared) or its endpoint."""

from __future__ import annotations

import http.client
import re
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from .checkpoint import newest_step
from .config import ThinpipeError
from .endpoint import PATH, read
from .metrics import read_events
from .standing import Standing

_PATIENCE = 5.0  # seconds to wait for an endpoint
_LARGEST = 1 << 20  # bytes of an answer that are read


def status(where: str | Path) -> dict[str, Any]:
    """How a run stands; see `Standing.told`.

    Args:
        where: the run's folder, or HOST:PORT, where it serves Prometheus text.

    Raises ThinpipeError if there is no run, or it can't be reached.
    """
    if re.fullmatch(r"[^/]+:\d{1,5}", str(where)) and not Path(where).exists():
        return _ask(str(where))
    folder = Path(where)
    events = list(read_events(folder / "metrics.jsonl"))
    if not any(event["event"] == "start" for event in events):
        raise ThinpipeError(f"{folder} holds no run that has started (no metrics.jsonl with a start); give the folder of a run")
    try:
        return Standing(events).told(str(folder), newest_step(folder / "checkpoints"))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ThinpipeError(f"{folder / 'metrics.jsonl'} is damaged ({type(error).__name__}: {error})") from None


def _ask(address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=_PATIENCE)
    try:
        connection.request("GET", PATH)
        return read(connection.getresponse().read(_LARGEST).decode(errors="replace"))
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ThinpipeError(f"{address} can't be reached ({why}); is the run training there, with run.prometheus?") from None
    except (LookupError, TypeError, ValueError, http.client.HTTPException):
        raise ThinpipeError(f"{address} is no thinpipe run's; give the HOST:PORT of its run.prometheus") from None
    finally:
        connection.close()


def describe(told: dict[str, Any]) -> dict[str, str]:
    """What `status` returned, for people: names and values of a table."""

    def number(key: str, form: str) -> str:
        return "–" if told[key] is None else format(told[key], form)

    heard = "finished" if told["finished"] else f"heard of {told['silent_s']:.0f} s ago"
    forward, backward = (decimal(int(told[f"total_bytes_{direction}"])) for direction in ("forward", "backward"))
    at_work = {"replicas": f"{told['replicas']} at work"} if told["replicas"] > 1 else {}
    rows = at_work | {
        "step": f"{told['step']} of {told['steps']}, {told['tokens']:,} tokens, {heard}",
        "loss": f"{number('loss', '.4f')}, validation {number('val_loss', '.4f')}",
        "speed": f"{number('seconds_per_step', '.3f')} s per step, {number('tokens_per_s', ',.0f')} tokens/s",
        "links": f"{number('link_mbit', '.3g')} Mbit/s on average, each boundary and direction",
        "sent": f"{forward} forward and {backward} backward, over all boundaries",
        "checkpoint": "none yet" if told["checkpoint"] is None else f"step {told['checkpoint']}",
        "trouble": f"{told['restarts']} restarts, {told['refused_steps']} steps refused",
    }
    return rows | {f"complaint {i}": text for i, text in enumerate(told["complaints"] or [], 1)}
