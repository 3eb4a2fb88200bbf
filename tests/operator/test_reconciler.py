"""A run's life on a fake API server, from creation to its end."""

import json
from dataclasses import replace

from fake_world import World, manifest

from populora_operator.cluster.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    JOB,
    NETWORK_POLICY,
    POD,
    RUN,
    SERVICE,
    SERVICE_ACCOUNT,
)
from populora_operator.cluster.port import ForbiddenError, Object, QuotaExceededError
from populora_operator.settings import Images


def test_a_run_gets_its_children_trains_and_completes() -> None:
    world = World()
    world.create(manifest())
    made = {where[0]: 0 for where in world.cluster.objects}
    for kind, _, _ in world.cluster.objects:
        made[kind] += 1
    assert made == {
        "PopulationRun": 1,
        "ConfigMap": 1,
        "ServiceAccount": 3,
        "NetworkPolicy": 4,
        "Service": 3,
        "PodDisruptionBudget": 1,
        "Deployment": 2,
        "Job": 1,
        "Event": 1,
    }
    world.until(lambda: world.phase() == "Running")
    assert world.condition("TrainersReady")["status"] == "True"
    world.until(lambda: world.phase() == "Completed")
    status = world.status()
    assert status["step"] == status["steps"] == 10
    assert status["progressPercent"] == 100
    assert [member["name"] for member in status["members"]] == ["t0", "s0"]
    assert status["members"][0]["adapterUri"] == "s3://bucket/run/adapters/ab"
    world.until(lambda: not world.cluster.of(DEPLOYMENT) and not world.cluster.of(SERVICE))
    assert world.cluster.has(CONFIG_MAP, "run-config")
    assert world.cluster.has(JOB, "run-trainer-1"), "its pods are kept for their logs"


def test_an_idle_run_costs_no_request() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    for _ in range(3):
        world.tick()
    writes, reads = len(world.cluster.writes), len(world.cluster.reads)
    for _ in range(100):
        world.tick()
    assert len(world.cluster.writes) == writes
    assert len(world.cluster.reads) - reads <= 2, "one look for each resync"


def test_a_crash_is_charged_told_and_followed_by_another_attempt() -> None:
    world = World()
    world.create(manifest(retries=1))
    world.trainers["run"].hold_at = 3
    world.until(lambda: world.status().get("step") == 3)
    world.end(_trainer(world), message="Traceback\nValueError: boom")
    world.tick()
    assert world.status()["attempts"] == 2
    assert world.condition("Progressing")["reason"] == "Retrying"
    assert "ValueError: boom" in world.condition("Progressing")["message"]
    assert not world.cluster.has(JOB, "run-trainer-2"), "there is a pause first"
    world.until(lambda: world.phase() == "Running")
    assert world.trainers["run"].starts == 2
    assert world.cluster.has(JOB, "run-trainer-1"), "the log of the failed attempt can be read"
    assert _events(world, "TrainerFailed")
    world.end(_trainer(world), code=137, message="")
    world.until(lambda: world.phase() == "Failed")
    failed = world.condition("Failed")
    assert failed["reason"] == "TrainerFailed"
    assert failed["message"].startswith("Attempt 2 of 2: ")
    assert world.status()["attempts"] == 2
    world.until(lambda: not world.cluster.of(DEPLOYMENT))


def test_exit_code_42_is_the_end() -> None:
    world = World()
    world.create(manifest(retries=9))
    world.until(lambda: world.phase() == "Running")
    world.end(_trainer(world), code=42, message="spec.training.steps: too many for this model")
    world.until(lambda: world.phase() == "Failed")
    assert world.condition("Failed")["reason"] == "ManifestRefused"
    assert "too many for this model" in world.condition("Failed")["message"]
    assert world.status()["attempts"] == 1
    assert len(world.cluster.of(JOB)) == 1


def test_disruptions_are_not_charged_however_many() -> None:
    world = World()
    world.create(manifest(retries=0))
    world.trainers["run"].hold_at = 2
    for _ in range(3):
        world.until(lambda: world.phase() == "Running")
        world.end(_trainer(world), code=137, disrupted=True)
        world.tick()
        assert world.condition("TrainersReady")["reason"] == "NodeFault"
    world.trainers["run"].hold_at = None
    world.until(lambda: world.phase() == "Completed")
    assert world.status()["attempts"] == 1
    assert _events(world, "NodeFault")


