"""A connection from every rank to rank 0 beside the collective operations: who lives, who wants to stop, how it ends.

A collective operation waits for a rank that is gone as long as its timeout, which must be longer than the longest
step; an NCCL one cannot even be interrupted. So a thread of each rank sends a sign of life every few seconds. The
kernel closes a dead process's connection at once, and silence means that a process or its node hangs.

Messages are lines of JSON: `{}` is a sign of life, `{"stop": 15}` asks rank 0 to stop after the step, `{"failed":
"..."}` tells it why a rank ends, `{"end": 143, "reason": null}` tells the others that and how the run ends.
"""

import hmac
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType

from populora_trainer.errors import RanksError

LIMIT_SECONDS = 60.0
"""Silence after which a rank is given up."""
REACTION_SECONDS = 5.0
"""Time that a process has to end by itself once the run cannot go on; it is then ended."""
LEAVE_SECONDS = 20.0
"""Time that rank 0 has to be gone after it has told the others the end."""
HELLO_SECONDS = 60.0

_BEAT = b"{}\n"
_LONGEST_HELLO = 1000  # bytes


class Ended(Exception):  # noqa: N818 - no error by itself: rank 0 may simply be done
    """Rank 0 has ended the run, or was made to.

    Attributes:
        code: what all processes exit with.
        reason: in a sentence; None where there is nothing to say.
    """

    def __init__(self, code: int, reason: str | None) -> None:
        super().__init__(reason or f"exit code {code}")
        self.code = code
        self.reason = reason


class Lifeline:
    """The connections of one process: rank 0's to all others, or another's to rank 0.

    Args:
        rank: of this process.
        peers: the connections, by the rank at the other end.
        limit_seconds: silence after which a peer is given up.
        speaks: whether this process says why it ends, where its main thread cannot.
        launched: whether it must not outlive the process that started it.
        exit_process: ends this process with a code.

    Attributes:
        lost: why the run cannot go on, e.g. a rank that is gone; None while all is well.
        ended: what rank 0 told; always None at rank 0.
        on_asked: rank 0's; called in a thread with the signal by which a rank was asked to stop.
        wish: set it to a signal's number to ask rank 0 for a stop.
    """

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, socket.socket],
        *,
        limit_seconds: float = LIMIT_SECONDS,
        speaks: bool = True,
        launched: bool = False,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.lost: str | None = None
        self.ended: Ended | None = None
        self.on_asked: Callable[[int], object] = lambda number: None
        self.wish: int | None = None
        self._rank = rank
        self._peers = dict(peers)
        self._limit = limit_seconds
        self._speaks = speaks
        self._parent = os.getppid() if launched else None
        self._exit_process = exit_process
        self._signals, self._wakeup = socket.socketpair()
        self._signals.setblocking(False)
        self._wakeup.setblocking(False)
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._buffers = {peer: bytearray() for peer in peers}
        self._sending = threading.Lock()
        self._over = threading.Event()  # the run is over, in whatever way
        self._closing = threading.Event()
        self._gone = threading.Event()  # rank 0 is gone, or all others are
        self._thread = threading.Thread(target=self._watch, name="populora-lifeline", daemon=True)
        for connection in self._peers.values():
            connection.settimeout(limit_seconds)
        self._thread.start()

    def watch_signals(self) -> None:
        """Take SIGTERM, and but at rank 0 SIGINT, in the lifeline's thread; to be called in the main thread.

        A handler in Python waits until the main thread is back from a collective operation, which may wait for a whole
        step. There must be one nevertheless: without it the system acts as it does by default.
        """
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)

    def tell(self, **message: object) -> None:
        """Send a message to every peer that is there."""
        self._send(json.dumps(message).encode() + b"\n")

    def end(self, code: int, reason: str | None) -> None:
        """Tell the others that the run ends here; from now on nobody is missed."""
        self._closing.set()
        self.tell(end=code, reason=reason)

    def leave(self) -> None:
        """Miss nobody from now on: everyone knows that the run is over."""
        self._closing.set()

    def wait_for_leader(self) -> None:
        """Wait until rank 0 is gone, so that its exit code and its last words come first."""
        self._closing.set()
        self._gone.wait(LEAVE_SECONDS)

    def explain(self, error: Exception) -> Exception:
        """Return what to raise for a collective operation that failed: mostly it failed because a rank is gone."""
        if not self._over.wait(REACTION_SECONDS / 2):
            sentence = " ".join(str(error).split())[:300]
            return RanksError(f"rank {self._rank} cannot reach the other ranks: {sentence}")
        return self.ended or RanksError(self.lost or "")

    def close(self) -> None:
        """Let go of the connections."""
        self._closing.set()
        self._gone.set()
        for connection in self._peers.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._thread.join(1)
        self._signals.close()
        self._wakeup.close()

    def __enter__(self) -> "Lifeline":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, line: bytes) -> None:
        with self._sending:
            for connection in list(self._peers.values()):
                # Who cannot be written to is found gone by the thread, which reads.
                with suppress(OSError):
                    connection.sendall(line)

    def _watch(self) -> None:
        interval = min(1.0, self._limit / 5)
        sent = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals, selectors.EVENT_READ)
            for peer, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, peer)
            while self._heard and not self._gone.is_set():
                now = time.monotonic()
                if now - sent >= interval:
                    self._send(_BEAT)
                    sent = now
                wish, self.wish = self.wish, None
                if wish is not None:
                    self.tell(stop=wish)
                try:
                    ready = selector.select(interval)
                except (OSError, ValueError):  # closed meanwhile
                    break
                for key, _ in ready:
                    if key.data is None:
                        self._take_signals()
                    else:
                        self._read(key.data, key.fileobj, selector)
                for peer, heard in self._heard.items():
                    if time.monotonic() - heard > self._limit:
                        self._lose(f"rank {peer} was not heard from for {self._limit:g} s: it hangs, or its node does")
                if self._parent is not None and os.getppid() != self._parent:
                    self._lose(f"the process that started rank {self._rank} is gone")
                if self._over.is_set():
                    self._see_to_the_end()
                    return
        self._gone.set()

    def _take_signals(self) -> None:
        for number in self._signals.recv(64):
            if self._rank and number in (signal.SIGINT, signal.SIGTERM):
                self.wish = number
            elif number == signal.SIGTERM:
                self.on_asked(number)

    def _read(self, peer: int, connection: object, selector: selectors.BaseSelector) -> None:
        assert isinstance(connection, socket.socket)
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            with suppress(KeyError, ValueError):
                selector.unregister(connection)
            self._heard.pop(peer, None)
            self._lose(f"rank {peer} is gone: its process or its node ended without a word")
            return
        self._heard[peer] = time.monotonic()
        buffer = self._buffers[peer]
        buffer += data
        while (stop := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:stop])
            del buffer[: stop + 1]
            self._take(peer, json.loads(line))

    def _take(self, peer: int, message: Mapping[str, object]) -> None:
        if "stop" in message:
            self.on_asked(int(str(message["stop"])))
        if "failed" in message:
            self._lose(f"rank {peer} failed: {message['failed']}")
        if "end" in message and self.ended is None:
            reason = message.get("reason")
            self.ended = Ended(int(str(message["end"])), None if reason is None else str(reason))
            self._over.set()

    def _lose(self, reason: str) -> None:
        if self._closing.is_set() or self._over.is_set():
            return
        self.lost = reason
        if self._rank == 0:
            self.tell(end=1, reason=reason)
        self._over.set()

    def _see_to_the_end(self) -> None:
        """End this process if it does not do so itself: it may wait for ever in a collective operation."""
        if self.ended is not None:
            self._wait_for_silence()
        self._gone.set()
        if self._closing.wait(REACTION_SECONDS):
            return
        if self._speaks and (reason := self.lost or (self.ended and self.ended.reason)):
            with suppress(OSError, ValueError):
                print(f"Error: {reason}", file=sys.stderr, flush=True)
        self._exit_process(self.ended.code if self.ended is not None else 1)

    def _wait_for_silence(self) -> None:
        deadline = time.monotonic() + LEAVE_SECONDS
        (connection,) = self._peers.values()
        with suppress(OSError):
            connection.settimeout(LEAVE_SECONDS)
            while time.monotonic() < deadline and connection.recv(1 << 16):
                pass


