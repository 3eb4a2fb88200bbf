"""What becomes of newborns over many rounds, by the simulation of benchmarks/newborns.py with skills from a script."""

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("newborns", Path(__file__).parents[3] / "benchmarks" / "newborns.py")
newborns = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = newborns
_spec.loader.exec_module(newborns)
simulate = newborns.simulate


@pytest.mark.parametrize(
    ("size", "games", "fair", "rounds"),
    [
        # One game a matchup, one for each of three task types, one for each of 24 problems.
        (4, 1, 0.25, 400),
        (4, 3, 0.25, 200),
        (4, 24, 0.25, 300),
        (2, 3, 0.5, 200),
        (8, 3, 0.25, 80),
    ],
)
def test_a_newborn_as_good_as_the_others_is_culled_as_often_as_they_are(size, games, fair, rounds):
    found = simulate(size, games, rounds=rounds, seed=1)
    assert found.newborns > 250
    assert found.culled == pytest.approx(fair, abs=0.05)
    assert found.rank == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("games", [1, 3])
def test_a_worse_newborn_goes_soon_and_a_better_one_stays(games):
    worse = simulate(4, games, rounds=60, seed=1, lead=-6.0)
    assert worse.gone[0] > 0.6
    assert worse.gone[1] > 0.9
    better = simulate(4, games, rounds=60, seed=1, lead=6.0)
    assert better.gone[-1] < 0.1


def test_the_priors_sigma_would_cull_most_newborns():
    assert simulate(4, 3, rounds=30, seed=1, rule=newborns.RULES["prior"]).culled > 0.6


def test_the_first_newborns_of_a_run_are_culled_no_more_often_than_later_ones():
    # 21 % in 800: ratings are far from settled, and parents are chosen for luck a little more.
    found = [simulate(4, 3, rounds=2, seed=seed) for seed in range(100)]
    assert 0.12 < sum(one.culled * one.newborns for one in found) / sum(one.newborns for one in found) < 0.3


def test_where_three_games_in_ten_have_two_losers_newborns_are_culled_little_more_often():
    assert 0.2 < simulate(4, 3, rounds=120, seed=1, unsolved=0.3).culled < 0.36
