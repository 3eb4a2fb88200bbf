import hashlib
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.serving import folders as module
from populora_trainer.serving.failures import ServingError
from populora_trainer.serving.folders import AdapterFolders, held
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.publication import PublishedAdapter

DIGEST = "d" * 64


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def folders(tmp_path):
    return AdapterFolders(tmp_path / "adapters")


def stored(store, **files: bytes) -> PublishedAdapter:
    for name, data in files.items():
        store.put(f"adapters/{DIGEST}/{name}", data)
    return PublishedAdapter("t0", "t0-s000001-dddddddd", DIGEST, {name: _sum(data) for name, data in files.items()})


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_an_adapter_comes_whole_and_can_be_read_by_other_users(store, folders, tmp_path):
    adapter = stored(store, config=b"{}", weights=b"w" * 1000)
    assert folders.stored([adapter]) == set()
    assert folders.download(store, adapter) == 1002
    assert folders.stored([adapter]) == {DIGEST}
    assert (tmp_path / "adapters" / DIGEST / "weights").read_bytes() == b"w" * 1000
    assert os.stat(tmp_path / "adapters" / DIGEST).st_mode & 0o055 == 0o055
    assert os.listdir(tmp_path / "adapters") == [DIGEST]


@given(size=st.integers(0, 40), chunk=st.integers(1, 12))
def test_files_of_any_size_come_in_parts_of_any_size(size, chunk, tmp_path_factory):
    place = tmp_path_factory.mktemp("sizes")
    store, folders = LocalStore(place / "run"), AdapterFolders(place / "adapters")
    data = bytes(range(size))
    adapter = stored(store, weights=data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        assert folders.download(store, adapter) == size
    assert (place / "adapters" / DIGEST / "weights").read_bytes() == data


@pytest.mark.parametrize("change", [b"", b"half", b"other bytes", b"weights and more"])
def test_an_object_that_is_not_what_was_published_is_refused(change, store, folders, tmp_path):
    adapter = stored(store, config=b"{}", weights=b"weights")
    store.put(adapter.key("weights"), change)
    with pytest.raises(ServingError, match=r"weights is damaged, so t0-s000001-dddddddd is not loaded: its \d+ bytes"):
        folders.download(store, adapter)
    assert os.listdir(tmp_path / "adapters") == []


def test_a_missing_object_is_named(store, folders):
    adapter = stored(store, config=b"{}", weights=b"weights")
    store.delete(adapter.key("weights"))
    with pytest.raises(ServingError, match=f"{DIGEST}/weights is missing, and the publication names it as t0-s000001-"):
        folders.download(store, adapter)


def test_what_an_interrupted_download_left_is_removed(tmp_path):
    left = tmp_path / "adapters" / ".populora-part-abc" / "whole"
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"half")
    AdapterFolders(tmp_path / "adapters")
    assert os.listdir(tmp_path / "adapters") == []


def test_a_folder_of_an_earlier_process_is_used_where_it_is_whole(store, folders, tmp_path):
    adapter = stored(store, weights=b"weights")
    folders.download(store, adapter)
    assert AdapterFolders(tmp_path / "adapters").stored([adapter]) == {DIGEST}


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "more"])
def test_a_folder_of_an_earlier_process_is_removed_where_it_is_damaged(damage, store, folders, tmp_path):
    adapter = stored(store, config=b"{}", weights=b"weights")
    folders.download(store, adapter)
    path = tmp_path / "adapters" / DIGEST
    match damage:
        case "changed":
            (path / "weights").write_bytes(b"Weights")
        case "cut":
            (path / "weights").write_bytes(b"weigh")
        case "gone":
            (path / "weights").unlink()
        case "more":
            (path / "adapter_model.bin").write_bytes(b"pickle")
    again = AdapterFolders(tmp_path / "adapters")
    assert again.stored([adapter]) == set()
    assert not path.exists()
    again.download(store, adapter)
    assert again.stored([adapter]) == {DIGEST}


def test_two_downloads_of_the_same_adapter_do_not_disturb_each_other(store, folders):
    adapter = stored(store, weights=b"weights")
    assert folders.download(store, adapter) == folders.download(store, adapter) == 7
    assert folders.stored([adapter]) == {DIGEST}


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ServingError, match="file/adapters can't hold adapters: Not a directory"):
        AdapterFolders(tmp_path / "file" / "adapters")


def test_what_is_no_adapter_is_neither_listed_nor_touched(store, folders, tmp_path):
    adapter = stored(store, weights=b"weights")
    folders.download(store, adapter)
    for name in ("papers", ".part-of-something", DIGEST[:63], f"{DIGEST}.bak"):
        (tmp_path / "adapters" / name).mkdir()
    assert AdapterFolders(tmp_path / "adapters").stored([adapter]) == {DIGEST}
    assert len(os.listdir(tmp_path / "adapters")) == 5


def test_a_folder_that_another_sidecar_uses_is_refused_until_that_one_is_gone(tmp_path):
    with (
        held(tmp_path / "adapters"),
        pytest.raises(ServingError, match="adapters is another sidecar's: give"),
        held(tmp_path / "adapters"),
    ):
        pass
    with held(tmp_path / "adapters"):
        assert os.listdir(tmp_path / "adapters") == []
