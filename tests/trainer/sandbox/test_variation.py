"""What an honest program cannot depend on: who depends on it is refused, and who does not is judged one way."""

import asyncio
import random
import sys
from collections.abc import Iterator

import pytest

from populora_trainer.sandbox import Case, Judgement, SandboxPool, Verdict

WORDS = ["apple", "pear", "fig", "plum", "lime", "kiwi", "date", "grape", "peach", "mango", "melon", "lemon"]
PER_TEMPLATE = 60

# Each takes its words from WORDS, so that no two programs are the same.
NOISE = {
    "parity of a hash": "def f(x): return hash({0!r} + x) % 2",
    "parity of a pair's hash": "def f(x): return hash(({0!r}, x)) % 2",
    "a hash modulo three": "def f(x): return hash({0!r} + x) % 3",
    "two bits of a hash": "def f(x):\n    h = hash({0!r} + x)\n    return (h ^ h >> 7) & 1",
    "two words": "def f(x): return list(set([{0!r}, {1!r}]))",
    "the first of two words": "def f(x): return next(iter({{{0!r}, {1!r}}}))",
    "the second of three": "def f(x): return list(set([{0!r}, {1!r}, {2!r}]))[1]",
    "the most frequent of three": "def f(x):\n    w = [{0!r}, {1!r}, {2!r}]\n    return max(set(w), key=w.count)",
    "words in turn": "def f(x): return ''.join(frozenset([{0!r}, {1!r}, {2!r}, x]))",
    "a word before another": (
        "def f(x):\n    w = list({{{0!r}, {1!r}, {2!r}, {3!r}}})\n    return w.index({0!r}) < w.index({1!r})"
    ),
    "a popped word": "def f(x): return {{{0!r}, {1!r}}}.pop()",
    "hash of an object": "def f(x):\n    {0} = object()\n    return hash({0}) % 2",
    "default hash of a class": "class {0}: pass\ndef f(x): return hash({0}()) % 2",
    "objects in a set": (
        "class {0}:\n    def __init__(self, n): self.n = n\ndef f(x): return [o.n for o in {{{0}(1), {0}(2)}}]"
    ),
    "functions in a set": (
        "def f(x):\n    def {0}(): return 1\n    def {1}(): return 2\n    return [g() for g in {{{0}, {1}}}]"
    ),
    "classes in a set": "class {0}: pass\nclass {1}: pass\ndef f(x): return [c.__name__ for c in {{{0}, {1}}}]",
    "order of addresses": "class {0}: pass\ndef f(x):\n    a, b = {0}(), {0}()\n    return str(a) < str(b)",
    "None in a set": "def f(x): return str({{None, {0!r}}}).startswith('{{None')",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    # One worker: where all runs of a program share a heap, only what no address enters is left to chance.
    with SandboxPool(workers=1, timeout_seconds=5, seed=7) as one:
        yield one


def judge(pool: SandboxPool, cases: list[Case], **options: int) -> list[Judgement]:
    return asyncio.run(pool.judge(cases, **options))


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="lists read sets directly there")
def test_nothing_that_should_vary_stays_the_same_here(pool: SandboxPool) -> None:
    assert "variation" not in pool.missing_layers
    assert "clock" not in pool.missing_layers


@pytest.mark.parametrize("name", NOISE)
def test_noise_is_refused_however_it_is_made(name: str, pool: SandboxPool) -> None:
    words = random.Random(name)
    programs = {NOISE[name].format(*words.sample(WORDS, 4)) + f"\n# {n}" for n in range(PER_TEMPLATE)}
    judgements = judge(pool, [Case(program, "code_o", program, ("'a'",)) for program in programs])
    assert {one.verdict for one in judgements} <= {Verdict.NONDETERMINISTIC, Verdict.VALID}
    accepted = sum(one.verdict is Verdict.VALID for one in judgements)
    # Certain for most; once in 128 for what the plan does not foresee.
    assert accepted <= (2 if name in ("two bits of a hash", "a word before another") else 0)


def test_what_is_accepted_by_chance_is_another_program_under_another_seed(pool: SandboxPool) -> None:
    """Else it could be learned."""
    program = "def f(x):\n    h = hash(x)\n    return (h & 1023 ^ h >> 10 & 1023) < 300"
    cases = [Case(str(n), "code_o", program, (repr(f"w{n}"),)) for n in range(60)]
    accepted = [{one.id for one in judge(pool, cases, seed=seed) if one.verdict is Verdict.VALID} for seed in (1, 1, 2)]
    assert accepted[0] == accepted[1] != accepted[2]
    assert accepted[0]
