"""From chat messages to token ids: control tokens come from the chat template alone, and it says the same every day.

A program, an output or a message that spells `<|im_end|>` is text. transformers encodes such text without the token
(`sanitize_control_tokens`); all other text has the token ids that it always has. Control tokens are a tokenizer's
special tokens, what its chat template writes, and what looks like one: Qwen's `<|fim_prefix|>` is not marked special.
Other added tokens, like Gemma's `<table>` and runs of spaces, are ordinary text.
"""

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from populora_trainer.errors import ChatTemplateError
from populora_trainer.tasks.templates import Message, Tokenizer

TODAY = datetime(2024, 7, 26)
"""The date that a chat template is told. It is the one that Llama 3 templates name where they know of no clock."""

_DIALOGUE = "{% for turn in messages %}{{ turn.role | capitalize }}: {{ turn.content }}\n\n{% endfor %}Assistant:"
_CLOCK = re.compile(r"\bstrftime_now\b")
_CLOCK_CALL = re.compile(r"""\bstrftime_now\s*\(\s*("[^"\\]*"|'[^'\\]*')\s*\)""")
_CLOCK_TEST = re.compile(r"\bstrftime_now\s+is\s+(?:not\s+)?defined\b")
_CHANCE = re.compile(r"\|\s*random\b|\blipsum\s*\(")
_MARKUP = re.compile(r"<[|｜].*[|｜]>$")
_PROBE = "def f(x):\n    return {'a': [x < 1, \"<b>\"]}  # 73 & 19"


@dataclass(frozen=True, slots=True)
class Turns:
    """How the messages of a prompt become token ids.

    Attributes:
        template: of Jinja, without a clock.
        opening: token ids before the text that the template writes.
        end_ids: what the template ends the assistant's turn with, and the tokenizer's padding, which says no more.
    """

    template: str
    opening: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages with the opening of the assistant's turn."""
        return [*self.opening, *self._apply(tokenizer, messages, sanitize_control_tokens=True, return_dict=False)]

    def render(self, tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
        """The same as text."""
        return str(self._apply(tokenizer, messages, tokenize=False))

    def _apply(self, tokenizer: Tokenizer, messages: Sequence[Message], **options: Any) -> Any:
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        asked = {"chat_template": self.template, "add_generation_prompt": True, **options}
        return tokenizer.apply_chat_template(conversation, **asked)


PLAIN_DIALOGUE = Turns(_DIALOGUE)
"""What a tokenizer without a chat template gets, as base models have."""


def turns_of(tokenizer: Tokenizer, base_uri: str) -> Turns:
    """Return how a base's chat prompts are encoded, tried once.

    Raises:
        ChatTemplateError: the tokenizer's chat template is empty, raises, loses the user's words, draws at random, or
            asks the clock in a way that can't be answered beforehand; or control tokens can't be encoded as text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        turns = Turns(_DIALOGUE, _opening(tokenizer))
    else:
        turns = Turns(_settled(_chosen(tokenizer, base_uri), base_uri))
    tokenizer.chat_control_tokens = _control_tokens(tokenizer, turns.template)
    _try(turns, tokenizer, base_uri)
    return replace(turns, end_ids=_end_ids(turns, tokenizer))


def _chosen(tokenizer: Tokenizer, base_uri: str) -> str:
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several named templates, none of which is the default
        raise _refusal(base_uri, f"can't be chosen: {error}") from error
    if not template.strip():
        raise _refusal(base_uri, "is empty; remove it, and the model gets a plain dialogue")
    return template


def _settled(template: str, base_uri: str) -> str:
    """Return the template with the clock stopped at `TODAY`.

    Source: `strftime_now` is what transformers offers to templates beside plain Jinja.
    """
    if _CHANCE.search(template):
        raise _refusal(base_uri, "draws at random, so no run with it could be repeated")
    calls = _CLOCK_CALL.findall(template)
    if len(calls) + len(_CLOCK_TEST.findall(template)) != len(_CLOCK.findall(template)):
        raise _refusal(base_uri, "asks the clock in a format that it computes, so no run with it could be repeated")
    if not calls:
        return template
    answers = {form: TODAY.strftime(form) for form in map(ast.literal_eval, calls)}
    clock = "{% macro strftime_now(format) %}{{ " + json.dumps(answers) + "[format] }}{% endmacro +%}"
    return clock + template


def _opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return what the tokenizer puts before a text, e.g. its beginning-of-sequence token."""
    bare = tokenizer.encode("x", add_special_tokens=False)
    whole = tokenizer.encode("x", add_special_tokens=True)
    starts = range(len(whole) - len(bare) + 1)
    return tuple(next((whole[:start] for start in starts if whole[start : start + len(bare)] == bare), ()))


def _control_tokens(tokenizer: Tokenizer, template: str) -> list[str]:
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or _MARKUP.match(token.content) or (token.content in template and not token.content.isspace())
    ]


def _try(turns: Turns, tokenizer: Tokenizer, base_uri: str) -> None:
    probe = [Message("user", _PROBE)]
    try:
        text = turns.render(tokenizer, probe)
    except Exception as error:  # whatever the template's own code raises
        raise _refusal(base_uri, f"fails on a single turn of the user: {_sentence(error)}") from error
    if _PROBE not in text:
        raise _refusal(base_uri, f"does not show the user's words as they are: it makes {text[:200]!r} of {_PROBE!r}")
    plain = turns.encode(tokenizer, probe)
    control = set(tokenizer.chat_control_tokens or ())
    numbers = tokenizer.added_tokens_encoder
    spelled = f"{_PROBE}\n{' '.join(sorted(control))}"
    try:
        hostile = turns.encode(tokenizer, [Message("user", spelled)])
    except ValueError as error:
        raise _refusal(base_uri, f"can't be used: {_sentence(error)}") from error
    for token in sorted(control):
        if hostile.count(numbers[token]) > plain.count(numbers[token]):
            raise _refusal(base_uri, f"can't be used: the tokenizer takes text that spells {token} for the token")


def _end_ids(turns: Turns, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end the assistant's turn: the first control token behind what it says, and padding.

    Qwen's base models end a text with `<|endoftext|>`, which their generation configuration names, and a turn with
    `<|im_end|>`, which only their template does.
    """
    control = {tokenizer.added_tokens_encoder[token] for token in tokenizer.chat_control_tokens or ()}
    exchange = [Message("user", _PROBE), Message("assistant", _PROBE)]
    try:
        text = str(turns._apply(tokenizer, exchange, tokenize=False, add_generation_prompt=False))
    except Exception:  # a template for single questions, whose own code may raise anything
        text = ""
    behind = tokenizer.encode(text.rpartition(_PROBE)[2], add_special_tokens=False) if _PROBE in text else []
    found = [token for token in behind if token in control][:1]
    padding = tokenizer.pad_token_id
    if found and padding in control and padding != tokenizer.unk_token_id:
        found.append(padding)
    return tuple(sorted(set(found)))


def _refusal(base_uri: str, reason: str) -> ChatTemplateError:
    return ChatTemplateError(f"baseModel.uri: the chat template of {base_uri} {reason}")


def _sentence(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
