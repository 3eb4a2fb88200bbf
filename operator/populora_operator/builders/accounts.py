"""Identities of the pods. None of them gets a token: no pod of a run talks to the API server."""

from typing import Literal

from populora_operator.builders.context import Context, Manifest
from populora_operator.cluster.kinds import SERVICE_ACCOUNT


def service_account(context: Context, component: Literal["trainer", "sandbox", "serving"]) -> Manifest:
    """Return the ServiceAccount of one kind of pod, so that rights in a cloud can be given to one kind alone."""
    name = f"{context.name}-{component}"
    return context.child(SERVICE_ACCOUNT, name, component, automountServiceAccountToken=False)
