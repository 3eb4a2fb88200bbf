"""The decompositions through the factors against torch's dense one in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from populora_trainer.population.factors import Pair
from populora_trainer.population.operators.svd import (
    basis_near,
    retained_energy,
    rows_of,
    shared_directions,
    spectrum,
    truncate,
)

shapes = st.tuples(st.integers(1, 6), st.integers(1, 24), st.integers(1, 24))


def pair_of(shape: tuple[int, int, int], seed: int, dtype: torch.dtype = torch.float32) -> Pair:
    rank, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(rank, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
    B = torch.randn(outputs, rank, generator=generator, dtype=torch.float64) * 0.1
    return Pair(A.to(dtype), B.to(dtype))


def dense(pair: Pair) -> Tensor:
    return pair.B.double() @ pair.A.double()


def best(matrix: Tensor, rank: int) -> Tensor:
    U, s, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return (U[:, :rank] * s[:rank]) @ Vt[:rank]


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 1000), st.sampled_from([torch.float32, torch.float64]))
def test_the_spectrum_is_that_of_the_dense_delta_and_rebuilds_it(
    shape: tuple[int, int, int], seed: int, dtype: torch.dtype
) -> None:
    pair = pair_of(shape, seed, dtype)
    form = spectrum(pair)
    values = torch.linalg.svdvals(dense(pair))[: min(shape)]
    torch.testing.assert_close(form.values, values, rtol=1e-5, atol=1e-6 * float(values[0]))
    Vt = form.right @ pair.A.double()
    torch.testing.assert_close(Vt @ Vt.T, torch.eye(min(shape), dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close((pair.B.double() @ form.left) @ Vt, dense(pair), rtol=0, atol=1e-6)


def test_small_singular_values_are_exact_to_what_float32_factors_can_hold() -> None:
    generator = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(40, 6, generator=generator, dtype=torch.float64)).Q
    A = torch.randn(6, 30, generator=generator)
    wanted = torch.tensor([1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5], dtype=torch.float64)
    pair = Pair(A, (U * wanted).float())
    error = (spectrum(pair).values / torch.linalg.svdvals(dense(pair))[:6] - 1).abs()
    assert error[:4].max() < 1e-9
    assert error[4] < 6e-8
    assert error[5] < 1e-5


@pytest.mark.parametrize("shape", [(3, 8, 6), (1, 4, 4), (4, 2, 9)])
def test_a_zero_delta_has_a_spectrum_of_zeros_and_no_nan(shape: tuple[int, int, int]) -> None:
    A, B = pair_of(shape, 0)
    for pair in (Pair(A, torch.zeros_like(B)), Pair(torch.zeros_like(A), B), Pair(A * 0, B * 0)):
        form = spectrum(pair)
        assert form.values.abs().max() == 0
        assert torch.isfinite(form.left).all()
        assert torch.isfinite(form.right).all()


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(0, 1000))
def test_truncation_is_the_best_of_its_rank(shape: tuple[int, int, int], seed: int) -> None:
    rank = shape[0]
    first, second = pair_of(shape, seed), pair_of(shape, seed + 1)
    stacked = torch.cat((first.A, second.A))
    B = torch.cat((first.B, second.B), dim=1)
    child = truncate(B, stacked, rows_of(stacked), rank)
    assert child.A.shape == first.A.shape
    assert child.B.shape == first.B.shape
    wanted = best(dense(first) + dense(second), rank)
    torch.testing.assert_close(dense(child), wanted, rtol=0, atol=1e-4 * float(wanted.norm()))


def test_truncation_keeps_the_parents_basis_where_they_share_it() -> None:
    first, second = pair_of((4, 64, 32), 0), pair_of((4, 64, 32), 1)
    stacked = torch.cat((first.A, first.A * 1.0001))
    child = truncate(torch.cat((first.B, second.B), dim=1), stacked, rows_of(stacked), 4)
    torch.testing.assert_close(child.A, first.A, rtol=0, atol=1e-3)


def test_truncation_of_nothing_keeps_every_row_of_a_alive() -> None:
    first, second = pair_of((4, 16, 8), 0), pair_of((4, 16, 8), 1)
    stacked = torch.cat((first.A, second.A))
    child = truncate(torch.zeros(8, 8), stacked, rows_of(stacked), 4)
    assert child.B.abs().max() == 0
    assert torch.linalg.matrix_rank(child.A) == 4


def test_a_change_of_basis_is_stable_and_has_the_size_asked_for() -> None:
    home = torch.diag(torch.tensor([1.0, 0.5, 1e-9], dtype=torch.float64))
    basis, inverse = basis_near(home, torch.tensor(2.0))
    torch.testing.assert_close(inverse @ basis, torch.eye(3, dtype=torch.float64))
    assert torch.linalg.cond(basis) == pytest.approx(10)
    assert torch.linalg.vector_norm(basis) == pytest.approx(2)
    basis, inverse = basis_near(torch.zeros(3, 3, dtype=torch.float64), torch.tensor(1.0))
    torch.testing.assert_close(inverse @ basis, torch.eye(3, dtype=torch.float64))


def test_shared_directions_hold_both_deltas_and_order_them_by_energy() -> None:
    first, second = pair_of((3, 20, 10), 0), pair_of((3, 20, 10), 1)
    stacked = torch.cat((first.A, second.A))
    C1, C2, basis = shared_directions(first.B, second.B, rows_of(stacked))
    Vt = basis @ stacked.double()
    torch.testing.assert_close(Vt @ Vt.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(C1.double() @ Vt, dense(first), rtol=0, atol=1e-6)
    torch.testing.assert_close(C2.double() @ Vt, dense(second), rtol=0, atol=1e-6)
    energy = (C1.square() + C2.square()).sum(0)
    assert (energy[:-1] >= energy[1:] - 1e-6).all()


def test_retained_energy_is_one_of_itself_zero_of_an_orthogonal_child_and_the_kept_share_of_a_truncation() -> None:
    parent = pair_of((3, 12, 9), 0)
    kept, total = retained_energy(parent, parent)
    assert float(kept / total) == pytest.approx(1, abs=1e-6)
    assert float(total) == pytest.approx(float(dense(parent).square().sum()), rel=1e-5)
    U, s, Vt = torch.linalg.svd(dense(parent), full_matrices=True)
    other = Pair(Vt[3:6].float(), U[:, 3:6].float())
    kept, total = retained_energy(parent, other)
    assert float(kept / total) == pytest.approx(0, abs=1e-6)
    leading = Pair(Vt[:3].float(), (U[:, :3] * torch.tensor([1.0, 0, 0])).float())
    kept, total = retained_energy(parent, leading)
    assert float(kept / total) == pytest.approx(float(s[0] ** 2 / s.square().sum()), rel=1e-4)
