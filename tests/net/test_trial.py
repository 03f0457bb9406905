"""`thinpipe lab`: the real command on every host, against the same run without a network."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from thinpipe.config import dump, from_dict
from thinpipe.lab import Link, Measured, leftovers, parse_links, unavailable
from thinpipe.metrics import read_events
from thinpipe.trial import as_achieved

_REASON = unavailable()
requires_net = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def command(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "thinpipe", *arguments]
    return subprocess.Popen(
        argv, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


def config(folder: Path, corpus: dict[str, Any], **groups: dict[str, Any]) -> str:
    path = folder / "lab.toml"
    path.write_text(dump(from_dict(tiny(data=corpus, pipeline={"stages": 3, "micro_batches": 4}, **groups))))
    return str(path)


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in read_events(run / "metrics.jsonl") if event["event"] == "step"]


def wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)


def everything() -> tuple[list[str], str]:
    """Namespaces and processes of labs, and the devices of this machine."""
    return leftovers(), subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, timeout=20).stdout


def test_achieved_links_stay_shared_or_apart() -> None:
    got = [Measured(79.0, 51.0), Measured(78.0, 50.0), Measured(77.0, 52.0)]
    shared = as_achieved(parse_links("80mbit,25ms", 3), got)
    assert shared == [Link(up=78e6, down=78e6, delay=0.0255)] * 3
    apart = as_achieved(parse_links("up=20mbit,down=80mbit,25ms/40mbit,10ms/unlimited", 3), got)
    assert (apart[0].up, apart[0].down, apart[0].delay) == (pytest.approx(79e6), pytest.approx(4 * 79e6), 0.0255)
    assert apart[1].up == pytest.approx(78e6) and apart[2].up is None and apart[2].delay == 0.026


@requires_net
@pytest.mark.slow
def test_a_run_in_the_lab_is_the_run(tmp_path: Path, corpus: dict[str, Any]) -> None:
    before = everything()
    path = config(tmp_path, corpus)
    lab = command(tmp_path, "lab", path, "--link", "60mbit,5ms/20mbit,10ms", "--run.dir", "lab", "--json")
    out, err = lab.communicate(timeout=180)
    assert lab.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    alone = command(tmp_path, "train", path, "--run.dir", "alone", "--json")
    reference = json.loads(alone.communicate(timeout=120)[0].splitlines()[-1])
    assert losses(tmp_path / "lab") == losses(tmp_path / "alone") and len(losses(tmp_path / "lab")) == 6
    assert result["val_loss"] == reference["val_loss"] and result.keys() > reference.keys()
    assert result["link"] == "60mbit,5ms/20mbit,10ms"
    achieved = [link.split(",") for link in result["achieved_link"].split("/")]
    for (rate, delay), (asked, late) in zip(achieved, ((60, 5), (20, 10)), strict=True):
        assert float(rate.removesuffix("mbit")) == pytest.approx(asked, rel=0.15)
        assert float(delay.removesuffix("ms")) == pytest.approx(late, abs=3)
    assert result["planned_seconds_per_step"] > 0.03 and 0 <= result["emulator_cpu"] < 1
    assert "asked 60mbit,5ms" in err and "planned" in err and "Traceback" not in err
    assert "network.rdzv" not in (tmp_path / "lab/config.toml").read_text()  # the lab is gone, the run can go on without
    assert everything() == before


@requires_net
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_ended_saves_or_leaves_nothing(tmp_path: Path, corpus: dict[str, Any], number: signal.Signals) -> None:
    before = everything()
    path = config(tmp_path, corpus, train={"steps": 4000, "eval_every": 0, "checkpoint_every": 1})
    lab = command(tmp_path, "lab", path, "--link", "80mbit,2ms", "--run.dir", "run")
    try:
        wait(lambda: len(losses(tmp_path / "run")) >= 3, 120)
    finally:
        lab.send_signal(number)
    _, err = lab.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert lab.returncode == 130, err
        (last,) = [path for path in (tmp_path / "run/checkpoints").iterdir() if path.name.endswith(str(len(losses(tmp_path / "run"))))]
        assert last.is_dir()
    wait(lambda: everything() == before, 30)


@requires_net
def test_links_that_do_not_fit_are_named(tmp_path: Path, corpus: dict[str, Any]) -> None:
    path = config(tmp_path, corpus)
    lab = command(tmp_path, "lab", path, "--link", "80mbit,2ms/80mbit,2ms/80mbit,2ms")
    _, err = lab.communicate(timeout=60)
    assert lab.returncode == 2 and "--link" in err and "Traceback" not in err
