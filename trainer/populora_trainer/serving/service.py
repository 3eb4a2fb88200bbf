"""The sidecar over HTTP.

GET  /healthz  200 while the process works
GET  /readyz   200 while vLLM serves what is published; else 503 with the reason
GET  /status   {"publication", "step", "adapters", "seen", "error"}, see `Sidecar.status`
POST /refresh  look at the storage now; 202
GET  /metrics  for Prometheus
"""

import asyncio
import signal
from contextlib import suppress

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from populora_trainer.errors import PopuloraError
from populora_trainer.serving.sidecar import Sidecar


def application(sidecar: Sidecar) -> web.Application:
    """Return the application, for any aiohttp server."""

    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(request: web.Request) -> web.Response:
        reason = sidecar.unready()
        return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")

    async def status(request: web.Request) -> web.Response:
        return web.json_response(sidecar.status())

    async def refresh(request: web.Request) -> web.Response:
        sidecar.refresh()
        return web.Response(status=202, text="looking\n")

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(sidecar.metrics.registry), headers={"Content-Type": content_type})

    made = web.Application()
    made.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/status", status),
            web.post("/refresh", refresh),
            web.get("/metrics", metrics),
        ]
    )
    return made


async def serve(sidecar: Sidecar, host: str, port: int, started: "asyncio.Future[int] | None" = None) -> None:
    """Serve and let the sidecar work until SIGTERM or SIGINT.

    Args:
        sidecar: what works.
        host: address to bind, empty for all.
        port: port to bind, 0 for any free one.
        started: gets the bound port.

    Raises:
        PopuloraError: the address cannot be bound.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(application(sidecar), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    work = asyncio.create_task(sidecar.run())
    stopped = asyncio.create_task(stop.wait())
    try:
        try:
            await web.TCPSite(runner, host or None, port).start()
        except OSError as error:
            raise PopuloraError(f"--listen {host}:{port}: cannot serve there ({error.strerror or error})") from error
        if started is not None:
            started.set_result(runner.addresses[0][1])
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, stopped):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await runner.cleanup()
