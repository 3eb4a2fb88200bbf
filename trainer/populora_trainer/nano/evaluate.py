"""Scores of the embedded base: solve rates on held-out problems, validity of its proposals, one-digit arithmetic.

Every answer is judged by the sandboxed verifier. `python -m populora_trainer.nano.evaluate FOLDER` prints the scores
that the model card carries.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from populora_trainer.nano.corpus import EASY_SIZES, IDENTITY, CorpusGenerator
from populora_trainer.nano.heldout import heldout_hashes, load_heldout
from populora_trainer.randomness import choices, tensor_generator
from populora_trainer.sandbox import Case, Judgement, SandboxPool, Verifier
from populora_trainer.tasks.cases import answer_case, proposal_case
from populora_trainer.tasks.compact import CompactTemplate
from populora_trainer.tasks.held_out import normalised_hash
from populora_trainer.tasks.problem import TASK_TYPES, Problem, TaskType
from populora_trainer.tasks.templates import Prompt

TEMPLATE = CompactTemplate()
BATCH = 128
PROPOSAL_TOKENS = 160
ANSWER_TOKENS: dict[TaskType, int] = {"code_o": 32, "code_i": 32, "code_f": 96}
LINE_BINS = ((2, 2), (3, 3), (4, 4), (5, 6), (7, 9), (10, 14))


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    max_tokens: int,
    generator: torch.Generator | None = None,
) -> list[str | None]:
    """Complete compact prompts, greedily or, with a generator, at temperature 1; None where no `<eos>` came in time."""
    encoded = [TEMPLATE.encode(tokenizer, prompt) for prompt in prompts]
    answers: list[str | None] = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        tokens = _decode_batch(model, tokenizer, [encoded[row] for row in rows], max_tokens, generator)
        for row, written in zip(rows, tokens, strict=True):
            answers[row] = TEMPLATE.decode(tokenizer, written) if tokenizer.eos_token_id in written else None
    return answers


def _decode_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Token ids written after left-padded prompts, until every row has ended."""
    width = max(map(len, prompts))
    step = torch.tensor([[tokenizer.pad_token_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    cache, written = DynamicCache(config=model.config), []
    unfinished = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(max_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
        output = model(
            input_ids=step, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        )
        logits = output.logits[:, -1].float()
        if generator is None:
            chosen = logits.argmax(-1)
        else:
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        written.append(chosen)
        unfinished &= chosen != tokenizer.eos_token_id
        if not unfinished.any():
            break
        step = chosen[:, None]
        mask = torch.cat((mask, torch.ones(len(prompts), 1, dtype=mask.dtype)), 1)
    return torch.stack(written, 1).tolist()


def solve_rates(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    verifier: Verifier,
    problems: Sequence[Problem],
    samples: int,
    seed: int = 0,
) -> list[float]:
    """Share of correct answers per problem: greedy with `samples` 0, else of that many at temperature 1."""
    generator = tensor_generator(seed, "held-out answers") if samples else None
    repeats = max(samples, 1)
    rows: list[int] = []
    cases: list[Case] = []
    for task in TASK_TYPES:
        asked = [index for index, problem in enumerate(problems) if problem.task == task for _ in range(repeats)]
        prompts = [TEMPLATE.solve(problems[index]) for index in asked]
        for index, text in zip(asked, complete(model, tokenizer, prompts, ANSWER_TOKENS[task], generator), strict=True):
            problem = problems[index]
            answer = None if text is None else TEMPLATE.parse_solution(problem, text)
            if answer is not None:
                rows.append(index)
                cases.append(answer_case(problem, answer))
    rates = [0.0] * len(problems)
    for index, judgement in zip(rows, _judge(verifier, cases), strict=True):
        rates[index] += (judgement.kind == "correct") / repeats
    return rates


def _judge(verifier: Verifier, cases: Sequence[Case]) -> list[Judgement]:
    return asyncio.run(_judged(verifier, cases)) if cases else []


async def _judged(verifier: Verifier, cases: Sequence[Case]) -> list[Judgement]:
    return await verifier.judge(cases)


def arithmetic_problems() -> list[Problem]:
    """`return x + c`, then `return x - c`, for every pair of one-digit numbers, as code_o."""
    problems = []
    for sign in "+-":
        for constant in range(10):
            program = f"def f(x):\n    return x {sign} {constant}"
            for x in range(10):
                output = str(x + constant if sign == "+" else x - constant)
                problems.append(Problem("code_o", program, (str(x),), (output,)))
    return problems


def propose(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: TaskType, count: int, seed: int = 0
) -> list[Problem | None]:
    """Sample proposals at temperature 1, each from its own reference, every tenth from the identity program."""
    corpus = CorpusGenerator(choices(seed, "references", task), heldout_hashes())
    programs = [IDENTITY if index % 10 == 0 else corpus.program(EASY_SIZES, 4).source for index in range(count)]
    references = [Problem(task, program, ("0",)) for program in programs]
    prompts = [TEMPLATE.propose(task, [reference]) for reference in references]
    texts = complete(model, tokenizer, prompts, PROPOSAL_TOKENS, tensor_generator(seed, "proposals", task))
    return [
        None if text is None else TEMPLATE.parse_proposal(task, text, [reference])
        for text, reference in zip(texts, references, strict=True)
    ]


def proposal_scores(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, verifier: Verifier, count: int, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Per type: validity, distinct programs among the valid, lines, and how often the base solves them at T=1."""
    scores: dict[str, dict[str, float]] = {}
    for task in TASK_TYPES:
        parsed = [problem for problem in propose(model, tokenizer, task, count, seed) if problem is not None]
        judged = _judge(verifier, [proposal_case(problem) for problem in parsed])
        valid = [
            Problem(task, problem.program, judgement.inputs, judgement.outputs, problem.message)
            for problem, judgement in zip(parsed, judged, strict=True)
            if judgement.kind == "valid"
        ]
        distinct = {normalised_hash(one.program) if task != "code_f" else (one.program, one.inputs) for one in valid}
        scores[task] = {
            "valid": round(len(valid) / count, 3),
            "distinct": round(len(distinct) / max(len(valid), 1), 3),
            "lines": _mean([_lines(problem) for problem in valid]),
            "solve_rate": _mean(solve_rates(model, tokenizer, verifier, valid, 2, seed)),
        }
    return scores


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, programs: int = 400, samples: int = 4, seed: int = 0
) -> dict[str, Any]:
    """All scores of the model card as one JSON-like object.

    Args:
        programs: how many held-out programs, three problems each, and how many proposals of each type.
        samples: answers per problem at temperature 1.
    """
    problems = load_heldout()[: 3 * programs]
    table: dict[str, Any] = {"programs": len(problems) // 3, "samples": samples}
    with SandboxPool(timeout_seconds=2.0) as verifier:
        for name, count in (("greedy", 0), ("sampled", samples)):
            rates = solve_rates(model, tokenizer, verifier, problems, count, seed)
            table[name] = _by_task(problems, rates, lambda _: True)
            for low, high in LINE_BINS:
                table[f"{name}, {low} to {high} lines"] = _by_task(
                    problems,
                    rates,
                    lambda problem, low=low, high=high: low <= _lines(problem) <= high,  # type: ignore[misc]
                )
        rates = solve_rates(model, tokenizer, verifier, arithmetic_problems(), 0, seed)
        table["arithmetic"] = {"add": _mean(rates[:100]), "subtract": _mean(rates[100:])}
        table["proposals"] = proposal_scores(model, tokenizer, verifier, programs, seed)
    return table


def _by_task(
    problems: Sequence[Problem], rates: Sequence[float], keep: Callable[[Problem], bool]
) -> dict[TaskType, float]:
    kept = [(problem.task, rate) for problem, rate in zip(problems, rates, strict=True) if keep(problem)]
    return {task: _mean([rate for one, rate in kept if one == task]) for task in TASK_TYPES}


def _lines(problem: Problem) -> int:
    return problem.program.count("\n") + 1


def _mean(values: Sequence[float]) -> float:
    return round(statistics.fmean(values), 3) if values else 0.0


def main() -> None:
    """Print the scores of a model folder as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--samples", type=int, default=4, help="answers per problem at temperature 1")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    print(json.dumps(score(model, tokenizer, options.programs, options.samples, options.seed), indent=1))


if __name__ == "__main__":
    main()
