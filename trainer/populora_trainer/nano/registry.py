"""The embedded bases by name: where their folders lie and what a user is told about them."""

from pathlib import Path

from populora_trainer.errors import PopuloraError

WEIGHTS = Path(__file__).with_name("weights")
SCHEME = "builtin://"
NOTICES = {
    "nano": "",
    "nano-raw": (
        "builtin://nano-raw is builtin://nano tuned on deliberately careless answers, a designed handicap "
        "that leaves reinforcement learning more to elicit; its gains do not measure a real model's."
    ),
}


def builtin_folder(name: str) -> Path:
    """Return the model folder of an embedded base, given as `nano` or `builtin://nano`.

    Raises:
        PopuloraError: there is no base of that name.
    """
    return WEIGHTS / _known(name)


def builtin_notice(name: str) -> str:
    """Return the one line that whoever uses the base is told, or an empty text.

    Raises:
        PopuloraError: there is no base of that name.
    """
    return NOTICES[_known(name)]


def _known(name: str) -> str:
    short = name.removeprefix(SCHEME)
    if short not in NOTICES:
        raise PopuloraError(
            f"There is no embedded base {SCHEME}{short}; allowed: {', '.join(SCHEME + key for key in NOTICES)}."
        )
    return short
