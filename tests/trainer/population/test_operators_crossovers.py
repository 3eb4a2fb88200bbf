"""Each crossover against an independent implementation: dense deltas, PEFT's building blocks, mergekit's formulas."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.merge_utils import calculate_majority_sign_mask, disjoint_merge, magnitude_based_pruning
from peft.utils.merge_utils import ties as peft_ties
from torch import Tensor

from populora_trainer.population.factors import Factors, Pair, delta
from populora_trainer.population.operators import Parameter, breed
from populora_trainer.population.operators.crossovers import NEGLIGIBLE, _elect, _trim

PATH = "layers.0.proj"
RANK, INPUTS, OUTPUTS = 4, 24, 18


def parents_of(drift: float | None, seed: int = 0, slots: int = 1) -> tuple[Factors, Factors]:
    """Two parents; A's shared, moved apart by `drift` of their size, or independent where it is None."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    first: Factors = {}
    second: Factors = {}
    for slot in range(slots):
        path = f"layers.{slot}.proj"
        A = rand(RANK, INPUTS) / INPUTS**0.5
        other = rand(RANK, INPUTS) / INPUTS**0.5
        first[path] = Pair(A, rand(OUTPUTS, RANK) * 0.1)
        second[path] = Pair(other if drift is None else A + drift * other, rand(OUTPUTS, RANK) * 0.1)
    return first, second


def cross(id: str, parents: tuple[Factors, Factors], seed: int = 0, **parameters: Parameter) -> Pair:
    return breed(id, parents, torch.Generator().manual_seed(seed), parameters)[PATH]


def best(matrix: Tensor, rank: int = RANK) -> Tensor:
    U, s, Vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return ((U[:, :rank] * s[:rank]) @ Vt[:rank]).float()


def dense(parents: tuple[Factors, Factors]) -> Iterator[Tensor]:
    return (delta(parent[PATH]) for parent in parents)


