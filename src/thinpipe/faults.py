"""Faults on purpose, at chosen moments inside a stage: what the tests, benchmarks/faults.py and users try a run's survival with.

    THINPIPE_FAULTS=faults.json thinpipe train CONFIG

with, for instance, [{"what": "kill", "stage": 1, "step": 12, "at": "backward"}] in faults.json. Every fault happens once, however
often the run starts again: `faults.json.0` says when it did. Networks are cut by the lab (`Lab.cut`), disks filled by `fill`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from .errors import ThinpipeError, check_type

VARIABLE = "THINPIPE_FAULTS"

What = Literal["kill", "stop", "delay", "poison", "slow"]
Moment = Literal["begin", "forward", "backward", "end", "save", "move"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        what: kill: SIGKILL; stop: SIGSTOP, as if frozen; delay: `seconds` of sleep; poison: a NaN in what the stage hands on; slow:
            `seconds` of sleep whenever the moment comes from then on, as on a machine that needs so much longer.
        stage: who; replica: in which one.
        step: from this step on (from 1), as soon as the moment comes.
        at: begin: before the step; forward, backward: after the first micro-batch's; end: before the optimizer; save: when the
            stage's file is written and not yet sealed; move: when the basis has moved and the weights have not.
    """

    what: What
    stage: int
    step: int
    at: Moment = "begin"
    seconds: float = 0.0
    replica: int = 0


def write(path: Path, faults: Sequence[Fault]) -> None:
    """A file for THINPIPE_FAULTS; what an earlier file of the name remembers is forgotten."""
    for mark in path.parent.glob(f"{path.name}.*"):
        mark.unlink()
    path.write_text(json.dumps([asdict(fault) for fault in faults], indent=1), encoding="utf-8")


def happened(path: Path) -> dict[int, tuple[float, int]]:
    """When the faults of a file happened (time.time()) and in which step, by their place in it."""
    told = {int(mark.suffix[1:]): mark.read_text().split() for mark in path.parent.glob(f"{path.name}.*")}
    return {number: (float(when), int(step)) for number, (when, step) in told.items()}


def draw(seed: int, count: int, stages: int, steps: range, what: What = "kill", replicas: int = 1) -> list[Fault]:
    """`count` faults in the order of their steps, the stages in turn, moments and distances drawn from the seed."""
    drawn = random.Random(seed)
    at = sorted(drawn.sample(steps, count))
    who = [divmod(i % (stages * replicas), stages) for i in range(count)]
    drawn.shuffle(who)
    return [
        Fault(what=what, stage=stage, replica=replica, step=step, at=drawn.choice(MOMENTS))
        for (replica, stage), step in zip(who, at, strict=True)
    ]


def read(path: Path) -> list[Fault]:
    """Raises ThinpipeError that names what is wrong in the file."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ThinpipeError(f"{VARIABLE} = {path} can't be read: {error}") from None
    kinds = {"what": What, "stage": int, "step": int, "at": Moment, "seconds": float, "replica": int}
    faults = []
    for entry in listed if isinstance(listed, list) else [listed]:
        if not isinstance(entry, dict) or not {"what", "stage", "step"} <= entry.keys() <= kinds.keys():
            raise ThinpipeError(f"{path}: {entry!r} is no fault; give what, stage, step, and perhaps at, seconds and replica")
        for key, value in entry.items():
            check_type(value, kinds[key], f"{path}: {key}")
        faults.append(Fault(**entry))
    return faults


def arm(stage: int, replica: int = 0) -> None:
    """In a worker: have this stage's faults happen when their moments come. Nothing without THINPIPE_FAULTS."""
    if (named := os.environ.get(VARIABLE)) is None:
        return
    _Armed(Path(named), stage, replica).wrap()


class _Armed:
    """The moments are reached through the library's own functions, wrapped here, so that nothing else knows of faults."""

    def __init__(self, path: Path, stage: int, replica: int) -> None:
        self.path, self.step = path, 0
        self.faults = [(number, fault) for number, fault in enumerate(read(path)) if (fault.stage, fault.replica) == (stage, replica)]

    def wrap(self) -> None:
        from . import checkpoint, model, optim, pipeline, trainer

        self._around(trainer.Trainer, "train_step", before=self._begin)
        self._around(pipeline._Passage, "_forward", after=lambda *_: self.reach("forward"))
        self._around(pipeline._Passage, "_backward", after=lambda *_: self.reach("backward"))
        self._around(pipeline.Pipeline, "tally", before=lambda *_: self.reach("end"))
        self._around(optim.Optimizer, "transport", before=lambda *_: self.reach("move"))
        self._around(checkpoint, "save_file", after=lambda *_: self.reach("save"))
        self._around(model.Stage, "forward", change=self._poisoned)

    def _around(
        self,
        owner: Any,
        name: str,
        before: Callable[..., None] = lambda *_: None,
        after: Callable[..., None] = lambda *_: None,
        change: Callable[[Any], Any] = lambda result: result,
    ) -> None:
        original = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            before(*arguments)
            result = change(original(*arguments, **named))
            after(*arguments)
            return result

        setattr(owner, name, wrapped)

    def _begin(self, trainer: Any, step: int) -> None:
        self.step = step + 1
        self.reach("begin")

    def reach(self, moment: Moment) -> None:
        for number, fault in self.faults:
            if fault.at == moment and fault.what == "slow" and self.step >= fault.step:
                time.sleep(fault.seconds)
            elif fault.at == moment and fault.what not in ("poison", "slow") and self._due(number, fault):
                if fault.what == "delay":
                    time.sleep(fault.seconds)
                else:
                    os.kill(os.getpid(), signal.SIGKILL if fault.what == "kill" else signal.SIGSTOP)

    def _poisoned(self, out: torch.Tensor) -> torch.Tensor:
        for number, fault in self.faults:
            if fault.what == "poison" and torch.is_grad_enabled() and self._due(number, fault):
                return out * math.nan
        return out

    def _due(self, number: int, fault: Fault) -> bool:
        """Whether it is time and has not happened yet, in this life or another one."""
        if not 0 < fault.step <= self.step:
            return False
        try:
            with open(f"{self.path}.{number}", "x") as mark:
                mark.write(f"{time.time()!r} {self.step}")
        except FileExistsError:
            return False
        return True


@contextlib.contextmanager
def fill(folder: Path, most: int = 1 << 30) -> Iterator[None]:
    """Fill the disk of `folder`, with `most` bytes at most; for small disks made for this."""
    path = folder / f".filled-{os.getpid()}"
    try:
        with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
            while file.tell() < most:
                file.write(bytes(1 << 16))
        yield
    finally:
        path.unlink(missing_ok=True)
