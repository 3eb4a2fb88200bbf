"""What a judged answer or proposal is worth to its author."""

from dataclasses import dataclass
from typing import Literal

from populora_trainer.tasks.problem import TaskType

PresetName = Literal["PopuLoRA", "AbsoluteZero"]
AnswerKind = Literal["correct", "wrong", "malformed"]


@dataclass(frozen=True, slots=True)
class RewardPreset:
    """The rewards of one published system.

    Attributes:
        correct: a student's answer that the verifier accepts.
        wrong: a well formed answer that it rejects.
        malformed: an answer in which no answer can be found.
        invalid: a teacher's proposal that is not parsable, not executable, not deterministic or over a limit.
        worthless: a valid problem whose solve rate leaves nothing to learn: 0, and 1 as well.
    """

    correct: float
    wrong: float
    malformed: float
    invalid: float
    worthless: float


PRESETS: dict[PresetName, RewardPreset] = {
    # arXiv 2605.16727, equations 1 and 2.
    "PopuLoRA": RewardPreset(correct=1.0, wrong=-0.5, malformed=-1.0, invalid=-1.0, worthless=0.0),
    # Absolute Zero Reasoner, reward_managers.py: every proposer reward that is not above zero becomes -0.5.
    "AbsoluteZero": RewardPreset(correct=1.0, wrong=-0.5, malformed=-1.0, invalid=-1.0, worthless=-0.5),
}


def student_reward(kind: AnswerKind, preset: RewardPreset) -> float:
    """Return the reward of one answer, given what the verifier made of it."""
    match kind:
        case "correct":
            return preset.correct
        case "wrong":
            return preset.wrong
        case "malformed":
            return preset.malformed
    raise ValueError(f"an answer is correct, wrong or malformed, not {kind!r}")


def teacher_reward(
    solve_rate: float | None,
    preset: RewardPreset,
    *,
    task: TaskType = "code_o",
    seen: bool = False,
    novelty_penalty: float = 0.0,
) -> float:
    """Return the reward of one proposal.

        invalid -> preset.invalid;    rho in {0, 1} -> preset.worthless;    else 1 - rho

    `novelty_penalty` is taken off valid proposals of a program that the buffer has seen. It is a departure from the
    paper and 0 unless the manifest says otherwise. It never applies to code_f, whose program is given to the teacher.

    Args:
        solve_rate: rho, the share of the student's rollouts that are correct, in [0, 1]; None for an invalid proposal.
        preset: one of `PRESETS`.
        task: the proposal's type.
        seen: whether the program was in the buffer before this step.
        novelty_penalty: zero or more.

    Raises:
        ValueError: the solve rate is not in [0, 1].
    """
    if solve_rate is None:
        return preset.invalid
    if not 0.0 <= solve_rate <= 1.0:
        raise ValueError(f"a solve rate lies in [0, 1], not {solve_rate!r}")
    reward = 1.0 - solve_rate if 0.0 < solve_rate < 1.0 else preset.worthless
    return reward - novelty_penalty if seen and task != "code_f" else reward
