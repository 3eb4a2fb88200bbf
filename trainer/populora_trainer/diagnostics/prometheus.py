"""A run's state as Prometheus metrics and as the object that `/status` returns."""

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from populora_trainer.diagnostics.records import MemberStatus, RunStatus, StepMetrics
from populora_trainer.rollout.replicas import Sync

Phase = Literal["Pending", "Provisioning", "Running", "Suspended", "Evaluating", "Completed", "Failed"]
PHASES: tuple[Phase, ...] = ("Pending", "Provisioning", "Running", "Suspended", "Evaluating", "Completed", "Failed")
_ETA_WINDOW = 20


class Family(NamedTuple):
    """One exported metric: its name, kind, labels with what bounds them, and meaning."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("populora_phase", "gauge", ("phase",), "1 for the phase the run is in, 0 for the others."),
        Family("populora_step", "gauge", (), "Steps completed, of all that the run has done."),
        Family("populora_steps", "gauge", (), "Steps that the manifest asks for."),
        Family("populora_solve_rate", "gauge", ("task",), "Mean solve rate of the step's valid problems."),
        Family("populora_valid_rate", "gauge", (), "Share of the step's proposals that the verifier accepted."),
        Family("populora_reward", "gauge", ("role",), "Mean reward of the step's samples."),
        Family("populora_entropy_nats", "gauge", ("role",), "Mean entropy of a sampled token."),
        Family("populora_response_tokens", "gauge", ("role",), "Mean length of a completion in tokens."),
        Family(
            "populora_complexity",
            "gauge",
            ("measure",),
            "Mean complexity of the step's valid programs that teachers wrote: those of code_i and code_o.",
        ),
        Family("populora_rating_mu", "gauge", ("member", "role"), "TrueSkill mean of a present member."),
        Family("populora_rating_sigma", "gauge", ("member", "role"), "TrueSkill deviation of a present member."),
        Family("populora_rating_lcb", "gauge", ("member", "role"), "TrueSkill mu - 3 sigma of a present member."),
        Family("populora_member_generation", "gauge", ("member", "role"), "Generation of a present member."),
        Family("populora_archive_coverage", "gauge", (), "Share of the CVT archive's cells that are occupied."),
        Family(
            "populora_seed_problems",
            "gauge",
            (),
            "Problems by the untrained base that the buffer holds; rises before the first step to tasks.seedProblems.",
        ),
        Family("populora_advantage", "gauge", ("statistic",), "Statistics of the step's advantages."),
        Family("populora_learner", "gauge", ("statistic",), "Statistics of the step's update."),
        Family("populora_held_out_solve_rate", "gauge", ("task",), "Solve rate of the last held-out evaluation."),
        Family(
            "populora_adapters_published_step", "gauge", (), "Steps done when adapters were published for vLLM last."
        ),
        Family(
            "populora_adapter_sync_seconds",
            "gauge",
            (),
            "From the last publication until the trainer went on with vLLM serving it; grows while it waits.",
        ),
        Family(
            "populora_serving_replicas",
            "gauge",
            ("state",),
            "vLLM replicas that serve the last publication (synced) and that do not yet (behind).",
        ),
        Family("populora_tokens_per_second", "gauge", (), "Tokens worked through per second of the last step."),
        Family("populora_phase_seconds", "counter", ("phase",), "Wall time spent in each phase of a step."),
        Family("populora_tokens", "counter", ("purpose",), "Tokens worked through since the process started."),
        Family("populora_proposals", "counter", ("verdict",), "Proposals since the process started, by their verdict."),
        Family("populora_steps_completed", "counter", (), "Steps completed since the process started."),
    )
}

_Samples = Mapping[tuple[str, ...], float | None]


class RunMonitor(Collector):
    """What is known of a running run; the loop writes it, HTTP threads read it.

    Values that were not measured are absent from the exposition, and so are members that have been replaced: the
    labels are the tasks, roles, phases, verdicts, present members and the learner's statistics, and nothing else.
    """

    def __init__(self, steps: int) -> None:
        self._lock = threading.Lock()
        self._steps = steps
        self._phase: Phase = "Pending"
        self._metrics: StepMetrics | None = None
        self._held_out: dict[tuple[str, ...], float | None] = {}
        self._members: list[MemberStatus] = []
        self._sync: Sync | None = None
        self._seeds: int | None = None
        self._durations: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._completed = 0
        self._seconds: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def enter(self, phase: Phase) -> None:
        """Note the phase of the run."""
        with self._lock:
            self._phase = phase

    def sync(self, sync: Sync) -> None:
        """Note how far vLLM is with the newest publication."""
        with self._lock:
            self._sync = sync

    def seeded(self, problems: int) -> None:
        """Note how many problems by the untrained base the buffer holds."""
        with self._lock:
            self._seeds = problems

    def restore(self, metrics: StepMetrics | None, members: Sequence[MemberStatus]) -> None:
        """Note what a checkpoint says, without counting its step as work of this process."""
        with self._lock:
            self._metrics, self._members = metrics, list(members)

    def record(self, metrics: StepMetrics, members: Sequence[MemberStatus]) -> None:
        """Note a completed step and the members as they are after it."""
        with self._lock:
            self._metrics, self._members = metrics, list(members)
            self._completed += 1
            self._durations.append(metrics["seconds"].get("total", 0.0))
            self._seconds.update({name: value for name, value in metrics["seconds"].items() if name != "total"})
            self._tokens.update(metrics.get("tokens", {}))
            self._verdicts.update(metrics.get("verdicts", {}))
            if "held_out" in metrics:
                rates = metrics["held_out"]["solve_rate"].items()
                self._held_out = {(task,): rate for task, rate in rates if isinstance(rate, float)}

    def status(self) -> RunStatus:
        """Return the answer of `/status`."""
        with self._lock:
            step = self._metrics["step"] if self._metrics else 0
            left = max(0, self._steps - step)
            pace = sum(self._durations) / len(self._durations) if self._durations else None
            status: RunStatus = {
                "phase": self._phase,
                "step": step,
                "steps": self._steps,
                "progressPercent": round(100.0 * min(1.0, step / self._steps), 2) if self._steps else 100.0,
                "estimatedSecondsRemaining": None if pace is None else round(pace * left, 1),
                "members": list(self._members),
                "best": {"teacher": self._best("teacher"), "student": self._best("student")},
                "solveRate": self._metrics["solve_rate"]["overall"] if self._metrics else None,
                "coverage": self._metrics["coverage"] if self._metrics else None,
            }
            if (sync := self._sync) is not None:
                status["serving"] = {
                    "publishedStep": sync.step,
                    "replicas": sync.replicas,
                    "synced": sync.synced,
                    "syncSeconds": round(sync.seconds, 3),
                    "waiting": sync.waiting,
                    "message": sync.problem,
                }
            return status

    def _best(self, role: str) -> str | None:
        of_role = [member for member in self._members if member["role"] in (role, "agent")]
        return max(of_role, key=lambda member: member["lcb"])["name"] if of_role else None

    def collect(self) -> Iterator[Metric]:
        """Yield every family of `FAMILIES`, with the samples that there are."""
        with self._lock:
            samples = self._samples()
        for family in FAMILIES.values():
            make = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
            metric = make(family.name, family.help, labels=family.labels)
            for labels, value in samples.get(family.name, {}).items():
                if value is not None:
                    metric.add_metric(labels, value)
            yield metric

    def _samples(self) -> dict[str, _Samples]:
        metrics = self._metrics
        found: dict[str, _Samples] = {
            "populora_phase": {(phase,): float(phase == self._phase) for phase in PHASES},
            "populora_step": {(): metrics["step"] if metrics else 0},
            "populora_steps": {(): self._steps},
            "populora_held_out_solve_rate": self._held_out,
            "populora_seed_problems": {(): self._seeds},
            "populora_phase_seconds": _labelled(self._seconds),
            "populora_tokens": _labelled(self._tokens),
            "populora_proposals": _labelled(self._verdicts),
            "populora_steps_completed": {(): self._completed},
        }
        for member in self._members:
            key = (member["name"], member["role"])
            for name, value in (
                ("populora_rating_mu", member["mu"]),
                ("populora_rating_sigma", member["sigma"]),
                ("populora_rating_lcb", member["lcb"]),
                ("populora_member_generation", float(member["generation"])),
            ):
                found[name] = {**found.get(name, {}), key: value}
        if (sync := self._sync) is not None:
            found |= {
                "populora_adapters_published_step": {(): sync.step},
                "populora_adapter_sync_seconds": {(): sync.seconds},
                "populora_serving_replicas": {("synced",): sync.synced, ("behind",): sync.replicas - sync.synced},
            }
        if metrics is None:
            return found
        return found | {
            "populora_solve_rate": _labelled(metrics["solve_rate"]),
            "populora_valid_rate": {(): metrics["valid_rate"]},
            "populora_reward": _labelled(metrics["reward"]),
            "populora_entropy_nats": _labelled(metrics["entropy"]),
            "populora_response_tokens": _labelled(metrics["response_tokens"]),
            "populora_complexity": _labelled(metrics["complexity"]),
            "populora_archive_coverage": {(): metrics["coverage"]},
            "populora_advantage": _labelled(metrics["advantage"]),
            "populora_learner": _labelled(metrics.get("learner", {})),
            "populora_tokens_per_second": {(): metrics["tokens_per_second"]},
        }


def _labelled(values: Mapping[str, object]) -> dict[tuple[str, ...], float | None]:
    return {(name,): float(value) if isinstance(value, int | float) else None for name, value in values.items()}
