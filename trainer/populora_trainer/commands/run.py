"""`populora run`: train the population of a manifest on this machine."""

import os
import shlex
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import click

from populora_api import ManifestError, PopulationRun, Services, local_refusals, name_of, parse_manifest, read_text
from populora_trainer.errors import PopuloraError
from populora_trainer.parameters import Seconds
from populora_trainer.ranks.world import World, world_from
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.removal import foreign_in
from populora_trainer.storage.run import RUN_MANIFEST


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
    "--serving",
    metavar="ADDRESS",
    envvar="POPULORA_SERVING_HOST",
    show_envvar=True,
    help="Sample at these vLLM servers where inference.engine is VLLM: http://HOST:PORT, or HOST for port 8000; every "
    "address of HOST is a server.",
)
@click.option(
    "--sidecar-port",
    type=click.IntRange(1, 65535),
    default=8001,
    show_default=True,
    help="Port of the sidecars that load adapters, at the same addresses.",
)
@click.option(
    "--leave-status",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the last answer of /status there at the end, e.g. as a container's termination message.",
)
@click.option(
    "--grace",
    type=Seconds(min=0),
    metavar="SECONDS",
    help="After a signal, leave a step that takes longer than this at the last checkpoint. [default: wait for it]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Processes on this machine that share each step: as many as it has GPUs.",
)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Machines that share each step. The same command, with its own --node, runs on each.",
)
@click.option(
    "--node",
    type=click.IntRange(min=0),
    default=0,
    envvar="JOB_COMPLETION_INDEX",
    show_envvar=True,
    show_default=True,
    help="Number of this machine. Machine 0 holds the run.",
)
@click.option("--rendezvous", metavar="HOST:PORT", help="Where machine 0 waits for the others.")
def command(
    manifest: Path,
    output: Path | None,
    overrides: tuple[str, ...],
    listen: str | None,
    from_step: int | None,
    allow_missing: tuple[str, ...],
    threads: int | None,
    sandbox: str | None,
    serving: str | None,
    sidecar_port: int,
    leave_status: Path | None,
    grace: float | None,
    ranks: int,
    nodes: int,
    node: int,
    rendezvous: str | None,
) -> None:
    """Train the population of MANIFEST here, `-` being standard input; continues where an earlier run stopped.

    A manifest whose storage.uri is s3://BUCKET/PREFIX keeps the run there, with the credentials of the environment
    (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).

    Ctrl-C ends the run after the step that is going on, with exit code 130 (SIGTERM: 143); a second one ends it at
    once, at its last checkpoint. The same command goes on from there.

    On a machine with 8 GPUs, --ranks 8 spreads every step over them. Processes that torchrun has started find each
    other too.
    """
    text, source = read_text(manifest), name_of(manifest)
    # The folder is named after the run, which the first parsing tells.
    first = parse_manifest(text, source, overrides, output="runs")
    place = output or Path("runs") / first.metadata.name
    run = parse_manifest(text, source, overrides, output=place)
    folder = run.spec.storage.folder
    if output is not None and folder != output.absolute():
        raise PopuloraError(
            f"--output {output}: this run goes to spec.storage.uri {run.spec.storage.uri}; leave --output out, or "
            f"override the other with --set storage.uri=file:///FOLDER"
        )
    # A wrong manifest is answered before torch is loaded, which takes seconds.
    services = Services(sandbox, serving, sidecar_port, controlled=bool(os.environ.get("POPULORA_CONTROLLED")))
    if refusals := local_refusals(run, services):
        raise ManifestError(refusals)
    world = world_from(os.environ)
    if not world.leads:
        click.get_current_context().exit(_follow(run, world, listen, services))
    _check_machines(nodes, node, rendezvous)
    _check_serving(run, services)
    _check_places(run, leave_status)
    if world.size == 1 and ranks * nodes > 1:
        click.get_current_context().exit(_launch(manifest, ranks, nodes, node, rendezvous))
    once = not manifest.is_file() or manifest.is_relative_to("/dev") or manifest.is_relative_to("/proc")
    kept_at = (str(place),) if folder == place.absolute() else ()
    if once and folder is not None:
        # A pipe gives the manifest once; what the run keeps is all of it, with the overrides.
        kept_at = kept_at or (str(folder),)
        manifest, overrides = Path(*kept_at) / "run.yaml", ()
    again = [_program(), "run", str(manifest)]
    given: dict[str, tuple[str, ...]] = {"--output": kept_at}
    given |= {"--set": overrides, "--listen": (listen,) if listen else (), "--allow-missing": allow_missing}
    given["--threads"] = () if threads is None else (str(threads),)
    given["--sandbox"] = () if sandbox is None else (sandbox,)
    given["--serving"] = () if serving is None else (serving,)
    given["--sidecar-port"] = () if sidecar_port == 8001 else (str(sidecar_port),)
    given["--leave-status"] = () if leave_status is None else (str(leave_status),)
    given["--grace"] = () if grace is None else (f"{grace:g}",)
    given["--ranks"] = () if ranks == 1 else (str(ranks),)
    given["--nodes"] = () if nodes == 1 else (str(nodes),)
    given["--node"] = () if nodes == 1 else (str(node),)
    given["--rendezvous"] = () if rendezvous is None else (rendezvous,)
    again += [word for option, values in given.items() for value in values for word in (option, value)]
    with ExitStack() as stack:
        endpoint = None
        if listen is not None:
            from populora_trainer.diagnostics.endpoint import Endpoint

            endpoint = stack.enter_context(Endpoint(listen))
        click.echo(f"Loading torch and {run.spec.base_model.uri} ...")
        from populora_trainer.progress import train_in_terminal

        group = None
        if world.size > 1:
            import torch

            from populora_trainer.ranks.group import leading

            group = stack.enter_context(leading(world, on_gpus=torch.cuda.is_available()))
        signal = train_in_terminal(
            run, shlex.join(again), endpoint, from_step, allow_missing, threads, services, leave_status, grace, group
        )
        if group is not None and signal is not None:
            group.code = 128 + signal
    if signal is not None:
        click.get_current_context().exit(128 + signal)


