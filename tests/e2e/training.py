"""A small PopulationRun on the node, what it has stored, and the same run in one process here. Imported by name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from client import Object, condition, eventually
from installation import with_libraries
from node import Node
from object_storage import BUCKET, ENDPOINT, SECRET_NAME, ObjectStorage
from population_run import Run, merged, read_manifest
from restrictions import containers_of

POPULORA = Path(sys.executable).with_name("populora")
PATIENCE = 900.0
"""How long anything may take on a busy machine; on an idle one a run takes two minutes."""

THREADS = "1"
"""Of torch in the trainer, here and there: results are bit-equal for equal numbers only."""


def manifest(name: str, **spec: Any) -> Object:
    """Return manifests/nano-s3.yaml for two teachers, two students, two small cores and the store of the tests."""
    small: Object = {
        "population": {"teachers": 2, "students": 2},
        "tasks": {"problemsPerMatchup": 12},
        "training": {"steps": 6, "proposalsPerPrompt": 4, "rolloutsPerProblem": 4},
        "evolution": {"everySteps": 3},
        "evaluation": {"heldOut": {"problems": 8}},
        "sandbox": {
            "replicas": 2,
            "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        },
        "trainer": {
            "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
            "podTemplate": with_libraries("trainer", OMP_NUM_THREADS=THREADS),
        },
        "storage": {
            "uri": f"s3://{BUCKET}/{name}",
            "endpoint": ENDPOINT,
            "credentialsSecretRef": {"name": SECRET_NAME},
        },
    }
    document = merged(read_manifest("nano-s3"), {"metadata": {"name": name}, "spec": small})
    return merged(document, {"spec": spec})


def apply(node: Node, namespace: str, document: Object) -> Run:
    """Apply a manifest with kubectl, as a user does."""
    node.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=yaml.safe_dump(document))
    return Run(node.api, namespace, document["metadata"]["name"])


def until_completed(node: Node, run: Run, *, seconds: float = PATIENCE) -> Object:
    """Wait with kubectl until a run is Completed and return its status; a failure says how the run stands."""
    try:
        words = (f"prun/{run.name}", "--for=condition=Completed", f"--timeout={seconds:.0f}s")
        node.kubectl("wait", "--namespace", run.namespace, *words, timeout=seconds + 30)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{explain(node, run)}") from None
    return run.status()


def ready_pods(run: Run, component: str) -> list[Object]:
    """Wait until every pod of a component is ready and return them."""

    def found() -> list[Object]:
        pods = run.pods(component)
        return pods if pods and all(condition(pod, "Ready") for pod in pods) else []

    return eventually(found, f"the pods of {component} are ready", seconds=PATIENCE)


def explain(node: Node, run: Run) -> str:
    """Say how a run stands and what its pods said last."""
    text = [run.explain()]
    selector = f"populora.dev/run={run.name}"
    for container in ("trainer", "sandbox", "vllm", "sidecar"):
        words = ("logs", "--namespace", run.namespace, "--selector", selector, "--container", container, "--tail=15")
        with_logs = subprocess.run(
            [str(node.plane.paths["kubectl"]), f"--kubeconfig={node.plane.kubeconfig}", *words, "--prefix"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        text.append(with_logs.stdout)
    return "\n".join(text)


def kill(node: Node, pod: Object, container: str) -> None:
    """Send SIGKILL to the first process of a pod's container, as the kernel does to one without memory."""
    os.kill(node.containerd.process_of(containers_of(pod)[container]), 9)


class Stored:
    """What a run has in the object store, read past the engine's own reader."""

    def __init__(self, storage: ObjectStorage, name: str) -> None:
        self.storage, self.prefix = storage, f"{name}/"

    def keys(self) -> list[str]:
        return [key.removeprefix(self.prefix) for key in self.storage.keys(self.prefix)]

    def read(self, key: str) -> bytes:
        return self.storage.read(self.prefix + key)

    def newest(self) -> Object:
        """Return the step manifest with the highest number."""
        steps = sorted(key for key in self.keys() if key.startswith("steps/"))
        manifest: Object = json.loads(self.read(steps[-1]))
        return manifest

    def digest(self) -> str:
        """Return the digest of everything that a next step would depend on."""
        return str(self.newest()["sha256"])

    def log(self, name: str) -> list[Object]:
        """Return the records of a log; every line must be one."""
        return [json.loads(line) for line in self.read(f"{name}.jsonl").splitlines()]

    def copy_adapter(self, digest: str, folder: Path) -> Path:
        """Copy an adapter's folder and return it."""
        for key in self.keys():
            if key.startswith(f"adapters/{digest}/"):
                path = folder / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.read(key))
        return folder / "adapters" / digest


def trained_here(document: Object, folder: Path, *options: str) -> Path:
    """Train a manifest on this machine, with further options of `populora run`, into a folder, and return that."""
    path = folder / "run.yaml"
    place = folder / "run"
    # Without the endpoint and the Secret of a bucket.
    here = {**document, "spec": {**document["spec"], "storage": {"uri": f"file://{place}"}}}
    path.write_text(yaml.safe_dump(here))
    command = [POPULORA, "run", path, "--output", place, *options]
    variables = {**os.environ, "OMP_NUM_THREADS": THREADS}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return place
