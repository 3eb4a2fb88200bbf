"""What the ranks of a run exchange: rank 0 hands out commands, all add up gradients, rank 0 takes in results."""

import math
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from populora_trainer.errors import RanksError
from populora_trainer.ranks.lifeline import LIMIT_SECONDS, Ended, Lifeline, accept, connect, listen
from populora_trainer.ranks.world import World

T = TypeVar("T")

TIMEOUT_VARIABLE = "POPULORA_RANK_TIMEOUT_SECONDS"
_MEET = timedelta(minutes=5)
_GRADIENTS = timedelta(minutes=30)  # between the first and the last rank to have its gradient
_WHOLE_STEP = timedelta(days=30)  # the lifeline knows better how long to wait for rank 0


@dataclass(frozen=True, slots=True)
class End:
    """Rank 0's last command."""

    code: int
    reason: str | None


class Group:
    """The ranks of one run, connected; the same calls in the same order everywhere, but for what rank 0 says alone.

    Objects and CPU tensors go by gloo, CUDA tensors by NCCL. Rank 0 hands out commands with `scatter`, which the
    others take with `receive`.

    Attributes:
        world: this process's place.
        lifeline: its connection beside the collective operations.
        code: rank 0's; what all exit with once it is done.
    """

    def __init__(self, world: World, lifeline: Lifeline, objects: dist.ProcessGroup, gradients: dist.ProcessGroup):
        self.world = world
        self.lifeline = lifeline
        self.code = 0
        self._objects = objects
        self._gradients = gradients
        self._ready = True  # the others wait for a command

    def scatter(self, commands: Sequence[T]) -> T:
        """Give every rank its command and return rank 0's own; only for rank 0."""
        self._ready = False
        return self._scatter(commands)

    def receive(self) -> object:
        """Return rank 0's next command; only for the others.

        Raises:
            Ended: rank 0 has ended the run.
            RanksError: a rank is lost.
        """
        command: object = self._scatter(None)
        if isinstance(command, End):
            dist.destroy_process_group()
            raise Ended(command.code, command.reason)
        return command

    def _scatter(self, commands: Sequence[T] | None) -> T:
        received: list[T | None] = [None]
        with self._explained():
            dist.scatter_object_list(received, None if commands is None else list(commands), 0, self._objects)
        return received[0]  # type: ignore[return-value] # a rank's command is never None but where T says so

    def gather(self, value: T) -> list[T]:
        """Return every rank's value at rank 0, in the order of the ranks, and an empty list elsewhere."""
        values: list[T] = [value] * self.world.size if self.world.leads else []
        with self._explained():
            dist.gather_object(value, values if self.world.leads else None, 0, self._objects)
        self._ready = True
        return values

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors by those of rank 0."""
        with self._explained(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, 0, self._gradients)

    def add(self, tensor: Tensor) -> None:
        """Overwrite a tensor by the sum over all ranks, which has the same bits everywhere."""
        with self._explained():
            dist.all_reduce(tensor, group=self._gradients)

    def end(self, code: int, reason: str | None) -> None:
        """Let all ranks exit with a code, after this process has; only for rank 0.

        Args:
            code: for all.
            reason: a sentence that one process a node prints; None where nothing is to be said.
        """
        lost = self.lifeline.lost
        self.lifeline.end(code, reason)
        if self._ready and lost is None:
            # Who waits for a command learns it in order; the lifeline tells who is in the middle of something.
            try:
                self.scatter([End(code, reason)] * self.world.size)
            except RanksError:
                return
            dist.destroy_process_group()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say which rank is missing where a collective operation fails."""
        try:
            yield
        except RuntimeError as error:
            raise self.lifeline.explain(error) from error


@contextmanager
def leading(world: World, *, on_gpus: bool) -> Iterator[Group]:
    """Meet the other ranks as rank 0, and let them end as this process does.

    Without an error all exit with the group's `code`, with an error as the command line does: with the code of the
    error, 130 for an interrupt, 1 for any other.

    Raises:
        RanksError: they cannot be met.
    """
    with joined(world, on_gpus=on_gpus) as group:
        try:
            yield group
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            code = 130 if interrupted else getattr(error, "exit_code", 1)
            group.end(code, None if interrupted else str(error) or type(error).__name__)
            raise
        group.end(group.code, None)


@contextmanager
def joined(world: World, *, on_gpus: bool) -> Iterator[Group]:
    """Meet the other ranks at MASTER_ADDR and MASTER_PORT.

    Args:
        world: this process's place; more than one process.
        on_gpus: whether gradients are on GPUs, one a rank; then NCCL adds them up.

    Raises:
        RanksError: they cannot be met.
    """
    host = os.environ.get("MASTER_ADDR", "")
    if not host or not os.environ.get("MASTER_PORT"):
        raise RanksError("MASTER_ADDR or MASTER_PORT is missing while WORLD_SIZE is set; torchrun sets both")
    _number("MASTER_PORT", 1, 65535)
    limit = _number(TIMEOUT_VARIABLE, 0.1, 86400) if os.environ.get(TIMEOUT_VARIABLE) else LIMIT_SECONDS
    try:
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size, timeout=_MEET)
        lifeline = _lifeline(world, host, limit)
    except RuntimeError as error:
        sentence = " ".join(str(error).split())[:300]
        raise RanksError(f"rank {world.rank} cannot meet the others of {world.size}: {sentence}") from error
    objects = dist.new_group(backend="gloo", timeout=_WHOLE_STEP)
    gradients = dist.new_group(backend="nccl", timeout=_GRADIENTS) if on_gpus else objects
    # The type has a number for processes that are no part of a group; all are part of these.
    assert not isinstance(objects, int)
    assert not isinstance(gradients, int)
    try:
        yield Group(world, lifeline, objects, gradients)
    finally:
        # The connections stay until the process is gone: that is what the others wait for.
        lifeline.leave()


def _number(name: str, least: float, most: float) -> float:
    """Return the number in a variable of the environment."""
    text = os.environ[name]
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise RanksError(f"{name} is {text[:40]}; allowed are {least:g} to {most:g}")
    return number


def _lifeline(world: World, host: str, limit: float) -> Lifeline:
    if world.leads:
        with listen(world.nodes) as server:
            token = secrets.token_hex(16)
            dist.broadcast_object_list([server.getsockname()[1], token], 0)
            peers = accept(server, world.size, token)
    else:
        address: list[object] = [None, None]
        dist.broadcast_object_list(address, 0)
        peers = {0: connect(host, int(str(address[0])), world.rank, str(address[1]))}
    # A launcher that is killed cannot pass signals on any more: its processes would train on with nobody to stop them.
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    return Lifeline(world.rank, peers, limit_seconds=limit, speaks=world.speaks, launched=launched)
