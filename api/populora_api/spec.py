"""The spec of a PopulationRun: what to train, on what, with what, and where the results go.

Defaults are the paper's (arXiv 2605.16727) unless a description says otherwise. Rules that tie several fields together
are in `rules.py`.
"""

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote

from pydantic import Field

from populora_api.fields import FreeForm, LabelMap, Matches, Model, ObjectName, OneOf, Quantity, Unique

Mode = Literal["Population", "SingleAgent"]
TaskType = Literal["code_i", "code_o", "code_f"]
OperatorId = Literal[
    "M1", "M2", "M3", "M4", "M5", "M6", "X1", "X2", "X3", "X4", "X5", "X6", "X7", "X8", "X9", "C1", "C2"
]
Suite = Literal[
    "humaneval_plus",
    "mbpp_plus",
    "livecodebench",
    "aime24",
    "aime25",
    "amc23",
    "math500",
    "minerva_math",
    "olympiadbench",
    "gsm8k",
]

STORAGE_FORMS = "s3://BUCKET/PREFIX or file:///ABSOLUTE/PATH"
BASE_MODEL_FORMS = (
    "hf://ORGANISATION/NAME[@REVISION], s3://BUCKET/PREFIX, file:///ABSOLUTE/PATH, builtin://nano or builtin://nano-raw"
)
_S3 = r"s3://[a-z0-9][-a-z0-9.]{1,61}[a-z0-9](/[-A-Za-z0-9_.=/]*)?"
_FILE = r"file:///([^\s\\]| )*[^\s\\]"
_HF = r"hf://[A-Za-z0-9][-A-Za-z0-9_.]*/[A-Za-z0-9][-A-Za-z0-9_.]*(@[A-Za-z0-9][-A-Za-z0-9_./]*)?"

Image = Annotated[
    str,
    Field(min_length=1, max_length=512),
    Matches(r"[a-z0-9][-a-zA-Z0-9_./:@]*", "an image reference such as registry/name:tag or registry/name@sha256:..."),
]
ModuleName = Annotated[
    str,
    Field(min_length=1, max_length=64),
    Matches(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*", "the last part of a module's name, such as q_proj"),
]


class BaseModelSource(Model):
    """The frozen model that every adapter sits on."""

    uri: Annotated[
        str,
        Field(min_length=1, max_length=512, examples=["builtin://nano"]),
        Matches(rf"{_HF}|{_S3}|{_FILE}|builtin://nano(-raw)?", BASE_MODEL_FORMS),
    ] = Field(
        description=f"Where the weights are: {BASE_MODEL_FORMS}. "
        "builtin://nano is the model of 1 M parameters that comes with the package; nano-raw is the same model tuned "
        "on careless answers, a designed handicap that leaves reinforcement learning more to elicit."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="Number format of the frozen weights and of the forward pass; float32 for accelerators without "
        "bfloat16. float16 is no choice: bases trained in bfloat16 overflow in it. Adapters are trained in float32.",
    )


class PopulationSize(Model):
    """How many members of each role, and the seed of everything random."""

    teachers: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Members that propose problems. 1 in mode SingleAgent, whose one member has both roles.",
    )
    students: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Members that solve problems. 1 in mode SingleAgent, whose one member has both roles.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**53 - 1,
        description="Every random draw of the run follows from this number: two runs of equal manifests are equal.",
    )


class Adapter(Model):
    """The shape of every member's LoRA adapter."""

    rank: Annotated[int, OneOf((1, 8, 16, 32, 64, 128, 256))] = Field(
        default=32, description="Rank of the low-rank update. One of the ranks that vLLM serves."
    )
    alpha: float = Field(default=64, gt=0, le=4096, description="LoRA scale: the update is multiplied by alpha / rank.")
    target_modules: Annotated[tuple[ModuleName, ...], Field(min_length=1, max_length=16), Unique()] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj"),
        description="Linear modules of every layer that get an adapter, by the last part of their names.",
    )


