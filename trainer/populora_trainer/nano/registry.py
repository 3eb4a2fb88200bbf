"""The embedded bases by name: where their folders lie and what a user is told about them."""

import filecmp
import shutil
import tempfile
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


def copy_builtin(name: str, folder: Path) -> None:
    """Write an embedded base as a folder, whole or not at all; a folder that holds it already is left as it is.

    Args:
        name: as in `builtin_folder`.
        folder: does not exist, is empty, or holds the same files.

    Raises:
        PopuloraError: there is no base of that name, the folder holds something else, or it can't be written.
    """
    source = builtin_folder(name)
    try:
        if folder.is_dir() and any(folder.iterdir()):
            files = [path.name for path in source.iterdir()]
            _, different, missing = filecmp.cmpfiles(source, folder, files, shallow=False)
            if different or missing or len(list(folder.iterdir())) != len(files):
                raise PopuloraError(f"{folder} holds something else than {name}; name a folder that does not exist.")
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".base-", dir=folder.parent) as temporary:
            shutil.copytree(source, Path(temporary, "base")).rename(folder)
    except OSError as error:
        raise PopuloraError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _known(name: str) -> str:
    short = name.removeprefix(SCHEME)
    if short not in NOTICES:
        given = name if "://" in name else SCHEME + name
        raise PopuloraError(
            f"There is no embedded base {given}; allowed: {', '.join(SCHEME + key for key in NOTICES)}."
        )
    return short
