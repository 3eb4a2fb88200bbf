import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from faults import disk_full, faults
from hypothesis import given
from hypothesis import strategies as st

from populora_trainer.errors import StorageError
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.store import AlreadyExists, MissingObject, check_key


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


def test_an_object_reads_back_whole_and_in_parts(store):
    store.put("steps/000001.json", b"0123456789")
    assert store.get("steps/000001.json") == b"0123456789"
    assert store.get("steps/000001.json", 3, 4) == b"3456"
    assert store.get("steps/000001.json", 8, 100) == b"89"
    assert store.size("steps/000001.json") == 10
    store.put("steps/000001.json", b"new")
    assert store.get("steps/000001.json") == b"new"


def test_a_missing_object_is_named(store):
    assert not store.exists("LATEST")
    for ask in (store.get, store.size):
        with pytest.raises(MissingObject, match=r"run/LATEST is missing"):
            ask("LATEST")


def test_create_never_overwrites(store):
    store.create("steps/000001.json", b"first")
    with pytest.raises(AlreadyExists, match=r"steps/000001\.json exists already"):
        store.create("steps/000001.json", b"second")
    assert store.get("steps/000001.json") == b"first"
    assert store.list() == ["steps/000001.json"]


def test_create_never_overwrites_where_the_file_system_has_no_links(store, monkeypatch):
    def no_links(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    store.create("LATEST", b"first")
    with pytest.raises(AlreadyExists):
        store.create("LATEST", b"second")
    assert store.get("LATEST") == b"first"


def test_of_many_creators_exactly_one_succeeds(store):
    winners = []
    barrier = threading.Barrier(8)

    def create(number):
        barrier.wait()
        try:
            store.create("steps/000001.json", b"%d" % number)
            winners.append(b"%d" % number)
        except AlreadyExists:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert winners == [store.get("steps/000001.json")]


def test_a_reader_sees_an_old_or_a_new_object_and_never_a_part(store):
    contents = [bytes([value]) * 200_000 for value in (1, 2)]
    store.put("LATEST", contents[0])
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for content in contents:
                store.put("LATEST", content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {store.get("LATEST") for _ in range(100)}
    finally:
        stop.set()
        writer.join()
    assert seen <= set(contents)


def test_list_gives_names_by_prefix_in_order_without_temporary_files_and_lock(store):
    for key in ("steps/000002.json", "steps/000001.json", "adapters/ab/x", "LATEST"):
        store.put(key, b"")
    (Path(store.location) / "steps" / ".tmp-1-1").write_bytes(b"half")
    with store.lock():
        assert store.list() == ["LATEST", "adapters/ab/x", "steps/000001.json", "steps/000002.json"]
    assert store.list("steps/") == ["steps/000001.json", "steps/000002.json"]
    assert store.list("adapters/a") == ["adapters/ab/x"]
    assert store.list("none/") == []


def test_delete_takes_the_empty_folders_along_and_may_be_repeated(store):
    store.put("adapters/ab/one", b"")
    store.put("adapters/cd/two", b"")
    store.delete("adapters/ab/one")
    store.delete("adapters/ab/one")
    assert sorted(path.name for path in (Path(store.location) / "adapters").iterdir()) == ["cd"]


def test_extend_appends_and_cuts(store):
    store.extend("metrics.jsonl", 0, b"one\ntwo\n")
    store.extend("metrics.jsonl", 8, b"three\n")
    assert store.get("metrics.jsonl") == b"one\ntwo\nthree\n"
    store.extend("metrics.jsonl", 4, b"2\n")
    assert store.get("metrics.jsonl") == b"one\n2\n"
    with pytest.raises(StorageError, match="at least 100 bytes"):
        store.extend("metrics.jsonl", 100, b"x")


def test_a_failed_extension_leaves_what_was_there(store):
    store.extend("metrics.jsonl", 0, b"one\n")
    with faults(2, disk_full, ("write",)), pytest.raises(StorageError, match="no space"):
        store.extend("metrics.jsonl", 4, b"two\n")
    assert store.get("metrics.jsonl") == b"one\n"


@given(st.text(max_size=20) | st.text("ab./-_", max_size=8))
def test_no_name_leads_out_of_the_run(name):
    with suppress(StorageError):
        parts = check_key(name).split("/")
        assert all(part and not part.startswith(".") for part in parts)
        assert name.isascii()


@pytest.mark.parametrize(
    "name", ["", "/etc/x", "../other", "steps/../../x", ".lock", "a//b", "a/", "a b", "a\\b", "a\n"]
)
def test_odd_names_are_refused(store, name):
    with pytest.raises(StorageError, match="can't name an object"):
        store.put(name, b"")


def test_a_second_process_is_told_who_holds_the_run(trainer, store):
    holder = trainer.ask(hold=store.location)
    try:
        with pytest.raises(StorageError, match=rf"run is in use by process {holder['pid']} on \S+$"), store.lock():
            pass
        assert store.holder().startswith(f"process {holder['pid']} on ")
    finally:
        trainer.ask(release=True)
    assert store.holder() is None
    with store.lock():
        assert store.holder().startswith(f"process {os.getpid()} on ")


def test_a_killed_process_holds_nothing_even_where_its_forked_worker_lives_on(store):
    script = (
        "import os, sys, time\n"
        "from populora_trainer.storage.local import LocalStore\n"
        "with LocalStore(sys.argv[1]).lock():\n"
        "    worker = os.fork()\n"
        "    if not worker:\n"
        "        print('ready', flush=True)\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, store.location], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        assert store.holder() == f"process {process.pid} on {os.uname().nodename}"
        process.kill()
        process.wait()
        assert store.holder() is None
        with store.lock():
            pass
    finally:
        process.stdin.close()
        process.stdout.close()


def test_taking_the_lock_clears_what_a_dead_writer_left(store):
    store.put("adapters/ab/file", b"whole")
    left = [Path(store.location) / name for name in (".tmp-9-1", "adapters/ab/.tmp-9-2")]
    for path in left:
        path.write_bytes(b"half")
    with store.lock():
        assert not any(path.exists() for path in left)
    assert store.get("adapters/ab/file") == b"whole"


def test_a_folder_that_cannot_be_one_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"can't open the folder .*file"):
        LocalStore(tmp_path / "file")
    with pytest.raises(StorageError, match="none is not a folder"):
        LocalStore(tmp_path / "none", create=False)
    store = LocalStore(tmp_path)
    with pytest.raises(StorageError, match=r"can't write 1 bytes to .*file/x"):
        store.put("file/x", b"1")


def test_a_file_system_without_inodes_is_called_that(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    found = os.statvfs_result((4096, 4096, 1000, 900, 900, 500, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    with faults(1, disk_full, ("open",)), pytest.raises(StorageError, match="no inode"):
        store.put("one", b"1")


def test_a_name_that_cannot_be_looked_up_is_a_storage_error(tmp_path):
    store = LocalStore(tmp_path)
    for look in (store.exists, store.list, store.get, store.size):
        with pytest.raises(StorageError, match=r"File name too long|is missing"):
            look("x" * 300 + "/y")
