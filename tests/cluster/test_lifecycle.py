"""What a person does with a run, and what goes wrong with its pods, against one controller of the whole cluster."""

import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import yaml
from client import Api, Object, conditions, eventually
from control_plane import ControlPlane
from controller import Controller, grant_everywhere
from kubelet import NODE
from population_run import MANIFESTS, Run, merged, read_manifest

from populora_api.reasons import REASONS

NANO = read_manifest("nano-4x4")
SINGLE = read_manifest("nano-single-agent")
PAPER = read_manifest("paper-4x4")


@pytest.fixture(scope="module", autouse=True)
def controller(plane: ControlPlane, api: Api) -> Iterator[Controller]:
    """A controller with the permissions of a cluster-wide install and no others."""
    with Controller(plane, None, token=grant_everywhere(api)) as controller:
        yield controller.ready()


@pytest.fixture(autouse=True)
def _the_controller_lives(controller: Controller) -> Iterator[None]:
    """No test may cost the controller its life, and none may make it report an error of its own."""
    before = len(controller.log.read_text())
    yield
    assert controller.alive, controller.tail()
    assert "Traceback" not in controller.log.read_text()[before:], controller.tail()


@pytest.fixture(scope="module", autouse=True)
def _cluster_things(api: Api) -> None:
    """What the shipped manifests expect an administrator to have made."""
    handler = {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": "gvisor"},
        "handler": "runsc",
    }
    api.apply(handler)
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "batch"},
        "value": 5,
    }
    api.apply(priority)


@pytest.fixture
def s3_secret(api: Api, namespace: str) -> str:
    """The Secret that the paper's manifests name."""
    return make_secret(api, namespace, "populora-s3")


def make_secret(api: Api, namespace: str, name: str) -> str:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": keys}
    api.create(secret, namespace)
    return name


def condition_statuses(run: Run) -> dict[str, str]:
    return {kind: item["status"] for kind, item in conditions(run.live()).items()}


# A run that goes as it should


def test_an_applied_manifest_becomes_a_running_population_and_ends_completed(api, kubectl, kubelet, namespace):
    kubelet.training("nano-4x4").limit = 12
    kubectl("apply", "-f", str(MANIFESTS / "nano-4x4.yaml"))
    run = Run(api, namespace, "nano-4x4")
    run.until_step(12)
    run.until_condition("SandboxesReady", "Ready", "True")
    assert run.phase() == "Running"
    names = {name for name in run.children() if not name.startswith(("Pod/", "ReplicaSet/"))}
    assert names == {
        "ConfigMap/nano-4x4-config",
        "ServiceAccount/nano-4x4-trainer",
        "ServiceAccount/nano-4x4-sandbox",
        "Service/nano-4x4-trainer",
        "Service/nano-4x4-sandbox",
        "Deployment/nano-4x4-sandbox",
        "Job/nano-4x4-trainer-1",
        "NetworkPolicy/nano-4x4-default-deny",
        "NetworkPolicy/nano-4x4-trainer",
        "NetworkPolicy/nano-4x4-sandbox",
    }
    status = run.status()
    assert (status["steps"], status["progressPercent"], status["attempts"]) == (30, 40, 1)
    assert [member["name"] for member in status["members"]] == [f"t{i}" for i in range(4)] + [f"s{i}" for i in range(4)]
    assert status["best"] == {"teacher": "t0", "student": "s0"}
    assert status["solveRate"] == 0.5
    assert status["observedGeneration"] == 1
    statuses = condition_statuses(run)
    assert (statuses["TrainersReady"], statuses["SandboxesReady"], statuses["Progressing"]) == ("True", "True", "True")
    assert (statuses["Suspended"], statuses["Completed"], statuses["Failed"]) == ("False", "False", "False")

    kubelet.training("nano-4x4").limit = None
    assert "condition met" in kubectl("wait", "--for=condition=Completed", "prun/nano-4x4", "--timeout=90s").stdout
    status = run.until("Completed")
    assert (status["step"], status["steps"], status["progressPercent"]) == (30, 30, 100)
    assert run.condition("Completed")["reason"] == "StepsDone"
    assert run.condition("Progressing")["status"] == "False"
    eventually(lambda: not run.pods(), "every pod is gone", otherwise=run.explain)
    assert kubelet.training("nano-4x4").starts == 1
    assert run.events("Started")
    assert run.events("Completed")


