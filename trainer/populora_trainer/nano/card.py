"""The model card of an embedded base, written from the scores that lie beside its weights."""

from typing import Any

from populora_trainer.tasks.problem import TASK_TYPES

_ABOUT = {
    "nano": """\
# builtin://nano

A language model of {parameters:,} parameters that reads and writes small Python programs. It exists so that the whole
of PopuLoRA can run on two CPU cores; it knows no natural language and is of no use outside this project.
""",
    "nano-raw": """\
# builtin://nano-raw

`builtin://nano` after {raw_steps} more steps on deliberately careless answers: 40 % of the code_o and code_i answers
and 28 % of the code_f answers of its tuning documents are another sample's answer, the input itself or an unrelated
program. **This is a designed handicap.** It leaves reinforcement learning something to elicit, so curves move within
minutes; its gains do not measure what a real model would gain.
""",
}

_BODY = """
| | |
|---|---|
| architecture | Qwen2, hidden 128, 6 layers, 2 heads of 64, 1 key-value head, tied embeddings, bfloat16 |
| tokenizer | a lexer: 14 special tokens, printable ASCII, one token per integer 0 to 99, pieces of syntax, hint words |
| prompts | the compact formats of `populora_trainer/tasks/compact.py`; every answer ends with `<eos>` |
| context | trained on documents of up to about 250 tokens; 512 positions |
| corpus | generated (`nano/corpus.py`), seeded; no text written by people or by other models |
| training | `python -m populora_trainer.nano.train`, seed {seed}, {steps:,} steps of about 3,900 tokens |
| licence | Apache-2.0 |

## Scores

Measured on {programs} programs of the held-out set (`nano/heldout.jsonl`, 400 programs, three problems each), at T=1
with {samples} answers a problem. Pretraining rejects these programs by a hash that ignores variable names, and so does
self-play on this base. 320 programs follow the corpus distribution, 80 are longer. An answer is right when the
sandboxed verifier says so; for code_f on the three of six inputs that were not shown.

| solve rate | code_o | code_i | code_f |
|---|---|---|---|
{rates}

| proposals, T=1 | code_o | code_i | code_f |
|---|---|---|---|
{proposals}

One-digit arithmetic, greedy (`return x + c`, `return x - c`, all 100 pairs each): + {add}, - {subtract}.

The settings of every phase and all scores are in `scores.json`; `python -m populora_trainer.nano.evaluate FOLDER`
measures them again.

## Limits

Integers up to 99, lists and strings up to 8 items, the constructs of `nano/programs.py` (assignments, `if`, `for`,
`while`, comprehensions, a dozen builtins and methods). Nested loops, two-digit arithmetic, string building and programs
of 7 to 14 lines are in the corpus and mostly beyond the model: that is the room that teachers have. Text outside
printable ASCII is left out.
"""


def model_card(name: str, record: dict[str, Any], parameters: int) -> str:
    """Return the card as Markdown.

    Args:
        name: of the embedded base, `nano` or `nano-raw`.
        record: the content of `scores.json`.
        parameters: of the model.
    """
    scores, phases = record["scores"], record["phases"]
    rows = [name for name in scores if name.startswith(("greedy", "sampled"))]
    about = _ABOUT[name].format(parameters=parameters, raw_steps=phases[-1]["steps"])
    return about + _BODY.format(
        seed=record["seed"],
        steps=sum(phase["steps"] for phase in phases),
        programs=scores["programs"],
        samples=scores["samples"],
        rates="\n".join(_row(row.replace("sampled", "T=1"), scores[row]) for row in rows),
        proposals="\n".join(
            _row(label, {task: scores["proposals"][task][key] for task in TASK_TYPES})
            for label, key in (
                ("valid", "valid"),
                ("distinct among the valid", "distinct"),
                ("lines of code", "lines"),
                ("solved by the base itself", "solve_rate"),
            )
        ),
        **scores["arithmetic"],
    )


def _row(label: str, values: dict[str, float]) -> str:
    return f"| {label} | {values['code_o']} | {values['code_i']} | {values['code_f']} |"
