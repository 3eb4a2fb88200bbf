"""`populora storage`: what is done to a run's stored objects as a whole."""

import click


@click.group("storage")
def command() -> None:
    """Look after where a run is stored."""


@command.command("delete")
@click.argument("place", metavar="DIR|URI")
@click.option("--endpoint", metavar="URL", help="S3 endpoint of a store that is not AWS.")
@click.option("--region", help="S3 region.")
def delete(place: str, endpoint: str | None, region: str | None) -> None:
    """Delete every object of the run in DIR or under URI. What is gone already is no error, so it can be repeated.

    Anything else than a run is left alone: nothing is deleted where something lies that is no part of one. The run.yaml
    goes last, so that a deletion that was interrupted can be taken up.
    """
    from populora_trainer.storage.removal import delete_run

    click.echo(f"Deleted {delete_run(place, endpoint=endpoint, region=region)} objects of {place}")
