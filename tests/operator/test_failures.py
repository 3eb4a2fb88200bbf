"""Why Jobs fail and pods do not run, from what Kubernetes says of them."""

from typing import Any

import pytest

from populora_api.reasons import REASONS
from populora_operator import failures
from populora_operator.cluster.kinds import DEPLOYMENT, JOB, POD
from populora_operator.observed import Deployment, Job, Pod, child


def job(reason: str = "BackoffLimitExceeded", message: str = "too many", **spec: Any) -> Job:
    condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
    item = {"metadata": {"name": "run-trainer-1", "uid": "j"}, "spec": spec, "status": {"conditions": [condition]}}
    made = child(JOB, item)
    assert isinstance(made, Job)
    return made


def pod(
    name: str = "p", *, end: dict[str, Any] | None = None, wait: tuple[str, str] | None = None, **status: Any
) -> Pod:
    state: dict[str, Any] = {}
    if end is not None:
        state = {"state": {"terminated": end}}
    if wait is not None:
        state = {"state": {"waiting": {"reason": wait[0], "message": wait[1]}}}
    containers = [{"name": "trainer", **state}] if state else []
    item = {
        "metadata": {"name": name, "uid": name, "labels": {}},
        "spec": {"nodeName": "gpu-7"},
        "status": {"phase": "Failed" if end else "Pending", "containerStatuses": containers, **status},
    }
    made = child(POD, item)
    assert isinstance(made, Pod)
    return made


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}


@pytest.mark.parametrize(
    ("the_job", "pods", "reason", "charged", "final", "said"),
    [
        (
            job(),
            [pod(end={"exitCode": 1, "message": "Traceback\nValueError: boom\n"})],
            "TrainerFailed",
            True,
            False,
            "boom",
        ),
        (
            job(),
            [pod(end={"exitCode": 42, "message": "spec.training.steps: no"})],
            "ManifestRefused",
            True,
            True,
            "steps: no",
        ),
        (
            job(
                "PodFailurePolicy",
                "Container trainer for pod ns/p failed with exit code 42 matching FailJob rule at index 0",
            ),
            [],
            "ManifestRefused",
            True,
            True,
            "exit code 42",
        ),
        (job(), [pod(end={"exitCode": 137, "reason": "OOMKilled"})], "OOMKilled", True, False, "memory"),
        (job(), [pod(end={"exitCode": 137}, conditions=[DISRUPTED])], "NodeFault", False, False, "gpu-7"),
        (
            job("PodFailurePolicy", "Pod ns/p has condition DisruptionTarget matching FailJob rule at index 1"),
            [],
            "NodeFault",
            False,
            False,
            "DisruptionTarget",
        ),
        (
            job(),
            [pod(phase="Failed", reason="Evicted", message="low on memory")],
            "NodeFault",
            False,
            False,
            "low on memory",
        ),
        (job(), [pod(phase="Failed", reason="NodeLost")], "NodeFault", False, False, "NodeLost"),
        (
            job(),
            [
                pod("first", end={"exitCode": 1, "message": "peer lost"}),
                pod("second", end={"exitCode": 143}, conditions=[DISRUPTED]),
            ],
            "NodeFault",
            False,
            False,
            "second",
        ),
        (
            job("DeadlineExceeded", "Job was active longer than specified deadline"),
            [],
            "TrainerFailed",
            True,
            False,
            "deadline",
        ),
        (job(suspend=True), [pod(end={"exitCode": 1})], "NodeFault", False, False, "queue"),
        (job(), [], "TrainerFailed", True, False, "too many"),
    ],
)
def test_a_failed_job_is_classified(
    the_job: Job, pods: list[Pod], reason: str, charged: bool, final: bool, said: str
) -> None:
    found = failures.of_job(the_job, pods)
    assert (found.reason, found.charged, found.final) == (reason, charged, final)
    assert said in found.message
    assert "\n" not in found.message
    assert reason in REASONS


