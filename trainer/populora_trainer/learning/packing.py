"""Prompts and completions as rows of a batch: a prompt once, then several of its completions side by side.

    tokens      p0 p1 p2 | a0 a1 a2 | b0 b1          a completion's last token is predicted, never an input
    positions    0  1  2 |  3  4  5 |  3  4
    attends to  the prompt and itself only

Every completion then sees exactly what it would see in a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Role = Literal["teacher", "student"]
ROLES: tuple[Role, ...] = ("teacher", "student")


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion to learn from: its tokens, their log-probabilities when sampled, and its advantage."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class Row:
    """Completions of one prompt, which a member sampled in one role, to be computed with that prompt."""

    member: int
    role: Role
    prompt_ids: tuple[int, ...]
    samples: tuple[Sample, ...]

    @property
    def length(self) -> int:
        """Input tokens: the prompt, and all of each completion but its last token."""
        return len(self.prompt_ids) + sum(len(sample.token_ids) - 1 for sample in self.samples)

    @property
    def targets(self) -> int:
        """Tokens that are learned from."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def unshared_tokens(self) -> int:
        """Tokens of prompt and completion, were every completion computed in a row of its own."""
        return sum(len(self.prompt_ids) + len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows as tensors; the last five have one entry per learned token (T), row by row.

    Attributes:
        members: per row, sorted.
        input_ids, position_ids: (row, token), padded on the right.
        attention_mask: (row, token), or (row, 1, token, token) added to the scores where rows hold several samples.
        source_T: index into row * token of the input that predicts the token.
        target_T, rollout_T, advantage_T: the token, its log-probability when sampled, its sample's advantage.
        member_T, role_T: the member it belongs to, and the role in `ROLES` that it was sampled in.
    """

    members: list[int]
    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor
    source_T: Tensor
    target_T: Tensor
    rollout_T: Tensor
    advantage_T: Tensor
    member_T: Tensor
    role_T: Tensor


def rows_of(
    member: int, role: Role, prompt_ids: tuple[int, ...], samples: Sequence[Sample], *, shared: bool, row_tokens: int
) -> list[Row]:
    """Return the samples of a prompt as rows of at most `row_tokens`, or of one sample where that is longer.

    Samples of like length share a row, in the order of their lengths. Without `shared`, every sample gets its own.
    """
    rows: list[Row] = []
    held: list[Sample] = []
    length = len(prompt_ids)
    for sample in sorted(samples, key=lambda sample: len(sample.token_ids)):
        added = len(sample.token_ids) - 1
        if held and (not shared or length + added > row_tokens):
            rows.append(Row(member, role, prompt_ids, tuple(held)))
            held, length = [], len(prompt_ids)
        held.append(sample)
        length += added
    if held:
        rows.append(Row(member, role, prompt_ids, tuple(held)))
    return rows


def micro_batches(rows: Sequence[Row], batch_tokens: int) -> list[list[Row]]:
    """Return the rows in batches of at most `batch_tokens` padded tokens, rows of like length together.

    The longest come first, so that a run that does not fit into memory stops at its first batch. Within a batch the
    rows are sorted by member.
    """
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if not batches or batches[-1][0].length * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return [sorted(batch, key=lambda row: row.member) for batch in batches]


def collate(rows: Sequence[Row], pad_id: int, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """Return rows as tensors on `device`; a four-dimensional mask has the dtype of the model."""
    width = max(row.length for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    positions = torch.zeros(len(rows), width, dtype=torch.long)
    # Padding is a segment that attends to itself: a softmax over nothing would be NaN.
    segments = torch.full((len(rows), width), -1)
    sources: list[Tensor] = []
    targets: list[int] = []
    rollout: list[float] = []
    advantages: list[float] = []
    member_of_token: list[int] = []
    role_of_token: list[int] = []
    for number, row in enumerate(rows):
        prompt, start = len(row.prompt_ids), len(row.prompt_ids)
        ids[number, :prompt] = torch.tensor(row.prompt_ids)
        positions[number, :prompt] = torch.arange(prompt)
        segments[number, :prompt] = 0
        for segment, sample in enumerate(row.samples, start=1):
            inputs = len(sample.token_ids) - 1
            stop = start + inputs
            ids[number, start:stop] = torch.tensor(sample.token_ids[:-1], dtype=torch.long)
            positions[number, start:stop] = torch.arange(prompt, prompt + inputs)
            segments[number, start:stop] = segment
            sources.append(number * width + torch.tensor([prompt - 1, *range(start, stop)]))
            targets.extend(sample.token_ids)
            rollout.extend(sample.logprobs)
            advantages.extend([sample.advantage] * len(sample.token_ids))
            member_of_token.extend([row.member] * len(sample.token_ids))
            role_of_token.extend([ROLES.index(row.role)] * len(sample.token_ids))
            start = stop
    shared = any(len(row.samples) > 1 for row in rows)
    mask = _additive(segments, dtype) if shared else (segments >= 0).long()
    return MicroBatch(
        members=[row.member for row in rows],
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=mask.to(device),
        source_T=torch.cat(sources).to(device),
        target_T=torch.tensor(targets, device=device),
        rollout_T=torch.tensor(rollout, dtype=torch.float32, device=device),
        advantage_T=torch.tensor(advantages, dtype=torch.float32, device=device),
        member_T=torch.tensor(member_of_token, device=device),
        role_T=torch.tensor(role_of_token, device=device),
    )


def _additive(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (row, 1, token, token): 0 where a token may attend, -inf elsewhere."""
    width = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    allowed = ((key == 0) & (query >= 0)) | (key == query)
    allowed &= torch.ones(width, width, dtype=torch.bool).tril()
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)[:, None]
