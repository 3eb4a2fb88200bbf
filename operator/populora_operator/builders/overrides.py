"""Users' podTemplates: merged over the controller's pods, except where the isolation of pods rests on a field.

What may be set is a list, so that a field that Kubernetes gets one day is refused until somebody has thought about it.
"""

from collections.abc import Iterator
from typing import Any

from populora_api.spec import PodTemplate
from populora_operator.builders.context import Manifest

_SCHEDULING = frozenset(
    {"affinity", "nodeName", "nodeSelector", "priorityClassName", "schedulerName", "schedulingGates", "tolerations"}
    | {"topologySpreadConstraints", "resourceClaims", "imagePullSecrets", "terminationGracePeriodSeconds", "overhead"}
)
_NETWORK = frozenset({"dnsConfig", "dnsPolicy", "hostAliases"})
_IDENTITY = frozenset({"serviceAccountName"})
_POD = _SCHEDULING | _NETWORK | _IDENTITY | {"runtimeClassName", "volumes", "containers", "initContainers"}
_POD = _POD | {"securityContext"}
_SANDBOX_POD = _SCHEDULING | {"volumes", "containers", "securityContext"}
_OWN_CONTAINER = frozenset({"name", "env", "envFrom", "volumeMounts", "resources", "imagePullPolicy"})
_SANDBOX_CONTAINER = frozenset({"name", "env", "volumeMounts", "resources", "imagePullPolicy"})
_OTHER_CONTAINER = _OWN_CONTAINER | frozenset(
    {"image", "command", "args", "workingDir", "restartPolicy", "lifecycle", "livenessProbe", "readinessProbe"}
    | {"startupProbe", "terminationMessagePath", "terminationMessagePolicy"}
)
_USER_IDS = frozenset({"runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups"})
_VOLUMES = frozenset({"name", "emptyDir", "configMap", "secret", "persistentVolumeClaim", "ephemeral", "downwardAPI"})
_SANDBOX_VOLUMES = frozenset({"name", "emptyDir"})
_OWN_LABELS = ("app.kubernetes.io/", "populora.dev/", "batch.kubernetes.io/", "kueue.x-k8s.io/")
_KEYED_LISTS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
}


def refusals(field: str, template: PodTemplate | None, own: frozenset[str], *, sandbox: bool = False) -> list[str]:
    """Say what of a podTemplate cannot be granted, a sentence each.

    Args:
        field: path of the podTemplate, e.g. `spec.trainer.podTemplate`.
        template: the podTemplate.
        own: names of the containers that the controller makes in such a pod.
        sandbox: the pods run untrusted programs, so that neither Secrets nor other containers belong into them.
    """
    return [f"{field}.{path} is not allowed: {allowed}." for path, allowed in _refusals(template, own, sandbox)]


def _refusals(template: PodTemplate | None, own: frozenset[str], sandbox: bool) -> Iterator[tuple[str, str]]:
    if template is None:
        return
    if template.metadata is not None:
        for kind in ("labels", "annotations"):
            for key in getattr(template.metadata, kind) or {}:
                if key.startswith(_OWN_LABELS):
                    yield f"metadata.{kind}[{key}]", "the controller sets what begins with " + ", ".join(_OWN_LABELS)
    spec = template.spec or {}
    allowed = _SANDBOX_POD if sandbox else _POD
    for key in sorted(spec.keys() - allowed):
        yield f"spec.{key}", "a podTemplate may set " + ", ".join(sorted(allowed))
    yield from _identifiers("spec.securityContext", spec.get("securityContext"))
    for place in ("containers", "initContainers"):
        if place in allowed:
            yield from _containers(
                f"spec.{place}", spec.get(place), own if place == "containers" else frozenset(), sandbox
            )
    for index, volume in enumerate(_list(spec.get("volumes"))):
        kinds = _SANDBOX_VOLUMES if sandbox else _VOLUMES
        if not isinstance(volume, dict):
            yield f"spec.volumes[{index}]", "a mapping with a name"
            continue
        for key in sorted(volume.keys() - kinds):
            yield f"spec.volumes[{index}].{key}", "volumes of " + ", ".join(sorted(kinds - {"name"}))
    for place in ("containers", "initContainers", "volumes", "tolerations", "imagePullSecrets", "resourceClaims"):
        if place in spec and not isinstance(spec[place], list):
            yield f"spec.{place}", "a list"


