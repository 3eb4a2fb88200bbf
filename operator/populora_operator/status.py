"""The status of a run as a pure function of what was decided and observed.

Equal inputs give equal status: a time changes only with the condition that it belongs to, so that nothing is written
unless something has changed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from populora_api.status import (
    Best,
    Condition,
    ConditionType,
    EvaluationResult,
    MemberStatus,
    Phase,
    Role,
    Status,
)
from populora_operator import failures, names
from populora_operator.builders.context import Context
from populora_operator.failures import Failure
from populora_operator.lifecycle import Decision, Stage, active_seconds, has_ended, live_pods
from populora_operator.observed import Deployment, Job, Observed
from populora_operator.progress import Member, Progress
from populora_operator.subject import Subject

MAX_EVALUATIONS = 64
MESSAGE_LENGTH = 1024
MAX_URI_CHARACTERS = 8192
DECIMALS = 4
UNREACHABLE_AFTER = timedelta(seconds=60)
SYNC_SECONDS = 30.0  # that vLLM may take to serve a step's adapters before the condition says so
STALLED_AFTER = timedelta(minutes=10)
STALLED_STEPS = 10
_ROLES: dict[str, Role] = {"teacher": "teacher", "student": "student", "agent": "agent"}
_READ = "The spec must be put right first."
_TRANSIENT = ("Retrying", "Restarting", "NodeFault")

Value = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Heartbeat:
    """What is known of the trainer's answers, by the controller's clock.

    Attributes:
        progress: the newest answer, None before the first.
        listening: a trainer is there that should answer.
        silent: for how long the trainer's pod has been ready without answering.
        still: for how long it has answered with the same step.
    """

    progress: Progress | None = None
    listening: bool = False
    silent: timedelta = timedelta(0)
    still: timedelta = timedelta(0)

    @property
    def stalled(self) -> bool:
        """Whether a step takes far longer than steps take."""
        pace = self.progress.seconds_per_step if self.progress is not None else None
        return self.still > max(STALLED_AFTER, timedelta(seconds=STALLED_STEPS * (pace or 0.0)))


@dataclass(frozen=True)
class _Verdict:
    """Value, reason and message of a condition, without its times."""

    status: Value
    reason: str
    message: str = ""


@dataclass(frozen=True, eq=False)
class Situation:
    """Everything that a status is made from.

    Attributes:
        subject: the run as the API server has it.
        context: the same for builders; None where the spec is not valid.
        decision: what is to be.
        observed: its children.
        heartbeat: of the trainer.
        obstacle: why the API server refuses a child or a Job's pods, None where it does not.
        waits: why a child is not made yet.
        now: the time, with its zone.
    """

    subject: Subject
    context: Context | None
    decision: Decision
    observed: Observed
    heartbeat: Heartbeat
    obstacle: Failure | None
    waits: str | None
    now: datetime

    @property
    def job(self) -> Job | None:
        """The trainer's present Job."""
        found = self.observed.job(names.trainer_job(self.subject.name, self.decision.attempt))
        return found if found is not None and found.owner == self.subject.uid else None


def compute(situation: Situation) -> Status:
    """Return the status that the run should have now."""
    old, stage = situation.subject.status, situation.decision.stage
    if stage in (Stage.DELETING, Stage.GONE):
        return old
    now = situation.now.replace(microsecond=0)
    verdicts = _verdicts(situation)
    conditions = tuple(_condition(situation, kind, verdict, now) for kind, verdict in verdicts.items())
    phase = _phase(situation, verdicts)
    return _with_progress(
        Status(
            phase=phase,
            reason=_reason(phase, verdicts),
            step=old.step,
            steps=_steps(situation),
            progress_percent=old.progress_percent,
            estimated_seconds_remaining=old.estimated_seconds_remaining,
            attempts=old.attempts if stage in (Stage.INVALID, Stage.BLOCKED) else situation.decision.attempt,
            failed_nodes=situation.decision.failed_nodes or old.failed_nodes,
            gpus=_gpus(situation),
            active_seconds=_active_seconds(situation, verdicts),
            evaluated_step=situation.decision.evaluated,
            observed_generation=situation.subject.generation,
            members=old.members,
            best=old.best,
            solve_rate=old.solve_rate,
            coverage=old.coverage,
            evaluation=_evaluation(old.evaluation or (), situation.decision.scores),
            conditions=conditions,
        ),
        situation,
    )


