"""A basis per cut, learned on the Stiefel manifold (METHOD.md section 5), against the fixed one: does it pay here?

    python benchmarks/learned_basis.py [--jobs 2]   # resumable: docs/learned-basis.json

One process, the model and data of learning.py's tier 1, method "projected" with the cuts' bases trained: tangent gradient, momentum,
polar direction, QR retraction. On a wire each basis would cost 2 d k numbers per cut and step besides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from learning import DOCS, TIERS, compressed, merged

from thinpipe import method, run, trainer
from thinpipe.metrics import read_events, write_whole
from thinpipe.model import Stage
from thinpipe.topology import connect

PATH = DOCS / "learned-basis.json"
RANK, MOMENTUM = 16, 0.9
ROWS: dict[str, tuple[str, float]] = {  # method, learning rate of the bases (0: fixed)
    "projected, one fixed basis": ("projected", 0.0),
    "a basis per cut, fixed": ("learned", 0.0),
    "a basis per cut, lr 0.002": ("learned", 0.002),
    "a basis per cut, lr 0.005": ("learned", 0.005),
    "a basis per cut, lr 0.02": ("learned", 0.02),
}


class Learned(method.Projected):
    """X <- E[t] + (X - E[t]) A_p A_p^T at cut p."""

    def __init__(self, spec: Any, compression: Any, segments: int, seed: int) -> None:
        super().__init__(spec, compression, seed)
        drawn = torch.Generator().manual_seed(seed + 1)
        self.bases = [torch.linalg.qr(torch.randn(spec.width, compression.rank, generator=drawn))[0] for _ in range(segments - 1)]
        for basis in self.bases:
            basis.requires_grad_()
        self.moments = [torch.zeros_like(basis) for basis in self.bases]

    def enter(self, c: torch.Tensor, segment: int) -> torch.Tensor:
        return c if segment == 0 else (c @ self.bases[segment - 1].T).to(c.dtype)

    def leave(self, s: torch.Tensor, segment: int) -> torch.Tensor:
        return (s @ self.bases[segment]).to(s.dtype)

    @torch.no_grad()
    def learn(self, lr: float) -> None:
        for A, m in zip(self.bases, self.moments, strict=True):
            assert A.grad is not None
            overlap = A.T @ A.grad
            m.mul_(MOMENTUM).add_(A.grad - A @ (overlap + overlap.T) / 2)
            left, _, right = torch.linalg.svd(m, full_matrices=False)
            Q, R = torch.linalg.qr(A - lr * left @ right)
            A.copy_(Q * R.diagonal().sign())
            A.grad = None


def one(name: str, out: Path) -> None:
    """A row, in this process."""
    kind, lr = ROWS[name]
    base, *_ = TIERS[1]
    config = merged(base, compressed("projected", RANK), {"run": {"dir": str(out / "run")}})
    torch.set_num_threads(1)
    if kind == "learned":
        fixed = method.make_method
        import thinpipe.model

        thinpipe.model.make_method = lambda c, spec, segments, seed: Learned(spec, c, segments, seed)  # type: ignore[attr-defined]
        assert fixed is method.make_method
    config, folder, _ = run.open_run(config)
    with connect(60.0) as here:
        training = trainer.Trainer(config, here, folder)
        if isinstance(learned := training.stage.method, Learned):
            step = training.optimizer.step

            def both(rate: float, scale: float = 1.0) -> None:
                step(rate, scale)
                learned.learn(lr * rate / config.optim.lr)

            training.optimizer.step = both  # type: ignore[method-assign]
        result = training.fit()
    assert result is not None and isinstance(training.stage, Stage)
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
        list(pool.map(work, [name for name in ROWS if name not in stored]))
    for name in ROWS:
        print(f"| {name} | {stored[name]['val_loss']:.3f} |")


if __name__ == "__main__":
    main()
