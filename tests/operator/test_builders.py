"""Manifests of the children: what every one has, and what the spec makes of each."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_world import manifest
from hypothesis import given
from hypothesis import strategies as st

from populora_api import load_manifest, parse_manifest
from populora_operator import names
from populora_operator.builders import storage
from populora_operator.builders.cleanup import cleanup_job
from populora_operator.builders.config import config_map
from populora_operator.builders.context import Context, Facts
from populora_operator.builders.evaluation import evaluation_job
from populora_operator.builders.podspec import CONTAINER_SECURITY
from populora_operator.builders.policies import default_deny, sandbox_policy, serving_policy, trainer_policy
from populora_operator.builders.sandbox import sandbox_deployment
from populora_operator.builders.serving import serving_deployment
from populora_operator.builders.trainer import trainer_job, trainer_service
from populora_operator.cluster.kinds import BY_NAME
from populora_operator.plan import _standing
from populora_operator.settings import Images
from populora_operator.subject import read

MANIFESTS = sorted((Path(__file__).parents[2] / "manifests").glob("*.yaml"))


def context(*, images: Images | None = None, **spec: Any) -> Context:
    item = manifest(**spec)
    item["metadata"] |= {"uid": "u", "resourceVersion": "1", "generation": 1}
    subject = read(item)
    assert subject.run is not None, subject.problem
    return Context(subject.run, "ns", "u", images or Images(), Facts(pod_monitors=True))


def everything(of: Context) -> list[dict[str, Any]]:
    once = [trainer_job(of, 1), evaluation_job(of, 10), cleanup_job(of, 1, owned=True)]
    return [*(item.build() for item in _standing(of)), *once]


def pods(of: Context) -> list[dict[str, Any]]:
    return [item["spec"]["template"] for item in everything(of) if "template" in item.get("spec", {})]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_child_of_a_shipped_manifest_is_named_labelled_and_owned(path: Path) -> None:
    run = load_manifest(path)
    made = everything(Context(run, "ns", "u", facts=Facts(pod_monitors=True)))
    for item in made:
        kind, metadata = BY_NAME[item["kind"]], item["metadata"]
        assert item["apiVersion"] == kind.api_version
        assert metadata["namespace"] == "ns"
        assert metadata["name"].startswith(run.metadata.name)
        assert len(metadata["name"]) <= 63
        assert names.common_labels(run.metadata.name).items() <= metadata["labels"].items()
        (owner,) = metadata["ownerReferences"]
        assert owner["uid"] == "u"
        assert owner["controller"] is True
        json.dumps(item)
    names_of = [(item["kind"], item["metadata"]["name"]) for item in made]
    assert len(set(names_of)) == len(names_of)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_every_pod_passes_the_profile_restricted(path: Path) -> None:
    for pod in pods(Context(load_manifest(path), "ns", "u")):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert spec["terminationGracePeriodSeconds"] > 0
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in spec["containers"]:
            assert CONTAINER_SECURITY.items() <= container["securityContext"].items()
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
            volumes = {volume["name"] for volume in spec["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_long_running_pods_are_probed() -> None:
    made = context()
    for template in (trainer_job(made, 1), sandbox_deployment(made), serving_deployment(made)):
        for container in template["spec"]["template"]["spec"]["containers"]:
            assert "readinessProbe" in container, container["name"]


def test_a_sandbox_has_ended_before_its_pods_grace_is_over():
    template = sandbox_deployment(context())["spec"]["template"]["spec"]
    (drain,) = [one for one in template["containers"][0]["args"] if one.startswith("--drain=")]
    # One second for the rest to be told, two for their connections to close, and one for the workers' end.
    assert float(drain.removeprefix("--drain=")) + 4 < template["terminationGracePeriodSeconds"]


def test_the_config_is_the_resolved_manifest_and_never_asks_for_a_pause() -> None:
    made = context(suspend=True)
    text = config_map(made)["data"]["run.yaml"]
    run = parse_manifest(text.encode(), "run.yaml")
    assert run.spec == made.spec.model_copy(update={"suspend": False})
    assert "status" not in yaml.safe_load(text)


def test_secrets_go_by_reference_and_not_into_sandboxes() -> None:
    endpoint = "http://minio.storage.svc:9000"
    made = context(storage={"uri": "s3://bucket/r", "endpoint": endpoint, "credentialsSecretRef": {"name": "s3"}})
    text = json.dumps(everything(made))
    assert '"secretKeyRef": {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY"}' in text
    sandbox = json.dumps(sandbox_deployment(made))
    assert "secret" not in sandbox.lower()
    assert "minio" not in sandbox


def test_a_trainer_starts_as_many_ranks_as_its_pod_has_gpus() -> None:
    alone = _trainer(context(trainer={"gpusPerNode": 0}))
    command = [
        "populora",
        "run",
        "/etc/populora/run.yaml",
        "--listen",
        "0.0.0.0:9090",
        "--leave-status",
        "/dev/termination-log",
        "--grace",
        "270",
    ]
    assert alone["command"] == command
    assert "nvidia.com/gpu" not in alone["resources"]["limits"]
    one = _trainer(context(trainer={"gpusPerNode": 1}))
    assert one["command"] == command
    assert one["resources"]["limits"]["nvidia.com/gpu"] == 1
    node = _trainer(context(trainer={"gpusPerNode": 8}))
    assert node["command"] == [*command, "--ranks", "8"]
    meeting = ["--nodes", "2", "--rendezvous", "run-trainer-1-0.run-trainer:29400"]
    many = _trainer(context(trainer={"nodes": 2, "gpusPerNode": 8}))
    assert many["command"] == [*command, "--ranks", "8", *meeting]
    assert many["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert _trainer(context(trainer={"nodes": 2, "gpusPerNode": 0}))["command"] == [*command, *meeting]


def test_a_step_is_left_before_the_pod_is_killed() -> None:
    spec = trainer_job(context(trainer={"gpusPerNode": 0}), 1)["spec"]["template"]["spec"]
    command = spec["containers"][0]["command"]
    assert int(command[command.index("--grace") + 1]) + 30 <= spec["terminationGracePeriodSeconds"]


def test_the_trainers_job_is_a_gang_that_says_why_it_failed() -> None:
    spec = trainer_job(context(trainer={"nodes": 3}), 2)["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["backoffLimit"] == 0
    refused, disrupted, terminated = spec["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [42])
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == ("FailJob", "DisruptionTarget")
    assert (terminated["action"], terminated["onExitCodes"]["values"]) == ("Ignore", [143])
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert spec["template"]["spec"]["subdomain"] == trainer_service(context())["metadata"]["name"]
    assert "suspend" not in spec


def test_nodes_that_have_failed_are_avoided_where_others_will_do_beside_what_the_user_asks_for() -> None:
    assert "affinity" not in trainer_job(context(), 1)["spec"]["template"]["spec"]
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    mine = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [zone]}]},
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 1, "preference": {"matchExpressions": [zone]}}
            ],
        },
        "podAffinity": {},
    }
    of = context(trainer={"podTemplate": {"spec": {"affinity": mine}}})
    given = trainer_job(of, 1, avoid=["n1", "n2"])["spec"]["template"]["spec"]["affinity"]
    *preferred, others = given["nodeAffinity"].pop("preferredDuringSchedulingIgnoredDuringExecution")
    assert [field["values"] for field in others["preference"]["matchFields"]] == [["n1"], ["n2"]]
    assert {field["operator"] for field in others["preference"]["matchFields"]} == {"NotIn"}
    assert preferred == mine["nodeAffinity"].pop("preferredDuringSchedulingIgnoredDuringExecution")
    assert given == mine


def test_a_queue_gets_its_jobs_suspended_and_labelled() -> None:
    made = context(
        scheduling={"queueName": "team-a", "priorityClassName": "high"}, evaluation={"suites": ["mbpp_plus"]}
    )
    for job in (trainer_job(made, 1), evaluation_job(made, 10)):
        assert job["spec"]["suspend"] is True
        assert job["metadata"]["labels"][names.QUEUE_LABEL] == "team-a"
        assert job["spec"]["template"]["spec"]["priorityClassName"] == "high"
    assert serving_deployment(made)["metadata"]["labels"][names.QUEUE_LABEL] == "team-a"


def test_vllm_is_told_of_the_model_and_holds_two_generations_of_adapters() -> None:
    made = context(baseModel={"uri": "hf://Qwen/Qwen2.5-Coder-7B@abc"}, inference={"gpusPerReplica": 2})
    vllm, sidecar = serving_deployment(made)["spec"]["template"]["spec"]["containers"]
    for argument in (
        "--model=Qwen/Qwen2.5-Coder-7B",
        "--revision=abc",
        "--tensor-parallel-size=2",
        "--max-loras=16",
        "--max-cpu-loras=16",
        "--max-lora-rank=32",
        "--max-model-len=8192",
    ):
        assert argument in vllm["args"]
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"} in vllm["env"]
    assert sidecar["name"] == "sidecar"


def test_there_is_no_vllm_where_the_trainer_samples() -> None:
    made = context(inference={"engine": "Transformers"})
    assert not [item for item in everything(made) if item["metadata"]["labels"][names.COMPONENT_LABEL] == "serving"]
    assert made.gpus == 4
    assert context().gpus == 8


def test_a_file_storage_is_the_users_volume_or_lasts_as_long_as_the_pod() -> None:
    bare = context(storage={"uri": "file:///data/run"})
    assert storage.volatile(bare)
    assert {"name": "run", "mountPath": "/data/run"} in _trainer(bare)["volumeMounts"]
    command = _trainer(bare)["command"]
    assert command[command.index("--output") + 1] == "/data/run"
    mounts = [{"name": "data", "mountPath": "/data"}]
    override = {
        "spec": {
            "containers": [{"name": "trainer", "volumeMounts": mounts}],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        }
    }
    kept = context(storage={"uri": "file:///data/run"}, trainer={"podTemplate": override})
    assert not storage.volatile(kept)
    for job in (trainer_job(kept, 1), evaluation_job(kept, 3), cleanup_job(kept, 1, owned=True)):
        spec = job["spec"]["template"]["spec"]
        assert not any(volume["name"] == "run" for volume in spec["volumes"])
        assert mounts[0] in spec["containers"][0]["volumeMounts"], "whatever touches storage mounts it"


def test_the_clean_up_rests_on_no_other_child() -> None:
    job = cleanup_job(context(), 2, owned=False)
    assert job["metadata"]["name"] == "run-cleanup-2"
    assert "ownerReferences" not in job["metadata"]
    spec = job["spec"]["template"]["spec"]
    assert "serviceAccountName" not in spec
    assert "configMap" not in json.dumps(spec["volumes"])
    assert spec["containers"][0]["command"] == ["populora", "storage", "delete", "s3://bucket/run"]
    assert job["spec"]["ttlSecondsAfterFinished"] > 0


def test_sandboxes_reach_nothing_and_are_reached_by_those_who_need_them() -> None:
    spec = sandbox_policy(context())["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in spec
    assert default_deny(context())["spec"] == {
        "podSelector": {"matchLabels": {names.RUN_LABEL: "run"}},
        "policyTypes": ["Ingress", "Egress"],
    }


@pytest.mark.parametrize(
    ("given_storage", "expected"),
    [
        ({"uri": "file:///data"}, None),
        ({"uri": "s3://bucket/run"}, {"protocol": "TCP", "port": 443}),
        ({"uri": "s3://bucket/run", "endpoint": "https://s3.example.com"}, {"protocol": "TCP", "port": 443}),
        ({"uri": "s3://bucket/run", "endpoint": "http://10.0.0.9:9000"}, {"protocol": "TCP", "port": 9000}),
    ],
)
def test_pods_reach_their_store_and_no_other_port(given_storage: dict[str, Any], expected: Any) -> None:
    made = context(storage=given_storage, baseModel={"uri": "file:///models/base"})
    for policy in (trainer_policy(made), serving_policy(made)):
        outside = [rule for rule in policy["spec"]["egress"] if "ipBlock" in json.dumps(rule)]
        assert [rule["ports"] for rule in outside] == ([[expected]] if expected else [])


def test_a_store_in_the_cluster_is_reached_in_its_namespace() -> None:
    made = context(
        storage={"uri": "s3://bucket/run", "endpoint": "http://minio.storage.svc.cluster.local:9000"},
        baseModel={"uri": "file:///models/base"},
    )
    rules = trainer_policy(made)["spec"]["egress"]
    assert {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "storage"}}}]} in rules


def test_the_controllers_images_are_defaults_and_its_version_restarts_no_trainer() -> None:
    old, new = context(images=Images(trainer="t:1")), context(images=Images(trainer="t:2", pull_secrets=("p",)))
    assert _trainer(old)["image"] == "t:1"
    assert trainer_job(new, 1)["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "p"}]
    assert old.training_digest == new.training_digest
    assert _trainer(context(trainer={"image": "mine:3"}))["image"] == "mine:3"


_FREE: dict[str, Any] = {
    "inference": {"replicas": 7},
    "sandbox": {"replicas": 3},
    "evaluation": {"suites": ["aime24"], "everySteps": 5},
    "suspend": True,
    "activeDeadlineSeconds": 60,
    "ttlSecondsAfterFinished": 60,
    "retries": 9,
    "deletionPolicy": "Delete",
    "monitoring": {"podMonitor": False},
    "scheduling": {"queueName": "q"},
}


@given(st.sets(st.sampled_from(sorted(_FREE))))
def test_what_the_trainer_does_not_read_restarts_no_trainer(changed: set[str]) -> None:
    assert context(**{name: _FREE[name] for name in changed}).training_digest == context().training_digest


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"steps": 11}},
        {"trainer": {"nodes": 2}},
        {"trainer": {"resources": {"limits": {"memory": "1Ti"}}}},
        {"sandbox": {"timeoutSeconds": 3}},
        {"inference": {"engine": "Transformers"}},
        {"evolution": {"everySteps": 3}},
    ],
)
def test_what_the_trainer_reads_restarts_it(change: dict[str, Any]) -> None:
    assert context(**change).training_digest != context().training_digest


def _trainer(of: Context) -> dict[str, Any]:
    container = trainer_job(of, 1)["spec"]["template"]["spec"]["containers"][0]
    assert isinstance(container, dict)
    return container
