"""From a manifest to a trained population on disk: what a run leaves behind, goes on from, and refuses."""

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from scripted import ScriptedEngine
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from populora_api import ManifestError, load_manifest
from populora_trainer import session as sessions
from populora_trainer.errors import AdapterTargetError, BaseModelError, OtherBaseError, StorageError
from populora_trainer.nano.heldout import held_out_programs, load_heldout
from populora_trainer.nano.registry import builtin_folder, copy_builtin
from populora_trainer.population.peft_format import read_adapter
from populora_trainer.seeding import held
from populora_trainer.session import Events, Session, held_out_problems, open_session
from populora_trainer.storage.checkpoint import intact, newest_manifest, read_checkpoint, read_manifest, steps
from populora_trainer.storage.environment import read_environments
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.tasks.buffer import ProblemBuffer

MANIFEST = Path(__file__).with_name("tiny.yaml")
ALL_TYPES = ("tasks.types=[code_i, code_o, code_f]", "tasks.problemsPerMatchup=6", "training.proposalsPerPrompt=2")
METRICS = {
    *("step", "seconds", "solve_rate", "valid_rate", "reward", "entropy", "response_tokens", "complexity"),
    *("ratings", "tokens_per_second", "advantage"),
}


@pytest.fixture(autouse=True)
def _restore_torch_settings() -> Iterator[None]:
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rollouts be scripted: a run then takes little time, and always has problems worth learning from."""
    monkeypatch.setattr(sessions, "TransformersEngine", lambda population, **_: ScriptedEngine())


def train(
    folder: Path,
    *overrides: str,
    stop: Callable[[Session], bool] = lambda session: False,
    from_step: int | None = None,
    threads: int | None = None,
    notices: list[str] | None = None,
) -> Session:
    """Train the tiny manifest in a folder until its end, or until `stop` wants."""
    manifest = load_manifest(MANIFEST, overrides, output=folder)
    opened: list[Session] = []
    events = Events(stop=lambda: stop(opened[0]), on_notice=(notices if notices is not None else []).append)
    with open_session(manifest, events=events, from_step=from_step, threads=threads) as session:
        opened.append(session)
        asyncio.run(session.train())
    return session


def digest(folder: Path) -> tuple[int, str]:
    pointer = json.loads((folder / "LATEST").read_text())
    return pointer["step"], pointer["sha256"]


def log(folder: Path, name: str) -> list[dict]:
    return list(read_log(LocalStore(folder, create=False), name))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with real rollouts: three types, evaluations, evolution, two steps."""
    folder = tmp_path_factory.mktemp("real") / "run"
    train(folder, *ALL_TYPES, "evaluation.heldOut.problems=2", "evaluation.heldOut.samples=2")
    return folder


def test_a_run_leaves_its_whole_layout(real: Path) -> None:
    names = {path.name for path in real.iterdir()}
    assert names - {".lock"} == {
        *("run.yaml", "base.json", "environment.json", "LATEST", "steps", "adapters", "optimizer", "buffer", "archive"),
        *("metrics.jsonl", "matchups.jsonl", "problems.jsonl", "evolution.jsonl"),
    }
    store = LocalStore(real, create=False)
    assert steps(store) == [0, 1, 2]
    assert all(intact(store, step) for step in steps(store))
    assert {path.name for path in (real / "adapters").rglob("*") if path.is_file()} == {
        *("adapter_config.json", "adapter_model.safetensors")
    }
    stored = load_manifest(real / "run.yaml").spec
    assert (stored.storage.folder, stored.training.steps) == (real, 2)


def test_metrics_have_one_line_a_step_with_every_number_in_its_range(real: Path) -> None:
    before, *lines = log(real, "metrics")
    assert (before["step"], [line["step"] for line in lines]) == (0, [1, 2])
    assert [set(line) >= METRICS for line in (before, *lines)] == [True] * 3
    for line in lines:
        shares = [line["valid_rate"], line["coverage"], *line["solve_rate"].values()]
        assert all(share is None or 0 <= share <= 1 for share in shares)
        assert line["valid_rate"] is not None
        assert -1 <= line["reward"]["teacher"] <= 1
        for role in ("teacher", "student"):
            if line["reward"][role] is not None:
                assert line["entropy"][role] > 0
                assert 1 <= line["response_tokens"][role] <= 48
        assert set(line["complexity"]) == {"ast_depth", "cyclomatic", "loc", "variables"}
        assert len(line["ratings"]) == 4
        for rating in line["ratings"].values():
            assert rating["lcb"] == pytest.approx(rating["mu"] - 3 * rating["sigma"])
        assert {"matchmaking", "sync", "propose", "solve", "evaluate", "update", "total"} <= set(line["seconds"])
        assert line["seconds"]["total"] == pytest.approx(
            sum(seconds for phase, seconds in line["seconds"].items() if phase != "total")
        )
        tokens = line["tokens"]
        assert line["tokens_per_second"] == pytest.approx(sum(tokens.values()) / line["seconds"]["total"])
        assert {"mean", "std", "masked_fraction"} <= set(line["advantage"])
        # Trainer and engine run the same model, so they agree on what they sampled.
        if line["learner"]["learned_tokens"]:
            assert line["learner"]["mismatch_mean"] < 0.05
            assert math.isfinite(line["learner"]["loss"])


