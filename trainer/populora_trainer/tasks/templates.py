"""How a problem becomes a prompt and a completion becomes a problem or an answer: one protocol, two template sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from populora_trainer.tasks.problem import Problem, TaskType


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat prompt."""

    role: Literal["system", "user", "assistant"]
    content: str


Prompt = str | tuple[Message, ...]


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that templates use."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends an answer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""

    def get_vocab(self) -> dict[str, int]:
        """Every token with its id."""

    def apply_chat_template(self, conversation: Sequence[dict[str, str]], **options: Any) -> Any:
        """Chat messages to text or token ids."""


class Template(Protocol):
    """One way to put problems to a model and to read its answers.

    Parsers execute nothing: they look at the syntax tree only, and whatever they return is still to be judged.
    """

    name: str

    def propose(self, task: TaskType, references: Sequence[Problem]) -> Prompt:
        """Ask a teacher for a new problem; for code_f, for inputs and a message about `references[0].program`."""

    def parse_proposal(self, task: TaskType, text: str, references: Sequence[Problem]) -> Problem | None:
        """Read a teacher's completion. None means malformed; the problem's outputs are empty."""

    def solve(self, problem: Problem) -> Prompt:
        """Ask a student; code_f shows the first `problem.shown` pairs and the message."""

    def parse_solution(self, problem: Problem, text: str) -> str | None:
        """Read a student's completion: literal text (code_o), argument list (code_i), program (code_f), or None."""

    def encode(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, ready for generation."""

    def decode(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        """Text of a completion for the parsers, without the end-of-sequence token and what follows it."""


def template_for(tokenizer: Tokenizer, base_uri: str) -> Template:
    """Return the template set that a base model was trained for.

    Args:
        tokenizer: the base model's tokenizer; one that knows the token `<po>` belongs to the embedded base.
        base_uri: where the base model comes from; an embedded base never takes chat prompts.

    Raises:
        PopuloraError: an embedded base whose tokenizer lacks the compact tokens.
    """
    from populora_trainer.errors import PopuloraError
    from populora_trainer.tasks.chat import ChatTemplate
    from populora_trainer.tasks.compact import PROPOSE_OUTPUT, CompactTemplate

    if PROPOSE_OUTPUT in tokenizer.get_vocab():
        return CompactTemplate()
    if base_uri.startswith("builtin://"):
        raise PopuloraError(
            f"The tokenizer of {base_uri} has no token {PROPOSE_OUTPUT}, so it is not an embedded base."
        )
    return ChatTemplate()
