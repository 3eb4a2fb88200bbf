"""A process that computes for rank 0: it shows nothing, holds nothing of the run, and ends as rank 0 does."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

import click
import torch

from populora_api import ALONE, PopulationRun, Services
from populora_trainer.diagnostics.endpoint import Endpoint
from populora_trainer.errors import PopuloraError
from populora_trainer.ranks.group import joined
from populora_trainer.ranks.lifeline import Ended, Lifeline
from populora_trainer.ranks.world import World
from populora_trainer.session import assist_session


def follow(manifest: PopulationRun, world: World, endpoint: Endpoint | None = None, services: Services = ALONE) -> int:
    """Compute until rank 0 ends the run and return the exit code that it gave.

    Args:
        manifest: the one that rank 0 has.
        world: this process's place.
        endpoint: answers probes for this node, or None; the caller closes it.
        services: what runs elsewhere.

    Raises:
        PopuloraError: the base cannot be had, or a rank is lost.
    """
    with ExitStack() as stack:
        wishes = stack.enter_context(_wishes())
        group = stack.enter_context(joined(world, on_gpus=torch.cuda.is_available()))
        wishes.lifeline = group.lifeline
        wishes.pass_on()
        group.lifeline.watch_signals()
        if endpoint is not None:
            endpoint.serve(None)
        try:
            end = asyncio.run(assist_session(manifest, group, services))
        except Ended as error:
            end = error
        except Exception as error:
            if group.lifeline.lost is None:
                kind = "" if isinstance(error, PopuloraError) else f"{type(error).__name__}: "
                group.lifeline.tell(failed=kind + " ".join(str(error).split())[:500])
            group.lifeline.leave()
            raise
        # Rank 0's exit code and last words come first: a node's processes are ended when the first one is.
        group.lifeline.wait_for_leader()
    # On node 0, rank 0 has said it.
    if end.reason is not None and world.speaks:
        click.echo(f"Error: {end.reason}", err=True)
    return end.code


class _Wishes:
    """Signals to this process, for rank 0 to decide upon."""

    def __init__(self) -> None:
        self.lifeline: Lifeline | None = None
        self._number: int | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        self.pass_on()

    def pass_on(self) -> None:
        if self.lifeline is not None and self._number is not None:
            self.lifeline.wish = self._number


@contextmanager
def _wishes() -> Iterator[_Wishes]:
    wishes = _Wishes()
    before = {number: signal.signal(number, wishes.take) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wishes
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
