"""`populora base`: an embedded base model as a folder that other programs load."""

from pathlib import Path

import click


@click.command("base")
@click.argument("uri")
@click.option("-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="The folder.")
def command(uri: str, output: Path) -> None:
    """Write the embedded base model URI, e.g. builtin://nano, as a folder, e.g. for `vllm serve`.

    A folder that holds the same model already is left as it is.
    """
    from populora_trainer.nano.registry import copy_builtin

    copy_builtin(uri, output)
    click.echo(str(output))
