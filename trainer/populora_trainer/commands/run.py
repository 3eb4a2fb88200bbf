"""`populora run`: train the population of a manifest on this machine."""

from pathlib import Path

import click


@click.command("run")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the run. [default: runs/NAME]")
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a field of the manifest.")
@click.option("--listen", metavar="HOST:PORT", help="Serve /metrics, /status and /healthz there while training.")
@click.option("--from-step", type=click.IntRange(min=0), help="Drop the checkpoints after this step and go on from it.")
@click.option(
    "--allow-missing", multiple=True, metavar="LAYER", help="Train although this machine lacks an isolation layer."
)
def command(
    manifest: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    listen: str | None,
    from_step: int | None,
    allow_missing: tuple[str, ...],
) -> None:
    """Train the population of MANIFEST here; continues where an earlier run stopped.

    Ctrl-C ends the run after the step that is going on; a second one ends it at once, at its last checkpoint.
    """
    from populora_trainer.progress import train_in_terminal

    train_in_terminal(manifest, output, overrides, listen, from_step, allow_missing)
