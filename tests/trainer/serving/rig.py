"""A sidecar in this process between a run's storage and a played vLLM, with limits that let no test wait."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from fake_vllm import FakeVllm, fake_vllm

from populora_trainer.errors import StorageError
from populora_trainer.serving.folders import AdapterFolders
from populora_trainer.serving.sidecar import Limits, Sidecar
from populora_trainer.serving.vllm import Timeouts, Vllm
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.publication import SERVING, Publication, parse_publication
from populora_trainer.storage.sealed import seal
from populora_trainer.storage.store import ObjectStore

LIMITS = Limits(interval=0.02, longest_pause=0.1, patience=2.0, grace=4.0, download=10.0)
TIMEOUTS = Timeouts(answer=1.0, load=1.0)


@dataclass
class Published:
    """Writes publications of small files in the place of adapters, as a trainer would."""

    store: LocalStore
    last: Publication | None = None
    contents: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def publish(self, step: int, **weights: str) -> Publication:
        """Publish members with weights of the given texts; returns what readers see."""
        rows = []
        for member, text in weights.items():
            files = {"adapter_config.json": b"{}", "adapter_model.safetensors": text.encode()}
            digest = hashlib.sha256(repr(files).encode()).hexdigest()
            for name, data in files.items():
                self.store.put(f"adapters/{digest}/{name}", data)
            self.contents[digest] = files
            name = f"{member}-s{step:06d}-{digest[:8]}"
            known = {one.digest: one.name for one in self.last.adapters if one.member == member} if self.last else {}
            sums = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
            rows.append({"member": member, "name": known.get(digest, name), "digest": digest, "files": sums})
        data = seal({"format": 1, "step": step, "adapters": rows})
        self.store.put(SERVING, data)
        self.last = parse_publication(data)
        return self.last


class BrokenStore:
    """A store that cannot be reached while it is told so."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.broken = False
        self.reads = 0
        self.location = store.location

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.reads += 1
        if self.broken:
            raise StorageError(f"can't read {self.location}/{key} after 3 tries: connection refused")
        return self.store.get(key, start, length)


@dataclass
class Rig:
    """What a test plays with."""

    trainer: Published
    store: BrokenStore
    vllm: FakeVllm
    sidecar: Sidecar
    folder: Path

    async def until(self, reached: Callable[[], object], what: str) -> None:
        """Wait for something to become true, and say the sidecar's error where it does not."""
        deadline = time.monotonic() + 240  # an idle machine takes a fraction of a second
        while not reached():
            assert time.monotonic() < deadline, f"{what} did not happen; {self.sidecar.status()}"
            await asyncio.sleep(0.005)

    async def until_serves(self, publication: Publication) -> None:
        """Wait until the sidecar says that a publication is served."""
        await self.until(lambda: self.sidecar.status()["publication"] == publication.sha256, "the publication's load")

    async def turns(self, count: int = 3) -> None:
        """Let the sidecar ask vLLM what it serves a number of times more."""
        await asyncio.sleep(count * 3 * LIMITS.interval)


@asynccontextmanager
async def rig(place: Path, limits: Limits = LIMITS) -> AsyncIterator[Rig]:
    """Run a sidecar until the context ends."""
    store = BrokenStore(LocalStore(place / "run"))
    async with fake_vllm() as vllm, sidecar(store, vllm.url, place / "adapters", limits) as one:
        yield Rig(Published(store.store), store, vllm, one, place / "adapters")


@asynccontextmanager
async def sidecar(store: ObjectStore, url: str, folder: Path, limits: Limits = LIMITS) -> AsyncIterator[Sidecar]:
    """Run a sidecar until the context ends."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        one = Sidecar(lambda: store, Vllm(url, session, TIMEOUTS), AdapterFolders(folder), limits=limits)
        task = asyncio.create_task(one.run())
        try:
            yield one
        finally:
            assert not task.done(), "the loops never end by themselves"
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
