"""What the pipeline costs and what the method saves, at one stage, as ratios of things measured in one run.

1. One-stage dense training by `Trainer.train_step` against a plain PyTorch loop over the same model and batches.
2. Subspace against dense, one stage, 8 segments: tokens/s, and the memory that the static embedding adds to a stage.
3. What it costs to check all messages of a middle stage for numbers that are not finite.

    python benchmarks/overhead.py [--width 1024] [--rounds 7]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thinpipe.config import Config, from_dict
from thinpipe.model import build_stages
from thinpipe.run import open_run
from thinpipe.topology import connect
from thinpipe.trainer import Trainer


def config(folder: Path, method: str, width: int, rank: int, layers: int, static: str = "factored") -> Config:
    return from_dict(
        {
            "run": {"dir": str(folder), "precision": "float32"},  # as the plain loop
            "model": {"width": width, "layers": layers, "heads": max(1, width // 64), "context": 128},
            "compression": {"method": method, "rank": rank, "segments": layers, "static": static, "move_every": 0},
            "pipeline": {"stages": 1, "micro_batches": 4},
            "train": {"batch": 8, "steps": 1000, "checkpoint_every": 0, "watch_every": 0},
        }
    )


def seconds(work: Callable[[int], Any], step: int) -> float:
    began = time.perf_counter()
    work(step)
    return time.perf_counter() - began


def plain_loop(trainer: Trainer) -> Callable[[int], None]:
    """The same model and batches without us: micro-batches, clip, torch's AdamW."""
    c = trainer.config
    (model,) = build_stages(c, trainer.stage.spec.vocab)
    decayed = [p for _, p, role in model.roles() if role.kind in ("hidden", "head")]
    rest = [p for _, p, role in model.roles() if role.kind not in ("hidden", "head")]
    groups = [{"params": decayed, "weight_decay": c.optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=c.optim.lr, betas=c.optim.betas, fused=True)

    def step(number: int) -> None:
        optimizer.zero_grad()
        tokens = trainer.batch(number)
        assert tokens is not None
        for part in tokens.chunk(c.pipeline.micro_batches):
            model(None, part).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), c.optim.clip)
        optimizer.step()

    return step


def compare(a: Callable[[int], Any], b: Callable[[int], Any], rounds: int) -> tuple[float, float, list[float]]:
    """Median seconds of a and of b, taken in turn after a warm-up, and the ratios b / a of each pair."""
    for step in range(2):
        a(step), b(step)
    pairs = [(seconds(a, step), seconds(b, step)) for step in range(2, 2 + rounds)]
    return median(x for x, _ in pairs), median(y for _, y in pairs), sorted(y / x for x, y in pairs)


def static_mb(static: str, vocab: int, width: int) -> float:
    """Resident memory (MB) that building the static embedding of one stage adds, in a process of its own."""
    code = (
        "import resource, torch; from thinpipe.subspace import StaticTable;"
        "before = int(open('/proc/self/statm').read().split()[1]);"
        f"table = StaticTable({static!r}, {vocab}, {width}, 1.0, 0);"
        "print((int(open('/proc/self/statm').read().split()[1]) - before) * resource.getpagesize() / 1e6)"
    )
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, connect(60) as alone:

        def trainer(name: str, *what: Any) -> Trainer:
            opened, folder, _ = open_run(config(Path(scratch) / name, *what))
            return Trainer(opened, alone, folder)

        for width, layers in ((256, 8), (arguments.width, 8)):
            dense = trainer(f"dense-{width}", "none", width, arguments.rank, layers)
            tokens = dense.stage.batch_tokens
            plain, ours, ratios = compare(plain_loop(dense), dense.train_step, arguments.rounds)
            print(
                f"d = {width}, {layers} layers, dense, one stage: plain loop {tokens / plain:,.0f} tokens/s, "
                f"thinpipe {tokens / ours:,.0f}; "
                f"ratio {1 / median(ratios):.3f} (of pairs: {1 / ratios[-1]:.3f} to {1 / ratios[0]:.3f})"
            )
            subspace = trainer(f"subspace-{width}", "subspace", width, arguments.rank, layers)
            ours, theirs, ratios = compare(dense.train_step, subspace.train_step, arguments.rounds)
            print(
                f"d = {width}, {layers} layers, 8 segments, k = {arguments.rank}: dense {tokens / ours:,.0f} tokens/s, "
                f"subspace {tokens / theirs:,.0f}; ratio {1 / median(ratios):.3f} (of pairs: {1 / ratios[-1]:.3f} to {1 / ratios[0]:.3f})"
            )
            options = subspace.config
            message = torch.randn(options.micro_batch, subspace.stage.spec.context, arguments.rank)
            check = median(seconds(lambda _, m=message: torch.linalg.vector_norm(m, float("inf")), 0) for _ in range(200))
            share = 4 * options.pipeline.micro_batches * check / theirs
            print(f"a check of a message for finite numbers: {1e6 * check:.0f} us; four per micro-batch: {share:.3%} of a subspace step")
            del dense, subspace
    for static in ("gaussian", "factored"):
        print(f"static embedding, {static}, V = 50,257, d = 4096: {static_mb(static, 50_257, 4096):,.1f} MB per stage")


if __name__ == "__main__":
    main()
