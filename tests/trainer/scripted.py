"""An engine that writes what a script says in the embedded base's compact format: rollouts whose worth is known."""

import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence

from transformers import PreTrainedTokenizerBase

from populora_trainer.nano.tokenizer import build_tokenizer
from populora_trainer.population.members import Member
from populora_trainer.randomness import draw
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave

_ADDEND = re.compile(r"return x \+ (\d+)")


class ScriptedEngine:
    """Teachers propose `x + k`, and things that fail; students are right as often as their seed says.

    Of four proposals from one prompt, two or three are valid. Every answer follows from the request alone.

    Attributes:
        requests: all that was asked for, in order.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.tokenizer = tokenizer or build_tokenizer()
        self.requests: list[RolloutRequest] = []

    @property
    def rollouts(self) -> Counter[int]:
        """Completions per member."""
        counts: Counter[int] = Counter()
        for request in self.requests:
            counts[request.member] += request.n
        return counts

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """A script has no weights."""

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        self.requests += requests
        yield list(enumerate([self._completion(one, number) for number in range(one.n)] for one in requests))

    def _completion(self, request: RolloutRequest, number: int) -> Completion:
        prompt = self.tokenizer.decode(list(request.prompt_ids), skip_special_tokens=False)
        write = self._proposal if prompt.startswith("<p") else self._solution
        text = write(prompt, request, number)
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        return Completion(ids, (-0.5,) * len(ids), "stop")

    def _proposal(self, prompt: str, request: RolloutRequest, number: int) -> str:
        chance = draw(request.seed, number, "proposal")
        if number % 4 == 3:
            return "no program at all"
        if number % 4 == 2 and chance % 2:
            return "def f(x):\n    return x / 0<in>1" if not prompt.startswith("<pf>") else "<in>1<msg>too few"
        if prompt.startswith("<pf>"):
            return f"<in>{chance % 9}<in>{10 + chance % 9}<msg>add"
        return f"def f(x):\n    return x + {chance // 9 % 10}<in>{chance % 9}"

    def _solution(self, prompt: str, request: RolloutRequest, number: int) -> str:
        outcome = draw(request.seed, number, "solution") % 4
        if outcome == 0:
            return ")("
        if outcome == 1:
            return "def f(x):\n    return None" if prompt.startswith("<f>") else "'wrong'"
        if prompt.startswith("<f>"):
            shown = re.match(r"<f><in>(\d+)<out>(\d+)<", prompt)
            return f"def f(x):\n    return x + {int(shown[2]) - int(shown[1])}" if shown else "def f(x):\n    return x"
        given = re.search(r">(\d+)<(out|in)>$", prompt)
        addend = _ADDEND.search(prompt)
        if not given:
            return "'not a problem of this script'"
        return str(int(given[1]) + (1 if given[2] == "out" else -1) * (int(addend[1]) if addend else 0))
