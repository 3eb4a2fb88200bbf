"""The Job that runs the benchmarks on the members of one step."""

from populora_operator import names
from populora_operator.builders import storage
from populora_operator.builders.config import config_volume
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.podspec import container, pod, resources, shared_memory
from populora_operator.builders.sandbox import queue
from populora_operator.builders.trainer import addresses, failure_policy
from populora_operator.cluster.kinds import JOB

GRACE_SECONDS = 30
TRIES = 3


def evaluation_job(context: Context, step: int) -> Manifest:
    """Return the Job; its pod says its scores in the termination message, see `progress.read_scores`."""
    choice, spec = context.spec.trainer, context.spec
    mount, volumes = storage.volume(context, choice, "trainer")
    gpus = min(1, choice.gpus_per_node) if not context.serves else spec.inference.gpus_per_replica
    suites = [word for suite in spec.evaluation.suites for word in ("--suite", suite)]
    made = container(
        # It has the trainer's name, so that what the user's podTemplate mounts there is mounted here.
        "trainer",
        choice.image or context.images.trainer,
        context,
        command=["populora", "evaluate", spec.storage.uri],
        args=["--step", str(step), "--members", spec.evaluation.members, *suites],
        env=[{"name": "HF_HOME", "value": "/cache/huggingface"}, *addresses(context), *storage.environment(context)],
        mounts={"/cache": "cache", "/dev/shm": "shared-memory", **mount},
        read_only={names.CONFIG_FOLDER: "config"},
        resources=resources(choice, cpu="4" if gpus else "1", memory="64Gi" if gpus else "4Gi", gpus=gpus),
        workingDir="/tmp",
    )
    template = pod(
        context,
        "evaluation",
        [made],
        choice=choice,
        grace=GRACE_SECONDS,
        service_account=names.trainer(context.name),
        volumes=[config_volume(context), {"name": "cache", "emptyDir": {}}, shared_memory(), *volumes],
        restartPolicy="Never",
    )
    job_spec: Manifest = {
        "backoffLimit": TRIES - 1,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": failure_policy(on_disruption="Ignore"),
        "template": template,
    }
    if spec.scheduling.queue_name is not None:
        job_spec["suspend"] = True
    job = context.child(JOB, names.evaluation_job(context.name, step), "evaluation", spec=job_spec)
    queue(context, job)
    return job
