"""What makes Prometheus scrape the pods of a run."""

from populora_operator import names
from populora_operator.builders.context import Context, Manifest
from populora_operator.cluster.kinds import POD_MONITOR


def pod_monitor(context: Context) -> Manifest:
    """Return the PodMonitor: trainer, sandboxes and vLLM at their port `http`, and vLLM's sidecar."""
    spec = {
        "selector": {"matchLabels": {names.RUN_LABEL: context.name}},
        "podTargetLabels": [names.RUN_LABEL, names.COMPONENT_LABEL],
        "podMetricsEndpoints": [
            {"port": "http", "path": "/metrics", "interval": "15s"},
            {"port": "sidecar", "path": "/metrics", "interval": "15s"},
        ],
    }
    return context.child(POD_MONITOR, context.name, "config", spec=spec)
