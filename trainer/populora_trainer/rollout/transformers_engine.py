"""Sampling in this process: one padded batch over all members, prompts computed once, finished rows dropped."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.members import Member
from populora_trainer.randomness import tensor_generator
from populora_trainer.rollout.check import check_sampling
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave, refuse_long_prompts
from populora_trainer.rollout.forward import last_logits
from populora_trainer.rollout.key_values import growing_cache, take_rows
from populora_trainer.rollout.time_steps import clamp_time_steps

COMPACT_BELOW = 0.75  # share of unfinished rows under which the finished ones are dropped


@dataclass(frozen=True, slots=True)
class _Share:
    """The samples `first` to `stop` of request number `index`; a large request is spread over several batches."""

    index: int
    request: RolloutRequest
    first: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.first


class TransformersEngine:
    """Samples from the population with the model that trains it.

    Each draw depends on its request's seed, sample and position only, never on what else is in the batch. Batches do
    change the rounding of the logits, so equal results need equal requests (and, on CPU, the same number of threads).

    Args:
        population: the adapters and their base model.
        end_ids: tokens that end a completion.
        pad_id: fills up the left of shorter prompts; never attended to.
        max_prompt_tokens: longer prompts are refused.
        batch_tokens: upper limit of rows times (prompt + completion) tokens in one batch: what the cache must hold.

    Raises:
        UnfitBaseError: sampling from the base with a cache is not what it is trained on.
    """

    def __init__(
        self,
        population: LoraPopulation,
        *,
        end_ids: Sequence[int],
        pad_id: int,
        max_prompt_tokens: int,
        batch_tokens: int = 131_072,
    ) -> None:
        clamp_time_steps(population.model)
        check_sampling(population, pad_id)
        self.population = population
        self.end_ids = torch.tensor(sorted(set(end_ids)), dtype=torch.long)
        self.pad_id = pad_id
        self.max_prompt_tokens = max_prompt_tokens
        self.batch_tokens = batch_tokens

    async def follow(self, step: int, members: Sequence[Member]) -> None:
        """Do nothing: the weights that train are the weights that sample."""

    async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
        """Yield all requests' completions in one wave: this process has nothing else to do meanwhile.

        Raises:
            RolloutError: a prompt is longer than `max_prompt_tokens`, or than the model's positions leave room for.
        """
        self.check(requests)
        completions: list[list[Completion]] = [[] for _ in requests]
        model, was_training = self.population.model, self.population.model.training
        model.eval()
        try:
            with torch.inference_mode():
                for batch in _batches(requests, self.batch_tokens):
                    for share, sampled in zip(batch, self._sample(batch), strict=True):
                        completions[share.index].extend(sampled)
        finally:
            model.train(was_training)
        yield list(enumerate(completions))

    def check(self, requests: Sequence[RolloutRequest]) -> None:
        """Raise a RolloutError where a request cannot be sampled."""
        positions = getattr(self.population.model.config, "max_position_embeddings", None)
        refuse_long_prompts(requests, self.max_prompt_tokens, positions)

    def _sample(self, batch: Sequence[_Share]) -> list[list[Completion]]:
        device = self.population.device
        end_ids = self.end_ids.to(device)
        length = max(len(share.request.prompt_ids) for share in batch)
        prompts, mask = _padded([share.request.prompt_ids for share in batch], length, self.pad_id)
        cache = growing_cache(self.population.model.config)
        with self.population.route([share.request.member for share in batch]):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = last_logits(
                self.population.model, prompts.to(device), mask.to(device), positions.to(device), cache
            )

        # From here on a row is a sample; `alive` holds the numbers of the rows that are still in the batch.
        share_of_row = torch.repeat_interleave(torch.tensor([share.rows for share in batch]))
        take_rows(cache, share_of_row.to(device))
        logits = logits[share_of_row.to(device)]
        requests = [batch[share].request for share in share_of_row.tolist()]
        limits = torch.tensor([request.max_tokens for request in requests])
        steps = int(limits.max())
        temperatures = torch.tensor([request.temperature for request in requests], device=device)
        uniforms = _uniforms(batch, steps).to(device)
        mask = torch.cat([mask[share_of_row], mask.new_ones(len(requests), steps)], dim=1).to(device)
        position = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        tokens = torch.zeros(len(requests), steps, dtype=torch.long)
        logprobs = torch.zeros(len(requests), steps)
        lengths, stopped = limits.clone(), torch.zeros(len(requests), dtype=torch.bool)

        alive = torch.arange(len(requests))
        unfinished = torch.ones(len(requests), dtype=torch.bool)  # of the alive rows
        for step in range(steps):
            drawn, drawn_logprobs = sample(logits, temperatures, uniforms[:, step])
            tokens[alive, step], logprobs[alive, step] = drawn.cpu(), drawn_logprobs.cpu()
            ended = torch.isin(drawn, end_ids).cpu() & unfinished
            stopped[alive[ended]], lengths[alive[ended]] = True, step + 1
            unfinished &= ~ended & (limits[alive] > step + 1)
            if not unfinished.any():
                break
            if unfinished.float().mean() < COMPACT_BELOW:
                kept = unfinished.nonzero().squeeze(1)
                alive, unfinished = alive[kept], unfinished[kept]
                kept = kept.to(device)
                take_rows(cache, kept)
                drawn, temperatures, uniforms, mask, position = (
                    rows[kept] for rows in (drawn, temperatures, uniforms, mask, position)
                )
            with self.population.route([requests[row].member for row in alive.tolist()]):
                seen = mask[:, : length + step + 1]
                logits = last_logits(self.population.model, drawn[:, None], seen, position[:, None] + step, cache)

        completions: list[list[Completion]] = [[] for _ in batch]
        for row, share in enumerate(share_of_row.tolist()):
            count = int(lengths[row])
            completions[share].append(
                Completion(
                    tuple(tokens[row, :count].tolist()),
                    tuple(logprobs[row, :count].tolist()),
                    "stop" if stopped[row] else "length",
                )
            )
        return completions


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: (row, vocabulary), fp32.
        temperatures: (row); 0 takes the most likely token.
        uniforms: (row), fp64 in [0, 1).

    Returns:
        Tokens (row) and their fp32 log-probabilities (row) under softmax(logits / temperature), or under
        softmax(logits) where the temperature is 0.
    """
    greedy = temperatures == 0
    log_probabilities = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures)[:, None], dim=-1)
    cumulative = log_probabilities.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total, so that the draw always falls on a token of positive probability.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = torch.searchsorted(cumulative, target, right=True)
    drawn = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
    return drawn.squeeze(1), log_probabilities.gather(1, drawn).squeeze(1)


