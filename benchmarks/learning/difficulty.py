"""How hard proposals are in absolute terms: the solve rate of the frozen base on them."""

import json
import statistics
from pathlib import Path

from populora_api import load_manifest
from populora_trainer.evaluation.held_out import Sampling, solve_held_out
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.randomness import choices
from populora_trainer.rollout.base_model import load_base
from populora_trainer.rollout.transformers_engine import TransformersEngine
from populora_trainer.sandbox import SandboxPool
from populora_trainer.selfplay import Tools
from populora_trainer.tasks.problem import Problem
from populora_trainer.tasks.templates import template_for

PROBLEMS, TRIES = 240, 4


async def reference_solve_rates(run: Path) -> tuple[float, float]:
    """Return the frozen base's mean solve rate on the problems of a run's first and last tenth of steps.

    code_o and code_i only, whose programs are the teacher's own; 240 of them, 4 tries each at temperature 1.
    """
    records = [json.loads(line) for line in (run / "problems.jsonl").read_text().splitlines()]
    records = [record for record in records if record["valid"] and record["task"] != "code_f"]
    last = max(record["step"] for record in records)
    tenth = max(1, last // 10)
    parts = (
        [record for record in records if record["step"] <= tenth],
        [record for record in records if record["step"] > last - tenth],
    )
    spec = load_manifest(run / "run.yaml").spec
    base = load_base(spec.base_model.uri, spec.base_model.dtype)
    population = LoraPopulation(base.model, 1, 1, 1, ("q_proj",), seed=0)  # B = 0: the base itself
    with SandboxPool(timeout_seconds=spec.sandbox.timeout_seconds) as verifier:
        engine = TransformersEngine(
            population, end_ids=base.end_ids, pad_id=base.pad_id, max_prompt_tokens=spec.training.max_prompt_tokens
        )
        tools = Tools(engine, verifier, template_for(base.tokenizer, base.uri), base.tokenizer)
        sampling = Sampling(TRIES, 1.0, spec.training.max_response_tokens, seed=0)
        rates = []
        for part in parts:
            chosen = choices(0, "difficulty").sample(part, min(PROBLEMS, len(part)))
            problems = [
                Problem(record["task"], record["program"], tuple(record["inputs"]), tuple(record["outputs"]))
                for record in chosen
            ]
            result = (await solve_held_out(problems, [0], sampling, tools))[0]
            rates.append(statistics.fmean(result.sampled_P))
    return rates[0], rates[1]
