"""The end of a run: everything that it stored goes, and nothing else."""

from pathlib import Path

from populora_trainer.errors import StorageError
from populora_trainer.storage.run import RUN_MANIFEST, open_store
from populora_trainer.storage.store import ObjectStore

_FILES = frozenset(
    {
        *("run.yaml", "LATEST", "serving.json", "environment.json", "report.html"),
        *("metrics.jsonl", "matchups.jsonl", "problems.jsonl", "evolution.jsonl"),
    }
)
_FOLDERS = frozenset({"steps", "adapters", "optimizer", "buffer", "archive", "evaluation"})


def delete_run(place: str, *, endpoint: str | None = None, region: str | None = None) -> int:
    """Delete the run in a folder or under a URI and return how many objects went; none where there is none.

    Raises:
        StorageError: something else is stored there too, another process trains the run, or it can't be deleted.
    """
    if "://" not in place and not Path(place).exists():
        return 0
    store = open_store(place, endpoint=endpoint, region=region, create=place.startswith("file://"))
    with store.lock():
        keys = store.list()
        foreign = [key for key in keys if not _of_a_run(key)]
        if foreign:
            raise StorageError(
                f"{store.location} is not deleted: it holds {foreign[0]}, which is no part of a run"
                + (f", and {len(foreign) - 1} more such objects" if len(foreign) > 1 else "")
            )
        return _delete_all(store, keys)


def _of_a_run(key: str) -> bool:
    first, _, rest = key.partition("/")
    return first in _FOLDERS if rest else key in _FILES


def _delete_all(store: ObjectStore, keys: list[str]) -> int:
    # Without LATEST no reader takes the rest for a run, and run.yaml says until the end what this was.
    for key in sorted(keys, key=lambda one: (one == RUN_MANIFEST, one != "LATEST", one)):
        store.delete(key)
    return len(keys)
