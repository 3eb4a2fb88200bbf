"""Checkpoints: everything that the next step depends on, under one manifest that is written last.

    steps/000010.json     members, counters and the digest of every object below; names itself by `sha256`
    adapters/<digest>/    a member's PEFT folder
    optimizer/<digest>    safetensors
    buffer/<digest>       problems seen
    archive/<digest>      cells covered
    LATEST                the newest step and its manifest's sha256

Objects are named by their content and never change, so equal states have equal manifests. A checkpoint exists once
its manifest does; LATEST is a convenience for readers and is set right by the next writer if it lags behind.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from populora_trainer.errors import PopuloraError, StorageError
from populora_trainer.population.members import JsonValue, Member
from populora_trainer.storage.sealed import seal, unseal
from populora_trainer.storage.store import AlreadyExists, MissingObject, ObjectStore, sha256

# Who only reads where a run stands (`populora status`) must not wait for torch: what holds tensors is imported by
# the two functions that write and read them.
if TYPE_CHECKING:
    import torch

    from populora_trainer.population.factors import Factors
    from populora_trainer.population.peft_format import AdapterConfig

FORMAT = 1
LATEST = "LATEST"

_STEP_KEY = re.compile(r"steps/([0-9]{6,})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Objects that may name a checkpoint or a part of one; what they name is kept.
_REFERRERS = ("LATEST", "serving.json", "evaluation/")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A member's weights as they are stored: its factors and the settings of the PEFT folder."""

    factors: "Factors"
    config: "AdapterConfig"


@dataclass(frozen=True)
class CheckpointState:
    """What a run is made of between two steps.

    Attributes:
        members: the population, in the order of its slots.
        adapters: every member's weights, in the same order.
        optimizer: the stacked optimizer state by name.
        buffer, archive: the problem buffer and the archive as their owners write them.
        counters: whatever else must survive, as JSON values; no times and no places.
    """

    members: Sequence[Member]
    adapters: Sequence[Adapter]
    optimizer: "Mapping[str, torch.Tensor]"
    buffer: bytes
    archive: bytes
    counters: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        step: number of steps that were done.
        digest: sha256 of the manifest's bytes; equal exactly where the states are.
        members: the population, in the order of its slots.
        adapters: digest of every member's PEFT folder, in the same order.
        files: sha256 of every file of those folders, by object name.
        optimizer, buffer, archive: digests.
        counters: as stored.
    """

    step: int
    digest: str
    members: tuple[Member, ...]
    adapters: tuple[str, ...]
    files: Mapping[str, str]
    optimizer: str
    buffer: str
    archive: str
    counters: Mapping[str, JsonValue]

    def objects(self) -> dict[str, str]:
        """Return the name of every object of the checkpoint with the sha256 of its bytes."""
        blobs = {f"optimizer/{self.optimizer}", f"buffer/{self.buffer}", f"archive/{self.archive}"}
        return {**self.files, **{key: key.partition("/")[2] for key in sorted(blobs)}}


def write_checkpoint(store: ObjectStore, step: int, state: CheckpointState) -> Manifest:
    """Store a state as the checkpoint of a step; it exists when this returns.

    Objects that an earlier checkpoint holds are checked and not written again.

    Raises:
        StorageError: the step has a checkpoint already, or an object can't be written.
    """
    from safetensors.torch import save

    if len(state.members) != len(state.adapters):
        raise ValueError(f"{len(state.members)} members have {len(state.adapters)} adapters")
    files: dict[str, str] = {}
    adapters = []
    for adapter in state.adapters:
        folder, contents = store_adapter(store, adapter)
        files |= {f"adapters/{folder}/{name}": expected for name, expected in contents.items()}
        adapters.append(folder)
    blobs = {
        "optimizer": save({name: tensor.contiguous() for name, tensor in sorted(state.optimizer.items())}),
        "buffer": state.buffer,
        "archive": state.archive,
    }
    digests = {kind: sha256(data) for kind, data in blobs.items()}
    for kind, data in blobs.items():
        _keep(store, f"{kind}/{digests[kind]}", data, digests[kind])
    body = seal(
        {
            "format": FORMAT,
            "step": step,
            "members": [member.to_dict() for member in state.members],
            "adapters": adapters,
            "files": files,
            "counters": dict(state.counters),
            **digests,
        }
    )
    try:
        store.create(step_key(step), body)
    except AlreadyExists as error:
        raise StorageError(
            f"another trainer has already written step {step} of this run ({store.location}); "
            f"this one stops and overwrites nothing"
        ) from error
    manifest = _parse_manifest(store, step_key(step), body)
    point_latest(store, manifest)
    return manifest


def store_adapter(store: ObjectStore, adapter: Adapter, *, check: bool = True) -> tuple[str, dict[str, str]]:
    """Store a member's weights under `adapters/<digest>/`; files that are there already are not written again.

    Args:
        store: the run.
        adapter: the weights.
        check: read what is there, and write it again where it is damaged; else its length is enough.

    Returns:
        The digest of the PEFT folder, and the sha256 of each of its files by name.

    Raises:
        StorageError: a file can't be written.
    """
    from populora_trainer.population.peft_format import adapter_to_files, digest

    contents = adapter_to_files(adapter.factors, adapter.config)
    folder = digest(contents)
    files = {name: sha256(data) for name, data in sorted(contents.items())}
    for name, expected in files.items():
        key = f"adapters/{folder}/{name}"
        if check or not _has_length(store, key, len(contents[name])):
            _keep(store, key, contents[name], expected)
    return folder, files


def steps(store: ObjectStore) -> list[int]:
    """Return the steps that have a checkpoint, oldest first."""
    return sorted(int(match[1]) for key in store.list("steps/") if (match := _STEP_KEY.fullmatch(key)))


def read_manifest(store: ObjectStore, step: int) -> Manifest:
    """Return a step's manifest, checked against its own digest.

    Raises:
        StorageError: it is missing or damaged.
    """
    manifest = _parse_manifest(store, step_key(step), store.get(step_key(step)))
    if manifest.step != step:
        raise StorageError(f"{store.location}/{step_key(step)} is damaged: it is the manifest of step {manifest.step}")
    return manifest


def read_checkpoint(store: ObjectStore, manifest: Manifest) -> CheckpointState:
    """Return the state that a manifest describes, every object checked against its digest.

    Raises:
        StorageError: an object is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from populora_trainer.population.peft_format import adapter_from_files

    adapters = []
    for folder in manifest.adapters:
        prefix = f"adapters/{folder}/"
        contents = {
            key.removeprefix(prefix): _checked(store, key, expected)
            for key, expected in manifest.files.items()
            if key.startswith(prefix)
        }
        try:
            adapters.append(Adapter(*adapter_from_files(contents)))
        except PopuloraError as error:
            raise StorageError(f"{store.location}/{prefix} is not an adapter: {error}") from error
    optimizer = _checked(store, f"optimizer/{manifest.optimizer}", manifest.optimizer)
    try:
        tensors = load(optimizer)
    except SafetensorError as error:
        raise StorageError(f"{store.location}/optimizer/{manifest.optimizer} can't be read: {error}") from error
    return CheckpointState(
        members=manifest.members,
        adapters=adapters,
        optimizer=tensors,
        buffer=_checked(store, f"buffer/{manifest.buffer}", manifest.buffer),
        archive=_checked(store, f"archive/{manifest.archive}", manifest.archive),
        counters=manifest.counters,
    )


