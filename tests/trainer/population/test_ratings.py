import math
import random
from dataclasses import replace

import numpy as np
import pytest
import trueskill
from hypothesis import given, settings
from hypothesis import strategies as st

from populora_trainer.population.members import Member, founders, single_agent
from populora_trainer.population.ratings import (
    BETA,
    DRAW_MARGIN,
    TAU,
    Exchange,
    Game,
    environment,
    games,
    rate,
    teacher_points,
    win_probability,
)

OUTCOMES = ("teacher", "student", "draw")


def game(outcome, teacher=0, student=1):
    return Game(teacher, student, "code_o", 1.0, outcome)


def pair(mu_teacher=25.0, sigma_teacher=25 / 3, mu_student=25.0, sigma_student=25 / 3):
    return (
        Member("t0", "teacher", mu=mu_teacher, sigma=sigma_teacher),
        Member("s0", "student", mu=mu_student, sigma=sigma_student),
    )


def test_the_first_win_moves_two_new_members_as_the_published_example():
    teacher, student = rate(founders(1, 1), [game("teacher")])
    assert (teacher.mu, teacher.sigma, teacher.lcb) == pytest.approx((29.396, 7.171, 7.881), abs=1e-3)
    assert (student.mu, student.sigma) == pytest.approx((20.604, 7.171), abs=1e-3)
    assert (teacher.games, student.games) == (1, 1)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 50), st.floats(0.8, 9), st.floats(0, 50), st.floats(0.8, 9), st.sampled_from(OUTCOMES))
def test_one_game_is_trueskills_own_update(mu_teacher, sigma_teacher, mu_student, sigma_student, outcome):
    reference = trueskill.TrueSkill(backend="mpmath")
    ranks = {"teacher": (0, 1), "student": (1, 0), "draw": (0, 0)}[outcome]
    (left,), (right,) = reference.rate(
        [(reference.create_rating(mu_teacher, sigma_teacher),), (reference.create_rating(mu_student, sigma_student),)],
        ranks=ranks,
    )
    teacher, student = rate(pair(mu_teacher, sigma_teacher, mu_student, sigma_student), [game(outcome)])
    assert (teacher.mu, teacher.sigma) == pytest.approx((left.mu, left.sigma), abs=1e-5)
    assert (student.mu, student.sigma) == pytest.approx((right.mu, right.sigma), abs=1e-5)


@pytest.mark.parametrize("outcomes", [("teacher",) * 3, ("teacher", "draw", "student"), ("student", "student", "draw")])
def test_several_games_are_near_the_exact_posterior_on_a_grid(outcomes):
    # Independent of the engine: numerical integration of prior times likelihood over both skills.
    axis = np.linspace(-30.0, 80.0, 701)
    sigma = math.hypot(25 / 3, TAU)
    density = np.exp(-0.5 * ((axis - 25.0) / sigma) ** 2)
    joint = np.outer(density, density)
    difference = axis[:, None] - axis[None, :]
    spread = math.sqrt(2.0) * BETA
    margin = environment().ppf((0.10 + 1) / 2.0) * spread
    below = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2.0)))
    wins, losses = below((difference - margin) / spread), below((-difference - margin) / spread)
    for outcome in outcomes:
        joint = joint * {"teacher": wins, "student": losses, "draw": 1.0 - wins - losses}[outcome]
    marginal = joint.sum(axis=1) / joint.sum()
    mean = float((marginal * axis).sum())
    deviation = math.sqrt(float((marginal * (axis - mean) ** 2).sum()))
    teacher, _ = rate(founders(1, 1), [game(outcome) for outcome in outcomes])
    assert (teacher.mu, teacher.sigma) == pytest.approx((mean, deviation), rel=0.02)


played = st.lists(
    st.builds(game, st.sampled_from(OUTCOMES), st.integers(0, 2), st.integers(3, 4)), min_size=1, max_size=12
)


