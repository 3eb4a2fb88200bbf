"""Makes one run's children and status what they should be. Level-based: it looks at what is, never at what changed.

A pass reads the run, decides, writes the status, then the children. The status comes first because it is the record:
what `lifecycle` says of each transition holds only where the record is never behind the children.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from populora_api import Status
from populora_operator import failures, names
from populora_operator.builders.context import Context, Facts
from populora_operator.builders.storage import volatile
from populora_operator.cluster.kinds import EVENT, JOB, RUN
from populora_operator.cluster.port import (
    Cluster,
    ClusterError,
    NotFoundError,
    NotLeadingError,
)
from populora_operator.events import Note, manifest, turns
from populora_operator.failures import Failure
from populora_operator.lifecycle import (
    CLEANUP_PATIENCE,
    CLEANUP_TRIES,
    Decision,
    Stage,
    active_seconds,
    decide,
    expires_at,
    has_ended,
)
from populora_operator.memory import RunMemory
from populora_operator.observed import Job, Observed
from populora_operator.plan import Change, Desired, changes, desired
from populora_operator.progress import Reader, first_pod, last_words
from populora_operator.queue import Key, Work
from populora_operator.settings import Settings
from populora_operator.status import Heartbeat, Situation, are_equal, compute, plain
from populora_operator.store import Store
from populora_operator.subject import Subject, read
from populora_operator.writer import Outcome, Writer

logger = logging.getLogger(__name__)

POLLS_PER_SECOND = 20.0
"""Trainers that are asked for their progress in a second, all together: with many runs each is asked less often."""

OBSTACLE_SECONDS = 30.0
NO_PODS_SECONDS = 3.0


class AgainError(ClusterError):
    """The run must be looked at again; how soon depends on how often that was said before."""


class Reconciler:
    """Reconciles runs, one call at a time for each."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        reader: Reader,
        settings: Settings,
        *,
        facts: Callable[[], Facts] = Facts,
        leaving: Callable[[str], bool] = lambda namespace: False,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        clock: Callable[[], float] | None = None,
    ):
        """Make a reconciler.

        Args:
            cluster: where to read and write.
            store: what the watches tell of children.
            reader: asks trainers.
            settings: of the controller.
            facts: what the cluster is like now.
            leaving: whether a namespace is being deleted.
            now: the time.
            clock: monotonic seconds; the event loop's by default.
        """
        self._cluster, self._store, self._reader, self._settings = cluster, store, reader, settings
        self._facts, self._leaving, self._now = facts, leaving, now
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._writer = Writer(cluster, store)
        self._memory: dict[Key, RunMemory] = {}
        self._polled: set[Key] = set()

    def statuses(self) -> Iterable[tuple[Key, Status, Heartbeat]]:
        """Yield what is known of every run, for metrics."""
        clock = self._clock()
        for key, memory in self._memory.items():
            if memory.subject is not None:
                yield key, memory.subject.status, memory.heartbeat(clock)

    def is_known(self, key: Key, version: str) -> bool:
        """Whether a resource version of a run is the one that was read or written last."""
        memory = self._memory.get(key)
        return memory is not None and memory.subject is not None and memory.subject.version == version

    async def reconcile(self, work: Work) -> float | None:
        """Make a run what it should be, and return after how many seconds to look again; None: it exists no longer.

        Raises:
            ClusterError: something could not be done; try again.
        """
        memory = self._memory.setdefault(work.key, RunMemory())
        if not work.woken and (situation := await self._nothing_new(work.key, memory)) is not None:
            return self._next(work.key, memory, situation.subject, situation)
        try:
            item = await self._cluster.get(RUN, *work.key)
        except NotFoundError:
            self._forget(work.key)
            return None
        subject = read(item)
        if memory.subject is not None and memory.subject.uid != subject.uid:
            # Another run of the same name: nothing that is remembered is about it.
            memory = self._memory[work.key] = RunMemory()
        self._know(memory, subject)
        return await self._pass(work.key, memory)

    def _forget(self, key: Key) -> None:
        self._memory.pop(key, None)
        self._polled.discard(key)

    def _know(self, memory: RunMemory, subject: Subject) -> None:
        """Take in the run as it is now; builders' context is kept as long as it would be the same."""
        old = memory.subject
        memory.subject = subject
        if subject.run is None:
            memory.context = None
            return
        facts, known = self._facts(), memory.context
        if known is None or old is None or old.generation != subject.generation or known.facts != facts:
            memory.context = Context(subject.run, subject.namespace, subject.uid, self._settings.images, facts)

    async def _nothing_new(self, key: Key, memory: RunMemory) -> Situation | None:
        """Look at the trainer and the clock without any request to the API server.

        Returns:
            The situation if nothing is to be done, None if a pass is needed.
        """
        subject = memory.subject
        if subject is None or memory.obstacle is not None or subject.deleted_at is not None:
            return None
        if self._is_expired(subject):
            return None
        situation, target = await self._look(key, memory, subject)
        if not are_equal(compute(situation), subject.status):
            return None
        return None if changes(target, subject, situation.observed, memory.applied) else situation

    async def _look(self, key: Key, memory: RunMemory, subject: Subject) -> tuple[Situation, Desired]:
        observed = self._store.observed(key)
        heartbeat = await self._listen(key, memory, subject, observed)
        step = heartbeat.progress.step if heartbeat.progress is not None else None
        decision = decide(subject, memory.context, observed, step, self._now())
        target = desired(subject, memory.context, decision, observed, self._now())
        obstacle = memory.obstacle or await self._refusal(subject, observed, decision)
        return (
            Situation(subject, memory.context, decision, observed, heartbeat, obstacle, target.waits, self._now()),
            target,
        )

    async def _listen(self, key: Key, memory: RunMemory, subject: Subject, observed: Observed) -> Heartbeat:
        """Ask the trainer for its progress if it runs."""
        job = observed.job(names.trainer_job(subject.name, max(1, subject.status.attempts or 1)))
        if job is not None and job.owner == subject.uid and job.complete and not has_ended(subject):
            memory.progress = last_words(observed, job) or memory.progress
        pod = first_pod(observed, job) if job is not None and job.owner == subject.uid and not job.finished else None
        if pod is None or not pod.ready or has_ended(subject):
            self._polled.discard(key)
            return memory.without_trainer()
        self._polled.add(key)
        return memory.hear(pod, await self._reader.read(pod), self._clock())

    async def _refusal(self, subject: Subject, observed: Observed, decision: Decision) -> Failure | None:
        """Return why the trainer's Job has no pods, which only the Job controller's Events tell."""
        job = observed.job(names.trainer_job(subject.name, decision.attempt))
        if job is None or decision.stage is not Stage.TRAINING or not self._lacks_pods(job, observed):
            return None
        page = await self._cluster.list(
            EVENT, subject.namespace, fields=f"involvedObject.uid={job.uid},reason=FailedCreate"
        )
        last = max(page.items, key=lambda item: item.get("lastTimestamp") or "", default=None)
        return failures.of_refusal(f"{job.name}: {last.get('message', '')}") if last is not None else None

    def _lacks_pods(self, job: Job, observed: Observed) -> bool:
        if job.finished or job.suspended or job.deleting or job.failing or job.active or job.age_from is None:
            return False
        age = self._now() - datetime.fromisoformat(job.age_from)
        return age.total_seconds() >= NO_PODS_SECONDS and not observed.pods_of(job)

    async def _pass(self, key: Key, memory: RunMemory) -> float:
        subject = memory.subject
        assert subject is not None
        if self._is_expired(subject):
            await self._expire(memory, subject)
            return self._settings.resync_seconds
        if subject.deleted_at is None:
            subject = await self._keep_finalizer(memory, subject)
        situation, target = await self._look(key, memory, subject)
        subject = await self._record(memory, situation)
        outcome = await self._write(memory, subject, situation, target)
        if situation.decision.stage is Stage.DELETING:
            await self._end_deletion(memory, subject, situation, outcome)
        if outcome.obstacle != memory.obstacle:
            # The record came before the attempt to write; what stood in the way is known only now.
            memory.obstacle = outcome.obstacle
            observed = self._store.observed(key)
            subject = await self._record(
                memory, replace(situation, subject=subject, observed=observed, obstacle=outcome.obstacle)
            )
        if outcome.conflict:
            raise AgainError("something changed meanwhile")
        return self._next(key, memory, subject, situation)

    async def _record(self, memory: RunMemory, situation: Situation) -> Subject:
        """Write the status if it has changed, unless somebody has changed the run since it was read."""
        subject = situation.subject
        status = compute(situation)
        if are_equal(status, subject.status):
            return subject
        item = {
            "apiVersion": RUN.api_version,
            "kind": RUN.kind,
            "metadata": {
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
                "resourceVersion": subject.version,
            },
            "status": plain(status),
        }
        written = await self._cluster.apply(RUN, item, manager=names.STATUS_MANAGER, subresource="status")
        self._know(memory, read(written))
        for note in (*turns(subject.status, status), *_charged(situation), *_evaluated(situation)):
            await self._tell(memory, subject, note)
        assert memory.subject is not None
        return memory.subject

    async def _write(self, memory: RunMemory, subject: Subject, situation: Situation, target: Desired) -> Outcome:
        todo = changes(target, subject, situation.observed, memory.applied)
        outcome = await self._writer.carry_out(todo, subject, memory)
        for change in outcome.done:
            for note in _notes(change, situation):
                await self._tell(memory, subject, note)
        return outcome

    async def _tell(self, memory: RunMemory, subject: Subject, note: Note) -> None:
        """Say something to the people who look at the run; that it cannot be said stops nothing."""
        logger.log(
            logging.WARNING if note.type == "Warning" else logging.INFO,
            "%s/%s: %s: %s",
            subject.namespace,
            subject.name,
            note.reason,
            note.message,
            extra={"run": f"{subject.namespace}/{subject.name}"},
        )
        now = self._now()
        name = manifest(subject, note, 1, now, "")["metadata"]["name"]
        count, first = memory.count_event(name, now)
        item = manifest(subject, note, count, first, self._settings.lease.identity)
        try:
            await self._cluster.apply(EVENT, item, manager=names.CHILDREN_MANAGER)
        except NotLeadingError:
            raise
        except ClusterError as error:
            logger.debug("the Event is not written: %s", error)

    # Finalizer, deletion, expiry

    async def _keep_finalizer(self, memory: RunMemory, subject: Subject) -> Subject:
        """Hold the run's deletion exactly if what it stores is to be deleted first, and can be."""
        leaving = self._leaving(subject.namespace)
        if subject.run is None and not leaving:
            return subject
        wanted = subject.run is not None and subject.run.spec.deletion_policy == "Delete" and not leaving
        if wanted == subject.held:
            return subject
        if leaving:
            await self._tell(memory, subject, _left_behind(memory.context))
        return await self._set_finalizers(memory, subject, [names.FINALIZER] if wanted else [])

    async def _set_finalizers(self, memory: RunMemory, subject: Subject, finalizers: list[str]) -> Subject:
        item = {
            "apiVersion": RUN.api_version,
            "kind": RUN.kind,
            "metadata": {
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
                "finalizers": finalizers,
            },
        }
        self._know(memory, read(await self._cluster.apply(RUN, item, manager=names.CHILDREN_MANAGER)))
        assert memory.subject is not None
        return memory.subject

    async def _end_deletion(self, memory: RunMemory, subject: Subject, situation: Situation, outcome: Outcome) -> None:
        """Let the run go once what it has stored is deleted, or cannot be."""
        assert subject.deleted_at is not None
        note = self._end_of_cleanup(subject, memory.context, situation.observed, outcome)
        if note is None:
            return
        if note.reason:
            await self._tell(memory, subject, note)
        await self._set_finalizers(memory, subject, [])

    def _end_of_cleanup(
        self, subject: Subject, context: Context | None, observed: Observed, outcome: Outcome
    ) -> Note | None:
        assert subject.deleted_at is not None
        if context is not None and context.spec.deletion_policy == "Retain":
            return Note("Normal", "CleanupAbandoned", "spec.deletionPolicy is Retain: what is stored is left as it is.")
        if context is None:
            return Note("Warning", "CleanupAbandoned", "The spec is not valid: what is stored is left as it is.")
        if outcome.terminating or self._leaving(subject.namespace):
            return _left_behind(context)
        uri = context.spec.storage.uri
        jobs = [job for job in observed.jobs if names.cleanup_number_of(subject.name, job.name) is not None]
        if any(job.complete for job in jobs):
            return Note("Normal", "CleanupDone", f"{uri} is deleted.")
        failed = [job for job in jobs if job.failed is not None]
        if len(failed) >= CLEANUP_TRIES or self._now() - subject.deleted_at > CLEANUP_PATIENCE:
            return Note("Warning", "CleanupAbandoned", f"{uri} could not be deleted and is left as it is.")
        return None

    def _is_expired(self, subject: Subject) -> bool:
        at = expires_at(subject)
        return at is not None and self._now() >= at and subject.deleted_at is None

    async def _expire(self, memory: RunMemory, subject: Subject) -> None:
        await self._tell(memory, subject, Note("Normal", "Expired", "ttlSecondsAfterFinished is over."))
        await self._cluster.delete(RUN, subject.namespace, subject.name, uid=subject.uid)

    # When to look again

    def _next(self, key: Key, memory: RunMemory, subject: Subject, situation: Situation) -> float:
        """Return after how many seconds the run is to be looked at again if nothing happens."""
        # Spread out, so that runs that were made together are not looked at together for ever.
        times = [self._settings.resync_seconds * random.uniform(0.9, 1.0)]
        now = self._now()
        if key in self._polled:
            times.append(self._poll_seconds(memory))
        if memory.obstacle is not None:
            times.append(OBSTACLE_SECONDS)
        if (at := expires_at(subject)) is not None:
            times.append((at - now).total_seconds())
        if subject.deleted_at is not None and subject.held:
            times.append((subject.deleted_at + CLEANUP_PATIENCE - now).total_seconds() + 1.0)
        if memory.context is not None and not has_ended(subject):
            if (deadline := memory.context.spec.active_deadline_seconds) is not None:
                times.append(deadline - active_seconds(subject, now))
            if (at := situation.decision.not_before) is not None and (situation.job is None or situation.job.finished):
                times.append((at - now).total_seconds())
            if situation.job is not None and not situation.job.finished:
                # Only Events tell of a Job that cannot make pods, and those are not watched.
                times.append(self._no_pods_seconds(situation))
        return max(0.05, min(times))

    def _no_pods_seconds(self, situation: Situation) -> float:
        job = situation.job
        assert job is not None
        waits = not job.active and not job.suspended and not situation.observed.pods_of(job)
        if not waits:
            return self._settings.resync_seconds
        return OBSTACLE_SECONDS if situation.obstacle is not None else NO_PODS_SECONDS

    def _poll_seconds(self, memory: RunMemory) -> float:
        """Return how often a trainer is asked: more rarely where steps are long, or where there are many."""
        pace = memory.progress.seconds_per_step if memory.progress is not None else None
        least = max(self._settings.status_poll_seconds, len(self._polled) / POLLS_PER_SECOND)
        return max(least, min((pace or 0.0) / 4, 30.0))


