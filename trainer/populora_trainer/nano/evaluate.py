"""Scores of the embedded base: solve rates on held-out problems, validity of its proposals, one-digit arithmetic.

Run `python -m populora_trainer.nano.evaluate FOLDER` for the table that the model card carries.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from populora_trainer.nano.corpus import IDENTITY, PROPOSE_SIZES, CorpusGenerator
from populora_trainer.nano.grading import harmless_function, is_correct, is_valid_proposal, run_text
from populora_trainer.nano.heldout import heldout_hashes, load_heldout
from populora_trainer.nano.programs import normalised_hash
from populora_trainer.randomness import choices, tensor_generator
from populora_trainer.tasks.compact import CompactTemplate
from populora_trainer.tasks.problem import TASK_TYPES, Problem

TEMPLATE = CompactTemplate()
BATCH = 128
LINE_BINS = ((2, 2), (3, 3), (4, 4), (5, 6), (7, 9), (10, 14))


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_tokens: int,
    generator: torch.Generator | None = None,
) -> list[str]:
    """Complete compact prompts: greedy, or at temperature 1 with a generator. Batches of similar length, left-padded."""
    encoded = [TEMPLATE.encode(tokenizer, prompt) for prompt in prompts]
    answers = [""] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(encoded[index]))
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        width = max(len(encoded[row]) for row in rows)
        ids = torch.tensor([[pad] * (width - len(encoded[row])) + encoded[row] for row in rows])
        mask = torch.tensor([[0] * (width - len(encoded[row])) + [1] * len(encoded[row]) for row in rows])
        cache, step_ids, written = None, ids, []
        open_rows = torch.ones(len(rows), dtype=torch.bool)
        for _ in range(max_tokens):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -step_ids.shape[1] :]
            output = model(
                input_ids=step_ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
            )
            cache, logits = output.past_key_values, output.logits[:, -1].float()
            if generator is None:
                chosen = logits.argmax(-1)
            else:
                chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            written.append(chosen)
            open_rows &= chosen != eos
            if not open_rows.any():
                break
            step_ids = chosen[:, None]
            mask = torch.cat((mask, torch.ones(len(rows), 1, dtype=mask.dtype)), 1)
        for row, tokens in zip(rows, torch.stack(written, 1).tolist(), strict=True):
            answers[row] = TEMPLATE.decode(tokenizer, tokens) if eos in tokens else "<unk>"
    return answers


def solve_rates(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], samples: int, seed: int
) -> list[float]:
    """Share of correct answers per problem: greedy with `samples` 0, else of that many at temperature 1."""
    generator = tensor_generator(seed, "held-out answers") if samples else None
    repeats = max(samples, 1)
    rates = [0.0] * len(problems)
    for task in TASK_TYPES:
        rows = [index for index, problem in enumerate(problems) if problem.task == task for _ in range(repeats)]
        prompts = [str(TEMPLATE.solve(problems[row])) for row in rows]
        answers = complete(model, tokenizer, prompts, 96 if task == "code_f" else 32, generator)
        for row, answer in zip(rows, answers, strict=True):
            rates[row] += is_correct(problems[row], TEMPLATE.parse_solution(problems[row], answer)) / repeats
    return rates


def arithmetic_problems() -> list[Problem]:
    """`return x + c` and `return x - c` for every pair of one-digit numbers, as code_o."""
    problems = []
    for sign in "+-":
        for constant in range(10):
            program = f"def f(x):\n    return x {sign} {constant}"
            for x in range(10):
                output = str(x + constant if sign == "+" else x - constant)
                problems.append(Problem("code_o", program, (str(x),), (output,)))
    return problems


def propose(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int
) -> tuple[list[Problem | None], list[Problem | None]]:
    """Sample `count` code_o and code_i proposals from random references, and a quarter as many code_f ones."""
    corpus = CorpusGenerator(choices(seed, "references"), heldout_hashes())
    references = [Problem("code_o", corpus.program(PROPOSE_SIZES, 4).source, ("0",)) for _ in range(count)]
    references[:: 10] = [Problem("code_o", IDENTITY, ("0",))] * len(references[:: 10])
    generator = tensor_generator(seed, "proposals")
    programs: list[Problem | None] = []
    for task in ("code_o", "code_i"):
        half = references[: count // 2] if task == "code_o" else references[count // 2 :]
        prompts = [str(TEMPLATE.propose(task, [reference])) for reference in half]  # type: ignore[arg-type]
        texts = complete(model, tokenizer, prompts, 160, generator)
        programs += [TEMPLATE.parse_proposal(task, text, [one]) for text, one in zip(texts, half, strict=True)]  # type: ignore[arg-type]
    some = references[: max(count // 4, 1)]
    texts = complete(model, tokenizer, [str(TEMPLATE.propose("code_f", [one])) for one in some], 160, generator)
    functions = [TEMPLATE.parse_proposal("code_f", text, [one]) for text, one in zip(texts, some, strict=True)]
    return programs, functions


def proposal_scores(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> dict[str, float]:
    """Validity, distinctness and length of proposals, and how often the base solves what it proposes (code_o, T=1)."""
    programs, functions = propose(model, tokenizer, count, seed)
    valid = [problem for problem in programs if problem is not None and is_valid_proposal(problem)]
    asked = []
    for problem in valid:
        function = harmless_function(problem.program)
        output = run_text(function, problem.inputs[0]) if function else None
        if output is not None:
            asked.append(Problem(problem.task, problem.program, problem.inputs, (output,)))
    rates = solve_rates(model, tokenizer, asked, 2, seed)
    by_task = {task: [rate for one, rate in zip(asked, rates, strict=True) if one.task == task] for task in ("code_o", "code_i")}
    return {
        "valid": len(valid) / len(programs),
        "valid_code_f": sum(map(is_valid_proposal, functions)) / len(functions),
        "distinct": len({normalised_hash(problem.program) for problem in valid}) / max(len(valid), 1),
        "distinct_text": len({(problem.program, problem.inputs) for problem in valid}) / max(len(valid), 1),
        "lines": sum(problem.program.count("\n") + 1 for problem in valid) / max(len(valid), 1),
        **{f"rho_{task}": sum(rates) / max(len(rates), 1) for task, rates in by_task.items()},
    }


def score(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, programs: int = 400, samples: int = 4, seed: int = 0
) -> dict[str, object]:
    """All scores of the model card as one JSON-like object."""
    problems = load_heldout()[: 3 * programs]
    greedy = solve_rates(model, tokenizer, problems, 0, seed)
    table: dict[str, object] = {"programs": len(problems) // 3}
    results = {"greedy": greedy}
    if samples:
        results["sampled"] = solve_rates(model, tokenizer, problems, samples, seed)
    for name, rates in results.items():
        table[name] = {
            task: _mean([rate for problem, rate in zip(problems, rates, strict=True) if problem.task == task])
            for task in TASK_TYPES
        }
        lines: dict[str, dict[str, float]] = defaultdict(dict)
        for low, high in LINE_BINS:
            for task in TASK_TYPES:
                lines[f"{low}-{high}"][task] = _mean(
                    [
                        rate
                        for problem, rate in zip(problems, rates, strict=True)
                        if problem.task == task and low <= problem.program.count("\n") + 1 <= high
                    ]
                )
        table[f"{name}_by_lines"] = dict(lines)
    arithmetic = arithmetic_problems()
    rates = solve_rates(model, tokenizer, arithmetic, 0, seed)
    table["arithmetic"] = {"add": _mean(rates[:100]), "subtract": _mean(rates[100:])}
    table["proposals"] = {key: round(value, 3) for key, value in proposal_scores(model, tokenizer, programs, seed).items()}
    return table


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 3) if values else float("nan")


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
