"""Validations a second: the verifier with its isolation on, beside two peers in the same run.

A validation is two runs of a program on one input, and nine of one that sees the order of a set of words, a hash of a
string or an address, whether or not its output shows it; the row "order seen" has such programs alone. Peers,
re-created here at their smallest:
- bare fork: one forked child per run, no isolation, no limits, the value sent back as text; forked from processes that
  have imported nothing, as the size of what is forked from is most of a fork's cost;
- in process: a process pool whose workers execute every program twice in themselves, as Absolute Zero's executor does.

Rates depend on what else the machine does. Processor time and page faults a run, of all processes together and without
their start, depend on it little.

    python benchmarks/verifier.py [--programs 2000] [--workers N] [--json]
"""

import argparse
import asyncio
import json
import marshal
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from populora_trainer.sandbox import Case, SandboxPool

Contender = Callable[[int, list[tuple[str, str]]], float]

PROGRAMS = (
    "def f(x):\n    total = 0\n    for i in range(x):\n        total += i * 2\n    return [total, x]\n",
    "def add(a, b):\n    return a + b\ndef f(x):\n    return add(x, 3) % 7\n",
    "def f(x):\n    words = ['a', 'b', 'c'] * x\n    return ''.join(sorted(words))[:20]\n",
    "def f(x):\n    table = {}\n    for i in range(x):\n        table[i] = i * i\n    return table\n",
    "import math\ndef f(x):\n    return math.gcd(x * 12, 18), math.isqrt(x)\n",
)

# Honest programs that see the order of a set: what they return does not depend on it.
ORDER_SEEN = (
    "def f(x):\n    return sorted({str(i) for i in range(x)})\n",
    "def f(x):\n    total = 0\n    for word in set('abcdefgh'[:x]):\n        total += len(word)\n    return total\n",
)


def programs(number: int, kinds: tuple[str, ...] = PROGRAMS) -> list[tuple[str, str]]:
    """Distinct programs, so that nothing can be remembered."""
    return [(f"{kinds[i % len(kinds)]}# {i}\n", str(i % 20)) for i in range(number)]


def execute(program: str, text: str) -> str:
    scope: dict[str, object] = {}
    exec(program, scope)  # noqa: S102 - the peers' way
    return repr(eval(f"f({text})", scope))  # noqa: S307


def execute_twice(case: tuple[str, str]) -> str:
    first, second = execute(*case), execute(*case)
    return first if first == second else ""


# Reads one list of cases per line and answers with the list of results, each from two forked children.
FORKER = """
import marshal, os, sys

def execute(program, text):
    scope = {}
    exec(program, scope)
    return repr(eval(f"f({text})", scope))

def fork_twice(program, text):
    results = []
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, execute(program, text).encode())
            os._exit(0)
        os.close(write)
        results.append(os.read(read, 65536))
        os.close(read)
        os.waitpid(pid, 0)
    return results[0].decode() if results[0] == results[1] else ""

while True:
    try:
        cases = marshal.load(sys.stdin.buffer)
    except EOFError:
        break
    sys.stdout.buffer.write(marshal.dumps([fork_twice(*case) for case in cases]))
    sys.stdout.buffer.flush()
"""


def bare_fork(workers: int, cases: list[tuple[str, str]]) -> float:
    forkers = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", FORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(workers)
    ]

    def run(cases: list[tuple[str, str]]) -> list[str]:
        for index, forker in enumerate(forkers):
            assert forker.stdin is not None
            marshal.dump(cases[index::workers], forker.stdin)
            forker.stdin.flush()
        return [result for forker in forkers if forker.stdout is not None for result in marshal.load(forker.stdout)]

    run(cases[:64])
    started = time.perf_counter()
    results = run(cases)
    seconds = time.perf_counter() - started
    for forker in forkers:
        forker.communicate()
    assert len(results) == len(cases)
    assert all(results)
    return len(cases) / seconds


def in_process(workers: int, cases: list[tuple[str, str]]) -> float:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(execute_twice, cases[:64], chunksize=8))
        started = time.perf_counter()
        results = list(pool.map(execute_twice, cases, chunksize=16))
        seconds = time.perf_counter() - started
    assert all(results)
    return len(cases) / seconds


def verifier(workers: int, cases: list[tuple[str, str]]) -> float:
    problems = [Case(str(i), "code_o", program, (text,)) for i, (program, text) in enumerate(cases)]
    with SandboxPool(workers=workers) as pool:
        asyncio.run(pool.judge(problems[:64]))
        started = time.perf_counter()
        judgements = asyncio.run(pool.judge(problems))
        seconds = time.perf_counter() - started
    assert all(judgement.kind == "valid" for judgement in judgements)
    return len(cases) / seconds


@dataclass
class Measured:
    """A contender's best rate, and what a run of a program costs.

    Attributes:
        rate: validations a second.
        processor_us: processor time, in microseconds, of all its processes together, for half a validation.
        faults: page faults of all its processes together.
    """

    rate: float = 0.0
    processor_us: float = float("inf")
    faults: float = float("inf")


def spent() -> tuple[float, int]:
    """Return processor seconds and page faults of this process and of all its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usages), sum(one.ru_minflt for one in usages)


def measure(contender: Contender, workers: int, cases: list[tuple[str, str]], best: Measured) -> None:
    """Run a contender on all cases, and on few for what its start costs; keep what is better than before."""
    marks = [spent()]
    contender(workers, cases[:64])
    marks.append(spent())
    rate = contender(workers, cases)
    marks.append(spent())
    runs = 2 * (len(cases) - 64)
    seconds, faults = (marks[2][i] - marks[1][i] - (marks[1][i] - marks[0][i]) for i in (0, 1))
    best.rate = max(best.rate, rate)
    best.processor_us = min(best.processor_us, seconds / runs * 1e6)
    best.faults = min(best.faults, faults / runs)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--programs", type=int, default=2000)
    arguments.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--rounds", type=int, default=3, help="each contender's best of so many, taken in turn")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    cases = programs(options.programs)
    contenders: dict[str, tuple[Contender, list[tuple[str, str]]]] = {
        "verifier, isolated": (verifier, cases),
        "verifier, order seen": (verifier, programs(64 + options.programs // 4, ORDER_SEEN)),
        "bare fork per run": (bare_fork, cases),
        "in process, unisolated": (in_process, cases),
    }
    load = os.getloadavg()[0]
    found = {name: Measured() for name in contenders}
    for _ in range(options.rounds):
        for name, (contender, its_cases) in contenders.items():
            measure(contender, options.workers, its_cases, found[name])
    ours = found["verifier, isolated"]
    if options.json:
        figures = {
            "validations_per_second": {name: round(one.rate, 1) for name, one in found.items()},
            "processor_us_per_run": {name: round(one.processor_us) for name, one in found.items()},
            "page_faults_per_run": {name: round(one.faults, 1) for name, one in found.items()},
        }
        print(json.dumps({**figures, "workers": options.workers, "load_before": load}))
        return
    print(
        f"{options.workers} workers, {len(cases)} programs, best of {options.rounds}, load average before: {load:.2f}\n"
    )
    print(f"{'':24}{'validations/s':>14}{'verifier / it':>15}{'processor us/run':>18}{'faults/run':>12}")
    for name, one in found.items():
        print(f"{name:24}{one.rate:14.0f}{ours.rate / one.rate:15.2f}{one.processor_us:18.0f}{one.faults:12.0f}")


if __name__ == "__main__":
    main()
