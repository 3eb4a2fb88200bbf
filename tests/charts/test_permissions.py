"""The roles that the chart renders are what the controller says that it needs, no more and no less."""

import pytest
from chart import Helm, HelmError, Manifests

from populora_operator.permissions import role_rules


def test_a_controller_of_all_namespaces_gets_one_cluster_role(defaults: Manifests) -> None:
    role = defaults.one("ClusterRole", ":populora")
    assert role["rules"] == role_rules("runs")
    binding = defaults.one("ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "populora", "namespace": "populora-system"}]
    lease = defaults.one("Role")
    assert (lease["metadata"]["namespace"], lease["rules"]) == ("populora-system", role_rules("lease"))


def test_a_controller_of_some_namespaces_gets_a_role_in_each_and_nothing_cluster_wide(helm: Helm) -> None:
    values = {
        "controller": {"namespaces": ["team-a", "team-b"], "leaseNamespace": "leases"},
        "rbac": {"aggregate": False},
    }
    manifests = helm.render(values, release="ml")
    assert not manifests.kind("ClusterRole")
    assert not manifests.kind("ClusterRoleBinding")
    granted = {role["metadata"]["namespace"]: role["rules"] for role in manifests.kind("Role")}
    assert granted == {"team-a": role_rules("runs"), "team-b": role_rules("runs"), "leases": role_rules("lease")}
    roles = {(role["metadata"]["namespace"], role["metadata"]["name"]) for role in manifests.kind("Role")}
    bindings = manifests.kind("RoleBinding")
    assert {(binding["metadata"]["namespace"], binding["roleRef"]["name"]) for binding in bindings} == roles
    for binding in bindings:
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "ml-populora", "namespace": "populora-system"}
        ]


def test_users_roles_see_and_change_runs_but_not_their_status(defaults: Manifests) -> None:
    view = defaults.one("ClusterRole", ":view")
    edit = defaults.one("ClusterRole", ":edit")
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert {"rbac.authorization.k8s.io/aggregate-to-edit", "rbac.authorization.k8s.io/aggregate-to-admin"} <= edit[
        "metadata"
    ]["labels"].keys()
    assert all(set(rule["verbs"]) <= {"get", "list", "watch"} for rule in view["rules"])
    writable = {resource for rule in edit["rules"] if "update" in rule["verbs"] for resource in rule["resources"]}
    assert writable == {"populationruns"}


def test_two_releases_in_one_cluster_share_no_cluster_wide_name(helm: Helm) -> None:
    names = [
        {
            (document["kind"], document["metadata"]["name"])
            for document in helm.render({"crds": {"install": False}}, release=release)
            if document["kind"].startswith("Cluster")
        }
        for release in ("populora", "populora-two")
    ]
    assert not names[0] & names[1]


def test_the_controllers_rights_never_go_to_the_account_of_pods_that_name_none(helm: Helm) -> None:
    with pytest.raises(HelmError, match=r"serviceAccount\.name: the name of an existing ServiceAccount"):
        helm.render({"serviceAccount": {"create": False}})
