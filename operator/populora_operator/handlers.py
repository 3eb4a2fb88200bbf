"""kopf's part: watch PopulationRuns and put their keys into the queue. No decision is taken here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import kopf
from kubernetes.aio.client.configuration import Configuration

from populora_operator.cluster.kinds import RUN
from populora_operator.cluster.kubernetes import REQUEST_SECONDS, connector
from populora_operator.cluster.port import UnavailableError
from populora_operator.watches import WATCH_SECONDS

SILENCE_SECONDS = 60.0

Enqueue = Callable[[tuple[str, str], str], None]
"""Called with the key and the resource version of a run to which something has happened."""


def registry(enqueue: Enqueue, login: Callable[[], Awaitable[kopf.AiohttpSession]]) -> kopf.OperatorRegistry:
    """Return the handlers: three lines, which kopf neither annotates nor finalizes anything for."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.event(RUN.group, RUN.version, RUN.plural, registry=handlers)
    async def changed(meta: Mapping[str, Any], event: Mapping[str, Any], **_: Any) -> None:
        version = "" if event["type"] == "DELETED" else meta["resourceVersion"]
        enqueue((meta["namespace"], meta["name"]), version)

    @kopf.on.login(registry=handlers)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return await login()

    @kopf.on.startup(registry=handlers)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.server_timeout = WATCH_SECONDS
        settings.watching.inactivity_timeout = SILENCE_SECONDS
        settings.watching.connect_timeout = 5.0
        settings.watching.reconnect_backoff = 0.5
        settings.watching.chunk_size = 500
        settings.networking.request_timeout = SILENCE_SECONDS
        settings.networking.error_backoffs = (0.5, 1, 2, 4, 8, 15)
        settings.queueing.idle_timeout = 1.0
        settings.queueing.exit_timeout = 0.5
        settings.persistence.consistency_timeout = 0.0
        settings.process.ultimate_exiting_timeout = None

    return handlers


class Session:
    """kopf's connection: our credentials with every request, and a sign of life with every piece of a watch."""

    def __init__(self, configuration: Configuration, on_life: Callable[[], None]):
        self._configuration, self._on_life = configuration, on_life
        self._sessions: list[aiohttp.ClientSession] = []

    async def open(self) -> kopf.AiohttpSession:
        """Return what kopf logs in with."""
        session = aiohttp.ClientSession(
            connector=connector(self._configuration), middlewares=(self._authorize, self._listen), trust_env=True
        )
        self._sessions.append(session)
        return kopf.AiohttpSession(server=self._configuration.host, aiohttp_session=session)

    async def close(self) -> None:
        """Close what kopf has left open, which it does when it is cancelled."""
        while self._sessions:
            await self._sessions.pop().close()

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        token = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            request.headers["Authorization"] = token
        return await handler(request)

    async def _listen(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        watches = request.url.query.get("watch") == "true"
        # The server answers a watch at once, however long it has nothing to tell.
        async with asyncio.timeout(REQUEST_SECONDS if watches else None):
            response = await handler(request)
        if RUN.plural in request.url.path and (response.status < 400 or response.status == HTTPStatus.FORBIDDEN):
            # What is forbidden is no reason to begin anew: the server answers.
            self._on_life()
            if watches and response.status < 400:
                response.content = _Heard(response.content, self._on_life)  # type: ignore[assignment]
        return response


class _Heard:
    """A stream that says when something comes out of it, also where kopf has no handler for it, as for bookmarks."""

    def __init__(self, inner: aiohttp.StreamReader, on_life: Callable[[], None]):
        self._inner, self._on_life = inner, on_life

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._inner.iter_chunked(size):
            self._on_life()
            yield chunk
        self._on_life()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def watch_runs(handlers: kopf.OperatorRegistry, namespace: str | None, take_signals: Callable[[], None]) -> None:
    """Run kopf until it fails, or is cancelled.

    kopf's own runner cancels every task of the process when it ends and takes the process's signals, so its tasks are
    run here instead.

    Args:
        handlers: what kopf is to do.
        namespace: where; None means everywhere.
        take_signals: takes the process's signals back from kopf.

    Raises:
        ClusterError: kopf has ended, which it never does by itself.
    """
    tasks = await kopf.spawn_tasks(
        registry=handlers,
        standalone=True,
        clusterwide=namespace is None,
        namespaces=[namespace] if namespace is not None else [],
        identity=None,
    )
    take_signals()
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
        raise UnavailableError(f"watching runs: {next((error for error in errors if error), 'kopf has ended')}")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