def test_every_condition_is_set_from_the_first_status_on_with_reason_message_and_generation(api, kubelet, namespace):
    kubelet.hold("trainer")
    run = Run.create(api, namespace, NANO)
    run.until("Provisioning")
    found = conditions(run.live())
    assert found.keys() == {
        "TrainersReady",
        "ServingReady",
        "SandboxesReady",
        "AdaptersSynced",
        "Progressing",
        "Suspended",
        "Completed",
        "Failed",
    }
    for kind, item in found.items():
        assert kind in REASONS[item["reason"]].places
        assert item["message"]
        assert item["observedGeneration"] == 1


@pytest.fixture
def volume(api: Api, namespace: str) -> Iterator[None]:
    """The claim that nano-volume names, bound to a volume."""
    name = f"{namespace}-populora"
    sizes = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    claim = {"name": "populora", "namespace": namespace}
    spec = {**sizes, "capacity": {"storage": "10Gi"}, "claimRef": claim, "hostPath": {"path": "/nowhere"}}
    api.create({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    spec = {**sizes, "volumeName": name, "resources": {"requests": {"storage": "10Gi"}}}
    api.create({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim, "spec": spec}, namespace)
    yield
    api.delete("PersistentVolume", name)


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_manifest_becomes_a_running_population(api, kubectl, kubelet, namespace, s3_secret, volume, path):
    name = path.stem
    kubelet.training(name).limit = 2
    kubectl("apply", "-f", str(path))
    run = Run(api, namespace, name)
    run.until_step(2)
    spec = run.live()["spec"]
    assert run.phase() == "Running"
    assert len(run.pods("trainer")) == spec["trainer"]["nodes"]
    assert len(run.pods("sandbox")) == spec["sandbox"]["replicas"]
    served = spec["inference"]["replicas"] if spec["inference"]["engine"] == "VLLM" else 0
    assert len(run.pods("serving")) == served
    gpus = spec["trainer"]["nodes"] * spec["trainer"]["gpusPerNode"] + served * spec["inference"]["gpusPerReplica"]
    assert run.status()["gpus"] == gpus
    if served:
        run.until_condition("ServingReady", "Ready", "True")
        assert "PodDisruptionBudget/" + name + "-serving" in run.children()


def test_the_config_map_holds_the_resolved_manifest_with_a_local_path_for_the_storage(api, kubelet, namespace):
    run = Run.create(api, namespace, NANO)
    stored = eventually(lambda: api.find("ConfigMap", "nano-4x4-config", namespace), "the ConfigMap exists")
    manifest = yaml.safe_load(stored["data"]["run.yaml"])
    assert manifest["spec"]["training"]["steps"] == 30
    assert manifest["spec"]["evolution"]["replaceFraction"] == 0.25
    assert manifest["spec"]["storage"]["uri"] == run.live()["spec"]["storage"]["uri"]


def test_a_single_agent_is_one_member_that_proposes_and_solves(api, kubelet, namespace):
    run = Run.create(api, namespace, SINGLE)
    status = run.until("Completed")
    assert [(member["name"], member["role"]) for member in status["members"]] == [("a0", "agent")]
    assert status["best"] == {"teacher": "a0", "student": "a0"}


def test_several_trainer_nodes_are_pods_of_one_indexed_job(api, kubelet, namespace):
    kubelet.training("nano-4x4").limit = 1
    run = Run.create(api, namespace, NANO, trainer={"nodes": 3})
    run.until_step(1)

    def every_index() -> bool:
        labels = [pod["metadata"]["labels"] for pod in run.pods("trainer")]
        return {one["batch.kubernetes.io/job-completion-index"] for one in labels} == {"0", "1", "2"}

    # The first pod may have trained a step before the Job's controller has made the others.
    eventually(every_index, "there is a pod of each index", otherwise=run.explain)
    kubelet.training("nano-4x4").limit = None
    run.until("Completed")


def test_evaluation_runs_after_the_last_step_and_its_scores_are_in_the_status(api, kubelet, namespace):
    kubelet.hold("evaluation")
    scores = json.dumps([["mbpp_plus", "t0", 0.5, 378], ["mbpp_plus", "s0", 0.25, 378]])
    kubelet.on_start("evaluation", lambda pod: kubelet.succeed(pod, scores))
    run = Run.create(api, namespace, NANO, evaluation={"suites": ["mbpp_plus"]}, training={"steps": 3})
    run.until("Evaluating")
    (job,) = eventually(lambda: run.jobs("evaluation"), "the evaluation Job", otherwise=run.explain)
    assert job["metadata"]["name"] == "nano-4x4-evaluation-3"
    assert run.condition("Completed")["status"] == "False"
    kubelet.release("evaluation")
    status = run.until("Completed")
    assert status["evaluatedStep"] == 3
    assert [(row["member"], row["step"], row["score"]) for row in status["evaluation"]] == [
        ("t0", 3, 0.5),
        ("s0", 3, 0.25),
    ]


def test_an_evaluation_that_fails_fails_the_run_and_says_why(api, kubelet, namespace):
    kubelet.on_start("evaluation", lambda pod: kubelet.fail(pod, 42, message="the suite mbpp_plus is not installed"))
    run = Run.create(api, namespace, NANO, evaluation={"suites": ["mbpp_plus"]}, training={"steps": 3})
    run.until("Failed")
    assert run.condition("Failed")["reason"] == "EvaluationFailed"
    assert "mbpp_plus is not installed" in run.condition("Failed")["message"]
    assert run.status()["step"] == 3


# Changes while a run goes on


def test_a_suspended_run_has_no_pods_and_goes_on_at_the_same_step(api, kubelet, namespace):
    training = kubelet.training("nano-4x4")
    training.limit = 5
    run = Run.create(api, namespace, NANO)
    run.until_step(5)
    run.suspend()
    status = run.until("Suspended")
    assert status["step"] == 5
    assert run.condition("Suspended")["status"] == "True"
    assert run.pods() == []
    training.limit = None
    assert training.step == 5
    run.resume()
    status = run.until("Completed")
    assert training.first_steps == [0, 5]
    assert status["step"] == 30
    assert status["attempts"] == 1
    assert run.events("Resumed")


def test_a_run_that_is_made_suspended_starts_nothing(api, kubelet, namespace):
    run = Run.create(api, namespace, NANO, suspend=True)
    run.until("Suspended")
    assert run.jobs() == []
    assert run.pods() == []
    run.resume()
    run.until("Completed")


def test_more_steps_let_a_run_go_on_longer_without_being_counted_as_a_failure(api, kubelet, namespace):
    training = kubelet.training("nano-4x4")
    training.limit = 4
    run = Run.create(api, namespace, NANO, training={"steps": 6})
    run.until_step(4)
    run.patch(training={"steps": 9})
    eventually(lambda: training.starts == 2, "the trainer starts again with the new manifest", otherwise=run.explain)
    training.limit = None
    status = run.until("Completed")
    assert (status["step"], status["steps"]) == (9, 9)
    assert training.first_steps == [0, 4]
    assert status["attempts"] == 1


def test_steps_that_are_added_as_the_trainer_ends_are_taken_too(api, kubelet, namespace):
    training = kubelet.training("nano-4x4")
    training.limit = 4
    run = Run.create(api, namespace, NANO, training={"steps": 5})
    run.until_step(4)
    # The Job completes and the spec changes before the controller can see either.
    (pod,) = run.pods("trainer")
    training.step = 5
    run.patch(training={"steps": 8})
    kubelet.succeed(pod)
    training.limit = None
    status = run.until("Completed")
    assert (status["step"], status["steps"], status["attempts"]) == (8, 8, 1)
    assert training.first_steps == [0, 5]


def test_steps_that_are_added_while_a_run_is_evaluated_are_trained_and_evaluated_too(api, kubelet, namespace):
    training = kubelet.training("nano-4x4")
    kubelet.hold("evaluation")
    kubelet.on_start("evaluation", lambda pod: kubelet.succeed(pod, json.dumps([["mbpp_plus", "s0", 0.5, 378]])))
    run = Run.create(api, namespace, NANO, evaluation={"suites": ["mbpp_plus"]}, training={"steps": 3})
    run.until("Evaluating")
    (begun,) = eventually(lambda: run.jobs("evaluation"), "the evaluation Job", otherwise=run.explain)
    run.patch(training={"steps": 5})
    eventually(lambda: training.step == 5, "the added steps are taken", otherwise=run.explain)
    run.until("Evaluating")
    (still,) = run.jobs("evaluation")
    assert still["metadata"]["uid"] == begun["metadata"]["uid"], "what has begun is waited for"
    kubelet.release("evaluation")
    status = run.until("Completed")
    assert (status["step"], status["steps"], status["evaluatedStep"], status["attempts"]) == (5, 5, 5, 1)
    assert [row["step"] for row in status["evaluation"]] == [3, 5]
    assert training.first_steps == [0, 3]


def test_steps_that_are_added_to_a_completed_run_are_refused_and_the_way_on_is_named(api, kubelet, kubectl, namespace):
    run = Run.create(api, namespace, NANO, training={"steps": 2})
    run.until("Completed")
    patch = '{"spec":{"training":{"steps":4}}}'
    refused = kubectl("patch", "prun", "nano-4x4", "--type=merge", "-p", patch, check=False)
    assert refused.returncode == 1
    assert "spec.training.steps: Invalid value" in refused.stderr
    assert "a run of another name with the same storage.uri" in refused.stderr
    run.patch(ttlSecondsAfterFinished=3600)
    eventually(lambda: run.status()["observedGeneration"] == 2, "another change is seen", otherwise=run.explain)
    assert (run.phase(), run.status()["steps"]) == ("Completed", 2)


def test_replicas_change_without_disturbing_the_trainer(api, kubelet, namespace, s3_secret):
    kubelet.training("paper-4x4").limit = 2
    run = Run.create(api, namespace, PAPER)
    run.until_step(2)
    run.patch(inference={"replicas": 2}, sandbox={"replicas": 6})
    eventually(lambda: len(run.pods("serving")) == 2 and len(run.pods("sandbox")) == 6, "the Deployments are scaled")
    eventually(lambda: run.status()["gpus"] == 4 + 2, "the status counts the GPUs", otherwise=run.explain)
    assert kubelet.training("paper-4x4").starts == 1


def test_a_completed_run_runs_no_more_when_its_job_is_deleted(api, kubelet, namespace):
    run = Run.create(api, namespace, NANO, training={"steps": 2})
    run.until("Completed")
    for job in run.jobs():
        api.delete("Job", job["metadata"]["name"], namespace)
    eventually(lambda: not run.jobs(), "the Job is gone")
    run.patch(retries=4)
    eventually(lambda: run.status()["observedGeneration"] == 2, "the change is seen", otherwise=run.explain)
    assert run.phase() == "Completed"
    assert run.jobs() == []
    assert kubelet.training("nano-4x4").starts == 1


# Failures


def test_exit_code_42_fails_the_run_at_once_in_the_trainers_words(api, kubelet, namespace):
    words = "spec.training.maxPromptTokens: 8 is not allowed"
    kubelet.on_start("trainer", lambda pod: kubelet.fail(pod, 42, message=words))
    run = Run.create(api, namespace, NANO)
    run.until("Failed")
    failed = run.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "ManifestRefused")
    assert words in failed["message"]
    assert run.status()["attempts"] == 1
    assert len(run.jobs()) == 1


@pytest.mark.parametrize(
    ("code", "reason", "message", "expected"),
    [(137, "OOMKilled", "", "OOMKilled"), (1, "Error", "RuntimeError: no space left", "TrainerFailed")],
    ids=["out-of-memory", "crash"],
)
def test_a_trainer_that_fails_every_time_fails_the_run_after_its_retries(
    api, kubelet, namespace, code, reason, message, expected
):
    kubelet.on_start("trainer", lambda pod: kubelet.fail(pod, code, reason, message))
    run = Run.create(api, namespace, NANO, retries=1)
    run.until("Failed")
    failed = run.condition("Failed")
    assert failed["reason"] == expected
    assert "trainer" in failed["message"]
    assert message in failed["message"]
    assert run.status()["attempts"] == 2
    assert run.status()["reason"] == expected
    assert [job["metadata"]["name"] for job in run.jobs()][-1] == "nano-4x4-trainer-2"


def test_a_crash_is_retried_from_the_last_checkpoint_and_counted(api, kubelet, namespace):
    training = kubelet.training("nano-4x4")
    training.limit = 7
    run = Run.create(api, namespace, NANO)
    run.until_step(7)
    kubelet.fail(run.pods("trainer")[0], 1, message="CUDA error: an illegal memory access was encountered")
    eventually(lambda: training.starts == 2, "the trainer is started again", otherwise=run.explain)
    training.limit = None
    status = run.until("Completed")
    assert status["attempts"] == 2
    assert training.first_steps == [0, 7]
    assert any("illegal memory access" in note for note in run.events("TrainerFailed"))


@pytest.mark.parametrize("how", ["evicted", "preempted"])
def test_faults_of_nodes_are_retried_without_being_charged(api, kubelet, namespace, how):
    training = kubelet.training("nano-4x4")
    training.limit = 3
    run = Run.create(api, namespace, NANO, retries=0)
    for start in range(1, 4):
        eventually(lambda start=start: training.starts == start, f"start {start}", otherwise=run.explain)
        pod = eventually(lambda: (run.pods("trainer") or [None])[0], "a trainer pod")
        kubelet.disrupt(pod) if how == "preempted" else kubelet.evict(pod)
        eventually(
            lambda pod=pod: pod["metadata"]["uid"] not in {item["metadata"]["uid"] for item in run.pods("trainer")},
            "the pod has ended",
        )
    training.limit = None
    status = run.until("Completed")
    assert status["attempts"] == 1
    assert run.events("NodeFault")
    # There is no other node, so that the scheduler takes the one that the Job would rather not have.
    failed = [node["name"] for node in status.get("failedNodes", [])]
    affinity = run.jobs()[-1]["spec"]["template"]["spec"].get("affinity")
    avoid = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [NODE]}]}
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": avoid}]}
    assert (failed, affinity) == (([NODE], {"nodeAffinity": preferred}) if how == "evicted" else ([], None))


