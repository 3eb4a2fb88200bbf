"""What the controller may do in a cluster, as data: the chart renders these rules and nothing else.

Every rule says what it is used for. Server-side apply needs `patch` on the object, and `create` where it does not exist
yet; both are checked by the API server for the one PATCH request.
"""

from dataclasses import dataclass
from typing import Literal

Scope = Literal["runs", "lease"]

_APPLIED = ("list", "watch", "create", "patch", "delete")
"""Verbs for kinds that are watched, applied and deleted; nothing is read one by one."""


@dataclass(frozen=True)
class Rule:
    """One rule of a Role or ClusterRole.

    Attributes:
        scope: `runs` is granted in every namespace whose runs are reconciled (or cluster-wide), `lease` in the
            namespace of the Lease only.
        api_group: the API group, empty for the core group.
        resources: plural names, with `/status` for the subresource.
        verbs: what may be done with them.
        purpose: what the controller does with it.
        optional: the kind is not in every cluster; the rule may be left out where its feature is switched off.
    """

    scope: Scope
    api_group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    purpose: str
    optional: bool = False

    def manifest(self) -> dict[str, list[str]]:
        """Return the rule as it stands in `rules` of a Role."""
        return {"apiGroups": [self.api_group], "resources": list(self.resources), "verbs": list(self.verbs)}


RULES: tuple[Rule, ...] = (
    Rule(
        "runs",
        "populora.dev",
        ("populationruns",),
        ("get", "list", "watch", "patch", "delete"),
        "read runs, add and remove the clean-up finalizer, delete runs whose ttlSecondsAfterFinished is over",
    ),
    Rule("runs", "populora.dev", ("populationruns/status",), ("patch",), "say where a run stands"),
    Rule(
        "runs",
        "",
        ("configmaps", "serviceaccounts", "services"),
        _APPLIED,
        "the resolved manifest, identities without a token, names of the pods",
    ),
    Rule("runs", "", ("pods",), ("list", "watch"), "see why a pod does not run, find the trainer's first pod"),
    Rule(
        "runs",
        "",
        ("namespaces",),
        ("watch",),
        "let go of runs that wait for a clean-up when their namespace is deleted, before a Role in it is",
    ),
    Rule("runs", "apps", ("deployments",), _APPLIED, "sandboxes and vLLM"),
    Rule("runs", "batch", ("jobs",), _APPLIED, "trainer, evaluation and clean-up"),
    Rule("runs", "networking.k8s.io", ("networkpolicies",), _APPLIED, "what a run's pods may reach"),
    Rule("runs", "policy", ("poddisruptionbudgets",), _APPLIED, "keep vLLM serving while nodes are drained"),
    Rule(
        "runs",
        "monitoring.coreos.com",
        ("podmonitors",),
        _APPLIED,
        "let Prometheus scrape a run's pods, where the cluster knows the kind",
        optional=True,
    ),
    Rule(
        "runs",
        "",
        ("events",),
        ("list", "create", "patch"),
        "tell a person what happened to a run; learn why a Job's pods are refused, which nothing else says",
    ),
    Rule("lease", "coordination.k8s.io", ("leases",), ("get", "create", "update"), "let one replica lead at a time"),
)


def role_rules(scope: Scope) -> list[dict[str, list[str]]]:
    """Return the rules of one scope as they stand in a Role or ClusterRole."""
    return [rule.manifest() for rule in RULES if rule.scope == scope]
