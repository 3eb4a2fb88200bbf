"""Where a run is in its life, decided anew each time from what is recorded in its status and what its children say.

Nothing else is remembered, so a controller that is killed anywhere goes on where another one would:

- `status.attempts` names the trainer's Job. A charged failure is charged by writing attempts + 1; only then is the next
  Job made. Killed before the write, the same failed Job is found and charged once; killed after it, the next Job is
  missing and made.
- A failure that is not charged leaves attempts as they are: the Job is deleted and made again under its name. Killed
  between the two, the Job is missing and made.
- A run ends by the write of Completed or Failed; only then are its children taken away. A run that has ended is never
  started again, whatever happens to its Jobs.
- `status.evaluatedStep` is written when an evaluation has ended, and an evaluated step is not evaluated again.
- The clock of activeDeadlineSeconds is `status.activeSeconds` and the time of the condition Suspended, which are
  written together.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, auto

from populora_api.status import EvaluationResult, FailedNode
from populora_operator import failures, names
from populora_operator.builders.context import Context
from populora_operator.failures import Failure
from populora_operator.observed import Job, Observed, Pod
from populora_operator.progress import read_scores
from populora_operator.subject import Subject

CLEANUP_PATIENCE = timedelta(minutes=30)
CLEANUP_TRIES = 3
FIRST_RETRY = timedelta(seconds=10)
LAST_RETRY = timedelta(minutes=5)
"""Pause before an attempt that follows a failure: it doubles with each."""

AVOIDANCE = timedelta(minutes=30)
AVOIDED_NODES = 8
"""For how long, and how many of, the nodes that have failed the trainer are avoided."""


class Stage(Enum):
    """Where a run is in its life."""

    INVALID = auto()  # the spec cannot be read: what there is stays as it is
    BLOCKED = auto()  # a podTemplate is refused: what there is stays as it is
    TRAINING = auto()
    SUSPENDED = auto()  # asked to be; pods may still be ending
    EVALUATING = auto()  # all steps are done
    COMPLETED = auto()
    FAILED = auto()
    DELETING = auto()  # the object goes once what is stored is deleted
    GONE = auto()  # the object goes, and the garbage collector takes the children


@dataclass(frozen=True)
class Decision:
    """What is to be.

    Attributes:
        stage: where the run is.
        attempt: number of the trainer's Job, from 1.
        failure: why the run has failed, or why its trainer is started again.
        restart: the trainer's Job is to be deleted, to be made again.
        not_before: when the trainer may be started again, None for at once.
        evaluate: step that is to be evaluated now.
        evaluated: last step whose evaluation has ended.
        scores: of evaluations that have just ended.
        evaluation_failure: why the evaluation that has just ended failed.
        failed_nodes: nodes that have failed the trainer, newest last.
    """

    stage: Stage
    attempt: int = 1
    failure: Failure | None = None
    restart: bool = False
    not_before: datetime | None = None
    evaluate: int | None = None
    evaluated: int | None = None
    scores: tuple[EvaluationResult, ...] = ()
    evaluation_failure: Failure | None = None
    failed_nodes: tuple[FailedNode, ...] = ()

    def avoids(self, now: datetime) -> tuple[str, ...]:
        """Return the nodes that the trainer should rather not run on."""
        return tuple(node.name for node in self.failed_nodes if now - node.at < AVOIDANCE)


def decide(subject: Subject, context: Context | None, observed: Observed, step: int | None, now: datetime) -> Decision:
    """Return what is to be.

    Args:
        subject: the run as the API server has it.
        context: the same for builders; None where the spec is not valid.
        observed: its children.
        step: last step that the trainer has told.
        now: the time, with its zone.
    """
    attempt = _attempt(subject, observed)
    evaluated = subject.status.evaluated_step
    if subject.deleted_at is not None:
        return Decision(Stage.DELETING if subject.held else Stage.GONE, attempt, evaluated=evaluated)
    if has_ended(subject):
        ended = Stage.COMPLETED if subject.is_true("Completed") else Stage.FAILED
        return Decision(ended, attempt, evaluated=evaluated)
    if context is None:
        return Decision(Stage.INVALID, attempt, evaluated=evaluated)
    if subject.refused:
        return Decision(Stage.BLOCKED, attempt, evaluated=evaluated)
    if (late := _too_late(subject, context, now)) is not None:
        return Decision(Stage.FAILED, attempt, late, evaluated=evaluated)
    job = _own_job(subject, observed, names.trainer_job(subject.name, attempt))
    if _is_trained(subject, context, job, step):
        return _after_training(subject, context, observed, attempt, step)
    if context.spec.suspend:
        return Decision(Stage.SUSPENDED, attempt, evaluated=evaluated)
    return _training(subject, context, observed, job, attempt, step, now)


def _is_trained(subject: Subject, context: Context, job: Job | None, step: int | None) -> bool:
    """Whether the trainer has done all steps, also those that were added as it ended or while it is evaluated."""
    if subject.status.phase != "Evaluating" and (job is None or not job.complete):
        return False
    if job is not None and job.digest == context.training_digest:
        return True
    return _reached(subject, step) >= context.spec.training.steps


def _reached(subject: Subject, step: int | None) -> int:
    """Return the last step that is known to be done: the trainer's last word may have been missed, or forgotten."""
    return max(step or 0, subject.status.step or 0)


