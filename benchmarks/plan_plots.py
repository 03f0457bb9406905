"""The planner's plots in docs: the square-cube law, tokens/s against depth, context, stages and link rate, a step's timeline.

python benchmarks/plan_plots.py [--out docs]     # half a minute; nothing is measured
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinpipe import planner, schedule
from thinpipe.config import Config, from_dict
from thinpipe.lab import parse_links

GPU = planner.find_gpu("L4")
LINK = "80mbit,25ms"
VOCAB = 32768
METHODS = {"subspace": ("subspace, k = 32 (64x)", "#0072B2", "-o"), "none": ("dense", "#D55E00", "--s")}


def config(method: str, layers: int, stages: int, context: int) -> Config:
    """A Llama of width 2,048 (the proportions of llama-1b), 32 sequences a step, one per micro-batch."""
    return from_dict(
        {
            "run": {"precision": "bf16"},
            "model": {"preset": "llama-1b", "layers": layers, "context": context, "vocab": VOCAB},
            "compression": {"method": method, "rank": 32},
            "pipeline": {"stages": stages, "micro_batches": 32},
            "train": {"batch": 32},
        }
    ).check()


def tokens_per_s(method: str, layers: int = 16, stages: int = 8, context: int = 1024, link: str = LINK) -> float:
    """In the best schedule that fits the memory; raises ThinpipeError if none does."""
    chosen = config(method, layers, stages, context)
    costs, limits = planner.costs_by_formula(chosen, VOCAB, GPU), planner.in_flight_limits(chosen, VOCAB, GPU)
    best = planner.best_schedule(costs, parse_links(link, stages - 1), chosen.pipeline.micro_batches, limits)
    return chosen.train.batch * context / best.seconds_per_step


def panel(axes: Axes, title: str, label: str, field: str, values: list[Any], places: list[int]) -> None:
    for method, (name, colour, line) in METHODS.items():
        results = [tokens_per_s(method, **{field: value}) for value in values]
        print(f"{title}, {name}:", [f"{place:,}: {result:,.0f}" for place, result in zip(places, results, strict=True)], flush=True)
        axes.plot(places, results, line, color=colour, linewidth=1.8, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set_ylim(30, 50000)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(label)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_tokens(path: Path) -> None:
    figure = Figure(figsize=(10, 7.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    ((depth, context), (stages, rate)) = figure.subplots(2, 2, sharey=True)
    layers, contexts, counts = [8, 16, 32, 64], [256, 512, 1024, 2048, 4096, 8192], [2, 4, 8, 16]
    rates = [5, 20, 80, 320, 1280, 5120, 20480]
    panel(depth, "depth", "layers, on 8 stages", "layers", layers, layers)
    panel(context, "context length", "tokens per sequence", "context", contexts, contexts)
    panel(stages, "number of stages", "stages, sharing 16 layers", "stages", counts, counts)
    panel(rate, "link rate", "Mbit/s (25 ms one way)", "link", [f"{each}mbit,25ms" for each in rates], rates)
    for axes in (depth, stages):
        axes.set_ylabel("tokens/s")
    handles, labels = depth.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncol=2, frameon=False)
    about = f"Predicted: Llama of width 2,048 and 16 layers on 8 {GPU.name}s, 32 sequences of 1,024 tokens a step, {LINK}"
    figure.suptitle(about, fontsize=11)
    figure.savefig(path, metadata={"Software": None})


def timeline(path: Path) -> None:
    """Four stages, eight micro-batches of 64 KiB, F = 20 ms, B = 40 ms, optimizer 10 ms."""
    costs, links = planner.Costs.uniform(4, 0.02, 0.04, 65536, optimizer=0.01), parse_links(LINK, 3)
    choice = planner.best_schedule(costs, links, 8)
    step = planner.simulate(schedule.actions(choice.schedule, 4, 8, choice.warmup), costs, links)
    planner.draw_timeline(step, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    out = parser.parse_args().out
    timeline(out / "planner_step.png")
    planner.draw_widths(GPU, parse_links(LINK, 1)[0], out / "planner_width.png")
    draw_tokens(out / "planner_tokens.png")


if __name__ == "__main__":
    main()
