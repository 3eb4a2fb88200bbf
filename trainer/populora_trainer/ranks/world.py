"""Who this process is among those that train one run, as torchrun's variables say it."""

from collections.abc import Mapping
from dataclasses import dataclass

from populora_trainer.errors import RanksError


@dataclass(frozen=True, slots=True)
class World:
    """The place of one process.

    Attributes:
        rank: its number among all, from 0; rank 0 holds the run, the others only compute.
        size: number of processes.
        local_rank: its number on its node, which is also the number of its GPU.
        local_size: number of processes on its node.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def leads(self) -> bool:
        """Whether it holds the run."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """Whether it answers probes for its node and says why its node has ended: one process a node does."""
        return self.local_rank == 0

    @property
    def nodes(self) -> int:
        """Number of nodes, where all have equally many processes, as torchrun gives them."""
        return self.size // self.local_size


SINGLE = World()
"""The place of a process that trains alone."""


def world_from(environment: Mapping[str, str]) -> World:
    """Return the place that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE give; alone without them.

    Raises:
        RanksError: a variable is missing, is no number, or does not fit the others.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return SINGLE
    size = _number(environment, "WORLD_SIZE", 1, None)
    rank = _number(environment, "RANK", 0, size)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size + 1)
    local_rank = _number(environment, "LOCAL_RANK", 0, local_size)
    if size % local_size:
        raise RanksError(f"WORLD_SIZE {size} is not allowed: it must be a multiple of LOCAL_WORLD_SIZE {local_size}")
    return World(rank, size, local_rank, local_size)


def _number(environment: Mapping[str, str], name: str, least: int, below: int | None) -> int:
    text = environment.get(name, "")
    allowed = f"{least} or more" if below is None else f"{least} to {below - 1}"
    if not (text.isascii() and text.isdigit()) or int(text) < least or (below is not None and int(text) >= below):
        raise RanksError(f"{name} is {text or 'missing'} while WORLD_SIZE is set; allowed are {allowed}")
    return int(text)
