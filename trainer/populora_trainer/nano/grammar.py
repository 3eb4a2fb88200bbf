"""The grammar of the corpus: writes one random program over integers, lists of integers and strings.

Variables are typed, so a program that is written here nearly always runs; whether it does, and what its outputs are,
`programs.py` finds out.
"""

import random
from collections.abc import Callable

ARGUMENT_NAMES: dict[str, tuple[str, ...]] = {
    "int": ("x", "y", "n", "a", "b"),
    "list": ("v", "w", "q"),
    "str": ("s", "t", "u"),
}
LOCAL_NAMES: dict[str, tuple[str, ...]] = {"int": ("r", "k", "m", "z"), "list": ("p", "o"), "str": ("d", "e")}
SIGNATURES: tuple[tuple[tuple[str, ...], ...], tuple[float, ...]] = (
    (("int",), ("int", "int"), ("list",), ("list", "int"), ("str",), ("str", "int"), ("str", "str"), ("list", "list")),
    (5, 4, 4, 2.5, 4, 1.5, 1, 0.7),
)
ALPHABET = "abcd"


def write_program(rng: random.Random, size: int, wide: bool) -> tuple[str, list[str]]:
    """Return the source of a program `f` and the kinds of its arguments, each "int", "list" or "str".

    Args:
        size: about how many statements precede the return.
        wide: whether constants may have two digits and expressions run deeper.
    """
    return _Writer(rng, wide).program(size)


