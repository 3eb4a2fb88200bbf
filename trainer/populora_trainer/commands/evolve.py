"""`populora evolve`."""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from populora_trainer.errors import AdapterFormatError, OperatorError

if TYPE_CHECKING:
    from populora_trainer.population.peft_format import AdapterConfig

CHILD_FILE = "child.json"


@click.command("evolve")
@click.argument("operator_id", metavar="ID")
@click.argument("folders", metavar="PARENT [PARENT]", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="New folder for the child.")
@click.option("--seed", required=True, type=click.IntRange(min=0), help="Of every draw the operator makes.")
@click.option("--set", "settings", metavar="PARAM=VALUE", multiple=True, help="Value in place of a default.")
def command(operator_id: str, folders: tuple[Path, ...], output: Path, seed: int, settings: tuple[str, ...]) -> None:
    """Breed a child adapter from one or two parents.

    ID is one of `populora operators`; each PARENT is a PEFT folder, and so is the child, with a child.json beside it
    that says how it was made and how it resembles its parents. The same ID, parents, seed and values give the same
    bytes.
    """
    from populora_trainer.population.child_report import report
    from populora_trainer.population.operators import breed, find
    from populora_trainer.population.peft_format import (
        adapter_from_files,
        adapter_to_files,
        digest,
        read_files,
        write_folder,
    )
    from populora_trainer.randomness import tensor_generator

    operator = find(operator_id)
    parameters = {**operator.parameters, **dict(_setting(text) for text in settings)}
    parents, configs, digests = [], [], []
    for folder in folders:
        files = read_files(folder)
        factors, config = adapter_from_files(files, source=str(folder))
        parents.append(factors)
        configs.append(config)
        digests.append(digest(files))
    for folder, config in zip(folders[1:], configs[1:], strict=True):
        _check_same(folders[0], configs[0], folder, config)
    child = breed(operator_id, parents, tensor_generator(seed, "evolve", operator_id), parameters)
    files = adapter_to_files(child, configs[0])
    record = {
        "operator": operator_id,
        "seed": seed,
        "parameters": parameters,
        "parents": digests,
        "digest": digest(files),
        "report": asdict(report(parents, child)),
    }
    write_folder(output, {**files, CHILD_FILE: json.dumps(record, indent=2, sort_keys=True).encode()})
    click.echo(f"{output}: child of {operator_id}, {record['digest']}")


def _setting(text: str) -> tuple[str, float | bool | None]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise OperatorError(f"--set {text!r} must be PARAM=VALUE")
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):  # no JSON, a whole number of thousands of digits, or lists in lists
        parsed = value
    if not isinstance(parsed, float | int | bool | None):
        shown = value if len(value) <= 40 else f"{value[:40]}..."
        raise OperatorError(f"--set {name} is {shown!r}; it must be a number, true, false or null")
    if isinstance(parsed, int) and abs(parsed) > sys.float_info.max:
        parsed = math.inf if parsed > 0 else -math.inf
    return name, parsed


def _check_same(first: Path, wanted: "AdapterConfig", folder: Path, config: "AdapterConfig") -> None:
    for field, name in (
        ("rank", "r"),
        ("alpha", "lora_alpha"),
        ("target_modules", "target_modules"),
        ("base_model", "base_model_name_or_path"),
        ("revision", "revision"),
    ):
        ours, theirs = getattr(wanted, field), getattr(config, field)
        if ours != theirs:
            raise AdapterFormatError(
                f"{folder}: {name} is {theirs!r} and {first} has {ours!r}; parents must agree on it"
            )