@pytest.mark.parametrize(
    ("the_pod", "reason", "said"),
    [
        (pod(wait=("ErrImagePull", "manifest unknown")), "ImagePullFailed", "manifest unknown"),
        (pod(wait=("ImagePullBackOff", 'Back-off pulling "x"')), "ImagePullFailed", "Back-off"),
        (pod(wait=("InvalidImageName", "")), "ImagePullFailed", "InvalidImageName"),
        (pod(wait=("CreateContainerConfigError", 'secret "s3" not found')), "S3CredentialsMissing", '"s3"'),
        (
            pod(wait=("CreateContainerConfigError", "couldn't find key AWS_ACCESS_KEY_ID in Secret ns/s3")),
            "S3CredentialsMissing",
            "AWS_ACCESS_KEY_ID",
        ),
        (pod(wait=("CreateContainerConfigError", 'configmap "mine" not found')), "ContainerNotStarted", "mine"),
        (pod(wait=("CreateContainerError", "no such device")), "ContainerNotStarted", "no such device"),
        (
            pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]),
            "Unschedulable",
            "0/3 nodes",
        ),
    ],
)
def test_a_pod_that_cannot_start_says_why(the_pod: Pod, reason: str, said: str) -> None:
    found = failures.of_pods([the_pod], credentials="s3")
    assert found is not None
    assert found.reason == reason
    assert said in found.message
    assert reason in REASONS


@pytest.mark.parametrize(
    ("the_pod", "blamed"),
    [
        (pod(phase="Failed", reason="UnexpectedAdmissionError", message="no healthy devices"), "gpu-7"),
        (pod(phase="Failed", reason="Evicted", message="low on memory"), "gpu-7"),
        (pod(phase="Failed", conditions=[{**DISRUPTED, "reason": "DeletionByTaintManager"}]), "gpu-7"),
        (pod(phase="Failed", conditions=[DISRUPTED]), ""),
        (pod(phase="Failed", conditions=[{**DISRUPTED, "reason": "EvictionByEvictionAPI"}]), ""),
        (pod(end={"exitCode": 1, "message": "CUDA error: uncorrectable ECC error encountered"}), "gpu-7"),
        (pod(end={"exitCode": 1, "message": "ValueError: boom"}), ""),
    ],
)
def test_a_node_is_blamed_for_what_is_its_fault(the_pod: Pod, blamed: str) -> None:
    assert failures.of_job(job(), [the_pod]).node == blamed


def test_a_pod_that_only_needs_time_is_no_problem() -> None:
    starting = pod(wait=("ContainerCreating", ""))
    gated = pod(
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates"}]
    )
    assert failures.of_pods([starting, gated, pod()]) is None


def test_a_crash_loop_is_named_with_the_last_words() -> None:
    status = {
        "name": "sandbox",
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"exitCode": 1, "message": "landlock is missing\n"}},
    }
    found = failures.of_pods([pod(phase="Running", containerStatuses=[status])])
    assert found is not None
    assert found.reason == "Crashing"
    assert "landlock is missing" in found.message


def test_the_most_telling_problem_of_several_pods_is_shown() -> None:
    stuck = pod(conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3"}])
    broken = pod("q", wait=("ErrImagePull", "no"))
    found = failures.of_pods([stuck, broken])
    assert found is not None
    assert found.reason == "ImagePullFailed"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('pods "x" is forbidden: exceeded quota: q, requested: cpu=1', "QuotaExceeded"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "Forbidden"),
    ],
)
def test_a_deployment_that_cannot_make_pods_says_why(message: str, reason: str) -> None:
    condition = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    item = {"metadata": {"name": "d", "uid": "d"}, "spec": {"replicas": 1}, "status": {"conditions": [condition]}}
    deployment = child(DEPLOYMENT, item)
    assert isinstance(deployment, Deployment)
    found = failures.of_deployment(deployment)
    assert found is not None
    assert found.reason == reason


def test_long_last_words_fit_into_a_condition() -> None:
    found = failures.of_job(job(), [pod(end={"exitCode": 1, "message": "x" * 10_000})])
    assert len(found.message) < 1000
