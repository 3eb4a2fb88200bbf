"""A verifier whose programs run elsewhere: spreads cases over the replicas of a sandbox service."""

import asyncio
import random
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox.verdicts import Case, Judgement
from populora_trainer.sandbox.wire import WireError, case_to_json, judgement_from_json

_CASES_PER_REQUEST = 32
_REQUESTS_PER_REPLICA = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds


class RemoteVerifier:
    """Judges cases over HTTP; safe to share between event loops, one at a time.

    Every chunk of cases goes to one replica, and to another where that one is full, ends or dies. A case is judged
    anew then: judging has no effects, and each place in the result is filled once, so no verdict is lost or doubled.
    """

    def __init__(self, url: str, *, patience_seconds: float = 600.0, request_seconds: float = 300.0) -> None:
        """Judge at a service.

        Args:
            url: of the service; every address that its host name has is a replica.
            patience_seconds: how long cases are tried again without one judgement coming back.
            request_seconds: deadline of one request.

        Raises:
            SandboxError: the URL is no http:// or https:// address.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            host.encode("idna")  # as every look-up of a name does
        except ValueError:
            parts, host, port = urlsplit(""), "", None
        if parts.scheme not in ("http", "https") or not host or port == 0 or parts.path.strip("/") or parts.username:
            raise SandboxError(f"the sandbox service {url!r} is not an address: http://HOST[:PORT] is allowed")
        self._scheme, self._host = parts.scheme, host
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._patience = patience_seconds
        self._request_seconds = request_seconds
        self._order = random.SystemRandom()  # which replica is asked first; no result depends on it

    async def judge(self, cases: Sequence[Case]) -> list[Judgement]:
        """Return one judgement per case, in order.

        Raises:
            SandboxError: no replica answers for longer than the patience, or one refuses the cases as malformed.
        """
        judgements: list[Judgement | None] = [None] * len(cases)
        starts = range(0, len(cases), _CASES_PER_REQUEST)
        replicas = await self._replicas()
        gate = asyncio.Semaphore(_REQUESTS_PER_REPLICA * max(1, len(replicas)))
        # Connections are not kept: a dead replica behind a shared address must not get the same work again.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        timeout = aiohttp.ClientTimeout(total=self._request_seconds + 10, sock_connect=5)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):

                async def fill(start: int) -> None:
                    chunk = cases[start : start + _CASES_PER_REQUEST]
                    async with gate:
                        judgements[start : start + len(chunk)] = await self._judge_chunk(session, chunk)

                for start in starts:
                    group.create_task(fill(start))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [judgement for judgement in judgements if judgement is not None]

    async def _judge_chunk(self, session: aiohttp.ClientSession, cases: Sequence[Case]) -> list[Judgement]:
        body = {"cases": [case_to_json(case) for case in cases], "deadline_seconds": self._request_seconds}
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience
        pause, failure, avoided = _FIRST_PAUSE, "", None
        while True:
            replicas = await self._replicas()
            choices = [one for one in replicas if one != avoided] or replicas
            if choices:
                address = self._order.choice(choices)
                try:
                    return await self._ask(session, address, body, cases)
                except (_PassingError, aiohttp.ClientError, OSError, TimeoutError) as error:
                    failure, avoided = f"{address}: {error or type(error).__name__}", address
            else:
                failure = f"{self._host} has no address"
            if loop.time() + pause > give_up:
                raise SandboxError(
                    f"the sandbox service {self._host}:{self._port} judged nothing for {self._patience:g} s ({failure})"
                )
            await asyncio.sleep(pause * self._order.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _ask(
        self, session: aiohttp.ClientSession, address: str, body: dict[str, object], cases: Sequence[Case]
    ) -> list[Judgement]:
        host = f"[{address}]" if ":" in address else address
        url = f"{self._scheme}://{host}:{self._port}/judge"
        headers = {"Host": f"{self._host}:{self._port}"}
        async with session.post(url, json=body, headers=headers, allow_redirects=False) as answer:
            if answer.status in (400, 413):
                raise SandboxError(f"the sandbox service refuses the cases: {await answer.text()}")
            if answer.status != 200:
                raise _PassingError(f"HTTP {answer.status} {(await answer.text())[:200]}")
            try:
                record = await answer.json()
                judgements = [judgement_from_json(one) for one in record["judgements"]]
            except (WireError, ValueError, KeyError, TypeError) as error:
                raise SandboxError(f"the sandbox service {url} is of another version: {error}") from error
        if [one.id for one in judgements] != [case.id for case in cases]:
            raise SandboxError(f"the sandbox service {url} answered other cases than it was asked")
        return judgements

    async def _replicas(self) -> list[str]:
        """Every address of the host name, asked anew as pods come and go."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError:
            return []
        return sorted({str(address[0]) for *_, address in found})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _PassingError(Exception):
    """A replica cannot answer now."""
