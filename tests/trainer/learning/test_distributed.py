"""An update on many ranks is the update on one, whatever the rows and however they fall."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from crew import Crew
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from populora_trainer.errors import RanksError
from populora_trainer.learning.distributed import SpreadLearner, checksum
from populora_trainer.learning.update import Group as RewardGroup
from populora_trainer.learning.update import Learner, LearnerSettings, UpdateMetrics
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.ranks.group import Group
from populora_trainer.rollout.engine import Completion

MEMBERS = 3
SETTINGS = LearnerSettings(learning_rate=1e-2, gradient_clip_norm=0.5, batch_tokens=64)
COUNTED = ("learned_tokens", "computed_tokens", "unshared_tokens", "updated", "skipped")
MEASURED = ("entropy", "clipped", "truncated", "mismatch_mean", "mismatch_max", "mismatch_kl", "kl_to_base")

Population = Callable[..., LoraPopulation]


@st.composite
def reward_groups(draw: st.DrawFn) -> RewardGroup:
    """One prompt's completions: of any member, some without a reward, some all alike."""
    tokens = st.integers(2, 47)
    answers = draw(st.lists(st.lists(tokens, min_size=1, max_size=9), min_size=1, max_size=5))
    rewards = draw(
        st.lists(
            st.sampled_from([1.0, 0.0, -0.5, None]) if draw(st.booleans()) else st.just(1.0),
            min_size=len(answers),
            max_size=len(answers),
        )
    )
    completions = tuple(Completion(tuple(ids), tuple(-3.0 - 0.1 * one for one in ids), "stop") for ids in answers)
    return RewardGroup(
        draw(st.integers(0, MEMBERS - 1)),
        draw(st.sampled_from(["teacher", "student"])),
        "code_o",
        tuple(draw(st.lists(tokens, min_size=1, max_size=12))),
        completions,
        tuple(rewards),
    )


def full(member: int, length: int = 4) -> RewardGroup:
    completions = tuple(Completion((2 + i,) * length, (-3.0,) * length, "stop") for i in range(3))
    return RewardGroup(member, "student", "code_o", (5, 6, 7), completions, (1.0, 0.0, -0.5))


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def crew(request: pytest.FixtureRequest, make_population: Population) -> Iterator[Crew]:
    learners: list[SpreadLearner] = []

    def begin(group: Group, chosen: LearnerSettings, spoiled: int | None) -> None:
        population = make_population(members=MEMBERS)
        if spoiled is not None:
            spoil(population, spoiled)
        learners[:] = [SpreadLearner(population, chosen, pad_id=0, group=group)]

    def update(group: Group, groups: list[RewardGroup]) -> UpdateMetrics | None:
        (learner,) = learners
        if group.world.leads:
            return learner.update(groups)
        learner.assist(group.receive())
        return None

    def state(group: Group) -> dict[str, Tensor]:
        return state_of(learners[0])

    def disturb(group: Group, rank: int, moments: bool) -> None:
        if group.world.rank == rank:
            learner = learners[0]
            target = learner.optimizer.moments()[-1] if moments else learner.population.parameters()[-1].detach()
            target[1, 0, 0] += 1e-3

    def share(group: Group) -> None:
        if group.world.leads:
            learners[0].share()
        else:
            learners[0].adopt(group.receive())

    made = Crew(request.param, {"begin": begin, "update": update, "state": state, "disturb": disturb, "share": share})
    yield made
    made.close()


def spoil(population: LoraPopulation, member: int) -> None:
    with torch.no_grad():
        for parameter in population.parameters():
            parameter[member] = float("nan")


def state_of(learner: Learner) -> dict[str, Tensor]:
    weights = {str(index): one.detach().clone() for index, one in enumerate(learner.population.parameters())}
    return learner.state() | weights


def alone(make_population: Population, chosen: LearnerSettings, groups: list[RewardGroup], spoiled: int | None = None):
    population = make_population(members=MEMBERS)
    if spoiled is not None:
        spoil(population, spoiled)
    learner = Learner(population, chosen, pad_id=0)
    return learner.update(groups), state_of(learner)


def check_alike(metrics: UpdateMetrics, expected: UpdateMetrics) -> None:
    for name in COUNTED:
        assert getattr(metrics, name) == getattr(expected, name), name
    for name in MEASURED:
        found, value = getattr(metrics, name), getattr(expected, name)
        assert found == (None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)), name
    assert metrics.loss_M == pytest.approx(expected.loss_M, rel=1e-4, abs=1e-5, nan_ok=True)
    assert metrics.mismatch_M == pytest.approx(expected.mismatch_M, rel=1e-4, abs=1e-6, nan_ok=True)
    assert metrics.gradient_norm_M == pytest.approx(expected.gradient_norm_M, rel=1e-4, abs=1e-6, nan_ok=True)
    assert metrics.advantage() == expected.advantage()


