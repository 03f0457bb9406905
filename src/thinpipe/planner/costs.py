"""What a step costs: seconds of compute per stage and bytes per message, by formula from a config and a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import Config
from ..errors import ThinpipeError
from ..lab.links import Link
from .counts import StageSizes, flops, message_bytes, stage_sizes, tied_bytes, weight_copies

UTILISATION = 0.4
"""Share of the dense peak rate that training reaches. An assumption: reports of well-fed GPUs range from 0.3 to 0.5."""

# Memory traffic beside the products, in bytes per parameter. Of each backward: a gradient is written (in bf16, then widened)
# and added to what is there; the key tells whether it is a product's in bf16. That of a table is as large as the table.
_ACCUMULATE = {True: 20, False: 16}
# Once a step: the gradients' norm, and gradient, parameter and two moments of AdamW.
_STEP = 40


@dataclass(frozen=True)
class GPU:
    """What computes a stage."""

    name: str
    bf16: float | None
    """Dense bf16 rate with float32 sums in TFLOP/s (None: no bf16 tensor cores, so precision "auto" means float32)."""
    float32: float
    """Float32 rate in TFLOP/s, without TF32, which torch leaves off."""
    memory_gb: float
    """Memory in GB (1e9 bytes)."""
    bandwidth: float
    """Memory bandwidth in GB/s."""
    source: str
    utilisation: float = UTILISATION
    fixed_gb: float = 1.0
    """Memory that libraries take before the first tensor."""

    @property
    def usable(self) -> int:
        """Bytes that a stage may fill; a twentieth stays free for fragmentation."""
        return int(0.95e9 * self.memory_gb)

    def uses_bf16(self, precision: str) -> bool:
        """Whether matrix products run in bf16 under run.precision."""
        return precision == "bf16" or (precision == "auto" and self.bf16 is not None)

    def rate(self, precision: str) -> float:
        """FLOP/s that training reaches."""
        peak = self.bf16 if self.uses_bf16(precision) and self.bf16 is not None else self.float32
        return peak * 1e12 * self.utilisation


_TABLE = [
    GPU("L4", 121, 30.3, 24, 300, "NVIDIA L4 datasheet: 242 TFLOP/s bf16 with sparsity, half without"),
    GPU("A10G", 70, 35, 24, 600, "NVIDIA A10G datasheet (AWS g5): 70 TFLOP/s bf16 dense"),
    GPU("T4", None, 8.1, 16, 320, "NVIDIA T4 datasheet: 8.1 TFLOP/s float32; its 65 TFLOP/s are fp16, which thinpipe doesn't use"),
    GPU("RTX 3090", 71, 35.6, 24, 936, "NVIDIA GA102 whitepaper: bf16 with float32 sums, dense"),
    GPU("RTX 4090", 165.2, 82.6, 24, 1008, "NVIDIA Ada whitepaper: bf16 with float32 sums, dense"),
    GPU("RTX 5090", 209.5, 104.8, 32, 1792, "NVIDIA RTX Blackwell whitepaper: bf16 with float32 sums, dense"),
    GPU("A100 40GB", 312, 19.5, 40, 1555, "NVIDIA A100 datasheet: bf16 dense"),
    GPU("A100 80GB", 312, 19.5, 80, 2039, "NVIDIA A100 80GB SXM datasheet: bf16 dense"),
    GPU("H100", 989, 67, 80, 3350, "NVIDIA H100 SXM datasheet: 1,979 TFLOP/s bf16 with sparsity, half without"),
    GPU(
        "cpu", None, 0.022, 16, 12, "measured: one core of an AMD EPYC, presets demo to medium (16 to 28 GFLOP/s), torch 2.13",
        utilisation=1.0, fixed_gb=0.4,
    ),
]  # fmt: skip
GPUS = {gpu.name: gpu for gpu in _TABLE}


def find_gpu(name: str) -> GPU:
    """The GPU of that name; case, spaces, dashes and a leading "RTX" don't matter.

    Raises ThinpipeError that lists the names.
    """

    def plain(text: str) -> str:
        return "".join(sign for sign in text.lower() if sign.isalnum()).removeprefix("rtx")

    for known, gpu in GPUS.items():
        if plain(known) == plain(name):
            return gpu
    raise ThinpipeError(f"gpu {name!r} is unknown; use one of {', '.join(GPUS)}, or plan with measured costs")


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of a step; tuples have one entry per stage."""

    forward: tuple[float, ...]
    """Seconds of one micro-batch's forward."""
    backward: tuple[float, ...]
    """Seconds of one micro-batch's backward, recomputation included."""
    optimizer: tuple[float, ...]
    """Seconds once per step: the optimizer's, and the bf16 copies of the weights."""
    forward_bytes: int
    """Bytes of one micro-batch's message to the next stage."""
    backward_bytes: int
    """Bytes of one micro-batch's message to the stage before."""
    tied_bytes: int = 0
    """Bytes that first and last stage each send per step for a tied table."""
    average: tuple[float, ...] = ()
    """Seconds that each stage waits for the other replicas' gradients after its last backward (none: there are no replicas)."""
    vote: float = 0.0
    """Seconds that the first stage waits for their consent."""
    cores: int | None = None
    """Cores that all stages share, one thread each; the seconds are then core-seconds (None: each stage has a machine of its own)."""

    def __post_init__(self) -> None:
        assert len(self.forward) == len(self.backward) == len(self.optimizer) > 0
        assert min(*self.forward, *self.backward, *self.optimizer) >= 0
        assert len(self.average) in (0, len(self.forward)) and min(*self.average, self.vote, 0.0) >= 0
        assert min(self.forward_bytes, self.backward_bytes, self.tied_bytes) >= 0

    @classmethod
    def uniform(cls, stages: int, forward: float, backward: float, bytes_each_way: int, optimizer: float = 0.0) -> Costs:
        """Equal stages."""
        return cls((forward,) * stages, (backward,) * stages, (optimizer,) * stages, bytes_each_way, bytes_each_way)

    @property
    def stages(self) -> int:
        return len(self.forward)


