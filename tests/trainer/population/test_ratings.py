import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import trueskill
from hypothesis import assume, given, settings
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
    student_score,
    teacher_score,
    win_probability,
)
from populora_trainer.tasks.rewards import PRESETS, teacher_reward

RESULTS = ("win", "draw", "loss")
VALUE = {"loss": 0, "draw": 1, "win": 2}
MIRROR = {"win": "loss", "draw": "draw", "loss": "win"}
GRANULARITIES = ("Matchup", "TaskType", "Problem")


def game(result, teacher=0, student=1):
    return Game(teacher, student, "code_o", result, MIRROR[result])


def pair(mu_teacher=25.0, sigma_teacher=25 / 3, mu_student=25.0, sigma_student=25 / 3):
    return (
        Member("t0", "teacher", mu=mu_teacher, sigma=sigma_teacher),
        Member("s0", "student", mu=mu_student, sigma=sigma_student),
    )


def test_the_first_win_moves_two_new_members_as_the_published_example():
    teacher, student = rate(founders(1, 1), [game("win")])
    assert (teacher.mu, teacher.sigma, teacher.lcb) == pytest.approx((29.396, 7.171, 7.881), abs=1e-3)
    assert (student.mu, student.sigma) == pytest.approx((20.604, 7.171), abs=1e-3)
    assert (teacher.games, student.games) == (1, 1)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 50), st.floats(0.8, 9), st.floats(0, 50), st.floats(0.8, 9), st.sampled_from(RESULTS))
def test_one_game_is_trueskills_own_update(mu_teacher, sigma_teacher, mu_student, sigma_student, result):
    reference = trueskill.TrueSkill(backend="mpmath")
    ranks = {"win": (0, 1), "loss": (1, 0), "draw": (0, 0)}[result]
    (left,), (right,) = reference.rate(
        [(reference.create_rating(mu_teacher, sigma_teacher),), (reference.create_rating(mu_student, sigma_student),)],
        ranks=ranks,
    )
    teacher, student = rate(pair(mu_teacher, sigma_teacher, mu_student, sigma_student), [game(result)])
    assert (teacher.mu, teacher.sigma) == pytest.approx((left.mu, left.sigma), abs=1e-5)
    assert (student.mu, student.sigma) == pytest.approx((right.mu, right.sigma), abs=1e-5)


@pytest.mark.parametrize("results", [("win",) * 3, ("win", "draw", "loss"), ("loss", "loss", "draw")])
def test_several_games_are_near_the_exact_posterior_on_a_grid(results):
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
    for result in results:
        joint = joint * {"win": wins, "loss": losses, "draw": 1.0 - wins - losses}[result]
    marginal = joint.sum(axis=1) / joint.sum()
    mean = float((marginal * axis).sum())
    deviation = math.sqrt(float((marginal * (axis - mean) ** 2).sum()))
    teacher, _ = rate(founders(1, 1), [game(result) for result in results])
    assert (teacher.mu, teacher.sigma) == pytest.approx((mean, deviation), rel=0.02)


complementary = st.builds(game, st.sampled_from(RESULTS), st.integers(0, 2), st.integers(3, 4))
contradictory = st.builds(
    Game,
    st.integers(0, 2),
    st.integers(3, 4),
    st.just("code_o"),
    st.sampled_from(RESULTS),
    st.sampled_from([*RESULTS, None]),
)
played = st.lists(complementary | contradictory, min_size=1, max_size=12)


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
    games_of = Counter(one.teacher for one in step) + Counter(one.student for one in step if one.student_result)
    for slot, (old, new) in enumerate(zip(before, after, strict=True)):
        if games_of[slot]:
            assert new.sigma < math.hypot(old.sigma, TAU)
            assert new.games == games_of[slot]
        else:
            assert new == old


@settings(max_examples=40, deadline=None)
@given(played)
def test_swapping_winners_mirrors_the_ratings(step):
    after = rate(founders(3, 2), step)
    mirrored = rate(
        founders(3, 2),
        [
            replace(
                one,
                teacher_result=MIRROR[one.teacher_result],
                student_result=one.student_result and MIRROR[one.student_result],
            )
            for one in step
        ],
    )
    for one, other in zip(after, mirrored, strict=True):
        assert one.mu - 25.0 == pytest.approx(25.0 - other.mu, abs=1e-5)
        assert one.sigma == pytest.approx(other.sigma, abs=1e-5)


