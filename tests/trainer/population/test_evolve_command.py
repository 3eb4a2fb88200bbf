"""`populora evolve` and `populora operators`, as a user calls them."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from populora_trainer.commands.evolve import command as evolve
from populora_trainer.commands.operators import command as operators
from populora_trainer.errors import PopuloraError
from populora_trainer.population.factors import Factors, Pair, delta
from populora_trainer.population.peft_format import AdapterConfig, digest, read_adapter, read_files, write_adapter

CONFIG = AdapterConfig(2, 4, ("q_proj",), "some/base")


def adapter(seed: int, rank: int = 2) -> Factors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model.layers.{layer}.q_proj": Pair(
            torch.randn(rank, 6, generator=generator), torch.randn(5, rank, generator=generator)
        )
        for layer in range(3)
    }


@pytest.fixture
def parents(tmp_path: Path) -> tuple[str, str]:
    for seed in (1, 2):
        write_adapter(tmp_path / f"p{seed}", adapter(seed), CONFIG)
    return str(tmp_path / "p1"), str(tmp_path / "p2")


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(evolve, [str(word) for word in words])


def message(result: Result) -> str:
    assert result.exit_code == 1
    assert isinstance(result.exception, PopuloraError)
    return str(result.exception)


def test_a_child_is_a_peft_folder_with_a_record_of_how_it_was_made(tmp_path: Path, parents: tuple[str, str]) -> None:
    result = call("X5", *parents, "-o", tmp_path / "child", "--seed", "7", "--set", "weight=0.25")
    assert result.exit_code == 0, result.output
    child, config = read_adapter(tmp_path / "child")
    assert config == CONFIG
    record = json.loads((tmp_path / "child" / "child.json").read_text())
    assert record["operator"] == "X5"
    assert record["seed"] == 7
    assert record["parameters"] == {"weight": 0.25}
    assert record["parents"] == [digest(read_files(parent)) for parent in parents]
    assert record["digest"] == digest(read_files(tmp_path / "child"))
    assert record["digest"] in result.output
    assert record["report"]["parents"][0]["cosine"] > record["report"]["parents"][1]["cosine"]
    wanted = 0.75 * delta(adapter(1)["model.layers.0.q_proj"]) + 0.25 * delta(adapter(2)["model.layers.0.q_proj"])
    U, s, Vt = torch.linalg.svd(wanted, full_matrices=False)
    torch.testing.assert_close(delta(child["model.layers.0.q_proj"]), (U[:, :2] * s[:2]) @ Vt[:2], rtol=0, atol=1e-4)


def test_the_same_words_give_the_same_bytes_and_another_seed_another_child(
    tmp_path: Path, parents: tuple[str, str]
) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert call("M1", parents[0], "-o", tmp_path / name, "--seed", seed).exit_code == 0
    a, b, c = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "abc")
    assert a == b
    assert a["adapter_model.safetensors"] != c["adapter_model.safetensors"]


def test_the_control_gives_the_parents_own_digest(tmp_path: Path, parents: tuple[str, str]) -> None:
    assert call("C1", parents[0], "-o", tmp_path / "child", "--seed", "0").exit_code == 0
    assert digest(read_files(tmp_path / "child")) == digest(read_files(parents[0]))


def test_what_does_not_fit_is_one_sentence_and_leaves_no_folder(tmp_path: Path, parents: tuple[str, str]) -> None:
    write_adapter(tmp_path / "rank", adapter(1, rank=3), AdapterConfig(3, 4, ("q_proj",), "some/base"))
    write_adapter(tmp_path / "alpha", adapter(1), AdapterConfig(2, 8, ("q_proj",), "some/base"))
    write_adapter(tmp_path / "base", adapter(1), AdapterConfig(2, 4, ("q_proj",), "other/base"))
    one, two = parents
    out = ("-o", tmp_path / "child", "--seed", "0")
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("M7", one), "operator M7 does not exist"),
        (("M1", one, two), "M1 takes 1 parent; 2 given"),
        (("X1", one), "X1 takes 2 parents; 1 given"),
        (("X1", one, tmp_path / "rank"), "r is 3 and"),
        (("X1", one, tmp_path / "alpha"), "lora_alpha is 8.0 and"),
        (("X1", one, tmp_path / "base"), "base_model_name_or_path is 'other/base' and"),
        (("X1", one, tmp_path / "nowhere"), "is not a folder"),
        (("M4", one, "--set", "epsilon=big"), "--set epsilon is 'big'"),
        (("M4", one, "--set", "epsilon"), "must be PARAM=VALUE"),
        (("M4", one, "--set", "epsilon=[1]"), "must be a number, true, false or null"),
        (("M4", one, "--set", "rho=1"), "M4 has no parameter rho"),
        (
            ("M4", one, "--set", "epsilon=1e43"),
            "must be a finite number, 0 or more and at most 3.4",
        ),
        (("M5", one, "--set", "alpha=1" + "0" * 400), "alpha is inf; it must be a finite number"),
        (("M5", one, "--set", "alpha=1" + "0" * 5000), "it must be a number, true, false or null"),
        (("M4", one, "--set", "epsilon=" + "[" * 100_000), "[...'; it must be a number, true, false or null"),
    ]
    for words, sentence in cases:
        assert sentence in message(call(*words, *out))
        assert not (tmp_path / "child").exists()
    assert call("C1", one, *out).exit_code == 0
    assert "exists; name a folder" in message(call("C1", one, *out))
    assert call("C1", one, "-o", tmp_path / "x").exit_code == 2
    assert call("C1", one, "-o", tmp_path / "x", "--seed", "-1").exit_code == 2


def test_operators_lists_the_seventeen_one_a_line() -> None:
    result = CliRunner().invoke(operators, [])
    lines = result.output.splitlines()
    assert len(lines) == 17
    assert lines[0].startswith("M1  1 parent ")
    assert "(epsilon=0.15)" in next(line for line in lines if line.startswith("M4"))
    assert "share=null" in next(line for line in lines if line.startswith("X3"))


def test_operators_as_json_has_parameters_and_sources() -> None:
    rows = json.loads(CliRunner().invoke(operators, ["--json"]).output)
    assert [row["id"] for row in rows][-2:] == ["C1", "C2"]
    by_id = {row["id"]: row for row in rows}
    assert by_id["M1"]["parameters"] == {"epsilon": 0.1, "rotation": 0.1, "first_order": False}
    assert by_id["X4"]["fitter"] == "second"
    assert "2306.01708" in by_id["X6"]["source"]
