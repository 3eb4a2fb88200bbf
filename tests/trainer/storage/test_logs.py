import json

import pytest
from faults import disk_full, faults
from hypothesis import given, settings
from hypothesis import strategies as st

from populora_trainer.errors import StorageError
from populora_trainer.storage import logs
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import RunLogs, last_record, read_log


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def written(store, steps, size=10):
    run_logs = RunLogs(store)
    for step in steps:
        run_logs.append("metrics", {"step": step, "text": "é" * size})
    run_logs.flush()
    return run_logs


def test_lines_wait_for_the_flush_and_then_hold_one_object_each(store):
    run_logs = RunLogs(store)
    run_logs.append("metrics", {"step": 1, "seconds": {"solve": 0.5}})
    run_logs.append("evolution", {"step": 1, "child": "t0-g1"})
    assert store.list() == []
    run_logs.flush()
    run_logs.flush()
    assert [json.loads(line) for line in store.get("metrics.jsonl").splitlines()] == [
        {"step": 1, "seconds": {"solve": 0.5}}
    ]
    assert list(read_log(store, "evolution")) == [{"step": 1, "child": "t0-g1"}]
    assert list(read_log(store, "problems")) == []


def test_a_record_without_a_step_is_refused(store):
    for record in ({"seconds": 1.0}, {"step": "1"}):
        with pytest.raises(ValueError, match=r"metrics\.jsonl needs its step"):
            RunLogs(store).append("metrics", record)


def test_numbers_that_json_does_not_have_become_null(store):
    run_logs = RunLogs(store)
    run_logs.append("metrics", {"step": 1, "entropy": float("nan"), "list": [1.5, float("inf")], "in": {"x": -1e400}})
    run_logs.flush()
    assert list(read_log(store, "metrics")) == [{"step": 1, "entropy": None, "list": [1.5, None], "in": {"x": None}}]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 8), max_size=25).map(sorted),
    st.integers(-1, 9),
    st.binary(max_size=30).filter(lambda data: b"\n" not in data),
    st.sampled_from([1, 7, 64, 1 << 20]),
)
def test_trimming_keeps_exactly_the_lines_up_to_a_step(tmp_path_factory, steps, last, torn, block):
    store = LocalStore(tmp_path_factory.mktemp("logs"))
    written(store, steps)
    size = store.size("metrics.jsonl") if store.exists("metrics.jsonl") else 0
    store.extend("metrics.jsonl", size, torn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_BLOCK", block)
        run_logs = RunLogs(store)
        run_logs.trim(last)
        kept = [step for step in steps if step <= last]
        assert [record["step"] for record in read_log(store, "metrics")] == kept
        newest = last_record(store, "metrics")
        assert newest is None if not kept else newest is not None and newest["step"] == kept[-1]
        run_logs.append("metrics", {"step": last + 1})
        run_logs.flush()
        assert [record["step"] for record in read_log(store, "metrics")] == [*kept, last + 1]
    assert store.get("metrics.jsonl").count(b"\n") == len(kept) + 1


def test_trimming_also_forgets_what_waits(store):
    run_logs = RunLogs(store)
    run_logs.append("problems", {"step": 3})
    run_logs.trim(2)
    run_logs.flush()
    assert list(read_log(store, "problems")) == []


def test_trimming_reads_only_the_end_of_a_long_log(store, monkeypatch):
    run_logs = written(store, range(2000), size=100)
    read = []
    get = store.get

    def counted(key, start=0, length=None):
        data = get(key, start, length)
        read.append(len(data))
        return data

    monkeypatch.setattr(logs, "_BLOCK", 4096)
    monkeypatch.setattr(store, "get", counted)
    run_logs.trim(1995)
    assert sum(read) < 20_000
    monkeypatch.undo()
    assert last_record(store, "metrics")["step"] == 1995


def test_a_reader_leaves_a_torn_last_line_out(store):
    written(store, [1, 2])
    store.extend("metrics.jsonl", store.size("metrics.jsonl"), b'{"step": 3, "te')
    assert [record["step"] for record in read_log(store, "metrics")] == [1, 2]
    assert last_record(store, "metrics")["step"] == 2


def test_a_failed_flush_can_be_repeated_and_writes_each_line_once(store):
    run_logs = RunLogs(store)
    for name in logs.LOG_NAMES:
        run_logs.append(name, {"step": 1})
    with faults(3, disk_full, ("write",)), pytest.raises(StorageError):
        run_logs.flush()
    run_logs.flush()
    for name in logs.LOG_NAMES:
        assert list(read_log(store, name)) == [{"step": 1}]


def test_numbers_that_no_measurement_gives_are_null_and_damaged_lines_are_named(store):
    store.put(
        "metrics.jsonl",
        b'{"step": 1, "a": NaN, "b": [-Infinity, 1e999], "c": 1' + b"0" * 400 + b', "d": -2.5e-3, "e": 12}\n'
        b'\n[1]\n{"step": 2\n' + b'{"step": 3, "f": ' + b"9" * 6000 + b"}\n" + b'{"step": 4',
    )
    damaged = []
    assert list(read_log(store, "metrics", damaged.append)) == [
        {"step": 1, "a": None, "b": [None, None], "c": None, "d": -0.0025, "e": 12},
        {"step": 3, "f": None},
    ]
    assert damaged == [3, 4]
