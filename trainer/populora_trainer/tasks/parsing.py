"""Text that a language model wrote, turned into parts: fenced blocks and Python syntax trees. Nothing is ever run."""

import ast
import functools
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from populora_trainer.sandbox import literals

_LONE_CLOSE = re.compile(r"</think>[ \t]*$", re.MULTILINE)
_ENTRY_NAME = "f"
_ANY_LENGTH = sys.maxsize // 8  # how long a value may be is the verifier's verdict, and no matter of form


class Block(NamedTuple):
    """One fenced block: the first word of its opening line in lower case ("" where there is none), and its text."""

    tag: str
    text: str


def fenced_blocks(text: str) -> list[Block] | None:
    """Return the fenced blocks of an answer in their order, or None where a fence is left open.

    A fence is a line of three or more backticks, indented or not; it is closed by a line with at least as many
    backticks and nothing else, so a block may contain shorter fences. Line ends may be CRLF.

    Thinking is dropped: an answer that starts with `<think>` counts from the first `</think>` on (None where there is
    none: cut off), and any other from after the first line that ends in `</think>`, because chat templates often put
    the opening tag into the prompt. The tags mean nothing elsewhere, so they may stand in a program's strings.
    """
    answer = _without_thinking(text.replace("\r\n", "\n").replace("\r", "\n"))
    if answer is None:
        return None
    blocks: list[Block] = []
    fence = 0
    tag, lines = "", list[str]()
    for line in answer.split("\n"):
        ticks, info = _fence(line)
        if not fence:
            if ticks:
                fence, tag, lines = ticks, (info.split() or [""])[0].lower(), []
        elif ticks >= fence and not info:
            blocks.append(Block(tag, "\n".join(lines)))
            fence = 0
        else:
            lines.append(line)
    return None if fence else blocks


def _fence(line: str) -> tuple[int, str]:
    """Return the number of backticks of a fence line, 0 for other lines, and what follows them."""
    line = line.strip(" \t")
    info = line.lstrip("`")
    ticks = len(line) - len(info)
    return (ticks, info.strip()) if ticks >= 3 and "`" not in info else (0, "")


def _without_thinking(text: str) -> str | None:
    if text.lstrip().startswith("<think>"):
        _, closed, after = text.partition("</think>")
        return after if closed else None
    closing = _LONE_CLOSE.search(text)
    return text[closing.end() :] if closing else text


def parse_source(program: str) -> ast.Module | None:
    """Return the syntax tree of Python source, or None where it has none (also: too deep, too large, not text)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a model's "\d" is no concern of the log
        try:
            return ast.parse(program)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


@functools.lru_cache(maxsize=4096)
def normalised(program: str) -> str:
    """Return the program's text without what its syntax tree does not hold: comments, spacing, quotes, brackets.

    Two programs with equal trees have equal normalised texts. Names and docstrings stay. Text that is not Python is
    returned stripped.
    """
    tree = parse_source(program)
    if tree is None:
        return program.strip()
    try:
        return ast.unparse(tree)
    except (ValueError, RecursionError):
        return program.strip()


def defines_entry(program: str) -> bool:
    """Tell whether the program parses and defines the function `f` at its top level, with any helpers."""
    tree = parse_source(program)
    return tree is not None and any(
        isinstance(node, ast.FunctionDef) and node.name == _ENTRY_NAME for node in tree.body
    )


def argument_list(text: str) -> str | None:
    """Return positional literal arguments in one canonical spelling, or None where the text is something else.

    The text is what stands between the parentheses of a call, on one or several lines, with at least one argument. A
    sole tuple keeps its parentheses: `(1, 2)` is one argument, `1, 2` are two.
    """
    try:
        return literals.canonical_arguments(literals.parse_arguments(text, _ANY_LENGTH), _ANY_LENGTH) or None
    except (literals.NotLiteral, literals.TooLarge):
        return None


def input_list(texts: Sequence[str], least: int, most: int) -> tuple[str, ...] | None:
    """Return the argument lists of a code_f proposal without repetitions, or None where one is something else.

    Two inputs are equal as values are for the verifier (`sandbox.literals`): `1` and `True` differ, the order of a dict
    makes no difference. Of equal ones the first stays, since a repeated one shows or judges nothing, and in the hidden
    half it would be an answer that the student was shown. A proposal with too few different inputs is like one with too
    few inputs. So Absolute Zero has it with inputs beyond the wanted number: they are dropped, too few are malformed.

    Args:
        texts: what was written, one text an input.
        least: number of different inputs that are needed.
        most: number of inputs that may be written.
    """
    if len(texts) > most:
        return None
    distinct: dict[tuple[str, ...], str] = {}
    for text in texts:
        arguments = argument_list(text)
        if arguments is None:
            return None
        values = literals.parse_arguments(arguments, _ANY_LENGTH)
        distinct.setdefault(tuple(literals.canonical(value, _ANY_LENGTH) for value in values), arguments)
    return tuple(distinct.values()) if len(distinct) >= least else None


def literal_text(text: str) -> str | None:
    """Return one literal in canonical spelling, or None where the text is something else.

    A tuple without parentheses, `1, 2`, counts as the tuple it is in Python.
    """
    try:
        return literals.canonical(literals.parse_literal(text, _ANY_LENGTH), _ANY_LENGTH, as_written=True)
    except (literals.NotLiteral, literals.TooLarge):
        return None
