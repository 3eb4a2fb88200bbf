import itertools
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from populora_trainer.population.matchmaking import Matchup, matchmake, sample_matching, weight
from populora_trainer.population.members import founders, single_agent
from populora_trainer.population.ratings import win_probability


def matchings(rows, columns):
    """Every way to give each row a column so that columns are used equally often, or one time apart."""
    low, rest = divmod(rows, columns)
    for choice in itertools.product(range(columns), repeat=rows):
        counts = [choice.count(column) for column in range(columns)]
        if min(counts) >= low and max(counts) <= low + bool(rest):
            yield choice


def rated(teachers, students, seed):
    generator = random.Random(seed)
    return tuple(
        replace(member, mu=generator.uniform(10, 40), sigma=generator.uniform(1, 8))
        for member in founders(teachers, students)
    )


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (4, 4), (4, 2), (5, 3), (5, 2), (4, 1)])
def test_matchings_are_drawn_in_proportion_to_the_product_of_their_weights(rows, columns):
    numbers = np.random.default_rng(3)
    weights = numbers.uniform(0.05, 1.0, (rows, columns))
    expected = {
        choice: float(np.prod([weights[row, column] for row, column in enumerate(choice)]))
        for choice in matchings(rows, columns)
    }
    draws = 4000
    generator = random.Random(11)
    seen = Counter(tuple(sample_matching(weights, generator)) for _ in range(draws))
    assert seen.keys() <= expected.keys()
    total = sum(expected.values())
    # Rare matchings are pooled, as chi-square needs some expected draws in every class.
    common = [choice for choice, mass in expected.items() if mass / total * draws >= 8]
    observed = [seen[choice] for choice in common]
    wanted = [expected[choice] / total * draws for choice in common]
    if len(common) < len(expected):
        observed.append(draws - sum(observed))
        wanted.append(draws - sum(wanted))
    if len(wanted) > 1:
        assert chisquare(observed, wanted).pvalue > 1e-3


def test_pfsp_prefers_even_pairs_over_foregone_ones():
    population = founders(2, 2)
    # t0 and s0 are strong, t1 and s1 weak: the even matching pairs strong with strong.
    population = tuple(
        replace(member, mu=mu, sigma=1.0) for member, mu in zip(population, (40.0, 10.0, 40.0, 10.0), strict=True)
    )
    generator = random.Random(0)
    even = [Matchup(0, 2), Matchup(1, 3)]
    drawn = [matchmake(population, generator) for _ in range(300)]
    assert drawn.count(even) > 295
    drawn = [matchmake(population, generator, strategy="Uniform") for _ in range(300)]
    assert 100 < drawn.count(even) < 200


def test_hard_weighting_gives_students_the_teachers_that_beat_them():
    assert weight(0.1, "Hard") == pytest.approx(0.81)
    assert weight(0.9, "Hard") == pytest.approx(0.01)
    # One student, two teachers of which it may meet the strong one twice as it must meet both: weights decide who is
    # met by the student with a free place.
    population = tuple(
        replace(member, mu=mu, sigma=1.0) for member, mu in zip(founders(1, 2), (25.0, 25.0, 25.0), strict=True)
    )
    assert matchmake(population, random.Random(0), weighting="Hard") == [Matchup(0, 1), Matchup(0, 2)]
    strong_first = tuple(
        replace(member, mu=mu, sigma=1.0)
        for member, mu in zip(founders(2, 3), (45.0, 5.0, 25.0, 25.0, 25.0), strict=True)
    )
    met = Counter(
        one.teacher for seed in range(200) for one in matchmake(strong_first, random.Random(seed), weighting="Hard")
    )
    assert met[0] > 395
    assert met[1] < 205


def test_variance_weighting_is_highest_for_even_pairs():
    assert weight(0.5) == pytest.approx(0.25)
    assert weight(0.1) == pytest.approx(weight(0.9)) == pytest.approx(0.09)
    assert weight(0.0) > 0.0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32), st.sampled_from(["PFSP", "Uniform"]))
def test_every_member_plays_and_games_are_balanced(teachers, students, seed, strategy):
    population = rated(teachers, students, seed)
    drawn = matchmake(population, random.Random(seed), strategy=strategy)
    assert len(drawn) == max(teachers, students)
    for slots in ([one.teacher for one in drawn], [one.student for one in drawn]):
        counts = Counter(slots).values()
        assert max(counts) - min(counts) <= 1
    assert {one.teacher for one in drawn} == set(range(teachers))
    assert {one.student for one in drawn} == set(range(teachers, teachers + students))
    assert drawn == sorted(drawn, key=lambda one: (one.teacher, one.student))


@pytest.mark.parametrize(("teachers", "students"), [(16, 16), (20, 13), (5, 64), (64, 64)])
def test_large_populations_are_matched_whole_too(teachers, students):
    population = rated(teachers, students, 1)
    drawn = matchmake(population, random.Random(1))
    assert drawn == matchmake(population, random.Random(1))
    assert drawn != matchmake(population, random.Random(2))
    counts = Counter(one.teacher for one in drawn), Counter(one.student for one in drawn)
    assert [len(count) for count in counts] == [teachers, students]
    assert all(max(count.values()) - min(count.values()) <= 1 for count in counts)


def test_large_populations_prefer_even_pairs_as_well():
    population = tuple(
        replace(member, mu=15.0 + 20.0 * (index % 16) / 15, sigma=1.0) for index, member in enumerate(founders(16, 16))
    )

    def distance(drawn):
        return sum(abs(win_probability(population[one.teacher], population[one.student]) - 0.5) for one in drawn)

    preferred = sum(distance(matchmake(population, random.Random(seed))) for seed in range(20))
    uniform = sum(distance(matchmake(population, random.Random(seed), strategy="Uniform")) for seed in range(20))
    assert preferred < 0.8 * uniform


def test_a_seed_reproduces_its_matchups_and_another_changes_them():
    population = rated(6, 6, 4)
    first = [matchmake(population, random.Random(seed)) for seed in range(20)]
    assert first == [matchmake(population, random.Random(seed)) for seed in range(20)]
    assert len({tuple(drawn) for drawn in first}) > 10


def test_foregone_conclusions_still_leave_every_matching_possible():
    population = tuple(
        replace(member, mu=mu, sigma=0.5) for member, mu in zip(founders(2, 2), (1e6, 1e6, 0.0, 0.0), strict=True)
    )
    drawn = Counter(tuple(matchmake(population, random.Random(seed))) for seed in range(50))
    assert len(drawn) == 2


def test_the_single_agent_plays_itself():
    assert matchmake(single_agent(), random.Random(0)) == [Matchup(0, 0)]
