"""How pods reach the run's storage and its base model."""

from typing import Any
from urllib.parse import urlsplit

from populora_api.spec import Pods
from populora_operator.builders.context import Context, Manifest

_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def environment(context: Context) -> list[Manifest]:
    """Return the variables by which S3 clients find the store and their credentials, the latter by reference only."""
    storage = context.spec.storage
    found: list[Manifest] = []
    if storage.credentials_secret_ref is not None:
        secret = storage.credentials_secret_ref.name
        found += [{"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}} for key in _KEYS]
        token = {"name": secret, "key": "AWS_SESSION_TOKEN", "optional": True}
        found.append({"name": "AWS_SESSION_TOKEN", "valueFrom": {"secretKeyRef": token}})
    if storage.endpoint is not None:
        found.append({"name": "AWS_ENDPOINT_URL_S3", "value": storage.endpoint})
    if storage.region is not None:
        found.append({"name": "AWS_REGION", "value": storage.region})
    return found


def volume(context: Context, choice: Pods, container: str) -> tuple[dict[str, str], list[Manifest]]:
    """Return the mount and the volume for a `file://` storage.

    Where the user's podTemplate mounts a volume at the folder or above it, that is the storage. Without one the folder
    lasts as long as the pod.

    Returns:
        Volume by mount path, and volumes; both empty where there is nothing to add.
    """
    folder = context.spec.storage.folder
    if folder is None or mounted(context, choice, container):
        return {}, []
    return {str(folder): "run"}, [{"name": "run", "emptyDir": {}}]


def mounted(context: Context, choice: Pods, container: str) -> bool:
    """Whether the user's podTemplate mounts a volume where a `file://` storage is."""
    folder = context.spec.storage.folder
    spec: dict[str, Any] = (choice.pod_template.spec if choice.pod_template else None) or {}
    containers = spec.get("containers")
    for item in containers if isinstance(containers, list) else []:
        mounts = item.get("volumeMounts") if isinstance(item, dict) and item.get("name") == container else None
        for mount in mounts if isinstance(mounts, list) else []:
            path = mount.get("mountPath") if isinstance(mount, dict) else None
            if folder is not None and isinstance(path, str) and folder.is_relative_to(path):
                return True
    return False


def volatile(context: Context) -> bool:
    """Whether what the run stores lasts only as long as the trainer's pod."""
    return context.spec.storage.folder is not None and not mounted(context, context.spec.trainer, "trainer")


def egress(context: Context) -> list[Manifest]:
    """Return the NetworkPolicy rules for storage and base model, without DNS."""
    rules: list[Manifest] = []
    storage = context.spec.storage
    if storage.uri.startswith("s3://"):
        rules += _to_endpoint(storage.endpoint) if storage.endpoint else [_https()]
    model = context.spec.base_model.uri
    if model.startswith(("hf://", "s3://")) and _https() not in rules:
        rules.append(_https())
    return rules


def _https() -> Manifest:
    return {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}, {"ipBlock": {"cidr": "::/0"}}], "ports": [_port(443)]}


def _port(number: int) -> Manifest:
    return {"protocol": "TCP", "port": number}


def _to_endpoint(endpoint: str) -> list[Manifest]:
    """Return the rule for an S3 endpoint.

    A Service's name stands for pods, whose port need not be the Service's; so the namespace is opened, not the port.
    """
    url = urlsplit(endpoint)
    host = url.hostname or ""
    service = host.split(".")
    if len(service) == 1:
        return [{"to": [{"podSelector": {}}]}]
    if service[2:3] == ["svc"]:
        labels = {"kubernetes.io/metadata.name": service[1]}
        return [{"to": [{"namespaceSelector": {"matchLabels": labels}}]}]
    rule = _https()
    rule["ports"] = [_port(url.port or (443 if url.scheme == "https" else 80))]
    return [rule]
