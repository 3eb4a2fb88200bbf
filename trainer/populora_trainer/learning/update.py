"""One mixed update of all adapters: rewards become advantages, rows, one gradient and one AdamW step per member."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from populora_trainer.errors import PopuloraError, UnfitBaseError, reason_of
from populora_trainer.learning.adamw import StackedAdamW
from populora_trainer.learning.advantages import Advantages, Variant, reinforce_plus_plus_baseline
from populora_trainer.learning.objective import kl_to_base, policy_objective
from populora_trainer.learning.packing import ROLES, MicroBatch, Role, Row, Sample, collate, micro_batches, rows_of
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.rollout.engine import Completion
from populora_trainer.rollout.forward import all_logits, hidden_states
from populora_trainer.rollout.output_head import OutputHead, find_output_head

Whitening = Literal["Member", "Role", "TaskAndRole"]

CHUNK_LOGITS = 1 << 25  # logits held at a time: 128 MiB in fp32


@dataclass(frozen=True, slots=True)
class Group:
    """The completions that one member sampled from one prompt, with a reward each.

    Attributes:
        member: slot of the adapter in the population.
        role, task: what the completions are; they decide what is whitened together.
        rewards_G: per completion; None where it could not be scored.
    """

    member: int
    role: Role
    task: str
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    rewards_G: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """How the population learns.

    Attributes:
        learning_rate: AdamW's, one for all or one per member.
        warmup_steps: a member's steps until its learning rate is reached.
        weight_decay: AdamW's, decoupled from the gradient.
        temperature: at which the completions were sampled; log-probabilities are taken at it.
        whitening: what a member's advantages are whitened over.
        variant: whose whitening formula.
        clip_ratio, importance_cap, kl_coefficient: of the objective.
        gradient_clip_norm: upper limit of each member's gradient norm.
        batch_tokens: upper limit of padded tokens in one forward.
        checkpoint_activations: recompute activations in the backward pass, for large bases.
    """

    learning_rate: float | Sequence[float]
    warmup_steps: int = 0
    weight_decay: float = 0.0
    temperature: float = 1.0
    whitening: Whitening = "Member"
    variant: Variant = "verl"
    clip_ratio: float = 0.2
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0
    gradient_clip_norm: float = 1.0
    batch_tokens: int = 8192
    checkpoint_activations: bool = False


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one update did; averages are over learned tokens, None where nothing was learned.

    Attributes:
        loss_M: per updated member, its mean loss over its own tokens.
        gradient_norm_M: per member that had tokens, before clipping.
        updated: members that took a step.
        skipped: members whose gradient was not finite; they took none.
        entropy: of the policy in each role that has learned tokens, in nats.
        clipped, truncated: share of tokens with a clipped ratio, and with a capped importance weight.
        mismatch_mean, mismatch_max, mismatch_kl: between trainer and sampling engine, of log-probabilities: mean and
            largest absolute difference in nats, and the k3 estimate of KL(engine || trainer).
        mismatch_M: mean absolute difference per member that had tokens, in nats.
        kl_to_base: where kl_coefficient is above 0.
        learned_tokens: tokens of completions that entered the loss.
        computed_tokens: tokens that went through the model, without padding.
        unshared_tokens: tokens of prompts and completions, had each completion been computed with its prompt.
        micro_batches: number of forwards.
        advantages: statistics of the advantages.
    """

    loss_M: dict[int, float]
    gradient_norm_M: dict[int, float]
    updated: tuple[int, ...]
    skipped: tuple[int, ...]
    entropy: dict[Role, float]
    clipped: float | None
    truncated: float | None
    mismatch_mean: float | None
    mismatch_max: float | None
    mismatch_kl: float | None
    mismatch_M: dict[int, float]
    kl_to_base: float | None
    learned_tokens: int
    computed_tokens: int
    unshared_tokens: int
    micro_batches: int
    advantages: Advantages

    def learner(self) -> dict[str, float | None]:
        """Return the update's statistics by name, as metrics.jsonl holds them."""
        losses, norms = list(self.loss_M.values()), [n for n in self.gradient_norm_M.values() if math.isfinite(n)]
        return {
            "loss": sum(losses) / len(losses) if losses else None,
            "gradient_norm": sum(norms) / len(norms) if norms else None,
            "entropy_teacher": self.entropy.get("teacher"),
            "entropy_student": self.entropy.get("student"),
            "clipped_fraction": self.clipped,
            "truncated_fraction": self.truncated,
            "mismatch_mean": self.mismatch_mean,
            "mismatch_max": self.mismatch_max,
            "mismatch_kl": self.mismatch_kl,
            "mismatch_worst_member": max(self.mismatch_M.values(), default=None),
            "kl_to_base": self.kl_to_base,
            "updated_members": float(len(self.updated)),
            "skipped_members": float(len(self.skipped)),
            "learned_tokens": float(self.learned_tokens),
            "computed_tokens": float(self.computed_tokens),
            "unshared_tokens": float(self.unshared_tokens),
        }

    def advantage(self) -> dict[str, float | None]:
        """Return the advantages' statistics by name, averaged over whitening scopes."""
        mean, std = list(self.advantages.mean.values()), list(self.advantages.std.values())
        return {
            "mean": sum(mean) / len(mean) if mean else None,
            "std": sum(std) / len(std) if std else None,
            "masked_groups": float(self.advantages.masked),
            "masked_fraction": self.advantages.masked_fraction,
            "unscored": float(self.advantages.unscored),
        }