def check_same(states: list[dict[str, Tensor]]) -> None:
    for name, tensor in states[0].items():
        assert all(torch.equal(other[name].nan_to_num(7), tensor.nan_to_num(7)) for other in states), name


@settings(max_examples=25)
@given(
    groups=st.lists(reward_groups(), max_size=7),
    kl=st.sampled_from([0.0, 0.3]),
    batch_tokens=st.sampled_from([16, 64, 8192]),
)
def test_an_update_on_ranks_is_the_update_on_one(
    crew: Crew, make_population: Population, groups: list[RewardGroup], kl: float, batch_tokens: int
) -> None:
    chosen = replace(SETTINGS, kl_coefficient=kl, batch_tokens=batch_tokens)
    expected, single = alone(make_population, chosen, groups)
    crew.same("begin", chosen, None)
    metrics = crew.same("update", groups)[0]
    states = crew.same("state")
    check_alike(metrics, expected)
    check_same(states)
    for name, tensor in single.items():
        if name.startswith(("first", "second", "steps")):  # a tenth of the clipped gradient, and its square
            torch.testing.assert_close(states[0][name], tensor, rtol=1e-3, atol=1e-6)
        else:
            # Adam's first step is as long as the learning rate, whatever the gradient: where that is mere rounding, the
            # order of a sum decides on its sign, and the moments above are all that can be compared.
            if all(not norm > 0 or norm > 1e-3 for norm in expected.gradient_norm_M):
                assert (states[0][name] - tensor).abs().mean() < 1e-5, name


def test_ranks_without_rows_and_members_without_tokens_take_the_same_step(
    crew: Crew, make_population: Population
) -> None:
    expected, _ = alone(make_population, SETTINGS, [full(1, 9)])
    crew.same("begin", SETTINGS, None)
    metrics = crew.same("update", [full(1, 9)])[0]
    states = crew.same("state")
    check_alike(metrics, expected)
    check_same(states)
    assert metrics.updated == (1,)
    assert states[0]["steps"].tolist() == [0, 1, 0]
    assert metrics.micro_batches == expected.micro_batches == 1
    untouched = make_population(members=MEMBERS).parameters()
    for index, parameter in enumerate(untouched):
        assert torch.equal(states[0][str(index)][[0, 2]], parameter[[0, 2]])
        assert not torch.equal(states[0][str(index)][1], parameter[1])


def test_nothing_to_learn_changes_nothing_on_any_rank(crew: Crew, make_population: Population) -> None:
    dead = replace(full(0), rewards_G=(0.5, 0.5, 0.5))
    crew.same("begin", SETTINGS, None)
    before = crew.same("state")
    metrics = crew.same("update", [dead])[0]
    assert (metrics.updated, metrics.learned_tokens, metrics.entropy) == ((), 0, {})
    check_same([*before, *crew.same("state")])


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks(crew: Crew, make_population: Population) -> None:
    groups = [full(0), full(1), full(2), full(1, 6)]
    expected, single = alone(make_population, SETTINGS, groups, spoiled=1)
    crew.same("begin", SETTINGS, 1)
    metrics = crew.same("update", groups)[0]
    states = crew.same("state")
    assert metrics.skipped == expected.skipped == (1,)
    assert metrics.updated == (0, 2)
    assert states[0]["steps"].tolist() == [1, 0, 1]
    check_same(states)
    for name, tensor in single.items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-3, atol=1e-4, equal_nan=True)


def test_steps_repeat_bit_for_bit_on_as_many_ranks(crew: Crew) -> None:
    runs: list[dict[str, Any]] = []
    for _ in range(2):
        crew.same("begin", SETTINGS, None)
        for groups in ([full(0), full(2, 7)], [full(2), full(1, 3), full(0, 5)]):
            crew.same("update", groups)
        runs.append(crew.same("state")[0])
    check_same(runs)
    assert runs[0]["steps"].tolist() == [2, 1, 2]


@pytest.mark.parametrize("moments", [False, True], ids=["a weight", "a moment"])
def test_a_rank_that_differs_is_named_and_gets_right_when_rank_0_shares(crew: Crew, moments: bool) -> None:
    crew.same("begin", SETTINGS, None)
    crew.same("update", [full(0), full(1)])
    crew.same("disturb", 1, moments)
    with pytest.raises(RanksError, match="the weights of rank 1 differ from those of rank 0 after the same step"):
        crew.same("update", [full(0), full(1)])
    crew.same("share")
    check_same(crew.same("state"))
    crew.same("update", [full(0), full(1)])
    check_same(crew.same("state"))


@given(st.lists(st.floats(width=32), min_size=2, max_size=30), st.integers(0, 2**20), st.integers(0, 31))
def test_a_checksum_is_of_bits(values: list[float], place: int, bit: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    changed = tensor.clone()
    place %= len(values)
    changed.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert checksum([tensor]) == checksum([tensor.clone()])
    assert checksum([tensor]) != checksum([changed])
