"""How the API server is found and who the controller is to it."""

from pathlib import Path

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

MAX_CONNECTIONS = 64


class NoClusterError(Exception):
    """There is no way to an API server; the message says what is missing."""


async def configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
    """Return where the API server is: the file, else the pod's own credentials, else the user's kubeconfig.

    Raises:
        NoClusterError: nothing of that is there.
    """
    found = Configuration()
    found.connection_pool_maxsize = MAX_CONNECTIONS
    try:
        if kubeconfig is None and context is None:
            try:
                load_incluster_config(client_configuration=found)
                return found
            except ConfigException:
                pass
        await load_kube_config(
            config_file=str(kubeconfig) if kubeconfig else None,
            context=context,
            client_configuration=found,
            persist_config=False,
        )
    except (ConfigException, OSError, AttributeError) as error:
        where = kubeconfig or "the pod's service account and the user's kubeconfig"
        raise NoClusterError(f"--kubeconfig: no API server found by {where}: {error}.") from error
    return found
