"""What a cut does to numbers: codes by hand, bounds, means, and a message of exactly the bytes that are counted."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe import planner
from thinpipe.codecs import BITS, Cast, Codec, Integers, TopK, cross, make_codec
from thinpipe.config import CompressionConfig, Config, from_dict
from thinpipe.method import LowRank, make_method
from thinpipe.model import build_stages

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
WIRES = ("float32", "bfloat16", *BITS)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def there(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(x), x.dtype)


def back(codec: Codec, g: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
    return codec.decode_gradient(codec.encode_gradient(g, places), g.dtype)


def step_of(wire: torch.Tensor) -> torch.Tensor:
    return wire[..., :2].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()


def by_hand(wire: torch.Tensor, bits: int, width: int) -> np.ndarray:
    """One token's message read bit by bit."""
    content = wire.numpy().tobytes()
    step = np.frombuffer(b"\0\0" + content[:2], dtype="<f4")[0]  # a bfloat16 is the upper half of a float32
    stream = "".join(f"{byte:08b}"[::-1] for byte in content[2:])
    codes = [int(stream[i * bits : (i + 1) * bits][::-1], 2) for i in range(width)]
    return np.array([(code - 2**bits / 2 + 0.5) * step for code in codes])


@given(
    st.sampled_from(WIRES), st.sampled_from(["none", "subspace", "topk", "lowrank"]), st.integers(1, 40), st.integers(1, 40), st.booleans()
)
def test_bytes_are_those_that_the_planner_counts(wire: str, method: str, width: int, rank: int, stochastic: bool) -> None:
    rank = min(rank, width)
    compression = CompressionConfig(method=method, wire=wire, rank=rank, rounding="stochastic" if stochastic else "nearest")  # type: ignore[arg-type]
    crossing = width if method in ("none", "topk") else rank
    codec = make_codec(compression, crossing)
    x = random(2, 3, crossing, seed=width)
    message = codec.encode(x)
    gradient = codec.encode_gradient(x, codec.places(message))
    expected = planner.wire_bytes(compression, width)
    assert codec.wire_bytes == expected
    for sent in (message, gradient):
        assert sent.dtype == torch.uint8 and sent.shape == (2, 3, expected)
    assert codec.decode(message, torch.float64).shape == codec.decode_gradient(gradient, torch.float64).shape == x.shape
    # A message is bytes alone: it may lie anywhere.
    moved = torch.cat((torch.zeros(1, dtype=torch.uint8), message[0, 0]))[1:]
    if wire in BITS or method == "topk":
        assert torch.equal(codec.decode(moved[None, None], x.dtype)[0, 0], codec.decode(message, x.dtype)[0, 0])


def test_bytes_of_the_formats_by_arithmetic() -> None:
    def count(**what) -> int:
        return planner.wire_bytes(CompressionConfig(**what), 128)

    assert count(method="subspace", rank=16, wire="int4") == 2 + 8 and count(method="subspace", rank=15, wire="int4") == 2 + 8
    assert count(method="none", wire="int8") == count(method="quantize", wire="int8") == 2 + 128
    assert count(method="quantize", wire="int2") == 2 + 32 and count(method="quantize", wire="int1") == 2 + 16
    assert count(method="topk", rank=4) == 4 * (2 + 2) and count(method="topk", rank=6, wire="int4") == 2 + 3 + 12
    assert count(method="lowrank", rank=8) == count(method="subspace", rank=8) == 16


@pytest.mark.parametrize("bits", BITS.values())
@given(st.lists(NUMBERS, min_size=1, max_size=40), st.booleans())
def test_integers_are_read_as_they_are_written(bits: int, numbers: list[float], stochastic: bool) -> None:
    x = torch.tensor([[numbers]])
    codec = Integers(bits, len(numbers), stochastic)
    for wire, seen in ((codec.encode(x), there(codec, x)), (codec.encode_gradient(x, None), back(codec, x))):
        assert np.array_equal(seen[0, 0].numpy(), by_hand(wire[0, 0], bits, len(numbers)).astype(np.float32))


@pytest.mark.parametrize("bits", BITS.values())
@given(numbers=st.lists(NUMBERS, min_size=1, max_size=40))
def test_error_bounds(bits: int, numbers: list[float]) -> None:
    x = torch.tensor([[numbers]])
    codec = Integers(bits, len(numbers))
    largest = float(x.abs().max())
    step = step_of(codec.encode_gradient(x, None))
    assert step <= largest / (2 ** (bits - 1) - 0.5) * 1.02, "no coarser than it must be"
    # One of the two levels next to the number.
    assert ((back(codec, x) - x).abs() <= step * (1 + 1e-5)).all()
    nearest = there(codec, x)
    if bits >= 4:
        assert ((nearest - x).abs() <= step / 2 * (1 + 1e-5)).all()
    else:  # what doesn't fit is cut off, towards 0
        inside = x.abs() <= step_of(codec.encode(x)) * 2 ** (bits - 1)
        assert ((nearest - x).abs() <= step_of(codec.encode(x)) / 2 * (1 + 1e-5))[inside].all()
        assert (nearest.abs() <= x.abs())[~inside].all()
    assert torch.equal(back(replace(codec, stochastic=False), x), nearest)


