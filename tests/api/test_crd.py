import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from populora_api import check_file, custom_resource_definition, load_manifest, resolved
from populora_api.documents import write_yaml
from populora_api.rules import IMMUTABLE, RULES

MANIFESTS = sorted((Path(__file__).parents[2] / "manifests").glob("*.yaml"))

# https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
FORBIDDEN = {
    "$ref",
    "additionalItems",
    "allOf",
    "anyOf",
    "const",
    "definitions",
    "dependencies",
    "deprecated",
    "discriminator",
    "id",
    "not",
    "nullable",
    "oneOf",
    "patternProperties",
    "prefixItems",
    "propertyNames",
    "readOnly",
    "title",
    "uniqueItems",
    "writeOnly",
    "xml",
}


@pytest.fixture(scope="module")
def definition() -> Any:
    return custom_resource_definition()


@pytest.fixture(scope="module")
def version(definition: Any) -> Any:
    (version,) = definition["spec"]["versions"]
    return version


@pytest.fixture(scope="module")
def schema(version: Any) -> Any:
    return version["schema"]["openAPIV3Schema"]


def nodes(schema: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


def test_the_names_are_those_that_users_type(definition):
    assert definition["metadata"]["name"] == "populationruns.populora.dev"
    assert definition["spec"]["names"]["shortNames"] == ["prun"]
    assert definition["spec"]["names"]["categories"] == ["populora"]
    assert definition["spec"]["scope"] == "Namespaced"


def test_status_is_a_subresource_and_scale_is_not(version):
    assert version["subresources"] == {"status": {}}
    assert version["served"]
    assert version["storage"]


def test_every_node_has_one_type_and_nothing_that_a_structural_schema_forbids(schema):
    for path, node in nodes(schema):
        assert not FORBIDDEN & node.keys(), path
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
        else:
            assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}, path
        if node.get("type") == "array":
            assert "items" in node, path
        if node.get("type") == "object" and path != "metadata":
            kinds = [
                "properties" in node,
                "additionalProperties" in node,
                node.get("x-kubernetes-preserve-unknown-fields") is True,
            ]
            assert sum(kinds) == 1, path
        for bound in ("exclusiveMinimum", "exclusiveMaximum"):
            assert node.get(bound, True) is True, path


def test_everything_is_bounded_so_that_cel_stays_in_its_budget(schema):
    for path, node in nodes(schema):
        if path in ("apiVersion", "kind", "metadata"):
            continue
        if node.get("type") == "string" and "enum" not in node and node.get("format") != "date-time":
            assert node["maxLength"] <= 4096, path
        if node.get("type") == "array":
            assert node["maxItems"] <= 128, path
        if "additionalProperties" in node:
            assert node["maxProperties"] <= 64, path
        if node.get("type") == "integer" and "enum" not in node:
            assert node["minimum"] <= node["maximum"], path


def test_no_bound_is_a_fraction_because_the_server_rounds_it_down_when_it_meets_an_integer(schema):
    # Seen with apiextensions-apiserver 0.36.3: `minimum: 0.1` accepts the integer 0.
    for path, node in nodes(schema):
        for bound in ("minimum", "maximum"):
            assert isinstance(node.get(bound, 0), int), path


def test_every_field_is_described(schema):
    for path, node in nodes(schema):
        if path and path != "metadata" and not path.endswith(("[]", "{}")):
            assert len(node["description"]) >= 10, path
            assert node["description"].endswith("."), path
            assert "\n" not in node["description"], path


def test_every_default_and_example_is_valid_by_its_own_schema(schema):
    for path, node in nodes(schema):
        for name in ("default", "example"):
            if name in node:
                jsonschema.Draft4Validator(node).validate(node[name]), path


def test_required_fields_have_no_default_and_objects_with_a_default_require_nothing(schema):
    for path, node in nodes(schema):
        for name in node.get("required", []):
            assert "default" not in node["properties"][name], path
        if node.get("default") == {}:
            assert "required" not in node, path


def test_lists_of_named_things_merge_by_name(schema):
    keys = {path: node.get("x-kubernetes-list-map-keys") for path, node in nodes(schema) if node.get("type") == "array"}
    assert keys["spec.evolution.operators"] == ["id"]
    assert keys["status.members"] == ["name"]
    assert keys["status.conditions"] == ["type"]
    for path, node in nodes(schema):
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path


