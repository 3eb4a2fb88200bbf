"""The sidecar's two loops: one watches what is published, the other brings vLLM to it.

Neither ends by an error: it is told in `/status`, in the log and in the metrics, and what failed is tried again. vLLM
is asked what it serves in every turn, so that a server that was started again gets all of its adapters back.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from populora_trainer.errors import StorageError
from populora_trainer.serving.failures import Kind, ServingError
from populora_trainer.serving.folders import AdapterFolders
from populora_trainer.serving.metrics import SidecarMetrics
from populora_trainer.serving.planning import Plan, digests, is_served, make_plan, root
from populora_trainer.serving.vllm import Vllm
from populora_trainer.storage.publication import (
    SERVING,
    DamagedPublication,
    Publication,
    PublishedAdapter,
    parse_publication,
)
from populora_trainer.storage.store import MissingObject, ObjectStore

log = logging.getLogger(__name__)

_LEAST_PAUSE = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in seconds, and how much is done at once.

    Attributes:
        interval: between two looks at the storage, and at vLLM.
        longest_pause: between two tries of what fails again and again.
        patience: for how long a newer publication may stay unloaded before the replica counts as unready.
        grace: for how long a server that is slow to answer counts as healthy.
        download: for one adapter.
        downloads: adapters that are downloaded at a time.
    """

    interval: float = 1.0
    longest_pause: float = 15.0
    patience: float = 60.0
    grace: float = 15.0
    download: float = 600.0
    downloads: int = 4


