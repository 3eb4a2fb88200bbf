"""What the chart renders over a matrix of values."""

import json
from typing import Any

import pytest
from chart import CHART, Helm, Manifests, Object
from matrix import EVERYTHING, MATRIX, NOTHING


@pytest.fixture(scope="module", params=MATRIX, ids=list(MATRIX))
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Manifests:
    return helm.render(MATRIX[request.param])


@pytest.fixture(scope="module")
def everything(helm: Helm) -> Manifests:
    return helm.render(EVERYTHING)


def pods(manifests: Manifests) -> list[Object]:
    """Return the metadata and spec of every rendered pod."""
    templates = [document["spec"]["template"] for document in manifests.kind("Deployment")]
    return templates + manifests.kind("Pod")


def test_every_object_is_whole_and_none_comes_twice(rendered: Manifests) -> None:
    names = [
        (document["kind"], document["metadata"].get("namespace"), document["metadata"]["name"]) for document in rendered
    ]
    assert len(names) == len(set(names))
    for document in rendered:
        assert document["metadata"]["labels"]["app.kubernetes.io/name"] == "populora", document["metadata"]
        assert document["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert not _nulls(document, document["kind"])
        cluster_wide = document["kind"] in ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")
        assert ("namespace" not in document["metadata"]) == cluster_wide


def _nulls(value: Any, path: str) -> list[str]:
    if isinstance(value, dict):
        return [bad for name, item in value.items() for bad in _nulls(item, f"{path}.{name}")]
    if isinstance(value, list):
        return [bad for item in value for bad in _nulls(item, f"{path}[]")]
    return [path] if value is None else []


def test_every_pod_is_restricted_and_its_root_is_read_only(rendered: Manifests) -> None:
    for pod in pods(rendered):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        for volume in spec.get("volumes", []):
            assert volume.keys() - {"name"} == {"emptyDir"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}


def test_only_the_controller_has_a_token(rendered: Manifests) -> None:
    assert rendered.one("Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    assert rendered.one("Pod")["spec"]["automountServiceAccountToken"] is False
    for account in rendered.kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_what_selects_the_controllers_pods_selects_them_and_nothing_else(rendered: Manifests) -> None:
    deployment = rendered.one("Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], rendered.one("Service")["spec"]["selector"]]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in rendered.kind("PodDisruptionBudget")]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in rendered.kind("NetworkPolicy")]
    selectors += [
        spread["labelSelector"]["matchLabels"]
        for spread in deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert selector["app.kubernetes.io/component"] == "controller"
    test_pod = rendered.one("Pod")["metadata"]["labels"]
    assert not any(selector.items() <= test_pod.items() for selector in selectors)


def test_the_default_image_is_the_controller_of_the_charts_version(helm: Helm, defaults: Manifests) -> None:
    assert defaults.controller["image"] == "populora/controller:0.1.0"
    assert helm.render({"image": {"tag": "edge"}}).controller["image"] == "populora/controller:edge"


def test_a_digest_takes_the_tags_place(everything: Manifests) -> None:
    image = "mirror/populora/controller@sha256:" + "0" * 64
    assert {container["image"] for pod in pods(everything) for container in pod["spec"]["containers"]} == {image}


def test_the_definition_stays_when_the_release_goes_unless_told_otherwise(helm: Helm, defaults: Manifests) -> None:
    kept = defaults.one("CustomResourceDefinition")["metadata"]["annotations"]
    assert kept == {"helm.sh/resource-policy": "keep"}
    gone = helm.render({"crds": {"keep": False}}).one("CustomResourceDefinition")
    assert "annotations" not in gone["metadata"]
    assert not helm.render({"crds": {"install": False}}).kind("CustomResourceDefinition")


def test_the_definition_is_the_one_that_the_command_prints(defaults: Manifests) -> None:
    from populora_api import custom_resource_definition

    definition = defaults.one("CustomResourceDefinition")
    del definition["metadata"]["labels"], definition["metadata"]["annotations"]
    assert definition == json.loads(json.dumps(custom_resource_definition()))


def test_switches_leave_objects_out(helm: Helm) -> None:
    bare = helm.render(NOTHING)
    assert sorted(document["kind"] for document in bare) == ["Deployment", "Pod", "Service"]
    assert bare.one("Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "robot"
    assert "runAsUser" not in bare.one("Deployment")["spec"]["template"]["spec"]["securityContext"]


def test_names_follow_the_release(helm: Helm) -> None:
    for release, name in (("populora", "populora"), ("my-populora", "my-populora"), ("ml", "ml-populora")):
        assert helm.render(release=release).one("Deployment")["metadata"]["name"] == name
    longest = helm.render(release="r" * 53)
    assert all(
        len(document["metadata"]["name"]) <= 63
        for document in longest
        if document["kind"] in ("Deployment", "Service", "Pod")
    )


def test_a_label_of_the_user_cannot_take_pods_out_of_the_selector(everything: Manifests) -> None:
    labels = everything.one("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["team"] == "ml"
    assert labels["app.kubernetes.io/component"] == "controller"


def test_everything_that_a_user_sets_about_pods_arrives(everything: Manifests) -> None:
    spec = everything.one("Deployment")["spec"]["template"]["spec"]
    assert everything.one("Deployment")["spec"]["replicas"] == 3
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert spec["nodeSelector"] == EVERYTHING["nodeSelector"]
    assert spec["tolerations"] == EVERYTHING["tolerations"]
    assert spec["affinity"] == EVERYTHING["affinity"]
    assert spec["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["serviceAccountName"] == everything.one("ServiceAccount")["metadata"]["name"] == "robot"
    assert spec["containers"][0]["resources"] == EVERYTHING["resources"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in spec["containers"][0]["env"]
    assert everything.one("Deployment")["spec"]["template"]["metadata"]["annotations"]["note"] == "yes: #1"
    (spread,) = spec["topologySpreadConstraints"]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"]) == ("topology.kubernetes.io/zone", "DoNotSchedule")


def test_ports_agree_between_arguments_probes_service_and_policy(everything: Manifests) -> None:
    container = everything.controller
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": 9080, "health": 9081}
    assert {"--metrics-port=9080", "--health-port=9081"} <= set(container["args"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == "health"
    (service_port,) = everything.one("Service")["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (9080, "metrics")
    (monitored,) = everything.one("ServiceMonitor")["spec"]["endpoints"]
    assert monitored["port"] == service_port["name"]
    assert (
        everything.one("ServiceMonitor")["spec"]["selector"]["matchLabels"].items()
        <= everything.one("Service")["metadata"]["labels"].items()
    )
    assert (
        everything.one("Pod")["spec"]["containers"][0]["args"][-1]
        == "http://controller-metrics.populora-system.svc:9080/metrics"
    )


def test_the_policy_opens_only_the_paths_that_the_controller_needs(defaults: Manifests, everything: Manifests) -> None:
    for manifests, api_ports in ((defaults, [443, 6443, 8443]), (everything, [6443])):
        spec = manifests.one("NetworkPolicy")["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        (metrics,) = spec["ingress"]
        assert metrics["ports"] == [{"protocol": "TCP", "port": "metrics"}]
        api, trainers, names = spec["egress"]
        assert [port["port"] for port in api["ports"]] == api_ports
        assert trainers["ports"] == [{"protocol": "TCP", "port": 9090}]
        assert trainers["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "trainer"
        assert {port["port"] for port in names["ports"]} == {53}
    assert everything.one("NetworkPolicy")["spec"]["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    (limits,) = everything.one("NetworkPolicy")["spec"]["egress"][1]["to"][0]["namespaceSelector"]["matchExpressions"]
    assert limits["values"] == ["team-a", "team-b"]


def test_the_policy_lets_helms_test_pod_in_where_it_names_who_may_come(everything: Manifests) -> None:
    (metrics,) = everything.one("NetworkPolicy")["spec"]["ingress"]
    selectors = [
        peer["podSelector"].get("matchLabels", {})
        for peer in metrics["from"]
        if "podSelector" in peer and "namespaceSelector" not in peer
    ]
    labels = everything.one("Pod")["metadata"]["labels"]
    assert any(selector and selector.items() <= labels.items() for selector in selectors)


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds(
    helm: Helm, everything: Manifests, defaults: Manifests
) -> None:
    assert not defaults.kind("ConfigMap")
    files = sorted((CHART / "dashboards").glob("*.json"))
    assert files
    found = {
        name: json.loads(text) for document in everything.kind("ConfigMap") for name, text in document["data"].items()
    }
    assert found == {file.name: json.loads(file.read_text()) for file in files}
    for document in everything.kind("ConfigMap"):
        assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert document["metadata"]["annotations"] == {"grafana_folder": "ML"}


def test_the_notes_tell_the_next_two_commands(helm: Helm) -> None:
    said = helm(
        "install",
        "populora",
        str(CHART),
        "--namespace",
        "populora-system",
        "--dry-run=client",
        values={"controller": {"namespaces": ["team-a"]}},
    )
    notes = said.split("NOTES:")[1]
    assert "kubectl --namespace populora-system rollout status deployment/populora" in notes
    assert "kubectl --namespace team-a apply -f manifests/nano-s3.yaml" in notes
