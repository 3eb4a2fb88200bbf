"""The run as the API server has it: its object read into the models, or what is wrong with it."""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from populora_api import PopulationRun, Status
from populora_api.checking import check
from populora_api.documents import Document
from populora_api.spec import Spec
from populora_api.status import Condition
from populora_operator import names
from populora_operator.builders.overrides import refusals
from populora_operator.cluster.port import Object

FOREGROUND = "foregroundDeletion"


@dataclass(frozen=True, eq=False)
class Subject:
    """A run's object.

    Attributes:
        namespace: where it is.
        name: its name.
        uid: its uid.
        version: its resourceVersion.
        generation: of its spec.
        deleted_at: when its deletion was asked for, None if it was not.
        finalizers: what its deletion waits for.
        run: the run, None where the spec is not valid.
        problem: what is wrong with the spec, None where nothing is.
        refused: what its podTemplates ask for and do not get.
        status: what was last written, empty where nothing was.
    """

    namespace: str
    name: str
    uid: str
    version: str
    generation: int
    deleted_at: datetime | None
    finalizers: tuple[str, ...]
    run: PopulationRun | None
    problem: str | None
    refused: tuple[str, ...]
    status: Status

    @property
    def held(self) -> bool:
        """Whether its deletion waits for this controller."""
        return names.FINALIZER in self.finalizers

    def condition(self, kind: str) -> Condition | None:
        """Return a condition of its status."""
        return next((item for item in self.status.conditions or () if item.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Whether a condition of its status is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"


def read(item: Object) -> Subject:
    """Return the run that an object describes; nothing in it raises."""
    metadata = item["metadata"]
    run, problem = _run(item)
    deleted = metadata.get("deletionTimestamp")
    return Subject(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        generation=int(metadata.get("generation") or 0),
        deleted_at=None if deleted is None else datetime.fromisoformat(deleted),
        finalizers=tuple(metadata.get("finalizers") or ()),
        run=run,
        problem=problem,
        refused=tuple(_refusals(run.spec)) if run is not None else (),
        status=_status(item.get("status")),
    )


def _run(item: Object) -> tuple[PopulationRun | None, str | None]:
    metadata = item["metadata"]
    plain: dict[str, Any] = {
        "apiVersion": item.get("apiVersion"),
        "kind": item.get("kind"),
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
        "spec": item.get("spec"),
    }
    try:
        return PopulationRun.model_validate_json(json.dumps(plain), by_alias=True, by_name=False), None
    except ValidationError:
        _, problems = check(Document("", 0, plain))
        return None, "; ".join(f"{problem.field}: {problem.message}" for problem in problems) or "it cannot be read"


def _status(value: Any) -> Status:
    """Return the status; one that an older or foreign writer has made unreadable counts as none."""
    try:
        return Status.model_validate_json(json.dumps(value or {}), by_alias=True, by_name=False)
    except ValidationError:
        return Status()


def _refusals(spec: Spec) -> list[str]:
    parts = (
        ("trainer", spec.trainer, frozenset({"trainer"}), False),
        ("inference", spec.inference, frozenset({"vllm", "sidecar"}), False),
        ("sandbox", spec.sandbox, frozenset({"sandbox"}), True),
    )
    return [
        sentence
        for name, pods, own, sandbox in parts
        for sentence in refusals(f"spec.{name}.podTemplate", pods.pod_template, own, sandbox=sandbox)
    ]
