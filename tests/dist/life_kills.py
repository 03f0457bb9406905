"""kill -9 at random moments of a whole run that is always saving; the same command resumes it every time.

    python tests/dist/life_kills.py [--kills 20] [--seed 0]

Prints what the kills hit and how long a life took. The suite has a shorter chain of lives (test_run_life.py).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # for conftest, when this file is the script
from conftest import tiny
from test_command import children, finish, gone, start

from thinpipe.checkpoint import Checkpoint, find
from thinpipe.config import dump, from_dict
from thinpipe.metrics import read_events


def write_config(folder: Path, **train: Any) -> Path:
    """A run of two stages that saves behind every step and moves its subspace often."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for i in range(24):
        (corpus / f"{i}.txt").write_text("\n".join(f"def function_{i}_{j}(x):\n    return x * {i + j} + {j % 7}\n" for j in range(24)))
    groups: dict[str, Any] = {
        "data": {"files": [str(corpus / "*.txt")], "cache": str(folder / "cache")},
        "compression": {"move_every": 4},
        "pipeline": {"stages": 2, "micro_batches": 2},
        "train": {"steps": 5000, "eval_every": 0, "checkpoint_every": 1, **train},
    }
    path = folder / "config.toml"
    path.write_text(dump(from_dict(tiny(**groups))))
    return path


def newest(run: Path) -> Checkpoint | None:
    """The newest checkpoint under its final name; nothing newer may be damaged."""
    return find(run / "checkpoints", None, None, pytest.fail)


def steps_told(run: Path) -> int:
    return max((event["step"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"), default=0)


def wait_for_a_step(run: Path, life: int) -> None:
    """Until the run's `life`-th life (from 1) has trained."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        kinds = [event["event"] for event in read_events(run / "metrics.jsonl")]
        if kinds.count("start") == life and kinds[-1] == "step":
            return
        time.sleep(0.01)
    raise AssertionError("the run did not get going")


def stages_of(launcher: int) -> dict[int, int]:
    """Process of each stage."""
    ranks = {pid: re.search(rb"\0RANK=([0-9]+)\0", Path(f"/proc/{pid}/environ").read_bytes()) for pid in children(launcher)}
    return {int(match[1]): pid for pid, match in ranks.items() if match}


def what_was_cut(run: Path) -> Iterator[str]:
    """What of a save a kill has left behind."""
    whole = newest(run)
    sizes = {path.name: path.stat().st_size for path in whole.folder.iterdir()} if whole else {}
    for partial in (run / "checkpoints").glob("*.partial"):
        yield "save under way"
        if (partial / "manifest.json").exists():
            yield "between the two phases"
        elif any(
            not (partial / name).exists() or (partial / name).stat().st_size < size for name, size in sizes.items() if "stage" in name
        ):
            yield "file cut off or not begun"
    if list((run / "checkpoints").glob("*.removed")):
        yield "removal under way"


def live(folder: Path, kills: int, seed: int) -> Counter[str]:
    """The run folder/killed, killed so many times, and folder/whole, which does as many steps undisturbed.

    Asserts after each kill that a whole checkpoint is there and that the next life begins with it. Returns what the kills hit.
    """
    moments, hit = random.Random(seed), Counter[str]()
    run = folder / "killed"
    command = ["train", str(write_config(folder, keep_last=6)), "--network.restarts", "0", "--run.dir"]
    least = told = 0  # steps that a life may resume from
    for life in range(1, kills + 1):
        process = start(folder, *command, str(run))
        wait_for_a_step(run, life)
        stages = stages_of(process.pid)
        victim = moments.choice(["launcher", "stage 0", "stage 1"])
        time.sleep(moments.uniform(0, 0.5))
        os.kill({"launcher": process.pid, "stage 0": stages[0], "stage 1": stages[1]}[victim], signal.SIGKILL)
        status, _, err = finish(process)
        assert gone([*stages.values()])
        assert status == -signal.SIGKILL if victim == "launcher" else f"{victim} was killed by SIGKILL" in err, err
        resumed = int(match[1]) if (match := re.search("resumed from step ([0-9]+)", err)) else 0
        assert least <= resumed <= told, err
        told, found = steps_told(run), newest(run)
        least = found.step if found else 0
        # When step n is told of, n - 1 may be in writing and n - 2 is committed.
        assert least >= max(resumed, told - 2), err
        hit.update({victim, *what_was_cut(run)})
    for name in ("killed", "whole"):
        status, _, err = finish(start(folder, *command, str(folder / name), "--train.stop-at", str(told + 8)))
        assert status == 0, (status, err)
    return hit


def compare(folder: Path) -> int:
    """Assert that the two runs agree bit for bit: each step's events and the last checkpoint's tensors. Returns their steps."""

    def events(run: str) -> dict[tuple[str, int], dict[str, Any]]:
        kept = [event for event in read_events(folder / run / "metrics.jsonl") if event["event"] in ("step", "move", "eval")]
        assert len({(event["event"], event["step"]) for event in kept}) == len(kept), "a step was told twice"
        return {(e["event"], e["step"]): {key: e[key] for key in e.keys() - {"time", "seconds", "tokens_per_s"}} for e in kept}

    killed, whole = events("killed"), events("whole")
    assert [key for key in killed if key[0] != "move"] == [key for key in whole if key[0] != "move"]
    for key, event in killed.items():  # a kill may cost the record of a move, not the move
        assert event == whole[key]
    ours, theirs = newest(folder / "killed"), newest(folder / "whole")
    assert ours is not None and theirs is not None and ours.step == theirs.step and ours.names == theirs.names
    assert all(ours.tensor(name).equal(theirs.tensor(name)) for name in ours.names)
    assert all(ours.facts[key] == theirs.facts[key] for key in theirs.facts.keys() - {"config"})
    return ours.step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        began = time.monotonic()
        hit = live(Path(scratch), arguments.kills, arguments.seed)
        steps, seconds = compare(Path(scratch)), time.monotonic() - began
    print(f"{arguments.kills} kills in {steps} steps, {seconds:.0f} s in all: the run equals an undisturbed one bit for bit")
    print("what the kills hit: " + ", ".join(f"{what} {count}" for what, count in hit.items()))