def listen(world_nodes: int) -> socket.socket:
    """Return rank 0's listening socket: on this machine only, where all ranks are here."""
    if world_nodes == 1:
        return socket.create_server(("127.0.0.1", 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def accept(server: socket.socket, size: int, token: str) -> dict[int, socket.socket]:
    """Return the connections of ranks 1 to size - 1, once they are there; strangers are turned away.

    Whoever connects is heard while others are waited for, so that a stranger that says nothing holds up nobody. What
    it says is read as one line of JSON and nothing else.

    Raises:
        RanksError: one did not come in time.
    """
    found: dict[int, socket.socket] = {}
    heard: dict[socket.socket, bytearray] = {}
    deadline = time.monotonic() + HELLO_SECONDS
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while len(found) < size - 1:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready or time.monotonic() > deadline:
                    missing = next(rank for rank in range(1, size) if rank not in found)
                    raise RanksError(f"rank {missing} did not connect to rank 0 within {HELLO_SECONDS:g} s")
                for key, _ in ready:
                    connection = key.fileobj
                    assert isinstance(connection, socket.socket)
                    if connection is server:
                        with suppress(OSError):
                            come, _ = server.accept()
                            come.setblocking(False)
                            heard[come] = bytearray()
                            selector.register(come, selectors.EVENT_READ)
                        continue
                    if not _hear(connection, heard[connection]):
                        continue
                    selector.unregister(connection)
                    rank = _rank_of(bytes(heard.pop(connection)), token)
                    if rank is not None and 0 < rank < size and rank not in found:
                        connection.settimeout(HELLO_SECONDS)
                        found[rank] = connection
                    else:
                        connection.close()
        finally:
            for connection in heard:
                connection.close()
    return found


def connect(host: str, port: int, rank: int, token: str) -> socket.socket:
    """Return a connection to rank 0.

    Raises:
        RanksError: nobody listens there.
    """
    try:
        connection = socket.create_connection((host, port), timeout=HELLO_SECONDS)
        connection.sendall(json.dumps({"rank": rank, "token": token}).encode() + b"\n")
    except OSError as error:
        raise RanksError(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error.strerror or error}") from error
    return connection


def _hear(connection: socket.socket, line: bytearray) -> bool:
    """Read what has come of a line, byte by byte as what follows is not ours; returns whether that was its end."""
    try:
        while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
            byte = connection.recv(1)
            if not byte:
                break
            line += byte
    except BlockingIOError:
        return False
    except OSError:
        line.clear()
    return True


def _rank_of(line: bytes, token: str) -> int | None:
    """Return the rank that a line names together with the token; None for any other line."""
    try:
        hello = json.loads(line)
        rank, word = hello["rank"], hello["token"]
        known = isinstance(rank, int) and hmac.compare_digest(word.encode(), token.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return rank if known else None
