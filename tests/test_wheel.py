"""The wheel by itself: installed into an empty environment, used from another folder."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("api/populora_api", "operator/populora_operator", "trainer/populora_trainer")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone; the libraries are those of this one, without what is installed editable."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    # The folder is a plain entry of the path: a .pth file in it, as of an editable installation, is not read.
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = ["uv", "pip", "install", "--offline", "--no-deps", "--python", str(folder / "bin" / "python"), str(wheel)]
    subprocess.run([sys.executable, "-m", *install], check=True, capture_output=True)
    return folder


def run(environment: Path, cwd: Path, command: str, *arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [environment / "bin" / command, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_file_of_its_packages_and_nothing_else(wheel: Path) -> None:
    expected = {
        path.relative_to((ROOT / package).parent).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {f"populora_trainer/nano/{name}" for name in ("heldout.jsonl", "weights/nano/model.safetensors")} < names
    assert wheel.stat().st_size < 10_000_000


def test_the_installed_commands_work_from_another_folder(environment: Path, tmp_path: Path) -> None:
    where = "import json, populora_api, populora_trainer as t; print(json.dumps([populora_api.__file__, t.__file__]))"
    for file in json.loads(run(environment, tmp_path, "python", "-c", where)):
        assert Path(file).is_relative_to(environment)
    manifest = tmp_path / "mine.yaml"
    manifest.write_text((ROOT / "tests" / "trainer" / "tiny.yaml").read_text())
    assert run(environment, tmp_path, "populora", "validate", "mine.yaml") == "mine.yaml: valid: tiny\n"
    assert "kind: CustomResourceDefinition" in run(environment, tmp_path, "populora", "crd")
    assert len(run(environment, tmp_path, "populora", "operators").splitlines()) == 17
    run(environment, tmp_path, "populora", "run", "mine.yaml", "--set", "training.steps=1")
    folder = tmp_path / "runs" / "tiny"
    assert json.loads((folder / "LATEST").read_text())["step"] == 1
    assert (folder / "report.html").is_file()
    status = json.loads(run(environment, tmp_path, "populora", "status", "runs/tiny", "--json"))
    assert (status["step"], status["steps"], len(status["members"])) == (1, 1, 4)
