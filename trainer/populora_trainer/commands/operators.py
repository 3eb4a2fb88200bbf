"""`populora operators`."""

import json

import click


@click.command("operators")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of id, name, arity, parameters, source.")
def command(as_json: bool) -> None:
    """List the evolution operators: id, number of parents, what they do, parameters with defaults."""
    from populora_trainer.population.catalogue import OPERATORS

    if as_json:
        rows = [
            {
                "id": operator.id,
                "name": operator.name,
                "parents": operator.arity,
                "description": operator.description,
                "parameters": dict(operator.parameters),
                "source": operator.source,
                "fitter": operator.fitter,
            }
            for operator in OPERATORS.values()
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    for operator in OPERATORS.values():
        parameters = ", ".join(f"{name}={_shown(value)}" for name, value in operator.parameters.items())
        parents = "1 parent " if operator.arity == 1 else "2 parents"
        click.echo(f"{operator.id}  {parents}  {operator.description}{f' ({parameters})' if parameters else ''}")


def _shown(value: float | bool | None) -> str:
    return f"{value:.3g}" if isinstance(value, float) else json.dumps(value)
