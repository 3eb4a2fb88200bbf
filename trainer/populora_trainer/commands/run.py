"""`populora run`: train the population of a manifest on this machine."""

import os
import shlex
from pathlib import Path

import click

from populora_api import ManifestError, Services, load_manifest, local_refusals
from populora_trainer.errors import PopuloraError


@click.command("run")
@click.argument("manifest", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of the run, where its manifest names no bucket. [default: runs/NAME]",
)
@click.option("--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override a field of the manifest.")
@click.option("--listen", metavar="HOST:PORT", help="Serve /metrics, /status and /healthz there while training.")
@click.option("--from-step", type=click.IntRange(min=0), help="Drop the checkpoints after this step and go on from it.")
@click.option(
    "--allow-missing", multiple=True, metavar="LAYER", help="Train although this machine lacks an isolation layer."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads to compute with; the results' last bits depend on them. [default: as the run began]",
)
@click.option(
    "--sandbox",
    metavar="URL",
    envvar="POPULORA_SANDBOX_URL",
    show_envvar=True,
    help="Execute programs at this sandbox service instead of here.",
)
@click.option(
    "--leave-status",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the last answer of /status there at the end, e.g. as a container's termination message.",
)
def command(
    manifest: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    listen: str | None,
    from_step: int | None,
    allow_missing: tuple[str, ...],
    threads: int | None,
    sandbox: str | None,
    leave_status: Path | None,
) -> None:
    """Train the population of MANIFEST here; continues where an earlier run stopped.

    A manifest whose storage.uri is s3://BUCKET/PREFIX keeps the run there, with the credentials of the environment
    (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).

    Ctrl-C ends the run after the step that is going on, with exit code 130 (SIGTERM: 143); a second one ends it at
    once, at its last checkpoint. The same command goes on from there.
    """
    # The folder is named after the run, which the first reading tells.
    first = load_manifest(manifest, overrides, output="runs")
    folder = output or Path("runs") / first.metadata.name
    run = load_manifest(manifest, overrides, output=folder)
    if output is not None and run.spec.storage.folder is None:
        raise PopuloraError(
            f"--output {output}: this run goes to spec.storage.uri {run.spec.storage.uri}; leave --output out, or "
            f"override the other with --set storage.uri=file:///FOLDER"
        )
    # A wrong manifest is answered before torch is loaded, which takes seconds.
    services = Services(sandbox_url=sandbox, controlled=bool(os.environ.get("POPULORA_CONTROLLED")))
    if refusals := local_refusals(run, services):
        raise ManifestError(refusals)
    from populora_trainer.progress import train_in_terminal

    again = ["populora", "run", str(manifest)]
    given: dict[str, tuple[str, ...]] = {"--output": (str(folder),) if run.spec.storage.folder is not None else ()}
    given |= {"--set": overrides, "--listen": (listen,) if listen else (), "--allow-missing": allow_missing}
    given["--threads"] = () if threads is None else (str(threads),)
    given["--sandbox"] = () if sandbox is None else (sandbox,)
    given["--leave-status"] = () if leave_status is None else (str(leave_status),)
    again += [word for option, values in given.items() for value in values for word in (option, value)]
    signal = train_in_terminal(
        run, shlex.join(again), listen, from_step, allow_missing, threads, services, leave_status
    )
    if signal is not None:
        click.get_current_context().exit(128 + signal)
