"""A run's life on a fake API server, from creation to its end."""

from fake_world import World, manifest

from populora_operator.cluster.kinds import CONFIG_MAP, DEPLOYMENT, JOB, SERVICE


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
