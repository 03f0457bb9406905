"""Basis, static table and the moving subspace against numpy in float64."""

import itertools

import numpy as np
import pytest
import torch

from thinpipe import subspace
from thinpipe.subspace import StaticTable


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gaussian_numbers_are_standard_and_can_be_made_in_pieces() -> None:
    numbers = subspace._gaussian(seed=3, stream=1, start=0, count=200_000)
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.var() - 1) < 0.01
    assert abs((numbers**4).mean() - 2.9) < 0.05  # kurtosis of a sum of twelve uniforms: 3 - 1.2 / 12
    assert torch.equal(subspace._gaussian(3, 1, 4000, 100), numbers[4000:4100])


@pytest.mark.parametrize("kind", ["gaussian", "factored"])
def test_static_table_is_a_function_of_the_seed(kind: str) -> None:
    table, same, other = (StaticTable(kind, 1000, 96, 0.5, seed) for seed in (7, 7, 8))
    ids = torch.arange(1000)
    rows = table(ids, torch.float64)
    assert torch.equal(rows, same(ids, torch.float64))
    assert table.digest() == same.digest() != other.digest()
    assert rows.std().item() == pytest.approx(0.5, rel=0.02)
    # Nearly orthogonal rows of full rank are all that the method needs of E.
    gram = rows @ rows.T / (96 * 0.25)
    assert (gram - torch.eye(1000)).abs().max() < 0.6
    assert torch.linalg.matrix_rank(rows) == 96
    assert not table.state_dict(), "the static table is never saved"


def test_factored_table_is_the_product_of_its_tables() -> None:
    table = StaticTable("factored", 1001, 64, 2.0, seed=0)
    m = 32  # ceil(sqrt(1001))
    assert table.a_RD.shape == (32, 64) and table.b_RD.shape == (m, 64)
    for token in (0, 1, 31, 32, 500, 1000):
        expected = table.a_RD[token // m].double() * table.b_RD[token % m].double() * 2.0
        assert torch.equal(table(torch.tensor(token), torch.float64), expected)
    bytes_held = sum(t.nbytes for t in StaticTable("factored", 50_257, 4096, 1.0, 0).buffers())
    assert bytes_held == pytest.approx(3.7e6, rel=0.02)  # METHOD.md section 7: instead of 412 MB


def test_module_conversion_keeps_the_table() -> None:
    table = StaticTable("gaussian", 50, 16, 1.0, 0)
    before = table.digest()
    assert table.double().digest() == before
    assert table(torch.arange(3), torch.float64).dtype == torch.float64


def test_initial_basis_is_orthonormal_and_reproducible() -> None:
    U = subspace.initial_basis(64, 10, seed=5)
    assert torch.allclose(U.T @ U, torch.eye(10, dtype=torch.float64), atol=1e-12)
    assert torch.equal(U, subspace.initial_basis(64, 10, seed=5))
    assert not torch.allclose(U, subspace.initial_basis(64, 10, seed=6))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 10.0])
@pytest.mark.parametrize("step", [0.25, 0.5])
def test_moves_descend_monotonically_to_the_svd_optimum(scale: float, step: float) -> None:
    G = (
        gaussian(400, 48)
        @ torch.diag(torch.logspace(0, -3, 48, dtype=torch.float64))
        @ subspace.orthonormal(gaussian(48, 48, seed=1))
        * scale
    )
    U = subspace.initial_basis(48, 6, seed=0)
    optimum = float((np.linalg.svd(G.numpy(), compute_uv=False)[6:] ** 2).sum())

    def missed(U: torch.Tensor) -> float:
        return float((G - G @ U @ U.T).square().sum())

    losses = [missed(U)]
    for _ in range(400):
        U = subspace.move(U, G.T @ (G @ U), step)
        losses.append(missed(U))
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(losses))
    assert losses[-1] <= optimum * 1.001


def test_basis_stays_orthonormal_in_float32_over_a_thousand_moves() -> None:
    U = subspace.initial_basis(64, 8, seed=0).float()
    for i in range(1000):
        G = gaussian(32, 64, seed=i).float()
        U = subspace.move(U, (G.T @ (G @ U)).double(), 0.25).float()
    assert (U.T @ U - torch.eye(8)).abs().max() < 1e-6


def test_move_does_not_depend_on_the_scale_and_zeros_move_nothing() -> None:
    U, M = subspace.initial_basis(32, 4, seed=0), gaussian(32, 32)
    M = M.T @ M @ U
    assert torch.allclose(subspace.move(U, M, 0.25), subspace.move(U, 1e-9 * M, 0.25), atol=1e-12)
    assert torch.allclose(subspace.move(U, torch.zeros_like(U), 0.25), U, atol=1e-12)


def test_captured_energy_and_angles() -> None:
    U = subspace.initial_basis(32, 4, seed=0)
    G = gaussian(50, 32)
    share = float((G @ U).square().sum() / G.square().sum())
    assert subspace.captured_energy(U, G.T @ (G @ U), float(G.square().sum())) == pytest.approx(share, rel=1e-12)
    inside = gaussian(50, 4) @ U.T
    assert subspace.captured_energy(U, inside.T @ (inside @ U), float(inside.square().sum())) == pytest.approx(1.0)
    turn = subspace.orthonormal(gaussian(4, 4))
    assert subspace.principal_angles(U, U @ turn).abs().max() < 1e-6
    complement = subspace.orthonormal(torch.cat([U, gaussian(32, 4)], dim=1))[:, 4:]
    assert torch.allclose(subspace.principal_angles(U, complement), torch.full((4,), np.pi / 2, dtype=torch.float64))


def test_transport_keeps_what_lies_in_both_subspaces() -> None:
    U, turn = subspace.initial_basis(32, 4, seed=0), subspace.orthonormal(gaussian(4, 4, seed=2))
    c = gaussian(10, 4)
    same_span = U @ turn
    assert torch.allclose(c @ subspace.transport(U, same_span) @ same_span.T, c @ U.T, atol=1e-12)
