"""Every image, built from the one Dockerfile, is small, bare and does its work as an unprivileged pod."""

import json
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import ROOT, USER, VERSION, ImageArchive, MountedImage, archive_path, copy_context, environment

LIMIT = 250_000_000
ENTRY = {
    "controller": ("controller",),
    "trainer": ("run",),
    "sandbox": ("sandbox", "serve"),
    "sidecar": ("sidecar",),
}
WORK = {
    "controller": "populora_operator.app",
    "trainer": "populora_trainer.storage.s3",
    "sandbox": "populora_trainer.sandbox.service",
    "sidecar": "populora_trainer.serving.service, populora_trainer.serving.vllm, populora_trainer.storage.s3",
}
"""Modules of each role that import all that it works with."""

HEAVY = {"torch", "nvidia", "triton", "transformers", "peft", "numpy", "scipy", "safetensors"}
PACKAGES = ("api/populora_api", "operator/populora_operator", "trainer/populora_trainer")

PROGRAM = "def f(n):\n    return n * 2"
SERVE = """
import signal, subprocess, sys, time, urllib.error, urllib.request
service = subprocess.Popen(["populora", "sandbox", "serve", "--listen=127.0.0.1:8080", "--workers=1", "--drain=5"])
for _ in range(300):
    try:
        urllib.request.urlopen("http://127.0.0.1:8080/readyz", timeout=10)
        break
    except (urllib.error.URLError, ConnectionError):
        time.sleep(0.2)
request = urllib.request.Request("http://127.0.0.1:8080/judge", sys.stdin.buffer.read())
request.add_header("Content-Type", "application/json")
print("ANSWER", urllib.request.urlopen(request, timeout=60).read().decode())
service.send_signal(signal.SIGTERM)
print("STATUS", service.wait(timeout=60))
"""


def files(image: MountedImage) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path inside the image and status of all that is no folder."""
    for folder, _, names in os.walk(image.root):
        for name in names:
            path = Path(folder, name)
            yield f"/{path.relative_to(image.root)}", path.lstat()


def packages(image: MountedImage) -> Path:
    (folder,) = (image.root / "opt/populora/lib").glob("python3.*/site-packages")
    return folder


def python(image: MountedImage, code: str, **options: object) -> str:
    done = image.run("-c", code, entrypoint=["python"], **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_image_starts_as_the_package_of_its_version(image: MountedImage) -> None:
    done = image.run("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"populora, version {VERSION}\n"
    assert image.config["Labels"]["org.opencontainers.image.version"] == VERSION


def test_the_image_has_what_its_role_imports(target: str, image: MountedImage) -> None:
    done = image.run(*ENTRY[target], "--help")
    assert done.returncode == 0, done.stderr
    assert f"Usage: populora {' '.join(ENTRY[target])}" in done.stdout
    assert tuple(image.config["Cmd"][: len(ENTRY[target])]) == ENTRY[target]


def test_any_user_that_a_cluster_chooses_can_run_it(target: str, image: MountedImage) -> None:
    done = image.run(*ENTRY[target], "--help", user=1000650000)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_runs_as_an_unprivileged_user_who_can_write_to_tmp_alone(image: MountedImage) -> None:
    assert image.config["User"] == f"{USER}:{USER}"
    code = """
