"""NetworkPolicies: every pod of a run is closed, then exactly the paths that are needed are opened."""

from populora_operator import names
from populora_operator.builders import storage
from populora_operator.builders.context import Context, Manifest
from populora_operator.cluster.kinds import NETWORK_POLICY

_CONTROLLER = {"app.kubernetes.io/name": "populora", "app.kubernetes.io/component": "controller"}
_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


def default_deny(context: Context) -> Manifest:
    """Return the policy that closes every pod of the run."""
    spec = {
        "podSelector": {"matchLabels": {names.RUN_LABEL: context.name}},
        "policyTypes": ["Ingress", "Egress"],
    }
    return context.child(NETWORK_POLICY, names.default_deny(context.name), "config", spec=spec)


def trainer_policy(context: Context) -> Manifest:
    """Return what trainer, evaluation and clean-up may reach: each other, sandboxes, vLLM and storage."""
    ingress: list[Manifest] = [
        # Collective operations of several trainer pods use any port.
        {"from": [_pods(context, "trainer")]},
        {"from": [_anywhere(_CONTROLLER), _anywhere(_PROMETHEUS)], "ports": _ports(names.STATUS_PORT)},
    ]
    egress: list[Manifest] = [
        _dns(),
        {"to": [_pods(context, "trainer")]},
        {"to": [_pods(context, "sandbox")], "ports": _ports(names.SANDBOX_PORT)},
        *storage.egress(context),
    ]
    if context.serves:
        egress.append({"to": [_pods(context, "serving")], "ports": _ports(names.SERVING_PORT, names.SIDECAR_PORT)})
    selector = {
        "matchLabels": {names.RUN_LABEL: context.name},
        "matchExpressions": [
            {"key": names.COMPONENT_LABEL, "operator": "In", "values": ["trainer", "evaluation", "cleanup"]}
        ],
    }
    return _policy(context, names.trainer(context.name), "trainer", selector, ingress, egress)


def serving_policy(context: Context) -> Manifest:
    """Return what vLLM may reach, which is storage, and who may reach it."""
    ingress: list[Manifest] = [
        {
            "from": [_pods(context, "trainer"), _pods(context, "evaluation"), _anywhere(_PROMETHEUS)],
            "ports": _ports(names.SERVING_PORT, names.SIDECAR_PORT),
        }
    ]
    egress = [_dns(), *storage.egress(context)]
    return _policy(context, names.serving(context.name), "serving", _labels(context, "serving"), ingress, egress)


def sandbox_policy(context: Context) -> Manifest:
    """Return who may reach sandboxes; they reach nothing, not even DNS."""
    ingress: list[Manifest] = [
        {
            "from": [_pods(context, "trainer"), _pods(context, "evaluation"), _anywhere(_PROMETHEUS)],
            "ports": _ports(names.SANDBOX_PORT),
        }
    ]
    return _policy(context, names.sandbox(context.name), "sandbox", _labels(context, "sandbox"), ingress, [])


def _policy(
    context: Context,
    name: str,
    component: names.Component,
    selector: Manifest,
    ingress: list[Manifest],
    egress: list[Manifest],
) -> Manifest:
    spec: Manifest = {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], "ingress": ingress}
    if egress:
        spec["egress"] = egress
    return context.child(NETWORK_POLICY, name, component, spec=spec)


def _labels(context: Context, component: names.Component) -> Manifest:
    return {"matchLabels": names.selector(context.name, component)}


def _pods(context: Context, component: names.Component) -> Manifest:
    return {"podSelector": _labels(context, component)}


def _anywhere(labels: dict[str, str]) -> Manifest:
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": labels}}


def _ports(*numbers: int) -> list[Manifest]:
    return [{"protocol": "TCP", "port": number} for number in numbers]


def _dns() -> Manifest:
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    return {"to": [{"namespaceSelector": {}}], "ports": ports}
