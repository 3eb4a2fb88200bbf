"""Documents to training batches: token ids, rotary positions, branch numbers, targets and loss weights."""

from collections.abc import Collection, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context

import numpy as np
import torch
from torch import Tensor

from populora_trainer.nano.corpus import Document, chunk
from populora_trainer.nano.tokenizer import Lexer
from populora_trainer.randomness import choices

PROMPT_WEIGHT = 0.1  # of a prompt token in the loss; an answer token weighs 1
PAD_BRANCH = -1


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document as arrays of equal length; targets are shifted by one and weigh 0 where a branch begins."""

    ids: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


def encode_document(document: Document, lexer: Lexer) -> Encoded:
    """Lay a document out: the prefix, then its branches, whose positions all continue after the prefix."""
    prefix = lexer.encode(document.prefix)
    ids, positions, branches = list(prefix), list(range(len(prefix))), [0] * len(prefix)
    targets, weights = [*prefix[1:], 0], [PROMPT_WEIGHT] * len(prefix)
    for number, branch in enumerate(document.branches, start=1):
        question, answer = lexer.encode(branch.question), lexer.encode(branch.answer)
        text = [*question, *answer]
        if number == 1:
            targets[-1] = text[0]
            weights[-1] = PROMPT_WEIGHT if question else 1.0
        ids += text
        positions += range(len(prefix), len(prefix) + len(text))
        branches += [number] * len(text)
        targets += [*text[1:], 0]
        asked = max(len(question) - 1, 0)
        weights += [PROMPT_WEIGHT] * asked + [1.0] * (len(text) - asked - 1) + [0.0]
    return Encoded(
        np.array(ids, np.int64),
        np.array(positions, np.int64),
        np.array(branches, np.int64),
        np.array(targets, np.int64),
        np.array(weights, np.float32),
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded documents.

    Attributes:
        ids, positions, targets: (batch, length) int64.
        weights: (batch, length) float32, of each target in the loss.
        mask: (batch, length, length) bool, True where the row's token may see the column's token.
        tokens: number of tokens without padding.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    weights: Tensor
    mask: Tensor
    tokens: int


def collate(documents: Sequence[Encoded]) -> Batch:
    """Pad documents to one length and build the mask: causal, prefix and own branch only."""
    length = max(len(document.ids) for document in documents)

    def padded(name: str, fill: int) -> Tensor:
        rows = [getattr(document, name) for document in documents]
        return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row)), constant_values=fill) for row in rows]))

    branches = padded("branches", PAD_BRANCH)
    rows, columns = branches.unsqueeze(2), branches.unsqueeze(1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return Batch(
        ids=padded("ids", 0),
        positions=padded("positions", 0),
        targets=padded("targets", 0),
        weights=padded("weights", 0),
        mask=causal & ((columns == 0) | (columns == rows)),
        tokens=sum(len(document.ids) for document in documents),
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a chunk is made of: its size, its batches, the mix of kinds and the share of sloppy answers."""

    documents: int
    batch_tokens: int
    mix: tuple[float, ...]
    sloppy: float = 0.0


def chunk_batches(seed: int, number: int, recipe: Recipe, held_out: Collection[str]) -> list[list[Encoded]]:
    """Documents of one chunk, by length into batches of at most `batch_tokens` padded tokens, in shuffled order."""
    lexer = Lexer()
    documents = chunk(seed, number, recipe.documents, held_out, recipe.mix, recipe.sloppy)
    encoded = [encode_document(document, lexer) for document in documents]
    encoded.sort(key=lambda document: len(document.ids))
    batches: list[list[Encoded]] = [[]]
    for document in encoded:
        if len(document.ids) * (len(batches[-1]) + 1) > recipe.batch_tokens:
            batches.append([])
        batches[-1].append(document)
    choices(seed, "batch order", number).shuffle(batches)
    return batches


def stream(seed: int, first: int, recipe: Recipe, held_out: Collection[str]) -> Generator[Batch]:
    """Endless batches from chunk `first` on; the next chunk is generated in a second process meanwhile."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(chunk_batches, seed, first, recipe, held_out)]
        for number in count(first + 1):
            waiting.append(pool.submit(chunk_batches, seed, number, recipe, held_out))
            for batch in waiting.pop(0).result():
                yield collate(batch)
