"""What every builder needs to know, and the frame that all children share."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

from populora_api import PopulationRun, Spec
from populora_operator import names
from populora_operator.cluster.kinds import RUN, Kind
from populora_operator.settings import Images

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What the cluster is like.

    Attributes:
        pod_monitors: it knows the kind PodMonitor.
    """

    pod_monitors: bool = False


@dataclass(frozen=True, eq=False)
class Context:
    """A run whose children are built.

    Attributes:
        run: the run, valid, with all defaults.
        namespace: where it is.
        uid: of the run's object.
        images: defaults of the controller.
        facts: what the cluster is like.
        memo: what was built from it before, by callers' keys.
    """

    run: PopulationRun
    namespace: str
    uid: str
    images: Images = field(default_factory=Images)
    facts: Facts = field(default_factory=Facts)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.run.metadata.name

    @property
    def spec(self) -> Spec:
        """Spec of the run."""
        return self.run.spec

    @property
    def serves(self) -> bool:
        """Whether the run has vLLM pods."""
        return self.spec.inference.engine == "VLLM"

    @cached_property
    def training_digest(self) -> str:
        """Digest of what of the spec a trainer reads when it starts.

        A trainer whose Job carries another digest is started again at its checkpoint. Defaults are left out and the
        controller's own settings do not count, so that a new version of the controller restarts no trainer.
        """
        spec = _without_empty(self.spec.model_dump(mode="json", exclude_defaults=True, exclude=_NOT_THE_TRAINERS))
        return sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def members(self) -> int:
        """Number of adapters in the population."""
        if self.spec.mode == "SingleAgent":
            return 1
        return self.spec.population.teachers + self.spec.population.students

    @property
    def gpus(self) -> int:
        """GPUs that the trainer's and vLLM's pods ask for."""
        spec = self.spec
        serving = spec.inference.replicas * spec.inference.gpus_per_replica if self.serves else 0
        return spec.trainer.nodes * spec.trainer.gpus_per_node + serving

    def child(self, kind: Kind, name: str, component: names.Component, *, owned: bool = True, **body: Any) -> Manifest:
        """Return a child with its metadata; `body` are its other fields."""
        metadata: Manifest = {"name": name, "namespace": self.namespace, "labels": names.labels(self.name, component)}
        if owned:
            metadata["ownerReferences"] = [self.owner_reference]
        return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, **body}

    @property
    def owner_reference(self) -> Manifest:
        """The reference by which a child goes with its run.

        It does not block the run's deletion, which would need a permission on the run's finalizers.
        """
        return {
            "apiVersion": RUN.api_version,
            "kind": RUN.kind,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


def _without_empty(value: Any) -> Any:
    """Leave out parts in which nothing is left, which are equal to parts that were never given."""
    if not isinstance(value, dict):
        return value
    kept = {key: _without_empty(item) for key, item in value.items()}
    return {key: item for key, item in kept.items() if item != {}}


_PODS = {"image", "resources", "node_selector", "tolerations", "pod_template"}
_NOT_THE_TRAINERS: Any = {
    "inference": {*_PODS, "replicas", "gpus_per_replica"},
    "sandbox": {*_PODS, "replicas", "runtime_class_name"},
    "evaluation": {"suites", "every_steps", "members"},
    "scheduling": True,
    "suspend": True,
    "active_deadline_seconds": True,
    "ttl_seconds_after_finished": True,
    "retries": True,
    "deletion_policy": True,
    "monitoring": True,
}
