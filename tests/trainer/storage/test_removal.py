import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from toy_run import train

from populora_trainer.commands.storage import command
from populora_trainer.errors import StorageError
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.removal import delete_run


def test_a_run_is_deleted_whole_and_a_second_time_is_no_error(tmp_path):
    train(tmp_path / "run", 2)
    (tmp_path / "beside").write_text("stays")
    stored = len(LocalStore(tmp_path / "run").list())
    assert stored > 10
    assert delete_run(str(tmp_path / "run")) == stored
    assert LocalStore(tmp_path / "run").list() == []
    assert delete_run(f"file://{tmp_path}/run") == 0
    assert delete_run(f"file://{tmp_path}/never") == 0
    assert not (tmp_path / "never").exists()
    assert delete_run(str(tmp_path / "never")) == 0
    assert (tmp_path / "beside").read_text() == "stays"


def test_an_interrupted_deletion_is_taken_up(tmp_path, monkeypatch):
    train(tmp_path, 1)
    delete, gone = LocalStore.delete, []

    def dies_after_five(store, key):
        if len(gone) == 5:
            raise StorageError("cut")
        gone.append(key)
        delete(store, key)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "delete", dies_after_five)
        with pytest.raises(StorageError, match="cut"):
            delete_run(str(tmp_path))
    assert gone[0] == "LATEST"
    assert (tmp_path / "run.yaml").exists()
    assert delete_run(str(tmp_path)) > 0
    assert LocalStore(tmp_path).list() == []


def test_what_is_no_run_is_left_alone(tmp_path):
    train(tmp_path, 1)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match=r"is not deleted: it holds thesis\.tex, which is no part of a run"):
        delete_run(str(tmp_path))
    assert (tmp_path / "LATEST").exists()


def test_a_run_that_is_being_trained_is_not_deleted(tmp_path):
    train(tmp_path, 1)
    with LocalStore(tmp_path).lock(), pytest.raises(StorageError, match="is in use by"):
        delete_run(str(tmp_path))


def test_the_command_says_what_went(tmp_path):
    train(tmp_path, 1)
    stored = len(LocalStore(tmp_path).list())
    result = CliRunner().invoke(command, ["delete", str(tmp_path)])
    assert result.output == f"Deleted {stored} objects of {tmp_path}\n"
    assert not list(Path(tmp_path).glob("[!.]*"))


def test_a_folder_of_other_things_is_neither_walked_nor_touched(tmp_path, monkeypatch):
    (tmp_path / "home" / "deep").mkdir(parents=True)
    (tmp_path / "home" / "deep" / ".tmp-1-1").write_text("somebody's")
    monkeypatch.setattr(os, "walk", None)
    with pytest.raises(StorageError, match=r"is not deleted: it holds home/, which is no part of a run"):
        delete_run(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert (tmp_path / "home" / "deep" / ".tmp-1-1").exists()


def test_the_whole_disk_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(os, "walk", None)
    with pytest.raises(StorageError, match=r"^/ is not deleted: it holds \w+"):
        delete_run("/")


def test_a_link_to_a_folder_elsewhere_is_not_followed(tmp_path):
    train(tmp_path / "run", 1)
    (tmp_path / "run" / "archive").rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "archive").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"it holds archive, which is no part of a run"):
        delete_run(str(tmp_path / "run"))
    assert list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "run" / "LATEST").exists()
