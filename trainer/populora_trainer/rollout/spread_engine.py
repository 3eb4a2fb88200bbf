"""Sampling on every rank: requests are spread by their tokens, each rank samples with its own copy of the weights."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from populora_trainer.population.members import Member
from populora_trainer.ranks.group import Group
from populora_trainer.ranks.shares import shares
from populora_trainer.rollout.engine import Completion, RolloutEngine, RolloutRequest, Wave, all_completions


class LocalEngine(RolloutEngine, Protocol):
    """An engine in this process, which can refuse requests before anyone starts on them."""

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raise a RolloutError where a request cannot be sampled."""
        ...


@dataclass(frozen=True, slots=True)
class Generate:
    """Rank 0's command to sample."""

    requests: tuple[RolloutRequest, ...]


class SpreadEngine:
    """Samples with the engines of all ranks, whose weights are the same.

    A completion's draws depend on its request alone, so how requests are spread changes no more than the rounding of
    the logits, as batches of another size do.

    Args:
        engine: of this rank.
        group: the ranks; only rank 0 calls `generate`, the others `assist` where they are told to.
    """

    def __init__(self, engine: LocalEngine, group: Group) -> None:
        self.engine = engine
        self.group = group

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """Do nothing: every rank's weights are those that train."""

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        """Yield all requests' completions in one wave.

        Raises:
            RolloutError: a prompt is longer than the engine takes.
            RanksError: a rank is lost.
        """
        self.engine.check(requests)
        costs = [len(request.prompt_ids) + request.n * request.max_tokens for request in requests]
        lots = shares(costs, self.group.world.size)
        mine = self.group.scatter([Generate(tuple(requests[index] for index in lot)) for lot in lots])
        found: list[list[Completion]] = [[] for _ in requests]
        for lot, answers in zip(lots, await self._gathered(mine), strict=True):
            for index, completions in zip(lot, answers, strict=True):
                found[index] = completions
        yield list(enumerate(found))

    async def assist(self, command: Generate) -> None:
        """Sample this rank's share."""
        await self._gathered(command)

    async def _gathered(self, mine: Generate) -> list[list[list[Completion]]]:
        """Sample this rank's share, and return every rank's."""
        return self.group.gather(await all_completions(self.engine, mine.requests))
