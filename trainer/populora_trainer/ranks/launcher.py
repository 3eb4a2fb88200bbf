"""Starting the ranks of this node, with the parts of torchrun, and ending with the exit code that they have in common.

torchrun itself ends with 1 whatever its processes end with, and kills them 30 s after a SIGTERM. Here a signal is
passed on to the processes, which decide when they are done, and their code is this process's own: what started it, such
as a Job with a podFailurePolicy, can tell a wrong manifest (42) from an orderly stop (128 + signal).
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

from populora_trainer.errors import RanksError
from populora_trainer.ranks.rendezvous import PATIENCE_SECONDS, Meeting

REFUSED = 42
"""Exit code of a wrong manifest."""
_STOPS = (signal.SIGINT, signal.SIGTERM)
_START_SECONDS = 0.2
_LEAVE_SECONDS = 30  # for other nodes to be done, when this one is


class _Stopped(Exception):  # noqa: N818
    """A signal came before there were processes to pass it on to."""


def launch(
    arguments: Sequence[str],
    *,
    ranks: int,
    nodes: int = 1,
    node: int = 0,
    host: str = "127.0.0.1",
    port: int = 0,
    say: Callable[[str], None],
    patience_seconds: float = PATIENCE_SECONDS,
) -> int:
    """Run `python ARGUMENTS` as this node's ranks and return what to exit with.

    Each process finds its place in torchrun's variables. The first SIGINT or SIGTERM, and each after it, is passed on
    to all of them.

    Args:
        arguments: of the Python interpreter.
        ranks: processes on this node.
        nodes: number of nodes.
        node: number of this one.
        host, port: where node 0 serves the rendezvous.
        say: prints a notice.
        patience_seconds: time for all nodes to come.

    Raises:
        RanksError: the nodes did not meet.
    """
    # What happened is told below, or by the processes; torch's own words are a page of advice.
    logging.getLogger("torch.distributed.elastic").addFilter(lambda record: False)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # The agent answers these two by ending its processes; the others are this module's.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"
    if nodes == 1 and (loopback := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}):
        # Gloo believes whoever connects to it: where all ranks are here, nobody else can.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    with _signals() as inbox:
        meeting = Meeting(nodes, node, host, port, say=say, check=inbox.check, patience_seconds=patience_seconds)
        agent = LocalElasticAgent(
            WorkerSpec(
                role="rank",
                local_world_size=ranks,
                rdzv_handler=meeting,
                entrypoint=sys.executable,
                args=tuple(arguments),
                max_restarts=0,
                monitor_interval=0.1,
            ),
            DefaultLogsSpecs(log_dir=os.devnull),
            exit_barrier_timeout=_LEAVE_SECONDS,
        )
        inbox.agent = agent
        try:
            result = agent.run()
        except _Stopped:
            return 128 + (inbox.first or signal.SIGTERM)
        except SignalException as error:
            return 128 + error.sigval
        if not result.failures:
            meeting.leave()
        failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
        for rank, code in sorted(failures.items()):
            if code < 0 and -code != signal.SIGTERM:
                say(f"Rank {rank} was ended by {signal.Signals(-code).name}")
        return exit_code(failures.values())


def exit_code(codes: Iterable[int]) -> int:
    """Return what a node exits with whose failed processes ended with these codes; negative ones are signals.

    A wrong manifest comes first. A process that died by a signal explains more than those that missed it, and those
    more than the ones that were then told to stop.
    """
    found = list(codes)
    if not found:
        return 0
    if REFUSED in found:
        return REFUSED
    killed = [128 - code for code in found if code < 0 and -code not in _STOPS]
    stopped = {128 + number for number in _STOPS} | {-number for number in _STOPS}
    failed = [code for code in found if code > 0 and code not in stopped]
    if killed or failed:
        return (killed or failed)[0]
    return max(code if code > 0 else 128 - code for code in found)


class _Inbox:
    """The signals that came, and who gets them."""

    def __init__(self) -> None:
        self.agent: LocalElasticAgent | None = None
        self.first: int | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        processes = [] if self.agent is None else [worker.id for worker in self.agent.get_worker_group().workers]
        if not processes or None in processes:
            # They are not there yet, or not all: before they are, `check` ends the wait for other nodes.
            later = threading.Timer(_START_SECONDS, self._pass_on, (number,))
            later.daemon = True
            later.start()
            return
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(int(process), number)

    def check(self) -> None:
        if self.first is not None:
            raise _Stopped


@contextmanager
def _signals() -> Iterator[_Inbox]:
    inbox = _Inbox()
    before = {number: signal.signal(number, inbox.take) for number in _STOPS}
    try:
        yield inbox
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split HOST:PORT.

    Raises:
        RanksError: the text is no such address.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise RanksError(f"--rendezvous {text!r}: expected HOST:PORT with a port from 1 to 65535")
    return host, int(port)
