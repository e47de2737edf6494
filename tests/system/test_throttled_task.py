"""Work in the background: never more than its share, done when it is asked for, and no error of it ends anything."""

from __future__ import annotations

import threading
import time

import pytest

from unet_trainer.system import throttled_task
from unet_trainer.system.throttled_task import ThrottledTask

LIMIT = 60.0


@pytest.fixture
def make():
    tasks = []

    def build(work, share=1.0):
        tasks.append(ThrottledTask("a test", work, share))
        return tasks[-1]

    yield build
    for task in tasks:
        task.finish()


def test_what_is_asked_for_is_done_in_another_thread(make):
    done, threads = threading.Event(), []
    task = make(lambda: (threads.append(threading.current_thread()), done.set()))
    task.request()
    assert done.wait(LIMIT)
    assert threads[0] is not threading.current_thread()


def test_what_is_asked_for_during_the_work_is_done_once_afterwards(make):
    may_go_on, begun, calls = threading.Event(), threading.Event(), []

    def work():
        calls.append(1)
        begun.set()
        assert may_go_on.wait(LIMIT)

    task = make(work)
    task.request()
    assert begun.wait(LIMIT)
    for _ in range(5):
        task.request()
    may_go_on.set()
    task.finish()
    assert len(calls) == 2


def test_work_takes_no_more_than_its_share_of_the_time(make, monkeypatch):
    """Five seconds of a core at a share of 1 %: not again before 500 seconds are over; at the end, at once."""
    now, done, calls = [1000.0], threading.Event(), []
    monkeypatch.setattr(throttled_task.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(throttled_task.time, "thread_time", lambda: 5.0 * len(calls))

    def work():
        calls.append(now[0])
        done.set()

    task = make(work, share=0.01)
    task.request()
    assert done.wait(LIMIT)
    now[0] = 1499.0
    task.request()
    time.sleep(0.1)  # it would be done within this time
    assert calls == [1000.0]
    task.finish()
    assert calls == [1000.0, 1499.0]


def test_work_goes_on_when_its_share_allows_it(make, monkeypatch):
    now, calls, done = [1000.0], [], threading.Semaphore(0)
    monkeypatch.setattr(throttled_task.time, "monotonic", lambda: now[0])
    task = make(lambda: (calls.append(now[0]), done.release()), share=0.01)
    task.request()
    assert done.acquire(timeout=LIMIT)
    now[0] = 5000.0
    task.request()
    assert done.acquire(timeout=LIMIT)
    assert calls == [1000.0, 5000.0]


def test_errors_are_kept_and_the_next_work_is_tried(make):
    errors, done = [ValueError("first"), ValueError("second")], threading.Semaphore(0)

    def work():
        done.release()
        raise errors.pop(0)

    task = make(work)
    assert task.take_error() is None
    for _ in range(2):
        task.request()
        assert done.acquire(timeout=LIMIT)
    task.finish()
    assert str(task.take_error()) == "first"
    assert task.take_error() is None


def test_a_task_that_nobody_asked_ends_at_once(make):
    task = make(lambda: pytest.fail("nobody asked"))
    task.finish()
    task.request()  # too late: nothing happens
    task.finish()


def test_a_thread_that_cannot_be_started_is_an_error_like_others(make, monkeypatch):
    task = make(lambda: None)

    def refuse():
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(task._thread, "start", refuse)
    task.request()
    task.request()
    assert str(task.take_error()) == "can't start new thread"


def test_ending_does_not_wait_for_ever(make, monkeypatch):
    monkeypatch.setattr(throttled_task, "FINISH_SECONDS", 0.05)
    may_go_on, begun = threading.Event(), threading.Event()
    task = make(lambda: (begun.set(), may_go_on.wait(LIMIT)))
    task.request()
    assert begun.wait(LIMIT)
    task.finish()
    may_go_on.set()
