"""Plots of a plan (PNG): the timeline of a step, and compute against communication as the width grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import CompressionConfig, Config, ModelConfig, PipelineConfig
from ..lab import Link
from ..lab.paths import slower
from .costs import GPU, costs_by_formula
from .simulation import Row, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {"forward": "#56B4E9", "backward": "#E69F00", "optimizer": "#999999", "tally": "#000000", "tied": "#CC79A7"}
_MESSAGES = {"send_forward": "#0072B2", "send_backward": "#D55E00"}
_METHODS = ("#D55E00", "#0072B2")  # dense, compressed
_SEEN_THROUGH = 0.7  # messages on their way at the same time show darker
_INK = "#333333"


def draw_timeline(timeline: Timeline, path: str | Path, title: str = "") -> None:
    """Write a PNG of one step: a lane per stage, between two lanes their messages, from first bit sent to last bit received.

    The others begin the next step as the tally's total reaches them.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tall = timeline.stages <= 8
    figure, axes = _figure(12, 1.6 + timeline.stages * (0.95 if tall else 0.34))
    height, lane = (0.46, 0.11) if tall else (0.5, 0.1)
    for row in timeline.rows:
        if row.to is None:
            axes.broken_barh(
                [(row.start, row.end - row.start)],
                (row.stage - height / 2, height),
                facecolor=_COLOURS[row.kind],
                edgecolor="white",
                linewidth=0.6 if tall else 0.2,
            )
            _number(axes, timeline, row, tall)
        elif row.kind in _MESSAGES:
            # Two thin lanes below the upper stage of the boundary: activations first, then gradients.
            upper = min(row.stage, row.to) + height / 2
            offset = 0.1 if row.kind == "send_forward" else 0.1 + 1.6 * lane
            axes.broken_barh([(row.start, row.end - row.start)], (upper + offset, lane), facecolor=_MESSAGES[row.kind], alpha=_SEEN_THROUGH)
        else:
            axes.plot([row.start, row.end], [row.stage, row.to], color=_COLOURS[row.kind], linewidth=0.8)
    ends = axes.axvline(timeline.seconds_per_step, color=_INK, linewidth=0.8, linestyle=":", label="stage 0 begins the next")
    axes.set_xlim(0, max([timeline.seconds_per_step, *(row.end for row in timeline.rows)]) * 1.01)
    axes.set_ylim(timeline.stages - 1 + 0.62, -0.62)
    axes.set_yticks(range(timeline.stages))
    axes.set_yticklabels([f"stage {s}  {100 * timeline.busy(s):.0f} %" for s in range(timeline.stages)])
    axes.set_xlabel("seconds")
    title = title or f"One step: {timeline.seconds_per_step:.3g} s; beside each stage the share of it that it computes"
    axes.set_title(title, loc="left", fontsize=10)
    kinds = {row.kind for row in timeline.rows}
    names = {"send_forward": "activations", "send_backward": "gradients", "tied": "tied table"}
    handles: list[Any] = []
    for kind, colour in (_COLOURS | _MESSAGES).items():
        if kind in ("tied", "tally") and kind in kinds:
            handles.append(Line2D([], [], color=colour, linewidth=0.8, label=names.get(kind, kind)))
        elif kind in kinds:
            handles.append(Patch(facecolor=colour, alpha=_SEEN_THROUGH if kind in _MESSAGES else 1, label=names.get(kind, kind)))
    below = -0.9 / figure.get_size_inches()[1]
    axes.legend(handles=[*handles, ends], loc="upper center", bbox_to_anchor=(0.5, below), ncol=8, frameon=False, fontsize=9)
    _save(figure, path)


def _number(axes: Axes, timeline: Timeline, row: Row, tall: bool) -> None:
    if tall and row.kind != "optimizer" and row.end - row.start > 0.013 * timeline.seconds_per_step:
        axes.text((row.start + row.end) / 2, row.stage, str(row.micro_batch), ha="center", va="center", fontsize=7, color=_INK)


class Width(NamedTuple):
    """Seconds that a width costs, see square_cube."""

    width: int
    compute: float
    dense: float
    compressed: float


def square_cube(gpu: GPU, link: Link, widths: Sequence[int], rank_of: int = 128, context: int = 1024) -> list[Width]:
    """Seconds of compute of one layer, of the dense stream's messages, and of the compressed ones, for each width.

    Forward and backward of one sequence through one layer of Llama proportions (heads of 128 numbers, hidden = 3.5 d)
    against an activation and its gradient on one link, in bf16. Compute grows with d², a dense message with d (SWARM's
    square-cube law, arXiv 2301.11913), so wide models need less network per FLOP; compression shifts the crossing.

    Args:
        rank_of: compression d / k.
    """
    rate = slower(link.up, link.down)
    rows = []
    for width in widths:
        model = ModelConfig(width=width, layers=3, heads=max(1, width // 128), hidden=7 * width // 2, context=context, vocab=512)
        base = Config(model=model, pipeline=PipelineConfig(stages=3, micro_batches=1))
        base = replace(base, train=replace(base.train, batch=1), compression=CompressionConfig(method="none"))
        dense = costs_by_formula(base, 257, gpu)
        thin = costs_by_formula(replace(base, compression=CompressionConfig(rank=max(1, width // rank_of))), 257, gpu)
        wire = [8 * (costs.forward_bytes + costs.backward_bytes) / rate if rate else 0.0 for costs in (dense, thin)]
        rows.append(Width(width, dense.forward[1] + dense.backward[1], *wire))
    return rows


def draw_widths(gpu: GPU, link: Link, path: str | Path, rank_of: int = 128) -> None:
    """Write a PNG of `square_cube` for widths from 256 to 262,144, with the widths at which compute equals the messages."""
    widths = [2**power for power in range(8, 19)]
    rows = square_cube(gpu, link, widths, rank_of)
    compute = [row.compute for row in rows]
    figure, axes = _figure(7.5, 4.6)
    messages = {"messages, dense": [row.dense for row in rows], f"messages, {rank_of}x compressed": [row.compressed for row in rows]}
    lines = {f"compute of one layer, {gpu.name}": compute} | messages
    for (label, seconds), colour in zip(lines.items(), (_INK, *_METHODS), strict=True):
        axes.plot(widths, seconds, color=colour, linewidth=2)
        at = (widths[-1], seconds[-1])
        axes.annotate(label, at, xytext=(6, 0), textcoords="offset points", va="center", color=colour, fontsize=9)
    for seconds, colour in zip(messages.values(), _METHODS, strict=True):
        for i in range(1, len(widths)):
            before, after = (math.log(compute[j] / seconds[j]) if seconds[j] else 0.0 for j in (i - 1, i))
            if before < 0 <= after:
                width = widths[i - 1] * (widths[i] / widths[i - 1]) ** (before / (before - after))
                axes.axvline(width, color=colour, linewidth=0.8, linestyle=":")
                text = f" in balance at\n d = {float(f'{width:.2g}'):,.0f}"
                axes.annotate(text, (width, 0.03), xycoords=("data", "axes fraction"), color=colour, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths[::2], [f"{width:,}" for width in widths[::2]])
    axes.minorticks_off()
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_xlabel("width d")
    axes.set_ylabel("seconds per sequence of 1,024 tokens")
    axes.set_title(f"Compute grows with d², a message with d (link {link})", loc="left", fontsize=10)
    _save(figure, path)


def _figure(width: float, height: float) -> tuple[Any, Axes]:
    # Without pyplot there is no global state and no display to find.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _save(figure: Any, path: str | Path) -> None:
    figure.savefig(path, format="png", bbox_inches="tight", metadata={"Software": None})
