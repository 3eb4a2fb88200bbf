"""What sampling means here: requests tagged with their member go in, completions with log-probabilities come out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One prompt of one member and how to sample from it.

    Attributes:
        member: slot of the adapter in the population.
        prompt_ids: the prompt's tokens, at least one.
        n: number of completions; the prompt is computed once for all of them.
        seed: of this request's draws, which depend on nothing else.
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


class RolloutEngine(Protocol):
    """Something that samples from the population."""

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[list[Completion]]:
        """Return `n` completions for every request, in the order of the requests.

        Raises:
            RolloutError: a prompt is longer than the engine takes, or the engine failed.
        """
        ...
