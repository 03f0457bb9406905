"""Stages and machines that are lost: the others say so, all start again from the newest checkpoint, and no number changes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from life_kills import stages_of, write_config
from test_command import command, finish, gone, start, wait_for_step
from test_machines import free_port, losses


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run of two stages, beside the run itself."""
    folder = tmp_path_factory.mktemp("restarts")
    config = write_config(folder, steps=100, checkpoint_every=15, eval_every=50)
    status, _, err = command(folder, "train", str(config), "--run.dir", "run")
    assert status == 0, err
    return config


def test_a_killed_and_a_frozen_stage_cost_time_only(undisturbed: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "train", str(undisturbed), "--run.dir", "run", "--network.timeout", "4")
    wait_for_step(tmp_path / "run", 20)
    os.kill(stages_of(process.pid)[1], signal.SIGKILL)
    wait_for_step(tmp_path / "run", 50)
    os.kill(stages_of(process.pid)[0], signal.SIGSTOP)
    status, _, err = finish(process)
    assert status == 0, err
    assert "stage 1 was killed by SIGKILL" in err and "heard nothing (network.timeout) from stage 0" in err, err
    assert err.count("(1 of 5)") == 2, err  # a new checkpoint came between the two
    assert losses(tmp_path / "run") == losses(undisturbed.parent / "run")


@pytest.mark.slow
def test_losses_that_bring_no_checkpoint_are_counted(undisturbed: Path, tmp_path: Path) -> None:
    more = ["--network.restarts", "1", "--train.checkpoint-every", "0"]
    process = start(tmp_path, "train", str(undisturbed), "--run.dir", "run", *more)
    for life in (1, 2):
        deadline = time.monotonic() + 60
        while not losses(tmp_path / "run") or len(stages_of(process.pid)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        stages = stages_of(process.pid)
        os.kill(stages[0], signal.SIGKILL)
        assert gone(list(stages.values())), life
        (tmp_path / "run/metrics.jsonl").unlink()
    status, _, err = finish(process)
    assert status == 1 and "starting again from the beginning (1 of 1)" in err, err
    assert [line for line in err.splitlines() if line.startswith("thinpipe:")] == err.splitlines()[-1:] and "killed by SIGKILL" in err


def test_a_spare_takes_a_lost_machines_place_and_the_meetings_host_may_come_back(undisturbed: Path, tmp_path: Path) -> None:
    meet = ["--network.rdzv", f"127.0.0.1:{free_port()}", "--network.nodes", "2:3", "--network.timeout", "20"]

    def machine(number: int, *more: str) -> Any:
        return start(tmp_path, "train", str(undisturbed), *meet, "--network.addr", f"127.0.0.{number}", "--run.dir", "run", *more)

    host, lost = machine(1, "--network.node-rank", "0"), machine(2)
    wait_for_step(tmp_path / "run", 5)
    spare = machine(3)
    wait_for_step(tmp_path / "run", 17)
    workers = list(stages_of(lost.pid).values())
    lost.kill()
    assert gone(workers)
    wait_for_step(tmp_path / "run", 40)
    assert stages_of(spare.pid).keys() == {1}
    host.kill()
    _, _, first_words = finish(host)
    host = machine(1, "--network.node-rank", "0")
    ends = [finish(each) for each in (host, spare)]
    assert [status for status, _, _ in ends] == [0, 0], ends
    assert "stage 0" in first_words and "lost the connection to stage 1" in first_words and "starting again from step" in first_words
    assert "lost the meeting's host" in ends[1][2], ends[1][2]
    assert losses(tmp_path / "run") == losses(undisturbed.parent / "run")
    finish(lost)