def test_nodes_that_have_failed_the_trainer_are_avoided_for_half_an_hour() -> None:
    def avoided() -> list[str]:
        (name,) = [item["metadata"]["name"] for item in world.cluster.of(JOB) if "conditions" not in item["status"]]
        spec = world.cluster.one(JOB, name)["spec"]["template"]["spec"]
        terms = spec.get("affinity", {}).get("nodeAffinity", {}).get("preferredDuringSchedulingIgnoredDuringExecution")
        return [field["values"][0] for term in terms or () for field in term["preference"]["matchFields"]]

    def lose(node: str) -> None:
        world.until(lambda: world.phase() == "Running")
        pod = _trainer(world)
        world.cluster.edit(POD, pod, lambda item: item["spec"].update(nodeName=node))
        world.end(pod, code=137, reason="", disrupted=True)
        evicted = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
        world.cluster.edit(POD, pod, lambda item: item["status"].update(evicted, conditions=[]))
        world.tick()
        assert world.condition("TrainersReady")["reason"] == "NodeFault"
        world.start()  # what is avoided is recorded

    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    for number in range(10):
        lose(f"node-{number}")
    world.until(lambda: world.phase() == "Running")
    assert avoided() == [f"node-{number}" for number in range(2, 10)], "the newest"
    world.cluster.advance(1900)
    lose("node-10")
    world.until(lambda: world.phase() == "Running")
    assert avoided() == ["node-10"]
    world.trainers["run"].hold_at = None
    world.until(lambda: world.phase() == "Completed")
    assert world.status()["attempts"] == 1


def test_a_suspended_run_has_no_pods_and_its_clock_stands_still() -> None:
    world = World()
    world.create(manifest(activeDeadlineSeconds=120))
    world.trainers["run"].hold_at = 3
    world.until(lambda: world.status().get("step") == 3)
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(suspend=True))
    world.settle()
    assert world.phase() == "Running", "its pods are still writing a checkpoint"
    assert world.condition("Suspended")["reason"] == "Suspending"
    assert world.pods("trainer")
    assert 0 not in {item["spec"]["replicas"] for item in world.cluster.of(DEPLOYMENT)}, (
        "trainers finish a step by them"
    )
    world.until(lambda: world.phase() == "Suspended")
    assert not [pod for pod in world.cluster.of(POD) if pod["status"]["phase"] == "Running"]
    assert {item["spec"]["replicas"] for item in world.cluster.of(DEPLOYMENT)} == {0}
    assert world.status()["gpus"] == 0
    for _ in range(100):
        world.tick()
    world.start()  # another replica
    world.settle()
    assert world.phase() == "Suspended"
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(suspend=False))
    world.until(lambda: world.phase() == "Running")
    assert world.trainers["run"].step >= 3
    assert world.status()["attempts"] == 1
    assert _events(world, "Resumed")
    world.until(lambda: world.phase() == "Failed")
    assert world.condition("Failed")["reason"] == "DeadlineExceeded"
    world.until(lambda: not world.pods("trainer"))


def test_more_steps_restart_the_trainer_at_its_checkpoint_without_a_charge() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 4
    world.until(lambda: world.status().get("step") == 4)
    world.cluster.edit(RUN, "run", lambda item: item["spec"]["training"].update(steps=20))
    world.settle()
    assert world.condition("TrainersReady")["reason"] == "Restarting"
    world.until(lambda: world.phase() == "Running")
    assert world.trainers["run"].starts == 2
    assert world.status()["attempts"] == 1
    assert world.status()["steps"] == 20
    assert '"steps": 20' in str(world.cluster.one(CONFIG_MAP, "run-config")["data"]) or "steps: 20" in str(
        world.cluster.one(CONFIG_MAP, "run-config")["data"]
    )
    assert _events(world, "Restarting")


