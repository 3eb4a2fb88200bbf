import pytest

from populora_api import ManifestError, load_manifest


def spec_after(write, manifest, *overrides):
    return load_manifest(write(manifest), overrides).spec


def refusal(write, manifest, *overrides):
    with pytest.raises(ManifestError) as raised:
        load_manifest(write(manifest), overrides)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize("path", ["training.steps", "spec.training.steps"])
def test_a_path_may_leave_out_spec(manifest, write, path):
    assert spec_after(write, manifest, f"{path}=7").training.steps == 7


def test_a_field_that_the_manifest_has_is_replaced_and_the_rest_stays(manifest, write):
    manifest["spec"]["training"] = {"steps": 5, "learningRate": 0.5}
    training = spec_after(write, manifest, "training.steps=9").training
    assert (training.steps, training.learning_rate) == (9, 0.5)


def test_values_are_yaml_as_kubectl_reads_it(manifest, write):
    spec = spec_after(
        write,
        manifest,
        "training.learningRate=1e-3",
        "tasks.types=[code_o]",
        "suspend=true",
        "baseModel.uri=hf://Qwen/Qwen2.5-Coder-7B@main",
        "evolution.operators=[{id: X5, weight: 2}, {id: C1}]",
        "trainer.resources.limits={memory: 8Gi, cpu: 2}",
        "sandbox={memoryMiB: 64}",
    )
    assert spec.training.learning_rate == 0.001
    assert spec.tasks.types == ("code_o",)
    assert spec.suspend is True
    assert spec.base_model.uri.endswith("@main")
    assert [(operator.id, operator.weight) for operator in spec.evolution.operators] == [("X5", 2), ("C1", 1)]
    assert spec.trainer.resources.limits == {"memory": "8Gi", "cpu": 2}
    assert (spec.sandbox.memory_mib, spec.sandbox.replicas) == (64, 2)


@pytest.mark.parametrize("index", ["[1]", ".1"])
def test_a_list_item_is_reached_by_its_index_even_in_a_default_list(manifest, write, index):
    operators = spec_after(write, manifest, f"evolution.operators{index}.weight=5").evolution.operators
    assert [operator.weight for operator in operators] == [1, 5, 1, 1, 1, 1, 1, 1]


def test_an_index_one_past_the_end_appends(manifest, write):
    spec = spec_after(write, manifest, "evolution.operators[8]={id: C1}", "evolution.operators[8].weight=3")
    assert (spec.evolution.operators[8].id, spec.evolution.operators[8].weight) == ("C1", 3)


@pytest.mark.parametrize("null", ["null", "~", " null # of a comment"])
def test_null_brings_back_the_default(manifest, write, null):
    manifest["spec"]["training"] = {"steps": 5}
    assert spec_after(write, manifest, f"training.steps={null}").training.steps == 200
    assert spec_after(write, manifest, f"training={null}").training.steps == 200
    assert len(spec_after(write, manifest, f"evolution.operators[0]={null}").evolution.operators) == 7


@pytest.mark.parametrize("nothing", ["", "  ", "# 20", "---"])
def test_no_value_is_refused_as_a_shells_unset_variable_leaves_none(manifest, write, nothing):
    (problem,) = refusal(write, manifest, f"training.steps={nothing}")
    assert problem == (
        f"--set training.steps={nothing}: spec.training.steps: there is no value: null is allowed, which takes the "
        "field away so that its default holds"
    )


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!mine"])
@pytest.mark.parametrize("value", ["", " 5", " [5]", " {a: 1}"])
def test_a_tag_is_refused_even_without_a_value(manifest, write, tag, value):
    (problem,) = refusal(write, manifest, f"training.steps={tag}{value}")
    assert f"the tag {tag} is not allowed: no tag" in problem


def test_a_quoted_text_without_characters_is_a_value(manifest, write):
    (problem,) = refusal(write, manifest, 'training.steps=""')
    assert 'spec.training.steps: "" is not allowed: an integer' in problem


def test_later_overrides_win_and_metadata_can_be_set(manifest, write):
    run = load_manifest(write(manifest), ["training.steps=5", "training.steps=6", "metadata.name=other"])
    assert run.spec.training.steps == 6
    assert run.metadata.name == "other"


def test_a_field_of_a_free_form_part_may_have_any_name(manifest, write):
    spec = spec_after(write, manifest, "trainer.podTemplate.spec.hostNetwork=true", "trainer.nodeSelector.disk=ssd")
    assert spec.trainer.pod_template.spec == {"hostNetwork": True}
    assert spec.trainer.node_selector == {"disk": "ssd"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stesp=4", "--set training.stesp=4: spec.training.stesp: unknown field: did you mean steps?"),
        ("teachers=8", "--set teachers=8: spec.teachers: unknown field: did you mean spec.population.teachers?"),
        ("steps=8", "--set steps=8: spec.steps: unknown field: did you mean spec.training.steps?"),
        ("training.steps=x", '--set training.steps=x: spec.training.steps: "x" is not allowed: an integer from 1 to'),
        ("training.steps='4'", "--set training.steps='4': spec.training.steps: \"4\" is not allowed: an integer"),
        ("training.steps=[1", "--set training.steps=[1: spec.training.steps: this is no YAML"),
        ("training.steps=.nan", "--set training.steps=.nan: spec.training.steps: .nan is not allowed: a finite number"),
        ("training.steps.x=1", "spec.training.steps.x: spec.training.steps is no mapping or list"),
        ("training", "--set training: this is not of the form PATH=VALUE"),
        ("=4", "--set =4: this is not of the form PATH=VALUE"),
        ("training..steps=4", "--set training..steps=4: this is not of the form PATH=VALUE"),
        ("training=4", "--set training=4: spec.training: 4 is not allowed: a mapping with the fields steps"),
        ("tasks.types[5]=code_o", "--set tasks.types[5]=code_o: spec.tasks.types[5]: the list has 3 items"),
        ("tasks.types.first=code_o", "--set tasks.types.first=code_o: spec.tasks.types.first: the list has 3 items"),
        ("tasks.types[0]=code_x", '--set tasks.types[0]=code_x: spec.tasks.types[0]: "code_x" is not allowed: one of'),
        ("mode=SingleAgent", "run.yaml:"),
        ("population.teachers=99999999999999999999999", "spec.population.teachers: "),
    ],
)
def test_a_wrong_override_is_refused_naming_itself(manifest, write, override, message):
    assert any(message in problem for problem in refusal(write, manifest, override))


def test_wrong_overrides_and_wrong_fields_are_listed_together(manifest, write):
    manifest["spec"]["retries"] = -1
    problems = refusal(write, manifest, "training.stesp=4", "training.steps=0")
    assert len(problems) == 3


def test_an_override_can_mend_the_manifest(manifest, write):
    manifest["spec"]["training"] = {"steps": "many"}
    assert spec_after(write, manifest, "training.steps=3").training.steps == 3


@pytest.mark.parametrize(
    "value", ["[" * 10_000, "7" * 5_000, "x" * 5_000, "." + "9" * 5_000 + "e999", "!x " + "y" * 5_000]
)
def test_a_problem_repeats_no_long_value(manifest, write, value):
    with pytest.raises(ManifestError) as caught:
        load_manifest(write(manifest), [f"training.learningRate={value}"])
    assert str(caught.value).startswith(f"--set training.learningRate={value[:20]}")
    assert len(str(caught.value)) < 400
