"""Whether the engine samples from the weights that are trained: what its log-probabilities say of it.

Both compute the same log-probability of every sampled token, the engine when it samples and the trainer before its
update. On the embedded base vLLM and the trainer differ by 4e-7 nats a token in float32 and by 0.005 in bfloat16;
deeper bases round more. A member whose adapter is not applied, or whose log-probabilities leave out the temperature,
differs by far more, and importance weights cannot mend that: what it learned from would be another policy's samples.
"""

import math
from collections.abc import Mapping, Sequence

from populora_trainer.errors import RolloutError
from populora_trainer.population.members import Member

NOTABLE = 0.1
"""Nats a token, as the mean of absolute differences over a member's learned tokens, from which the user is told."""

ABSURD = 0.5
"""The same, from which the run ends: the mean importance weight is off by a factor of 1.6."""


def doubt(mismatch_M: Mapping[int, float], members: Sequence[Member], step: int) -> str | None:
    """Return what to tell the user of a step's mismatch; None where it is as usual.

    Args:
        mismatch_M: nats a token, by slot of the members that learned.
        members: who held the slots.
        step: of the update.

    Raises:
        RolloutError: a member's mismatch is absurd; nothing of the step may be kept.
    """
    if not mismatch_M:
        return None
    slot = max(mismatch_M, key=lambda one: (math.isnan(mismatch_M[one]), mismatch_M[one]))
    worst = mismatch_M[slot]
    found = (
        f"in step {step}, the log-probabilities of the rollout engine and of the trainer differ by {worst:.2f} nats a "
        f"token for {members[slot].name}"
    )
    if not worst <= ABSURD:
        raise RolloutError(
            f"{found}, and {ABSURD:g} is the limit: its adapter is not applied, or vLLM serves another base model or "
            f"another dtype, or runs without --logprobs-mode=processed_logprobs; the step is not kept"
        )
    if worst > NOTABLE:
        return f"{found[0].upper()}{found[1:]}; up to {NOTABLE:g} is usual, and above {ABSURD:g} the run ends"
    return None
