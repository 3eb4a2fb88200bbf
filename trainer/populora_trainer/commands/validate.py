"""`populora validate`."""

import json
from dataclasses import asdict

import click

from populora_api import ManifestError, check_file, name_of


@click.command("validate")
@click.argument("manifests", metavar="MANIFEST...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of problems; empty if all is well.")
def command(manifests: tuple[str, ...], as_json: bool) -> None:
    """Say what the API server would say to PopulationRun manifests, offline; `-` is standard input.

    Every problem of every file is one line: FILE:LINE: FIELD: what is there and what is allowed. The exit code is 42 if
    there is any. Two runs of one name are no problem, as each may be for a cluster of its own, and get a note.
    """
    problems = []
    seen: dict[tuple[str | None, str], str] = {}
    for path in dict.fromkeys(manifests):
        runs, found = check_file(path)
        problems += found
        for run in runs:
            key = (run.metadata.namespace, run.metadata.name)
            if key in seen:
                click.echo(
                    f"Note: {name_of(path)}: a run {run.metadata.name} is in {seen[key]} too: in one namespace, the "
                    f"later of the two takes the place of the other",
                    err=True,
                )
            seen[key] = name_of(path)
        if as_json:
            continue
        for problem in found:
            click.echo(problem)
        if not found:
            click.echo(f"{name_of(path)}: valid: {', '.join(run.metadata.name for run in runs)}")
    if as_json:
        click.echo(json.dumps([asdict(problem) for problem in problems], indent=2, ensure_ascii=False))
    if problems:
        raise SystemExit(ManifestError.exit_code)
