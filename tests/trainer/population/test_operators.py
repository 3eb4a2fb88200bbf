"""What holds for every operator, over shapes, dtypes and zero adapters."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from populora_trainer.errors import OperatorError, PopuloraError
from populora_trainer.population.child_report import report
from populora_trainer.population.factors import Factors, Pair, copy_factors, delta
from populora_trainer.population.operators import FUNCTIONS, OPERATORS, Parameter, breed, find

CROSSOVERS = [id for id, operator in OPERATORS.items() if operator.arity == 2]
RANDOM = ["M1", "M2", "M3", "M4", "M5", "M6", "X1", "X2", "X3", "X4", "X7"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# Settings that make a crossover of a parent with itself the parent.
LOSSLESS: dict[str, dict[str, Parameter]] = {
    "X1": {"p": 0.0},
    "X6": {"density": 1.0},
    "X7": {"density": 1.0, "epsilon": 0.0},
}


def adapter(
    seed: int,
    shape: tuple[int, int, int] = (4, 12, 9),
    *,
    slots: int = 3,
    dtype: torch.dtype = torch.float32,
    zero: bool = False,
    like: Factors | None = None,
    drift: float = 0.0,
) -> Factors:
    """An adapter whose modules differ in width; with `like` its A's are those, moved by `drift` of their size."""
    rank, inputs, outputs = shape
    generator = torch.Generator().manual_seed(seed)
    factors: Factors = {}
    for slot in range(slots):
        path = f"layers.{slot}.proj"
        A = torch.randn(rank, inputs + slot, generator=generator, dtype=torch.float64) / inputs**0.5
        B = torch.randn(outputs + 2 * slot, rank, generator=generator, dtype=torch.float64) * 0.1
        if like is not None:
            A = like[path].A.double() + drift * A
        factors[path] = Pair(A.to(dtype), torch.zeros_like(B).to(dtype) if zero else B.to(dtype))
    return factors


def child_of(id: str, *parents: Factors, seed: int = 0, **parameters: Parameter) -> Factors:
    return breed(id, parents[: OPERATORS[id].arity], torch.Generator().manual_seed(seed), parameters)


def deltas(factors: Factors) -> Tensor:
    return torch.cat([delta(pair).double().flatten() for pair in factors.values()])


def same(first: Factors, second: Factors) -> bool:
    return list(first) == list(second) and all(
        torch.equal(first[path].A, second[path].A) and torch.equal(first[path].B, second[path].B) for path in first
    )


shapes = st.tuples(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12))


@pytest.mark.parametrize("id", OPERATORS)
@settings(max_examples=12)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    zeros=st.tuples(st.booleans(), st.booleans()),
    kinship=st.sampled_from(["shared A", "drifted A", "independent A"]),
    seed=st.integers(0, 99),
)
def test_a_child_has_its_parents_form_can_be_trained_and_leaves_them_untouched(
    id: str, shape: tuple[int, int, int], dtype: torch.dtype, zeros: tuple[bool, bool], kinship: str, seed: int
) -> None:
    first = adapter(seed, shape, slots=2, dtype=dtype, zero=zeros[0])
    like = None if kinship == "independent A" else first
    drift = 0.3 if kinship == "drifted A" else 0.0
    second = adapter(seed + 1, shape, slots=2, dtype=dtype, zero=zeros[1], like=like, drift=drift)
    before = copy_factors(first), copy_factors(second)
    child = child_of(id, first, second, seed=seed)
    assert same(first, before[0])
    assert same(second, before[1])
    assert list(child) == list(first)
    for path, pair in child.items():
        for made, parents in zip(pair, zip(first[path], second[path], strict=True), strict=True):
            assert made.shape == parents[0].shape
            assert made.dtype == dtype
            assert made.device == parents[0].device
            assert torch.isfinite(made).all()
            assert made.data_ptr() not in {parent.data_ptr() for parent in parents}
        # A direction whose row of A and column of B are both zero gets no gradient, ever.
        dead = (pair.A.abs().amax(1) == 0) & (pair.B.abs().amax(0) == 0)
        assert not dead.any()
        if all(zeros) or (zeros[0] and OPERATORS[id].arity == 1):
            assert delta(pair).abs().max() == 0
    assert same(child, child_of(id, first, second, seed=seed))


@pytest.mark.parametrize("id", OPERATORS)
def test_the_seed_decides_the_child_where_there_is_chance_and_only_there(id: str) -> None:
    first = adapter(1, slots=8)
    second = adapter(2, slots=8)
    assert same(child_of(id, first, second), child_of(id, first, second, seed=1)) == (id not in RANDOM)