@settings(max_examples=40, deadline=None)
@given(played, st.randoms(use_true_random=False))
def test_the_order_of_a_steps_games_does_not_matter(step, random_order):
    shuffled = list(step)
    random_order.shuffle(shuffled)
    assert rate(founders(3, 2), step) == rate(founders(3, 2), shuffled)


@settings(max_examples=40, deadline=None)
@given(played)
def test_games_narrow_every_players_rating_and_leave_the_others_alone(step):
    before = founders(3, 2)
    after = rate(before, step)
    busy = {slot for one in step for slot in (one.teacher, one.student)}
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        if slot in busy:
            assert new.sigma < math.hypot(old.sigma, TAU)
            assert new.games == sum(slot in (one.teacher, one.student) for one in step)
        else:
            assert new == old


@settings(max_examples=40, deadline=None)
@given(played)
def test_swapping_winners_mirrors_the_ratings(step):
    mirror = {"teacher": "student", "student": "teacher", "draw": "draw"}
    after = rate(founders(3, 2), step)
    mirrored = rate(founders(3, 2), [replace(one, outcome=mirror[one.outcome]) for one in step])
    for one, other in zip(after, mirrored, strict=True):
        assert one.mu - 25.0 == pytest.approx(25.0 - other.mu, abs=1e-5)
        assert one.sigma == pytest.approx(other.sigma, abs=1e-5)


@pytest.mark.parametrize("count", [1, 3, 72, 1000])
@pytest.mark.parametrize("gap", [5.0, 60.0, 500.0])
def test_upsets_of_any_size_are_rated(gap, count):
    # `gap` counts standard deviations of the difference between the two performances.
    distance = gap * math.sqrt(2.0 * BETA**2 + 2.0)
    before = pair(25.0, 1.0, 25.0 + distance, 1.0)
    for outcome in OUTCOMES:
        teacher, student = rate(before, [game(outcome)] * count)
        assert all(math.isfinite(value) for value in (teacher.mu, teacher.sigma, student.mu, student.sigma))
        assert 0.0 < teacher.sigma <= 1.01
        assert teacher.mu > 25.0 or outcome == "student"
        assert student.mu < 25.0 + distance or outcome == "student"
    with pytest.raises(FloatingPointError):
        rate_with_the_default_backend(25.0, 25.0 + max(distance, 400.0))


def rate_with_the_default_backend(mu_winner, mu_loser):
    env = trueskill.TrueSkill()
    env.rate([(env.create_rating(mu_winner, 1.0),), (env.create_rating(mu_loser, 1.0),)])


def test_rating_leaves_trueskills_global_environment_alone():
    before = vars(trueskill.global_env()).copy()
    rate(founders(1, 1), [game("draw")])
    assert vars(trueskill.global_env()) == before


def test_the_win_probability_is_even_between_equals_and_grows_with_the_teachers_mean():
    assert win_probability(*founders(1, 1)) == pytest.approx(0.5)
    assert win_probability(*pair(mu_teacher=30.0)) == pytest.approx(
        0.5 * (1 + math.erf(5.0 / math.sqrt(2 * BETA**2 + 2 * (25 / 3) ** 2) / math.sqrt(2)))
    )
    assert win_probability(*pair(mu_teacher=1e6, mu_student=0.0)) == 1.0


rates = st.one_of(st.none(), st.integers(0, 8).map(lambda solved: solved / 8))
step_of_problems = st.lists(
    st.builds(Exchange, st.integers(0, 2), st.integers(3, 4), st.sampled_from(["code_i", "code_o", "code_f"]), rates),
    max_size=30,
)