def _batches(requests: Sequence[RolloutRequest], batch_tokens: int) -> Iterator[list[_Share]]:
    """Yield batches of prompts of like length within the token budget, each sorted by member."""
    order = sorted(range(len(requests)), key=lambda index: (len(requests[index].prompt_ids), index))
    batch: list[_Share] = []
    rows = tokens = 0
    for index in order:
        request, first = requests[index], 0
        while first < request.n:
            longest = max(tokens, len(request.prompt_ids) + request.max_tokens)
            room = batch_tokens // longest - rows
            if room < 1 and batch:
                yield sorted(batch, key=lambda share: share.request.member)
                batch, rows, tokens = [], 0, 0
                continue
            taken = min(max(room, 1), request.n - first)
            batch.append(_Share(index, request, first, first + taken))
            first, rows, tokens = first + taken, rows + taken, longest
    if batch:
        yield sorted(batch, key=lambda share: share.request.member)


def _padded(prompts: Sequence[tuple[int, ...]], length: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Return the prompts (row, length) padded on the left, and the mask of what is prompt."""
    ids = torch.full((len(prompts), length), pad_id)
    mask = torch.zeros(len(prompts), length, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    return ids, mask


def _uniforms(batch: Sequence[_Share], steps: int) -> Tensor:
    """Return the draws (row, step), fp64: those of a sample depend on its request's seed and its number only."""
    uniforms = torch.zeros(sum(share.rows for share in batch), steps, dtype=torch.float64)
    row = 0
    for share in batch:
        request = share.request
        drawn = torch.rand(request.n, request.max_tokens, generator=tensor_generator(request.seed), dtype=torch.float64)
        uniforms[row : row + share.rows, : request.max_tokens] = drawn[share.first : share.stop]
        row += share.rows
    return uniforms
