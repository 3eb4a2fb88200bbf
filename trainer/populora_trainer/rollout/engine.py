"""What sampling means here: requests tagged with their member go in, completions with log-probabilities come out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from populora_trainer.errors import RolloutError
from populora_trainer.population.members import Member


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One prompt of one member and how to sample from it.

    Attributes:
        member: slot of the adapter in the population.
        prompt_ids: the prompt's tokens, at least one.
        n: number of completions; the prompt is computed once for all of them.
        seed: of this request's draws, which depend on nothing else where the engine draws them itself.
        max_tokens: longest completion, the end token included.
        temperature: of sampling; 0 takes the most likely token.
    """

    member: int
    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    max_tokens: int
    temperature: float

    def __post_init__(self) -> None:
        if not self.prompt_ids or self.n < 1 or self.max_tokens < 1 or not self.temperature >= 0:
            raise ValueError(
                f"a request needs a prompt, n and max_tokens of 1 or more and a temperature of 0 or more; got "
                f"{len(self.prompt_ids)} prompt tokens, n {self.n}, max_tokens {self.max_tokens}, "
                f"temperature {self.temperature}"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: what was sampled; ends with the end token where `finish_reason` is "stop".
        logprobs: per token, log-probability under the distribution it was sampled from, temperature applied; at
            temperature 0 under the model's distribution at temperature 1.
        finish_reason: "stop" after an end token, "length" at the limit.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


Wave: TypeAlias = Sequence[tuple[int, list[Completion]]]
"""Requests that are done: the number of each, in ascending order, with its `n` completions."""


class RolloutEngine(Protocol):
    """Something that samples from the population."""

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """Sample from the population's present weights from here on.

        Args:
            step: number of training steps done.
            members: who holds which slot.

        Raises:
            RolloutError: what serves the weights does not take them.
        """
        ...

    def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        """Yield the requests' completions as they are done: every request once, in waves whose cut is the engine's.

        Raises:
            RolloutError: a prompt is longer than the engine takes, or the engine failed.
        """
        ...


async def all_completions(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
    """Return the completions of every request, in the order of the requests, when all are done.

    Raises:
        RolloutError: as `RolloutEngine.generate` does.
    """
    done: dict[int, list[Completion]] = {}
    async with aclosing(engine.generate(requests)) as waves:
        async for wave in waves:
            done.update(wave)
    return [done[index] for index in range(len(requests))]


def refuse_long_prompts(requests: Sequence[RolloutRequest], max_prompt_tokens: int, positions: int | None) -> None:
    """Refuse what no engine may shorten in silence.

    Args:
        requests: what is asked for.
        max_prompt_tokens: the run's limit.
        positions: of the base model, for prompt and completion together; None where it has no limit.

    Raises:
        RolloutError: a prompt is longer than allowed, or than the model's positions leave room for.
    """
    for index, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length > max_prompt_tokens:
            raise RolloutError(
                f"the prompt of request {index} has {length} tokens; at most {max_prompt_tokens} are allowed"
            )
        if positions is not None and length + request.max_tokens > positions:
            raise RolloutError(
                f"request {index} needs {length} + {request.max_tokens} positions; the base model has {positions}"
            )