@pytest.mark.parametrize("id", ["C1", "C2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_controls_are_copies_bit_for_bit(id: str, dtype: torch.dtype) -> None:
    first, second = adapter(1, dtype=dtype), adapter(2, dtype=dtype)
    assert same(child_of(id, first, second), first)


@pytest.mark.parametrize("id", CROSSOVERS)
@pytest.mark.parametrize("shape", [(4, 12, 9), (1, 5, 7), (5, 3, 8)])
def test_a_parent_crossed_with_itself_is_itself(id: str, shape: tuple[int, int, int]) -> None:
    parent = adapter(1, shape)
    child = child_of(id, parent, copy_factors(parent), **LOSSLESS.get(id, {}))
    torch.testing.assert_close(deltas(child), deltas(parent), rtol=0, atol=1e-5 * float(deltas(parent).norm()))


@pytest.mark.parametrize("id", OPERATORS)
@pytest.mark.parametrize("drift", [0.0, 0.5])
@pytest.mark.parametrize("scale", [0.25, 64.0])
def test_scaled_parents_have_a_scaled_child(id: str, drift: float, scale: float) -> None:
    first = adapter(1)
    second = adapter(2, like=first, drift=drift)
    scaled = [{path: Pair(A, B * scale) for path, (A, B) in parent.items()} for parent in (first, second)]
    plain, large = deltas(child_of(id, first, second, seed=3)), deltas(child_of(id, *scaled, seed=3))
    torch.testing.assert_close(large, scale * plain, rtol=0, atol=1e-4 * float(large.norm()))


@pytest.mark.parametrize(
    ("id", "parameters"), [("X1", {"p": 0.0}), ("X3", {"share": 0.5}), ("X4", {}), ("X5", {}), ("X8", {})]
)
def test_mixed_deltas_do_not_depend_on_the_basis_a_parent_is_written_in(
    id: str, parameters: dict[str, Parameter]
) -> None:
    first, second = adapter(1), adapter(2)
    G = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0))).Q
    turned = {path: Pair(G @ A, B @ G.T) for path, (A, B) in second.items()}
    plain, other = child_of(id, first, second, **parameters), child_of(id, first, turned, **parameters)
    torch.testing.assert_close(deltas(other), deltas(plain), rtol=0, atol=1e-4 * float(deltas(plain).norm()))


