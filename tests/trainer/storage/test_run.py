import json

import pytest
from click.testing import CliRunner
from toy_run import MANIFEST, first_state, train

from populora_trainer.commands.status import command as status
from populora_trainer.errors import StorageError
from populora_trainer.storage.checkpoint import LATEST, newest_manifest, steps
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.storage.overview import overview
from populora_trainer.storage.run import EARLIER_MANIFESTS, RUN_MANIFEST, Run, existing_run, open_store

SPEC = "metadata: {name: toy}\nspec: {training: {steps: 40}}\n"


def test_a_run_goes_on_where_it_stopped(tmp_path):
    train(tmp_path / "once", 4)
    for end in (1, 2, 2, 4):
        train(tmp_path / "often", end)
    assert (tmp_path / "once" / LATEST).read_bytes() == (tmp_path / "often" / LATEST).read_bytes()


def test_a_run_gone_back_to_an_earlier_step_ends_as_one_that_never_left_it(tmp_path):
    train(tmp_path, 4, keep=None)
    latest = (tmp_path / LATEST).read_bytes()
    train(tmp_path, 4, keep=None, from_step=1)
    assert (tmp_path / LATEST).read_bytes() == latest
    assert [record["step"] for record in read_log(LocalStore(tmp_path), "metrics")] == [0, 1, 2, 3, 4]


def test_a_latest_that_lags_behind_is_set_right(tmp_path):
    train(tmp_path, 1, keep=None)
    behind = (tmp_path / LATEST).read_bytes()
    train(tmp_path, 2, keep=None)
    ahead = (tmp_path / LATEST).read_bytes()
    for stale in (behind, b"{", None):
        (tmp_path / LATEST).unlink() if stale is None else (tmp_path / LATEST).write_bytes(stale)
        with Run.open_or_create(LocalStore(tmp_path), MANIFEST) as run:
            assert run.latest()[0].step == 2
        assert (tmp_path / LATEST).read_bytes() == ahead


def test_a_latest_whose_manifest_is_gone_is_an_error_with_a_way_out(tmp_path):
    train(tmp_path, 2, keep=None)
    (tmp_path / "steps/000002.json").unlink()
    with pytest.raises(StorageError, match=r"000002\.json is missing; step 1 is intact.*--from-step 1"):
        train(tmp_path, 3)
    train(tmp_path, 3, from_step=1)
    assert newest_manifest(LocalStore(tmp_path)).step == 3


def test_two_trainers_of_one_run_the_second_is_told_who_has_it(tmp_path):
    with Run.open_or_create(LocalStore(tmp_path), MANIFEST) as run:
        with pytest.raises(StorageError, match="is in use by process"):
            Run.open_or_create(LocalStore(tmp_path), MANIFEST)
        run.commit(0, first_state())
    Run.open_or_create(LocalStore(tmp_path), MANIFEST).close()


def test_a_failure_while_opening_lets_go_of_the_run(tmp_path):
    train(tmp_path, 1)
    (tmp_path / "steps/000001.json").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StorageError, match="is damaged"):
            Run.open_or_create(LocalStore(tmp_path), MANIFEST)


def test_log_lines_of_an_uncommitted_step_are_repeated_and_not_doubled(tmp_path):
    train(tmp_path, 1)
    with Run.open_or_create(LocalStore(tmp_path), MANIFEST) as run:
        run.log("metrics", {"step": 2})
        run.logs.flush()
    train(tmp_path, 2)
    assert [record["step"] for record in read_log(LocalStore(tmp_path), "metrics")] == [0, 1, 2]


def test_another_manifest_is_refused_unless_the_change_is_allowed(tmp_path):
    with Run.open_or_create(LocalStore(tmp_path), SPEC) as run:
        run.commit(0, first_state())
    with pytest.raises(StorageError, match="a run of another manifest"):
        Run.open_or_create(LocalStore(tmp_path), MANIFEST)
    seen = []
    longer = SPEC.replace("40", "60")
    Run.open_or_create(LocalStore(tmp_path), longer, check_change=lambda *texts: seen.append(texts)).close()
    assert seen == [(SPEC, longer)]
    assert (tmp_path / "run.yaml").read_text() == longer

    def refuse(*_):
        raise StorageError("immutable")

    with pytest.raises(StorageError, match="immutable"):
        Run.open_or_create(LocalStore(tmp_path), MANIFEST, check_change=refuse)
    assert (tmp_path / "run.yaml").read_text() == longer


