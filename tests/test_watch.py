"""Stable rank and energy in the top k against LAPACK's singular values; the watch against torch's AdamW done by hand."""

import json
import math

import pytest
import torch
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe import watch
from thinpipe.config import from_dict
from thinpipe.model import Stage, build_stages
from thinpipe.watch import RankWatch, rank_figures, stream_writers


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_spectrum(values: torch.Tensor, columns: int) -> torch.Tensor:
    """A (len(values), columns) matrix with these singular values."""
    rows = len(values)
    left, right = torch.linalg.qr(gaussian(rows, rows, seed=1)).Q, torch.linalg.qr(gaussian(columns, rows, seed=2)).Q
    return left * values @ right.T


def reference(W: torch.Tensor, k: int) -> tuple[float, float]:
    """By LAPACK's singular values in float64. Through torch: numpy's BLAS starts threads, which crawl where cores are shared."""
    squares = torch.linalg.svdvals(W.double()).square()
    return float(squares.sum() / squares[0]), float(squares[:k].sum() / squares.sum())


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (40, 24), (24, 40), (130, 128)])
@pytest.mark.parametrize("k", [1, 5, 200])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float16, 1e-5)])
def test_exact_path(shape: tuple[int, int], k: int, dtype: torch.dtype, rel: float) -> None:
    W = gaussian(*shape).to(dtype)
    assert rank_figures(W, k) == pytest.approx(reference(W, k), rel=rel)


def test_known_spectra() -> None:
    assert rank_figures(torch.eye(12), 3) == pytest.approx((12, 0.25))
    assert rank_figures(gaussian(20, 1) @ gaussian(1, 30), 1) == pytest.approx((1, 1))
    assert rank_figures(with_spectrum(torch.tensor([2.0, 1, 1, 1, 0]).double(), 9), 2) == pytest.approx((7 / 4, 5 / 7))


@pytest.mark.parametrize(
    ("spectrum", "rel"),
    [
        (lambda i: i**-0.5, 1e-4),
        (lambda i: 1 / i, 1e-4),
        (lambda i: torch.exp(-i / 40), 1e-4),
        (lambda i: 1.0 * (i <= 30), 1e-4),
        (lambda i: 1 + (i == 1) * 9.0, 0.05),
        (None, 0.05),
    ],
    ids=["1/sqrt(i)", "1/i", "exponential", "rank 30", "flat but one", "Gaussian"],
)
@pytest.mark.parametrize("k", [4, 12])
def test_iterative_path(monkeypatch: pytest.MonkeyPatch, spectrum: object, rel: float, k: int) -> None:
    """A small matrix sent down the path of large ones; always stable rank from above, energy from below."""
    monkeypatch.setattr(watch, "EXACT_SIDE", 100)
    i = torch.arange(1, 321, dtype=torch.float64)
    W = gaussian(320, 420) if spectrum is None else with_spectrum(spectrum(i), 420)  # type: ignore[operator]
    exact = reference(W, k)
    for dtype, rounding in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = rank_figures(W.to(dtype), k)
        assert found == pytest.approx(exact, rel=rel)
        assert found[0] >= exact[0] * (1 - rounding) and found[1] <= exact[1] * (1 + rounding)
        assert found == rank_figures(W.to(dtype), k)  # the same seed every time
    assert rank_figures(W.T, k) == pytest.approx(rank_figures(W, k), rel=1e-12)


def test_large_float32_sums() -> None:
    """A plain float32 sum over millions of squares would be off by 1e-4."""
    W = gaussian(200, 12000).float()
    total = float(W.double().square().sum())
    largest = float(torch.linalg.matrix_norm(W.double(), 2)) ** 2
    assert rank_figures(W, 1)[0] == pytest.approx(total / largest, rel=1e-6)


matrices = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6))


@settings(deadline=None, max_examples=60)
@given(matrices, st.integers(1, 15), st.floats(-15, 15), st.booleans())
def test_bounds_and_scale(sizes: tuple[int, int, int, int], k: int, exponent: float, negative: bool) -> None:
    rows, inner, columns, seed = sizes
    W = gaussian(rows, inner, seed=seed) @ gaussian(inner, columns, seed=seed + 1)
    rank = min(rows, inner, columns)
    stable, energy = rank_figures(W, k)
    assert 1 <= stable <= rank * (1 + 1e-9) and 1 / stable * (1 - 1e-9) <= energy <= 1
    assert energy == pytest.approx(1) or k < rank
    scale = 10**exponent * (-1 if negative else 1)
    assert rank_figures((W * scale).float(), k) == pytest.approx((stable, energy), rel=1e-4)


