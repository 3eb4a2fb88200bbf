"""Objects as files of a folder: each write goes to a temporary file, is flushed, and then gets its name."""

import errno
import fcntl
import itertools
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from populora_trainer.errors import StorageError
from populora_trainer.storage.store import AlreadyExists, MissingObject, check_key

_TEMPORARY = ".tmp-"
_OURS = re.compile(r"\.tmp-[0-9]+-[0-9]+")
_LOCK = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_serial = itertools.count()
_held_locks: set[int] = set()


def _forget_locks() -> None:
    # A forked worker that outlives the trainer would otherwise keep the run locked.
    for descriptor in _held_locks:
        with suppress(OSError):
            os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_forget_locks)


class LocalStore:
    """An `ObjectStore` in a folder."""

    def __init__(self, folder: str | Path, *, create: bool = True) -> None:
        """Open the folder.

        Args:
            folder: the run's folder.
            create: make it where it does not exist; a reader doesn't.

        Raises:
            StorageError: it can't be made, or is not a folder.
        """
        self._root = Path(folder)
        try:
            if create:
                self._root.mkdir(parents=True, exist_ok=True)
            elif not self._root.is_dir():
                raise StorageError(f"{folder} is not a folder")
        except OSError as error:
            raise self._explained(error, "open the folder", self._root) from error

    @property
    def location(self) -> str:
        """The folder, as it was given."""
        return str(self._root)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return an object's bytes, or a range of them. See `ObjectStore`."""
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read() if length is None else file.read(length)
        except FileNotFoundError as error:
            raise self._missing(key) from error
        except OSError as error:
            raise self._explained(error, "read", path) from error

    def size(self, key: str) -> int:
        """Return the number of an object's bytes. See `ObjectStore`."""
        path = self._path(key)
        try:
            return path.stat().st_size
        except FileNotFoundError as error:
            raise self._missing(key) from error
        except OSError as error:
            raise self._explained(error, "read", path) from error

    def exists(self, key: str) -> bool:
        """Return whether there is such an object."""
        path = self._path(key)
        try:
            return path.is_file()
        except OSError as error:
            raise self._explained(error, "read", path) from error

    def list(self, prefix: str = "") -> list[str]:
        """Return the names of all objects that start with the prefix, sorted."""
        folder = self._root / prefix.rpartition("/")[0]
        keys = []
        for path, folders, files in os.walk(folder, onerror=self._unlisted):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = Path(path).relative_to(self._root)
            keys += [(inside / name).as_posix() for name in files if not name.startswith(".")]
        return sorted(key for key in keys if key.startswith(prefix))

    def put(self, key: str, data: bytes) -> None:
        """Write an object, over an earlier one if there is any. See `ObjectStore`."""
        self._write(key, data, os.replace)

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist yet. See `ObjectStore`."""
        self._write(key, data, _name_new)

    def extend(self, key: str, at: int, data: bytes) -> None:
        """Make an object its first `at` bytes followed by data. See `ObjectStore`."""
        path = self._path(key)
        try:
            self._make_folders(path.parent)
            known = path.exists()
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.fstat(descriptor).st_size < at:
                    raise StorageError(f"{path} is damaged: it should have at least {at} bytes")
                os.ftruncate(descriptor, at)
                os.lseek(descriptor, at, os.SEEK_SET)
                try:
                    _write_all(descriptor, data)
                    os.fsync(descriptor)
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(descriptor, at)
                    raise
            finally:
                os.close(descriptor)
            if not known:
                _sync_folder(path.parent)
        except OSError as error:
            raise self._explained(error, f"write {len(data)} bytes to", path) from error

    def delete(self, key: str) -> None:
        """Remove an object, and the folders that are empty without it."""
        path = self._path(key)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
            for folder in path.relative_to(self._root).parents:
                if folder.name:
                    os.rmdir(self._root / folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise self._explained(error, "delete", path) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for writing; the kernel lets go of it when the process dies. See `ObjectStore`."""
        path = self._root / _LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._explained(error, "lock", path) from error
        try:
            try:
                _take_lock(descriptor)
            except BlockingIOError as error:
                raise StorageError(f"{self._root} is in use by {_read_holder(descriptor)}") from error
            except OSError as error:
                raise self._explained(error, "lock", path) from error
            _held_locks.add(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            self._sweep()
            yield
        finally:
            _held_locks.discard(descriptor)
            os.close(descriptor)

    def holder(self) -> str | None:
        """Return who holds the run for writing, e.g. `"process 12 on host"`; None where nobody does."""
        try:
            descriptor = os.open(self._root / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_holder(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return None

    def _write(self, key: str, data: bytes, give_name: Callable[[Path, Path], None]) -> None:
        path = self._path(key)
        temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{next(_serial)}")
        try:
            self._make_folders(path.parent)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                try:
                    _write_all(descriptor, data)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                give_name(temporary, path)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
            _sync_folder(path.parent)
        except OSError as error:
            raise self._explained(error, f"write {len(data)} bytes to", path) from error

    def _make_folders(self, folder: Path) -> None:
        new = list(itertools.takewhile(lambda one: not one.is_dir(), (folder, *folder.parents)))
        for one in reversed(new):
            one.mkdir(exist_ok=True)
            _sync_folder(one.parent)

    def _sweep(self) -> None:
        """Remove the temporary files of writers that died; nobody else writes while the lock is held."""
        for path, folders, files in os.walk(self._root):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if _OURS.fullmatch(name):
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(path, name))

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _unlisted(self, error: OSError) -> None:
        # A folder that is not there, or has gone since its name was read, holds nothing.
        if not isinstance(error, FileNotFoundError):
            raise self._explained(error, "list", Path(error.filename)) from error

    def _missing(self, key: str) -> MissingObject:
        return MissingObject(f"{self._path(key)} is missing")

    def _explained(self, error: OSError, action: str, path: Path) -> StorageError:
        if error.errno == errno.ENOSPC and self._has_no_inodes():
            return StorageError(
                f"can't {action} {path}: the file system holds as many files as it can ({self._free()} free, but no "
                f"inode); nothing that was committed is lost, so delete files and run the same command again"
            )
        if error.errno in _FULL:
            return StorageError(
                f"can't {action} {path}: no space is left for it ({self._free()} free: {error.strerror}); nothing that "
                f"was committed is lost, so make room and run the same command again"
            )
        return StorageError(f"can't {action} {path}: {error.strerror or error}")

    def _has_no_inodes(self) -> bool:
        try:
            found = os.statvfs(self._root)
        except OSError:
            return False
        return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0

    def _free(self) -> str:
        try:
            return f"{shutil.disk_usage(self._root).free / 2**20:.1f} MiB"
        except OSError:
            return "unknown space"


def _take_lock(descriptor: int) -> None:
    # Who asks for the holder has the lock for an instant, so one refusal is not yet an answer.
    for _ in range(4):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
    return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_holder(descriptor: int) -> str:
    return os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "another process"


def _name_new(temporary: Path, path: Path) -> None:
    """Give a file its name if that is free."""
    taken = AlreadyExists(f"{path} exists already")
    try:
        # A link fails where the name is taken; a rename would replace what is there.
        os.link(temporary, path)
    except FileExistsError as error:
        raise taken from error
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        # No hard links on this file system; the run's lock keeps other writers of this machine away.
        if path.exists():
            raise taken from error
        os.replace(temporary, path)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems can't flush folders; they order names themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
