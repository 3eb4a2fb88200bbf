"""How the tests' binaries are built, with a Go that only pretends to."""

import os
import stat
import threading
from pathlib import Path

import build
import pytest

GO = """#!/usr/bin/env python3
import os, pathlib, sys
words = sys.argv[1:]
if words == ["version"]:
    print("go version go{version} linux/amd64")
    sys.exit()
with open({log!r}, "a") as log:
    print(*words, file=log)
print("a/package", file=sys.stderr)
if {fails}:
    print("a/package: it does not compile", file=sys.stderr)
    sys.exit(1)
folder = pathlib.Path(words[words.index("-o") + 1])
for package in words[words.index("-o") + 2 :]:
    parts = package.split("/")
    name = parts[-2] if parts[-1] == "v3" else parts[-1]
    (folder / name).write_text(package)
"""


class PlayedGo:
    """A `go` on PATH.

    Attributes:
        builds: the arguments of every build.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.log = folder, folder / "builds"
        self.become("1.26.8")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)

    def become(self, version: str, fails: bool = False) -> None:
        """Be of a version, and compile or not."""
        path = self.folder / "go"
        path.write_text(GO.format(version=version, log=str(self.log), fails=fails))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def builds(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedGo:
    return PlayedGo(tmp_path, monkeypatch)


def test_what_is_missing_is_built_by_one_command_and_what_is_there_is_not(go: PlayedGo) -> None:
    said: list[str] = []
    first = build.binaries(["etcd", "kubectl"], said.append)
    assert {name: path.read_text() for name, path in first.items()} == {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    }
    assert said[0].startswith("Building etcd, kubectl with ")
    assert build.binaries(["kubectl", "helm", "etcd"], said.append).keys() == {"etcd", "kubectl", "helm"}
    assert [line.partition("/ ")[2] for line in go.builds] == [
        "go.etcd.io/etcd/server/v3 k8s.io/kubernetes/cmd/kubectl",
        "helm.sh/helm/v4/cmd/helm",
    ]
    assert build.binary("helm", said.append).parent == first["etcd"].parent


def test_another_go_another_flag_or_another_pin_is_another_folder(
    go: PlayedGo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = tmp_path / "modules"
    (modules / "etcd").mkdir(parents=True)
    for name in ("go.work", "go.work.sum", "etcd/go.mod", "etcd/go.sum"):
        (modules / name).write_text(name)
    monkeypatch.setattr(build, "MODULES", modules)
    folders = [build.binary("etcd").parent]
    go.become("1.27.0")
    folders.append(build.binary("etcd").parent)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-race"))
    folders.append(build.binary("etcd").parent)
    for name in ("go.work", "go.work.sum", "etcd/go.mod", "etcd/go.sum"):
        (modules / name).write_text("other")
        folders.append(build.binary("etcd").parent)
    assert len(set(folders)) == len(folders) == len(go.builds)


def test_two_that_want_the_same_build_it_once(go: PlayedGo) -> None:
    threads = [threading.Thread(target=build.binary, args=("etcd",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(go.builds) == 1


def test_what_go_says_is_the_error_and_nothing_is_left(go: PlayedGo) -> None:
    go.become("1.26.8", fails=True)
    with pytest.raises(build.BuildError, match=r"Go could not build etcd:\n(.*\n)*a/package: it does not compile"):
        build.binary("etcd")
    assert [path.name for path in build.cache_folder().rglob("*") if path.is_file()] == [".lock"]


def test_a_go_that_is_too_old_for_the_workspace_is_none(go: PlayedGo) -> None:
    go.become(f"{build.NEEDED_GO.rpartition('.')[0]}.{build.NEEDED[-1] - 1}")
    version, reason = build._go_version(go.folder / "go")
    assert version is None
    assert reason.startswith(f"{go.folder}/go: go version go1.")
    assert f"\ngo {build.NEEDED_GO}\n" in (build.MODULES / "go.work").read_text()


def test_every_module_that_is_built_is_in_the_workspace() -> None:
    used = {line.strip().removeprefix("./") for line in (build.MODULES / "go.work").read_text().splitlines()}
    commands = {path.parent.name for pattern in ("tools.go", "main.go") for path in build.MODULES.glob(f"*/{pattern}")}
    assert commands <= used
