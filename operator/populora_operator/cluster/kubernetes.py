"""The cluster over the transport of `kubernetes.aio`, in plain dictionaries.

The typed models of that package are left out: they are slow and drop fields that they do not know.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject

from populora_operator.cluster.errors import from_answer
from populora_operator.cluster.kinds import Kind
from populora_operator.cluster.port import (
    ClusterError,
    GoneError,
    NotFoundError,
    Object,
    Page,
    Propagation,
    UnavailableError,
    WatchEvent,
)

APPLY = "application/apply-patch+yaml"
PAGE_SIZE = 500
REQUEST_SECONDS = 10.0
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 10.0
"""A watch that stays silent for this long after the server should have ended it is dead."""

_NEVER_A_VERSION = "1"
"""A resource version that no object has: applying under it creates an object and conflicts with an existing one."""

OnRequest = Callable[[str, str, int, float], None]
"""Called after every request with verb, plural name, HTTP status (0: none) and seconds."""


def connector(configuration: Configuration) -> aiohttp.TCPConnector:
    """Return connections to the API server of a configuration, for clients that are not of this package."""
    context = RESTClientObject(configuration).ssl_context
    return aiohttp.TCPConnector(limit=0, ssl=context)


class KubernetesCluster:
    """A `Cluster` over HTTP; a context manager that closes its connections."""

    def __init__(self, configuration: Configuration, on_request: OnRequest = lambda *_: None):
        self._client = ApiClient(configuration)
        self._on_request = on_request

    async def __aenter__(self) -> "KubernetesCluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """Return an object as it is now."""
        return await self._request("get", "GET", kind, kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", *, fields: str = "", more: str = ""
    ) -> Page:
        """Return a page of the objects in a namespace (None: in all) whose labels and fields match."""
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(PAGE_SIZE), "continue": more}
        answer = await self._request("list", "GET", kind, kind.path(namespace), query, seconds=60.0)
        metadata = answer.get("metadata") or {}
        return Page(answer.get("items") or [], metadata.get("resourceVersion", ""), metadata.get("continue") or "")

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, resource_version: str, seconds: int
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield what happens from a resource version on; ends after some seconds, or when the connection does."""
        query = {
            "labelSelector": selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=float(seconds) + SILENCE_SECONDS
        )
        url = self._url(kind.watch_path(namespace), query)
        started = time.monotonic()
        response = None
        try:
            # The server answers at once, however long it has nothing to tell.
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._client.call_api("GET", url, await self._headers(), _request_timeout=timeout)
            response = answer.response
            self._on_request("watch", kind.plural, response.status, time.monotonic() - started)
            if response.status >= 400:
                raise from_answer(response.status, await response.read(), response.headers)
            async for line in _lines(response.content):
                yield _event(line)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if response is None:
                self._on_request("watch", kind.plural, 0, time.monotonic() - started)
            raise UnavailableError(f"watching {kind.plural}: {_text(error)}") from error
        finally:
            if response is not None:
                response.close()

    async def apply(
        self, kind: Kind, item: Object, *, manager: str, create: bool = False, subresource: str | None = None
    ) -> Object:
        """Apply an object on the server under a field manager, taking over fields of others, and return the result."""
        metadata = item["metadata"]
        if create:
            item = {**item, "metadata": {**metadata, "resourceVersion": _NEVER_A_VERSION}}
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true"}
        return await self._request("apply", "PATCH", kind, path, query, body=item, content=APPLY, creating=create)

    async def create(self, kind: Kind, item: Object) -> Object:
        """Create an object and return it."""
        return await self._request("create", "POST", kind, kind.path(item["metadata"]["namespace"]), body=item)

    async def replace(self, kind: Kind, item: Object) -> Object:
        """Replace an object; metadata.resourceVersion makes it conditional."""
        metadata = item["metadata"]
        return await self._request("update", "PUT", kind, kind.path(metadata["namespace"], metadata["name"]), body=item)

    async def delete(
        self, kind: Kind, namespace: str, name: str, *, uid: str | None = None, propagation: Propagation = "Background"
    ) -> None:
        """Delete an object if it has the uid; one that is gone is deleted."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            await self._request("delete", "DELETE", kind, kind.path(namespace, name), body=options)
        except NotFoundError:
            return

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows the kind."""
        try:
            answer = await self._request("discover", "GET", kind, kind.root)
        except NotFoundError:
            return False
        return any(resource.get("name") == kind.plural for resource in answer.get("resources") or ())

    async def _request(
        self,
        verb: str,
        method: str,
        kind: Kind,
        path: str,
        query: dict[str, str] | None = None,
        *,
        body: Object | None = None,
        content: str = "application/json",
        creating: bool = False,
        seconds: float = REQUEST_SECONDS,
    ) -> Object:
        started, code = time.monotonic(), 0
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            answer = await self._client.call_api(
                method,
                self._url(path, query or {}),
                {**await self._headers(), "Content-Type": content},
                body=body,
                _request_timeout=timeout,
            )
            data = await answer.read()
            code = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnavailableError(f"{verb} {kind.plural}: {_text(error)}") from error
        finally:
            self._on_request(verb, kind.plural, code, time.monotonic() - started)
        if code >= 400:
            raise from_answer(code, data, answer.headers, creating=creating)
        result = json.loads(data) if data else {}
        return result if isinstance(result, dict) else {}

    def _url(self, path: str, query: dict[str, str]) -> str:
        given = {name: value for name, value in query.items() if value}
        return f"{self._client.configuration.host}{path}" + (f"?{urlencode(given)}" if given else "")

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "populora-controller"}
        token = await self._client.configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        return headers


def _event(line: bytes) -> WatchEvent:
    value: dict[str, Any] = json.loads(line)
    if value.get("type") != "ERROR":
        return WatchEvent(value["type"], value["object"])
    status = value.get("object") or {}
    code, message = int(status.get("code") or 0), str(status.get("message") or "the watch failed")
    raise (GoneError if code == 410 else ClusterError)(message, code=code, reason=str(status.get("reason") or ""))


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield lines of any length; the reader's own iteration refuses long ones."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line:
                    yield line


def _text(error: BaseException) -> str:
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
