"""The verifier as an HTTP service, for pods of their own.

    POST /judge    {"cases": [...], "deadline_seconds": 60, "seed": 0}  ->  {"judgements": [...]}, in the cases' order
    GET  /healthz  200 as long as programs can be executed here, however many wait
    GET  /readyz   the same, and 503 from the moment on at which the service is to end
    GET  /metrics  for Prometheus

A full queue answers 429 with Retry-After; a request past its deadline answers 504 and its programs are not run; one
that asks for more than an answer may hold is answered 413. Workers are shared out equally among the addresses that
ask. On SIGTERM the service takes no new work, finishes what it can in its time, answers the rest 503 and ends.
"""

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from populora_trainer.errors import SandboxError
from populora_trainer.sandbox.pool import SandboxPool
from populora_trainer.sandbox.verdicts import Case, Judgement
from populora_trainer.sandbox.wire import WireError, case_from_json, judgement_to_json, load_bounded

MAX_DEADLINE_SECONDS = 3600.0
_CANARY = Case("canary", "code_o", "def f(x):\n    return x + 1", ("1",))
_CANARY_SECONDS = 5.0  # how long runs that ended vouch for the service
_CANARY_WAIT = 2.0  # for one to be executed; a probe's timeout is 5
_TROUBLE_SECONDS = 10.0  # in which no program can be run, after which the service is not healthy
_FIELDS = frozenset({"cases", "deadline_seconds", "seed"})
_ENCODINGS = ("identity", "gzip", "deflate")
_VALUES_PER_CASE = 10  # of JSON, without inputs and outputs
_CLOSING_SECONDS = 1.0  # for the last answers to be sent


@dataclass(frozen=True)
class ServiceLimits:
    """What the service takes on.

    Attributes:
        queued_cases: cases that may wait or run at a time, over all requests.
        cases_per_request: cases of one request.
        inputs_per_request: inputs of all cases of one request; with the longest output, this bounds an answer.
        body_bytes: of one request, decompressed.
        held_bytes: of all requests that are read or judged at a time.
        deadline_seconds: of a request that names none.
        transfer_seconds: for a request to arrive, for its answer to be taken, and for a connection to be idle.
        drain_seconds: time to finish on SIGTERM.
    """

    queued_cases: int = 4096
    cases_per_request: int = 1024
    inputs_per_request: int = 4096
    body_bytes: int = 16 << 20
    held_bytes: int = 64 << 20
    deadline_seconds: float = 600.0
    transfer_seconds: float = 60.0
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
        self.restarts = Counter(
            "populora_sandbox_worker_restarts",
            "Workers that ended, or were stuck, and were replaced.",
            registry=self.registry,
        )


