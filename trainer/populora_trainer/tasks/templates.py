"""How a problem becomes a prompt and a completion becomes a problem or an answer: one protocol, two template sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from populora_trainer.tasks.problem import Problem, TaskType


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


class Control(str):
    """A control token in a compact prompt. What stands beside it as plain `str` is text, whatever it spells."""

    __slots__ = ()


Parts = tuple[str, ...]
"""A compact prompt: control tokens, and between them programs, values and messages that models have written."""

Prompt = Parts | tuple[Message, ...]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that templates use.

    Attributes:
        chat_control_tokens: what a chat prompt spells as text where a message contains it; None for the default.
    """

    chat_control_tokens: list[str] | None

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Text to token ids; with `split_special_tokens`, a special token in it is text like any other."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Every token outside of the learned vocabulary by its id, with `content` and `special`."""

    @property
    def added_tokens_encoder(self) -> Mapping[str, int]:
        """The ids of the same tokens by their text."""

    @property
    def pad_token_id(self) -> int | None:
        """Id of the token that fills up rows."""

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for what the vocabulary lacks."""

    def get_chat_template(self) -> str:
        """The chat template by which messages become text."""

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: Any) -> Any:
        """Chat messages to text or token ids."""


class Template(Protocol):
    """One way to put problems to a model and to read its answers.

    Parsers execute nothing: they look at the syntax tree only, and whatever they return is still to be judged.
    """

    name: str

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, besides those that the base names."""

    def propose(self, task: TaskType, references: Sequence[Problem]) -> Prompt:
        """Ask a teacher for a new problem; for code_f, for inputs and a message about `references[0].program`."""

    def parse_proposal(self, task: TaskType, text: str, references: Sequence[Problem]) -> Problem | None:
        """Read a teacher's completion. None means malformed; the problem's outputs are empty."""

    def solve(self, problem: Problem) -> Prompt:
        """Ask a student; code_f shows the first `problem.shown` pairs and the message."""

    def parse_solution(self, problem: Problem, text: str) -> str | None:
        """Read a student's completion: literal text (code_o), argument list (code_i), program (code_f), or None."""

    def encode(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, ready for generation. Control tokens come from the template and from nothing else."""

    def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Text of a completion for the parsers, without the end-of-sequence token and what follows it."""


def template_for(tokenizer: Tokenizer, base_uri: str) -> Template:
    """Return the template set that a base model was trained for.

    Args:
        tokenizer: the base model's tokenizer; one that knows the token `<po>` belongs to the embedded base.
        base_uri: where the base model comes from; an embedded base never takes chat prompts.

    Raises:
        PopuloraError: an embedded base whose tokenizer lacks the compact tokens.
        ChatTemplateError: the tokenizer's chat template can't put a problem to the model, or not twice the same.
    """
    from populora_trainer.errors import PopuloraError
    from populora_trainer.tasks.chat import ChatTemplate
    from populora_trainer.tasks.compact import PROPOSE_OUTPUT, CompactTemplate
    from populora_trainer.tasks.turns import turns_of

    if PROPOSE_OUTPUT in tokenizer.get_vocab():
        return CompactTemplate()
    if base_uri.startswith("builtin://"):
        raise PopuloraError(
            f"The tokenizer of {base_uri} has no token {PROPOSE_OUTPUT}, so it is not an embedded base."
        )
    return ChatTemplate(turns_of(tokenizer, base_uri))
