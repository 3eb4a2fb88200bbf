"""What the sidecar exports to Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from populora_trainer.diagnostics.prometheus import Family
from populora_trainer.serving.failures import KINDS, Kind

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("populora_sidecar_adapters_loaded", "gauge", (), "Adapters of the run that vLLM serves."),
        Family("populora_sidecar_published_step", "gauge", (), "Step of the newest publication that was seen."),
        Family("populora_sidecar_served_step", "gauge", (), "Step of the newest publication that is wholly served."),
        Family(
            "populora_sidecar_sync_lag_seconds",
            "gauge",
            (),
            "Time since the newest publication was seen, while it is not wholly served; else 0.",
        ),
        Family(
            "populora_sidecar_sync_seconds", "histogram", (), "From seeing a publication to serving all its adapters."
        ),
        Family("populora_sidecar_download_bytes", "counter", (), "Bytes of adapters that were downloaded."),
        Family("populora_sidecar_loads", "counter", (), "Adapters that vLLM has loaded."),
        Family("populora_sidecar_unloads", "counter", (), "Adapters that vLLM has unloaded."),
        Family(
            "populora_sidecar_failures",
            "counter",
            ("kind",),
            f"What went wrong and is tried again; {'; '.join(f'{kind}: {text}' for kind, text in KINDS.items())}.",
        ),
    )
}
_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)


class SidecarMetrics:
    """The families of `FAMILIES`, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.adapters_loaded = self._gauge("adapters_loaded")
        self.published_step = self._gauge("published_step")
        self.served_step = self._gauge("served_step")
        self._lag = self._gauge("sync_lag_seconds")
        self.download_bytes = self._counter("download_bytes")
        self.loads = self._counter("loads")
        self.unloads = self._counter("unloads")
        self._failures = self._counter("failures")
        family = FAMILIES["populora_sidecar_sync_seconds"]
        self.sync_seconds = Histogram(family.name, family.help, buckets=_BUCKETS, registry=self.registry)
        for kind in KINDS:
            self._failures.labels(kind)

    def measure_lag(self, lag: Callable[[], float]) -> None:
        """Ask the function for the lag in seconds whenever it is scraped."""
        self._lag.set_function(lag)

    def failed(self, kind: Kind) -> None:
        """Count a failure."""
        self._failures.labels(kind).inc()

    def _gauge(self, name: str) -> Gauge:
        family = FAMILIES[f"populora_sidecar_{name}"]
        return Gauge(family.name, family.help, family.labels, registry=self.registry)

    def _counter(self, name: str) -> Counter:
        family = FAMILIES[f"populora_sidecar_{name}"]
        return Counter(family.name, family.help, family.labels, registry=self.registry)
