"""What is not in the library, tried in one process: does it earn a place? Against what is, at the same bytes.

    python benchmarks/boundary_trials.py [--jobs 2]   # resumable: docs/boundary-trials.json

The model and data of learning.py's tier 1. At k = 16 (1/8), "projected": a basis per cut learned on the Stiefel manifold (METHOD.md
section 5: tangent gradient, momentum, polar direction, QR retraction; on a wire each would cost 2 d k numbers per cut and step besides),
also with one cut between eight layers and eight and a table per segment for anchors; the principal directions of each cut's activations
or gradients; and unlike ranks at the cuts with the same sum. "subspace" with elementwise AdamW in place of the row-constant one. The
best at 1/32 with a second table per segment that multiplies what came over the cut, number by number.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from learning import DOCS, SLOW, TIERS, compressed, merged, packed

import thinpipe.model
from thinpipe import method, optim, run, trainer
from thinpipe.metrics import read_events, write_whole
from thinpipe.topology import connect

PATH = DOCS / "boundary-trials.json"
MOMENTUM = 0.9
TAKEN = (50, 200)  # steps behind which a basis of principal directions is taken, from all steps since the last one


class Row(NamedTuple):
    """Ranks of the cuts; the learning rate of a basis per cut (None: one fixed basis for all); what a basis per cut is taken from."""

    ranks: tuple[int, ...] = (16, 16, 16)
    lr: float | None = None
    principal: Literal["activations", "gradients"] | None = None
    deep: bool = False


DEEP: dict[str, Any] = {"model": {"layers": 16}, "compression": {"segments": 2, "stage_table": 32}}

ROWS = {
    "projected, one fixed basis": Row(),
    "more at the early cuts: 24, 16, 8": Row((24, 16, 8)),
    "more at the late cuts: 8, 16, 24": Row((8, 16, 24)),
    "a basis per cut, fixed": Row(lr=0.0),
    "a basis per cut, learned at 0.002": Row(lr=0.002),
    "a basis per cut, learned at 0.005": Row(lr=0.005),
    "a basis per cut, learned at 0.02": Row(lr=0.02),
    "one cut between 8 and 8 layers, anchors, fixed": Row((16,), 0.0, deep=True),
    "one cut between 8 and 8 layers, anchors, learned at 0.005": Row((16,), 0.005, deep=True),
    "a basis per cut, principal directions of activations": Row(lr=0.0, principal="activations"),
    "a basis per cut, principal directions of gradients": Row(lr=0.0, principal="gradients"),
}

ELEMENTWISE, GATES = "subspace 1/8, elementwise AdamW", "best at 1/32 with tables that multiply"


class Trial(method.Projected):
    """X <- E[t] + (X - E[t]) A_p A_p^T at cut p, A_p of the cut's own rank."""

    def __init__(self, spec: Any, compression: Any, seed: int, row: Row) -> None:
        super().__init__(spec, compression, seed)
        ranks, self.row, self.steps = row.ranks, row, 0
        drawn = torch.Generator().manual_seed(seed + 1)
        orthonormal = [torch.linalg.qr(torch.randn(spec.width, max(ranks), generator=drawn))[0] for _ in ranks]
        # The same width on every cut; columns beyond a cut's rank are zero, so nothing crosses there.
        self.bases = [(orthonormal[0] if row.lr is None else A).clone() for A in orthonormal]
        for A, k in zip(self.bases, ranks, strict=True):
            A[:, k:] = 0.0
            A.requires_grad_()
        self.moments = [torch.zeros_like(A) for A in self.bases]
        self.energies = [torch.zeros(spec.width, spec.width) for _ in ranks]

    def enter(self, c: torch.Tensor, segment: int) -> torch.Tensor:
        if segment == 0:
            return c
        x = (c @ self.bases[segment - 1].T).to(c.dtype)
        if self.row.principal == "gradients" and x.requires_grad:
            x.register_hook(partial(self._observe, segment - 1))
        return x

    def leave(self, s: torch.Tensor, segment: int) -> torch.Tensor:
        if self.row.principal == "activations" and s.requires_grad:
            self._observe(segment, s)
        return (s @ self.bases[segment]).to(s.dtype)

    def _observe(self, cut: int, x_BTD: torch.Tensor) -> None:
        x_ND = x_BTD.detach().flatten(0, 1)
        self.energies[cut] += x_ND.T @ x_ND

    @torch.no_grad()
    def learn(self, lr: float) -> None:
        self.steps += 1
        for A, m, energy, k in zip(self.bases, self.moments, self.energies, self.row.ranks, strict=True):
            if self.row.principal and self.steps in TAKEN:
                A[:, :k] = torch.linalg.eigh(energy)[1][:, -k:]
                energy.zero_()
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
    base = TIERS[1].base
    row = ROWS.get(name, Row())
    groups = compressed("projected", max(row.ranks)) | SLOW
    if name == ELEMENTWISE:
        groups = compressed("subspace", 16) | SLOW
        setattr(optim.Optimizer, "_rule", lambda self, role: "adamw")  # noqa: B010
    elif name == GATES:
        groups = packed("projected", 128, 32)
        setattr(thinpipe.model, "Stage", Gated)  # noqa: B010
    else:
        make: Any = lambda c, spec, segments, seed: Trial(spec, c, seed, row)  # noqa: E731
        setattr(thinpipe.model, "make_method", make)  # noqa: B010
    config, folder, _ = run.open_run(merged(base, groups, DEEP if row.deep else {}, {"run": {"dir": str(out / "run")}}))
    torch.set_num_threads(1)
    with connect(60.0) as here:
        training = trainer.Trainer(config, here, folder)
        tried, step = training.stage.method, training.optimizer.step

        def both(rate: float, scale: float = 1.0) -> None:
            step(rate, scale)
            if isinstance(tried, Trial):
                tried.learn((row.lr or 0.0) * rate / config.optim.lr)

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