def test_steps_that_are_added_while_a_run_is_evaluated_are_trained_and_evaluated_too() -> None:
    for restarted in (False, True):
        world = World()
        world.create(manifest(evaluation={"suites": ["mbpp_plus"]}))
        world.until(lambda world=world: world.phase() == "Evaluating")  # type: ignore[misc]
        world.cluster.edit(RUN, "run", lambda item: item["spec"]["training"].update(steps=14))
        world.trainers["run"].steps = 14
        if restarted:
            world.start()
        world.settle()
        assert world.condition("TrainersReady")["reason"] == "Restarting"
        assert (world.status()["step"], world.status()["steps"]) == (10, 14)
        assert world.status()["progressPercent"] < 100
        assert world.cluster.has(JOB, "run-evaluation-10"), "what has begun is not thrown away"
        world.until(lambda world=world: world.phase() == "Running")  # type: ignore[misc]
        world.until(lambda world=world: world.phase() == "Completed")  # type: ignore[misc]
        status = world.status()
        assert (status["step"], status["evaluatedStep"], status["attempts"]) == (14, 14, 1)
        assert [row["step"] for row in status["evaluation"]] == [10, 14]
        assert world.trainers["run"].starts == 2


def test_an_evaluation_that_outlasts_training_is_waited_for_before_the_last_one() -> None:
    world = World()
    world.create(manifest(evaluation={"suites": ["mbpp_plus"], "everySteps": 4}))
    world.until(lambda: world.cluster.has(JOB, "run-evaluation-4"))
    # Its pods are not played from here on: a Job that takes long.
    world.cluster.edit(JOB, "run-evaluation-4", lambda item: item["spec"].update(suspend=True))
    world.until(lambda: world.phase() == "Evaluating")
    assert world.cluster.has(JOB, "run-evaluation-4")
    assert not world.cluster.has(JOB, "run-evaluation-10")
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "gave up"}
    world.cluster.edit(JOB, "run-evaluation-4", lambda item: item.update(status={"conditions": [failed]}))
    world.until(lambda: world.phase() == "Completed")
    assert _events(world, "EvaluationFailed"), "the run goes on without it"
    assert [row["step"] for row in world.status()["evaluation"]] == [10]


def test_fewer_steps_than_are_done_end_a_run_at_what_is_done() -> None:
    world = World()
    world.create(manifest(evaluation={"suites": ["mbpp_plus"]}))
    world.trainers["run"].hold_at = 8
    world.until(lambda: world.status().get("step") == 8)
    world.cluster.edit(RUN, "run", lambda item: item["spec"]["training"].update(steps=5))
    world.trainers["run"].steps = 5
    world.until(lambda: world.phase() == "Completed")
    status = world.status()
    assert (status["step"], status["steps"], status["progressPercent"]) == (8, 5, 100)
    assert [row["step"] for row in status["evaluation"]] == [8]


def test_replicas_and_evaluation_change_without_disturbing_the_trainer() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 4
    world.until(lambda: world.status().get("step") == 4)

    def change(item: Object) -> None:
        item["spec"].update(inference={"replicas": 2}, sandbox={"replicas": 5}, evaluation={"suites": ["mbpp_plus"]})

    world.cluster.edit(RUN, "run", change)
    world.tick()
    replicas = {item["metadata"]["name"]: item["spec"]["replicas"] for item in world.cluster.of(DEPLOYMENT)}
    assert replicas == {"run-sandbox": 5, "run-serving": 2}
    assert world.trainers["run"].starts == 1
    world.trainers["run"].hold_at = None
    world.until(lambda: world.phase() == "Completed")
    assert world.cluster.has(JOB, "run-evaluation-10")
    assert world.status()["evaluation"][0]["score"] == 0.5


def test_another_engine_takes_vllm_away() -> None:
    world = World()
    world.create(manifest())
    world.until(lambda: world.phase() == "Running")
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(inference={"engine": "Transformers"}))
    world.until(lambda: not world.cluster.has(DEPLOYMENT, "run-serving"))
    assert not world.cluster.has(SERVICE, "run-serving")
    world.until(lambda: world.phase() == "Running")
    assert world.condition("ServingReady")["reason"] == "NotNeeded"


def test_a_failed_evaluation_fails_the_run_after_its_training() -> None:
    world = World()
    world.create(manifest(evaluation={"suites": ["mbpp_plus"]}))
    world.until(lambda: world.phase() == "Evaluating")
    assert not world.cluster.has(DEPLOYMENT, "run-serving"), "its GPUs are free for the evaluation"
    assert world.cluster.has(DEPLOYMENT, "run-sandbox")
    world.plays = False
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "gave up"}
    world.cluster.edit(JOB, "run-evaluation-10", lambda item: item.update(status={"conditions": [failed]}))
    world.settle()
    assert world.phase() == "Failed"
    assert world.condition("Failed")["reason"] == "EvaluationFailed"
    assert world.status()["step"] == 10


