"""The command as a user types it: real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from thinpipe.config import dump, from_dict
from thinpipe.metrics import read_events

KEYS = {
    "run", "method", "stages", "segments", "steps", "tokens", "train_loss", "val_loss", "tokens_per_s", "seconds_per_step",
    "wire_bytes_per_token", "wire_bytes_forward", "wire_bytes_backward", "wire_measured", "dense_wire_bytes_per_token",
    "compression", "peak_rss_mb",
}  # fmt: skip


def write(folder: Path, corpus: dict[str, Any], **groups: dict[str, Any]) -> Path:
    path = folder / "config.toml"
    path.write_text(dump(from_dict(tiny(data=corpus, **groups))))
    return path


def start(cwd: Path, *arguments: str, module: str = "thinpipe", **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *module.split(), *arguments]
    return subprocess.Popen(command, cwd=cwd, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def command(cwd: Path, *arguments: str) -> tuple[int, str, str]:
    return finish(start(cwd, *arguments))


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def wait_for_step(run: Path, step: int, timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if any(e["event"] == "step" and e["step"] >= step for e in read_events(run / "metrics.jsonl")):
            return
        time.sleep(0.1)
    raise AssertionError("the run did not get going")


def gone(pids: list[int], timeout: float = 20) -> bool:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


def test_train_eval_and_again(tmp_path: Path, corpus: dict[str, Any]) -> None:
    config = write(tmp_path, corpus, train={"sample": "def "})
    status, out, err = command(tmp_path, "train", str(config), "--pipeline.stages", "4", "--data.source", "first", "--json")
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result.keys() >= KEYS
    assert result["run"] == "runs/demo-1" and result["stages"] == 4 and result["segments"] == 8 and result["steps"] == 6
    assert result["wire_measured"] and len(result["peak_rss_mb"]) == 4
    # k numbers of two bytes each way, and the window's ids (int32, one more than targets) forward.
    assert result["wire_bytes_backward"] == 3 * 256 * 8 * 2
    assert result["wire_bytes_forward"] == 3 * (256 * 8 * 2 + 16 * 17 * 4)
    assert result["sample"].startswith("def ")
    assert "step" in err and "Traceback" not in err

    status, out, err = command(tmp_path, "eval", "runs/demo-1", "--json", "--batches", "2")
    assert status == 0, err
    evaluated = json.loads(out.splitlines()[-1])
    assert evaluated["val_loss"] == pytest.approx(result["val_loss"], rel=1e-5)

    ask = ["generate", "runs/demo-1", "-p", "def f", "--new-tokens", "8", "--json"]
    status, out, err = command(tmp_path, *ask)
    assert status == 0, err
    text = json.loads(out.splitlines()[-1])["text"]
    assert text.startswith("def f") and len(text) > len("def f")
    status, out, err = command(tmp_path, *ask, "--staged", "--stages", "2")
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["text"] == text and text in out.partition("{")[0]

    status, out, err = command(tmp_path, "export", "runs/demo-1", "hf", "--json")
    assert status == 0, err
    exported = json.loads(out.splitlines()[-1])
    assert exported["max_abs_logit_diff"] <= 1e-5 * max(1.0, exported["max_abs_logit"])
    status, out, err = command(tmp_path, "report", "runs/demo-1", "--json")
    assert status == 0 and all((tmp_path / file).stat().st_size > 5000 for file in json.loads(out.splitlines()[-1])["files"])

    status, out, err = command(tmp_path, "train", "--run.dir", "runs/demo-1", "--json")
    assert status == 0 and "finished" in err
    assert json.loads(out.splitlines()[-1]) == result
    status, out, err = command(tmp_path, "train", "--run.dir", "runs/demo-1", "--train.steps", "8", "--pipeline.stages", "2", "--json")
    assert status == 0, err
    assert "train.steps grows from 6 to 8" in err and "resumed from step 6" in err
    assert json.loads(out.splitlines()[-1])["steps"] == 8


@pytest.mark.slow
def test_verify(tmp_path: Path, corpus: dict[str, Any]) -> None:
    config = write(tmp_path, corpus, pipeline={"stages": 2})
    status, out, err = command(tmp_path, "verify", str(config), "--json")
    assert status == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["ok"] and result["stages"] == 2 and result["dtype"] == "float64"
    assert result.keys() >= {"loss_rel_diff", "grad_max_rel_diff", "wire_loss_rel_diff", "rounding_loss_rel_diff"}
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_stop_saves_and_resumes(tmp_path: Path, corpus: dict[str, Any], number: signal.Signals) -> None:
    config = write(tmp_path, corpus, pipeline={"stages": 2}, train={"steps": 5000, "eval_every": 0})
    process = start(tmp_path, "train", str(config), "--run.dir", "run")
    wait_for_step(tmp_path / "run", 3)
    workers = children(process.pid)
    process.send_signal(number)
    status, _, err = finish(process)
    assert status == 130, err
    assert "stopped after step" in err and "Traceback" not in err
    assert gone(workers)
    last = max(e["step"] for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "step")
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    status, _, err = command(tmp_path, "train", "--run.dir", "run", "--train.stop-at", str(last + 2))
    assert status == 0 and f"resumed from step {last}" in err, err


def test_a_second_command_in_the_same_folder_is_refused_and_changes_nothing(tmp_path: Path, corpus: dict[str, Any]) -> None:
    config = write(tmp_path, corpus, pipeline={"stages": 2}, train={"steps": 5000, "eval_every": 0})
    process = start(tmp_path, "train", str(config), "--run.dir", "run")
    wait_for_step(tmp_path / "run", 1)
    before = (tmp_path / "run" / "config.toml").read_bytes()
    status, _, err = command(tmp_path, "train", "--run.dir", "run", "--train.steps", "6000")
    assert status == 2 and "another command trains in run now; wait for it or stop it" in err and len(err.splitlines()) == 1, err
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 130
    starts = [event for event in read_events(tmp_path / "run" / "metrics.jsonl") if event["event"] == "start"]
    assert len(starts) == 1


def test_a_killed_stage_is_named_and_ends_the_others(tmp_path: Path, corpus: dict[str, Any]) -> None:
    config = write(tmp_path, corpus, pipeline={"stages": 3}, train={"steps": 5000, "eval_every": 0})
    process = start(tmp_path, "train", str(config), "--run.dir", "run", "--network.restarts", "0")
    wait_for_step(tmp_path / "run", 2)
    workers = children(process.pid)
    by_rank = {Path(f"/proc/{pid}/environ").read_bytes().partition(b"\0RANK=")[2].partition(b"\0")[0]: pid for pid in workers}
    os.kill(by_rank[b"1"], signal.SIGKILL)
    began = time.monotonic()
    status, _, err = finish(process)
    assert status == 1 and "stage 1 was killed by SIGKILL" in err, err
    assert len([line for line in err.splitlines() if line.startswith("thinpipe:")]) == 1 and "Traceback" not in err
    assert time.monotonic() - began < 30 and gone(workers)


@pytest.mark.slow
def test_killing_the_launcher_leaves_nothing(tmp_path: Path, corpus: dict[str, Any]) -> None:
    config = write(tmp_path, corpus, pipeline={"stages": 2}, train={"steps": 5000, "eval_every": 0})
    process = start(tmp_path, "train", str(config), "--run.dir", "run")
    wait_for_step(tmp_path / "run", 1)
    workers = children(process.pid)
    process.kill()
    finish(process)
    assert len(workers) >= 2 and gone(workers)


def test_a_mistake_inside_a_stage_is_shown(tmp_path: Path, corpus: dict[str, Any]) -> None:
    """A bug of ours: the failing stage's traceback, exit status 1, not a wall of logs."""
    config = write(tmp_path, corpus, pipeline={"stages": 2})
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import thinpipe.model\n"
        "    def broken(self, *a): raise ZeroDivisionError('on purpose')\n"
        "    thinpipe.model.Stage.logits = broken\n"
    )
    status, _, err = finish(start(tmp_path, "train", str(config), PYTHONPATH=str(tmp_path)))
    assert status == 1, err
    assert "stage 1 failed" in err and "ZeroDivisionError: on purpose" in err, err


@pytest.mark.slow
def test_torchrun(tmp_path: Path, corpus: dict[str, Any]) -> None:
    config = write(tmp_path, corpus, pipeline={"stages": 2})
    module = "torch.distributed.run --nproc-per-node 2 --local-addr 127.0.0.1 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 -m thinpipe"
    status, out, err = finish(start(tmp_path, "train", str(config), "--json", module=module))
    assert status == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("{")]
    assert json.loads(line)["stages"] == 2
    status, _, err = finish(start(tmp_path, "train", str(config), "--pipeline.stages", "3", module=module))
    assert status != 0 and "pipeline.stages = 3 but 2 processes" in err
