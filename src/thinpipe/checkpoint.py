"""Checkpoints: one safetensors file per stage, a manifest that seals them, any number of stages on resume.

    RUN/checkpoints/step-00000200/{manifest.json, stage-0-of-4.safetensors, ...}

A checkpoint is written as `step-00000200.partial` and renamed. It is committed in two phases, so that a kill at any moment
leaves machines with disks of their own in agreement: (1) when every stage has its file on disk, each disk gets the manifest;
(2) when every disk has the manifest, each renames. So a folder with its final name anywhere means a sealed one everywhere,
and a sealed `.partial` is whole. Nothing here pickles, and what is read from disk is checked before it is believed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, KeysView
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import ThinpipeError
from .topology import Topology

FORMAT = 1
MANIFEST = "manifest.json"
HEARTBEAT = 1.0  # seconds between signs of life while some stage waits for its disk; below any sensible network.timeout
DISK_PATIENCE = 1800.0  # seconds after which a disk counts as stuck
REMOVAL_PATIENCE = 20.0  # seconds that the end of a run waits for old checkpoints to go; the next start removes the rest

_FOLDER = re.compile(r"step-([0-9]{8,15})")
_FILE = re.compile(r"stage-[0-9]{1,6}-of-[0-9]{1,6}\.safetensors")

T = TypeVar("T")
Wanted = Collection[str] | Callable[[set[str]], Collection[str]] | None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that `find` has verified as far as this stage needs it.

    Attributes:
        step: optimizer steps done.
        facts: what the trainer stored beside the tensors (JSON).
        folder: where it lies.
        files: the file that holds each tensor; on nodes with disks of their own not every file is here.
    """

    step: int
    facts: dict[str, Any]
    folder: Path
    files: dict[str, str]

    @property
    def names(self) -> KeysView[str]:
        """Names of all tensors, those on other nodes included."""
        return self.files.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its global name, in host memory. Raises like `tensors`."""
        return self.tensors([name])[name]

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Tensors by their global names, in host memory; nothing else is read from disk.

        Raises:
            ThinpipeError: a name is not in this checkpoint, or its file (not among those `find` verified) can't be read.
        """
        by_file = defaultdict(list)
        for name in sorted(names):  # the same complaint each time, though a set has no order
            if name not in self.files:
                raise ThinpipeError(f"{self.folder} has no tensor {name}; was it written by a run of another config?")
            by_file[self.files[name]].append(name)
        loaded: dict[str, torch.Tensor] = {}
        for file, members in by_file.items():
            try:
                with safe_open(self.folder / file, framework="pt") as opened:
                    loaded |= {name: opened.get_tensor(name) for name in members}
            except (OSError, SafetensorError) as error:
                raise ThinpipeError(f"{self.folder / file} can't be read: {error}; copy it again from the node that wrote it") from error
        return loaded


@dataclass(frozen=True)
class _Save:
    """A save under way; `record` is the manifest's entry for this stage's file."""

    step: int
    facts: dict[str, Any]
    record: Future[dict[str, Any]]


