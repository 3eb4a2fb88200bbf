"""What the Dockerfile says without being built: versions and requirement lists agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"controller": "operator", "trainer": "trainer", "sandbox": "sandbox", "sidecar": "sidecar"}


def pinned(name: str) -> dict[str, str]:
    """Return the version of every package of a requirement list; a list without hashes is refused."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    entries = re.findall(r"^([\w.-]+)==(\S+)[^\n]*?((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE)), (
        f"requirements/{name}.txt has lines without hashes"
    )
    return {canonicalize_name(package): version for package, version, _ in entries}


def test_the_image_and_the_chart_have_the_version_of_the_package() -> None:
    chart = yaml.safe_load((ROOT / "charts/populora/Chart.yaml").read_text())
    assert re.findall(r"^ARG VERSION=(.+)$", DOCKERFILE, re.MULTILINE) == [PROJECT["version"]]
    assert chart["appVersion"] == PROJECT["version"]


def test_the_base_is_pinned_and_names_no_registry() -> None:
    ((image, tag),) = re.findall(r"^ARG PYTHON_IMAGE=([^:\n]+):(.+)$", DOCKERFILE, re.MULTILINE)
    assert "/" not in image
    assert re.match(r"3\.\d+\.\d+-", tag)


@pytest.mark.parametrize("image", EXTRAS)
def test_an_image_installs_its_extra_as_the_developers_have_it(image: str) -> None:
    locked, developers = pinned(image), pinned("dev")
    wanted = [
        Requirement(line) for line in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][EXTRAS[image]])
    ]
    assert {canonicalize_name(requirement.name) for requirement in wanted} <= locked.keys()
    for requirement in wanted:
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])
    assert locked.items() <= developers.items()


def test_what_builds_the_wheel_is_pinned() -> None:
    assert {"hatchling", "setuptools"} <= pinned("build").keys()


def test_commands_are_in_exec_form_and_nothing_needs_one_builder() -> None:
    for instruction in ("ENTRYPOINT", "CMD"):
        lines = re.findall(rf"^{instruction} (.*)$", DOCKERFILE, re.MULTILINE)
        assert lines
        assert all(line.startswith("[") for line in lines)
    assert not re.search(r"--mount|--link|<<|^# *syntax", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]


def test_a_build_is_sent_nothing_but_what_the_dockerfile_copies() -> None:
    ignored, *allowed = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in "#"]
    assert ignored == "*"
    copied = {
        source.split("/")[0]
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for source in sources.split()
        if not source.startswith("$")
    }
    assert {line.removeprefix("!") for line in allowed if line.startswith("!")} == copied
    assert {line for line in allowed if not line.startswith("!")} == {"**/__pycache__", "**/*.pyc"}