class _Writer:
    """Writes one random program; holds the variables in scope by kind."""

    def __init__(self, rng: random.Random, wide: bool) -> None:
        self.rng = rng
        self.wide = wide  # two-digit constants and deeper expressions
        self.scope: dict[str, list[str]] = {"int": [], "list": [], "str": []}
        self.taken: set[str] = set()
        self.fixed: set[str] = set()  # loop variables and what a loop runs over: statements do not assign them
        self.known: set[str] = set()  # accumulators that still hold their constant start: nothing tests them

    # expressions -----------------------------------------------------------------------------------------------

    def constant(self) -> str:
        return str(self.rng.randint(10, 30) if self.wide and self.rng.random() < 0.25 else self.rng.randint(1, 9))

    def some(self, kind: str) -> str | None:
        names = self.scope[kind]
        return self.rng.choice(names) if names else None

    def varying(self, kind: str) -> str | None:
        """A variable whose value depends on the arguments."""
        names = [name for name in self.scope[kind] if name not in self.known]
        return self.rng.choice(names) if names else None

    def int_atom(self) -> str:
        name = self.some("int")
        if name and self.rng.random() < 0.75:
            return name
        options = [f"len({other})" for kind in ("list", "str") if (other := self.some(kind))]
        if options and self.rng.random() < 0.8:
            return self.rng.choice(options)
        return name or self.constant()

    def integer(self, depth: int = 1) -> str:
        rng = self.rng
        if depth <= 0 or rng.random() < 0.15:
            return self.int_atom()
        options: list[Callable[[], str]] = []
        if self.scope["int"]:
            options += [self._arithmetic] * 9 + [self._divide] * 2 + [self._extreme]
        values, text = self.some("list"), self.some("str")
        if values:
            options += [
                lambda: f"len({values})",
                lambda: f"sum({values})",
                lambda: f"sum({values})",
                lambda: f"max({values})",
                lambda: f"min({values})",
                lambda: f"{values}[{rng.choice(('0', '-1', '1'))}]",
                lambda: f"{values}[{rng.choice(('0', '-1', '1'))}]",
                lambda: f"{values}.count({self.int_operand()})",
                self._arithmetic,
                self._sum_over,
            ]
        if text:
            letter = repr(rng.choice(ALPHABET))
            options += [lambda: f"len({text})", lambda: f"{text}.count({letter})", self._arithmetic]
        return rng.choice(options)() if options else self.int_atom()

    def int_operand(self) -> str:
        return self.constant() if self.rng.random() < 0.6 or not self.scope["int"] else self.int_atom()

    def _arithmetic(self) -> str:
        rng = self.rng
        operator = rng.choices(("+", "-", "*"), (4, 4, 2))[0]
        left, right = self.int_atom(), self.int_operand()
        if rng.random() < 0.12:
            left, right = self.constant(), left
        if operator == "*" and (right == left or right == "1"):
            right = str(rng.randint(2, 4))
        if operator == "-" and right == left:
            right = self.constant()
        text = f"{left} {operator} {right}"
        if rng.random() < (0.3 if self.wide else 0.12):
            text += f" {rng.choice('+-')} {self.int_operand()}"
        return text

    def _divide(self) -> str:
        operator = self.rng.choice(("//", "%", "%"))
        return f"{self.int_atom()} {operator} {self.rng.randint(2, 7 if self.wide else 5)}"

    def _extreme(self) -> str:
        left, right = self.int_atom(), self.int_operand()
        right = self.constant() if right == left else right
        if self.rng.random() < 0.3:
            return f"abs({left} - {right})"
        return f"{self.rng.choice(('max', 'min'))}({left}, {right})"

    def _sum_over(self) -> str:
        values, item = self.some("list"), self.fresh(("i", "j", "c"))
        if item is None:
            return f"sum({values})"
        if self.rng.random() < 0.5:
            return f"sum([{item} {self.rng.choice('+-*')} {self.rng.randint(2, 4)} for {item} in {values}])"
        return f"sum([{item} for {item} in {values} if {self._item_test(item)}])"

    def _item_test(self, item: str) -> str:
        if self.rng.random() < 0.4:
            return f"{item} % {self.rng.randint(2, 3)} == {self.rng.randint(0, 1)}"
        return f"{item} {self.rng.choice(('<', '>'))} {self.int_operand()}"

    def listing(self, depth: int = 1) -> str:
        rng, values, text = self.rng, self.some("list"), self.some("str")
        if not values:
            start = rng.randint(0, 2)
            number = self.int_atom()
            options = [
                f"list(range({number}))" if start == 0 else f"list(range({start}, {number}))",
                f"[{number}, {self.int_operand()}]",
                f"[{number}] * {rng.randint(2, 3)}",
            ]
            if text:
                options += [f"[len({text}), {self.int_operand()}]"]
            return rng.choice(options)
        item = self.fresh(("i", "j", "c"))
        options = [
            f"{values}[::-1]",
            f"sorted({values})",
            f"{values}[1:]",
            f"{values}[:-1]",
            f"{values}[:{rng.randint(1, 3)}]",
            f"{values} + [{self.int_operand()}]",
            f"[{self.int_operand()}] + {values}",
            f"{values} + {self.some('list')}",
        ]
        if item:
            options += [
                f"[{item} {rng.choice('+-*')} {self.int_operand()} for {item} in {values}]",
                f"[{item} {rng.choice('+-*')} {rng.randint(2, 5)} for {item} in {values}]",
                f"[{item} for {item} in {values} if {self._item_test(item)}]",
            ]
        return rng.choice(options)

    def string(self, depth: int = 1) -> str:
        rng, text = self.rng, self.some("str")
        number = self.some("int")
        if not text:
            return f"str({number})" if number and rng.random() < 0.5 else repr(rng.choice(ALPHABET))
        first, second = (repr(letter) for letter in rng.sample(ALPHABET, 2))
        options = [
            f"{text}[::-1]",
            f"{text} + {first}",
            f"{first} + {text}",
            f"{text} + {self.some('str')}",
            f"{text}[1:]",
            f"{text}[:-1]",
            f"{text}[:{rng.randint(1, 3)}]",
            f"{text} * 2",
            f"{text}.upper()",
            f"{text}.replace({first}, {second})",
            f"''.join(sorted({text}))",
            f"{text}[0]",
            f"{text}[-1]",
        ]
        if number:
            options += [f"{text} + str({number})", f"{text}[:{number}]", f"{text}[{number}:]"]
        return rng.choice(options)

    def condition(self) -> str:
        rng = self.rng
        options: list[str] = []
        number, values, text = self.varying("int"), self.varying("list"), self.varying("str")
        if number:
            comparison = rng.choice(("<", ">", "<=", ">=", "==", "!="))
            operand = self.int_operand()
            options += [f"{number} {comparison} {self.constant() if operand == number else operand}"] * 4
            options += [f"{number} % {rng.randint(2, 3)} == {rng.randint(0, 1)}"] * 2
        if values:
            options += [
                f"{self.int_operand()} in {values}",
                f"len({values}) > {rng.randint(1, 3)}",
                f"{values}[0] {rng.choice('<>')} {self.int_operand()}",
                f"sum({values}) > {rng.randint(4, 15)}",
            ]
        if text:
            letter = repr(rng.choice(ALPHABET))
            options += [f"{letter} in {text}", f"len({text}) > {rng.randint(1, 3)}", f"{text}[0] == {letter}"]
        return rng.choice(options) if options else f"{self.int_atom()} > {self.constant()}"

    def expression(self, kind: str, depth: int = 1) -> str:
        if kind == "int":
            return self.integer(depth)
        if kind == "list":
            return self.listing(depth)
        return self.string(depth) if kind == "str" else self.condition()

    # statements ------------------------------------------------------------------------------------------------

    def fresh(self, names: tuple[str, ...]) -> str | None:
        free = [name for name in names if name not in self.taken]
        return free[0] if free and self.rng.random() < 0.8 else (self.rng.choice(free) if free else None)

    def declare(self, kind: str, name: str) -> None:
        if name not in self.scope[kind]:
            self.scope[kind].append(name)
        self.taken.add(name)

    def kind(self) -> str:
        weights = [3 if self.scope[kind] else (1 if kind == "int" else 0.15) for kind in ("int", "list", "str")]
        return self.rng.choices(("int", "list", "str"), weights)[0]

    def local(self) -> tuple[str, str] | None:
        """A variable that a statement may change, of any kind."""
        pairs = [(kind, name) for kind, names in self.scope.items() for name in names if name not in self.fixed]
        return self.rng.choice(pairs) if pairs else None

    def assign(self, indent: str) -> list[str]:
        kind = self.kind()
        name = self.some(kind) if self.rng.random() < 0.3 else self.fresh(LOCAL_NAMES[kind])
        if name is None or (name in self.fixed and name in ("i", "j", "c")):
            return self.change(indent)
        text = self.expression(kind)
        if text.isidentifier():
            return self.change(indent)
        self.declare(kind, name)
        self.known.discard(name)
        return [f"{indent}{name} = {text}"]

    def change(self, indent: str, looped: bool = False) -> list[str]:
        """Update a local variable in place, in a way that stays small inside a loop."""
        rng, target = self.rng, self.local()
        if target is None:
            return []
        kind, name = target
        self.known.discard(name)
        if kind == "int":
            operand = self.int_operand() if rng.random() < 0.5 else self.int_atom()
            if operand == name:
                operand = self.constant()
            if rng.random() < 0.15:
                return [f"{indent}{name} = {rng.choice(('max', 'min'))}({name}, {operand})"]
            if rng.random() < 0.15 and not (looped and self.wide):
                return [f"{indent}{name} = {name} * {rng.randint(2, 3)}"]
            return [f"{indent}{name} {rng.choices(('+=', '-='), (3, 2))[0]} {operand}"]
        if kind == "list":
            return [f"{indent}{name}.append({self.int_operand() if rng.random() < 0.4 else self.int_atom()})"]
        letters = [other for other in self.scope["str"] if other in ("i", "j", "c")]
        piece = letters[0] if letters and rng.random() < 0.8 else repr(rng.choice(ALPHABET))
        return [f"{indent}{name} = {piece} + {name}"] if rng.random() < 0.35 else [f"{indent}{name} += {piece}"]

    def step(self, indent: str, looped: bool) -> list[str]:
        """One simple statement; inside a loop only changes, since an assignment there could double a value."""
        return self.change(indent, looped) if looped or self.rng.random() < 0.5 else self.assign(indent)

    def branch(self, indent: str, looped: bool = False) -> list[str]:
        rng, test = self.rng, self.condition()
        inner = indent + "    "
        if not looped and rng.random() < 0.3:
            return [f"{indent}if {test}:", f"{inner}return {{result}}"]
        before = self.snapshot()
        body = self.step(inner, looped)
        if not body:
            return []
        lines = [f"{indent}if {test}:", *body]
        self.restore(before)
        if rng.random() < 0.5:
            other = self.step(inner, looped)
            self.restore(before)
            if other and other != body:
                lines += [f"{indent}else:", *other]
        return lines

    def loop(self, indent: str, budget: int, depth: int = 0) -> list[str]:
        rng, lines = self.rng, []
        if self.local() is None or rng.random() < 0.5:
            kind = rng.choices(("int", "list", "str"), (5, 2, 2 if self.scope["str"] else 0.3))[0]
            name = self.fresh(LOCAL_NAMES[kind])
            if name:
                start = {"int": rng.choice(("0", "0", "1", self.int_operand())), "list": "[]", "str": "''"}[kind]
                lines.append(f"{indent}{name} = {start}")
                self.declare(kind, name)
                self.known.add(name)
        item = next((name for name in ("i", "j", "c") if name not in self.taken), None)
        values, text, number = self.varying("list"), self.varying("str"), self.varying("int")
        heads: list[tuple[str, str]] = []
        if values:
            heads += [(values, "int")] * 3
        if text:
            heads += [(text, "str")] * 3
        if number and number not in ("i", "j", "c"):
            heads += [(f"range({number})", "int")] * 2 + [(f"range(1, {number})", "int")]
        heads += [(f"range({rng.randint(2, 4)})", "int")]
        if depth and number in ("i", "j", "c"):
            heads += [(f"range({number})", "int")] * 2
        if item is None or self.local() is None:
            return lines
        over, kind = rng.choice(heads)
        before = self.snapshot()
        self.declare(kind, item)
        self.fixed.add(item)
        blocked = over if over.isidentifier() else ""
        self.fixed.add(blocked)
        inner = indent + "    "
        self.known.clear()
        body: list[str] = []
        for _ in range(1 if budget < 3 else rng.randint(1, 2 if budget < 5 else 3)):
            roll = rng.random()
            if depth == 0 and budget >= 3 and roll < 0.2:
                body += self.loop(inner, 1, 1)
            elif roll < 0.45:
                body += self.branch(inner, True)
            else:
                body += self.change(inner, True)
        self.restore(before)
        return [*lines, f"{indent}for {item} in {over}:", *body] if body else lines

    def while_loop(self, indent: str) -> list[str]:
        rng = self.rng
        number = self.varying("int")
        if number is None or number in ("i", "j", "c"):
            return self.assign(indent)
        lines = []
        if self.local() is None or self.local() == ("int", number):
            name = self.fresh(LOCAL_NAMES["int"])
            if name is None:
                return []
            lines.append(f"{indent}{name} = {rng.choice(('0', '1', self.constant()))}")
            self.declare("int", name)
        inner = indent + "    "
        self.fixed.add(number)
        body = self.change(inner, True)
        self.fixed.discard(number)
        step = (
            f"{number} -= {rng.randint(1, 3)}" if rng.random() < 0.7 else f"{number} = {number} // {rng.randint(2, 3)}"
        )
        return [*lines, f"{indent}while {number} > {rng.randint(0, 3)}:", *body, f"{inner}{step}"]

    def snapshot(self) -> tuple[dict[str, list[str]], set[str], set[str]]:
        return {kind: list(names) for kind, names in self.scope.items()}, set(self.taken), set(self.fixed)

    def restore(self, saved: tuple[dict[str, list[str]], set[str], set[str]]) -> None:
        """Forget the names declared since; they may be unbound on some path."""
        scope, taken, fixed = saved
        self.scope = {kind: list(names) for kind, names in scope.items()}
        self.taken, self.fixed = set(taken), set(fixed)

    def program(self, size: int) -> tuple[str, list[str]]:
        """Source of a program with about `size` statements before its return, and its arguments' kinds."""
        rng = self.rng
        kinds = list(rng.choices(*SIGNATURES)[0])
        names: list[str] = []
        for kind in kinds:
            pool = [name for name in ARGUMENT_NAMES[kind] if name not in names]
            names.append(pool[0] if rng.random() < 0.5 else rng.choice(pool))
            self.declare(kind, names[-1])
        lines: list[str] = []
        for _ in range(size):
            roll, budget = rng.random(), size
            if roll < 0.34:
                lines += self.assign("    ")
            elif roll < 0.58:
                lines += self.branch("    ")
            elif roll < 0.9:
                lines += self.loop("    ", budget)
            else:
                lines += self.while_loop("    ")
        kind = self._result_kind(kinds, bool(lines))
        lines = [line.replace("{result}", self._early(kind)) if "{result}" in line else line for line in lines]
        lines.append(f"    return {self._result(kind, lines)}")
        return f"def f({', '.join(names)}):\n" + "\n".join(lines), kinds

    def _result_kind(self, kinds: list[str], body: bool) -> str:
        if body:
            local = self.local()
            if local and self.rng.random() < 0.85:
                return local[0]
        return self.rng.choices((self.rng.choice(kinds), "int", "list", "str", "bool"), (5, 2, 0.4, 0.5, 0.4))[0]

    def _early(self, kind: str) -> str:
        if kind == "bool" or self.rng.random() < 0.6:
            return self.expression(kind)
        return self.some(kind) or self.expression(kind)

    def _result(self, kind: str, lines: list[str]) -> str:
        if kind == "bool":
            return self.condition()
        locals_ = [name for name in self.scope[kind] if name in LOCAL_NAMES[kind]]
        if locals_ and self.rng.random() < 0.65:
            return self.rng.choice(locals_)
        if kind == "int" and locals_ and self.rng.random() < 0.7:
            return f"{self.rng.choice(locals_)} {self.rng.choice('+-')} {self.int_operand()}"
        return self.expression(kind)
