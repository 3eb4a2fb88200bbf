import json
import re

import pytest
import yaml
from click.testing import CliRunner

from populora_api import custom_resource_definition
from populora_trainer.commands.crd import command as crd
from populora_trainer.commands.validate import command as validate


@pytest.fixture
def run():
    return CliRunner().invoke


def test_crd_prints_the_definition_as_yaml_or_json(run):
    as_yaml, as_json = run(crd), run(crd, ["--json"])
    assert as_yaml.exit_code == as_json.exit_code == 0
    assert yaml.safe_load(as_yaml.output) == json.loads(as_json.output) == custom_resource_definition()


def test_validate_says_which_files_are_valid(run, manifest, write):
    path = write(manifest)
    result = run(validate, [str(path)])
    assert (result.exit_code, result.output) == (0, f"{path}: valid: minimal\n")


def test_validate_prints_one_line_a_problem_of_every_file_and_exits_with_42(run, manifest, write):
    good = write(manifest, "good.yaml")
    manifest["spec"] |= {"retries": -1, "suspend": "no"}
    bad = write(manifest, "bad.yaml")
    result = run(validate, [str(bad), str(good), "/nowhere.yaml"])
    assert result.exit_code == 42
    lines = result.output.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"{bad}:")
    assert lines[0].endswith(": spec.retries: -1 is not allowed: an integer from 0 to 1000")
    assert lines[2:] == [f"{good}: valid: minimal", "/nowhere.yaml: cannot be read: No such file or directory"]


def test_validate_lists_problems_as_json(run, manifest, write):
    good = run(validate, ["--json", str(write(manifest))])
    assert (good.exit_code, json.loads(good.output)) == (0, [])
    manifest["spec"]["retries"] = -1
    bad = run(validate, ["--json", str(write(manifest))])
    assert bad.exit_code == 42
    (problem,) = json.loads(bad.output)
    assert problem["field"] == "spec.retries"
    assert problem["message"] == "-1 is not allowed: an integer from 0 to 1000"


def test_validate_reads_standard_input(run, manifest):
    good = run(validate, ["-"], input=yaml.safe_dump(manifest))
    assert (good.exit_code, good.output) == (0, "<stdin>: valid: minimal\n")
    manifest["spec"]["retries"] = -1
    bad = run(validate, ["-"], input=yaml.safe_dump(manifest))
    assert bad.exit_code == 42
    assert re.match(r"<stdin>:\d+: spec\.retries: -1 is not allowed", bad.output)
    assert run(validate, ["-"], input="").output.startswith("<stdin>: there is no YAML in it")


def test_validate_checks_a_file_once_and_notes_two_runs_of_one_name(run, manifest, write):
    first = write(manifest, "first.yaml")
    same = run(validate, [str(first), str(first)])
    assert same.output == f"{first}: valid: minimal\n"
    second = write(manifest, "second.yaml")
    both = run(validate, [str(first), str(second)])
    assert both.exit_code == 0
    assert both.stdout == f"{first}: valid: minimal\n{second}: valid: minimal\n"
    assert both.stderr.startswith(f"Note: {second}: a run minimal is in {first} too")
    manifest["metadata"]["namespace"] = "elsewhere"
    assert run(validate, [str(first), str(write(manifest, "third.yaml"))]).stderr == ""
