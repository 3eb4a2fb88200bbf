"""What the trainer wants served: `serving.json`, by which adapters reach vLLM.

    {"format": 1, "step": 12, "adapters": [{"member": "t0", "name": "t0-s000012-1a2b3c4d", "digest": "1a2b3c4d...",
     "files": {"adapter_config.json": "<sha256>", "adapter_model.safetensors": "<sha256>"}}, ...], "sha256": "..."}

The trainer alone writes it, over the one before, when every object that it names is stored. A name belongs to one
adapter's weights for ever, so whoever asks vLLM for it gets these weights or an error.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from populora_trainer.errors import StorageError
from populora_trainer.storage.checkpoint import store_adapter
from populora_trainer.storage.sealed import seal, unseal
from populora_trainer.storage.store import MissingObject, ObjectStore

if TYPE_CHECKING:
    from populora_trainer.population.members import JsonValue
    from populora_trainer.storage.checkpoint import Adapter

SERVING = "serving.json"
FORMAT = 1

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Names become parts of paths and addresses on machines that read a publication.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KIND = "a publication of adapters"


class DamagedPublication(StorageError):  # noqa: N818 - says what is wrong
    """The object is there and is no publication of this format."""


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """One adapter as vLLM shall serve it.

    Attributes:
        member: whose weights they are.
        name: by which vLLM serves them, `<member>-s<step>-<first 8 of digest>` with the step of their first
            publication; never used for other weights.
        digest: of the PEFT folder, which is stored under `adapters/<digest>/`.
        files: sha256 of each of the folder's files by its name.
    """

    member: str
    name: str
    digest: str
    files: Mapping[str, str]

    def key(self, file: str) -> str:
        """Return the name of a file's object in the run's storage."""
        return f"adapters/{self.digest}/{file}"


@dataclass(frozen=True, slots=True)
class Publication:
    """What shall be served.

    Attributes:
        step: number of training steps done when it was published.
        adapters: one for each member, in the order of the population's slots.
        sha256: the document's seal, by which a sidecar says what it has loaded.
    """

    step: int
    adapters: tuple[PublishedAdapter, ...]
    sha256: str

    @property
    def names(self) -> dict[str, str]:
        """The adapters' names by member."""
        return {adapter.member: adapter.name for adapter in self.adapters}


def publish(store: ObjectStore, step: int, adapters: "Mapping[str, Adapter]") -> Publication:
    """Store adapters, then name them in `serving.json`.

    A member whose weights are those of the last publication keeps its name, so that nothing is loaded twice.

    Args:
        store: the run's storage; only its trainer may publish.
        step: number of training steps done.
        adapters: every member's weights by the member's name.

    Returns:
        The publication, which readers see from now on.

    Raises:
        StorageError: an object can't be written.
    """
    try:
        last = read_publication(store)
    except DamagedPublication:
        last = None  # it is replaced now, and nobody could be serving it
    known = {(adapter.member, adapter.digest): adapter for adapter in last.adapters} if last else {}
    published = []
    for member, adapter in adapters.items():
        # The checkpoint has just written most of them, and whoever loads an adapter checks every byte of it.
        digest, files = store_adapter(store, adapter, check=False)
        new = PublishedAdapter(member, f"{member}-s{step:06d}-{digest[:8]}", digest, files)
        published.append(known.get((member, digest), new))
    publication, data = _sealed(step, tuple(published))
    if publication != last:
        store.put(SERVING, data)
    return publication


def read_publication(store: ObjectStore) -> Publication | None:
    """Return what shall be served; None where nothing was published yet.

    Raises:
        DamagedPublication: the object is no publication, or not the one that was written.
        StorageError: the storage can't be read.
    """
    try:
        data = store.get(SERVING)
    except MissingObject:
        return None
    return parse_publication(data, f"{store.location}/{SERVING}")


def parse_publication(data: bytes, place: str = SERVING) -> Publication:
    """Return the publication that the bytes hold.

    Args:
        data: bytes of `serving.json`.
        place: where they were read, for messages.

    Raises:
        DamagedPublication: they are no publication, or not what was written.
    """
    try:
        body, sha256 = unseal(data, place, kind=_KIND, version=FORMAT)
    except StorageError as error:
        raise DamagedPublication(str(error)) from error
    step, rows = body.get("step"), body.get("adapters")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise DamagedPublication(f"{place} is damaged: step is {repr(step)[:100]}, it must be a number of steps")
    if not isinstance(rows, list):
        raise DamagedPublication(f"{place} is damaged: adapters is {repr(rows)[:100]}, it must be a list")
    adapters = tuple(_adapter(row, f"{place} is damaged: adapters[{slot}]") for slot, row in enumerate(rows))
    for field in ("member", "name"):
        (commonest, count), *_ = Counter(getattr(adapter, field) for adapter in adapters).most_common(1) or [("", 0)]
        if count > 1:
            raise DamagedPublication(f"{place} is damaged: two adapters have the {field} {commonest}")
    return Publication(step, adapters, sha256)


def _sealed(step: int, adapters: tuple[PublishedAdapter, ...]) -> tuple[Publication, bytes]:
    """Return the publication and its document's bytes."""
    rows: list[JsonValue] = [
        {"member": one.member, "name": one.name, "digest": one.digest, "files": dict(one.files)} for one in adapters
    ]
    data = seal({"format": FORMAT, "step": step, "adapters": rows})
    return parse_publication(data), data


def _adapter(row: object, where: str) -> PublishedAdapter:
    if not isinstance(row, dict) or not isinstance(files := row.get("files"), dict) or not files:
        raise DamagedPublication(f"{where} must be an object with member, name, digest and files")
    for field in ("member", "name"):
        _check(row.get(field), _NAME, f"{where}.{field}", "letters, digits, '.', '_' and '-' are allowed")
    _check(row.get("digest"), _DIGEST, f"{where}.digest", "it must be a sha256 of 64 hexadecimal digits")
    for file, digest in files.items():
        _check(file, _NAME, f"{where}.files", "names of files are allowed")
        _check(digest, _DIGEST, f"{where}.files[{file}]", "it must be a sha256 of 64 hexadecimal digits")
    # A name that says its weights is nobody else's: not the base model's, not that of another adapter in vLLM.
    due = rf"{re.escape(row['member'])}-s[0-9]+-{row['digest'][:8]}"
    _check(row["name"], re.compile(due), f"{where}.name", "<member>-s<step>-<first 8 digits of digest> is allowed")
    return PublishedAdapter(row["member"], row["name"], row["digest"], dict(files))


def _check(value: object, allowed: re.Pattern[str], where: str, rule: str) -> None:
    if not isinstance(value, str) or not allowed.fullmatch(value):
        raise DamagedPublication(f"{where} is {str(value)[:100]!r}; {rule}")