def newest_manifest(store: ObjectStore) -> Manifest | None:
    """Return the newest checkpoint's manifest; None where the run has no checkpoint yet.

    Raises:
        StorageError: the newest manifest is damaged, or LATEST names a later one that is gone. The sentence says which
            earlier step is intact.
    """
    known = steps(store)
    promised = _promised_step(store)
    if promised is not None and (not known or promised > known[-1]):
        raise _with_way_out(store, promised, MissingObject(f"{store.location}/{step_key(promised)} is missing"))
    if not known:
        return None
    try:
        return read_manifest(store, known[-1])
    except StorageError as error:
        raise _with_way_out(store, known[-1], error) from error


def load_newest(store: ObjectStore) -> tuple[Manifest, CheckpointState] | None:
    """Return the newest checkpoint with its state; None where the run has no checkpoint yet.

    Raises:
        StorageError: something of it is missing or damaged. The sentence says which earlier step is intact: whether to
            repeat the steps since then is the user's decision.
    """
    manifest = newest_manifest(store)
    if manifest is None:
        return None
    try:
        return manifest, read_checkpoint(store, manifest)
    except StorageError as error:
        raise _with_way_out(store, manifest.step, error) from error


def intact(store: ObjectStore, step: int) -> bool:
    """Return whether a step's checkpoint is there in full, by its digests."""
    try:
        for key, expected in read_manifest(store, step).objects().items():
            _checked(store, key, expected)
    except StorageError:
        return False
    return True


