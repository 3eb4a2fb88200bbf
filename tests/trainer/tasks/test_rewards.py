import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.tasks.rewards import PRESETS, student_reward, teacher_reward

PAPER = PRESETS["PopuLoRA"]
ABSOLUTE_ZERO = PRESETS["AbsoluteZero"]


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize(("kind", "reward"), [("correct", 1.0), ("wrong", -0.5), ("malformed", -1.0)])
def test_students_are_paid_by_the_verdict(preset, kind, reward):
    assert student_reward(kind, preset) == reward


@pytest.mark.parametrize(
    ("solve_rate", "paper", "absolute_zero"),
    [
        (None, -1.0, -1.0),
        (0.0, 0.0, -0.5),
        (0.125, 0.875, 0.875),
        (0.5, 0.5, 0.5),
        (0.875, 0.125, 0.125),
        (1.0, 0.0, -0.5),
    ],
)
def test_teachers_are_paid_by_the_solve_rate(solve_rate, paper, absolute_zero):
    assert teacher_reward(solve_rate, PAPER) == paper
    assert teacher_reward(solve_rate, ABSOLUTE_ZERO) == absolute_zero


def test_repetition_costs_only_where_a_penalty_is_set():
    assert teacher_reward(0.25, PAPER, seen=True) == 0.75
    assert teacher_reward(0.25, PAPER, seen=True, novelty_penalty=0.5) == 0.25
    assert teacher_reward(0.0, PAPER, seen=True, novelty_penalty=0.5) == -0.5
    assert teacher_reward(0.25, PAPER, seen=False, novelty_penalty=0.5) == 0.75


def test_the_penalty_spares_invalid_proposals_and_given_programs():
    assert teacher_reward(None, PAPER, seen=True, novelty_penalty=0.5) == -1.0
    assert teacher_reward(0.25, PAPER, task="code_f", seen=True, novelty_penalty=0.5) == 0.75


BETWEEN = st.floats(0, 1, exclude_min=True, exclude_max=True)


@given(BETWEEN, BETWEEN, st.sampled_from(list(PRESETS.values())))
def test_harder_problems_pay_more_as_long_as_somebody_solves_them(one, other, preset):
    harder, easier = sorted((one, other))
    assert 1 >= teacher_reward(harder, preset) >= teacher_reward(easier, preset) >= 0
    assert teacher_reward(easier, preset) >= teacher_reward(0.0, preset) >= teacher_reward(None, preset)


@pytest.mark.parametrize("solve_rate", [-0.1, 1.1, float("nan")])
def test_a_solve_rate_outside_of_its_range_is_an_error(solve_rate):
    with pytest.raises(ValueError, match="solve rate"):
        teacher_reward(solve_rate, PAPER)


def test_an_unknown_verdict_is_an_error():
    with pytest.raises(ValueError, match="valid"):
        student_reward("valid", PAPER)
