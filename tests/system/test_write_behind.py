"""Tasks behind the caller: bounds, order, errors and the end."""

from __future__ import annotations

import threading

import pytest

from unet_trainer.system.write_behind import WriteBehind


def test_all_tasks_are_done_when_it_is_left():
    done = []
    with WriteBehind(3, max_bytes=100) as writers:
        for number in range(50):
            writers.submit(lambda number=number: done.append(number), 10)
    assert sorted(done) == list(range(50))
    assert not any(thread.is_alive() for thread in writers.threads)


def test_one_thread_keeps_the_order():
    done = []
    with WriteBehind(1, max_bytes=100) as writers:
        for number in range(50):
            writers.submit(lambda number=number: done.append(number), 1)
    assert done == list(range(50))


def test_the_caller_waits_while_there_is_no_room():
    may_end, third = threading.Event(), threading.Event()
    with WriteBehind(1, max_bytes=100) as writers:
        writers.submit(may_end.wait, 60)
        writers.submit(lambda: None, 40)  # full

        def submit_third():
            writers.submit(lambda: None, 1)
            third.set()

        thread = threading.Thread(target=submit_third)
        thread.start()
        assert not third.wait(0.2)
        may_end.set()
        assert third.wait(10)
        thread.join()


def test_a_task_larger_than_the_bound_runs_alone():
    done = []
    with WriteBehind(2, max_bytes=10) as writers:
        writers.submit(lambda: done.append(1), 1000)
        writers.submit(lambda: done.append(2), 1000)
    assert sorted(done) == [1, 2]


def test_after_an_error_no_task_begins_and_the_caller_gets_it():
    done, failed = [], threading.Event()

    def fail():
        failed.set()
        raise OSError("disk full")

    def use():
        with WriteBehind(1, max_bytes=100) as writers:
            writers.submit(fail, 1)
            assert failed.wait(10)
            with pytest.raises(OSError, match="disk full"):
                writers.finish()
            writers.submit(lambda: done.append(1), 1)

    with pytest.raises(OSError, match="disk full"):
        use()
    assert done == []


def test_tasks_that_have_not_begun_are_dropped_when_the_caller_fails():
    done, has_begun, may_end = [], threading.Event(), threading.Event()

    def first():
        has_begun.set()
        assert may_end.wait(10)
        done.append("first")

    def use():
        with WriteBehind(1, max_bytes=100) as writers:
            writers.submit(first, 1)
            writers.submit(lambda: done.append("second"), 1)
            assert has_begun.wait(10)
            threading.Timer(0.1, may_end.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert done == ["first"]  # was under way, and is waited for
