"""Commands that only read and list answer at once: they import nothing that takes seconds."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "storage"))
from toy_run import train

ROOT = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.yaml")
HEAVY = ("torch", "transformers", "scipy", "numpy", "peft", "safetensors.torch", "boto3", "populora_operator")
CODE = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == heavy or name.startswith(heavy + ".") for heavy in {HEAVY!r}):
            raise AssertionError(f"{{name}} was imported")

sys.meta_path.insert(0, Refuse())
from populora_trainer.cli import main
main()
"""


def populora(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("light") / "run"
    train(folder, 2)
    return str(folder)


def test_status_needs_no_torch(run: str) -> None:
    assert "step 2 of" in populora("status", run)
    found = json.loads(populora("status", run, "--json"))
    assert found["step"] == 2
    assert found["members"]


def test_the_report_needs_no_torch(run: str) -> None:
    lines = [{"step": step, "coverage": step / 10, "solve_rate": {"overall": 0.5}} for step in (1, 2)]
    (Path(run) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "report.html" in populora("report", run)
    assert "<svg" in (Path(run) / "report.html").read_text()
    (numbers,) = json.loads(populora("report", run, "--json"))["runs"]
    assert numbers["steps"] == 2


def test_the_list_of_operators_needs_no_torch() -> None:
    assert "M3  1 parent" in populora("operators")
    rows = json.loads(populora("operators", "--json"))
    assert len(rows) == 17
    assert rows[1]["parameters"] == {"epsilon": 0.1, "fraction": 1 / 3}


def test_manifests_are_checked_and_described_without_torch() -> None:
    populora("validate", str(TINY))
    assert "kind: CustomResourceDefinition" in populora("crd")


def test_help_needs_neither_torch_nor_the_api() -> None:
    code = "\nimport sys; sys.argv = ['populora', '--help']\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
    check = "assert not {'pydantic', 'yaml', 'populora_api'} & set(sys.modules), sorted(sys.modules)"
    start = CODE.rpartition("main()")[0]
    done = subprocess.run([sys.executable, "-c", start + code + check], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Commands:" in done.stdout


@pytest.mark.parametrize("role", ["sandbox", "sidecar"])
def test_a_role_imports_only_what_its_extra_installs(role: str) -> None:
    """The images of the sandbox and the sidecar have no other packages."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[<>=~]", one)[0] for one in extras[extra]} for extra in ("trainer", role)}
    absent = tuple(sorted(name.replace("-", "_") for name in names["trainer"] - names[role]))
    assert {"mpmath", "numpy", "torch"} <= set(absent)
    code = CODE.replace(repr(HEAVY), repr(absent)).rpartition("from populora")[0]
    service = {"sandbox": "sandbox", "sidecar": "serving"}[role]
    code += f"import populora_trainer.commands.{role}, populora_trainer.{service}.service"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
