import json
import re
from dataclasses import replace

import pytest
import torch
from toy_run import first_state, next_state, train

from populora_trainer.errors import StorageError
from populora_trainer.storage.checkpoint import (
    LATEST,
    collect,
    intact,
    load_newest,
    newest_manifest,
    read_checkpoint,
    read_manifest,
    rewind,
    step_key,
    steps,
    write_checkpoint,
)
from populora_trainer.storage.local import LocalStore


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def three(store):
    """A run with the checkpoints 0, 1 and 2."""
    state = first_state()
    write_checkpoint(store, 0, state)
    for step in (1, 2):
        state = next_state(state, step)
        write_checkpoint(store, step, state)
    return store


def equal(one, other):
    return (
        one.members == other.members
        and one.counters == other.counters
        and (one.buffer, one.archive) == (other.buffer, other.archive)
        and one.optimizer.keys() == other.optimizer.keys()
        and all(torch.equal(one.optimizer[name], other.optimizer[name]) for name in one.optimizer)
        and all(
            mine.config == theirs.config
            and mine.factors.keys() == theirs.factors.keys()
            and all(torch.equal(mine.factors[path].A, theirs.factors[path].A) for path in mine.factors)
            and all(torch.equal(mine.factors[path].B, theirs.factors[path].B) for path in mine.factors)
            for mine, theirs in zip(one.adapters, other.adapters, strict=True)
        )
    )


def test_a_state_comes_back_bit_by_bit(store):
    state = next_state(next_state(first_state(), 1), 2)
    written = write_checkpoint(store, 2, state)
    manifest, found = load_newest(store)
    assert manifest == written
    assert equal(found, state)
    assert found.optimizer["steps"].dtype == torch.int64


def test_the_layout_is_the_documented_one(three):
    keys = three.list()
    assert {"LATEST", "steps/000000.json", "steps/000001.json", "steps/000002.json"} <= set(keys)
    assert {key.split("/")[0] for key in keys} == {"LATEST", "steps", "adapters", "optimizer", "buffer", "archive"}
    latest = json.loads(three.get(LATEST))
    assert latest["step"] == 2
    assert latest["sha256"] == read_manifest(three, 2).digest
    for folder in read_manifest(three, 2).adapters:
        assert three.list(f"adapters/{folder}/") == [
            f"adapters/{folder}/adapter_config.json",
            f"adapters/{folder}/adapter_model.safetensors",
        ]