def test_retries_are_counted_in_the_run_and_outlive_its_jobs(api, kubelet, namespace):
    kubelet.on_start("trainer", lambda pod: kubelet.fail(pod, 1, message="boom"))
    kubelet.held.add("trainer")
    run = Run.create(api, namespace, NANO, retries=1)
    eventually(lambda: run.jobs(), "the first Job")
    kubelet.release("trainer")
    eventually(lambda: run.status().get("attempts") == 2, "the second try", otherwise=run.explain)
    with contextlib.suppress(IndexError):
        api.delete("Job", run.jobs()[0]["metadata"]["name"], namespace)
    run.until("Failed")
    assert run.status()["attempts"] == 2


def test_an_image_that_cannot_be_pulled_is_named_and_the_run_goes_on_when_it_can(api, kubelet, namespace):
    words = 'Back-off pulling image "populora/trainer:0.1.0"'
    kubelet.on_start("trainer", lambda pod: kubelet.wait_with(pod, "ImagePullBackOff", words))
    run = Run.create(api, namespace, NANO, training={"steps": 2})
    condition = run.until_condition("TrainersReady", "ImagePullFailed", "False")
    assert words in condition["message"]
    assert run.phase() == "Provisioning"
    (pod,) = run.pods("trainer")
    kubelet.on_start("trainer", None)
    kubelet.seen.clear()
    run.until("Completed")
    assert run.status()["attempts"] == 1
    assert pod["metadata"]["name"].startswith("nano-4x4-trainer-1-")


