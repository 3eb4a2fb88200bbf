"""The kinds of objects that the controller reads or writes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of object.

    Attributes:
        group: API group, empty for the core group.
        version: version of the group.
        kind: name of the kind.
        plural: name in URLs.
        namespaced: its objects are in namespaces.
    """

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The value of `apiVersion`."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of the group's version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of an object, or of the collection in a namespace or (None) in all."""
        scope = f"/namespaces/{namespace}" if namespace is not None else ""
        parts = [self.root + scope, self.plural, *(part for part in (name, subresource) if part)]
        return "/".join(parts)

    def watch_path(self, namespace: str | None) -> str:
        """Return the URL path of a watch: of a collection, or of one namespace's own object.

        A Role in that namespace can grant the latter's path, and no other one by which it could be watched.
        """
        if self.namespaced or namespace is None:
            return self.path(namespace)
        return f"{self.root}/watch/{self.plural}/{namespace}"


RUN = Kind("populora.dev", "v1alpha1", "PopulationRun", "populationruns")
CONFIG_MAP = Kind("", "v1", "ConfigMap", "configmaps")
SERVICE_ACCOUNT = Kind("", "v1", "ServiceAccount", "serviceaccounts")
SERVICE = Kind("", "v1", "Service", "services")
POD = Kind("", "v1", "Pod", "pods")
EVENT = Kind("", "v1", "Event", "events")
DEPLOYMENT = Kind("apps", "v1", "Deployment", "deployments")
JOB = Kind("batch", "v1", "Job", "jobs")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies")
DISRUPTION_BUDGET = Kind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets")
POD_MONITOR = Kind("monitoring.coreos.com", "v1", "PodMonitor", "podmonitors")
NAMESPACE = Kind("", "v1", "Namespace", "namespaces", namespaced=False)
LEASE = Kind("coordination.k8s.io", "v1", "Lease", "leases")

CHILDREN: tuple[Kind, ...] = (
    CONFIG_MAP,
    SERVICE_ACCOUNT,
    NETWORK_POLICY,
    SERVICE,
    DISRUPTION_BUDGET,
    DEPLOYMENT,
    JOB,
    POD_MONITOR,
)
"""Kinds that the controller makes, in the order in which it does: what pods rest on comes first."""

BY_NAME = {kind.kind: kind for kind in (RUN, POD, EVENT, LEASE, *CHILDREN)}