class Sidecar:
    """Keeps one vLLM server's adapters equal to what a run has published."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        vllm: Vllm,
        folders: AdapterFolders,
        metrics: SidecarMetrics | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Do nothing yet; see `run`.

        Args:
            open_store: opens the run's storage; called until it succeeds.
            vllm: the server.
            folders: where it reads adapters from.
            metrics: to count in.
            limits: times and amounts.
        """
        self.metrics = metrics or SidecarMetrics()
        self.metrics.measure_lag(self._lag)
        self._open_store = open_store
        self._vllm = vllm
        self._folders = folders
        self._limits = limits or Limits()
        self._store: ObjectStore | None = None
        self._bytes: bytes | None = None  # of the newest publication
        self._looked = False
        self._seen: Publication | None = None
        self._seen_at = 0.0
        self._loaded: Publication | None = None  # the newest that was wholly loaded
        self._before: Publication | None = None  # the one that was wholly loaded before it
        self._served: dict[str, str] | None = None  # name to path; None where vLLM is not healthy
        self._served_at = 0.0
        self._errors: dict[str, str] = {}
        self._failed_in_a_row = 0
        self._asked, self._changed = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._watch())
            loops.create_task(self._follow())

    def refresh(self) -> None:
        """Look at the storage and at vLLM now."""
        self._asked.set()
        self._changed.set()

    def status(self) -> dict[str, object]:
        """Return the answer of `/status`."""
        loaded = self._newest_served()
        return {
            "publication": loaded.sha256 if loaded else None,
            "step": loaded.step if loaded else None,
            "adapters": digests(self._served or {}, self._folders.folder),
            "seen": self._seen.sha256 if self._seen else None,
            "error": next(iter(self._errors.values()), None),
        }

    def unready(self) -> str | None:
        """Return why requests should go to another replica; None where vLLM serves what it should.

        A newer publication alone makes no replica unready, as every step brings one; one that cannot be loaded does, so
        that the trainer goes on with the other replicas.
        """
        if self._served is None:
            return self._errors.get("vllm", f"vLLM at {self._vllm.url} was not asked yet")
        if not self._looked:
            return self._errors.get("storage", "the storage was not read yet")
        if self._seen is None or self._serves(self._seen):
            return None
        if self._loaded and self._serves(self._loaded) and self._lag() < self._limits.patience:
            return None
        missing = [one.name for one in self._seen.adapters if one.name not in self._served]
        reason = self._errors.get("adapters", "they are being loaded")
        return f"{', '.join(missing)} of step {self._seen.step} are not loaded: {reason}"

    # --- What is published ---

    async def _watch(self) -> None:
        while True:
            self._asked.clear()
            try:
                publication = await asyncio.to_thread(self._read)
            except StorageError as error:
                kind: Kind = "damaged" if isinstance(error, DamagedPublication) else "storage"
                self._failed("storage", ServingError(kind, str(error)))
            else:
                self._fixed("storage")
                self._see(publication)
            await _pause(self._asked, self._limits.interval)

    def _read(self) -> Publication | None:
        self._store = store = self._store or self._open_store()
        try:
            data = store.get(SERVING)
        except MissingObject:
            self._bytes = None
            return None
        if data == self._bytes:
            return self._seen
        publication = parse_publication(data, f"{store.location}/{SERVING}")
        self._bytes = data
        return publication

    def _see(self, publication: Publication | None) -> None:
        first, self._looked = not self._looked, True
        if publication == self._seen and not first:
            return
        self._seen, self._seen_at, self._failed_in_a_row = publication, time.monotonic(), 0
        if publication is None:
            log.info("nothing is published yet")
            return
        log.info("step %d is published: %d adapters", publication.step, len(publication.adapters))
        self.metrics.published_step.set(publication.step)
        self._changed.set()

    # --- What vLLM serves ---

    async def _follow(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._look()
                if self._seen is not None:
                    await self._sync(self._seen)
            except ServingError as error:
                self._failed("vllm", error)
                if error.gone or time.monotonic() - self._served_at > self._limits.grace:
                    self._show(None)
                pause = self._limits.interval
            else:
                pause = min(self._limits.longest_pause, self._limits.interval * 2**self._failed_in_a_row)
            await _pause(self._changed, pause)

    async def _look(self) -> None:
        """Ask vLLM what it serves.

        Raises:
            ServingError: it does not answer, or is not healthy.
        """
        self._show(await self._vllm.served())
        self._served_at = time.monotonic()
        self._fixed("vllm")

    async def _sync(self, wanted: Publication) -> None:
        """Let vLLM serve a publication.

        Raises:
            ServingError: vLLM does not answer; other failures are noted.
        """
        before = self._before if wanted == self._loaded else self._loaded
        try:
            stored = await asyncio.to_thread(self._folders.stored, wanted.adapters)
        except OSError as error:
            return self._give_up(
                ServingError("disk", f"{self._folders.folder} can't be read: {error.strerror or error}")
            )
        plan = make_plan(wanted, before, self._served or {}, stored, self._folders.folder)
        failures = await self._carry_out(plan)
        if plan.unload or plan.load:
            await self._look()
        if self._serves(wanted):
            self._note_loaded(wanted)
        elif not failures:
            failures = [
                ServingError("refused", f"vLLM at {self._vllm.url} has loaded adapters and does not serve them")
            ]
        if failures:
            return self._give_up(*failures)
        for digest in plan.discard:
            await asyncio.to_thread(self._folders.discard, digest)
        self._failed_in_a_row = 0
        return self._fixed("adapters")

    async def _carry_out(self, plan: Plan) -> list[ServingError]:
        """Take a plan's steps, each adapter loaded as soon as it is here; return what failed, adapter by adapter.

        Raises:
            ServingError: vLLM does not answer, which says the same of all.
        """
        failures = []
        for name in plan.unload:
            try:
                await self._vllm.unload(name)
                self.metrics.unloads.inc()
                log.info("unloaded %s", name)
            except ServingError as error:
                failures.append(_unless_silent(error))
        slots, one_at_a_time = asyncio.Semaphore(self._limits.downloads), asyncio.Lock()

        async def bring(adapters: list[PublishedAdapter], missing: bool) -> None:
            if missing:
                async with slots:
                    await self._download(adapters[0])
            for adapter in adapters:
                async with one_at_a_time:
                    await self._vllm.load(adapter.name, root(self._folders.folder, adapter))
                    self.metrics.loads.inc()
                    log.info("loaded %s", adapter.name)

        missing = {adapter.digest for adapter in plan.download}
        together: dict[str, list[PublishedAdapter]] = {}
        for adapter in plan.load:
            together.setdefault(adapter.digest, []).append(adapter)
        tasks = [asyncio.create_task(bring(group, digest in missing)) for digest, group in together.items()]
        try:
            for task in tasks:
                try:
                    await task
                except ServingError as error:
                    failures.append(_unless_silent(error))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return failures

    async def _download(self, adapter: PublishedAdapter) -> None:
        assert self._store is not None  # it has told of the adapter
        try:
            async with asyncio.timeout(self._limits.download):
                size = await asyncio.to_thread(self._folders.download, self._store, adapter)
        except TimeoutError as error:
            reason = f"{adapter.name} has not come from {self._store.location} within {self._limits.download:g} s"
            raise ServingError("storage", reason) from error
        self.metrics.download_bytes.inc(size)

    def _note_loaded(self, publication: Publication) -> None:
        if publication == self._loaded:
            return
        self._before, self._loaded = self._loaded, publication
        seconds = time.monotonic() - self._seen_at
        self.metrics.served_step.set(publication.step)
        self.metrics.sync_seconds.observe(seconds)
        log.info("step %d is served, %.1f s after it was seen", publication.step, seconds)

    # --- What is told ---

    def _show(self, served: dict[str, str] | None) -> None:
        self._served = served
        self.metrics.adapters_loaded.set(len(digests(served or {}, self._folders.folder)))

    def _serves(self, publication: Publication) -> bool:
        return self._served is not None and is_served(publication, self._served, self._folders.folder)

    def _newest_served(self) -> Publication | None:
        return next((one for one in (self._seen, self._loaded) if one is not None and self._serves(one)), None)

    def _lag(self) -> float:
        return 0.0 if self._seen is None or self._serves(self._seen) else time.monotonic() - self._seen_at

    def _give_up(self, *failures: ServingError) -> None:
        self._failed_in_a_row = min(self._failed_in_a_row + 1, 10)
        for error in failures[1:]:
            self.metrics.failed(error.kind)
        self._failed("adapters", failures[0])

    def _failed(self, part: str, error: ServingError) -> None:
        self.metrics.failed(error.kind)
        if self._errors.get(part) != str(error):
            log.warning("%s", error)
        self._errors[part] = str(error)

    def _fixed(self, part: str) -> None:
        if self._errors.pop(part, None) is not None:
            log.info("%s: well again", part)


def _unless_silent(error: ServingError) -> ServingError:
    """Return the error of one adapter; raise it where vLLM does not answer at all."""
    if error.kind == "vllm":
        raise error
    return error


async def _pause(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event, or for so long; but a moment at least, however often others ask for a look."""
    await asyncio.sleep(_LEAST_PAUSE)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
