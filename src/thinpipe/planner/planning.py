"""`thinpipe plan`: what a config will do on given machines and links, and which one would do better."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import schedule
from ..config import WITHOUT_RANK, Config
from ..errors import ThinpipeError
from ..lab import Link
from ..lab.paths import is_star
from .costs import GPU, Costs, costs_by_formula, costs_over, with_averages
from .counts import (
    Memory,
    message_bytes,
    parameters,
    saved_bytes,
    stage_memory,
    stage_sizes,
    tied_bytes_per_step,
    wire_bytes_per_token,
)
from .search import Name, best_schedule, bound
from .simulation import Timeline, simulate

_CLOSE = 1.03  # fewer stages are preferred to a step that is this much shorter
_THIN = 1.10  # the largest rank whose step is at most this much longer than with next to nothing on the wire


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to expect of a config; `as_dict` gives the keys of `thinpipe plan --json`.

    Attributes:
        seconds_per_step: of a steady step, tally and optimizer included; validation and saving are not.
        least_seconds_per_step: what no schedule can beat with these costs and links (search.bound, and the first stage's optimizer).
        bound: what binds: the one of "compute", "bandwidth" and "latency" that would shorten the step most if it cost nothing;
            replicas' averages are bandwidth and latency, their vote is latency.
        memory_gb: by stage, in 1e9 bytes (counts.stage_memory says what is assumed); fits: whether every stage fits the GPU.
        wire_bytes_per_token: per boundary and direction; wire_bytes_forward, wire_bytes_backward: of a step, all boundaries.
        dense_seconds_per_step: the same model and schedule ("auto": its own best) with method "none" in bfloat16, without segments'
            tables and local losses.
        days: for `tokens` tokens at tokens_per_s (all replicas together).
        parameters: trained numbers of the whole model.
        memory: by stage and what it is for; timeline: of one step.
    """

    seconds_per_step: float
    least_seconds_per_step: float
    tokens_per_s: float
    bound: str
    memory_gb: list[float]
    fits: bool
    wire_bytes_per_token: float
    wire_bytes_forward: int
    wire_bytes_backward: int
    tied_bytes_per_step: int
    dense_seconds_per_step: float
    speedup_vs_dense: float
    compression: float
    days: float
    tokens: int
    method: str
    rank: int | None
    stages: int
    micro_batches: int
    replicas: int
    schedule: str
    warmup: int | None
    why: str
    gpu: str
    parameters: int
    memory: list[Memory]
    timeline: Timeline

    def as_dict(self) -> dict[str, Any]:
        """Everything but what memory is made of and the timeline."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("memory", "timeline")}


def plan(
    config: Config,
    vocab: int,
    links: Sequence[Link],
    gpu: GPU,
    *,
    costs: Costs | None = None,
    tokens: int | None = None,
) -> Plan:
    """Predict a run of a checked config.

    Args:
        vocab: entries of the tokenizer.
        links: one for all boundaries, or one each.
        gpu: what each stage has: the source of costs where none are given, and of the memory to fit.
        costs: measured ones, for the config as it is; the dense ones are then these times the ratio of the formulas.
        tokens: how many to train on (None: config.plan.tokens, or those of the config's steps).

    Raises ThinpipeError if links or vocabulary don't fit the config.
    """
    stages, micro_batches = config.pipeline.stages, config.pipeline.micro_batches
    ours = with_averages(costs or costs_by_formula(config, vocab, gpu), config, vocab, links)
    dense_seconds = _dense_seconds(config, vocab, links, gpu, costs)
    spec = config.spec(vocab)
    name, warmup, why = resolve_schedule(config, vocab, ours, links, gpu)
    actions = schedule.actions(name, stages, micro_batches, warmup)
    timeline = simulate(actions, ours, links)
    seconds = timeline.seconds_per_step
    memory = memory_by_stage(config, vocab, gpu, [schedule.in_flight(stage_actions) for stage_actions in actions])
    batch_tokens = config.train.batch * spec.context
    tokens = tokens or config.plan.tokens or config.train.steps * batch_tokens
    forward_bytes, backward_bytes = (size * micro_batches * (stages - 1) for size in message_bytes(config))
    per_token = wire_bytes_per_token(config)
    return Plan(
        seconds_per_step=seconds,
        least_seconds_per_step=bound(ours, links, micro_batches) + ours.optimizer[0],
        tokens_per_s=batch_tokens / seconds,
        bound=what_binds(config, vocab, actions, ours, links),
        memory_gb=[part.total / 1e9 for part in memory],
        fits=max(part.total for part in memory) <= gpu.usable,
        wire_bytes_per_token=per_token,
        wire_bytes_forward=forward_bytes,
        wire_bytes_backward=backward_bytes,
        tied_bytes_per_step=tied_bytes_per_step(config, spec),
        dense_seconds_per_step=dense_seconds,
        speedup_vs_dense=dense_seconds / seconds,
        compression=2.0 * spec.width / per_token,
        days=tokens * seconds / batch_tokens / 86400,
        tokens=tokens,
        method=config.compression.method,
        rank=None if config.compression.method in WITHOUT_RANK else config.compression.rank,
        stages=stages,
        micro_batches=micro_batches,
        replicas=config.pipeline.replicas,
        schedule=name,
        warmup=warmup,
        why=why,
        gpu=gpu.name,
        parameters=parameters(config, spec),
        memory=memory,
        timeline=timeline,
    )


def what_binds(config: Config, vocab: int, actions: Sequence[Sequence[schedule.Action]], costs: Costs, links: Sequence[Link]) -> str:
    """ "compute", "bandwidth" or "latency": which shortens a step most if it costs nothing."""
    nothing = (0.0,) * costs.stages
    unlimited = [replace(link, up=None, down=None) for link in links]
    # Not quite zero: links that differ must stay different, since equal ones share a host's rate.
    near = [replace(link, delay=link.delay * 1e-6) for link in links]
    without = {
        "compute": (replace(costs, forward=nothing, backward=nothing, optimizer=nothing), links),
        "bandwidth": (
            with_averages(replace(costs, forward_bytes=0, backward_bytes=0, tied_bytes=0), config, vocab, unlimited),
            links,
        ),
        "latency": (with_averages(costs, config, vocab, near), near),
    }
    left = {name: simulate(actions, *other).seconds_per_step for name, other in without.items()}
    return min(left, key=lambda name: left[name])


def memory_by_stage(config: Config, vocab: int, gpu: GPU, in_flight: Sequence[int]) -> list[Memory]:
    """Memory of each stage that holds so many micro-batches in flight."""
    spec, bf16 = config.spec(vocab), gpu.uses_bf16(config.run.precision)
    return [
        stage_memory(stage_sizes(config, spec, stage), config, held, bf16, int(gpu.fixed_gb * 1e9)) for stage, held in enumerate(in_flight)
    ]


def in_flight_limits(config: Config, vocab: int, gpu: GPU) -> list[int]:
    """Micro-batches that each stage has memory for (below 1: not even one)."""
    spec, bf16 = config.spec(vocab), gpu.uses_bf16(config.run.precision)
    limits = []
    for stage, empty in enumerate(memory_by_stage(config, vocab, gpu, [0] * config.pipeline.stages)):
        each = saved_bytes(stage_sizes(config, spec, stage), config.micro_batch, bf16, config.pipeline.recompute)
        limits.append((gpu.usable - empty.total) // each)
    return limits


def at_least_possible(limits: Sequence[int], micro_batches: int) -> list[int]:
    """Every stage's limit, or what the schedule that holds the least needs: there is then one to choose even if nothing fits."""
    return [max(limit, min(micro_batches, len(limits) - stage)) for stage, limit in enumerate(limits)]


def resolve_schedule(config: Config, vocab: int, costs: Costs, links: Sequence[Link], gpu: GPU) -> tuple[Name, int | None, str]:
    pipeline = config.pipeline
    if pipeline.schedule != "auto":
        return pipeline.schedule, pipeline.warmup, "as configured"
    # What doesn't fit is told by Plan.fits.
    choice = best_schedule(
        costs, links, pipeline.micro_batches, at_least_possible(in_flight_limits(config, vocab, gpu), pipeline.micro_batches)
    )
    return choice.schedule, choice.warmup, choice.why


def _dense_seconds(config: Config, vocab: int, links: Sequence[Link], gpu: GPU, measured: Costs | None) -> float:
    """A step of the plain model: method "none" in bfloat16, without tables and local losses, which every stage would pay for."""
    dense = replace(config, compression=replace(config.compression, method="none", wire="bfloat16", stage_table=0, local_loss=0.0))
    costs = costs_by_formula(dense, vocab, gpu)
    if measured is not None:
        ours = costs_by_formula(config, vocab, gpu)

        def scaled(name: str) -> tuple[float, ...]:
            columns = (getattr(each, name) for each in (measured, costs, ours))
            return tuple(m * d / o for m, d, o in zip(*columns, strict=True))

        costs = replace(costs, forward=scaled("forward"), backward=scaled("backward"), optimizer=scaled("optimizer"), cores=measured.cores)
    costs = with_averages(costs, dense, vocab, links)
    name, warmup, _ = resolve_schedule(dense, vocab, costs, links, gpu)
    return simulate(schedule.actions(name, costs.stages, config.pipeline.micro_batches, warmup), costs, links).seconds_per_step


@dataclass(frozen=True)
class Suggestion:
    """A better config."""

    config: Config
    """The given one with other stages, micro_batches, schedule, warmup and rank."""
    plan: Plan
    why: str


def suggest(
    config: Config,
    vocab: int,
    links: Sequence[Link],
    gpu: GPU,
    *,
    tokens_per_s: float | None = None,
    max_stages: int | None = None,
) -> Suggestion:
    """Stages, micro-batches, schedule and rank for a model and a batch, on equal GPUs.

    Without a target: the fewest stages within 3 % of the fastest. With one: the fewest that reach it, or the fastest if
    none does. Then the largest rank that keeps the target, or whose step is at most 10 % longer than with next to nothing
    on the wire: a larger rank learns better (METHOD.md section 10), so none should be given away where the link is idle.

    Args:
        links: one for all boundaries (equal ones count as one); with different ones, the number of stages is theirs.
        tokens_per_s: target.
        max_stages: GPUs at hand (None: as many as there are layers).

    Raises ThinpipeError if no number of stages fits the GPU's memory.
    """
    links = links[:1] if is_star(links) else links
    if config.pipeline.layers_per_segment:  # it fixes the segments, which would follow the stages that are tried
        config = replace(config, compression=replace(config.compression, segments=config.segments))
    goal = config.train.batch * config.sizes()["context"] / tokens_per_s if tokens_per_s else None
    found: list[tuple[float, Config]] = []
    for stages in _stage_counts(config, links, max_stages):
        best = min((seconds for seconds, _ in found), default=float("inf"))
        fastest = _fastest(config, vocab, links, gpu, stages, enough=_CLOSE * best)
        found += [fastest] if fastest else []
        if goal and any(seconds <= goal for seconds, _ in found):
            break
    if not found:
        raise ThinpipeError(
            f"no number of stages fits {gpu.memory_gb:g} GB ({gpu.name}); use a smaller train.batch or model.context, "
            "pipeline.recompute = true, or a GPU with more memory"
        )
    best = min(seconds for seconds, _ in found)
    enough = goal if goal and best <= goal else _CLOSE * best
    _, chosen = min((each for each in found if each[0] <= enough), key=lambda each: (each[1].pipeline.stages, each[0]))
    chosen = largest_rank(_with_schedule(chosen, vocab, links, gpu), vocab, links, gpu, goal)
    planned = plan(chosen, vocab, links, gpu)
    reached = f"; the target of {tokens_per_s:,.0f} tokens/s is out of reach" if goal and planned.seconds_per_step > goal else ""
    rank = "" if planned.rank is None else f", rank {planned.rank} ({planned.compression:.3g}x fewer bytes)"
    why = (
        f"{planned.stages} stages, {planned.micro_batches} micro-batches{rank}: {planned.tokens_per_s:,.0f} tokens/s, "
        f"bound by {planned.bound}, at most {max(planned.memory_gb):.1f} GB a stage{reached}"
    )
    return Suggestion(chosen, planned, why)


def _stage_counts(config: Config, links: Sequence[Link], max_stages: int | None) -> list[int]:
    """Numbers of stages to try, rising: those that share the layers out evenly, and the config's own."""
    if len(links) != 1:
        return [len(links) + 1]
    parts = config.compression.segments or config.sizes()["layers"]
    most = min(parts, max_stages or parts)
    return sorted({s for s in range(1, most + 1) if parts % s == 0} | {min(config.pipeline.stages, most)})


def _fastest(config: Config, vocab: int, links: Sequence[Link], gpu: GPU, stages: int, enough: float) -> tuple[float, Config] | None:
    """Seconds per step and config with the fastest number of micro-batches that fits; None if none can be as fast as `enough`.

    Branch and bound: most promising first, until the lower bound of the rest is no better than what was found.
    """
    batch = config.share
    open_: list[tuple[float, int, Config, Costs, list[int]]] = []
    for micro_batches in (m for m in range(1, batch + 1) if batch % m == 0):
        pipeline = replace(config.pipeline, stages=stages, micro_batches=micro_batches, schedule="wan", warmup=None)
        tried = replace(config, pipeline=pipeline)
        limits = in_flight_limits(tried, vocab, gpu)
        if all(limit >= min(micro_batches, stages - stage) for stage, limit in enumerate(limits)):
            costs = costs_over(links, tried, vocab, gpu)
            open_.append((bound(costs, links, micro_batches) + costs.optimizer[0], micro_batches, tried, costs, limits))
    best: tuple[float, Config] | None = None
    for least, micro_batches, tried, costs, limits in sorted(open_, key=lambda each: each[:2]):
        if least >= (best[0] if best else enough):
            break
        seconds = best_schedule(costs, links, micro_batches, limits, depths=5).seconds_per_step
        if best is None or seconds < best[0]:
            best = seconds, tried
    return best


def _with_schedule(config: Config, vocab: int, links: Sequence[Link], gpu: GPU) -> Config:
    costs = costs_over(links, config, vocab, gpu)
    choice = best_schedule(costs, links, config.pipeline.micro_batches, in_flight_limits(config, vocab, gpu))
    return replace(config, pipeline=replace(config.pipeline, schedule=choice.schedule, warmup=choice.warmup))


def largest_rank(config: Config, vocab: int, links: Sequence[Link], gpu: GPU, goal: float | None) -> Config:
    """The largest rank that the goal, or _THIN, allows; in the config's schedule."""
    stages, width = config.pipeline.stages, config.sizes()["width"]
    if config.compression.method in WITHOUT_RANK or stages == 1:
        return config
    name, warmup, _ = resolve_schedule(config, vocab, costs_over(links, config, vocab, gpu), links, gpu)
    actions = schedule.actions(name, stages, config.pipeline.micro_batches, warmup)
    held = [schedule.in_flight(stage_actions) for stage_actions in actions]

    def with_rank(rank: int) -> Config:
        return replace(config, compression=replace(config.compression, rank=rank))

    def seconds(tried: Config) -> float:
        return simulate(actions, costs_over(links, tried, vocab, gpu), links).seconds_per_step

    def fits(tried: Config) -> bool:
        return all(h <= most for h, most in zip(held, in_flight_limits(tried, vocab, gpu), strict=True))

    ranks = sorted({max(1, width >> shift) for shift in range(1, 9)} | {config.compression.rank}, reverse=True)
    most = goal if goal and seconds(config) <= goal else _THIN * seconds(with_rank(ranks[-1]))
    return next((tried for tried in map(with_rank, ranks) if fits(tried) and seconds(tried) <= most), config)
