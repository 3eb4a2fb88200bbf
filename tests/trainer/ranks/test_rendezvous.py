"""Nodes that start in any order meet once, and only those of one attempt."""

import threading
import time
from collections.abc import Callable

import pytest
from crew import free_port
from torch.distributed.elastic.rendezvous import RendezvousInfo

from populora_trainer.errors import RanksError
from populora_trainer.ranks import rendezvous
from populora_trainer.ranks.rendezvous import Meeting

PATIENCE_SECONDS = 240.0


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "FIRST_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(rendezvous, "_LEAVE_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.05)


class Node:
    """A node's meeting in a thread."""

    def __init__(self, nodes: int, node: int, port: int, host: str = "127.0.0.1", patience: float = PATIENCE_SECONDS):
        self.said: list[str] = []
        self.leave = False
        self.info: RendezvousInfo | None = None
        self.error: Exception | None = None
        self.meeting = Meeting(
            nodes, node, host, port, say=self.said.append, check=self._check, patience_seconds=patience
        )
        self._thread = threading.Thread(target=self._meet, daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self.leave:
            raise InterruptedError("the pod is deleted")

    def _meet(self) -> None:
        try:
            self.info = self.meeting.next_rendezvous()
        except Exception as error:
            self.error = error

    def done(self) -> "Node":
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        return self

    def until_said(self, start: str) -> None:
        eventually(lambda: any(sentence.startswith(start) for sentence in self.said))


def eventually(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_nodes_meet_whoever_comes_first():
    port = free_port()
    late = [Node(3, 2, port), Node(3, 1, port)]
    late[0].until_said(f"Waiting for node 0 at 127.0.0.1:{port}: ")
    late.append(Node(3, 0, port))
    infos = [node.done().info for node in late]
    assert [info.rank for info in infos] == [2, 1, 0]
    assert {info.world_size for info in infos} == {3}
    assert {info.bootstrap_store_info.master_port for info in infos} == {port}
    infos[0].store.set("key", "value")
    assert infos[2].store.get("key") == b"value"


def test_node_0_says_whom_it_waits_for():
    port = free_port()
    first = Node(3, 0, port)
    first.until_said(f"Waiting for 2 of 3 nodes at 127.0.0.1:{port}; missing: 1, 2")
    second = Node(3, 1, port)
    first.until_said(f"Waiting for 1 of 3 nodes at 127.0.0.1:{port}; missing: 2")
    second.until_said("Waiting for the other nodes at")
    Node(3, 2, port).done()
    assert first.done().info.rank == 0
    assert second.done().info.rank == 1


def test_a_name_that_is_not_known_yet_is_waited_for():
    node = Node(2, 1, 29400, host="job-0.nowhere.invalid", patience=0.5)
    node.done()
    assert node.said[0].startswith("Waiting for node 0 at job-0.nowhere.invalid:29400: ")
    assert isinstance(node.error, RanksError)
    assert str(node.error).startswith("the nodes of this run did not meet within 0.5 s. Last: Waiting for node 0 at")


def test_a_successor_of_a_node_waits_until_the_old_attempt_is_over():
    port = free_port()
    old, companion = Node(2, 0, port), Node(2, 1, port)
    old.done()
    companion.done()
    successor = Node(2, 1, port)
    successor.until_said(f"Node 0 at 127.0.0.1:{port} is that of an earlier attempt; waiting for its successor")
    assert successor.info is None
    # The old attempt's store ends with its process.
    del old, companion
    other_port = free_port()
    successor.meeting.port = other_port
    new = Node(2, 0, other_port)
    assert new.done().info.rank == 0
    assert successor.done().info.rank == 1


def test_a_node_that_shall_end_leaves_the_rendezvous():
    nodes = [Node(2, 0, free_port()), Node(2, 1, free_port())]
    for node in nodes:
        eventually(lambda node=node: bool(node.said))
        node.leave = True
        node.done()
        assert isinstance(node.error, InterruptedError)


def test_a_port_that_is_taken_is_a_sentence():
    port = free_port()
    first = Node(2, 0, port)
    first.until_said("Waiting for 1 of 2 nodes")
    second = Node(2, 0, port).done()
    first.leave = True
    assert isinstance(second.error, RanksError)
    assert str(second.error).startswith(f"the rendezvous cannot be served at 127.0.0.1:{port}: ")


def test_a_node_alone_meets_itself_at_any_port():
    info = Node(1, 0, 0).done().info
    assert (info.rank, info.world_size) == (0, 1)
    assert info.bootstrap_store_info.master_port > 0


def test_node_0_leaves_last():
    port = free_port()
    first, second = [node.done() for node in (Node(2, 0, port), Node(2, 1, port))]
    leaving = threading.Thread(target=first.meeting.leave)
    leaving.start()
    assert second.info is not None
    second.info.store.set("asked", "late")  # its store is still there
    assert leaving.is_alive()
    second.meeting.leave()
    leaving.join(PATIENCE_SECONDS)
    assert not leaving.is_alive()
