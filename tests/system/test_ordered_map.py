"""Items in threads, results in order, a bounded number ahead."""

from __future__ import annotations

import contextlib
import threading

import pytest

from unet_trainer.system.ordered_map import ordered_map


def test_results_come_in_the_order_of_the_items_whichever_is_done_first():
    second_is_done = threading.Event()

    def work(item):
        if item == 0:
            assert second_is_done.wait(20)
        if item == 1:
            second_is_done.set()
        return item * 10

    assert list(ordered_map(work, range(5), num_threads=2, num_ahead=3)) == [0, 10, 20, 30, 40]


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_no_more_items_are_taken_ahead_than_asked_for(num_ahead):
    taken = []

    def items():
        for item in range(20):
            taken.append(item)
            yield item

    for position, _ in enumerate(ordered_map(lambda item: item, items(), 2, num_ahead)):
        assert len(taken) <= position + num_ahead
    assert len(taken) == 20


def test_an_exception_comes_at_its_items_turn():
    def work(item):
        if item == 2:
            raise ValueError("the third")
        return item

    results = ordered_map(work, range(9), 2, 4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="the third"):
        next(results)


def test_when_it_is_closed_no_thread_is_left_and_what_has_not_begun_is_dropped():
    begun = []
    before = threading.active_count()
    with contextlib.closing(ordered_map(begun.append, range(100), 1, 5)) as results:
        next(results)
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert len(begun) <= 6
