"""A step as the runtime executes it: every stage works its action list off, messages pass the lab's hops.

Compute is serial per stage and waits for the message it needs. A send starts right after it is issued and doesn't hold the
stage up. Gloo is rendezvous: a payload moves once the receiver has posted its receive and the sender has heard of it, one
delay later. Hops are those of the lab (lab/paths.py): with one link for all, a host's uplink and its downlink are first-in
first-out servers that all its boundaries share; with different links, each boundary and direction is one. A hop passes a
message on while it comes in, so equal rates in a row delay it once.

After the list: the tied table's exchange, the tally down and up the pipeline (Pipeline.tally), the optimizer, the next step.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..config import ThinpipeError
from ..lab import Link
from ..lab.paths import Hop, build_hops, is_star, route
from ..schedule import Action
from .costs import Costs

_TALLY_BYTES = 64  # eight float64 numbers
_STEPS = 2  # later steps take as long as the second in all that we tried

Work = Literal["forward", "backward", "optimizer", "send_forward", "send_backward", "tied", "tally"]


class Row(NamedTuple):
    """Something that took time: compute on `stage`, or a message that it sent to stage `to`. Seconds since the step began."""

    stage: int
    kind: Work
    micro_batch: int
    start: float
    """Of compute, or when the first bit left."""
    end: float
    """Of compute, or when the last bit arrived."""
    to: int | None = None


@dataclass(frozen=True)
class Timeline:
    """What happened when."""

    rows: tuple[Row, ...]
    """The last step simulated, in order of their end; time 0 is when the first stage began it."""
    stages: int
    makespan: float
    """Seconds from a start of all stages at once to the last backward: the schedule alone, without tally and optimizer."""
    seconds_per_step: float
    """Seconds from one step's start to the next one's, on the first stage, once steps follow each other."""

    def busy(self, stage: int) -> float:
        """Share of the step in which the stage computes."""
        spans = [row.end - row.start for row in self.rows if row.stage == stage and row.to is None]
        return sum(spans) / self.seconds_per_step if self.seconds_per_step else 0.0


def per_boundary(links: Sequence[Link], stages: int) -> tuple[Link, ...]:
    """One link per boundary from one for all, or from as many.

    Raises ThinpipeError if the count fits neither.
    """
    if len(links) == 1:
        return (links[0],) * (stages - 1)
    if len(links) != stages - 1:
        raise ThinpipeError(f"{len(links)} links don't fit pipeline.stages = {stages}; give one for all, or {stages - 1}")
    return tuple(links)


def simulate(actions: Sequence[Sequence[Action]], costs: Costs, links: Sequence[Link], steps: int = _STEPS) -> Timeline:
    """Run `steps` steps of the action lists (schedule.actions), one list per stage.

    Loss and jitter of the links are not simulated: give measured rates instead.

    Args:
        links: one for all boundaries, or one each.
    """
    assert len(actions) == costs.stages, (len(actions), costs.stages)
    return _Simulation(actions, costs, per_boundary(links, costs.stages), steps).run()


class _Event:
    """A moment that processes wait for."""

    __slots__ = ("happened", "waiting")

    def __init__(self) -> None:
        self.happened = False
        self.waiting: list[_Process] = []


_Process = Iterator["float | _Event"]  # yields seconds to sleep, or what to wait for
_Key = tuple[int, "Work", int, int, int]  # step, kind, micro-batch, source, target


class _Message:
    """A payload on its way; `passed` when it has its turn where the sender's bytes queue, `arrived` when all of it has."""

    __slots__ = ("arrived", "bits", "heard", "issued", "key", "leaves", "passed", "route", "start")

    def __init__(self, key: _Key, bits: int, hops: list[int]) -> None:
        self.key, self.bits, self.route = key, bits, hops
        self.issued = False
        self.heard: float | None = None  # when the sender knows of the receive
        self.start = self.leaves = 0.0  # when the first and the last bit leave the sender
        self.passed, self.arrived = _Event(), _Event()