def are_equal(one: Status, other: Status) -> bool:
    """Whether two statuses say the same; the API server may keep conditions in another order."""
    return _ordered(one) == _ordered(other)


def _ordered(status: Status) -> Status:
    conditions = sorted(status.conditions or (), key=lambda condition: condition.type)
    return status.model_copy(update={"conditions": tuple(conditions)})


def plain(status: Status) -> dict[str, object]:
    """Return a status as the API server spells it."""
    return status.model_dump(mode="json", exclude_none=True)


def _verdicts(s: Situation) -> dict[ConditionType, _Verdict]:
    stopped = _stopped(s)
    trainers = stopped or _trainers(s)
    serving = stopped or _serving(s)
    sandboxes = stopped or _sandboxes(s)
    return {
        "TrainersReady": trainers,
        "ServingReady": _not_needed(s) or serving,
        "SandboxesReady": sandboxes,
        "AdaptersSynced": _not_needed(s) or stopped or _adapters(s, serving),
        "Progressing": stopped or _progressing(s, (trainers, serving, sandboxes)),
        "Suspended": _suspended(s),
        "Completed": _completed(s),
        "Failed": _failed(s),
    }


def _stopped(s: Situation) -> _Verdict | None:
    """Return what all conditions of a run say that neither works nor should, None for another."""
    match s.decision.stage:
        case Stage.COMPLETED | Stage.FAILED:
            return _Verdict("False", "Finished", "The run has ended.")
        case Stage.INVALID:
            return _Verdict("False", "InvalidSpec", _clip(s.subject.problem or ""))
        case Stage.SUSPENDED:
            reason = "Suspended" if is_still(s.observed) else "Suspending"
            return _Verdict("False", reason, "spec.suspend is true.")
        case _:
            return None


def is_still(observed: Observed) -> bool:
    """Whether nothing of the run works any more."""
    pods = live_pods(observed, "trainer", "serving", "sandbox", "evaluation")
    return not pods and all(job.finished for job in observed.jobs)


def _trainers(s: Situation) -> _Verdict:
    if s.context is None or s.decision.stage is Stage.BLOCKED:
        return _Verdict("Unknown", "Waiting", _READ)
    if s.decision.stage is Stage.EVALUATING:
        return _Verdict("False", "Finished", "All steps are done.")
    job, wanted = s.job, s.context.spec.trainer.nodes
    if job is not None and not job.finished and not job.deleting and not s.decision.restart:
        pods = s.observed.pods_of(job)
        ready = sum(pod.ready for pod in pods)
        if ready >= wanted:
            return _Verdict("True", "Ready", f"{ready} of {wanted} trainer pods are ready.")
        if (problem := failures.of_pods(pods, credentials=_credentials(s.context))) is not None:
            return _Verdict("False", problem.reason, _clip(problem.message))
        if job.suspended:
            queue = s.context.spec.scheduling.queue_name
            return _Verdict("False", "Queued", f"{job.name} waits for the LocalQueue {queue}.")
    if s.obstacle is not None and s.obstacle.reason in ("QuotaExceeded", "Forbidden"):
        return _Verdict("False", s.obstacle.reason, _clip(s.obstacle.message))
    if s.decision.failure is not None:
        reason = "Retrying" if s.decision.failure.charged else s.decision.failure.reason
        return _Verdict("False", reason, _clip(" ".join(filter(None, (_again(s), s.waits)))))
    old = s.subject.condition("TrainersReady")
    if old is not None and old.reason in _TRANSIENT and old.status == "False":
        return _Verdict("False", old.reason, old.message)
    return _Verdict("False", "Provisioning", s.waits or "The trainer's pods are not ready yet.")


