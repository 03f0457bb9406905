"""What a boundary sends and how blocks meet it: one object per method behind one interface.

A model is cut into segments (METHOD.md 3.4b). Inside a segment the residual stream is carried as a state s, which blocks
`read` as X (width d) and add their output to. At a cut the state leaves as c (`wire_width` numbers a token), crosses in
the wire's number format whether or not a process boundary stands there, and enters the next segment.

Legend: B sequences, T tokens, D stream width d, K rank k, W width of a segment's state (K or D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from . import subspace
from .config import CompressionConfig, ModelSpec


@dataclass(frozen=True)
class Role:
    """What a parameter is, for the optimizer and for a move of the subspace.

    Attributes:
        kind: "hidden" (matrices of the blocks), "embedding", "head" or "gain" (norms).
        coordinates: the dimension that runs over the K coordinates of the subspace; None for a free parameter.
    """

    kind: Literal["hidden", "embedding", "head", "gain"]
    coordinates: int | None = None


class Dense(nn.Module):
    """Method "none": the stream is X itself and crosses whole."""

    is_plain_llama = True

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.wire_width = spec.width
        self.embedding_width = spec.width
        self.embedding_role = Role("embedding")

    @property
    def basis(self) -> torch.Tensor | None:
        """U (D, K), the same on all stages: the last one's, which a checkpoint keeps."""
        basis: torch.Tensor | None = getattr(self, "U_DK", None)
        return basis

    def width(self, segment: int) -> int:
        """Numbers per token that the blocks of `segment` write."""
        return self.wire_width

    def writer(self, segment: int) -> Role:
        """Role of the matrices that write into the stream of `segment`."""
        return Role("hidden")

    def static(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """The part of X that every stage knows by itself, (B, T, D), or None."""
        return None

    def enter(self, c: torch.Tensor, segment: int) -> torch.Tensor:
        """State of `segment` from what came over the cut before it (segment 0: from the embedding)."""
        return c

    def read(self, s: torch.Tensor, static: torch.Tensor | None, segment: int) -> torch.Tensor:
        """X (B, T, D) as the blocks of `segment` see it; `static` is None where there is no such part."""
        return s if static is None else static + s

    def leave(self, s: torch.Tensor, segment: int) -> torch.Tensor:
        """What crosses the cut behind `segment`, (B, T, wire_width)."""
        return s

    def initial_embedding(self) -> torch.Tensor | None:
        """The table's start where the method prescribes it; None: Gaussian rows."""
        return None

    def full_embedding(self, table: torch.Tensor) -> torch.Tensor:
        """The (V, D) table of a plain model."""
        return table

    def full_writer(self, weight: torch.Tensor) -> torch.Tensor:
        """The (D, in) weight of a plain model from a weight of a constrained segment."""
        return weight

    def digest(self) -> str:
        """What every stage must have alike before the first step."""
        return ""


class Subspace(Dense):
    """Method "subspace" (Protocol Models): X = E[t] + C U^T, and only C crosses (METHOD.md section 3).

    Before the last cut, matrices that write into the stream hold coordinates A (in, K), W = A U^T, and the state is C.
    Behind it nothing crosses any more, so the state there is X - E[t] at full width.
    """

    U_DK: torch.Tensor

    def __init__(self, spec: ModelSpec, compression: CompressionConfig, segments: int, seed: int) -> None:
        super().__init__(spec)
        self.last = segments - 1
        self.rank, self.full_width = compression.rank, spec.width
        self.embedding_start = compression.embedding_start
        self.wire_width = self.embedding_width = compression.rank
        self.embedding_role = Role("embedding", coordinates=1)
        self.table = subspace.StaticTable(compression.static, spec.vocab, spec.width, compression.static_scale, seed)
        self.register_buffer("U_DK", subspace.initial_basis(spec.width, compression.rank, seed).float())
        self.statistic: GradientStatistic | None = None

    def width(self, segment: int) -> int:
        return self.rank if segment < self.last else self.full_width

    def writer(self, segment: int) -> Role:
        # A (in, K) is stored as nn.Linear's weight (K, in): its coordinates run along dimension 0.
        return Role("hidden", coordinates=0 if segment < self.last else None)

    def static(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.table(tokens, dtype)

    def enter(self, c: torch.Tensor, segment: int) -> torch.Tensor:
        if segment < self.last:
            return c
        x_BTD = (c @ self.U_DK.T).to(c.dtype)  # under autocast the product is bfloat16; the stream stays what it was
        if self.statistic is not None and x_BTD.requires_grad:
            x_BTD.register_hook(self.statistic.observe)
        return x_BTD

    def read(self, s: torch.Tensor, static: torch.Tensor | None, segment: int) -> torch.Tensor:
        assert static is not None
        return static + (s @ self.U_DK.T if segment < self.last else s)

    def initial_embedding(self) -> torch.Tensor:
        """`embedding_start` times E U: 1 is the paper's (METHOD.md 3.1); a smaller one learned faster (docs/LOG.md)."""
        U_DK = self.U_DK.double() * self.embedding_start
        ids = torch.arange(self.table.vocab, device=U_DK.device)
        return torch.cat([self.table(part, torch.float64) @ U_DK for part in ids.split(8192)])

    def full_embedding(self, table: torch.Tensor) -> torch.Tensor:
        static_VD = self.table(torch.arange(self.table.vocab, device=table.device), table.dtype)
        return static_VD + table @ self.U_DK.to(table.dtype).T

    def full_writer(self, weight: torch.Tensor) -> torch.Tensor:
        return self.U_DK.to(weight.dtype) @ weight

    def digest(self) -> str:
        return self.table.digest()


class GradientStatistic:
    """M = G^T (G U) and ||G||^2 of the gradients G of X at the last cut, summed since the last move (METHOD.md section 3).

    A step's share is held apart until the step is accepted: refused steps do not enter.
    """

    def __init__(self, method: Subspace) -> None:
        self.method = method
        self.reset()

    def reset(self) -> None:
        self.M_DK = torch.zeros_like(self.method.U_DK, dtype=torch.float64)
        self.square_norm = torch.zeros((), dtype=torch.float64, device=self.M_DK.device)
        self.drop()

    def observe(self, G_BTD: torch.Tensor) -> None:
        G_ND = G_BTD.detach().flatten(0, -2).to(self.method.U_DK.dtype)
        with torch.autocast(G_ND.device.type, enabled=False):
            self._M_DK += G_ND.T @ (G_ND @ self.method.U_DK)
        self._square_norm += G_ND.square().sum()

    def captured(self) -> float:
        """Share of this step's gradient energy inside the subspace: tr(U^T M) / ||G||^2 of the step under way."""
        return subspace.captured_energy(self.method.U_DK, self._M_DK, float(self._square_norm))

    def accept(self) -> None:
        self.M_DK += self._M_DK
        self.square_norm += self._square_norm
        self.drop()

    def drop(self) -> None:
        self._M_DK = torch.zeros_like(self.M_DK)
        self._square_norm = torch.zeros_like(self.square_norm)


class Lossy(Dense):
    """Methods "topk" and "quantize": the dense stream, of which the codec loses a part (METHOD.md section 8)."""

    is_plain_llama = False


class LowRank(Dense):
    """Method "lowrank": X -> X U U^T at every cut, U fixed; no static part, so that the rest of X is lost (METHOD.md section 8)."""

    is_plain_llama = False
    U_DK: torch.Tensor

    def __init__(self, spec: ModelSpec, rank: int, seed: int) -> None:
        super().__init__(spec)
        self.wire_width = rank
        self.register_buffer("U_DK", subspace.initial_basis(spec.width, rank, seed).float())

    def width(self, segment: int) -> int:
        return self.embedding_width

    def enter(self, c: torch.Tensor, segment: int) -> torch.Tensor:
        return c if segment == 0 else (c @ self.U_DK.T).to(c.dtype)

    def leave(self, s: torch.Tensor, segment: int) -> torch.Tensor:
        return (s @ self.U_DK).to(s.dtype)


class Projected(LowRank):
    """Method "projected": X <- E[t] + (X - E[t]) U U^T at every cut, blocks free in between (METHOD.md section 5).

    The state is X - E[t] at full width; the stream starts as E[t] + T[t] with T from 0.
    """

    def __init__(self, spec: ModelSpec, compression: CompressionConfig, seed: int) -> None:
        super().__init__(spec, compression.rank, seed)
        self.table = subspace.StaticTable(compression.static, spec.vocab, spec.width, compression.static_scale, seed)

    def static(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.table(tokens, dtype)

    def initial_embedding(self) -> torch.Tensor:
        return torch.zeros(self.table.vocab, self.embedding_width)

    def full_embedding(self, table: torch.Tensor) -> torch.Tensor:
        return self.table(torch.arange(self.table.vocab, device=table.device), table.dtype) + table

    def digest(self) -> str:
        return self.table.digest()


def make_method(compression: CompressionConfig, spec: ModelSpec, segments: int, seed: int) -> Dense:
    """The configured method; `segments` is the model's, `seed` makes basis and static table."""
    if compression.method == "none":
        return Dense(spec)
    if compression.method in ("topk", "quantize"):
        return Lossy(spec)
    if compression.method == "lowrank":
        return LowRank(spec, compression.rank, seed)
    if compression.method == "projected":
        return Projected(spec, compression, seed)
    return Subspace(spec, compression, segments, seed)
