"""The vLLM pods behind one name: which there are, which serve the newest adapters, and which has room."""

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp

from populora_trainer.errors import RolloutError
from populora_trainer.storage.publication import Publication

SERVING_PORT, SIDECAR_PORT = 8000, 8001

_NO_HOST = re.compile(r"[\s,;@]")  # e.g. of a list of hosts, where one name stands for all
_LOOK_SECONDS = 10.0  # deadline of one look at a sidecar
LOOK_AGAIN = 1.0  # seconds between looks at replicas that are behind, while there is work
_FIRST_REST, _LONGEST_REST = 0.5, 15.0  # seconds that a replica is left alone after a failure


@dataclass(frozen=True, slots=True)
class ServingAddress:
    """Where vLLM and its sidecars are: every address of the host's name is a replica.

    Attributes:
        host: name or address.
        port: of vLLM's server.
        sidecar_port: of the sidecar beside it.
    """

    host: str
    port: int = SERVING_PORT
    sidecar_port: int = SIDECAR_PORT

    def __str__(self) -> str:
        return f"{_bracketed(self.host)}:{self.port}"

    @classmethod
    def parse(cls, text: str, sidecar_port: int = SIDECAR_PORT) -> "ServingAddress":
        """Return the address that `HOST`, `HOST:PORT` or `http://HOST:PORT` names.

        Raises:
            RolloutError: it is something else.
        """
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = SERVING_PORT if parts.port is None else parts.port
            host = parts.hostname or ""
            host.encode("idna")  # as every look-up of a name does
        except ValueError:
            host, port = "", 0
        if (
            not (host and port)
            or _NO_HOST.search(host)
            or parts.scheme != "http"
            or any((parts.path.strip("/"), parts.query, parts.fragment, parts.username))
        ):
            raise RolloutError(
                f"the address of vLLM is {text!r}: http://HOST:PORT, HOST:PORT and HOST are allowed, and the port is "
                f"{SERVING_PORT} where it is not given (--serving or POPULORA_SERVING_HOST)"
            )
        return cls(host, port, sidecar_port)


@dataclass(frozen=True, slots=True)
class Behind:
    """A replica that does not serve the newest publication.

    Attributes:
        address: of the replica.
        problem: what is missing, in words.
        reachable: whether its sidecar answers.
    """

    address: str
    problem: str
    reachable: bool = True

    def __str__(self) -> str:
        return f"{self.address}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Sync:
    """How far vLLM is with the newest publication.

    Attributes:
        step: number of training steps that its adapters had.
        replicas: addresses that the serving host has now.
        synced: those that serve all adapters of the publication.
        seconds: since the publication was written, until the trainer went on or until now.
        waiting: whether the trainer waits for it.
        problem: what keeps a replica from serving it; empty where nothing does.
    """

    step: int
    replicas: int
    synced: int
    seconds: float
    waiting: bool
    problem: str = ""