def _again(s: Situation) -> str:
    failure = s.decision.failure
    assert failure is not None
    assert s.context is not None
    if not failure.charged:
        return f"The trainer starts again at its last checkpoint: {failure.message}"
    tries = s.context.spec.retries + 1
    return f"Attempt {s.decision.attempt} of {tries} follows: {failure.reason}: {failure.message}"


def _serving(s: Situation) -> _Verdict:
    if s.context is None or s.decision.stage is Stage.BLOCKED:
        return _Verdict("Unknown", "Waiting", _READ)
    if s.decision.stage is Stage.EVALUATING:
        return _Verdict("False", "Finished", "All steps are done.")
    return _deployed(s, names.serving(s.subject.name), "serving", "vLLM", s.context.spec.inference.replicas)


def _sandboxes(s: Situation) -> _Verdict:
    if s.context is None or s.decision.stage is Stage.BLOCKED:
        return _Verdict("Unknown", "Waiting", _READ)
    return _deployed(s, names.sandbox(s.subject.name), "sandbox", "sandbox", s.context.spec.sandbox.replicas)


def _deployed(s: Situation, name: str, component: str, what: str, wanted: int) -> _Verdict:
    assert s.context is not None
    deployment: Deployment | None = s.observed.deployment(name)
    ready = deployment.ready if deployment is not None else 0
    message = f"{ready} of {wanted} {what} pods are ready."
    if deployment is not None and deployment.current and deployment.wanted == wanted and ready >= wanted:
        return _Verdict("True", "Ready", message)
    problem = failures.of_deployment(deployment) or failures.of_pods(
        s.observed.pods(component), credentials=_credentials(s.context)
    )
    if problem is not None:
        return _Verdict("False", problem.reason, _clip(f"{message} {problem.message}"))
    return _Verdict("False", "Provisioning", message)


def _not_needed(s: Situation) -> _Verdict | None:
    if s.context is None or s.context.serves:
        return None
    return _Verdict("True", "NotNeeded", "inference.engine is Transformers.")


def _adapters(s: Situation, serving: _Verdict) -> _Verdict:
    if serving.reason in ("Waiting", "Finished"):
        return serving
    told = s.heartbeat.progress.serving if s.heartbeat.listening and s.heartbeat.progress is not None else None
    # Every step publishes, so what is served is behind for a moment each time.
    if told is not None and told.synced < told.replicas and (not told.waiting or told.sync_seconds > SYNC_SECONDS):
        message = f"{told.synced} of {told.replicas} vLLM pods serve the adapters of step {told.published_step}."
        return _Verdict("False", "Syncing", _clip(f"{message} {told.message}".strip()))
    if serving.status != "True":
        return _Verdict("False", "Syncing", serving.message)
    return _Verdict("True", "Synced", "Every vLLM pod serves what the trainer has published.")


def _progressing(s: Situation, parts: Sequence[_Verdict]) -> _Verdict:
    if s.decision.stage is Stage.BLOCKED:
        return _Verdict("False", "OverrideRefused", _clip(" ".join(s.subject.refused)))
    if s.obstacle is not None:
        return _Verdict("False", s.obstacle.reason, _clip(s.obstacle.message))
    trainers, *others = parts
    if s.decision.stage is Stage.EVALUATING:
        return _Verdict("True", "Evaluating", f"The members of step {s.decision.evaluate} are being evaluated.")
    if trainers.status != "True":
        blocking = [part for part in (trainers, *others) if part.reason not in ("Provisioning", "Ready", "Waiting")]
        worst = blocking[0] if blocking else trainers
        return _Verdict("False", worst.reason, worst.message)
    if s.heartbeat.silent > UNREACHABLE_AFTER:
        message = f"The trainer has not answered GET /status for {_rounded(s.heartbeat.silent)}."
        return _Verdict("False", "TrainerUnreachable", message)
    if s.heartbeat.progress is not None and s.heartbeat.stalled:
        message = f"Step {s.heartbeat.progress.step + 1} takes longer than {_rounded(s.heartbeat.still)}."
        return _Verdict("False", "Stalled", message)
    return _Verdict("True", "Training", "The trainer takes steps.")


