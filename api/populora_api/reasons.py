"""Every reason that a condition or an Event of a PopulationRun can have; the documentation is generated from this."""

from dataclasses import dataclass
from typing import Literal

from populora_api.status import ConditionType

Place = ConditionType | Literal["Event"]
"""Where a reason appears: in a condition of this type, or in an Event only."""

_READY: tuple[Place, ...] = ("TrainersReady", "ServingReady", "SandboxesReady")
_BLOCKED: tuple[Place, ...] = (*_READY, "Progressing")


@dataclass(frozen=True)
class ReasonInfo:
    """What a reason means.

    Attributes:
        name: the word in `reason`.
        places: the conditions that can have it, or `Event`.
        meaning: what is the case, in a sentence.
        action: what a person should do, in a sentence.
    """

    name: str
    places: tuple[Place, ...]
    meaning: str
    action: str


_NOTHING = "Nothing."

_ALL = (
    # How a run goes
    ReasonInfo("Waiting", (*_BLOCKED, "AdaptersSynced"), "Nothing is known yet.", _NOTHING),
    ReasonInfo(
        "Provisioning", _BLOCKED, "Pods are being created, or are starting.", "Wait; a pod that cannot start is named."
    ),
    ReasonInfo(
        "Queued",
        _BLOCKED,
        "Kueue has not admitted the trainer's Job yet.",
        "Look at the Workload and the LocalQueue that scheduling.queueName names.",
    ),
    ReasonInfo("Ready", _READY, "All pods that are wanted are ready.", _NOTHING),
    ReasonInfo(
        "NotNeeded",
        ("ServingReady", "AdaptersSynced"),
        "The run samples in the trainer process (inference.engine is Transformers), so there is no vLLM.",
        _NOTHING,
    ),
    ReasonInfo("Synced", ("AdaptersSynced",), "Every vLLM pod serves what the trainer has published.", _NOTHING),
    ReasonInfo(
        "Syncing",
        ("AdaptersSynced",),
        "A vLLM pod does not serve what the trainer has published last: it is not ready, or its sidecar is behind. "
        "Rollouts go to the other pods.",
        "Wait; read the message, and look at ServingReady and at the sidecar's log if it stays.",
    ),
    ReasonInfo("Training", ("Progressing",), "The trainer takes steps.", _NOTHING),
    ReasonInfo("Evaluating", ("Progressing",), "Training is complete and the members are being evaluated.", _NOTHING),
    ReasonInfo(
        "Restarting",
        ("TrainersReady", "Progressing", "Event"),
        "The trainer starts again at its last checkpoint because the spec, or its Job, was changed. Not counted.",
        _NOTHING,
    ),
    ReasonInfo(
        "Retrying",
        ("TrainersReady", "Progressing"),
        "The trainer failed and starts again at its last checkpoint; the failure counts against spec.retries.",
        "Read the message; the failed Job and its pods are kept until the next attempt fails.",
    ),
    ReasonInfo(
        "NodeFault",
        ("TrainersReady", "Progressing", "Event"),
        "A trainer pod was preempted, evicted or lost with its node; it starts again at its last checkpoint, for half "
        "an hour rather on nodes that have not failed it. Not counted.",
        "Nothing, unless it happens again and again; the message names the node.",
    ),
    ReasonInfo(
        "TrainerUnreachable",
        ("Progressing",),
        "The trainer's pod is ready and has not answered the controller's GET /status for a minute.",
        "Look at the trainer's log; a NetworkPolicy may keep the controller off port 9090.",
    ),
    ReasonInfo(
        "Stalled",
        ("Progressing",),
        "The trainer answers and has taken no step for ten times as long as a step takes, at least ten minutes.",
        "Look at the trainer's log and at ServingReady and SandboxesReady; deleting the trainer's pod restarts it at "
        "its last checkpoint.",
    ),
    # What keeps pods from running
    ReasonInfo(
        "Unschedulable",
        _BLOCKED,
        "No node can take a pod; the message is the scheduler's.",
        "Add nodes or free GPUs, or change resources, nodeSelector or tolerations in the spec.",
    ),
    ReasonInfo(
        "ImagePullFailed",
        _BLOCKED,
        "An image cannot be pulled.",
        "Check the image in the spec or in the controller's options, and --image-pull-secret.",
    ),
    ReasonInfo(
        "S3CredentialsMissing",
        _BLOCKED,
        "The Secret of storage.credentialsSecretRef, or a key of it, does not exist.",
        "Create the Secret with the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; pods start by themselves then.",
    ),
    ReasonInfo(
        "ContainerNotStarted",
        _BLOCKED,
        "The node cannot start a container, e.g. for a ConfigMap or Secret that does not exist.",
        "Read the message; what it names usually comes from podTemplate.",
    ),
    ReasonInfo(
        "Crashing",
        _READY,
        "A container of a Deployment fails again and again.",
        "Read the message, which has the last line of its log, and `kubectl logs --previous`.",
    ),
    ReasonInfo(
        "QuotaExceeded",
        _BLOCKED,
        "A ResourceQuota of the namespace does not allow a pod or an object.",
        "Raise the quota or ask for less; the controller tries again by itself.",
    ),
    ReasonInfo(
        "Forbidden",
        _BLOCKED,
        "The API server forbids a pod or an object, by Pod Security, an admission webhook or missing permissions.",
        "Read the message; the controller tries again by itself.",
    ),
    ReasonInfo(
        "InvalidChild",
        ("Progressing",),
        "The API server says that an object made for the run is not valid, usually because of a podTemplate.",
        "Correct the field that the message names.",
    ),
    ReasonInfo(
        "NameTaken",
        ("Progressing",),
        "An object that the run needs exists already and belongs to something else; it is left alone.",
        "Delete or rename that object, or give the run another name.",
    ),
    ReasonInfo(
        "OverrideRefused",
        ("Progressing",),
        "A podTemplate sets something that the isolation of pods rests on; no pod of it is made or changed.",
        "Take the field that the message names out of the podTemplate.",
    ),
    # Suspension
    ReasonInfo("NotSuspended", ("Suspended",), "spec.suspend is false.", _NOTHING),
    ReasonInfo(
        "Suspending",
        (*_BLOCKED, "AdaptersSynced", "Suspended"),
        "Pods are given time to write a checkpoint.",
        "Wait.",
    ),
    ReasonInfo(
        "Suspended",
        (*_BLOCKED, "AdaptersSynced", "Suspended"),
        "spec.suspend is true and every pod is gone; the run goes on at the same step when it is set to false.",
        '`kubectl patch prun NAME --type=merge -p \'{"spec":{"suspend":false}}\'` to go on.',
    ),
    # Ends
    ReasonInfo("Running", ("Completed", "Failed"), "The run has not ended; the condition is False.", _NOTHING),
    ReasonInfo(
        "StepsDone", ("Completed",), "All training.steps are done, and the evaluation if one was asked for.", _NOTHING
    ),
    ReasonInfo(
        "Finished",
        (*_BLOCKED, "AdaptersSynced", "Completed", "Failed"),
        "The run has ended and its pods are gone.",
        _NOTHING,
    ),
    ReasonInfo(
        "InvalidSpec",
        (*_BLOCKED, "AdaptersSynced", "Failed"),
        "The spec breaks a rule that the API server did not check. What runs is left as it is.",
        "Correct the field that the message names; the run goes on by itself then.",
    ),
    ReasonInfo(
        "ManifestRefused",
        ("Failed",),
        "The trainer ended with exit code 42: this manifest cannot be trained, however often it is tried.",
        "Read the message, correct the manifest and make a new run.",
    ),
    ReasonInfo(
        "OOMKilled",
        ("TrainersReady", "Progressing", "Failed", "Event"),
        "A container used more memory than its limit, as often as spec.retries allows.",
        "Raise trainer.resources.limits.memory or lower training.tokensPerMicroBatch, and make a new run on the same "
        "storage.uri, which goes on at the last checkpoint.",
    ),
    ReasonInfo(
        "TrainerFailed",
        ("TrainersReady", "Progressing", "Failed", "Event"),
        "The trainer ended with an error, as often as spec.retries allows; the message has its last words.",
        "Read the message and the log of the kept pod.",
    ),
    ReasonInfo(
        "DeadlineExceeded",
        ("Failed",),
        "The run was not suspended for longer than spec.activeDeadlineSeconds.",
        "Make a new run on the same storage.uri with a longer deadline; it goes on at the last checkpoint.",
    ),
    ReasonInfo(
        "EvaluationFailed",
        ("Failed", "Event"),
        "An evaluation failed; adapters and checkpoints are in storage. The last one's failure fails the run; an "
        "earlier one's is told by an Event, and the run goes on.",
        "Read the message: what was trained is stored, whatever became of its evaluation.",
    ),
    # Events
    ReasonInfo("Started", ("Event",), "A trainer is started.", _NOTHING),
    ReasonInfo("Resumed", ("Event",), "spec.suspend became false.", _NOTHING),
    ReasonInfo("Completed", ("Event",), "The run has ended as it should.", _NOTHING),
    ReasonInfo(
        "VolatileStorage",
        ("Event",),
        "storage.uri is a file:// folder and no volume is mounted there: checkpoints go with the trainer's pod.",
        "Mount a PersistentVolumeClaim there in trainer.podTemplate, or use s3://.",
    ),
    ReasonInfo("CleanupStarted", ("Event",), "The run is deleted and a Job deletes what it has stored.", _NOTHING),
    ReasonInfo("CleanupDone", ("Event",), "Everything that the run has stored is deleted.", _NOTHING),
    ReasonInfo(
        "CleanupFailed",
        ("Event",),
        "The clean-up Job failed; it is tried again for half an hour after the deletion.",
        "Read the message. To give up at once: "
        '`kubectl patch prun NAME --type=merge -p \'{"spec":{"deletionPolicy":"Retain"}}\'`.',
    ),
    ReasonInfo(
        "CleanupAbandoned",
        ("Event",),
        "What the run has stored could not be deleted in time; the run is deleted and storage.uri is left as it is.",
        "Delete the folder storage.uri by hand.",
    ),
    ReasonInfo("Expired", ("Event",), "ttlSecondsAfterFinished is over: the run is deleted.", _NOTHING),
)

REASONS: dict[str, ReasonInfo] = {info.name: info for info in _ALL}
"""The list, in the order in which it is documented."""
