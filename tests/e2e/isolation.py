"""Runs a command in network, mount and process namespaces of its own, so that nothing it starts outlives it.

The real node makes interfaces, rules, mounts and containers. In namespaces of their own they meet nothing of this
machine and nothing of another run, and the kernel takes them away with the command, however it ends. Control groups and
one folder are all that is left then; they are removed here, and those of a run that was killed by the next run.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER_VARIABLE = "POPULORA_NODE_FOLDER"
"""Set for the command: the folder for all files, whose name is that of the control groups, too."""

PREFIX = "populora-node-"
CGROUPS = Path("/sys/fs/cgroup")

IMAGES_FOLDER = "images"
"""In the folder, for images and root file systems of containers: in memory, as unpacking and deleting takes time."""

_LOCK = "lock"
# What programs of the node write outside the folder and what has to be theirs alone.
_PRIVATE_FOLDERS = ("/run", "/var/lib/cni", "/var/log/pods", "/var/log/containers")

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def isolated_folder() -> Path | None:
    """Return the folder of the isolated command that this process belongs to, None outside."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def run_isolated(command: Sequence[str]) -> int:
    """Run a command in namespaces of its own and return its exit status, negative for a signal.

    SIGTERM ends the command as SIGINT does, so that it can stop what it has started in order. Where the kernel refuses
    the namespaces, it says so and returns 1.
    """
    with _folder() as folder:
        child = os.fork()
        if child == 0:
            os._exit(_separate(command, folder))
        with _handled(signal.SIGINT, signal.SIG_IGN), _handled(signal.SIGTERM, lambda *_: os.kill(child, 15)):
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make the folder and hold its lock, by which others see that it is in use; remove what nobody holds any more."""
    # One without a lock is being made at this moment.
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        path = lock.parent
        with _locked(path) as free:
            if free:
                _remove(path)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    # Users in containers read what is mounted from it.
    folder.chmod(0o755)
    with _locked(folder):
        yield folder
        if (folder / "kept").exists():
            _remove_cgroups(folder.name)
        else:
            _remove(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    with open(folder / _LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _remove(folder: Path) -> None:
    """Remove a folder and the control groups of its name; whatever was mounted in it has gone with its namespace."""
    _remove_cgroups(folder.name)
    if any(f" {folder}/" in line for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        sys.exit(f"{folder} was left by an earlier run and holds mounts: unmount them and remove it by hand.")
    shutil.rmtree(folder, ignore_errors=True)


def _remove_cgroups(name: str) -> None:
    for top in (CGROUPS / name, *CGROUPS.glob(f"*/{name}")):
        for group in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()


def _separate(command: Sequence[str], folder: Path) -> int:
    """In the child: enter the namespaces and wait for their first process."""
    _die_with_parent()
    if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWPID):
        print(f"This machine refuses namespaces: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return 1
    first = os.fork()
    if first == 0:
        os._exit(_first_process(command, folder))
    with _handled(signal.SIGINT, signal.SIG_IGN), _handled(signal.SIGTERM, lambda *_: os.kill(first, 15)):
        status = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    return status if status >= 0 else 128 - status


def _first_process(command: Sequence[str], folder: Path) -> int:
    """In process 1 of the namespaces: start the command and bury orphans; with this process everything ends."""
    _die_with_parent()
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "proc", "proc", "/proc")
    for path in (*_PRIVATE_FOLDERS, folder / IMAGES_FOLDER):
        Path(path).mkdir(parents=True, exist_ok=True)
        _run("mount", "-t", "tmpfs", "tmpfs", str(path))
    _run("ip", "link", "set", "lo", "up")
    process = subprocess.Popen(list(command), env={**os.environ, FOLDER_VARIABLE: str(folder)})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGINT))
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: "signal._HANDLER") -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
