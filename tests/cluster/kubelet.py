"""Kubelets played by the tests: a node that the scheduler binds pods to, and pods whose fate a test decides.

No container runs. Every pod gets a loopback address of its own; a trainer's pod 0 answers `/status` there at port 9090
and walks through its steps as the engine would, from the step that its run had reached, and exits at the end.
"""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import urllib3
import yaml
from client import Api, ApiError, Object

STATUS_PORT = 9090
COMPONENT = "app.kubernetes.io/component"
RUN = "populora.dev/run"
NODE = "played-1"
LABELS = {"kubernetes.io/hostname": NODE, "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}

CAPACITY = {"cpu": "4000", "memory": "64Ti", "ephemeral-storage": "1Pi", "pods": "20000", "nvidia.com/gpu": "4096"}


@dataclass
class Training:
    """What a run has learnt so far: it outlives pods, as its storage does.

    Attributes:
        step: last committed step.
        steps: steps that the manifest in the pod asks for.
        limit: the trainer waits here for the test to raise it; None lets it run to the end.
        step_seconds: time a step takes.
        phase: what `/status` says.
        starts: trainer processes so far.
        first_steps: the step that each of them began at.
        extra: fields that replace those of `/status`.
    """

    step: int = 0
    steps: int = 0
    limit: int | None = None
    step_seconds: float = 0.02
    phase: str = "Running"
    starts: int = 0
    first_steps: list[int] = field(default_factory=list)
    teachers: int = 4
    students: int = 4
    extra: dict[str, Any] = field(default_factory=dict)

    def status(self) -> Object:
        """Return the answer of `/status`."""
        members = [member(role, index, self.step) for role, count in self._roles() for index in range(count)]
        teachers = [item["name"] for item in members if item["role"] in ("teacher", "agent")]
        students = [item["name"] for item in members if item["role"] in ("student", "agent")]
        answer = {
            "phase": self.phase,
            "step": self.step,
            "steps": self.steps,
            "progressPercent": round(100 * self.step / self.steps, 2) if self.steps else 100.0,
            "estimatedSecondsRemaining": self.step_seconds * (self.steps - self.step) if self.step else None,
            "members": members,
            "best": {"teacher": teachers[0], "student": students[0]},
            "solveRate": 0.5 if self.step else None,
            "coverage": self.step / 4096 if self.step else None,
        }
        return answer | self.extra

    def _roles(self) -> list[tuple[str, int]]:
        return [("agent", 1)] if self.teachers == 0 else [("teacher", self.teachers), ("student", self.students)]


def member(role: str, index: int, step: int) -> Object:
    """Return a member as `/status` gives it."""
    mu = 25.0 + step - index
    return {
        "name": f"{role[0]}{index}",
        "role": role,
        "generation": step // 10,
        "mu": mu,
        "sigma": 8.0,
        "lcb": mu - 24.0,
        "digest": f"{step:04x}{index:04x}" * 8,
    }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Kubelet:
    """Plays the pods of one namespace, or of all.

    By default every pod starts, is ready and stays so; trainers train and succeed; other Jobs' pods succeed at once.
    Tests change that by component (`config`, `trainer`, `serving`, `sandbox`, `evaluation`, `cleanup`) or pod by pod.
    """

    def __init__(self, api: Api, namespace: str | None = None, *, play: bool = True) -> None:
        self.api, self.namespace, self.play = api, namespace, play
        self.trainings: dict[tuple[str, str], Training] = {}
        self.held: set[str] = set()
        self.failing: dict[str, Callable[[Object], None]] = {}
        self.hanging: set[str] = set()
        self.seen: dict[str, Object] = {}
        self.started: list[Object] = []
        self.errors: list[str] = []
        self._succeeded: dict[str, int] = {}
        self._addresses: dict[str, str] = {}
        self._trainers: dict[str, _Trainer] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="kubelet")
        self._lock = threading.RLock()

    def __enter__(self) -> "Kubelet":
        register_node(self.api)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(10)
        for trainer in list(self._trainers.values()):
            trainer.end()

    def training(self, run: str, namespace: str | None = None) -> Training:
        """Return what a run has learnt; a test may change it before and while the run goes on."""
        with self._lock:
            return self.trainings.setdefault((namespace or self.namespace or "default", run), Training())

    def hold(self, component: str) -> None:
        """Leave new pods of a component as the scheduler left them: not started."""
        self.held.add(component)

    def release(self, component: str) -> None:
        """Start the pods that were held."""
        self.held.discard(component)
        for pod in self.api.list("Pod", self.namespace, f"{COMPONENT}={component}"):
            if pod["spec"].get("nodeName"):
                with self._lock:
                    self._play("MODIFIED", pod)

    def on_start(self, component: str, act: Callable[[Object], None] | None) -> None:
        """Do `act(pod)` with every new pod of a component instead of running it; None plays normally again."""
        if act is None:
            self.failing.pop(component, None)
        else:
            self.failing[component] = act

    def pods(self, run: str, component: str) -> list[Object]:
        """Return the live pods of a component of a run, oldest first."""
        found = self.api.list("Pod", self.namespace, f"{RUN}={run},{COMPONENT}={component}")
        live = [pod for pod in found if pod["status"].get("phase") in ("Pending", "Running", None)]
        return sorted(live, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def ended(self, component: str) -> int:
        """Return how many pods of a component have succeeded."""
        return self._succeeded.get(component, 0)

    def start(self, pod: Object) -> None:
        """Say that every container runs and is ready."""
        running = {"running": {"startedAt": now()}}
        states = [_container(item, running, ready=True) for item in _containers(pod)]
        started = [
            _container(item, running, ready=True)
            if item.get("restartPolicy") == "Always"
            else _container(item, _ended(0, "Completed"), ready=False)
            for item in _init_containers(pod)
        ]
        conditions = [_condition(kind, True) for kind in ("Initialized", "ContainersReady", "Ready", "PodScheduled")]
        address = self._address(pod)
        self._write(
            pod,
            {
                "phase": "Running",
                "conditions": conditions,
                "containerStatuses": states,
                "initContainerStatuses": started,
                "podIP": address,
                "podIPs": [{"ip": address}],
                "hostIP": "127.0.0.1",
                "startTime": now(),
            },
        )

    def succeed(self, pod: Object, message: str = "") -> None:
        """Say that every container has exited with 0, the first with a termination message."""
        component = pod["metadata"]["labels"].get(COMPONENT, "")
        self._succeeded[component] = self._succeeded.get(component, 0) + 1
        self._end(pod, "Succeeded", 0, "Completed", message)

    def fail(
        self, pod: Object, code: int = 1, reason: str = "Error", message: str = "", *, container: str = ""
    ) -> None:
        """Say that a container (the first, without a name) has exited, e.g. with reason OOMKilled; the pod failed."""
        self._end(pod, "Failed", code, reason, message, container)

    def evict(self, pod: Object, message: str = "The node was low on resource: memory.") -> None:
        """Say that the kubelet evicted the pod."""
        self._forget(pod)
        disrupted = _condition("DisruptionTarget", True, "TerminationByKubelet", message)
        self._write(pod, {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": [disrupted]})

    def disrupt(self, pod: Object, reason: str = "PreemptionByScheduler") -> None:
        """Fail a pod as preemption and node faults do: with the condition DisruptionTarget."""
        self._forget(pod)
        disrupted = _condition("DisruptionTarget", True, reason, "Preempted in order to admit another pod")
        states = [_container(item, _ended(143, "Error"), ready=False) for item in _containers(pod)]
        self._write(pod, {"phase": "Failed", "conditions": [disrupted], "containerStatuses": states})

    def wait_with(self, pod: Object, reason: str, message: str = "") -> None:
        """Say that the containers cannot start, e.g. for ImagePullBackOff or CreateContainerConfigError."""
        waiting = {"waiting": {"reason": reason, "message": message}}
        states = [_container(item, waiting, ready=False) for item in _containers(pod)]
        self._write(pod, {"phase": "Pending", "containerStatuses": states, "startTime": now()})

    def crash_loop(
        self, pod: Object, code: int = 1, reason: str = "Error", message: str = "", restarts: int = 3
    ) -> None:
        """Say that a container exits and is restarted again and again."""
        state = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}}
        last = _ended(code, reason, message)
        states = [
            _container(item, state, ready=False) | {"restartCount": restarts, "lastState": last}
            for item in _containers(pod)
        ]
        unready = [_condition(kind, False, "ContainersNotReady") for kind in ("Ready", "ContainersReady")]
        self._write(pod, {"phase": "Running", "conditions": unready, "containerStatuses": states})

    def unready(self, pod: Object) -> None:
        """Say that a running pod's readiness probe fails."""
        kinds = [_condition(kind, False, "ContainersNotReady") for kind in ("Ready", "ContainersReady")]
        states = [_container(item, {"running": {"startedAt": now()}}, ready=False) for item in _containers(pod)]
        self._write(pod, {"phase": "Running", "conditions": kinds, "containerStatuses": states})

    def silence(self, run: str) -> None:
        """Let a run's trainers no longer answer `/status`, though they go on."""
        for trainer in list(self._trainers.values()):
            if trainer.run == run:
                trainer.close()

    def _run(self) -> None:
        for kind, pod in self._watch():
            try:
                with self._lock:
                    self._play(kind, pod)
            except ApiError as error:
                if error.code not in (404, 409, 422):
                    self.errors.append(f"{pod['metadata']['name']}: {error}")
            except (urllib3.exceptions.HTTPError, OSError) as error:
                self.errors.append(f"{pod['metadata']['name']}: {error}")

    def _watch(self) -> Iterator[tuple[str, Object]]:
        yield from self.api.watch("Pod", self.namespace, self._stop, fields=f"spec.nodeName={NODE}")

    def _play(self, kind: str, pod: Object) -> None:
        uid, metadata, status = pod["metadata"]["uid"], pod["metadata"], pod["status"]
        component = metadata.get("labels", {}).get(COMPONENT, "")
        if kind == "DELETED":
            self._forget(pod)
            self.seen.pop(uid, None)
            return
        if metadata.get("deletionTimestamp"):
            self._terminate(pod, component)
            return
        if status.get("phase") in ("Succeeded", "Failed") or not self.play:
            self._forget(pod)
            return
        if uid in self.seen:
            return
        if component in self.held:
            return
        if (missing := self._missing_secret(pod)) is not None:
            self.wait_with(pod, "CreateContainerConfigError", f'secret "{missing}" not found')
            return
        self.seen[uid] = pod
        self.started.append(pod)
        if (act := self.failing.get(component)) is not None:
            act(pod)
            return
        self.start(pod)
        if component == "trainer":
            self._train(pod)
        elif any(owner["kind"] == "Job" for owner in metadata.get("ownerReferences", [])):
            self.succeed(pod)

    def _missing_secret(self, pod: Object) -> str | None:
        """Return the name of a Secret that a container needs and that does not exist; asked again every few seconds."""
        for item in (*_containers(pod), *_init_containers(pod)):
            for variable in item.get("env", []):
                wanted = variable.get("valueFrom", {}).get("secretKeyRef")
                if wanted is None or wanted.get("optional"):
                    continue
                secret = self.api.find("Secret", wanted["name"], pod["metadata"]["namespace"])
                if secret is None or wanted["key"] not in secret.get("data", {}):
                    return str(wanted["name"])
        return None

    def _train(self, pod: Object) -> None:
        index = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "0")
        run, namespace = pod["metadata"]["labels"][RUN], pod["metadata"]["namespace"]
        training = self.training(run, namespace)
        if index == "0":
            manifest = self.api.find("ConfigMap", f"{run}-config", namespace)
            if manifest is not None:
                spec = yaml.safe_load(manifest["data"]["run.yaml"])["spec"]
                training.steps = spec["training"]["steps"]
                single = spec["mode"] == "SingleAgent"
                training.teachers = 0 if single else spec["population"]["teachers"]
                training.students = 0 if single else spec["population"]["students"]
            training.starts += 1
            training.first_steps.append(training.step)
        trainer = _Trainer(self, pod, run, training, self._address(pod), leads=index == "0")
        self._trainers[pod["metadata"]["uid"]] = trainer
        trainer.start()

    def _terminate(self, pod: Object, component: str) -> None:
        """End a deleted pod as a kubelet does: containers first, then the object, at once."""
        if component in self.hanging:
            return
        self._forget(pod)
        if pod["status"].get("phase") == "Running":
            states = [_container(item, _ended(143, "Error"), ready=False) for item in _containers(pod)]
            with contextlib.suppress(ApiError):
                self._write(pod, {"phase": "Failed", "containerStatuses": states})
        self.api.delete("Pod", pod["metadata"]["name"], pod["metadata"]["namespace"], grace=0)

    def _end(self, pod: Object, phase: str, code: int, reason: str, message: str, container: str = "") -> None:
        self._forget(pod)
        chosen = container or _containers(pod)[0]["name"]
        states = [
            _container(
                item, _ended(code, reason, message) if item["name"] == chosen else _ended(0, "Completed"), ready=False
            )
            for item in _containers(pod)
        ]
        self._write(
            pod,
            {
                "phase": phase,
                "containerStatuses": states,
                "conditions": [_condition("Ready", False, "PodFailed" if code else "PodCompleted")],
            },
        )

    def _forget(self, pod: Object) -> None:
        """Stop what plays a pod's trainer."""
        if (trainer := self._trainers.pop(pod["metadata"]["uid"], None)) is not None:
            trainer.end()

    def _write(self, pod: Object, status: Object) -> None:
        """Merge into the pod's status; conditions by type, as a kubelet does."""
        metadata = pod["metadata"]
        if "conditions" in status:
            present = self.api.get("Pod", metadata["name"], metadata["namespace"])["status"].get("conditions", [])
            merged = {item["type"]: item for item in (*present, *status["conditions"])}
            status = {**status, "conditions": list(merged.values())}
        self.api.patch("Pod", metadata["name"], {"status": status}, metadata["namespace"], "status")

    def _address(self, pod: Object) -> str:
        uid = pod["metadata"]["uid"]
        if uid not in self._addresses:
            self._addresses[uid] = free_address()
        return self._addresses[uid]


