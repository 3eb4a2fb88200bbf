"""The verifier as an HTTP service, for pods of their own.

    POST /judge    {"cases": [...], "deadline_seconds": 60}  ->  {"judgements": [...]}, in the order of the cases
    GET  /healthz  200 as long as programs can be executed here: one was, a moment ago
    GET  /readyz   the same, and 503 from the moment on at which the service is to end
    GET  /metrics  for Prometheus

A full queue answers 429 with Retry-After; a request past its deadline answers 504 and its programs are not run. On
SIGTERM the service takes no new work, finishes what it has and ends.
"""

import asyncio
import json
import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from populora_trainer.errors import PopuloraError, SandboxError
from populora_trainer.sandbox.pool import SandboxPool
from populora_trainer.sandbox.verdicts import Case, Judgement, Verdict
from populora_trainer.sandbox.wire import WireError, case_from_json, judgement_to_json

MAX_BODY_BYTES = 64 << 20
MAX_DEADLINE_SECONDS = 3600.0
_CANARY = Case("canary", "code_o", "def f(x):\n    return x + 1", ("1",))
_CANARY_SECONDS = 5.0  # how long one execution vouches for the service


@dataclass(frozen=True)
class ServiceLimits:
    """What the service takes on.

    Attributes:
        queued_cases: cases that may wait or run at a time, over all requests.
        cases_per_request: cases of one request.
        deadline_seconds: of a request that names none.
        drain_seconds: time to finish on SIGTERM.
    """

    queued_cases: int = 4096
    cases_per_request: int = 1024
    deadline_seconds: float = 600.0
    drain_seconds: float = 60.0


class SandboxMetrics:
    """What the service exports; the labels are the verdicts and the answers' codes."""

    def __init__(self, workers: int) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.verdicts = Counter(
            "populora_sandbox_verdicts", "Judged cases.", ("verdict", "kind"), registry=self.registry
        )
        self.requests = Counter("populora_sandbox_requests", "Answered requests.", ("code",), registry=self.registry)
        self.seconds = Histogram(
            "populora_sandbox_request_seconds",
            "From a request's arrival to its judgements.",
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
            registry=self.registry,
        )
        self.queued = Gauge("populora_sandbox_queued_cases", "Cases that wait or run.", registry=self.registry)
        self.workers = Gauge(
            "populora_sandbox_workers", "Programs that may run at a time under each hash seed.", registry=self.registry
        )
        self.workers.set(workers)


