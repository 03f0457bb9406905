"""Rank collapse, or its absence, watched: how many directions the residual-writing matrices, their gradients and updates use.

A matrix of a constrained segment, W = A U^T (METHOD.md section 3), is watched through its coordinates A: U is orthonormal, so
A has the singular values of W and nothing is materialised. Its gradient and its update are those of A too, which is all that
the method sees of them. None of the three can have a rank above K there.

Legend: R the smaller side of a matrix, C the larger one, P columns of a random block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import nn

Pair = list[float | None]  # stable rank and energy in the top k; None where there is none

# Up to this smaller side all squared singular values are computed; beyond it the largest, by block Krylov iteration.
EXACT_SIDE = 1024
_OVERSAMPLING, _ITERATIONS, _SEED = 8, 4, 0


@torch.no_grad()
def rank_figures(W: torch.Tensor, k: int) -> tuple[float, float]:
    """Stable rank and energy in the top k of a matrix (rows, columns) of any float dtype, from one decomposition.

    The former is ||W||_F^2 / ||W||_2^2, between 1 and the rank (Rudelson and Vershynin, 2007); the latter the sum of the k
    largest squared singular values over ||W||_F^2, in (0, 1].

    Smaller side up to 1024: relative error about 1e-6 (1e-12 for float64 input). Above it: Ritz values of a block Krylov space
    (Musco and Musco, 2015) from a fixed seed. They never exceed the true squared singular values, so the stable rank comes out
    too high and the energy too low: by less than 1e-4 where the spectrum decays (like 1/sqrt(i) or faster), by up to 5 % where
    it is as flat as that of Gaussian noise.

    Returns NaN twice for a matrix of zeros or with entries that aren't finite.

    Raises ValueError if W is no matrix or k < 1.
    """
    if W.dim() != 2 or k < 1:
        raise ValueError(f"a matrix and k >= 1 are wanted, not shape {tuple(W.shape)} and k = {k}")
    largest = float(W.abs().amax()) if W.numel() else 0.0
    if not 0 < largest < math.inf:
        return math.nan, math.nan
    # Entries of at most 1: the squares of a small gradient would vanish in float32.
    W = W.to(W.dtype if W.dtype == torch.float64 else torch.float32) / largest
    W_RC = W if W.shape[0] <= W.shape[1] else W.T
    # Row by row: one float32 sum over millions of squares is off by 1e-4.
    total = float(torch.linalg.vector_norm(W_RC, dim=1).cpu().double().square().sum())
    squares = _top_squares(W_RC, k)
    return max(1.0, total / float(squares[0])), min(1.0, float(squares[:k].sum()) / total)


def _top_squares(W_RC: torch.Tensor, k: int) -> torch.Tensor:
    """At least the k largest squared singular values (all R of them if R < k), falling, in float64 on the CPU."""
    block = k + _OVERSAMPLING
    # Beyond a third of R the Krylov space costs more than the whole Gram matrix.
    if W_RC.shape[0] > max(EXACT_SIDE, 3 * (_ITERATIONS + 1) * block):
        generator = torch.Generator().manual_seed(_SEED)
        random_CP = torch.randn(W_RC.shape[1], block, generator=generator).to(W_RC)
        W_RC = _krylov_basis(W_RC, random_CP).T @ W_RC
    # The Gram matrix squares singular values, and squares are what is asked for: no accuracy is lost.
    # On the CPU in float64, since not every device has eigenvalues or float64.
    gram_RR = (W_RC @ W_RC.T).cpu().double()
    return torch.linalg.eigvalsh(gram_RR).flip(0)


def _krylov_basis(W_RC: torch.Tensor, random_CP: torch.Tensor) -> torch.Tensor:
    """Orthonormal basis of the span of (W W^T)^i W times a random block, i = 0 .. iterations."""
    blocks = [torch.linalg.qr(W_RC @ random_CP).Q]
    for _ in range(_ITERATIONS):
        blocks.append(torch.linalg.qr(W_RC @ (W_RC.T @ blocks[-1])).Q)
    return torch.linalg.qr(torch.cat(blocks, dim=1)).Q


def stream_writers(layers: nn.ModuleDict) -> Iterator[tuple[str, nn.Parameter]]:
    """The matrices of a stage's blocks (`Stage.layers`) that write into the residual stream, under the model's names."""
    for layer in layers:
        for writer in ("attn.o", "mlp.down"):
            weight = layers.get_submodule(f"{layer}.{writer}").get_parameter("weight")
            yield f"layers.{layer}.{writer}.weight", weight


class RankWatch:
    """Stable rank and energy in the top k of some matrices, their gradients and their updates, around one optimizer step.

    The update is new minus old weight: what the optimizer really did, learning rate, moments and decoupled decay included.
    A gradient's figures are taken before the step; that clipping has or hasn't scaled it changes nothing.
    Between the two calls a copy of every matrix is held on its device.

    Args:
        matrices: name and parameter of each, as `stream_writers` gives them.
        k: compression.rank; for a dense run too, so that runs compare.
    """

    def __init__(self, matrices: Iterable[tuple[str, nn.Parameter]], k: int) -> None:
        self.matrices, self.k = dict(matrices), k
        self._old: dict[str, torch.Tensor] = {}
        self._gradients: dict[str, Pair] = {}

    def before_step(self) -> None:
        """Remember the weights and measure the gradients; what an earlier call remembered (a refused step) is dropped."""
        self._old = {name: parameter.detach().clone() for name, parameter in self.matrices.items()}
        self._gradients = {name: self._measure(parameter.grad) for name, parameter in self.matrices.items()}

    def after_step(self) -> dict[str, dict[str, Pair]]:
        """{name: {"weight": [stable rank, energy], "gradient": [...], "update": [...]}}, the weight as it is after the step.

        Ready for JSON: five decimals or so; None where there is no figure (a zero or missing gradient, NaN).
        """
        assert self._old.keys() == self.matrices.keys(), "before_step comes first"
        old, self._old = self._old, {}
        return {
            name: {
                "weight": self._measure(parameter.detach()),
                "gradient": self._gradients[name],
                "update": self._measure(parameter.detach() - old.pop(name)),
            }
            for name, parameter in self.matrices.items()
        }

    def _measure(self, matrix: torch.Tensor | None) -> Pair:
        found = (math.nan, math.nan) if matrix is None else rank_figures(matrix, self.k)
        return [round(value, 5) if math.isfinite(value) else None for value in found]
