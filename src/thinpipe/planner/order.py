"""Which machine should hold which place in the pipeline, and the largest rank that hides behind compute, from measured links.

A matrix holds at [i][j] what was measured from machine i to machine j (None: not measured); an order names the machine of
each place, the first one holding the first stages.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from statistics import fmean

from .. import schedule
from ..config import WITHOUT_RANK, Config
from ..lab import Link, Measured
from .costs import GPU, Costs, costs_by_formula, costs_over
from .planning import largest_rank, resolve_schedule
from .search import bound
from .simulation import simulate

Matrix = Sequence[Sequence[Measured | None]]
Order = tuple[int, ...]
Estimate = Callable[[Order], float]

_EXACT = 8  # machines up to which all orders are looked at
_FEW = 8  # orders that are simulated, by each of the two estimates
_TIE = 1.01  # steps closer than this are equal; the order that leaves its links more idle is taken
_ALIKE = 1.1  # rates and delays closer than this are equal: measuring again moves them as much


@dataclass(frozen=True)
class Recommendation:
    """What to change, and what it gives."""

    order: Order
    """The machine of each place."""
    rank: int | None
    """The largest k whose step is at most 10 % longer than with next to nothing on the wire (None: the method has no rank)."""
    present: float
    """Predicted seconds per step of the machines as they stand, at the config's rank."""
    reordered: float
    """The same in the recommended order."""
    recommended: float
    """The same in the recommended order, at the recommended rank."""


def recommend(matrix: Matrix, config: Config, vocab: int, gpu: GPU) -> Recommendation:
    """The order with the shortest predicted step, and the rank for it; equal shares of the stages on equal GPUs.

    Up to 8 machines all orders are compared by an estimate, beyond that 2-opt looks for good ones; the best few are simulated.
    The present order stays unless another one gains more than measuring again would change.

    Args:
        matrix: every pair measured.
        vocab: entries of the tokenizer.

    Raises ThinpipeError if the vocabulary doesn't fit the config.
    """
    assert config.pipeline.stages % len(matrix) == 0
    costs, micro_batches = costs_by_formula(config, vocab, gpu), config.pipeline.micro_batches
    work = micro_batches * max(f + b for f, b in zip(costs.forward, costs.backward, strict=True))
    wire = _estimate(matrix, costs, micro_batches)

    def seconds(config: Config, links: Sequence[Link]) -> float:
        costs = costs_over(links, config, vocab, gpu)
        name, warmup, _ = resolve_schedule(config, vocab, costs, links, gpu)
        return simulate(schedule.actions(name, costs.stages, micro_batches, warmup), costs, links).seconds_per_step

    present = tuple(range(len(matrix)))
    tried = {present: seconds(config, chain(matrix, present, costs.stages))}
    for estimate in (_estimate(matrix, costs, micro_batches, work), wire):
        for promising in _promising(len(matrix), estimate):
            for order in (promising, promising[::-1]):  # to the planner they differ: the last stage has the head
                links = chain(matrix, order, costs.stages)
                if order not in tried and bound(costs, links, micro_batches) < min(tried.values()):
                    tried[order] = seconds(config, links)
    near = [order for order in tried if tried[order] <= _TIE * min(tried.values())]
    best = min(near, key=lambda order: (wire(order), tried[order]))
    if present in near and wire(present) <= _ALIKE * wire(best):
        best = present
    links = chain(matrix, best, costs.stages)
    chosen = largest_rank(config, vocab, links, gpu, None)
    rank = None if chosen.compression.method in WITHOUT_RANK else chosen.compression.rank
    return Recommendation(best, rank, tried[present], tried[best], seconds(chosen, links))


def balance(seconds: Sequence[float], layers: int, heads: Sequence[float]) -> tuple[int, ...]:
    """Layers of each stage, one at least, such that the slowest stage is as fast as can be.

    Each layer goes where the work ends first with it, which is best for equal layers.

    Args:
        seconds: that a layer takes on each stage's machine.
        layers: of the model, as many as stages at least.
        heads: seconds that each stage needs besides its layers.
    """
    given = [1] * len(seconds)
    for _ in range(layers - len(seconds)):
        given[min(range(len(seconds)), key=lambda i: (given[i] + 1) * seconds[i] + heads[i])] += 1
    return tuple(given)


