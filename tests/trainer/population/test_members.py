import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.errors import StorageError
from populora_trainer.population.members import (
    Member,
    child_name,
    founders,
    order_key,
    ranked,
    single_agent,
    slots,
)

members = st.builds(
    Member,
    name=st.builds(lambda role, place: f"{role}{place}", st.sampled_from("tsa"), st.integers(0, 63)),
    role=st.sampled_from(["teacher", "student", "agent"]),
    generation=st.integers(0, 10_000),
    parents=st.lists(st.sampled_from(["t0", "t1-g2"]), max_size=2).map(tuple),
    operator=st.sampled_from(["", "M1", "X4"]),
    born_step=st.integers(0, 10_000),
    mu=st.floats(-1e3, 1e3),
    sigma=st.floats(0.1, 10.0),
    games=st.integers(0, 10**6),
)


def test_founders_are_teachers_then_students_with_trueskills_prior():
    first = founders(2, 3)
    assert [member.name for member in first] == ["t0", "t1", "s0", "s1", "s2"]
    assert [member.role for member in first] == ["teacher"] * 2 + ["student"] * 3
    assert {(member.mu, round(member.sigma, 6), member.generation) for member in first} == {(25.0, 8.333333, 0)}
    assert first[0].lcb == pytest.approx(0.0)


def test_the_single_agent_acts_in_both_roles():
    assert slots(single_agent(), "teacher") == slots(single_agent(), "student") == (0,)


def test_slots_are_the_indices_of_a_role():
    assert slots(founders(2, 3), "teacher") == (0, 1)
    assert slots(founders(2, 3), "student") == (2, 3, 4)


@given(members)
def test_a_member_survives_json_bit_by_bit(member):
    assert Member.from_dict(json.loads(json.dumps(member.to_dict()))) == member


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mu", "25"),
        ("mu", True),
        ("games", 1.5),
        ("role", "judge"),
        ("name", "../t0"),
        ("name", "t01"),
        ("parents", "t0"),
    ],
)
def test_a_stored_member_with_a_wrong_value_is_refused_by_its_field(field, value):
    with pytest.raises(StorageError, match=re.escape(repr(value))):
        Member.from_dict({**founders(1, 1)[0].to_dict(), field: value})


def test_a_member_that_an_earlier_version_stored_with_its_lineage_is_read():
    first = founders(1, 1)[0]
    assert Member.from_dict({**first.to_dict(), "lineage": "founders"}) == first


@pytest.mark.parametrize("change", [{"colour": "red"}, {"mu": None}])
def test_a_stored_member_with_a_missing_or_unknown_field_is_refused(change):
    values = {**founders(1, 1)[0].to_dict(), **change}
    values = {key: value for key, value in values.items() if value is not None}
    with pytest.raises(StorageError, match=r"colour|mu"):
        Member.from_dict(values)


def test_names_sort_by_place_and_generation_as_numbers():
    names = ["t0", "s10-g11", "s10", "s2", "s10-g2"]
    assert sorted(names, key=order_key) == ["s2", "s10", "s10-g2", "s10-g11", "t0"]


def test_a_child_keeps_the_place_of_the_one_it_follows():
    child = Member(child_name(Member("t2-g3", "teacher").place, 7), "teacher")
    assert (child.name, child.place) == ("t2-g7", "t2")


def test_ranking_is_by_lower_confidence_bound_then_mean_then_slot():
    population = (
        Member("t0", "teacher", mu=30.0, sigma=8.0),  # lcb 6
        Member("t1", "teacher", mu=27.0, sigma=1.0),  # lcb 24
        Member("s0", "student", mu=99.0, sigma=1.0),
        Member("t2", "teacher", mu=30.0, sigma=2.0),  # lcb 24, higher mean
        Member("t3", "teacher", mu=27.0, sigma=1.0),  # as t1, later
    )
    assert ranked(population, "teacher") == (3, 1, 4, 0)