def has_ended(subject: Subject) -> bool:
    """Whether the run has ended for good. An invalid spec is no end: it can be corrected."""
    failed = subject.condition("Failed")
    return subject.is_true("Completed") or (
        failed is not None and failed.status == "True" and failed.reason != "InvalidSpec"
    )


def active_seconds(subject: Subject, now: datetime) -> int:
    """Return for how long the run was not suspended until now."""
    before = subject.status.active_seconds or 0
    suspended = subject.condition("Suspended")
    if suspended is None or suspended.status == "True":
        return before
    return before + max(0, int((now - suspended.last_transition_time).total_seconds()))


def expires_at(subject: Subject) -> datetime | None:
    """Return when a run that has ended is to be deleted, None for one that has not or that stays."""
    if subject.run is None or subject.run.spec.ttl_seconds_after_finished is None or not has_ended(subject):
        return None
    ended = [subject.condition(kind) for kind in ("Completed", "Failed") if subject.is_true(kind)]
    at = min(condition.last_transition_time for condition in ended if condition is not None)
    return at + timedelta(seconds=subject.run.spec.ttl_seconds_after_finished)


def live_pods(observed: Observed, *components: str) -> list[Pod]:
    """Return the pods of some components that have not ended, also of earlier runs of the name."""
    return [pod for component in components for pod in observed.pods(component) if not pod.ended]


def _attempt(subject: Subject, observed: Observed) -> int:
    """Return the number of the present attempt: the recorded one, or where the record is lost, that of the last Job."""
    numbers = [names.attempt_of(subject.name, job.name) or 0 for job in observed.jobs if job.owner == subject.uid]
    return max([1, subject.status.attempts or 0, *numbers])


def _own_job(subject: Subject, observed: Observed, name: str) -> Job | None:
    job = observed.job(name)
    return job if job is not None and job.owner == subject.uid else None


def _retry_at(subject: Subject, observed: Observed, attempt: int) -> datetime | None:
    """Return when an attempt may start: some time after the end of the one before, if that is known."""
    before = _own_job(subject, observed, names.trainer_job(subject.name, attempt - 1))
    return _after(before, min(LAST_RETRY, FIRST_RETRY * 2.0 ** min(attempt - 2, 10))) if before is not None else None


def _after(job: Job, pause: timedelta) -> datetime | None:
    return datetime.fromisoformat(job.failed_at) + pause if job.failed_at else None


def _too_late(subject: Subject, context: Context, now: datetime) -> Failure | None:
    deadline = context.spec.active_deadline_seconds
    if deadline is None or (active := active_seconds(subject, now)) < deadline:
        return None
    return Failure(
        "DeadlineExceeded",
        f"The run was not suspended for {active} s; spec.activeDeadlineSeconds allows {deadline}.",
        final=True,
    )