class SandboxService:
    """Serves a pool over HTTP."""

    def __init__(self, pool: SandboxPool, limits: ServiceLimits | None = None) -> None:
        self.pool = pool
        self.limits = limits or ServiceLimits()
        self.metrics = SandboxMetrics(pool.workers)
        self._queued = 0
        self._draining = False
        self._executed_at = -math.inf
        self._canary: asyncio.Task[bool] | None = None

    def application(self) -> web.Application:
        """Return the application, for any aiohttp server."""
        application = web.Application(client_max_size=MAX_BODY_BYTES)
        application.add_routes(
            [
                web.post("/judge", self._judge),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        return application

    async def serve(self, host: str, port: int, started: "asyncio.Future[int] | None" = None) -> None:
        """Serve until SIGTERM or SIGINT, then finish what was begun.

        Args:
            host: address to bind.
            port: port to bind, 0 for any free one.
            started: gets the bound port.

        Raises:
            SandboxError: the address cannot be bound.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        runner = web.AppRunner(self.application(), access_log=None, shutdown_timeout=self.limits.drain_seconds)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise SandboxError(f"--listen {host}:{port}: cannot serve there ({error.strerror or error})") from error
            if started is not None:
                started.set_result(runner.addresses[0][1])
            await stop.wait()
            await self.drain()
        finally:
            await runner.cleanup()

    async def drain(self) -> None:
        """Take no new work, and wait until what was begun is answered."""
        self._draining = True
        deadline = time.monotonic() + self.limits.drain_seconds
        while self._queued and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _judge(self, request: web.Request) -> web.Response:
        started = time.monotonic()
        try:
            cases, deadline = self._read(await request.read())
        except web.HTTPRequestEntityTooLarge:
            return self._refuse(413, f"a request has at most {MAX_BODY_BYTES} bytes")
        except WireError as error:
            return self._refuse(400, str(error))
        if self._draining:
            return self._refuse(503, "the service is ending; ask another replica")
        # A request that alone is over the limit is let in where nothing waits, or it could never be answered.
        if self._queued and self._queued + len(cases) > self.limits.queued_cases:
            return self._refuse(429, f"{self._queued} cases are waiting", {"Retry-After": "1"})
        self._queued += len(cases)
        self.metrics.queued.set(self._queued)
        try:
            async with asyncio.timeout(deadline):
                judgements = await self.pool.judge(cases)
        except TimeoutError:
            return self._refuse(504, f"not judged within {deadline:g} s")
        except SandboxError as error:
            return self._refuse(500, str(error))
        finally:
            self._queued -= len(cases)
            self.metrics.queued.set(self._queued)
        self._note(judgements)
        self.metrics.seconds.observe(time.monotonic() - started)
        self.metrics.requests.labels("200").inc()
        return web.json_response({"judgements": [judgement_to_json(one) for one in judgements]})

    def _read(self, body: bytes) -> tuple[list[Case], float]:
        try:
            record = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise WireError(f"the body is not JSON: {error}") from None
        if not isinstance(record, dict) or not isinstance(record.get("cases"), list):
            raise WireError('the body must be {"cases": [...]}')
        cases = record["cases"]
        if len(cases) > self.limits.cases_per_request:
            raise WireError(f"cases are {len(cases)}, allowed are {self.limits.cases_per_request} a request")
        deadline = record.get("deadline_seconds", self.limits.deadline_seconds)
        if (
            isinstance(deadline, bool)
            or not isinstance(deadline, int | float)
            or not 0 < deadline <= MAX_DEADLINE_SECONDS
        ):
            raise WireError(f"deadline_seconds is {deadline!r}, allowed are 0 to {MAX_DEADLINE_SECONDS:g}")
        return [_numbered(number, case) for number, case in enumerate(cases)], float(deadline)

    def _note(self, judgements: Sequence[Judgement]) -> None:
        for one in judgements:
            self.metrics.verdicts.labels(str(one.verdict), one.kind).inc()
            if one.verdict not in (Verdict.TIMEOUT, Verdict.CRASHED):
                self._executed_at = time.monotonic()

    async def _executes(self) -> bool:
        """Whether a program was executed within the last seconds; else one is executed now."""
        if time.monotonic() - self._executed_at < _CANARY_SECONDS:
            return True
        if self._canary is None or self._canary.done():
            self._canary = asyncio.create_task(self._try_canary())
        return await asyncio.shield(self._canary)

    async def _try_canary(self) -> bool:
        with suppress(PopuloraError, TimeoutError):
            async with asyncio.timeout(3 * _CANARY_SECONDS):
                (judgement,) = await self.pool.judge([_CANARY])
            if judgement.outputs == ("2",):
                self._executed_at = time.monotonic()
                return True
        return False

    async def _healthz(self, request: web.Request) -> web.Response:
        if await self._executes():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="programs cannot be executed here\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._draining:
            return web.Response(status=503, text="ending\n")
        return await self._healthz(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        encoder, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encoder(self.metrics.registry), headers={"Content-Type": content_type})

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
        self.metrics.requests.labels(str(status)).inc()
        return web.json_response({"error": message}, status=status, headers=headers)


def _numbered(number: int, record: object) -> Case:
    try:
        return case_from_json(record)
    except WireError as error:
        raise WireError(f"cases[{number}]: {error}") from None
