"""The rendered arguments are options that the controller takes, and every option can be set."""

from typing import Any

import click
import pytest
from chart import Helm, Manifests, setting

from populora_operator.command import command

ELSEWHERE = {
    "identity": "each replica makes its own",
    "kubeconfig": "in a cluster the pod's own credentials are used",
    "context": "in a cluster the pod's own credentials are used",
}
"""Options that have no value in the chart, and why."""

SETTINGS: dict[str, tuple[str, Any, Any]] = {
    "namespaces": ("controller.namespaces", ["team-a", "team-b"], ("team-a", "team-b")),
    "lease_namespace": ("controller.leaseNamespace", "leases", "leases"),
    "lease_name": ("controller.leaseName", "leader", "leader"),
    "lease_seconds": ("controller.leaseSeconds", 20, 20),
    "metrics_port": ("controller.metricsPort", 18080, 18080),
    "health_port": ("controller.healthPort", 18081, 18081),
    "trainer_image": ("workloads.trainerImage", "mirror/trainer:1", "mirror/trainer:1"),
    "sandbox_image": ("workloads.sandboxImage", "mirror/sandbox:1", "mirror/sandbox:1"),
    "sidecar_image": ("workloads.sidecarImage", "mirror/sidecar:1", "mirror/sidecar:1"),
    "serving_image": ("workloads.servingImage", "mirror/vllm@sha256:" + "1" * 64, "mirror/vllm@sha256:" + "1" * 64),
    "image_pull_policy": ("workloads.imagePullPolicy", "Never", "Never"),
    "image_pull_secrets": ("workloads.imagePullSecrets", ["c", "d"], ("c", "d")),
    "workers": ("controller.workers", 32, 32),
    "resync_seconds": ("controller.resyncSeconds", 86400, 86400),
    "status_poll_seconds": ("controller.statusPollSeconds", 0.5, 0.5),
    "log_format": ("controller.logFormat", "text", "text"),
    "log_level": ("controller.logLevel", "warning", "warning"),
}
"""Parameter of the command: the value that sets it, an example, and what the command then gets."""


def parsed(manifests: Manifests) -> dict[str, Any]:
    """Return what the command reads from the rendered arguments.

    Raises:
        click.UsageError: an argument is not one of its options.
    """
    container = manifests.controller
    assert container["command"] == ["populora"]
    assert container["args"][0] == command.name
    return command.make_context("populora", [str(argument) for argument in container["args"][1:]]).params


def test_the_default_arguments_mean_the_commands_defaults(defaults: Manifests) -> None:
    given, own = parsed(defaults), command.make_context("populora", []).params
    assert {name for name in own if given[name] != own[name]} == {"lease_namespace", "log_format"}
    assert given["lease_namespace"] == "populora-system"
    assert given["log_format"] == "json"


@pytest.mark.parametrize("parameter", SETTINGS)
def test_a_value_arrives_at_its_option(helm: Helm, parameter: str) -> None:
    path, value, expected = SETTINGS[parameter]
    assert parsed(helm.render(setting(path, value)))[parameter] == expected


def test_every_option_can_be_set() -> None:
    options = {param.name for param in command.params if isinstance(param, click.Option)}
    assert options == SETTINGS.keys() | ELSEWHERE.keys()


def test_further_arguments_come_last_and_as_they_are(helm: Helm) -> None:
    manifests = helm.render({"controller": {"extraArgs": ["--identity=me: 'you' # \"x\""]}})
    assert parsed(manifests)["identity"] == "me: 'you' # \"x\""