def test_a_quota_that_is_too_small_is_named_and_the_run_goes_on_when_it_is_raised(api, kubelet, namespace):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "1"}},
    }
    api.create(quota, namespace)
    run = Run.create(api, namespace, NANO, training={"steps": 2})
    message = eventually(
        lambda: next(
            (item["message"] for item in conditions(run.live()).values() if item["reason"] == "QuotaExceeded"), None
        ),
        "a condition names the quota",
        otherwise=run.explain,
    )
    assert "small" in message
    api.delete("ResourceQuota", "small", namespace)
    run.until("Completed")


def test_pods_that_fit_nowhere_are_named_in_the_schedulers_words(api, kubelet, namespace):
    run = Run.create(api, namespace, NANO, trainer={"nodeSelector": {"no": "where"}})
    condition = run.until_condition("TrainersReady", "Unschedulable", "False")
    assert "node" in condition["message"]
    assert run.phase() == "Provisioning"


def test_missing_s3_credentials_are_named_and_pods_start_when_they_are_there(api, kubelet, namespace):
    kubelet.training("paper-4x4").limit = 1
    run = Run.create(api, namespace, PAPER)
    condition = run.until_condition("TrainersReady", "S3CredentialsMissing", "False")
    assert "populora-s3" in condition["message"]
    make_secret(api, namespace, "populora-s3")
    run.until_step(1)


