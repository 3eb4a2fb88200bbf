import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from populora_api import PopulationRun
from populora_api.resource import SKIP_RULES
from populora_api.rules import RULES, Rule
from populora_api.schema import child_schema, structural_schema
from populora_api.spec import Spec


def spec_of(**changes: dict) -> Spec:
    """Build a spec that may break rules."""
    value = {
        "apiVersion": "populora.dev/v1alpha1",
        "kind": "PopulationRun",
        "metadata": {"name": "x"},
        "spec": {"baseModel": {"uri": "builtin://nano"}, "storage": {"uri": "file:///x"}, **changes},
    }
    return PopulationRun.model_validate_json(json.dumps(value), context=SKIP_RULES).spec


# For each rule a spec that keeps it only just and one that breaks it.
KEPT_AND_BROKEN = {
    ("population.teachers", 0): (
        {"mode": "SingleAgent", "population": {"teachers": 1, "students": 1}},
        {"mode": "SingleAgent", "population": {"teachers": 2, "students": 1}},
    ),
    ("population.students", 0): (
        {"mode": "SingleAgent", "population": {"teachers": 1, "students": 1}},
        {"mode": "SingleAgent", "population": {"teachers": 1, "students": 2}},
    ),
    ("training.freezeTeachers", 0): (
        {"training": {"freezeTeachers": True}},
        {"mode": "SingleAgent", "training": {"freezeTeachers": True}},
    ),
    ("training.teacherLearningRate", 0): (
        {"training": {"teacherLearningRate": 0.1}},
        {"mode": "SingleAgent", "training": {"teacherLearningRate": 0.1}},
    ),
    ("training.teacherLearningRate", 1): (
        {"training": {"freezeTeachers": False, "teacherLearningRate": 0.1}},
        {"training": {"freezeTeachers": True, "teacherLearningRate": 0.1}},
    ),
    ("tasks.problemsPerMatchup", 0): (
        {"tasks": {"problemsPerMatchup": 12, "types": ["code_i", "code_o"]}, "training": {"proposalsPerPrompt": 6}},
        {"tasks": {"problemsPerMatchup": 12, "types": ["code_i", "code_o"]}, "training": {"proposalsPerPrompt": 4}},
    ),
    ("tasks.seedProblems", 0): (
        {"tasks": {"seedProblems": 255, "bufferSize": 256}},
        {"tasks": {"seedProblems": 256, "bufferSize": 256}},
    ),
    ("training.tokensPerMicroBatch", 0): (
        {"training": {"maxPromptTokens": 100, "maxResponseTokens": 28, "tokensPerMicroBatch": 128}},
        {"training": {"maxPromptTokens": 100, "maxResponseTokens": 29, "tokensPerMicroBatch": 128}},
    ),
    ("training.temperature", 0): (
        {"training": {"temperature": 0.01}},
        {"training": {"temperature": 0.009}},
    ),
    ("evolution.operators", 0): (
        {"evolution": {"operators": [{"id": "M1", "weight": 0}, {"id": "C1", "weight": 0.001}]}},
        {"evolution": {"operators": [{"id": "M1", "weight": 0}, {"id": "C1", "weight": 0}]}},
    ),
    ("evaluation.heldOut.problems", 0): (
        {"evaluation": {"heldOut": {"problems": 1}}},
        {"evaluation": {"heldOut": {"problems": 1}}, "baseModel": {"uri": "hf://a/b"}},
    ),
    ("storage.endpoint", 0): (
        {"storage": {"uri": "s3://bucket", "endpoint": "http://h:9000"}},
        {"storage": {"uri": "file:///x", "endpoint": "http://h:9000"}},
    ),
    ("storage.region", 0): (
        {"storage": {"uri": "s3://bucket", "region": "r"}},
        {"storage": {"uri": "file:///x", "region": "r"}},
    ),
    ("storage.credentialsSecretRef", 0): (
        {"storage": {"uri": "s3://bucket", "credentialsSecretRef": {"name": "s"}}},
        {"storage": {"uri": "file:///x", "credentialsSecretRef": {"name": "s"}}},
    ),
}


