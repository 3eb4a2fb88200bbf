import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.errors import StorageError
from populora_trainer.storage.environment import (
    ENVIRONMENT,
    Environment,
    differences,
    environment_after,
    read_environments,
    record_environment,
)
from populora_trainer.storage.local import LocalStore

HERE = Environment(threads=4, torch="2.9.0", device="cpu", instructions="AVX512")
FEWER = dataclasses.replace(HERE, threads=2)


def test_a_run_that_recorded_nothing_has_no_environment(tmp_path):
    assert read_environments(LocalStore(tmp_path)) == ()
    assert environment_after((), 3) is None


@given(openings=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 2, 3])), min_size=1, max_size=8))
def test_the_record_says_of_every_step_what_it_was_computed_with(tmp_path_factory, openings):
    store = LocalStore(tmp_path_factory.mktemp("run"))
    computed: dict[int, int] = {}  # step -> threads, as a run that goes on or is taken back makes them
    for back, threads in openings:
        start = max(0, len(computed) - back)
        record_environment(store, start, dataclasses.replace(HERE, threads=threads))
        computed = {step: known for step, known in computed.items() if step <= start}
        computed |= dict.fromkeys(range(start + 1, start + 3), threads)
    entries = read_environments(store)
    for step, threads in computed.items():
        found = environment_after(entries, step - 1)
        assert found is not None
        assert found.threads == threads
    assert all(one.environment != two.environment for one, two in itertools.pairwise(entries))
    assert [entry.after_step for entry in entries] == sorted({entry.after_step for entry in entries})


def test_going_on_as_before_writes_nothing(tmp_path):
    store = LocalStore(tmp_path)
    record_environment(store, 0, HERE)
    written = (tmp_path / ENVIRONMENT).stat()
    record_environment(store, 5, HERE)
    assert (tmp_path / ENVIRONMENT).stat() == written


def test_only_what_differs_is_said():
    assert differences(HERE, HERE) == ""
    assert differences(HERE, FEWER) == "threads 2 (before: 4)"
    elsewhere = dataclasses.replace(FEWER, device="NVIDIA H200")
    assert differences(HERE, elsewhere) == "threads 2 (before: 4), device NVIDIA H200 (before: cpu)"


@pytest.mark.parametrize(
    "damage", ["", "{", "7", "[" * 100_000, "[7]", '[{"after_step": 0}]', '[{"after_step": 0, "threads": "x"}]']
)
def test_a_damaged_record_is_an_error_that_says_what_to_do(tmp_path, damage):
    (tmp_path / ENVIRONMENT).write_text(damage)
    with pytest.raises(StorageError, match=r"environment\.json is damaged: it must be a list .*once it is deleted"):
        read_environments(LocalStore(tmp_path))
