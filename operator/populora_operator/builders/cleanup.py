"""The Job that deletes what a run has stored, before the run's object goes."""

from populora_api.spec import Pods
from populora_operator import names
from populora_operator.builders import storage
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.podspec import container, pod
from populora_operator.cluster.kinds import JOB

GRACE_SECONDS = 10
DEADLINE_SECONDS = 600
KEPT_SECONDS = 300


def cleanup_job(context: Context, number: int, *, owned: bool) -> Manifest:
    """Return the Job of one try.

    It rests on no other child, as those may go before it: its identity is the user's ServiceAccount if there is one in
    the trainer's podTemplate, else the namespace's default.

    Args:
        context: the run.
        number: of the try, counted from 1.
        owned: False where the run is deleted in the foreground: the garbage collector would delete a Job that the run
            owns before it has done its work. Such a Job deletes itself later.
    """
    trainer = context.spec.trainer
    mount, volumes = storage.volume(context, trainer, "trainer")
    made = container(
        "trainer",
        trainer.image or context.images.trainer,
        context,
        command=["populora", "storage", "delete", context.spec.storage.uri],
        env=storage.environment(context),
        mounts=mount,
        resources={"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        workingDir="/tmp",
    )
    choice = Pods(
        node_selector=trainer.node_selector, tolerations=trainer.tolerations, pod_template=trainer.pod_template
    )
    template = pod(
        context,
        "cleanup",
        [made],
        choice=choice,
        grace=GRACE_SECONDS,
        volumes=volumes,
        restartPolicy="Never",
    )
    spec = {
        "backoffLimit": 3,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "template": template,
    }
    return context.child(JOB, names.cleanup_job(context.name, number), "cleanup", owned=owned, spec=spec)