@pytest.mark.parametrize("count", [1, 3, 72, 1000])
@pytest.mark.parametrize("gap", [5.0, 60.0, 500.0])
def test_upsets_of_any_size_are_rated(gap, count):
    # `gap` counts standard deviations of the difference between the two performances.
    distance = gap * math.sqrt(2.0 * BETA**2 + 2.0)
    before = pair(25.0, 1.0, 25.0 + distance, 1.0)
    for result in RESULTS:
        teacher, student = rate(before, [game(result)] * count)
        assert all(math.isfinite(value) for value in (teacher.mu, teacher.sigma, student.mu, student.sigma))
        assert 0.0 < teacher.sigma <= 1.01
        assert teacher.mu > 25.0 or result == "loss"
        assert student.mu < 25.0 + distance or result == "loss"
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
    ("solve_rates", "teacher", "student"),
    [
        ([0.25, 0.25], "win", "loss"),
        ([1.0, 1.0], "loss", "win"),
        ([0.5, 0.5], "draw", "draw"),
        ([0.5 - DRAW_MARGIN], "draw", "draw"),
        ([0.5 + DRAW_MARGIN], "draw", "draw"),
        ([0.44], "win", "loss"),
        # Refused by the verifier: it counts against the teacher alone.
        ([None, None], "loss", None),
        ([0.125, None], "loss", "loss"),
        ([0.125, 0.125, 0.125, None], "win", "loss"),
        ([0.125, 0.125, None, None], "loss", "loss"),
        ([0.875, None], "loss", "win"),
        # Solved by nobody: it counts against both.
        ([0.0, 0.0], "loss", "loss"),
        ([0.125, 0.0], "loss", "loss"),
        ([0.125, *[0.0] * 7], "loss", "loss"),
        ([0.125, 0.125, 0.125, 0.0], "win", "loss"),
        ([1.0, 1.0, 0.0], "loss", "win"),
        ([1.0, 0.0], "loss", "draw"),
    ],
)
def test_a_side_wins_where_its_score_is_above_an_even_one_by_more_than_the_margin(solve_rates, teacher, student):
    (one,) = games([Exchange(0, 1, "code_o", rate_) for rate_ in solve_rates])
    assert (one.teacher_result, one.student_result) == (teacher, student)


def ratings(step, granularity, members=None):
    return rate(members or founders(3, 2), games(step, granularity))


# A matching: who meets several opponents may move by what else is said of them.
matched = st.lists(
    st.builds(
        lambda slot, task, rate_: Exchange(slot, slot + 3, task, rate_),
        st.integers(0, 1),
        st.sampled_from(["code_i", "code_o", "code_f"]),
        rates,
    ),
    max_size=20,
)


@settings(max_examples=40, deadline=None)
@given(matched, st.sampled_from(["code_i", "code_o", "code_f"]), st.sampled_from([None, 0.0]), st.integers(1, 20))
def test_problems_that_nobody_could_verify_or_solve_never_raise_their_teacher(step, task, value, count):
    more = [*step, *[Exchange(0, 3, task, value)] * count]
    for granularity in GRANULARITIES:
        assert ratings(more, granularity)[0].mu <= ratings(step, granularity)[0].mu + 1e-5


@settings(max_examples=40, deadline=None)
@given(step_of_problems, st.data())
def test_more_such_problems_add_losses_and_turn_no_result_for_the_better(step, data):
    worthless = replace(
        data.draw(st.sampled_from([*step, Exchange(0, 3, "code_o", None)])),
        solve_rate=data.draw(st.sampled_from([None, 0.0])),
    )
    for granularity in GRANULARITIES:
        before, after = (
            sorted(
                VALUE[one.teacher_result] for one in games(exchanges, granularity) if one.teacher == worthless.teacher
            )
            for exchanges in (step, [*step, worthless])
        )
        assert all(new <= old for new, old in zip(after[len(after) - len(before) :], before, strict=True))
        assert sum(after) <= sum(before)


@settings(max_examples=40, deadline=None)
@given(step_of_problems.filter(bool), st.data())
def test_an_unsolved_problem_is_worth_to_its_teacher_what_a_refused_one_is_and_never_more_than_a_solved_one(step, data):
    index = data.draw(st.integers(0, len(step) - 1))
    for granularity in GRANULARITIES:
        unsolved, refused = (
            games([*step[:index], replace(step[index], solve_rate=value), *step[index + 1 :]], granularity)
            for value in (0.0, None)
        )
        assert Counter((one.teacher, one.student, one.task, one.teacher_result) for one in unsolved) == Counter(
            (one.teacher, one.student, one.task, one.teacher_result) for one in refused
        )
        wins = [sum(VALUE[one.teacher_result] for one in played) for played in (unsolved, games(step, granularity))]
        assert wins[0] <= wins[1]


