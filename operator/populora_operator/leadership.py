"""Which replica leads: a Lease that its holder renews and that others take when it is not renewed.

The holder stops writing `renew_deadline` seconds after the beginning of its last successful renewal; another replica
takes the Lease `duration` seconds after it has last seen it change. As the second is longer than the first and both
are measured on the replica's own monotonic clock, there is never a moment at which two replicas write.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from populora_operator.cluster.kinds import LEASE
from populora_operator.cluster.port import Cluster, ClusterError, ConflictError, NotFoundError, Object
from populora_operator.settings import LeaseSettings

logger = logging.getLogger(__name__)

_LEAST_PAUSE_SECONDS = 0.1
_SILENT = "no answer in time"


class Leadership:
    """This replica's side of the election."""

    def __init__(
        self,
        cluster: Cluster,
        settings: LeaseSettings,
        *,
        on_contact: Callable[[], None] = lambda: None,
        clock: Callable[[], float] | None = None,
    ):
        """Take part in an election.

        Args:
            cluster: where the Lease is; not fenced.
            settings: of the Lease.
            on_contact: called whenever the API server has answered.
            clock: monotonic seconds; the event loop's by default.
        """
        self._cluster, self._settings, self._on_contact = cluster, settings, on_contact
        self._clock = clock or (lambda: asyncio.get_running_loop().time())
        self._lease: Object = {}
        self._seen_at = 0.0
        self._valid_until = float("-inf")

    def remaining(self) -> float:
        """Seconds for which this replica may write; 0 or less where it does not lead."""
        return self._valid_until - self._clock()

    @property
    def leading(self) -> bool:
        """Whether this replica leads now."""
        return self.remaining() > 0

    async def run(self, lead: Callable[[], Awaitable[None]]) -> None:
        """Contend for ever; call `lead` whenever this replica leads and cancel it when it does no longer.

        Cancelling this gives the Lease back, so that another replica need not wait for it to run out. An error of
        `lead` ends it.
        """
        while True:
            await self._acquire()
            logger.info("leading as %s", self._settings.identity)
            work = asyncio.ensure_future(lead())
            renewal = asyncio.create_task(self._renew())
            try:
                await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, renewal):
                    task.cancel()
                await asyncio.gather(work, renewal, return_exceptions=True)
                await self._release()
            logger.warning("the Lease %s is lost: not leading any more", self._settings.name)

    async def _acquire(self) -> None:
        while not await self._try_to_take():
            await asyncio.sleep(self._settings.retry_period)

    async def _renew(self) -> None:
        """Return when the Lease is lost."""
        while self.leading:
            # Tried more often as time runs out, so that the last try is not long before the end.
            await asyncio.sleep(min(self._settings.retry_period, max(_LEAST_PAUSE_SECONDS, self.remaining() / 2)))
            if not self.leading or not await self._try_to_renew():
                return

    async def _try_to_renew(self) -> bool:
        """Renew and say whether this replica still leads; an error costs time only."""
        try:
            async with asyncio.timeout(max(0.0, self.remaining())):
                await self._write(self._held(self._lease))
        except ConflictError:
            return await self._try_to_take()
        except (ClusterError, TimeoutError) as error:
            logger.warning("the Lease %s is not renewed: %s", self._settings.name, str(error) or _SILENT)
        return self.leading

    async def _try_to_take(self) -> bool:
        """Take the Lease if nobody holds it, and say whether this replica leads."""
        try:
            async with asyncio.timeout(self._settings.renew_deadline):
                await self._look()
                if self._is_held_by_another():
                    self._valid_until = float("-inf")
                    return False
                await self._write(self._held(self._lease))
        except ConflictError:
            return False  # Another replica was quicker.
        except (ClusterError, TimeoutError) as error:
            logger.warning("the Lease %s/%s: %s", self._settings.namespace, self._settings.name, str(error) or _SILENT)
        return self.leading

    async def _look(self) -> None:
        try:
            lease = await self._cluster.get(LEASE, self._settings.namespace, self._settings.name)
        except NotFoundError:
            lease = {}
        self._on_contact()
        if not self._seen_at or _version(lease) != _version(self._lease):
            self._seen_at = self._clock()
        self._lease = lease

    def _is_held_by_another(self) -> bool:
        spec = self._lease.get("spec") or {}
        if spec.get("holderIdentity") in (None, "", self._settings.identity):
            return False
        duration = float(spec.get("leaseDurationSeconds") or self._settings.duration)
        return self._clock() < self._seen_at + duration

    async def _write(self, lease: Object) -> None:
        started = self._clock()
        write = self._cluster.replace if _version(lease) else self._cluster.create
        self._lease = await write(LEASE, lease)
        self._seen_at = started
        self._valid_until = started + self._settings.renew_deadline
        self._on_contact()

    def _held(self, lease: Object) -> Object:
        spec = lease.get("spec") or {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        mine = spec.get("holderIdentity") == self._settings.identity
        transitions = int(spec.get("leaseTransitions") or 0)
        return self._named(
            {
                "holderIdentity": self._settings.identity,
                "leaseDurationSeconds": max(1, round(self._settings.duration)),
                "acquireTime": spec.get("acquireTime", now) if mine else now,
                "renewTime": now,
                "leaseTransitions": transitions if mine or not spec else transitions + 1,
            }
        )

    def _named(self, spec: Object) -> Object:
        metadata = {"namespace": self._settings.namespace, "name": self._settings.name}
        if version := _version(self._lease):
            metadata["resourceVersion"] = version
        return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": metadata, "spec": spec}

    async def _release(self) -> None:
        """Give the Lease back if it is still held; nothing writes any more at this point."""
        self._valid_until = float("-inf")
        with contextlib.suppress(ClusterError, TimeoutError):
            async with asyncio.timeout(self._settings.renew_deadline):
                while (spec := self._lease.get("spec") or {}).get("holderIdentity") == self._settings.identity:
                    try:
                        free = self._named({**spec, "holderIdentity": "", "leaseDurationSeconds": 1})
                        self._lease = await self._cluster.replace(LEASE, free)
                    except ConflictError:
                        # A renewal that was cut off may have arrived, or another replica has taken the Lease.
                        await self._look()


def _version(lease: Object) -> str:
    return str((lease.get("metadata") or {}).get("resourceVersion") or "")
