"""The controller under many runs at once, against a real API server on this machine, whose cores it shares.

    python benchmarks/controller.py --runs 500

Applies the runs, waits until each has all of its children, then lets the controller idle; then one run's trainer is
played to see how soon its step is in the status. Nodes are not played, so pods stay pending. The peer in the same run
is a client that creates the same children one after the other, which knows nothing and watches nothing.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))
from client import Api
from control_plane import control_plane
from controller import Controller, grant_everywhere
from kubelet import Kubelet, register_node

from populora_api import load_manifest, resolved
from populora_operator.builders.context import Manifest

NAMESPACES = 10
KINDS = ("ConfigMap", "ServiceAccount", "Service", "Deployment", "Job", "NetworkPolicy", "PodDisruptionBudget")


def run_of(manifest: dict[str, Any], number: int) -> dict[str, Any]:
    """One of many equal runs, spread over the namespaces."""
    name = f"run-{number:04d}"
    return {**manifest, "metadata": {"name": name, "namespace": f"team-{number % NAMESPACES}"}}


def children(api: Api) -> Counter[str]:
    """Number of children by the name of their run."""
    found: Counter[str] = Counter()
    for kind in KINDS:
        for value in api.list(kind, None, "app.kubernetes.io/managed-by=populora-controller"):
            found[value["metadata"]["labels"]["populora.dev/run"]] += 1
    return found


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Metric samples by name and labels."""
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def quantile(found: dict[tuple[str, ...], float], name: str, share: float) -> float:
    """Upper bound of the histogram's bucket that holds the quantile, in seconds."""
    buckets: Counter[float] = Counter()
    for key, value in found.items():
        if key[0] == f"{name}_bucket":
            bound = next(part.partition("=")[2] for part in key if part.startswith("le="))
            buckets[float(bound)] += value
    total = buckets[float("inf")]
    return next((bound for bound in sorted(buckets) if buckets[bound] >= share * total), float("nan"))


def requests(found: dict[tuple[str, ...], float]) -> float:
    """Requests to the API server so far."""
    return sum(value for key, value in found.items() if key[0] == "populora_controller_api_requests_total")


class Memory(threading.Thread):
    """Watches a process's resident memory."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.ended = psutil.Process(pid), 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.5):
            self.peak = max(self.peak, self.process.memory_info().rss)


def peer_rate(api: Api, count: int) -> float:
    """Objects a second that a bare client gets created by server-side apply, on eight connections."""

    def make(number: int) -> None:
        body: Manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"peer-{number}"},
            "data": {"run.yaml": "x" * 2000},
        }
        api.apply(body, "default", manager="peer")

    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(count)))
    return count / (time.monotonic() - started)


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--manifest", type=Path, default=ROOT / "manifests" / "paper-4x4.yaml")
    parser.add_argument("--idle", type=int, default=60, help="seconds")
    parser.add_argument("--patience", type=int, default=420, help="seconds to wait for all children")
    options = parser.parse_args()
    manifest: dict[str, Any] = resolved(load_manifest(options.manifest))
    report: dict[str, Any] = {"runs": options.runs, "manifest": options.manifest.name}
    with control_plane() as plane:
        api = Api(plane.url, plane.token, plane.ca)
        api.install_definition()
        register_node(api)
        for name in ("probe", *(f"team-{number}" for number in range(NAMESPACES))):
            api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        report["peer, objects a second"] = round(peer_rate(api, 400), 1)
        with Controller(
            plane,
            None,
            token=grant_everywhere(api),
            options=("--log-level=warning", "--status-poll-seconds=1"),
        ) as controller:
            controller.ready()
            assert controller.process is not None
            memory = Memory(controller.process.pid)
            memory.start()
            probe = {**manifest, "metadata": {"name": "probe", "namespace": "probe"}}
            api.create(probe, "probe")
            time.sleep(10)
            each = children(api)["probe"]
            before = samples(controller.metrics())
            started = time.monotonic()
            with ThreadPoolExecutor(8) as pool:
                list(
                    pool.map(
                        lambda number: api.create(
                            run_of(manifest, number), run_of(manifest, number)["metadata"]["namespace"]
                        ),
                        range(options.runs),
                    )
                )
            report["seconds to apply the runs"] = round(time.monotonic() - started, 1)
            while time.monotonic() - started < options.patience:
                found = children(api)
                complete = sum(count >= each for count in found.values())
                if complete > options.runs:
                    break
                time.sleep(1)
            seconds = time.monotonic() - started
            report["runs with all children"] = complete - 1
            report["seconds until all children"] = round(seconds, 1)
            report["children a run"] = each
            report["objects a second"] = round(options.runs * each / seconds, 1)
            time.sleep(20)
            after = samples(controller.metrics())
            histogram = "populora_controller_reconcile_seconds"
            report["reconcile, p50 at most, seconds"] = quantile(after, histogram, 0.5)
            report["reconcile, p99 at most, seconds"] = quantile(after, histogram, 0.99)
            report["API requests a run"] = round((requests(after) - requests(before)) / options.runs, 1)
            process = psutil.Process(controller.process.pid)
            used, at = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(options.idle)
            passed = time.monotonic() - at
            report["idle, share of a core"] = round((sum(process.cpu_times()[:2]) - used) / passed, 4)
            idle = requests(samples(controller.metrics())) - requests(after)
            report["idle, API requests a second"] = round(idle / passed, 2)
            report["resident, MiB"] = round(memory.process.memory_info().rss / 2**20)
            report["resident at most, MiB"] = round(memory.peak / 2**20)
            report["status change visible after, seconds"] = status_delays(api)
            memory.ended.set()
    print(json.dumps(report, indent=1))


def status_delays(api: Api) -> dict[str, float]:
    """Seconds between a step of a played trainer and the same step in the run's status."""
    name = namespace = "probe"
    delays: list[float] = []
    with Kubelet(api, namespace) as kubelet:
        training = kubelet.training(name)
        training.step_seconds = 3.0
        seen, deadline = 0, time.monotonic() + 90
        reached: dict[int, float] = {}
        while time.monotonic() < deadline and len(delays) < 8:
            reached.setdefault(training.step, time.monotonic())
            step = (api.get("PopulationRun", name, namespace).get("status") or {}).get("step") or 0
            if step > seen and step in reached:
                delays.append(time.monotonic() - reached[step])
                seen = step
            time.sleep(0.02)
    if not delays:
        return {}
    return {"median": round(statistics.median(delays), 2), "most": round(max(delays), 2)}


if __name__ == "__main__":
    main()
