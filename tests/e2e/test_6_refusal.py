"""A run whose manifest is wrong in a way that only the trainer sees."""

from client import condition
from node import Node
from training import PATIENCE, apply, manifest


def test_a_base_model_that_is_not_there_fails_the_run_at_once_with_the_reason(node: Node, namespace: str) -> None:
    absent = {"uri": "file:///models/absent"}
    document = manifest("no-base", baseModel=absent, evaluation={"heldOut": {"problems": 0}})
    run = apply(node, namespace, document)
    failed = run.until_condition("Failed", "ManifestRefused", "True", seconds=PATIENCE)
    assert "baseModel.uri: file:///models/absent has no config.json" in failed["message"]
    assert run.phase() == "Failed"
    assert [job["metadata"]["name"] for job in run.jobs()] in ([], ["no-base-trainer-1"])
    assert run.status()["attempts"] == 1
    assert not condition(run.live(), "Completed")