def costs_by_formula(config: Config, vocab: int, gpu: GPU) -> Costs:
    """Costs of a checked config on equal GPUs.

    Compute = FLOPs (counts.flops) / (peak rate x utilisation) + the weights' own traffic per micro-batch / memory
    bandwidth. Left out: the copy between device and host (PCIe moves 10 GB/s and more, links a hundredth of it), and what
    starting kernels costs, which shows below some 1,000 tokens a micro-batch.

    Args:
        vocab: entries of the tokenizer.

    Raises ThinpipeError if model.vocab is smaller than that.
    """
    spec = config.spec(vocab)
    stages = [stage_sizes(config, spec, stage) for stage in range(config.pipeline.stages)]
    forward_bytes, backward_bytes = message_bytes(config)
    compute = [_compute_seconds(sizes, config, gpu) for sizes in stages]
    return Costs(
        forward=tuple(forward for forward, _ in compute),
        backward=tuple(backward for _, backward in compute),
        optimizer=tuple(_optimizer_seconds(sizes, config, gpu) for sizes in stages),
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        tied_bytes=tied_bytes(config, spec),
    )


def _compute_seconds(sizes: StageSizes, config: Config, gpu: GPU) -> tuple[float, float]:
    precision = config.run.precision
    forward, backward = flops(sizes, config.micro_batch, config.pipeline.recompute)
    traffic = _ACCUMULATE[gpu.uses_bf16(precision)] * sizes.multiplied + _ACCUMULATE[False] * sizes.spec.vocab * sum(sizes.lookups)
    return forward / gpu.rate(precision), backward / gpu.rate(precision) + traffic / (gpu.bandwidth * 1e9)


def _optimizer_seconds(sizes: StageSizes, config: Config, gpu: GPU) -> float:
    traffic = _STEP * sizes.parameters + 3 * weight_copies(sizes, gpu.uses_bf16(config.run.precision))  # 2 bytes written of 4 read
    seconds = traffic / (gpu.bandwidth * 1e9)
    if config.optim.hidden == "muon":
        # Five Newton-Schulz steps X <- aX + (bA + cA^2)X, A = X X^T, on the shorter side (torch.optim.Muon).
        for matrix in sizes.matrices:
            if matrix.kind == "hidden":
                short, long = sorted((matrix.inputs, matrix.outputs))
                seconds += 5 * (4.0 * short**2 * long + 2.0 * short**3) / gpu.rate(config.run.precision)
    return seconds


def calibrate(gpu: GPU, config: Config, vocab: int, measured: Costs) -> GPU:
    """The GPU as it really is: scaled so that the formula's compute of a step adds up to what was measured for `config`."""
    formula = costs_by_formula(config, vocab, gpu)
    ratio = sum(formula.forward + formula.backward) / sum(measured.forward + measured.backward)
    return replace(gpu, name=f"{gpu.name}, measured", utilisation=gpu.utilisation * ratio, bandwidth=gpu.bandwidth * ratio)


def _sent(config: Config, vocab: int, stage: int) -> float:
    """Bytes that a stage sends to other replicas per average; PowerSGD's as if its rank were full."""
    replicas, is_int8 = config.pipeline.replicas, config.average.wire == "int8"
    numbers = stage_sizes(config, config.spec(vocab), stage).parameters
    return numbers * (replicas - 1) * (1 if is_int8 else 8 / replicas)


def average_bytes(config: Config, vocab: int) -> float:
    """Bytes per step that all replicas send each other."""
    pipeline = config.pipeline
    return pipeline.replicas * sum(_sent(config, vocab, stage) for stage in range(pipeline.stages)) / (config.average.every or 1)


def with_averages(costs: Costs, config: Config, vocab: int, links: Sequence[Link]) -> Costs:
    """The costs with what replicas spend on averaging over links like the boundaries'; DiLoCo's average is spread over its steps.

    A ring of R sends 2 (R - 1) / R of a stage's gradients in 2 (R - 1) turns, each of which waits for a delay; in int8 all send
    all (R - 1 turns). A vote is four questions to the meeting's host.

    Args:
        links: one for all boundaries, or one each; without any, averages are free.
    """
    replicas, average = config.pipeline.replicas, config.average
    if replicas == 1 or not links:
        return costs
    every, turns = average.every or 1, (1 if average.wire == "int8" else 2) * (replicas - 1)
    waits = []
    for stage in range(costs.stages):
        beside = links[max(0, stage - 1) : stage + 1] or links[-1:]
        rate = min((rate for link in beside for rate in (link.up, link.down) if rate is not None), default=math.inf)
        waits.append((8 * _sent(config, vocab, stage) / rate + turns * max(link.delay for link in beside)) / every)
    return replace(costs, average=tuple(waits), vote=8 * max(link.delay for link in links) / every)


def costs_over(links: Sequence[Link], config: Config, vocab: int, gpu: GPU) -> Costs:
    """Costs by formula, replicas' averages over `links` included."""
    return with_averages(costs_by_formula(config, vocab, gpu), config, vocab, links)
