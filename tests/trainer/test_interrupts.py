"""What the first signal means, what the second one, and what signals of other processes do not."""

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from populora_trainer.interrupts import INTERRUPTED, TOO_LONG, Interrupts

STOPPING = "Stopping after this step; Ctrl-C again stops now, at the last checkpoint."


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # a handler runs between two instructions


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_an_interrupt_after_it_is_a_command(number):
    said: list[str] = []
    left: list[tuple[int, str]] = []
    with Interrupts(said.append, lambda *last: left.append(last)) as interrupts:
        assert interrupts.asked is None
        send(number)
        send(signal.SIGTERM)
        assert (interrupts.asked, said, left) == (number, [STOPPING], [])
        send(signal.SIGINT)
        wait_for(lambda: left)
    assert left == [(signal.SIGINT, INTERRUPTED)]


def test_what_another_process_heard_of_an_interrupt_is_not_the_second_one():
    said: list[str] = []
    left: list[tuple[int, str]] = []
    with Interrupts(said.append, lambda *last: left.append(last)) as interrupts:
        interrupts.hear(signal.SIGINT)
        send(signal.SIGINT)
        interrupts.hear(signal.SIGINT)
        assert (interrupts.asked, said, left) == (signal.SIGINT, [STOPPING], [])
        send(signal.SIGINT)
        wait_for(lambda: left)
    assert left == [(signal.SIGINT, INTERRUPTED)]


def test_a_step_is_abandoned_when_the_grace_is_over_and_not_when_the_run_is():
    abandoned: list[tuple[int, str]] = []
    with Interrupts(lambda sentence: None, lambda *last: abandoned.append(last), 0.01) as interrupts:
        interrupts.hear(signal.SIGTERM)
        wait_for(lambda: abandoned)
    assert abandoned == [(signal.SIGTERM, TOO_LONG)]
    with Interrupts(lambda sentence: None, lambda *last: abandoned.append(last), 3600) as interrupts:
        interrupts.hear(signal.SIGINT)
        (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
    timer.join()
    assert abandoned == [(signal.SIGTERM, TOO_LONG)]


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts(lambda sentence: None, lambda *last: None):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
