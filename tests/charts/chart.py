"""Helm on the chart, and what it renders. Imported by name: the conftest beside it is on `sys.path`."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "populora"

Object = dict[str, Any]


class HelmError(Exception):
    """Helm refused; the message is what it said."""


class Helm:
    """Runs Helm on the chart, without any state of the person who runs the tests."""

    def __init__(self, binary: Path, home: Path, kubeconfig: Path | None = None) -> None:
        self.binary, self.home, self.kubeconfig = binary, home, kubeconfig
        self.said = ""
        """What the last command said beside its output: warnings of the API server."""

    def __call__(self, *arguments: str, values: Object | None = None, timeout: float = 300) -> str:
        """Run one command and return its output.

        Raises:
            HelmError: the command failed.
        """
        environment = {
            "HOME": str(self.home),
            "HELM_CACHE_HOME": str(self.home / "cache"),
            "HELM_CONFIG_HOME": str(self.home / "config"),
            "HELM_DATA_HOME": str(self.home / "data"),
            "KUBECONFIG": str(self.kubeconfig or self.home / "none"),
            "PATH": "/usr/bin:/bin",
        }
        command = [str(self.binary), *arguments]
        if values is not None:
            command += ["--values", "-"]
        run = subprocess.run(
            command, input=json.dumps(values or {}), env=environment, capture_output=True, text=True, timeout=timeout
        )
        self.said = run.stderr.strip()
        if run.returncode:
            raise HelmError(self.said)
        return run.stdout

    def render(
        self, values: Object | None = None, *, release: str = "populora", flags: tuple[str, ...] = ()
    ) -> "Manifests":
        """Return the objects that an installation in namespace `populora-system` would make."""
        text = self("template", release, str(CHART), "--namespace", "populora-system", *flags, values=values)
        return Manifests([document for document in yaml.safe_load_all(text) if document])


class Manifests(list[Object]):
    """Rendered objects."""

    def kind(self, kind: str) -> list[Object]:
        """Return the objects of one kind."""
        return [document for document in self if document["kind"] == kind]

    def one(self, kind: str, ending: str = "") -> Object:
        """Return the only object of a kind, or the only one whose name ends so."""
        (found,) = (document for document in self.kind(kind) if document["metadata"]["name"].endswith(ending))
        return found

    @property
    def controller(self) -> Object:
        """The controller's container."""
        (container,) = self.one("Deployment")["spec"]["template"]["spec"]["containers"]
        return dict(container)


def leaves(values: Object, schema: Object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and default of every value that a user sets."""
    for name, value in values.items():
        child = schema["properties"].get(name, {})
        if isinstance(value, dict) and value and child.get("properties"):
            yield from leaves(value, child, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def setting(path: str, value: Any) -> Object:
    """Return values that set one path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)
