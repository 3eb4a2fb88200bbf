"""The end of a run: everything that it stored goes, and nothing else."""

import os
from pathlib import Path

from populora_trainer.errors import StorageError
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.run import RUN_MANIFEST, folder_of, open_store
from populora_trainer.storage.store import ObjectStore

_FILES = frozenset(
    {
        *("run.yaml", "LATEST", "serving.json", "environment.json", "base.json", "report.html"),
        *("metrics.jsonl", "matchups.jsonl", "problems.jsonl", "evolution.jsonl"),
    }
)
_FOLDERS = frozenset({"steps", "manifests", "adapters", "optimizer", "buffer", "archive", "evaluation"})


def delete_run(place: str, *, endpoint: str | None = None, region: str | None = None) -> int:
    """Delete the run in a folder or under a URI and return how many objects went; none where there is none.

    Raises:
        StorageError: something else is stored there too, another process trains the run, or it can't be deleted.
    """
    folder = folder_of(place)
    if folder is not None and not folder.exists():
        return 0
    store = open_store(place, endpoint=endpoint, region=region)
    if isinstance(store, LocalStore):
        # At the first look: taking the lock of a folder and listing it go through everything in it.
        _refuse_foreign(store, _top(Path(store.location)))
    with store.lock():
        keys = store.list()
        _refuse_foreign(store, keys)
        return _delete_all(store, keys)


def _top(folder: Path) -> list[str]:
    """Return what stands in a folder itself, folders with a slash at their end; names with a dot are the store's."""
    try:
        with os.scandir(folder) as entries:
            return sorted(
                f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        raise StorageError(f"{folder} can't be read: {error.strerror}") from error


def foreign_in(folder: Path) -> list[str]:
    """Return what stands in a folder and is no part of a run; a file system's own `lost+found` is nobody's.

    Raises:
        StorageError: the folder can't be read.
    """
    return [name for name in _top(folder) if not _of_a_run(name) and name != "lost+found/"]


def _refuse_foreign(store: ObjectStore, keys: list[str]) -> None:
    foreign = [key for key in keys if not _of_a_run(key)]
    if foreign:
        raise StorageError(
            f"{store.location} is not deleted: it holds {foreign[0]}, which is no part of a run"
            + (f", and {len(foreign) - 1} more such objects" if len(foreign) > 1 else "")
        )


def _of_a_run(key: str) -> bool:
    first, inside, _ = key.partition("/")
    return first in _FOLDERS if inside else key in _FILES


def _delete_all(store: ObjectStore, keys: list[str]) -> int:
    # Without LATEST no reader takes the rest for a run, and run.yaml says until the end what this was.
    for key in sorted(keys, key=lambda one: (one == RUN_MANIFEST, one != "LATEST", one)):
        store.delete(key)
    return len(keys)
