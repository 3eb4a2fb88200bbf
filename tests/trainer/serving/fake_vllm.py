"""A server that behaves as vLLM 0.32 does where adapters are loaded, and badly where it is told to."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web


class FakeVllm:
    """Attributes:
    adapters: path of each loaded adapter by name.
    calls: path and body of every POST so far.
    healthy: what /health says.
    hanging: paths whose requests are never answered.
    refusing: names that are not loaded.
    lying: adapters are said to be loaded and are not.
    most: largest number of adapters that were loaded at a time.
    """

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.healthy = True
        self.hanging: set[str] = set()
        self.refusing: set[str] = set()
        self.lying = False
        self.most = 0
        self.url = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Serve, at the same port as before; nothing is loaded."""
        self.adapters.clear()
        app = web.Application(middlewares=[self._hang])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Refuse connections from now on."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @web.middleware
    async def _hang(self, request: web.Request, handler) -> web.StreamResponse:
        while request.path in self.hanging and self._runner is not None:
            await asyncio.sleep(0.01)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": "base", "root": "/base/nano", "parent": None}
        cards = [{"id": name, "root": path, "parent": "base"} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": [base, *cards]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        name, path = body["lora_name"], body["lora_path"]
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if name in self.refusing:
            return _error(400, "LoRA rank 64 is greater than max_lora_rank 8.")
        if not (Path(path) / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        if not self.lying:
            self.adapters[name] = path
            self.most = max(self.most, len(self.adapters))
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append((request.path, body))
        if self.adapters.pop(body["lora_name"], None) is None:
            return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
        return web.Response(text="Success")


@asynccontextmanager
async def fake_vllm() -> AsyncIterator[FakeVllm]:
    """Serve until the context ends."""
    server = FakeVllm()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json")