@settings(max_examples=40, deadline=None)
@given(step_of_problems.filter(bool), st.data())
def test_a_student_never_gains_by_solving_less(step, data):
    index = data.draw(st.integers(0, len(step) - 1))
    assume(step[index].solve_rate is not None)
    less = replace(step[index], solve_rate=data.draw(st.sampled_from([0.0, step[index].solve_rate / 2])))
    for granularity in GRANULARITIES:
        better = games(step, granularity)
        worse = games([*step[:index], less, *step[index + 1 :]], granularity)
        values = [
            sum(VALUE[one.student_result] for one in played if one.student_result is not None)
            for played in (worse, better)
        ]
        assert values[0] <= values[1]


worthless = st.sampled_from([0.0, None])
hard = st.sampled_from([0.125, 0.25, 0.375])


def step_of(solve_rates):
    """Return a matchup's problems, the same solve rates for each type."""
    return [Exchange(0, 3, task, rate_) for task in ("code_i", "code_o", "code_f") for rate_ in solve_rates]


@settings(max_examples=40, deadline=None)
@given(st.lists(worthless, min_size=3, max_size=21), st.lists(hard, max_size=7))
def test_a_teacher_of_nearly_impossible_problems_falls_whatever_a_game_covers(unsolved, solved):
    solve_rates = [*unsolved, *solved[: len(unsolved) // 3]]
    for granularity in GRANULARITIES:
        for mu in (25.0, 35.0):
            before = (replace(founders(3, 2)[0], mu=mu), *founders(3, 2)[1:])
            assert ratings(step_of(solve_rates), granularity, before)[0].mu < mu


@settings(max_examples=40, deadline=None)
@given(st.lists(hard, min_size=8, max_size=21), st.lists(worthless, max_size=1))
def test_a_teacher_of_hard_problems_that_are_solved_rises_whatever_a_game_covers(solved, unsolved):
    # One in nine may be worthless: 8/9 of the lowest pay, 1 - 3/8, is 0.556.
    for granularity in GRANULARITIES:
        after = ratings(step_of([*solved, *unsolved]), granularity)
        assert after[0].mu > 25.0 > after[3].mu


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_teacher_of_hard_problems_overtakes_one_of_impossible_and_one_of_easy_problems(granularity):
    generator = random.Random(7)
    population = founders(3, 3)
    solved = {0: (0.125, 0.25, 0.375), 1: (0.0, 0.0, 0.0, 0.125, None), 2: (0.75, 0.875, 1.0)}
    for _ in range(12):
        students = generator.sample(range(3, 6), 3)
        step = [
            Exchange(teacher, student, task, generator.choice(solved[teacher]))
            for teacher, student in enumerate(students)
            for task in ("code_i", "code_o", "code_f")
            for _ in range(8)
        ]
        population = rate(population, games(step, granularity))
    assert population[0].mu > 30.0
    assert max(population[1].mu, population[2].mu) < 20.0


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_students_are_ranked_by_what_they_solve_where_some_problems_are_out_of_reach(granularity):
    # Were an unsolved problem a student's win, the last would beat the third and the second.
    generator = random.Random(3)
    population = founders(4, 4)
    able = (1.0, 0.7, 0.4, 0.02)
    for _ in range(20):
        step = [
            Exchange(teacher, student, task, sum(generator.random() < chance for _ in range(8)) / 8)
            for teacher, student in enumerate(generator.sample(range(4, 8), 4))
            for task in ("code_i", "code_o", "code_f")
            for chance in [able[student - 4] * (generator.random() > 0.2) for _ in range(8)]
        ]
        population = rate(population, games(step, granularity))
    assert population[4].mu > population[5].mu > max(population[6].mu, population[7].mu)


@settings(max_examples=40, deadline=None)
@given(step_of_problems, st.sampled_from(GRANULARITIES), st.randoms(use_true_random=False))
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


def test_the_single_agent_plays_no_rated_game():
    assert games([Exchange(0, 0, "code_o", 0.25)]) == []
    assert rate(single_agent(), []) == single_agent()


def test_a_teachers_score_is_the_mean_of_the_papers_reward_and_a_students_the_mean_solve_rate():
    paper = PRESETS["PopuLoRA"]
    for solve_rates in ([None, 0.0, 0.125, 0.5, 1.0], [0.25], [0.0], [None]):
        paid = [max(0.0, teacher_reward(rate_, paper)) for rate_ in solve_rates]
        assert teacher_score(solve_rates) == pytest.approx(sum(paid) / len(paid))
    assert student_score([None, 0.0, 0.125, 0.5, 1.0]) == pytest.approx(0.40625)
    assert student_score([None]) is None


def test_members_of_different_strength_are_told_apart_after_some_steps():
    generator = random.Random(5)
    population = founders(2, 2)
    for _ in range(25):
        step = [
            game("win" if generator.random() < chance else "loss", teacher, student)
            for teacher, chance in ((0, 0.8), (1, 0.3))
            for student in (2, 3)
        ]
        population = rate(population, step)
    assert population[0].lcb > population[1].mu
