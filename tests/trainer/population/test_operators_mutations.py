"""What each mutation does to its parent's delta."""

import math

import pytest
import torch
from torch import Tensor

from populora_trainer.population.factors import Factors, Pair, delta
from populora_trainer.population.operators import Parameter, breed
from populora_trainer.population.operators.draws import keep, normal, uniform
from populora_trainer.population.operators.mutations import _rotation

PATH = "layers.0.proj"


def parent_of(rank: int = 8, inputs: int = 40, outputs: int = 30, slots: int = 1, seed: int = 0) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{slot}.proj": Pair(
            torch.randn(rank, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, rank, generator=generator) * 0.1,
        )
        for slot in range(slots)
    }


def child_of(id: str, parent: Factors, seed: int = 0, **parameters: Parameter) -> Factors:
    return breed(id, [parent], torch.Generator().manual_seed(seed), parameters)


def singular_values(pair: Pair) -> Tensor:
    return torch.linalg.svdvals(delta(pair).double())[: pair.A.shape[0]]


def gradient_size(pair: Pair, direction: Tensor) -> float:
    """Size of what B receives along an input direction of A, for a loss whose gradient in dW is all ones."""
    A, B = pair.A.clone().requires_grad_(), pair.B.clone().requires_grad_()
    (B @ A).sum().backward()
    assert B.grad is not None
    return float((B.grad @ (pair.A @ direction)).norm())


def test_cayley_rotations_are_orthogonal_and_first_order_ones_are_not() -> None:
    live = torch.ones(32, dtype=torch.bool)
    R = _rotation(live, 0.1, torch.Generator().manual_seed(0), False)
    torch.testing.assert_close(R @ R.T, torch.eye(32, dtype=torch.float64))
    assert (R - torch.eye(32)).norm() > 0.5
    first_order = _rotation(live, 0.1, torch.Generator().manual_seed(0), True)
    assert torch.linalg.svdvals(first_order)[0] > 1.1
    torch.testing.assert_close(
        _rotation(live, 1e-4, torch.Generator().manual_seed(0), True),
        _rotation(live, 1e-4, torch.Generator().manual_seed(0), False),
        rtol=0,
        atol=1e-6,
    )


def test_m1_moves_the_singular_values_by_its_log_normal_draws_alone() -> None:
    parent = parent_of()
    child = child_of("M1", parent, epsilon=0.3, rotation=0.2)
    z = normal((8,), torch.Generator().manual_seed(0), torch.zeros(1, dtype=torch.float64))
    wanted = (singular_values(parent[PATH]) * torch.exp(0.3 * z)).sort(descending=True).values
    torch.testing.assert_close(singular_values(child[PATH]), wanted, rtol=1e-5, atol=1e-7)


def test_m1_rotates_within_the_parents_singular_spaces_and_keeps_a_bit_for_bit() -> None:
    parent = parent_of()
    child = child_of("M1", parent, epsilon=0.0)
    assert torch.equal(child[PATH].A, parent[PATH].A)
    torch.testing.assert_close(singular_values(child[PATH]), singular_values(parent[PATH]), rtol=1e-5, atol=1e-7)
    U, _, Vt = torch.linalg.svd(delta(parent[PATH]), full_matrices=False)
    inside = U[:, :8] @ U[:, :8].T @ delta(child[PATH]) @ Vt[:8].T @ Vt[:8]
    torch.testing.assert_close(inside, delta(child[PATH]), rtol=0, atol=1e-5)
    assert (delta(child[PATH]) - delta(parent[PATH])).norm() > 0.05 * delta(parent[PATH]).norm()


def test_m1_without_noise_is_the_parent_and_first_order_differs_from_cayley() -> None:
    parent = parent_of()
    still = child_of("M1", parent, epsilon=0.0, rotation=0.0)
    torch.testing.assert_close(delta(still[PATH]), delta(parent[PATH]), rtol=0, atol=1e-6)
    first_order = child_of("M1", parent, epsilon=0.0, first_order=True)
    assert float(singular_values(first_order[PATH]).norm()) > float(singular_values(parent[PATH]).norm()) * 1.001