def chain(matrix: Matrix, order: Sequence[int], stages: int) -> tuple[Link, ...]:
    """The link of each boundary when the machines of `order` hold equal shares of the stages; no limit inside a machine.

    If all that was measured is alike, it is one link for all, which the planner takes as each machine's own, shared by its
    boundaries. Needs the pairs that stand side by side in `order` only.
    """
    share, given = stages // len(order), [path for row in matrix for path in row if path is not None]
    rates, trips = [path.rate for path in given], [path.round_trip for path in given]
    if share == 1 and max(rates) <= _ALIKE * min(rates) and max(trips) <= max(_ALIKE * min(trips), min(trips) + 2.0):
        return (_link(fmean(rates) * 1e6, fmean(rates) * 1e6, fmean(trips) / 2e3),) * (stages - 1)
    links = []
    for b in range(stages - 1):
        i, j = order[b // share], order[(b + 1) // share]
        links.append(Link() if i == j else _link(_path(matrix, i, j).rate * 1e6, _path(matrix, j, i).rate * 1e6, _delay(matrix, i, j)))
    return tuple(links)


def _link(up: float, down: float, delay: float) -> Link:
    """Inside the range that a Link allows."""
    return Link(up=max(1e3, up), down=max(1e3, down), delay=min(10.0, delay))


def _path(matrix: Matrix, i: int, j: int) -> Measured:
    path = matrix[i][j]
    assert path is not None, (i, j)
    return path


def _delay(matrix: Matrix, i: int, j: int) -> float:
    """Seconds one way."""
    return (_path(matrix, i, j).round_trip + _path(matrix, j, i).round_trip) / 4e3


def _estimate(matrix: Matrix, costs: Costs, micro_batches: int, work: float = 0.0) -> Estimate:
    """About the seconds of a step, without simulating it; the same in both directions.

    The busiest boundary's messages in one direction, or the compute of a stage (`work`) where that is longer, and one
    micro-batch's way down and back.
    """
    busy, trip = {}, {}
    for i, j in permutations(range(len(matrix)), 2):
        bit = 1e-6 / min(_path(matrix, i, j).rate, _path(matrix, j, i).rate)  # the planner too takes the slower direction for both
        busy[i, j] = micro_batches * 8 * max(costs.forward_bytes, costs.backward_bytes) * bit
        trip[i, j] = 8 * (costs.forward_bytes + costs.backward_bytes) * bit + 2 * _delay(matrix, i, j)

    def estimate(order: Order) -> float:
        boundaries = list(pairwise(order))
        return max(work, *(busy[boundary] for boundary in boundaries)) + sum(trip[boundary] for boundary in boundaries)

    return estimate


def _promising(machines: int, estimate: Estimate) -> list[Order]:
    """The best few orders, each in one of its two directions, which `estimate` takes as equal."""
    found: Iterable[Order]
    if machines <= _EXACT:
        found = (order for order in permutations(range(machines)) if order[0] < order[-1])
    else:
        found = {_two_opt(_nearest(first, machines, estimate), estimate) for first in range(machines)}
    return heapq.nsmallest(_FEW, found, key=estimate)


def _nearest(first: int, machines: int, estimate: Estimate) -> Order:
    """From `first` on, always the machine with the best link to the one before."""
    order, rest = [first], set(range(machines)) - {first}
    while rest:
        order.append(min(rest, key=lambda other: (estimate((order[-1], other)), other)))
        rest.remove(order[-1])
    return tuple(order)


def _two_opt(order: Order, estimate: Estimate) -> Order:
    """Turn runs of machines round as long as that helps."""
    best = estimate(order)
    while True:
        turned = (
            order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
            for i in range(len(order)) for j in range(i + 1, len(order))
        )  # fmt: skip
        candidate = min(turned, key=estimate)
        if estimate(candidate) >= best:
            return order
        order, best = candidate, estimate(candidate)
