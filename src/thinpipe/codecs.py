"""What crosses a cut as bytes: `encode` before it, `decode` behind it, and the same for the gradient that comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Codec(Protocol):
    """How W numbers per token travel, forward and backward; pure functions."""

    def wire_bytes(self, width: int) -> int:
        """Bytes per token and direction for `width` numbers."""

    def encode(self, c_BTW: torch.Tensor) -> torch.Tensor:
        """The bytes that travel, uint8 (B, T, wire_bytes(W))."""

    def decode(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the other side makes of them, (B, T, W)."""

    def encode_gradient(self, g_BTW: torch.Tensor) -> torch.Tensor:
        """The gradient's bytes, uint8 (B, T, wire_bytes(W))."""

    def decode_gradient(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the other side makes of them, (B, T, W)."""


@dataclass(frozen=True)
class Cast:
    """Numbers rounded to a floating-point type, gradients alike."""

    dtype: torch.dtype

    def wire_bytes(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode(self, c_BTW: torch.Tensor) -> torch.Tensor:
        return c_BTW.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wire.view(self.dtype).to(dtype)

    encode_gradient = encode
    decode_gradient = decode


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, c_BTW: torch.Tensor, codec: Codec) -> torch.Tensor:
        ctx.codec = codec
        return codec.decode(codec.encode(c_BTW), c_BTW.dtype)

    @staticmethod
    def backward(ctx: Any, g_BTW: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.codec.decode_gradient(ctx.codec.encode_gradient(g_BTW), g_BTW.dtype), None


def cross(c_BTW: torch.Tensor, codec: Codec) -> torch.Tensor:
    """A cut inside a stage: what a boundary would do to c and to its gradient, so that the model doesn't depend on the stages."""
    crossed: torch.Tensor = _Cut.apply(c_BTW, codec)
    return crossed


def make_codec(wire: str) -> Codec:
    return Cast(getattr(torch, wire))
