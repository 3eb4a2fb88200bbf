"""The node itself: what the other tests stand on."""

import json

from archives import BUSYBOX_IMAGE
from client import Object, eventually
from network import ADDRESS
from node import NODE, Node
from object_storage import ObjectStorage

NAMESPACE = "default"


def pod(name: str, *command: str, labels: dict[str, str] | None = None) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {"name": "main", "image": BUSYBOX_IMAGE, "imagePullPolicy": "Never", "command": list(command)}
            ],
        },
    }


def said_by(node: Node, name: str, *command: str) -> str:
    """Run a command in a pod to its end and return what it said, read as `kubectl logs` reads it."""
    node.api.create(pod(name, *command), NAMESPACE)
    ended = eventually(
        lambda: next(
            (
                phase
                for phase in [node.api.get("Pod", name, NAMESPACE)["status"].get("phase")]
                if phase in ("Succeeded", "Failed")
            ),
            None,
        ),
        f"the pod {name} ends",
        otherwise=lambda: node.kubectl("describe", "pod", name),
    )
    text = node.kubectl("logs", name)
    assert ended == "Succeeded", text
    return text


def test_the_node_runs_what_the_kubelet_is_told(node: Node) -> None:
    described = node.api.get("Node", NODE)["status"]["nodeInfo"]
    assert described["containerRuntimeVersion"].startswith("containerd://")
    assert "uid=0" in said_by(node, "identity", "/bin/id")


def test_pods_reach_other_pods_by_the_name_of_a_service(node: Node) -> None:
    server = pod("server", "/bin/sh", "-c", "echo hello > /index.html; exec httpd -f -p 8080 -h /", labels={"app": "s"})
    node.api.create(server, NAMESPACE)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "server"},
        "spec": {"selector": {"app": "s"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    node.api.create(service, NAMESPACE)
    loop = r"until printf 'GET / HTTP/1.0\r\n\r\n' | nc -w 2 server 80; do sleep 0.2; done"
    assert said_by(node, "client", "/bin/sh", "-c", loop).endswith("\nhello\n")
    address = node.api.get("Service", "server", NAMESPACE)["spec"]["clusterIP"]
    assert address in said_by(node, "names", "/bin/nslookup", "server.default.svc.cluster.local")


def test_pods_reach_the_api_server_by_the_service_kubernetes(node: Node) -> None:
    slices = json.loads(node.kubectl("get", "endpointslices", "kubernetes", "-o", "json"))
    assert slices["endpoints"][0]["addresses"] == [ADDRESS]
    assert said_by(node, "api", "/bin/nc", "-w", "5", "kubernetes.default.svc", "443") == ""


def test_pods_reach_the_object_store_by_name(node: Node, storage: ObjectStorage) -> None:
    loop = "until nc -w 2 s3.storage.svc 9000; do sleep 0.2; done"
    assert said_by(node, "storage", "/bin/sh", "-c", loop) == ""
