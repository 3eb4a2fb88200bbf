"""The pool's life: it isolates, recovers, forgets and leaves nothing behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from populora_trainer.commands.sandbox import command
from populora_trainer.errors import PopuloraError, SandboxError
from populora_trainer.sandbox import Case, Judgement, SandboxPool, Verdict, crew
from populora_trainer.sandbox import pool as pool_module

GOOD = Case("good", "code_o", "def f(x): return x + 1", ("1",))
LOOP = Case("loop", "code_o", "def f(x):\n    while True: pass", ("1",))
TRAINER = str(Path(__file__).parents[3] / "trainer")


def judge(pool: SandboxPool, *cases: Case) -> list[Judgement]:
    return asyncio.run(pool.judge(cases))


def descendants(pid: int) -> set[int]:
    children: dict[int, set[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                status = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if status[0] != "Z":
                children.setdefault(int(status[1]), set()).add(int(entry))
    found: set[int] = set()
    todo = [pid]
    while todo:
        todo += (new := children.get(todo.pop(), set()) - found)
        found |= new
    return found


def eventually(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_closed_pool_leaves_no_process_and_no_descriptor_behind() -> None:
    before, descriptors = descendants(os.getpid()), len(os.listdir("/proc/self/fd"))
    with SandboxPool(workers=2, timeout_seconds=0.3) as pool:
        assert len(descendants(os.getpid()) - before) == 4
        assert [judgement.verdict for judgement in judge(pool, LOOP, GOOD)] == [Verdict.TIMEOUT, Verdict.VALID]
    assert descendants(os.getpid()) <= before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_pool_closed_while_a_program_runs_kills_it_and_fails_the_judgement() -> None:
    before = descendants(os.getpid())
    pool = SandboxPool(workers=1, timeout_seconds=60)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            judge(pool, LOOP)
        except SandboxError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert eventually(lambda: len(descendants(os.getpid()) - before) == 3)
    pool.close()
    thread.join()
    assert descendants(os.getpid()) <= before
    assert "closed" in str(failures[0])
    with pytest.raises(SandboxError, match="closed"):
        judge(pool, GOOD)


def test_nothing_survives_a_trainer_that_is_killed() -> None:
    script = f"""
import asyncio, sys
sys.path.insert(0, {TRAINER!r})
from populora_trainer.sandbox import Case, SandboxPool
pool = SandboxPool(workers=1, timeout_seconds=600)
print("ready", flush=True)
asyncio.run(pool.judge([Case("1", "code_o", "def f(x):\\n    while True: pass", ("1",))]))
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        assert eventually(lambda: len(descendants(trainer.pid)) == 3)
        processes = descendants(trainer.pid)
        trainer.kill()
    assert eventually(lambda: not any(map(alive, processes)))


def test_hanging_programs_cost_the_honest_ones_beside_them_no_verdict() -> None:
    cases = []
    for index in range(40):
        cases.append(Case(f"good {index}", "code_o", "def f(x): return x + 1", (str(index),)))
        if index % 10 == 0:
            cases.append(Case(f"loop {index}", "code_o", "def f(x):\n    while True: pass", (str(index),)))
    with SandboxPool(workers=2, timeout_seconds=0.3) as pool:
        judgements = judge(pool, *cases)
    assert [judgement.id for judgement in judgements] == [case.id for case in cases]
    for judgement in judgements:
        assert judgement.verdict == ("timeout" if judgement.id.startswith("loop") else "valid")


