"""A client of the API server for tests: objects are plain mappings, errors say what the server said."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import urllib3

from populora_api import custom_resource_definition

Object = dict[str, Any]
T = TypeVar("T")

PATIENCE_SECONDS = 240.0
"""How long what must happen may take: a machine that other work shares is many times slower than an idle one."""

KINDS: dict[str, tuple[str, str]] = {
    "ConfigMap": ("v1", "configmaps"),
    "Event": ("v1", "events"),
    "Namespace": ("v1", "namespaces"),
    "Node": ("v1", "nodes"),
    "PersistentVolume": ("v1", "persistentvolumes"),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims"),
    "Pod": ("v1", "pods"),
    "ResourceQuota": ("v1", "resourcequotas"),
    "Secret": ("v1", "secrets"),
    "Service": ("v1", "services"),
    "ServiceAccount": ("v1", "serviceaccounts"),
    "Deployment": ("apps/v1", "deployments"),
    "ReplicaSet": ("apps/v1", "replicasets"),
    "Job": ("batch/v1", "jobs"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("policy/v1", "poddisruptionbudgets"),
    "RuntimeClass": ("node.k8s.io/v1", "runtimeclasses"),
    "PriorityClass": ("scheduling.k8s.io/v1", "priorityclasses"),
    "Role": ("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ClusterRole": ("rbac.authorization.k8s.io/v1", "clusterroles"),
    "ClusterRoleBinding": ("rbac.authorization.k8s.io/v1", "clusterrolebindings"),
    "CustomResourceDefinition": ("apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "PodMonitor": ("monitoring.coreos.com/v1", "podmonitors"),
    "PopulationRun": ("populora.dev/v1alpha1", "populationruns"),
}
"""API version and plural of the kinds that tests touch."""

CLUSTER_WIDE = frozenset(
    {
        "Namespace",
        "Node",
        "PersistentVolume",
        "PriorityClass",
        "RuntimeClass",
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
    }
)

CHILD_KINDS = (
    "ConfigMap",
    "ServiceAccount",
    "Service",
    "Deployment",
    "Job",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "Pod",
    "ReplicaSet",
)
"""Kinds of what a run may own, pods and ReplicaSets by way of their controllers."""

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class ApiError(Exception):
    """The server refused.

    Attributes:
        code: HTTP status.
        status: the server's Status object.
        warnings: what it sent as Warning headers.
    """

    def __init__(self, code: int, status: Object, warnings: list[str]) -> None:
        self.code, self.status, self.warnings = code, status, warnings
        super().__init__(f"{code}: {status.get('message', status)}")

    @property
    def message(self) -> str:
        return str(self.status.get("message", ""))


class Api:
    """Requests with one bearer token. Safe to share between threads."""

    def __init__(self, url: str, token: str, ca: Path) -> None:
        self.url, self.ca = url, ca
        self._pool = urllib3.PoolManager(ca_certs=str(ca), maxsize=16, retries=False)
        self._headers = {"Authorization": f"Bearer {token}", "User-Agent": "populora-tests"}
        self._local = threading.local()

    @property
    def warnings(self) -> list[str]:
        """Warning headers of this thread's last answer."""
        return getattr(self._local, "warnings", [])

    def request(
        self, method: str, path: str, body: Any = None, content: str = "application/json", **query: Any
    ) -> Object:
        """Send a request and return the answer's object; ApiError where the server refuses."""
        url = f"{self.url}{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = self._pool.request(
            method, url, body=data, headers={**self._headers, "Content-Type": content}, timeout=60
        )
        self._local.warnings = [text.split(" ", 2)[2].strip('"') for text in answer.headers.getlist("Warning")]
        try:
            value = json.loads(answer.data)
        except ValueError:
            value = {"message": answer.data.decode(errors="replace")}
        if answer.status >= 400:
            raise ApiError(answer.status, value, self.warnings)
        return value

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        return self.request("GET", path_of(kind, namespace, name))

    def find(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        """Return an object, None where there is none."""
        try:
            return self.get(kind, name, namespace)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None = "default", selector: str = "") -> list[Object]:
        """Return the objects of a kind, of every namespace where that is None."""
        items = self.request("GET", path_of(kind, namespace), labelSelector=selector)["items"]
        return [{"apiVersion": KINDS[kind][0], "kind": kind, **item} for item in items]

    def create(self, value: Object, namespace: str = "default", *, strict: bool = False) -> Object:
        query = {"fieldValidation": "Strict"} if strict else {}
        return self.request("POST", path_of(value["kind"], namespace_of(value, namespace)), value, **query)

    def replace(self, value: Object, namespace: str = "default", subresource: str = "") -> Object:
        path = path_of(value["kind"], namespace_of(value, namespace), value["metadata"]["name"], subresource)
        return self.request("PUT", path, value)

    def apply(
        self, value: Object, namespace: str = "default", *, manager: str = "tests", subresource: str = ""
    ) -> Object:
        path = path_of(value["kind"], namespace_of(value, namespace), value["metadata"]["name"], subresource)
        return self.request("PATCH", path, value, APPLY, fieldManager=manager, force="true", fieldValidation="Strict")

    def patch(
        self, kind: str, name: str, change: Mapping[str, Any], namespace: str = "default", subresource: str = ""
    ) -> Object:
        return self.request("PATCH", path_of(kind, namespace, name, subresource), change, MERGE)

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str = "default",
        *,
        propagation: str = "Background",
        grace: int | None = None,
    ) -> None:
        """Delete an object; one that is not there is no error."""
        query = {"propagationPolicy": propagation} | ({} if grace is None else {"gracePeriodSeconds": grace})
        try:
            self.request("DELETE", path_of(kind, namespace, name), **query)
        except ApiError as error:
            if error.code != 404:
                raise

    def watch(
        self, kind: str, namespace: str | None, stop: threading.Event, *, fields: str = ""
    ) -> Iterator[tuple[str, Object]]:
        """Yield (ADDED, MODIFIED or DELETED, object) of all there is and then of changes, until `stop`.

        Every few seconds all there is comes again as ADDED: who reads this looks at the object, not at the event.
        """
        query = urlencode({"watch": "true", "timeoutSeconds": 5, "fieldSelector": fields})
        url = f"{self.url}{path_of(kind, namespace)}?{query}"
        patience = urllib3.Timeout(connect=5, read=20)
        while not stop.is_set():
            try:
                answer = self._pool.request("GET", url, headers=self._headers, preload_content=False, timeout=patience)
                try:
                    yield from _events(answer, stop)
                finally:
                    answer.close()
            except (urllib3.exceptions.HTTPError, OSError):
                stop.wait(0.2)

    def token(self, account: str, namespace: str) -> str:
        """Return a token of a ServiceAccount, good for an hour."""
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        path = path_of("ServiceAccount", namespace, account, "token")
        return str(self.request("POST", path, body)["status"]["token"])

    def install_definition(self) -> None:
        """Install the definition of PopulationRun and wait until the server serves it."""
        definition = custom_resource_definition()
        self.apply(definition)
        eventually(
            lambda: condition(self.get("CustomResourceDefinition", definition["metadata"]["name"]), "Established"),
            "the definition is established",
        )
        eventually(lambda: self.list("PopulationRun", None) is not None, "PopulationRuns are served", ignore=ApiError)

    def children(self, run: Object) -> dict[str, Object]:
        """Return what a run owns, directly or not, by `Kind/name`."""
        namespace = run["metadata"]["namespace"]
        owned: dict[str, Object] = {}
        uids = {run["metadata"]["uid"]}
        everything = [item for kind in CHILD_KINDS for item in self.list(kind, namespace)]
        for _ in range(3):
            for item in everything:
                if any(owner["uid"] in uids for owner in item["metadata"].get("ownerReferences", [])):
                    owned[f"{item['kind']}/{item['metadata']['name']}"] = item
                    uids.add(item["metadata"]["uid"])
        return owned