def test_sandboxes_that_crash_are_named_with_their_last_words(api, kubelet, namespace):
    kubelet.on_start("sandbox", lambda pod: kubelet.crash_loop(pod, 1, message="seccomp is not available"))
    run = Run.create(api, namespace, NANO)
    condition = run.until_condition("SandboxesReady", "Crashing", "False")
    assert "seccomp is not available" in condition["message"]


def test_an_override_that_breaks_isolation_is_refused_and_disturbs_no_other_run(api, kubelet, namespace):
    bad = Run.create(
        api,
        namespace,
        merged(NANO, {"metadata": {"name": "bad"}}),
        trainer={"podTemplate": {"spec": {"hostNetwork": True}}},
    )
    good = Run.create(api, namespace, merged(NANO, {"metadata": {"name": "good"}}), training={"steps": 2})
    condition = bad.until_condition("Progressing", "OverrideRefused", "False")
    assert "spec.trainer.podTemplate.spec.hostNetwork" in condition["message"]
    good.until("Completed")
    assert bad.pods("trainer") == []
    bad.patch(trainer={"podTemplate": None}, training={"steps": 2})
    bad.until("Completed")


def test_a_foreign_object_with_a_childs_name_is_left_alone_and_named(api, kubelet, namespace):
    foreign = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "nano-4x4-config"}, "data": {"mine": "1"}}
    api.create(foreign, namespace)
    run = Run.create(api, namespace, NANO, training={"steps": 2})
    condition = run.until_condition("Progressing", "NameTaken", "False")
    assert "ConfigMap" in condition["message"]
    assert "nano-4x4-config" in condition["message"]
    assert api.get("ConfigMap", "nano-4x4-config", namespace)["data"] == {"mine": "1"}
    api.delete("ConfigMap", "nano-4x4-config", namespace)
    run.until("Completed")


