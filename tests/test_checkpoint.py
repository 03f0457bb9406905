"""Checkpoints against damage, kills, full disks and other numbers of stages. Stages are threads here; tests/dist has processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from conftest import small_tmpfs
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from thinpipe import checkpoint
from thinpipe.checkpoint import Checkpoint, Checkpointer, find
from thinpipe.config import ThinpipeError
from thinpipe.topology import Topology, connect

T = TypeVar("T")


class Room:
    """Where the threads of a test meet."""

    def __init__(self, stages: int) -> None:
        self.slots: list[str] = [""] * stages
        self.barrier = threading.Barrier(stages, timeout=20)


@dataclass(eq=False)
class ThreadTopology(Topology):
    room: Room

    def gather(self, value: Any) -> list[Any]:
        self.room.slots[self.stage] = json.dumps(value)
        self.room.barrier.wait()
        everyone = [json.loads(slot) for slot in self.room.slots]
        self.room.barrier.wait()
        return everyone


def pipeline(stages: int, act: Callable[[Topology], T]) -> list[T]:
    """Run `act` on every stage of a pipeline of threads, stage s on host "node-s"."""
    room = Room(stages)
    members = [ThreadTopology(s, stages, f"node-{s}", 0, 1, None, room) for s in range(stages)]  # type: ignore[arg-type]
    with ThreadPoolExecutor(stages) as pool:
        return [future.result() for future in [pool.submit(act, member) for member in members]]


def owned(stage: int, stages: int, value: float = 0.0) -> dict[str, torch.Tensor]:
    """What a stage owns of a model of eight tensors."""
    return {f"layer.{i}.weight": torch.full((3, 5), value + i) for i in range(8) if i * stages // 8 == stage}


def saving(folder: Callable[[int], Path], *steps: int, keep: int = 9, resumed: int | None = None) -> Callable[[Topology], list[str | None]]:
    def act(topology: Topology) -> list[str | None]:
        checkpointer = Checkpointer(folder(topology.stage), topology, keep, 0, resumed)
        errors = []
        for step in steps:
            checkpointer.save(step, owned(topology.stage, topology.stages, step), {"step": step})
            errors.append(checkpointer.finish())
        return errors

    return act


def finding(folder: Callable[[int], Path], said: list[str]) -> Callable[[Topology], Checkpoint | None]:
    return lambda topology: find(folder(topology.stage), topology, owned(topology.stage, topology.stages).keys(), said.append)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.fixture
def alone() -> Iterator[Topology]:
    with connect(20) as topology:
        yield topology


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8)
    tied = torch.nn.Parameter(torch.randn(4, 4))
    strange = torch.tensor([0x7FC00001, 0x7F800001, -0x7FFFFFFF - 1], dtype=torch.int32).view(torch.float32)  # NaNs, -0
    return {
        "transposed": base.T,
        "slice": base[1:4, ::2],
        "overlap": base[2:5],
        "tied.first": tied,
        "tied.last": tied,
        "strange": strange,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "expanded": torch.ones(1, 3).expand(4, 3),
        "bf16": torch.randn(5).bfloat16(),
        "f16": torch.randn(5).half(),
        "f64": torch.randn(5, dtype=torch.float64),
        "bool": torch.tensor([True, False]),
        "step": torch.tensor(2**60 + 1),
        "rng": torch.get_rng_state(),
    }


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_round_trip_is_bit_for_bit_of_the_moment_of_saving(tmp_path: Path, alone: Topology) -> None:
    tensors = odd_tensors()
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    facts: dict[str, Any] = {"config": {"run": {"seed": 3}}, "tokens": 10**12, "lr": 0.1 + 0.2, "näme": [None, True]}
    checkpointer = Checkpointer(tmp_path / "c", alone, 2, 0)
    assert checkpointer.state == "idle"
    assert checkpointer.finish() is None
    checkpointer.save(7, tensors, facts)
    assert checkpointer.state in ("writing", "written")
    with torch.no_grad():
        for name in ("transposed", "tied.first", "bf16", "scalar"):
            tensors[name].fill_(9)  # training goes on while the copy is written
    facts["tokens"] = 0
    assert checkpointer.finish() is None

    found = find(tmp_path / "c", None, None, pytest.fail)
    assert found is not None
    assert (found.step, found.folder) == (7, tmp_path / "c" / "step-00000007")
    assert found.facts == {**facts, "tokens": 10**12}
    assert found.names == expected.keys()
    assert {name: bits(tensor) for name, tensor in found.tensors(found.names).items()} == expected
    assert bits(found.tensor("scalar")) == expected["scalar"]
    assert load_file(found.folder / "stage-0-of-1.safetensors").keys() == expected.keys()
    modes = {path.stat().st_mode & 0o777 for path in found.folder.iterdir()}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == {0o666 & ~umask}
    with pytest.raises(ThinpipeError, match=r"no tensor layer\.9"):
        found.tensor("layer.9")


def test_copies_are_reused_and_follow_the_tensors(tmp_path: Path, alone: Topology) -> None:
    checkpointer = Checkpointer(tmp_path, alone, 9, 0)
    for step, tensors in enumerate(
        [{"a": torch.ones(3), "b": torch.ones(2)}, {"a": torch.zeros(3)}, {"a": torch.zeros(2, dtype=torch.int64)}]
    ):
        before = checkpointer._copies.get("a")
        checkpointer.save(step, tensors, {})
        assert (checkpointer._copies["a"] is before) == (step == 1)
        assert checkpointer.finish() is None
        found = find(tmp_path, alone, None, pytest.fail)
        assert found is not None
        assert found.names == tensors.keys()
        assert bits(found.tensor("a")) == bits(tensors["a"])


def test_any_number_of_stages_resumes(tmp_path: Path) -> None:
    for step, stages in enumerate([4, 2, 1, 8, 3], start=1):
        if step > 1:
            found = pipeline(stages, finding(lambda _: tmp_path, []))
            for stage, checkpoint_ in enumerate(found):
                assert checkpoint_ is not None
                assert checkpoint_.step == step - 1
                assert len(checkpoint_.names) == 8
                wanted = owned(stage, stages, step - 1)
                assert {n: bits(t) for n, t in checkpoint_.tensors(wanted.keys()).items()} == {n: bits(t) for n, t in wanted.items()}
        assert pipeline(stages, saving(lambda _: tmp_path, step)) == [[None]] * stages
    assert len(list((tmp_path / "step-00000004").iterdir())) == 9


def test_wanted_may_be_picked_from_the_names(tmp_path: Path) -> None:
    pipeline(2, saving(lambda _: tmp_path, 5))
    (tmp_path / "step-00000005" / "stage-1-of-2.safetensors").unlink()  # not needed, so not missed
    found = find(tmp_path, None, lambda names: {name for name in names if name <= "layer.3.weight"}, pytest.fail)
    assert found is not None
    assert len(found.names) == 8
    with pytest.raises(ThinpipeError, match=r"no tensor layer\.99 \(1 of 1"):
        find(tmp_path, None, ["layer.99"], lambda _: None)


# Damage


STAGE_FILE = "stage-1-of-2.safetensors"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def take_from_earlier(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000100" / path.name, path)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "header length": (STAGE_FILE, lambda p: flip(p, 0), "damaged"),
    "header": (STAGE_FILE, lambda p: flip(p, 20), "damaged"),
    "data": (STAGE_FILE, lambda p: flip(p, -1), "damaged"),
    "cut": (STAGE_FILE, cut, "bytes instead of"),
    "empty": (STAGE_FILE, lambda p: p.write_bytes(b""), "has 0 bytes instead of"),
    "missing": (STAGE_FILE, Path.unlink, "missing"),
    "a folder": (STAGE_FILE, replace_by_folder, "directory"),
    "other step's": (STAGE_FILE, take_from_earlier, "damaged"),
    "manifest start": ("manifest.json", lambda p: flip(p, 0), "damaged"),
    "manifest middle": ("manifest.json", lambda p: flip(p, p.read_text().index('"tokens"') + 12), "damaged"),
    "manifest hash": ("manifest.json", lambda p: flip(p, p.read_text().index('"sha256"') + 20), "damaged"),
    "manifest cut": ("manifest.json", cut, "damaged"),
    "manifest missing": ("manifest.json", Path.unlink, "missing"),
    "manifest of another": (
        "manifest.json",
        take_from_earlier,
        "no manifest of",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named_and_the_checkpoint_before_it_used(tmp_path: Path, kind: str) -> None:
    file, harm, words = DAMAGES[kind]

    def act(topology: Topology) -> None:
        checkpointer = Checkpointer(tmp_path, topology, 9, 0)
        for step in (100, 200):
            checkpointer.save(step, owned(topology.stage, 2, step), {"tokens": step * 1111})
            assert checkpointer.finish() is None

    pipeline(2, act)
    harm(tmp_path / "step-00000200" / file)
    for look in (lambda said: pipeline(2, finding(lambda _: tmp_path, said))[1], lambda said: find(tmp_path, None, None, said.append)):
        said: list[str] = []
        found = look(said)
        assert found is not None
        assert found.step == 100
        assert len(said) == 1
        for expected in ("step 200", file, words, *(["stage 1 on node-1"] if file == STAGE_FILE else [])):
            assert expected in said[0]
    shutil.rmtree(tmp_path / "step-00000100")
    with pytest.raises(ThinpipeError, match=f"no whole checkpoint.*{file}"):
        find(tmp_path, None, None, lambda _: None)


def test_only_needed_files_are_read(tmp_path: Path) -> None:
    pipeline(2, saving(lambda _: tmp_path, 1))
    (tmp_path / "step-00000001" / STAGE_FILE).unlink()
    found = find(tmp_path, None, owned(0, 2).keys(), pytest.fail)
    assert found is not None
    with pytest.raises(ThinpipeError, match=STAGE_FILE):
        found.tensor("layer.7.weight")


def test_nothing_there_is_no_checkpoint(tmp_path: Path, alone: Topology) -> None:
    assert find(tmp_path / "absent", None, None, pytest.fail) is None
    for name in ("step-00000200.partial", "step-00000100.removed", "step-xyz", "step-00000300.backup", "step-0000000400"):
        (tmp_path / name).mkdir()
    for topology in (None, alone):
        assert find(tmp_path, topology, None, pytest.fail) is None
    Checkpointer(tmp_path, alone, 1, 0)
    assert steps_in(tmp_path) == ["step-0000000400", "step-00000300.backup", "step-xyz"]


# Hostile manifests


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    pipeline(2, saving(lambda _: folder, 1, 2))
    return folder


def look_with_manifest(sample: Path, raw: bytes) -> Checkpoint | None:
    manifest = sample / "step-00000002" / "manifest.json"
    original = manifest.read_bytes()
    try:
        manifest.write_bytes(raw)
        found = find(sample, None, None, lambda _: None)
        if found is not None:
            with contextlib.suppress(ThinpipeError):
                found.tensors(found.names)
        return found
    finally:
        manifest.write_bytes(original)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_damaged_manifest_bytes_are_never_believed(sample: Path, data: st.DataObject) -> None:
    raw = (sample / "step-00000002" / "manifest.json").read_bytes()
    start = data.draw(st.integers(0, len(raw)))
    stop = data.draw(st.integers(start, min(len(raw), start + 40)))
    found = look_with_manifest(sample, raw[:start] + data.draw(st.binary(max_size=8)) + raw[stop:])
    assert found is not None
    assert found.step == 1 or found.facts == {"step": 2}  # the same content, spelled with other white space


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_forged_manifests_are_refused_without_a_traceback(sample: Path, data: st.DataObject) -> None:
    content = json.loads((sample / "step-00000002" / "manifest.json").read_text())
    place = content
    while isinstance(place, dict) and place:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            place[key] = data.draw(JUNK)
            break
        place = place[key]
    del content["sha256"]
    forged = content | {"sha256": checkpoint._digest(content)}
    look_with_manifest(sample, json.dumps(forged).encode())


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff", b'"a"', b"[" * 100_000, b'{"sha256": ' + b"9" * 5000 + b"}"])
def test_what_is_no_manifest_is_refused(sample: Path, raw: bytes) -> None:
    found = look_with_manifest(sample, raw)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "{sample}/secret.safetensors", "stage-0-of-1.safetensors/../../secret.safetensors"]
)
def test_file_names_cannot_leave_the_folder(sample: Path, name: str) -> None:
    secret = sample / "secret.safetensors"
    save_file({"a": torch.ones(1)}, secret)
    (sample / "step-00000002" / "stage-0-of-1.safetensors").mkdir(exist_ok=True)
    digest = hashlib.sha256(secret.read_bytes()).hexdigest()
    record = {"sha256": digest, "bytes": secret.stat().st_size, "host": "h", "stage": 0, "tensors": {"a": ["float32", [1]]}}
    content = {"format": 1, "step": 2, "stages": 1, "facts": {}, "files": {name.format(sample=sample): record}}
    found = look_with_manifest(sample, json.dumps(content | {"sha256": checkpoint._digest(content)}).encode())
    assert found is not None
    assert found.step == 1


def test_newer_format_is_named(sample: Path) -> None:
    content = {"format": 2, "step": 2}
    said: list[str] = []
    manifest = sample / "step-00000002" / "manifest.json"
    original = manifest.read_bytes()
    manifest.write_text(json.dumps(content | {"sha256": checkpoint._digest(content)}))
    find(sample, None, None, said.append)
    manifest.write_bytes(original)
    assert "has format 2" in said[0]


# Keeping and abandoning


def test_keep_last_and_keep_every(tmp_path: Path, alone: Topology) -> None:
    checkpointer = Checkpointer(tmp_path, alone, 2, 30)
    for step in range(10, 80, 10):
        checkpointer.save(step, {"a": torch.ones(1)}, {})
        checkpointer.save(step, {"a": torch.zeros(1)}, {})  # being saved: skipped
        assert checkpointer.finish() is None
        checkpointer.save(step, {"a": torch.zeros(1)}, {})  # saved: skipped
        assert checkpointer.state == "idle"
    assert steps_in(tmp_path) == [f"step-000000{step}" for step in (30, 60, 70)]
    found = find(tmp_path, None, None, pytest.fail)
    assert found is not None
    assert found.tensor("a") == 1


def test_an_abandoned_future_neither_counts_nor_stays(tmp_path: Path) -> None:
    pipeline(2, saving(lambda _: tmp_path, 100, 200, 300))
    for step in (200, 300):
        (tmp_path / f"step-00000{step}" / STAGE_FILE).unlink()
    assert pipeline(1, saving(lambda _: tmp_path, 150, keep=2, resumed=100)) == [[None]]
    assert steps_in(tmp_path) == [f"step-00000{step}" for step in (100, 150, 200, 300)]
    found = pipeline(1, finding(lambda _: tmp_path, []))[0]
    assert found is not None
    assert found.step == 150
    assert pipeline(1, saving(lambda _: tmp_path, 200, 310, keep=2, resumed=150)) == [[None, None]]
    assert steps_in(tmp_path) == [f"step-00000{step}" for step in (200, 310)]
    assert steps_in(tmp_path / "step-00000200") == ["manifest.json", "stage-0-of-1.safetensors"]


# Disks of their own


@pytest.fixture
def disks(tmp_path: Path) -> Callable[[int], Path]:
    return lambda stage: tmp_path / f"disk-{stage}"


def test_each_disk_gets_its_stage_and_the_manifest(disks: Callable[[int], Path]) -> None:
    assert pipeline(2, saving(disks, 1, 2, keep=1)) == [[None, None]] * 2
    for stage in range(2):
        assert steps_in(disks(stage)) == ["step-00000002"]
        assert steps_in(disks(stage) / "step-00000002") == ["manifest.json", f"stage-{stage}-of-2.safetensors"]
    assert [found and found.step for found in pipeline(2, finding(disks, []))] == [2, 2]
    said: list[str] = []
    with pytest.raises(ThinpipeError, match=r"stage-1-of-2\.safetensors is missing on .*; it was written by stage 1 on node-1"):
        find(disks(0), None, None, said.append)


def test_stages_agree_on_a_step_that_all_have(disks: Callable[[int], Path]) -> None:
    pipeline(3, saving(disks, 1, 2, 3, 4))
    shutil.rmtree(disks(0) / "step-00000004")
    (disks(1) / "step-00000003" / "stage-1-of-3.safetensors").unlink()
    flip(disks(2) / "step-00000003" / "stage-2-of-3.safetensors", -1)
    said: list[str] = []
    found = pipeline(3, finding(disks, said))
    assert [checkpoint_ and checkpoint_.step for checkpoint_ in found] == [2, 2, 2]
    assert len(said) == 2
    assert "disk-0/step-00000004/stage-0-of-3.safetensors is missing on node-0; it was written by stage 0 on node-0" in said[0]
    assert "disk-1/step-00000003/stage-1-of-3.safetensors is missing on node-1" in said[1]
    assert "disk-2/step-00000003/stage-2-of-3.safetensors on node-2 is damaged" in said[1]


def test_a_node_needs_only_its_file(disks: Callable[[int], Path], tmp_path: Path) -> None:
    """Restaged from 2 to 3 on fresh nodes, with just the files that each stage needs copied, and the manifest on one of them."""
    pipeline(2, saving(disks, 5))
    for stage, files in enumerate([["stage-0-of-2", "manifest"], ["stage-0-of-2", "stage-1-of-2"], ["stage-1-of-2"]]):
        fresh = tmp_path / f"fresh-{stage}" / "step-00000005"
        fresh.mkdir(parents=True)
        for name in files:
            source = next(path for disk in (0, 1) for path in (disks(disk) / "step-00000005").iterdir() if path.stem == name)
            shutil.copy(source, fresh)
    found = pipeline(3, finding(lambda stage: tmp_path / f"fresh-{stage}", []))
    for stage, checkpoint_ in enumerate(found):
        assert checkpoint_ is not None
        assert all(checkpoint_.tensor(name).equal(tensor) for name, tensor in owned(stage, 3, 5).items())


def test_manifests_of_different_saves_do_not_mix(disks: Callable[[int], Path], tmp_path: Path) -> None:
    pipeline(2, saving(disks, 1))
    pipeline(2, saving(lambda stage: tmp_path / f"other-{stage}", 1, 2))
    shutil.copytree(tmp_path / "other-0" / "step-00000002", disks(0) / "step-00000002")
    manifest = json.loads((disks(0) / "step-00000002" / "manifest.json").read_text())
    del manifest["sha256"]
    manifest["facts"] = {"step": "another"}
    shutil.copytree(tmp_path / "other-1" / "step-00000002", disks(1) / "step-00000002")
    (disks(1) / "step-00000002" / "manifest.json").write_text(json.dumps(manifest | {"sha256": checkpoint._digest(manifest)}))
    said: list[str] = []
    assert [found and found.step for found in pipeline(2, finding(disks, said))] == [1, 1]
    assert "differs between the machines" in said[0]


@pytest.mark.parametrize("killed", [{0}, {1}, {0, 1}])
@pytest.mark.parametrize("earlier", [(), (1,)])
def test_a_kill_between_the_renames_loses_nothing(disks: Callable[[int], Path], killed: set[int], earlier: tuple[int, ...]) -> None:
    pipeline(2, saving(disks, *earlier, 2))
    for stage in killed:
        (disks(stage) / "step-00000002").rename(disks(stage) / "step-00000002.partial")
    found = pipeline(2, finding(disks, []))
    for stage, checkpoint_ in enumerate(found):
        assert checkpoint_ is not None
        assert checkpoint_.step == 2
        checkpoint_.tensors(owned(stage, 2).keys())
    pipeline(2, lambda topology: Checkpointer(disks(topology.stage), topology, 1, 0, 2))
    assert steps_in(disks(0))[-1] == steps_in(disks(1))[-1] == "step-00000002"


@pytest.mark.parametrize("earlier", [(), (1,)])
def test_a_kill_before_all_have_sealed_is_no_checkpoint(disks: Callable[[int], Path], earlier: tuple[int, ...]) -> None:
    pipeline(2, saving(disks, *earlier, 2))
    for stage in range(2):
        (disks(stage) / "step-00000002").rename(disks(stage) / "step-00000002.partial")
    (disks(1) / "step-00000002.partial" / "stage-1-of-2.safetensors").unlink()
    found = pipeline(2, finding(disks, said := []))
    assert [checkpoint_ and checkpoint_.step for checkpoint_ in found] == [earlier[0] if earlier else None] * 2
    assert not said


# Disks that are full or slow


@pytest.fixture(params=["tmpfs", "patched"])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a disk with room for little more than a small checkpoint."""
    folder = tmp_path / "full"
    folder.mkdir()
    if request.param == "patched":
        fsync = os.fsync

        def full(descriptor: int) -> None:
            here = os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/")
            if here and os.fstat(descriptor).st_size > 1_000_000:
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        yield folder
        return
    with small_tmpfs(folder, "1m") as disk:
        yield disk


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, full_disk: Path) -> None:
    def folder(stage: int) -> Path:
        return full_disk if stage == 1 else tmp_path / "roomy"

    def act(topology: Topology) -> str | None:
        checkpointer = Checkpointer(folder(topology.stage), topology, 2, 0)
        tensors = owned(topology.stage, 2)
        checkpointer.save(1, tensors, {})
        assert checkpointer.finish() is None
        checkpointer.save(2, {**tensors, f"big.{topology.stage}": torch.ones(500_000)}, {})
        text = checkpointer.finish()
        assert checkpointer.state == "idle"
        assert steps_in(folder(topology.stage)) == ["step-00000001"]  # nothing half behind
        checkpointer.save(2, tensors, {})  # there's room again
        assert checkpointer.finish() is None
        return text

    first, second = pipeline(2, act)
    assert first == second
    assert first is not None
    for expected in ("step 2 was not saved", "stage 1 on node-1", STAGE_FILE, "No space left on device", "step 1 stays"):
        assert expected in first
    assert "stage 0" not in first
    found = pipeline(2, finding(folder, []))
    assert [checkpoint_ and checkpoint_.step for checkpoint_ in found] == [2, 2]