class Tasks(Model):
    """Which problems are proposed, and how many."""

    types: Annotated[tuple[TaskType, ...], Field(min_length=1, max_length=3), Unique()] = Field(
        default=("code_i", "code_o", "code_f"),
        description="Problem types: code_o asks for the output of a program, code_i for an input that gives an output, "
        "code_f for a program that agrees with examples.",
    )
    problems_per_matchup: int = Field(
        default=72,
        ge=2,
        le=4096,
        description="Proposals that a teacher makes for its student in one step, split equally over tasks.types. "
        "A multiple of the number of types times training.proposalsPerPrompt.",
    )
    novelty_penalty: float = Field(
        default=0,
        ge=0,
        le=2,
        description="Taken off a teacher's reward for a program that the buffer has seen. A departure from the paper, "
        "which has none.",
    )
    buffer_size: int = Field(
        default=16384,
        ge=16,
        le=1_000_000,
        description="Valid problems kept per type to show to teachers as references; when full, the oldest go.",
    )
    seed_problems: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Problems that the untrained base writes before the first step, to be shown to teachers from then "
        "on; with 0 they start from the identity program alone. Absolute Zero starts with 256, the paper names none. "
        "Without effect once the run has begun.",
    )
    references_per_proposal: int = Field(
        default=6,
        ge=1,
        le=16,
        description="At most this many earlier problems are shown in a proposer's prompt. code_f shows one, and so do "
        "the compact prompts of the builtin:// models.",
    )


class Training(Model):
    """Rollouts, the policy gradient and its optimizer, and checkpoints."""

    steps: int = Field(
        default=200, ge=1, le=1_000_000, description="Training steps of the run. May change while it goes on."
    )
    learning_rate: float = Field(default=5e-5, gt=0, le=1, description="AdamW's learning rate, constant after warmup.")
    teacher_learning_rate: float | None = Field(
        default=None, gt=0, le=1, description="The teachers' learning rate where it differs; without it, learningRate."
    )
    warmup_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="Steps over which a member's learning rate rises linearly from 0."
    )
    weight_decay: float = Field(
        default=0,
        ge=0,
        le=1,
        description="AdamW's decoupled decay: each step also multiplies a member's A and B by 1 - learningRate x "
        "weightDecay. The paper gives none; torch's own default is 0.01.",
    )
    freeze_teachers: bool = Field(
        default=False,
        description="Teachers receive no update. A control for experiments and a departure from the paper.",
    )
    temperature: float = Field(default=1, gt=0, le=2, description="Sampling temperature of proposals and solutions.")
    rollouts_per_problem: int = Field(
        default=8, ge=2, le=256, description="Solutions that a student samples for each valid problem."
    )
    proposals_per_prompt: int = Field(
        default=8,
        ge=2,
        le=256,
        description="Proposals that a teacher samples from each prompt: the group over which its rewards are centred. "
        "With 72 problems in a matchup that is 9 prompts.",
    )
    advantage: Literal["ReinforcePlusPlusBaseline"] = Field(
        default="ReinforcePlusPlusBaseline",
        description="Rewards minus the mean of their prompt's group, then whitened (REINFORCE++ with baseline).",
    )
    whitening: Literal["Member", "Role", "TaskAndRole"] = Field(
        default="Member",
        description="What a member's advantages are whitened over: all that it did in the step, each role, or each "
        "pair of task type and role (as Absolute Zero does). The last two matter for the single agent.",
    )
    kl_coefficient: float = Field(
        default=0, ge=0, le=10, description="Weight of the KL divergence to the base model in the loss."
    )
    clip_ratio: float = Field(
        default=0.2, gt=0, lt=1, description="Probability ratios outside 1 - clipRatio to 1 + clipRatio are clipped."
    )
    importance_sampling_cap: float = Field(
        default=2,
        ge=1,
        le=100,
        description="Upper limit of the weight that corrects for the rollout engine's log-probabilities.",
    )
    gradient_clip_norm: float = Field(
        default=1, gt=0, le=1000, description="Each member's gradient is scaled down to at most this Euclidean norm."
    )
    max_prompt_tokens: int = Field(
        default=4096, ge=16, le=131_072, description="Longest prompt, in tokens; problems that need more are not used."
    )
    max_response_tokens: int = Field(
        default=4096, ge=8, le=131_072, description="Longest proposal or solution, in tokens; sampling stops there."
    )
    tokens_per_micro_batch: int = Field(
        default=16384,
        ge=64,
        le=4_194_304,
        description="Tokens in one forward and backward pass; bounds memory and leaves the result as it is. At least "
        "maxPromptTokens + maxResponseTokens.",
    )
    checkpoint_every_steps: int = Field(
        default=1, ge=1, le=1_000_000, description="Steps between checkpoints; the last step always makes one."
    )
    keep_checkpoints: int = Field(
        default=3, ge=1, le=10_000, description="Newest checkpoints that are kept; older ones are deleted from storage."
    )


