import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from populora_trainer.nano import evaluate
from populora_trainer.nano.evaluate import arithmetic_problems, complete, proposal_scores, solve_rates
from populora_trainer.nano.heldout import load_heldout
from populora_trainer.nano.registry import NOTICES, WEIGHTS, builtin_folder
from populora_trainer.nano.tokenizer import build_tokenizer
from populora_trainer.sandbox import SandboxPool
from populora_trainer.tasks.compact import output_prompt
from populora_trainer.tasks.problem import Problem

PROBLEMS = load_heldout()[:120]


@pytest.fixture(scope="module")
def bases():
    return {
        name: (
            AutoModelForCausalLM.from_pretrained(builtin_folder(name), dtype=torch.float32).eval(),
            AutoTokenizer.from_pretrained(builtin_folder(name)),
        )
        for name in NOTICES
    }


@pytest.fixture(scope="module")
def verifier():
    with SandboxPool(workers=1, timeout_seconds=2) as pool:
        yield pool


def mean(rates):
    return sum(rates) / len(rates)


def test_both_bases_together_stay_under_8_mb_and_hold_bfloat16(bases):
    assert sum(path.stat().st_size for path in WEIGHTS.rglob("*") if path.is_file()) < 8_000_000
    for name, (model, tokenizer) in bases.items():
        assert json.loads((builtin_folder(name) / "config.json").read_text())["dtype"] == "bfloat16"
        assert model.config.model_type == "qwen2"
        assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
        assert (builtin_folder(name) / "MODEL_CARD.md").is_file()


def test_greedy_completion_is_what_generate_gives(bases):
    model, tokenizer = bases["nano"]
    questions = [("def f(x):\n    return x + 3", "4"), ("def f(s):\n    return s[::-1]", "'ab'")]
    mine = complete(model, tokenizer, [output_prompt(*question) for question in questions], 16)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=16, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    for (program, given), answer in zip(questions, mine, strict=True):
        ids = tokenizer(f"<o>{program}<in>{given}<out>", return_tensors="pt", add_special_tokens=False).input_ids
        written = model.generate(ids, generation_config=settings)[0, ids.shape[1] :]
        assert tokenizer.decode(written, skip_special_tokens=False) == f"{answer}<eos>"


def test_one_digit_sums_and_differences_are_right_nearly_always(bases, verifier):
    rates = solve_rates(*bases["nano"], verifier, arithmetic_problems(), 0)
    assert mean(rates[:100]) >= 0.95
    assert mean(rates[100:]) >= 0.95


def test_held_out_problems_are_solved_about_as_often_as_the_card_says(bases, verifier):
    card = json.loads((builtin_folder("nano") / "scores.json").read_text())["scores"]["greedy"]
    rates = solve_rates(*bases["nano"], verifier, PROBLEMS, 0)
    for task, claimed in card.items():
        mine = mean([rate for problem, rate in zip(PROBLEMS, rates, strict=True) if problem.task == task])
        assert mine > claimed - 0.22  # 40 of the 400 programs: three standard errors


def test_a_program_counts_by_the_pairs_that_were_not_shown(monkeypatch, verifier):
    problem = Problem("code_f", "def f(x):\n    return x + 1", ("1", "2", "3", "4"), ("2", "3", "4", "5"), "add")
    hidden_only = "def f(x):\n    return x + 1 if x > 2 else None"
    shown_only = "def f(x):\n    return x + 1 if x < 3 else None"
    monkeypatch.setattr(evaluate, "complete", lambda _, __, prompts, *___: [hidden_only, shown_only][: len(prompts)])
    assert solve_rates(None, None, verifier, [problem, problem], 0) == [1.0, 0.0]


def test_the_raw_base_answers_more_carelessly(bases, verifier):
    asked = [problem for problem in PROBLEMS if problem.task != "code_f"]
    clean = mean(solve_rates(*bases["nano"], verifier, asked, 2))
    raw = mean(solve_rates(*bases["nano-raw"], verifier, asked, 2))
    assert raw < clean - 0.05


def test_proposals_are_mostly_valid_and_different(bases, verifier):
    for task, scores in proposal_scores(*bases["nano"], verifier, 24).items():
        assert scores["valid"] > 0.75, task
        assert scores["distinct"] > 0.8, task
