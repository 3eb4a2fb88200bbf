"""The whole path: trainer, vLLM with its sidecar, sandboxes and the object store, until a run says Completed."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from client import Object, eventually
from figures import Figures
from installation import SYSTEM
from node import Node
from object_storage import BUCKET, ObjectStorage
from restrictions import violations
from scraping import prometheus
from training import Stored, apply, explain, manifest, ready_pods, until_completed

NAME = "population"
STEPS = 6
USER = 10001

EXPRESSIONS = {
    "solve rate": "populora_solve_rate",
    "reward": "populora_reward",
    "phases": "populora_phase_seconds_total",
    "served step": "populora_sidecar_served_step",
    "synchronisations": "populora_sidecar_sync_seconds_count",
    "synchronisation seconds": "populora_sidecar_sync_seconds_sum",
    "verdicts": "populora_sandbox_verdicts_total",
    "vLLM": "vllm:generation_tokens_total",
    "step as the controller sees it": f'populora_controller_run_step{{run="{NAME}"}}',
}


@dataclass
class Witnessed:
    """What was seen of the run while its pods lived.

    Attributes:
        status: of the completed run.
        violations: what a pod might have done beyond its restrictions, by component.
        policies: the NetworkPolicies of the namespace, by name.
        metrics: labels and last value of the series of EXPRESSIONS.
    """

    status: Object
    violations: dict[str, list[str]]
    policies: dict[str, Object]
    metrics: dict[str, list[tuple[dict[str, str], float]]]


@pytest.fixture(scope="module")
def witnessed(node: Node, namespace: str, storage: ObjectStorage, inference: Object, figures: Figures) -> Witnessed:
    """A run of six steps with one round of evolution, sampled by vLLM, watched by Prometheus."""
    run = apply(node, namespace, manifest(NAME, training={"steps": STEPS}, inference=inference))
    beyond: dict[str, list[str]] = {}
    try:
        monitors = [
            eventually(lambda: node.api.find("PodMonitor", NAME, namespace), "there is a PodMonitor"),
            *service_monitors(node),
        ]
        with prometheus(node, monitors) as server:
            for component in ("sandbox", "serving", "trainer"):
                pods = ready_pods(run, component)
                beyond[component] = [text for pod in pods for text in violations(node, pod, user=USER)]
            policies = {item["metadata"]["name"]: item for item in node.api.list("NetworkPolicy", namespace)}
            status = until_completed(node, run)
            reached = f"{EXPRESSIONS['step as the controller sees it']} == {STEPS}"
            eventually(lambda: server.query(reached), "Prometheus has scraped the controller once more")
            metrics = {name: server.query(f"last_over_time({text}[1h])") for name, text in EXPRESSIONS.items()}
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(node, run)}") from None
    figures.add_steps("node, vLLM", Stored(storage, NAME).log("metrics"))
    return Witnessed(status, beyond, policies, metrics)


def service_monitors(node: Node) -> list[Object]:
    path = f"/apis/monitoring.coreos.com/v1/namespaces/{SYSTEM}/servicemonitors"
    return [{**item, "kind": "ServiceMonitor"} for item in node.api.request("GET", path)["items"]]


def test_it_completes_with_one_attempt(witnessed: Witnessed) -> None:
    status = witnessed.status
    assert (status["phase"], status["step"], status["steps"]) == ("Completed", STEPS, STEPS)
    assert status["attempts"] == 1


def test_its_status_is_what_the_last_step_manifest_says(witnessed: Witnessed, storage: ObjectStorage) -> None:
    newest = Stored(storage, NAME).newest()
    assert newest["step"] == witnessed.status["step"]
    stored = {
        member["name"]: (digest, member["role"], member["generation"], member["mu"], member["sigma"])
        for member, digest in zip(newest["members"], newest["adapters"], strict=True)
    }
    told = {
        member["name"]: (
            member["digest"],
            member["role"],
            member["generation"],
            pytest.approx(stored[member["name"]][3], abs=1e-3),
            pytest.approx(stored[member["name"]][4], abs=1e-3),
        )
        for member in witnessed.status["members"]
    }
    assert stored == told
    assert {member["adapterUri"] for member in witnessed.status["members"]} == {
        f"s3://{BUCKET}/{NAME}/adapters/{digest}" for digest in newest["adapters"]
    }


def test_evolution_bred_one_child_of_each_role(witnessed: Witnessed, storage: ObjectStorage) -> None:
    births = [record for record in Stored(storage, NAME).log("evolution") if record["event"] == "birth"]
    # A round of evolution opens the step after the third.
    assert [(birth["step"], birth["role"]) for birth in births] == [(4, "teacher"), (4, "student")]
    alive = {member["name"] for member in witnessed.status["members"]}
    for birth in births:
        assert birth["child"] in alive
        assert birth["replaced"]["name"] not in alive
        assert birth["child"] == f"{birth['replaced']['name'].partition('-')[0]}-g{birth['generation']}"


def test_the_stored_adapters_are_peft_folders_that_change_what_the_base_says(
    witnessed: Witnessed, storage: ObjectStorage, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from populora_trainer.nano.registry import builtin_folder

    stored = Stored(storage, NAME)
    ids = torch.arange(20, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(builtin_folder("nano"), dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits
    for digest in stored.newest()["adapters"]:
        folder = stored.copy_adapter(digest, tmp_path)
        model = PeftModel.from_pretrained(base, str(folder))
        with torch.no_grad():
            assert not torch.equal(model(ids).logits, before)
        base = model.unload()


def test_vllm_served_the_last_adapters_by_their_digests(witnessed: Witnessed, storage: ObjectStorage) -> None:
    stored = Stored(storage, NAME)
    publication = json.loads(stored.read("serving.json"))
    assert [adapter["digest"] for adapter in publication["adapters"]] == stored.newest()["adapters"]
    for adapter in publication["adapters"]:
        assert adapter["name"].endswith(f"-{adapter['digest'][:8]}")
        for file, digest in adapter["files"].items():
            data = stored.read(f"adapters/{adapter['digest']}/{file}")
            assert hashlib.sha256(data).hexdigest() == digest
    # The held-out problems after the last step were solved by what the sidecar had loaded by then.
    ((_, served),) = witnessed.metrics["served step"]
    assert served == publication["step"] == STEPS
    assert [record["step"] for record in stored.log("metrics") if "held_out" in record] == [0, STEPS]


def test_prometheus_sees_trainer_vllm_sidecar_sandboxes_and_controller(witnessed: Witnessed, figures: Figures) -> None:
    found = witnessed.metrics
    assert {labels["task"] for labels, _ in found["solve rate"]} >= {"code_i", "code_o", "code_f"}
    assert {labels["role"] for labels, _ in found["reward"]} == {"teacher", "student"}
    assert {labels["phase"] for labels, _ in found["phases"]} >= {"update"}
    for series in (found["solve rate"], found["served step"], found["verdicts"], found["vLLM"]):
        assert {labels["populora_dev_run"] for labels, _ in series} == {NAME}
    components = {
        name: {labels["app_kubernetes_io_component"] for labels, _ in found[name]}
        for name in ("solve rate", "served step", "verdicts", "vLLM")
    }
    assert components == {
        "solve rate": {"trainer"},
        "served step": {"serving"},
        "verdicts": {"sandbox"},
        "vLLM": {"serving"},
    }
    assert [value for _, value in found["step as the controller sees it"]] == [STEPS]
    ((_, count),), ((_, seconds),) = found["synchronisations"], found["synchronisation seconds"]
    assert count >= STEPS
    figures.add("publication to served", f"{seconds / count:.2f} s, mean of {count:.0f}")


@pytest.mark.parametrize("component", ["trainer", "serving", "sandbox"])
def test_its_pods_ran_under_their_restrictions(witnessed: Witnessed, component: str) -> None:
    assert witnessed.violations[component] == []


def test_policies_give_sandboxes_no_way_to_the_object_store(witnessed: Witnessed) -> None:
    # The node's CNI plugin enforces no NetworkPolicy; what a cluster's plugin would enforce is what the objects say.
    deny = witnessed.policies[f"{NAME}-default-deny"]["spec"]
    assert deny["podSelector"] == {"matchLabels": {"populora.dev/run": NAME}}
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"}
    assert "egress" not in deny
    assert "egress" not in witnessed.policies[f"{NAME}-sandbox"]["spec"]
    to_storage = {"to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "storage"}}}]}
    for component in ("trainer", "serving"):
        assert to_storage in witnessed.policies[f"{NAME}-{component}"]["spec"]["egress"]