def point_latest(store: ObjectStore, manifest: Manifest) -> None:
    """Let LATEST name a manifest; written only where it does not already."""
    pointer = {"step": manifest.step, "manifest": step_key(manifest.step), "sha256": manifest.digest}
    data = json.dumps(pointer, indent=1).encode() + b"\n"
    if not store.exists(LATEST) or store.get(LATEST) != data:
        store.put(LATEST, data)


def check_rewind(store: ObjectStore, step: int) -> None:
    """Check that a run can be taken back to a step.

    Raises:
        StorageError: the step has no intact checkpoint.
    """
    if not intact(store, step):
        raise StorageError(
            f"step {step} of {store.location} can't be gone back to: it has no intact checkpoint; "
            f"{_intact_steps_in_words(store, before=None)}"
        )


def rewind(store: ObjectStore, step: int) -> None:
    """Drop every checkpoint after a step, newest first, so that the run goes on from it.

    Raises:
        StorageError: the step has no intact checkpoint; nothing is dropped then.
    """
    check_rewind(store, step)
    point_latest(store, read_manifest(store, step))
    for later in reversed([known for known in steps(store) if known > step]):
        store.delete(step_key(later))


def collect(store: ObjectStore, keep: int) -> list[int]:
    """Delete all but the newest checkpoints, and every object that no checkpoint names.

    What serving.json or an evaluation names by its digest stays: a manifest with all of its objects, an adapter alone.
    Only the holder of the run's lock may call this, between two checkpoints.

    Args:
        store: the run.
        keep: number of checkpoints to keep, at least 1.

    Returns:
        The steps whose checkpoints are gone.
    """
    known = steps(store)
    named = _named_digests(store)
    manifests = {}
    gone = []
    for step in known:
        try:
            manifest = read_manifest(store, step)
        except StorageError:
            # A damaged manifest is evidence, and is no reason to lose what it may name.
            return []
        if step in known[-max(1, keep) :] or manifest.digest in named:
            manifests[step] = manifest
        else:
            gone.append(step)
    for step in gone:
        store.delete(step_key(step))
    wanted = {key for manifest in manifests.values() for key in manifest.objects()}
    for kind in ("adapters", "optimizer", "buffer", "archive"):
        for key in store.list(f"{kind}/"):
            if key not in wanted and key.split("/")[1] not in named:
                store.delete(key)
    return gone


def step_key(step: int) -> str:
    """Return the name of a step's manifest, e.g. `steps/000010.json`."""
    return f"steps/{step:06d}.json"


def _has_length(store: ObjectStore, key: str, length: int) -> bool:
    try:
        return store.size(key) == length
    except MissingObject:
        return False


def _keep(store: ObjectStore, key: str, data: bytes, expected: str) -> None:
    if not (store.exists(key) and sha256(store.get(key)) == expected):
        store.put(key, data)


def _checked(store: ObjectStore, key: str, expected: str) -> bytes:
    data = store.get(key)
    found = sha256(data)
    if found != expected:
        raise StorageError(
            f"{store.location}/{key} is damaged: its {len(data)} bytes have the sha256 {found}, expected {expected}"
        )
    return data


def _parse_manifest(store: ObjectStore, key: str, data: bytes) -> Manifest:
    body: Any
    body, _ = unseal(data, f"{store.location}/{key}", kind="a checkpoint's manifest", version=FORMAT)
    return Manifest(
        step=body["step"],
        digest=sha256(data),
        members=tuple(Member.from_dict(member) for member in body["members"]),
        adapters=tuple(body["adapters"]),
        files=body["files"],
        optimizer=body["optimizer"],
        buffer=body["buffer"],
        archive=body["archive"],
        counters=body["counters"],
    )


def _promised_step(store: ObjectStore) -> int | None:
    """Return the step that LATEST names; None where it is missing or unreadable, as the manifests know better."""
    try:
        step = json.loads(store.get(LATEST))["step"]
    except (MissingObject, ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def _with_way_out(store: ObjectStore, step: int, error: StorageError) -> StorageError:
    return StorageError(f"{error}; {_intact_steps_in_words(store, before=step)}")


def _intact_steps_in_words(store: ObjectStore, before: int | None) -> str:
    for step in reversed(steps(store)):
        if (before is None or step < before) and intact(store, step):
            return f"step {step} is intact: to go on from it, run the same command with --from-step {step}"
    return "no earlier checkpoint of this run is intact"


def _named_digests(store: ObjectStore) -> set[str]:
    keys = [key for prefix in _REFERRERS for key in store.list(prefix)]
    return {name for key in keys for name in _DIGEST.findall(store.get(key).decode(errors="replace"))}
