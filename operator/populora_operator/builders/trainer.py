"""The Job that trains, and the Service by which its pods find each other."""

from collections.abc import Sequence

from populora_operator import names
from populora_operator.builders import storage
from populora_operator.builders.config import config_volume
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.podspec import container, http_probe, pod, prefer_others, resources, shared_memory
from populora_operator.builders.sandbox import queue
from populora_operator.cluster.kinds import JOB, SERVICE

GRACE_SECONDS = 300
"""Time to finish a step, or to leave it at the last checkpoint."""

LEAVE_SECONDS = 30
"""The last part of it, in which a step that is still going on is left."""


def trainer_job(context: Context, attempt: int, *, avoid: Sequence[str] = ()) -> Manifest:
    """Return the Job of one attempt.

    It fails with its first pod that fails, as the others could not go on alone: the controller then starts the next
    attempt. Its rules put the reason into the Job's own condition, which outlives the pods: exit code 42, and
    disruptions. A pod that ends by SIGTERM, e.g. because it was deleted by hand or by Kueue, is replaced by the Job.

    Args:
        context: the run.
        attempt: its number, from 1.
        avoid: names of nodes to run on only where no other will do.
    """
    choice = context.spec.trainer
    name = names.trainer_job(context.name, attempt)
    mount, volumes = storage.volume(context, choice, "trainer")
    on_gpus = choice.gpus_per_node > 0
    made = container(
        "trainer",
        choice.image or context.images.trainer,
        context,
        command=_command(context, name),
        ports={"http": names.STATUS_PORT, "rendezvous": names.RENDEZVOUS_PORT},
        env=[{"name": "HF_HOME", "value": "/cache/huggingface"}, *addresses(context), *storage.environment(context)],
        mounts={"/cache": "cache", "/dev/shm": "shared-memory", **mount},
        read_only={names.CONFIG_FOLDER: "config"},
        resources=resources(
            choice, cpu="8" if on_gpus else "1", memory="64Gi" if on_gpus else "4Gi", gpus=choice.gpus_per_node
        ),
        startupProbe=http_probe("/healthz", names.STATUS_PORT, period=5, failures=360),
        readinessProbe=http_probe("/healthz", names.STATUS_PORT, period=5, failures=3),
        workingDir="/tmp",
    )
    template = pod(
        context,
        "trainer",
        [made],
        choice=choice,
        grace=GRACE_SECONDS,
        service_account=names.trainer(context.name),
        volumes=[config_volume(context), {"name": "cache", "emptyDir": {}}, shared_memory(), *volumes],
        restartPolicy="Never",
        subdomain=names.trainer(context.name),
    )
    if avoid:
        prefer_others(template["spec"], avoid)
    spec: Manifest = {
        "completions": choice.nodes,
        "parallelism": choice.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": failure_policy(on_disruption="FailJob"),
        "template": template,
    }
    if context.spec.scheduling.queue_name is not None:
        # Kueue owns the field from here on; the Job is never applied again.
        spec["suspend"] = True
    job = context.child(JOB, name, "trainer", spec=spec)
    job["metadata"]["annotations"] = {names.DIGEST_ANNOTATION: context.training_digest}
    queue(context, job)
    return job


def trainer_service(context: Context) -> Manifest:
    """Return the headless Service; it names pods before they are ready, as they meet before they are."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.selector(context.name, "trainer"),
        "ports": [
            {"name": "http", "port": names.STATUS_PORT, "targetPort": "http", "protocol": "TCP"},
            {"name": "rendezvous", "port": names.RENDEZVOUS_PORT, "targetPort": "rendezvous", "protocol": "TCP"},
        ],
    }
    return context.child(SERVICE, names.trainer(context.name), "trainer", spec=spec)


def addresses(context: Context) -> list[Manifest]:
    """Return the variables that tell a program whose it is and where sandboxes and vLLM are."""
    found = [
        ("POPULORA_CONTROLLED", "1"),
        ("POPULORA_SANDBOX_URL", f"http://{names.sandbox(context.name)}:{names.SANDBOX_PORT}"),
    ]
    if context.serves:
        found.append(("POPULORA_SERVING_HOST", names.serving(context.name)))
    return [{"name": name, "value": value} for name, value in found]


def failure_policy(*, on_disruption: str) -> Manifest:
    """Return how a Job takes the end of a pod, as its own condition keeps it.

    A wrong manifest fails it at once. A pod that SIGTERM ended, e.g. as it was deleted by hand, is replaced.

    Args:
        on_disruption: FailJob, or Ignore to replace a pod that was preempted, evicted or lost with its node.
    """

    def rule(action: str, code: int) -> Manifest:
        return {"action": action, "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [code]}}

    disrupted = {"action": on_disruption, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    refused, terminated = rule("FailJob", names.REFUSED_EXIT_CODE), rule("Ignore", names.TERMINATED_EXIT_CODE)
    return {"rules": [refused, disrupted, terminated]}


def _command(context: Context, job: str) -> list[str]:
    choice = context.spec.trainer
    run = ["populora", "run", f"{names.CONFIG_FOLDER}/{names.CONFIG_KEY}", "--listen", f"0.0.0.0:{names.STATUS_PORT}"]
    run += ["--leave-status", "/dev/termination-log"]
    if (folder := context.spec.storage.folder) is not None:
        run += ["--output", str(folder)]
    run += ["--grace", str(GRACE_SECONDS - LEAVE_SECONDS)]
    if (ranks := max(1, choice.gpus_per_node)) > 1:
        run += ["--ranks", str(ranks)]
    if choice.nodes > 1:
        # Pods of an Indexed Job are called JOB-INDEX, and the Service gives each of them a DNS name. Which one a pod
        # is, it finds in JOB_COMPLETION_INDEX.
        endpoint = f"{job}-0.{names.trainer(context.name)}:{names.RENDEZVOUS_PORT}"
        run += ["--nodes", str(choice.nodes), "--rendezvous", endpoint]
    return run
