"""The HTTP endpoint of a run: `/metrics` for Prometheus, `/status` for people and the controller, `/healthz`."""

import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from populora_trainer.diagnostics.prometheus import RunMonitor
from populora_trainer.errors import PopuloraError

_REQUEST_TIMEOUT_SECONDS = 10
_POLL_SECONDS = 0.1  # how long closing may take


def parse_listen(listen: str) -> tuple[str, int]:
    """Split HOST:PORT; an IPv6 host stands in brackets, an empty host means all interfaces, port 0 means any free one.

    Raises:
        PopuloraError: the text is no such address.
    """
    host, colon, port = listen.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise PopuloraError(f"--listen {listen!r}: an IPv6 address stands in brackets, as in [::1]:9090.")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise PopuloraError(f"--listen {listen!r}: expected HOST:PORT with a port from 0 to 65535.")
    try:
        host.encode("idna")  # as every look-up of a name does
    except UnicodeError as error:
        raise PopuloraError(f"--listen {listen!r}: the host is no name or address.") from error
    return host, int(port)


class Endpoint:
    """An address that is taken at once, and serves a monitor over HTTP in daemon threads; a context manager.

    Connections are refused until `serve`, so that whoever asks sees that the run is not there yet.

    Attributes:
        host: the address that is bound.
        port: the port that is bound, also where 0 was asked for.
    """

    def __init__(self, listen: str) -> None:
        """Bind.

        Raises:
            PopuloraError: the address is malformed, taken, or not this machine's.
        """
        host, port = parse_listen(listen)

        self._listen = listen
        self._thread: threading.Thread | None = None
        try:
            family, *_, address = socket.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]

            class Server(ThreadingHTTPServer):
                address_family = family
                daemon_threads = True
                block_on_close = False

            self._server = Server((str(address[0]), int(address[1])), _Handler, bind_and_activate=False)
            try:
                self._server.server_bind()
            except OSError:
                self._server.server_close()
                raise
        except OSError as error:
            raise self._explained(error) from error
        self.host, self.port = self._server.server_address[:2]

    def serve(self, monitor: RunMonitor | None) -> "Endpoint":
        """Answer from now on, and return itself.

        Without a monitor, as in a process that only computes for another, `/status` is not found and `/metrics` is
        empty, so that it can be probed and scraped like any other.

        Raises:
            PopuloraError: another process that had taken the address too was faster.
        """

        class Handler(_Handler):
            pass

        Handler.monitor = monitor
        self._server.RequestHandlerClass = Handler
        try:
            self._server.server_activate()
        except OSError as error:
            raise self._explained(error) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="populora-endpoint", daemon=True
        )
        self._thread.start()
        return self

    def _explained(self, error: OSError) -> PopuloraError:
        return PopuloraError(f"--listen {self._listen}: cannot serve there ({error.strerror or error}).")

    @property
    def url(self) -> str:
        """The address to open."""
        host = str(self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def close(self) -> None:
        """Stop serving and free the port."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    monitor: RunMonitor | None
    timeout = _REQUEST_TIMEOUT_SECONDS
    protocol_version = "HTTP/1.1"
    server_version = "populora"
    sys_version = ""

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                registry = CollectorRegistry() if self.monitor is None else self.monitor.registry
                self._answer(HTTPStatus.OK, encode(registry), content_type)
            case "/status" if self.monitor is not None:
                body = json.dumps(self.monitor.status(), allow_nan=False, indent=2).encode() + b"\n"
                self._answer(HTTPStatus.OK, body, "application/json")
            case "/healthz":
                self._answer(HTTPStatus.OK, b"ok\n", "text/plain; charset=utf-8")
            case _:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics /status /healthz\n", "text/plain; charset=utf-8")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: the terminal belongs to the run's progress."""
