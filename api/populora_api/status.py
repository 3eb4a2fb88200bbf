"""The status of a PopulationRun: where it stands now. History lives in storage, so every list here is bounded."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from populora_api.fields import Matches, Model, Unique

Phase = Literal["Pending", "Provisioning", "Running", "Suspended", "Evaluating", "Completed", "Failed"]
Role = Literal["teacher", "student", "agent"]
ConditionType = Literal[
    "TrainersReady",
    "ServingReady",
    "SandboxesReady",
    "AdaptersSynced",
    "Progressing",
    "Suspended",
    "Completed",
    "Failed",
]

Reason = Annotated[
    str,
    Field(min_length=1, max_length=64),
    Matches(r"[A-Z][A-Za-z0-9]*", "one word in CamelCase, such as QuotaExceeded"),
]
MemberName = Annotated[str, Field(min_length=1, max_length=63)]
Step = Annotated[int, Field(ge=0, le=1_000_000)]


class MemberStatus(Model):
    """One member of the population as of the last committed step."""

    name: MemberName = Field(description="Name of the member, unique in the run.", examples=["t0"])
    role: Role = Field(description="teacher, student, or agent in mode SingleAgent.", examples=["teacher"])
    generation: int = Field(
        ge=0, le=1_000_000, description="0 for a founder, else one above its oldest parent.", examples=[0]
    )
    mu: float = Field(description="Mean of the TrueSkill rating.", examples=[25])
    sigma: float = Field(ge=0, description="Standard deviation of the TrueSkill rating.", examples=[8])
    lcb: float = Field(description="mu - 3 sigma: members are ranked by it.", examples=[1])
    adapter_uri: str | None = Field(default=None, max_length=1024, description="Folder of the adapter in PEFT format.")
    digest: str | None = Field(default=None, max_length=64, description="SHA-256 of the adapter, in hexadecimal.")


class Best(Model):
    """The best-rated member of each role."""

    teacher: MemberName | None = Field(default=None, description="Teacher with the highest lcb.")
    student: MemberName | None = Field(default=None, description="Student with the highest lcb.")


class EvaluationResult(Model):
    """One score of one member on one benchmark."""

    suite: str = Field(min_length=1, max_length=64, description="Benchmark.", examples=["mbpp_plus"])
    member: MemberName = Field(description="Member that was evaluated, or base.", examples=["s0"])
    step: Step = Field(description="Step at which it was evaluated.", examples=[0])
    score: float = Field(ge=0, le=1, description="Share of problems solved.", examples=[0])
    problems: int = Field(ge=1, le=1_000_000, description="Number of problems of the benchmark.", examples=[1])


class Condition(Model):
    """One aspect of the run's state, in the convention of Kubernetes."""

    type: ConditionType = Field(description="Which aspect.", examples=["Progressing"])
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.", examples=["Unknown"])
    reason: Reason = Field(description="Why, in one word of a documented list.", examples=["Waiting"])
    message: str = Field(default="", max_length=1024, description="Why, in a sentence for a person.")
    observed_generation: int | None = Field(
        default=None, ge=0, le=2**53, description="metadata.generation that this was decided for."
    )
    last_transition_time: datetime = Field(description="When status last changed.", examples=["2000-01-01T00:00:00Z"])


class FailedNode(Model):
    """A node that has failed the trainer: it refused, evicted or lost a pod, or its hardware broke one."""

    name: str = Field(min_length=1, max_length=253, description="Name of the node.", examples=["node-7"])
    at: datetime = Field(description="When it did.", examples=["2000-01-01T00:00:00Z"])


class Status(Model):
    """Where the run stands. Written by the controller only."""

    phase: Phase | None = Field(default=None, description="The state in one word.")
    reason: Reason | None = Field(default=None, description="Reason of the condition that explains the phase.")
    step: Step | None = Field(default=None, description="Last committed training step.")
    steps: Step | None = Field(default=None, description="Training steps that were asked for.")
    progress_percent: float | None = Field(default=None, ge=0, le=100, description="100 step / steps.")
    estimated_seconds_remaining: int | None = Field(
        default=None, ge=0, le=2**53, description="Seconds to the last step at the present speed."
    )
    attempts: int | None = Field(default=None, ge=0, le=1_000_000, description="Trainer starts that counted as tries.")
    failed_nodes: Annotated[tuple[FailedNode, ...], Field(max_length=8), Unique("name")] | None = Field(
        default=None, description="Nodes that have failed the trainer; for half an hour it prefers others."
    )
    gpus: int | None = Field(default=None, ge=0, le=1_000_000, description="GPUs that the run's pods ask for.")
    active_seconds: int | None = Field(
        default=None,
        ge=0,
        le=2**53,
        description="Seconds of not being suspended before Suspended last changed; activeDeadlineSeconds limits these "
        "and those since then.",
    )
    evaluated_step: Step | None = Field(
        default=None, description="Last step whose evaluation has ended, well or not; it is not evaluated again."
    )
    observed_generation: int | None = Field(
        default=None, ge=0, le=2**53, description="metadata.generation that the controller last acted on."
    )
    members: Annotated[tuple[MemberStatus, ...], Field(max_length=128), Unique("name")] | None = Field(
        default=None, description="The population, teachers first."
    )
    best: Best | None = Field(default=None, description="The best-rated member of each role.")
    solve_rate: float | None = Field(
        default=None, ge=0, le=1, description="Share of solutions of the last step that were correct."
    )
    coverage: float | None = Field(
        default=None, ge=0, le=1, description="Share of the problem archive's cells that are filled."
    )
    evaluation: Annotated[tuple[EvaluationResult, ...], Field(max_length=64)] | None = Field(
        default=None, description="The newest benchmark scores; all of them are in storage."
    )
    conditions: Annotated[tuple[Condition, ...], Field(max_length=16), Unique("type")] | None = Field(
        default=None, description="Aspects of the run's state."
    )
