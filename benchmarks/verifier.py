"""Validations a second: the verifier with its isolation on, beside two peers in the same run.

A validation is two runs of a program on one input. Peers, re-created here at their smallest:
- bare fork: one forked child per run, no isolation, no limits, the value sent back as text;
- in process: a process pool whose workers execute every program twice in themselves, as Absolute Zero's executor does.

    python benchmarks/verifier.py [--programs 2000] [--workers N] [--json]
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from populora_trainer.sandbox import Case, SandboxPool

PROGRAMS = (
    "def f(x):\n    total = 0\n    for i in range(x):\n        total += i * 2\n    return [total, x]\n",
    "def add(a, b):\n    return a + b\ndef f(x):\n    return add(x, 3) % 7\n",
    "def f(x):\n    words = ['a', 'b', 'c'] * x\n    return ''.join(sorted(words))[:20]\n",
    "def f(x):\n    table = {}\n    for i in range(x):\n        table[i] = i * i\n    return table\n",
    "import math\ndef f(x):\n    return math.gcd(x * 12, 18), math.isqrt(x)\n",
)


def programs(number: int) -> list[tuple[str, str]]:
    """Distinct programs, so that nothing can be remembered."""
    return [(f"{PROGRAMS[i % len(PROGRAMS)]}# {i}\n", str(i % 20)) for i in range(number)]


def execute(program: str, text: str) -> str:
    scope: dict[str, object] = {}
    exec(program, scope)  # noqa: S102 - the peers' way
    return repr(eval(f"f({text})", scope))  # noqa: S307


def execute_twice(case: tuple[str, str]) -> str:
    first, second = execute(*case), execute(*case)
    return first if first == second else ""


def fork_twice(case: tuple[str, str]) -> str:
    results = []
    for _ in range(2):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, execute(*case).encode())
            os._exit(0)
        os.close(write)
        results.append(os.read(read, 65536))
        os.close(read)
        os.waitpid(pid, 0)
    return results[0].decode() if results[0] == results[1] else ""


def peer(run: Callable[[tuple[str, str]], str], workers: int, cases: list[tuple[str, str]]) -> float:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(run, cases[:64], chunksize=8))
        started = time.perf_counter()
        results = list(pool.map(run, cases, chunksize=16))
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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--programs", type=int, default=2000)
    arguments.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    arguments.add_argument("--rounds", type=int, default=3, help="each contender's best of so many, taken in turn")
    arguments.add_argument("--json", action="store_true")
    options = arguments.parse_args()
    cases = programs(options.programs)
    contenders: dict[str, Callable[[], float]] = {
        "verifier, isolated": lambda: verifier(options.workers, cases),
        "bare fork per run": lambda: peer(fork_twice, options.workers, cases),
        "in process, unisolated": lambda: peer(execute_twice, options.workers, cases),
    }
    load = os.getloadavg()[0]
    rates = dict.fromkeys(contenders, 0.0)
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            rates[name] = max(rates[name], contender())
    ours = rates["verifier, isolated"]
    if options.json:
        rounded = {name: round(rate, 1) for name, rate in rates.items()}
        print(json.dumps({"validations_per_second": rounded, "workers": options.workers, "load_before": load}))
        return
    print(
        f"{options.workers} workers, {len(cases)} programs, best of {options.rounds}, load average before: {load:.2f}\n"
    )
    print(f"{'':24}{'validations/s':>14}{'verifier / it':>15}")
    for name, rate in rates.items():
        print(f"{name:24}{rate:14.0f}{ours / rate:15.2f}")


if __name__ == "__main__":
    main()
