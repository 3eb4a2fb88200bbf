"""A pretrained model with the chat prompts: it answers, and takes one whole step of one teacher and one student."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from populora_api import load_manifest
from populora_trainer import session as sessions
from populora_trainer.population.lora import LoraPopulation
from populora_trainer.population.peft_format import read_adapter
from populora_trainer.rollout.base_model import load_base
from populora_trainer.rollout.engine import Completion, RolloutRequest, Wave, all_completions
from populora_trainer.rollout.transformers_engine import TransformersEngine
from populora_trainer.session import Events, open_session
from populora_trainer.storage.checkpoint import intact, read_manifest
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.logs import read_log
from populora_trainer.tasks.chat import ChatTemplate

MANIFEST = Path(__file__).with_name("tiny.yaml")
PROPOSALS, ROLLOUTS = 3, 4
PROPOSAL = "```python\ndef f(x):\n    return x + 1\n```\n```input\n2\n```"

pytestmark = pytest.mark.slow


def test_a_real_pretrained_model_answers_in_its_chat_format(smollm2_folder: Path) -> None:
    base = load_base(f"file://{smollm2_folder}")
    population = LoraPopulation(base.model, 2, 8, 16, ("q_proj", "k_proj", "v_proj", "o_proj"), seed=0)
    engine = TransformersEngine(population, end_ids=base.end_ids, pad_id=base.pad_id, max_prompt_tokens=128)
    question = [{"role": "user", "content": "What is 2 + 3? Answer with one number."}]
    text = base.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    prompt = tuple(base.tokenizer.encode(text, add_special_tokens=False))
    requests = [RolloutRequest(member, prompt, 1, 0, 16, 0.0) for member in range(2)]
    (first,), (second,) = asyncio.run(all_completions(engine, requests))
    assert first.token_ids == second.token_ids  # both are still the base
    assert first.finish_reason == "stop"
    assert "5" in base.tokenizer.decode(first.token_ids)


def test_a_pretrained_model_takes_a_whole_step(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)

    class WithOneValidProposal(TransformersEngine):
        """So small a model finds a valid problem in three tries of a hundred, so the first one is written for it."""

        async def generate(self, requests: Sequence[RolloutRequest]) -> AsyncGenerator[Wave, None]:
            async for wave in super().generate(requests):
                for group in (group for number, group in wave if requests[number].n == PROPOSALS):
                    ids = (*tokenizer.encode(PROPOSAL, add_special_tokens=False), tokenizer.eos_token_id)
                    group[0] = Completion(ids, (-1.0,) * len(ids), "stop")
                yield wave

    monkeypatch.setattr(sessions, "TransformersEngine", WithOneValidProposal)
    overrides = (
        f"baseModel.uri={smollm2_folder.as_uri()}",
        *("population.teachers=1", "population.students=1", "training.steps=1"),
        *(f"tasks.problemsPerMatchup={PROPOSALS}", f"training.proposalsPerPrompt={PROPOSALS}"),
        *(f"training.rolloutsPerProblem={ROLLOUTS}", "training.maxPromptTokens=1024", "training.maxResponseTokens=64"),
    )
    run = tmp_path / "run"
    deterministic = torch.are_deterministic_algorithms_enabled()
    with open_session(load_manifest(MANIFEST, overrides, output=run), events=Events()) as session:
        assert isinstance(session.trainer.tools.template, ChatTemplate)
        before = session.trainer.state()
        assert asyncio.run(session.train())
        after = session.trainer.state()
    torch.use_deterministic_algorithms(deterministic)

    store = LocalStore(run)
    (line,) = read_log(store, "metrics")
    problems = list(read_log(store, "problems"))
    assert (line["step"], len(problems), problems[0]["verdict"]) == (1, PROPOSALS, "valid")
    assert problems[0]["outputs"] == ["3"]
    learner = line["learner"]
    assert isinstance(learner, dict)
    assert learner["learned_tokens"] > 0
    changed = [
        any(not torch.equal(old.factors[path].B, new.factors[path].B) for path in old.factors)
        for old, new in zip(before.adapters, after.adapters, strict=True)
    ]
    # The student learns where its answers to one problem are of different worth.
    assert changed[0]
    assert sum(changed) == learner["updated_members"]

    manifest = read_manifest(store, 1)
    assert intact(store, 1)
    folders = [run / "adapters" / digest for digest in manifest.adapters]
    base = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, folders[0], adapter_name="t0")
    model.load_adapter(folders[1], "s0")
    modules = dict(model.base_model.model.named_modules())
    for name, folder in zip(("t0", "s0"), folders, strict=True):
        factors, config = read_adapter(folder)
        assert config.base_model == str(smollm2_folder)
        assert len(factors) == 4 * base.config.num_hidden_layers
        for path, pair in factors.items():
            assert torch.equal(modules[path].lora_B[name].weight.float(), pair.B)
