"""The ConfigMap with the manifest that the run's programs read."""

from populora_api import resolved_yaml
from populora_operator import names
from populora_operator.builders.context import Context, Manifest
from populora_operator.cluster.kinds import CONFIG_MAP


def config_map(context: Context) -> Manifest:
    """Return the ConfigMap. Its manifest never asks to be suspended: that is the controller's affair."""
    if "manifest" not in context.memo:
        # Writing YAML takes longer than everything else that is built for a run.
        context.memo["manifest"] = _manifest(context)
    data = {names.CONFIG_KEY: context.memo["manifest"]}
    return context.child(CONFIG_MAP, names.config(context.name), "config", data=data)


def _manifest(context: Context) -> str:
    run = context.run
    running = run.model_copy(
        update={
            "spec": run.spec.model_copy(update={"suspend": False}),
            "status": None,
            "metadata": run.metadata.model_copy(update={"labels": None, "annotations": None}),
        }
    )
    return resolved_yaml(running)


def config_volume(context: Context) -> Manifest:
    """Return the volume `config`, to be mounted at `names.CONFIG_FOLDER`."""
    return {"name": "config", "configMap": {"name": names.config(context.name)}}
