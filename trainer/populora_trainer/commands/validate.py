"""`populora validate`."""

import json
from dataclasses import asdict

import click

from populora_api import ManifestError, check_file


@click.command("validate")
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of problems; empty if all is well.")
def command(manifests: tuple[str, ...], as_json: bool) -> None:
    """Say what the API server would say to PopulationRun manifests, offline.

    Every problem of every file is one line: FILE:LINE: FIELD: what is there and what is allowed. The exit code is 42 if
    there is any.
    """
    problems = []
    for path in manifests:
        runs, found = check_file(path)
        problems += found
        if as_json:
            continue
        for problem in found:
            click.echo(problem)
        if not found:
            click.echo(f"{path}: valid: {', '.join(run.metadata.name for run in runs)}")
    if as_json:
        click.echo(json.dumps([asdict(problem) for problem in problems], indent=2, ensure_ascii=False))
    if problems:
        raise SystemExit(ManifestError.exit_code)
