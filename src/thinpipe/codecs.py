"""What crosses a cut as bytes: `encode` before it, `decode` behind it, and the same for the gradient that comes back.

Legend: B sequences, T tokens, W numbers per token, K of them kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .config import CompressionConfig

BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
_STEP = torch.bfloat16

# Steps of the mid-rise quantiser with the least squared error for a Gaussian, in units of its mean |x| (Max 1960, table 2).
_BEST_STEP = {1: 2.0, 2: 0.9957 / 0.7979}


class Codec(Protocol):
    """How W numbers per token travel, forward and backward; pure functions.

    Whatever is rounded or left out, a token with a number that is not finite arrives as one, so that the step is refused.
    """

    @property
    def wire_bytes(self) -> int:
        """Bytes per token and direction."""

    def encode(self, c_BTW: torch.Tensor) -> torch.Tensor:
        """The bytes that travel, uint8 (B, T, wire_bytes)."""

    def decode(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the other side makes of them, (B, T, W)."""

    def places(self, wire: torch.Tensor) -> torch.Tensor | None:
        """Which numbers the forward's bytes hold, int64 (B, T, K); None: all. Only they have a gradient."""
        return None

    def encode_gradient(self, g_BTW: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """The gradient's bytes, uint8 (B, T, wire_bytes), at the forward's `places`."""

    def decode_gradient(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the other side makes of them, (B, T, W)."""


@dataclass(frozen=True)
class Cast(Codec):
    """W numbers rounded to a floating-point type, gradients alike."""

    dtype: torch.dtype
    width: int

    @property
    def wire_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def encode(self, c_BTW: torch.Tensor) -> torch.Tensor:
        return _bytes(c_BTW.to(self.dtype))

    def decode(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wire.view(self.dtype).to(dtype)

    def encode_gradient(self, g_BTW: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        return self.encode(g_BTW)

    decode_gradient = decode


@dataclass(frozen=True)
class Integers(Codec):
    """Uniform quantisation: 2^bits levels half a step off zero, (q + 1/2) step, one bfloat16 step per token, packed.

    Forward rounds to the nearest level; the gradient passes as if nothing had been rounded. At 4 and 8 bits the levels span
    the token's largest number; at 1 and 2 that would be far too coarse, so nearest rounding clips. The gradient is rounded up
    or down at random so that its mean is right (the levels then always span it), or to the nearest.

    The random numbers are a hash of position and step: nothing is drawn, so they are the same for any number of stages and
    any schedule. Since the step has 8 significant bits, gradients that differ in their last bits are rounded alike.

    Args:
        width: W, which the packed bytes alone don't tell.
        stochastic: how gradients are rounded.
    """

    bits: int
    width: int
    stochastic: bool = True

    @property
    def wire_bytes(self) -> int:
        return _STEP.itemsize + -(-self.width * self.bits // 8)

    def encode(self, c_BTW: torch.Tensor) -> torch.Tensor:
        c_BTW = c_BTW.float()
        if self.bits in _BEST_STEP:
            step = (_BEST_STEP[self.bits] * c_BTW.abs().mean(-1, keepdim=True)).to(_STEP)
        else:
            step = self._spanning_step(c_BTW)
        return self._quantise(c_BTW, step, 0.0)

    def decode(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        step = _part(wire[..., : _STEP.itemsize]).view(_STEP).float()
        # A step that is not finite makes every number of its token so: no level is 0.
        return ((self._unpack(wire[..., _STEP.itemsize :]) + (0.5 - self._half)) * step).to(dtype)

    def encode_gradient(self, g_BTW: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        if not self.stochastic:
            return self.encode(g_BTW)
        g_BTW = g_BTW.float()
        step = self._spanning_step(g_BTW)
        return self._quantise(g_BTW, step, _noise(step, self.width) - 0.5)

    decode_gradient = decode

    @property
    def _half(self) -> int:
        return 2 ** (self.bits - 1)

    def _spanning_step(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """The step whose outermost levels reach the token's largest number, (B, T, 1); bfloat16 can't round it below that."""
        return (x_BTW.abs().amax(-1, keepdim=True) * ((1 + 2**-7) / (self._half - 0.5))).to(_STEP)

    def _quantise(self, x_BTW: torch.Tensor, step: torch.Tensor, shift: torch.Tensor | float) -> torch.Tensor:
        """Bytes of floor(x / step + shift), within the levels; a token of zeros has step 0 and any level."""
        levels = (x_BTW / step.float() + shift).floor().nan_to_num(0.0).clamp(-self._half, self._half - 1)
        return torch.cat((_bytes(step), self._pack((levels + self._half).to(torch.uint8))), dim=-1)

    def _pack(self, levels_BTW: torch.Tensor) -> torch.Tensor:
        per_byte = 8 // self.bits
        padded = torch.nn.functional.pad(levels_BTW, (0, -self.width % per_byte)).unflatten(-1, (-1, per_byte))
        packed = padded[..., 0]
        for place in range(1, per_byte):
            packed = packed | padded[..., place] << (place * self.bits)
        return packed

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=packed.device)
        return ((packed[..., None] >> shifts) & (2**self.bits - 1)).flatten(-2)[..., : self.width].float()


@dataclass(frozen=True)
class TopK(Codec):
    """The K largest numbers of a token by magnitude and their places (uint16); the rest arrives as 0.

    The gradient keeps to the forward's places: that is this function's derivative, while K places of its own choice don't
    train (METHOD.md section 10). Its bytes name the places once more, though both sides know them: one size per cut.

    Args:
        width: W.
        inner: how the K values travel; its width is K.
    """

    width: int
    inner: Cast | Integers

    @property
    def keep(self) -> int:
        return self.inner.width

    @property
    def wire_bytes(self) -> int:
        return self.inner.wire_bytes + 2 * self.keep

    def encode(self, c_BTW: torch.Tensor) -> torch.Tensor:
        places = c_BTW.abs().topk(self.keep, dim=-1).indices
        return torch.cat((self.inner.encode(c_BTW.gather(-1, places)), self._bytes_of(places)), dim=-1)

    def decode(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._spread(self.inner.decode(_part(wire[..., : -2 * self.keep]), dtype), self.places(wire))

    def places(self, wire: torch.Tensor) -> torch.Tensor:
        return _part(wire[..., -2 * self.keep :]).view(torch.int16).to(torch.int64) & 0xFFFF

    def encode_gradient(self, g_BTW: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        assert places is not None
        return torch.cat((self.inner.encode_gradient(g_BTW.gather(-1, places), None), self._bytes_of(places)), dim=-1)

    def decode_gradient(self, wire: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._spread(self.inner.decode_gradient(_part(wire[..., : -2 * self.keep]), dtype), self.places(wire))

    def _bytes_of(self, places: torch.Tensor) -> torch.Tensor:
        assert self.width <= 2**16
        return _bytes(places.to(torch.int16))

    def _spread(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(*values.shape[:-1], self.width).scatter(-1, places, values)


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def _part(wire: torch.Tensor) -> torch.Tensor:
    """A slice of a message as a message: a number in it needn't lie at a multiple of its size before."""
    return wire.clone(memory_format=torch.contiguous_format)


def _noise(step: torch.Tensor, width: int) -> torch.Tensor:
    """Numbers in [0, 1), float32 (B, T, W): a hash of the token's place in the micro-batch, its step (B, T, 1) and W's index."""
    place = torch.arange(step.numel(), dtype=torch.int32, device=step.device).view(step.shape)
    column = torch.arange(width, dtype=torch.int32, device=step.device)
    # Weyl sequences: multiples of an odd constant, 2^32 over the golden ratio, modulo 2^32.
    words = _mix(_mix(place * _WEYL + step.view(torch.int16)) + column * _WEYL)
    return (words >> 8 & 0xFFFFFF) * 2.0**-24


_WEYL = 0x9E3779B9 - 2**32


def _mix(x: torch.Tensor) -> torch.Tensor:
    """An invertible hash of int32, each output bit depending on all of the input (C. Wellons' lowbias32); products wrap."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, c_BTW: torch.Tensor, codec: Codec) -> torch.Tensor:
        wire = codec.encode(c_BTW)
        ctx.codec, ctx.places = codec, codec.places(wire)
        return codec.decode(wire, c_BTW.dtype)

    @staticmethod
    def backward(ctx: Any, g_BTW: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.codec.decode_gradient(ctx.codec.encode_gradient(g_BTW, ctx.places), g_BTW.dtype), None


def cross(c_BTW: torch.Tensor, codec: Codec) -> torch.Tensor:
    """A cut inside a stage: what a boundary would do to c and to its gradient, so that the model doesn't depend on the stages."""
    crossed: torch.Tensor = _Cut.apply(c_BTW, codec)
    return crossed


def make_codec(compression: CompressionConfig, width: int, wire: str | None = None) -> Codec:
    """The configured codec for the `width` numbers of a method's cut, with `wire` in place of compression.wire if given."""
    wire = wire or compression.wire
    keep = compression.rank if compression.method == "topk" else width
    if wire in BITS:
        codec: Cast | Integers = Integers(BITS[wire], keep, compression.rounding == "stochastic")
    else:
        codec = Cast(getattr(torch, wire), keep)
    return TopK(width, codec) if compression.method == "topk" else codec
