import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from populora_trainer.population.evolution import Breeding, apply, plan, replaced_count
from populora_trainer.population.members import founders, ranked, single_agent
from populora_trainer.population.members import slots as slots_of

OPERATORS = (Breeding("M1", 1), Breeding("X1", 2, 2.0))


def rated(teachers, students, seed=0):
    generator = random.Random(seed)
    return tuple(
        replace(member, mu=generator.uniform(10, 40), sigma=generator.uniform(1, 8))
        for member in founders(teachers, students)
    )


def evolve(members, generation=1, step=10, seed=0, fraction=0.25, operators=OPERATORS):
    return plan(members, generation, step, random.Random(seed), replace_fraction=fraction, operators=operators)


@pytest.mark.parametrize(
    ("size", "fraction", "count"),
    [
        (4, 0.25, 1),
        (8, 0.25, 2),
        (3, 0.25, 1),
        (2, 0.25, 1),
        (1, 0.9, 0),
        (4, 0.9, 3),
        (4, 0.0, 0),
        (10, 0.3, 3),
        (2, 0.9, 1),
    ],
)
def test_the_fraction_is_rounded_down_but_at_least_one_goes_and_one_stays(size, fraction, count):
    assert replaced_count(size, fraction) == count


def test_the_worst_of_each_role_makes_room_for_a_child_of_the_better_ones():
    members = rated(4, 4)
    teacher, student = evolve(members)
    assert teacher.slot == ranked(members, "teacher")[-1]
    assert student.slot == ranked(members, "student")[-1]
    assert teacher.replaced == members[teacher.slot]
    assert teacher.child.name == f"t{teacher.slot}-g1"
    assert student.child.name == f"s{student.slot - 4}-g1"
    assert (teacher.child.role, student.child.role) == ("teacher", "student")
    assert set(teacher.parents) <= set(range(4)) - {teacher.slot}
    assert set(student.parents) <= set(range(4, 8)) - {student.slot}


def test_a_child_starts_at_its_parents_mean_a_little_less_certain():
    members = rated(4, 4)
    for one in evolve(members, operators=[Breeding("X4", 2)]):
        first, second = (members[parent] for parent in one.parents)
        assert one.child.mu == pytest.approx((first.mu + second.mu) / 2)
        assert one.child.sigma == pytest.approx(1.05 * (first.sigma + second.sigma) / 2)
        assert one.child.games == 0
        assert one.child.parents == (first.name, second.name)
        assert (one.child.operator, one.operator, one.child.born_step) == ("X4", "X4", 10)


populations = st.builds(rated, st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**32))


@settings(max_examples=80, deadline=None)
@given(populations, st.floats(0.01, 0.9), st.integers(0, 2**32))
def test_the_best_survive_the_roster_keeps_its_shape_and_parents_live(members, fraction, seed):
    replacements = evolve(members, fraction=fraction, seed=seed)
    after = apply(members, replacements)
    assert [member.role for member in after] == [member.role for member in members]
    gone = {one.slot for one in replacements}
    assert len(gone) == len(replacements)
    for role in ("teacher", "student"):
        ranking = ranked(members, role)
        assert ranking[0] not in gone
        count = replaced_count(len(ranking), fraction)
        assert gone & set(ranking) == set(ranking[len(ranking) - count :])
    for one in replacements:
        breeding = next(other for other in OPERATORS if other.operator == one.operator)
        assert len(set(one.parents)) == len(one.parents) == breeding.parents
        assert not set(one.parents) & gone
        assert {members[parent].role for parent in one.parents} == {one.replaced.role}


@settings(max_examples=30, deadline=None)
@given(populations, st.floats(0.01, 0.9), st.integers(0, 2**32))
def test_a_seed_reproduces_the_plan(members, fraction, seed):
    assert evolve(members, fraction=fraction, seed=seed) == evolve(members, fraction=fraction, seed=seed)


def test_names_and_seeds_are_never_used_twice_in_many_generations():
    members = rated(4, 3)
    names = [member.name for member in members]
    seeds = []
    generator = random.Random(1)
    for generation in range(1, 200):
        replacements = evolve(members, generation, generation * 10, generator.random(), fraction=0.5)
        members = tuple(
            replace(member, mu=generator.uniform(10, 40), sigma=generator.uniform(1, 8))
            for member in apply(members, replacements)
        )
        names += [one.child.name for one in replacements]
        seeds += [one.seed for one in replacements]
    assert len(names) == 7 + 199 * 3
    assert len(set(names)) == len(names)
    assert len(set(seeds)) == len(seeds)


