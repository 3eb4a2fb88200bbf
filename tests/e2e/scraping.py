"""A real Prometheus that scrapes what PodMonitors and ServiceMonitors name. Imported by name."""

import contextlib
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from control_plane import Process, free_ports
from discovery import Discovery, safe
from node import Node

Object = dict[str, Any]

INTERVAL = "2s"
"""Between scrapes: short runs would end between two of those that monitors ask for."""


class Prometheus:
    """A running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the present series of an expression: labels and value."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def targets(self) -> list[Object]:
        """Return the targets that are scraped."""
        with urllib.request.urlopen(f"{self.url}/api/v1/targets?state=active", timeout=30) as answer:
            found: list[Object] = json.load(answer)["data"]["activeTargets"]
        return found


@contextlib.contextmanager
def prometheus(node: Node, monitors: Sequence[Object]) -> Iterator[Prometheus]:
    """Run Debian's Prometheus on the monitors' targets, as the Prometheus operator would have it do."""
    folder = node.folder / "prometheus"
    folder.mkdir(exist_ok=True)
    configuration = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL},
        "scrape_configs": [job for monitor in monitors for job in scrape_configurations(monitor, folder)],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    (port,) = free_ports(1)
    process = Process(
        "prometheus",
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        node.folder,
    )
    with Discovery(node.api, folder):
        process.start()
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            process.until(server.ready, "/-/ready")
            yield server
        finally:
            process.stop()


def scrape_configurations(monitor: Object, targets: Path) -> list[Object]:
    """Return what a PodMonitor or a ServiceMonitor means to Prometheus, a job for each of its endpoints.

    Args:
        monitor: the object.
        targets: folder of the files that `Discovery` keeps.

    Source: the Prometheus operator's generator of configurations, for the fields that this project uses.
    """
    pods = monitor["kind"] == "PodMonitor"
    spec, place = monitor["spec"], monitor["metadata"]["namespace"]
    role, labels = ("pod", "pod_label") if pods else ("endpointslice", "service_label")
    port = "pod_container_port_name" if pods else "endpointslice_port_name"
    chosen = spec.get("namespaceSelector") or {}
    namespaces = [] if chosen.get("any") else [_keep("namespace", "|".join(chosen.get("matchNames") or [place]))]
    jobs = []
    for number, endpoint in enumerate(spec["podMetricsEndpoints" if pods else "endpoints"]):
        rules = [_keep(f"{labels}_{safe(key)}", value) for key, value in spec["selector"]["matchLabels"].items()]
        rules.append(_keep(port, endpoint["port"]))
        rules.append({**_keep("pod_phase", "Failed|Succeeded"), "action": "drop"})
        rules += [
            {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
            for source, target in (("namespace", "namespace"), ("pod_name", "pod"), ("pod_container_name", "container"))
        ]
        rules += [
            {"source_labels": [f"__meta_kubernetes_pod_label_{safe(key)}"], "target_label": safe(key)}
            for key in spec.get("podTargetLabels", [])
        ]
        jobs.append(
            {
                "job_name": f"{monitor['kind']}/{place}/{monitor['metadata']['name']}/{number}",
                "metrics_path": endpoint.get("path", "/metrics"),
                "honor_labels": endpoint.get("honorLabels", False),
                "file_sd_configs": [{"files": [str(targets / f"{role}.json")], "refresh_interval": INTERVAL}],
                "relabel_configs": namespaces + rules,
            }
        )
    return jobs


def _keep(source: str, value: str) -> Object:
    return {"action": "keep", "source_labels": [f"__meta_kubernetes_{source}"], "regex": value}
