"""The client over HTTP, against a server that answers as the API server does."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from populora_operator.cluster import kubernetes
from populora_operator.cluster.errors import from_answer
from populora_operator.cluster.kinds import CONFIG_MAP, JOB, NAMESPACE, POD_MONITOR, RUN
from populora_operator.cluster.kubernetes import KubernetesCluster
from populora_operator.cluster.port import (
    AlreadyExistsError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    NamespaceTerminatingError,
    NotFoundError,
    QuotaExceededError,
    TooManyRequestsError,
    UnavailableError,
)


def status(code: int, reason: str, message: str, **details: Any) -> bytes:
    answer = {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    ("code", "body", "creating", "expected"),
    [
        (404, status(404, "NotFound", "no"), False, NotFoundError),
        (409, status(409, "Conflict", "modified"), False, ConflictError),
        (409, status(409, "Conflict", "modified"), True, AlreadyExistsError),
        (409, status(409, "AlreadyExists", "there"), False, AlreadyExistsError),
        (410, status(410, "Expired", "old"), False, GoneError),
        (403, status(403, "Forbidden", "exceeded quota: q"), False, QuotaExceededError),
        (403, status(403, "Forbidden", "no right"), False, ForbiddenError),
        (
            403,
            status(403, "Forbidden", "x", causes=[{"reason": "NamespaceTerminating"}]),
            False,
            NamespaceTerminatingError,
        ),
        (422, status(422, "Invalid", "spec.x: bad"), False, InvalidError),
        (
            500,
            status(500, "", "failed to create typed patch object (ns/x; v1, Kind=Pod): .spec.x"),
            False,
            InvalidError,
        ),
        (500, status(500, "InternalError", "etcd"), False, UnavailableError),
        (502, b"<html>bad gateway</html>", False, UnavailableError),
        (429, status(429, "TooManyRequests", "slow", retryAfterSeconds=7), False, TooManyRequestsError),
    ],
)
def test_answers_become_errors(code: int, body: bytes, creating: bool, expected: type[ClusterError]) -> None:
    error = from_answer(code, body, {}, creating=creating)
    assert type(error) is expected
    assert error.code == code
    assert str(error)


def test_the_server_says_how_long_to_wait() -> None:
    assert from_answer(429, b"", {"Retry-After": "3"}).retry_after == 3
    assert from_answer(429, status(429, "", "", retryAfterSeconds=7), {}).retry_after == 7
    assert from_answer(429, b"", {"Retry-After": "soon"}).retry_after is None


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def serve(handler: Handler, story: Callable[[KubernetesCluster, list[Any]], Awaitable[None]]) -> None:
    """Run a story against a server."""

    async def main() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        configuration.api_key["BearerToken"] = "Bearer secret"
        counted: list[Any] = []
        async with KubernetesCluster(configuration, lambda *args: counted.append(args[:3])) as cluster:
            await story(cluster, counted)
        await runner.cleanup()

    asyncio.run(main())


def test_apply_is_server_side_forced_and_conditional_when_it_creates() -> None:
    seen: list[web.Request] = []
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        bodies.append(json.loads(await request.text()))
        return web.json_response({"metadata": {"name": "c"}})

    async def story(cluster: KubernetesCluster, counted: list[Any]) -> None:
        item = {"metadata": {"name": "c", "namespace": "ns"}}
        await cluster.apply(CONFIG_MAP, item, manager="populora-controller", create=True)
        await cluster.apply(RUN, item, manager="populora-status", subresource="status")
        assert counted == [("apply", "configmaps", 200), ("apply", "populationruns", 200)]

    serve(handler, story)
    create, write_status = seen
    assert create.method == "PATCH"
    assert create.path == "/api/v1/namespaces/ns/configmaps/c"
    assert create.headers["Content-Type"].startswith("application/apply-patch+yaml")
    assert create.headers["Authorization"] == "Bearer secret"
    assert dict(create.query) == {"fieldManager": "populora-controller", "force": "true"}
    assert bodies[0]["metadata"]["resourceVersion"] == "1", "an existing object conflicts"
    assert write_status.path == "/apis/populora.dev/v1alpha1/namespaces/ns/populationruns/c/status"
    assert "resourceVersion" not in bodies[1]["metadata"]


def test_deletion_names_uid_and_propagation_and_forgives_absence() -> None:
    bodies: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(json.loads(await request.text()))
        return web.json_response(json.loads(status(404, "NotFound", "no")), status=404)

    async def story(cluster: KubernetesCluster, counted: list[Any]) -> None:
        await cluster.delete(JOB, "ns", "j", uid="u", propagation="Foreground")
        assert counted == [("delete", "jobs", 404)]

    serve(handler, story)
    assert bodies[0]["propagationPolicy"] == "Foreground"
    assert bodies[0]["preconditions"] == {"uid": "u"}


def test_events_of_any_length_are_read_and_errors_in_the_stream_are_raised() -> None:
    big = "x" * 3_000_000

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.query["allowWatchBookmarks"] == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        for line in (
            {"type": "ADDED", "object": {"metadata": {"name": "a", "note": big}}},
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}},
            {"type": "ERROR", "object": {"code": 410, "message": "too old"}},
        ):
            await response.write(json.dumps(line).encode() + b"\n")
        return response

    async def story(cluster: KubernetesCluster, counted: list[Any]) -> None:
        seen: list[Any] = []

        async def read() -> None:
            async for event in cluster.watch(CONFIG_MAP, None, "a", "1", 50):
                seen.append(event)

        with pytest.raises(GoneError, match="too old"):
            await read()
        assert [event.type for event in seen] == ["ADDED", "BOOKMARK"]
        assert len(seen[0].object["metadata"]["note"]) == len(big)

    serve(handler, story)


def test_a_cut_connection_and_a_closed_port_are_unavailable() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def story(cluster: KubernetesCluster, counted: list[Any]) -> None:
        with pytest.raises(UnavailableError):
            await cluster.get(RUN, "ns", "r")
        with pytest.raises(UnavailableError):
            await anext(cluster.watch(RUN, "ns", "", "1", 5))
        assert counted == [("get", "populationruns", 0), ("watch", "populationruns", 0)]

    serve(handler, story)


def test_a_watch_that_is_not_answered_or_falls_silent_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(kubernetes, "SILENCE_SECONDS", 0.3)

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.query["resourceVersion"] == "answered":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}\n')
        await asyncio.sleep(2)
        return web.Response()

    async def story(cluster: KubernetesCluster, counted: list[Any]) -> None:
        for version, told in (("unanswered", 0), ("answered", 1)):
            events = cluster.watch(CONFIG_MAP, None, "a", version, 0)
            for _ in range(told):
                await anext(events)
            with pytest.raises(UnavailableError, match=r"no answer in time|[Tt]imeout"):
                await anext(events)
        assert counted == [("watch", "configmaps", 0), ("watch", "configmaps", 200)]

    serve(handler, story)


def test_a_namespace_is_watched_where_a_role_in_it_allows_it() -> None:
    assert NAMESPACE.watch_path("team-a") == "/api/v1/watch/namespaces/team-a"
    assert NAMESPACE.watch_path(None) == "/api/v1/namespaces"
    assert JOB.watch_path("team-a") == JOB.path("team-a")


def test_an_unknown_group_is_not_served() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == "/apis/populora.dev/v1alpha1":
            return web.json_response({"resources": [{"name": "populationruns"}]})
        return web.json_response({}, status=404)

    async def story(cluster: KubernetesCluster, counted: list[Any]) -> None:
        assert await cluster.serves(RUN)
        assert not await cluster.serves(POD_MONITOR)

    serve(handler, story)