class Checkpointer:
    """Saves this stage's tensors in the background; all stages of a pipeline commit a checkpoint together.

    COLLECTIVE, after `find`: making one removes the leftovers of a killed run.

    Args:
        folder: RUN/checkpoints, on a disk that stages share or on one of their own.
        topology: the pipeline.
        keep_last: newest checkpoints that are kept, at least 1.
        keep_every: checkpoints whose step this divides are kept too (0: none).
        resumed: step of the checkpoint that the run goes on from. Later ones on disk (`find` rejected them) then belong to
            an abandoned future: they don't count as checkpoints and go when the run has passed them.

    Attributes:
        newest: step of the newest checkpoint that is safe on every machine; None if there is none.
    """

    def __init__(self, folder: Path, topology: Topology, keep_last: int, keep_every: int, resumed: int | None = None) -> None:
        assert keep_last >= 1
        self.folder, self.topology = folder, topology
        self.keep_last, self.keep_every = keep_last, keep_every
        self.newest = resumed
        self._abandoned = {step for step in _steps(folder) if resumed is not None and step > resumed}
        self._copies: dict[str, torch.Tensor] = {}
        self._save: _Save | None = None
        self._removal: Future[None] | None = None
        _delete(folder, "step-*.partial", "step-*.removed")
        topology.gather(None)  # no stage may start to save while another still cleans up

    @property
    def state(self) -> Literal["idle", "writing", "written", "failed"]:
        """How this stage's save stands; cheap, for the message that all stages share each step."""
        if self._save is None:
            return "idle"
        if not self._save.record.done():
            return "writing"
        return "failed" if self._save.record.exception() else "written"

    def save(self, step: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
        """Copy this stage's tensors to host memory, then write the copy in a thread. The caller waits for the copy only.

        The copy's memory is kept for the next save. A step that is saved or being saved is skipped. The save before must be committed.

        Args:
            step: optimizer steps done.
            tensors: what this stage owns, by global name; no name is owned by two stages.
            facts: JSON stored in the manifest, the same on all stages (the first stage's is taken).
        """
        if step == self.newest or (self._save is not None and self._save.step == step):
            return
        assert self._save is None, "commit the earlier save first"
        for name in self._copies.keys() - tensors.keys():
            del self._copies[name]
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                copy = self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copy.copy_(tensor.detach())
        self._save = _Save(step, json.loads(json.dumps(facts)), in_background(lambda: self._write(step)))

    def commit(self) -> str | None:
        """COLLECTIVE, once every stage's state is "written" or "failed": seal and rename the checkpoint, remove old ones.

        Returns:
            None when it is in place on every machine. Else what went wrong, naming stage and host, the same text on every
            stage: nothing is left of the failed one and the checkpoints before it stay.
        """
        assert self._save is not None, "nothing to commit"
        assert self._save.record.done(), "still writing"
        save, self._save = self._save, None
        failure = save.record.exception()
        mine = [save.step, str(failure) if failure else None, None if failure else save.record.result()]
        everyone = self.topology.gather([*mine, save.facts if self.topology.is_first else None])
        assert all(step == save.step for step, *_ in everyone), "stages commit different steps"
        error = "; ".join(theirs for _, theirs, _, _ in everyone if theirs)
        if not error:
            records = [record for _, _, record, _ in everyone]
            files = {_file_name(stage, len(records)): record for stage, record in enumerate(records)}
            names = [name for record in records for name in record["tensors"]]
            assert len(names) == len(set(names)), "two stages saved a tensor of one name"
            content = {"format": FORMAT, "step": save.step, "stages": len(records), "facts": everyone[0][3], "files": files}
            error = self._everywhere(lambda: self._seal(save.step, content))
        if error:
            self._everywhere(lambda: self._discard(save.step))
            stays = f"step {self.newest} stays the newest" if self.newest is not None else "there is none yet"
            return f"checkpoint of step {save.step} was not saved: {error}\nMake room or mend that disk; training goes on, {stays}."
        self.newest = save.step
        self._abandoned.discard(save.step)
        error = self._everywhere(lambda: self._publish(save.step))
        return f"checkpoint of step {save.step} was saved, but then: {error}" if error else None

    def finish(self) -> str | None:
        """COLLECTIVE: wait for the save under way, if any, and `commit` it. For the end of a run and for a stop.

        Returns: like `commit`; None if there was nothing to save.

        Raises:
            ThinpipeError: a disk did not finish within DISK_PATIENCE seconds.
        """
        error = None
        if self._save is not None:
            await_together(self._save.record, self.topology)
            error = self.commit()
        if self._removal is not None:
            wait([self._removal], REMOVAL_PATIENCE)
        return error

    def _partial(self, step: int) -> Path:
        return _path(self.folder, step).with_suffix(".partial")

    def _write(self, step: int) -> dict[str, Any]:
        """In the background: this stage's file, on disk for good, and its record."""
        path = self._partial(step) / _file_name(self.topology.stage, self.topology.stages)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(self._copies, path)
            path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors 0.8 makes it private, whatever the umask
            with open(path, "rb") as written:
                os.fsync(written.fileno())
                digest = hashlib.file_digest(written, "sha256").hexdigest()
                size = written.tell()
        except Exception as error:  # whatever it is, training goes on and every stage hears of it
            with contextlib.suppress(OSError):
                path.unlink()
            raise ThinpipeError(f"{self.topology} could not write {path}: {_reason(error)}") from error
        tensors = {name: [str(copy.dtype).removeprefix("torch."), list(copy.shape)] for name, copy in self._copies.items()}
        return {"sha256": digest, "bytes": size, "host": self.topology.host, "stage": self.topology.stage, "tensors": tensors}

    def _leads(self, step: int) -> bool:
        """Whether this stage acts for its disk: it is the first whose file lies there.

        Asked of the disk since a machine's processes may share it with other machines, or not even with each other.
        """
        stage, stages = self.topology.stage, self.topology.stages
        first = next((s for s in range(stages) if (self._partial(step) / _file_name(s, stages)).exists()), None)
        return first == stage

    def _everywhere(self, act: Callable[[], None]) -> str:
        """Do something on every stage; returns the errors of all of them ("" if none), the same on every stage."""
        error = None
        try:
            act()
        except OSError as failure:
            error = f"{self.topology}: {failure.filename or self.folder}: {_reason(failure)}"
        return "; ".join(error for error in self.topology.gather(error) if error)

    def _seal(self, step: int, content: dict[str, Any]) -> None:
        """Phase 1: put the manifest beside the files."""
        (self._partial(step) / _file_name(self.topology.stage, self.topology.stages)).stat()  # nobody has removed it meanwhile
        if not self._leads(step):
            return
        if (final := _path(self.folder, step)).exists():
            _retire(final)  # of an abandoned future
        beside = self._partial(step) / f"{MANIFEST}.{self.topology.stage}"
        with open(beside, "w", encoding="utf-8") as file:
            file.write(json.dumps(content | {"sha256": _digest(content)}, indent=1))
            file.flush()
            os.fsync(file.fileno())
        beside.rename(beside.with_name(MANIFEST))
        _sync_folder(beside.parent)

    def _publish(self, step: int) -> None:
        """Phase 2: the final name; then the checkpoints that are no longer kept go."""
        if not self._leads(step):
            return
        self._partial(step).rename(_path(self.folder, step))
        _sync_folder(self.folder)
        passed = sorted(old for old in _steps(self.folder) if old <= step)
        good = [old for old in passed if old not in self._abandoned]
        keep = {*good[-self.keep_last :], *(old for old in good if self.keep_every and old % self.keep_every == 0)}
        for old in passed:
            if old not in keep:
                _retire(_path(self.folder, old))
        self._removal = in_background(lambda: _delete(self.folder, "step-*.removed"))  # gigabytes: no step shall wait for that

    def _discard(self, step: int) -> None:
        partial, stage = self._partial(step), self.topology.stage
        for name in (_file_name(stage, self.topology.stages), f"{MANIFEST}.{stage}", MANIFEST):
            (partial / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the last stage on this disk succeeds
            partial.rmdir()


def newest_step(folder: Path) -> int | None:
    """Step of the newest checkpoint under its final name on this disk, not looked into."""
    return max(_steps(folder), default=None)


def find(folder: Path, topology: Topology | None, wanted: Wanted, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole for every stage. COLLECTIVE when `topology` is given.

    Whole: each stage has here, with the right size and sha256, the files of all tensors that it wants. Other files are neither
    needed nor read, so a node needs only its own stages' tensors; one stage that has the manifest is enough.

    Args:
        folder: RUN/checkpoints.
        topology: the pipeline; None for one process.
        wanted: names of the tensors this stage needs, or a function that picks them from the names of all; None for all.
            If the function raises, it must do so on every stage.
        say: told, on the first stage, of each newer checkpoint that is passed over: the file, what is wrong, who wrote it.

    Returns:
        The same step on every stage; None if the folder holds no checkpoint.

    Raises:
        ThinpipeError: there are checkpoints but none is whole, or a disk did not answer within DISK_PATIENCE seconds.
    """
    here = _steps(folder)
    if topology:  # one process can't know whether the other machines sealed theirs too
        here = _sealed(folder) | here
    everyone = _gather(topology, [[step, path.suffix == ""] for step, path in here.items()])
    named = {step for steps in everyone for step, is_named in steps if is_named}
    complaints: list[str] = []
    for step in sorted({step for steps in everyone for step, _ in steps}, reverse=True):
        try:
            checkpoint = _open(here.get(step, _path(folder, step)), step, wanted, topology)
        except _NotWhole as complaint:
            if step in named:  # else it never was a checkpoint, only a save that was cut off
                complaints.append(str(complaint))
                if topology is None or topology.is_first:
                    say(f"passing over the checkpoint of step {step}: {complaint}")
            continue
        if checkpoint.folder.suffix:
            with contextlib.suppress(OSError):  # another stage on this disk may have renamed it
                checkpoint.folder.rename(_path(folder, step))
        return replace(checkpoint, folder=_path(folder, step))
    if complaints:
        raise ThinpipeError(
            f"no whole checkpoint in {folder}; the newest: {complaints[0]}\nRestore that file, or move the folder away to start anew."
        )
    return None


class _NotWhole(Exception):
    """What is wrong with a checkpoint, as `find` says it."""


def _open(folder: Path, step: int, wanted: Wanted, topology: Topology | None) -> Checkpoint:
    """COLLECTIVE. The checkpoint, verified by every stage for itself. Raises _NotWhole, the same on every stage."""
    host = topology.host if topology else socket.gethostname()
    read = _gather(topology, _read_manifest(folder / MANIFEST, step, host))
    _complain(complaint for _, complaint in read)
    manifests = [manifest for manifest, _ in read if manifest]
    if len({manifest["sha256"] for manifest in manifests}) != 1:
        raise _NotWhole(f"{folder / MANIFEST} " + ("differs between the machines" if manifests else "is missing"))
    facts, records = manifests[0]["facts"], manifests[0]["files"]
    files = {tensor: file for file, record in records.items() for tensor in record["tensors"]}

    def verify() -> str | None:
        names = files if wanted is None else wanted(set(files)) if callable(wanted) else wanted
        if lacking := [name for name in sorted(names) if name not in files]:
            return f"{folder} has no tensor {lacking[0]} ({len(lacking)} of {len(names)} are lacking)"
        damages = (_damage(folder / file, records[file], host) for file in sorted({files[name] for name in names}))
        return next(filter(None, damages), None)

    pending = in_background(verify)
    await_together(pending, topology)
    _complain(_gather(topology, pending.result()))
    return Checkpoint(step, facts, folder, files)


def _complain(complaints: Iterable[str | None]) -> None:
    """Raise _NotWhole if there are complaints; several stages may have the same."""
    if told := list(dict.fromkeys(filter(None, complaints))):
        raise _NotWhole("; ".join(told))


def _read_manifest(path: Path, step: int, host: str) -> tuple[dict[str, Any] | None, str | None]:
    """(manifest, None) with its form checked, (None, what is wrong with it), or (None, None) where there is none."""
    try:
        manifest = json.loads(path.read_bytes())
        content = {key: value for key, value in manifest.items() if key != "sha256"}
        intact = manifest.get("sha256") == _digest(content)
    except FileNotFoundError:
        return None, None
    except OSError as error:
        return None, f"{path} on {host}: {_reason(error)}"
    except (ValueError, AttributeError, RecursionError):  # not JSON, not an object, too deep
        intact = False
    if not intact:
        return None, f"{path} on {host} is damaged"
    match manifest:
        case {"format": int(version)} if version != FORMAT:
            return None, f"{path} has format {version}; this thinpipe reads {FORMAT}"
        case {"format": int(), "step": int(told), "facts": dict(), "files": dict(files)}:
            if told == step and all(map(_is_record, files.keys(), files.values())):
                return manifest, None
    return None, f"{path} on {host} is no manifest of step {step}"


def _is_record(name: str, record: object) -> bool:
    """Whether a manifest's entry has the right form; a name that is not a plain stage file could lead out of the folder."""
    match record:
        case {"sha256": str(), "bytes": int(), "host": str(host), "stage": int(), "tensors": dict()}:
            return _FILE.fullmatch(name) is not None and host.isprintable()
    return False


def _damage(path: Path, record: dict[str, Any], host: str) -> str | None:
    """How the file differs from the one that was written; None if it doesn't."""
    writer = f"it was written by stage {record['stage']} on {record['host']}"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != record["bytes"]:
                return f"{path} on {host} has {size} bytes instead of {record['bytes']}; {writer}"
            if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                return f"{path} on {host} is damaged; {writer}"
    except FileNotFoundError:
        return f"{path} is missing on {host}; {writer}"
    except OSError as error:
        return f"{path} on {host}: {_reason(error)}; {writer}"
    return None


def _gather(topology: Topology | None, value: Any) -> list[Any]:
    return topology.gather(value) if topology else [value]


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread: unlike an executor's it doesn't hold up a process that is told to exit at once."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


def await_together(pending: Future[Any], topology: Topology | None, patience: float | None = None) -> None:
    """Wait until every stage's work is done, hearing from all meanwhile: a peer with a slow disk is not a lost one.

    Args:
        patience: seconds after which a disk counts as stuck (None: DISK_PATIENCE).
    """
    patience = DISK_PATIENCE if patience is None else patience
    started = time.monotonic()
    while True:
        wait([pending], HEARTBEAT)
        busy = not pending.done()
        everyone = _gather(topology, [busy, busy and time.monotonic() - started > patience, str(topology or "this process")])
        if stuck := [who for _, is_stuck, who in everyone if is_stuck]:
            raise ThinpipeError(f"the disk of {', '.join(stuck)} has not answered for {patience:g} s; mend it and start again")
        if not any(busy for busy, _, _ in everyone):
            return


def _steps(folder: Path) -> dict[int, Path]:
    """The checkpoints under their final names, by step."""
    found = ((int(match[1]), path) for path in folder.glob("step-*") if (match := _FOLDER.fullmatch(path.name)))
    return {step: path for step, path in found if path == _path(folder, step)}


def _sealed(folder: Path) -> dict[int, Path]:
    """Checkpoints that every stage has written but that a kill left under their provisional names here."""
    found = ((int(match[1]), path) for path in folder.glob("step-*.partial") if (match := _FOLDER.fullmatch(path.stem)))
    return {step: path for step, path in found if (path / MANIFEST).exists()}


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _file_name(stage: int, stages: int) -> str:
    return f"stage-{stage}-of-{stages}.safetensors"


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _reason(error: BaseException) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _retire(folder: Path) -> None:
    """Take away the good name before anything is deleted, so that a kill leaves no half checkpoint under it."""
    folder.rename(folder.with_suffix(".removed"))


def _delete(folder: Path, *patterns: str) -> None:
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        shutil.rmtree(path, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems can't
            raise
    finally:
        os.close(descriptor)
