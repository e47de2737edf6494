"""SIGINT and SIGTERM are noted, in the main thread alone, and what listened before listens again afterwards."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from unet_trainer.signals import Interrupted, Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_raised_where_it_is_asked_for(number):
    with Signals() as signals:
        signals.check()
        assert not signals.is_stopping()
        os.kill(os.getpid(), number)
        assert signals.is_stopping()
        with pytest.raises(Interrupted, match=number.name) as caught:
            signals.check()
    assert caught.value.signal_number == number
    assert isinstance(caught.value, KeyboardInterrupt)  # what a notebook expects


def test_a_second_sigint_does_not_wait():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.is_stopping()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_after_sigint_still_lets_the_step_finish():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.is_stopping()


def test_handlers_of_the_caller_come_back():
    def mine(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with Signals():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_leaves_the_handlers_alone():
    seen = []

    def enter():
        with Signals() as signals:
            seen.append((signal.getsignal(signal.SIGINT), signals.is_stopping()))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGINT), False)]
