"""Reading ahead: order, bounds, errors and the end."""

from __future__ import annotations

import threading

import pytest

from unet_trainer.system.read_ahead import ReadAhead


def read_ahead(function, items, num_threads=4, max_bytes=100, max_items=8):
    return ReadAhead(function, items, num_threads, lambda outcome: outcome, max_bytes, max_items)


def test_results_come_in_the_order_of_the_items_whichever_is_done_first():
    second_is_done = threading.Event()

    def read(item):
        if item == 0:
            assert second_is_done.wait(10)
        elif item == 1:
            second_is_done.set()
        return 10 * item

    with read_ahead(read, [0, 1, 2], max_bytes=1000) as ahead:
        assert list(ahead) == [(0, 0), (1, 10), (2, 20)]


def test_no_more_is_begun_while_as_many_items_wait_as_may():
    begun = threading.Semaphore(0)
    with read_ahead(lambda item: begun.release() or 0, list(range(20)), max_items=3) as ahead:
        for _ in range(3):
            assert begun.acquire(timeout=10)
        assert not begun.acquire(timeout=0.2)  # the fourth waits until one is taken
        iterator = iter(ahead)
        next(iterator)
        assert begun.acquire(timeout=10)
        assert not begun.acquire(timeout=0.2)


def test_no_more_is_begun_while_as_many_bytes_wait_as_may():
    begun = []
    third_is_read = threading.Event()

    def read(item):
        begun.append(item)
        if item == 2:
            third_is_read.set()
        return 50

    with read_ahead(read, list(range(20)), num_threads=1, max_bytes=150) as ahead:
        assert third_is_read.wait(10)
        taken = [next(iter(ahead))]
        assert taken == [(0, 50)]
    assert len(begun) <= 5  # three wait, and one follows for each that was taken or is begun meanwhile


def test_an_item_larger_than_the_bound_passes():
    with read_ahead(lambda item: 1000, [0, 1, 2], max_bytes=10) as ahead:
        assert [item for item, _ in ahead] == [0, 1, 2]


def test_an_exception_is_raised_at_the_turn_of_its_item():
    def read(item):
        if item == 1:
            raise ValueError("item 1")
        return item

    taken = []
    with pytest.raises(ValueError, match="item 1"), read_ahead(read, [0, 1, 2]) as ahead:
        taken += [item for item, _ in ahead]
    with read_ahead(read, [0]) as ahead:
        assert list(ahead) == [(0, 0)]


def test_an_exception_that_is_the_result_is_not_raised():
    error = ValueError("a result")
    with ReadAhead(lambda item: error, [0], 1, lambda outcome: 0, 100, 8) as ahead:
        assert list(ahead) == [(0, error)]


def test_threads_end_when_it_is_left_early():
    with read_ahead(lambda item: 1, list(range(1000)), max_items=2) as ahead:
        next(iter(ahead))
    assert not any(thread.is_alive() for thread in ahead.threads)
    assert ahead.num_begun < 1000


def test_no_items_are_no_results():
    with read_ahead(lambda item: 1, []) as ahead:
        assert list(ahead) == []
