"""Ranks notice over sockets who is gone, who hangs and who wants to stop, and end by rank 0's word."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from populora_trainer.errors import RanksError
from populora_trainer.ranks import lifeline as lifelines
from populora_trainer.ranks.lifeline import Ended, Lifeline, accept, connect, listen

PATIENCE_SECONDS = 240.0


class Line(Lifeline):
    """A lifeline whose process does not end, but says by which code it would have."""

    def __init__(self, *arguments, **options) -> None:
        self.exits: list[int] = []
        super().__init__(*arguments, exit_process=self.exits.append, **options)


def eventually(reached) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Ranks:
    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.lines: list[Line] = []
        self.ends: dict[int, socket.socket] = {}

    def start(self, size: int, *, silent: tuple[int, ...] = (), limit: float = 600.0) -> list[Line]:
        """Return the lines of rank 0 and of those that are not silent; a silent rank is a mere connection."""
        leaders, followers = {}, {}
        for rank in range(1, size):
            leaders[rank], followers[rank] = socket.socketpair()
        self.lines = [Line(0, leaders, limit_seconds=limit)]
        for rank, end in followers.items():
            if rank in silent:
                self.ends[rank] = end
            else:
                self.lines.append(Line(rank, {0: end}, limit_seconds=limit))
        for line in self.lines:
            self._stack.callback(line.close)
        return self.lines


@pytest.fixture
def ranks(monkeypatch) -> Iterator[Ranks]:
    monkeypatch.setattr(lifelines, "REACTION_SECONDS", 0.5)
    monkeypatch.setattr(lifelines, "LEAVE_SECONDS", 5.0)
    with ExitStack() as stack:
        yield Ranks(stack)


def test_a_rank_that_is_gone_is_named_to_all(ranks, capfd):
    leader, other = ranks.start(3, silent=(2,))
    ranks.ends[2].close()
    eventually(lambda: leader.lost and other.ended)
    assert leader.lost == "rank 2 is gone: its process or its node ended without a word"
    assert (other.ended.code, other.ended.reason) == (1, leader.lost)
    # Nobody's main thread reacts here, as in a collective operation that cannot be interrupted.
    eventually(lambda: leader.exits)
    assert leader.exits == [1]
    assert capfd.readouterr().err == f"Error: {leader.lost}\n"
    leader.close()
    eventually(lambda: other.exits)
    assert other.exits == [1]


def test_silence_is_a_loss_and_signs_of_life_are_not(ranks):
    leader, other = ranks.start(3, silent=(2,), limit=5.0)
    eventually(lambda: leader.lost)
    assert leader.lost == "rank 2 was not heard from for 5 s: it hangs, or its node does"
    assert other.lost is None


def test_a_leader_that_is_gone_ends_the_others(ranks):
    leader, other = ranks.start(2)
    leader.close()
    eventually(lambda: other.lost)
    assert other.lost == "rank 0 is gone: its process or its node ended without a word"
    eventually(lambda: other.exits == [1])


def test_a_rank_that_fails_says_why(ranks):
    leader, other, third = ranks.start(3)
    other.tell(failed="OutOfMemoryError: no memory is left")
    eventually(lambda: leader.lost and third.ended)
    assert third.ended.reason == "rank 1 failed: OutOfMemoryError: no memory is left"
    error = leader.explain(RuntimeError("connection closed by peer"))
    assert isinstance(error, RanksError)
    assert str(error) == "rank 1 failed: OutOfMemoryError: no memory is left"


def test_the_end_reaches_all_and_nobody_is_missed_after_it(ranks):
    leader, other = ranks.start(2)
    leader.end(143, None)
    eventually(lambda: other.ended)
    assert (other.ended.code, other.ended.reason) == (143, None)
    assert other.explain(RuntimeError("reset")) is other.ended
    waiting = threading.Thread(target=other.wait_for_leader)
    waiting.start()
    assert waiting.is_alive()
    leader.close()
    waiting.join(PATIENCE_SECONDS)
    assert not waiting.is_alive()
    assert (leader.lost, other.lost, leader.exits, other.exits) == (None, None, [], [])


def test_a_wish_to_stop_reaches_rank_0_alone(ranks):
    asked: list[int] = []
    leader, other, third = ranks.start(3)
    leader.on_asked = asked.append
    other.wish = 15
    eventually(lambda: asked)
    third.wish = 2
    eventually(lambda: len(asked) == 2)
    assert asked == [15, 2]
    assert other.wish is None
    assert (leader.lost, other.ended, third.ended) == (None, None, None)


def test_a_rank_does_not_outlive_the_process_that_started_it(ranks, monkeypatch):
    (leader,) = ranks.start(2, silent=(1,))
    orphan = Line(1, {0: ranks.ends[1]}, launched=True)
    monkeypatch.setattr(lifelines.os, "getppid", lambda: 1)
    eventually(lambda: orphan.exits)
    assert orphan.lost == "the process that started rank 1 is gone"
    assert leader.exits == []
    orphan.close()


def test_a_signal_reaches_rank_0_without_a_handler_of_the_main_thread(ranks):
    asked: list[int] = []
    leader, other = ranks.start(2)
    leader.on_asked = asked.append
    other.watch_signals()
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        eventually(lambda: asked == [signal.SIGTERM])
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)


def test_what_fails_without_a_loss_is_told_as_it_is(ranks):
    leader, _ = ranks.start(2)
    error = leader.explain(RuntimeError("NCCL error:\n  unhandled system error"))
    assert str(error) == "rank 0 cannot reach the other ranks: NCCL error: unhandled system error"


def test_strangers_are_turned_away(monkeypatch):
    monkeypatch.setattr(lifelines, "HELLO_SECONDS", PATIENCE_SECONDS)
    with listen(1) as server, ExitStack() as stack:
        host, port = server.getsockname()
        strangers = [
            *(b"GET / HTTP/1.1\r\n\r\n", b"", b"[" * 1000, b"\xff\n", b"7\n", b"x" * 5000),
            *(b'{"rank": 1, "token": "guess"}\n', b'{"rank": 7, "token": "word"}\n'),
            *(b'{"rank": Infinity, "token": "word"}\n', b'{"rank": 1, "token": 7}\n'),
            '{"rank": 1, "token": "w\u00f6rd"}\n'.encode(),
            rb'{"rank": 1, "token": "\ud800"}' + b"\n",
            b"\x80\x04cbuiltins\nexit\n)R.\n",  # a pickle, which is not loaded
        ]
        for words in strangers:
            stranger = stack.enter_context(socket.create_connection((host, port)))
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
        for words in (b"", b'{"rank": 1'):  # these stay and say no more
            stack.enter_context(socket.create_connection((host, port))).sendall(words)
        ours = [stack.enter_context(connect(host, port, rank, "word")) for rank in (2, 1)]
        found = accept(server, 3, "word")
        for connection in found.values():
            stack.callback(connection.close)
        assert sorted(found) == [1, 2]
        found[1].sendall(b"!")
        assert ours[1].recv(1) == b"!"


def test_a_rank_that_does_not_connect_is_named(monkeypatch):
    monkeypatch.setattr(lifelines, "HELLO_SECONDS", 0.2)
    with listen(1) as server, pytest.raises(RanksError, match=r"rank 1 did not connect to rank 0 within 0\.2 s"):
        accept(server, 2, "word")


def test_an_end_says_its_code_or_its_reason():
    assert str(Ended(143, None)) == "exit code 143"
    assert str(Ended(1, "rank 1 is gone")) == "rank 1 is gone"
