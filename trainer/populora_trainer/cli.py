"""The command line `populora`: finds a command by name, runs it, and turns errors into one sentence."""

import importlib
import os
import sys

import click

from populora_trainer.errors import PopuloraError

COMMANDS = {
    "run": "Train a population here; continues where an earlier run stopped.",
    "status": "Show where a run stands: step, members, ratings, solve rates.",
    "report": "Draw one or more runs as one self-contained HTML page.",
    "operators": "List the evolution operators.",
    "evolve": "Breed a child adapter from one or two parents.",
    "sandbox": "Execute untrusted programs under the verifier's isolation.",
    "sidecar": "Keep a vLLM server's adapters equal to what a run publishes.",
    "base": "Write an embedded base model as a folder, for other programs.",
    "storage": "Delete what a run has stored.",
    "controller": "Reconcile PopulationRuns in a Kubernetes cluster.",
    "validate": "Say what the API server would say to a manifest, offline.",
    "crd": "Print the CustomResourceDefinition of PopulationRun.",
}

ELSEWHERE = {"controller": "populora_operator.command"}
"""Modules of commands outside `populora_trainer.commands`; named, not imported, as the engine knows no cluster."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that `--help` needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which a user meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the command's module and return its `command`."""
        if name not in COMMANDS:
            return None
        command = importlib.import_module(ELSEWHERE.get(name, f"populora_trainer.commands.{name}")).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="populora-operator", prog_name="populora")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def populora(context: click.Context, debug: bool) -> None:
    """Train co-evolving populations of LoRA teachers and students on one frozen code model."""
    context.obj = {"debug": debug}


def main() -> None:
    """Run the command line. Exit code 42: the manifest is wrong; 1: any other error; 130: interrupted."""
    debug = "--debug" in sys.argv[1:]
    try:
        sys.exit(populora.main(standalone_mode=False) or 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output has gone (`populora ... | head`); nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        foreseen = _exit_code(error)
        sentence = f"{type(error).__name__}: {error} (`populora --debug ...` shows the traceback)"
        click.echo(f"Error: {sentence if foreseen is None else error}", err=True)
        sys.exit(foreseen or 1)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error of ours, None of any other.

    The API package takes half a second to import, which not every command needs; an error of it says that it is here.
    """
    api = sys.modules.get("populora_api.errors")
    if isinstance(error, PopuloraError) or (api is not None and isinstance(error, api.ManifestError)):
        return int(error.exit_code)
    return None


if __name__ == "__main__":
    main()
