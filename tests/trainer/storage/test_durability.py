import errno
import json
import random
import re

import pytest
from faults import disk_full, faults, raises
from toy_run import MANIFEST, first_state, train

from populora_trainer.errors import StorageError
from populora_trainer.storage.checkpoint import LATEST, intact, load_newest, newest_manifest, steps
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.run import Run

STEPS = 2


@pytest.fixture(scope="module")
def undisturbed(trainer, tmp_path_factory):
    """The LATEST of a run that nothing happened to, and the number of events in it."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    code, notes = trainer.train(folder, STEPS)
    assert (code, notes["committed"]) == (0, STEPS)
    return (folder / LATEST).read_bytes(), notes["events"]


def check_finished(folder, expected):
    """The run ended as the undisturbed one: same LATEST, each step once in the logs, nothing left lying about."""
    store = LocalStore(folder, create=False)
    assert (folder / LATEST).read_bytes() == expected
    # Who is killed while the old checkpoint is collected leaves that to the next commit.
    assert steps(store) in ([STEPS], [STEPS - 1, STEPS])
    assert all(intact(store, step) for step in steps(store))
    assert [record["step"] for record in read_log(store, "metrics")] == list(range(STEPS + 1))
    assert [(record["step"], record["number"]) for record in read_log(store, "problems")] == [
        (step, number) for step in range(1, STEPS + 1) for number in range(3)
    ]
    assert not list(folder.rglob(".tmp-*"))


def test_two_undisturbed_runs_have_the_same_latest_whatever_the_time_and_place(trainer, tmp_path, undisturbed):
    assert trainer.train(tmp_path / "another_name", STEPS)[0] == 0
    assert (tmp_path / "another_name" / LATEST).read_bytes() == undisturbed[0]


def test_a_run_killed_at_any_write_goes_on_to_the_same_end(trainer, tmp_path, undisturbed):
    expected, events = undisturbed
    assert events > 80
    for kill_at in range(1, events + 1):
        folder = tmp_path / f"killed-{kill_at}"
        code, notes = trainer.train(folder, STEPS, kill_at=kill_at)
        assert code == -9, f"event {kill_at} of {events} did not happen"
        # A reader who looks at the wreck sees a whole checkpoint, and none that was committed is lost.
        if notes["committed"] >= 0:
            newest = load_newest(LocalStore(folder, create=False))
            assert newest is not None
            assert newest[0].step in (notes["committed"], notes["committed"] + 1)
        code, notes = trainer.train(folder, STEPS)
        assert (code, notes.get("error")) == (0, None)
        check_finished(folder, expected)


@pytest.mark.parametrize("seed", range(2))
def test_a_run_killed_again_and_again_goes_on_to_the_same_end(trainer, tmp_path, undisturbed, seed):
    generator = random.Random(seed)
    folder = tmp_path / "run"
    committed, code = -1, -9
    for _ in range(200):
        code, notes = trainer.train(folder, STEPS, kill_at=generator.randint(1, 100))
        committed = max(committed, notes["committed"])
        newest = newest_manifest(LocalStore(folder, create=False)) if committed >= 0 else None
        assert newest is None or newest.step >= committed
        if code == 0:
            break
    else:
        assert trainer.train(folder, STEPS)[0] == 0
    check_finished(folder, undisturbed[0])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_at_any_write_is_a_sentence_and_loses_no_step(tmp_path, undisturbed, number):
    expected, _ = undisturbed
    kinds = ("open", "write", "fsync")
    with faults(None, disk_full, kinds) as recorder:
        train(tmp_path / "count", STEPS)
    for at in range(1, len(recorder.events) + 1, 7):
        folder = tmp_path / f"run-{at}"
        done: list[int] = []
        with faults(at, raises(number), kinds), pytest.raises(StorageError) as caught:
            train(folder, STEPS, committed=done.append)
        message = str(caught.value)
        assert str(folder) in message
        assert "\n" not in message
        if number != errno.EIO and ".lock" not in message:
            assert re.search(r"[0-9.]+ MiB free", message)
            assert "nothing that was committed is lost" in message
        assert not list(folder.rglob(".tmp-*"))
        if done:
            newest = newest_manifest(LocalStore(folder, create=False))
            assert newest is not None
            assert newest.step in (done[-1], done[-1] + 1)
        with faults(None, disk_full):
            train(folder, STEPS)
        check_finished(folder, expected)


def test_a_real_limit_of_the_kernel_on_file_sizes_is_a_sentence_and_loses_no_step(trainer, tmp_path, undisturbed):
    expected, _ = undisturbed
    folder = tmp_path / "run"
    assert trainer.train(folder, 1)[0] == 0
    problems = (folder / "problems.jsonl").stat().st_size
    before = (folder / LATEST).read_bytes()
    code, notes = trainer.train(folder, STEPS, file_limit=problems + 20)
    assert code == 1
    assert "no space is left for it" in notes["error"]
    assert str(folder) in notes["error"]
    assert (folder / LATEST).read_bytes() == before
    assert json.loads(before)["step"] == 1
    assert trainer.train(folder, STEPS)[0] == 0
    check_finished(folder, expected)


def test_after_a_full_disk_the_same_trainer_can_commit_the_step_again(tmp_path, undisturbed):
    store = LocalStore(tmp_path)
    with Run.open_or_create(store, MANIFEST) as run:
        run.log("metrics", {"step": 0})
        for at in (1, 4, 2):
            with faults(at, disk_full, ("write",)), pytest.raises(StorageError):
                run.commit(0, first_state())
        run.commit(0, first_state())
        assert [record["step"] for record in read_log(store, "metrics")] == [0]
        assert intact(store, 0)
