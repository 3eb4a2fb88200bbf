"""A real S3 server over a folder, and a proxy before it that makes requests go wrong."""

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import boto3

sys.path.insert(0, str(Path(__file__).parents[2] / "cluster"))
from build import binary

ACCESS, SECRET = "test-access", "test-secret"

Fault = Literal["refuse", "cut before", "cut after", "cut upload", "cut download", "slow down", "wait"]
FAULTS: tuple[Fault, ...] = ("refuse", "cut before", "cut after", "cut upload", "cut download", "slow down", "wait")


@contextmanager
def gateway(folder: Path) -> Iterator[str]:
    """Serve a folder; yields the endpoint. Credentials are ACCESS and SECRET."""
    for name in ("objects", "iam"):
        (folder / name).mkdir(parents=True)
    port = _free_port()
    environment = {**os.environ, "ROOT_ACCESS_KEY": ACCESS, "ROOT_SECRET_KEY": SECRET}
    command = [
        binary("versitygw"),
        "--port",
        f"127.0.0.1:{port}",
        "--iam-dir",
        folder / "iam",
        "posix",
        folder / "objects",
    ]
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            _wait_for(port, process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def client(endpoint: str):
    """A client of the server, past every proxy."""
    return boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET, region_name="us-east-1"
    )


@dataclass
class FaultyProxy:
    """What the proxy does with the requests that come.

    Attributes:
        endpoint: where it listens.
        choose: gets the number of the request, from 1, and its method and path; returns a fault or None.
        requests: method and path of every request so far.
    """

    endpoint: str = ""
    choose: Callable[[int, str, str], Fault | None] = lambda number, method, path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self, choose: Callable[[int, str, str], Fault | None] = lambda number, method, path: None) -> None:
        """Count from 1 again, with other faults."""
        with self.lock:
            self.requests.clear()
            self.choose = choose


@contextmanager
def faulty_proxy(endpoint: str) -> Iterator[FaultyProxy]:
    """Stand before a server on a port of its own."""
    target = endpoint.removeprefix("http://")
    proxy = FaultyProxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            with suppress(ConnectionError):
                super().handle_one_request()

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with proxy.lock:
                proxy.requests.append((self.command, self.path))
                fault = proxy.choose(len(proxy.requests), self.command, self.path)
            if fault in ("refuse", "slow down"):
                code, name = (500, "InternalError") if fault == "refuse" else (503, "SlowDown")
                return self.answer(code, [], f"<Error><Code>{name}</Code><Message>test</Message></Error>".encode())
            if fault == "cut before":
                return self.cut()
            if fault == "wait":
                time.sleep(0.3)
            if fault == "cut upload" and body:
                with socket.create_connection(target.split(":")) as raw:  # type: ignore[arg-type]
                    head = f"{self.command} {self.path} HTTP/1.1\r\n" + "".join(
                        f"{name}: {value}\r\n" for name, value in self.headers.items()
                    )
                    raw.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])
                return self.cut()
            upstream = http.client.HTTPConnection(target, timeout=240)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(body)
            answer = upstream.getresponse()
            data = answer.read()
            upstream.close()
            if fault in ("cut after", "cut upload"):
                return self.cut()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("transfer-encoding", "connection")]
            if fault == "cut download":
                self.answer(answer.status, headers, data, len(data) // 2)
                return self.cut()
            return self.answer(answer.status, headers, data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

        def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, send: int | None = None) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD" and status != 204:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data[:send])

        def cut(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *words: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: object, address: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the S3 server does not serve: {log.read_text()[-2000:]}")
