"""The controller's metrics: bounded labels, and series of a run only as long as the run exists."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from populora_api import Status
from populora_operator.queue import Key
from populora_operator.settings import VERSION
from populora_operator.status import Heartbeat

PHASES = ("Pending", "Provisioning", "Running", "Suspended", "Evaluating", "Completed", "Failed")
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Family(NamedTuple):
    """One exported metric: its name, kind, labels with what bounds them, and meaning."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    help: str


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("populora_controller_build_info", "gauge", ("version",), "1; the version of the controller."),
        Family("populora_controller_leader", "gauge", (), "1 if this replica leads, else 0."),
        Family(
            "populora_controller_reconcile_seconds",
            "histogram",
            ("result",),
            "Time of one look at a run; result is ok or error.",
        ),
        Family(
            "populora_controller_reconcile_errors",
            "counter",
            ("error",),
            "Looks at a run that ended with an error, by the error's class.",
        ),
        Family("populora_controller_queue_depth", "gauge", (), "Runs that wait for a worker."),
        Family(
            "populora_controller_watch_age_seconds",
            "gauge",
            ("watch",),
            "Time since the API server last said anything on a watch, by kind and namespace.",
        ),
        Family(
            "populora_controller_api_requests",
            "counter",
            ("verb", "resource", "code"),
            "Requests to the API server; code 0 means no answer.",
        ),
        Family(
            "populora_controller_api_request_seconds", "histogram", ("verb",), "Time of requests to the API server."
        ),
        Family("populora_controller_runs", "gauge", ("phase",), "Runs by phase."),
        Family(
            "populora_controller_run_condition",
            "gauge",
            ("namespace", "run", "condition"),
            "1 for a condition that is True, 0 for one that is False, -1 for one that is Unknown.",
        ),
        Family("populora_controller_run_attempts", "gauge", ("namespace", "run"), "Trainer starts that counted."),
        Family("populora_controller_run_step", "gauge", ("namespace", "run"), "Last committed training step."),
        Family("populora_controller_run_steps", "gauge", ("namespace", "run"), "Training steps that were asked for."),
        Family("populora_controller_run_gpus", "gauge", ("namespace", "run"), "GPUs that a run's pods ask for."),
        Family(
            "populora_controller_run_heartbeat_age_seconds",
            "gauge",
            ("namespace", "run"),
            "Time since the trainer last answered; only of runs whose trainer is ready.",
        ),
    )
}

# The times at which series began, which nobody asks for, would double their number.
disable_created_metrics()  # type: ignore[no-untyped-call]

_VALUES = {"True": 1.0, "False": 0.0, "Unknown": -1.0}


class Metrics(Collector):
    """Counts what happens, and reads the rest when it is asked."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._reconcile = self._histogram("populora_controller_reconcile_seconds")
        self._errors = self._counter("populora_controller_reconcile_errors")
        self._requests = self._counter("populora_controller_api_requests")
        self._request_seconds = self._histogram("populora_controller_api_request_seconds")
        self.leading: Callable[[], bool] = lambda: False
        self.queue_depth: Callable[[], int] = lambda: 0
        self.watch_ages: Callable[[], Mapping[str, float]] = dict
        self.statuses: Callable[[], Iterable[tuple[Key, Status, Heartbeat]]] = tuple
        self.registry.register(self)

    def request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Count a request to the API server."""
        self._requests.labels(verb, resource, str(code)).inc()
        if verb != "watch":
            self._request_seconds.labels(verb).observe(seconds)

    def reconciled(self, started: float, error: BaseException | None) -> None:
        """Count a look at a run.

        Args:
            started: `time.perf_counter` at its beginning.
            error: what ended it, None where nothing did.
        """
        self._reconcile.labels("ok" if error is None else "error").observe(time.perf_counter() - started)
        if error is not None:
            self._errors.labels(type(error).__name__).inc()

    def collect(self) -> Iterator[Metric]:
        """Yield the families that are read when they are asked for."""
        statuses = list(self.statuses())
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {
            "populora_controller_build_info": [((VERSION,), 1.0)],
            "populora_controller_leader": [((), float(self.leading()))],
            "populora_controller_queue_depth": [((), float(self.queue_depth()))],
            "populora_controller_watch_age_seconds": [((source,), age) for source, age in self.watch_ages().items()],
            "populora_controller_runs": [
                ((phase,), float(sum(status.phase == phase for _, status, _ in statuses))) for phase in PHASES
            ],
            **_of_runs(statuses),
        }
        for name, values in samples.items():
            family = FAMILIES[name]
            metric = GaugeMetricFamily(name, family.help, labels=family.labels)
            for labels, value in values:
                metric.add_metric(labels, value)
            yield metric

    def _counter(self, name: str) -> Counter:
        family = FAMILIES[name]
        return Counter(name, family.help, family.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        family = FAMILIES[name]
        return Histogram(name, family.help, family.labels, registry=self.registry, buckets=_BUCKETS)


def _of_runs(
    statuses: Iterable[tuple[Key, Status, Heartbeat]],
) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    prefix = "populora_controller_run"
    samples: dict[str, list[tuple[tuple[str, ...], float]]] = {
        name: [] for name in FAMILIES if name.startswith(f"{prefix}_")
    }
    for key, status, heartbeat in statuses:
        for condition in status.conditions or ():
            samples[f"{prefix}_condition"].append(((*key, condition.type), _VALUES[condition.status]))
        numbers = {
            "attempts": status.attempts,
            "step": status.step,
            "steps": status.steps,
            "gpus": status.gpus,
            "heartbeat_age_seconds": heartbeat.silent.total_seconds() if heartbeat.listening else None,
        }
        for name, value in numbers.items():
            if value is not None:
                samples[f"{prefix}_{name}"].append((key, float(value)))
    return samples
