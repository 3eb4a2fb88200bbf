"""What a run is of: the base that its adapters are trained on, by its content and not by its address.

`base.json` beside `run.yaml` is written before the first step and never changes after it. An adapter is worth something
on the weights it was trained on alone, so a run does not go on with others.
"""

import json
from dataclasses import asdict, dataclass, fields

from populora_trainer.errors import OtherBaseError, StorageError
from populora_trainer.storage.store import MissingObject, ObjectStore

BASE = "base.json"


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The base of a run.

    Attributes:
        uri: its address.
        revision: commit of the hub that the address stood for; None where it is no hub's.
        weights: SHA-256 of its weights, as `weights_digest` gives it.
        tokenizer: SHA-256 of its tokenizer and chat template.
        transformers: version of the library that loaded it, which decides how weights are named and laid out.
    """

    uri: str
    revision: str | None
    weights: str
    tokenizer: str
    transformers: str


def read_base(store: ObjectStore) -> BaseRecord | None:
    """Return the base of a run; None where it was not recorded.

    Raises:
        StorageError: the record is damaged.
    """
    try:
        data = store.get(BASE)
    except MissingObject:
        return None
    try:
        record = BaseRecord(**json.loads(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(store) from error
    if not all(isinstance(value, str) or name == "revision" for name, value in asdict(record).items()):
        raise _damaged(store)
    return record


def settle_base(store: ObjectStore, now: BaseRecord, *, begun: bool) -> None:
    """Record the base of a run that has not begun, and compare it with the recorded one where it has.

    Args:
        store: the run.
        now: the base as this process has loaded it.
        begun: whether a step is committed, the zeroth included.

    Raises:
        OtherBaseError: the run began on another base.
        StorageError: the record is damaged, or can't be written.
    """
    before = read_base(store)
    if begun and before is not None:
        if before.weights != now.weights:
            raise _other("weights", before, now, store)
        if before.tokenizer != now.tokenizer:
            raise _other("a tokenizer or chat template", before, now, store)
        return
    if before != now:
        store.put(BASE, json.dumps(asdict(now), indent=1).encode() + b"\n")


def _other(part: str, before: BaseRecord, now: BaseRecord, store: ObjectStore) -> OtherBaseError:
    field = "weights" if part == "weights" else "tokenizer"
    was, found = getattr(before, field)[:8], getattr(now, field)[:8]
    library = (
        f", or transformers {now.transformers} reads it in another way than {before.transformers}"
        if before.transformers != now.transformers
        else ""
    )
    return OtherBaseError(
        f"baseModel.uri: {now.uri} has {part} ({found}) that this run did not begin with ({was}): put back what was "
        f"there{library}, or begin another run; {store.location}/{BASE} has the digests"
    )


def _damaged(store: ObjectStore) -> StorageError:
    names = ", ".join(field.name for field in fields(BaseRecord))
    return StorageError(
        f"{store.location}/{BASE} is damaged: it must be an object of {names}; once it is deleted, the run goes on "
        f"with the base that is there"
    )
