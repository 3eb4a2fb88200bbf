"""Every architecture is computed as PEFT computes it or refused in a sentence, and docs/reference says which."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from survey import save, survey
from table import HEAD, PAGE, row
from zoo import ARCHITECTURES

REFUSED = {
    ("Qwen3-MoE", "gate_proj"): "PEFT does not load an adapter of down_proj, gate_proj, up_proj on Qwen3MoeForCausalLM",
    ("Qwen3-Next", "gate_proj"): "PEFT does not load an adapter of down_proj, gate_proj, up_proj on Qwen3Next",
    ("GLM-4-MoE", "gate_proj"): "PEFT does not load an adapter of down_proj, gate_proj, up_proj on Glm4MoeForCausalLM",
    ("DeepSeek-V2", "gate_proj"): "PEFT does not load an adapter of down_proj, gate_proj, up_proj on DeepseekV2",
    ("DeepSeek-V3", "gate_proj"): "PEFT does not load an adapter of ",
    ("MiniMax", ""): "MiniMaxForCausalLM can't be sampled from with a cache in this process (ValueError: MiniMax uses",
    ("Mamba", "out_proj"): "PEFT does not load an adapter of out_proj on MambaForCausalLM",
    ("Mamba 2", "out_proj"): "PEFT does not load an adapter of out_proj on Mamba2ForCausalLM",
    ("RecurrentGemma", ""): "RecurrentGemmaForCausalLM keeps a state of its rows in model.layers.0",
    ("RWKV", ""): "RwkvForCausalLM takes no cache of keys and values or states",
}


def refusal(name: str, targets: tuple[str, ...]) -> str | None:
    """Return how the sentence must begin, after the field; None where the architecture is taken."""
    found = [text for (one, target), text in REFUSED.items() if one == name and (not target or target in targets)]
    return found[0] if found else None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_exact_or_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    save(architecture, tmp_path / "model")
    page = PAGE.read_text()
    for number, targets in enumerate(architecture.targets):
        finding = survey(tmp_path / "model", targets, tmp_path / str(number))
        expected = refusal(name, targets)
        if expected is None:
            assert finding.exact, (targets, finding)
        else:
            assert finding.refusal is not None, (targets, finding)
            assert expected in finding.refusal
            assert "\n" not in finding.refusal
        assert row(name, architecture, targets, finding) in page, "run `make docs`"


def test_the_page_has_no_row_of_its_own() -> None:
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    rows = text.removeprefix(HEAD).splitlines()
    assert len(rows) == sum(len(architecture.targets) for architecture in ARCHITECTURES.values())
