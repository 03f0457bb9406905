"""What a checkpoint and a move of the subspace cost a run, in steps, and the share of training time at the default intervals.

A checkpoint costs the copy inside the step and the writer's share of the cores behind it; a move costs the statistic in every
step (measured as the ratio of steps with and without it) and the move itself, two evaluations of the batch included.

    python benchmarks/run_costs.py [--preset small] [--rounds 9]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from thinpipe.config import from_dict
from thinpipe.method import Subspace
from thinpipe.run import open_run
from thinpipe.topology import connect
from thinpipe.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, connect(60) as alone:

        def trainer(name: str, move_every: int) -> Trainer:
            values = {
                "run": {"dir": str(Path(scratch) / name)},
                "model": {"preset": arguments.preset},
                "compression": {"move_every": move_every, "segments": 4},
                "pipeline": {"stages": 1, "micro_batches": 4},
                "train": {"batch": 8, "steps": 100_000, "watch_every": 0, "checkpoint_every": 0},
            }
            opened, folder, _ = open_run(from_dict(values))
            return Trainer(opened, alone, folder)

        moving, frozen = trainer("moving", 90_000), trainer("frozen", 0)
        step = 0
        with_statistic, without, copies, behind, moves = [], [], [], [], []
        for number in range(-2, arguments.rounds):
            times = []
            for which in (moving, frozen):
                began = time.perf_counter()
                which.train_step(step)
                times.append(time.perf_counter() - began)
            began = time.perf_counter()
            frozen.save()
            copied = time.perf_counter() - began
            began = time.perf_counter()
            frozen.train_step(step + 1)
            beside = time.perf_counter() - began
            frozen.checkpoints.finish()
            method = moving.stage.method
            assert isinstance(method, Subspace)
            began = time.perf_counter()
            moving.move_subspace(method, moving.batch(step))
            moved = time.perf_counter() - began
            moving.train_step(step + 1)
            step += 2
            if number >= 0:
                with_statistic.append(times[0])
                without.append(times[1])
                copies.append(copied)
                behind.append(beside)
                moves.append(moved)
        size = sum(tensor.nbytes for tensor in frozen.owned().values())
        plain = median(without)
        statistic = median(a / b for a, b in zip(with_statistic, without, strict=True)) - 1
        slower = median(a / b for a, b in zip(behind, without, strict=True)) - 1
        print(f"preset {arguments.preset}, one stage, checkpoint of {size / 1e6:,.1f} MB, step {plain:.3f} s")
        print(f"checkpoint: the copy takes {median(copies) / plain:.1%} of a step; the step while it is written is {slower:+.1%} longer")
        print(f"move: {median(moves) / plain:.1%} of a step; every 500 steps: {median(moves) / plain / 500:.3%} of training time")
        print(f"statistic of the gradients at the last cut: {statistic:+.1%} of every step")


if __name__ == "__main__":
    main()
