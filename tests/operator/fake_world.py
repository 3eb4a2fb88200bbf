"""Kubernetes around a fake API server: the Job and Deployment controllers, the garbage collector, kubelets, a trainer.

Time moves in steps of five seconds. A controller under test can be killed and started again at any moment.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_cluster import FakeCluster, Killed, stamp

from populora_operator import names
from populora_operator.builders.context import Facts
from populora_operator.cluster.kinds import BY_NAME, CHILDREN, DEPLOYMENT, JOB, POD, RUN, Kind
from populora_operator.cluster.port import ClusterError, Object
from populora_operator.observed import Pod
from populora_operator.progress import Progress
from populora_operator.queue import Key, Work
from populora_operator.reconciler import AgainError, Reconciler
from populora_operator.settings import LeaseSettings, Settings
from populora_operator.store import Store

SECONDS = 5.0
_LOOP = asyncio.new_event_loop()
SETTINGS = Settings(lease=LeaseSettings("ns", "lease", "me"))


def manifest(name: str = "run", **spec: Any) -> Object:
    """Return a PopulationRun with defaults for a test; `spec` replaces whole parts."""
    return {
        "apiVersion": "populora.dev/v1alpha1",
        "kind": "PopulationRun",
        "metadata": {"name": name, "namespace": "ns"},
        "spec": {
            "baseModel": {"uri": "hf://Org/Model"},
            "training": {"steps": 10},
            "storage": {"uri": "s3://bucket/run", "credentialsSecretRef": {"name": "s3"}},
            **spec,
        },
    }


@dataclass
class Trainer:
    """The training of one run: it outlives its pods."""

    step: int = 0
    steps: int = 10
    hold_at: int | None = None
    starts: int = 0

    def status(self) -> Progress:
        """Return what `/status` answers."""
        members = [
            {"name": f"{role[0]}0", "role": role, "mu": 25.0 + self.step, "sigma": 8.0, "lcb": 1.0, "digest": "ab"}
            for role in ("teacher", "student")
        ]
        return Progress.model_validate(
            {
                "step": self.step,
                "steps": self.steps,
                "estimatedSecondsRemaining": 5.0 * max(0, self.steps - self.step),
                "members": members,
                "best": {"teacher": "t0", "student": "s0"},
                "solveRate": 0.5,
                "coverage": 0.1,
            }
        )


@dataclass
class World:
    """A cluster that lives, with one controller in it."""

    cluster: FakeCluster = field(default_factory=FakeCluster)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    settings: Settings = SETTINGS
    facts: Facts = field(default_factory=Facts)
    plays: bool = True
    deaths: int = 0
    answers: bool = True
    leaving: bool = False

    def __post_init__(self) -> None:
        self._labelled: dict[tuple[str, str], Object] = {}
        self.cluster.on_event = self._hear
        self.start()

    # The controller

    def start(self) -> None:
        """Start a controller that remembers nothing."""
        self.store = Store()
        self.due: dict[Key, float] = {}
        self.woken: set[Key] = set()
        for kind in (*CHILDREN, POD):
            self.store.replace(kind, None, [item for item in self.cluster.of(kind) if _labelled(item)])
        self.reconciler = Reconciler(
            self.cluster,
            self.store,
            self,  # type: ignore[arg-type]
            self.settings,
            facts=lambda: self.facts,
            leaving=lambda namespace: self.leaving,
            now=lambda: self.cluster.now,
            clock=self.seconds,
        )
        self.woken = {(item["metadata"]["namespace"], item["metadata"]["name"]) for item in self.cluster.of(RUN)}
        self.woken |= self.store.runs()

    async def read(self, pod: Pod) -> Progress | None:
        """Answer as the trainer in a pod."""
        run = self.cluster.one(POD, pod.name)["metadata"]["labels"][names.RUN_LABEL]
        return self.trainers[run].status() if self.answers else None

    def seconds(self) -> float:
        """Monotonic seconds."""
        return self.cluster.now.timestamp()

    def _hear(self, what: str, kind: Kind, item: Object) -> None:
        if kind is RUN:
            key = (item["metadata"]["namespace"], item["metadata"]["name"])
            version = "" if what == "DELETED" else item["metadata"]["resourceVersion"]
            if not self.reconciler.is_known(key, version):
                self.woken.add(key)
        elif kind in (*CHILDREN, POD):
            where = (kind.kind, item["metadata"]["name"])
            if not _labelled(item):
                # A watch by label says of an object that matches no longer that it was deleted, as it was before.
                if (before := self._labelled.pop(where, None)) is not None:
                    self._hear("DELETED", kind, before)
                return
            self._labelled[where] = item
            found = (self.store.drop if what == "DELETED" else self.store.put)(kind, item)
            if found is not None:
                self.woken.add(found)

    def settle(self, passes: int = 60) -> None:
        """Reconcile whatever is due until nothing is; a controller that is killed is started again."""
        for _ in range(passes):
            keys = self.woken | {key for key, at in self.due.items() if at <= self.seconds()}
            if not keys:
                return
            for key in sorted(keys):
                self._reconcile(key)
        raise AssertionError(f"it never settles: {self.woken}, {self.cluster.writes[-12:]}")

    def _reconcile(self, key: Key) -> None:
        woken = key in self.woken
        self.woken.discard(key)
        self.due.pop(key, None)
        try:
            again = _LOOP.run_until_complete(self.reconciler.reconcile(Work(key, woken)))
            if again is not None:
                self.due[key] = self.seconds() + again
        except Killed:
            self.deaths += 1
            self.start()
        except AgainError:
            self.woken.add(key)
        except ClusterError:
            self.due[key] = self.seconds() + SECONDS

    # The rest of the cluster

    def create(self, item: Object) -> None:
        """Apply a run as a person would."""
        self.cluster.put(RUN, item)
        self.trainers.setdefault(item["metadata"]["name"], Trainer(steps=item["spec"]["training"]["steps"]))
        self.settle()

    def tick(self) -> None:
        """Let five seconds pass."""
        self.cluster.advance(SECONDS)
        if self.plays:
            self._jobs()
            self._deployments()
            self._kubelets()
            self._garbage()
        self.settle()

    def until(self, what: Callable[[], bool], ticks: int = 120) -> None:
        """Let time pass until something is the case."""
        for _ in range(ticks):
            if what():
                return
            self.tick()
        raise AssertionError(f"never so; {[item.get('status') for item in self.cluster.of(RUN)]}")

    def status(self, name: str = "run") -> Object:
        """Return the status of a run."""
        found = self.cluster.one(RUN, name).get("status") or {}
        assert isinstance(found, dict)
        return found

    def condition(self, kind: str, name: str = "run") -> Object:
        """Return a condition of a run."""
        return next(item for item in self.status(name)["conditions"] if item["type"] == kind)

    def phase(self, name: str = "run") -> str | None:
        """Return the phase of a run."""
        return self.status(name).get("phase")

    def pods(self, component: str, name: str = "run") -> list[Object]:
        """Return pods of a component that have not ended."""
        wanted = names.selector(name, component)  # type: ignore[arg-type]
        return [
            pod
            for pod in self.cluster.of(POD)
            if wanted.items() <= pod["metadata"]["labels"].items()
            and pod["status"]["phase"] not in ("Succeeded", "Failed")
        ]

    def end(
        self, pod: str, *, code: int = 1, reason: str = "Error", message: str = "", disrupted: bool = False
    ) -> None:
        """End a pod's trainer container."""
        ended = {"exitCode": code, "reason": reason, "message": message}

        def change(item: Object) -> None:
            item["status"]["phase"] = "Failed" if code else "Succeeded"
            item["status"]["containerStatuses"] = [{"name": "trainer", "state": {"terminated": ended}}]
            item["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
            if disrupted:
                item["status"]["conditions"].append(
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "PreemptionByScheduler",
                        "message": "preempted by a pod of higher priority",
                    }
                )

        self.cluster.edit(POD, pod, change)
        self.settle()

    def _jobs(self) -> None:
        for job in self.cluster.of(JOB):
            metadata, spec, status = job["metadata"], job["spec"], job.get("status") or {}
            if not self.cluster.has(JOB, metadata["name"]):
                continue
            pods = [pod for pod in self.cluster.of(POD) if _owner(pod) == metadata["uid"]]
            if metadata.get("deletionTimestamp"):
                for pod in pods:
                    self._terminate(pod)
                if not any(_owner(pod) == metadata["uid"] for pod in self.cluster.of(POD)):
                    self.cluster.finish(JOB, job)
                continue
            if status.get("conditions") or spec.get("suspend"):
                continue
            new: Object = {**status, "startTime": status.get("startTime") or stamp(self.cluster.now)}
            count = spec.get("completions", 1)
            here = {pod["metadata"]["labels"][names.INDEX_LABEL] for pod in pods if pod["status"]["phase"] != "Failed"}
            failed = [pod for pod in pods if pod["status"]["phase"] == "Failed"]
            succeeded = [pod for pod in pods if pod["status"]["phase"] == "Succeeded"]
            if failed and spec["backoffLimit"] == 0:
                for pod in pods:
                    if pod["status"]["phase"] in ("Pending", "Running"):
                        self._terminate(pod)
                new["conditions"] = [_failed(failed[0], self.cluster)]
            elif len(failed) > spec["backoffLimit"]:
                new["conditions"] = [_failed(failed[0], self.cluster)]
            elif len(succeeded) >= count:
                new["conditions"] = [{"type": "Complete", "status": "True", "reason": "CompletionsReached"}]
            else:
                for index in range(count):
                    if str(index) not in here:
                        self._pod(job, f"{metadata['name']}-{index}-{metadata['uid'][4:]}{len(pods)}", str(index))
            new["active"] = len(
                [
                    pod
                    for pod in self.cluster.of(POD)
                    if _owner(pod) == metadata["uid"] and pod["status"]["phase"] in ("Pending", "Running")
                ]
            )
            self.cluster.edit(JOB, metadata["name"], lambda item, new=new: item.update(status=new))

    def _deployments(self) -> None:
        for deployment in self.cluster.of(DEPLOYMENT):
            metadata, spec = deployment["metadata"], deployment["spec"]
            pods = [pod for pod in self.cluster.of(POD) if _owner(pod) == metadata["uid"]]
            for number in range(spec["replicas"]):
                if number >= len(pods):
                    self._pod(deployment, f"{metadata['name']}-{metadata['uid'][4:]}-{number}", None)
            for pod in pods[spec["replicas"] :]:
                self._terminate(pod)
            pods = [pod for pod in self.cluster.of(POD) if _owner(pod) == metadata["uid"]]
            status = {
                "replicas": len(pods),
                "readyReplicas": sum(_is_ready(pod) for pod in pods),
                "observedGeneration": metadata["generation"],
            }
            self.cluster.edit(DEPLOYMENT, metadata["name"], lambda item, status=status: item.update(status=status))

    def _pod(self, owner: Object, name: str, index: str | None) -> None:
        template = owner["spec"]["template"]
        labels = dict(template["metadata"]["labels"])
        if index is not None:
            labels |= {names.INDEX_LABEL: index, names.JOB_LABEL: owner["metadata"]["name"]}
        reference = {"kind": owner["kind"], "uid": owner["metadata"]["uid"], "controller": True}
        self.cluster.put(
            POD,
            {
                "metadata": {"name": name, "namespace": "ns", "labels": labels, "ownerReferences": [reference]},
                "spec": {"containers": template["spec"]["containers"], "nodeName": "node-1"},
                "status": {"phase": "Pending"},
            },
        )

    def _terminate(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if pod["metadata"].get("deletionTimestamp") or pod["status"]["phase"] in ("Succeeded", "Failed"):
            self.cluster.remove(POD, "ns", name)
            return
        gone = stamp(self.cluster.now)
        self.cluster.edit(POD, name, lambda item: item["metadata"].update(deletionTimestamp=gone))

    def _kubelets(self) -> None:
        for pod in self.cluster.of(POD):
            phase, labels = pod["status"]["phase"], pod["metadata"]["labels"]
            if pod["metadata"].get("deletionTimestamp"):
                continue
            component, run = labels[names.COMPONENT_LABEL], labels[names.RUN_LABEL]
            if phase == "Pending":
                running = {
                    "phase": "Running",
                    "podIP": "10.0.0.1",
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "containerStatuses": [],
                }
                self.cluster.edit(POD, pod["metadata"]["name"], lambda item, status=running: item.update(status=status))
                if component == "trainer" and labels[names.INDEX_LABEL] == "0":
                    self.trainers[run].starts += 1
            elif phase == "Running":
                self._work(pod, component, run)

    def _work(self, pod: Object, component: str, run: str) -> None:
        name = pod["metadata"]["name"]
        if component == "trainer":
            trainer = self.trainers[run]
            if trainer.step >= trainer.steps:
                self.end(name, code=0)
            elif pod["metadata"]["labels"][names.INDEX_LABEL] == "0" and trainer.step != trainer.hold_at:
                trainer.step += 1
        elif component == "evaluation":
            self.end(name, code=0, message=json.dumps([["humaneval_plus", "t0", 0.5, 164]]))
        elif component == "cleanup":
            self.end(name, code=0)

    def _garbage(self) -> None:
        uids = {item["metadata"]["uid"] for item in self.cluster.objects.values()}
        for (kind, namespace, name), item in list(self.cluster.objects.items()):
            if (owner := _owner(item)) is not None and owner not in uids:
                if kind == "Pod":
                    self._terminate(item)
                else:
                    self.cluster.remove(BY_NAME[kind], namespace, name)


def _failed(pod: Object, cluster: FakeCluster) -> Object:
    end = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    disrupted = any(item["type"] == "DisruptionTarget" for item in pod["status"]["conditions"])
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    if disrupted:
        reason = "PodFailurePolicy"
        message = f"Pod ns/{pod['metadata']['name']} has condition DisruptionTarget matching FailJob rule at index 1"
    elif end["exitCode"] == names.REFUSED_EXIT_CODE:
        reason = "PodFailurePolicy"
        message = (
            f"Container trainer for pod ns/{pod['metadata']['name']} failed with exit code 42 "
            "matching FailJob rule at index 0"
        )
    return {
        "type": "Failed",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": stamp(cluster.now),
    }


def _owner(item: Object) -> str | None:
    for reference in item["metadata"].get("ownerReferences") or ():
        if reference.get("controller"):
            return str(reference["uid"])
    return None


def _is_ready(pod: Object) -> bool:
    return any(item["type"] == "Ready" and item["status"] == "True" for item in pod["status"].get("conditions") or ())


def _labelled(item: Object) -> bool:
    return names.RUN_LABEL in (item["metadata"].get("labels") or {})