class Replica:
    """One vLLM server.

    Attributes:
        address: its IP address.
        in_flight: completions that it is computing for this process.
        serves: the seal of the publication whose adapters it is known to serve all of, or None.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.in_flight = 0
        self.serves: str | None = None
        self._failures = 0
        self._rests_until = 0.0

    def url(self, port: int, path: str) -> str:
        """Return the address of a path on one of its ports."""
        return f"http://{_bracketed(self.address)}:{port}{path}"

    def fail(self, now: float) -> bool:
        """Note a failure: the replica rests for a while. Returns whether it is the first since a success.

        Failures while it rests are those of requests that it got before.
        """
        if self.rests(now):
            return False
        self._rests_until = now + min(_FIRST_REST * 2.0**self._failures, _LONGEST_REST)
        self._failures += 1
        return self._failures == 1

    def succeed(self) -> None:
        """Note an answer."""
        self._failures, self._rests_until = 0, 0.0

    def rests(self, now: float) -> bool:
        """Return whether it has failed a moment ago."""
        return now < self._rests_until


class Replicas:
    """Every replica, with what it serves and how much it has to do.

    Args:
        address: where they are; looked up anew as pods come and go.
        most_in_flight: completions that one replica is asked for at a time; a larger request goes alone.
    """

    def __init__(self, address: ServingAddress, *, most_in_flight: int) -> None:
        self.address = address
        self.publication: Publication | None = None
        self._most = most_in_flight
        self._known: dict[str, Replica] = {}
        self._looked_at = float("-inf")
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def all(self) -> list[Replica]:
        """The replicas that the name had at the last look."""
        return list(self._known.values())

    @property
    def synced(self) -> list[Replica]:
        """Those that may be asked: they serve the newest publication."""
        return [one for one in self._known.values() if self.publication and one.serves == self.publication.sha256]

    @property
    def usable(self) -> list[Replica]:
        """Those of them that have not failed a moment ago."""
        now = asyncio.get_running_loop().time()
        return [one for one in self.synced if not one.rests(now)]

    async def publish(self, session: aiohttp.ClientSession, publication: Publication) -> None:
        """Let a publication be the one that counts, and tell every sidecar of it."""
        self.publication = publication
        await self.resolve()
        await asyncio.gather(*(self._refresh(session, one) for one in self.all if one not in self.synced))

    async def resolve(self) -> None:
        """Ask which addresses the name has; what is known of those that stay is kept."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self.address.host, self.address.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno == socket.EAI_AGAIN:  # the name server is away, not the replicas
                return
            found = []
        addresses = sorted({str(address[0]) for *_, address in found})
        self._known = {one: self._known.get(one) or Replica(one) for one in addresses}

    async def look(self, session: aiohttp.ClientSession) -> list[Behind]:
        """Look at the sidecars of all replicas that are not known to serve the newest publication.

        Returns:
            Those that are still behind.
        """
        self._looked_at = asyncio.get_running_loop().time()
        await self.resolve()
        looks = await asyncio.gather(*(self._look_at(session, one) for one in self.all if one not in self.synced))
        self._wake()
        return [look for look in looks if look is not None]

    @property
    def look_is_due(self) -> bool:
        """Whether replicas may have come or caught up since the last look."""
        return asyncio.get_running_loop().time() - self._looked_at >= LOOK_AGAIN

    async def room(self, completions: int, *, avoid: Replica | None, until: float) -> Replica | None:
        """Return the synced replica with the least to do, when one has room; None where none has by the deadline.

        The completions count as its work until `leave` is called.

        Args:
            completions: what it will be asked for.
            avoid: a replica to ask only where there is no other.
            until: deadline, in the event loop's time.
        """
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            rested = self.usable
            choice = [one for one in rested if one is not avoid] or rested
            free = [one for one in choice if not one.in_flight or one.in_flight + completions <= self._most]
            if free:
                chosen = min(free, key=lambda one: one.in_flight)
                chosen.in_flight += completions
                return chosen
            if now >= until:
                return None
            # Rests end without a sign, so nobody sleeps for longer than the shortest of them.
            await self._change(min(until - now, _FIRST_REST))

    def leave(self, replica: Replica, completions: int) -> None:
        """Take the completions off a replica's work."""
        replica.in_flight -= completions
        self._wake()

    async def _change(self, seconds: float) -> None:
        """Wait until room has become free or a replica has become usable, or for so long."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        await asyncio.wait([waiter], timeout=seconds)
        if not waiter.done():
            self._waiting.remove(waiter)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _refresh(self, session: aiohttp.ClientSession, replica: Replica) -> None:
        """Ask a sidecar to look at storage now; one that does not hear it will look by itself."""
        try:
            url = replica.url(self.address.sidecar_port, "/refresh")
            async with session.post(url, timeout=aiohttp.ClientTimeout(total=2.0), allow_redirects=False):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass

    async def _look_at(self, session: aiohttp.ClientSession, replica: Replica) -> Behind | None:
        """Note whether a replica serves the newest publication; returns what is missing, None where nothing is."""
        publication = self.publication
        if publication is None:
            return Behind(replica.address, "nothing is published")
        try:
            url = replica.url(self.address.sidecar_port, "/status")
            timeout = aiohttp.ClientTimeout(total=_LOOK_SECONDS, sock_connect=2.0)
            async with session.get(url, timeout=timeout, allow_redirects=False) as answer:
                if answer.status != 200:
                    return Behind(replica.address, f"its sidecar answers with HTTP {answer.status}")
                status = await answer.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            text = f"its sidecar at port {self.address.sidecar_port} does not answer ({error or type(error).__name__})"
            return Behind(replica.address, text, reachable=False)
        except (ValueError, RecursionError):
            status = None
        if missing := missing_adapters(status, publication):
            return Behind(replica.address, missing)
        replica.serves = publication.sha256
        return None


def missing_adapters(status: object, publication: Publication) -> str:
    """Return what a sidecar's `/status` lacks to be the echo of a publication, in words; empty where it is one."""
    if not isinstance(status, Mapping) or not isinstance(served := status.get("adapters"), Mapping):
        return f"its sidecar is of another version: /status is {str(status)[:200]}"
    wrong = [one.name for one in publication.adapters if served.get(one.name) != one.digest]
    if not wrong and status.get("publication") == publication.sha256:
        return ""
    text = f"{_some(wrong)} not loaded" if wrong else "it has not confirmed the newest publication"
    error = " ".join(str(status.get("error") or "").split())[:300]
    return f"{text}: {error}" if error else text


def in_words(behind: Sequence[Behind]) -> str:
    """Return what keeps replicas from serving, for a person."""
    return "; ".join(map(str, behind[:3])) + (f"; and {len(behind) - 3} more" if len(behind) > 3 else "")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