def _launch(manifest: Path, ranks: int, nodes: int, node: int, rendezvous: str | None) -> int:
    """Run this command as the ranks of this machine and return what to exit with."""
    if nodes > 1 and rendezvous is None:
        raise PopuloraError(f"--nodes {nodes}: --rendezvous HOST:PORT must say where machine 0 waits for the others")
    if node >= nodes:
        raise PopuloraError(f"--node {node} is not allowed with --nodes {nodes}: machines are numbered from 0")
    if not manifest.is_file():
        raise PopuloraError(f"{manifest}: --ranks needs a manifest in a file, as every process reads it")
    from populora_trainer.ranks.launcher import launch, parse_endpoint

    host, port = parse_endpoint(rendezvous) if rendezvous is not None and nodes > 1 else ("127.0.0.1", 0)
    arguments = ["-m", "populora_trainer.cli", *sys.argv[1:]]
    return launch(arguments, ranks=ranks, nodes=nodes, node=node, host=host, port=port, say=click.echo)


def _follow(run: PopulationRun, world: World, listen: str | None, services: Services) -> int:
    """Compute for rank 0 and return what to exit with."""
    with ExitStack() as stack:
        endpoint = None
        if listen is not None and world.speaks:
            from populora_trainer.diagnostics.endpoint import Endpoint

            endpoint = stack.enter_context(Endpoint(listen))
        from populora_trainer.following import follow

        return follow(run, world, endpoint, services)


def _check_machines(nodes: int, node: int, rendezvous: str | None) -> None:
    """Refuse options that would be passed over, so that no machine trains the whole run by mistake.

    A number that a Job gives its pod may mean something else, e.g. which of several runs it is.
    """
    if nodes > 1:
        return
    numbered = click.get_current_context().get_parameter_source("node") is click.core.ParameterSource.COMMANDLINE
    given = f"--rendezvous {rendezvous}" if rendezvous is not None else f"--node {node}"
    if rendezvous is not None or (node and numbered):
        raise PopuloraError(f"{given} is for several machines, and --nodes is 1")


def _check_serving(run: PopulationRun, services: Services) -> None:
    """Refuse an address that is none, or of servers that nobody would ask."""
    if services.sandbox_url is not None:
        from populora_trainer.sandbox.remote import RemoteVerifier

        RemoteVerifier(services.sandbox_url)
    if services.serving is None:
        return
    if run.spec.inference.engine == "VLLM":
        from populora_trainer.rollout.replicas import ServingAddress

        ServingAddress.parse(services.serving, services.sidecar_port)
    elif click.get_current_context().get_parameter_source("serving") is click.core.ParameterSource.COMMANDLINE:
        raise PopuloraError(
            f"--serving {services.serving}: spec.inference.engine is {run.spec.inference.engine}, which samples in "
            f"this process; leave --serving out, or add --set inference.engine=VLLM"
        )


def _check_places(run: PopulationRun, leave_status: Path | None) -> None:
    """Refuse what could not be written, or is another process's, before loading torch takes its seconds."""
    folder = run.spec.storage.folder
    if folder is not None:
        nearest = next(one for one in (folder, *folder.parents) if os.path.exists(one))
        if not os.path.isdir(nearest):
            raise PopuloraError(f"{folder} can't hold the run: {nearest} is no folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PopuloraError(f"{folder} can't hold the run: {nearest} is not writable")
        if nearest == folder and (holder := LocalStore(folder, create=False).holder()):
            raise PopuloraError(f"{folder} is in use by {holder}")
        # A mistyped folder would be mixed with a run, of which it could not be cleared again.
        if nearest == folder and not (folder / RUN_MANIFEST).exists() and (others := foreign_in(folder)):
            raise PopuloraError(
                f"{folder} can't hold the run: it has {others[0]} in it, which is no part of a run; name a folder that "
                f"is empty, does not exist or holds a run"
            )
    if leave_status is not None:
        place = leave_status if os.path.exists(leave_status) else leave_status.absolute().parent
        if not os.access(place, os.W_OK):
            reason = "is not writable" if os.path.exists(place) else "does not exist"
            raise PopuloraError(f"--leave-status {leave_status}: cannot be written: {place} {reason}")


def _program() -> str:
    """Return what a shell finds this command by: its path, where the environment that it is in is not activated."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "populora" and shutil.which("populora") is None else "populora"
