"""The tokenizer of the embedded base: a lexer for small Python programs, one token per integer from 0 to 99.

A sum of two small integers is then a table lookup. Printable ASCII is covered character by character, so every
printable text survives a round trip; anything else is left out.
"""

import re
from pathlib import Path

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

from populora_trainer.tasks.compact import EOS, PAD, SPECIAL_TOKENS, UNKNOWN

HINT_WORDS = (
    *("add", "sub", "mul", "div", "mod", "loop", "nested", "while", "if", "else", "early", "len", "sum", "max", "min"),
    *("abs", "sorted", "reverse", "slice", "index", "count", "append", "join", "upper", "replace", "range", "list"),
    *("str", "int", "bool", "repeat", "filter", "map", "compare", "in"),
)
_PIECES = (
    *("def f(", "\n    return ", "\n        return ", "def g(", "):", "return ", "if ", "elif ", "else:"),
    *("else ", "for ", "while ", " in ", " not in "),
    *(" if ", " else ", " for ", " and ", " or ", "not ", "True", "False", "None", "range(", "len(", "sum(", "max("),
    *("min(", "abs(", "sorted(", "str(", "int(", "list(", "set(", ".append(", ".count(", ".upper()", ".lower()"),
    *(".replace(", ".join(", ".index(", "''", "[::-1]", "[-1]", "[]", "()", "))", "[1:]", "[:-1]", "break"),
    *("continue", "lambda ", "import ", "class ", " + ", " - ", " * ", " // ", " % ", " ** ", " / ", " == ", " != "),
    *(" < ", " > ", " <= ", " >= ", " = ", " += ", " -= ", " *= ", ", ", ": ", "enumerate(", "zip("),
)
_BYTE_LEVEL = {" ": "Ġ", "\n": "Ċ", "\t": "ĉ"}  # how byte-level BPE spells what is not printable
_NEWLINES = tuple("\n" + "    " * depth for depth in range(6))
_NUMBERS = tuple(str(number) for number in range(10, 100))
_PRINTABLE = tuple(chr(code) for code in range(32, 127))


def vocabulary() -> list[str]:
    """Every token in id order: special tokens, integers, characters, indented newlines, pieces of syntax, hints."""
    words = (*SPECIAL_TOKENS, *_PRINTABLE, *_NUMBERS, *_NEWLINES, "\t", *_PIECES, *HINT_WORDS)
    return list(dict.fromkeys(words))


def pattern() -> str:
    """Regular expression whose leftmost alternative is the token at every position (longest pieces first)."""
    pieces = sorted((*_PIECES, *HINT_WORDS, *_NEWLINES), key=len, reverse=True)
    return "|".join(
        (*(re.escape(piece).replace("\\\n", "\\n").replace("\\ ", " ") for piece in pieces), "[1-9][0-9]", r"[\s\S]")
    )


def build_tokenizer() -> Qwen2Tokenizer:
    """Return the tokenizer as transformers loads it.

    AutoTokenizer makes a Qwen2Tokenizer for a Qwen2 model whatever its files say, and that class replaces the model of
    `tokenizer.json` by byte-level BPE. So the lexer is written in its terms: tokens of several characters are added
    tokens, which are matched first, leftmost and longest; BPE without merges spells the rest in single characters.
    """
    words = vocabulary()
    vocab = {_BYTE_LEVEL.get(token, token): index for index, token in enumerate(words)}
    extra = [token for token in SPECIAL_TOKENS if token not in (PAD, EOS, UNKNOWN)]
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=[],
        unk_token=UNKNOWN,
        eos_token=EOS,
        pad_token=PAD,
        extra_special_tokens=extra,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    several = [token for token in words if len(token) > 1 and token not in SPECIAL_TOKENS]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in several])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and its configuration into `folder`."""
    build_tokenizer().save_pretrained(str(folder))


class Lexer:
    """The same token ids as the saved tokenizer from one compiled expression, for encoding a corpus."""

    def __init__(self) -> None:
        self.ids = {token: index for index, token in enumerate(vocabulary())}
        special = "|".join(re.escape(token) for token in sorted(SPECIAL_TOKENS, key=len, reverse=True))
        self._find = re.compile(f"{special}|{pattern()}").findall

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; characters outside the vocabulary are left out."""
        return [self.ids[token] for token in self._find(text) if token in self.ids]
