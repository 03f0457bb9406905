"""Subspace against dense training of a real model over a link as thin, for its compute, as the paper's.

    python benchmarks/wan_speedup.py [--steps 8]   # needs the lab: root or unshare -rmn

The paper's setting: Llama 8B, one block of width 4,096 per stage on an L4, 80 Mbit/s. A token costs a stage 6 x (parameters of a block)
FLOPs and, dense, 2 x 4,096 x 2 bytes on the wire. Here the link is chosen so that one second of a stage's measured compute stands
against as many seconds of dense messages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from thinpipe.calibrate import calibrate
from thinpipe.config import Config, dump, from_dict

WIDTH, RANK, LAYERS, STAGES, MICRO_BATCHES, CONTEXT = 512, 5, 4, 4, 40, 64
DELAY = 0.025  # seconds one way


def config(rank: int, steps: int) -> Config:
    return from_dict(
        {
            "model": {"width": WIDTH, "layers": LAYERS, "heads": 8, "hidden": 1376, "context": CONTEXT},
            "data": {"vocab": 1024},
            "compression": {"method": "subspace", "rank": rank} if rank else {"method": "none"},
            "pipeline": {"stages": STAGES, "micro_batches": MICRO_BATCHES},
            "train": {"steps": steps, "batch": MICRO_BATCHES, "eval_every": 0, "checkpoint_every": 0, "eval_batches": 1, "sample": ""},
            "network": {"timeout": 900.0},  # dense, a gradient stands behind minutes of activations
        }
    ).check()


def published_ratio() -> tuple[float, str]:
    """Seconds of dense messages per second of compute in the paper's setting, and the arithmetic."""
    block = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336
    compute = 6 * block / (121e12 * 0.4)
    wire = 2 * 2 * 4096 * 8 / 80e6
    text = (
        f"6 x {block / 1e6:.0f} M FLOPs / (121 TFLOP/s x 0.4) = {1e6 * compute:.1f} us; 2 x 8,192 bytes / 80 Mbit/s = {1e6 * wire:.0f} us"
    )
    return wire / compute, text


def lab(folder: Path, rank: int, link: str, steps: int) -> dict[str, Any]:
    toml, out = folder / f"{rank}.toml", folder / f"run-{rank}-{link.replace(',', '-')}"
    toml.write_text(dump(config(rank, steps)))
    command = [sys.executable, "-m", "thinpipe", "lab", str(toml), "--link", link, "--run.dir", str(out), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=3600)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    ratio, arithmetic = published_ratio()
    costs = calibrate(config(0, arguments.steps))
    compute = (sum(costs.forward) + sum(costs.backward)) / STAGES / CONTEXT  # seconds per token and stage
    rate = 2 * 2 * WIDTH * 8 / (ratio * compute) / 1e6
    print(f"published, per token and stage: {arithmetic}: {ratio:.0f} s of messages per second of compute")
    print(
        f"here: {1e6 * compute:.0f} us of compute, all stages busy; 2 x {2 * WIDTH} bytes take {ratio:.0f} times that at {rate:.2f} Mbit/s"
    )
    link = f"{rate:.2f}mbit,{1e3 * DELAY:g}ms"
    with tempfile.TemporaryDirectory() as scratch:
        # Dense over the thin link takes minutes a step, each as long as the other.
        rows = [("subspace", RANK, link), ("subspace", RANK, "unlimited"), ("dense", 0, "unlimited"), ("dense", 0, link)]
        seconds = {}
        for name, rank, over in rows:
            result = lab(Path(scratch), rank, over, 2 if (rank, over) == (0, link) else arguments.steps)
            seconds[name, over] = result["seconds_per_step"]
            print(
                f"{name:>9} over {over:>16}: {result['seconds_per_step']:8.3f} s per step "
                f"(planned {result['planned_seconds_per_step']:.3f}), "
                f"{result['wire_bytes_per_token']:g} bytes per token, emulator {result['emulator_cpu']:.0%}",
                flush=True,
            )
    print(f"speed-up by compression of {WIDTH / RANK:.0f}: {seconds['dense', link] / seconds['subspace', link]:.1f}x (published: 13x)")
    print(f"subspace over the link against unlimited: {seconds['subspace', link] / seconds['subspace', 'unlimited']:.2f}")


if __name__ == "__main__":
    main()
