"""What can go wrong between a publication and vLLM, each kind counted by itself."""

from typing import Literal

from populora_trainer.errors import PopuloraError

Kind = Literal["storage", "damaged", "disk", "vllm", "refused"]
KINDS: dict[Kind, str] = {
    "storage": "the run's storage cannot be read",
    "damaged": "an object is not what was published",
    "disk": "an adapter cannot be written to the folder that vLLM reads",
    "vllm": "vLLM does not answer",
    "refused": "vLLM does not take an adapter in, or does not let go of one",
}


class ServingError(PopuloraError):
    """An adapter is not served yet.

    Attributes:
        kind: what is at fault.
        gone: nothing answers where vLLM should be, so whatever it had loaded is lost.
    """

    def __init__(self, kind: Kind, message: str, *, gone: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.gone = gone
