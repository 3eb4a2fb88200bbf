"""The chart on a real node: its controller runs from its image."""

import json

from client import Api, condition
from installation import SYSTEM, Installation
from node import Node
from restrictions import violations


def test_both_controllers_run_under_the_restrictions_that_the_chart_names(
    node: Node, installation: Installation
) -> None:
    pods = controllers(node.api)
    assert len(pods) == 2
    assert all(condition(pod, "Ready") for pod in pods)
    for pod in pods:
        # The controller alone has a token: it talks to the API server.
        assert violations(node, pod, user=65532, token=True) == []


def test_one_of_them_leads_and_the_other_is_ready_to(node: Node, installation: Installation) -> None:
    lease = node.api.get("Lease", "populora-controller", SYSTEM)
    assert lease["spec"]["holderIdentity"].startswith("populora-")
    metrics = [
        node.kubectl("get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{pod['metadata']['name']}:8080/proxy/metrics")
        for pod in controllers(node.api)
    ]
    assert sorted("populora_controller_leader 1.0" in text for text in metrics) == [False, True]


def test_helm_test_reaches_the_metrics_by_their_service(installation: Installation) -> None:
    assert "Phase:          Succeeded" in installation.helm("test", "populora", "--namespace", SYSTEM)
    listed = json.loads(installation.helm("list", "--namespace", SYSTEM, "--output", "json"))
    assert [release["status"] for release in listed] == ["deployed"]


def controllers(api: Api) -> list[dict]:
    return api.list("Pod", SYSTEM, "app.kubernetes.io/component=controller")
