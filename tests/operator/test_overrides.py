"""podTemplates: what may be set is followed, what isolation rests on is refused by name."""

from typing import Any

import pytest
from fake_world import manifest
from hypothesis import given
from hypothesis import strategies as st

from populora_api.spec import PodTemplate
from populora_operator.builders.context import Context
from populora_operator.builders.overrides import merge, refusals
from populora_operator.builders.podspec import CONTAINER_SECURITY
from populora_operator.builders.sandbox import sandbox_deployment
from populora_operator.builders.trainer import trainer_job
from populora_operator.subject import read

OWN = frozenset({"trainer"})


def template(spec: dict[str, Any] | None = None, **metadata: Any) -> PodTemplate:
    return PodTemplate.model_validate({"spec": spec, **({"metadata": metadata} if metadata else {})})


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"hostNetwork": True}, "spec.hostNetwork"),
        ({"hostPID": True}, "spec.hostPID"),
        ({"hostIPC": True}, "spec.hostIPC"),
        ({"hostUsers": True}, "spec.hostUsers"),
        ({"shareProcessNamespace": True}, "spec.shareProcessNamespace"),
        ({"automountServiceAccountToken": True}, "spec.automountServiceAccountToken"),
        ({"serviceAccount": "admin"}, "spec.serviceAccount"),
        ({"hostname": "x"}, "spec.hostname"),
        ({"subdomain": "x"}, "spec.subdomain"),
        ({"restartPolicy": "Always"}, "spec.restartPolicy"),
        ({"activeDeadlineSeconds": 1}, "spec.activeDeadlineSeconds"),
        ({"ephemeralContainers": []}, "spec.ephemeralContainers"),
        ({"something": "new"}, "spec.something"),
        ({"securityContext": {"runAsUser": 0}}, "spec.securityContext.runAsUser"),
        ({"securityContext": {"runAsNonRoot": False}}, "spec.securityContext.runAsNonRoot"),
        ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "spec.securityContext.seccompProfile"),
        ({"securityContext": {"sysctls": []}}, "spec.securityContext.sysctls"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "spec.volumes[0].hostPath"),
        ({"volumes": [{"name": "x", "projected": {}}]}, "spec.volumes[0].projected"),
        ({"volumes": "x"}, "spec.volumes"),
        ({"containers": "x"}, "spec.containers"),
        ({"containers": ["x"]}, "spec.containers[0]"),
        ({"containers": [{"name": "trainer", "image": "mine"}]}, "spec.containers[0].image"),
        ({"containers": [{"name": "trainer", "command": ["sh"]}]}, "spec.containers[0].command"),
        ({"containers": [{"name": "trainer", "ports": []}]}, "spec.containers[0].ports"),
        (
            {"containers": [{"name": "trainer", "securityContext": {"privileged": True}}]},
            "spec.containers[0].securityContext.privileged",
        ),
        (
            {"containers": [{"name": "mine", "securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}]},
            "spec.containers[0].securityContext.capabilities",
        ),
        (
            {"initContainers": [{"name": "i", "securityContext": {"runAsUser": 0}}]},
            "spec.initContainers[0].securityContext.runAsUser",
        ),
    ],
)
def test_what_isolation_rests_on_is_refused_by_name(spec: dict[str, Any], field: str) -> None:
    found = refusals("spec.trainer.podTemplate", template(spec), OWN)
    assert any(sentence.startswith(f"spec.trainer.podTemplate.{field} is not allowed: ") for sentence in found), found


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"serviceAccountName": "mine"}, "spec.serviceAccountName"),
        ({"runtimeClassName": "runc"}, "spec.runtimeClassName"),
        ({"initContainers": []}, "spec.initContainers"),
        ({"dnsPolicy": "Default"}, "spec.dnsPolicy"),
        ({"containers": [{"name": "other", "image": "x"}]}, "spec.containers[0].name"),
        ({"containers": [{"name": "sandbox", "envFrom": []}]}, "spec.containers[0].envFrom"),
        ({"containers": [{"name": "sandbox", "env": [{"name": "A", "valueFrom": {}}]}]}, "spec.containers[0].env"),
        ({"volumes": [{"name": "x", "secret": {"secretName": "s3"}}]}, "spec.volumes[0].secret"),
        ({"volumes": [{"name": "x", "persistentVolumeClaim": {}}]}, "spec.volumes[0].persistentVolumeClaim"),
    ],
)
def test_sandboxes_are_closed_further(spec: dict[str, Any], field: str) -> None:
    found = refusals("spec.sandbox.podTemplate", template(spec), frozenset({"sandbox"}), sandbox=True)
    assert any(sentence.startswith(f"spec.sandbox.podTemplate.{field} is not allowed: ") for sentence in found), found


