"""Every program of honest.yaml, hostile.yaml and answers.yaml, through one pool, as one batch."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from populora_trainer.nano.heldout import load_heldout
from populora_trainer.sandbox import Case, Judgement, SandboxPool, Verdict
from populora_trainer.sandbox.wire import case_to_json, judgement_from_json

HERE = Path(__file__).parent
ESCAPE = (HERE / "escape.txt").read_text()
TIMEOUT = 0.4
pytestmark = pytest.mark.filterwarnings("ignore:invalid escape sequence")


def load(name: str) -> list[dict]:
    entries = yaml.safe_load((HERE / name).read_text())
    for entry in entries:
        for key in ("program", "input", "answer"):
            source = entry.pop("expression" if key == "program" else f"expression_{key}", None)
            if source is not None:
                entry[key] = eval(source, {})
        if entry.get("escape"):
            # The program that is on trial is the answer where there is one.
            trial = "answer" if "answer" in entry else "program"
            entry[trial] = ESCAPE + entry[trial]
        entry["id"] = f"{name.removesuffix('.yaml')}: {entry.get('task', 'code_o')}: {entry['name']}"
    return entries


HONEST, HOSTILE, ANSWERS = load("honest.yaml"), load("hostile.yaml"), load("answers.yaml")
ALL = [*HONEST, *HOSTILE, *ANSWERS]


def case_of(entry: dict) -> Case:
    inputs = tuple(entry["inputs"]) if "inputs" in entry else (entry.get("input", "1"),)
    return Case(entry["id"], entry.get("task", "code_o"), entry["program"], inputs, entry.get("answer"))


@pytest.fixture(scope="module")
def judgements() -> dict[str, Judgement]:
    before = set(os.listdir("/dev/shm")) | set(os.listdir("/tmp"))
    with SandboxPool(workers=4, timeout_seconds=TIMEOUT, memory_mib=256) as pool:
        judged = asyncio.run(pool.judge([case_of(entry) for entry in ALL]))
    assert "populora-pwned" not in {*os.listdir("/dev/shm"), *os.listdir("/tmp"), *os.listdir("/"), *os.listdir()}
    assert {name for name in {*os.listdir("/dev/shm"), *os.listdir("/tmp")} - before if "job" in name} == set()
    return {judgement.id: judgement for judgement in judged}


def test_the_tables_hold_at_least_eighty_hostile_programs_and_distinct_names() -> None:
    assert len(HOSTILE) >= 80
    assert len({entry["id"] for entry in ALL}) == len(ALL)


def test_every_verdict_occurs_in_the_tables(judgements: dict[str, Judgement]) -> None:
    assert {judgement.verdict for judgement in judgements.values()} == set(Verdict)


@pytest.mark.parametrize("entry", HONEST, ids=lambda entry: entry["name"])
def test_an_honest_program_passes(entry: dict, judgements: dict[str, Judgement]) -> None:
    judgement = judgements[entry["id"]]
    assert (judgement.verdict, judgement.kind) == (Verdict.VALID, "valid"), judgement.detail
    if "output" in entry:
        assert judgement.outputs == (entry["output"],)


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda entry: entry["name"])
def test_a_hostile_program_gains_nothing(entry: dict, judgements: dict[str, Judgement]) -> None:
    judgement = judgements[entry["id"]]
    expected = entry["verdict"] if isinstance(entry["verdict"], list) else [entry["verdict"]]
    assert judgement.verdict in expected, judgement
    assert judgement.kind == ("valid" if judgement.verdict == "valid" else "invalid")
    assert judgement.outputs == ((entry["output"],) if "output" in entry else judgement.outputs)
    assert len(judgement.detail) <= 300
    assert judgement.detail.isprintable()


@pytest.mark.parametrize("entry", ANSWERS, ids=lambda entry: f"{entry.get('task', 'code_o')}: {entry['name']}")
def test_an_answer_gets_its_class(entry: dict, judgements: dict[str, Judgement]) -> None:
    judgement = judgements[entry["id"]]
    assert (judgement.verdict, judgement.kind) == (entry["verdict"], entry["class"]), judgement
    if "output" in entry:
        assert judgement.outputs == (entry["output"],)


def alike(judgement: Judgement) -> tuple[object, ...]:
    return judgement.id, judgement.verdict, judgement.kind, judgement.inputs, judgement.outputs


def held_out(count: int) -> list[tuple[Case, tuple[str, ...]]]:
    """Programs that the embedded base's grammar made, with the outputs that they were written down with."""
    problems = load_heldout()[:: len(load_heldout()) // count]
    return [(Case(f"held out {n}", one.task, one.program, one.inputs), one.outputs) for n, one in enumerate(problems)]


ELSEWHERE = """
import asyncio, json, sys
from populora_trainer.sandbox import SandboxPool
from populora_trainer.sandbox.wire import case_from_json, judgement_to_json
cases = [case_from_json(record) for record in json.load(sys.stdin)]
with SandboxPool(workers=1, timeout_seconds=5, memory_mib=256) as pool:
    json.dump([judgement_to_json(one) for one in asyncio.run(pool.judge(cases))], sys.stdout)
"""


def test_a_verdict_and_an_output_are_the_programs_own(judgements: dict[str, Judgement]) -> None:
    """Alone, in any batch at any place, after a restart and in another process: one verdict and one output."""
    entries = [entry for entry in ALL if judgements[entry["id"]].verdict not in ("timeout", "memory", "crashed")]
    cases = [case_of(entry) for entry in entries] + [case for case, _ in held_out(60)]
    wanted = {one.id: alike(one) for one in judgements.values()}
    wanted |= {case.id: (case.id, Verdict.VALID, "valid", case.inputs, outputs) for case, outputs in held_out(60)}
    assert len(cases) > 400
    order = random.Random(0)

    async def alone(pool: SandboxPool) -> list[Judgement]:
        return [one for case in cases for one in await pool.judge([case])]

    async def in_batches(pool: SandboxPool) -> list[Judgement]:
        left, found = order.sample(cases, len(cases)), []
        while left:
            size = order.randint(2, 60)
            found += await pool.judge(left[:size])
            del left[:size]
        return found

    with SandboxPool(workers=2, timeout_seconds=5, memory_mib=256) as pool:
        for judgement in [*asyncio.run(alone(pool)), *asyncio.run(in_batches(pool))]:
            assert alike(judgement) == wanted[judgement.id]
        for pid in Path(f"/proc/self/task/{pool._dispatcher.native_id}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
        for judgement in asyncio.run(in_batches(pool)):
            assert alike(judgement) == wanted[judgement.id]
        assert pool.restarts >= 4

    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        input=json.dumps([case_to_json(case) for case in reversed(cases)]),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "3"},
    )
    for record in json.loads(done.stdout):
        assert alike(judgement_from_json(record)) == wanted[record["id"]]