class _Refused(Exception):  # noqa: N818
    """A request is answered with a status and a sentence; its connection is closed where no more can be read of it."""

    def __init__(
        self, status: int, message: str, headers: dict[str, str] | None = None, *, unreadable: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.unreadable = status, headers, unreadable


class SandboxService:
    """Serves a pool over HTTP."""

    def __init__(self, pool: SandboxPool, limits: ServiceLimits | None = None) -> None:
        self.pool = pool
        self.limits = limits or ServiceLimits()
        self.metrics = SandboxMetrics(pool.workers)
        self._queued = 0
        self._held = 0
        self._restarts = 0
        self._draining = False
        self._ended = asyncio.Event()
        self._canary: asyncio.Task[str | None] | None = None

    def runner(self) -> web.AppRunner:
        """Return the runner of the application: it closes slow connections, and ends what was asked by who has gone."""
        application = web.Application()
        application.add_routes(
            [
                web.post("/judge", self._judge),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
            ]
        )
        return web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=self.limits.transfer_seconds,
            shutdown_timeout=_CLOSING_SECONDS,
        )

    async def serve(self, host: str, port: int, started: "asyncio.Future[int] | None" = None) -> None:
        """Serve until SIGTERM or SIGINT, then finish what was begun; a second signal ends that.

        Args:
            host: address to bind.
            port: port to bind, 0 for any free one.
            started: gets the bound port.

        Raises:
            SandboxError: the address cannot be bound.
        """
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def told() -> None:
            if stop.is_set():
                self._ended.set()
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, told)
        runner = self.runner()
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
        """Take no new work, wait until what was begun is judged or its time is over, and answer all."""
        self._draining = True
        deadline = time.monotonic() + self.limits.drain_seconds
        while self._queued and time.monotonic() < deadline and not self._ended.is_set():
            await asyncio.sleep(0.05)
        self._ended.set()
        deadline = time.monotonic() + _CLOSING_SECONDS
        while self._queued and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _judge(self, request: web.Request) -> web.StreamResponse:
        started = time.monotonic()
        held = 0
        try:
            if self._draining:
                raise _Refused(503, "the service is ending; ask another replica")
            body = await self._body(request)
            self._held += (held := len(body))
            cases, deadline, seed = self._read(body)
            del body
            judgements = await self._judged(cases, deadline, seed, request.remote or "")
            answer = await _written(judgements)
        except _Refused as refusal:
            self.metrics.requests.labels(str(refusal.status)).inc()
            said = web.json_response({"error": str(refusal)}, status=refusal.status, headers=refusal.headers)
            if refusal.unreadable:
                said.force_close()
                await self._send(request, said)
                request.protocol.force_close()  # it would read on otherwise, up to the fault
            return said
        finally:
            self._held -= held
        for one in judgements:
            self.metrics.verdicts.labels(str(one.verdict), one.kind).inc()
        self.metrics.seconds.observe(time.monotonic() - started)
        self.metrics.requests.labels("200").inc()
        return await self._send(request, web.Response(body=answer, content_type="application/json"))

    async def _send(self, request: web.Request, response: web.Response) -> web.Response:
        """Send a response to a client that takes it in time; part with any other."""
        await response.prepare(request)
        try:
            async with asyncio.timeout(self.limits.transfer_seconds):
                await response.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _body(self, request: web.Request) -> bytes:
        """Read a request's body within its time and its size, decompressed where it says so."""
        limits, held = self.limits, 0
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in _ENCODINGS:
            raise _Refused(415, f"Content-Encoding is {encoding[:40]!r}, allowed are {', '.join(_ENCODINGS)}")
        body = bytearray()
        try:
            async with asyncio.timeout(limits.transfer_seconds):
                async for part in request.content.iter_any():
                    body += part
                    self._held += len(part)
                    held += len(part)
                    if len(body) > limits.body_bytes:
                        raise _Refused(413, f"a request has at most {limits.body_bytes} bytes")
                    if self._held > limits.held_bytes and self._held > held:
                        raise _Refused(429, f"{self._held} bytes of requests are waiting", {"Retry-After": "1"})
        except TimeoutError:
            message = f"the body did not arrive within {limits.transfer_seconds:g} s"
            raise _Refused(408, message, unreadable=True) from None
        except (web.RequestPayloadError, HttpProcessingError) as error:
            raise _Refused(400, f"the body cannot be read: {' '.join(str(error).split())}", unreadable=True) from None
        finally:
            self._held -= held
        return bytes(body)

    def _read(self, body: bytes) -> tuple[list[Case], float, int | None]:
        limits = self.limits
        most = _VALUES_PER_CASE * (limits.cases_per_request + 1) + 2 * limits.inputs_per_request
        try:
            record = load_bounded(body, most)
            if not isinstance(record, dict) or not isinstance(record.get("cases"), list):
                raise WireError('the body must be {"cases": [...]}')
            if unknown := sorted(set(record) - _FIELDS):
                raise WireError(
                    f"{unknown[0][:40]!r} is no field of a request, allowed are {', '.join(sorted(_FIELDS))}"
                )
            cases = record["cases"]
            if len(cases) > limits.cases_per_request:
                raise WireError(f"cases are {len(cases)}, allowed are {limits.cases_per_request} a request")
            deadline = record.get("deadline_seconds", limits.deadline_seconds)
            if (
                isinstance(deadline, bool)
                or not isinstance(deadline, int | float)
                or not 0 < deadline <= MAX_DEADLINE_SECONDS
            ):
                raise WireError(f"deadline_seconds is {str(deadline)[:40]}, allowed are 0 to {MAX_DEADLINE_SECONDS:g}")
            seed = record.get("seed")
            if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << 64):
                raise WireError(f"seed is {str(seed)[:40]}, allowed are 0 to 2^64 - 1")
            read = [_numbered(number, case) for number, case in enumerate(cases)]
        except WireError as error:
            raise _Refused(400, str(error)) from None
        inputs = sum(len(case.inputs) for case in read)
        if inputs > limits.inputs_per_request:
            raise _Refused(413, f"inputs of all cases are {inputs}, allowed are {limits.inputs_per_request} a request")
        return read, float(deadline), seed

    async def _judged(self, cases: Sequence[Case], deadline: float, seed: int | None, client: str) -> list[Judgement]:
        # A request that alone is over the limit is let in where nothing waits, or it could never be answered.
        if self._queued and self._queued + len(cases) > self.limits.queued_cases:
            raise _Refused(429, f"{self._queued} cases are waiting", {"Retry-After": "1"})
        self._queued += len(cases)
        self.metrics.queued.set(self._queued)
        judging = asyncio.ensure_future(self.pool.judge(cases, seed=seed, client=client))
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({judging, ending}, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
            if judging.done():
                return judging.result()
            if ending.done():
                raise _Refused(503, "the service is ending; ask another replica")
            raise _Refused(504, f"not judged within {deadline:g} s")
        except SandboxError as error:
            raise _Refused(500, str(error)) from None
        finally:
            judging.cancel()
            ending.cancel()
            self._queued -= len(cases)
            self.metrics.queued.set(self._queued)

    async def _fault(self) -> str | None:
        """Return why programs cannot be executed here; None where some were a moment ago, or one is now.

        Programs that hang keep the canary waiting and are no fault. Then the pool says whether its workers live.
        """
        if time.monotonic() - self.pool.ran_at < _CANARY_SECONDS:
            return None
        if self._canary is None or self._canary.done():
            self._canary = asyncio.create_task(self._try_canary())
        done, _ = await asyncio.wait({self._canary}, timeout=_CANARY_WAIT)
        return self._canary.result() if done else self.pool.trouble(_TROUBLE_SECONDS)

    async def _try_canary(self) -> str | None:
        try:
            (judgement,) = await self.pool.judge([_CANARY], client=self)
        except SandboxError as error:
            return str(error)
        return None if judgement.outputs == ("2",) else f"{judgement.verdict}: {judgement.detail}"

    async def _healthz(self, request: web.Request) -> web.Response:
        fault = await self._fault()
        if fault is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"programs cannot be executed here: {fault}\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        if self._draining:
            return web.Response(status=503, text="ending\n")
        return await self._healthz(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        restarts = self.pool.restarts
        self.metrics.restarts.inc(restarts - self._restarts)
        self._restarts = restarts
        accept = request.headers.get("Accept", "")
        try:
            encoder, content_type = choose_encoder(accept)
            return web.Response(body=encoder(self.metrics.registry), headers={"Content-Type": content_type})
        except Exception:  # whatever the client library makes of a header that nobody checked
            return web.Response(status=400, text=f"Accept is {accept[:80]!r}, which names no format of metrics\n")


async def _written(judgements: Sequence[Judgement]) -> bytes:
    """Write an answer piece by piece, as a long one takes a while and other requests should not wait for it."""
    parts, pending = [b'{"judgements": ['], 0
    for number, one in enumerate(judgements):
        parts.append((", " if number else "").encode() + json.dumps(judgement_to_json(one)).encode())
        pending += len(parts[-1])
        if pending > 1 << 18:
            pending = 0
            await asyncio.sleep(0)
    return b"".join([*parts, b"]}"])


def _numbered(number: int, record: object) -> Case:
    try:
        return case_from_json(record)
    except WireError as error:
        raise WireError(f"cases[{number}]: {error}") from None
