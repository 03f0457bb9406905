"""How fast a step could be at best, and which schedule comes closest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from .. import schedule
from ..errors import ThinpipeError
from ..lab import Link
from ..lab.paths import build_hops, is_star, route
from .costs import Costs
from .simulation import Timeline, per_boundary, simulate

Name = Literal["wan", "gpipe", "1f1b"]

_TIE = 0.01  # schedules closer than this are equal; the one that holds less is taken


def bound(costs: Costs, links: Sequence[Link], micro_batches: int) -> float:
    """Seconds that no schedule's step can beat: the larger of what compute and what the busiest link need.

    For equal stages: M (F + B) + (S - 1)(F + B + 2 (tau + lambda)), tau the time of a message at the link's rate and lambda the
    delay one way; in general the same for every stage as the one that never idles. For every uplink, downlink or boundary
    direction: the earliest moment of its first message + all its bytes / its rate + the shortest way on from there to the
    last backward on the first stage. Tally and optimizer come on top.
    """
    links = per_boundary(links, costs.stages)
    last, star = costs.stages - 1, is_star(links)
    hops = build_hops(links, star)
    routes = {(i, j): route(i, j, costs.stages, star) for b in range(last) for i, j in ((b, b + 1), (b + 1, b))}

    def alone(i: int, j: int) -> float:
        """Seconds of a message from i to j when nothing else is sent."""
        size = 8 * (costs.forward_bytes if i < j else costs.backward_bytes)
        rates = [hop.rate for hop in (hops[n] for n in routes[i, j]) if hop.rate is not None]
        return (size / min(rates) if rates else 0.0) + sum(hops[n].delay for n in routes[i, j])

    # down[s]: from the start to the first message's arrival at stage s; back[s]: from a gradient's departure at s to the end.
    down = list(accumulate((costs.forward[b] + alone(b, b + 1) for b in range(last)), initial=0.0))
    back = list(accumulate((alone(b + 1, b) + costs.backward[b] for b in range(last)), initial=0.0))
    best = max(down[s] + micro_batches * (costs.forward[s] + costs.backward[s]) + back[s] for s in range(costs.stages))
    turn = down[last] + costs.forward[last] + costs.backward[last]  # the first gradient leaves the last stage

    used: dict[int, list[tuple[float, float, float]]] = {}  # hop: (first use, seconds of all messages, way on) per direction
    for (i, j), hops_passed in routes.items():
        passed = 0.0  # delays behind us
        for number in hops_passed:
            hop = hops[number]
            left = sum(hops[n].delay for n in hops_passed) - passed
            if i < j:
                first = down[i] + costs.forward[i]
                on = left + turn - down[j] + back[last]
            else:
                first = turn + back[last] - back[i]
                on = left + costs.backward[j] + back[j]
            if hop.rate is not None:
                size = 8 * (costs.forward_bytes if i < j else costs.backward_bytes)
                used.setdefault(number, []).append((first + passed, micro_batches * size / hop.rate, on))
            passed += hop.delay
    for uses in used.values():
        best = max(best, min(u[0] for u in uses) + sum(u[1] for u in uses) + min(u[2] for u in uses))
    return best


class Choice(NamedTuple):
    """A schedule for pipeline.schedule and pipeline.warmup."""

    schedule: Name
    warmup: int | None
    seconds_per_step: float
    makespan: float
    why: str
    """One sentence."""


class _Candidate(NamedTuple):
    name: Name
    warmup: int | None
    held: tuple[int, ...]
    timeline: Timeline


def best_schedule(
    costs: Costs,
    links: Sequence[Link],
    micro_batches: int,
    limit: int | Sequence[int] | None = None,
    depths: int = 10,
) -> Choice:
    """The schedule with the shortest step; of those within 1 % of it, the one that holds the fewest micro-batches.

    Tries gpipe, 1f1b, and wan at depths from 1F1B's to "every stage but the last runs all forwards first". Beyond
    pipeline.warmup = micro_batches, the depth at the first stages stays at all micro-batches and falls later: each stage
    should run (F + B + 2 (tau + lambda)) / (F + B) forwards more than the next to cover a round trip.

    Args:
        limit: micro-batches that memory lets a stage hold in flight, for all stages or one number each (None: any).
        depths: how many depths of wan to try.

    Raises ThinpipeError if even 1F1B's order holds more.
    """
    stages = costs.stages
    limits = [micro_batches if limit is None else limit] * stages if limit is None or isinstance(limit, int) else list(limit)
    tried: dict[tuple[str, tuple[int, ...]], _Candidate] = {}
    refused = False
    shallow = min(stages, micro_batches)
    deep = max(shallow, 1 + (micro_batches - 1) * (stages - 1))
    warmups = {micro_batches, *(round(shallow * (deep / shallow) ** (i / (depths - 1))) for i in range(depths))}
    orders: list[tuple[Name, int | None]] = [("gpipe", None), ("1f1b", None), *(("wan", warmup) for warmup in sorted(warmups))]
    for name, warmup in orders:
        if name == "1f1b" and micro_batches < stages:
            continue
        actions = schedule.actions(name, stages, micro_batches, warmup)
        held = tuple(schedule.in_flight(stage_actions) for stage_actions in actions)
        if any(h > most for h, most in zip(held, limits, strict=True)):
            refused = True
        elif (name, held) not in tried:
            tried[name, held] = _Candidate(name, warmup, held, simulate(actions, costs, links))
    if not tried:
        stage = next(s for s in range(stages) if min(micro_batches, stages - s) > limits[s])
        raise ThinpipeError(
            f"stage {stage} has memory for {max(0, limits[stage])} micro-batches in flight, and every schedule holds at least "
            f"{min(micro_batches, stages - stage)}; use more micro-batches, other stages or pipeline.recompute"
        )
    fastest = min(candidate.timeline.seconds_per_step for candidate in tried.values())
    near = [c for c in tried.values() if c.timeline.seconds_per_step <= (1 + _TIE) * fastest]
    chosen = min(near, key=lambda c: (sum(c.held), c.name != "wan", c.timeline.seconds_per_step))
    why = _why(chosen, list(tried.values()), refused)
    return Choice(chosen.name, chosen.warmup, chosen.timeline.seconds_per_step, chosen.timeline.makespan, why)


def _why(chosen: _Candidate, tried: list[_Candidate], refused: bool) -> str:
    if len(chosen.held) == 1:
        return "one stage: the order doesn't change its time, and wan holds one micro-batch"
    seconds = {name: min((c.timeline.seconds_per_step for c in tried if c.name == name), default=0.0) for name in ("wan", "gpipe", "1f1b")}
    others = " and ".join(f"{time:.3g} s with {name}" for name, time in seconds.items() if time and name != chosen.name)
    order = f"{chosen.name} with warm-up {chosen.warmup}" if chosen.warmup else chosen.name
    takes = f"{order} takes {chosen.timeline.seconds_per_step:.3g} s a step{f', against {others}' if others else ''}"
    reason = "receives posted early and this warm-up hide most of the delay" if chosen.name == "wan" else "a deeper order gains nothing"
    return f"{takes}: {reason}{'; memory rules out others' if refused else ''}"
