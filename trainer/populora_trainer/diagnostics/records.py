"""The lines of a run's logs, one JSON object each: the loop writes them, the report and the exposition read them.

Where nothing was measured a number is null, never NaN. Rates are shares in [0, 1], times are seconds.
"""

from typing import NotRequired, TypedDict

from populora_trainer.population.members import Result
from populora_trainer.tasks.problem import TaskType

Role = str  # "teacher", "student"; a single agent's samples carry the role in which they were drawn


class ComplexityRecord(TypedDict):
    """`complexity.Complexity` as an object; in metrics the means over the step's valid programs by teachers."""

    ast_depth: float | None
    cyclomatic: float | None
    loc: float | None
    variables: float | None


class TaskGame(TypedDict):
    """One task type of a match-up."""

    proposals: int
    valid: int
    solve_rate: float | None  # mean over the valid problems


class Game(TypedDict):
    """One rating game of a match-up."""

    task: TaskType | None  # None: the match-up as a whole
    teacher: Result
    student: Result | None  # None: the student had nothing to solve


class MatchupRecord(TypedDict):
    """A line of matchups.jsonl: what one teacher and one student did to each other in one step."""

    step: int
    teacher: str
    student: str
    win_probability: NotRequired[float]  # of the teacher, predicted before the games
    tasks: dict[TaskType, TaskGame]
    games: list[Game]


class ProblemRecord(TypedDict):
    """A line of problems.jsonl: one proposal, valid or not."""

    step: int
    teacher: str
    student: str
    task: TaskType
    program: str  # the completion's text where it was malformed
    inputs: list[str]
    outputs: list[str]
    shown: int  # code_f: pairs that the student saw, the first ones, the others judged its program; else 0
    message: str
    verdict: str  # of the verifier, or "malformed", "held_out" or "prompt_limit": see selfplay.Proposal
    valid: bool
    solve_rate: float | None  # None: invalid, or nobody tried
    reward: float  # the teacher's
    complexity: ComplexityRecord | None  # None: not Python
    seen: bool  # the buffer held the program before this step


class SolveRates(TypedDict):
    """Mean solve rate over valid problems."""

    overall: float | None
    code_i: float | None
    code_o: float | None
    code_f: float | None


class PerRole(TypedDict):
    """A mean over the samples drawn in each role; a single agent draws in both."""

    teacher: float | None
    student: float | None


class RatingRecord(TypedDict):
    """A member's TrueSkill."""

    mu: float
    sigma: float
    lcb: float  # mu - 3 sigma


class SeedingRecord(TypedDict):
    """How the untrained base wrote the run's first references, where `tasks.seedProblems` asks for them."""

    wanted: int
    kept: int  # different valid problems
    proposals: int
    valid: int  # of the proposals
    tokens: int  # sampled


class HeldOutRecord(TypedDict):
    """An evaluation on fixed problems whose programs no training saw, as the mean over the students."""

    solve_rate: SolveRates  # sampled at the training temperature
    stderr: NotRequired[float | None]  # of the overall solve rate
    greedy: NotRequired[SolveRates]
    problems: NotRequired[int]
    members: NotRequired[dict[str, float]]  # sampled solve rate of each member that was evaluated


class MemberStatus(TypedDict):
    """A member in `/status`; names as in the status of a PopulationRun."""

    name: str
    role: Role
    generation: int
    mu: float
    sigma: float
    lcb: float
    digest: NotRequired[str]


class BestMembers(TypedDict):
    """The members with the highest LCB of their role; None where there is none."""

    teacher: str | None
    student: str | None


class ServingStatus(TypedDict):
    """How far vLLM is with the adapters that the trainer has published last."""

    publishedStep: int  # training steps that they had
    replicas: int  # addresses that the serving host has
    synced: int  # those that serve all of them
    syncSeconds: float  # from publishing until the trainer went on, or until now
    waiting: bool  # whether the trainer waits for them
    message: str  # what keeps a replica from serving them; empty where nothing does


class RunStatus(TypedDict):
    """The answer of `/status`; names as in the status of a PopulationRun."""

    phase: str
    step: int
    steps: int
    progressPercent: float
    estimatedSecondsRemaining: float | None
    members: list[MemberStatus]
    best: BestMembers
    solveRate: float | None
    coverage: float | None
    serving: NotRequired[ServingStatus]  # where vLLM samples, from the first publication on


class StepMetrics(TypedDict):
    """A line of metrics.jsonl."""

    step: int
    seconds: dict[str, float]  # per phase, and "total"
    solve_rate: SolveRates
    valid_rate: float | None
    verdicts: NotRequired[dict[str, int]]  # the step's proposals by verdict
    reward: PerRole
    entropy: PerRole  # nats a token, mean over sampled tokens
    response_tokens: PerRole  # mean length of a completion
    complexity: ComplexityRecord  # without code_f, whose programs are drawn from the buffer
    ratings: dict[str, RatingRecord]
    tokens_per_second: float | None  # sampled and trained, over the step's wall time
    advantage: dict[str, float | None]  # statistics of the learner
    coverage: float | None  # of the archive
    tokens: NotRequired[dict[str, int]]  # counts by purpose, e.g. "sampled", "trained"
    learner: NotRequired[dict[str, float | None]]  # loss, gradient norm, clipped share, ...
    seeding: NotRequired[SeedingRecord]  # at step 0
    held_out: NotRequired[HeldOutRecord]