def _containers(path: str, containers: Any, own: frozenset[str], sandbox: bool) -> Iterator[tuple[str, str]]:
    for index, container in enumerate(_list(containers)):
        where = f"{path}[{index}]"
        name = container.get("name") if isinstance(container, dict) else None
        if not isinstance(container, dict) or not isinstance(name, str):
            yield where, "a mapping with a name"
            continue
        if sandbox and name not in own:
            yield f"{where}.name", f"only {', '.join(sorted(own))}: no other container runs beside untrusted programs"
            continue
        fields = (_SANDBOX_CONTAINER if sandbox else _OWN_CONTAINER) if name in own else _OTHER_CONTAINER
        for key in sorted(container.keys() - fields - {"securityContext"}):
            yield f"{where}.{key}", f"the container {name} may be given {', '.join(sorted(fields))}"
        yield from _identifiers(f"{where}.securityContext", container.get("securityContext"))
        if sandbox and any(isinstance(item, dict) and "valueFrom" in item for item in _list(container.get("env"))):
            yield f"{where}.env", "plain values only: nothing secret belongs beside untrusted programs"
        for key in ("env", "envFrom", "volumeMounts"):
            if any(not isinstance(item, dict) for item in _list(container.get(key))):
                yield f"{where}.{key}", "a list of mappings"


def _identifiers(path: str, context: Any) -> Iterator[tuple[str, str]]:
    if context is None:
        return
    if not isinstance(context, dict):
        yield path, "a mapping"
        return
    for key in sorted(context.keys() - _USER_IDS):
        yield f"{path}.{key}", "only " + ", ".join(sorted(_USER_IDS)) + ", as every pod keeps to the profile restricted"
    if context.get("runAsUser") == 0:
        yield f"{path}.runAsUser", "a number above 0, as no pod runs as root"


def merge(pod: Manifest, template: PodTemplate | None) -> Manifest:
    """Return a pod template with a user's podTemplate, whose refusals are empty, laid over it."""
    if template is None:
        return pod
    merged = dict(pod)
    if template.metadata is not None:
        metadata = dict(pod.get("metadata") or {})
        for kind, extra in (("labels", template.metadata.labels), ("annotations", template.metadata.annotations)):
            if extra:
                metadata[kind] = {**extra, **(metadata.get(kind) or {})}
        merged["metadata"] = metadata
    merged["spec"] = _merge(pod["spec"], template.spec or {})
    return merged


def _merge(base: Any, extra: Any) -> Any:
    """Lay `extra` over `base`: mappings by key, lists of named things by name, other lists one after the other.

    A null says nothing: it must not take away what isolation rests on.
    """
    if extra is None:
        return base
    if isinstance(base, dict) and isinstance(extra, dict):
        merged = dict(base)
        for key, value in extra.items():
            if key in _KEYED_LISTS and isinstance(base.get(key), list) and isinstance(value, list):
                merged[key] = _merge_named(base[key], value, _KEYED_LISTS[key])
            elif key == "tolerations" and isinstance(base.get(key), list) and isinstance(value, list):
                merged[key] = [*base[key], *value]
            else:
                merged[key] = _merge(base.get(key), value)
        return merged
    return extra


def _merge_named(base: list[Any], extra: list[Any], key: str) -> list[Any]:
    merged = {item.get(key): item for item in base}
    for item in extra:
        name = item.get(key) if isinstance(item, dict) else None
        merged[name] = _replaced(merged[name], item, key) if name in merged else item
    return list(merged.values())


def _replaced(old: Any, new: Any, key: str) -> Any:
    """A variable or a mount is replaced as a whole, as its old source would contradict the new one."""
    return (
        new
        if key == "mountPath" or (isinstance(new, dict) and new.keys() & {"value", "valueFrom"})
        else _merge(old, new)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
