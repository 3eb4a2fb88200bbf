"""Pods: hardened so that every one passes the Pod Security profile `restricted`."""

from collections.abc import Sequence
from typing import Any

from populora_api.spec import Pods
from populora_operator import names
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.overrides import merge

USER_ID = 10001
"""User and group of every container; no image needs to know them."""

GPU = "nvidia.com/gpu"
_PERMISSIONS = ("allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem")
CONTAINER_SECURITY: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY: Manifest = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def container(
    name: str,
    image: str,
    context: Context,
    *,
    command: list[str] | None = None,
    args: list[str] | None = None,
    ports: dict[str, int] | None = None,
    env: list[Manifest] | None = None,
    mounts: dict[str, str] | None = None,
    read_only: dict[str, str] | None = None,
    resources: Manifest | None = None,
    **fields: Any,
) -> Manifest:
    """Return a container with a read-only root and a private /tmp, whose last log lines explain its end.

    Args:
        name: of the container.
        image: its image.
        context: the run.
        command: entry point.
        args: arguments.
        ports: numbers by name.
        env: environment variables.
        mounts: volume by mount path.
        read_only: the same for volumes that cannot be written.
        resources: requests and limits.
        fields: other fields of the container, such as its probes.
    """
    volumes: list[Manifest] = [
        {"name": volume, "mountPath": path} for path, volume in {"/tmp": "tmp", **(mounts or {})}.items()
    ]
    volumes += [{"name": volume, "mountPath": path, "readOnly": True} for path, volume in (read_only or {}).items()]
    made: Manifest = {
        "name": name,
        "image": image,
        "imagePullPolicy": context.images.pull_policy,
        "env": [{"name": "HOME", "value": "/tmp"}, *(env or [])],
        "volumeMounts": volumes,
        "resources": resources or {},
        "securityContext": CONTAINER_SECURITY,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **fields,
    }
    if command is not None:
        made["command"] = command
    if args is not None:
        made["args"] = args
    if ports:
        made["ports"] = [{"name": port, "containerPort": number, "protocol": "TCP"} for port, number in ports.items()]
    return made


def pod(
    context: Context,
    component: names.Component,
    containers: list[Manifest],
    *,
    choice: Pods,
    grace: int,
    service_account: str | None = None,
    volumes: list[Manifest] | None = None,
    **spec: Any,
) -> Manifest:
    """Return a pod template with what the user chose for this kind of pod.

    Args:
        context: the run.
        component: what the pod is.
        containers: its containers.
        choice: the user's node selector, tolerations and podTemplate.
        grace: seconds between SIGTERM and SIGKILL.
        service_account: its identity; none means the namespace's default.
        volumes: beside /tmp.
        spec: other fields of the PodSpec.
    """
    made: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": grace,
        "containers": containers,
        "volumes": [{"name": "tmp", "emptyDir": {}}, *(volumes or [])],
        **spec,
    }
    if service_account is not None:
        made["serviceAccountName"] = service_account
    if context.images.pull_secrets:
        made["imagePullSecrets"] = [{"name": name} for name in context.images.pull_secrets]
    if context.spec.scheduling.priority_class_name is not None:
        made["priorityClassName"] = context.spec.scheduling.priority_class_name
    if choice.node_selector:
        made["nodeSelector"] = dict(choice.node_selector)
    if choice.tolerations:
        made["tolerations"] = [item.model_dump(mode="json", exclude_none=True) for item in choice.tolerations]
    template = {"metadata": {"labels": names.labels(context.name, component)}, "spec": made}
    return harden(merge(template, choice.pod_template))


def harden(template: Manifest) -> Manifest:
    """Give containers that a user has added what the profile `restricted` asks for, and a read-only root."""
    spec = dict(template["spec"])
    for place in ("containers", "initContainers"):
        if place in spec:
            spec[place] = [
                {**item, "securityContext": {**(item.get("securityContext") or {}), **CONTAINER_SECURITY}}
                for item in spec[place]
            ]
    return {**template, "spec": spec}


def prefer_others(spec: Manifest, nodes: Sequence[str]) -> None:
    """Let the scheduler prefer other nodes than these, beside what the user's affinity asks for."""
    # One node for each requirement: a field selector takes no more.
    others = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = dict(spec.get("affinity") or {})
    of_nodes = dict(affinity.get("nodeAffinity") or {})
    preferred = of_nodes.get("preferredDuringSchedulingIgnoredDuringExecution") or []
    of_nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [
        *preferred,
        {"weight": 100, "preference": {"matchFields": others}},
    ]
    spec["affinity"] = {**affinity, "nodeAffinity": of_nodes}


def resources(choice: Pods, *, cpu: str, memory: str, gpus: int = 0) -> Manifest:
    """Return requests and limits: the user's, else the defaults; memory is limited, processors are not.

    Args:
        choice: the user's.
        cpu: requested by default.
        memory: requested and limited by default.
        gpus: of the container.
    """
    given = choice.resources
    requests = dict(given.requests) if given and given.requests else {}
    limits = dict(given.limits) if given and given.limits else {}
    if not requests and not limits:
        requests, limits = {"cpu": cpu, "memory": memory}, {"memory": memory}
    if gpus:
        limits[GPU] = gpus
        requests.pop(GPU, None)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def http_probe(path: str, port: int, *, period: int, failures: int, timeout: int = 5) -> Manifest:
    """Return an HTTP probe; period and timeout are seconds."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def shared_memory() -> Manifest:
    """Return the volume that PyTorch's processes exchange tensors through; the container's memory limit bounds it."""
    return {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