def _rounded(time: timedelta) -> str:
    """Return a time in words that change rarely, so that a condition is not written again and again."""
    minutes = int(time.total_seconds() // 60)
    steps = next((size for size in (1, 5, 10, 30, 60, 180, 720, 1440) if minutes < 5 * size), 1440)
    return f"{max(1, minutes // steps * steps)} min"


def _suspended(s: Situation) -> _Verdict:
    if s.decision.stage is Stage.SUSPENDED:
        if is_still(s.observed):
            return _Verdict("True", "Suspended", "Every pod is gone; the last checkpoint is kept.")
        return _Verdict("False", "Suspending", "Pods are given time to write a checkpoint.")
    if s.context is None:
        old = s.subject.condition("Suspended")
        return _Verdict(old.status, old.reason, old.message) if old else _Verdict("False", "NotSuspended", _READ)
    return _Verdict("False", "NotSuspended", "Nothing asks for a pause.")


def _completed(s: Situation) -> _Verdict:
    if s.decision.stage is Stage.COMPLETED:
        old = s.subject.condition("Completed")
        if old is not None and old.status == "True":
            return _Verdict("True", old.reason, old.message)
        return _Verdict("True", "StepsDone", "All training steps are done.")
    if s.decision.stage is Stage.FAILED:
        return _Verdict("False", "Finished", "The run has failed.")
    return _Verdict("False", "Running", "The run has not ended.")


def _failed(s: Situation) -> _Verdict:
    if s.decision.stage is Stage.INVALID:
        return _Verdict("True", "InvalidSpec", _clip(s.subject.problem or ""))
    if s.decision.stage is Stage.COMPLETED:
        return _Verdict("False", "Finished", "The run has completed.")
    if s.decision.stage is Stage.FAILED:
        if s.decision.failure is not None:
            return _Verdict("True", s.decision.failure.reason, _clip(s.decision.failure.message))
        old = s.subject.condition("Failed")
        assert old is not None
        return _Verdict("True", old.reason, old.message)
    return _Verdict("False", "Running", "The run has not failed.")


def _condition(s: Situation, kind: ConditionType, verdict: _Verdict, now: datetime) -> Condition:
    old = s.subject.condition(kind)
    changed = old is None or old.status != verdict.status
    return Condition(
        type=kind,
        status=verdict.status,
        reason=verdict.reason,
        message=verdict.message,
        observed_generation=s.subject.generation,
        last_transition_time=now if old is None or changed else old.last_transition_time,
    )


def _phase(s: Situation, verdicts: dict[ConditionType, _Verdict]) -> Phase:
    match s.decision.stage:
        case Stage.COMPLETED:
            return "Completed"
        case Stage.FAILED | Stage.INVALID:
            return "Failed"
        case Stage.EVALUATING:
            return "Evaluating"
        case Stage.SUSPENDED:
            if verdicts["Suspended"].status == "True":
                return "Suspended"
            return s.subject.status.phase or "Pending"
        case Stage.BLOCKED:
            return s.subject.status.phase or "Pending"
    if verdicts["TrainersReady"].status == "True":
        return "Running"
    job = s.job
    waiting = job is None or job.suspended or (s.obstacle is not None)
    return "Pending" if waiting and not live_pods(s.observed, "trainer") else "Provisioning"


def _reason(phase: Phase, verdicts: dict[ConditionType, _Verdict]) -> str:
    match phase:
        case "Completed" | "Failed" | "Suspended":
            return verdicts[phase].reason
        case _:
            return verdicts["Progressing"].reason


def _active_seconds(s: Situation, verdicts: dict[ConditionType, _Verdict]) -> int | None:
    old = s.subject.condition("Suspended")
    if old is not None and old.status == "False" and verdicts["Suspended"].status == "True":
        return active_seconds(s.subject, s.now)
    return s.subject.status.active_seconds


def _gpus(s: Situation) -> int | None:
    match s.decision.stage:
        case Stage.TRAINING:
            return s.context.gpus if s.context is not None else None
        case Stage.INVALID | Stage.BLOCKED:
            return s.subject.status.gpus
        case _:
            return 0


def _evaluation(
    old: tuple[EvaluationResult, ...], new: tuple[EvaluationResult, ...]
) -> tuple[EvaluationResult, ...] | None:
    """Return the newest scores, an evaluation's in place of earlier ones of the same step."""
    steps = {score.step for score in new}
    scores = (*(score for score in old if score.step not in steps), *new)[-MAX_EVALUATIONS:]
    return scores or None


def _steps(s: Situation) -> int | None:
    """Return the steps that are asked for; what is asked of a run that has ended is not heeded any more."""
    if s.context is None or has_ended(s.subject):
        return s.subject.status.steps
    return s.context.spec.training.steps


def _percent(step: int, steps: int | None) -> float:
    return round(100.0 * min(1.0, step / steps), 2) if steps else 100.0


def _with_progress(status: Status, s: Situation) -> Status:
    """Return the status with what the trainer has told, if it has told of a step that is not in the status yet."""
    progress, old = s.heartbeat.progress, s.subject.status
    if has_ended(s.subject):
        return status
    ended = s.decision.stage in (Stage.EVALUATING, Stage.COMPLETED)
    if ended:
        step = max(status.steps or 0, old.step or 0, progress.step if progress is not None else 0)
        done = {"step": step, "progress_percent": 100.0, "estimated_seconds_remaining": 0}
        status = status.model_copy(update=done)
    elif status.steps != old.steps and old.step is not None:
        share = {"progress_percent": _percent(old.step, status.steps), "estimated_seconds_remaining": None}
        status = status.model_copy(update=share)
    if progress is None or (progress.step == old.step and old.members is not None and status.steps == old.steps):
        return status
    steps = status.steps or progress.steps
    left = max(0, steps - progress.step)
    pace = progress.seconds_per_step
    remaining = progress.estimated_seconds_remaining if pace is None else pace * left
    told = {
        "step": min(progress.step, 1_000_000),
        "progress_percent": _percent(progress.step, steps),
        "estimated_seconds_remaining": None if remaining is None else round(remaining),
        "members": tuple(_members(progress.members, s.context)) or old.members,  # a short answer leaves them out
        "best": Best(teacher=progress.best.teacher, student=progress.best.student),
        "solve_rate": progress.solve_rate,
        "coverage": progress.coverage,
    }
    if ended:
        told = {name: value for name, value in told.items() if name not in done}
    return status.model_copy(update=told)


def _members(members: Sequence[Member], context: Context | None) -> Iterable[MemberStatus]:
    folder = f"{context.spec.storage.uri.rstrip('/')}/adapters" if context is not None else ""
    # The digest alone names an adapter; the longer text is left out where it would fill the object.
    tell = bool(folder) and len(members) * len(folder) <= MAX_URI_CHARACTERS
    for member in members:
        uri = f"{folder}/{member.digest}" if tell and member.digest else None
        yield MemberStatus(
            name=member.name,
            role=_ROLES.get(member.role, "agent"),
            generation=member.generation,
            mu=round(member.mu, DECIMALS),
            sigma=round(member.sigma, DECIMALS),
            lcb=round(member.lcb, DECIMALS),
            adapter_uri=uri,
            digest=member.digest,
        )


def _credentials(context: Context) -> str | None:
    reference = context.spec.storage.credentials_secret_ref
    return reference.name if reference is not None else None


def _clip(message: str) -> str:
    return message if len(message) <= MESSAGE_LENGTH else f"{message[: MESSAGE_LENGTH - 3]}..."