def test_a_small_batch_does_not_wait_for_a_large_one_submitted_before_it() -> None:
    async def race() -> list[str]:
        order: list[str] = []

        async def named(name: str, cases: list[Case]) -> None:
            await pool.judge(cases)
            order.append(name)

        large = [Case(str(index), "code_o", LOOP.program, (str(index),)) for index in range(6)]
        await asyncio.gather(named("large", large), named("small", [GOOD]))
        return order

    with SandboxPool(workers=2, timeout_seconds=0.2) as pool:
        assert asyncio.run(race()) == ["small", "large"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_killed_worker_is_replaced_and_its_run_repeated(index: int) -> None:
    before = descendants(os.getpid())
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        workers = sorted(descendants(os.getpid()) - before)
        os.kill(workers[index], signal.SIGKILL)
        assert [judgement.verdict for judgement in judge(pool, GOOD)] == [Verdict.VALID]
        assert eventually(lambda: not alive(workers[index]))
        assert len(descendants(os.getpid()) - before) == 2


def test_a_cancelled_judgement_leaves_the_pool_usable() -> None:
    async def cancel() -> list[Judgement]:
        task = asyncio.create_task(pool.judge([LOOP] * 3 + [GOOD]))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await pool.judge([GOOD])

    with SandboxPool(workers=1, timeout_seconds=0.3) as pool:
        assert [judgement.outputs for judgement in asyncio.run(cancel())] == [("2",)]


def test_threads_and_event_loops_share_one_pool() -> None:
    results: list[tuple[str, ...]] = []
    with SandboxPool(workers=2, timeout_seconds=5) as pool:
        threads = [
            threading.Thread(target=lambda: results.extend(j.outputs for j in judge(pool, GOOD, GOOD)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [("2",)] * 8


def test_no_case_is_no_judgement() -> None:
    with SandboxPool(workers=1) as pool:
        assert judge(pool) == []


def test_outputs_longer_than_a_pipe_arrive_whole() -> None:
    case = Case("1", "code_f", "def f(n): return 'é' * n", tuple(str(4000 + index) for index in range(40)))
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        (judgement,) = judge(pool, case)
    assert judgement.outputs == tuple(repr("é" * (4000 + index)) for index in range(40))


def run_pool(prelude: str, allow_missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Judge three cases in a fresh process that first executes `prelude`."""
    script = f"""
import asyncio, ctypes, os, struct, sys
sys.path.insert(0, {TRAINER!r})
from populora_trainer.errors import SandboxError
from populora_trainer.sandbox import Case, SandboxPool
{prelude}
fork = {(Path(__file__).parent / "escape.txt").read_text()!r} + "def f(x):\\n    os.fork()\\n    while True: pass"
try:
    with SandboxPool(workers=1, timeout_seconds=0.3, allow_missing={allow_missing!r}) as pool:
        cases = [Case("1", "code_o", "def f(x): return x", ("1",)), Case("2", "code_o", fork, ("1",))]
        print([str(judgement.verdict) for judgement in asyncio.run(pool.judge(cases))], os.geteuid())
except SandboxError as error:
    print("refused:", error)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)


def deny(numbers: tuple[int, ...], errno: int = 38, prctl: int | None = None) -> str:
    """Python source that makes system calls (or one option of prctl, x86-64 and aarch64) fail from here on."""
    return f"""
code = [(0x20, 0, 0, 0)]
for number in {numbers!r}:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | {errno})]
if {prctl!r} is not None:
    code += [(0x15, 0, 3, {167 if os.uname().machine == "aarch64" else 157}), (0x20, 0, 0, 16)]
    code += [(0x15, 0, 1, {prctl!r}), (0x06, 0, 0, 0x50000 | {errno})]
code += [(0x06, 0, 0, 0x7FFF0000)]
body = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
head = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(body)))
libc = ctypes.CDLL(None)
libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.addressof(head), 0, 0) == 0
"""


def test_a_kernel_without_landlock_is_refused_by_name_unless_allowed() -> None:
    refused = run_pool(deny((444,))).stdout
    assert refused.startswith("refused: the verifier's isolation lacks landlock")
    assert "--allow-missing landlock" in refused
    assert run_pool(deny((444,)), ("landlock",)).stdout.startswith("['valid', 'runtime_error']")


def test_a_kernel_without_seccomp_is_refused_and_if_allowed_no_process_outlives_its_run() -> None:
    refused = run_pool(deny((), prctl=22)).stdout
    assert refused.startswith("refused: the verifier's isolation lacks seccomp")
    allowed = run_pool(deny((), prctl=22), ("seccomp",))
    # The limit of processes still holds for an unprivileged user; whatever started all the same is killed.
    assert allowed.stdout.startswith("['valid', ")


BECOME_NOBODY = """
if os.geteuid() == 0:
    # All that is kept is passing through folders, because the interpreter may lie where only root can look.
    libc, look = ctypes.CDLL(None), 1 << 1 | 1 << 2
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl(8, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    assert libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", look, look, look, 0, 0, 0)) == 0
    for capability in (1, 2):
        assert libc.prctl(47, 2, capability, 0, 0) == 0
"""


def test_an_unprivileged_user_gets_the_same_isolation() -> None:
    done = run_pool(BECOME_NOBODY)
    assert done.stdout.startswith("['valid', 'runtime_error']"), done
    assert int(done.stdout.split()[-1]) != 0


def invoke(text: str, *options: str):
    return CliRunner().invoke(command, ["check", "-", "--workers", "1", "--timeout", "0.5", *options], input=text)


def test_the_command_prints_one_line_a_case_in_order() -> None:
    lines = [
        {"id": "a", "task": "code_o", "program": "def f(x): return x * 2", "input": "3"},
        {"id": "b", "task": "code_o", "program": "def f(x): return x * 2", "input": "3", "answer": "7"},
        {"id": "c", "task": "code_i", "program": "def f(x): return x * x", "input": "3", "answer": "-3"},
        {
            "id": "d",
            "task": "code_f",
            "program": "def f(x): return x",
            "inputs": ["1", "2"],
            "answer": "def f(y): return y",
        },
        {"id": "e", "task": "code_f", "program": "def f(x): return x", "inputs": ["1", "2"]},
        {"id": "f", "task": "code_o", "program": "import os", "input": "1"},
        {"id": "\ud800", "task": "code_o", "program": "def f(x): return chr(0xd800)", "input": "1"},
    ]
    result = invoke("\n\n".join(map(json.dumps, lines)))
    assert result.exit_code == 0
    out = [json.loads(line) for line in result.output.splitlines()]
    assert [(line["id"], line["verdict"], line["class"], line.get("output", line.get("outputs"))) for line in out] == [
        ("a", "valid", "valid", "6"),
        ("b", "wrong_output", "wrong", "7"),
        ("c", "correct", "correct", "9"),
        ("d", "correct", "correct", ["1", "2"]),
        ("e", "valid", "valid", ["1", "2"]),
        ("f", "forbidden_import", "invalid", None),
        ("\ud800", "valid", "valid", "'\\ud800'"),
    ]


def test_a_reader_that_has_enough_ends_the_command_quietly(tmp_path: Path) -> None:
    file = tmp_path / "cases.jsonl"
    line = json.dumps({"id": "a", "task": "code_o", "program": "def f(x): return x", "input": "3"})
    file.write_text(f"{line}\n" * 400)
    populora = str(Path(sys.executable).with_name("populora"))
    with subprocess.Popen(
        [populora, "sandbox", "check", str(file), "--workers", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["verdict"] == "valid"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_the_command_takes_known_outputs_as_the_service_does() -> None:
    case = {"id": "a", "task": "code_o", "program": "not run", "input": "3", "answer": "4", "outputs": ["4"]}
    assert json.loads(invoke(json.dumps(case)).output)["verdict"] == "correct"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a case is a JSON object, this is list"),
        ('{"id": "1", "task": "code_x", "program": "", "input": ""}', 'task is "code_x", allowed are code_i'),
        ('{"id": "1", "task": "code_o", "input": ""}', "program must be a string"),
        ('{"id": 1, "task": "code_o", "program": "", "input": ""}', "id must be a string, this is 1"),
        ('{"id": "1", "task": "code_o", "program": ""}', "either input"),
        ('{"id": "1", "task": "code_o", "program": "", "inputs": [1]}', "inputs must be a list of strings"),
        ('{"id": "1", "task": "code_o", "program": "", "answr": ""}', 'unknown field "answr"'),
    ],
)
def test_a_line_that_is_no_case_is_named_after_the_results_before_it(line: str, message: str) -> None:
    good = json.dumps({"id": "a", "task": "code_o", "program": "def f(x): return x", "input": "3"})
    result = invoke(f"{good}\n{line}\n{good}\n")
    assert isinstance(result.exception, PopuloraError)
    assert "<stdin>, line 2: " in str(result.exception)
    assert message in str(result.exception)
    assert [json.loads(text)["id"] for text in result.output.splitlines()] == ["a"]


# Each level doubles the code of the one below, as a finally block is compiled once for every way into it.
BOMB = (
    "def f(x):\n"
    + "".join("    " * level + "try: pass\n" + "    " * level + "finally:\n" for level in range(1, 19))
    + "    " * 19
    + "x += 1\n    return x\n"
)


def test_a_program_that_the_compiler_chokes_on_costs_the_others_of_its_batch_no_verdict() -> None:
    cases = [Case(str(number), "code_o", f"def f(x): return x + {number}", ("1",)) for number in range(20)]
    cases[7:7] = [Case("bomb", "code_o", BOMB, ("1",)), Case("open", "code_o", "def f(x: return", ("1",))]
    with SandboxPool(workers=1, timeout_seconds=0.3, memory_mib=128) as pool:
        judgements = {judgement.id: judgement for judgement in judge(pool, *cases)}
        (alone,) = judge(pool, Case("bomb", "code_o", BOMB, ("1",)))
    assert {judgements[str(number)].outputs for number in range(20)} == {(str(1 + number),) for number in range(20)}
    assert judgements["open"].verdict == "syntax_error"
    assert judgements["bomb"].kind == "invalid"
    assert judgements["bomb"].verdict == alone.verdict


@pytest.mark.parametrize("literal", ["{16, 8, 0}", "{0, 8, 16}", "{'b', 'a'} and {24, 8, 16}"])
def test_the_order_of_a_set_does_not_depend_on_who_compiled_the_program(literal: str) -> None:
    program = f"def f(x): return [one for one in {literal}] + [x]"
    cases = [Case(str(number), "code_o", f"{program}  # {number}", (str(number),)) for number in range(6)]
    with SandboxPool(workers=1) as pool:
        together = judge(pool, *cases)
        apart = [judge(pool, case)[0] for case in cases]
    assert together == apart
    assert together[0].outputs == (repr([*eval(literal), 0]),)


def test_a_batch_of_one_program_with_many_inputs_gives_every_case_its_own_output() -> None:
    cases = [Case(str(number), "code_o", "def f(x): return x * x", (str(number),)) for number in range(40)]
    with SandboxPool(workers=2) as pool:
        assert [judgement.outputs for judgement in judge(pool, *cases)] == [(str(n * n),) for n in range(40)]


def test_a_case_that_is_the_callers_error_fails_its_batch_and_no_other() -> None:
    wrong = Case("wrong", "code_f", GOOD.program, ("1",), outputs=("1", "2"))

    async def both(pool: SandboxPool) -> list[object]:
        batches = ([*[GOOD] * 3, wrong, *[GOOD] * 30], [wrong], [GOOD] * 5)
        return await asyncio.gather(*(pool.judge(batch) for batch in batches), return_exceptions=True)

    with SandboxPool(workers=1) as pool:
        first, second, third = asyncio.run(both(pool))
        assert isinstance(first, ValueError)
        assert isinstance(second, ValueError)
        assert isinstance(third, list)
        assert [judgement.verdict for judgement in judge(pool, GOOD)] == ["valid"]


# A second run takes the inputs in reversed order.
SECOND_HANGS = "seen = []\ndef f(x):\n    seen.append(x)\n    while seen[0] == 2: pass\n    return x"


@pytest.mark.parametrize("same_client", [False, True])
@pytest.mark.parametrize("program", [LOOP.program, SECOND_HANGS])
def test_programs_that_hang_in_either_run_delay_nobody_elses_honest_case(program: str, same_client: bool) -> None:
    hanging = 5

    async def race(pool: SandboxPool) -> tuple[int, str]:
        ended = 0

        async def hang(number: int) -> None:
            nonlocal ended
            cases = [Case("", "code_f", f"{program}  # {number} {part}", ("1", "2")) for part in range(2)]
            assert {one.verdict for one in await pool.judge(cases, client="a")} == {Verdict.TIMEOUT}
            ended += 1

        tasks = [asyncio.create_task(hang(number)) for number in range(hanging)]
        await asyncio.sleep(0.2)  # every first run of those that hang in their second is over
        (honest,) = await pool.judge([GOOD], client="a" if same_client else "b")
        before = ended
        await asyncio.gather(*tasks)
        return before, honest.verdict

    with SandboxPool(workers=1, timeout_seconds=0.1) as pool:
        before, verdict = asyncio.run(race(pool))
    assert verdict == Verdict.VALID
    assert before < hanging // 2


def own_workers(before: set[int]) -> list[int]:
    return sorted(pid for pid in descendants(os.getpid()) - before if parent_of(pid) == os.getpid())


def programs_of(workers: list[int]) -> list[int]:
    return [pid for worker in workers for pid in descendants(worker)]


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def test_a_pool_whose_workers_are_all_killed_again_and_again_goes_on() -> None:
    before = descendants(os.getpid())
    with SandboxPool(workers=2, timeout_seconds=5) as pool:
        for round_ in range(4):
            workers = own_workers(before)
            assert len(workers) == 4
            for pid in workers:
                os.kill(pid, signal.SIGKILL)
            if round_ % 2:  # while they are being replaced
                assert [judgement.verdict for judgement in judge(pool, GOOD)] == [Verdict.VALID]
            assert eventually(lambda gone=set(workers): len(set(own_workers(before)) - gone) == 4)
        assert pool.trouble() is None
        assert [judgement.verdict for judgement in judge(pool, GOOD)] == [Verdict.VALID]
        assert pool.restarts >= 16


BUSY = "def f(x):\n    for i in range(20_000_000): pass\n    return x"


def test_a_program_that_is_killed_from_outside_is_run_again_and_not_blamed() -> None:
    before = descendants(os.getpid())
    with SandboxPool(workers=1, timeout_seconds=30) as pool:
        workers = own_workers(before)
        killed: list[int] = []

        def kill() -> None:
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
                assert eventually(lambda: set(programs_of(workers)) - set(killed))
                pid = (set(programs_of(workers)) - set(killed)).pop()
                killed.append(pid)
                os.kill(pid, number)

        thread = threading.Thread(target=kill)
        thread.start()
        (judgement,) = judge(pool, Case("busy", "code_o", BUSY, ("1",)))
        thread.join()
    assert len(killed) == 3
    assert (judgement.verdict, judgement.outputs) == (Verdict.VALID, ("1",))


def test_a_program_that_never_survives_costs_one_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_PAUSES", (0.0,))
    before = descendants(os.getpid())
    cases = [Case(str(number), "code_o", f"def f(x): return x + {number}", ("1",)) for number in range(6)]
    with SandboxPool(workers=1, timeout_seconds=30) as pool:
        workers, over = own_workers(before), threading.Event()

        def kill() -> None:  # whatever runs for longer than the others do
            seen: dict[int, float] = {}
            while not over.is_set():
                for pid in programs_of(workers):
                    if time.monotonic() - seen.setdefault(pid, time.monotonic()) > 0.3 and alive(pid):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)

        thread = threading.Thread(target=kill)
        thread.start()
        judgements = judge(pool, *cases[:3], LOOP, *cases[3:])
        over.set()
        thread.join()
        assert pool.trouble() is None
        assert pool.restarts == 0
    assert [one.outputs for one in judgements if one.id != "loop"] == [(str(1 + number),) for number in range(6)]
    (blamed,) = [one for one in judgements if one.id == "loop"]
    assert (blamed.verdict, blamed.kind) == (Verdict.CRASHED, "invalid")
    assert "killed from outside 5 times" in blamed.detail


def test_a_run_over_its_processor_limit_is_timed_out_though_its_worker_did_not_look() -> None:
    before = descendants(os.getpid())
    with SandboxPool(workers=1, timeout_seconds=0.3) as pool:
        workers = own_workers(before)
        judgements: list[Judgement] = []
        thread = threading.Thread(target=lambda: judgements.extend(judge(pool, LOOP)))
        thread.start()
        assert eventually(lambda: programs_of(workers))
        (program,) = programs_of(workers)
        worker = parent_of(program)
        os.kill(worker, signal.SIGSTOP)
        assert eventually(lambda: not alive(program))  # the kernel ends it
        os.kill(worker, signal.SIGCONT)
        thread.join()
    assert [one.verdict for one in judgements] == [Verdict.TIMEOUT]


def test_a_pool_that_can_start_no_worker_says_so_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descendants(os.getpid())
    with SandboxPool(workers=1, timeout_seconds=5) as pool:
        with monkeypatch.context() as broken:

            def refuse(*arguments: object, **options: object) -> None:
                raise OSError(11, "Resource temporarily unavailable")

            broken.setattr(crew, "Lane", refuse)
            broken.setattr(pool_module, "_PATIENCE", 0.3)
            for pid in own_workers(before):
                os.kill(pid, signal.SIGKILL)
            assert eventually(lambda: pool.trouble() is not None)
            with pytest.raises(SandboxError, match=r"no program could be run: .*Resource temporarily unavailable"):
                judge(pool, GOOD)
        assert [judgement.verdict for judgement in judge(pool, GOOD)] == [Verdict.VALID]
        assert pool.trouble() is None