def _training(
    subject: Subject,
    context: Context,
    observed: Observed,
    job: Job | None,
    attempt: int,
    step: int | None,
    now: datetime,
) -> Decision:
    evaluation = _evaluation_on_the_way(subject, context, observed, step)
    failure: Failure | None = None
    restart, not_before = False, None
    failed_nodes = subject.status.failed_nodes or ()
    if job is not None and job.failed is not None:
        failure = failures.of_job(job, observed.pods_of(job))
        failed_nodes = _with_node(failed_nodes, failure.node, job.failed_at)
        if not failure.charged:
            # A node that takes pods and drops them at once must not be fed with one pod after the other.
            not_before = _after(job, FIRST_RETRY)
            restart = not_before is None or now >= not_before
        elif failure.final or attempt > context.spec.retries:
            tries = f"Attempt {attempt} of {context.spec.retries + 1}: " if not failure.final else ""
            ended = Failure(failure.reason, f"{tries}{failure.message}", final=True)
            return Decision(Stage.FAILED, attempt, ended, evaluated=evaluation.evaluated, scores=evaluation.scores)
        else:
            attempt += 1
    elif job is not None and job.digest != context.training_digest:
        restart = True
        failure = Failure("Restarting", f"The spec has changed since {job.name} was started.", charged=False)
    return Decision(
        Stage.TRAINING,
        attempt,
        failure,
        restart,
        not_before or _retry_at(subject, observed, attempt),
        evaluation.evaluate,
        evaluation.evaluated,
        evaluation.scores,
        evaluation.evaluation_failure,
        failed_nodes,
    )


def _with_node(known: tuple[FailedNode, ...], name: str, at: str | None) -> tuple[FailedNode, ...]:
    if not name or not at:
        return known
    others = [node for node in known if node.name != name]
    return (*others, FailedNode(name=name, at=datetime.fromisoformat(at)))[-AVOIDED_NODES:]


def _evaluation_on_the_way(subject: Subject, context: Context, observed: Observed, step: int | None) -> Decision:
    """Decide on evaluations while training goes on: the newest due step, one at a time."""
    spec, done = context.spec, subject.status.evaluated_step
    if not spec.evaluation.suites:
        return Decision(Stage.TRAINING, evaluated=done)
    every, reached = spec.evaluation.every_steps, step if step is not None else subject.status.step or 0
    # One that has begun is waited for, also where it was the last one until steps were added.
    due = min(_begun_evaluations(subject, observed), default=reached // every * every if every else 0)
    if due <= (done or 0) or due >= spec.training.steps:
        return Decision(Stage.TRAINING, evaluated=done)
    return _evaluation(subject, observed, due, done)


def _begun_evaluations(subject: Subject, observed: Observed) -> list[int]:
    """Return the steps with an evaluation whose end is not recorded yet."""
    steps = [names.step_of(subject.name, job.name) for job in observed.jobs if job.owner == subject.uid]
    return [step for step in steps if step is not None and step > (subject.status.evaluated_step or 0)]


def _evaluation(subject: Subject, observed: Observed, step: int, done: int | None) -> Decision:
    job = _own_job(subject, observed, names.evaluation_job(subject.name, step))
    if job is None or not job.finished:
        return Decision(Stage.EVALUATING, evaluate=step, evaluated=done)
    pods = observed.pods_of(job)
    if job.complete:
        return Decision(Stage.EVALUATING, evaluated=step, scores=read_scores(pods, step))
    cause = failures.of_job(job, pods)
    failure = Failure("EvaluationFailed", f"The evaluation of step {step} failed: {cause.message}", final=True)
    return Decision(Stage.EVALUATING, evaluated=step, evaluation_failure=failure)


def _after_training(subject: Subject, context: Context, observed: Observed, attempt: int, told: int | None) -> Decision:
    # Fewer steps may have been asked for when more were done: the members are those of the last one.
    done, last = subject.status.evaluated_step, max(context.spec.training.steps, _reached(subject, told))
    if not context.spec.evaluation.suites or (done is not None and done >= last):
        return Decision(Stage.COMPLETED, attempt, evaluated=done)
    if context.spec.suspend:
        return Decision(Stage.SUSPENDED, attempt, evaluated=done)
    step = min([last, *_begun_evaluations(subject, observed)])
    evaluation = _evaluation(subject, observed, step, done)
    if evaluation.evaluate is None and step < last:
        evaluation = replace(evaluation, evaluate=last)
    if evaluation.evaluate is not None:
        return replace(evaluation, attempt=attempt)
    if evaluation.evaluation_failure is not None:
        return Decision(Stage.FAILED, attempt, evaluation.evaluation_failure, evaluated=last)
    return replace(evaluation, stage=Stage.COMPLETED, attempt=attempt)