def test_a_finished_run_is_never_started_again() -> None:
    world = World()
    world.create(manifest())
    world.until(lambda: world.phase() == "Completed")
    world.cluster.remove(JOB, "ns", "run-trainer-1")
    world.cluster.edit(RUN, "run", lambda item: item["spec"]["training"].update(steps=99))
    world.start()
    for _ in range(5):
        world.tick()
    assert world.phase() == "Completed"
    assert (world.status()["step"], world.status()["steps"]) == (10, 10), "steps that were never taken are not claimed"
    assert not world.cluster.of(JOB)


def test_a_finished_run_goes_when_its_time_is_over() -> None:
    world = World()
    world.create(manifest(ttlSecondsAfterFinished=60))
    world.until(lambda: world.phase() == "Completed")
    world.tick()
    assert world.cluster.has(RUN, "run")
    world.until(lambda: not world.cluster.has(RUN, "run"), ticks=15)
    assert _events(world, "Expired")
    world.until(lambda: not [kind for kind, _, _ in world.cluster.objects if kind != "Event"])


def test_a_hand_deleted_job_is_made_again_when_its_pods_are_gone() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    world.cluster.remove(JOB, "ns", "run-trainer-1")
    world.settle()
    assert not world.cluster.has(JOB, "run-trainer-1"), "the old pod may still write"
    assert "has ended" in world.condition("TrainersReady")["message"]
    world.until(lambda: world.phase() == "Running" and world.trainers["run"].starts == 2)
    assert world.status()["attempts"] == 1


def test_children_that_are_edited_are_repaired_and_others_cost_nothing() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    for _ in range(3):
        world.tick()
    writes = len(world.cluster.writes)
    world.cluster.edit(DEPLOYMENT, "run-sandbox", lambda item: item["spec"].update(replicas=9))
    world.cluster.edit(CONFIG_MAP, "run-config", lambda item: item["data"].update({"run.yaml": "mine"}))
    world.cluster.edit(SERVICE, "run-sandbox", lambda item: item["metadata"]["labels"].clear())
    world.settle()
    assert world.cluster.one(DEPLOYMENT, "run-sandbox")["spec"]["replicas"] == 2
    assert "PopulationRun" in world.cluster.one(CONFIG_MAP, "run-config")["data"]["run.yaml"]
    assert world.cluster.one(SERVICE, "run-sandbox")["metadata"]["labels"]["populora.dev/run"] == "run"
    repairs = [
        (kind, name)
        for verb, kind, name in world.cluster.writes[writes:]
        if verb == "apply" and kind != "PopulationRun"
    ]
    assert sorted(set(repairs)) == [
        ("ConfigMap", "run-config"),
        ("Deployment", "run-sandbox"),
        ("Service", "run-sandbox"),
    ]


def test_a_child_that_has_lost_its_labels_is_repaired_once() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    world.cluster.edit(SERVICE, "run-sandbox", lambda item: item["metadata"]["labels"].clear())
    for _ in range(5):
        world.tick()
    writes = len(world.cluster.writes)
    for _ in range(5):
        world.tick()
    assert len(world.cluster.writes) == writes


def test_a_child_whose_owner_was_taken_away_is_given_back_to_its_run() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    for kind, name in ((SERVICE, "run-sandbox"), (JOB, "run-trainer-1")):
        world.cluster.edit(kind, name, lambda item: item["metadata"].pop("ownerReferences"))
        world.settle()
        (owner,) = world.cluster.one(kind, name)["metadata"]["ownerReferences"]
        assert owner["uid"] == world.cluster.one(RUN, "run")["metadata"]["uid"]
    # A Job keeps the template that it was made with, whatever would be made now.
    other = Images(trainer="another:2")
    world.reconciler._settings = replace(world.settings, images=other)
    world.reconciler._memory["ns", "run"].context = None
    world.cluster.edit(JOB, "run-trainer-1", lambda item: item["metadata"].pop("ownerReferences"))
    world.settle()
    assert world.cluster.one(JOB, "run-trainer-1")["metadata"]["ownerReferences"]
    assert world.condition("Progressing")["status"] == "True"
    world.trainers["run"].hold_at = None
    world.until(lambda: world.phase() == "Completed")
    assert world.trainers["run"].starts == 1


