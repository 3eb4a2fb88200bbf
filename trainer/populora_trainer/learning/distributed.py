"""One update on many ranks: each takes a share of the rows, the gradients are added up, all take the same step.

    g = sum over ranks of g_rank,       g_rank = d/d(A, B) sum over the rank's rows of weight_m loss

The weights 1 / (tokens of the member) are those of the whole batch, wherever its rows are, and clipping looks at the
sum: an update on N ranks is the update on one, but for the order of fp32 sums. Rank 0 makes rows of groups and tells
the others what to do; no rank needs another's rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from populora_trainer.errors import RanksError
from populora_trainer.learning.packing import Row
from populora_trainer.learning.update import Learner, LearnerSettings, Outcome, Sums
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.ranks.group import Group
from populora_trainer.ranks.shares import shares


@dataclass(frozen=True, slots=True)
class Learn:
    """Rank 0's command to take a step.

    Attributes:
        rows: this rank's share.
        tokens_M: learned tokens per member, of all ranks.
    """

    rows: tuple[Row, ...]
    tokens_M: dict[int, int]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Rank 0's command to take over its weights and moments; `steps` are the optimizer's counts."""

    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Report:
    """What a rank says after a step."""

    sums: Sums
    forwards: int
    checksum: str


class SpreadLearner(Learner):
    """A learner whose rows are spread over ranks; rank 0's `update` makes the others `assist`."""

    def __init__(self, population: LoraPopulation, settings: LearnerSettings, *, pad_id: int, group: Group) -> None:
        super().__init__(population, settings, pad_id=pad_id)
        self.group = group

    def learn(self, rows: Sequence[Row], tokens_M: dict[int, int]) -> Outcome:
        """Take one step on all ranks; only for rank 0.

        Raises:
            RanksError: a rank is lost, or the ranks' weights are no longer the same.
        """
        lots = shares([row.length for row in rows], self.group.world.size)
        mine = self.group.scatter([Learn(tuple(rows[index] for index in lot), tokens_M) for lot in lots])
        outcome = self._step(mine)
        reports = self.group.gather(_Report(outcome.sums, outcome.forwards, checksum(self._state())))
        for rank, report in enumerate(reports):
            if report.checksum != reports[0].checksum:
                raise RanksError(
                    f"the weights of rank {rank} differ from those of rank 0 after the same step; nothing of this step "
                    f"is kept. All ranks need the same processors, accelerators and versions of torch"
                )
        total = Sums()
        for report in reports:
            total.add(report.sums)
        return Outcome(total, outcome.norms, outcome.updated, sum(report.forwards for report in reports))

    def assist(self, command: Learn) -> None:
        """Compute this rank's share of a step, and take it."""
        outcome = self._step(command)
        self.group.gather(_Report(outcome.sums, outcome.forwards, checksum(self._state())))

    def share(self) -> None:
        """Give all ranks the weights and moments of this one; only for rank 0."""
        self.group.scatter([Adopt(tuple(self.optimizer.steps))] * self.group.world.size)
        self.group.broadcast(self._state())
        self.group.gather(None)

    def adopt(self, command: Adopt) -> None:
        """Take over the weights and moments of rank 0."""
        self.optimizer.steps = list(command.steps)
        self.group.broadcast(self._state())
        self.group.gather(None)

    def _step(self, command: Learn) -> Outcome:
        parameters = self.population.parameters()
        # Gradients are views of one flat tensor, into which autograd adds, so that nothing is copied to exchange it.
        sizes = [parameter.numel() for parameter in parameters]
        flat = torch.zeros(sum(sizes), device=self.population.device)
        for parameter, part in zip(parameters, torch.split(flat, sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        sums, forwards = self.differentiate(command.rows, command.tokens_M)
        if command.tokens_M:
            self.group.add(flat)
        return Outcome(sums, *self.descend(sorted(command.tokens_M)), forwards)

    def _state(self) -> list[Tensor]:
        return [*(parameter.detach() for parameter in self.population.parameters()), *self.optimizer.moments()]


def checksum(tensors: Sequence[Tensor]) -> str:
    """Return a digest of fp32 tensors that differs where a bit does, but for rare coincidences.

    Each tensor's bits are summed as integers where they are, which is exact in any order and reads them once; only the
    sums leave the device.
    """
    sums = torch.stack([tensor.view(torch.int32).sum(dtype=torch.int64) for tensor in tensors])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]
