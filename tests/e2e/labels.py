"""How Prometheus spells labels of Kubernetes. Imported by name."""

import re


def safe(label: str) -> str:
    """Return a label's name as Prometheus has it, e.g. populora_dev_run for populora.dev/run."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", label)
