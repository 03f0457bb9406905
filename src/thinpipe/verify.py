"""Proof that the pipeline computes what one process does (METHOD.md section 4).

The reference is the model's segments chained by a plain loop with loss.backward(): no schedule, no process group.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from . import launch
from .codecs import cross
from .config import Config
from .data import prepare
from .device import pick_device, share_cores, use_bf16
from .model import Stage, build_stages
from .optim import clip_scale
from .pipeline import Pipeline, share_owned, to_tensor
from .run import open_run
from .tally import Tally
from .topology import Topology

_VERIFY_TAG = 10

# Largest relative differences that count as rounding: of the loss, and of any gradient against its tensor's largest entry.
TOLERANCES = {"float64": (1e-12, 1e-9), "float32": (2e-6, 2e-4), "bf16": (2e-3, 5e-2)}

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """Loss, gradients (clipped, float64, by global name; on the first stage) and their norm before the clip."""

    loss: float
    gradients: Gradients
    norm: float


def reference(config: Config, vocab: int, tokens_BS: torch.Tensor, *, dtype: torch.dtype, wire: str | None, whole: bool) -> Outcome:
    """One process, plain autograd. Gradients are clipped to half their norm, so that a wrong clip shows.

    Args:
        dtype: of parameters and stream.
        wire: number format at the cuts (None: the configured one).
        whole: the batch at once; else micro-batch by micro-batch, gradients accumulating.
    """
    alone = replace(config, pipeline=replace(config.pipeline, stages=config.segments), data=replace(config.data, source="local"))
    stages = [_place(stage, config, dtype, 0) for stage in build_stages(alone, vocab, wire=wire)]
    if stages[0].spec.tied:
        stages[-1].embed = stages[0].embed  # truly one table
    loss = 0.0
    for part_BS in [tokens_BS] if whole else tokens_BS.chunk(config.pipeline.micro_batches):
        x = stages[0](None, part_BS)
        for before, stage in pairwise(stages):
            x = stage(cross(x, before.codec), part_BS)
        x.backward()
        loss += float(x.detach().double())
    parameters = {name: parameter for stage in stages for name, parameter, _ in stage.roles()}
    squares = sum(float(p.grad.double().square().sum()) for p in parameters.values() if p.grad is not None)
    norm = math.sqrt(squares)
    torch.nn.utils.clip_grad_norm_(parameters.values(), norm / 2)
    return Outcome(loss, {name: p.grad.double().cpu() for name, p in parameters.items() if p.grad is not None}, norm)


def pipelined(
    config: Config, topology: Topology, vocab: int, tokens_BS: torch.Tensor, clip: float, dtype: torch.dtype, wire: str | None
) -> Outcome:
    """The same step by this run's pipeline, clipped to `clip`; gradients are gathered on the first stage. COLLECTIVE."""
    here = replace(config, pipeline=replace(config.pipeline, stages=topology.stages))
    stage = _place(build_stages(here, vocab, [topology.stage], wire=wire)[0], config, dtype, topology.local_rank)
    pipeline = Pipeline(stage, topology, here.pipeline, config.micro_batch)
    share_owned(stage, topology)
    needs = config.data.source == "local" or topology.is_first
    loss = pipeline.step(tokens_BS if needs else None)
    total = pipeline.tally(Tally(loss=loss))
    own = {name: p.grad.double().cpu() * clip_scale(total.norm, clip) for name, p, _ in stage.roles() if p.grad is not None}
    return Outcome(total.loss, _gather(own, topology), total.norm)


def _place(stage: Stage, config: Config, dtype: torch.dtype, local_rank: int) -> Stage:
    device = pick_device(config.run.device, local_rank)
    stage.to(device, dtype)
    stage.bf16 = dtype == torch.float32 and use_bf16(config.run.precision, device)
    return stage


