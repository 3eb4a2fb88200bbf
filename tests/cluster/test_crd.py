"""The definition of PopulationRun on a real API server: defaults, refusals, immutability, columns, every edit."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_manifests import BAD, MISSING, edited
from client import Api, ApiError, Object, conditions, eventually, path_of
from population_run import read_manifest

from populora_api import custom_resource_definition, load_manifest, resolved
from populora_api.rules import IMMUTABLE, IMMUTABLE_ALLOWED, RULES
from populora_api.schema import structural_schema

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "manifests").glob("*.yaml"))

NAME = "populationruns.populora.dev"


def dry_run(api: Api, namespace: str, manifest: Object) -> Object:
    """Let the server judge a manifest strictly without keeping it."""
    path = path_of("PopulationRun", namespace)
    return api.request("POST", path, manifest, dryRun="All", fieldValidation="Strict")


@pytest.fixture(scope="module")
def shared(api: Api) -> Iterator[str]:
    """A namespace of the tests here that keep nothing in it."""
    name = "crd-tests"
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    yield name
    api.delete("Namespace", name)


@pytest.fixture
def definition_file(tmp_path: Path) -> Path:
    """What `populora crd` prints."""
    done = subprocess.run([Path(sys.executable).parent / "populora", "crd"], capture_output=True, text=True, check=True)
    path = tmp_path / "crd.yaml"
    path.write_text(done.stdout)
    return path


def established(api: Api) -> Object:
    """Wait until the server serves the definition, and return it."""
    return eventually(
        lambda: (
            found
            if (found := api.find("CustomResourceDefinition", NAME))
            and conditions(found).get("Established", {}).get("status") == "True"
            else None
        ),
        "the definition is established",
    )


def test_what_populora_crd_prints_is_taken_by_every_verb_of_kubectl(api, kubectl, definition_file):
    api.delete("CustomResourceDefinition", NAME)
    eventually(lambda: api.find("CustomResourceDefinition", NAME) is None, "the definition is gone")

    assert "created" in kubectl("apply", "-f", str(definition_file)).stdout
    definition = established(api)
    assert conditions(definition)["NamesAccepted"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions(definition)
    assert "unchanged" in kubectl("apply", "-f", str(definition_file)).stdout
    assert kubectl("diff", "-f", str(definition_file), check=False).returncode == 0

    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(definition_file))
    kubectl("replace", "-f", str(definition_file))
    assert (
        kubectl("diff", "--server-side", "--force-conflicts", "-f", str(definition_file), check=False).returncode == 0
    )
    api.install_definition()


def test_the_stored_definition_is_small_and_says_what_the_models_say(api):
    stored = established(api)
    annotations = stored["metadata"].get("annotations", {})
    assert len(annotations.get("kubectl.kubernetes.io/last-applied-configuration", "")) < 100 * 1024
    assert len(json.dumps(stored["spec"])) < 100 * 1024
    (version,) = stored["spec"]["versions"]
    (ours,) = custom_resource_definition()["spec"]["versions"]
    assert version == ours


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_server_fills_in_every_default_of_the_models(api, shared, path):
    ours = resolved(load_manifest(path))
    theirs = dry_run(api, shared, read_manifest(path.stem))
    assert theirs["spec"] == ours["spec"]
    assert "status" not in theirs


def test_the_least_manifest_gets_every_default_there_is(api, shared, manifest):
    filled = dry_run(api, shared, manifest)["spec"]
    wanted = dict(_defaults(structural_schema()["properties"]["spec"]))
    assert len(wanted) > 50
    for path, value in wanted.items():
        found = filled
        for part in path.split("."):
            found = found[part]
        assert found == value, path


def _defaults(schema: Object, path: str = "") -> Any:
    """Yield the path and the value of every field with a default that is no object."""
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        if "default" in child and child["type"] != "object":
            yield here, child["default"]
        yield from _defaults(child, here)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubectl_applies_every_shipped_manifest(api, kubectl, namespace, path):
    assert "created" in kubectl("apply", "-f", str(path)).stdout
    assert "unchanged" in kubectl("apply", "-f", str(path)).stdout
    assert api.get("PopulationRun", path.stem, namespace)["metadata"]["generation"] == 1


# Refusals


# How the server says what is allowed, where no rule of ours says it.
SAID = re.compile(
    r"supported values: |must be of type |should be (greater|less) than |should have at (least|most) |"
    r"Required value|name or generateName is required|Duplicate value|Too long: may not be more than |unknown field"
)


def _rules(schema: Object) -> Iterator[str]:
    """Yield the messages of all rules of a schema."""
    yield from (rule["message"] for rule in schema.get("x-kubernetes-validations", []))
    for child in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(child, dict):
            yield from _rules(child)


def says_what_is_allowed(message: str) -> bool:
    own = _rules(custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    return SAID.search(message) is not None or any(allowed in message for allowed in own)


def names_the_field(message: str, field: str) -> bool:
    """Whether a message names a field; keys of maps are in brackets, or after a point where a type is wrong."""
    dotted, *keys = re.split(r"[\[\]]+", field.rstrip("]"))
    spellings = {field, ".".join([dotted, *keys])}
    path, _, key = field.rpartition(".")
    return any(spelling in message for spelling in (*spellings, f"{path}[{key}]"))


WRONG = [row for row in BAD if row[0].startswith(("metadata.", "spec"))]


def test_the_table_is_long_and_its_other_rows_are_judged_below():
    assert len(WRONG) >= 40
    assert {row[0] for row in BAD if row not in WRONG} == {"apiVersion", "kind", "status.phase"}


@pytest.mark.parametrize(("path", "value", "field", "_"), WRONG, ids=[f"{row[0]}={row[1]!r:.30}" for row in WRONG])
def test_the_server_refuses_what_populora_validate_refuses_and_says_why(api, shared, manifest, path, value, field, _):
    with pytest.raises(ApiError) as refused:
        dry_run(api, shared, edited(manifest, path, value))
    assert refused.value.code in (400, 422), refused.value
    assert names_the_field(refused.value.message, field), refused.value.message
    assert says_what_is_allowed(refused.value.message), refused.value.message


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("apiVersion", "populora.dev/v1", 'no matches for kind "PopulationRun" in version "populora.dev/v1"'),
        ("apiVersion", MISSING, "apiVersion not set"),
        ("kind", "PopulationRuns", 'no matches for kind "PopulationRuns"'),
    ],
    ids=["another-version", "no-version", "another-kind"],
)
def test_kubectl_refuses_what_is_no_run(kubectl, manifest, path, value, said):
    refused = kubectl("apply", "-f", "-", stdin=json.dumps(edited(manifest, path, value)), check=False)
    assert refused.returncode == 1
    assert said in refused.stderr


def test_every_rule_over_several_fields_is_in_the_table():
    assert {rule.field for rule in RULES} - {row[2].removeprefix("spec.") for row in BAD} <= {
        "training.freezeTeachers",
        "training.teacherLearningRate",
        "evaluation.heldOut.problems",
    }


def test_an_unknown_field_is_reported_by_kubectl_and_pruned_where_reports_are_off(api, kubectl, namespace, manifest):
    manifest["spec"]["training"] = {"stpes": 5}
    manifest["spec"]["sandboxes"] = 3
    text = json.dumps(manifest)
    refused = kubectl("apply", "-f", "-", stdin=text, check=False)
    assert refused.returncode == 1
    assert 'unknown field "spec.sandboxes"' in refused.stderr
    assert 'unknown field "spec.training.stpes"' in refused.stderr

    warned = kubectl("apply", "--validate=warn", "-f", "-", stdin=text)
    assert 'unknown field "spec.training.stpes"' in warned.stderr
    stored = api.get("PopulationRun", "minimal", namespace)["spec"]
    assert "sandboxes" not in stored
    assert "stpes" not in stored["training"]


def test_a_pod_template_keeps_every_field_of_a_pod_spec(api, namespace, manifest):
    override = {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}], "hostAliases": [{"ip": "::1"}]}
    manifest["spec"]["trainer"] = {"podTemplate": {"spec": override}}
    api.create(manifest, namespace, strict=True)
    assert api.get("PopulationRun", "minimal", namespace)["spec"]["trainer"]["podTemplate"]["spec"] == override


def test_null_means_the_default(api, shared, manifest):
    manifest["spec"] |= {"training": {"steps": None}, "sandbox": None, "suspend": None}
    spec = dry_run(api, shared, manifest)["spec"]
    assert spec["training"]["steps"] == 200
    assert spec["sandbox"]["replicas"] == 2
    assert spec["suspend"] is False


# Changes

S3_RUN = {
    "baseModel": {"uri": "hf://Qwen/Qwen2.5-Coder-7B"},
    "storage": {
        "uri": "s3://bucket/run",
        "endpoint": "http://minio:9000",
        "region": "eu-west-1",
        "credentialsSecretRef": {"name": "s3"},
    },
}

# Every field of the identity: a value other than S3_RUN's that would be right in a new run.
FIXED: dict[str, Any] = {
    "mode": "SingleAgent",
    "baseModel.uri": "hf://Qwen/Qwen2.5-Coder-7B@v2",
    "baseModel.dtype": "float32",
    "population.teachers": 5,
    "population.students": 5,
    "population.seed": 1,
    "adapter.rank": 8,
    "adapter.alpha": 32,
    "adapter.targetModules": ["q_proj"],
    "storage.uri": "s3://bucket/other",
    "storage.endpoint": "http://minio:9001",
    "storage.region": MISSING,
    "storage.credentialsSecretRef.name": "other",
}

# Fields that may change while a run goes on.
FREE: dict[str, Any] = {
    "training.steps": 400,
    "training.learningRate": 0.0001,
    "tasks.noveltyPenalty": 0.5,
    "matchmaking.strategy": "Uniform",
    "evolution.everySteps": 5,
    "evolution.operators": [{"id": "X9"}],
    "rewards.preset": "AbsoluteZero",
    "trainer.nodes": 2,
    "trainer.image": "example/trainer:2",
    "trainer.resources": {"limits": {"memory": "64Gi"}},
    "inference.replicas": 8,
    "sandbox.replicas": 1,
    "sandbox.runtimeClassName": "gvisor",
    "evaluation.suites": ["mbpp_plus"],
    "evaluation.everySteps": 10,
    "scheduling.queueName": "gpus",
    "suspend": True,
    "activeDeadlineSeconds": 3600,
    "ttlSecondsAfterFinished": 60,
    "retries": 5,
    "deletionPolicy": "Delete",
    "monitoring.podMonitor": False,
}


@pytest.fixture(scope="module")
def stored(api: Api, shared: str) -> Object:
    """A run whose updates are tried and not kept."""
    manifest = {"apiVersion": "populora.dev/v1alpha1", "kind": "PopulationRun", "metadata": {"name": "stored"}}
    return api.create({**manifest, "spec": S3_RUN}, shared)


def update(api: Api, stored: Object, changed: Object) -> Object:
    path = path_of("PopulationRun", stored["metadata"]["namespace"], stored["metadata"]["name"])
    return api.request("PUT", path, changed, dryRun="All", fieldValidation="Strict")


def test_the_cases_of_immutability_cover_the_identity():
    spec = structural_schema()["properties"]["spec"]["properties"]
    leaves = {
        name if spec[name]["type"] != "object" else f"{name}.{field}"
        for name in IMMUTABLE
        for field in spec[name].get("properties", {"": {}})
    }
    assert {path.removesuffix(".name") for path in FIXED} == leaves


@pytest.mark.parametrize("path", FIXED)
def test_what_makes_a_run_what_it_is_cannot_change(api, stored, path):
    changed = edited(stored, f"spec.{path}", FIXED[path])
    if path == "mode":
        changed["spec"]["population"] = {"teachers": 1, "students": 1}
    with pytest.raises(ApiError) as refused:
        update(api, stored, changed)
    assert refused.value.code == 422
    assert f"spec.{path.split('.')[0]}: Invalid value" in refused.value.message
    assert IMMUTABLE_ALLOWED in refused.value.message


@pytest.mark.parametrize("path", FREE)
def test_what_is_not_its_identity_can_change(api, stored, path):
    changed = update(api, stored, edited(stored, f"spec.{path}", FREE[path]))
    assert changed["metadata"]["generation"] == 2


def test_an_unchanged_identity_is_no_change_however_it_is_spelt(api, stored):
    for path, value in {"population": MISSING, "adapter.targetModules": MISSING, "baseModel.dtype": None}.items():
        assert update(api, stored, edited(stored, f"spec.{path}", value))["metadata"]["generation"] == 1


def test_a_rule_over_several_fields_holds_for_updates_too(api, stored):
    with pytest.raises(ApiError, match=r"spec.tasks.problemsPerMatchup.*a multiple of"):
        update(api, stored, edited(stored, "spec.tasks.types", ["code_i", "code_o"]) | {})


def test_apply_server_side_apply_patch_edit_and_replace_all_change_a_run(api, kubectl, namespace, manifest, tmp_path):
    def steps() -> int:
        return api.get("PopulationRun", "minimal", namespace)["spec"]["training"]["steps"]

    def manifest_with(count: int) -> str:
        return json.dumps(edited(manifest, "spec.training", {"steps": count}))

    kubectl("apply", "-f", "-", stdin=manifest_with(10))
    assert steps() == 10
    kubectl("apply", "-f", "-", stdin=manifest_with(11))
    assert steps() == 11
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifest_with(12))
    assert steps() == 12
    kubectl("patch", "prun", "minimal", "--type=merge", "-p", '{"spec":{"training":{"steps":13}}}')
    assert steps() == 13
    kubectl("patch", "prun/minimal", "--type=json", "-p", '[{"op":"replace","path":"/spec/training/steps","value":14}]')
    assert steps() == 14
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/    steps: 14/    steps: 15/" "$1"\n')
    editor.chmod(0o755)
    assert "edited" in kubectl("edit", "prun", "minimal", environment={"KUBE_EDITOR": str(editor)}).stdout
    assert steps() == 15
    kubectl("replace", "-f", "-", stdin=manifest_with(16))
    assert steps() == 16
    refused = kubectl(
        "patch", "prun", "minimal", "--type=merge", "-p", '{"spec":{"population":{"seed":1}}}', check=False
    )
    assert refused.returncode == 1
    assert f"spec.population: Invalid value: {IMMUTABLE_ALLOWED}" in refused.stderr.replace('"object": ', "")


def test_two_people_who_apply_different_operators_share_the_list(api, namespace, manifest):
    api.create(edited(manifest, "spec.evolution", {"operators": [{"id": "M1"}]}), namespace)
    partial = {key: manifest[key] for key in ("apiVersion", "kind", "metadata")}
    weights = {**partial, "spec": {"evolution": {"operators": [{"id": "X1", "weight": 2}]}}}
    api.apply(weights, namespace, manager="somebody")
    operators = api.get("PopulationRun", "minimal", namespace)["spec"]["evolution"]["operators"]
    assert {item["id"]: item["weight"] for item in operators} == {"M1": 1, "X1": 2}


# Status


def full_status() -> Object:
    """A status with every field there is, and as many members as there may be."""
    member = {
        "role": "teacher",
        "generation": 7,
        "mu": 27.25,
        "sigma": 1.5,
        "lcb": 22.75,
        "adapterUri": "s3://bucket/run/adapters/" + "0f" * 32,
        "digest": "0f" * 32,
    }
    return {
        "phase": "Running",
        "reason": "Training",
        "step": 9999,
        "steps": 10000,
        "progressPercent": 99.99,
        "estimatedSecondsRemaining": 61,
        "attempts": 2,
        "failedNodes": [{"name": "node-7", "at": "2026-01-01T00:00:00Z"}],
        "gpus": 8,
        "activeSeconds": 86400,
        "evaluatedStep": 9990,
        "observedGeneration": 3,
        "members": [{"name": f"t{index}", **member} for index in range(128)],
        "best": {"teacher": "t3", "student": "s1"},
        "solveRate": 0.4375,
        "coverage": 0.25,
        "evaluation": [
            {"suite": "mbpp_plus", "member": f"t{index}", "step": 9990, "score": 0.625, "problems": 378}
            for index in range(64)
        ],
        "conditions": [
            {
                "type": kind,
                "status": status,
                "reason": "Because",
                "message": "A sentence for a person.",
                "observedGeneration": 3,
                "lastTransitionTime": "2026-01-31T12:00:00Z",
            }
            for kind, status in (("Progressing", "True"), ("Failed", "False"), ("AdaptersSynced", "Unknown"))
        ],
    }


def _leaves(schema: Object, path: str = "") -> Any:
    for name, child in schema.get("properties", {}).items():
        yield from _leaves(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from _leaves(schema["items"], path)
    if "properties" not in schema and "items" not in schema:
        yield path


def _named(value: Any, path: str = "") -> Any:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _named(item, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _named(item, path)
    else:
        yield path


def test_every_field_of_the_status_comes_back_as_it_was_written(api, namespace, manifest):
    status = full_status()
    assert set(_named(status)) == set(_leaves(structural_schema()["properties"]["status"]))
    api.create(manifest, namespace)
    partial = {key: manifest[key] for key in ("apiVersion", "kind", "metadata")}
    api.apply({**partial, "status": status}, namespace, manager="populora-status", subresource="status")
    stored = api.get("PopulationRun", "minimal", namespace)
    assert stored["status"] == status
    assert len(json.dumps(stored, separators=(",", ":"))) < 64 * 1024


def test_status_and_spec_are_written_apart(api, namespace, manifest):
    run = api.create(manifest | {"status": {"phase": "Running"}}, namespace)
    assert "status" not in run
    run["spec"]["training"]["steps"] = 7
    run["status"] = {"phase": "Pending", "step": 3}
    after = api.replace(run, namespace, "status")
    assert after["status"] == {"phase": "Pending", "step": 3}
    assert after["spec"]["training"]["steps"] == 200
    assert after["metadata"]["generation"] == 1
    after["spec"]["training"]["steps"] = 8
    after["status"] = {"phase": "Failed"}
    last = api.replace(after, namespace)
    assert last["status"] == {"phase": "Pending", "step": 3}
    assert last["spec"]["training"]["steps"] == 8
    assert last["metadata"]["generation"] == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("status.phase", "Done"),
        ("status.step", -1),
        ("status.solveRate", 1.5),
        (
            "status.conditions",
            [{"type": "Progressing", "status": "Perhaps", "reason": "A", "lastTransitionTime": "now"}],
        ),
        ("status.members", [{"name": "t0"}]),
        ("status.reason", "two words"),
    ],
    ids=str,
)
def test_a_status_that_means_nothing_is_refused(api, stored, path, value):
    namespace = stored["metadata"]["namespace"]
    with pytest.raises(ApiError) as refused:
        api.request(
            "PUT",
            path_of("PopulationRun", namespace, "stored", "status"),
            edited(stored, path, value),
            dryRun="All",
        )
    assert refused.value.code == 422
    assert path in refused.value.message


def test_there_is_no_scale(api, kubectl, stored):
    with pytest.raises(ApiError) as refused:
        api.request("GET", path_of("PopulationRun", stored["metadata"]["namespace"], "stored", "scale"))
    assert refused.value.code == 404
    assert kubectl("scale", "prun/stored", "--replicas=2", check=False).returncode == 1


# What people see


def test_get_shows_where_a_run_stands(api, kubectl, namespace, manifest):
    run = api.create(manifest, namespace)
    assert _table(kubectl("get", "prun").stdout)[0]["TEACHERS"] == "4"
    run["status"] = full_status()
    api.replace(run, namespace, "status")
    for what in ("prun", "populationrun", "populationruns", "populationruns.populora.dev", "populora"):
        (row,) = _table(kubectl("get", what).stdout)
        age = row.pop("AGE")
        assert age.endswith("s")
        assert row == {
            "NAME": "minimal",
            "PHASE": "Running",
            "STEP": "9999",
            "TEACHERS": "4",
            "STUDENTS": "4",
            "SOLVE-RATE": "0.4375",
            "BEST": "s1",
        }
    (wide,) = _table(kubectl("get", "prun", "-o", "wide").stdout)
    assert (wide["GPUS"], wide["ETA"], wide["REASON"]) == ("8", "61", "Training")


def test_kubectl_waits_for_a_condition(api, kubectl, namespace, manifest):
    run = api.create(manifest, namespace)
    assert kubectl("wait", "--for=condition=Completed", "prun/minimal", "--timeout=1s", check=False).returncode == 1
    done = {"type": "Completed", "status": "True", "reason": "StepsDone", "lastTransitionTime": "2026-01-31T12:00:00Z"}
    run["status"] = {"conditions": [done]}
    api.replace(run, namespace, "status")
    assert "condition met" in kubectl("wait", "--for=condition=Completed", "prun/minimal", "--timeout=20s").stdout


def _table(text: str) -> list[dict[str, str]]:
    """Read a table by the places of its headings: values may be empty."""
    header, *rows = text.splitlines()
    names = header.split()
    starts = [header.index(name) for name in names]
    ends = [*starts[1:], None]
    return [
        {name: row[start:end].strip() for name, start, end in zip(names, starts, ends, strict=True)} for row in rows
    ]


def test_explain_reads_well(kubectl):
    text = kubectl("explain", "prun.spec.evolution").stdout
    said = " ".join(text.split())
    for field, schema in structural_schema()["properties"]["spec"]["properties"]["evolution"]["properties"].items():
        assert field in text
        assert schema["description"] in said
    assert "GROUP: populora.dev" in said
    assert "Replacement of the weakest members by children bred in weight space." in said
    assert "<no description>" not in text


def test_explain_describes_every_field_at_every_depth(kubectl):
    text = kubectl("explain", "prun", "--recursive").stdout
    for path, _ in _defaults(structural_schema()["properties"]["spec"]):
        assert path.split(".")[-1] in text
    for name in ("spec", "status", "spec.training", "spec.storage", "spec.trainer.podTemplate", "status.conditions"):
        assert "<no description>" not in kubectl("explain", f"prun.{name}").stdout