def test_held_out_programs_stay_out_of_a_run_on_an_embedded_base_and_of_no_other(
    tmp_path: Path, scripted: None
) -> None:
    """The script writes `x + k`, and two of the ten are held out."""
    copy_builtin("nano", tmp_path / "base")
    kept, verdicts = held_out_programs("builtin://nano"), {}
    for uri in ("builtin://nano", f"file://{tmp_path / 'base'}"):
        folder = tmp_path / uri.partition(":")[0]
        train(folder, f"baseModel.uri={uri}", "tasks.problemsPerMatchup=24", "training.steps=1")
        verdicts[uri] = {one["verdict"] for one in log(folder, "problems") if one["program"] in kept}
    assert list(verdicts.values()) == [{"held_out"}, {"valid"}]


def test_the_other_logs_agree_with_the_metrics(real: Path) -> None:
    for line in log(real, "metrics")[1:]:
        problems = [one for one in log(real, "problems") if one["step"] == line["step"]]
        matchups = [one for one in log(real, "matchups") if one["step"] == line["step"]]
        valid = [one for one in problems if one["valid"]]
        assert (len(problems), len(matchups)) == (12, 2)
        assert line["valid_rate"] == pytest.approx(len(valid) / len(problems))
        assert sum(task["proposals"] for one in matchups for task in one["tasks"].values()) == len(problems)
        assert sum(task["valid"] for one in matchups for task in one["tasks"].values()) == len(valid)
        assert line["reward"]["teacher"] == pytest.approx(sum(one["reward"] for one in problems) / len(problems))
        played = {name for one in matchups for name in (one["teacher"], one["student"])}
        assert played == set(line["ratings"])
    births = [one for one in log(real, "evolution") if one["event"] == "birth"]
    assert [one["step"] for one in births] == [2, 2]
    assert {one["child"] for one in births} < set(log(real, "metrics")[2]["ratings"])


def test_held_out_problems_are_tried_before_the_first_step_and_after_the_last(real: Path) -> None:
    before, first, last = log(real, "metrics")
    assert "held_out" not in first
    for line, members in ((before, 1), (last, 2)):
        held_out = line["held_out"]
        assert held_out["problems"] == 6
        assert len(held_out["members"]) == members
        for rates in (held_out["solve_rate"], held_out["greedy"]):
            assert set(rates) == {"overall", "code_i", "code_o", "code_f"}
            assert all(0 <= rate <= 1 for rate in rates.values())
        assert held_out["stderr"] >= 0
    assert set(before["held_out"]["members"]) == {"s0"}


def test_a_run_begins_with_problems_of_the_base_and_keeps_them_with_step_0(scripted: None, tmp_path: Path) -> None:
    words = ("tasks.seedProblems=9", "training.keepCheckpoints=3")
    straight = train(tmp_path / "straight", *words)
    before, *lines = log(tmp_path / "straight", "metrics")
    assert (before["step"], [line["step"] for line in lines]) == (0, [1, 2])
    assert (before["seeding"]["wanted"], before["seeding"]["kept"]) == (9, 9)
    assert 9 <= before["seeding"]["valid"] <= before["seeding"]["proposals"]
    assert not any("seeding" in line for line in lines)
    store = LocalStore(tmp_path / "straight", create=False)
    buffers = [ProblemBuffer.from_bytes(read_checkpoint(store, read_manifest(store, at)).buffer) for at in (0, 2)]
    assert [held(buffer) for buffer in buffers] == [9, 9]
    assert len(buffers[0]) == 3 + 2 * 9 < len(buffers[1])
    assert seeds_shown(straight) == 9
    # A run that is stopped after its start goes on with the same, and one that is stopped before begins again.
    train(tmp_path / "resumed", *words, stop=lambda session: True)
    assert not (tmp_path / "resumed" / "LATEST").exists()
    train(tmp_path / "resumed", *words, stop=lambda session: session.trainer.step == 1)
    assert log(tmp_path / "resumed", "metrics")[0]["seeding"] == before["seeding"]
    resumed = train(tmp_path / "resumed", *words)
    assert (resumed.resumed, seeds_shown(resumed)) == (1, 9)
    assert digest(tmp_path / "resumed") == digest(tmp_path / "straight")
    for kind in ("problems", "matchups", "evolution"):
        assert log(tmp_path / "resumed", kind) == log(tmp_path / "straight", kind)
    # Without the setting there is nothing of it.
    train(tmp_path / "without")
    assert digest(tmp_path / "without") != digest(tmp_path / "straight")
    assert [line["step"] for line in log(tmp_path / "without", "metrics")] == [1, 2]


