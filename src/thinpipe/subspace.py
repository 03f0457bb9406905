"""The subspace and the static embedding: pure functions on tensors (METHOD.md sections 3 and 7).

Legend: B sequences, T tokens, V vocabulary, D stream width d, K rank k. U_DK is an orthonormal basis of the subspace S,
c_BTK coordinates in it. Mathematics is in row vectors, y = x W with W (in, out); torch.nn.Linear stores W transposed.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

# Separate streams of the Philox generator, so that no two tables share words.
_STATIC, _LEFT, _RIGHT, _BASIS = 1, 2, 3, 4
_ROWS_AT_ONCE = 4096


def _words(seed: int, stream: int, start: int, count: int) -> np.ndarray:
    """`count` raw 64-bit Philox words from position `start` (a multiple of 4): the same on every machine."""
    generator = np.random.Philox(key=[seed, stream])
    return generator.advance(start // 4).random_raw(count)


def _gaussian(seed: int, stream: int, start: int, count: int) -> torch.Tensor:
    """`count` numbers of mean 0 and variance 1, float64: each the sum of twelve uniform 16-bit integers.

    Integer sums keep the table bit-equal over machines, which a logarithm or cosine of the C library doesn't promise.
    `start` and `count` are multiples of 4.
    """
    parts = _words(seed, stream, 3 * start, 3 * count).view(np.uint16).reshape(count, 12)
    total = parts.astype(np.int64).sum(axis=1) - 6 * 65535
    # Variance of a uniform integer on [0, 65535] is (65536^2 - 1) / 12, so twelve of them have 65536^2 - 1.
    return torch.from_numpy(total / math.sqrt(65536.0**2 - 1))


def _signs(seed: int, stream: int, rows: int, width: int) -> torch.Tensor:
    """A (rows, width) table of -1 and 1, bfloat16."""
    words = -(-rows * width // 64)
    bits = np.unpackbits(_words(seed, stream, 0, words).astype("<u8").view(np.uint8), bitorder="little")[: rows * width]
    return torch.from_numpy(bits.reshape(rows, width)).to(torch.bfloat16) * 2 - 1


class StaticTable(torch.nn.Module):
    """The static embedding E (V, d): known to every stage, never trained, sent or saved (METHOD.md section 7).

    Args:
        kind: "gaussian" holds E itself, V x d in bfloat16; "factored" holds two tables of random signs with 2 sqrt(V)
            rows, E[t] = a[t // m] * b[t mod m], m = ceil(sqrt(V)).
        scale: standard deviation of E's entries.
        seed: every stage makes the same table from it.
    """

    a_RD: torch.Tensor
    b_RD: torch.Tensor

    def __init__(self, kind: str, vocab: int, width: int, scale: float, seed: int) -> None:
        super().__init__()
        self.vocab, self.width, self.scale = vocab, width, scale
        self.factored = kind == "factored"
        self.rows = math.isqrt(vocab - 1) + 1 if self.factored else vocab
        if self.factored:
            self.register_buffer("a_RD", _signs(seed, _LEFT, -(-vocab // self.rows), width), persistent=False)
            self.register_buffer("b_RD", _signs(seed, _RIGHT, self.rows, width), persistent=False)
        else:
            stride = -(-width // 4) * 4  # whole Philox blocks per row, so that rows can be made in pieces
            table = torch.empty(vocab, width, dtype=torch.bfloat16)
            for first in range(0, vocab, _ROWS_AT_ONCE):
                rows = min(_ROWS_AT_ONCE, vocab - first)
                table[first : first + rows] = _gaussian(seed, _STATIC, first * stride, rows * stride).view(rows, stride)[:, :width]
            self.register_buffer("a_RD", table, persistent=False)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        # The table's values are fixed in bfloat16; module.to(dtype) may move it, not widen it.
        return super()._apply(lambda t: fn(t).to(t.dtype), recurse)

    def forward(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows E[t] (..., D) in `dtype` for integer ids (...)."""
        rows = self.a_RD[tokens // self.rows] * self.b_RD[tokens % self.rows] if self.factored else self.a_RD[tokens]
        return rows.to(dtype) * self.scale

    def digest(self) -> str:
        """sha256 of the values: equal on all stages of a run."""
        digest = hashlib.sha256(f"{self.vocab} {self.width} {self.scale!r}".encode())
        for table in self.buffers():
            digest.update(table.cpu().contiguous().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()


def orthonormal(x_DK: torch.Tensor) -> torch.Tensor:
    """qf(x): the Q of the QR decomposition whose R has a positive diagonal, which makes it unique (METHOD.md section 3)."""
    q_DK, r_KK = torch.linalg.qr(x_DK)
    return q_DK * torch.where(r_KK.diagonal() < 0, -1.0, 1.0).to(q_DK.dtype)


def initial_basis(width: int, rank: int, seed: int) -> torch.Tensor:
    """U_0 (D, K), float64: the Q of a Gaussian made from the seed."""
    stride = -(-rank // 4) * 4
    return orthonormal(_gaussian(seed, _BASIS, 0, width * stride).view(width, stride)[:, :rank])


def move(U_DK: torch.Tensor, M_DK: torch.Tensor, step: float) -> torch.Tensor:
    """One Riemannian descent step of L(U) = ||G - G U U^T||^2 on the Grassmann manifold (METHOD.md section 3).

        U' = qf(U + 2 eta (I - U U^T) M / lambda_max(U^T M))

    Args:
        U_DK: orthonormal basis.
        M_DK: the statistic G^T (G U) of gradients G (tokens, D); its scale cancels.
        step: eta in (0, 0.5].

    Returns U' (D, K) in float64. A statistic of zeros leaves the basis as it is.
    """
    U_DK, M_DK = U_DK.double(), M_DK.double()
    # U stored in float32 is orthonormal to 1e-7; without this an error would live on in U' through the projection.
    U_DK = orthonormal(U_DK)
    largest = torch.linalg.eigvalsh(U_DK.T @ M_DK)[-1]
    if not largest > 0:
        return U_DK
    return orthonormal(U_DK + 2 * step * (M_DK - U_DK @ (U_DK.T @ M_DK)) / largest)


def captured_energy(U_DK: torch.Tensor, M_DK: torch.Tensor, square_norm: float) -> float:
    """tr(U^T M) / ||G||^2: the share of the gradients' energy inside the subspace."""
    return float((U_DK.double() * M_DK.double()).sum()) / square_norm if square_norm > 0 else math.nan


def principal_angles(old_DK: torch.Tensor, new_DK: torch.Tensor) -> torch.Tensor:
    """The K angles between two subspaces, in radians, rising."""
    cosines = torch.linalg.svdvals(old_DK.double().T @ new_DK.double()).clamp(max=1.0)
    return cosines.arccos()


def transport(old_DK: torch.Tensor, new_DK: torch.Tensor) -> torch.Tensor:
    """T (K, K) = U^T U': row-vector coordinates c in the old basis become c T in the new one (METHOD.md section 3)."""
    return old_DK.double().T @ new_DK.double()
