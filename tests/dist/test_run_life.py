"""A run's life through the command: kills, damaged checkpoints, none left, other data, a full disk (FIELD.md kinds 9 and 10)."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import small_tmpfs
from life_kills import compare, live, newest, wait_for_a_step, write_config
from test_command import command, finish, start
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from thinpipe import launch
from thinpipe.config import PipelineConfig, ThinpipeError, from_dict, load
from thinpipe.metrics import read_events
from thinpipe.topology import connect
from thinpipe.trainer import Trainer


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lives")
    live(folder, kills=2, seed=4)  # one of the launcher, one of a stage
    return folder


@pytest.mark.slow
def test_killed_at_any_moment_a_run_ends_as_if_undisturbed(lives: Path) -> None:
    assert compare(lives) > 3


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"}


@pytest.mark.slow
def test_damage_is_named_and_the_newest_whole_checkpoint_used(lives: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(lives / "whole", tmp_path / "run")
    whole, *rest = sorted((run / "checkpoints").iterdir())
    step, before = int(whole.name.removeprefix("step-")), losses(run)
    (run / "result.json").unlink(missing_ok=True)  # which tells of more steps than will be left
    damages = [
        ("stage-1-of-2.safetensors", flip, "is damaged"),
        ("stage-0-of-2.safetensors", cut, "bytes instead of"),
        ("stage-1-of-2.safetensors", Path.unlink, "is missing"),
        ("manifest.json", flip, "is damaged"),
        ("manifest.json", Path.unlink, "is missing"),
    ]
    for folder, (file, harm, _) in zip(rest, damages, strict=True):
        harm(folder / file)

    def passed_over(err: str) -> bool:
        told = [line for line in err.splitlines() if line.startswith("passing over")]
        expected = [(f"{folder.name}/{file}", words) for folder, (file, _, words) in zip(rest, damages, strict=True)]
        return len(told) == 5 and all(path in line and words in line for line, (path, words) in zip(told, expected[::-1], strict=True))

    asked = [
        start(tmp_path, "eval", "run", "--batches", "1", "--json"),
        start(tmp_path, "generate", "run", "-p", "def", "--new-tokens", "1"),
    ]
    (status, out, err), generated = map(finish, asked)
    assert status == 0 and passed_over(err) and json.loads(out.splitlines()[-1])["step"] == step, err
    assert generated[0] == 0 and passed_over(generated[2]), generated[2]
    status, _, err = command(tmp_path, "train", "--run.dir", "run", "--train.stop-at", str(step + 1))
    assert status == 0 and passed_over(err) and f"resumed from step {step}\n" in err, err
    assert losses(run) == {n: loss for n, loss in before.items() if n <= step + 1}

    for folder in (whole, rest[0]):  # the last two that are whole
        flip(folder / "stage-0-of-2.safetensors")
    asked = [start(tmp_path, *words.split()) for words in (f"train --run.dir run --train.stop-at {step + 2}", "eval run")]
    for status, _, err in map(finish, asked):
        assert status == 2 and "no whole checkpoint in run/checkpoints" in err and "Traceback" not in err, err
        assert f"{rest[-1].name}/{damages[-1][0]} is missing" in err and "move the folder away to start anew" in err, err
    assert max(losses(run)) == step + 1  # nothing was trained

    shutil.rmtree(run / "checkpoints")
    with connect(20) as alone:
        Trainer(replace(load(run / "config.toml"), pipeline=PipelineConfig(stages=1)), alone, run).metrics.close()
    assert f"{run}/checkpoints holds no checkpoint; training begins anew" in capsys.readouterr().err


@pytest.mark.slow
def test_other_data_is_refused_and_changes_nothing(lives: Path, tmp_path: Path, corpus: dict[str, Any]) -> None:
    run = shutil.copytree(lives / "whole", tmp_path / "run")
    (tmp_path / "corpus" / "0.txt").write_text("another text, of other words\n" * 200)
    config = replace(load(run / "config.toml"), data=from_dict({"data": corpus}).data, pipeline=PipelineConfig(stages=1))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with connect(20) as alone, pytest.raises(ThinpipeError, match=f"the data differs from that of {run}/checkpoints/step"):
        Trainer(config, alone, run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_signals_are_the_callers_again_behind_a_training(tmp_path: Path) -> None:
    """Who trains from a program of his own keeps his Ctrl-C."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    launch.side_by_side([[sys.executable, "-c", ""]], 1, [tmp_path / "log"], "{}", lambda: True, print)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    (tmp_path / "config.toml").write_text("[model]\nwidht = 1\n")
    with pytest.raises(ThinpipeError, match=r"model\.widht"):
        launch.start("train", tmp_path, 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert launch._hangup() == ()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert launch._hangup() == (signal.SIGHUP,)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_of_commands_beside_each_other_the_killed_one_is_named(tmp_path: Path) -> None:
    """The others end because of it."""
    codes = ("raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)", "raise SystemExit(1)")
    commands, logs = [[sys.executable, "-c", code] for code in codes], [tmp_path / str(i) for i in range(3)]
    with pytest.raises(launch.Lost, match="^host 1 was killed by SIGKILL$"):
        launch.side_by_side(commands, 1, logs, "host {}", lambda: False, print)


def test_a_stage_whose_command_is_gone_ends_at_once(tmp_path: Path) -> None:
    """It may have been killed while the stage was loading torch."""
    done = subprocess.run([sys.executable, "-m", "thinpipe.worker", "1", "train", str(tmp_path)], capture_output=True, timeout=60)
    assert done.returncode == 1 and not done.stderr, done.stderr


def test_the_agents_sigterm_hides_no_failure() -> None:
    """When a stage dies, the agent ends the others in the same second; that is no stop that the user asked for."""

    def cause(*codes: int) -> Exception:
        return launch._explain([(rank, ProcessFailure(rank, 1, code, "")) for rank, code in enumerate(codes)])

    lost = cause(-signal.SIGTERM, -signal.SIGABRT, launch.STOPPED)
    assert isinstance(lost, launch.Lost) and "stage 1 was killed by SIGABRT" in str(lost)
    assert isinstance(cause(launch.STOPPED, -signal.SIGTERM), launch.Stopped)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_tmpfs(folder, "4m") as disk:
        yield disk


def test_a_full_disk_costs_saves_but_no_run(tmp_path: Path, small_disk: Path) -> None:
    """Not a byte is left, for the metrics and the stages' words neither, from the first steps to the last."""
    run, filler = small_disk / "run", small_disk / "filler"
    train = ["train", str(write_config(tmp_path, steps=40, checkpoint_every=2, keep_last=1)), "--run.dir", str(run)]
    process = start(tmp_path, *train)
    wait_for_a_step(run, 1)
    with open(filler, "wb", buffering=0) as file:
        while process.poll() is None:
            if list((run / "checkpoints").glob("step-????????")):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(4096))
            time.sleep(0.002)
    status, _, err = finish(process)
    saved = newest(run)
    assert saved is not None and 0 < saved.step < 40
    assert status != 0 and "Traceback" not in err, err
    for words in (f"checkpoint of step {saved.step + 2} was not saved", "No space left on device", f"step {saved.step} stays the newest"):
        assert words in err, err
    assert "metrics.jsonl can't be written" in err and "step 40 could not be saved" in err, err

    filler.unlink()
    status, _, err = command(tmp_path, *train)
    assert status == 0 and f"resumed from step {saved.step}\n" in err, err
    last = newest(run)
    assert last is not None and last.step == 40 and [*losses(run)] == [*range(1, 41)]
