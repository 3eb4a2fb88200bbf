"""From a manifest to a trained population: opens the run, builds the trainer, drives it and keeps its records."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import transformers

from populora_api import (
    ALONE,
    ManifestError,
    PopulationRun,
    Problem,
    Services,
    Spec,
    changes,
    local_refusals,
    parse_manifest,
    resolved_yaml,
)
from populora_trainer.assistance import Begin, Likeness, assist, compare, device_of, environment_of
from populora_trainer.diagnostics.metrics import assemble
from populora_trainer.diagnostics.prometheus import RunMonitor
from populora_trainer.diagnostics.records import HeldOutRecord, StepMetrics
from populora_trainer.errors import RolloutStoppedError
from populora_trainer.evaluation.held_out import Sampling, solve_held_out, summarise
from populora_trainer.learning.mismatch import doubt
from populora_trainer.learning.update import Learner, LearnerSettings
from populora_trainer.loop import Trainer
from populora_trainer.nano.heldout import held_out_programs, load_heldout
from populora_trainer.observations import Observations, member_status
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.members import Member, founders, single_agent, slots
from populora_trainer.population.peft_check import check_peft_loads
from populora_trainer.population.peft_format import AdapterConfig
from populora_trainer.ranks.lifeline import Ended
from populora_trainer.ranks.world import SINGLE, World
from populora_trainer.rollout.base_model import Base, load_base, tokenizer_digest, use_deterministic_algorithms
from populora_trainer.rollout.engine import RolloutEngine
from populora_trainer.rollout.replicas import ServingAddress
from populora_trainer.rollout.transformers_engine import TransformersEngine
from populora_trainer.rollout.vllm_engine import VllmEngine
from populora_trainer.sandbox import SandboxPool
from populora_trainer.sandbox.remote import RemoteVerifier
from populora_trainer.seeding import Seeding, held, seed_problems
from populora_trainer.selfplay import Tools
from populora_trainer.storage.base_record import BaseRecord, read_base, settle_base
from populora_trainer.storage.checkpoint import Adapter, CheckpointState, Manifest
from populora_trainer.storage.environment import (
    Environment,
    differences,
    environment_after,
    read_environments,
    record_environment,
)
from populora_trainer.storage.logs import last_record
from populora_trainer.storage.publication import Publication, publish
from populora_trainer.storage.run import EARLIER_MANIFESTS, Run, open_store
from populora_trainer.tasks.budget import shortest_limit
from populora_trainer.tasks.problem import Problem as TaskProblem
from populora_trainer.tasks.problem import TaskType
from populora_trainer.tasks.templates import Template, template_for

SHOWN_CHANGES = 8

if TYPE_CHECKING:
    from populora_trainer.learning.distributed import SpreadLearner
    from populora_trainer.ranks.group import Group
    from populora_trainer.rollout.spread_engine import SpreadEngine


@dataclass
class Events:
    """What a session tells whoever watches it."""

    on_phase: Callable[[str], None] = lambda phase: None
    on_step: Callable[[StepMetrics], None] = lambda metrics: None
    stop: Callable[[], bool] = field(default=lambda: False)
    on_notice: Callable[[str], None] = lambda sentence: None


class Session:
    """A run that is open in this process.

    Attributes:
        trainer: the population as it stands.
        resumed: the step at which an earlier process stopped, or None for a new run.
        monitor: what `/metrics` and `/status` show.
    """

    def __init__(
        self, manifest: PopulationRun, run: Run, trainer: Trainer, events: Events, monitor: RunMonitor
    ) -> None:
        self.manifest = manifest
        self.spec = manifest.spec
        self.run = run
        self.trainer = trainer
        self.events = events
        self.monitor = monitor
        self.resumed: int | None = None
        held_out = self.spec.evaluation.held_out
        self.problems = held_out_problems(held_out.problems, self.spec.tasks.types)
        self._committed = 0
        self._stored: tuple[str, ...] = ()
        self._doubted = False

    def restore(self, latest: tuple[Manifest, CheckpointState]) -> None:
        """Go on from a checkpoint."""
        manifest, state = latest
        self.trainer.restore(manifest.step, state)
        self.resumed = self._committed = manifest.step
        self._stored = manifest.adapters
        last = cast(StepMetrics | None, last_record(self.run.store, "metrics"))
        self.monitor.restore(last, member_status(self.trainer.members, self._stored))
        if self.spec.tasks.seed_problems:
            self.monitor.seeded(held(self.trainer.buffer))

    async def train(self) -> bool:
        """Train up to `training.steps` and return whether that was reached; else `events.stop` asked for the end.

        Every step that is due is committed before the next one begins; so is the last one before a stop, unless vLLM
        has gone away: then the run stops at its last checkpoint.
        """
        self.monitor.enter("Running")
        try:
            await self._take_steps()
        except RolloutStoppedError as stopped:
            self.events.on_notice(f"{stopped}; the run goes on from step {self._committed}")
            self.monitor.enter("Suspended")
            return False
        if self.trainer.step > self._committed:
            self.commit()
        done = self.trainer.step >= self.spec.training.steps
        self.monitor.enter("Completed" if done else "Suspended")
        return done

    async def _take_steps(self) -> None:
        training = self.spec.training
        if self.resumed is None and not await self._begin():
            return
        while self.trainer.step < training.steps and not self.events.stop():
            observed = await self.trainer.train_step()
            step = observed.step
            self._check_mismatch(observed)
            last = step == training.steps
            held_out = await self._evaluate(step) if self._evaluation_due(step) else None
            metrics = observed.metrics(held_out)
            for problem in observed.problem_records():
                self.run.log("problems", problem)
            for matchup in observed.matchup_records():
                self.run.log("matchups", matchup)
            for birth in observed.births:
                self.run.log("evolution", birth)
            self.run.log("metrics", metrics)
            if last or step % training.checkpoint_every_steps == 0:
                self.events.on_phase("checkpoint")
                self.commit()
            stored = self._stored if self._committed == step else None
            self.monitor.record(metrics, member_status(self.trainer.members, stored))
            if self.spec.tasks.seed_problems:
                self.monitor.seeded(held(self.trainer.buffer))
            self.events.on_step(metrics)

    def _check_mismatch(self, observed: Observations) -> None:
        """Tell the user once where vLLM samples from other weights than are trained; by far, and the run ends."""
        if self.spec.inference.engine == "VLLM":
            doubts = doubt(observed.update.mismatch_M, observed.before, observed.step)
            if doubts and not self._doubted:
                self._doubted = True
                self.events.on_notice(doubts)

    def commit(self) -> None:
        """Make the state after the newest step durable."""
        manifest = self.run.commit(self.trainer.step, self.trainer.state(), keep=self.spec.training.keep_checkpoints)
        self._committed, self._stored = manifest.step, manifest.adapters

    async def _begin(self) -> bool:
        """Record the population before its first step: step 0. Returns False where a stop was asked for before."""
        seeding = None
        if self.spec.tasks.seed_problems:
            seeding = await self._seed()
            if seeding is None:
                return False
        held_out = await self._evaluate(0) if self.problems else None
        if held_out is not None or seeding is not None:
            metrics = assemble(
                0,
                seconds={},
                problems=[],
                samples=[],
                ratings={member.name: (member.mu, member.sigma) for member in self.trainer.members},
                advantage={},
                coverage=self.trainer.archive.coverage,
                seeding=None if seeding is None else seeding.record(),
                held_out=held_out,
            )
            self.run.log("metrics", metrics)
            self.events.on_step(metrics)
        self.commit()
        return True

    async def _seed(self) -> Seeding | None:
        """Let the base write the first references; None where a stop was asked for before all were there.

        The checkpoint of step 0 is the first that holds them: a run that ends before it begins with them again.
        """

        def tell(seeding: Seeding) -> None:
            self.events.on_phase(f"seed problems, {seeding.kept} of {seeding.wanted}")
            self.monitor.seeded(seeding.kept)

        await self.trainer.tools.engine.follow(0, self.trainer.members)
        seeding = await seed_problems(
            self.spec, self.trainer.buffer, self.trainer.tools, on_round=tell, stop=self.events.stop
        )
        if seeding is None:
            self.events.on_notice(
                "Stopped while the base wrote seed problems, which it writes again when the run goes on"
            )
        elif seeding.kept < seeding.wanted:
            self.events.on_notice(
                f"The base wrote {seeding.kept} different valid seed problems in {seeding.proposals} proposals and is "
                f"asked no further; the run begins with these instead of tasks.seedProblems {seeding.wanted}"
            )
        return seeding

    def _evaluation_due(self, step: int) -> bool:
        every = self.spec.evaluation.held_out.every_steps
        return bool(self.problems) and (step == self.spec.training.steps or (every > 0 and step % every == 0))

    async def _evaluate(self, step: int) -> HeldOutRecord:
        """Let every member that solves try the held-out problems."""
        self.events.on_phase("held-out evaluation")
        sampling = Sampling(
            samples=self.spec.evaluation.held_out.samples,
            temperature=self.spec.training.temperature,
            max_tokens=self.spec.training.max_response_tokens,
            seed=self.spec.population.seed,
        )
        # Before the first step all members are equal: one of them speaks for all.
        solvers = slots(self.trainer.members, "student")[: None if step else 1]
        await self.trainer.tools.engine.follow(step, self.trainer.members)
        results = await solve_held_out(self.problems, solvers, sampling, self.trainer.tools)
        return summarise(self.problems, {self.trainer.members[slot].name: one for slot, one in results.items()})


@contextmanager
def open_session(
    manifest: PopulationRun,
    *,
    events: Events,
    from_step: int | None = None,
    allow_missing: Collection[str] = (),
    threads: int | None = None,
    services: Services = ALONE,
    group: "Group | None" = None,
) -> Iterator[Session]:
    """Open the run that a manifest describes; everything is released at the end.

    Args:
        manifest: with `storage.uri` set to where the run lives.
        events: who watches.
        from_step: go back to this checkpoint first.
        allow_missing: isolation layers that this machine may lack.
        threads: of torch; by default those that the run began with, unless OMP_NUM_THREADS or MKL_NUM_THREADS is set.
        services: what runs elsewhere.
        group: the ranks that compute, of which this is rank 0; None where it computes alone.

    Raises:
        ManifestError: the manifest needs a part that is not here, or does not fit the run that is there.
        PopuloraError: the base, the run's folder or the verifier's isolation cannot be had.
    """
    refuse(local_refusals(manifest, services) + _held_out_refusals(manifest))
    spec = manifest.spec
    storage = spec.storage
    # Whoever goes back to a step has a run; a mistyped folder is not made.
    store = open_store(storage.uri, create=from_step is None, endpoint=storage.endpoint, region=storage.region)
    resolved = resolved_yaml(manifest)
    with (
        Run.open_or_create(store, resolved, check_change=_check_change, from_step=from_step, hold=True) as run,
        _verifier(spec, services.sandbox_url, allow_missing) as verifier,
    ):
        world = SINGLE if group is None else group.world
        device = device_of(world, spec.trainer.gpus_per_node if services.controlled else 0)
        environment = _settle_environment(run, device, world, threads, events.on_notice)
        known = read_base(store)
        revision = known.revision if known is not None and known.uri == spec.base_model.uri else None
        if group is not None:
            group.scatter([Begin(environment.threads, revision)] * world.size)
        base = load_base(spec.base_model.uri, spec.base_model.dtype, device=device, revision=revision)
        settle_base(store, record_of(base), begun=run.step is not None)
        refuse(_position_refusals(spec, base))
        members = _members(manifest)
        population = _population(spec, len(members), base)
        adapter = AdapterConfig(
            spec.adapter.rank, spec.adapter.alpha, spec.adapter.target_modules, base.place, base.revision
        )
        check_peft_loads(population, adapter)
        settings = _learner_settings(manifest, members)
        learner = (
            Learner(population, settings, pad_id=base.pad_id)
            if group is None
            else _spread_learner(population, settings, base, group)
        )
        if group is not None:
            compare(group.gather(Likeness(environment, base.digest)))
        monitor = RunMonitor(spec.training.steps)

        def publish_adapters(step: int, members: Sequence[Member]) -> Publication:
            stored = {member.name: Adapter(population.factors(slot), adapter) for slot, member in enumerate(members)}
            return publish(run.store, step, stored)

        template = template_for(base.tokenizer, base.uri)
        refuse(_prompt_refusals(spec, base, template))
        tools = Tools(
            engine=_engine(spec, services, base, template, population, publish_adapters, events, monitor, group),
            verifier=verifier,
            template=template,
            tokenizer=base.tokenizer,
            held_out=held_out_programs(base.uri),
        )
        trainer = Trainer(
            spec,
            members,
            population,
            learner,
            tools,
            adapter,
            events.on_phase,
        )
        session = Session(manifest, run, trainer, events, monitor)
        # From here on the run goes on: nothing of what is refused above has changed it.
        if (replaced := run.begin()) is not None:
            _tell_changes(replaced, manifest, events.on_notice)
        record_environment(store, run.step or 0, environment)
        latest = run.latest()
        if latest is not None:
            session.restore(latest)
        yield session


def _engine(
    spec: Spec,
    services: Services,
    base: Base,
    template: Template,
    population: LoraPopulation,
    publish_adapters: Callable[[int, Sequence[Member]], Publication],
    events: Events,
    monitor: RunMonitor,
    group: "Group | None",
) -> RolloutEngine:
    if spec.inference.engine == "Transformers":
        engine = _engine_here(spec, base, template, population)
        return engine if group is None else _spread_engine(engine, spec, base, group)
    assert services.serving is not None, "a run without an address of vLLM was not refused"
    return VllmEngine(
        ServingAddress.parse(services.serving, services.sidecar_port),
        publish_adapters,
        end_ids=_end_ids(base, template),
        max_prompt_tokens=spec.training.max_prompt_tokens,
        positions=getattr(base.model.config, "max_position_embeddings", None),
        vocabulary=getattr(base.model.config, "vocab_size", None),
        notice=events.on_notice,
        on_sync=monitor.sync,
        stop=events.stop,
    )


def _end_ids(base: Base, template: Template) -> list[int]:
    """Return the tokens at which a completion ends: those that the base names, and what ends a turn of its template."""
    return sorted({*base.end_ids, *template.end_ids})


def _engine_here(spec: Spec, base: Base, template: Template, population: LoraPopulation) -> RolloutEngine:
    return TransformersEngine(
        population,
        end_ids=_end_ids(base, template),
        pad_id=base.pad_id,
        max_prompt_tokens=spec.training.max_prompt_tokens,
    )


def _spread_engine(engine: RolloutEngine, spec: Spec, base: Base, group: "Group") -> "SpreadEngine":
    from populora_trainer.rollout.spread_engine import SpreadEngine

    positions = getattr(base.model.config, "max_position_embeddings", None)
    return SpreadEngine(engine, group, max_prompt_tokens=spec.training.max_prompt_tokens, positions=positions)


def _spread_learner(
    population: LoraPopulation, settings: LearnerSettings, base: Base, group: "Group"
) -> "SpreadLearner":
    from populora_trainer.learning.distributed import SpreadLearner

    return SpreadLearner(population, settings, pad_id=base.pad_id, group=group)


def _population(spec: Spec, members: int, base: Base) -> LoraPopulation:
    return LoraPopulation(
        base.model,
        members=members,
        rank=spec.adapter.rank,
        alpha=spec.adapter.alpha,
        target_modules=spec.adapter.target_modules,
        seed=spec.population.seed,
    )


async def assist_session(manifest: PopulationRun, group: "Group", services: Services = ALONE) -> Ended:
    """Compute for the session that rank 0 opens of the same manifest; returns how it ended.

    Raises:
        PopuloraError: the base cannot be had, or a rank is lost.
    """
    spec, world = manifest.spec, group.world
    device = device_of(world, spec.trainer.gpus_per_node if services.controlled else 0)
    try:
        command = group.receive()
    except Ended as end:
        return end
    assert isinstance(command, Begin)
    use_deterministic_algorithms(command.threads)
    base = load_base(spec.base_model.uri, spec.base_model.dtype, device=device, revision=command.revision)
    members = _members(manifest)
    population = _population(spec, len(members), base)
    learner = _spread_learner(population, _learner_settings(manifest, members), base, group)
    engine = _spread_engine(
        _engine_here(spec, base, template_for(base.tokenizer, base.uri), population), spec, base, group
    )
    group.gather(Likeness(environment_of(device, world), base.digest))
    return await assist(group, learner, engine)


def _verifier(spec: Spec, service: str | None, allow_missing: Collection[str]) -> SandboxPool | RemoteVerifier:
    limits, seed = spec.sandbox, spec.population.seed
    if service is not None:
        return RemoteVerifier(service, seed=seed)
    return SandboxPool(
        timeout_seconds=limits.timeout_seconds, memory_mib=limits.memory_mib, allow_missing=allow_missing, seed=seed
    )


def held_out_problems(per_task: int, tasks: Collection[TaskType]) -> tuple[TaskProblem, ...]:
    """Return the first problems of each task type of a run from the embedded base's held-out set."""
    taken: dict[str, int] = {}
    chosen = []
    for problem in load_heldout():
        if problem.task in tasks and taken.setdefault(problem.task, 0) < per_task:
            taken[problem.task] += 1
            chosen.append(problem)
    return tuple(chosen)