import getpass, os, pathlib, sys
pathlib.Path.home().joinpath("scratch").write_text("")
refused = [place for place in ("/", "/opt/populora", "/etc", "/var/tmp", "/usr/bin") if not os.access(place, os.W_OK)]
print(os.getuid(), os.getgid(), os.getcwd(), pathlib.Path.home(), len(refused), getpass.getuser(), sys.prefix)
"""
    assert python(image, code).split() == [str(USER), str(USER), "/tmp", "/tmp", "5", "populora", "/opt/populora"]


def test_no_file_of_it_could_be_changed_even_under_a_writable_root(image: MountedImage) -> None:
    loose = [
        path
        for path, status in files(image)
        if stat.S_ISREG(status.st_mode) and (status.st_mode & stat.S_IWOTH or USER in (status.st_uid, status.st_gid))
    ]
    assert loose == []


def test_labels_say_what_it_is(target: str, image: MountedImage) -> None:
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in image.config["Labels"].items()}
    assert labels["title"] == f"PopuLoRA {target}"
    assert labels["licenses"] == "Apache-2.0"
    assert len(labels["description"]) > 20
    assert re.fullmatch("[0-9a-f]{16}", labels["revision"])


def test_it_holds_the_packages_of_this_tree_and_nothing_else_of_it(image: MountedImage) -> None:
    ours = {
        path.relative_to((ROOT / package).parent).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    site = packages(image)
    theirs = {
        path.relative_to(site).as_posix()
        for path in site.glob("populora_*/**/*")
        if path.is_file() and "__pycache__" not in path.parts and ".dist-info" not in str(path)
    }
    assert theirs == ours
    foreign = re.compile(r"^/build/|/\.git/|/(Dockerfile|Makefile|pyproject\.toml|\.dockerignore)$")
    assert [path for path, _ in files(image) if foreign.search(path)] == []


def test_nothing_in_it_installs_compiles_or_becomes_root(image: MountedImage) -> None:
    tool = re.compile(r"bin/([\w-]+-)?(pip|uv|gcc|cc|c\+\+|g\+\+|clang|make|ld|as)(-?[\d.]+)?$")
    assert [path for path, _ in files(image) if tool.search(path)] == []
    assert [path for path, status in files(image) if status.st_mode & (stat.S_ISUID | stat.S_ISGID)] == []
    assert [path for path, _ in files(image) if path.startswith("/var/lib/apt/lists/") or path.endswith(".deb")] == []
    assert [path for path, _ in files(image) if path.endswith(".whl")] == []
    installed = {folder.name.partition("-")[0] for folder in packages(image).glob("*.dist-info")}
    assert "populora_operator" in installed
    assert not installed & {"pip", "setuptools", "wheel", "hatchling", "pytest", "hypothesis", "ruff"}


def test_it_starts_from_bytecode(target: str, image: MountedImage) -> None:
    """Python says `code object from X.py` where it has compiled a module, which it would do in every process."""
    done = image.run("-v", "-c", f"import populora_trainer.cli, {WORK[target]}", entrypoint=["python"])
    assert done.returncode == 0, done.stderr
    assert re.findall(r"# code object from '(\S+\.py)'", done.stderr) == []
    assert len(re.findall(r"# code object from '(\S+\.pyc)'", done.stderr)) > 100


@pytest.mark.parametrize("name", ["controller", "sandbox", "sidecar"])
def test_images_without_torch_are_small(archives: dict[str, ImageArchive], name: str) -> None:
    assert archives[name].size < LIMIT, f"{archives[name].added / 1e6:.0f} MB of it lie on the base"


@pytest.mark.parametrize("name", ["controller", "sandbox", "sidecar"])
def test_images_without_torch_have_nothing_that_comes_with_it(images: dict[str, MountedImage], name: str) -> None:
    assert not HEAVY & {path.name for path in packages(images[name]).iterdir()}


def test_the_archive_carries_the_name_that_pods_ask_for(archives: dict[str, ImageArchive], target: str) -> None:
    archive = archives[target]
    assert archive.name == f"localhost/populora/{target}:{VERSION}"
    with tarfile.open(archive.path) as tar:
        file = tar.extractfile("index.json")
        assert file is not None
        (entry,) = json.load(file)["manifests"]
    assert entry["annotations"]["org.opencontainers.image.ref.name"] == archive.name


def test_an_image_is_built_again_when_what_goes_into_it_changes_and_only_then(tmp_path: Path) -> None:
    copy_context(tmp_path)
    built = archive_path("sandbox", tmp_path)
    assert built == archive_path("sandbox", tmp_path)
    module = tmp_path / "trainer" / "populora_trainer" / "cli.py"
    (module.parent / "__pycache__").mkdir()
    (module.parent / "__pycache__" / "cli.cpython-311.pyc").write_bytes(b"")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("It is in no image.")
    assert archive_path("sandbox", tmp_path) == built
    assert archive_path("sidecar", tmp_path) != built
    module.write_text(module.read_text() + "\n")
    assert archive_path("sandbox", tmp_path) != built


def test_the_sandbox_judges_programs(images: dict[str, MountedImage]) -> None:
    cases = [
        {"id": "right", "task": "code_o", "program": PROGRAM, "input": "21", "answer": "42"},
        {"id": "wrong", "task": "code_o", "program": PROGRAM, "input": "21", "answer": "41"},
    ]
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = images["sandbox"].run("sandbox", "check", "-", "--workers=1", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["class"] for line in done.stdout.splitlines()] == ["correct", "wrong"]


def test_the_sandbox_serves_and_ends_in_order(images: dict[str, MountedImage]) -> None:
    case = {"id": "double", "task": "code_o", "program": PROGRAM, "inputs": ["21"], "answer": "42"}
    output = python(images["sandbox"], SERVE, stdin=json.dumps({"cases": [case]}))
    said = dict(line.split(" ", 1) for line in output.splitlines() if line.startswith(("ANSWER ", "STATUS ")))
    assert [answer["kind"] for answer in json.loads(said["ANSWER"])["judgements"]] == ["correct"]
    assert said["STATUS"] == "0"


def test_the_controller_says_that_it_has_no_cluster(images: dict[str, MountedImage]) -> None:
    done = images["controller"].run("controller")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: --kubeconfig: no API server found"), done.stderr


def test_the_trainers_image_cleans_up_without_an_environment(images: dict[str, MountedImage]) -> None:
    done = images["trainer"].run("storage", "delete", "file:///tmp/none")
    assert done.returncode == 0, done.stderr
    code = "import populora_trainer.storage.s3, sys; print('torch' in sys.modules)"
    assert python(images["trainer"], code) == "False\n"


def test_the_trainers_image_trains_with_a_mounted_environment(images: dict[str, MountedImage]) -> None:
    tiny = ROOT / "tests" / "trainer" / "tiny.yaml"
    done = images["trainer"].run(
        *("run", "/etc/populora/run.yaml", "--output=/tmp/run", "--set=training.steps=1"),
        mounts={environment(): "/environment", tiny: "/etc/populora/run.yaml"},
        variables={"PYTHONPATH": "/environment", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/tmp/run" in done.stdout