def test_equal_states_have_equal_digests_and_any_change_changes_it(tmp_path):
    state = next_state(first_state(), 1)
    digests = [
        write_checkpoint(LocalStore(tmp_path / str(number)), step, changed).digest
        for number, (step, changed) in enumerate(
            [
                (1, state),
                (1, next_state(first_state(), 1)),
                (2, state),
                (1, replace(state, buffer=b"other")),
                (1, replace(state, archive=b"other")),
                (1, replace(state, counters={"seen": 1})),
                (1, replace(state, members=[replace(state.members[0], mu=26.0), state.members[1]])),
                (1, replace(state, optimizer={**state.optimizer, "steps": torch.ones(2)})),
                (1, replace(state, adapters=state.adapters[::-1])),
            ]
        )
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == len(digests) - 1


def test_a_second_writer_of_a_step_stops_and_overwrites_nothing(three):
    before = three.get(step_key(2)), three.get(LATEST)
    with pytest.raises(StorageError, match="another trainer has already written step 2 of this run"):
        write_checkpoint(three, 2, first_state())
    assert (three.get(step_key(2)), three.get(LATEST)) == before


def test_an_object_that_an_earlier_checkpoint_holds_is_not_written_again_unless_it_is_damaged(three, monkeypatch):
    put: list[str] = []
    original = three.put
    monkeypatch.setattr(three, "put", lambda key, data: (put.append(key), original(key, data)))
    state = read_checkpoint(three, read_manifest(three, 2))
    write_checkpoint(three, 3, state)
    assert put == [LATEST]
    key = f"buffer/{read_manifest(three, 3).buffer}"
    original(key, b"damaged")
    write_checkpoint(three, 4, state)
    assert key in put
    assert intact(three, 3)


@pytest.mark.parametrize("kind", ["adapters", "optimizer", "buffer", "archive", "steps"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_named_with_the_file_and_the_way_to_go_on(three, kind, damage):
    state = next_state(read_checkpoint(three, read_manifest(three, 2)), 3)
    manifest = write_checkpoint(three, 3, replace(state, archive=b"new cells"))
    key = step_key(3) if kind == "steps" else next(key for key in manifest.objects() if key.startswith(f"{kind}/"))
    content = three.get(key)
    if damage == "remove":
        three.delete(key)
    else:
        middle = len(content) // 2
        flipped = bytes([content[middle] ^ 1])
        three.put(key, content[:middle] + (flipped + content[middle + 1 :] if damage == "flip" else b""))
    with pytest.raises(StorageError) as caught:
        load_newest(three)
    message = str(caught.value)
    assert key in message
    assert "step 2 is intact" in message
    assert "--from-step 2" in message
    assert "\n" not in message
    assert ("is missing" if damage == "remove" else "is damaged") in message
    if damage == "flip" and kind != "steps":
        assert re.search(r"sha256 [0-9a-f]{64}, expected [0-9a-f]{64}", message)


def test_going_back_to_an_intact_step_drops_the_later_ones(three):
    rewind(three, 1)
    assert steps(three) == [0, 1]
    assert load_newest(three)[0].step == 1
    assert json.loads(three.get(LATEST))["step"] == 1


def test_going_back_to_a_step_that_is_not_there_drops_nothing(three):
    with pytest.raises(StorageError, match=r"step 7 .* has no intact checkpoint; step 2 is intact"):
        rewind(three, 7)
    assert steps(three) == [0, 1, 2]


def test_without_any_intact_checkpoint_the_sentence_says_so(store):
    manifest = write_checkpoint(store, 0, first_state())
    store.put(f"optimizer/{manifest.optimizer}", b"")
    with pytest.raises(StorageError, match="no earlier checkpoint of this run is intact"):
        load_newest(store)


def test_a_new_run_has_no_checkpoint(store):
    assert load_newest(store) is None
    assert newest_manifest(store) is None


def test_an_unreadable_latest_is_no_loss_as_the_manifests_know_better(three):
    three.put(LATEST, b"{")
    assert newest_manifest(three).step == 2


def test_collecting_keeps_the_newest_checkpoints_whole_and_nothing_else(three):
    assert collect(three, 2) == [0]
    assert steps(three) == [1, 2]
    wanted = {key for step in (1, 2) for key in read_manifest(three, step).objects()}
    assert {key for key in three.list() if "/" in key and not key.startswith("steps/")} == wanted
    assert all(intact(three, step) for step in (1, 2))
    assert collect(three, 0) == [1]
    assert steps(three) == [2]


def test_collecting_takes_what_an_interrupted_writer_left(three):
    three.put(f"optimizer/{'0' * 64}", b"orphan")
    collect(three, 10)
    assert not three.exists(f"optimizer/{'0' * 64}")
    assert steps(three) == [0, 1, 2]


def test_what_serving_or_an_evaluation_names_is_never_collected(three):
    oldest, middle = read_manifest(three, 0), read_manifest(three, 1)
    three.put("serving.json", json.dumps({"t0-s000001-abc": middle.adapters[0]}).encode())
    three.put("evaluation/humaneval.json", json.dumps({"checkpoint": oldest.digest}).encode())
    assert collect(three, 1) == [1]
    assert steps(three) == [0, 2]
    assert intact(three, 0)
    assert three.list(f"adapters/{middle.adapters[0]}/")
    assert not three.exists(f"buffer/{middle.buffer}")


def test_collecting_does_nothing_while_a_manifest_is_damaged(three):
    three.put(step_key(1), b"{}")
    before = three.list()
    assert collect(three, 1) == []
    assert three.list() == before


def test_a_newer_format_is_refused_by_its_number(three):
    body = json.loads(three.get(step_key(2)))
    three.put(step_key(2), json.dumps({**body, "format": 99}).encode())
    with pytest.raises(StorageError, match="format 99; this version reads format 1"):
        read_manifest(three, 2)


def test_a_manifest_under_another_steps_name_or_of_another_kind_is_damaged(tmp_path):
    store = LocalStore(tmp_path)
    train(tmp_path, 2, keep=None)
    store.put(step_key(9), store.get(step_key(1)))
    with pytest.raises(StorageError, match=r"000009\.json is damaged: it is the manifest of step 1; step 2 is intact"):
        newest_manifest(store)
    for wreck in (b"[]", b"[" * 200_000, b"3"):
        store.put(step_key(9), wreck)
        with pytest.raises(StorageError, match=r"000009\.json is damaged: .*; step 2 is intact"):
            newest_manifest(store)