@pytest.mark.parametrize("bits", [1, 2])
def test_few_bits_clip_because_that_is_better(bits: int) -> None:
    """Least squares: Max's table for a Gaussian (distortion 0.3634 at 2 levels, 0.1188 at 4), and far below levels that span everything."""
    x = random(1, 2000, 256)
    codec = Integers(bits, 256)
    error = float((there(codec, x) - x).square().sum() / x.square().sum())
    assert error == pytest.approx({1: 0.3634, 2: 0.1188}[bits], rel=0.02)
    spanning = 2 * x.abs().amax(-1, keepdim=True) / (2**bits - 1)
    spanned = ((x / spanning).floor().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 0.5) * spanning
    assert error < 0.5 * float((spanned - x).square().sum() / x.square().sum())


@pytest.mark.parametrize("bits", BITS.values())
def test_stochastic_rounding_is_right_on_average(bits: int) -> None:
    codec = Integers(bits, 24)
    row = random(24, seed=bits)
    copies = row.expand(64, 512, 24).contiguous()  # the same numbers at many places
    seen = back(codec, copies)
    step = float(step_of(codec.encode_gradient(copies, None)).max())
    within = 5 * step / 2 / math.sqrt(64 * 512)  # five standard deviations at most
    assert ((seen.double().mean((0, 1)) - row).abs() <= within).all()
    assert len(seen.flatten(0, 1).unique(dim=0)) > min(2**bits, 1000), "places draw different numbers"
    # The same over different numbers: no error on average, none that follows the numbers.
    x = random(64, 512, 24, seed=9)
    steps = step_of(codec.encode_gradient(x, None))
    error = ((back(codec, x) - x) / steps).double()
    assert float(error.mean().abs()) < 5 * 0.5 / math.sqrt(error.numel())
    assert float((error * x).mean().abs()) < 5 * 0.5 / math.sqrt(error.numel()) * 1.1
    # Rounding to the nearest fails exactly this.
    assert ((there(codec, copies).double().mean((0, 1)) - row).abs() > within).any()


def test_random_numbers_are_uniform_and_unrelated() -> None:
    """Seen through the codec: with one bit a number x of step s goes up with probability 1/2 + x/s."""
    codec = Integers(1, 64)
    g = torch.full((32, 64, 64), 0.0)
    g[..., 0] = 1.0  # sets the step; the others are fair coins
    coins = (back(codec, g)[..., 1:] > 0).double() * 2 - 1
    n = coins.numel()
    assert float(coins.mean().abs()) < 5 / math.sqrt(n)
    for shifted in (coins[:, :, 1:] * coins[:, :, :-1], coins[:, 1:] * coins[:, :-1], coins[1:] * coins[:-1]):
        assert float(shifted.mean().abs()) < 5 / math.sqrt(shifted.numel())
    assert float(coins.sum(-1).square().mean()) == pytest.approx(63, rel=0.15) and float(coins.sum((0, 1)).square().mean()) < 2048 * 2
    assert float((back(codec, 1.1 * g)[..., 1:].sign() * coins).mean().abs()) < 5 / math.sqrt(n), "another step, other numbers"