def test_m1_is_exact_where_components_differ_by_five_orders() -> None:
    parent = parent_of()
    U, _, Vt = torch.linalg.svd(delta(parent[PATH]).double(), full_matrices=False)
    s = 10.0 ** -torch.arange(8, dtype=torch.float64).clamp(max=5)
    parent = {PATH: Pair(Vt[:8].float(), (U[:, :8] * s).float())}
    child = child_of("M1", parent, epsilon=0.0, rotation=0.5)
    torch.testing.assert_close(
        singular_values(child[PATH])[:4], singular_values(parent[PATH])[:4], rtol=1e-3, atol=1e-7
    )


@pytest.mark.parametrize(
    ("slots", "fraction", "changed"), [(9, 1 / 3, 3), (1, 1 / 3, 1), (6, 1.0, 6), (112, 1 / 3, 37)]
)
def test_m2_changes_both_factors_of_a_third_of_the_slots(slots: int, fraction: float, changed: int) -> None:
    parent = parent_of(rank=2, inputs=5, outputs=4, slots=slots)
    child = child_of("M2", parent, fraction=fraction)
    moved = [path for path in parent if not torch.equal(child[path].A, parent[path].A)]
    assert len(moved) == changed
    for path in parent:
        assert torch.equal(child[path].B, parent[path].B) == (path not in moved)


@pytest.mark.parametrize(("id", "epsilon"), [("M2", 0.1), ("M4", 0.15)])
def test_noise_has_the_size_of_epsilon_times_each_tensors_deviation(id: str, epsilon: float) -> None:
    parent = parent_of(rank=16, inputs=300, outputs=200)
    child = child_of(id, parent)
    for made, was in zip(child[PATH], parent[PATH], strict=True):
        noise = made - was
        assert float(noise.std() / was.std()) == pytest.approx(epsilon, rel=0.05)
        assert abs(float(noise.mean())) < 0.1 * float(noise.std())


@pytest.mark.parametrize(("rank", "fraction", "dropped"), [(8, 0.3, 2), (32, 0.3, 10), (1, 0.3, 0), (8, 0.99, 7)])
def test_m3_drops_its_share_of_components_and_keeps_the_others_exactly(
    rank: int, fraction: float, dropped: int
) -> None:
    parent = parent_of(rank=rank, outputs=50)
    child = child_of("M3", parent, fraction=fraction)
    before, after = singular_values(parent[PATH]), singular_values(child[PATH])
    left = after[after > 1e-5 * before[0]]
    assert len(left) == rank - dropped
    for value in left:
        assert float((before / value - 1).abs().min()) < 1e-4
    assert torch.equal(child[PATH].A, parent[PATH].A)


def test_m3_leaves_dropped_directions_a_live_gradient_of_the_size_they_had() -> None:
    parent = parent_of()
    child = child_of("M3", parent)
    _, _, Vt = torch.linalg.svd(delta(parent[PATH]), full_matrices=False)
    gone = [v for v in Vt[:8] if (delta(child[PATH]) @ v).norm() < 1e-5]
    assert len(gone) == 2
    for direction in gone:
        assert gradient_size(child[PATH], direction) == pytest.approx(gradient_size(parent[PATH], direction), rel=1e-5)
        assert gradient_size(child[PATH], direction) > 0.1


def test_m3_chooses_components_uniformly_not_by_size() -> None:
    parent = parent_of(rank=4)
    _, _, Vt = torch.linalg.svd(delta(parent[PATH]), full_matrices=False)
    lost = torch.zeros(4)
    for seed in range(200):
        child = child_of("M3", parent, seed=seed)
        lost += (delta(child[PATH]) @ Vt[:4].T).norm(dim=0) < 1e-5
    assert int(lost.sum()) == 200
    assert (lost > 25).all()


