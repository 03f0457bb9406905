"""What `thinpipe status` makes of a run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from thinpipe.config import ThinpipeError, from_dict, to_dict
from thinpipe.status import describe, status


def write(folder: Path, events: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def start(step: int) -> dict[str, Any]:
    return {"event": "start", "time": 1.0, "step": step, "config": to_dict(from_dict(tiny())), "stages": 3}


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 3.5, "seconds": 0.5, "tokens": 256 * number, "tokens_per_s": 1024.0, **more}


def test_a_run_under_way(tmp_path: Path) -> None:
    events = [start(0), step(1), {"event": "complaint", "text": "disk full", "step": 1}, {"event": "eval", "step": 1, "val_loss": 3.25}]
    events += [start(1), step(2, wire_forward=100_000, wire_backward=300_000, refused=1, time=time.time() - 40)]
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    told = status(write(tmp_path, events))
    assert (told["step"], told["steps"], told["stages"], told["loss"], told["val_loss"]) == (2, 6, 3, 3.5, 3.25)
    assert (told["restarts"], told["refused_steps"], told["checkpoint"], told["finished"]) == (1, 1, 1, False)
    assert told["tokens_per_s"] == 1024.0 and 39 < told["silent_s"] < 60
    assert told["link_mbit"] == pytest.approx(400_000 * 8 / 4 / 0.5 / 1e6)  # two boundaries, two directions
    assert (told["total_bytes_forward"], told["total_bytes_backward"]) == (100_000, 300_000)
    assert told["complaints"] == ["disk full"]
    assert describe(told)["sent"].startswith("100.0 kB forward and 300.0 kB backward")
    assert "heard of 4" in describe(told)["step"] and describe(told)["complaint 1"] == "disk full"


def test_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    told = status(write(tmp_path, [start(0)]))
    assert told["loss"] is None and told["tokens_per_s"] is None and "–" in describe(told)["loss"]
    told = status(write(tmp_path, [start(0), step(6), {"event": "result", "step": 6}]))
    assert told["finished"] and "finished" in describe(told)["step"] and told["link_mbit"] == 0.0


@pytest.mark.parametrize("events", [[], [step(1)], [start(0), step(1, seconds="many")], [{"event": "start"}]])
def test_what_is_no_run_is_named(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    with pytest.raises(ThinpipeError, match=str(tmp_path)):
        status(write(tmp_path, events))
