"""A run as its trainer holds it: locked, continued where it stopped, committed step by step."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from populora_trainer.errors import StorageError
from populora_trainer.storage.checkpoint import (
    CheckpointState,
    Manifest,
    check_rewind,
    collect,
    load_newest,
    newest_manifest,
    point_latest,
    rewind,
    write_checkpoint,
)
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import LogName, RunLogs
from populora_trainer.storage.store import AlreadyExists, ObjectStore

RUN_MANIFEST = "run.yaml"
EARLIER_MANIFESTS = "manifests"
"""Folder of the manifests that `run.yaml` held before a resume changed it, oldest first."""


class Run:
    """The run that this process trains. A context manager: leaving it lets go of the run.

    `commit` is the only way forward: when it returns, the step is durable with its log lines; a process that dies
    before leaves the run at the step before. Nothing in it depends on the clock or the machine.
    """

    def __init__(self, store: ObjectStore, lock: ExitStack, manifest: str, from_step: int | None) -> None:
        """Take over a store whose lock is held; use `open_or_create`."""
        self.store = store
        self.logs = RunLogs(store)
        self._lock = lock
        self._manifest = manifest
        self._from_step = from_step

    @property
    def step(self) -> int | None:
        """The committed step that the run goes on from; None where there is none."""
        if self._from_step is not None:
            return self._from_step
        newest = newest_manifest(self.store)
        return None if newest is None else newest.step

    @classmethod
    def open_or_create(
        cls,
        store: ObjectStore,
        manifest: str,
        *,
        check_change: Callable[[str, str], None] | None = None,
        from_step: int | None = None,
        hold: bool = False,
    ) -> "Run":
        """Lock the run, make it if it is new, and put it in order as its newest checkpoint says (`begin`).

        Until step 0 is committed the manifest may become any other: a first try that failed has left nothing worth
        keeping.

        Args:
            store: where the run lives or shall live.
            manifest: the text of `run.yaml`.
            check_change: called with (stored, new) text where they differ; raises if the run can't change like that.
                Without it, no difference is allowed.
            from_step: drop the checkpoints after this step and go on from it.
            hold: leave a run that is there as it is until `begin` is called, since the call may still be refused.

        Raises:
            StorageError: another process holds the run, it belongs to another manifest, or its newest checkpoint is
                damaged.
        """
        with ExitStack() as lock:
            lock.enter_context(store.lock())
            if from_step is not None and not store.exists(RUN_MANIFEST):
                raise StorageError(f"{store.location} holds no run yet, so there is no step {from_step} to go back to")
            _check_manifest(store, manifest, check_change)
            if from_step is not None:
                check_rewind(store, from_step)
            run = cls(store, lock.pop_all(), manifest, from_step)
        try:
            if hold and store.exists(RUN_MANIFEST):
                newest_manifest(store)  # one that is damaged is told before anything is loaded
            else:
                run.begin()
        except BaseException:
            run.close()
            raise
        return run

    def begin(self) -> str | None:
        """Put the run in order to go on, and return the manifest that its own takes the place of, None for the same.

        What an interrupted writer left is cleared: temporary files, a LATEST that lags behind, log lines of steps that
        were not committed.
        """
        replaced = _settle_manifest(self.store, self._manifest)
        if self._from_step is not None:
            rewind(self.store, self._from_step)
            self._from_step = None
        newest = newest_manifest(self.store)
        if newest is not None:
            point_latest(self.store, newest)
        # Step 0 is the state before training; without a checkpoint not even its lines count.
        self.logs.trim(-1 if newest is None else newest.step)
        return replaced

    def latest(self) -> tuple[Manifest, CheckpointState] | None:
        """Return the newest checkpoint, or None for a run without one; every byte is checked against its digest."""
        return load_newest(self.store)

    def log(self, name: LogName, record: Mapping[str, object]) -> None:
        """Add a record, with its `step`, to a log; written by the next `commit` or `logs.flush`."""
        self.logs.append(name, record)

    def commit(self, step: int, state: CheckpointState, *, keep: int | None = None) -> Manifest:
        """Make a step durable: its log lines, its objects, its manifest, LATEST, in this order.

        Args:
            step: number of steps done; newer than every committed one.
            state: what the next step starts from.
            keep: how many checkpoints to keep; None keeps all.

        Raises:
            StorageError: something can't be written, or another trainer was faster. The steps before stay as they are.
        """
        self.logs.flush()
        manifest = write_checkpoint(self.store, step, state)
        if keep is not None:
            collect(self.store, keep)
        return manifest

    def close(self) -> None:
        """Let go of the run."""
        self._lock.close()

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def open_store(
    place: str,
    *,
    create: bool = False,
    endpoint: str | None = None,
    region: str | None = None,
    tries: int | None = None,
) -> ObjectStore:
    """Return the store of a folder, or of a `file://` or `s3://BUCKET/PREFIX` URI.

    Args:
        place: the folder or URI.
        create: make the folder where it does not exist; a bucket always exists.
        endpoint, region: of a bucket; by default what the environment says.
        tries: of a request to a bucket that fails; by default enough to sit out an interruption of half a minute.

    Raises:
        StorageError: another scheme, or a folder that does not exist and shall not be made.
    """
    folder = folder_of(place)
    if folder is not None:
        return LocalStore(folder, create=create)
    parts = urlsplit(place)
    # boto3 takes a noticeable part of a second to load.
    from populora_trainer.storage.s3 import S3Store

    return S3Store(parts.netloc, parts.path.strip("/"), endpoint=endpoint, region=region, tries=tries)


def folder_of(place: str) -> Path | None:
    """Return the folder that a path or URI names; None where it names a bucket.

    Raises:
        StorageError: it is neither.
    """
    if "://" not in place:
        return Path(place)
    try:
        parts = urlsplit(place)
    except ValueError:  # brackets without an IPv6 address between them
        parts = urlsplit("")
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    if parts.scheme == "s3" and parts.netloc:
        return None
    raise StorageError(f"{place} can't hold a run: a folder, file:///FOLDER or s3://BUCKET/PREFIX can")


def existing_run(place: str) -> ObjectStore:
    """Return the store of a run, for reading.

    Raises:
        StorageError: there is no run.
    """
    store = open_store(place)
    if not store.exists(RUN_MANIFEST):
        raise StorageError(f"{place} is not a run: it has no {RUN_MANIFEST}")
    return store


def _check_manifest(store: ObjectStore, text: str, check_change: Callable[[str, str], None] | None) -> None:
    """Refuse a manifest that is not the run's, or that the run cannot go on with."""
    if not store.exists(RUN_MANIFEST):
        if store.list("steps/"):
            raise StorageError(f"{store.location} holds checkpoints but no {RUN_MANIFEST}, so it can't be gone on with")
        return
    stored = store.get(RUN_MANIFEST).decode()
    if stored == text or newest_manifest(store) is None:
        return
    if check_change is None:
        raise StorageError(
            f"{store.location} holds a run of another manifest: choose another folder, or compare with "
            f"{store.location}/{RUN_MANIFEST}"
        )
    check_change(stored, text)


def _settle_manifest(store: ObjectStore, text: str) -> str | None:
    """Make the text the run's manifest; keep and return the one that steps were done by, where it is another."""
    try:
        store.create(RUN_MANIFEST, text.encode())
        return None
    except AlreadyExists:
        stored = store.get(RUN_MANIFEST).decode()
    if stored == text:
        return None
    begun = newest_manifest(store) is not None
    if begun:
        _keep(store, stored)
    store.put(RUN_MANIFEST, text.encode())
    return stored if begun else None


def _keep(store: ObjectStore, text: str) -> None:
    """Keep a manifest that steps were done by, under the number of the manifests before it."""
    kept = store.list(f"{EARLIER_MANIFESTS}/")
    # A process that was killed before it wrote the new one has kept it already.
    if not kept or store.get(kept[-1]) != text.encode():
        store.create(f"{EARLIER_MANIFESTS}/{len(kept):04d}.yaml", text.encode())