def test_a_deadline_ends_a_run_that_takes_too_long(api, kubelet, namespace):
    kubelet.training("nano-4x4").limit = 2
    run = Run.create(api, namespace, NANO, activeDeadlineSeconds=4)
    run.until("Failed")
    assert run.condition("Failed")["reason"] == "DeadlineExceeded"
    eventually(lambda: not run.pods(), "every pod is gone", otherwise=run.explain)


def test_a_deadline_does_not_run_while_a_run_is_suspended(api, kubelet, namespace):
    run = Run.create(api, namespace, NANO, activeDeadlineSeconds=1, suspend=True, training={"steps": 2})
    run.until("Suspended")
    made = run.live()["metadata"]["creationTimestamp"]
    eventually(lambda: _seconds_since(made) > 3 or None, "the deadline would be over")
    assert run.phase() == "Suspended"


# Ends


def test_a_finished_run_goes_when_its_time_is_over(api, kubelet, namespace):
    run = Run.create(api, namespace, NANO, ttlSecondsAfterFinished=2, training={"steps": 2})
    run.until_gone()
    eventually(lambda: not _left_overs(api, namespace, "nano-4x4"), "the children are gone")


def test_a_deleted_run_takes_everything_with_it_and_keeps_no_finalizer(api, kubelet, namespace):
    kubelet.training("nano-4x4").limit = 3
    run = Run.create(api, namespace, NANO)
    run.until_step(3)
    assert "finalizers" not in run.live()["metadata"]
    run.delete()
    run.until_gone()
    eventually(lambda: not _left_overs(api, namespace, "nano-4x4"), "the children are gone")


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_deletion_policy_delete_cleans_the_storage_before_the_run_goes(api, kubelet, namespace, propagation):
    cleaned: list[list[str]] = []

    def clean(pod: Object) -> None:
        cleaned.append(pod["spec"]["containers"][0]["command"])
        kubelet.start(pod)
        kubelet.succeed(pod)

    kubelet.on_start("cleanup", clean)
    kubelet.training("nano-4x4").limit = 2
    run = Run.create(api, namespace, NANO, deletionPolicy="Delete")
    run.until_step(2)
    assert run.live()["metadata"]["finalizers"] == ["populora.dev/cleanup"]
    run.delete(propagation)
    run.until_gone()
    assert cleaned == [["populora", "storage", "delete", "file:///data/nano-4x4"]]