@pytest.mark.parametrize("phase", ["_seal", "_publish"])
def test_a_manifest_that_cannot_be_written_is_an_error_everywhere(
    disks: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    pipeline(2, saving(disks, 1))
    original = getattr(Checkpointer, phase)

    def failing(self: Checkpointer, *arguments: Any) -> None:
        if self.topology.stage == 1:
            raise OSError(28, "No space left on device")
        original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, phase, failing)
        texts = pipeline(2, saving(disks, 2, resumed=1))
    assert texts[0] == texts[1]
    assert "stage 1 on node-1" in str(texts[0])
    assert "No space left" in str(texts[0])
    if phase == "_seal":
        assert steps_in(disks(0)) == steps_in(disks(1)) == ["step-00000001"]
    found = pipeline(2, finding(disks, []))  # sealed everywhere is saved, whatever name it has
    assert [checkpoint_ and checkpoint_.step for checkpoint_ in found] == [1 if phase == "_seal" else 2] * 2


def test_a_file_that_somebody_removed_is_not_sealed(tmp_path: Path) -> None:
    def act(topology: Topology) -> str | None:
        checkpointer = Checkpointer(tmp_path, topology, 1, 0)
        checkpointer.save(1, owned(topology.stage, 2), {})
        while checkpointer.state == "writing":
            time.sleep(0.001)
        topology.gather(None)
        if topology.is_last:
            (tmp_path / "step-00000001.partial" / STAGE_FILE).unlink()
        return checkpointer.finish()

    texts = pipeline(2, act)
    assert texts[0] == texts[1]
    assert STAGE_FILE in str(texts[0])
    assert "there is none yet" in str(texts[0])
    assert steps_in(tmp_path) == []


