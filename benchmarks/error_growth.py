"""How a codec's error grows with depth: Theorem B.1 of the paper, measured (METHOD.md section 8).

A boundary after every block. Against an exact float64 forward and backward of the same weights: the relative error of X as the
next block reads it, and of the gradient as it arrives at the sender, at every boundary; the rate at which either grows
per boundary (least squares of its logarithm). The exact model of a lossy codec is the dense one; the subspace has its own, since
there the method is a part of the model and only the wire rounds. Weights: random, and after a short training without codec.

Draws docs/error_growth.png and prints Markdown tables.

    python benchmarks/error_growth.py [--width 128] [--layers 32] [--train 50] [--out docs/error_growth.png]
"""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinpipe.codecs import Cast, Integers
from thinpipe.config import CompressionConfig, Config, from_dict
from thinpipe.data import prepare
from thinpipe.model import Stage, build_stages
from thinpipe.pipeline import to_tensor
from thinpipe.planner import wire_bytes
from thinpipe.run import open_run
from thinpipe.topology import connect
from thinpipe.trainer import Trainer

SEQUENCES = 4


@dataclass(frozen=True, eq=False)
class Row:
    """A codec: its name in tables and plots, [compression] at width d, colour and line style."""

    name: str
    compression: dict[str, Any]
    colour: str
    style: str = "-"

    @property
    def model(self) -> dict[str, Any]:
        """[compression] of the model whose exact values count and whose weights are used."""
        if self.compression["method"] == "subspace":
            return {"method": "subspace", "rank": self.compression["rank"], "wire": "float32"}
        return {"method": "none", "wire": "float32"}


