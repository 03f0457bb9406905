"""Cold against warm: a run that starts from its own random basis against one that takes a trained run's (compression.init_from).

Draws docs/warm_start.png: training loss, and the share of the gradients' energy that the subspace captures.

    python benchmarks/warm_start.py [--steps 200] [--out docs/warm_start.png]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from thinpipe.config import from_dict
from thinpipe.metrics import read_events
from thinpipe.run import open_run
from thinpipe.topology import connect
from thinpipe.trainer import Trainer


def run(folder: Path, steps: int, seed: int, **compression: Any) -> list[dict[str, Any]]:
    values = {
        "run": {"dir": str(folder), "seed": seed},
        "compression": {"segments": 4, **compression},
        "pipeline": {"stages": 1, "micro_batches": 1},
        "train": {"batch": 8, "steps": steps, "eval_every": 0, "eval_batches": 32, "watch_every": 0, "sample": ""},
    }
    config, opened, _ = open_run(from_dict(values))
    with connect(60) as alone:
        result = Trainer(config, alone, opened).fit()
    assert result is not None
    print(f"{folder.name}: validation loss {result.val_loss:.4f}", flush=True)
    return [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("docs/warm_start.png"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        run(source, arguments.steps, 0, move_every=25)
        rows = {
            "warm: the trained run's basis, moving": run(Path(scratch) / "warm", arguments.steps, 1, move_every=25, init_from=str(source)),
            "cold: random basis, moving": run(Path(scratch) / "cold", arguments.steps, 1, move_every=25),
        }
    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, key, label in zip(
        figure.subplots(2, 1, sharex=True), ("loss", "energy"), ("training loss (nats/token)", "captured energy"), strict=True
    ):
        for (name, events), colour in zip(rows.items(), ("#0072b2", "#d55e00"), strict=True):
            values = [event[key] for event in events]
            smooth = [sum(values[max(0, i - 9) : i + 1]) / len(values[max(0, i - 9) : i + 1]) for i in range(len(values))]
            axis.plot([event["step"] for event in events], smooth, color=colour, label=name)
        axis.set_ylabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    axis.set_xlabel("step (mean of 10)")
    figure.savefig(arguments.out, dpi=150)
    print(arguments.out)


if __name__ == "__main__":
    main()
