"""Tells Prometheus of pods and Services as its own discovery would, which Debian builds without. Imported by name."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import urllib3
from client import Api, ApiError, Object

_PAUSE_SECONDS = 0.5


class Discovery:
    """Keeps two files of targets, `pod.json` and `endpointslice.json`, equal to what runs; a context manager.

    A target carries the labels `__meta_kubernetes_*` of Prometheus's role of the file's name, as far as rules of
    monitors ask for them.
    """

    def __init__(self, api: Api, folder: Path) -> None:
        self._api, self._folder = api, folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> "Discovery":
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(30)

    def _keep(self) -> None:
        while not self._over.wait(_PAUSE_SECONDS):
            # A request that fails on a busy machine is followed by the next.
            with contextlib.suppress(ApiError, urllib3.exceptions.HTTPError):
                self._write()

    def _write(self) -> None:
        pods = [pod for pod in self._api.list("Pod", None) if pod["status"].get("podIP")]
        services = self._api.list("Service", None)
        for role, targets in (
            ("pod", [target for pod in pods for target in pod_targets(pod)]),
            ("endpointslice", [target for service in services for target in service_targets(service, pods)]),
        ):
            scratch = self._folder / f"{role}.new"
            scratch.write_text(json.dumps(targets))
            scratch.rename(self._folder / f"{role}.json")


def pod_targets(pod: Object) -> Iterator[Object]:
    """Yield a target for every port that a pod's containers name."""
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", []):
            yield _target(
                pod,
                port["containerPort"],
                {
                    "pod_phase": pod["status"]["phase"],
                    "pod_container_name": container["name"],
                    "pod_container_port_name": port.get("name", ""),
                },
            )


def service_targets(service: Object, pods: list[Object]) -> Iterator[Object]:
    """Yield a target for every port of a Service and every pod behind it."""
    place, selector = service["metadata"]["namespace"], service["spec"].get("selector") or {}
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        if not selector or pod["metadata"]["namespace"] != place or not selector.items() <= labels.items():
            continue
        numbers = {
            port["name"]: port["containerPort"]
            for container in pod["spec"]["containers"]
            for port in container.get("ports", [])
            if "name" in port
        }
        for port in service["spec"]["ports"]:
            wanted = port.get("targetPort", port["port"])
            more = {f"service_label_{safe(key)}": value for key, value in service["metadata"].get("labels", {}).items()}
            more |= {"endpointslice_port_name": port.get("name", ""), "pod_phase": pod["status"]["phase"]}
            yield _target(pod, numbers.get(wanted, wanted), more)


def safe(label: str) -> str:
    """Return a label's name as Prometheus has it, e.g. populora_dev_run for populora.dev/run."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)


def _target(pod: Object, port: int, more: dict[str, str]) -> Object:
    metadata = pod["metadata"]
    labels = {
        "namespace": metadata["namespace"],
        "pod_name": metadata["name"],
        **{f"pod_label_{safe(key)}": value for key, value in metadata.get("labels", {}).items()},
        **more,
    }
    return {
        "targets": [f"{pod['status']['podIP']}:{port}"],
        "labels": {f"__meta_kubernetes_{name}": value for name, value in labels.items()},
    }
