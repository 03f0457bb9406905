"""Number formats of what crosses a cut: `encode` before it, `decode` behind it, both known to autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cast:
    """Coordinates rounded to a floating-point type. The gradient comes back in the same type, so it is rounded alike."""

    dtype: torch.dtype

    def encode(self, c_BTK: torch.Tensor) -> torch.Tensor:
        return c_BTK.to(self.dtype)

    def decode(self, wire_BTK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wire_BTK.to(dtype)

    def wire_bytes(self, width: int) -> int:
        """Bytes per token and direction for `width` numbers."""
        return width * self.dtype.itemsize


def make_codec(wire: str) -> Cast:
    return Cast(getattr(torch, wire))
