"""A run whose trainer is two pods, which meet by the headless Service and share every step's update."""

import json
from pathlib import Path

import pytest
from client import Object
from figures import Figures
from node import Node
from object_storage import ObjectStorage
from population_run import Run
from restrictions import violations
from training import Stored, apply, explain, manifest, ready_pods, trained_here, until_completed

NAME = "ranks"
STEPS = 6
USER = 10001


@pytest.fixture(scope="module")
def document() -> Object:
    return manifest(NAME, training={"steps": STEPS}, trainer={"nodes": 2})


@pytest.fixture(scope="module")
def alone(document: Object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, trained by two ranks of this machine."""
    return trained_here(document, tmp_path_factory.mktemp("alone"), "--ranks", "2")


@pytest.fixture(scope="module")
def run(node: Node, namespace: str, document: Object, storage: ObjectStorage, figures: Figures) -> Run:
    run = apply(node, namespace, document)
    try:
        pods = ready_pods(run, "trainer")
        assert sorted(pod["metadata"]["name"][: len("ranks-trainer-1-0")] for pod in pods) == [
            "ranks-trainer-1-0",
            "ranks-trainer-1-1",
        ]
        assert [text for pod in pods for text in violations(node, pod, user=USER)] == []
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(node, run)}") from None
    until_completed(node, run)
    figures.add_steps("node, Transformers, 2 trainer pods", Stored(storage, NAME).log("metrics"))
    return run


def test_it_completes_with_one_attempt(run: Run) -> None:
    status = run.status()
    assert (status["phase"], status["step"], status["attempts"]) == ("Completed", STEPS, 1)


def test_its_last_state_is_bit_for_bit_that_of_two_ranks_on_one_machine(
    run: Run, alone: Path, storage: ObjectStorage
) -> None:
    here = json.loads((alone / "LATEST").read_text())
    there = json.loads(Stored(storage, NAME).read("LATEST"))
    assert there == here
