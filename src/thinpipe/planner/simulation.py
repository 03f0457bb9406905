"""A step as the runtime executes it: every stage works its action list off (pipeline.Pipeline).

Compute is serial per stage and waits for the message it needs; stages on one machine share its cores (Costs.cores). A
send starts right after it is issued and doesn't hold the stage up. After the list come the next step's first receives,
the tied table's exchange, the tally down and up the pipeline (Pipeline.tally), the optimizer and the next step. How
messages share links stands in network.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import ThinpipeError
from ..lab import Link
from ..schedule import Action
from .costs import Costs
from .network import Clock, Cores, Message, Network, Process

TALLY_BYTES = 88  # eleven float64 numbers
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

    Raises ThinpipeError if the number of links doesn't fit.
    """
    assert len(actions) == costs.stages, (len(actions), costs.stages)
    return _Simulation(actions, costs, per_boundary(links, costs.stages), steps).run()


class _Simulation:
    def __init__(self, actions: Sequence[Sequence[Action]], costs: Costs, links: tuple[Link, ...], steps: int) -> None:
        self.actions, self.costs, self.steps = actions, costs, steps
        self.last = costs.stages - 1
        self.clock = Clock()
        self.network = Network(self.clock, links)
        self.cores = Cores(self.clock, costs.cores) if costs.cores else None
        self.sizes = {"send_forward": costs.forward_bytes, "send_backward": costs.backward_bytes, "tied": costs.tied_bytes}
        self.messages: dict[tuple[int, Work, int, int, int], Message] = {}
        self.rows: list[list[Row]] = [[] for _ in range(steps)]
        self.began: list[float] = []  # on the first stage, and the end of the last step

    def run(self) -> Timeline:
        for stage in range(self.costs.stages):
            self.clock.resume(self._stage(stage))
        self.clock.run()
        assert len(self.began) == self.steps + 1, "the schedule waits for a message that is never sent"
        for (step, kind, m, source, target), message in self.messages.items():
            self.rows[step].append(Row(source, kind, m, message.start, message.arrived.time, target))
        compute = [row.end for row in self.rows[0] if row.kind in ("forward", "backward")]
        began, ended = self.began[-2:]
        rows = sorted(self.rows[-1], key=lambda row: row.end)
        return Timeline(
            rows=tuple(row._replace(start=row.start - began, end=row.end - began) for row in rows),
            stages=self.costs.stages,
            makespan=max(compute, default=0.0),
            seconds_per_step=ended - began,
        )

    def _stage(self, stage: int) -> Process:
        actions = self.actions[stage]
        leading = next(number for number, action in enumerate(actions) if not action.kind.startswith("recv"))
        self._post(stage, 0, actions[:leading])
        for step in range(self.steps):
            if stage == 0:
                self.began.append(self.clock.now)
            self._expect_tally(stage, step)
            for action in actions[leading:]:
                yield from self._act(stage, step, action)
            if step + 1 < self.steps:
                self._post(stage, step + 1, actions[:leading])
            if self.costs.average:
                yield self.costs.average[stage]
            yield from self._tied(stage, step)
            yield from self._tally(stage, step)
            yield from self._compute(stage, step, "optimizer", 0, self.costs.optimizer[stage])
        if stage == 0:
            self.began.append(self.clock.now)

    def _act(self, stage: int, step: int, action: Action) -> Process:
        kind, m = action
        if kind == "recv_forward" or kind == "recv_backward":
            self._post(stage, step, [action])
        elif kind == "send_forward" or kind == "send_backward":
            self.network.issue(self._message(step, kind, m, stage, stage + (1 if kind == "send_forward" else -1)))
        elif kind == "forward":
            if stage > 0:
                yield self._message(step, "send_forward", m, stage - 1, stage).arrived
            yield from self._compute(stage, step, kind, m, self.costs.forward[stage])
        else:
            if stage < self.last:
                yield self._message(step, "send_backward", m, stage + 1, stage).arrived
            yield from self._compute(stage, step, kind, m, self.costs.backward[stage])

    def _post(self, stage: int, step: int, receives: Sequence[Action]) -> None:
        for kind, m in receives:
            down: Work = "send_forward" if kind == "recv_forward" else "send_backward"
            self.network.post(self._message(step, down, m, stage + (-1 if kind == "recv_forward" else 1), stage))

    def _tied(self, stage: int, step: int) -> Process:
        if self.costs.tied_bytes and self.last and stage in (0, self.last):
            peer = self.last - stage
            theirs, own = self._message(step, "tied", 0, peer, stage), self._message(step, "tied", 0, stage, peer)
            self.network.post(theirs)
            self.network.issue(own)
            yield theirs.arrived
            yield own.left

    def _tally(self, stage: int, step: int) -> Process:
        """Down from the last stage, added up, and up again. A stage's sends need no wait: the total comes back behind them."""
        if stage < self.last:
            yield self._message(step, "tally", 0, stage + 1, stage).arrived
        if stage == 0:
            yield self.costs.vote
        else:
            self.network.issue(self._message(step, "tally", 0, stage, stage - 1))
            yield self._message(step, "tally", 1, stage - 1, stage).arrived
        if stage < self.last:
            total = self._message(step, "tally", 1, stage, stage + 1)
            self.network.issue(total)
            yield total.left

    def _expect_tally(self, stage: int, step: int) -> None:
        if stage < self.last:
            self.network.post(self._message(step, "tally", 0, stage + 1, stage))
        if stage > 0:
            self.network.post(self._message(step, "tally", 1, stage - 1, stage))

    def _compute(self, stage: int, step: int, kind: Work, m: int, seconds: float) -> Process:
        start = self.clock.now
        yield seconds if self.cores is None or not seconds else self.cores.compute(seconds)
        self.rows[step].append(Row(stage, kind, m, start, self.clock.now))

    def _message(self, step: int, kind: Work, m: int, source: int, target: int) -> Message:
        key = (step, kind, m, source, target)
        if key not in self.messages:
            self.messages[key] = Message(source, target, self.sizes.get(kind, TALLY_BYTES))
        return self.messages[key]
