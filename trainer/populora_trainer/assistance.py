"""What the ranks beside rank 0 do: they get ready as it does, then sample and learn as it tells them, until the end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from populora_trainer.errors import PopuloraError, RanksError
from populora_trainer.learning.distributed import Adopt, Learn, SpreadLearner
from populora_trainer.ranks.group import Group
from populora_trainer.ranks.lifeline import Ended
from populora_trainer.ranks.world import SINGLE, World
from populora_trainer.rollout.spread_engine import Generate, SpreadEngine
from populora_trainer.storage.environment import Environment, differences


@dataclass(frozen=True, slots=True)
class Begin:
    """Rank 0's first command: the run is open, and this is how to compute.

    Attributes:
        threads: of torch.
        revision: commit of the hub that the base is loaded from, where the run has one.
    """

    threads: int
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Likeness:
    """What must be the same on all ranks, for the same step to give the same bits.

    Attributes:
        environment: what a rank computes with.
        base: digest of the base model's weights.
    """

    environment: Environment
    base: str


def device_of(world: World, wanted_gpus: int = 0) -> str:
    """Return this process's device and make it torch's: its own GPU, or the processor where torch sees none.

    Args:
        world: this process's place.
        wanted_gpus: GPUs that this node must have; more is no harm.

    Raises:
        RanksError: the node has GPUs, but fewer than processes.
        PopuloraError: it has fewer than wanted.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there < wanted_gpus:
        raise PopuloraError(f"spec.trainer.gpusPerNode is {wanted_gpus}; torch sees {there} GPUs here")
    if there and there < world.local_size:
        raise RanksError(f"{world.local_size} ranks on this node need a GPU each; torch sees {there}")
    if not there:
        return "cpu"
    if world.size == 1:
        return "cuda"
    torch.cuda.set_device(world.local_rank)
    return f"cuda:{world.local_rank}"


def environment_of(device: str, world: World = SINGLE) -> Environment:
    """Return what this process computes with."""
    return Environment(
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        device="cpu" if device == "cpu" else torch.cuda.get_device_name(device),
        instructions=torch.backends.cpu.get_cpu_capability(),
        ranks=world.size,
    )


def compare(likenesses: Sequence[Likeness]) -> None:
    """Check that all ranks compute alike.

    Raises:
        RanksError: one does not.
    """
    first = likenesses[0]
    for rank, other in enumerate(likenesses):
        if other.environment != first.environment:
            found = differences(first.environment, other.environment).replace("before:", "rank 0:")
            raise RanksError(f"rank {rank} computes with {found}; all ranks must compute alike")
        if other.base != first.base:
            raise RanksError(f"rank {rank} has loaded other weights of baseModel.uri than rank 0")


async def assist(group: Group, learner: SpreadLearner, engine: SpreadEngine) -> Ended:
    """Do what rank 0 says until it ends the run; returns how it did.

    Raises:
        RanksError: a rank is lost.
    """
    while True:
        try:
            command = group.receive()
        except Ended as end:
            return end
        match command:
            case Generate():
                await engine.assist(command)
            case Learn():
                learner.assist(command)
            case Adopt():
                learner.adopt(command)
            case _:
                raise TypeError(f"rank 0 sent {command!r}")
