"""What a manifest asks for that an engine without a cluster cannot do, and what does not concern it."""

from dataclasses import dataclass

from populora_api.errors import Problem
from populora_api.manifest import leaves
from populora_api.resource import PopulationRun

CLUSTER_ONLY: tuple[str, ...] = (
    "trainer",
    "inference.replicas",
    "inference.gpusPerReplica",
    "sandbox.replicas",
    *(
        f"{part}.{name}"
        for part in ("inference", "sandbox")
        for name in ("image", "resources", "nodeSelector", "tolerations", "podTemplate")
    ),
    "scheduling",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "retries",
    "deletionPolicy",
    "monitoring",
)
"""Fields of spec that say how a cluster runs the pods; a local run gives the same results whatever they are."""


@dataclass(frozen=True, slots=True)
class Services:
    """What an engine is given to work with that does not run in its own process.

    Attributes:
        sandbox_url: of a sandbox service, which then executes all programs; None where the engine does it itself.
        serving: address of vLLM servers, `http://HOST:PORT`, `HOST:PORT` or `HOST`; None where there are none.
        sidecar_port: of the sidecars beside them, at the same addresses.
        controlled: whether a controller started the engine; benchmarks are then an affair of its own.
    """

    sandbox_url: str | None = None
    serving: str | None = None
    sidecar_port: int = 8001
    controlled: bool = False


ALONE = Services()


def local_refusals(run: PopulationRun, services: Services = ALONE) -> list[Problem]:
    """Return what a run asks for that is not here: vLLM without an address, benchmarks, RuntimeClasses.

    A local run is refused if there is any; nothing that changes results or isolation is passed over in silence.
    """
    spec = run.spec
    found: list[tuple[str, str]] = []
    if spec.inference.engine == "VLLM" and services.serving is None:
        found.append(
            (
                "inference.engine",
                "VLLM needs the address of vLLM servers, which `populora run --serving http://HOST:PORT` or "
                "POPULORA_SERVING_HOST gives: without it Transformers is allowed here, which samples in this process",
            )
        )
    if spec.base_model.uri.startswith("s3://"):
        found.append(
            (
                "baseModel.uri",
                f"{spec.base_model.uri} needs an object store: builtin://, file:// and hf:// are allowed here",
            )
        )
    if spec.evaluation.suites:
        suites = ", ".join(spec.evaluation.suites)
        found.append(("evaluation.suites", f"{suites}: this version runs no benchmarks; no suites are allowed here"))
    if spec.sandbox.runtime_class_name is not None and services.sandbox_url is None:
        found.append(
            (
                "sandbox.runtimeClassName",
                f"{spec.sandbox.runtime_class_name} is a cluster's isolation: no value is allowed here, where the "
                "sandbox isolates by its own means",
            )
        )
    if spec.suspend:
        found.append(("suspend", "true asks for no training: false is allowed here"))
    return [Problem("", f"spec.{field}", message) for field, message in found]


def cluster_only_fields(run: PopulationRun) -> list[str]:
    """Return those of CLUSTER_ONLY that the manifest gives, e.g. to tell the user that they are of no effect here."""
    given = leaves(run.spec.model_dump(mode="json", exclude_unset=True, exclude_none=True), "spec")
    return [f"spec.{name}" for name in CLUSTER_ONLY if any(f"{field}.".startswith(f"spec.{name}.") for field in given)]