class _Simulation:
    def __init__(self, actions: Sequence[Sequence[Action]], costs: Costs, links: tuple[Link, ...], steps: int) -> None:
        self.actions, self.costs, self.steps = actions, costs, steps
        self.last = costs.stages - 1
        star = is_star(links)
        self.hops: list[Hop] = build_hops(links, star)
        self.free = [0.0] * len(self.hops)
        hosts = costs.stages
        pairs = [(i, j) for i in range(hosts) for j in range(hosts) if abs(i - j) == 1 or {i, j} == {0, self.last} != {i}]
        self.routes = {pair: self._hops_that_matter(route(*pair, hosts, star)) for pair in pairs}
        self.delays = {pair: sum(self.hops[hop].delay for hop in hops) for pair, hops in self.routes.items()}
        self.sizes = {"send_forward": costs.forward_bytes, "send_backward": costs.backward_bytes, "tied": costs.tied_bytes}
        self.now = 0.0
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.number = itertools.count()
        self.messages: dict[_Key, _Message] = {}
        self.rows: list[list[Row]] = [[] for _ in range(steps)]
        self.began = [[0.0] * hosts for _ in range(steps + 1)]

    def _hops_that_matter(self, hops: list[int]) -> list[int]:
        return [hop for hop in hops if self.hops[hop].rate is not None or self.hops[hop].delay] or hops[:1]

    def run(self) -> Timeline:
        for stage in range(self.costs.stages):
            self._resume(self._stage(stage))
        while self.due:
            self.now, _, call = heapq.heappop(self.due)
            call()
        compute = [row.end for row in self.rows[0] if row.kind in ("forward", "backward")]
        began, ended = self.began[-2][0], self.began[-1][0]
        return Timeline(
            rows=tuple(row._replace(start=row.start - began, end=row.end - began) for row in self.rows[-1]),
            stages=self.costs.stages,
            makespan=max(compute, default=0.0),
            seconds_per_step=ended - began,
        )

    # Processes and events

    def _at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.due, (time, next(self.number), call))

    def _resume(self, process: _Process) -> None:
        for wanted in process:
            if isinstance(wanted, _Event):
                if not wanted.happened:
                    wanted.waiting.append(process)
                    return
            elif wanted > 0:
                self._at(self.now + wanted, lambda: self._resume(process))
                return

    def _happen(self, event: _Event) -> None:
        event.happened = True
        for process in event.waiting:
            self._resume(process)

    # Stages

    def _stage(self, stage: int) -> _Process:
        for step in range(self.steps):
            self.began[step][stage] = self.now
            yield from self._schedule(stage, step)
            yield from self._tied(stage, step)
            yield from self._tally(stage, step)
            yield from self._compute(stage, step, "optimizer", 0, self.costs.optimizer[stage])
        self.began[self.steps][stage] = self.now

    def _schedule(self, stage: int, step: int) -> _Process:
        sent = []
        for kind, m in self.actions[stage]:
            if kind == "recv_forward":
                self._post(self._message(step, "send_forward", m, stage - 1, stage))
            elif kind == "recv_backward":
                self._post(self._message(step, "send_backward", m, stage + 1, stage))
            elif kind == "send_forward" or kind == "send_backward":
                yield self.costs.send_overhead
                message = self._message(step, kind, m, stage, stage + (1 if kind == "send_forward" else -1))
                self._issue(message)
                sent.append(message)
            elif kind == "forward":
                if stage > 0:
                    yield self._message(step, "send_forward", m, stage - 1, stage).arrived
                yield from self._compute(stage, step, kind, m, self.costs.forward[stage])
            else:
                if stage < self.last:
                    yield self._message(step, "send_backward", m, stage + 1, stage).arrived
                yield from self._compute(stage, step, kind, m, self.costs.backward[stage])
        for message in sent:  # the runtime's step ends when its sends have
            yield from self._sent(message)

    def _tied(self, stage: int, step: int) -> _Process:
        if not self.costs.tied_bytes or not self.last or stage not in (0, self.last):
            return
        peer = self.last - stage
        theirs, own = self._message(step, "tied", 0, peer, stage), self._message(step, "tied", 0, stage, peer)
        self._post(theirs)
        self._issue(own)
        yield theirs.arrived
        yield from self._sent(own)

    def _tally(self, stage: int, step: int) -> _Process:
        if stage < self.last:
            yield from self._receive(self._message(step, "tally", 0, stage + 1, stage))
        if stage > 0:
            yield from self._send(self._message(step, "tally", 0, stage, stage - 1))
            yield from self._receive(self._message(step, "tally", 1, stage - 1, stage))
        if stage < self.last:
            yield from self._send(self._message(step, "tally", 1, stage, stage + 1))

    def _receive(self, message: _Message) -> _Process:
        self._post(message)
        yield message.arrived

    def _send(self, message: _Message) -> _Process:
        self._issue(message)
        yield from self._sent(message)

    def _sent(self, message: _Message) -> _Process:
        yield message.passed
        yield max(0.0, message.leaves - self.now)

    def _compute(self, stage: int, step: int, kind: Work, m: int, seconds: float) -> _Process:
        start = self.now
        yield seconds
        self.rows[step].append(Row(stage, kind, m, start, self.now))

    # Messages

    def _message(self, step: int, kind: Work, m: int, source: int, target: int) -> _Message:
        key = (step, kind, m, source, target)
        if key not in self.messages:
            self.messages[key] = _Message(key, 8 * self.sizes.get(kind, _TALLY_BYTES), self.routes[source, target])
        return self.messages[key]

    def _post(self, message: _Message) -> None:
        _, _, _, source, target = message.key
        message.heard = self.now + self.delays[target, source]
        self._begin(message)

    def _issue(self, message: _Message) -> None:
        message.issued = True
        self._begin(message)

    def _begin(self, message: _Message) -> None:
        if message.issued and message.heard is not None:
            if message.heard > self.now:
                self._at(message.heard, lambda: self._pass(message, 0, self.now))
            else:
                self._pass(message, 0, self.now)

    def _pass(self, message: _Message, place: int, last_bit: float) -> None:
        """The first bit reaches that place of the route now, the last one at `last_bit` at the earliest."""
        number = message.route[place]
        hop = self.hops[number]
        start = max(self.now, self.free[number])
        self.free[number] = start + (message.bits / hop.rate if hop.rate else 0.0)
        last_bit = max(last_bit, self.free[number])
        if place == 0:
            message.start, message.leaves = start, last_bit
            self._happen(message.passed)
        if place + 1 < len(message.route):
            self._at(start + hop.delay, lambda: self._pass(message, place + 1, last_bit + hop.delay))
        else:
            self._at(last_bit + hop.delay, lambda: self._arrive(message))

    def _arrive(self, message: _Message) -> None:
        step, kind, m, source, target = message.key
        self.rows[step].append(Row(source, kind, m, message.start, self.now, target))
        self._happen(message.arrived)
