"""The command `populora sidecar` as a pod runs it: over HTTP, on a bucket, until SIGTERM. And `populora base`."""

import asyncio
import filecmp
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from fake_vllm import fake_vllm
from rig import Published

from populora_trainer.commands.base import command as base_command
from populora_trainer.commands.sidecar import command as sidecar_command
from populora_trainer.errors import PopuloraError
from populora_trainer.nano.registry import builtin_folder
from populora_trainer.serving.metrics import FAMILIES
from populora_trainer.storage.local import LocalStore
from populora_trainer.storage.s3 import S3Store

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
from s3_server import ACCESS, SECRET, client, gateway

MANIFEST = """
apiVersion: populora.dev/v1alpha1
kind: PopulationRun
metadata: {name: served}
spec:
  baseModel: {uri: "builtin://nano"}
  storage: {uri: "s3://runs/served", endpoint: "%s"}
"""
WITHOUT_TORCH = (
    "import sys\n"
    "class Refuse:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        assert name.partition('.')[0] not in ('torch', 'numpy', 'safetensors', 'transformers'), name\n"
    "sys.meta_path.insert(0, Refuse())\n"
    "from populora_trainer.cli import main\n"
    "main()\n"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def answer(session: aiohttp.ClientSession, url: str, method: str = "GET") -> tuple[int, str]:
    """The status and body; 0 where nobody listens."""
    try:
        async with session.request(method, url) as response:
            return response.status, await response.text()
    except aiohttp.ClientError:
        return 0, ""


async def eventually(ask, good, patience: float = 240) -> tuple[int, str]:
    async with asyncio.timeout(patience):
        while True:
            found = await ask()
            if good(found):
                return found
            await asyncio.sleep(0.05)


def test_a_pods_sidecar_serves_what_a_bucket_publishes_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    async def scene(endpoint: str) -> None:
        (tmp_path / "run.yaml").write_text(MANIFEST % endpoint)
        trainer = Published(S3Store("runs", "served", endpoint=endpoint))  # type: ignore[arg-type]
        async with fake_vllm() as vllm, aiohttp.ClientSession() as session:
            words = ["sidecar", str(tmp_path / "run.yaml"), f"--listen=127.0.0.1:{port}", f"--vllm={vllm.url}"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WITHOUT_TORCH, *words, f"--folder={tmp_path / 'adapters'}", env={**os.environ}
            )
            try:
                await eventually(lambda: answer(session, f"{url}/readyz"), lambda found: found[0] == 200)
                assert (await answer(session, f"{url}/healthz"))[0] == 200
                published = await asyncio.to_thread(trainer.publish, 1, t0="one", s0="two")
                assert (await answer(session, f"{url}/refresh", "POST"))[0] == 202
                await eventually(lambda: answer(session, f"{url}/status"), lambda found: published.sha256 in found[1])
                await eventually(
                    lambda: answer(session, f"{url}/status"),
                    lambda found: f'"publication": "{published.sha256}"' in found[1],
                )
                assert set(vllm.adapters) == set(published.names.values())
                _, metrics = await answer(session, f"{url}/metrics")
                assert all(f"# HELP {family}" in metrics for family in FAMILIES)
                assert "populora_sidecar_adapters_loaded 2.0" in metrics
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), 240) == 0
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    with gateway(tmp_path / "s3") as endpoint:
        client(endpoint).create_bucket(Bucket="runs")
        asyncio.run(scene(endpoint))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--vllm", "localhost:8000"], "--vllm 'localhost:8000': expected http://HOST:PORT."),
        (["--vllm", "http://"], "--vllm 'http://': expected http://HOST:PORT."),
        (["--vllm", "http://[::1"], "--vllm 'http://[::1': expected http://HOST:PORT."),
        (["--vllm", "http://127.0.0.1:99999"], "--vllm 'http://127.0.0.1:99999': expected http://HOST:PORT."),
        (["--vllm", "http://me:secret@host"], "--vllm 'http://me:secret@host': expected http://HOST:PORT."),
        (["--listen", "8001"], "--listen '8001': expected HOST:PORT"),
        (["--listen", "a" * 64 + ":8001"], "aaaa:8001': the host is no name"),
        (["--folder", "{file}/adapters"], "/file/adapters can't hold adapters: Not a directory"),
    ],
)
def test_a_wrong_call_is_one_sentence(words, sentence, tmp_path):
    (tmp_path / "file").write_text("")
    given = [word.format(file=tmp_path / "file") for word in words]
    done = CliRunner().invoke(sidecar_command, [str(tmp_path), *given])
    assert isinstance(done.exception, PopuloraError)
    assert sentence in str(done.exception)