def test_the_paths_of_printer_columns_and_rules_exist(version, schema):
    known = {path for path, _ in nodes(schema)}
    columns = version["additionalPrinterColumns"]
    assert [column["name"] for column in columns if "priority" not in column] == [
        "Phase",
        "Step",
        "Teachers",
        "Students",
        "Solve-Rate",
        "Best",
        "Age",
    ]
    assert [column["name"] for column in columns if column.get("priority") == 1] == ["GPUs", "ETA", "Reason"]
    for column in columns:
        assert column["jsonPath"][1:] in known | {"metadata.creationTimestamp"}
    for path, node in nodes(schema):
        for rule in node.get("x-kubernetes-validations", []):
            assert rule["message"]
            if "fieldPath" in rule:
                assert (path + rule["fieldPath"]).removeprefix(".") in known


def test_every_rule_of_the_models_is_in_the_crd(schema):
    said = {(rule["rule"], rule["message"]) for rule in schema["properties"]["spec"]["x-kubernetes-validations"]}
    assert said == {(rule.cel, rule.allowed) for rule in RULES}


def test_identity_cannot_change_on_the_server(schema):
    spec = schema["properties"]["spec"]["properties"]
    guarded = {
        name
        for name, node in spec.items()
        if any(rule["rule"] == "self == oldSelf" for rule in node.get("x-kubernetes-validations", []))
    }
    assert guarded == set(IMMUTABLE) == {"mode", "baseModel", "population", "adapter", "storage"}


def test_kubectl_can_apply_it_on_the_client_side(definition):
    assert len(json.dumps(definition)) < 100 * 1024


def test_the_yaml_form_says_the_same(definition):
    assert yaml.safe_load(write_yaml(definition)) == definition


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_the_server_fills_in_the_defaults_that_the_engine_uses(path, server):
    filled, refused = server.admit(yaml.safe_load(path.read_text().replace("1e-3", "0.001").replace("5e-5", "0.00005")))
    assert refused == []
    assert filled == resolved(load_manifest(path))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_each_shipped_manifest_is_valid_and_named_as_its_file(path):
    runs, problems = check_file(path)
    assert problems == []
    assert [run.metadata.name for run in runs] == [path.stem]


def test_the_defaults_are_the_papers(manifest, write):
    spec = load_manifest(write(manifest)).spec
    assert (spec.mode, spec.population.teachers, spec.population.students) == ("Population", 4, 4)
    assert (spec.adapter.rank, spec.adapter.alpha) == (32, 64)
    assert spec.adapter.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert (spec.tasks.problems_per_matchup, spec.tasks.novelty_penalty) == (72, 0)
    assert (spec.training.steps, spec.training.learning_rate, spec.training.temperature) == (200, 5e-5, 1)
    assert (spec.training.rollouts_per_problem, spec.training.proposals_per_prompt) == (8, 8)
    assert (spec.training.max_prompt_tokens, spec.training.max_response_tokens) == (4096, 4096)
    assert (spec.training.kl_coefficient, spec.training.whitening) == (0, "Member")
    assert (spec.matchmaking.strategy, spec.matchmaking.weighting, spec.matchmaking.games_per) == (
        "PFSP",
        "Variance",
        "TaskType",
    )
    assert (spec.evolution.every_steps, spec.evolution.replace_fraction) == (10, 0.25)
    assert [operator.id for operator in spec.evolution.operators] == ["M1", "M2", "M3", "M4", "X1", "X2", "X3", "X4"]
    assert (spec.rewards.preset, spec.deletion_policy, spec.retries) == ("PopuLoRA", "Retain", 3)
    assert (spec.trainer.nodes, spec.trainer.gpus_per_node) == (1, 4)
    assert (spec.inference.replicas, spec.inference.gpus_per_replica) == (4, 1)
    assert (spec.sandbox.replicas, spec.sandbox.timeout_seconds, spec.sandbox.memory_mib) == (2, 10, 512)


def test_the_minimal_manifest_is_short():
    path = next(path for path in MANIFESTS if path.stem == "minimal")
    assert len(path.read_text().splitlines()) <= 15