def relative(made: Tensor, wanted: Tensor) -> float:
    return float((made - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("weight", [0.0, 0.5, 0.8])
@pytest.mark.parametrize(("drift", "tolerance"), [(0.0, 1e-5), (0.005, 0.01), (0.3, 1e-4), (None, 1e-4)])
def test_x5_is_the_best_rank_r_mean_of_the_dense_deltas(weight: float, drift: float | None, tolerance: float) -> None:
    parents = parents_of(drift)
    D1, D2 = dense(parents)
    child = cross("X5", parents, weight=weight)
    assert relative(delta(child), best((1 - weight) * D1 + weight * D2)) < tolerance


def test_averaging_the_factors_of_independent_parents_would_be_far_off() -> None:
    first, second = parents_of(None)
    mean = (delta(first[PATH]) + delta(second[PATH])) / 2
    factors = delta(Pair(*((a + b) / 2 for a, b in zip(first[PATH], second[PATH], strict=True))))
    assert relative(factors, mean) > 0.5
    assert relative(delta(cross("X5", (first, second))), best(mean)) < 1e-4


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_children_of_parents_with_near_factors_keep_their_basis_and_scale(drift: float) -> None:
    first, second = parents_of(drift)
    for id in ("X1", "X3", "X4", "X5", "X6", "X7", "X8", "X9"):
        A = cross(id, (first, second)).A
        mean = (first[PATH].A + second[PATH].A) / 2
        assert 0.5 < float(A.norm() / mean.norm()) < 2, id
        if id != "X3":
            cosine = torch.nn.functional.cosine_similarity(A.flatten(), mean.flatten(), dim=0)
            assert float(cosine) > 0.9, id


@given(
    drift=st.none() | st.just(0.0) | st.floats(1e-5, 2.0),
    seed=st.integers(0, 2**16),
    id=st.sampled_from(["X1", "X4", "X5"]),
    weight=st.floats(0.0, 1.0),
)
def test_mixing_is_of_deltas_however_far_training_has_moved_the_parents_apart(
    drift: float | None, seed: int, id: str, weight: float
) -> None:
    parents = parents_of(drift, seed)
    D1, D2 = dense(parents)
    parameters, w2 = {
        "X1": ({"p": 0.0}, 0.5),
        "X4": ({"eta_min": 1 + weight, "eta_max": 1 + weight}, 1 + weight),
        "X5": ({"weight": weight}, weight),
    }[id]
    child = delta(cross(id, parents, **parameters))
    # Under the threshold the cross term is left out: up to 1 % of |A| |B|, which is at most sqrt(rank) of the delta.
    assert relative(child, best((1 - w2) * D1 + w2 * D2)) < NEGLIGIBLE * RANK**0.5 + 1e-4


@given(seed=st.integers(0, 2**16), id=st.sampled_from(["X3", "X4", "X5", "X6", "X8", "X9"]))
def test_a_child_depends_on_the_parents_deltas_and_not_on_how_their_factors_spell_them(seed: int, id: str) -> None:
    parents = parents_of(None, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    respelt = []
    for parent in parents:
        A, B = parent[PATH]
        left, _ = torch.linalg.qr(torch.randn(RANK, RANK, generator=generator, dtype=torch.float64))
        T = (left * (0.5 + 1.5 * torch.rand(RANK, generator=generator, dtype=torch.float64))) @ left.T
        respelt.append({PATH: Pair((T @ A.double()).float(), (B.double() @ torch.linalg.inv(T)).float())})
        assert relative(delta(respelt[-1][PATH]), delta(parent[PATH])) < 1e-5
    parameters = {"X3": {"share": 0.5}, "X4": {"eta_min": 1.3, "eta_max": 1.3}}.get(id, {})
    first, second = (delta(cross(id, pair, **parameters)) for pair in (parents, tuple(respelt)))
    # An entry at the edge of TIES' trimming may fall to either side.
    assert relative(second, first) < (0.1 if id == "X6" else 1e-3)


@pytest.mark.parametrize("drift", [0.0, None])
def test_x4_goes_past_parent_2_away_from_parent_1(drift: float | None) -> None:
    parents = parents_of(drift)
    D1, D2 = dense(parents)
    child = delta(cross("X4", parents, eta_min=1.4, eta_max=1.4))
    assert relative(child, best(D1 + 1.4 * (D2 - D1))) < 1e-4
    assert float(((child - D2) * (D2 - D1)).sum()) > 0
    assert relative(delta(cross("X4", parents, eta_max=1.0)), D2) < 1e-4


def test_x4_draws_one_eta_for_the_whole_child_within_its_range() -> None:
    parents = parents_of(0.0, slots=2)
    found = set()
    for seed in range(20):
        child = breed("X4", parents, torch.Generator().manual_seed(seed))
        etas = []
        for path, pair in child.items():
            D1, D2 = (delta(parent[path]) for parent in parents)
            etas.append(float(((delta(pair) - D1) * (D2 - D1)).sum() / (D2 - D1).square().sum()))
        assert etas[0] == pytest.approx(etas[1], rel=1e-4)
        assert 1.0 <= etas[0] < 1.5
        found.add(round(etas[0], 3))
    assert len(found) > 10


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("kinship", ["shared A", "independent A, half of the rank"])
def test_x1_is_the_parents_mean_in_expectation_where_that_fits_the_rank(kinship: str, p: float) -> None:
    parents = parents_of(0.0 if kinship == "shared A" else None)
    if kinship != "shared A":
        for parent in parents:
            parent[PATH].B[:, RANK // 2 :] = 0
    D1, D2 = dense(parents)
    trials = 400
    mean = torch.stack([delta(cross("X1", parents, seed=seed, p=p)) for seed in range(trials)]).mean(0)
    # Entries are dropped independently, so a child's squared error is sum |B_ok|^2 |A_k|^2 p / (1 - p) / 4 over both
    # parents, and that of the mean of n children a n-th of it. It is a sum of at least 72 independent squares, nearly
    # normal each: a deviation of sqrt(2 / 72) = 1/6, so 0.5 to 2 leaves room for three deviations on either side.
    one = sum(float((B.square() @ A.square().sum(1)).sum()) for A, B in (parent[PATH] for parent in parents)) / 4
    error = float((mean - (D1 + D2) / 2).square().sum())
    assert 0.5 < error / (one * p / (1 - p) / trials) < 2


@given(seed=st.integers(0, 2**16), p=st.sampled_from([0.0, 0.1, 0.6]))
def test_x1_of_independent_parents_is_the_best_of_its_rank_for_the_dropped_mean_of_every_draw(
    seed: int, p: float
) -> None:
    first, second = parents_of(None, seed)
    # Beside a parent without a delta and with the same A, the draws show what was dropped of the other.
    dropped = torch.zeros(OUTPUTS, INPUTS)
    for index, parent in enumerate((first, second)):
        empty = {PATH: Pair(parent[PATH].A, torch.zeros_like(parent[PATH].B))}
        dropped += delta(cross("X1", (parent, empty) if index == 0 else (empty, parent), seed, p=p))
    assert relative(delta(cross("X1", (first, second), seed, p=p)), best(dropped)) < 1e-3


def test_x1_of_independent_parents_lacks_in_expectation_what_its_rank_cuts_off() -> None:
    parents = parents_of(None)
    mean = sum(dense(parents)) / 2
    children = torch.stack([delta(cross("X1", parents, seed=seed)) for seed in range(400)]).mean(0)
    assert relative(children, mean) > 0.8 * relative(best(mean), mean) > 0.2
    # Nearer, all the same, than a child without this bias: each component whole from either parent.
    errors = {"X1": 0.0, "coin": 0.0}
    first, second = (parent[PATH] for parent in parents)
    for seed in range(50):
        coin = torch.rand(RANK, generator=torch.Generator().manual_seed(seed)) < 0.5
        other = delta(Pair(torch.where(coin[:, None], first.A, second.A), torch.where(coin, first.B, second.B)))
        for name, made in (("X1", delta(cross("X1", parents, seed=seed))), ("coin", other)):
            errors[name] += relative(made, mean) / 50
    assert errors["X1"] < 0.7 * errors["coin"]


def test_x1_drops_entries_of_b_alone() -> None:
    first, _ = parents_of(0.0)
    alone = breed("X1", (first, first), torch.Generator().manual_seed(0), {"p": 0.5})[PATH]
    torch.testing.assert_close(alone.A, first[PATH].A)
    ratio = (alone.B / first[PATH].B).round(decimals=3)
    assert set(ratio.unique().tolist()) == {0.0, 1.0, 2.0}


def test_x2_takes_every_slot_whole_from_one_of_them() -> None:
    first, second = parents_of(None, slots=40)
    child = breed("X2", (first, second), torch.Generator().manual_seed(0))
    from_first = [path for path in child if torch.equal(child[path].A, first[path].A)]
    assert 8 < len(from_first) < 32
    for path in child:
        origin = first if path in from_first else second
        assert torch.equal(child[path].B, origin[path].B)
        assert torch.equal(child[path].A, origin[path].A)


@pytest.mark.parametrize("drift", [0.0, 0.3, None])
def test_x3_joins_the_leading_components_of_one_to_the_rest_of_the_other(drift: float | None) -> None:
    parents = parents_of(drift)
    D1, D2 = dense(parents)
    child = delta(cross("X3", parents, share=0.25))
    assert relative(child, best(D1, 1) + D2 - best(D2, 1)) < 1e-4


def test_x3_draws_every_cut_and_at_rank_1_takes_either_parent() -> None:
    first, second = parents_of(None)
    D1, D2 = dense((first, second))
    wanted = [best(D1, k) + D2 - best(D2, k) for k in (1, 2, 3)]
    cuts = set()
    for seed in range(30):
        child = delta(cross("X3", (first, second), seed=seed))
        errors = [relative(child, one) for one in wanted]
        assert min(errors) < 1e-4
        cuts.add(errors.index(min(errors)) + 1)
    assert cuts == {1, 2, 3}
    ones = tuple({PATH: Pair(parent[PATH].A[:1], parent[PATH].B[:, :1])} for parent in (first, second))
    origins = set()
    for seed in range(20):
        child = delta(breed("X3", ones, torch.Generator().manual_seed(seed))[PATH])
        origins.add(min((0, 1), key=lambda index: relative(child, delta(ones[index][PATH]))))
    assert origins == {0, 1}


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_x6_on_a_shared_a_equals_pefts_ties_on_b(density: float) -> None:
    first, second = parents_of(0.0)
    child = cross("X6", (first, second), density=density)
    wanted = peft_ties([first[PATH].B, second[PATH].B], torch.ones(2), density)
    torch.testing.assert_close(child.B, wanted)
    assert torch.equal(child.A, first[PATH].A)


def test_trimming_and_election_equal_pefts_building_blocks() -> None:
    first, second = parents_of(0.0)
    B1, B2 = first[PATH].B, second[PATH].B
    for density in (0.1, 0.5, 0.9):
        assert torch.equal(_trim(B1, density), magnitude_based_pruning(B1, density))
    stacked = torch.stack((B1, B2))
    torch.testing.assert_close(_elect(B1, B2), disjoint_merge(stacked, calculate_majority_sign_mask(stacked)))
    assert torch.equal(_elect(B1, -B1), B1.clamp(min=0) + (-B1).clamp(min=0))  # a tie counts as plus
    assert _elect(torch.zeros(2, 2), torch.zeros(2, 2)).abs().max() == 0


@pytest.mark.parametrize("id", ["X6", "X7", "X9"])
def test_entrywise_crossovers_of_independent_parents_match_a_dense_reference(id: str) -> None:
    parents = parents_of(None)
    D1, D2 = dense(parents)
    _, _, Vt = torch.linalg.svd(torch.cat((D1, D2)), full_matrices=False)
    V = Vt[: 2 * RANK].T
    C1, C2 = D1 @ V, D2 @ V
    if id == "X6":
        merged = peft_ties([C1, C2], torch.ones(2), 0.5)
        child = cross(id, parents)
    elif id == "X7":
        merged = peft_ties([C1, C2], torch.ones(2), 1.0)
        child = cross(id, parents, density=1.0, epsilon=0.0)
    else:
        merged = (C1**3 + C2**3) / (C1**2 + C2**2)
        child = cross(id, parents)
    assert relative(delta(child), best(merged @ V.T)) < 1e-3


@pytest.mark.parametrize(("density", "epsilon"), [(0.7, 0.15), (0.5, 0.4), (0.3, 0.3)])
def test_x7_keeps_by_rank_within_a_row_and_divides_each_entry_by_its_chance(density: float, epsilon: float) -> None:
    first, _ = parents_of(0.0)
    B = first[PATH].B
    empty = {PATH: Pair(first[PATH].A, torch.zeros_like(B))}
    # mergekit's keep probability; MAGPRUNE's rescaling, 1 / (1 - p) with the entry's own drop probability p.
    chance = density - epsilon + 2 * epsilon * B.abs().argsort(dim=1).argsort(dim=1) / (RANK - 1)
    kept = torch.zeros_like(B)
    trials = 1000
    generator = torch.Generator().manual_seed(0)
    for _ in range(trials):
        child = breed("X7", (first, empty), generator, {"density": density, "epsilon": epsilon})[PATH]
        mask = child.B != 0
        torch.testing.assert_close(child.B[mask], (B / chance)[mask])
        kept += mask
    # Binomial counts of 72 entries: five standard deviations are passed once in 24,000 tries.
    assert ((kept / trials - chance).abs() <= 5 * (chance * (1 - chance) / trials).sqrt() + 1e-6).all()


@pytest.mark.parametrize("weight", [0.25, 0.5])
@pytest.mark.parametrize("drift", [0.0, None])
def test_x8_equals_mergekits_slerp_of_the_flattened_deltas(weight: float, drift: float | None) -> None:
    parents = parents_of(drift)
    D1, D2 = dense(parents)
    dot = float((D1 * D2).sum() / (D1.norm() * D2.norm()))
    theta = math.acos(dot)
    s1 = math.sin((1 - weight) * theta) / math.sin(theta)
    s2 = math.sin(weight * theta) / math.sin(theta)
    assert relative(delta(cross("X8", parents, weight=weight)), best(s1 * D1 + s2 * D2)) < 1e-4


def test_x8_is_linear_for_parallel_opposite_and_zero_parents() -> None:
    first, second = parents_of(0.0)
    D1, D2 = dense((first, second))
    for factor in (3.0, -2.0):
        scaled = {PATH: Pair(first[PATH].A, factor * first[PATH].B)}
        assert relative(delta(cross("X8", (first, scaled), weight=0.25)), (0.75 + 0.25 * factor) * D1) < 1e-5
    zero = {PATH: Pair(first[PATH].A, torch.zeros_like(first[PATH].B))}
    assert relative(delta(cross("X8", (zero, second), weight=0.25)), 0.25 * D2) < 1e-5


def test_x9_weights_each_entry_by_its_square_even_where_squares_underflow() -> None:
    first, second = parents_of(0.0)
    for scale in (1.0, 1e-25):
        pairs = tuple({PATH: Pair(parent[PATH].A, parent[PATH].B * scale)} for parent in (first, second))
        B1, B2 = (pair[PATH].B.double() for pair in pairs)
        wanted = (B1**3 + B2**3) / (B1**2 + B2**2)
        torch.testing.assert_close(cross("X9", pairs).B.double() / scale, wanted / scale, rtol=1e-4, atol=1e-6)
