"""The chart installed, upgraded and uninstalled with Helm on a real API server."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart import CHART, ROOT, Helm, HelmError, Object
from client import Api, ApiError, condition, eventually
from control_plane import ControlPlane
from kubelet import Kubelet
from matrix import MATRIX
from monitoring import definitions

pytestmark = pytest.mark.slow

CRD = "populationruns.populora.dev"
RUN: Object = yaml.safe_load((ROOT / "manifests" / "minimal.yaml").read_text())


def install(helm: Helm, namespace: str, values: Object | None = None, *flags: str, release: str = "populora") -> str:
    """Install the chart and wait until its controller is available."""
    command = ("install", release, str(CHART), "--namespace", namespace, "--wait", "--timeout", "3m", *flags)
    return helm(*command, values=values or {})


def served(api: Api) -> None:
    """Wait until the API server serves PopulationRuns, which is a moment after their definition is there."""
    eventually(lambda: api.list("PopulationRun", None) is not None, "PopulationRuns are served", ignore=ApiError)


def objects_of(api: Api, release: str, *namespaces: str) -> set[str]:
    """Return the objects in these namespaces and cluster-wide that bear a release's label."""
    kinds = (
        "Deployment",
        "ServiceAccount",
        "Service",
        "ConfigMap",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "Role",
        "RoleBinding",
    )
    label = f"app.kubernetes.io/instance={release},app.kubernetes.io/managed-by=Helm"
    found = {
        f"{kind}/{item['metadata']['name']}"
        for kind in kinds
        for place in namespaces
        for item in api.list(kind, place, label)
    }
    return found | {
        f"{kind}/{item['metadata']['name']}"
        for kind in ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")
        for item in api.list(kind, None, label)
    }


def test_it_installs_under_pod_security_restricted_and_its_test_passes(
    cluster_helm: Helm, api: Api, namespaces: list[str], kubelet: Kubelet
) -> None:
    home = namespaces[0]
    install(cluster_helm, home)
    assert "would violate" not in cluster_helm.said
    deployment = api.get("Deployment", "populora", home)
    assert deployment["status"]["availableReplicas"] == 2
    assert condition(api.get("CustomResourceDefinition", CRD), "Established")
    served(api)
    assert "Phase:          Succeeded" in cluster_helm("test", "populora", "--namespace", home)

    kubelet.on_start("test", kubelet.fail)
    with pytest.raises(HelmError):
        cluster_helm("test", "populora", "--namespace", home, "--timeout", "30s")


def older_chart(folder: Path) -> Path:
    """Return a copy of the chart as an earlier version might be: no field spec.retries, fewer rights."""
    older = folder / "populora"
    shutil.copytree(CHART, older)
    definition = yaml.safe_load((older / "files" / "crd.yaml").read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["retries"]
    (older / "files" / "crd.yaml").write_text(yaml.safe_dump(definition, sort_keys=False, width=10**6))
    rules = yaml.safe_load((older / "files" / "permissions.yaml").read_text())
    del rules["runs"][-1]
    (older / "files" / "permissions.yaml").write_text(yaml.safe_dump(rules))
    about = yaml.safe_load((older / "Chart.yaml").read_text())
    (older / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "0.0.9", "appVersion": "0.0.9"}))
    return older


def test_an_upgrade_brings_the_definition_and_leaves_runs_alone(
    cluster_helm: Helm, api: Api, namespaces: list[str], kubelet: Kubelet, tmp_path: Path
) -> None:
    home, team = namespaces[:2]
    older = older_chart(tmp_path)
    cluster_helm(
        "install", "populora", str(older), "--namespace", home, "--wait", "--timeout", "3m", values={"replicas": 1}
    )
    served(api)
    made = api.apply(RUN, team)
    assert "retries" not in made["spec"]

    cluster_helm(
        "upgrade", "populora", str(CHART), "--namespace", home, "--wait", "--timeout", "3m", "--reset-then-reuse-values"
    )
    kept = eventually(
        lambda: (run := api.get("PopulationRun", "minimal", team)) and "retries" in run["spec"] and run,
        "the definition is upgraded",
    )
    assert kept["metadata"]["uid"] == made["metadata"]["uid"]
    deployment = api.get("Deployment", "populora", home)
    assert deployment["spec"]["replicas"] == 1
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "populora/controller:0.1.0"
    role = api.get("ClusterRole", f"{home}:populora")
    assert any("events" in rule["resources"] for rule in role["rules"])

    cluster_helm("rollback", "populora", "1", "--namespace", home, "--wait", "--timeout", "3m")
    assert api.get("PopulationRun", "minimal", team)["metadata"]["uid"] == made["metadata"]["uid"]