class Matchmaking(Model):
    """Who meets whom, and what counts as a game for the ratings."""

    strategy: Literal["PFSP", "Uniform"] = Field(
        default="PFSP",
        description="PFSP prefers opponents by predicted win probability; Uniform pairs at random.",
    )
    weighting: Literal["Variance", "Hard"] = Field(
        default="Variance",
        description="PFSP's weight of a pair whose student wins with probability x: Variance is x (1 - x), even "
        "matches first; Hard is (1 - x)^2, strong teachers first. Without effect where strategy is Uniform.",
    )
    games_per: Literal["Matchup", "TaskType", "Problem"] = Field(
        default="TaskType",
        description="What makes one TrueSkill game between a teacher and its student: the whole matchup, each task "
        "type, or each problem. The teacher's score is the mean of 1 - solve rate, with 0 for a proposal that is "
        "invalid or that nobody solved; the student's is the mean solve rate of the valid problems. Above 0.55 wins, "
        "below 0.45 loses, and both may lose.",
    )


class WeightedOperator(Model):
    """An evolution operator and how often it is drawn."""

    id: OperatorId = Field(
        description="M1 to M6 mutate one parent, X1 to X9 cross two; C1 and C2 are the controls that copy their "
        "(first) parent. `populora operators` lists them.",
        examples=["M1"],
    )
    weight: float = Field(
        default=1, ge=0, le=1000, description="Relative frequency; 0 keeps the operator in the list and never draws it."
    )


class Evolution(Model):
    """Replacement of the weakest members by children bred in weight space."""

    every_steps: int = Field(
        default=10, ge=0, le=1_000_000, description="Steps between generations; 0 means no evolution."
    )
    replace_fraction: float = Field(
        default=0.25,
        ge=0,
        lt=1,
        description="Share of each role that is replaced in a generation, lowest rating first: rounded down, at "
        "least one member, never the best. 0 means none.",
    )
    operators: Annotated[tuple[WeightedOperator, ...], Field(min_length=1, max_length=17), Unique("id")] = Field(
        default=tuple(WeightedOperator(id=name) for name in ("M1", "M2", "M3", "M4", "X1", "X2", "X3", "X4")),
        description="Operators that make a child, drawn by weight.",
    )


class Rewards(Model):
    """What teachers and students are paid."""

    preset: Literal["PopuLoRA", "AbsoluteZero"] = Field(
        default="PopuLoRA",
        description="Students: 1 correct, -0.5 wrong, -1 malformed. Teachers: -1 invalid, else 1 - solve rate; where "
        "nobody or everybody solved it PopuLoRA gives 0 and AbsoluteZero -0.5.",
    )