def path_of(kind: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the path of a kind, an object or its subresource."""
    version, plural = KINDS[kind]
    parts = ["/api" if "/" not in version else "/apis", version]
    if namespace and kind not in CLUSTER_WIDE:
        parts += ["namespaces", namespace]
    return "/".join([*parts, plural, *filter(None, (name, subresource))])


def namespace_of(value: Object, default: str) -> str:
    return str(value["metadata"].get("namespace", default))


def condition(value: Object | None, kind: str) -> bool:
    """Whether an object's condition is True."""
    found = conditions(value).get(kind)
    return found is not None and found["status"] == "True"


def conditions(value: Object | None) -> dict[str, Object]:
    """Return an object's conditions by type."""
    return {item["type"]: item for item in ((value or {}).get("status") or {}).get("conditions") or []}


def eventually(
    ask: Callable[[], T | None],
    what: str,
    *,
    seconds: float = PATIENCE_SECONDS,
    every: float = 0.1,
    ignore: type[BaseException] | tuple[type[BaseException], ...] = (),
    otherwise: Callable[[], object] = lambda: "",
) -> T:
    """Return the first true answer, or fail saying what was awaited and, from `otherwise`, what was there instead."""
    deadline = time.monotonic() + seconds
    while True:
        error: BaseException | None = None
        try:
            if answer := ask():
                return answer
        except ignore as caught:
            error = caught
        if time.monotonic() > deadline:
            raise AssertionError(f"After {seconds} s still not so: {what}. {error or ''} {otherwise()}")
        time.sleep(every)


def _events(answer: urllib3.BaseHTTPResponse, stop: threading.Event) -> Iterator[tuple[str, Object]]:
    buffer = b""
    while not stop.is_set() and (chunk := answer.read1()):
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["type"] not in ("BOOKMARK", "ERROR"):
                yield event["type"], event["object"]