@dataclass(slots=True)
class Sums:
    """What the micro-batches of an update add up to."""

    tokens: int = 0
    clipped: float = 0.0
    truncated: float = 0.0
    mismatch: float = 0.0
    mismatch_max: float = 0.0
    mismatch_kl: float = 0.0
    kl: float = 0.0
    tokens_by_role: dict[Role, int] = field(default_factory=dict)
    entropy_by_role: dict[Role, float] = field(default_factory=dict)
    loss_M: dict[int, float] = field(default_factory=dict)
    mismatch_M: dict[int, float] = field(default_factory=dict)

    def add(self, other: "Sums") -> None:
        """Take in the sums of other micro-batches."""
        self.tokens += other.tokens
        self.clipped += other.clipped
        self.truncated += other.truncated
        self.mismatch += other.mismatch
        self.mismatch_max = max(self.mismatch_max, other.mismatch_max)
        self.mismatch_kl += other.mismatch_kl
        self.kl += other.kl
        for mine, theirs in ((self.loss_M, other.loss_M), (self.mismatch_M, other.mismatch_M)):
            for member, value in theirs.items():
                mine[member] = mine.get(member, 0.0) + value
        for role, tokens in other.tokens_by_role.items():
            self.add_entropy(role, tokens, other.entropy_by_role[role])

    def add_entropy(self, role: Role, tokens: int, entropy: float) -> None:
        """Take in the entropies of tokens that were sampled in a role, as their number and sum."""
        self.tokens_by_role[role] = self.tokens_by_role.get(role, 0) + tokens
        self.entropy_by_role[role] = self.entropy_by_role.get(role, 0.0) + entropy


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did: sums over its micro-batches, gradient norms by member, who took it, number of forwards."""

    sums: Sums
    norms: dict[int, float]
    updated: tuple[int, ...]
    forwards: int


class Learner:
    """Updates every member of a population from its own completions, in one pass over mixed batches.

    Each member's loss is the mean over its own tokens and its gradient is clipped by its own norm, so that a member's
    step is the same whoever else is in the batch. The same groups give the same bits on CPU with the same number of
    threads, and on accelerators with deterministic algorithms (`base_model.use_deterministic_algorithms`).

    Args:
        population: the adapters and their base model; computed in the dtype of the base, bfloat16 or float32, with fp32
            masters; there is no loss scaling, so float16 is no choice of the manifest.
        pad_id: fills up shorter rows; never attended to.

    Raises:
        UnfitBaseError: the base's logits can't be computed from its last hidden states.
        AdapterTargetError: a target gets inputs that do not tell the rows of a batch apart.
    """

    def __init__(self, population: LoraPopulation, settings: LearnerSettings, *, pad_id: int) -> None:
        self.population = population
        self.settings = settings
        self.pad_id = pad_id
        self.optimizer = StackedAdamW(
            population.parameters(),
            settings.learning_rate,
            weight_decay=settings.weight_decay,
            warmup_steps=settings.warmup_steps,
        )
        self.dtype: torch.dtype = population.model.dtype
        self.head = _head_of(population)
        self.shares_prompts = can_share_prompts(population, pad_id)
        if settings.checkpoint_activations:
            population.checkpoint_activations()

    def update(self, groups: Sequence[Group]) -> UpdateMetrics:
        """Take one step with every member that has something to learn, and say what happened."""
        advantages = reinforce_plus_plus_baseline(
            [group.rewards_G for group in groups],
            [[len(completion.token_ids) for completion in group.completions] for group in groups],
            [_scope(group, self.settings.whitening) for group in groups],
            variant=self.settings.variant,
        )
        rows = self._rows(groups, advantages)
        tokens_M: dict[int, int] = {}
        for row in rows:
            tokens_M[row.member] = tokens_M.get(row.member, 0) + row.targets
        return self._metrics(self.learn(rows, tokens_M), rows, advantages)

    def learn(self, rows: Sequence[Row], tokens_M: dict[int, int]) -> Outcome:
        """Take one step on rows; `tokens_M` are the learned tokens of each member that has any."""
        self.optimizer.zero_grad()
        sums, forwards = self.differentiate(rows, tokens_M)
        return Outcome(sums, *self.descend(sorted(tokens_M)), forwards)

    def differentiate(self, rows: Sequence[Row], tokens_M: Mapping[int, int]) -> tuple[Sums, int]:
        """Add the gradient of rows to the parameters' gradients; returns sums and the number of forwards.

        A member's loss is the sum over its tokens here, divided by all of its tokens, here or elsewhere.
        """
        weights = torch.zeros(self.population.members, device=self.population.device)
        for member, tokens in tokens_M.items():
            weights[member] = 1 / tokens
        model, was_training = self.population.model, self.population.model.training
        # Dropout would make the trainer another policy than the one that sampled; checkpointing needs training mode.
        model.train(self.settings.checkpoint_activations)
        sums, batches = Sums(), micro_batches(rows, self.settings.batch_tokens)
        for batch in batches:
            self._accumulate(collate(batch, self.pad_id, self.dtype, self.population.device), weights, sums)
        model.train(was_training)
        return sums, len(batches)

    def descend(self, members: Sequence[int]) -> tuple[dict[int, float], tuple[int, ...]]:
        """Take a step with the gradients of members, clipped, and forget them; returns their norms and who took it."""
        norms = self._clip_gradients(members)
        updated = tuple(member for member, norm in norms.items() if math.isfinite(norm))
        self.optimizer.step(updated)
        self.optimizer.zero_grad()
        return norms, updated

    def share(self) -> None:
        """Make weights and moments that were changed from outside known to who else computes with them: nobody."""

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state for a checkpoint."""
        return self.optimizer.state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's optimizer state."""
        self.optimizer.load_state(tensors)

    def reset(self, member: int) -> None:
        """Forget a member's moments and step count: its slot holds a child now."""
        self.optimizer.reset(member)

    def _rows(self, groups: Sequence[Group], advantages: Advantages) -> list[Row]:
        rows: list[Row] = []
        for group, live, scored_G, values_G in zip(
            groups, advantages.live_P, advantages.scored_PG, advantages.values_PG, strict=True
        ):
            if not live:
                continue
            samples = [
                Sample(completion.token_ids, completion.logprobs, float(value))
                for completion, scored, value in zip(group.completions, scored_G, values_G, strict=True)
                if scored
            ]
            rows += rows_of(
                group.member,
                group.role,
                group.prompt_ids,
                samples,
                shared=self.shares_prompts,
                row_tokens=self.settings.batch_tokens,
            )
        return rows

    def _accumulate(self, batch: MicroBatch, weights_M: Tensor, sums: Sums) -> None:
        """Add the gradient of one micro-batch."""
        settings = self.settings
        with self.population.route(batch.members):
            hidden = self._sources(batch)
            logprobs_T, entropy_T = token_logprobs(self.head, hidden, batch.target_T, settings.temperature)
            objective = policy_objective(
                logprobs_T,
                logprobs_T.detach(),
                batch.rollout_T,
                batch.advantage_T,
                clip_ratio=settings.clip_ratio,
                importance_cap=settings.importance_cap,
            )
            loss_T = objective.loss_T
            if settings.kl_coefficient:
                with torch.no_grad(), self.population.base_only():
                    base_T, _ = token_logprobs(self.head, self._sources(batch), batch.target_T, settings.temperature)
                kl_T = kl_to_base(logprobs_T, base_T)
                loss_T = loss_T + settings.kl_coefficient * kl_T
                sums.kl += float(kl_T.detach().sum())
            weighted_T = loss_T * weights_M[batch.member_T]
            weighted_T.sum().backward()  # type: ignore[no-untyped-call]
        mismatch_T = objective.difference_T.abs()
        for sums_M, values_T in (
            (sums.loss_M, weighted_T.detach()),
            (sums.mismatch_M, mismatch_T * weights_M[batch.member_T]),
        ):
            values_M = torch.zeros_like(weights_M).index_add_(0, batch.member_T, values_T)
            for member in dict.fromkeys(batch.members):
                sums_M[member] = sums_M.get(member, 0.0) + float(values_M[member])
        sums.tokens += len(batch.target_T)
        for index, role in enumerate(ROLES):
            of_role = batch.role_T == index
            if tokens := int(of_role.sum()):
                sums.add_entropy(role, tokens, float(entropy_T[of_role].sum()))
        sums.clipped += float(objective.clipped_T.sum())
        sums.truncated += float(objective.truncated_T.sum())
        sums.mismatch += float(mismatch_T.sum())
        sums.mismatch_max = max(sums.mismatch_max, float(mismatch_T.max()))
        sums.mismatch_kl += float(objective.mismatch_kl_T.sum())

    def _sources(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states (T, hidden) that predict the learned tokens."""
        hidden = hidden_states(self.population.model, batch.input_ids, batch.attention_mask, batch.position_ids)
        return hidden.flatten(0, 1)[batch.source_T]

    def _clip_gradients(self, members: Sequence[int]) -> dict[int, float]:
        """Scale each member's gradient to the allowed norm; return the norms before that."""
        gradients = [parameter.grad for parameter in self.population.parameters() if parameter.grad is not None]
        norms: dict[int, float] = {}
        for member in members:
            parts = [gradient[member] for gradient in gradients]
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(parts)))
            norms[member] = float(norm)
            if math.isfinite(norms[member]):
                torch._foreach_mul_(parts, (self.settings.gradient_clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norms

    def _metrics(self, outcome: Outcome, rows: Sequence[Row], advantages: Advantages) -> UpdateMetrics:
        sums = outcome.sums

        def mean(total: float) -> float | None:
            return total / sums.tokens if sums.tokens else None

        return UpdateMetrics(
            loss_M=sums.loss_M,
            gradient_norm_M=outcome.norms,
            updated=outcome.updated,
            skipped=tuple(member for member in outcome.norms if member not in outcome.updated),
            entropy={role: sums.entropy_by_role[role] / tokens for role, tokens in sums.tokens_by_role.items()},
            clipped=mean(sums.clipped),
            truncated=mean(sums.truncated),
            mismatch_mean=mean(sums.mismatch),
            mismatch_max=sums.mismatch_max if sums.tokens else None,
            mismatch_kl=mean(sums.mismatch_kl),
            mismatch_M=sums.mismatch_M,
            kl_to_base=mean(sums.kl) if self.settings.kl_coefficient else None,
            learned_tokens=sums.tokens,
            computed_tokens=sum(row.length for row in rows),
            unshared_tokens=sum(row.unshared_tokens for row in rows),
            micro_batches=outcome.forwards,
            advantages=advantages,
        )


def token_logprobs(head: OutputHead, hidden: Tensor, targets_T: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (T) of the targets, with gradient, and entropies (T), without.

    At most `CHUNK_LOGITS` logits exist at a time: with more tokens than that, each chunk's logits are computed again
    in the backward pass.

    Args:
        head: the output head, hidden (T, hidden) to logits (T, vocabulary).
        temperature: logits are divided by it.
    """

    def chunk(hidden: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
        log_probabilities = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
        with torch.no_grad():
            entropy_T = -(log_probabilities.exp() * log_probabilities).sum(-1)
        return log_probabilities.gather(1, targets_T[:, None]).squeeze(1), entropy_T

    size = max(1, CHUNK_LOGITS // head.out_features)
    if len(targets_T) <= size:
        return chunk(hidden, targets_T)
    parts = [
        checkpoint(chunk, *part, use_reentrant=False)
        for part in zip(torch.split(hidden, size), torch.split(targets_T, size), strict=True)
    ]
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def can_share_prompts(population: LoraPopulation, pad_id: int) -> bool:
    """Say whether completions of one prompt may share a row, by the configuration and by trying it once.

    It takes attention that is the same in all layers, over all tokens, and follows a given mask and given positions.
    """
    config = population.model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or [
        "full_attention" if _window(config) is None else "sliding_attention"
    ]
    if config._attn_implementation != "sdpa" or set(layers) != {"full_attention"}:
        return False
    prompt, answers = (
        _probe_ids(config.vocab_size, 5),
        (_probe_ids(config.vocab_size, 4), _probe_ids(config.vocab_size, 3)),
    )
    samples = [Sample(answer, (0.0,) * len(answer), 0.0) for answer in answers]
    states = []
    for shared in (True, False):
        rows = rows_of(0, "student", prompt, samples, shared=shared, row_tokens=64)
        batch = collate(rows, pad_id, population.model.dtype, population.device)
        with torch.no_grad(), population.base_only():
            try:
                hidden = hidden_states(population.model, batch.input_ids, batch.attention_mask, batch.position_ids)
            except (RuntimeError, ValueError, TypeError, IndexError):  # the architecture refuses the mask
                return False
        states.append(hidden.flatten(0, 1)[batch.source_T].float())
    return bool(torch.linalg.vector_norm(states[0] - states[1]) < 0.05 * torch.linalg.vector_norm(states[1]))


def _window(config: object) -> int | None:
    return getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None


def _probe_ids(vocabulary: int, count: int) -> tuple[int, ...]:
    return tuple((3 + 7 * index * count) % vocabulary for index in range(count))


def _head_of(population: LoraPopulation) -> OutputHead:
    """Return how the base's hidden states become its logits, by computing a few tokens both ways with an adapter."""
    model = population.model
    ids = torch.tensor([_probe_ids(model.config.get_text_config().vocab_size, 8)], device=population.device)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad(), population.route([0]):
        try:
            expected = all_logits(model, ids, torch.ones_like(ids), positions)
            hidden = hidden_states(model, ids, torch.ones_like(ids), positions)
        except (PopuloraError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever an architecture raises that is called in a way that it does not know
            raise UnfitBaseError(
                f"baseModel.uri: {type(model).__name__} can't be called as the update does ({reason_of(error)})"
            ) from error
    return find_output_head(model, hidden, expected)


def _scope(group: Group, whitening: Whitening) -> Hashable:
    match whitening:
        case "Member":
            return (group.member,)
        case "Role":
            return (group.member, group.role)
        case "TaskAndRole":
            return (group.member, group.role, group.task)
