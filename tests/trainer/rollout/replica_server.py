"""Played vLLM replicas with their sidecars, over real HTTP, with faults on demand. Imported by name.

Each replica has a loopback address of its own, so that all share a port as pods do. What it answers follows from the
request alone: `answer_to` is the whole of its intelligence.
"""

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from populora_trainer.rollout.engine import Completion, RolloutRequest
from populora_trainer.rollout.replicas import ServingAddress
from populora_trainer.storage.publication import Publication, PublishedAdapter

END = 1
HOST = "vllm.test"

Json = dict[str, object]
Fault = Callable[[web.Request, Json], Awaitable[web.StreamResponse]]


def publication_of(step: int, members: tuple[str, ...] = ("t0", "s0")) -> Publication:
    """Return a publication whose adapters are new at the step."""
    adapters = []
    for member in members:
        digest = hashlib.sha256(f"{member} {step}".encode()).hexdigest()
        files = {"adapter_config.json": "a" * 64, "adapter_model.safetensors": "b" * 64}
        adapters.append(PublishedAdapter(member, f"{member}-s{step:06d}-{digest[:8]}", digest, files))
    return Publication(step, tuple(adapters), hashlib.sha256(str(step).encode()).hexdigest())


def tokens_of(prompt: tuple[int, ...], number: int, limit: int) -> tuple[int, ...]:
    """Return the tokens of a request's completion: every third is cut off, the others end by themselves."""
    length = 1 + (sum(prompt) + number) % 5
    body = tuple(10 + (prompt[0] + number + place) % 20 for place in range(length))
    return (body * limit)[:limit] if number % 3 == 2 else (*body, END)[-limit:]


def expected(request: RolloutRequest) -> list[Completion]:
    """Return what a request must bring, whichever replica it comes from."""
    completions = []
    for number in range(request.n):
        ids = tokens_of(request.prompt_ids, number if request.temperature else 0, request.max_tokens)
        logprobs = tuple(-0.01 * (place + 1) for place in range(len(ids)))
        completions.append(Completion(ids, logprobs, "stop" if ids[-1] == END else "length"))
    return completions


def answer_to(body: Json) -> Json:
    """Return vLLM's answer to a body of `/v1/completions`."""
    choices = []
    for number in range(body["n"]):
        ids = tokens_of(tuple(body["prompt"]), number, body["max_tokens"])
        logprobs = {"token_logprobs": [-0.01 * (place + 1) for place in range(len(ids))], "tokens": ["x"] * len(ids)}
        choices.append(
            {
                "index": number,
                "text": "x",
                "token_ids": list(ids),
                "prompt_token_ids": body["prompt"],
                "logprobs": logprobs,
                "finish_reason": "stop" if ids[-1] == END else "length",
            }
        )
    return {"object": "text_completion", "model": body["model"], "choices": choices[::-1]}


@dataclass
class PlayedReplica:
    """One vLLM server and its sidecar.

    Attributes:
        loads: whether a refresh makes the sidecar load the newest publication.
        error: what its `/status` gives as the error.
        faults: what answers the next requests instead, the first first.
        always: what answers every request instead.
        seconds: that an answer takes.
    """

    address: str
    loads: bool = True
    error: str | None = None
    faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    seconds: float = 0.0
    served: list[Publication] = field(default_factory=list)
    newest: Publication | None = None
    asked: list[Json] = field(default_factory=list)
    refreshed: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def names(self) -> dict[str, str]:
        return {one.name: one.digest for publication in self.served[-2:] for one in publication.adapters}

    def load(self) -> None:
        """Serve the newest publication."""
        if self.newest is not None and self.newest not in self.served:
            self.served.append(self.newest)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.in_flight += body["n"]
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if fault := self.faults.pop(0) if self.faults else self.always:
                return await fault(request, body)
            if body["model"] not in self.names:
                return web.json_response(
                    {"error": {"message": f"The model {body['model']} does not exist."}}, status=404
                )
            await asyncio.sleep(self.seconds)
            return web.json_response(answer_to(body))
        finally:
            self.in_flight -= body["n"]

    async def status(self, request: web.Request) -> web.Response:
        newest = self.served[-1] if self.served else None
        return web.json_response(
            {
                "publication": newest.sha256 if newest else None,
                "step": newest.step if newest else None,
                "adapters": self.names,
                "seen": self.newest.sha256 if self.newest else None,
                "error": self.error,
            }
        )

    async def refresh(self, request: web.Request) -> web.Response:
        self.refreshed += 1
        if self.loads:
            self.load()
        return web.Response(status=202)


