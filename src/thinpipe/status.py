"""`thinpipe status`: how a run stands, from its folder alone: on the first stage's machine, or wherever the folder is shared."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from .checkpoint import newest_step
from .config import ThinpipeError
from .metrics import read_events

_COMPLAINTS = 3  # newest ones that are shown


def status(folder: Path) -> dict[str, Any]:
    """How a run stands.

    Returns:
        run, method, stages; step of steps; loss of the last step and the newest val_loss (None: none yet); seconds_per_step and
        tokens_per_s, medians of the last 20 steps; link_mbit, what a boundary carries in one direction on average, Mbit/s;
        restarts; refused_steps; checkpoint, the newest one's step; silent_s, seconds since the run was heard of; finished;
        complaints, the newest ones.

    Raises ThinpipeError if the folder holds no run.
    """
    events = [event for event in read_events(folder / "metrics.jsonl") if "event" in event]
    if not any(event["event"] == "start" for event in events):
        raise ThinpipeError(f"{folder} holds no run that has started (no metrics.jsonl with a start); give the folder of a run")
    try:
        return _told(folder, events)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ThinpipeError(f"{folder / 'metrics.jsonl'} is damaged ({type(error).__name__}: {error})") from None


def _told(folder: Path, events: list[dict[str, Any]]) -> dict[str, Any]:
    starts = [event for event in events if event["event"] == "start"]
    newest: dict[str, dict[str, Any]] = {event["event"]: event for event in events}
    last, evaluated = newest.get("step", {}), newest.get("eval", {})
    config, stages, seconds, step = starts[-1]["config"], starts[-1]["stages"], last.get("seconds"), last.get("step", 0)
    sent = last.get("wire_forward", 0) + last.get("wire_backward", 0)
    return {
        "run": str(folder),
        "method": config["compression"]["method"],
        "stages": stages,
        "step": step,
        "steps": config["train"]["steps"],
        "loss": last.get("loss"),
        "val_loss": evaluated.get("val_loss"),
        "seconds_per_step": seconds,
        "tokens_per_s": last["tokens"] / step / seconds if seconds else None,
        "link_mbit": sent * 8e-6 / (2 * (stages - 1)) / seconds if seconds and stages > 1 else None,
        "restarts": len(starts) - 1,
        "refused_steps": last.get("refused", 0),
        "checkpoint": newest_step(folder / "checkpoints"),
        "silent_s": max(0.0, time.time() - events[-1].get("time", time.time())),
        "finished": events[-1]["event"] == "result",
        "complaints": [event["text"] for event in events if event["event"] == "complaint"][-_COMPLAINTS:],
    }


def describe(told: dict[str, Any]) -> dict[str, str]:
    """What `status` returned, for people: names and values of a table."""

    def number(key: str, form: str) -> str:
        return "–" if told[key] is None else format(told[key], form)

    heard = "finished" if told["finished"] else f"heard of {told['silent_s']:.0f} s ago"
    rows = {
        "step": f"{told['step']} of {told['steps']}, {heard}",
        "loss": f"{number('loss', '.4f')}, validation {number('val_loss', '.4f')}",
        "speed": f"{number('seconds_per_step', '.3f')} s per step, {number('tokens_per_s', ',.0f')} tokens/s",
        "links": f"{number('link_mbit', '.3g')} Mbit/s on average, each boundary and direction",
        "checkpoint": "none yet" if told["checkpoint"] is None else f"step {told['checkpoint']}",
        "trouble": f"{told['restarts']} restarts, {told['refused_steps']} steps refused",
    }
    return rows | {f"complaint {i}": text for i, text in enumerate(told["complaints"], 1)}
