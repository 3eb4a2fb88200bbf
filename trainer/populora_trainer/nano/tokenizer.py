"""The tokenizer of the embedded base: a lexer for small Python programs, one token per integer from 0 to 99.

A sum of two small integers is then a table lookup. Printable ASCII is covered character by character, so every
printable text survives a round trip; anything else becomes `<unk>`.
"""

import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer as transformers loads it."""
    ids = {token: index for index, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern()), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, EOS, UNKNOWN)],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


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
        """Token ids of `text`; unknown characters become the id of `<unk>`."""
        unknown = self.ids[UNKNOWN]
        return [self.ids.get(token, unknown) for token in self._find(text)]