def test_m5_adds_bounded_uniform_noise_to_a_alone() -> None:
    parent = parent_of(rank=16, inputs=300)
    child = child_of("M5", parent, alpha=2.0)
    bound = 2.0 / math.sqrt(16 * 300)
    noise = child[PATH].A - parent[PATH].A
    assert float(noise.abs().max()) <= bound * 1.001
    assert float(noise.std()) == pytest.approx(bound / math.sqrt(3), rel=0.03)
    assert torch.equal(child[PATH].B, parent[PATH].B)


@pytest.mark.parametrize(("keep", "left"), [(0.5, 4), (0.1, 1), (1.0, 8)])
def test_m6_keeps_the_leading_components_shakes_them_and_leaves_the_others_alone(keep: float, left: int) -> None:
    parent = parent_of(inputs=300, outputs=200)
    still = delta(child_of("M6", parent, keep=keep, epsilon=0.0)[PATH]).double()
    U, s, Vt = torch.linalg.svd(delta(parent[PATH]).double(), full_matrices=False)
    U, Vt = U[:, :left], Vt[:left]
    torch.testing.assert_close(still, (U * s[:left]) @ Vt, rtol=0, atol=1e-5)
    child = child_of("M6", parent, seed=1, keep=keep)[PATH]  # seed 0 drew the parent
    shaken = delta(child).double()
    values = torch.linalg.svdvals(shaken)
    assert values[left - 1] > 0.5 * s[left - 1]
    assert float(values[left]) < 1e-5 * float(values[0])
    # |noise V^T| and |U s noise| are each about epsilon |s|, sums of at least 200 independent squares.
    size = float(still.norm())
    assert float((shaken - still).norm()) / size == pytest.approx(2**0.5 * 0.05, rel=0.2)
    assert float((shaken - shaken @ Vt.T @ Vt).norm()) / size == pytest.approx(0.05, rel=0.2)
    assert float((shaken - U @ U.T @ shaken).norm()) / size == pytest.approx(0.05, rel=0.2)
    moved = (child.A - parent[PATH].A).double()
    assert torch.linalg.matrix_rank(moved, rtol=1e-4) == left
    assert float(moved.norm() / parent[PATH].A.norm()) < 0.1


def test_m6_leaves_dropped_directions_a_live_gradient() -> None:
    parent = parent_of()
    child = child_of("M6", parent, epsilon=0.0)
    _, _, Vt = torch.linalg.svd(delta(parent[PATH]), full_matrices=False)
    for direction in Vt[4:8]:
        assert (delta(child[PATH]) @ direction).norm() < 1e-5
        assert gradient_size(child[PATH], direction) == pytest.approx(gradient_size(parent[PATH], direction), rel=1e-5)
        assert gradient_size(child[PATH], direction) > 0.1


@pytest.mark.parametrize("id", ["M1", "M3", "M6"])
def test_an_a_with_dependent_or_zero_rows_leaves_b_its_part(id: str) -> None:
    A, B = parent_of(rank=4)[PATH]
    zero = child_of(id, {PATH: Pair(torch.zeros_like(A), B)})[PATH]
    assert delta(zero).abs().max() == 0
    if id != "M6":
        torch.testing.assert_close(zero.B, B)
    A = A.clone()
    A[1] = A[0]
    child = child_of(id, {PATH: Pair(A, B)})[PATH]
    assert torch.isfinite(child.B).all()
    assert float(child.B.norm()) < 10 * float(B.norm())


def test_draws_are_symmetric_and_keep_masks_have_their_probability() -> None:
    generator = torch.Generator().manual_seed(0)
    like = torch.zeros(1)
    values = uniform((40_001,), generator, like)
    assert values.shape == (40_001,)
    assert float(values.abs().max()) < 1
    assert abs(float(values.mean())) < 0.02
    for share in (0.1, 0.5, 0.9):
        mask, drawn = keep((200, 200), share, generator, like)
        assert drawn == pytest.approx(share, abs=1e-5)
        assert float(mask.float().mean()) == pytest.approx(share, abs=0.02)
    assert keep((3, 3), 1.0, generator, like)[0].all()
    assert normal((2,), generator, torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
