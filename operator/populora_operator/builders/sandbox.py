"""The pods that run untrusted programs."""

from populora_operator import names
from populora_operator.builders.context import Context, Manifest
from populora_operator.builders.podspec import container, http_probe, pod, resources
from populora_operator.cluster.kinds import DEPLOYMENT, SERVICE

GRACE_SECONDS = 30
_AFTER_DRAIN_SECONDS = 5  # for the last answers and the workers' end
_CONCURRENT_EXECUTIONS = 4
_SERVER_MIB = 512


def sandbox_deployment(context: Context, *, replicas: int | None = None) -> Manifest:
    """Return the Deployment; `replicas` overrides the spec's, e.g. 0 while suspended."""
    choice = context.spec.sandbox
    memory = f"{_SERVER_MIB + _CONCURRENT_EXECUTIONS * choice.memory_mib}Mi"
    made = container(
        "sandbox",
        choice.image or context.images.sandbox,
        context,
        command=["populora", "sandbox", "serve"],
        args=[
            f"--listen=0.0.0.0:{names.SANDBOX_PORT}",
            f"--timeout={choice.timeout_seconds:g}",
            f"--memory={choice.memory_mib}",
            f"--workers={_CONCURRENT_EXECUTIONS // 2}",
            f"--drain={GRACE_SECONDS - _AFTER_DRAIN_SECONDS}",
        ],
        ports={"http": names.SANDBOX_PORT},
        resources=resources(choice, cpu="1", memory=memory),
        startupProbe=http_probe("/healthz", names.SANDBOX_PORT, period=2, failures=60),
        readinessProbe=http_probe("/readyz", names.SANDBOX_PORT, period=5, failures=2),
        livenessProbe=http_probe("/healthz", names.SANDBOX_PORT, period=10, failures=6),
    )
    runtime: Manifest = {"runtimeClassName": choice.runtime_class_name} if choice.runtime_class_name else {}
    template = pod(
        context,
        "sandbox",
        [made],
        choice=choice,
        grace=GRACE_SECONDS,
        service_account=names.sandbox(context.name),
        **runtime,
    )
    return deployment(context, names.sandbox(context.name), "sandbox", template, replicas, choice.replicas)


def sandbox_service(context: Context) -> Manifest:
    """Return the Service by which trainer and evaluation reach any sandbox."""
    spec = {
        "selector": names.selector(context.name, "sandbox"),
        "ports": [{"name": "http", "port": names.SANDBOX_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return context.child(SERVICE, names.sandbox(context.name), "sandbox", spec=spec)


def deployment(
    context: Context, name: str, component: names.Component, template: Manifest, replicas: int | None, wanted: int
) -> Manifest:
    """Return a Deployment that never takes away more than one pod in four at a time."""
    spec: Manifest = {
        "replicas": wanted if replicas is None else replicas,
        "revisionHistoryLimit": 1,
        "selector": {"matchLabels": names.selector(context.name, component)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%", "maxSurge": 0}},
        "template": template,
    }
    if wanted < 4:
        # A quarter of few pods is rounded down to none, and without a surge nothing could ever be replaced.
        spec["strategy"]["rollingUpdate"]["maxUnavailable"] = 1
    made = context.child(DEPLOYMENT, name, component, spec=spec)
    queue(context, made)
    return made


def queue(context: Context, made: Manifest) -> None:
    """Label an object for Kueue where the run names a queue."""
    if context.spec.scheduling.queue_name is not None:
        made["metadata"]["labels"][names.QUEUE_LABEL] = context.spec.scheduling.queue_name
