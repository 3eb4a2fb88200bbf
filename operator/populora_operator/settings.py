"""What the controller was started with."""

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

VERSION = version("populora-operator")

TRAINER_IMAGE = f"populora/trainer:{VERSION}"
SANDBOX_IMAGE = f"populora/sandbox:{VERSION}"
SIDECAR_IMAGE = f"populora/sidecar:{VERSION}"
SERVING_IMAGE = "vllm/vllm-openai:v0.32.0"


@dataclass(frozen=True)
class Images:
    """Container images of a run's pods, where its spec names none.

    Attributes:
        trainer: the engine; also evaluates and cleans up.
        sandbox: runs untrusted programs.
        sidecar: keeps vLLM's adapters equal to what the trainer published.
        serving: vLLM.
        pull_policy: of every container.
        pull_secrets: Secrets in the run's namespace, of every pod.
    """

    trainer: str = TRAINER_IMAGE
    sandbox: str = SANDBOX_IMAGE
    sidecar: str = SIDECAR_IMAGE
    serving: str = SERVING_IMAGE
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeaseSettings:
    """How replicas agree on a leader; times are seconds.

    Attributes:
        namespace: of the Lease.
        name: of the Lease.
        identity: this replica.
        duration: for how long others keep off a Lease that its holder does not renew.
    """

    namespace: str
    name: str
    identity: str
    duration: float = 15.0

    @property
    def renew_deadline(self) -> float:
        """Seconds after the last renewal at which the holder stops writing, before anybody else may start."""
        return self.duration * 2 / 3

    @property
    def retry_period(self) -> float:
        """Seconds between two tries to renew or to take the Lease."""
        return self.duration * 2 / 15


@dataclass(frozen=True)
class Settings:
    """Options of `populora controller`.

    Attributes:
        namespaces: whose runs are reconciled; none means all.
        lease: leader election.
        images: container images.
        metrics_port: port of /metrics.
        health_port: port of /healthz and /readyz.
        workers: runs that are reconciled at the same time.
        resync_seconds: every run is looked at this often even if nothing happens.
        status_poll_seconds: how often a running trainer is asked for its progress.
        kubeconfig: file to find the cluster by, instead of the pod's own credentials.
        context: context in that file.
    """

    lease: LeaseSettings
    namespaces: tuple[str, ...] = ()
    images: Images = field(default_factory=Images)
    metrics_port: int = 8080
    health_port: int = 8081
    workers: int = 8
    resync_seconds: float = 600.0
    status_poll_seconds: float = 5.0
    kubeconfig: Path | None = None
    context: str | None = None