class ResourceList(Model):
    """Kubernetes resources of a container."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] | None = Field(
        default=None, description="Reserved for the container, e.g. cpu: 2, memory: 8Gi."
    )
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] | None = Field(
        default=None, description="Upper limits of the container. GPUs are set by the gpus fields, not here."
    )


class Toleration(Model):
    """Lets pods onto nodes with a matching taint."""

    key: str | None = Field(default=None, max_length=317, description="Key of the taint; none matches every key.")
    operator: Literal["Equal", "Exists"] | None = Field(
        default=None, description="How value is compared; Kubernetes takes Equal where none is given."
    )
    value: str | None = Field(default=None, max_length=63, description="Value of the taint, with operator Equal.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="Effect of the taint; none matches every effect."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Seconds a NoExecute taint is tolerated; none means for ever."
    )


class PodMetadata(Model):
    """Labels and annotations added to pods."""

    labels: LabelMap | None = Field(default=None, description="Added labels; the controller's own cannot be replaced.")
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)] | None = Field(
        default=None, description="Added annotations."
    )


class PodTemplate(Model):
    """A narrow override of the pods that the controller makes."""

    metadata: PodMetadata | None = Field(default=None, description="Labels and annotations added to the pods.")
    spec: FreeForm | None = Field(
        default=None,
        description="Fields of a Kubernetes PodSpec, merged over the controller's; what isolation rests on cannot be "
        "changed.",
    )


class Pods(Model):
    """What every kind of pod lets a user choose. Concerns a cluster only."""

    image: Image | None = Field(default=None, description="Container image; without it, the controller's default.")
    resources: ResourceList | None = Field(
        default=None, description="CPU and memory of the container; without it, the controller's defaults."
    )
    node_selector: LabelMap | None = Field(default=None, description="Labels that a node must carry.")
    tolerations: Annotated[tuple[Toleration, ...], Field(max_length=16)] | None = Field(
        default=None, description="Taints of nodes that the pods accept."
    )
    pod_template: PodTemplate | None = Field(default=None, description="Override of the pods, merged last.")


class Trainer(Pods):
    """The pods that hold the population and update it."""

    nodes: int = Field(default=1, ge=1, le=64, description="Trainer pods, one a node, joined by torchrun.")
    gpus_per_node: int = Field(default=4, ge=0, le=16, description="GPUs of each trainer pod; 0 trains on CPUs.")


class Inference(Pods):
    """Where proposals and solutions are sampled."""

    engine: Literal["VLLM", "Transformers"] = Field(
        default="VLLM",
        description="VLLM samples in pods of its own; Transformers in the trainer process, for small models and "
        "laptops (no vLLM pods then).",
    )
    replicas: int = Field(
        default=4, ge=1, le=256, description="vLLM pods, each serving all members. May change while the run goes on."
    )
    gpus_per_replica: int = Field(
        default=1, ge=0, le=16, description="GPUs of each vLLM pod, used by tensor parallelism."
    )


class Sandbox(Pods):
    """Where generated programs run, and what they may use."""

    replicas: int = Field(default=2, ge=1, le=256, description="Sandbox pods. May change while the run goes on.")
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass of the sandbox pods, e.g. gvisor; none means the cluster's default."
    )
    timeout_seconds: float = Field(
        default=10,
        gt=0,
        le=300,
        description="Seconds of processor time after which one execution is killed; three times as much in wall time.",
    )
    memory_mib: int = Field(
        default=512, ge=32, le=65_536, alias="memoryMiB", description="Memory of one execution, in MiB (2^20 bytes)."
    )


class SecretReference(Model):
    """A Secret in the run's namespace."""

    name: ObjectName = Field(
        description="Name of the Secret, with keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.", examples=["s3"]
    )


class Storage(Model):
    """Where checkpoints, adapters and logs are kept."""

    uri: Annotated[
        str, Field(min_length=1, max_length=512, examples=["file:///run"]), Matches(rf"{_S3}|{_FILE}", STORAGE_FORMS)
    ] = Field(description=f"Folder of the run: {STORAGE_FORMS}; a file:// folder is a volume that every pod mounts.")
    endpoint: (
        Annotated[
            str,
            Field(min_length=1, max_length=512),
            Matches(r"https?://[-A-Za-z0-9_.]+(:[0-9]{1,5})?/?", "http://HOST[:PORT] or https://HOST[:PORT]"),
        ]
        | None
    ) = Field(default=None, description="S3 endpoint of a store that is not AWS.")
    region: (
        Annotated[str, Field(min_length=1, max_length=64), Matches(r"[a-z0-9][-a-z0-9]*", "a region such as eu-west-1")]
        | None
    ) = Field(default=None, description="S3 region.")
    credentials_secret_ref: SecretReference | None = Field(
        default=None, description="Secret with the S3 credentials; without it, the pod's own identity is used."
    )

    @property
    def folder(self) -> Path | None:
        """The local folder of a `file://` uri, None for another kind."""
        scheme, _, rest = self.uri.partition("://")
        return Path(unquote(rest)) if scheme == "file" else None