def seeds_shown(session: Session) -> float | None:
    return session.monitor.registry.get_sample_value("populora_seed_problems")


def test_a_stop_and_a_base_that_is_given_up_are_said(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    train(tmp_path / "stopped", "tasks.seedProblems=9", stop=lambda session: True, notices=notices)
    monkeypatch.setattr(ScriptedEngine, "_proposal", lambda self, prompt, request, number: "no program")
    train(tmp_path / "useless", "tasks.seedProblems=1", "training.steps=1", notices=notices)
    assert notices == [
        "Stopped while the base wrote seed problems, which it writes again when the run goes on",
        "The base wrote 0 different valid seed problems in 32 proposals and is asked no further; the run begins with "
        "these instead of tasks.seedProblems 1",
    ]
    assert digest(tmp_path / "useless")[0] == 1


def test_weight_decay_is_the_manifests(scripted: None, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", "training.steps=1")
    decayed = train(tmp_path / "decayed", "training.steps=1", "training.weightDecay=0.5")
    store = LocalStore(tmp_path / "plain")
    start = read_checkpoint(store, read_manifest(store, 0))
    for slot, adapter in enumerate(start.adapters):
        with_decay, without = (one.trainer.population.factors(slot) for one in (decayed, plain))
        for path, pair in adapter.factors.items():
            # Decoupled: beside the same step, 1e-3 x 0.5 of what was there is gone. B is 0 at first.
            torch.testing.assert_close(with_decay[path].A, without[path].A - 5e-4 * pair.A, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(with_decay[path].B, without[path].B)
            assert not torch.equal(with_decay[path].A, without[path].A)


def test_a_checkpoints_adapters_load_in_peft_on_the_base(real: Path) -> None:
    store = LocalStore(real, create=False)
    manifest = read_manifest(store, 2)
    folder = real / "adapters" / manifest.adapters[0]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(builtin_folder("nano")), folder)
    factors, config = read_adapter(folder)
    assert (config.rank, config.alpha, config.base_model) == (8, 16, "builtin://nano")
    modules = dict(model.base_model.model.named_modules())
    assert len(factors) == 6 * 4
    for path, pair in factors.items():
        assert torch.equal(modules[path].lora_A["default"].weight.float(), pair.A)
        assert torch.equal(modules[path].lora_B["default"].weight.float(), pair.B)


def test_equal_manifests_make_equal_runs_and_another_seed_another(scripted: None, tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        train(tmp_path / name, f"population.seed={seed}")
    assert digest(tmp_path / "one") == digest(tmp_path / "same")
    assert digest(tmp_path / "one")[1] != digest(tmp_path / "other")[1]
    for kind in ("problems", "matchups", "evolution"):
        assert log(tmp_path / "one", kind) == log(tmp_path / "same", kind)


def test_a_run_that_is_given_more_steps_equals_one_that_had_them_from_the_start(scripted: None, tmp_path: Path) -> None:
    train(tmp_path / "straight", "training.steps=4")
    first = train(tmp_path / "extended", "training.steps=2")
    assert (first.resumed, first.trainer.step) == (None, 2)
    second = train(tmp_path / "extended", "training.steps=4")
    assert (second.resumed, second.trainer.step) == (2, 4)
    assert digest(tmp_path / "extended") == digest(tmp_path / "straight")
    # Stopped between two checkpoints, a run loses nothing either.
    stopped = train(
        tmp_path / "stopped",
        *("training.steps=4", "training.checkpointEverySteps=3"),
        stop=lambda session: session.trainer.step == 2,
    )
    assert stopped.trainer.step == digest(tmp_path / "stopped")[0] == 2
    train(tmp_path / "stopped", "training.steps=4", "training.checkpointEverySteps=3")
    assert digest(tmp_path / "stopped") == digest(tmp_path / "straight")
    assert steps(LocalStore(tmp_path / "stopped")) == [2, 3, 4]
    for name in ("extended", "stopped"):
        assert [line["step"] for line in log(tmp_path / name, "metrics")] == [1, 2, 3, 4]
        for kind in ("problems", "matchups", "evolution"):
            assert log(tmp_path / name, kind) == log(tmp_path / "straight", kind)
    # There is nothing left to do for a run that has all of its steps.
    again = train(tmp_path / "straight", "training.steps=4")
    assert (again.resumed, again.trainer.step) == (4, 4)
    assert digest(tmp_path / "straight") == digest(tmp_path / "extended")


def test_checkpoints_are_made_when_due_and_old_ones_are_deleted_with_what_only_they_name(
    scripted: None, tmp_path: Path
) -> None:
    train(tmp_path, "training.steps=5", "training.checkpointEverySteps=2", "training.keepCheckpoints=2")
    store = LocalStore(tmp_path, create=False)
    assert steps(store) == [4, 5]
    named = {key for step in (4, 5) for key in read_manifest(store, step).objects()}
    stored = {key for kind in ("adapters", "optimizer", "buffer", "archive") for key in store.list(f"{kind}/")}
    assert stored == named
    assert [line["step"] for line in log(tmp_path, "metrics")] == [1, 2, 3, 4, 5]


def test_status_names_the_stored_adapter_of_every_member_and_none_that_is_not_stored(
    scripted: None, tmp_path: Path
) -> None:
    shown: list[list[str | None]] = []

    def look(session: Session) -> bool:
        shown.append([member.get("digest") for member in session.monitor.status()["members"]])
        return False

    words = ("training.steps=2", "training.checkpointEverySteps=2", "evolution.everySteps=0")
    trained = train(tmp_path, *words, stop=look)
    stored = list(read_manifest(LocalStore(tmp_path, create=False), 2).adapters)
    assert [member["digest"] for member in trained.monitor.status()["members"]] == stored
    assert shown == [[], [None] * 4]
    train(tmp_path, *words, "training.steps=3", stop=look)
    assert shown[2] == stored


def test_a_run_goes_on_with_the_threads_it_began_with(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path, "training.steps=1", threads=1)
    torch.set_num_threads(2)
    notices: list[str] = []
    train(tmp_path, "training.steps=2", notices=notices)
    assert torch.get_num_threads() == 1
    (notice,) = notices
    assert "spec.training.steps: 1 -> 2" in notice
    (entry,) = read_environments(LocalStore(tmp_path))
    assert (entry.after_step, entry.environment.threads, entry.environment.torch) == (0, 1, torch.__version__)


def test_other_threads_that_a_user_asked_for_are_taken_and_said(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train(tmp_path, "training.steps=1", threads=2)
    torch.set_num_threads(1)  # what torch makes of the variable when it is imported
    notices: list[str] = []
    train(tmp_path, "training.steps=2", notices=notices)
    assert torch.get_num_threads() == 1
    (notice,) = [notice for notice in notices if "threads" in notice]
    assert notice.startswith("From step 2 on, this run is computed with threads 1 (before: 2): ")
    assert "not bit-equal" in notice
    entries = read_environments(LocalStore(tmp_path))
    assert [(entry.after_step, entry.environment.threads) for entry in entries] == [(0, 2), (1, 1)]


def test_more_threads_than_cores_are_said_with_the_way_out(
    scripted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path, "training.steps=1", threads=2)
    monkeypatch.setattr(sessions.os, "sched_getaffinity", lambda pid: {0})
    notices: list[str] = []
    train(tmp_path, "training.steps=1", notices=notices)
    (notice,) = notices
    assert notice.startswith("Computing with 2 threads on 1 cores, as this run began; --threads 1 is faster")


def test_a_step_can_be_gone_back_to(scripted: None, tmp_path: Path) -> None:
    train(tmp_path, "training.steps=3")
    end = digest(tmp_path)
    session = train(tmp_path, "training.steps=3", from_step=1)
    assert session.resumed == 1
    assert digest(tmp_path) == end
    assert [line["step"] for line in log(tmp_path, "metrics")] == [1, 2, 3]


def test_a_single_agent_and_unequal_roles_train_from_their_manifests(scripted: None, tmp_path: Path) -> None:
    alone = ("mode=SingleAgent", "population.teachers=1", "population.students=1", "rewards.preset=AbsoluteZero")
    for name, overrides, members in (
        ("alone", alone, ["a0"]),
        ("one teacher", ("population.teachers=1", "population.students=3"), ["t0", "s0", "s1", "s2"]),
        ("one student", ("population.teachers=3", "population.students=1"), ["t0", "t1", "t2", "s0"]),
    ):
        folder = tmp_path / name
        train(folder, *overrides, "training.steps=1")
        newest = newest_manifest(LocalStore(folder, create=False))
        assert newest is not None
        assert [member.name for member in newest.members] == members
        first, last = (read_checkpoint(LocalStore(folder), read_manifest(LocalStore(folder), at)) for at in (0, 1))
        (line,) = log(folder, "metrics")
        assert line["learner"]["updated_members"] >= (1 if name == "alone" else 2)
        assert len(first.adapters) == len(last.adapters) == len(members)


def test_a_runs_identity_cannot_change_and_the_rest_can(scripted: None, tmp_path: Path) -> None:
    train(tmp_path, "training.steps=1")
    before = digest(tmp_path)
    with pytest.raises(ManifestError) as caught:
        train(tmp_path, "population.seed=7", "adapter.rank=16")
    assert [problem.field for problem in caught.value.problems] == ["spec.population.seed", "spec.adapter.rank", ""]
    assert str(caught.value).endswith(f"{tmp_path} holds another run: name another place for this one")
    assert "spec.population.seed: is immutable: the run has 0, the manifest says 7" in str(caught.value)
    assert digest(tmp_path) == before
    notices: list[str] = []
    train(tmp_path, "training.steps=1", "training.keepCheckpoints=9", notices=notices)
    assert "spec.training.keepCheckpoints: 3 -> 9; the one before is kept in its manifests/" in notices[0]
    assert load_manifest(tmp_path / "manifests" / "0000.yaml").spec.training.keep_checkpoints == 3
    assert load_manifest(tmp_path / "run.yaml").spec.training.keep_checkpoints == 9
    assert digest(tmp_path) == before


def test_a_run_goes_on_with_the_weights_that_it_began_with_only(scripted: None, tmp_path: Path) -> None:
    run, other, given = (tmp_path / name for name in ("run", "other", "my base"))
    shutil.copytree(builtin_folder("nano"), given)
    shutil.copytree(builtin_folder("nano-raw"), other)
    uri = f"baseModel.uri={given.as_uri()}"
    with pytest.raises(BaseModelError):
        train(run, f"baseModel.uri={(tmp_path / 'mistyped').as_uri()}")
    train(run, uri, "training.steps=1")
    adapter = next(run.glob("adapters/*/adapter_config.json")).parent
    # An adapter alone says what it belongs to, in words that PEFT and transformers load.
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(given, dtype=torch.float32), adapter)
    ids = torch.tensor([[3, 20, 21, 22]])
    assert torch.equal(loaded(input_ids=ids).logits, whole(input_ids=ids).logits)
    before = digest(run)
    weights = (given / "model.safetensors").read_bytes()
    (given / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(OtherBaseError, match=r"has weights .* that this run did not begin with"):
        train(run, uri, "training.steps=2")
    assert digest(run) == before
    (given / "model.safetensors").write_bytes(weights)
    train(run, uri, "training.steps=2")
    assert digest(run)[0] == 2


def test_a_call_that_is_refused_changes_nothing_of_the_run(scripted: None, tmp_path: Path) -> None:
    run, base, other = (tmp_path / name for name in ("run", "base", "other"))
    copy_builtin("nano", base)
    copy_builtin("nano-raw", other)
    uri = f"baseModel.uri={base.as_uri()}"
    train(run, uri, "training.steps=2", threads=1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    weights = base / "model.safetensors"
    notices: list[str] = []

    def refused(error: type[Exception], *overrides: str, from_step: int | None = None) -> None:
        with pytest.raises(error):
            train(run, uri, *overrides, from_step=from_step, threads=2, notices=notices)
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    refused(StorageError, "training.steps=3", from_step=9)
    refused(ManifestError, "training.steps=3", "training.maxPromptTokens=600", from_step=1)
    kept = weights.read_bytes()
    weights.write_bytes((other / "model.safetensors").read_bytes())
    refused(OtherBaseError, "training.steps=3", from_step=1)
    weights.write_bytes(kept)
    assert not any("goes on" in notice for notice in notices)
    train(run, uri, "training.steps=3", from_step=1, threads=1, notices=notices)
    assert "spec.training.steps: 2 -> 3" in notices[-1]
    assert digest(run)[0] == 3


def test_going_back_in_a_folder_that_is_no_run_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        train(tmp_path / "mistyped", from_step=1)
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize(
    ("overrides", "field", "message"),
    [
        (["inference.engine=VLLM"], "spec.inference.engine", "VLLM needs the address of vLLM servers"),
        (["baseModel.uri=s3://bucket/base"], "spec.baseModel.uri", "s3://bucket/base needs an object store"),
        (["evaluation.suites=[mbpp_plus]"], "spec.evaluation.suites", "mbpp_plus: this version runs no benchmarks"),
        (
            ["evaluation.heldOut.problems=99999"],
            "spec.evaluation.heldOut.problems",
            f"99999 is not allowed: builtin://nano has {len(load_heldout()) // 3} held-out problems of each type",
        ),
    ],
)
def test_what_this_machine_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, overrides: list[str], field: str, message: str
) -> None:
    with pytest.raises(ManifestError) as caught:
        train(tmp_path / "run", *overrides)
    (problem,) = caught.value.problems
    assert problem.field == field
    assert problem.message.startswith(message)
    assert not (tmp_path / "run").exists()


def test_prompts_and_responses_for_which_the_base_has_no_positions_are_refused_before_the_first_step(tmp_path):
    with pytest.raises(ManifestError) as caught:
        train(tmp_path, "training.maxPromptTokens=500", "training.maxResponseTokens=13")
    (problem,) = caught.value.problems
    assert problem.field == "spec.training.maxPromptTokens"
    assert problem.message == "500 and maxResponseTokens 13 are not allowed: builtin://nano has 512 positions"


def test_a_limit_that_a_held_out_problem_cannot_keep_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        train(tmp_path, "training.maxPromptTokens=16", "evaluation.heldOut.problems=3")
    (problem,) = caught.value.problems
    assert problem.field == "spec.training.maxPromptTokens"
    assert problem.message.startswith("16 is not allowed: the longest held-out code_")
    assert problem.message.endswith("tokens of builtin://nano")


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "000003.json").write_text("{}")
    with pytest.raises(StorageError, match=r"holds checkpoints but no run\.yaml"):
        train(tmp_path)


def test_held_out_problems_are_the_first_of_each_of_the_runs_types() -> None:
    for tasks in (("code_i", "code_o", "code_f"), ("code_o", "code_i"), ("code_f",)):
        chosen = held_out_problems(3, tasks)
        assert {problem.task for problem in chosen} == set(tasks)
        for task in tasks:
            mine = [problem for problem in chosen if problem.task == task]
            assert mine == [problem for problem in load_heldout() if problem.task == task][:3]
    assert held_out_problems(0, ("code_i",)) == ()


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        ("[kv_b_proj, gate_proj]", "PEFT does not load an adapter of gate_proj on DeepseekV3ForCausalLM"),
        (
            "[kv_b_proj, gate_proj, up_proj]",
            "PEFT does not load an adapter of gate_proj, up_proj on DeepseekV3ForCausalLM",
        ),
        ("[c_attn]", "c_attn is no linear layer of the base; it has"),
    ],
)
def test_targets_that_do_not_fit_the_base_are_refused_by_name_and_claim_nothing(
    tmp_path: Path, targets: str, sentence: str
) -> None:
    base = tmp_path / "base"
    copy_builtin("nano", base)
    (base / "model.safetensors").unlink()
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    config = DeepseekV3Config(
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=8,
        q_lora_rank=8,
        v_head_dim=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        vocab_size=vocabulary,
        bos_token_id=None,
    )
    DeepseekV3ForCausalLM(config).save_pretrained(base)
    run, uri = tmp_path / "run", f"baseModel.uri=file://{base}"
    with pytest.raises(AdapterTargetError, match=sentence) as caught:
        train(run, uri, f"adapter.targetModules={targets}")
    assert caught.value.exit_code == 42
    assert not list(run.glob("steps/*"))
    manifest = load_manifest(MANIFEST, (uri, "adapter.targetModules=[kv_b_proj]"), output=run)
    with open_session(manifest, events=Events()) as session:  # the same folder, without what is refused
        assert next(path for path, _, _ in session.trainer.population.named_stacks()).endswith("kv_b_proj")