def _left_behind(context: Context | None) -> Note:
    """Return what is said of a run whose namespace is being deleted, in which no clean-up can be started."""
    what = context.spec.storage.uri if context is not None else "what is stored"
    return Note("Warning", "CleanupAbandoned", f"The namespace is being deleted: {what} is left as it is.")


def _charged(situation: Situation) -> Iterable[Note]:
    """Yield the failure that has just been charged, if one has."""
    decision, failure = situation.decision, situation.decision.failure
    if decision.stage is not Stage.TRAINING or failure is None or not failure.charged:
        return
    if decision.attempt != situation.subject.status.attempts:
        yield Note("Warning", failure.reason, failure.message)


def _evaluated(situation: Situation) -> Iterable[Note]:
    """Yield the failure of an evaluation before the last one, if one has just ended: the run goes on without it."""
    decision = situation.decision
    if decision.stage in (Stage.TRAINING, Stage.EVALUATING) and (failure := decision.evaluation_failure) is not None:
        yield Note("Warning", failure.reason, failure.message)


def _notes(change: Change, situation: Situation) -> Iterable[Note]:
    """Yield what a person wants to know of a change that was made."""
    (kind, name), context, run = change.where, situation.context, situation.subject.name
    if kind != JOB.kind or context is None:
        return
    attempt, cleanup = names.attempt_of(run, name), names.cleanup_number_of(run, name)
    if change.action == "create" and attempt is not None:
        yield Note("Normal", "Started", f"{name} is started: attempt {attempt} of {context.spec.retries + 1}.")
        if volatile(context):
            folder = context.spec.storage.folder
            yield Note("Warning", "VolatileStorage", f"No volume is mounted at {folder}: checkpoints go with the pod.")
    if change.action == "create" and cleanup is not None:
        before = situation.observed.job(names.cleanup_job(run, cleanup - 1))
        if before is not None and before.failed is not None:
            cause = failures.of_job(before, situation.observed.pods_of(before))
            yield Note("Warning", "CleanupFailed", cause.message)
        yield Note("Normal", "CleanupStarted", f"{name} deletes {context.spec.storage.uri}.")
