"""A rollout request as vLLM's `/v1/completions` takes it, and its answer as completions."""

import math
from collections.abc import Collection, Mapping, Sequence

from populora_trainer.rollout.engine import Completion, RolloutRequest

LOWEST_TEMPERATURE = 0.01  # below it, and above 0, vLLM samples at 0.01

JsonObject = dict[str, object]


class WrongAnswer(ValueError):  # noqa: N818 - what it is
    """An answer of vLLM that is not what was asked for."""


def request_body(request: RolloutRequest, adapter: str, end_ids: Sequence[int]) -> JsonObject:
    """Return the body that makes vLLM sample from the adapter's own distribution at the request's temperature.

    Everything that a model's generation configuration could change is given: no filter, no penalty, and only our own
    tokens end a completion. There is no seed: the CPU engine does not survive one.

    Args:
        request: what is wanted.
        adapter: name by which vLLM serves the member's weights.
        end_ids: tokens that end a completion.
    """
    return {
        "model": adapter,
        "prompt": list(request.prompt_ids),
        "n": sampled(request),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "ignore_eos": True,
        "stop_token_ids": list(end_ids),
        "skip_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": 0,
        "return_token_ids": True,
        "stream": False,
    }


def sampled(request: RolloutRequest) -> int:
    """Return how many completions vLLM is asked for: greedy ones are all equal, and it refuses more than one."""
    return request.n if request.temperature else 1


def completions_of(
    answer: object, request: RolloutRequest, adapter: str, end_ids: Collection[int], vocabulary: int | None = None
) -> list[Completion]:
    """Return the request's completions from the answer's JSON.

    Args:
        answer: what vLLM has sent.
        request: what was asked.
        adapter: whose completions they must be.
        end_ids: tokens that end a completion.
        vocabulary: number of tokens that the trainer's base model knows; None where that is not known.

    Raises:
        WrongAnswer: it is not the answer to this request, or its numbers cannot be log-probabilities.
    """
    if not isinstance(answer, Mapping) or not isinstance(choices := answer.get("choices"), list):
        raise WrongAnswer(f"it has no choices: {str(answer)[:200]}")
    if answer.get("model") != adapter:
        raise WrongAnswer(f"it was sampled from {answer.get('model')!r}, and {adapter!r} was asked for")
    wanted = sampled(request)
    if len(choices) != wanted or not all(isinstance(choice, Mapping) for choice in choices):
        raise WrongAnswer(f"it has {len(choices)} choices, and {wanted} were asked for")
    numbers = [choice.get("index") for choice in choices]
    if not all(number in numbers for number in range(wanted)):
        raise WrongAnswer(f"its choices have the numbers {str(numbers)[:100]}, and 0 to {wanted - 1} are due")
    in_order = (choices[numbers.index(number)] for number in range(wanted))
    completions = [_completion(choice, request, end_ids, vocabulary) for choice in in_order]
    return completions * request.n if wanted < request.n else completions


def _completion(
    choice: Mapping[str, object], request: RolloutRequest, end_ids: Collection[int], vocabulary: int | None
) -> Completion:
    token_ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(token_ids, list) or not isinstance(values, list):
        raise WrongAnswer("a choice lacks token_ids or logprobs.token_logprobs, which vLLM 0.11 and newer return")
    if not 1 <= len(token_ids) <= request.max_tokens or len(values) != len(token_ids):
        raise WrongAnswer(
            f"a choice has {len(token_ids)} tokens and {len(values)} log-probabilities; as many of each, and at most "
            f"{request.max_tokens}, are due"
        )
    if not all(isinstance(token, int) and token >= 0 for token in token_ids):
        raise WrongAnswer("a choice has token_ids that are no numbers of tokens")
    if vocabulary is not None and max(token_ids) >= vocabulary:
        raise WrongAnswer(
            f"a choice has the token {str(max(token_ids))[:20]}, and the run's base model knows {vocabulary}: vLLM "
            f"serves another base"
        )
    if not all(isinstance(value, int | float) and math.isfinite(value) and value < 1e-3 for value in values):
        raise WrongAnswer("a choice has log-probabilities that are no finite numbers up to 0")
    prompt = choice.get("prompt_token_ids")
    if prompt is not None and prompt != list(request.prompt_ids):
        raise WrongAnswer("it answers another prompt than was asked")
    ended = token_ids[-1] in end_ids
    reason = choice.get("finish_reason")
    if any(token in end_ids for token in token_ids[:-1]) or reason != ("stop" if ended else "length"):
        raise WrongAnswer(f"a choice of {len(token_ids)} tokens finished by {reason!r}, which its tokens do not say")
    return Completion(tuple(token_ids), tuple(float(value) for value in values), "stop" if ended else "length")