def test_a_foreign_object_is_left_alone_and_named() -> None:
    world = World()
    foreign = {"metadata": {"name": "run-sandbox", "namespace": "ns"}, "spec": {"selector": {"mine": "yes"}}}
    world.cluster.put(SERVICE, foreign)
    world.create(manifest())
    assert world.cluster.one(SERVICE, "run-sandbox")["spec"] == {"selector": {"mine": "yes"}}
    assert world.condition("Progressing")["reason"] == "NameTaken"
    assert "run-sandbox" in world.condition("Progressing")["message"]
    world.cluster.remove(SERVICE, "ns", "run-sandbox")
    world.until(lambda: world.phase() == "Running")


def test_no_pod_is_made_without_what_it_rests_on() -> None:
    for kind in (CONFIG_MAP, NETWORK_POLICY, SERVICE_ACCOUNT):
        world = World()
        denied = ForbiddenError("denied by a webhook", code=403)
        world.cluster.refuse = lambda verb, of, item, kind=kind, denied=denied: denied if of is kind else None
        world.create(manifest())
        assert world.condition("Progressing")["reason"] == "Forbidden"
        assert not world.cluster.of(JOB), kind
        assert not world.cluster.of(DEPLOYMENT), kind
        assert world.cluster.of(SERVICE), "a Service runs nothing"


def test_a_pass_that_comes_early_comes_again_in_time() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 3
    world.until(lambda: world.status().get("step") == 3)
    world.end(_trainer(world))
    world.tick()
    assert not world.cluster.has(JOB, "run-trainer-2")
    key = ("ns", "run")
    world.due = {key: world.seconds()}
    world.settle()
    assert world.due[key] - world.seconds() <= 10, "the pause of the next attempt is not forgotten"
    world.until(lambda: world.cluster.has(JOB, "run-trainer-2"), ticks=4)


def test_a_quota_is_named_and_the_run_goes_on_when_it_is_raised() -> None:
    world = World()
    full = QuotaExceededError('configmaps "x" is forbidden: exceeded quota: q', code=403)
    world.cluster.refuse = lambda verb, kind, item: full if kind is CONFIG_MAP else None
    world.create(manifest())
    assert world.condition("Progressing")["reason"] == "QuotaExceeded"
    assert world.status()["reason"] == "QuotaExceeded"
    before = len(world.cluster.writes)
    world.settle()
    assert len(world.cluster.writes) == before, "it does not hammer"
    world.cluster.refuse = lambda verb, kind, item: None
    world.until(lambda: world.phase() == "Running")


def test_a_jobs_refused_pods_are_explained_by_its_events() -> None:
    world = World()
    world.plays = False
    world.create(manifest())
    world.cluster.edit(JOB, "run-trainer-1", lambda item: item.update(status={"startTime": "2026-01-01T00:00:00Z"}))
    world.settle()
    uid = world.cluster.one(JOB, "run-trainer-1")["metadata"]["uid"]
    world.cluster.put(
        EVENT,
        {
            "metadata": {"name": "e", "namespace": "ns"},
            "involvedObject": {"uid": uid},
            "reason": "FailedCreate",
            "message": "pods is forbidden: exceeded quota: gpus",
            "lastTimestamp": "2026-01-01T00:00:01Z",
        },
    )
    world.tick()
    assert world.condition("TrainersReady")["reason"] == "QuotaExceeded"
    assert "exceeded quota: gpus" in world.condition("Progressing")["message"]


def test_an_invalid_spec_is_named_and_can_be_corrected() -> None:
    world = World()
    world.create(manifest(tasks={"problemsPerMatchup": 7}))
    assert world.phase() == "Failed"
    failed = world.condition("Failed")
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"].startswith("spec.tasks.problemsPerMatchup: 7 is not allowed: a multiple of ")
    assert not world.cluster.of(JOB)
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(tasks={"problemsPerMatchup": 72}))
    world.until(lambda: world.phase() == "Completed")


def test_a_refused_podtemplate_is_named_and_disturbs_no_other_run() -> None:
    world = World()
    world.create(manifest("bad", trainer={"podTemplate": {"spec": {"hostNetwork": True}}}))
    world.create(manifest())
    assert world.condition("Progressing", "bad")["reason"] == "OverrideRefused"
    assert "hostNetwork" in world.condition("Progressing", "bad")["message"]
    world.until(lambda: world.phase() == "Completed")
    assert not [name for _, _, name in world.cluster.objects if name.startswith("bad-")]