def test_uninstalling_leaves_runs_and_their_definition_and_nothing_else(
    cluster_helm: Helm, api: Api, namespaces: list[str], kubelet: Kubelet
) -> None:
    home, other, team = namespaces
    install(cluster_helm, home)
    served(api)
    made = api.apply(RUN, team)
    assert len(objects_of(api, "populora", home)) > 8
    cluster_helm("uninstall", "populora", "--namespace", home, "--wait")
    eventually(
        lambda: objects_of(api, "populora", *namespaces) == {f"CustomResourceDefinition/{CRD}"}, "the rest is gone"
    )
    assert api.get("PopulationRun", "minimal", team)["metadata"]["uid"] == made["metadata"]["uid"]

    install(cluster_helm, home)
    cluster_helm("uninstall", "populora", "--namespace", home, "--wait")
    with pytest.raises(HelmError, match="invalid ownership metadata"):
        install(cluster_helm, other, release="second")
    install(cluster_helm, other, None, "--take-ownership", release="second")
    assert api.get("PopulationRun", "minimal", team)["metadata"]["uid"] == made["metadata"]["uid"]


def test_the_definition_goes_with_the_release_where_that_is_asked_for(
    cluster_helm: Helm, api: Api, namespaces: list[str], kubelet: Kubelet
) -> None:
    install(cluster_helm, namespaces[0], {"crds": {"keep": False}})
    cluster_helm("uninstall", "populora", "--namespace", namespaces[0], "--wait")
    eventually(lambda: api.find("CustomResourceDefinition", CRD) is None, "the definition is gone")


def test_teams_have_releases_of_their_own_in_one_cluster(
    cluster_helm: Helm, api: Api, namespaces: list[str], kubelet: Kubelet
) -> None:
    first, second, _ = namespaces
    install(cluster_helm, first, {"controller": {"namespaces": [first]}})
    alone = {"controller": {"namespaces": [second]}, "crds": {"install": False}, "rbac": {"aggregate": False}}
    install(cluster_helm, second, alone)
    label = "app.kubernetes.io/instance=populora"
    assert {item["metadata"]["name"] for item in api.list("ClusterRole", None, label)} == {
        f"{first}:populora:view",
        f"{first}:populora:edit",
    }
    assert api.list("ClusterRoleBinding", None, label) == []
    cluster_helm("uninstall", "populora", "--namespace", second, "--wait")
    assert api.get("Deployment", "populora", first)["status"]["availableReplicas"] == 2


def may(api: Api, account: str, namespace: str, verb: str, resource: str, subresource: str = "") -> bool:
    """Ask the API server whether a ServiceAccount may do something with PopulationRuns."""
    attributes = {
        "namespace": namespace,
        "verb": verb,
        "group": "populora.dev",
        "resource": resource,
        "subresource": subresource,
    }
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": f"system:serviceaccount:{namespace}:{account}", "resourceAttributes": attributes},
    }
    answer: Any = api.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"]["allowed"])


def test_the_clusters_own_roles_cover_runs(
    cluster_helm: Helm, api: Api, namespaces: list[str], kubelet: Kubelet
) -> None:
    home, team, _ = namespaces
    install(cluster_helm, home)
    for role in ("view", "edit", "admin"):
        api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": role}}, team)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": role, "namespace": team}],
        }
        api.create(binding, team)
    eventually(lambda: may(api, "admin", team, "create", "populationruns"), "the roles are aggregated")
    eventually(lambda: may(api, "edit", team, "delete", "populationruns"), "the roles are aggregated")
    eventually(lambda: may(api, "view", team, "get", "populationruns"), "the roles are aggregated")
    assert not may(api, "view", team, "create", "populationruns")
    assert not may(api, "edit", team, "patch", "populationruns", "status")
    assert not may(api, "edit", home, "get", "populationruns")


def test_the_api_server_accepts_all_that_is_rendered_and_knows_every_field(
    cluster_helm: Helm, api: Api, plane: ControlPlane, namespaces: list[str]
) -> None:
    """Strict dry runs on the server take the place of offline schemas, for every set of values of the matrix."""
    for definition in definitions():
        api.apply(definition)
        eventually(
            lambda name=definition["metadata"]["name"]: condition(
                api.get("CustomResourceDefinition", name), "Established"
            ),
            "the kind is served",
        )
    for name in ("populora-system", "team-a", "team-b", "leases"):
        if api.find("Namespace", name) is None:
            api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        eventually(lambda name=name: api.find("ServiceAccount", "default", name), "the namespace has its account")

    def apply(text: str) -> subprocess.CompletedProcess[str]:
        kubectl = [str(plane.paths["kubectl"]), f"--kubeconfig={plane.kubeconfig}"]
        options = ["--dry-run=server", "--server-side", "--validate=strict", "--filename=-"]
        return subprocess.run([*kubectl, "apply", *options], input=text, capture_output=True, text=True, timeout=120)

    for name, values in MATRIX.items():
        rendered = cluster_helm("template", "populora", str(CHART), "--namespace", "populora-system", values=values)
        done = apply(rendered)
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "Warning" not in done.stderr, name
    assert "serviceAccountNamed" in apply(rendered.replace("serviceAccountName:", "serviceAccountNamed:", 1)).stderr
