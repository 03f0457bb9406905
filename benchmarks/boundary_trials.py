"""What is not in the library, tried in one process: does it earn a place? Against what is, at the same bytes.

    python benchmarks/boundary_trials.py [--jobs 2]   # resumable: docs/boundary-trials.json

The model and data of learning.py's tier 1. At k = 16 (1/8), "projected": a basis per cut learned on the Stiefel manifold (METHOD.md
section 5: tangent gradient, momentum, polar direction, QR retraction; on a wire each would cost 2 d k numbers per cut and step besides),
and unlike ranks at the cuts with the same sum. "subspace" with elementwise AdamW in place of the row-constant one. The best at 1/32
with a second table per segment that multiplies what came over the cut, number by number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from learning import DOCS, SLOW, TIERS, compressed, merged, packed

import thinpipe.model
from thinpipe import method, optim, run, trainer
from thinpipe.metrics import read_events, write_whole
from thinpipe.topology import connect

PATH = DOCS / "boundary-trials.json"
MOMENTUM = 0.9
# Ranks of the three cuts, and the learning rate of a basis per cut (None: one fixed basis for all, as in the library).
ROWS: dict[str, tuple[tuple[int, int, int], float | None]] = {
    "projected, one fixed basis": ((16, 16, 16), None),
    "more at the early cuts: 24, 16, 8": ((24, 16, 8), None),
    "more at the late cuts: 8, 16, 24": ((8, 16, 24), None),
    "a basis per cut, fixed": ((16, 16, 16), 0.0),
    "a basis per cut, learned at 0.002": ((16, 16, 16), 0.002),
    "a basis per cut, learned at 0.005": ((16, 16, 16), 0.005),
    "a basis per cut, learned at 0.02": ((16, 16, 16), 0.02),
}


ELEMENTWISE, GATES = "subspace 1/8, elementwise AdamW", "best at 1/32 with tables that multiply"


class Trial(method.Projected):
    """X <- E[t] + (X - E[t]) A_p A_p^T at cut p, A_p of the cut's own rank."""

    def __init__(self, spec: Any, compression: Any, seed: int, ranks: Sequence[int], own: bool) -> None:
        super().__init__(spec, compression, seed)
        drawn = torch.Generator().manual_seed(seed + 1)
        orthonormal = [torch.linalg.qr(torch.randn(spec.width, max(ranks), generator=drawn))[0] for _ in ranks]
        # The same width on every cut; columns beyond a cut's rank are zero, so nothing crosses there.
        self.bases = [(A if own else orthonormal[0]).clone() for A in orthonormal]
        for A, k in zip(self.bases, ranks, strict=True):
            A[:, k:] = 0.0
            A.requires_grad_()
        self.moments = [torch.zeros_like(A) for A in self.bases]

    def enter(self, c: torch.Tensor, segment: int) -> torch.Tensor:
        return c if segment == 0 else (c @ self.bases[segment - 1].T).to(c.dtype)

    def leave(self, s: torch.Tensor, segment: int) -> torch.Tensor:
        return (s @ self.bases[segment]).to(s.dtype)

    @torch.no_grad()
    def learn(self, lr: float) -> None:
        for A, m in zip(self.bases, self.moments, strict=True):
            assert A.grad is not None
            if lr:
                overlap = A.T @ A.grad
                m.mul_(MOMENTUM).add_(A.grad - A @ (overlap + overlap.T) / 2)
                left, _, right = torch.linalg.svd(m, full_matrices=False)
                Q, R = torch.linalg.qr(A - lr * left @ right)
                A.copy_(Q * R.diagonal().sign())
            A.grad = None


class Gates(thinpipe.model.StageTable):
    """A table whose row, 1 at first, multiplies what came over the cut before the segment."""

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return 1 + super().forward(ids_BT)


class Gated(thinpipe.model.Stage):
    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.gates = torch.nn.ModuleDict({str(s): Gates(self.spec.vocab, self.spec.width, None, 0) for s in self.segments[1:]})
        enter = self.method.enter
        # One process, one micro-batch: the ids of the step are those that forward has just been given.
        setattr(self.method, "enter", lambda c, s: enter(c, s) * self.gates[str(s)](self.ids_BT) if s else enter(c, s))  # noqa: B010

    def forward(self, c_BTW: torch.Tensor | None, tokens_BS: torch.Tensor) -> torch.Tensor:
        self.ids_BT = tokens_BS[:, :-1].clamp(min=0)
        return super().forward(c_BTW, tokens_BS)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        super().initialise(seed)
        for gates in self.gates.values():
            torch.nn.init.zeros_(gates.weight)  # type: ignore[arg-type]


def one(name: str, out: Path) -> None:
    """A row, in this process."""
    base, *_ = TIERS[1]
    ranks, lr = ROWS.get(name, ((16, 16, 16), None))
    groups = compressed("projected", max(ranks)) | SLOW
    if name == ELEMENTWISE:
        groups = compressed("subspace", 16) | SLOW
        setattr(optim.Optimizer, "_rule", lambda self, role: "adamw")  # noqa: B010
    elif name == GATES:
        groups = packed("projected", 128, 32)
        setattr(thinpipe.model, "Stage", Gated)  # noqa: B010
    else:
        make: Any = lambda c, spec, segments, seed: Trial(spec, c, seed, ranks, own=lr is not None)  # noqa: E731
        setattr(thinpipe.model, "make_method", make)  # noqa: B010
    config, folder, _ = run.open_run(merged(base, groups, {"run": {"dir": str(out / "run")}}))
    torch.set_num_threads(1)
    with connect(60.0) as here:
        training = trainer.Trainer(config, here, folder)
        tried, step = training.stage.method, training.optimizer.step

        def both(rate: float, scale: float = 1.0) -> None:
            step(rate, scale)
            if isinstance(tried, Trial):
                tried.learn((lr or 0.0) * rate / config.optim.lr)

        setattr(training.optimizer, "step", both)  # noqa: B010
        result = training.fit()
    assert result is not None
    evals = [[e["step"], round(e["val_loss"], 5)] for e in read_events(folder / "metrics.jsonl") if e["event"] == "eval"]
    write_whole(out / "row.json", json.dumps({"val_loss": result.val_loss, "curve": evals}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        one(arguments.row[0], Path(arguments.row[1]))
        return
    stored: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {}

    def work(name: str) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            subprocess.run([sys.executable, __file__, "--row", name, scratch], check=True, stderr=subprocess.DEVNULL)
            stored[name] = json.loads((Path(scratch) / "row.json").read_text())
        write_whole(PATH, json.dumps(stored, indent=1) + "\n")

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(work, [name for name in (*ROWS, ELEMENTWISE, GATES) if name not in stored]))
    for name in stored:
        print(f"| {name} | {stored[name]['val_loss']:.3f} |")


if __name__ == "__main__":
    main()