def test_a_queue_decides_when_the_trainer_starts() -> None:
    world = World()
    world.create(manifest(scheduling={"queueName": "team"}))
    for _ in range(3):
        world.tick()
    assert world.phase() == "Pending"
    assert world.condition("TrainersReady")["reason"] == "Queued"
    world.cluster.edit(JOB, "run-trainer-1", lambda item: item["spec"].update(suspend=False))
    world.until(lambda: world.phase() == "Running")
    writes = len(world.cluster.writes)
    world.cluster.edit(JOB, "run-trainer-1", lambda item: item["spec"].update(suspend=True))
    world.settle()
    assert ("apply", "Job", "run-trainer-1") not in world.cluster.writes[writes:], "the queue owns spec.suspend"


def test_a_silent_trainer_is_noticed() -> None:
    world = World()
    world.create(manifest())
    world.trainers["run"].hold_at = 2
    world.until(lambda: world.status().get("step") == 2)
    world.answers = False
    world.until(lambda: world.condition("Progressing")["reason"] == "TrainerUnreachable", ticks=30)
    world.answers = True
    world.until(lambda: world.condition("Progressing")["reason"] == "Training", ticks=3)
    world.until(lambda: world.condition("Progressing")["reason"] == "Stalled", ticks=200)
    world.trainers["run"].hold_at = None
    world.until(lambda: world.phase() == "Completed")


def test_deletion_waits_for_the_clean_up_and_for_whoever_writes() -> None:
    world = World()
    world.create(manifest(deletionPolicy="Delete"))
    assert world.cluster.one(RUN, "run")["metadata"]["finalizers"] == ["populora.dev/cleanup"]
    world.until(lambda: world.phase() == "Running")
    world.cluster.remove(RUN, "ns", "run")
    world.settle()
    assert not world.cluster.has(JOB, "run-cleanup-1"), "the trainer still writes"
    world.until(lambda: world.cluster.has(JOB, "run-cleanup-1"))
    assert not world.pods("trainer")
    world.until(lambda: not world.cluster.has(RUN, "run"))
    assert _events(world, "CleanupDone")
    world.until(lambda: not [kind for kind, _, _ in world.cluster.objects if kind != "Event"])


def test_a_clean_up_outlives_a_deletion_in_the_foreground() -> None:
    world = World()
    world.create(manifest(deletionPolicy="Delete"))
    world.until(lambda: world.phase() == "Running")
    world.cluster.edit(RUN, "run", lambda item: item["metadata"]["finalizers"].append("foregroundDeletion"))
    world.cluster.remove(RUN, "ns", "run")
    world.until(lambda: world.cluster.has(JOB, "run-cleanup-1"))
    assert not world.cluster.one(JOB, "run-cleanup-1")["metadata"].get("ownerReferences")


def test_a_clean_up_is_given_up_on_request_and_after_its_tries() -> None:
    for way in ("request", "tries"):
        world = World()
        world.create(manifest(deletionPolicy="Delete", suspend=True))
        world.cluster.remove(RUN, "ns", "run")
        world.settle()
        world.plays = False
        assert world.cluster.has(JOB, "run-cleanup-1")
        if way == "request":
            world.cluster.edit(RUN, "run", lambda item: item["spec"].update(deletionPolicy="Retain"))
        else:
            for number in range(1, 4):
                failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "late"}
                world.cluster.edit(
                    JOB,
                    f"run-cleanup-{number}",
                    lambda item, failed=failed: item.update(status={"conditions": [failed]}),
                )
                world.settle()
        world.settle()
        assert not world.cluster.has(RUN, "run"), way
        assert _events(world, "CleanupAbandoned"), way
        assert bool(_events(world, "CleanupFailed")) == (way == "tries")


def test_a_namespace_that_is_deleted_is_not_held_up() -> None:
    world = World()
    world.create(manifest(deletionPolicy="Delete"))
    world.until(lambda: world.phase() == "Running")
    world.cluster.terminating = True
    world.cluster.remove(RUN, "ns", "run")
    world.until(lambda: not world.cluster.has(RUN, "run"), ticks=10)
    assert not world.cluster.has(JOB, "run-cleanup-1")


