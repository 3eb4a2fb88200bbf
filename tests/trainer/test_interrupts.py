"""What the first signal means, what the second one, and what signals of other processes do not."""

import os
import signal
import time

import pytest

from populora_trainer.interrupts import Interrupts

STOPPING = "Stopping after this step; Ctrl-C again stops now, at the last checkpoint."


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # a handler runs between two instructions


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_and_an_interrupt_after_it_is_a_command(number):
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        assert interrupts.asked is None
        send(number)
        send(signal.SIGTERM)
        assert (interrupts.asked, said) == (number, [STOPPING])
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_what_another_process_heard_of_an_interrupt_is_not_the_second_one():
    said: list[str] = []
    with Interrupts(said.append) as interrupts:
        interrupts.hear(signal.SIGINT)
        send(signal.SIGINT)
        interrupts.hear(signal.SIGINT)
        assert (interrupts.asked, said) == (signal.SIGINT, [STOPPING])
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_step_is_abandoned_when_the_grace_is_over_and_not_when_the_run_is():
    abandoned: list[int] = []
    with Interrupts(lambda sentence: None, 0.01, abandoned.append) as interrupts:
        interrupts.hear(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while not abandoned:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert abandoned == [signal.SIGTERM]
    with Interrupts(lambda sentence: None, 0.2, abandoned.append) as interrupts:
        interrupts.hear(signal.SIGINT)
    time.sleep(0.4)
    assert abandoned == [signal.SIGTERM]


def test_handlers_are_as_before_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts(lambda sentence: None):
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
