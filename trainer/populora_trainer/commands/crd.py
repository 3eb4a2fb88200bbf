"""`populora crd`."""

import json

import click
import yaml

from populora_api import custom_resource_definition


@click.command("crd")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def command(as_json: bool) -> None:
    """Print the CustomResourceDefinition of PopulationRun, for `kubectl apply --server-side -f -`."""
    definition = custom_resource_definition()
    if as_json:
        click.echo(json.dumps(definition, indent=2, ensure_ascii=False))
    else:
        click.echo(yaml.safe_dump(definition, sort_keys=False, allow_unicode=True, width=120), nl=False)
