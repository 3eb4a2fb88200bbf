"""`populora report`: what a run did, as one HTML page or as numbers."""

import json
import os
import tempfile
from pathlib import Path

import click

from populora_trainer.errors import PopuloraError


@click.command("report")
@click.argument("places", metavar="RUN...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The page to write. By default report.html in the run's folder; for several runs, or a URI, in this one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the numbers; write no page unless -o is given.")
def command(places: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Draw runs as one self-contained HTML page; several are set side by side, as a population and its baseline.

    A RUN is a folder or s3://BUCKET/PREFIX; the environment says how to reach the bucket (AWS_ENDPOINT_URL,
    AWS_ACCESS_KEY_ID, ...).
    """
    from populora_trainer.diagnostics.report import load, render
    from populora_trainer.diagnostics.report_numbers import summarise

    runs = load(places)
    if output is None and not as_json:
        here = len(places) == 1 and "://" not in places[0]
        output = Path(places[0], "report.html") if here else Path("report.html")
    if output is not None:
        _write_whole(output, render(runs).encode("utf-8", "replace"))
    if as_json:
        click.echo(json.dumps({"runs": summarise(runs)}, indent=2, allow_nan=False))
        return
    for run in runs:
        for note in run.notes:
            click.echo(f"{run.location}: {note}", err=True)
    click.echo(f"Report: {output}")


def _write_whole(path: Path, data: bytes) -> None:
    if path.exists() and not path.is_file():
        raise PopuloraError(f"The report cannot be written to {path}: it is there and is no regular file.")
    path = path.resolve()  # a link keeps pointing to the page
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".report-", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise PopuloraError(f"The report cannot be written to {path}: {error.strerror}.") from error
