"""What is said of the wrong manifests of `bad_manifests.py`, and of several problems in one file."""

from pathlib import Path

import pytest
import yaml
from bad_manifests import BAD, edited

from populora_api import ManifestError, check_file, load_manifest


@pytest.mark.parametrize(("path", "value", "field", "fragment"), BAD, ids=[f"{row[0]}={row[1]!r:.30}" for row in BAD])
def test_a_wrong_manifest_is_refused_naming_the_field_and_what_is_allowed(
    manifest, write, path, value, field, fragment
):
    file = write(edited(manifest, path, value))
    runs, problems = check_file(file)
    assert runs == []
    said = [problem.message for problem in problems if problem.field == field]
    assert any(fragment in message for message in said), [str(problem) for problem in problems]
    with pytest.raises(ManifestError) as raised:
        load_manifest(file)
    assert raised.value.exit_code == 42
    assert raised.value.problems == tuple(problems)
    assert str(raised.value) == "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("path", "value"),
    [row[:2] for row in BAD if row[0] not in ("apiVersion", "kind", "metadata.name")],
    ids=[f"{row[0]}={row[1]!r:.30}" for row in BAD if row[0] not in ("apiVersion", "kind", "metadata.name")],
)
def test_the_crd_refuses_the_same_manifests(manifest, server, path, value):
    _, refused = server.admit(edited(manifest, path, value))
    assert refused


def test_the_crd_refuses_the_same_names(manifest, server):
    for name, good in {
        "Nano": False,
        "nano-": False,
        "4x4": False,
        "n" * 41: False,
        "a-1": True,
        "n" * 40: True,
    }.items():
        assert (server.admit(edited(manifest, "metadata.name", name))[1] == []) == good, name


def test_every_problem_of_a_manifest_is_listed_and_rules_over_several_fields_too(manifest, write):
    manifest["spec"] |= {
        "trainig": {},
        "population": {"teachers": "4", "students": 4},
        "mode": "SingleAgent",
        "storage": {"uri": "file:///data", "region": "eu-west-1"},
        "evolution": {"operators": [{"id": "M9"}, {"id": "M1", "wieght": 2}]},
    }
    _, problems = check_file(write(manifest))
    assert {problem.field for problem in problems} == {
        "spec.trainig",
        "spec.population.teachers",  # of the wrong type, so the rule about its value in mode SingleAgent says nothing
        "spec.population.students",
        "spec.storage.region",
        "spec.evolution.operators[0].id",
        "spec.evolution.operators[1].wieght",
    }
    lines = [int(problem.source.rsplit(":", 1)[1]) for problem in problems]
    assert lines == sorted(lines)


def test_the_line_of_each_problem_is_where_the_field_stands(write):
    text = """\
# a comment
apiVersion: populora.dev/v1alpha1
kind: PopulationRun
metadata:
  name: run

spec:
  baseModel: { uri: "builtin://nano",
    dtype: fp8 }
  training:
    learningRate:
      fast
    stpes: 3
  evolution:
    operators:
      - id: M1
      - weight: 2
      - id: M2
        weight: lots
"""
    path = write(text)
    _, problems = check_file(path)
    assert {problem.field: problem.source for problem in problems} == {
        "spec.storage": f"{path}:7",
        "spec.baseModel.dtype": f"{path}:9",
        "spec.training.learningRate": f"{path}:11",
        "spec.training.stpes": f"{path}:13",
        "spec.evolution.operators[1].id": f"{path}:17",
        "spec.evolution.operators[2].weight": f"{path}:19",
    }
    dtype = next(problem for problem in problems if problem.field == "spec.baseModel.dtype")
    assert str(dtype) == f'{path}:9: spec.baseModel.dtype: "fp8" is not allowed: one of bfloat16, float32'


def test_fields_are_named_as_yaml_spells_them_and_never_as_python_does(manifest, write):
    manifest["spec"]["base_model"] = manifest["spec"].pop("baseModel")
    _, problems = check_file(write(manifest))
    assert {problem.field for problem in problems} == {"spec.base_model", "spec.baseModel"}


def test_a_long_value_is_shortened_in_the_message(manifest, write):
    manifest["spec"]["mode"] = "x" * 5000
    _, (problem,) = check_file(write(manifest))
    assert len(problem.message) < 200


def test_a_null_counts_as_absent_as_on_the_server(manifest, write, server):
    manifest["spec"]["training"] = {"steps": None, "teacherLearningRate": None}
    manifest["spec"]["sandbox"] = None
    assert load_manifest(write(manifest)).spec.training.steps == 200
    filled, refused = server.admit(manifest)
    assert refused == []
    assert filled["spec"]["training"]["steps"] == 200
    manifest["spec"]["storage"] = None
    _, (problem,) = check_file(write(manifest))
    assert problem.message.startswith("missing")


def test_what_a_cluster_adds_to_metadata_is_no_problem(manifest, write):
    manifest["metadata"] |= {
        "uid": "0b7c",
        "resourceVersion": "12",
        "generation": 3,
        "creationTimestamp": "2026-01-31T12:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
        "labels": {"team": "a"},
    }
    run = load_manifest(write(manifest))
    assert run.metadata.labels == {"team": "a"}


def test_an_unreadable_file_is_one_problem_and_no_traceback(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    (tmp_path / "nul.yaml").write_bytes(b"kind: a\nname: \x00")
    (tmp_path / "empty.yaml").write_bytes(b"")
    (tmp_path / "comment.yaml").write_bytes(b"# nothing\n---\n# here\n")
    (tmp_path / "deep.yaml").write_text("[" * 3000)
    (tmp_path / "large.yaml").write_text("# " + "x" * 300_000)
    (tmp_path / "text.yaml").write_text("hello")
    for name in ("binary", "nul", "empty", "comment", "deep", "large", "text", "absent"):
        path = tmp_path / f"{name}.yaml"
        _, problems = check_file(path)
        assert len(problems) == 1, name
        assert problems[0].source.startswith(str(path))
        with pytest.raises(ManifestError):
            load_manifest(path)
    assert check_file(tmp_path)[1][0].message == "cannot be read: Is a directory"
    assert check_file(Path("\0"))[1][0].message.startswith("cannot be read")


def test_several_documents_are_checked_but_only_one_can_be_run(manifest, write):
    two = yaml.safe_dump(manifest) + "---\n" + yaml.safe_dump(edited(manifest, "metadata.name", "other"))
    runs, problems = check_file(write(two))
    assert [run.metadata.name for run in runs] == ["minimal", "other"]
    assert problems == []
    with pytest.raises(ManifestError, match="2 YAML documents are not allowed: one PopulationRun"):
        load_manifest(write(two))


def test_a_document_of_another_kind_is_named_and_the_rest_is_still_checked(manifest, write):
    path = write("kind: Service\napiVersion: v1\n---\n" + yaml.safe_dump(manifest))
    runs, problems = check_file(path)
    assert [run.metadata.name for run in runs] == ["minimal"]
    assert [str(problem) for problem in problems] == [f'{path}:1: kind: "Service" is not allowed: PopulationRun']
