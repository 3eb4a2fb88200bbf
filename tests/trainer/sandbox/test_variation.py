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


# Each shows what two interpreters do not have in common, in a way of its own.
LEAKS = {
    "a memo's keys": (
        "import copy\ndef f(x):\n    m = {{}}\n    copy.deepcopy([[1], [2]], m)\n    return [k >> 14 & 1 for k in m][0]"
    ),
    "where an array lies": "import array\ndef f(x): return array.array('i', [1, 2, 3]).buffer_info()[0] >> 14 & 1",
    "a lock": "import queue\ndef f(x): return str(queue.Queue().mutex)",
    "a lock that may be taken again": (
        "import functools\nclass A:\n    @functools.cached_property\n    def x(self): return 3\n"
        "def f(x): return str(vars(A)['x'].lock)"
    ),
    "an asynchronous generator": "async def g(): yield 1\ndef f(x): return str(g())",
    "what a large set gives up": (
        "def f(x):\n    s = {{str(i * 7 + {0}) for i in range(300)}}\n    return int(s.pop()) % 2"
    ),
    "words behind many numbers": (
        "def f(x):\n    s = set(range(300)) | {{'a{0}', 'b{0}'}}\n    return [y for y in s if type(y) is str]"
    ),
    "objects behind many numbers": (
        "class A:\n    def __init__(self, n): self.n = n\n"
        "def f(x): return [y.n for y in set(range(1000)) | {{A(1), A({0} + 2)}} if type(y) is A]"
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_what_two_interpreters_do_not_share_leaks_nowhere(name: str, pool: SandboxPool) -> None:
    programs = [LEAKS[name].format(n) + f"\n# {n}" for n in range(12)]
    judgements = judge(pool, [Case(program, "code_o", program, ("'a'",)) for program in programs])
    accepted = sum(one.verdict is Verdict.VALID for one in judgements)
    assert accepted <= 1  # the parity of a large set's element passes once in 128
    assert {one.verdict for one in judgements} <= {Verdict.NONDETERMINISTIC, Verdict.VALID}


def test_samples_without_a_seed_are_refused_and_those_with_one_are_not(pool: SandboxPool) -> None:
    draw = "from statistics import NormalDist\ndef f(x): return NormalDist().samples(2{})"
    unseeded, seeded = judge(pool, [Case(o, "code_o", draw.format(o), ("1",)) for o in ("", ", seed=3")])
    assert unseeded.verdict is Verdict.RUNTIME_ERROR
    assert "without a seed" in unseeded.detail
    drawn = random.Random(3)
    assert seeded.outputs == (repr([drawn.gauss(0.0, 1.0) for _ in range(2)]),)


WORD = "class P:\n    def __init__(self, *n): self.n = n\n    def __eq__(self, o): return self.n == o.n\n"
TEXTS = "{str(i) for i in range(300)}"
# By what they give, each in every interpreter of this version.
HONEST = {
    "True": [
        WORD + "    def __hash__(self): return hash(self.n)\ndef f(x): return hash(P(1, 'a')) == hash((1, 'a'))",
        WORD + "    def __hash__(self): return hash(self.n)\ndef f(x): return hash(P('a')) == P('a').__hash__()",
        WORD + "    def __hash__(self): return hash(self.n) % 10\ndef f(x): return hash(P('a')) < 10",
        f"def f(x):\n    s = {TEXTS}\n    return next(iter(s)) == s.pop()",
        "def f(x):\n    s = set('abc')\n    return next(iter(s)) == s.pop()",
        "def f(x): return (1, 'a').__hash__() == hash((1, 'a')) and 'a'.__hash__() == hash('a') == str.__hash__('a')",
        "def f(x):\n    t = ()\n    for i in range(1200): t = (i, t)\n"
        "    return len({t, (1,)}) == 2 and hash(t) == hash(t)",
        f"def f(x):\n    s, n = {TEXTS}, 0\n    while s: s.pop(); n += 1\n    return n == 300",
        f"def f(x):\n    s = {TEXTS}\n    a = s.pop()\n    s |= {{a, 'x', 'y'}}\n"
        "    return len({s.pop() for _ in range(302)}) == 302 and not s",
        f"def f(x):\n    s = {TEXTS}\n"
        "    return sorted(s) == sorted(str(i) for i in range(300)) and len(list(s)) == 300",
        "def f(x):\n    i = iter({'a', 'b'})\n    return sorted([next(i), next(i)]) == ['a', 'b'] and next(i, 0) == 0",
    ],
    "0": ["def f(x): return hash('')", "def f(x): return b''.__hash__()"],
    "3": [
        "class P:\n    n = 0\n    def __init__(self, i): self.i = i\n"
        "    def __hash__(self):\n        P.n += 1\n        return self.i\n"
        "def f(x):\n    P.n = 0\n    for p in {P(1), P(2), P(3)}: pass\n    return P.n",
        "import operator\ndef f(x): return operator.length_hint(iter({'a', 'b', 'c'}))",
        "import queue\ndef f(x):\n    q = queue.Queue()\n    q.put(x + 2, timeout=1)\n    return q.get(timeout=1)",
    ],
    "'set_iterator'": ["def f(x): return type(iter({'a', 'b'})).__name__"],
    "'Set changed size during iteration'": [
        "def f(x):\n    s = {'a', 'b'}\n    try:\n        for c in s: s.add(c + 'x')\n"
        "    except RuntimeError as error: return str(error)"
    ],
    "\"<method 'pop' of 'set' objects> <built-in function hash> pop\"": [
        "def f(x): return f'{set.pop} {hash} {set.pop.__name__}'"
    ],
    "'empty'": [
        "import queue\ndef f(x):\n    try: queue.Queue().get(timeout=0.01)\n    except queue.Empty: return 'empty'"
    ],
    "'set.pop() takes no arguments (1 given)'": [
        "def f(x):\n    try: {1}.pop(0)\n    except TypeError as error: return str(error)"
    ],
    "'hash() takes exactly one argument (0 given)'": [
        "def f(x):\n    try: hash()\n    except TypeError as error: return str(error)"
    ],
    "\"unhashable type: 'list'\"": [
        "def f(x):\n    try: (1, [2]).__hash__()\n    except TypeError as error: return str(error)"
    ],
    "'expected 0 arguments, got 1'": [
        "def f(x):\n    try: (1).__hash__(3)\n    except TypeError as error: return str(error)"
    ],
    "\"'q'\"": [
        "class B:\n    def __hash__(self): raise KeyError('q')\n"
        "def f(x):\n    try: (B(),).__hash__()\n    except KeyError as error: return str(error)"
    ],
}


def test_what_follows_from_a_program_is_not_refused(pool: SandboxPool) -> None:
    cases = [(Case(program, "code_o", program, ("1",)), output) for output in HONEST for program in HONEST[output]]
    judgements = judge(pool, [case for case, _ in cases])
    assert [one.id for (case, output), one in zip(cases, judgements, strict=True) if one.outputs != (output,)] == []


def test_the_further_runs_of_a_program_take_no_whole_timeout_each() -> None:
    """Each run is within its own limit, and all together are not: the first took no time."""
    slow = "def f(x):\n    if next(iter(set('abcdefgh'))) != FIRST:\n        for n in range(10**8): pass\n    return 1"
    with SandboxPool(workers=1, timeout_seconds=2) as pool:
        told = "def f(x): return next(iter(set('abcdefgh')))"
        detail = judge(pool, [Case("told", "code_o", told, ("1",))])[0].detail  # two runs give 'a' and 'b'
        first = detail.split("'")[1]
        (judgement,) = judge(pool, [Case("slow", "code_o", slow.replace("FIRST", repr(first)), ("1",))])
    assert judgement.verdict is Verdict.TIMEOUT
    assert judgement.detail == "its further runs take too long"
