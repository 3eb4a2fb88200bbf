"""A proxy in front of the API server that counts, delays, loses and refuses requests as a test asks.

It speaks plain HTTP on loopback and passes bearer tokens on. Its event loop runs in a thread of its own; what a test
sets is read at each request.
"""

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NoReturn

import aiohttp
from aiohttp import web
from control_plane import ControlPlane
from yarl import URL

WRITES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
)


@dataclass(frozen=True)
class Request:
    """A request that passed.

    Attributes:
        method: HTTP method.
        path: without the query.
        query: of the URL.
        status: what the server answered; None where the answer was lost.
        user: the client's token, to tell clients apart.
        body: what was sent.
    """

    method: str
    path: str
    query: str
    status: int | None
    user: str
    body: bytes = field(default=b"", repr=False)

    @property
    def writes(self) -> bool:
        return self.method in WRITES

    @property
    def of_lease(self) -> bool:
        return "/leases" in self.path

    @property
    def of_event(self) -> bool:
        return "/events" in self.path


Hook = Callable[[Request], None]


class Proxy:
    """See the module.

    Attributes:
        requests: all that have passed, in the order of their answers.
        before: called with each request before it is passed on; it loses the request by raising ConnectionError.
        after: called with each request when the server has answered and the client does not know it yet; it loses
            the answer by raising ConnectionError.
        refuse: returns a status such as 409 to answer a request with instead of passing it on, or None.
        black_hole: while set, watches deliver nothing more and new requests are never answered.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.requests: list[Request] = []
        self.before: Hook | None = None
        self.after: Hook | None = None
        self.refuse: Callable[[Request], int | None] | None = None
        self.black_hole = threading.Event()
        self.delay_seconds = 0.0
        self.url = ""
        self._deafened = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="proxy")
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    def __enter__(self) -> "Proxy":
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @property
    def writes(self) -> list[Request]:
        """Writes that the server has taken or refused, but those that renew a Lease."""
        return [request for request in self.requests if request.writes and not request.of_lease]

    def deafen(self) -> None:
        """Let the watches that are open now deliver nothing more, and not end either; new ones work."""
        self._deafened += 1

    def cut(self) -> None:
        """Close every connection of the clients, as a load balancer that restarts does."""
        self._do(self._cut())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start(self) -> None:
        context = ssl.create_default_context(cafile=str(self.plane.ca))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=timeout, auto_decompress=False
        )
        application = web.Application(client_max_size=64 * 2**20)
        application.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        ((_, port),) = self._runner.addresses
        self.url = f"http://127.0.0.1:{port}"

    async def _close(self) -> None:
        assert self._runner is not None
        assert self._session is not None
        await self._session.close()
        await self._runner.cleanup()

    async def _cut(self) -> None:
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def _pass(self, incoming: web.Request) -> web.StreamResponse:
        body = await incoming.read()
        seen = Request(incoming.method, incoming.path, incoming.query_string, None, _user(incoming), body)
        if self.black_hole.is_set():
            await self._swallowed()
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        if self.refuse is not None and (code := self.refuse(seen)) is not None:
            return _refusal(code)
        _run_hook(self.before, seen, incoming)
        assert self._session is not None
        headers = {name: value for name, value in incoming.headers.items() if name.lower() not in _HOP_BY_HOP}
        try:
            url = URL(f"{self.plane.url}{incoming.raw_path}", encoded=True)
            async with self._session.request(incoming.method, url, data=seen.body or None, headers=headers) as answer:
                return await self._answer(incoming, seen, answer)
        except aiohttp.ClientError:
            # The API server is away: so is the connection, for the client.
            _lose(incoming)

    async def _answer(self, incoming: web.Request, seen: Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP}
        done = replace(seen, status=answer.status)
        if "watch=" not in seen.query:
            content = await answer.read()
            self.requests.append(done)
            _run_hook(self.after, done, incoming)
            return web.Response(status=answer.status, headers=headers, body=content)
        self.requests.append(done)
        stream = web.StreamResponse(status=answer.status, headers=headers)
        await stream.prepare(incoming)
        opened = self._deafened
        async for chunk in answer.content.iter_any():
            if self.black_hole.is_set() or self._deafened != opened:
                await self._swallowed()
            await stream.write(chunk)
        await stream.write_eof()
        return stream

    async def _swallowed(self) -> None:
        """Wait as a packet that was dropped does: until the client gives up."""
        while True:
            await asyncio.sleep(3600)


def _run_hook(hook: Hook | None, request: Request, incoming: web.Request) -> None:
    """Call a hook; one that raises ConnectionError loses the request or its answer."""
    try:
        if hook is not None:
            hook(request)
    except ConnectionError:
        _lose(incoming)


def _lose(incoming: web.Request) -> NoReturn:
    if incoming.transport is not None:
        incoming.transport.abort()
    raise asyncio.CancelledError


def _user(incoming: web.Request) -> str:
    return incoming.headers.get("Authorization", "").removeprefix("Bearer ")


def _refusal(code: int) -> web.Response:
    reasons = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
    status = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": f"refused by the test with {code}",
        "reason": reasons[code],
        "code": code,
    }
    headers = {"Retry-After": "1"} if code in (429, 503) else {}
    with contextlib.suppress(KeyError):
        return web.Response(
            status=code, body=json.dumps(status).encode(), content_type="application/json", headers=headers
        )
    raise AssertionError(code)
