from pathlib import PurePath

from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.serving.planning import digests, is_served, make_plan, root
from populora_trainer.storage.publication import Publication, PublishedAdapter

FOLDER = PurePath("/adapters")
DIGESTS = [letter * 64 for letter in "abcdef"]
ADAPTERS = [
    PublishedAdapter(f"t{slot}", f"t{slot}-s{step:06d}-{digest[:8]}", digest, {"weights": "0" * 64})
    for slot in range(3)
    for step, digest in enumerate(DIGESTS)
]
FOREIGN = {"mine": "/elsewhere/mine", "other": "hub/other"}


@st.composite
def publications(draw):
    """One adapter each of some members."""
    slots = draw(st.lists(st.integers(0, 2), unique=True))
    adapters = tuple(ADAPTERS[slot * len(DIGESTS) + draw(st.integers(0, len(DIGESTS) - 1))] for slot in slots)
    return Publication(draw(st.integers(0, 9)), adapters, "0" * 64)


SERVED = st.dictionaries(
    st.sampled_from([one.name for one in ADAPTERS]), st.sampled_from([str(FOLDER / digest) for digest in DIGESTS])
)
STATES = (publications(), st.none() | publications(), SERVED, st.sets(st.sampled_from(DIGESTS)))


def carried_out(plan, served, stored):
    """What is served and stored when every step of the plan has succeeded."""
    stored = stored | {one.digest for one in plan.download}
    served = {name: path for name, path in served.items() if name not in plan.unload}
    for one in plan.load:
        assert one.name not in served, "a name is never loaded over another of the same name"
        assert one.digest in stored, "what is loaded is here"
        served[one.name] = root(FOLDER, one)
    return served, stored - set(plan.discard)


@given(*STATES)
def test_a_plan_leads_to_the_publication_and_leaves_nothing_more_to_do(wanted, before, served, stored):
    plan = make_plan(wanted, before, {**served, **FOREIGN}, stored, FOLDER)
    now, here = carried_out(plan, {**served, **FOREIGN}, stored)
    assert is_served(wanted, now, FOLDER)
    again = make_plan(wanted, before, now, here, FOLDER)
    assert (again.unload, again.download, again.load, again.discard) == ((), (), (), ())


@given(*STATES)
def test_at_most_two_publications_stay_loaded_and_stored(wanted, before, served, stored):
    now, here = carried_out(make_plan(wanted, before, served, stored, FOLDER), served, stored)
    both = {one.name: one.digest for one in (*(before.adapters if before else ()), *wanted.adapters)}
    assert now.keys() <= both.keys()
    assert here <= set(both.values())
    assert all(digest in here for digest in digests(now, FOLDER).values() if digest in stored)


@given(*STATES)
def test_what_is_right_already_is_left_alone(wanted, before, served, stored):
    plan = make_plan(wanted, before, {**served, **FOREIGN}, stored, FOLDER)
    kept = {one.name: root(FOLDER, one) for one in (*(before.adapters if before else ()), *wanted.adapters)}
    for name, path in served.items():
        assert (name in plan.unload) == (kept.get(name) != path)
    assert not FOREIGN.keys() & set(plan.unload)
    assert len({one.digest for one in plan.download}) == len(plan.download)
    assert not {one.digest for one in plan.download} & stored


def test_a_name_of_the_publication_with_other_weights_is_unloaded_first():
    (one, *_) = ADAPTERS
    wanted = Publication(1, (one,), "0" * 64)
    for path in ("/elsewhere/weights", str(FOLDER / DIGESTS[3])):
        plan = make_plan(wanted, None, {one.name: path}, {one.digest}, FOLDER)
        assert plan.unload == (one.name,)
        assert plan.load == (one,)
