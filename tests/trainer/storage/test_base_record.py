"""What a run keeps of its base, and when another one is refused."""

from dataclasses import replace

import pytest

from populora_trainer.errors import OtherBaseError, StorageError
from populora_trainer.storage.base_record import BASE, BaseRecord, read_base, settle_base
from populora_trainer.storage.local import LocalStore

RECORD = BaseRecord("hf://Some/Model", "c0ffee", "a" * 64, "b" * 64, "5.24.0")


def test_a_base_may_become_another_until_the_run_has_begun(tmp_path):
    store = LocalStore(tmp_path)
    assert read_base(store) is None
    settle_base(store, RECORD, begun=False)
    other = replace(RECORD, uri="hf://Other/Model", weights="c" * 64)
    settle_base(store, other, begun=False)
    assert read_base(store) == other
    settle_base(store, other, begun=True)
    with pytest.raises(OtherBaseError, match="has weights"):
        settle_base(store, RECORD, begun=True)
    assert read_base(store) == other


@pytest.mark.parametrize(
    ("change", "part"), [({"weights": "d" * 64}, "weights"), ({"tokenizer": "d" * 64}, "a tokenizer or chat template")]
)
def test_the_part_that_changed_is_named_and_so_is_another_library(tmp_path, change, part):
    store = LocalStore(tmp_path)
    settle_base(store, RECORD, begun=False)
    with pytest.raises(OtherBaseError, match=rf"has {part} \(dddddddd\) that this run did not begin with") as refused:
        settle_base(store, replace(RECORD, **change), begun=True)
    assert (refused.value.exit_code, "transformers" in str(refused.value)) == (42, False)
    with pytest.raises(OtherBaseError, match=r"or transformers 6\.0 reads it in another way than 5\.24\.0"):
        settle_base(store, replace(RECORD, transformers="6.0", **change), begun=True)


def test_a_run_that_moved_or_was_upgraded_goes_on_with_equal_weights(tmp_path):
    store = LocalStore(tmp_path)
    settle_base(store, RECORD, begun=False)
    settle_base(store, replace(RECORD, transformers="6.0", revision=None), begun=True)
    assert read_base(store) == RECORD


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"uri": 1}', "[" * 100_000])
def test_a_damaged_record_says_how_to_go_on(tmp_path, damage):
    (tmp_path / BASE).write_text(damage)
    with pytest.raises(StorageError, match=r"base\.json is damaged: .*; once it is deleted"):
        read_base(LocalStore(tmp_path))
