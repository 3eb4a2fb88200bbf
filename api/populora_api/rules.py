"""Rules over several fields of a spec, each once as CEL for the API server and once as Python for everybody else.

A rule's `allowed` is the sentence that both show. Checks of one field alone are with the field, in `spec.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from populora_api.spec import Spec

_READ = re.compile(r"\bself((?:\.[A-Za-z]+)+)(\()?")


@dataclass(frozen=True)
class Rule:
    """A condition on a whole spec whose defaults are filled in.

    Attributes:
        field: the field to blame, relative to spec.
        cel: the condition in CEL; `self` is the spec.
        holds: the condition in Python.
        allowed: what the blamed field may be.
    """

    field: str
    cel: str
    holds: Callable[[Spec], bool]
    allowed: str

    @property
    def reads(self) -> frozenset[str]:
        """Fields that the condition looks at, relative to spec."""
        paths = (path[1:].rsplit(".", 1)[0] if call else path[1:] for path, call in _READ.findall(self.cel))
        return frozenset(paths)


RULES: tuple[Rule, ...] = (
    Rule(
        field="population.teachers",
        cel="self.mode != 'SingleAgent' || self.population.teachers == 1",
        holds=lambda s: s.mode != "SingleAgent" or s.population.teachers == 1,
        allowed="1 where mode is SingleAgent, whose one member is both teacher and student",
    ),
    Rule(
        field="population.students",
        cel="self.mode != 'SingleAgent' || self.population.students == 1",
        holds=lambda s: s.mode != "SingleAgent" or s.population.students == 1,
        allowed="1 where mode is SingleAgent, whose one member is both teacher and student",
    ),
    Rule(
        field="training.freezeTeachers",
        cel="self.mode != 'SingleAgent' || !self.training.freezeTeachers",
        holds=lambda s: s.mode != "SingleAgent" or not s.training.freeze_teachers,
        allowed="false where mode is SingleAgent, whose one member would learn nothing as a teacher",
    ),
    Rule(
        field="training.teacherLearningRate",
        cel="self.mode != 'SingleAgent' || !has(self.training.teacherLearningRate)",
        holds=lambda s: s.mode != "SingleAgent" or s.training.teacher_learning_rate is None,
        allowed="no value where mode is SingleAgent: its one member has one learning rate, training.learningRate",
    ),
    Rule(
        field="training.teacherLearningRate",
        cel="!self.training.freezeTeachers || !has(self.training.teacherLearningRate)",
        holds=lambda s: not s.training.freeze_teachers or s.training.teacher_learning_rate is None,
        allowed="no value where training.freezeTeachers is true: frozen teachers have no learning rate",
    ),
    Rule(
        field="tasks.problemsPerMatchup",
        cel="self.tasks.problemsPerMatchup % (size(self.tasks.types) * self.training.proposalsPerPrompt) == 0",
        holds=lambda s: s.tasks.problems_per_matchup % (len(s.tasks.types) * s.training.proposals_per_prompt) == 0,
        allowed="a multiple of the number of tasks.types times training.proposalsPerPrompt, so that every type gets "
        "whole groups of proposals",
    ),
    Rule(
        field="tasks.seedProblems",
        cel="self.tasks.seedProblems < self.tasks.bufferSize",
        holds=lambda s: s.tasks.seed_problems < s.tasks.buffer_size,
        allowed="below tasks.bufferSize, which the identity program and every seed problem must fit into",
    ),
    Rule(
        field="training.tokensPerMicroBatch",
        cel="self.training.tokensPerMicroBatch >= self.training.maxPromptTokens + self.training.maxResponseTokens",
        holds=lambda s: (
            s.training.tokens_per_micro_batch >= s.training.max_prompt_tokens + s.training.max_response_tokens
        ),
        allowed="at least training.maxPromptTokens + training.maxResponseTokens, so that the longest sequence fits",
    ),
    Rule(
        field="training.temperature",
        cel="self.inference.engine != 'VLLM' || self.training.temperature >= 0.01",
        holds=lambda s: s.inference.engine != "VLLM" or s.training.temperature >= 0.01,
        allowed="at least 0.01 where inference.engine is VLLM, which takes any lower temperature for 0.01",
    ),
    Rule(
        field="evolution.operators",
        cel="self.evolution.operators.exists(o, o.weight > 0.0)",
        holds=lambda s: any(o.weight > 0 for o in s.evolution.operators),
        allowed="at least one operator with a weight above 0",
    ),
    Rule(
        field="evaluation.heldOut.problems",
        cel="self.evaluation.heldOut.problems == 0 || self.baseModel.uri.startsWith('builtin://')",
        holds=lambda s: s.evaluation.held_out.problems == 0 or s.base_model.uri.startswith("builtin://"),
        allowed="0 unless baseModel.uri is builtin://nano or builtin://nano-raw, which alone have held-out problems",
    ),
    Rule(
        field="storage.endpoint",
        cel="self.storage.uri.startsWith('s3://') || !has(self.storage.endpoint)",
        holds=lambda s: s.storage.uri.startswith("s3://") or s.storage.endpoint is None,
        allowed="no value unless storage.uri begins with s3://",
    ),
    Rule(
        field="storage.region",
        cel="self.storage.uri.startsWith('s3://') || !has(self.storage.region)",
        holds=lambda s: s.storage.uri.startswith("s3://") or s.storage.region is None,
        allowed="no value unless storage.uri begins with s3://",
    ),
    Rule(
        field="storage.credentialsSecretRef",
        cel="self.storage.uri.startsWith('s3://') || !has(self.storage.credentialsSecretRef)",
        holds=lambda s: s.storage.uri.startswith("s3://") or s.storage.credentials_secret_ref is None,
        allowed="no value unless storage.uri begins with s3://",
    ),
)

IMMUTABLE: tuple[str, ...] = ("mode", "baseModel", "population", "adapter", "storage")
"""Fields of spec that make a run what it is and cannot change once it exists."""

IMMUTABLE_CEL = "self == oldSelf"
IMMUTABLE_ALLOWED = "the value that the run was created with; make a new run to change it"

STEPS_CEL = (
    "self.spec.training.steps == oldSelf.spec.training.steps || !has(oldSelf.status) || !has(oldSelf.status.phase) || "
    "oldSelf.status.phase != 'Completed'"
)
"""A transition rule of the whole object: steps that are asked of a run that is complete would never be taken."""

STEPS_ALLOWED = (
    "the value that the run has completed with; make a run of another name with the same storage.uri, which goes on at "
    "the last checkpoint"
)


def broken_rules(spec: Spec) -> list[Rule]:
    """Return the rules that the spec breaks, in their order above."""
    return [rule for rule in RULES if not rule.holds(spec)]
