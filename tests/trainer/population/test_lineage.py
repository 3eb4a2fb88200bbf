import json
import random
from dataclasses import replace

from populora_trainer.population.evolution import Breeding, apply, plan
from populora_trainer.population.lineage import ancestors, birth, family, ranks
from populora_trainer.population.members import founders

OPERATORS = (Breeding("M1", 1), Breeding("X1", 2))


def evolved(rounds, seed=0):
    """A population after some rounds of evolution, with the records as they come back from the log."""
    generator = random.Random(seed)
    members = founders(4, 4)
    records = []
    for generation in range(1, rounds + 1):
        members = tuple(
            replace(member, mu=generator.uniform(10, 40), sigma=generator.uniform(1, 8)) for member in members
        )
        step = generation * 10
        records += ranks(members, step)
        replacements = plan(members, generation, step, generator, replace_fraction=0.25, operators=OPERATORS)
        records += [birth(one, members, parameters={"p": 0.1}, diagnostics={"cosine": 0.9}) for one in replacements]
        members = apply(members, replacements)
    return members, [json.loads(json.dumps(record)) for record in records]


def test_the_tree_read_back_holds_every_living_member_with_its_parents():
    members, records = evolved(12)
    tree = family(records)
    for member in members:
        if member.generation:
            relative = tree[member.name]
            assert relative.parents == member.parents
            assert (relative.generation, relative.operator) == (member.generation, member.operator)
            assert relative.born_step == member.born_step
            assert relative.diagnostics == {"cosine": 0.9}
        assert member.name not in tree or tree[member.name].died_step is None
    assert sum(relative.generation > 0 for relative in tree.values()) == 24
    assert sum(relative.died_step is not None for relative in tree.values()) == 24


def test_everybody_descends_from_founders_only():
    members, records = evolved(12, seed=3)
    tree = family(records)
    youngest = max(members, key=lambda member: member.generation)
    found = ancestors(tree, youngest.name)
    assert found
    assert all(tree[name].generation < youngest.generation for name in found)
    assert {name for name in found if not tree[name].parents} <= {member.name for member in founders(4, 4)}


def test_ranks_tell_what_became_of_a_child():
    members, records = evolved(5)
    tree = family(records)
    older = [relative for relative in tree.values() if relative.generation == 1]
    assert older
    for relative in older:
        assert relative.born_step == 10  # the step that its round opened
        lived_until = relative.died_step or 50
        assert [age for age, _, _ in relative.ranks] == list(range(10, lived_until - 10 + 1, 10))
        assert all(1 <= rank <= size == 4 for _, rank, size in relative.ranks)
    assert ranks(founders(4, 4), 10) == []
    assert all(record["step"] == 50 for record in ranks(members, 50))


def test_a_birth_records_what_is_needed_to_repeat_it():
    members = founders(4, 4)
    one = plan(members, 1, 10, random.Random(0), replace_fraction=0.25, operators=OPERATORS)[0]
    record = birth(one, members, parameters={"p": 0.2}, diagnostics={"norm_ratio": 1.0})
    assert record["child"] == one.child.name == "t3-g1"
    assert (record["step"], record["slot"], record["seed"]) == (10, 3, one.seed)
    assert record["parameters"] == {"p": 0.2}
    assert record["replaced"] == {"name": "t3", "mu": 25.0, "sigma": 25.0 / 3.0, "lcb": 0.0}
    assert [parent["name"] for parent in record["parents"]] == [members[slot].name for slot in one.parents]


def test_records_of_unknown_kinds_are_passed_over():
    assert family([{"step": 1, "event": "eclipse"}]) == {}
