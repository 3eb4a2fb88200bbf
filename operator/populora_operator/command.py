"""`populora controller`: reconcile PopulationRuns in a cluster."""

import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from populora_operator.settings import (
    SANDBOX_IMAGE,
    SERVING_IMAGE,
    SIDECAR_IMAGE,
    TRAINER_IMAGE,
    Images,
    LeaseSettings,
    Settings,
)

POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PREFIX = "POPULORA_CONTROLLER"
_PORT = click.IntRange(0, 65535)
_F = TypeVar("_F", bound=Callable[..., Any])


def _own_namespace() -> str:
    """Return the namespace of the pod that this process runs in, `default` outside a cluster."""
    try:
        return POD_NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"


def _own_identity() -> str:
    """Return a name that no other process has, also after a restart in the same pod."""
    return f"{socket.gethostname()}_{uuid.uuid4()}"


def _option(flag: str, *names: str, **settings: Any) -> Callable[[_F], _F]:
    """Return an option that the environment can give as well, as POPULORA_CONTROLLER_FLAG."""
    return click.option(flag, *names, envvar=f"{_PREFIX}{flag.upper().replace('-', '_')[1:]}", **settings)


@click.command("controller", context_settings={"show_default": True})
@_option(
    "--namespace",
    "namespaces",
    multiple=True,
    metavar="NS",
    help="Reconcile runs of this namespace; may be repeated (in the environment: separated by spaces). "
    "[default: all namespaces]",
)
@_option("--lease-namespace", metavar="NS", help="Namespace of the Lease. [default: the pod's own, else `default`]")
@_option("--lease-name", default="populora-controller", help="Name of the Lease.")
@_option("--identity", help="Name of this replica in the Lease. [default: host name and a random part]")
@_option(
    "--lease-seconds",
    type=click.FloatRange(3, 3600),
    default=15,
    help="Seconds after which another replica may take a Lease that is not renewed.",
)
@_option("--metrics-port", type=_PORT, default=8080, help="Port of /metrics.")
@_option("--health-port", type=_PORT, default=8081, help="Port of /healthz and /readyz.")
@_option("--trainer-image", default=TRAINER_IMAGE, help="Image of the engine.")
@_option("--sandbox-image", default=SANDBOX_IMAGE, help="Image of the sandboxes.")
@_option("--sidecar-image", default=SIDECAR_IMAGE, help="Image of vLLM's sidecar.")
@_option("--serving-image", default=SERVING_IMAGE, help="Image of vLLM.")
@_option(
    "--image-pull-policy",
    type=click.Choice(["IfNotPresent", "Always", "Never"]),
    default="IfNotPresent",
    help="Pull policy of every container.",
)
@_option(
    "--image-pull-secret",
    "image_pull_secrets",
    multiple=True,
    metavar="NAME",
    help="Secret in the runs' namespaces for pulling images; may be repeated.",
)
@_option("--workers", type=click.IntRange(1, 256), default=8, help="Runs that are reconciled at the same time.")
@_option(
    "--resync-seconds",
    type=click.FloatRange(1),
    default=600,
    help="Look at every run this often even if nothing happens.",
)
@_option(
    "--status-poll-seconds",
    type=click.FloatRange(0.1),
    default=5,
    help="Ask a running trainer for its progress this often.",
)
@_option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Lines for people or JSON objects.")
@_option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="Least severity that is logged.",
)
@_option(
    "--kubeconfig",
    type=click.Path(path_type=Path),
    help="Find the cluster by this file. [default: the pod's own credentials, else the user's kubeconfig]",
)
@_option("--context", help="Context of the kubeconfig. [default: its current one]")
@click.pass_context
def command(
    click_context: click.Context,
    namespaces: tuple[str, ...],
    lease_namespace: str | None,
    lease_name: str,
    identity: str | None,
    lease_seconds: float,
    metrics_port: int,
    health_port: int,
    trainer_image: str,
    sandbox_image: str,
    sidecar_image: str,
    serving_image: str,
    image_pull_policy: str,
    image_pull_secrets: tuple[str, ...],
    workers: int,
    resync_seconds: float,
    status_poll_seconds: float,
    log_format: str,
    log_level: str,
    kubeconfig: Path | None,
    context: str | None,
) -> None:
    """Reconcile PopulationRuns in a Kubernetes cluster until SIGTERM or Ctrl-C.

    Every option can be given in the environment as POPULORA_CONTROLLER_OPTION, e.g. POPULORA_CONTROLLER_WORKERS=16.
    """
    settings = Settings(
        lease=LeaseSettings(
            namespace=lease_namespace or _own_namespace(),
            name=lease_name,
            identity=identity or _own_identity(),
            duration=lease_seconds,
        ),
        namespaces=tuple(sorted(set(namespaces))),
        images=Images(
            trainer=trainer_image,
            sandbox=sandbox_image,
            sidecar=sidecar_image,
            serving=serving_image,
            pull_policy=image_pull_policy,
            pull_secrets=image_pull_secrets,
        ),
        metrics_port=metrics_port,
        health_port=health_port,
        workers=workers,
        resync_seconds=resync_seconds,
        status_poll_seconds=status_poll_seconds,
        kubeconfig=kubeconfig,
        context=context,
    )
    # The libraries of the cluster are imported when a controller starts, so that other commands stay quick.
    from populora_operator.app import run
    from populora_operator.logs import configure

    configure(log_format, log_level)
    click_context.exit(run(settings))
