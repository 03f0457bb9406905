"""The planner against the lab: planned and measured seconds per step, by `thinpipe lab` itself.

    python benchmarks/planner_lab.py [--out runs/planner-lab] [--steps 40]   # needs the lab: root or unshare -rmn
    python benchmarks/planner_lab.py --spots   # tokens/s against depth, context, stages and rate: docs/planner_spots.png

Each setting is a run of its own: calibrated with all its stages computing at once, planned, then trained. A setting whose
result is in --out already is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from thinpipe.config import Config, dump, from_dict

# Small, so that eight stages on two cores wait for their links and not for each other, as on machines of their own.
MODEL = {"width": 64, "layers": 8, "heads": 2, "hidden": 160, "context": 64}

# stages, micro-batches, rank (0: dense), schedule, links
SETTINGS: list[tuple[int, int, int, str, str]] = [
    (2, 4, 8, "wan", "10mbit,25ms"),
    (2, 8, 0, "gpipe", "4mbit,10ms"),
    (4, 8, 8, "wan", "80mbit,25ms"),
    (4, 8, 8, "gpipe", "80mbit,25ms"),
    (4, 8, 8, "1f1b", "80mbit,25ms"),
    (4, 16, 8, "wan", "10mbit,50ms"),
    (4, 8, 0, "wan", "3mbit,25ms"),
    (4, 8, 32, "wan", "2mbit,10ms"),
    (4, 4, 16, "wan", "60mbit,90ms/350mbit,40ms/160mbit,30ms"),
    (4, 8, 0, "1f1b", "10mbit,50ms"),
    (6, 12, 8, "wan", "40mbit,20ms"),
    (6, 6, 16, "gpipe", "10mbit,30ms"),
    (8, 8, 8, "wan", "80mbit,25ms"),
    (8, 16, 4, "wan", "20mbit,50ms"),
    (8, 16, 0, "wan", "10mbit,25ms"),
    (8, 8, 8, "auto", "300mbit,10ms"),
]


# One thing at a time away from four stages of two layers, contexts of 64 tokens, k = 8, 20 Mbit/s and 25 ms one way.
BASE = {"layers": 8, "context": 64, "stages": 4, "Mbit/s": 20}
SPOTS = {"layers": (4, 8, 16), "context": (32, 64, 256), "stages": (2, 4, 8), "Mbit/s": (0.5, 2, 20)}


def config(stages: int, micro_batches: int, rank: int, schedule: str, steps: int, **model: int) -> Config:
    compression = {"method": "subspace", "rank": rank} if rank else {"method": "none"}
    return from_dict(
        {
            "model": MODEL | model,
            "data": {"vocab": 512},
            "compression": compression | {"segments": max(stages, 4) if model else 8},
            "pipeline": {"stages": stages, "micro_batches": micro_batches, "schedule": schedule},
            "train": {"steps": steps, "batch": micro_batches, "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1, "sample": ""},
        }
    ).check()


def run(folder: Path, setting: tuple[int, int, int, str, str], steps: int, **model: int) -> dict[str, Any]:
    *shape, link = setting
    done = folder / "lab.json"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        toml = folder.with_suffix(".toml")
        toml.write_text(dump(config(*shape, steps, **model)))
        command = [sys.executable, "-m", "thinpipe", "lab", str(toml), "--link", link, "--run.dir", str(folder), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=600)
    result: dict[str, Any] = json.loads(done.read_text())
    return result


def spots(out: Path, steps: int) -> None:
    """Measure them, print planned and measured tokens/s, and draw both."""
    from matplotlib.figure import Figure

    from thinpipe.report import COLOURS, clean, save

    figure = Figure(figsize=(7.0, 5.2), layout="constrained")
    for axes, (axis, values) in zip(figure.subplots(2, 2).flat, SPOTS.items(), strict=True):
        planned, measured = [], []
        for value in values:
            at = BASE | {axis: value}
            setting = (int(at["stages"]), 8, 8, "wan", f"{at['Mbit/s']}mbit,25ms")
            name = "-".join(str(each) for each in at.values())
            result = run(out / f"spot-{name}", setting, steps, layers=int(at["layers"]), context=int(at["context"]))
            tokens = 8 * at["context"]
            planned.append(tokens / result["planned_seconds_per_step"])
            measured.append(tokens / result["seconds_per_step"])
            print(f"| {axis} {value:g} | {planned[-1]:,.0f} | {measured[-1]:,.0f} | {measured[-1] / planned[-1] - 1:+.1%} |", flush=True)
        clean(axes)
        axes.plot(values, planned, "o-", color=COLOURS[0], markerfacecolor="white", markersize=7, label="planned")
        axes.plot(values, measured, "x", color=COLOURS[1], markersize=7, label="measured in the lab")
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.minorticks_off()
        axes.set_ylim(0, 1.08 * max(planned + measured))
        axes.set_xlabel(axis)
        axes.set_ylabel("tokens/s")
    figure.axes[0].legend(frameon=False, loc="best")
    save(figure, Path(__file__).parents[1] / "docs/planner_spots.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/planner-lab")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--spots", action="store_true")
    arguments = parser.parse_args()
    if arguments.spots:
        spots(Path(arguments.out), arguments.steps)
        return
    print(f"{'stages':>6} {'M':>3} {'k':>5} {'schedule':>8} {'links':>38} {'planned':>8} {'measured':>8} {'error':>6} {'emulator':>8}")
    errors = []
    for number, setting in enumerate(SETTINGS):
        result = run(Path(arguments.out) / f"{number:02}", setting, arguments.steps)
        planned, measured = result["planned_seconds_per_step"], result["seconds_per_step"]
        errors.append(planned / measured - 1)
        stages, micro_batches, rank, schedule, link = setting
        print(
            f"{stages:>6} {micro_batches:>3} {rank or 'dense':>5} {schedule:>8} {link:>38} {planned:>8.3f} {measured:>8.3f} "
            f"{errors[-1]:>+6.1%} {result['emulator_cpu']:>8.0%}",
            flush=True,
        )
    sizes = [abs(error) for error in errors]
    print(f"\nmedian error {median(sizes):.1%}, worst {max(sizes):.1%}, of {len(sizes)} settings")


if __name__ == "__main__":
    main()
