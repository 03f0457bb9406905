"""How a run stands, from its events as they come: what `thinpipe status` and the Prometheus endpoint show."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

_COMPLAINTS = 3  # newest ones that are shown


class Standing:
    """Hears a run's events (metrics.jsonl) one by one, in their order."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self._newest: dict[str, dict[str, Any]] = {}
        self._last: dict[str, Any] = {}
        self._starts = self._forward = self._backward = 0
        self._complaints: deque[dict[str, Any]] = deque(maxlen=_COMPLAINTS)
        for event in events:
            self.hear(event)

    def hear(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        self._newest[kind] = self._last = event
        self._starts += kind == "start"
        if kind == "complaint":
            self._complaints.append(event)
        if kind in ("step", "lost"):
            forward, backward = wire_bytes(event)
            self._forward += forward
            self._backward += backward

    def told(self, run: str, checkpoint: int | None) -> dict[str, Any]:
        """How the run stands now.

        Args:
            run: what to call it.
            checkpoint: step of its newest checkpoint.

        Returns:
            run, method, stages, replicas at work; step of steps; tokens trained on; loss of the last step and the newest val_loss
            (None: none yet); seconds_per_step, the median of the last 20 steps; tokens_per_s, the last step's tokens over that;
            link_mbit, what a boundary carries in one direction on average, Mbit/s; total_bytes_forward and total_bytes_backward,
            sent over all boundaries so far, for steps that a restart has undone too; restarts; refused_steps; checkpoint;
            heard, the Unix time of its last event, and silent_s, seconds since then; finished; complaints, the newest ones.

        Raises LookupError, TypeError or ArithmeticError if it has not started or an event is damaged.
        """
        start, step, evaluated = self._newest["start"], self._newest.get("step", {}), self._newest.get("eval", {})
        config, stages, seconds = start["config"], start["stages"], step.get("seconds")
        sent, heard = sum(wire_bytes(step)), self._last.get("time", time.time())
        return {
            "run": run,
            "method": config["compression"]["method"],
            "stages": stages,
            "replicas": step.get("replicas", 1),
            "step": step.get("step", 0),
            "steps": config["train"]["steps"],
            "tokens": step.get("tokens", 0),
            "loss": step.get("loss"),
            "val_loss": evaluated.get("val_loss"),
            "seconds_per_step": seconds,
            "tokens_per_s": step.get("tokens_per_s"),
            "link_mbit": sent * 8e-6 / (2 * (stages - 1)) / seconds if seconds and stages > 1 else None,
            "total_bytes_forward": self._forward,
            "total_bytes_backward": self._backward,
            "restarts": self._starts - 1,
            "refused_steps": step.get("refused", 0),
            "checkpoint": checkpoint,
            "heard": heard,
            "silent_s": max(0.0, time.time() - heard),
            "finished": self._last["event"] == "result",
            "complaints": [complaint["text"] for complaint in list(self._complaints)],
        }


def wire_bytes(event: dict[str, Any]) -> tuple[int, int]:
    """Bytes forward and backward that a step event tells; a damaged number counts as 0, since it must not end a run."""
    forward, backward = (event.get(name) for name in ("wire_forward", "wire_backward"))
    return forward if isinstance(forward, int) else 0, backward if isinstance(backward, int) else 0
