"""Adapters on this machine's disk: one folder for each digest, which appears whole and verified or not at all."""

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from populora_trainer.errors import StorageError
from populora_trainer.serving.failures import ServingError
from populora_trainer.storage.publication import PublishedAdapter
from populora_trainer.storage.store import MissingObject, ObjectStore

_TEMPORARY = ".populora-part-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK = 32 << 20  # bytes in memory for each adapter that is being downloaded


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other sidecars, which would remove what this one needs, from a folder; it is made where it does not exist.

    Raises:
        ServingError: another process holds the folder, or it can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ServingError("disk", f"{folder} can't hold adapters: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ServingError(
                "disk", f"{folder} is another sidecar's: give each vLLM server's adapters a folder of their own"
            ) from error
        except OSError:
            pass  # this file system has no locks
        yield
    finally:
        os.close(descriptor)


class AdapterFolders:
    """The folder that vLLM reads adapters from. Its methods block; calls for different digests may run at a time.

    Whatever else is in the folder is left alone: only names that are digests are adapters.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder where it does not exist, and remove what an interrupted download left.

        Raises:
            ServingError: it can't be made or written.
        """
        self.folder = folder.absolute()
        self._verified: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob(f"{_TEMPORARY}*"):
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=self.folder):
                pass
        except OSError as error:
            raise ServingError("disk", f"{folder} can't hold adapters: {error.strerror or error}") from error

    def stored(self, adapters: Iterable[PublishedAdapter]) -> frozenset[str]:
        """Return the digests of all folders, without those of the given adapters that are not what was published.

        A folder that another process left is read once and removed if it is damaged.
        """
        for adapter in adapters:
            path = self.folder / adapter.digest
            if adapter.digest in self._verified or not path.exists():
                continue
            if _is_whole(path, adapter):
                self._verified.add(adapter.digest)
            else:
                self.discard(adapter.digest)
        return frozenset(path.name for path in self.folder.iterdir() if _DIGEST.fullmatch(path.name))

    def download(self, store: ObjectStore, adapter: PublishedAdapter) -> int:
        """Bring an adapter here and return the number of bytes that came.

        Raises:
            ServingError: the storage can't be read, what it holds is not what was published, or the disk is full. The
                folder is as it was.
        """
        path = self.folder / adapter.digest
        try:
            with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=self.folder, ignore_cleanup_errors=True) as name:
                whole = Path(name) / "whole"
                whole.mkdir()
                size = sum(_fetch(store, adapter, file, whole / file) for file in adapter.files)
                _give_name(whole, path)
        except OSError as error:
            raise ServingError("disk", f"{path} can't be written: {error.strerror or error}") from error
        self._verified.add(adapter.digest)
        return size

    def discard(self, digest: str) -> None:
        """Remove an adapter's folder; one that does not exist is removed already."""
        self._verified.discard(digest)
        shutil.rmtree(self.folder / digest, ignore_errors=True)


def _fetch(store: ObjectStore, adapter: PublishedAdapter, file: str, path: Path) -> int:
    key = adapter.key(file)
    found = hashlib.sha256()
    size = 0
    with open(path, "wb") as written:
        while True:
            try:
                part = store.get(key, size, _CHUNK)
            except MissingObject as error:
                raise ServingError("damaged", f"{error}, and the publication names it as {adapter.name}") from error
            except StorageError as error:
                raise ServingError("storage", str(error)) from error
            found.update(part)
            written.write(part)
            size += len(part)
            if len(part) < _CHUNK:
                break
    if found.hexdigest() != adapter.files[file]:
        raise ServingError(
            "damaged",
            f"{store.location}/{key} is damaged, so {adapter.name} is not loaded: its {size} bytes have the sha256 "
            f"{found.hexdigest()}, expected {adapter.files[file]}",
        )
    return size


def _give_name(whole: Path, path: Path) -> None:
    try:
        whole.rename(path)
    except OSError:
        # A download that was given up in the meantime has come to its end before this one.
        if not path.exists():
            raise


def _is_whole(path: Path, adapter: PublishedAdapter) -> bool:
    try:
        if sorted(os.listdir(path)) != sorted(adapter.files):
            return False
        for file, expected in adapter.files.items():
            with open(path / file, "rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
                    return False
    except OSError:
        return False
    return True
