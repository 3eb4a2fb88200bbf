"""Errors of the engine's edges. Each message is one sentence that names the field or file and what is allowed."""


class PopuloraError(Exception):
    """Base of all errors that a user can act on; the command line prints its message without a traceback."""

    exit_code = 1


class AdapterFormatError(PopuloraError):
    """A folder is not a LoRA adapter that the population can take in."""


class OperatorError(PopuloraError):
    """An evolution operator cannot make a child: unknown id, parameter out of range, or parents that do not fit."""


class BaseModelError(PopuloraError):
    """The base model cannot be had, or is not a causal language model that the engine can train adapters on."""


class NoBaseModelError(BaseModelError):
    """The address of the base model names no model: trying again is of no use until the manifest names another."""

    exit_code = 42


class ChatTemplateError(BaseModelError):
    """The base's chat template cannot put a problem to the model: trying again is of no use until it is another."""

    exit_code = 42


class UnfitBaseError(BaseModelError):
    """The base is of an architecture that the engine can't train or sample: the manifest must name another."""

    exit_code = 42


class OtherBaseError(BaseModelError):
    """The base is not the one that the run began on: trying again is of no use until it is put back."""

    exit_code = 42


class AdapterTargetError(PopuloraError):
    """The manifest's target modules can't have adapters in this base."""

    exit_code = 42


class RolloutError(PopuloraError):
    """Completions cannot be sampled: a prompt is too long, or the engine failed."""


class RolloutStoppedError(RolloutError):
    """The end was asked for while nothing was there to sample with; the step that was going on is not kept."""


class StorageError(PopuloraError):
    """An object of a run is missing, damaged, cannot be written, or belongs to another writer."""


class SandboxError(PopuloraError):
    """The verifier's isolation cannot be had, or the verifier itself failed (never the program under test)."""


class RanksError(PopuloraError):
    """The processes that train one run together cannot meet, have lost one of them, or no longer agree."""


def reason_of(error: Exception, limit: int = 300) -> str:
    """Return what another library's error says as a part of a sentence: its kind and its text on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:limit]}" if text else type(error).__name__
