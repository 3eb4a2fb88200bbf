"""The PopulationRun resource as a whole."""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, model_validator

from populora_api.fields import LabelMap, Matches, Model
from populora_api.rules import broken_rules
from populora_api.spec import Spec
from populora_api.status import Status

GROUP = "populora.dev"
VERSION = "v1alpha1"
KIND: Literal["PopulationRun"] = "PopulationRun"
API_VERSION: Literal["populora.dev/v1alpha1"] = "populora.dev/v1alpha1"

RUN_NAME = Matches(
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    "at most 40 lower-case letters, digits and '-', beginning with a letter and not ending with '-'",
)
"""Names of children and their DNS names are made from the run's name and must stay under 63 characters."""

RUN_NAME_LENGTH = 40

SKIP_RULES = "skip-rules"
"""Validation context under which a run is built whether or not its rules hold."""

SERVER_METADATA = frozenset(
    {
        "finalizers",
        "ownerReferences",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
        "selfLink",
    }
)
"""Fields of ObjectMeta that a manifest read back from a cluster carries and that mean nothing here."""


class Metadata(Model):
    """The part of Kubernetes' ObjectMeta that a person writes."""

    name: Annotated[str, Field(min_length=1, max_length=RUN_NAME_LENGTH, examples=["run"]), RUN_NAME] = Field(
        description="Name of the run, unique in its namespace."
    )
    namespace: str | None = Field(default=None, max_length=63, description="Namespace of the run.")
    labels: LabelMap | None = Field(default=None, description="Labels of the run.")
    annotations: dict[str, str] | None = Field(default=None, description="Annotations of the run.")


class PopulationRun(Model):
    """A run that trains a co-evolving population of LoRA teachers and students on one frozen code model."""

    api_version: Literal["populora.dev/v1alpha1"] = Field(default=API_VERSION, description="populora.dev/v1alpha1.")
    kind: Literal["PopulationRun"] = Field(default=KIND, description="PopulationRun.")
    metadata: Metadata = Field(description="Name, namespace, labels and annotations.")
    spec: Spec = Field(description="What the run trains and with what.")
    status: Status | None = Field(default=None, description="Where the run stands. Written by the controller only.")

    @model_validator(mode="after")
    def _rules_hold(self, info: ValidationInfo) -> Self:
        """Refuse a spec that breaks a rule, unless the caller reports the rules itself."""
        if info.context != SKIP_RULES and (broken := broken_rules(self.spec)):
            raise ValueError("; ".join(f"spec.{rule.field}: {rule.allowed}" for rule in broken))
        return self
