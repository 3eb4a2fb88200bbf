"""`populora crd`."""

import json

import click

from populora_api import custom_resource_definition
from populora_api.documents import write_yaml


@click.command("crd")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def command(as_json: bool) -> None:
    """Print the CustomResourceDefinition of PopulationRun, for `kubectl apply --server-side -f -`."""
    definition = custom_resource_definition()
    if as_json:
        click.echo(json.dumps(definition, indent=2, ensure_ascii=False))
    else:
        click.echo(write_yaml(definition), nl=False)