class Replicas:
    """All replicas behind one name, and the storage that they read publications from."""

    def __init__(self) -> None:
        self.port, self.sidecar_port = _free_port(), _free_port()
        self.replicas: list[PlayedReplica] = []
        self.addresses: list[str] = []
        self._runners: dict[tuple[str, int], web.AppRunner] = {}

    @property
    def address(self) -> ServingAddress:
        return ServingAddress(HOST, self.port, self.sidecar_port)

    def publish(self, publication: Publication) -> Publication:
        """Make a publication visible to all sidecars."""
        for replica in self.replicas:
            replica.newest = publication
        return publication

    async def start(self, **options: object) -> PlayedReplica:
        """Start one more replica."""
        replica = PlayedReplica(f"127.0.0.{61 + len(self.replicas)}", **options)
        replica.newest = self.replicas[0].newest if self.replicas else None
        self.replicas.append(replica)
        self.addresses.append(replica.address)
        await self.serve_vllm(replica)
        await self.serve_sidecar(replica)
        return replica

    async def serve_vllm(self, replica: PlayedReplica) -> None:
        await self._serve(replica.address, self.port, [web.post("/v1/completions", replica.completions)])

    async def serve_sidecar(self, replica: PlayedReplica) -> None:
        routes = [web.get("/status", replica.status), web.post("/refresh", replica.refresh)]
        await self._serve(replica.address, self.sidecar_port, routes)

    async def kill(self, replica: PlayedReplica, *ports: int) -> None:
        """Cut connections and refuse new ones; on all ports where none is given."""
        for port in ports or (self.port, self.sidecar_port):
            await self._runners.pop((replica.address, port)).cleanup()

    async def _serve(self, address: str, port: int, routes: list[web.RouteDef]) -> None:
        made = web.Application()
        made.add_routes(routes)
        runner = web.AppRunner(made, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, address, port, reuse_address=True).start()
        self._runners[address, port] = runner

    async def close(self) -> None:
        for runner in self._runners.values():
            await runner.cleanup()


@asynccontextmanager
async def replicas(count: int, **options: object):
    """Serve `count` replicas; `options` are those of `PlayedReplica`."""
    all_of_them = Replicas()
    try:
        with _resolved(all_of_them):
            for _ in range(count):
                await all_of_them.start(**options)
            yield all_of_them
    finally:
        await all_of_them.close()


@contextmanager
def _resolved(all_of_them: Replicas) -> Iterator[None]:
    """Let HOST have the addresses that `addresses` lists; a name without any is unknown, as in DNS."""
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *arguments: object, **options: object) -> list:
        if host != HOST:
            return real(host, port, *arguments, **options)
        if not all_of_them.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in all_of_them.addresses]

    socket.getaddrinfo = look_up
    try:
        yield
    finally:
        socket.getaddrinfo = real


# --- Faults ---


def status(code: int, text: str = "") -> Fault:
    async def fault(request: web.Request, body: Json) -> web.StreamResponse:
        return web.Response(status=code, text=text)

    return fault


def text(content: str) -> Fault:
    async def fault(request: web.Request, body: Json) -> web.StreamResponse:
        return web.Response(text=content, content_type="application/json")

    return fault


def changed(change: Callable[[Json], object]) -> Fault:
    """Answer with what a change makes of the right answer."""

    async def fault(request: web.Request, body: Json) -> web.StreamResponse:
        answer = answer_to(body)
        change(answer)
        return web.json_response(answer)

    return fault


async def redirect(request: web.Request, body: Json) -> web.StreamResponse:
    """Send the request elsewhere, where it would be answered."""
    raise web.HTTPTemporaryRedirect(str(request.url))


async def hang(request: web.Request, body: Json) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("nobody waits for an hour")


async def cut(request: web.Request, body: Json) -> web.StreamResponse:
    """Send half of an answer, then cut the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.abort()
    return response


async def drop(request: web.Request, body: Json) -> web.StreamResponse:
    """Cut the connection without an answer, as a server does with an idle one."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
