"""How the nodes of a run meet: at a store that node 0 serves under a name that the others know beforehand.

Pods of one Job start in any order, and their names cannot be looked up before they do. A pod may also be replaced
while node 0 still is the one of before, whose meeting is over. So a node that comes writes a word of its own into the
store, and waits until node 0 has named all words it goes on with; a node that is not among them comes again.
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined] # as documented
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from populora_trainer.errors import RanksError

PATIENCE_SECONDS = 1500.0
"""Time for all nodes to come; below the half hour after which a cluster's startup probe gives a trainer up."""
NOTICE_SECONDS = 30.0
FIRST_NOTICE_SECONDS = 5.0

_POLL_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_STORE = timedelta(seconds=30)
_LEAVE_SECONDS = 5.0
_GO = "go"


class Meeting(RendezvousHandler):
    """A rendezvous of as many nodes as were asked for, numbered beforehand; it takes place once.

    Args:
        nodes: how many.
        node: number of this one, from 0.
        host, port: of node 0's store; port 0 means any free one, where node 0 is alone.
        say: told what is waited for, after a few seconds and then every half minute.
        check: called between two looks; raises if this process shall end.
        patience_seconds: time for all to come.
    """

    def __init__(
        self,
        nodes: int,
        node: int,
        host: str,
        port: int,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        check: Callable[[], None] = lambda: None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.nodes, self.node, self.host, self.port = nodes, node, host, port
        self._say = say
        self._check = check
        self._patience = patience_seconds
        self._store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store and this node's place, once all nodes are there.

        Raises:
            RanksError: they did not come in time, or the store cannot be served at its port.
        """
        self._deadline = time.monotonic() + self._patience
        self._noticed = time.monotonic() - NOTICE_SECONDS + FIRST_NOTICE_SECONDS
        if self.node == 0:
            store = self._serve()
            host = "127.0.0.1"
        else:
            store = self._come()
            host = self.host
        self._store = store
        place = RendezvousStoreInfo(host, store.port)
        return RendezvousInfo(PrefixStore("agents", store), self.node, self.nodes, place)

    def _serve(self) -> TCPStore:
        address = f"{self.host}:{self.port}"
        try:
            store = _store_here(self.port) if self.nodes == 1 else _store_for_all(self.port)
        except (RuntimeError, OSError) as error:
            raise RanksError(f"the rendezvous cannot be served at {address}: {_sentence(error)}") from error
        others = range(1, self.nodes)
        while missing := [node for node in others if not store.check([_key(node)])]:
            numbers = ", ".join(map(str, missing))
            self._wait(f"Waiting for {len(missing)} of {self.nodes} nodes at {address}; missing: {numbers}")
        words = {str(node): store.get(_key(node)).decode() for node in others}
        store.set(_GO, json.dumps(words))
        return store

    def _come(self) -> TCPStore:
        address = f"{self.host}:{self.port}"
        while True:
            try:
                # The store's own client complains at length on standard error about what is no fault yet.
                socket.create_connection((self.host, self.port), timeout=_RETRY_SECONDS * 5).close()
                store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_STORE)
                if self._admitted(store):
                    return store
                self._wait(f"Node 0 at {address} is that of an earlier attempt; waiting for its successor")
            except OSError as error:
                self._wait(f"Waiting for node 0 at {address}: {error.strerror or error}")
            except RuntimeError as error:
                self._wait(f"Waiting for node 0 at {address}: {_sentence(error)}")
            time.sleep(_RETRY_SECONDS)

    def _admitted(self, store: TCPStore) -> bool:
        word = secrets.token_hex(8)
        store.set(_key(self.node), word)
        while not store.check([_GO]):
            self._wait(f"Waiting for the other nodes at {self.host}:{self.port}")
        words: dict[str, str] = json.loads(store.get(_GO))
        return words.get(str(self.node)) == word

    def _wait(self, sentence: str) -> None:
        self._check()
        now = time.monotonic()
        if now > self._deadline:
            raise RanksError(f"the nodes of this run did not meet within {self._patience:g} s. Last: {sentence}")
        if now - self._noticed >= NOTICE_SECONDS:
            self._noticed = now
            self._say(sentence)
        time.sleep(_POLL_SECONDS)

    def leave(self) -> None:
        """Say that this node asks the store nothing more; node 0, whose store ends with it, hears the others out."""
        if self._store is None:
            return
        with suppress(RuntimeError):
            if self.node:
                self._store.set(_left(self.node), "")
                return
            deadline = time.monotonic() + _LEAVE_SECONDS
            others = [_left(node) for node in range(1, self.nodes)]
            while others and not self._store.check(others) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS / 4)

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return "populora"

    @property
    def use_agent_store(self) -> bool:
        """Let the processes use the same store, which outlives each of them."""
        return True

    def is_closed(self) -> bool:
        """Say that nobody has closed it."""
        return False

    def set_closed(self) -> None:
        """Do nothing: it takes place once."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """Return a name for logs."""
        return os.environ.get("HOSTNAME", "run")

    def shutdown(self) -> bool:
        """Do nothing: the store ends with its process."""
        return True


def _store_here(port: int) -> TCPStore:
    """Serve a store to this machine alone: nothing in it is asked who it is, and it leads ranks to one another."""
    with socket.create_server(("127.0.0.1", port)) as server:
        bound = int(server.getsockname()[1])
        # The store takes the descriptor over, and would bind to every interface by itself.
        return TCPStore(
            "127.0.0.1",
            bound,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE,
            master_listen_fd=server.detach(),
        )


def _store_for_all(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=_STORE)


def _key(node: int) -> str:
    return f"node/{node}"


def _left(node: int) -> str:
    return f"left/{node}"


def _sentence(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
