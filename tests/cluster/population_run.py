"""A PopulationRun in a test: made, watched, changed."""

import copy
from pathlib import Path
from typing import Any

from client import PATIENCE_SECONDS, Api, ApiError, Object, conditions, eventually

from populora_api.documents import read_documents

MANIFESTS = Path(__file__).parents[2] / "manifests"


def read_manifest(name: str) -> Object:
    """Return a shipped manifest as kubectl reads it: numbers by YAML 1.2."""
    path = MANIFESTS / f"{name}.yaml"
    (document,), problems = read_documents(path.read_bytes(), str(path))
    assert problems == []
    assert isinstance(document.value, dict)
    return document.value


def merged(base: Any, change: Any) -> Any:
    """Return a merge patch's result."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return copy.deepcopy(change)
    result = {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}
    return {key: value for key, value in result.items() if value is not None}


class Run:
    """One run in one namespace."""

    def __init__(self, api: Api, namespace: str, name: str) -> None:
        self.api, self.namespace, self.name = api, namespace, name

    @classmethod
    def create(cls, api: Api, namespace: str, manifest: Object, **spec: Any) -> "Run":
        """Make the run of a manifest whose spec is changed by a merge patch."""
        made = api.create(merged(manifest, {"spec": spec}), namespace, strict=True)
        return cls(api, namespace, made["metadata"]["name"])

    def live(self) -> Object:
        return self.api.get("PopulationRun", self.name, self.namespace)

    def gone(self) -> bool:
        return self.api.find("PopulationRun", self.name, self.namespace) is None

    def status(self) -> Object:
        return self.live().get("status") or {}

    def phase(self) -> str | None:
        return self.status().get("phase")

    def condition(self, kind: str) -> Object:
        """Return a condition, an empty one where there is none."""
        return conditions(self.live()).get(kind, {"status": "", "reason": "", "message": ""})

    def children(self) -> dict[str, Object]:
        return self.api.children(self.live())

    def pods(self, component: str = "") -> list[Object]:
        """Return the pods of a component (all without) that have not ended."""
        selector = f"populora.dev/run={self.name}"
        selector += f",app.kubernetes.io/component={component}" if component else ""
        found = self.api.list("Pod", self.namespace, selector)
        return [pod for pod in found if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def jobs(self, component: str = "trainer") -> list[Object]:
        """Return the Jobs of a component, oldest first."""
        selector = f"populora.dev/run={self.name},app.kubernetes.io/component={component}"
        return sorted(self.api.list("Job", self.namespace, selector), key=lambda job: job["metadata"]["name"])

    def events(self, reason: str = "") -> list[str]:
        """Return the notes of the run's events of a reason."""
        found = [
            event
            for event in self.api.list("Event", self.namespace)
            if event["involvedObject"]["kind"] == "PopulationRun" and event["involvedObject"]["name"] == self.name
        ]
        return [event["message"] for event in found if reason in ("", event["reason"])]

    def patch(self, **spec: Any) -> None:
        self.api.patch("PopulationRun", self.name, {"spec": spec}, self.namespace)

    def suspend(self) -> None:
        self.patch(suspend=True)

    def resume(self) -> None:
        self.patch(suspend=False)

    def delete(self, propagation: str = "Background") -> None:
        self.api.delete("PopulationRun", self.name, self.namespace, propagation=propagation)

    def until(self, phase: str, *, seconds: float = PATIENCE_SECONDS) -> Object:
        """Wait for a phase and return the status."""
        eventually(lambda: self.phase() == phase, f"{self.name} is {phase}", seconds=seconds, otherwise=self.explain)
        return self.status()

    def until_step(self, step: int, *, seconds: float = PATIENCE_SECONDS) -> None:
        eventually(
            lambda: (self.status().get("step") or 0) >= step,
            f"{self.name} is at step {step}",
            seconds=seconds,
            otherwise=self.explain,
        )

    def until_condition(self, kind: str, reason: str, status: str = "", *, seconds: float = PATIENCE_SECONDS) -> Object:
        """Wait for a condition with a reason (and a status) and return it."""

        def found() -> Object | None:
            condition = self.condition(kind)
            return condition if condition["reason"] == reason and status in ("", condition["status"]) else None

        return eventually(found, f"{kind} is {status} for {reason}", seconds=seconds, otherwise=self.explain)

    def until_gone(self, *, seconds: float = PATIENCE_SECONDS) -> None:
        eventually(self.gone, f"{self.name} is deleted", seconds=seconds, otherwise=self.explain)

    def until_event(self, reason: str, *, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for an event with a reason and return the newest one's note."""
        return eventually(lambda: self.events(reason), f"an event {reason}", seconds=seconds, otherwise=self.explain)[
            -1
        ]

    def explain(self) -> str:
        """Say how the run stands, for a failure's message."""
        try:
            status = self.status()
        except ApiError as error:
            return str(error)
        lines = [f"phase {status.get('phase')}, step {status.get('step')}, attempts {status.get('attempts')}"]
        lines += [
            f"{kind}={item['status']} {item['reason']}: {item['message']}"
            for kind, item in conditions({"status": status}).items()
        ]
        lines += [f"event: {note}" for note in self.events()]
        lines += [
            f"{pod['metadata']['name']}: {pod['status'].get('phase')} on {pod['spec'].get('nodeName')}"
            for pod in self.api.list("Pod", self.namespace)
        ]
        return "\n".join(lines)