@pytest.mark.parametrize("place", ["https://x/y", "s3://", "file://elsewhere/run", "s3://[x"])
def test_a_place_that_never_holds_a_run_is_refused_at_once(place, tmp_path):
    done = CliRunner().invoke(sidecar_command, [place, "--folder", str(tmp_path / "adapters")])
    assert f"{place} can't hold a run: a folder, file:///FOLDER or s3://BUCKET/PREFIX can" in str(done.exception)


def test_a_signal_ends_it_while_the_storage_does_not_answer(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        words = [sys.executable, "-m", "populora_trainer.cli", "sidecar", "s3://runs/served", f"--endpoint={endpoint}"]
        words += ["--listen=127.0.0.1:0", f"--folder={tmp_path / 'adapters'}"]
        secrets = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
        process = subprocess.Popen(words, env=os.environ | secrets)
        try:
            connection, _ = silent.accept()
            with connection:
                process.terminate()
                assert process.wait(45) == 0, "a request to the storage may take longer than this"
        finally:
            process.kill()
            process.wait()


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = [sys.executable, "-m", "populora_trainer.cli", "sidecar", str(tmp_path), f"--listen={address}"]
        done = subprocess.run(
            [*words, f"--folder={tmp_path / 'adapters'}"], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 1
    assert f"--listen {address}: cannot serve there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["nano", "nano-raw"])
def test_an_embedded_base_is_written_whole_and_once(name, tmp_path):
    for _ in range(2):
        done = CliRunner().invoke(base_command, [f"builtin://{name}", "--output", str(tmp_path / "base")])
        assert (done.exit_code, done.output) == (0, f"{tmp_path / 'base'}\n")
    compared = filecmp.dircmp(builtin_folder(name), tmp_path / "base")
    assert (compared.left_only, compared.right_only, compared.diff_files) == ([], [], [])
    assert os.listdir(tmp_path) == ["base"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    CliRunner().invoke(base_command, ["builtin://nano", "--output", str(tmp_path / "base")])
    for change in ("more", "config.json"):
        (tmp_path / "base" / change).write_text("{}")
        done = CliRunner().invoke(base_command, ["builtin://nano", "--output", str(tmp_path / "base")])
        assert "holds something else than builtin://nano" in str(done.exception)
        assert (tmp_path / "base" / change).read_text() == "{}"
        (tmp_path / "base" / "more").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["builtin://mega", "hf://mega/base"])
def test_an_unknown_base_is_named(name, tmp_path):
    done = CliRunner().invoke(base_command, [name, "--output", str(tmp_path / "base")])
    assert f"There is no embedded base {name}; allowed: builtin://nano, builtin://nano-raw." in str(done.exception)
    assert not (tmp_path / "base").exists()


def test_a_folder_of_a_run_is_read_as_one(tmp_path):
    opened = {}

    async def scene() -> None:
        async with fake_vllm() as vllm, aiohttp.ClientSession() as session:
            published = Published(LocalStore(tmp_path / "run")).publish(4, t0="one")
            port = free_port()
            words = ["sidecar", str(tmp_path / "run"), f"--listen=127.0.0.1:{port}", f"--vllm={vllm.url}"]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", WITHOUT_TORCH, *words, f"--folder={tmp_path / 'adapters'}"
            )
            try:
                url = f"http://127.0.0.1:{port}/status"
                good = f'"publication": "{published.sha256}"'
                opened["status"] = await eventually(lambda: answer(session, url), lambda found: good in found[1])
            finally:
                process.terminate()
                await process.wait()

    asyncio.run(scene())
    assert '"step": 4' in opened["status"][1]
