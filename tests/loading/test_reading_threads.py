"""Calls in threads: their outcome and errors arrive, and one that never ends is not waited for."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from unet_trainer.loading.reading_threads import ReadingThread, ReadTimeout, map_in_threads


@pytest.fixture
def never():
    """A function that waits until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_outcomes_and_errors_arrive_in_turn_from_one_thread():
    thread = ReadingThread()
    first, second = (thread.call(threading.get_ident, None) for _ in range(2))
    assert first == second != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0, 60)
    assert thread.call(lambda: None, 60) is None


def test_a_call_that_never_ends_is_given_up_after_the_limit(never):
    with pytest.raises(ReadTimeout):
        ReadingThread().call(never, 0.2)


def test_a_call_that_never_ends_is_given_up_after_a_signal_even_without_a_limit(never):
    with pytest.raises(ReadTimeout):
        ReadingThread().call(never, None, is_stopping=lambda: True, stop_seconds=0.1)


def test_after_a_signal_there_is_time_to_finish():
    begun = threading.Event()

    def is_stopping():
        begun.set()
        return True

    assert ReadingThread().call(lambda: begun.wait(60) and "done", None, is_stopping, stop_seconds=60) == "done"


def test_every_number_is_done_once_and_by_several_threads():
    barrier = threading.Barrier(3)
    done = list(map_in_threads(lambda index: barrier.wait(60), 6, 3, 60))
    assert sorted(done) == [0, 1, 2, 3, 4, 5]
    assert list(map_in_threads(lambda index: None, 0, 3, 60)) == []


def test_an_error_of_a_call_is_raised_and_no_further_call_begins():
    begun, is_over = [], threading.Event()

    def fail_first(index):
        begun.append(index)
        if index == 0:
            raise ValueError(index)
        is_over.wait(60)

    with pytest.raises(ValueError):
        list(map_in_threads(fail_first, 1000, 1, 60))
    is_over.set()
    assert begun in ([0], [0, 1])


def test_calls_of_which_none_ends_are_given_up(never):
    with pytest.raises(ReadTimeout):
        list(map_in_threads(lambda index: never(), 4, 2, 0.2))


def test_a_thread_ends_with_the_object_that_it_reads_for():
    thread = ReadingThread()
    (found,) = thread.call(lambda: [threading.current_thread()], None)
    assert found.is_alive()
    del thread
    gc.collect()
    found.join(60)
    assert not found.is_alive()


def test_what_was_read_is_not_kept_while_the_next_is_waited_for():
    class Large:
        pass

    thread = ReadingThread()
    kept = weakref.ref(thread.call(Large, None))
    thread.call(lambda: None, None)
    assert kept() is None