class _Trainer:
    """One trainer pod: answers HTTP at its address and, where it leads, trains."""

    def __init__(
        self, kubelet: Kubelet, pod: Object, run: str, training: Training, address: str, *, leads: bool
    ) -> None:
        self.kubelet, self.pod, self.run, self.training, self.leads = kubelet, pod, run, training, leads
        self._over = threading.Event()
        self._server = _StatusServer((address, STATUS_PORT), training.status)
        self._threads = [threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)]
        self._threads.append(threading.Thread(target=self._train, daemon=True))
        self._open = True

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stop as on SIGKILL."""
        self._over.set()
        self.close()

    def close(self) -> None:
        """Answer no more."""
        if self._open:
            self._open = False
            self._server.shutdown()
            self._server.server_close()

    def _train(self) -> None:
        training = self.training
        training.phase = "Running"
        while training.step < training.steps or not self.leads:
            if self._over.wait(training.step_seconds):
                return
            if self.leads and (training.limit is None or training.step < training.limit):
                training.step += 1
            if not self.leads and training.step >= training.steps:
                break
        training.phase = "Completed"
        # The last status stays readable for a moment, as the engine's does while it writes its report.
        if not self._over.wait(0.3):
            with contextlib.suppress(ApiError, urllib3.exceptions.HTTPError):
                # As termination message, so that it is known to a controller that was away.
                self.kubelet.succeed(self.pod, json.dumps(training.status()) if self.leads else "")


class _StatusServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], status: Callable[[], Object]) -> None:
        self.status = status
        super().__init__(address, _StatusHandler)


class _StatusHandler(BaseHTTPRequestHandler):
    server: _StatusServer

    def do_GET(self) -> None:
        known = self.path in ("/status", "/healthz")
        body = json.dumps(self.server.status()).encode() if known else b"{}"
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def register_node(api: Api, name: str = NODE, capacity: dict[str, str] | None = None) -> None:
    """Register a node that is ready for pods, or find it registered."""
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**LABELS, "kubernetes.io/hostname": name}},
    }
    with contextlib.suppress(ApiError):
        api.create(node)
    sizes = capacity or CAPACITY
    status = {"capacity": sizes, "allocatable": sizes, "conditions": [_condition("Ready", True, "Played")]}
    api.patch("Node", name, {"status": status}, subresource="status")
    # The admission plug-in taints new nodes; the controller that would take the taint away does not run here.
    api.patch("Node", name, {"spec": {"taints": None}})


def free_address() -> str:
    """Return a loopback address at which nobody listens on the trainer's port."""
    while True:
        address = f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, STATUS_PORT))
            except OSError:
                time.sleep(0.01)
                continue
        return address


def _containers(pod: Object) -> list[Object]:
    return list(pod["spec"]["containers"])


def _init_containers(pod: Object) -> list[Object]:
    return list(pod["spec"].get("initContainers", []))


def _container(container: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "state": state,
        "ready": ready,
        "started": ready,
        "restartCount": 0,
    }


def _ended(code: int, reason: str, message: str = "") -> Object:
    ended = {"exitCode": code, "reason": reason, "startedAt": now(), "finishedAt": now()}
    return {"terminated": ended | ({"message": message} if message else {})}


def _condition(kind: str, holds: bool, reason: str = "Played", message: str = "") -> Object:
    return {
        "type": kind,
        "status": "True" if holds else "False",
        "reason": reason,
        "message": message,
        "lastTransitionTime": now(),
    }