def test_a_generation_that_is_not_new_is_refused():
    members = apply(rated(4, 4), evolve(rated(4, 4), generation=3))
    with pytest.raises(ValueError, match="generation 3"):
        evolve(members, generation=3)


def test_better_ranked_survivors_have_more_children_in_the_ratio_of_their_ranks():
    members = rated(4, 1)
    ranking = ranked(members, "teacher")
    children = Counter(
        parent
        for seed in range(3000)
        for one in evolve(members, seed=seed, operators=[Breeding("M1", 1)])
        for parent in one.parents
    )
    shares = [children[slot] / 3000 for slot in ranking[:3]]
    assert shares == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=0.04)


def test_operators_are_drawn_by_their_weights():
    operators = [Breeding("M1", 1, 1.0), Breeding("X1", 2, 3.0), Breeding("M2", 1, 0.0)]
    drawn = Counter(one.operator for seed in range(2000) for one in evolve(rated(4, 1), seed=seed, operators=operators))
    assert drawn["X1"] / 2000 == pytest.approx(0.75, abs=0.04)
    assert drawn["M2"] == 0


def test_a_lone_survivor_is_mutated_and_crossed_with_the_one_that_goes_only_where_there_are_crossovers_alone():
    members = rated(2, 1)
    best, worst = ranked(members, "teacher")
    assert {one.operator for seed in range(50) for one in evolve(members, seed=seed)} == {"M1"}
    for seed in range(20):
        (one,) = evolve(members, seed=seed, operators=[Breeding("X1", 2)])
        assert one.parents == (best, worst)


def test_an_operator_that_tells_its_parents_apart_gets_them_in_the_order_of_their_ranks():
    drawn = set()
    for seed in range(40):
        members = rated(5, 1, seed)
        place = ranked(members, "teacher").index
        plans = {
            fitter: evolve(members, seed=seed, fraction=0.4, operators=[Breeding("X3", 2, 1.0, fitter)])
            for fitter in (None, "first", "second")
        }
        for as_drawn, first, second in zip(*plans.values(), strict=True):
            assert list(first.parents) == sorted(as_drawn.parents, key=place)
            assert second.parents == first.parents[::-1]
            for one in (as_drawn, first, second):
                assert one.child.parents == tuple(members[slot].name for slot in one.parents)
                assert (one.seed, one.child.mu) == (as_drawn.seed, as_drawn.child.mu)
            drawn.add(as_drawn.parents == first.parents)
    assert drawn == {True, False}


def test_equally_rated_parents_and_a_lone_survivors_mate_have_an_order_as_well():
    for seed in range(20):
        for one in evolve(founders(4, 1), seed=seed, operators=[Breeding("X4", 2, 1.0, "second")]):
            assert one.parents == tuple(sorted(one.parents, reverse=True))
    members = rated(2, 1)
    best, worst = ranked(members, "teacher")
    for fitter, parents in (("first", (best, worst)), ("second", (worst, best))):
        (one,) = evolve(members, operators=[Breeding("X4", 2, 1.0, fitter)])
        assert one.parents == parents


def test_a_lone_survivors_child_starts_with_its_rating():
    members = rated(2, 1)
    best, _ = ranked(members, "teacher")
    (one,) = evolve(members)
    assert (one.child.mu, one.child.sigma) == (members[best].mu, members[best].sigma)


def test_a_single_member_and_the_single_agent_are_never_replaced():
    assert evolve(rated(1, 1), fraction=0.9) == []
    assert evolve(single_agent(), fraction=0.9) == []


def test_ties_are_broken_by_slot_so_that_unrated_founders_lose_their_last():
    assert [one.slot for one in evolve(founders(4, 4))] == [3, 7]


def test_a_plan_for_one_role_leaves_the_other_alone():
    members = rated(4, 4)
    planned = plan(members, 1, 10, random.Random(0), replace_fraction=0.25, operators=OPERATORS, roles=("student",))
    assert [one.slot for one in planned] == [ranked(members, "student")[-1]]


def test_no_usable_operator_is_an_error():
    with pytest.raises(ValueError, match="weight above zero"):
        evolve(rated(4, 4), operators=[Breeding("M1", 1, 0.0)])


def test_evolution_touches_no_slot_of_another_role():
    members = rated(5, 3)
    for one in evolve(members, fraction=0.9):
        assert one.slot in slots_of(members, one.replaced.role)
