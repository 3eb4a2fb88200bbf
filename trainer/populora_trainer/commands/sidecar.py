"""`populora sidecar`: keeps a vLLM server's adapters equal to what a run has published."""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from populora_trainer.diagnostics.endpoint import parse_listen
from populora_trainer.errors import PopuloraError

if TYPE_CHECKING:
    from populora_trainer.storage.store import ObjectStore

# The sidecar comes back to the storage by itself, so a request that fails is told of after a few tries.
_TRIES = 3
_MANIFESTS = (".yaml", ".yml", ".json")


@click.command("sidecar")
@click.argument("run", metavar="[RUN]", default="/etc/populora/run.yaml")
@click.option("--listen", default="127.0.0.1:8001", show_default=True, metavar="HOST:PORT", help="Where to serve.")
@click.option("--vllm", default="http://127.0.0.1:8000", show_default=True, metavar="URL", help="The vLLM server.")
@click.option("--folder", default="/adapters", show_default=True, type=click.Path(file_okay=False, path_type=Path),
              help="Where adapters are kept for vLLM, which must see them under the same path.")  # fmt: skip
@click.option("--endpoint", metavar="URL", help="S3 endpoint of a store that is not AWS.")
@click.option("--region", help="S3 region.")
def command(run: str, listen: str, vllm: str, folder: Path, endpoint: str | None, region: str | None) -> None:
    """Keep a vLLM server's adapters equal to what RUN publishes, until SIGTERM.

    RUN is a manifest, a folder or s3://BUCKET/PREFIX; without one it is /etc/populora/run.yaml. Start vLLM with
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and `--enable-lora --max-loras 2N --max-cpu-loras 2N --max-lora-rank R` for a
    population of N adapters of rank R, and one sidecar beside each server.

    GET /healthz, /readyz (vLLM serves what is published), /status and /metrics; POST /refresh looks at once.
    Nothing authenticates who asks: serve to a network only behind a NetworkPolicy or its like.
    """
    host, port = parse_listen(listen)
    if not _is_server(vllm):
        raise PopuloraError(f"--vllm {vllm!r}: expected http://HOST:PORT.")
    opened = _storage(run, endpoint, region)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("botocore").setLevel(logging.WARNING)

    from populora_trainer.serving.folders import held

    with held(folder):
        asyncio.run(_serve(opened, run, host, port, vllm, folder))


async def _serve(opened: "Callable[[], ObjectStore]", run: str, host: str, port: int, url: str, folder: Path) -> None:
    import aiohttp

    from populora_trainer.serving.folders import AdapterFolders
    from populora_trainer.serving.service import serve
    from populora_trainer.serving.sidecar import Sidecar
    from populora_trainer.serving.vllm import Vllm

    def say(bound: "asyncio.Future[int]") -> None:
        if not bound.cancelled():
            click.echo(f"Serving http://{host or '0.0.0.0'}:{bound.result()} for {url} and {run}")

    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    started.add_done_callback(say)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        await serve(Sidecar(opened, Vllm(url, session), AdapterFolders(folder)), host, port, started)
    # A request to the storage may take minutes, in a thread that the interpreter would wait for. Nothing is lost:
    # adapters appear whole, and half a download is removed at the next start.
    sys.stdout.flush()
    os._exit(0)


def _is_server(url: str) -> bool:
    """Return whether a URL names a server, without a secret that logs would tell."""
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return named and parts.scheme in ("http", "https") and not (parts.username or parts.query or parts.fragment)


def _storage(run: str, endpoint: str | None, region: str | None) -> "Callable[[], ObjectStore]":
    """Return what opens the run's storage.

    Raises:
        ManifestError: RUN is a manifest, and wrong.
        StorageError: RUN can't be a run's place.
    """
    from populora_trainer.storage.run import folder_of, open_store

    if "://" not in run and not Path(run).is_dir() and (Path(run).suffix in _MANIFESTS or Path(run).exists()):
        from populora_api import load_manifest

        spec = load_manifest(run).spec
        if spec.inference.engine != "VLLM":
            click.echo(
                f"Note: {run} has spec.inference.engine {spec.inference.engine}; such a run publishes adapters only "
                f"if it is started with --set inference.engine=VLLM",
                err=True,
            )
        storage = spec.storage
        run, endpoint, region = storage.uri, endpoint or storage.endpoint, region or storage.region
    folder_of(run)  # what can be no run's place is refused now, not again and again
    return lambda: open_store(run, create=True, endpoint=endpoint, region=region, tries=_TRIES)