def rows(d: int) -> list[Row]:
    """First those of about d / 8 bytes per token (16 times fewer than a dense bfloat16 stream), then finer quantisation."""
    k = d // 16
    return [
        Row(f"subspace, k = {k}, bfloat16", {"method": "subspace", "rank": k, "wire": "bfloat16"}, "#0072b2"),
        Row(f"subspace, k = {4 * k - 4}, int4", {"method": "subspace", "rank": 4 * k - 4, "wire": "int4"}, "#56b4e9"),
        Row(f"low rank, k = {k}, bfloat16", {"method": "lowrank", "rank": k, "wire": "bfloat16"}, "#009e73"),
        Row(f"top-k, {k // 2} of {d}, bfloat16", {"method": "topk", "rank": k // 2, "wire": "bfloat16"}, "#cc79a7"),
        Row("1 bit", {"method": "quantize", "wire": "int1"}, "#7f2704"),
        Row("1 bit, gradients to the nearest", {"method": "quantize", "wire": "int1", "rounding": "nearest"}, "#7f2704", "--"),
        Row("2 bits", {"method": "quantize", "wire": "int2"}, "#d94801"),
        Row("4 bits", {"method": "quantize", "wire": "int4"}, "#f58538"),
        Row("8 bits", {"method": "quantize", "wire": "int8"}, "#fdbe85"),
    ]


def config(width: int, layers: int, compression: dict[str, Any], **run: Any) -> Config:
    return from_dict(
        {
            "run": run,
            "model": {"width": width, "layers": layers, "heads": width // 32, "context": 128},
            "data": {"vocab": 1024},
            "compression": {"segments": layers, "move_every": 0, **compression},
            "pipeline": {"stages": 1, "micro_batches": 1},
            "train": {"batch": 4, "eval_every": 0, "eval_batches": 8, "checkpoint_every": 0, "watch_every": 0, "sample": ""},
            "optim": {"lr": 3e-3, "warmup": 10},
        }
    ).check()


def train(c: Config, steps: int) -> dict[str, torch.Tensor]:
    """Weights after a short training."""
    with tempfile.TemporaryDirectory() as scratch, connect(60) as alone:
        c = replace(c, run=replace(c.run, dir=f"{scratch}/run"), train=replace(c.train, steps=steps))
        opened, folder, _ = open_run(c)
        trainer = Trainer(opened, alone, folder)
        result = trainer.fit()
        assert result is not None
        rank = f", k = {c.compression.rank}" if c.compression.method == "subspace" else ""
        print(f"trained {steps} steps: {c.compression.method}{rank}: validation loss {result.val_loss:.3f}", flush=True)
        return {name: tensor.clone() for name, tensor in trainer.stage.weights().items()}


@dataclass
class Seen:
    """At every boundary, float64: X as it arrives, what is to be sent, and the gradient of it as it comes back."""

    x: list[torch.Tensor]
    sent: list[torch.Tensor]
    gradients: list[torch.Tensor]


def observe(stage: Stage, tokens_BS: torch.Tensor) -> Seen:
    """One forward and backward, seen through what the method does around each cut."""
    method = stage.method
    static_BTD = method.static(tokens_BS[:, :-1], stage.dtype)
    arrived: list[torch.Tensor] = []
    left: list[torch.Tensor] = []
    enter, leave = method.enter, method.leave

    def entering(c: torch.Tensor, segment: int) -> torch.Tensor:
        s = enter(c, segment)
        if segment:
            arrived.append(method.read(s, static_BTD, segment).detach().double())
        return s

    def leaving(s: torch.Tensor, segment: int) -> torch.Tensor:
        s.retain_grad()
        left.append(s)
        return leave(s, segment)

    method.enter, method.leave = entering, leaving  # type: ignore[method-assign]
    stage(None, tokens_BS).backward()
    return Seen(arrived, [s.detach().double() for s in left], [s.grad.double() for s in left if s.grad is not None])


class Models:
    """The exact model of each codec at one depth, with random weights or trained ones."""

    def __init__(self, width: int, layers: int, vocab: int, tokens_BS: torch.Tensor, steps: int) -> None:
        self.width, self.layers, self.vocab, self.tokens_BS, self.steps = width, layers, vocab, tokens_BS, steps
        self._known: dict[str, tuple[dict[str, torch.Tensor], Seen]] = {}

    def exact(self, row: Row) -> tuple[dict[str, torch.Tensor], Seen]:
        """Weights, and what float64 without a codec makes of them."""
        key = str(row.model)
        if key not in self._known:
            c = config(self.width, self.layers, row.model)
            (stage,) = build_stages(c, self.vocab)
            weights = train(c, self.steps) if self.steps else stage.weights()
            stage.load_weights(weights)
            stage.double().codec = Cast(torch.float64, stage.method.wire_width)
            self._known[key] = weights, observe(stage, self.tokens_BS)
        return self._known[key]

    def errors(self, row: Row) -> tuple[list[float], list[float]]:
        """Relative errors of X and of its gradient at every boundary, from the first to the last."""
        weights, exact = self.exact(row)
        (stage,) = build_stages(config(self.width, self.layers, row.compression), self.vocab)
        stage.load_weights(weights)
        seen = observe(stage, self.tokens_BS)
        return relative(seen.x, exact.x), relative(seen.gradients, exact.gradients)


def relative(ours: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]


def growth(values: list[float]) -> float:
    """rho of the least-squares fit error ~ rho^boundary."""
    return math.exp(np.polyfit(range(len(values)), np.log(values), 1)[0])


def bits_per_code(messages: list[torch.Tensor], gradients: bool) -> float:
    """Entropy of the 4-bit codes: what an ideal entropy coder would need, the scales apart."""
    counts = torch.zeros(16, dtype=torch.float64)
    for x in messages:
        codec = Integers(4, x.shape[-1])
        packed = (codec.encode_gradient(x, None) if gradients else codec.encode(x))[..., 2:]
        counts += torch.bincount(torch.stack((packed & 15, packed >> 4)).flatten().long(), minlength=16)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log2()).sum())


HIGHEST = (3.0, 1e4)  # where the plots end, and a line that leaves them is named


def draw(axes: tuple[Axes, Axes], series: dict[Row, tuple[list[float], list[float]]], weights: str) -> None:
    for which, (axis, what) in enumerate(zip(axes, ("activation", "gradient"), strict=True)):
        for row, both in series.items():
            values = both[which]
            axis.plot(range(1, len(values) + 1), values, row.style, color=row.colour, linewidth=1.6, label=row.name)
            if max(values) > HIGHEST[which]:
                axis.set_title(f"{row.name}: {values[0]:.0e} at boundary 1", fontsize=8, loc="right", color=row.colour)
        axis.set_yscale("log")
        axis.set_ylim(1e-4 if which == 0 else 1e-3, HIGHEST[which])
        axis.set_title(f"{what}, {weights}", fontsize=10, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.6)
        axis.set_xlabel("boundary" if which == 0 else "boundary (gradients come from the right)")
    axes[0].set_ylabel("relative error")


def table(series: dict[Row, tuple[list[float], list[float]]], width: int) -> None:
    last = len(next(iter(series.values()))[0])
    print(
        f"\n| codec | bytes | X at boundary 1 | {last} | rho | gradient at boundary {last} | 1 | rho |\n|---|---|---|---|---|---|---|---|"
    )
    for row, (x, g) in series.items():
        sent = wire_bytes(CompressionConfig(**row.compression), width)
        print(f"| {row.name} | {sent} | {x[0]:.2g} | {x[-1]:.2g} | {growth(x):.3f} | {g[-1]:.2g} | {g[0]:.2g} | {growth(g[::-1]):.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--train", type=int, default=50, help="steps of the short training (0: random weights only)")
    parser.add_argument("--out", type=Path, default=Path("docs/error_growth.png"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    width, layers = arguments.width, arguments.layers
    data = prepare(config(width, layers, {"method": "none"}))
    tokens_BS = to_tensor(data.batch(10**6, SEQUENCES))
    codecs = rows(width)

    depths = [*(depth for depth in (2, 4, 8, 16) if depth < layers), layers]
    by_depth = {depth: Models(width, depth, data.vocab, tokens_BS, 0) for depth in depths}
    print(
        f"X at the last boundary, random weights\n\n| codec | {' | '.join(f'{d} layers' for d in depths)} |\n|{'---|' * (1 + len(depths))}"
    )
    for row in codecs:
        print(f"| {row.name} | {' | '.join(f'{by_depth[depth].errors(row)[0][-1]:.2g}' for depth in depths)} |", flush=True)

    shown = {"random weights": 0} | ({f"after {arguments.train} steps": arguments.train} if arguments.train else {})
    figure = Figure(figsize=(9, 3.2 * len(shown) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for pair, (label, steps) in zip(axes, shown.items(), strict=True):
        models = Models(width, layers, data.vocab, tokens_BS, steps) if steps else by_depth[layers]
        series = {row: models.errors(row) for row in codecs}
        print(f"\n{layers} layers, {label}")
        table(series, width)
        draw(tuple(pair), series, label)
        for row in codecs[1:3]:
            seen = models.exact(row)[1]
            bits = bits_per_code(seen.sent, False), bits_per_code(seen.gradients, True)
            print(f"entropy of 4-bit codes, {row.model['method']}: {bits[0]:.2f} bits forward, {bits[1]:.2f} backward", flush=True)
    handles, labels = axes[0][0].get_legend_handles_labels()
    bytes_of = [wire_bytes(CompressionConfig(**row.compression), width) for row in codecs]
    named = [f"{label}: {count} bytes" for label, count in zip(labels, bytes_of, strict=True)]
    figure.legend(handles, named, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(arguments.out, dpi=150)
    print(arguments.out)


if __name__ == "__main__":
    main()