@pytest.mark.parametrize("bits", BITS.values())
def test_rounding_depends_on_the_numbers_alone_and_not_on_their_last_bits(bits: int) -> None:
    codec, g = Integers(bits, 16), random(8, 128, 16)
    state = torch.get_rng_state()
    first = back(codec, g)
    assert torch.equal(first, back(codec, g)) and torch.equal(state, torch.get_rng_state())
    nearly = back(codec, g * (1 + 1e-6 * random(8, 128, 16, seed=1)))
    changed = ((nearly - first).abs() > 0.02 * first.abs()).double().mean()
    assert changed < 2e-3  # a step at the edge between two bfloat16 numbers draws anew


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("method", ["none", "topk"])
def test_zeros_huge_numbers_and_what_is_not_finite(wire: str, method: str) -> None:
    codec = make_codec(CompressionConfig(method=method, wire=wire, rank=3), 8)  # type: ignore[arg-type]
    x = random(1, 7, 8)
    x[0, 1] = 0
    x[0, 2, 3] = math.nan
    x[0, 3, 5] = math.inf
    x[0, 4, 0] = -math.inf
    x[0, 5] *= 1e37
    x[0, 6] *= 1e-37
    message = codec.encode(x)
    for seen in (codec.decode(message, x.dtype), back(codec, x, codec.places(message))):
        assert (seen[0, 1] == 0).all()
        assert seen[0, [0, 1, 5, 6]].isfinite().all()
        assert all(not row.isfinite().all() for row in seen[0, 2:5])
        if wire in BITS and method == "none":
            assert not seen[0, 2:5].isfinite().any()


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
def test_top_k_against_a_sort(width: int, keep: int, seed: int) -> None:
    keep = min(keep, width)
    x, g = random(2, 3, width, seed=seed), random(2, 3, width, seed=seed + 1)
    codec = TopK(width, Cast(torch.float32, keep))
    message = codec.encode(x)
    for row, seen, gradient, g_row in zip(
        x.flatten(0, 1).numpy(),
        codec.decode(message, x.dtype).flatten(0, 1).numpy(),
        back(codec, g, codec.places(message)).flatten(0, 1).numpy(),
        g.flatten(0, 1).numpy(),
        strict=True,
    ):
        kept = np.zeros(width, bool)
        kept[np.argsort(-np.abs(row))[:keep]] = True
        assert np.array_equal(seen, np.where(kept, row, 0)) and np.array_equal(gradient, np.where(kept, g_row, 0))


def test_top_k_at_the_widest() -> None:
    x = torch.zeros(1, 1, 2**16)
    x[..., -2:], x[..., 40_000] = torch.tensor([3.0, -4.0]), 5.0
    assert torch.equal(there(TopK(2**16, Cast(torch.float32, 3)), x), x)


def test_a_cut_is_the_codec_both_ways() -> None:
    x, g = random(2, 5, 16).requires_grad_(), random(2, 5, 16, seed=1)
    for wire in WIRES:
        for method in ("none", "topk"):
            codec = make_codec(CompressionConfig(method=method, wire=wire, rank=6), 16)  # type: ignore[arg-type]
            x.grad = None
            crossed = cross(x, codec)
            crossed.backward(g)
            assert torch.equal(crossed, there(codec, x.detach()))
            assert torch.equal(x.grad, back(codec, g, codec.places(codec.encode(x.detach()))))  # type: ignore[arg-type]
    # Top-k's gradient is its derivative.
    y = x.detach().double().requires_grad_()
    exact = cross(y, TopK(16, Cast(torch.float64, 6)))
    exact.backward(g.double())
    assert torch.equal(y.grad, torch.where(exact != 0, g.double(), 0.0))  # type: ignore[arg-type]


def config(**compression: object) -> Config:
    return from_dict(tiny(compression={"segments": 8, **compression})).check()


def test_low_rank_projects_at_every_cut() -> None:
    c = config(method="lowrank", rank=8)
    method = make_method(c.compression, c.spec(300), 8, 0)
    assert isinstance(method, LowRank)
    U, x = method.U_DK, random(2, 5, 32)
    assert torch.allclose(U.T @ U, torch.eye(8), atol=1e-6)
    assert method.leave(x, 0).shape == (2, 5, 8)
    assert torch.allclose(method.enter(method.leave(x, 0), 1), x @ U @ U.T, atol=1e-6)
    assert method.enter(x, 0) is x, "the embedding doesn't cross"


@pytest.mark.parametrize(
    ("compression", "tolerance"),
    [
        ({"method": "lowrank", "rank": 32, "wire": "float32"}, 1e-5),  # k = d turns the stream and loses nothing
        ({"method": "topk", "rank": 32, "wire": "float32"}, 0),  # nothing is left out
        ({"method": "quantize", "wire": "int8"}, 2e-2),
        ({"method": "none", "wire": "int8"}, 2e-2),
    ],
)
def test_lossy_methods_are_dense_where_they_lose_nothing(compression: dict, tolerance: float) -> None:
    tokens = torch.randint(0, 300, (4, 17), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for what in (compression, {"method": "none", "wire": "float32"}):
        (stage,) = build_stages(config(**what), 300)
        loss = stage(None, tokens)
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p, _ in stage.roles()})
    assert losses[0] == pytest.approx(losses[1], rel=max(tolerance, 1e-12))
    for name, exact in gradients[1].items():
        assert float((gradients[0][name] - exact).norm()) <= max(5 * tolerance, 1e-12) * float(exact.norm()), name


def test_only_plain_models_export() -> None:
    plain = {}
    for method in ("none", "subspace", "topk", "quantize", "lowrank"):
        c = config(method=method, rank=4, wire="int4")
        plain[method] = make_method(c.compression, c.spec(300), 8, 0).is_plain_llama
    assert plain == {"none": True, "subspace": True, "topk": False, "quantize": False, "lowrank": False}
