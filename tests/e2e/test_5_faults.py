"""Runs that lose their pods on the way: they end as if undisturbed."""

import json
from collections import Counter
from pathlib import Path

import pytest
from client import Object, eventually
from figures import Figures
from installation import SYSTEM
from node import Node
from object_storage import ObjectStorage
from population_run import Run
from training import PATIENCE, Stored, apply, explain, kill, manifest, trained_here, until_completed

NAME = "faults"
STEPS = 12


@pytest.fixture(scope="module")
def document() -> Object:
    return manifest(NAME, training={"steps": STEPS}, deletionPolicy="Delete")


@pytest.fixture(scope="module")
def undisturbed(document: Object, tmp_path_factory: pytest.TempPathFactory, figures: Figures) -> Path:
    """The folder of the same run, trained in one process here."""
    folder = trained_here(document, tmp_path_factory.mktemp("undisturbed"))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    figures.add_steps("one process, Transformers", [json.loads(line) for line in lines])
    return folder


@pytest.fixture(scope="module")
def disturbed(node: Node, namespace: str, document: Object) -> Run:
    """The run after everything has happened to it."""
    run = apply(node, namespace, document)
    try:
        disturb(node, run)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(node, run)}") from None
    until_completed(node, run)
    return run


def disturb(node: Node, run: Run) -> None:
    run.until_step(1, seconds=PATIENCE)
    (trainer,) = run.pods("trainer")
    kill(node, trainer, "trainer")
    eventually(lambda: (run.status().get("attempts") or 0) >= 2, "the lost trainer is charged", seconds=PATIENCE)

    run.until_step(3, seconds=PATIENCE)
    sandbox = run.pods("sandbox")[0]
    kill(node, sandbox, "sandbox")
    eventually(lambda: restarts(node, sandbox, "sandbox") == 1, "the sandbox is started again", seconds=PATIENCE)

    run.suspend()
    run.until("Suspended", seconds=PATIENCE)
    eventually(lambda: not run.pods(), "no pod is left", seconds=PATIENCE)
    stored = run.status()["step"]
    assert 3 <= stored < STEPS
    run.resume()

    run.until_step(stored + 1, seconds=PATIENCE)
    leader = node.api.get("Lease", "populora-controller", SYSTEM)["spec"]["holderIdentity"]
    (pod,) = (pod for pod in controllers(node) if pod["metadata"]["name"] in leader)
    kill(node, pod, "controller")


def controllers(node: Node) -> list[Object]:
    return node.api.list("Pod", SYSTEM, "app.kubernetes.io/component=controller")


def restarts(node: Node, pod: Object, container: str) -> int:
    live = node.api.get("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"])
    (status,) = (status for status in live["status"]["containerStatuses"] if status["name"] == container)
    return int(status["restartCount"])


def test_it_completes_with_the_steps_that_were_promised_at_the_cost_of_one_attempt(disturbed: Run) -> None:
    status = disturbed.status()
    assert (status["phase"], status["step"], status["steps"]) == ("Completed", STEPS, STEPS)
    assert status["attempts"] == 2


def test_no_step_is_lost_or_doubled(disturbed: Run, storage: ObjectStorage) -> None:
    stored = Stored(storage, NAME)
    # Step 0 is the evaluation of the base.
    assert Counter(record["step"] for record in stored.log("metrics")) == Counter(range(STEPS + 1))
    assert {record["step"] for record in stored.log("matchups")} == set(range(1, STEPS + 1))


def test_its_last_state_is_bit_for_bit_that_of_the_undisturbed_run(
    disturbed: Run, undisturbed: Path, storage: ObjectStorage
) -> None:
    here = json.loads((undisturbed / "LATEST").read_text())
    there = json.loads(Stored(storage, NAME).read("LATEST"))
    assert there == here


def test_deletion_takes_everything_it_stored_and_then_the_object(
    node: Node, disturbed: Run, storage: ObjectStorage
) -> None:
    assert Stored(storage, NAME).keys()
    node.kubectl("delete", "prun", NAME, "--namespace", disturbed.namespace, f"--timeout={PATIENCE:.0f}s", timeout=1000)
    assert disturbed.gone()
    assert Stored(storage, NAME).keys() == []


# vLLM, which holds nothing that is not stored


SERVED = "served"
SERVED_STEPS = 5


@pytest.fixture(scope="module")
def without_vllm_for_a_while(node: Node, namespace: str, inference: Object) -> Run:
    """A run whose only vLLM was killed while it sampled."""
    small = {"problemsPerMatchup": 4, "types": ["code_o"]}
    run = apply(node, namespace, manifest(SERVED, tasks=small, training={"steps": SERVED_STEPS}, inference=inference))
    try:
        run.until_step(1, seconds=PATIENCE)
        (pod,) = run.pods("serving")
        kill(node, pod, "vllm")
        eventually(lambda: restarts(node, pod, "vllm") == 1, "vLLM is started again", seconds=PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(node, run)}") from None
    until_completed(node, run)
    return run


def test_a_run_waits_for_its_vllm_and_completes_with_one_attempt(without_vllm_for_a_while: Run) -> None:
    status = without_vllm_for_a_while.status()
    assert (status["phase"], status["step"], status["attempts"]) == ("Completed", SERVED_STEPS, 1)


def test_what_the_new_vllm_serves_is_what_was_published_last(
    without_vllm_for_a_while: Run, storage: ObjectStorage
) -> None:
    stored = Stored(storage, SERVED)
    assert Counter(record["step"] for record in stored.log("metrics")) == Counter(range(SERVED_STEPS + 1))
    publication = json.loads(stored.read("serving.json"))
    assert publication["step"] == SERVED_STEPS
    assert [adapter["digest"] for adapter in publication["adapters"]] == stored.newest()["adapters"]