@pytest.mark.parametrize(
    ("solve_rates", "outcome"),
    [
        ([0.25, 0.25], "teacher"),
        ([1.0, 1.0], "student"),
        ([0.5, 0.5], "draw"),
        ([0.5 - DRAW_MARGIN], "draw"),
        ([0.5 + DRAW_MARGIN], "draw"),
        ([0.44], "teacher"),
        ([None, None], "student"),
        ([0.0, 0.0], "student"),
        ([0.125, None], "student"),
        ([0.125, 0.0], "teacher"),
        ([0.75, 0.0, 0.0], "student"),
        ([0.125, 0.125, 0.125, None], "teacher"),
        ([0.125, 0.125, None, None], "student"),
    ],
)
def test_the_winner_is_ahead_of_an_even_solve_rate_by_more_than_the_margin(solve_rates, outcome):
    (one,) = games([Exchange(0, 1, "code_o", rate_) for rate_ in solve_rates])
    assert one.outcome == outcome


@settings(max_examples=20, deadline=None)
@given(step_of_problems, st.data())
def test_a_problem_that_nobody_could_verify_or_solve_never_raises_its_teacher(step, data):
    worthless = replace(
        data.draw(st.sampled_from([*step, Exchange(0, 3, "code_o", None)])),
        solve_rate=data.draw(st.sampled_from([None, 0.0])),
    )
    for granularity in ("Matchup", "TaskType", "Problem"):
        before = rate(founders(3, 2), games(step, granularity))
        after = rate(founders(3, 2), games([*step, worthless], granularity))
        assert after[worthless.teacher].mu <= before[worthless.teacher].mu + 1e-5


@settings(max_examples=40, deadline=None)
@given(step_of_problems)
def test_a_refused_proposal_is_never_better_than_the_solved_problem_it_stands_for(step):
    rank = {"student": 0, "draw": 1, "teacher": 2}
    for index, exchange in enumerate(step):
        if exchange.solve_rate == 0.0:
            continue
        worse = [*step[:index], replace(exchange, solve_rate=None), *step[index + 1 :]]
        for granularity in ("Matchup", "TaskType", "Problem"):
            before = [rank[one.outcome] for one in games(step, granularity)]
            after = [rank[one.outcome] for one in games(worse, granularity)]
            assert sum(after) <= sum(before)
            assert len(after) == len(before)


@settings(max_examples=40, deadline=None)
@given(step_of_problems, st.sampled_from(["Matchup", "TaskType", "Problem"]), st.randoms(use_true_random=False))
def test_games_do_not_depend_on_the_order_of_the_problems(step, granularity, random_order):
    shuffled = list(step)
    random_order.shuffle(shuffled)
    assert games(step, granularity) == games(shuffled, granularity)


def test_a_game_covers_a_matchup_a_task_type_or_a_problem():
    step = [
        Exchange(0, 1, task, rate_) for task in ("code_i", "code_o", "code_f") for rate_ in (0.25, 0.75, None, 0.125)
    ]
    assert len(games(step, "Matchup")) == 1
    assert [one.task for one in games(step, "TaskType")] == ["code_f", "code_i", "code_o"]
    assert len(games(step, "Problem")) == 12
    assert games(step, "TaskType")[0].points == pytest.approx((0.75 + 0.25 + 0 + 0.875) / 4)


def test_the_single_agent_plays_no_rated_game():
    assert games([Exchange(0, 0, "code_o", 0.25)]) == []
    assert rate(single_agent(), []) == single_agent()


def test_teachers_points_are_one_minus_the_solve_rate_of_what_was_solved():
    assert [teacher_points(value) for value in (None, 0.0, 0.125, 0.5, 1.0)] == [0.0, None, 0.875, 0.5, 0.0]


def test_members_of_different_strength_are_told_apart_after_some_steps():
    generator = random.Random(5)
    population = founders(2, 2)
    for _ in range(25):
        step = [
            Game(teacher, student, "code_o", 1.0, "teacher" if generator.random() < chance else "student")
            for teacher, chance in ((0, 0.8), (1, 0.3))
            for student in (2, 3)
        ]
        population = rate(population, step)
    assert population[0].lcb > population[1].mu
