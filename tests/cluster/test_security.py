"""Least privilege, Pod Security, closed networks, no tokens: what a run and its controller may do in a cluster."""

from collections.abc import Iterator

import pytest
from client import Api, ApiError, Object, conditions, eventually
from control_plane import ControlPlane
from controller import ACCOUNT, Controller, grant, user_of
from kubelet import Kubelet
from monitoring import definitions
from population_run import Run, merged, read_manifest

from populora_operator.permissions import role_rules

NANO = merged(read_manifest("nano-4x4"), {"spec": {"training": {"steps": 3}}})
PAPER = merged(read_manifest("paper-4x4"), {"spec": {"training": {"steps": 3}, "sandbox": {"runtimeClassName": None}}})

Granted = tuple[str, str, str]
"""A verb, an API group, a resource with its subresource."""


@pytest.fixture
def namespace(namespace: str, api: Api) -> str:
    """The test's namespace, which enforces the Pod Security profile `restricted`."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
    api.patch("Namespace", namespace, {"metadata": {"labels": labels}})
    return namespace


@pytest.fixture(scope="module", autouse=True)
def _pod_monitors(api: Api) -> Iterator[None]:
    """The kind PodMonitor, as the Prometheus operator defines it."""
    (definition,) = [item for item in definitions() if item["spec"]["names"]["kind"] == "PodMonitor"]
    api.apply(definition)
    eventually(lambda: api.list("PodMonitor", "default") == [] or None, "PodMonitors are served", ignore=ApiError)
    yield
    api.delete("CustomResourceDefinition", definition["metadata"]["name"])


@pytest.fixture
def controller(plane: ControlPlane, api: Api, namespace: str) -> Iterator[Controller]:
    with Controller(plane, namespace, token=grant(api, namespace)) as controller:
        yield controller.ready()


@pytest.fixture
def paper(api: Api, kubelet: Kubelet, namespace: str, controller: Controller) -> Run:
    """A run with every kind of child, at its second step."""
    make_secret(api, namespace)
    kubelet.training("paper-4x4").limit = 2
    run = Run.create(api, namespace, PAPER)
    run.until_step(2)
    return run


def make_secret(api: Api, namespace: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "the-secret-value"}
    api.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "populora-s3"}, "stringData": keys}, namespace
    )


# Permissions


def granted() -> set[Granted]:
    rules = role_rules("runs") + role_rules("lease")
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def test_the_controller_uses_every_permission_that_it_is_granted_and_asks_for_no_other(plane, api, kubelet, namespace):
    _, since = plane.audit(plane.audit_log.stat().st_size)
    make_secret(api, namespace)
    token = grant(api, namespace)
    with Controller(plane, namespace, token=token, options=("--resync-seconds=2",)) as controller:
        controller.ready()
        # All there is to start, change, suspend, resume, finish, clean up and let expire.
        everything = Run.create(
            api, namespace, PAPER, deletionPolicy="Delete", evaluation={"suites": ["mbpp_plus"]}, suspend=True
        )
        everything.until("Suspended")
        everything.resume()
        everything.until("Completed")
        everything.patch(monitoring={"podMonitor": False})
        expiring = Run.create(api, namespace, NANO, ttlSecondsAfterFinished=1)
        expiring.until_gone()
        everything.delete()
        everything.until_gone()
        quota = {"hard": {"pods": "0"}}
        api.create(
            {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": quota}, namespace
        )
        Run.create(api, namespace, NANO).until_condition("TrainersReady", "QuotaExceeded", "False")
    requests, _ = plane.audit(since)
    mine = [request for request in requests if request["user"]["username"] == user_of(namespace)]
    used = {permission for request in mine if "objectRef" in request for permission in used_by(request)}
    refused = [
        f"{request['verb']} {request['requestURI']}: {request['responseStatus'].get('message', '')}"
        for request in mine
        if request["responseStatus"].get("code") == 403
    ]
    assert refused == []
    assert sorted(granted() - used) == []
    assert sorted(used - granted()) == []


def used_by(request: Object) -> set[Granted]:
    """Return the permissions that a request needed: an apply that makes its object is checked for two verbs."""
    target = request["objectRef"]
    resource = target["resource"] + (f"/{target['subresource']}" if "subresource" in target else "")
    made = request["verb"] == "patch" and request["responseStatus"].get("code") == 201
    return {(verb, target.get("apiGroup", ""), resource) for verb in (request["verb"], *(["create"] if made else []))}


def test_a_controller_that_may_not_see_jobs_starts_none_and_goes_on_when_it_may(plane, api, kubelet, namespace):
    token = grant(api, namespace)
    role = api.get("Role", ACCOUNT, namespace)
    blind = [rule for rule in role["rules"] if rule["apiGroups"] != ["batch"]]
    api.patch("Role", ACCOUNT, {"rules": blind}, namespace)
    with Controller(plane, namespace, token=token) as controller:
        controller.ready()
        run = Run.create(api, namespace, NANO)
        eventually(lambda: f"jobs in {namespace} are not known" in controller.tail(), "it says what it does not know")
        assert run.children() == {}
        api.patch("Role", ACCOUNT, {"rules": role["rules"]}, namespace)
        run.until("Completed")


def test_the_controller_reads_no_secret_and_writes_in_no_other_namespace():
    resources = {resource for _, _, resource in granted()}
    assert not resources & {"secrets", "pods/exec", "pods/log", "nodes", "roles", "rolebindings", "*"}
    assert {verb for verb, _, resource in granted() if resource == "namespaces"} == {"watch"}
    assert all(verb != "*" for verb, _, _ in granted())


# Pods


def test_every_pod_is_admitted_where_the_profile_restricted_is_enforced(api, kubelet, namespace, paper, controller):
    kubelet.training("paper-4x4").limit = None
    paper.patch(evaluation={"suites": ["mbpp_plus"]})
    paper.until("Completed")
    for deployment in api.list("Deployment", namespace):
        assert "ReplicaFailure" not in conditions(deployment)
    assert "FailedCreate" not in {event["reason"] for event in api.list("Event", namespace)}
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in kubelet.started}
    assert components == {"trainer", "serving", "sandbox", "evaluation"}
    said = controller.log.read_text()
    assert "would violate PodSecurity" not in said


def test_pods_are_hardened_beyond_the_profile(kubelet, paper):
    pods = paper.pods()
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in pods} == {
        "trainer",
        "serving",
        "sandbox",
    }
    for pod in pods:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not any("projected" in volume for volume in spec["volumes"])
        assert (
            spec["serviceAccountName"]
            == pod["metadata"]["labels"]["populora.dev/run"]
            + "-"
            + (pod["metadata"]["labels"]["app.kubernetes.io/component"])
        )
        assert spec["enableServiceLinks"] is False
        assert spec["terminationGracePeriodSeconds"] >= 10
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            assert not spec.get(field)
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]
            assert "readinessProbe" in container


def test_no_service_account_of_a_run_mounts_a_token_or_may_do_anything(api, namespace, paper):
    for account in api.list("ServiceAccount", namespace, f"populora.dev/run={paper.name}"):
        name = account["metadata"]["name"]
        assert account["automountServiceAccountToken"] is False
        token = api.token(name, namespace)
        held = Api(api.url, token, api.ca)
        for kind in ("Secret", "Pod", "ConfigMap", "PopulationRun"):
            with pytest.raises(ApiError) as refused:
                held.list(kind, namespace)
            assert refused.value.code == 403


def test_secrets_go_by_reference_and_never_to_a_sandbox(api, namespace, paper):
    for child in paper.children().values():
        assert "the-secret-value" not in str(child)
    for pod in paper.pods("sandbox"):
        assert "secretKeyRef" not in str(pod["spec"])
        assert "AWS_" not in str(pod["spec"])
    names = {
        variable["name"]
        for container in paper.pods("trainer")[0]["spec"]["containers"]
        for variable in container["env"]
        if "valueFrom" in variable
    }
    assert names >= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}


# Networks


def selects(policy: Object, pod: Object) -> bool:
    """Whether a policy's podSelector selects a pod."""
    return matches(policy["spec"]["podSelector"], pod["metadata"]["labels"])


