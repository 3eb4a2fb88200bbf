"""One table of wrong manifests: each is an edit of a good one, the field that is named and a part of what is said.

`test_bad_manifests.py` beside it shows them to `populora validate`, `tests/cluster/test_crd.py` to a real API server.
"""

import copy
from typing import Any


class _Missing:
    def __repr__(self) -> str:
        return "missing"  # without an address, as tests are called by it


MISSING: Any = _Missing()

# (path of the edit, new value, field named, part of the message)
BAD: list[tuple[str, Any, str, str]] = [
    ("apiVersion", "populora.dev/v1", "apiVersion", '"populora.dev/v1" is not allowed: populora.dev/v1alpha1'),
    ("apiVersion", MISSING, "apiVersion", "missing: populora.dev/v1alpha1"),
    ("kind", "PopulationRuns", "kind", '"PopulationRuns" is not allowed: PopulationRun'),
    ("metadata.name", MISSING, "metadata.name", "missing: at most 40 lower-case letters"),
    ("metadata.name", "Nano", "metadata.name", '"Nano" is not allowed: at most 40 lower-case letters'),
    ("metadata.name", "nano-", "metadata.name", "not ending with '-'"),
    ("metadata.name", "4x4", "metadata.name", "beginning with a letter"),
    ("metadata.name", "n" * 41, "metadata.name", "at most 40"),
    ("spec", MISSING, "spec", "missing: a mapping with the fields mode, baseModel"),
    ("spec", [], "spec", "a list of 0 items is not allowed: a mapping"),
    ("spec.baseModel", MISSING, "spec.baseModel", "missing: a mapping with the fields uri, dtype"),
    ("spec.baseModel.uri", MISSING, "spec.baseModel.uri", "missing: hf://"),
    ("spec.baseModel.uri", "Qwen/Qwen2.5-Coder-7B", "spec.baseModel.uri", "hf://ORGANISATION/NAME[@REVISION]"),
    ("spec.baseModel.uri", "hf://Qwen", "spec.baseModel.uri", "hf://ORGANISATION/NAME"),
    ("spec.baseModel.uri", "builtin://micro", "spec.baseModel.uri", "builtin://nano or builtin://nano-raw"),
    ("spec.baseModel.uri", "file://relative/path", "spec.baseModel.uri", "file:///ABSOLUTE/PATH"),
    ("spec.baseModel.uri", "https://example.org/model", "spec.baseModel.uri", "s3://BUCKET/PREFIX"),
    ("spec.baseModel.uri", "builtin://nano\n", "spec.baseModel.uri", "builtin://nano or"),
    ("spec.baseModel.uri", "file:///" + "a" * 600, "spec.baseModel.uri", "at most 512 characters"),
    ("spec.baseModel.dtype", "float16", "spec.baseModel.dtype", "one of bfloat16, float32"),
    ("spec.baseModel.dtype", "fp16", "spec.baseModel.dtype", "one of bfloat16, float32"),
    ("spec.baseModel.revision", "main", "spec.baseModel.revision", "unknown field: uri, dtype are allowed"),
    ("spec.mode", "singleAgent", "spec.mode", '"singleAgent" is not allowed: one of Population, SingleAgent'),
    ("spec.mode", True, "spec.mode", "true is not allowed: one of"),
    ("spec.mode", "SingleAgent", "spec.population.teachers", "4 is not allowed: 1 where mode is SingleAgent"),
    ("spec.mode", "SingleAgent", "spec.population.students", "4 is not allowed: 1 where mode is SingleAgent"),
    ("spec.population.teachers", 0, "spec.population.teachers", "0 is not allowed: an integer from 1 to 64"),
    ("spec.population.teachers", 65, "spec.population.teachers", "from 1 to 64"),
    ("spec.population.teachers", "4", "spec.population.teachers", '"4" is not allowed: an integer'),
    ("spec.population.teachers", True, "spec.population.teachers", "true is not allowed: an integer"),
    ("spec.population.teachers", 4.5, "spec.population.teachers", "4.5 is not allowed: an integer"),
    ("spec.population.students", -1, "spec.population.students", "-1 is not allowed"),
    ("spec.population.student", 4, "spec.population.student", "did you mean students?"),
    ("spec.population.seed", -1, "spec.population.seed", "an integer from 0 to"),
    ("spec.population.seed", 2**70, "spec.population.seed", "an integer from 0 to 9007199254740991"),
    ("spec.adapter.rank", 4, "spec.adapter.rank", "4 is not allowed: one of 1, 8, 16, 32, 64, 128, 256"),
    ("spec.adapter.rank", True, "spec.adapter.rank", "true is not allowed: one of 1, 8"),
    ("spec.adapter.alpha", 0, "spec.adapter.alpha", "0 is not allowed: a number above 0 and at most 4096"),
    ("spec.adapter.targetModules", [], "spec.adapter.targetModules", "a list of 1 to 16 items"),
    ("spec.adapter.targetModules", "q_proj", "spec.adapter.targetModules", '"q_proj" is not allowed: a list'),
    ("spec.adapter.targetModules", ["q proj"], "spec.adapter.targetModules[0]", "such as q_proj"),
    ("spec.adapter.targetModules", ["q_proj", "q_proj"], "spec.adapter.targetModules", "q_proj is given twice"),
    ("spec.tasks.types", ["code_x"], "spec.tasks.types[0]", "one of code_i, code_o, code_f"),
    ("spec.tasks.types", ["code_i", "code_i"], "spec.tasks.types", "code_i is given twice"),
    ("spec.tasks.types", {"code_i": True}, "spec.tasks.types", "a mapping is not allowed: a list of 1 to 3 items"),
    ("spec.tasks.problemsPerMatchup", 70, "spec.tasks.problemsPerMatchup", "70 is not allowed: a multiple of"),
    ("spec.tasks.problemsPerMatchup", 36, "spec.tasks.problemsPerMatchup", "training.proposalsPerPrompt"),
    ("spec.tasks.noveltyPenalty", -0.5, "spec.tasks.noveltyPenalty", "a number from 0 to 2"),
    ("spec.tasks.seedProblems", -1, "spec.tasks.seedProblems", "an integer from 0 to 1000000"),
    ("spec.tasks.seedProblems", 16384, "spec.tasks.seedProblems", "16384 is not allowed: below tasks.bufferSize"),
    ("spec.training.weightDecay", 1.5, "spec.training.weightDecay", "a number from 0 to 1"),
    ("spec.training.steps", 0, "spec.training.steps", "an integer from 1 to 1000000"),
    ("spec.training.stpes", 5, "spec.training.stpes", "did you mean steps?"),
    ("spec.training.learning_rate", 0.1, "spec.training.learning_rate", "did you mean learningRate?"),
    ("spec.training.learningRate", 0, "spec.training.learningRate", "a number above 0 and at most 1"),
    ("spec.training.learningRate", "1e-3", "spec.training.learningRate", '"1e-3" is not allowed: a number'),
    ("spec.training.temperature", 3, "spec.training.temperature", "a number above 0 and at most 2"),
    ("spec.training.rolloutsPerProblem", 1, "spec.training.rolloutsPerProblem", "from 2 to 256"),
    ("spec.training.advantage", "GRPO", "spec.training.advantage", "ReinforcePlusPlusBaseline"),
    ("spec.training.whitening", "Population", "spec.training.whitening", "one of Member, Role, TaskAndRole"),
    ("spec.training.clipRatio", 1, "spec.training.clipRatio", "a number above 0 and below 1"),
    ("spec.training.importanceSamplingCap", 0.5, "spec.training.importanceSamplingCap", "from 1 to 100"),
    ("spec.training.freezeTeachers", "yes", "spec.training.freezeTeachers", "true or false"),
    ("spec.training.freezeTeachers", 1, "spec.training.freezeTeachers", "1 is not allowed: true or false"),
    (
        "spec.training.tokensPerMicroBatch",
        4096,
        "spec.training.tokensPerMicroBatch",
        "at least training.maxPromptTokens",
    ),
    ("spec.training.checkpointEverySteps", 0, "spec.training.checkpointEverySteps", "from 1 to"),
    ("spec.matchmaking.strategy", "pfsp", "spec.matchmaking.strategy", "one of PFSP, Uniform"),
    ("spec.matchmaking.gamesPer", "Step", "spec.matchmaking.gamesPer", "one of Matchup, TaskType, Problem"),
    ("spec.evolution.replaceFraction", 1, "spec.evolution.replaceFraction", "a number of at least 0 and below 1"),
    ("spec.evolution.operators", [], "spec.evolution.operators", "a list of 1 to 17 items"),
    ("spec.evolution.operators", [{"id": "M7"}], "spec.evolution.operators[0].id", '"M7" is not allowed: one of M1'),
    ("spec.evolution.operators", [{"weight": 1}], "spec.evolution.operators[0].id", "missing: one of M1"),
    ("spec.evolution.operators", ["M1"], "spec.evolution.operators[0]", "a mapping with the fields id, weight"),
    ("spec.evolution.operators", [{"id": "M1", "weight": -1}], "spec.evolution.operators[0].weight", "from 0 to 1000"),
    ("spec.evolution.operators", [{"id": "M1", "weight": 0}], "spec.evolution.operators", "a weight above 0"),
    ("spec.evolution.operators", [{"id": "M1"}, {"id": "M1"}], "spec.evolution.operators", "M1 is given twice"),
    ("spec.rewards.preset", "AZR", "spec.rewards.preset", "one of PopuLoRA, AbsoluteZero"),
    ("spec.trainer.nodes", 0, "spec.trainer.nodes", "from 1 to 64"),
    (
        "spec.trainer.resources",
        {"limits": {"cpu": "two"}},
        "spec.trainer.resources.limits.cpu",
        "such as 2, 500m or 8Gi",
    ),
    (
        "spec.trainer.resources",
        {"requests": {"cpu": -1}},
        "spec.trainer.resources.requests.cpu",
        "such as 2, 500m or 8Gi",
    ),
    ("spec.trainer.resources", {"requests": {"cpu": 0.5}}, "spec.trainer.resources.requests.cpu", "a quantity such as"),
    ("spec.trainer.resources", {"limit": {}}, "spec.trainer.resources.limit", "did you mean limits?"),
    (
        "spec.trainer.podTemplate",
        {"containers": []},
        "spec.trainer.podTemplate.containers",
        "metadata, spec are allowed",
    ),
    ("spec.trainer.podTemplate", {"spec": "x"}, "spec.trainer.podTemplate.spec", '"x" is not allowed: a mapping'),
    ("spec.trainer.nodeSelector", {"a.b/c": 1}, "spec.trainer.nodeSelector[a.b/c]", "text of at most 63 characters"),
    ("spec.trainer.tolerations", [{"operator": "In"}], "spec.trainer.tolerations[0].operator", "one of Equal, Exists"),
    ("spec.trainer.image", "My Image", "spec.trainer.image", "an image reference"),
    ("spec.inference.engine", "vllm", "spec.inference.engine", "one of VLLM, Transformers"),
    ("spec.inference.replicas", 0, "spec.inference.replicas", "from 1 to 256"),
    ("spec.sandbox.timeoutSeconds", 0, "spec.sandbox.timeoutSeconds", "a number above 0 and at most 300"),
    ("spec.sandbox.memoryMib", 64, "spec.sandbox.memoryMib", "did you mean memoryMiB?"),
    ("spec.sandbox.runtimeClassName", "gVisor", "spec.sandbox.runtimeClassName", "lower-case letters"),
    ("spec.storage", MISSING, "spec.storage", "missing: a mapping with the fields uri"),
    ("spec.storage.uri", "gs://bucket/run", "spec.storage.uri", "s3://BUCKET/PREFIX or file:///ABSOLUTE/PATH"),
    ("spec.storage.uri", "/data/run", "spec.storage.uri", "file:///ABSOLUTE/PATH"),
    ("spec.storage.region", "eu-west-1", "spec.storage.region", "no value unless storage.uri begins with s3://"),
    ("spec.storage.endpoint", "http://minio:9000", "spec.storage.endpoint", "no value unless storage.uri begins"),
    ("spec.storage.credentialsSecretRef", {"name": "s3"}, "spec.storage.credentialsSecretRef", "no value unless"),
    ("spec.storage.credentialsSecretRef", "s3", "spec.storage.credentialsSecretRef", "a mapping with the fields name"),
    ("spec.evaluation.suites", ["humaneval"], "spec.evaluation.suites[0]", "one of humaneval_plus, mbpp_plus"),
    ("spec.evaluation.members", "Top", "spec.evaluation.members", "one of All, Best"),
    ("spec.evaluation.heldOut.samples", 0, "spec.evaluation.heldOut.samples", "from 1 to 256"),
    ("spec.scheduling.queueName", "my queue", "spec.scheduling.queueName", "lower-case letters"),
    ("spec.suspend", "true", "spec.suspend", '"true" is not allowed: true or false'),
    ("spec.activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds", "from 1 to"),
    ("spec.ttlSecondsAfterFinished", "1h", "spec.ttlSecondsAfterFinished", '"1h" is not allowed: an integer'),
    ("spec.retries", 1.5, "spec.retries", "1.5 is not allowed: an integer from 0 to 1000"),
    ("spec.deletionPolicy", "Orphan", "spec.deletionPolicy", "one of Retain, Delete"),
    ("spec.monitoring", True, "spec.monitoring", "true is not allowed: a mapping with the fields podMonitor"),
    ("spec.model", "nano", "spec.model", "unknown field: did you mean mode?"),
    ("status.phase", "Done", "status.phase", "one of Pending, Provisioning"),
]


def edited(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one field set, or taken away for MISSING."""
    changed = copy.deepcopy(manifest)
    parent = changed
    *parents, last = path.split(".")
    for part in parents:
        parent = parent.setdefault(part, {})
    if value is MISSING:
        del parent[last]
    else:
        parent[last] = value
    return changed