def test_runs_are_let_go_of_as_soon_as_the_deletion_of_their_namespace_begins() -> None:
    for spec in ({}, {"suspend": True}, {"tasks": {"problemsPerMatchup": 7}}):
        world = World()
        world.create(manifest(deletionPolicy="Delete"))
        world.cluster.edit(RUN, "run", lambda item, spec=spec: item["spec"].update(spec))
        world.settle()
        assert world.cluster.one(RUN, "run")["metadata"]["finalizers"]
        world.leaving = world.cluster.terminating = True
        world.woken = {("ns", "run")}
        world.settle()
        assert not world.cluster.one(RUN, "run")["metadata"].get("finalizers"), spec
        world.start()
        world.settle()
        assert not world.cluster.one(RUN, "run")["metadata"].get("finalizers"), "nor does another replica hold them"


def test_a_clean_up_that_waits_is_given_up_when_the_deletion_of_its_namespace_begins() -> None:
    world = World()
    world.create(manifest(deletionPolicy="Delete"))
    world.until(lambda: world.phase() == "Running")
    world.cluster.remove(RUN, "ns", "run")
    world.settle()
    assert world.cluster.has(RUN, "run"), "its trainer's pod has not ended"
    world.leaving = world.cluster.terminating = True
    world.woken = {("ns", "run")}
    world.settle()
    assert not world.cluster.has(RUN, "run")


def test_a_policy_of_retain_takes_no_finalizer_and_gives_one_back() -> None:
    world = World()
    world.create(manifest())
    assert not world.cluster.one(RUN, "run")["metadata"].get("finalizers")
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(deletionPolicy="Delete"))
    world.settle()
    assert world.cluster.one(RUN, "run")["metadata"]["finalizers"] == ["populora.dev/cleanup"]
    world.cluster.edit(RUN, "run", lambda item: item["spec"].update(deletionPolicy="Retain"))
    world.settle()
    assert not world.cluster.one(RUN, "run")["metadata"].get("finalizers")


def test_another_run_of_the_same_name_waits_for_the_children_of_the_first() -> None:
    world = World()
    world.create(manifest())
    world.until(lambda: world.phase() == "Running")
    old = world.cluster.one(JOB, "run-trainer-1")["metadata"]["uid"]
    world.cluster.remove(RUN, "ns", "run")
    world.trainers["run"].step = 0
    world.create(manifest())
    world.until(lambda: world.phase() == "Running")
    assert world.cluster.one(JOB, "run-trainer-1")["metadata"]["uid"] != old
    owners = {item["metadata"]["ownerReferences"][0]["uid"] for item in world.cluster.of(DEPLOYMENT)}
    assert owners == {world.cluster.one(RUN, "run")["metadata"]["uid"]}


def test_a_spec_that_changes_while_a_pass_goes_on_is_not_overwritten() -> None:
    world = World()
    world.create(manifest())
    done: list[int] = []

    def meddle(number: int) -> None:
        if not done and world.cluster.writes and world.trainers["run"].step == 3:
            done.append(number)
            world.cluster.edit(RUN, "run", lambda item: item["spec"].update(retries=7))

    world.cluster.before = meddle
    world.until(lambda: world.phase() == "Completed")
    assert done
    assert world.cluster.one(RUN, "run")["spec"]["retries"] == 7
    assert world.condition("Completed")["observedGeneration"] == 2


def test_thousands_of_steps_leave_the_object_small() -> None:
    world = World()
    world.create(manifest(training={"steps": 300}, evaluation={"suites": ["mbpp_plus"], "everySteps": 2}))
    world.until(lambda: world.phase() == "Completed", ticks=2000)
    status = world.status()
    assert len(status["evaluation"]) <= 64
    assert len(json.dumps(status)) < 64 * 1024
    assert len(world.cluster.of(JOB)) <= 3


def test_single_agent_runs_are_the_same_but_for_their_member() -> None:
    world = World()
    world.create(manifest(mode="SingleAgent", population={"teachers": 1, "students": 1}, evolution={"everySteps": 0}))
    world.until(lambda: world.phase() == "Completed")


def _trainer(world: World) -> str:
    (pod,) = world.pods("trainer")
    return str(pod["metadata"]["name"])


def _events(world: World, reason: str) -> list[str]:
    return [event["message"] for event in world.cluster.of(EVENT) if event["reason"] == reason]