def test_every_manifest_that_steps_were_done_by_is_kept(tmp_path):
    texts = [SPEC.replace("40", str(steps)) for steps in (40, 50, 60)]
    with Run.open_or_create(LocalStore(tmp_path), texts[0]) as run:
        run.commit(0, first_state())
    for text in (*texts, texts[2], texts[0]):
        Run.open_or_create(LocalStore(tmp_path), text, check_change=lambda *texts: None).close()
    kept = sorted((tmp_path / EARLIER_MANIFESTS).iterdir())
    assert [path.read_text() for path in kept] == texts
    assert (tmp_path / RUN_MANIFEST).read_text() == texts[0]


def test_a_first_try_that_failed_binds_nobody(tmp_path):
    Run.open_or_create(LocalStore(tmp_path), SPEC).close()
    train(tmp_path, 1)
    assert (tmp_path / RUN_MANIFEST).read_text() == MANIFEST
    assert not (tmp_path / EARLIER_MANIFESTS).exists()


def test_going_back_in_a_run_that_is_none_leaves_nothing(tmp_path):
    with pytest.raises(StorageError, match="holds no run yet, so there is no step 3 to go back to"):
        Run.open_or_create(LocalStore(tmp_path), MANIFEST, from_step=3)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == []


def test_checkpoints_without_a_manifest_are_no_run(tmp_path):
    train(tmp_path, 0)
    (tmp_path / "run.yaml").unlink()
    with pytest.raises(StorageError, match=r"no run\.yaml"):
        train(tmp_path, 1)
    assert not (tmp_path / "run.yaml").exists()


def test_stores_are_opened_by_folder_and_by_uri_and_others_refused(tmp_path):
    train(tmp_path / "a run", 0)
    assert steps(existing_run(str(tmp_path / "a run"))) == [0]
    assert steps(existing_run(f"file://{tmp_path}/a%20run")) == [0]
    assert open_store("s3://bucket/a/run/").location == "s3://bucket/a/run"
    with pytest.raises(StorageError, match=r"gs://bucket/run can't hold a run"):
        open_store("gs://bucket/run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StorageError, match=r"empty is not a run: it has no run\.yaml"):
        existing_run(str(tmp_path / "empty"))
    with pytest.raises(StorageError, match="none is not a folder"):
        existing_run(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def logged(folder):
    with Run.open_or_create(LocalStore(folder), SPEC) as run:
        run.log("metrics", {"step": 0, "held_out": {"solve_rate": {"overall": 0.4}}})
        run.commit(0, first_state())
        rates = {"overall": 0.5, "code_o": 0.75, "code_i": None}
        run.log("metrics", {"step": 1, "solve_rate": rates, "valid_rate": 0.9})
        run.commit(1, first_state())


def test_status_shows_step_members_ratings_and_rates_on_one_screen(tmp_path):
    logged(tmp_path)
    result = CliRunner().invoke(status, [str(tmp_path)])
    assert result.exit_code == 0
    text = result.output
    assert "toy" in text
    assert "step 1 of 40; nobody is training it" in text.replace("\n", " ")
    assert "overall 50.0 %, code_o 75.0 %, code_i -" in text
    assert "held-out solve rate at step 0: 40.0 %" in text
    assert "t0 0.00 25.00 8.33" in " ".join(text.split())
    assert len(text.splitlines()) < 24


def test_status_as_json_is_one_object(tmp_path):
    logged(tmp_path)
    found = json.loads(CliRunner().invoke(status, [str(tmp_path), "--json"]).output)
    assert (found["name"], found["step"], found["steps"], found["holder"]) == ("toy", 1, 40, None)
    assert [member["name"] for member in found["members"]] == ["t0", "s0"]
    assert found["solve_rate"] == {"overall": 0.5, "code_o": 0.75, "code_i": None}
    assert found["digest"] == newest_manifest(LocalStore(tmp_path)).digest


def test_status_of_a_run_in_training_names_the_trainer(tmp_path):
    with Run.open_or_create(LocalStore(tmp_path), SPEC):
        found = overview(str(tmp_path))
    assert found.holder is not None
    assert found.holder.startswith("process ")
    assert (found.step, found.members) == (None, ())
