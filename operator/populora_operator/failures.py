"""Why a Job has failed, and why a pod does not run, in the words of `populora_api.reasons`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from populora_operator import names
from populora_operator.observed import Container, Deployment, Job, Pod

_LINE_LENGTH = 400
_NODE_REASONS = frozenset({"Evicted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting"})
_NODE_REASONS = _NODE_REASONS | {"NodeAffinity", "UnexpectedAdmissionError", "OutOfcpu", "OutOfmemory", "OutOfpods"}
_IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
    | {"RegistryUnavailable", "SignatureValidationFailed"}
)
_START_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"})
_ASKED_FOR = frozenset({"PreemptionByScheduler", "Preempting", "EvictionByEvictionAPI"})
"""Disruptions that say nothing against the node."""

_HARDWARE = re.compile(r"\bXid\b|uncorrectable ECC|fallen off the bus|NVLink error", re.IGNORECASE)
"""How programs tell that a GPU is broken. Such a failure counts: a program can say anything."""

_STARTING = frozenset({"", "ContainerCreating", "PodInitializing"})


@dataclass(frozen=True)
class Failure:
    """Why something does not run.

    Attributes:
        reason: one of `populora_api.reasons`.
        message: a sentence for a person.
        charged: it counts against spec.retries.
        final: trying again is of no use.
        node: the node that is to blame, empty where none is known to be.
    """

    reason: str
    message: str
    charged: bool = True
    final: bool = False
    node: str = ""


def of_job(job: Job, pods: Sequence[Pod], container: str = "trainer") -> Failure:
    """Return why a Job has failed, from its own condition and those of its pods that are still there.

    Args:
        job: a Job that has failed.
        pods: its pods.
        container: whose end counts.
    """
    reason, message = job.failed or ("", "")
    ends = [(pod, end) for pod in pods for end in pod.containers if end.name == container and end.exit_code]
    for pod in pods:
        if pod.disrupted is not None or (pod.phase == "Failed" and pod.reason in _NODE_REASONS):
            return _node_fault(pod)
    if reason == "PodFailurePolicy" and "DisruptionTarget" in message:
        return Failure("NodeFault", _sentence(f"{job.name}: {message}"), charged=False)
    for pod, end in ends:
        if end.exit_code == names.REFUSED_EXIT_CODE:
            return Failure("ManifestRefused", _said(pod, end), final=True)
    if reason == "PodFailurePolicy" and f"exit code {names.REFUSED_EXIT_CODE}" in message:
        return Failure("ManifestRefused", _sentence(f"{job.name}: {message}"), final=True)
    if job.suspended:
        return Failure("NodeFault", f"{job.name} was stopped by its queue.", charged=False)
    for pod, end in ends:
        if end.exit_reason == "OOMKilled":
            return Failure("OOMKilled", f"{pod.name}: the container {end.name} used more memory than its limit.")
    for pod, end in ends:
        return Failure("TrainerFailed", _said(pod, end), node=pod.node if _HARDWARE.search(end.exit_message) else "")
    return Failure("TrainerFailed", _sentence(f"{job.name}: {message or reason or 'the Job failed'}"))


def of_pods(pods: Sequence[Pod], *, credentials: str | None = None) -> Failure | None:
    """Return why pods do not run, the most telling reason first; None where they only need time.

    Args:
        pods: pods that should run.
        credentials: name of the Secret with the S3 credentials.
    """
    found = [failure for pod in pods if not pod.deleting and (failure := _of_pod(pod, credentials)) is not None]
    return min(found, key=lambda failure: _ORDER.index(failure.reason), default=None)


def of_deployment(deployment: Deployment | None) -> Failure | None:
    """Return why a Deployment cannot make pods, None where it can."""
    if deployment is None or deployment.problem is None:
        return None
    return of_refusal(deployment.problem)


def of_refusal(message: str) -> Failure:
    """Return what the API server's refusal of a pod means."""
    reason = "QuotaExceeded" if "exceeded quota" in message else "Forbidden"
    return Failure(reason, _sentence(message))


_ORDER = ("S3CredentialsMissing", "ImagePullFailed", "ContainerNotStarted", "Crashing", "OOMKilled", "Unschedulable")


def _of_pod(pod: Pod, credentials: str | None) -> Failure | None:
    if pod.ended:
        return None
    for container in pod.containers:
        reason, message = container.waiting or ("", "")
        if reason in _IMAGE_REASONS:
            return Failure("ImagePullFailed", _sentence(f"{pod.name}: {message or reason}"))
        if reason in _START_REASONS:
            missing = credentials is not None and re.search(rf'["/]{re.escape(credentials)}("|\s|$)', message)
            what = "S3CredentialsMissing" if missing else "ContainerNotStarted"
            return Failure(what, _sentence(f"{pod.name}: {message or reason}"))
        if reason == "CrashLoopBackOff" or (container.restarts > 1 and reason not in _STARTING):
            return Failure("Crashing", _said(pod, container))
    if pod.unschedulable is not None:
        return Failure("Unschedulable", _sentence(f"{pod.name}: {pod.unschedulable}"))
    return None


def _node_fault(pod: Pod) -> Failure:
    reason, message = pod.disrupted or (pod.reason, pod.message)
    where = f" on node {pod.node}" if pod.node else ""
    words = _sentence(f"{pod.name}{where}: {reason}: {message or pod.message}")
    return Failure("NodeFault", words, charged=False, node="" if reason in _ASKED_FOR else pod.node)


def _said(pod: Pod, end: Container) -> str:
    """Return how a container ended and its last words."""
    lines = [line.strip() for line in end.exit_message.splitlines() if line.strip()]
    last = f": {lines[-1][:_LINE_LENGTH]}" if lines else ""
    how = (
        "used more memory than its limit" if end.exit_reason == "OOMKilled" else f"ended with exit code {end.exit_code}"
    )
    return f"{pod.name}: the container {end.name} {how}{last}"


def _sentence(text: str) -> str:
    """Return a text of one line that fits into a condition."""
    line = " ".join(text.split())
    return line if len(line) <= 2 * _LINE_LENGTH else f"{line[: 2 * _LINE_LENGTH - 3]}..."
