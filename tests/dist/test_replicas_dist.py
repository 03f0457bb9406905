"""Replicas through the command: what several learn is what one does, and a killed one comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from life_kills import write_config
from safetensors.torch import load_file
from test_command import children, command, finish, gone, start, wait_for_step

from thinpipe import faults
from thinpipe.faults import Fault
from thinpipe.metrics import read_events


def train(folder: Path, config: Path, *options: str) -> Path:
    status, _, err = command(folder, "train", str(config), "--run.dir", "run", *options)
    assert status == 0, err
    return folder / "run"


def steps(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = (run / "checkpoints" / f"step-{step:08}").glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in tensors.items() if name not in ("basis/M", "basis/square_norm")}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_two_replicas_learn_what_one_does_and_a_killed_one_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, steps=120, checkpoint_every=15, eval_every=0)
    one = ["--pipeline.stages", "1", "--pipeline.micro-batches", "2", "--train.batch", "4", "--compression.segments", "2"]
    one += ["--compression.wire", "float32"]  # so that nothing is rounded but float32 itself
    two = [*one, "--pipeline.replicas", "2"]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = train(tmp_path / "one", config, *one, "--train.stop-at", "10")
    faults.write(tmp_path / "faults.json", [Fault(what="kill", replica=1, stage=0, step=12, at="backward")])
    monkeypatch.setenv(faults.VARIABLE, str(tmp_path / "faults.json"))
    run = train(tmp_path / "two", config, *two)
    for ours, theirs in zip(steps(run)[:10], steps(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5) and ours["norm"] == pytest.approx(theirs["norm"], rel=1e-4)
        assert ours["tokens"] == theirs["tokens"] and ours["replicas"] == 2

    told = steps(run)
    assert [event["step"] for event in told] == list(range(1, 121))  # no step of the other one is lost
    without = [event["step"] for event in told if event["replicas"] == 1]
    assert without and without[0] == 12 and told[-1]["replicas"] == 2, without
    context = told[0]["tokens"] // 4
    assert told[-1]["tokens"] == sum(2 * event["replicas"] for event in told) * context
    assert all(event["tokens_per_s"] == 2 * event["replicas"] * context / event["seconds"] for event in told)
    words = (run / "logs/replica-1.txt").read_text()
    assert "killed by SIGKILL" in words and "took over the state of step" in words, words
    assert_same(weights(run, 120), weights(run / "replicas/1", 120))


@pytest.mark.slow
def test_distant_replicas_agree_whenever_they_average(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=24, checkpoint_every=0, eval_every=0)
    options = ["--pipeline.stages", "2", "--pipeline.replicas", "2", "--pipeline.micro-batches", "1", "--train.batch", "4"]
    options += ["--average.every", "6", "--average.wire", "int8", "--compression.move-every", "12"]
    run = train(tmp_path, config, *options)
    ours, theirs = (
        {name: tensor for name, tensor in weights(folder, 24).items() if not name.startswith("optim/")}
        for folder in (run, run / "replicas/1")
    )
    assert_same(ours, theirs)
    losses = [[event["loss"] for event in steps(folder)] for folder in (run, run / "replicas/1")]
    assert losses[0] != losses[1]  # each its own part of the data
    sent = [event["average_bytes"] for event in steps(run)]
    assert [step for step, size in enumerate(sent) if size] == [6, 12, 18]


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_replica(tmp_path: Path) -> None:
    config = write_config(tmp_path, checkpoint_every=0)
    process = start(tmp_path, "train", str(config), "--run.dir", "run", "--pipeline.stages", "1", "--pipeline.replicas", "2")
    wait_for_step(tmp_path / "run", 3)
    below = children(process.pid)
    below += [worker for command_ in below for worker in children(command_)]
    assert len(below) >= 4
    process.kill()
    assert gone(below)
    finish(process)
