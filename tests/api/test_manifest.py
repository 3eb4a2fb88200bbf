import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from populora_api import (
    ManifestError,
    PopulationRun,
    Services,
    changes,
    cluster_only_fields,
    identity,
    load_manifest,
    local_refusals,
    parse_manifest,
    resolved,
    resolved_yaml,
)
from populora_api.documents import read_documents
from populora_api.resource import SKIP_RULES
from populora_api.schema import structural_schema

MANIFESTS = sorted((Path(__file__).parents[2] / "manifests").glob("*.yaml"))


def from_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Draw values that a structural schema allows."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return st.just({"nodeName": "y", "nested": {"1e3": [1, 0.5, None, True, "1e3"]}})
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from([1, "500m", "8Gi", "1e3"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(schema["minimum"], schema["maximum"])
    if kind == "number":
        return st.floats(
            schema.get("minimum", -1e6),
            schema.get("maximum", 1e6),
            exclude_min=schema.get("exclusiveMinimum", False),
            exclude_max=schema.get("exclusiveMaximum", False),
            allow_subnormal=False,
        )
    if kind == "string":
        if rules := schema.get("x-kubernetes-validations"):
            pattern = re.search(r"matches\('\^(.*)\$'\)", rules[0]["rule"])
            assert pattern is not None
            text = st.from_regex(re.compile(pattern[1].replace("\\\\", "\\"), re.ASCII), fullmatch=True)
            return text.filter(lambda value: len(value) <= schema["maxLength"])
        if schema.get("format") == "date-time":
            return st.just("2026-01-31T12:00:00Z")
        return st.sampled_from(["1e3", "y", "null", "008", "é: 1", "x"])
    if kind == "array":
        unique = schema.get("x-kubernetes-list-map-keys", [None])[0]
        key = (lambda item: item[unique]) if unique else (lambda item: json.dumps(item))
        return st.lists(
            from_schema(schema["items"]),
            min_size=schema.get("minItems", 0),
            max_size=min(schema["maxItems"], 3),
            unique_by=key,
        )
    if "additionalProperties" in schema:
        return st.dictionaries(
            st.sampled_from(["a", "b.c/d", "1e3", "y"]), from_schema(schema["additionalProperties"]), max_size=2
        )
    required = schema.get("required", [])
    fields = {field: from_schema(child) for field, child in schema["properties"].items()}
    return st.fixed_dictionaries(
        {field: strategy for field, strategy in fields.items() if field in required},
        optional={field: strategy for field, strategy in fields.items() if field not in required},
    )


def without_rules(text: str) -> PopulationRun:
    """Read resolved YAML back without the rules over several fields, which random values break."""
    (document,), problems = read_documents(text.encode(), "f")
    assert problems == []
    assert document.problems == []
    return PopulationRun.model_validate_json(
        json.dumps(document.value), context=SKIP_RULES, by_alias=True, by_name=False
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    spec=from_schema(structural_schema()["properties"]["spec"]),
    status=from_schema(structural_schema()["properties"]["status"]),
)
def test_any_run_survives_being_resolved_written_and_read(spec, status):
    value = {
        "apiVersion": "populora.dev/v1alpha1",
        "kind": "PopulationRun",
        "metadata": {"name": "x"},
        "spec": spec,
        "status": status,
    }
    run = PopulationRun.model_validate_json(json.dumps(value), context=SKIP_RULES, by_alias=True, by_name=False)
    again = without_rules(resolved_yaml(run))
    assert again.spec == run.spec
    assert again.metadata == run.metadata
    assert resolved_yaml(again) == resolved_yaml(run)
    # Written out, it has every default: nothing is left to whoever reads it.
    assert again.spec.training.model_fields_set >= set(type(run.spec.training).model_fields) - {"teacher_learning_rate"}
    assert run.model_validate_json(run.model_dump_json(), context=SKIP_RULES).status == run.status


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_resolved_manifest_loads_to_the_same_run(path, write):
    run = load_manifest(path)
    again = load_manifest(write(resolved_yaml(run)))
    assert resolved(again) == resolved(run)
    assert changes(run, again) == []


def test_a_value_written_out_or_spelled_another_way_resolves_to_the_same_text(manifest, write):
    short = load_manifest(write(manifest))
    long = load_manifest(write(manifest), ["adapter.alpha=64.0", "training.learningRate=0.00005", "training.steps=2e2"])
    assert resolved_yaml(long) == resolved_yaml(short)
    assert type(short.spec.adapter.alpha) is type(long.spec.adapter.alpha) is float


def test_a_stored_text_is_parsed_as_a_file_is(manifest, write):
    run = load_manifest(write(manifest))
    assert parse_manifest(resolved_yaml(run).encode(), "run.yaml") == load_manifest(write(resolved_yaml(run)))
    with pytest.raises(ManifestError, match=r"^run.yaml: there is no YAML in it: a PopulationRun is needed$"):
        parse_manifest(b"", "run.yaml")


def test_yaml_values_keep_their_types(manifest, write):
    manifest["spec"]["trainer"] = {"nodeSelector": {"pool": "1e3", "spot": "y"}}
    run = load_manifest(write(manifest))
    assert load_manifest(write(resolved_yaml(run))).spec.trainer.node_selector == {"pool": "1e3", "spot": "y"}


def test_a_run_cannot_be_changed_in_place(manifest, write):
    run = load_manifest(write(manifest))
    with pytest.raises(ValidationError, match="frozen"):
        run.spec.suspend = True


def test_output_takes_the_place_of_a_missing_or_a_local_storage(manifest, write, tmp_path):
    folder = tmp_path / "a run"
    assert load_manifest(write(manifest), output=folder).spec.storage.folder == folder
    del manifest["spec"]["storage"]
    assert load_manifest(write(manifest), output=folder).spec.storage.folder == folder
    assert (
        load_manifest(write(manifest), ["training.steps=2"], output="runs/x").spec.storage.folder
        == Path.cwd() / "runs/x"
    )
    with pytest.raises(ManifestError, match=r"spec\.storage: missing"):
        load_manifest(write(manifest))


def test_an_override_of_the_storage_goes_before_output(manifest, write, tmp_path):
    path = write(manifest)
    for override in ("storage.uri=file:///elsewhere/my run", "storage={uri: 'file:///elsewhere/my%20run'}"):
        assert load_manifest(path, [override], output=tmp_path).spec.storage.folder == Path("/elsewhere/my run")


def test_a_folder_whose_name_is_too_long_is_blamed_on_output(manifest, write, tmp_path):
    with pytest.raises(ManifestError, match=r"^--output: spec\.storage\.uri: .*at most 512 characters"):
        load_manifest(write(manifest), output=tmp_path.joinpath(*["x" * 200] * 3))


def test_output_leaves_s3_as_it_is(manifest, write, tmp_path):
    manifest["spec"]["storage"] = {"uri": "s3://bucket/run"}
    run = load_manifest(write(manifest), output=tmp_path)
    assert run.spec.storage.folder is None
    assert run.spec.storage.uri == "s3://bucket/run"
    assert local_refusals(run) == []


def test_identity_is_what_cannot_change():
    run = load_manifest(MANIFESTS[-1])
    assert list(identity(run)) == ["mode", "baseModel", "population", "adapter", "storage"]
    assert identity(run)["adapter"]["rank"] == 32


def test_changes_of_a_stored_run_are_named_with_both_values(manifest, write):
    stored = load_manifest(write(manifest))
    now = load_manifest(
        write(manifest),
        [
            "population.seed=1",
            "training.steps=300",
            "adapter.targetModules=[q_proj]",
            "training.teacherLearningRate=0.5",
        ],
    )
    assert [str(change) for change in changes(stored, now)] == [
        "spec.population.seed is immutable: the run has 0, the manifest says 1",
        'spec.adapter.targetModules is immutable: the run has ["q_proj", "k_proj", "v_proj", "o_proj"], '
        'the manifest says ["q_proj"]',
        "spec.training.steps: 200 -> 300",
        "spec.training.teacherLearningRate: no value -> 0.5",
    ]
    assert [change.immutable for change in changes(stored, now)] == [True, True, False, False]


def test_a_local_run_may_be_moved(manifest, write, tmp_path):
    here, there = (load_manifest(write(manifest), output=tmp_path / name) for name in ("a", "b"))
    assert changes(here, there, local=True) == []
    (change,) = changes(here, there)
    assert change.field == "spec.storage.uri"
    assert change.immutable


def test_what_only_a_cluster_can_do_is_refused_locally(manifest, write):
    assert local_refusals(load_manifest(write(manifest))) == []
    manifest["spec"] |= {
        "baseModel": {"uri": "s3://bucket/base"},
        "inference": {},
        "evaluation": {"suites": ["mbpp_plus"]},
        "sandbox": {"runtimeClassName": "gvisor"},
        "suspend": True,
        "storage": {"uri": "s3://bucket/run"},
    }
    problems = local_refusals(load_manifest(write(manifest)))
    assert [problem.field for problem in problems] == [
        "spec.inference.engine",
        "spec.baseModel.uri",
        "spec.evaluation.suites",
        "spec.sandbox.runtimeClassName",
        "spec.suspend",
    ]
    assert all("allowed here" in problem.message for problem in problems)


def test_vllm_is_refused_only_where_no_address_of_it_is_given(manifest, write):
    manifest["spec"] |= {"inference": {"engine": "VLLM"}}
    run = load_manifest(write(manifest))
    (problem,) = local_refusals(run)
    assert problem.field == "spec.inference.engine"
    assert "`populora run --serving http://HOST:PORT` or POPULORA_SERVING_HOST" in problem.message
    assert local_refusals(run, Services(serving="vllm")) == []


def test_the_isolation_of_a_sandbox_service_is_its_own_affair(manifest, write):
    manifest["spec"] |= {"sandbox": {"runtimeClassName": "gvisor"}}
    run = load_manifest(write(manifest))
    assert local_refusals(run, Services(sandbox_url="http://sandbox:8080")) == []


def test_benchmarks_are_refused_before_a_step_is_paid_for(manifest, write):
    manifest["spec"] |= {"evaluation": {"suites": ["mbpp_plus"]}}
    services = Services(sandbox_url="http://sandbox:8080", controlled=True)
    (problem,) = local_refusals(load_manifest(write(manifest)), services)
    assert problem.field == "spec.evaluation.suites"


def test_fields_without_effect_here_are_listed_if_the_manifest_gives_them(manifest, write):
    assert cluster_only_fields(load_manifest(write(manifest))) == []
    manifest["spec"] |= {
        "trainer": {"nodeSelector": {"disk.type": "ssd"}},
        "sandbox": {"replicas": 2, "memoryMiB": 64},
        "retries": 3,
        "monitoring": {"podMonitor": True},
    }
    assert cluster_only_fields(load_manifest(write(manifest))) == [
        "spec.trainer",
        "spec.sandbox.replicas",
        "spec.retries",
        "spec.monitoring",
    ]


@pytest.mark.parametrize("path", [path for path in MANIFESTS if "s3://" not in path.read_text()], ids=lambda p: p.stem)
def test_small_manifests_run_locally_as_they_are(path, tmp_path):
    assert local_refusals(load_manifest(path, output=tmp_path)) == []


def test_paper_manifests_differ_from_each_other_in_nothing_but_the_population():
    paper, one, eight = (
        load_manifest(path) for path in MANIFESTS if path.stem in ("paper-1x1", "paper-4x4", "paper-8x8")
    )
    expected = {"spec.population.teachers", "spec.population.students", "spec.storage.uri"}
    assert {change.field for change in changes(one, eight)} == expected
    assert {change.field for change in changes(paper, one)} == {*expected, "spec.evolution.everySteps"}


def test_the_papers_single_agent_differs_from_its_population_in_nothing_but_being_alone():
    population, single = (load_manifest(path) for path in MANIFESTS if path.stem in ("paper-4x4", "paper-single-agent"))
    assert {change.field for change in changes(population, single)} == {
        *("spec.mode", "spec.population.teachers", "spec.population.students", "spec.storage.uri"),
        # An adapter of the population has one role, so that Member and Role are the same for it.
        "spec.training.whitening",
        "spec.evolution.everySteps",
    }
    assert population.spec.rewards == single.spec.rewards


def test_reading_a_manifest_imports_no_heavy_library(write, manifest):
    import subprocess

    code = (
        "import sys, populora_api; populora_api.load_manifest(sys.argv[1]);"
        "print([name for name in ('torch', 'numpy', 'kopf', 'populora_trainer') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(write(manifest))], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_name_with_every_allowed_form_of_uri_is_taken(manifest, write):
    for uri in (
        "hf://Qwen/Qwen2.5-Coder-7B",
        "hf://Qwen/Qwen2.5-Coder-7B@v1.0/x",
        "s3://my.bucket-1/models/qwen",
        "s3://bucket",
        "file:///models/qwen 2.5".replace(" ", "%20"),
        "builtin://nano-raw",
    ):
        manifest["spec"]["baseModel"]["uri"] = uri
        assert load_manifest(write(manifest)).spec.base_model.uri == uri
    assert yaml.safe_load(resolved_yaml(load_manifest(write(manifest))))["kind"] == "PopulationRun"


def test_a_manifest_is_read_from_a_pipe_once(manifest, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(yaml.safe_dump(manifest).encode())))
    assert load_manifest("-").metadata.name == "minimal"
    with pytest.raises(ManifestError, match=r"^<stdin>: there is no YAML in it"):
        load_manifest("-")
