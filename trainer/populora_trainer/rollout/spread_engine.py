"""Sampling on every rank: requests are spread by their tokens, each rank samples with its own copy of the weights."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from populora_trainer.population.members import Member
from populora_trainer.ranks.group import Group
from populora_trainer.ranks.shares import shares
from populora_trainer.rollout.engine import (
    Completion,
    RolloutEngine,
    RolloutRequest,
    Wave,
    all_completions,
    refuse_long_prompts,
)


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
        max_prompt_tokens, positions: limits of a prompt, and of prompt and completion, checked before ranks begin.
    """

    def __init__(self, engine: RolloutEngine, group: Group, *, max_prompt_tokens: int, positions: int | None) -> None:
        self.engine = engine
        self.group = group
        self._limits = (max_prompt_tokens, positions)
        self._one_at_a_time = asyncio.Lock()

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """Do as the engine of this rank does; all ranks have the same weights already."""
        await self.engine.follow(step, members)

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        """Yield all requests' completions in one wave.

        Raises:
            RolloutError: a prompt is longer than allowed.
            RanksError: a rank is lost.
        """
        refuse_long_prompts(requests, *self._limits)
        costs = [len(request.prompt_ids) + request.n * request.max_tokens for request in requests]
        lots = shares(costs, self.group.world.size)
        found: list[list[Completion]] = [[] for _ in requests]
        async with self._one_at_a_time:
            mine = self.group.scatter([Generate(tuple(requests[index] for index in lot)) for lot in lots])
            answers = self.group.gather(await all_completions(self.engine, mine.requests))
        for lot, completions_of_rank in zip(lots, answers, strict=True):
            for index, completions in zip(lot, completions_of_rank, strict=True):
                found[index] = completions
        yield list(enumerate(found))

    async def assist(self, command: Generate) -> None:
        """Sample this rank's share."""
        self.group.gather(await all_completions(self.engine, command.requests))
