"""Shared by all tests: quiet threads, no network, small configs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

# A model that trains in milliseconds; tests override what they are about.
# float32, also where the CPU multiplies bfloat16: what is compared is arithmetic, not rounding.
TINY: dict[str, dict[str, Any]] = {
    "run": {"precision": "float32"},
    "model": {"width": 32, "layers": 8, "heads": 4, "kv_heads": 2, "hidden": 64, "context": 16},
    "data": {"vocab": 300},
    "compression": {"rank": 8, "segments": 8},
    "pipeline": {"stages": 1, "micro_batches": 8},
    "train": {"steps": 6, "batch": 16, "eval_every": 3, "eval_batches": 2, "checkpoint_every": 0, "sample": ""},
    "optim": {"warmup": 2, "lr": 4e-3},
    "network": {"timeout": 30.0},
}


def tiny(**groups: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """TINY with some fields replaced, as `config.from_dict` takes it."""
    return {group: TINY.get(group, {}) | groups.get(group, {}) for group in {**TINY, **groups}}


@contextlib.contextmanager
def small_tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A disk of that size at `folder`; skips the test where mounting is not allowed."""
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "thinpipe-test", folder], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """A [data] group over a few small text files with a cache of its own."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(24):
        lines = [f"def function_{i}_{j}(x):\n    return x * {i + j} + {j % 7}\n" for j in range(24)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return {"files": [str(folder / "*.txt")], "vocab": 300, "cache": str(tmp_path / "cache")}


@pytest.fixture
def spawn(tmp_path: Path) -> Callable[..., str]:
    """Run a script of tests/dist in N processes under torchrun; returns its output or fails with it."""

    def run(script: str, processes: int, *arguments: str, timeout: float = 240, expect: int | None = 0) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--local-addr", "127.0.0.1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(Path(__file__).parent / "dist" / script), *arguments]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=tmp_path)
        text = done.stdout + done.stderr
        assert expect is None or done.returncode == expect, text[-6000:]
        return text

    return run
