"""Checkpoints of real processes over Gloo, each with a disk of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from thinpipe.checkpoint import Checkpointer, find
from thinpipe.topology import Topology, connect

WORLD = 2
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["thinpipe.checkpoint", "pytest"])  # children then need no seconds to import torch


def start(target: Any, *arguments: Any) -> list[ForkServerProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [CONTEXT.Process(target=as_rank, args=(rank, port, target, *arguments)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    return processes


def as_rank(rank: int, port: int, target: Any, *arguments: Any) -> None:
    """Each process is its machine's only one, as on WORLD machines."""
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    with connect(30) as topology:
        target(topology, *arguments)


def owned(topology: Topology, step: int) -> dict[str, torch.Tensor]:
    return {f"stage.{topology.stage}.{i}": torch.full((50_000 + i,), step) for i in range(3)}


def save_and_resume(topology: Topology, root: Path) -> None:
    folder = root / f"disk-{topology.stage}"
    said: list[str] = []
    assert find(folder, topology, None, said.append) is None
    checkpointer = Checkpointer(folder, topology, 2, 0)
    for step in (1, 2, 3):
        checkpointer.save(step, owned(topology, step), {"step": step})
        while "writing" in topology.gather(checkpointer.state):  # the trainer's per-step message
            time.sleep(0.001)
        assert checkpointer.commit() is None
    assert checkpointer.finish() is None  # old ones have gone, too
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    topology.gather(None)
    if topology.is_last:
        (folder / "step-00000003" / "stage-1-of-2.safetensors").unlink()
    found = find(folder, topology, owned(topology, 0).keys(), said.append)
    assert found is not None
    assert found.facts == {"step": 2}
    assert all(found.tensor(name).equal(tensor) for name, tensor in owned(topology, 2).items())
    assert len(said) == (1 if topology.is_first else 0)
    assert all("disk-1/step-00000003/stage-1-of-2.safetensors is missing" in line for line in said)


def save_for_ever(topology: Topology, root: Path, found_step: Any, committed: Any) -> None:
    folder = root / f"disk-{topology.stage}"
    found = find(folder, topology, owned(topology, 0).keys(), pytest.fail)
    step = found.step if found else 0
    if found:
        assert found.facts == {"step": step}
        assert all(found.tensor(name).equal(tensor) for name, tensor in owned(topology, step).items())
    found_step[topology.stage] = step
    checkpointer = Checkpointer(folder, topology, 2, 0, step if found else None)
    with contextlib.suppress(RuntimeError):  # Gloo: the other was killed first
        while True:
            step += 1
            checkpointer.save(step, owned(topology, step), {"step": step})
            assert checkpointer.finish() is None
            committed[topology.stage] = step


def test_processes_with_disks_of_their_own(tmp_path: Path) -> None:
    processes = start(save_and_resume, tmp_path)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * WORLD


def test_kill_at_any_moment_leaves_machines_in_agreement(tmp_path: Path) -> None:
    found_step, committed = CONTEXT.Array("q", WORLD, lock=False), CONTEXT.Array("q", WORLD, lock=False)
    moments = random.Random(1)
    safe = 0
    for round_ in range(12):
        found_step[:] = [-1] * WORLD
        committed[:] = [-1] * WORLD
        processes = start(save_for_ever, tmp_path, found_step, committed)
        deadline = time.monotonic() + 60
        # Half of the rounds are killed at or near the very first saves.
        while (min(found_step) < 0 or (round_ % 2 and min(committed) < 0)) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert found_step[0] == found_step[1]
        assert safe <= found_step[0] <= safe + 1
        for process in moments.sample(processes, WORLD):
            time.sleep(moments.uniform(0, 0.03))
            process.kill()
        for process in processes:
            process.join(20)
        safe = max(*committed, found_step[0])