class HeldOut(Model):
    """The fixed held-out problems of the embedded base models: the same in every run, their programs in no training."""

    problems: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="Problems of each task type; 0 means no such evaluation. Only builtin:// models have them.",
    )
    samples: int = Field(
        default=4, ge=1, le=256, description="Solutions sampled for each problem, at training.temperature."
    )
    every_steps: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Steps between evaluations; 0 means before the first step and after the last.",
    )


class Evaluation(Model):
    """Benchmarks of the trained members. May change while the run goes on."""

    suites: Annotated[tuple[Suite, ...], Field(max_length=10), Unique()] = Field(
        default=(), description="Benchmarks to run; none by default."
    )
    every_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="Steps between evaluations; 0 means at the end only."
    )
    members: Literal["All", "Best"] = Field(
        default="All", description="All members, or the best teacher and the best student by rating."
    )
    held_out: HeldOut = Field(
        default_factory=HeldOut, description="The fixed held-out problems of the embedded base model."
    )


class Scheduling(Model):
    """How the pods queue for the cluster."""

    queue_name: ObjectName | None = Field(default=None, description="Kueue LocalQueue that admits the run's pods.")
    priority_class_name: ObjectName | None = Field(default=None, description="PriorityClass of the run's pods.")


class Monitoring(Model):
    """Objects for Prometheus."""

    pod_monitor: bool = Field(
        default=True, description="Make a PodMonitor where the cluster knows that kind; scrapes every pod of the run."
    )


class Spec(Model):
    """What the run trains and with what."""

    mode: Mode = Field(
        default="Population",
        description="Population trains teachers and students; SingleAgent is the paper's baseline, one adapter "
        "that proposes and solves, with population.teachers and population.students 1 and no evolution.",
    )
    base_model: BaseModelSource = Field(description="The frozen model that every adapter sits on.")
    population: PopulationSize = Field(
        default_factory=PopulationSize, description="How many members, and the seed of everything random."
    )
    adapter: Adapter = Field(default_factory=Adapter, description="Shape of every member's LoRA adapter.")
    tasks: Tasks = Field(default_factory=Tasks, description="Which problems are proposed, and how many.")
    training: Training = Field(
        default_factory=Training, description="Rollouts, policy gradient, optimizer and checkpoints."
    )
    matchmaking: Matchmaking = Field(default_factory=Matchmaking, description="Who meets whom, and what is a game.")
    evolution: Evolution = Field(
        default_factory=Evolution, description="Replacement of the weakest members by children bred in weight space."
    )
    rewards: Rewards = Field(default_factory=Rewards, description="What teachers and students are paid.")
    trainer: Trainer = Field(
        default_factory=Trainer, description="Pods that hold the population and update it. Concerns a cluster only."
    )
    inference: Inference = Field(default_factory=Inference, description="Where proposals and solutions are sampled.")
    sandbox: Sandbox = Field(
        default_factory=Sandbox, description="Where generated programs run, and what they may use."
    )
    storage: Storage = Field(
        description="Where checkpoints, adapters and logs are kept. `populora run` takes its --output where the "
        "manifest has none."
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Benchmarks of the trained members.")
    scheduling: Scheduling = Field(
        default_factory=Scheduling, description="How the pods queue for the cluster. Concerns a cluster only."
    )
    suspend: bool = Field(
        default=False, description="Stop at a checkpoint and remove every pod; false goes on at the same step."
    )
    active_deadline_seconds: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Seconds of not being suspended after which the run fails."
    )
    ttl_seconds_after_finished: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Seconds after which a finished run is deleted; none means never."
    )
    retries: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="Failures of the trainer that are tried again; node faults are not counted.",
    )
    deletion_policy: Literal["Retain", "Delete"] = Field(
        default="Retain",
        description="What happens to the stored adapters and logs when the run is deleted. Delete removes them first.",
    )
    monitoring: Monitoring = Field(default_factory=Monitoring, description="Objects for Prometheus.")
