"""The HTTP servers of the controller: /metrics on one port, /healthz and /readyz on another."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from populora_operator.metrics import Metrics


@asynccontextmanager
async def serve(
    metrics: Metrics,
    metrics_port: int,
    health_port: int,
    problems: Callable[[], Sequence[str]],
    ready: Callable[[], bool],
) -> AsyncIterator[tuple[int, int]]:
    """Serve while the context lasts, and yield both ports.

    Args:
        metrics: what /metrics shows.
        metrics_port: its port.
        health_port: port of /healthz and /readyz.
        problems: what makes /healthz fail.
        ready: whether /readyz succeeds.

    Raises:
        OSError: a port is taken.
    """

    async def show_metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(metrics.registry), headers={"Content-Type": content_type})

    async def healthz(request: web.Request) -> web.Response:
        found = problems()
        return web.Response(status=503 if found else 200, text="".join(f"{line}\n" for line in found or ("ok",)))

    async def readyz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if ready() else web.Response(status=503, text="starting\n")

    runners = [
        await _start(metrics_port, {"/metrics": show_metrics}),
        await _start(health_port, {"/healthz": healthz, "/readyz": readyz}),
    ]
    try:
        yield _port(runners[0]), _port(runners[1])
    finally:
        for runner in runners:
            await runner.cleanup()


def _port(runner: web.AppRunner) -> int:
    """Return the port, of IPv4 where any free port was asked for and each family has got another."""
    addresses = sorted(runner.addresses, key=len)
    return int(addresses[0][1])


async def _start(port: int, routes: dict[str, Callable[[web.Request], object]]) -> web.AppRunner:
    application = web.Application()
    for path, handler in routes.items():
        application.router.add_get(path, handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