def matches(selector: Object, labels: dict[str, str]) -> bool:
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions", []):
        has = labels.get(expression["key"]) in expression.get("values", [])
        assert expression["operator"] in ("In", "NotIn")
        if has != (expression["operator"] == "In"):
            return False
    return True


def allowed(policies: list[Object], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether a pod may connect to another pod of its namespace: its egress and the other's ingress say so."""

    def one_way(direction: str, of: dict[str, str], peer: dict[str, str]) -> bool:
        closed = False
        for policy in policies:
            spec = policy["spec"]
            if direction.title() not in spec["policyTypes"] or not matches(spec["podSelector"], of):
                continue
            closed = True
            for rule in spec.get(direction, []):
                peers = rule.get("from" if direction == "ingress" else "to")
                ports = rule.get("ports")
                to_peer = peers is None or any(peer_matches(item, peer) for item in peers)
                to_port = ports is None or any(item.get("port") == port for item in ports)
                if to_peer and to_port:
                    return True
        return not closed

    return one_way("egress", source, target) and one_way("ingress", target, source)


def peer_matches(peer: Object, labels: dict[str, str]) -> bool:
    if "ipBlock" in peer:
        # An address in the cluster is an address: the block says nothing of labels.
        return True
    wanted = peer.get("namespaceSelector")
    here = wanted is None or matches(wanted, {"kubernetes.io/metadata.name": "here"})
    return here and matches(peer.get("podSelector", {}), labels)


RUN_LABELS = {"populora.dev/run": "paper-4x4"}
OUTSIDERS = {
    "controller": {"app.kubernetes.io/name": "populora", "app.kubernetes.io/component": "controller"},
    "prometheus": {"app.kubernetes.io/name": "prometheus"},
    "stranger": {"app": "stranger"},
    "other-trainer": {"populora.dev/run": "other", "app.kubernetes.io/component": "trainer"},
}

# Who may connect to whom, on which port; everything else that is tried below must be closed.
OPEN = {
    ("trainer", "sandbox", 8080),
    ("trainer", "serving", 8000),
    ("trainer", "serving", 8001),
    ("trainer", "trainer", 29400),
    ("trainer", "trainer", 9090),
    ("trainer", "trainer", 8080),
    ("trainer", "trainer", 8000),
    ("trainer", "trainer", 8001),
    ("controller", "trainer", 9090),
    ("prometheus", "trainer", 9090),
    ("prometheus", "serving", 8000),
    ("prometheus", "serving", 8001),
    ("prometheus", "sandbox", 8080),
}


def test_exactly_the_paths_that_a_run_needs_are_open(api, namespace, paper):
    policies = api.list("NetworkPolicy", namespace, "populora.dev/run=paper-4x4")
    pods = {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"] for pod in paper.pods()}
    assert pods.keys() == {"trainer", "serving", "sandbox"}
    everybody = {**pods, **OUTSIDERS}
    ports = (8000, 8001, 8080, 9090, 29400)
    found = {
        (source, target, port)
        for source in everybody
        for target in pods
        for port in ports
        if allowed(policies, everybody[source], everybody[target], port)
    }
    assert found == OPEN


def test_every_pod_of_a_run_is_closed_in_both_directions_whatever_other_policies_say(api, namespace, paper):
    policies = {item["metadata"]["name"]: item for item in api.list("NetworkPolicy", namespace)}
    deny = policies["paper-4x4-default-deny"]["spec"]
    assert sorted(deny["policyTypes"]) == ["Egress", "Ingress"]
    assert "ingress" not in deny
    assert "egress" not in deny
    for pod in paper.pods():
        assert selects(policies["paper-4x4-default-deny"], pod)
    sandbox = policies["paper-4x4-sandbox"]["spec"]
    assert "egress" not in sandbox, "a sandbox reaches nothing, not even DNS"


# Overrides

# Of which kind of pod, what is tried, and the field that the refusal names.
HOSTILE: list[tuple[str, Object, str]] = [
    ("trainer", {"hostNetwork": True}, "hostNetwork"),
    ("trainer", {"hostPID": True}, "hostPID"),
    ("trainer", {"automountServiceAccountToken": True}, "automountServiceAccountToken"),
    ("trainer", {"securityContext": {"runAsNonRoot": False}}, "securityContext.runAsNonRoot"),
    ("trainer", {"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser"),
    ("trainer", {"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "securityContext.seccompProfile"),
    ("trainer", {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}, "volumes[0].hostPath"),
    ("trainer", {"volumes": [{"name": "t", "projected": {"sources": []}}]}, "volumes[0].projected"),
    (
        "trainer",
        {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]},
        "containers[0].securityContext.privileged",
    ),
    ("trainer", {"containers": [{"name": "trainer", "command": ["sh"]}]}, "containers[0].command"),
    ("inference", {"shareProcessNamespace": True}, "shareProcessNamespace"),
    ("inference", {"containers": [{"name": "vllm", "args": ["--api-key"]}]}, "containers[0].args"),
    ("sandbox", {"serviceAccountName": "default"}, "serviceAccountName"),
    ("sandbox", {"containers": [{"name": "spy", "image": "spy"}]}, "containers[0].name"),
    ("sandbox", {"initContainers": [{"name": "spy", "image": "spy"}]}, "initContainers"),
    ("sandbox", {"volumes": [{"name": "s", "secret": {"secretName": "populora-s3"}}]}, "volumes[0].secret"),
    (
        "sandbox",
        {"containers": [{"name": "sandbox", "envFrom": [{"secretRef": {"name": "populora-s3"}}]}]},
        "containers[0].envFrom",
    ),
    ("sandbox", {"runtimeClassName": "runc"}, "runtimeClassName"),
    ("sandbox", {"dnsPolicy": "Default"}, "dnsPolicy"),
]


def test_no_pod_template_touches_what_isolation_rests_on(api, kubelet, namespace, controller):
    runs = []
    for number, (place, spec, _) in enumerate(HOSTILE):
        manifest = merged(NANO, {"metadata": {"name": f"hostile-{number}"}, "spec": {"inference": {"engine": "VLLM"}}})
        runs.append(Run.create(api, namespace, manifest, **{place: {"podTemplate": {"spec": spec}}}))
    for run, (place, spec, field) in zip(runs, HOSTILE, strict=True):
        condition = run.until_condition("Progressing", "OverrideRefused", "False")
        assert f"spec.{place}.podTemplate.spec.{field}" in condition["message"], spec
        component = {"inference": "serving"}.get(place, place)
        assert run.pods(component) == []


def test_labels_of_a_pod_template_cannot_leave_the_network_policies(api, kubelet, namespace, controller):
    for number, key in enumerate(("populora.dev/run", "app.kubernetes.io/component")):
        manifest = merged(NANO, {"metadata": {"name": f"label-{number}"}})
        run = Run.create(api, namespace, manifest, sandbox={"podTemplate": {"metadata": {"labels": {key: "other"}}}})
        condition = run.until_condition("Progressing", "OverrideRefused", "False")
        assert f"spec.sandbox.podTemplate.metadata.labels[{key}]" in condition["message"]


def test_a_harmless_pod_template_is_followed_and_stays_within_the_profile(api, kubelet, namespace, controller):
    spec = {
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
        "containers": [
            {
                "name": "trainer",
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "env": [{"name": "A", "value": "1"}],
            },
            {"name": "helper", "image": "example/helper:1", "command": ["sleep", "infinity"]},
        ],
        "affinity": {"nodeAffinity": {}},
    }
    kubelet.training("nano-4x4").limit = 1
    labels = {"team": "research"}
    run = Run.create(api, namespace, NANO, trainer={"podTemplate": {"metadata": {"labels": labels}, "spec": spec}})
    job = eventually(lambda: (run.jobs() or [None])[0], "the trainer's Job", otherwise=run.explain)
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "research"
    assert template["metadata"]["labels"]["populora.dev/run"] == "nano-4x4"
    containers = {item["name"]: item for item in template["spec"]["containers"]}
    assert containers["helper"]["securityContext"]["allowPrivilegeEscalation"] is False
    assert {"name": "A", "value": "1"} in containers["trainer"]["env"]
    assert "/data" in {mount["mountPath"] for mount in containers["trainer"]["volumeMounts"]}