def test_constrained_matrices_need_no_materialising() -> None:
    U_DK = torch.linalg.qr(gaussian(64, 8)).Q
    weight_KI = gaussian(8, 40, seed=3)
    assert rank_figures(weight_KI, 3) == pytest.approx(rank_figures(U_DK @ weight_KI, 3), rel=1e-12)


@pytest.mark.parametrize("W", [torch.zeros(3, 4), torch.tensor([[1.0, math.nan]]), torch.tensor([[math.inf, 1.0]]), torch.zeros(0, 3)])
def test_no_figure(W: torch.Tensor) -> None:
    assert all(map(math.isnan, rank_figures(W, 2)))


@pytest.mark.parametrize(("W", "k"), [(torch.ones(3), 1), (torch.ones(2, 2, 2), 1), (torch.ones(2, 2), 0)])
def test_bad_input(W: torch.Tensor, k: int) -> None:
    with pytest.raises(ValueError, match="a matrix and k >= 1"):
        rank_figures(W, k)


def small_stage(method: str) -> Stage:
    groups = {"model": tiny()["model"] | {"layers": 2}, "compression": {"rank": 8, "segments": 2, "method": method}}
    (stage,) = build_stages(from_dict(tiny(**groups)), 300)
    return stage


def backward(stage: Stage, seed: int) -> None:
    stage.zero_grad()
    tokens_BS = torch.randint(300, (4, 17), generator=torch.Generator().manual_seed(seed))
    stage(None, tokens_BS).backward()


@pytest.mark.parametrize("method", ["none", "subspace"])
def test_stream_writers(method: str) -> None:
    """They are exactly the matrices whose output is added to the stream: by name, and by the role where there is one."""
    stage = small_stage(method)
    found = dict(stream_writers(stage.layers))
    parameters = {name: (parameter, role) for name, parameter, role in stage.roles()}
    assert list(found) == [f"layers.{i}.{writer}.weight" for i in range(2) for writer in ("attn.o", "mlp.down")]
    assert all(parameters[name][0] is weight for name, weight in found.items())
    constrained = {name for name, (_, role) in parameters.items() if role.kind == "hidden" and role.coordinates is not None}
    assert constrained == ({name for name in found if name.startswith("layers.0.")} if method == "subspace" else set())


@pytest.mark.parametrize("method", ["none", "subspace"])
def test_watch_against_adamw_by_hand(method: str) -> None:
    stage = small_stage(method)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(stage.parameters(), **options)  # type: ignore[arg-type]
    ranks, k = RankWatch(stream_writers(stage.layers), 3), 3
    first = {name: [torch.zeros_like(w).double() for _ in "mv"] for name, w in ranks.matrices.items()}
    for step in (1, 2, 3):
        backward(stage, step)
        expected = {}
        for name, w in ranks.matrices.items():
            assert w.grad is not None
            old, g, (m, v) = w.detach().double(), w.grad.double(), first[name]
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            root = (v / (1 - 0.95**step)).sqrt() + 1e-8
            update = -0.01 * 0.1 * old - 0.01 * m / (1 - 0.9**step) / root
            first[name] = [m, v]
            expected[name] = {"weight": old + update, "gradient": g, "update": update}
        ranks.before_step()
        optimizer.step()
        found = ranks.after_step()
        assert json.loads(json.dumps(found)) == found and found.keys() == expected.keys()
        for name, matrices in expected.items():
            assert found[name].keys() == matrices.keys()
            for kind, matrix in matrices.items():
                assert found[name][kind] == pytest.approx(reference(matrix, k), rel=1e-3, abs=1e-5), (name, kind)
    widths = {name: weight.shape[0] for name, weight in ranks.matrices.items()}
    assert widths["layers.0.mlp.down.weight"] == (8 if method == "subspace" else 32)


def test_refused_steps_and_missing_gradients() -> None:
    stage = small_stage("none")
    ranks = RankWatch(stream_writers(stage.layers), 4)
    backward(stage, 0)
    ranks.before_step()  # refused: the step isn't taken
    weights = [weight for _, weight in stream_writers(stage.layers)]
    with torch.no_grad():
        for weight in weights:
            weight.add_(1.0)
    weights[0].grad = None
    ranks.before_step()
    with torch.no_grad():
        weights[1][0, 0] += 1.0
    found = list(ranks.after_step().values())
    assert found[0]["gradient"] == found[0]["update"] == [None, None]
    assert found[1]["update"] == [1.0, 1.0]
    with pytest.raises(AssertionError, match="before_step"):
        ranks.after_step()