def test_what_safetensors_refuses_is_a_failed_save(tmp_path: Path, alone: Topology) -> None:
    checkpointer = Checkpointer(tmp_path, alone, 1, 0)
    checkpointer.save(1, {"a": torch.ones(2, dtype=torch.complex128)}, {})
    assert "could not write" in str(checkpointer.finish())
    assert steps_in(tmp_path) == []


def test_a_slow_disk_is_waited_for_and_a_stuck_one_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    original = checkpoint.save_file

    def slow(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "stage-1" in path.name:
            release.wait(20)
        original(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    monkeypatch.setattr(checkpoint, "HEARTBEAT", 0.02)
    threading.Timer(0.3, release.set).start()
    assert pipeline(2, saving(lambda _: tmp_path, 1)) == [[None], [None]]

    release.clear()
    monkeypatch.setattr(checkpoint, "DISK_PATIENCE", 0.2)
    with pytest.raises(ThinpipeError, match="the disk of stage 1 on node-1 has not answered"):
        pipeline(2, saving(lambda _: tmp_path, 2, resumed=1))
    release.set()


# kill -9


def save_for_ever(folder: Path, committed: Synchronized[int]) -> None:
    torch.set_num_threads(1)
    with connect(20) as topology:
        resumed = find(folder, topology, None, print)
        checkpointer = Checkpointer(folder, topology, 2, 5, resumed.step if resumed else None)
        step = resumed.step if resumed else 0
        while True:
            step += 1
            checkpointer.save(step, {f"t{i}": torch.full((100_000 + i,), step) for i in range(4)}, {"step": step})
            assert checkpointer.finish() is None
            committed.value = step


def test_kill_at_any_moment_loses_no_committed_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinpipe.checkpoint", "hypothesis", "pytest"])
    committed = context.Value("q", 0, lock=False)
    moments = random.Random(0)
    for _ in range(20):
        process = context.Process(target=save_for_ever, args=(tmp_path, committed))
        before = committed.value
        process.start()
        deadline = time.monotonic() + 60
        while committed.value == before and time.monotonic() < deadline:
            time.sleep(0.002)
        assert committed.value > before
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join(20)
        reported = committed.value
        found = find(tmp_path, None, None, pytest.fail)
        assert found is not None
        assert found.step in (reported, reported + 1)
        assert found.facts == {"step": found.step}
        assert len(found.names) == 4
        assert all((tensor == found.step).all() for tensor in found.tensors(found.names).values())
        committed.value = found.step
