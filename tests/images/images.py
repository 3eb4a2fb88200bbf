"""Builds the images of the Dockerfile without Docker and runs programs in them, for the tests; needs root.

    python tests/images/images.py [TARGET ...]      build (all without arguments) and print names and paths

`build(target)` returns an archive that `ctr images import` takes, built once for each state of what goes into it:

    image = build("sandbox")
    image.name, image.path          # localhost/populora/sandbox:0.1.0, ~/.cache/populora/images/sandbox-<key>.tar

No registry is asked: the base image is a Debian with Python, made by debootstrap and stripped as Debian's slim images
are. Base, archives and buildah's storage are kept in `$XDG_CACHE_HOME/populora/images` (`~/.cache` where it is not
set). A build installs Python packages over the network; where there is none, build beforehand and call `build` again.

`mounted(image)` gives the image's file system and runs programs in it as a pod would: unprivileged, without
capabilities, with a read-only root. `environment()` is what the trainer's image, built without torch, needs mounted.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

TARGETS: dict[str, dict[str, str]] = {
    "controller": {},
    # torch and all that needs it come from a mounted environment: its wheels are 6 GB.
    "trainer": {"TRAINER_REQUIREMENTS": "requirements/sidecar.txt"},
    "sandbox": {},
    "sidecar": {},
}
"""Build arguments by target."""

USER = 10001

_SUITE = "bookworm"
_PYTHON = (3, 11)  # that of the suite
_PACKAGES = ("ca-certificates", "python3", "python3-venv")
_STRIP = r"""
rm -rf usr/share/man/* usr/share/info/* usr/share/locale/* usr/share/i18n/* usr/share/lintian usr/share/bug
rm -rf usr/share/zoneinfo/right usr/share/perl5/* var/lib/apt/lists/* var/cache/apt/* var/cache/debconf/*-old
rm -rf var/log/* tmp/* run/*
find usr/share/doc -type f ! -name copyright -delete
find usr/share/doc -type l -delete
find usr/share/doc -type d -empty -delete
"""
_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap", "runc": "runc"}  # Debian's package by program
_CONTEXT = (
    *("Dockerfile", ".dockerignore", "LICENSE", "README.md", "pyproject.toml", "requirements"),
    *("api", "operator", "trainer"),
)
_KEPT_ARCHIVES = 3  # of a target
_LARGEST_STORAGE = 6 << 30  # bytes of buildah's layers, after which they are thrown away and built again

Say = Callable[[str], None]


class ImageError(Exception):
    """An image cannot be built; the message says what to do."""


@dataclass(frozen=True)
class ImageArchive:
    """An image as a file.

    Attributes:
        target: of the Dockerfile.
        name: under which containerd knows the image after `ctr images import`, and pods ask for it.
        path: the file, an OCI archive.
        size: bytes of the image's uncompressed layers, with its base.
        added: bytes of the layers that lie on the base.
    """

    target: str
    name: str
    path: Path
    size: int
    added: int


def say_on_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def missing() -> list[str]:
    """Return a sentence for everything that this machine lacks to build images, with what to do."""
    problems = []
    if not sys.platform.startswith("linux"):
        return ["The images' tests run on Linux only."]
    if os.geteuid() != 0:
        problems.append("The images' tests need root (they make a Debian and containers): say `sudo make e2e`.")
    if packages := sorted({package for program, package in _PROGRAMS.items() if _program(program) is None}):
        problems.append(
            "The images' tests need programs that are not here: apt-get install --yes --no-install-recommends "
            + " ".join(packages)
        )
    return problems


def build(target: str, say: Say = say_on_stderr) -> ImageArchive:
    """Return the image of a target, building it where what goes into it has changed.

    Args:
        target: one of TARGETS.
        say: takes lines of progress.

    Raises:
        ImageError: something is missing here, or the build fails.
    """
    path = archive_path(target, ROOT)
    if not path.exists():
        _require()
        cache_folder().mkdir(parents=True, exist_ok=True)
        with (
            _locked(cache_folder() / ".lock", lambda: say("Waiting for another process that builds images")),
            tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".context-") as context,
        ):
            # A copy, as the tree may change during the build.
            copy_context(Path(context))
            path = archive_path(target, Path(context))
            if not path.exists():
                _build(target, Path(context), path, say)
    os.utime(path)
    return ImageArchive(target, _name(target), path, **json.loads(path.with_suffix(".json").read_text()))


@dataclass(frozen=True)
class MountedImage:
    """An image's file system, writable from here, read-only for what runs in it.

    Attributes:
        root: where it is mounted.
        config: of the image, as the OCI image specification names its fields: Env, Entrypoint, Labels, ...
    """

    root: Path
    config: Mapping[str, Any]

    def run(
        self,
        *arguments: str,
        entrypoint: Sequence[str] | None = None,
        user: int | None = None,
        stdin: str = "",
        mounts: Mapping[Path, str] | None = None,
        variables: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run the image's entry point, or another, with a private /tmp and neither network, capabilities nor a root.

        Args:
            arguments: in place of the image's CMD; none means CMD.
            entrypoint: in place of the image's.
            user: id of user and group; None means the image's.
            stdin: what the program reads.
            mounts: read-only, place inside by place here.
            variables: of the environment, beside the image's.
            timeout: seconds.
        """
        own = self.config["User"].split(":")
        ids = [int(own[0]), int(own[1])] if user is None else [user, user]
        process = {
            "terminal": False,
            "user": {"uid": ids[0], "gid": ids[1]},
            "args": [
                *(self.config["Entrypoint"] if entrypoint is None else entrypoint),
                *(arguments or (() if entrypoint else self.config["Cmd"])),
            ],
            "env": [*self.config["Env"], *(f"{name}={value}" for name, value in (variables or {}).items())],
            "cwd": self.config["WorkingDir"],
            "capabilities": {},
            "noNewPrivileges": True,
        }
        with tempfile.TemporaryDirectory(prefix="populora-bundle-") as folder:
            bundle = {**_BUNDLE, "process": process, "root": {"path": str(self.root), "readonly": True}}
            bundle["mounts"] = [*_BUNDLE["mounts"], *(_bind(here, place) for here, place in (mounts or {}).items())]
            Path(folder, "config.json").write_text(json.dumps(bundle))
            command = [_found("runc"), "--root", f"{folder}/state", "run", "--bundle", folder, Path(folder).name]
            return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout)


@contextlib.contextmanager
def mounted(image: ImageArchive) -> Iterator[MountedImage]:
    """Mount an image's file system for as long as the context lasts."""
    _require()
    with open(cache_folder() / ".used", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        name = _buildah("from", "--pull=never", f"oci-archive:{image.path}").split()[-1]
        try:
            inspected = json.loads(_buildah("inspect", "--type=container", name))
            yield MountedImage(Path(_buildah("mount", name).strip()), inspected["OCIv1"]["config"])
        finally:
            _buildah("rm", name)


def environment() -> Path:
    """Return the packages of this Python, which serve the Python of the images when they are on its PYTHONPATH.

    Raises:
        ImageError: the two Pythons differ, so that compiled packages of one do not work with the other.
    """
    if sys.version_info[:2] != _PYTHON:
        wanted, found = (".".join(map(str, version)) for version in (_PYTHON, sys.version_info[:2]))
        raise ImageError(
            f"The trainer's image has Python {wanted} and is lent the packages of this one, which is Python {found}: "
            f"make the environment with that one, `make clean setup PYTHON=python{wanted}`."
        )
    return Path(sysconfig.get_path("purelib"))


def cache_folder() -> Path:
    """Return where bases, archives and buildah's storage are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "populora" / "images"


def _mount(place: str, kind: str, *options: str) -> dict[str, Any]:
    return {"destination": place, "type": kind, "source": kind, "options": ["nosuid", *options]}


def _bind(here: Path, place: str) -> dict[str, Any]:
    return {"destination": place, "type": "bind", "source": str(here), "options": ["rbind", "ro", "nosuid", "nodev"]}


_BUNDLE: dict[str, Any] = {
    "ociVersion": "1.0.2",
    "mounts": [
        _mount("/proc", "proc", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "strictatime", "mode=755", "size=65536k"),
        _mount("/dev/pts", "devpts", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        _mount("/dev/shm", "tmpfs", "noexec", "nodev", "mode=1777", "size=65536k"),
        _mount("/sys", "sysfs", "noexec", "nodev", "ro"),
        _mount("/tmp", "tmpfs", "nodev", "mode=1777"),
    ],
    "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
}


def _build(target: str, context: Path, path: Path, say: Say) -> None:
    started = time.monotonic()
    name = _name(target)
    _limit_storage(say)
    base = _base(say)
    say(f"Building the image {target}")
    arguments = {"PYTHON_IMAGE": base, "VERSION": VERSION, "REVISION": path.stem.rpartition("-")[2], **TARGETS[target]}
    command = ["bud", "--layers", "--pull=never", "--network=host", f"--target={target}", f"--tag={name}"]
    command += [f"--volume={place}:{inside}:ro" for place, inside in _host_files().items()]
    command += [f"--build-arg={field}={value}" for field, value in arguments.items()]
    _buildah(*command, str(context))
    _export(name, path)
    say(f"Built the image {target} in {time.monotonic() - started:.0f} s: {path}")
    archives = sorted(path.parent.glob(f"{target}-*.tar"), key=lambda file: file.stat().st_mtime)
    for old in archives[:-_KEPT_ARCHIVES]:
        old.unlink(missing_ok=True)
        old.with_suffix(".json").unlink(missing_ok=True)


def _export(name: str, path: Path) -> None:
    """Write the image and its sizes; both appear whole or not at all, the image last."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".archive-") as scratch:
        archive, sizes = Path(scratch, "image.tar"), Path(scratch, "sizes.json")
        _buildah("push", name, f"oci-archive:{archive}:{name}")
        layers = _layers(archive)
        sizes.write_text(json.dumps({"size": sum(layers), "added": sum(layers[1:])}))
        sizes.rename(path.with_suffix(".json"))
        archive.rename(path)


def _layers(archive: Path) -> list[int]:
    """Return the bytes of an archive's layers, uncompressed, the base's first, which has one."""
    with tarfile.open(archive) as tar:

        def blob(name: str) -> IO[bytes]:
            file = tar.extractfile(name)
            assert file is not None
            return file

        def place(descriptor: Mapping[str, str]) -> str:
            return "blobs/" + descriptor["digest"].replace(":", "/")

        (entry,) = json.load(blob("index.json"))["manifests"]
        sizes = []
        for layer in json.load(blob(place(entry)))["layers"]:
            with gzip.open(blob(place(layer))) as content:
                sizes.append(content.seek(0, os.SEEK_END))
        return sizes


def _base(say: Say) -> str:
    """Return the name, in buildah's storage, of a Debian with Python of the size of the public slim image."""
    key = hashlib.sha256(repr((_SUITE, _PACKAGES, _STRIP)).encode()).hexdigest()[:12]
    name = f"localhost/populora-base:{key}"
    if _succeeds("inspect", "--type=image", name):
        return name
    archive = cache_folder() / f"base-{key}.tar"
    with tempfile.TemporaryDirectory(dir=cache_folder(), prefix=".base-") as scratch:
        if not archive.exists():
            say("Making the base image with debootstrap (a minute)")
            rootfs = Path(scratch, "rootfs")
            _run(_found("debootstrap"), "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(rootfs))
            _run("sh", "-euc", _STRIP, cwd=rootfs)
            _run("tar", "--create", "--numeric-owner", f"--file={scratch}/base.tar", f"--directory={rootfs}", ".")
            Path(scratch, "base.tar").rename(archive)
        Path(scratch, "Dockerfile").write_text(f"FROM scratch\nADD {archive.name} /\n")
        os.link(archive, Path(scratch, archive.name))
        _buildah("bud", f"--tag={name}", f"--ignorefile={os.devnull}", scratch)
    return name


def _limit_storage(say: Say) -> None:
    """Throw old layers away, unless somebody uses one."""
    storage = cache_folder() / "storage"
    if not storage.exists() or _bytes(storage) < _LARGEST_STORAGE:
        return
    with open(cache_folder() / ".used", "w") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        say("Throwing away old layers of images")
        _buildah("rm", "--all")
        _buildah("rmi", "--all", "--force")


def _bytes(folder: Path) -> int:
    done = subprocess.run(
        ["du", "--summarize", "--one-file-system", "--block-size=1", folder], capture_output=True, text=True
    )
    return int(done.stdout.split()[0])


def _host_files() -> dict[str, str]:
    """Return what of this machine's configuration pip needs to reach its index: place here by place in the build."""
    found = {"/etc/ssl/certs": "/etc/ssl/certs"}
    for file in (Path("/etc/pip.conf"), Path.home() / ".config/pip/pip.conf"):
        if file.exists():
            found[str(file)] = "/etc/pip.conf"
            break
    return found


def _name(target: str) -> str:
    return f"localhost/populora/{target}:{VERSION}"


def archive_path(target: str, context: Path) -> Path:
    """Return the place of the archive; its name says all that the image is made of."""
    digest = hashlib.sha256(repr((target, TARGETS[target], _SUITE, _PACKAGES, _STRIP)).encode())
    for name in _files(context):
        digest.update(f"\n{name}\n".encode())
        digest.update((context / name).read_bytes())
    return cache_folder() / f"{target}-{digest.hexdigest()[:16]}.tar"


def copy_context(context: Path) -> None:
    """Copy what of this tree can be part of an image."""
    for name in _files(ROOT):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, context / name)


def _files(context: Path) -> list[Path]:
    """Return what of a tree can be part of an image, relative to its top."""
    tops = [context / name for name in _CONTEXT]
    files = [file for top in tops for file in ([top] if top.is_file() else top.rglob("*"))]
    return sorted(file.relative_to(context) for file in files if file.is_file() and "__pycache__" not in file.parts)


def _buildah(*arguments: str) -> str:
    return _run(_found("buildah"), *_storage(), *arguments)


def _succeeds(*arguments: str) -> bool:
    command = [_found("buildah"), *_storage(), *arguments]
    return subprocess.run(command, env=_environment(), capture_output=True).returncode == 0


def _storage() -> list[str]:
    folder = cache_folder()
    return [f"--root={folder}/storage", f"--runroot={folder}/run", "--storage-driver=overlay"]


def _environment() -> dict[str, str]:
    return {**os.environ, "BUILDAH_ISOLATION": "chroot"}


def _run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, env=_environment(), capture_output=True, text=True)
    if done.returncode:
        output = f"{done.stdout}\n{done.stderr}".strip()
        raise ImageError(f"{' '.join(command[:8])} ended with {done.returncode}:\n{output[-6000:]}")
    return done.stdout


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _found(name: str) -> str:
    path = _program(name)
    assert path is not None, f"{name} was not looked for"
    return path


def _require() -> None:
    if problems := missing():
        raise ImageError("\n".join(problems))


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(targets: Sequence[str]) -> None:
    """Build the named targets, all where none is named, and print their names, archives and sizes."""
    if unknown := [target for target in targets if target not in TARGETS]:
        sys.exit(f"{', '.join(unknown)}: unknown; {', '.join(TARGETS)} are allowed")
    try:
        for target in targets or TARGETS:
            image = build(target)
            print(f"{image.name} {image.path} {image.size / 1e6:.0f} MB, {image.added / 1e6:.0f} MB of it on the base")
    except ImageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