@pytest.mark.parametrize("id", OPERATORS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@given(whose=st.integers(1, 2), slot=st.integers(0, 2), factor=st.sampled_from("AB"), kin=st.booleans())
@settings(max_examples=12)
def test_parents_with_nan_or_infinity_are_refused_by_name(
    id: str, value: float, whose: int, slot: int, factor: str, kin: bool
) -> None:
    whose = min(whose, OPERATORS[id].arity)
    first = adapter(1)
    parents = first, adapter(2, like=first if kin else None)
    getattr(parents[whose - 1][f"layers.{slot}.proj"], factor)[0, 0] = value
    with pytest.raises(
        OperatorError, match=rf"^parent {whose}: layers\.{slot}\.proj\.lora_{factor} holds NaN or infinity"
    ):
        child_of(id, *parents)


@pytest.mark.parametrize(
    ("id", "parameters", "ignored"),
    [("X5", {"weight": 0.0}, 2), ("X5", {"weight": 1.0}, 1), ("X4", {"eta_max": 1.0}, 1), ("X1", {"p": 0.99}, 2)],
)
def test_a_parent_that_hardly_counts_is_looked_at_as_well(
    id: str, parameters: dict[str, Parameter], ignored: int
) -> None:
    parents = adapter(1), adapter(2)
    parents[ignored - 1]["layers.2.proj"].B[3, 1] = float("inf")
    with pytest.raises(OperatorError, match=rf"^parent {ignored}: layers\.2\.proj\.lora_B holds"):
        child_of(id, *parents, **parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_child_is_made_of_the_same_values_as_a_small_one(dtype: torch.dtype) -> None:
    first, second = (adapter(seed, (8, 40_000, 30_000), slots=8, dtype=dtype) for seed in (1, 2))
    assert same(child_of("C1", first), first)
    path = "layers.7.proj"
    large = child_of("X5", first, second, weight=0.25)
    assert same({path: large[path]}, child_of("X5", {path: first[path]}, {path: second[path]}, weight=0.25))
    before = copy_factors({path: large[path]})
    large["layers.6.proj"].B.zero_()
    assert same({path: large[path]}, before)


def test_a_child_that_overflows_is_refused_rather_than_returned() -> None:
    first, second = adapter(1, dtype=torch.bfloat16), adapter(2, dtype=torch.bfloat16)
    for parent, value in ((first, -3e38), (second, 3e38)):
        parent["layers.0.proj"].B.fill_(value)
    with pytest.raises(OperatorError, match="the child"):
        child_of("X4", first, second, eta_min=1.5)


def test_unknown_operators_parents_and_parameters_are_refused_in_one_sentence() -> None:
    first, second = adapter(1), adapter(2)
    generator = torch.Generator()
    cases: list[tuple[str, list[Factors], dict[str, Parameter], str]] = [
        ("M7", [first], {}, "M7 does not exist; it must be one of M1, M2"),
        ("M1", [first, second], {}, "M1 takes 1 parent; 2 given"),
        ("X1", [first], {}, "X1 takes 2 parents; 1 given"),
        ("M4", [first], {"rho": 1.0}, "M4 has no parameter rho; it has: epsilon"),
        ("X2", [first, second], {"p": 1.0}, "X2 has no parameter p; it has: none"),
        ("M1", [first], {"first_order": 1.0}, "first_order is 1.0; it must be true or false"),
        ("M1", [first], {"epsilon": True}, "epsilon is True; it must be a number"),
        ("M4", [first], {"epsilon": -0.1}, r"epsilon is -0\.1; it must be a finite number, 0 or more"),
        ("M4", [first], {"epsilon": float("nan")}, "epsilon is nan"),
        ("M2", [first], {"fraction": 0.0}, "above 0 and at most 1"),
        ("M3", [first], {"fraction": 1.0}, "0 or more and below 1"),
        ("M5", [first], {"alpha": float("inf")}, "alpha is inf"),
        ("M6", [first], {"keep": 1.5}, "keep is 1.5"),
        ("X1", [first, second], {"p": 1.0}, "p is 1"),
        ("X3", [first, second], {"share": 1.0}, "share is 1"),
        ("X4", [first, second], {"eta_min": 0.5}, "eta_min is 0.5"),
        ("X4", [first, second], {"eta_max": 0.9}, "eta_max is 0.9"),
        ("X5", [first, second], {"weight": 2.0}, "weight is 2"),
        ("X6", [first, second], {"density": 0.0}, "density is 0"),
        ("X7", [first, second], {"density": 0.95}, "density -/\\+ epsilon"),
        ("X8", [first, second], {"weight": -1.0}, "weight is -1"),
    ]
    for id, parents, parameters, words in cases:
        with pytest.raises(OperatorError, match=words):
            breed(id, parents, generator, parameters)
    assert issubclass(OperatorError, PopuloraError)


def test_the_table_names_all_seventeen_with_what_a_reader_needs() -> None:
    assert list(OPERATORS) == [*(f"M{n}" for n in range(1, 7)), *(f"X{n}" for n in range(1, 10)), "C1", "C2"]
    for id, operator in OPERATORS.items():
        assert operator.id == id
        assert find(id) is operator
        assert operator.description.endswith(".")
        assert len(operator.description) < 100
        assert operator.source
        function = FUNCTIONS[id]
        assert function.__doc__.startswith(id)  # type: ignore[union-attr]
        takes = inspect.signature(function).parameters.values()
        assert {one.name: one.default for one in takes if one.kind is one.KEYWORD_ONLY} == operator.parameters
        assert sum(one.name.startswith("parent") for one in takes) == operator.arity
        assert operator.arity == (1 if id.startswith("M") or id == "C1" else 2)


def test_the_report_measures_norm_cosine_and_what_is_kept() -> None:
    first, second = adapter(1), adapter(2)
    double = {path: Pair(A, -2 * B) for path, (A, B) in first.items()}
    seen = report([first, second], double)
    assert seen.norm == pytest.approx(2 * float(deltas(first).norm()), rel=1e-5)
    assert seen.parents[0].norm_ratio == pytest.approx(2, rel=1e-5)
    assert seen.parents[0].input_factor_distance == 0
    assert seen.parents[1].input_factor_distance > 0.5
    assert seen.parents[0].cosine == pytest.approx(-1, rel=1e-5)
    assert seen.parents[0].retained_energy == pytest.approx(1, rel=1e-5)
    dense = torch.nn.functional.cosine_similarity(deltas(first), -deltas(second), dim=0)
    assert seen.parents[1].cosine == pytest.approx(float(dense), abs=1e-5)
    assert 0 < seen.parents[1].retained_energy < 1  # type: ignore[operator]


def test_the_report_of_zero_deltas_has_no_ratios() -> None:
    zero, other = adapter(1, zero=True), adapter(2)
    assert report([zero], other).parents[0].norm_ratio is None
    nothing = report([other], zero).parents[0]
    assert (nothing.norm_ratio, nothing.cosine, nothing.retained_energy) == (0, None, 0)
