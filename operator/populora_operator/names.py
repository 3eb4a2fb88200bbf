"""Names that children, labels and field managers have; the only place where they are spelled."""

from typing import Literal

Component = Literal["config", "trainer", "serving", "sandbox", "evaluation", "cleanup"]

CHILDREN_MANAGER = "populora-controller"
"""Field manager of children and of the run's finalizers."""

ADOPTION_MANAGER = "populora-adoption"
"""Field manager of the labels and the owner that are given back to a Job; what it was made with stays as it is."""

STATUS_MANAGER = "populora-status"
"""Field manager of the run's status."""

FINALIZER = "populora.dev/cleanup"
RUN_LABEL = "populora.dev/run"
COMPONENT_LABEL = "app.kubernetes.io/component"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
DIGEST_ANNOTATION = "populora.dev/training-digest"
"""Annotation of trainer Jobs: what of the spec the trainer was started with."""

INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
JOB_LABEL = "batch.kubernetes.io/job-name"

CONFIG_FOLDER = "/etc/populora"
CONFIG_KEY = "run.yaml"
STATUS_PORT = 9090
RENDEZVOUS_PORT = 29400
SANDBOX_PORT = 8080
SERVING_PORT = 8000
SIDECAR_PORT = 8001
REFUSED_EXIT_CODE = 42
"""Exit code by which a program says that the manifest is wrong, so that trying again is of no use."""

TERMINATED_EXIT_CODE = 143
"""Exit code of a program that SIGTERM ended: 128 + 15."""

MANAGED_BY = "populora-controller"


def common_labels(run: str) -> dict[str, str]:
    """Return the labels that all children of a run share."""
    return {
        "app.kubernetes.io/name": "populora",
        "app.kubernetes.io/instance": run,
        "app.kubernetes.io/managed-by": MANAGED_BY,
        RUN_LABEL: run,
    }


def labels(run: str, component: Component) -> dict[str, str]:
    """Return the labels of a child."""
    return {**common_labels(run), COMPONENT_LABEL: component}


def selector(run: str, component: Component) -> dict[str, str]:
    """Return the labels by which the pods of a component are selected; they never change."""
    return {RUN_LABEL: run, COMPONENT_LABEL: component}


def config(run: str) -> str:
    """Name of the ConfigMap with the resolved manifest."""
    return f"{run}-config"


def trainer(run: str) -> str:
    """Name of the trainer's Service, ServiceAccount and NetworkPolicy."""
    return f"{run}-trainer"


def trainer_job(run: str, attempt: int) -> str:
    """Name of the trainer's Job of one attempt, counted from 1."""
    return f"{run}-trainer-{attempt}"


def attempt_of(run: str, job: str) -> int | None:
    """Return the attempt in the name of a trainer's Job, None for another name."""
    prefix, _, number = job.rpartition("-")
    return int(number) if prefix == trainer(run) and number.isascii() and number.isdigit() else None


def sandbox(run: str) -> str:
    """Name of everything of the sandboxes."""
    return f"{run}-sandbox"


def serving(run: str) -> str:
    """Name of everything of vLLM."""
    return f"{run}-serving"


def default_deny(run: str) -> str:
    """Name of the NetworkPolicy that closes every pod of the run."""
    return f"{run}-default-deny"


def evaluation_job(run: str, step: int) -> str:
    """Name of the Job that evaluates the members of one step."""
    return f"{run}-evaluation-{step}"


def step_of(run: str, job: str) -> int | None:
    """Return the step in the name of an evaluation Job, None for another name."""
    prefix, _, number = job.rpartition("-")
    return int(number) if prefix == f"{run}-evaluation" and number.isascii() and number.isdigit() else None


def cleanup_job(run: str, number: int) -> str:
    """Name of the Job that deletes what is stored, by its try, counted from 1."""
    return f"{run}-cleanup-{number}"


def cleanup_number_of(run: str, job: str) -> int | None:
    """Return the try in the name of a clean-up Job, None for another name."""
    prefix, _, number = job.rpartition("-")
    return int(number) if prefix == f"{run}-cleanup" and number.isascii() and number.isdigit() else None
