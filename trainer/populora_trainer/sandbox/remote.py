"""A verifier whose programs run elsewhere: spreads cases over the replicas of a sandbox service."""

import asyncio
import json
import random
import socket
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import aiohttp

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox.verdicts import Case, Judgement, Kind, Verdict
from populora_trainer.sandbox.wire import WireError, case_to_json, judgement_from_json

_CASES_PER_REQUEST = 32
_INPUTS_PER_REQUEST = 1024
_CHARS_PER_REQUEST = 1 << 20
_DEATHS = 2  # of replicas that were judging the same cases, after which these are judged apart from all others
_PARTS = 8  # into which they are split then
_REQUESTS_PER_REPLICA = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds


class RemoteVerifier:
    """Judges cases over HTTP; safe to share between event loops, one at a time.

    Every chunk of cases goes to one replica, and to another where that one is full, ends or dies. A case is judged
    anew then: judging has no effects, and each place in the result is filled once, so no verdict is lost or doubled.
    Cases under which replicas die again and again are judged after all others, in ever smaller parts: what ends a
    service whenever it is alone with it costs one verdict, and not the replicas.
    """

    def __init__(
        self, url: str, *, seed: int = 0, patience_seconds: float = 600.0, request_seconds: float = 300.0
    ) -> None:
        """Judge at a service.

        Args:
            url: of the service; every address that its host name has is a replica.
            seed: of the training run; see `SandboxPool`.
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
        self._seed = seed
        self._patience = patience_seconds
        self._request_seconds = request_seconds
        self._order = random.SystemRandom()  # which replica is asked first; no result depends on it

    async def judge(self, cases: Sequence[Case]) -> list[Judgement]:
        """Return one judgement per case, in order.

        Raises:
            SandboxError: no replica answers for longer than the patience, or one refuses the cases as malformed.
        """
        judgements: list[Judgement | None] = [None] * len(cases)
        suspects: list[range] = []
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

                async def fill(chunk: range) -> None:
                    async with gate:
                        try:
                            judgements[chunk.start : chunk.stop] = await self._judge_chunk(
                                session, cases[chunk.start : chunk.stop], _DEATHS
                            )
                        except _DeadlyError:
                            suspects.append(chunk)

                for chunk in _chunks(cases):
                    group.create_task(fill(chunk))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if suspects:
            connector = aiohttp.TCPConnector(force_close=True, limit=0)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                for chunk in suspects:
                    found = await self._judge_suspects(session, cases[chunk.start : chunk.stop])
                    judgements[chunk.start : chunk.stop] = found
        return [judgement for judgement in judgements if judgement is not None]

    async def _judge_suspects(self, session: aiohttp.ClientSession, cases: Sequence[Case]) -> list[Judgement]:
        """Judge cases under which replicas died, with nothing else of this call beside them."""
        if len(cases) == 1:
            try:
                return await self._judge_chunk(session, cases, _DEATHS)
            except _DeadlyError:
                return [_deadly(cases[0])]
        judgements: list[Judgement] = []
        size = -(-len(cases) // _PARTS)
        for start in range(0, len(cases), size):
            part = cases[start : start + size]
            try:
                judgements += await self._judge_chunk(session, part, 1 if len(part) > 1 else _DEATHS)
            except _DeadlyError:
                judgements += await self._judge_suspects(session, part) if len(part) > 1 else [_deadly(part[0])]
        return judgements

    async def _judge_chunk(self, session: aiohttp.ClientSession, cases: Sequence[Case], deaths: int) -> list[Judgement]:
        """Judge cases in one request, and in two where that asks for too much.

        Raises:
            _DeadlyError: so many replicas died with the request.
            SandboxError: as `judge`.
        """
        body = {
            "cases": [case_to_json(case) for case in cases],
            "deadline_seconds": self._request_seconds,
            "seed": self._seed,
        }
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
                except _TooMuchError as error:
                    if len(cases) > 1:
                        half = len(cases) // 2
                        return [
                            *await self._judge_chunk(session, cases[:half], deaths),
                            *await self._judge_chunk(session, cases[half:], deaths),
                        ]
                    failure, avoided = f"{address}: {error}", address
                except _CutOffError as error:
                    failure, avoided = f"{address}: {error}", address
                    deaths -= 1
                    if not deaths:
                        raise _DeadlyError(failure) from error
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
        try:
            async with session.post(url, json=body, headers=headers, allow_redirects=False) as answer:
                status, text = answer.status, await answer.text()
        except aiohttp.ClientConnectorError:
            raise  # nothing was asked
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError) as error:
            raise _CutOffError(str(error) or type(error).__name__) from error
        if status == 504 or (status == 413 and len(cases) > 1):
            raise _TooMuchError(f"HTTP {status} {text[:200]}")
        if status in (400, 413):
            raise SandboxError(f"the sandbox service refuses the cases: {text}")
        if status != 200:
            raise _PassingError(f"HTTP {status} {text[:200]}")
        try:
            record = json.loads(text)
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


class _CutOffError(Exception):
    """A replica took the request, and its connection ended without an answer."""


class _TooMuchError(Exception):
    """A replica cannot answer so many cases at a time."""


class _DeadlyError(Exception):
    """Replicas died whenever they were asked these cases."""


def _chunks(cases: Sequence[Case]) -> Iterator[range]:
    """Cut cases into requests of bounded size; a case of its own size is a request of its own."""
    start = inputs = chars = 0
    for number, case in enumerate(cases):
        size = len(case.program) + len(case.answer or "") + sum(map(len, (*case.inputs, *case.outputs)))
        inputs += len(case.inputs)
        chars += size
        full = number - start == _CASES_PER_REQUEST or inputs > _INPUTS_PER_REQUEST or chars > _CHARS_PER_REQUEST
        if full and number > start:
            yield range(start, number)
            start, inputs, chars = number, len(case.inputs), size
    if start < len(cases):
        yield range(start, len(cases))


def _deadly(case: Case) -> Judgement:
    """Return the verdict on a case that no replica survives."""
    detail = "replicas of the sandbox service ended whenever they judged it, and nothing else of its batch"
    kind: Kind = "wrong" if case.answer is not None and case.outputs else "invalid"
    return Judgement(case.id, Verdict.CRASHED, kind, case.inputs, (), detail)