def numbered() -> dict[tuple[str, int], Rule]:
    """Return the rules by blamed field, and a number where several blame one."""
    found: dict[tuple[str, int], Rule] = {}
    for rule in RULES:
        found[rule.field, sum(field == rule.field for field, _ in found)] = rule
    return found


def test_every_rule_has_a_case_here():
    assert numbered().keys() == KEPT_AND_BROKEN.keys()


@pytest.mark.parametrize("key", KEPT_AND_BROKEN, ids=lambda key: f"{key[0]}-{key[1]}")
def test_python_and_cel_agree_on_what_keeps_and_what_breaks_a_rule(key, cel):
    rule = numbered()[key]
    for changes, expected in zip(KEPT_AND_BROKEN[key], (True, False), strict=True):
        spec = spec_of(**changes)
        assert rule.holds(spec) is expected
        assert cel(rule.cel, spec.model_dump(mode="json", exclude_none=True)) is expected


optional_rate = st.none() | st.just(0.5)
small = st.integers(2, 48)


@given(
    mode=st.sampled_from(["Population", "SingleAgent"]),
    base=st.sampled_from(["builtin://nano", "hf://a/builtin", "file:///builtin://"]),
    members=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    training=st.fixed_dictionaries(
        {"freezeTeachers": st.booleans(), "proposalsPerPrompt": small},
        optional={
            "temperature": st.sampled_from([0.001, 0.01, 1, 2]),
            "teacherLearningRate": st.just(0.5),
            "tokensPerMicroBatch": st.integers(64, 100),
            "maxPromptTokens": st.integers(16, 60),
            "maxResponseTokens": st.integers(16, 60),
        },
    ),
    types=st.sets(st.sampled_from(["code_i", "code_o", "code_f"]), min_size=1),
    problems=small,
    weights=st.lists(st.sampled_from([0, 1, 0.5]), min_size=1, max_size=3),
    held_out=st.integers(0, 1),
    engine=st.sampled_from(["VLLM", "Transformers"]),
    storage=st.fixed_dictionaries(
        {"uri": st.sampled_from(["file:///s3://", "s3://bucket/file"])},
        optional={
            "endpoint": st.just("http://h"),
            "region": st.just("r"),
            "credentialsSecretRef": st.just({"name": "s"}),
        },
    ),
)
def test_python_and_cel_agree_on_any_spec(
    cel, mode, base, members, training, types, problems, weights, held_out, engine, storage
):
    spec = spec_of(
        mode=mode,
        baseModel={"uri": base},
        population={"teachers": members[0], "students": members[1]},
        training=training,
        tasks={"types": sorted(types), "problemsPerMatchup": problems},
        evolution={"operators": [{"id": f"M{i + 1}", "weight": weight} for i, weight in enumerate(weights)]},
        evaluation={"heldOut": {"problems": held_out}},
        inference={"engine": engine},
        storage=storage,
    )
    plain = spec.model_dump(mode="json", exclude_none=True)
    for rule in RULES:
        assert cel(rule.cel, plain) == rule.holds(spec), rule.cel


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.cel)
def test_a_rule_reads_fields_that_exist_and_blames_one_of_them(rule):
    assert rule.field in rule.reads
    for path in rule.reads:
        node = child_schema(structural_schema(), "spec")
        for part in path.split("."):
            assert node is not None
            node = child_schema(node, part)
        assert node is not None, path


def test_a_run_built_in_python_keeps_the_rules_too():
    spec = spec_of(mode="SingleAgent")
    with pytest.raises(ValidationError, match=r"spec\.population\.teachers: 1 where mode is SingleAgent"):
        PopulationRun.model_validate({"metadata": {"name": "x"}, "spec": spec.model_dump()})