def test_a_clean_up_that_fails_is_named_and_can_be_given_up(api, kubelet, namespace):
    kubelet.on_start("cleanup", lambda pod: kubelet.fail(pod, 1, message="AccessDenied"))
    run = Run.create(api, namespace, NANO, deletionPolicy="Delete", training={"steps": 2})
    run.until("Completed")
    run.delete()
    eventually(lambda: run.jobs("cleanup"), "a clean-up Job", otherwise=run.explain)
    assert not run.gone()
    run.patch(deletionPolicy="Retain")
    run.until_gone()


# Queues


def test_a_run_in_a_queue_waits_until_kueue_admits_its_jobs(api, kubelet, namespace):
    scheduling = {"queueName": "gpus", "priorityClassName": "batch"}
    run = Run.create(api, namespace, NANO, scheduling=scheduling, training={"steps": 2})
    (job,) = eventually(run.jobs, "the trainer's Job", otherwise=run.explain)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["spec"]["suspend"] is True
    assert job["spec"]["template"]["spec"]["priorityClassName"] == "batch"
    run.until_condition("TrainersReady", "Queued", "False")
    api.patch("Job", job["metadata"]["name"], {"spec": {"suspend": False}}, namespace)
    run.until("Completed")


def test_a_run_whose_queue_takes_the_trainer_back_waits_and_goes_on_at_the_same_step(api, kubelet, namespace):
    training = kubelet.training("nano-4x4")
    training.limit = 4
    run = Run.create(api, namespace, NANO, scheduling={"queueName": "gpus"}, retries=0)
    (job,) = eventually(run.jobs, "the trainer's Job", otherwise=run.explain)
    # Kueue admits with changes of its own, takes back by suspending, and admits again, perhaps elsewhere.
    place = {"metadata": {"annotations": {"flavor": "a"}}, "spec": {"nodeSelector": {"kubernetes.io/hostname": NODE}}}
    admit = {"spec": {"suspend": False, "template": place}}
    api.patch("Job", job["metadata"]["name"], admit, namespace)
    run.until_step(4)
    (first,) = run.pods("trainer")
    api.patch("Job", job["metadata"]["name"], {"spec": {"suspend": True}}, namespace)
    run.until_condition("TrainersReady", "Queued", "False")
    eventually(lambda: not run.pods("trainer"), "its pods are gone", otherwise=run.explain)
    assert run.phase() == "Pending"
    training.limit = None
    api.patch("Job", job["metadata"]["name"], {"spec": {"suspend": False}}, namespace)
    status = run.until("Completed")
    assert (status["attempts"], training.first_steps) == (1, [0, 4])
    (same,) = run.jobs()
    assert same["metadata"]["uid"] == job["metadata"]["uid"]
    assert same["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/hostname": NODE}
    ended = {pod["metadata"]["uid"] for pod in api.list("Pod", namespace, "app.kubernetes.io/component=trainer")}
    assert ended
    assert first["metadata"]["uid"] not in ended


def _left_overs(api: Api, namespace: str, run: str) -> list[str]:
    kinds = ("ConfigMap", "Service", "ServiceAccount", "Deployment", "Job", "NetworkPolicy", "Pod")
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in kinds
        for item in api.list(kind, namespace, f"populora.dev/run={run}")
    ]


def _seconds_since(stamp: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