def _gather(own: Gradients, here: Topology) -> Gradients:
    shapes = here.gather([[name, list(tensor.shape)] for name, tensor in own.items()])
    if not here.is_first:
        here.isend(torch.cat([tensor.flatten() for tensor in own.values()]), 0, _VERIFY_TAG).wait()
        return {}
    gathered = dict(own)
    for stage in range(1, here.stages):
        sizes = [math.prod(shape) for _, shape in shapes[stage]]
        flat = torch.empty(sum(sizes), dtype=torch.float64)
        here.irecv(flat, stage, _VERIFY_TAG).wait()
        for (name, shape), part in zip(shapes[stage], flat.split(sizes), strict=True):
            gathered.setdefault(name, part.view(shape))  # a tied table comes from both ends, the same
    return gathered


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-300)


def _worst(ours: Gradients, theirs: Gradients) -> float:
    """Largest max|difference| / max|gradient| over all tensors; infinite if one is missing or not a number."""
    if ours.keys() != theirs.keys():
        return math.inf
    worst = 0.0
    for name, theirs_ in theirs.items():
        difference = float((ours[name] - theirs_).abs().max())
        if not math.isfinite(difference):
            return math.inf
        if difference:
            worst = max(worst, difference / max(float(theirs_.abs().max()), 1e-300))
    return worst


def compare(config: Config, topology: Topology, vocab: int, tokens_BS: torch.Tensor) -> dict[str, Any]:
    """Both checks of METHOD.md section 4 on one batch; the JSON object of `thinpipe verify` on the first stage. COLLECTIVE.

    Args:
        tokens_BS: the batch, the same on all stages.
    """
    device = pick_device(config.run.device, topology.local_rank)
    high, high_name = (torch.float32, "float32") if device.type == "mps" else (torch.float64, "float64")
    low_name = "bf16" if use_bf16(config.run.precision, device) else "float32"
    exact = rounded = Outcome(math.nan, {}, 0.0)
    if topology.is_first:
        exact = reference(config, vocab, tokens_BS, dtype=high, wire=high_name, whole=True)
        rounded = reference(config, vocab, tokens_BS, dtype=torch.float32, wire=None, whole=False)
    exact_clip, rounded_clip = topology.gather([exact.norm / 2, rounded.norm / 2])[0]
    ours = pipelined(config, topology, vocab, tokens_BS, exact_clip, high, high_name)
    ours_rounded = pipelined(config, topology, vocab, tokens_BS, rounded_clip, torch.float32, None)
    if not topology.is_first:
        return {}
    result = {
        "loss_rel_diff": _relative(ours.loss, exact.loss),
        "grad_max_rel_diff": _worst(ours.gradients, exact.gradients),
        "wire_loss_rel_diff": _relative(ours_rounded.loss, rounded.loss),
        "wire_grad_max_rel_diff": _worst(ours_rounded.gradients, rounded.gradients),
        "rounding_loss_rel_diff": _relative(ours_rounded.loss, exact.loss),
    }
    limits = dict(zip(result, [*TOLERANCES[high_name], *TOLERANCES[low_name]], strict=False))
    return {
        **result,
        "dtype": high_name,
        "wire": config.compression.wire,
        "method": config.compression.method,
        "schedule": config.pipeline.schedule,
        "stages": topology.stages,
        "segments": config.segments,
        "ok": all(result[key] <= limit for key, limit in limits.items()),
    }


def verify_stage(config: Config, topology: Topology) -> dict[str, Any]:
    """One worker's part of `thinpipe verify`, on the first batch of the configured data."""
    share_cores(topology)
    data = prepare(config)
    return compare(config, topology, data.vocab, to_tensor(data.batch(0, config.share)))


def verify(config: Config, folder: Path, debug: bool = False) -> dict[str, Any]:
    """Start `pipeline.stages` processes that prove losslessness here; returns the JSON object of `thinpipe verify`.

    Args:
        folder: a scratch folder for the workers' config and logs.
    """
    config, folder, _ = open_run(replace(config, run=replace(config.run, dir=str(folder))))
    prepare(config)
    launch.start("verify", folder, config.pipeline.stages, debug)
    result: dict[str, Any] = json.loads((folder / "verify.json").read_text(encoding="utf-8"))
    return result
