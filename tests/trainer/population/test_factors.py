import pytest
import torch

from populora_trainer.errors import OperatorError
from populora_trainer.population.factors import (
    Factors,
    Pair,
    check_fit,
    copy_factors,
    delta,
    delta_norm,
    distance_of_a,
    first_not_finite,
    inner_product,
    rank_of,
)


def adapter(seed: int, rank: int = 2, inputs: int = 6, outputs: int = 5, dtype: torch.dtype = torch.float32) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return {
        path: Pair(
            torch.randn(rank, inputs, generator=generator).to(dtype),
            torch.randn(outputs, rank, generator=generator).to(dtype),
        )
        for path in ("layers.0.q_proj", "layers.0.v_proj")
    }


def test_products_through_the_factors_equal_those_of_the_dense_deltas() -> None:
    first, second = adapter(1)["layers.0.q_proj"], adapter(2)["layers.0.q_proj"]
    dense = (delta(first).double() * delta(second).double()).sum()
    torch.testing.assert_close(inner_product(first, second), dense, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(delta_norm(first), delta(first).double().norm(), rtol=1e-5, atol=1e-6)


def test_a_copy_has_memory_of_its_own() -> None:
    parent = adapter(1)
    child = copy_factors(parent)
    child["layers.0.q_proj"].A.zero_()
    assert parent["layers.0.q_proj"].A.abs().sum() > 0
    assert rank_of(child) == 2


def test_distance_of_a_is_zero_for_a_shared_a_and_near_root_half_for_independent_ones() -> None:
    shared = adapter(1, rank=8, inputs=400)
    other = {path: Pair(pair.A, pair.B * 2) for path, pair in shared.items()}
    assert distance_of_a(shared, other) == 0.0
    assert distance_of_a(shared, adapter(2, rank=8, inputs=400)) == pytest.approx(0.5**0.5, abs=0.02)
    zero = {"a": Pair(torch.zeros(1, 2), torch.zeros(2, 1))}
    assert distance_of_a(zero, zero) == 0.0


def test_the_first_tensor_that_is_not_finite_is_named_and_large_finite_values_are_not_mistaken_for_one() -> None:
    huge = torch.full((4, 4), 3e38)
    assert first_not_finite({"a": huge, "b": torch.zeros(2)}) is None
    assert first_not_finite({"a": huge, "b": torch.tensor([1.0, float("nan")])}) == "b"
    assert first_not_finite({"a": torch.tensor([float("-inf")])}) == "a"
    assert first_not_finite({}) is None


def test_parents_that_do_not_fit_are_refused_by_module() -> None:
    good = adapter(1)
    check_fit(good, adapter(2))
    q, v = "layers.0.q_proj", "layers.0.v_proj"
    cases: list[tuple[list[Factors], str]] = [
        ([{}], "has no modules"),
        ([good, {q: good[q]}], v),
        ([good, adapter(2, inputs=7)], "equal shapes"),
        ([good, adapter(2, dtype=torch.float64)], "float64"),
        ([{q: Pair(torch.ones(2, 3), torch.ones(4, 3))}], "must be"),
        ([{q: Pair(torch.ones(2, 3), torch.ones(4, 2)), v: Pair(torch.ones(1, 3), torch.ones(4, 1))}], v),
        ([{q: Pair(torch.ones(2, 3, dtype=torch.int64), torch.ones(4, 2, dtype=torch.int64))}], "floating-point"),
        ([{q: Pair(torch.ones(2, 3), torch.ones(4, 2, dtype=torch.bfloat16))}], "bfloat16"),
    ]
    for parents, words in cases:
        with pytest.raises(OperatorError, match=words):
            check_fit(*parents)