def refuse(problems: list[Problem]) -> None:
    """Raise a ManifestError where there is a problem."""
    if problems:
        raise ManifestError(problems)


def _settle_environment(
    run: Run, device: str, world: World, threads: int | None, notice: Callable[[str], None]
) -> Environment:
    """Compute as the run did so far, and say where that is not possible or not wanted."""
    step = run.step or 0
    before = environment_after(read_environments(run.store), step)
    chosen = not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}.isdisjoint(os.environ)
    if threads is None and before is not None and not chosen:
        threads = before.threads
        if threads > (cores := len(os.sched_getaffinity(0))):
            notice(
                f"Computing with {threads} threads on {cores} cores, as this run began; --threads {cores} is faster, "
                f"but the continuation is then not bit-equal to that of a run that was never stopped"
            )
    if threads is None and world.size > 1 and not chosen:
        threads = max(1, len(os.sched_getaffinity(0)) // world.local_size)
    use_deterministic_algorithms(threads)
    now = environment_of(device, world)
    if before is not None and before != now:
        notice(
            f"From step {step + 1} on, this run is computed with {differences(before, now)}: "
            f"the continuation is not bit-equal to that of a run that was never stopped"
        )
    return now


def record_of(base: Base) -> BaseRecord:
    """Return what a run keeps of its base."""
    return BaseRecord(base.uri, base.revision, base.digest, tokenizer_digest(base.tokenizer), transformers.__version__)


def _members(manifest: PopulationRun) -> tuple[Member, ...]:
    size = manifest.spec.population
    return single_agent() if manifest.spec.mode == "SingleAgent" else founders(size.teachers, size.students)


def _learner_settings(manifest: PopulationRun, members: Sequence[Member]) -> LearnerSettings:
    training = manifest.spec.training
    teacher = training.teacher_learning_rate or training.learning_rate
    return LearnerSettings(
        learning_rate=[teacher if member.role == "teacher" else training.learning_rate for member in members],
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        temperature=training.temperature,
        whitening=training.whitening,
        clip_ratio=training.clip_ratio,
        importance_cap=training.importance_sampling_cap,
        kl_coefficient=training.kl_coefficient,
        gradient_clip_norm=training.gradient_clip_norm,
        batch_tokens=training.tokens_per_micro_batch,
    )


def _position_refusals(spec: Spec, base: Base) -> list[Problem]:
    """Refuse prompts and responses that together may be longer than what the base model can attend to."""
    positions = getattr(base.model.config, "max_position_embeddings", None)
    longest, response = spec.training.max_prompt_tokens, spec.training.max_response_tokens
    if positions is None or longest + response <= positions:
        return []
    text = (
        f"{longest} and maxResponseTokens {response} are not allowed: {spec.base_model.uri} has {positions} positions"
    )
    return [Problem("", "spec.training.maxPromptTokens", text)]


def _prompt_refusals(spec: Spec, base: Base, template: Template) -> list[Problem]:
    """Refuse a limit that some prompt of the run cannot keep, whatever is left out of it."""
    fixed = held_out_problems(spec.evaluation.held_out.problems, spec.tasks.types)
    needed, what = shortest_limit(template, base.tokenizer, spec.tasks.types, fixed)
    limit = spec.training.max_prompt_tokens
    if needed <= limit:
        return []
    text = f"{limit} is not allowed: {what} has {needed} tokens of {spec.base_model.uri}"
    return [Problem("", "spec.training.maxPromptTokens", text)]


def _held_out_refusals(manifest: PopulationRun) -> list[Problem]:
    """Refuse more held-out problems than there are."""
    spec = manifest.spec
    wanted = spec.evaluation.held_out.problems
    if not wanted:
        return []
    available = min(sum(problem.task == task for problem in load_heldout()) for task in spec.tasks.types)
    if wanted > available:
        text = f"{wanted} is not allowed: {spec.base_model.uri} has {available} held-out problems of each type"
        return [Problem("", "spec.evaluation.heldOut.problems", text)]
    return []


def _check_change(stored: str, new: str) -> None:
    """Raise a ManifestError where a run cannot go on with the manifest that is given now."""
    before = parse_manifest(stored.encode(), "run.yaml")
    after = parse_manifest(new.encode(), "the manifest")
    found = [change for change in changes(before, after, local=True) if change.immutable]
    problems = [Problem("", one.field, str(one).removeprefix(f"{one.field} ")) for one in found]
    if problems:
        place = after.spec.storage.folder or after.spec.storage.uri
        problems.append(Problem("", "", f"{place} holds another run: name another place for this one"))
    refuse(problems)


def _tell_changes(replaced: str, manifest: PopulationRun, notice: Callable[[str], None]) -> None:
    """Say what a run goes on with that it did not begin with."""
    found = changes(parse_manifest(replaced.encode(), "run.yaml"), manifest, local=True)
    if found:
        more = f", and {len(found) - SHOWN_CHANGES} more" if len(found) > SHOWN_CHANGES else ""
        notice(
            f"This run goes on with another manifest: {', '.join(map(str, found[:SHOWN_CHANGES]))}{more}; "
            f"the one before is kept in its {EARLIER_MANIFESTS}/"
        )