@pytest.mark.parametrize("key", ["populora.dev/run", "app.kubernetes.io/component", "kueue.x-k8s.io/queue-name"])
def test_the_controllers_labels_cannot_be_set(key: str) -> None:
    found = refusals("spec.trainer.podTemplate", template(labels={key: "x"}), OWN)
    assert found
    assert key in found[0]


def test_what_does_not_touch_isolation_is_followed() -> None:
    spec = {
        "nodeName": "gpu-1",
        "affinity": {"nodeAffinity": {}},
        "serviceAccountName": "irsa",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "securityContext": {"runAsUser": 2000, "fsGroup": 2000},
        "containers": [
            {
                "name": "trainer",
                "env": [{"name": "HOME", "value": "/work"}, {"name": "A", "valueFrom": {"fieldRef": {}}}],
                "volumeMounts": [{"name": "work", "mountPath": "/work"}],
            },
            {"name": "proxy", "image": "proxy:1"},
        ],
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "work"}}],
    }
    given = template(spec, labels={"team": "a"}, annotations={"note": "b"})
    assert refusals("x", given, OWN) == []
    run = manifest(trainer={"podTemplate": given.model_dump(mode="json", exclude_none=True)})
    made = trainer_job(_context(run), 1)["spec"]["template"]
    assert made["metadata"]["labels"]["team"] == "a"
    assert made["metadata"]["labels"]["populora.dev/run"] == "run"
    assert made["metadata"]["annotations"] == {"note": "b"}
    pod = made["spec"]
    assert pod["nodeName"] == "gpu-1"
    assert pod["serviceAccountName"] == "irsa"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsUser"] == 2000
    assert pod["securityContext"]["runAsNonRoot"] is True
    trainer, proxy = pod["containers"]
    assert {"name": "HOME", "value": "/work"} in trainer["env"]
    assert [item["name"] for item in trainer["env"]].count("HOME") == 1
    assert {"name": "work", "mountPath": "/work"} in trainer["volumeMounts"]
    assert {"name": "tmp", "mountPath": "/tmp"} in trainer["volumeMounts"]
    assert CONTAINER_SECURITY.items() <= proxy["securityContext"].items(), "a user's container is hardened as well"
    assert pod["volumes"][-1]["name"] == "work"


def test_a_podtemplate_of_a_run_is_read_with_its_refusals() -> None:
    subject = read(_live(manifest(sandbox={"podTemplate": {"spec": {"hostNetwork": True}}})))
    assert subject.run is not None
    assert len(subject.refused) == 1
    assert subject.refused[0].startswith("spec.sandbox.podTemplate.spec.hostNetwork is not allowed")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["a", "trainer", "/tmp", "tmp"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "env", "image", "securityContext", "emptyDir", "value"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
_FIELDS = [
    "containers",
    "initContainers",
    "volumes",
    "tolerations",
    "securityContext",
    "affinity",
    "nodeName",
    "hostPID",
]


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_no_podtemplate_raises_and_none_that_is_accepted_weakens_a_pod(spec: dict[str, Any]) -> None:
    given_template = template(spec)
    for sandbox, build in ((False, trainer_job), (True, sandbox_deployment)):
        own = frozenset({"sandbox"}) if sandbox else OWN
        if refusals("x", given_template, own, sandbox=sandbox):
            continue
        part = "sandbox" if sandbox else "trainer"
        run = manifest(**{part: {"podTemplate": {"spec": spec}}})
        context = _context(run)
        made = build(context) if sandbox else trainer_job(context, 1)  # type: ignore[operator]
        pod = made["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"}
        for container in (*pod["containers"], *(pod.get("initContainers") or ())):
            assert CONTAINER_SECURITY.items() <= container["securityContext"].items()
        assert not any("hostPath" in volume for volume in pod["volumes"])


def test_nothing_is_changed_without_a_podtemplate() -> None:
    pod = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": []}}
    assert merge(pod, None) == pod


def _live(run: dict[str, Any]) -> dict[str, Any]:
    return {**run, "metadata": {**run["metadata"], "uid": "u", "resourceVersion": "1", "generation": 1}}


def _context(run: dict[str, Any]) -> Context:
    subject = read(_live(run))
    assert subject.run is not None, subject.problem
    return Context(subject.run, "ns", "u")
