"""What a difference between the engine's log-probabilities and the trainer's leads to."""

import asyncio
from dataclasses import replace

import pytest

from populora_trainer.errors import RolloutError
from populora_trainer.learning.mismatch import ABSURD, NOTABLE, doubt
from populora_trainer.learning.update import Group, Learner, LearnerSettings
from populora_trainer.population.members import founders
from populora_trainer.rollout.engine import Completion, RolloutRequest, all_completions
from populora_trainer.rollout.transformers_engine import TransformersEngine

MEMBERS = founders(2, 1)


def test_what_is_usual_is_not_worth_a_word():
    assert doubt({}, MEMBERS, 3) is None
    assert doubt({0: 0.0, 1: NOTABLE}, MEMBERS, 3) is None


def test_a_notable_difference_of_one_member_is_told_with_its_name():
    said = doubt({0: 0.01, 2: 0.31}, MEMBERS, 3)
    assert said is not None
    assert said.startswith("In step 3, the log-probabilities of the rollout engine and of the trainer differ by 0.31 ")
    assert "for s0; up to 0.1 is usual, and above 0.5 the run ends" in said


@pytest.mark.parametrize("value", [ABSURD + 0.01, 20.0, float("nan")])
def test_an_absurd_difference_of_one_member_ends_the_run(value):
    with pytest.raises(RolloutError, match=r"for t1, and 0\.5 is the limit: its adapter is not applied"):
        doubt({0: 0.01, 1: value, 2: 0.2}, MEMBERS, 3)


def _sampled(population, temperature, *, as_if=lambda member: member):
    """Groups of what members sampled, with rewards that have variance; `as_if` says whose weights sampled."""
    engine = TransformersEngine(population, end_ids=[1], pad_id=0, max_prompt_tokens=16)
    requests = [RolloutRequest(as_if(member), (5 + member, 7, 9), 8, member, 6, temperature) for member in range(3)]
    found = asyncio.run(all_completions(engine, requests))
    return [
        Group(member, "student", "code_o", requests[member].prompt_ids, tuple(found[member]), (1.0, -0.5) * 4)
        for member in range(3)
    ]


def _update(population, groups, temperature=1.0):
    settings = LearnerSettings(learning_rate=0.0, temperature=temperature)
    return Learner(population, settings, pad_id=0).update(groups)


def test_each_members_difference_is_its_own(make_population):
    population = make_population(members=3)
    found = _update(population, _sampled(population, 1.0))
    assert set(found.mismatch_M) == {0, 1, 2}
    assert max(found.mismatch_M.values()) < 1e-5
    assert found.learner()["mismatch_worst_member"] == max(found.mismatch_M.values())

    # Member 1's completions come from member 2's weights: as if its adapter had been loaded under the wrong name.
    mixed = _update(population, _sampled(population, 1.0, as_if=lambda member: 2 if member == 1 else member))
    assert mixed.mismatch_M[1] > 0.1
    assert mixed.mismatch_M[0] < 1e-5
    assert mixed.mismatch_M[2] < 1e-5
    tokens = {0: 0, 1: 0, 2: 0}
    for group in _sampled(population, 1.0, as_if=lambda member: 2 if member == 1 else member):
        tokens[group.member] += sum(len(one.token_ids) for one in group.completions)
    mean = sum(mixed.mismatch_M[member] * tokens[member] for member in tokens) / sum(tokens.values())
    assert mixed.mismatch_mean == pytest.approx(mean, rel=1e-4)


def test_log_probabilities_without_the_temperature_are_found_out(make_population):
    population = make_population(members=3)
    groups = _sampled(population, 0.6)
    assert max(_update(population, groups, temperature=0.6).mismatch_M.values()) < 1e-5
    raw = [
        replace(
            group,
            completions=tuple(
                Completion(one.token_ids, tuple(value - 0.7 for value in one.logprobs), one.finish_reason)
                for one in group.completions
            ),
        )
        for group in groups
    ]
    found = _update(population, raw, temperature=0.6)
    with pytest.raises(RolloutError, match="processed_logprobs"):
        doubt(found.mismatch_M, MEMBERS, 1)
