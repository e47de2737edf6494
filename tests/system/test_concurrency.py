"""Worker processes and threads: every outcome arrives, in order and within bounds; crashes, hangs and errors cost no more than they
must; nothing outlives its use."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import cv2
import numpy as np
import pytest

from helpers.killed_runs import is_running, wait_until
from helpers.project import ROOT
from unet_trainer.system import concurrency
from unet_trainer.system.concurrency import MAX_MESSAGE, Crash, ReadTimeout, call_with_timeout, forked_map, read_ahead

LIMIT = 30
needs_fork = pytest.mark.skipif(not concurrency.CAN_FORK, reason="processes are forked on Linux only")


@pytest.fixture
def children():
    """Calls give the child processes that a test has started: other tests may have some of their own."""
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


@pytest.fixture
def never():
    """A function that waits until the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


@needs_fork
def test_every_item_has_its_outcome_once(children):
    num_children = 3
    outcomes = list(forked_map(lambda item, read_stderr: (item * item, os.getpid()), range(20), num_children))
    assert sorted((index, square) for index, (square, _) in outcomes) == [(index, index * index) for index in range(20)]
    pids = {pid for _, (_, pid) in outcomes}
    assert len(pids) <= num_children
    assert os.getpid() not in pids
    assert children() == []
    assert list(forked_map(lambda item, read_stderr: item, [], 2)) == []


@needs_fork
def test_an_exception_in_a_child_is_raised_with_its_traceback(children):
    for work, message in ((lambda: 1 // 0, "ZeroDivisionError"), (threading.Lock, "cannot pickle")):
        with pytest.raises(RuntimeError, match=rf"a child process failed:\nTraceback(.|\n)*{message}"):
            list(forked_map(lambda item, read_stderr, work=work: work(), range(3), 2))
    assert children() == []


@needs_fork
def test_a_crash_costs_one_item_and_the_end_of_what_the_child_printed_is_kept(capfd):
    def crash_at_two(item, read_stderr):
        os.write(2, b"line\n" * 100 + f"native code\n at item {item}\n".encode())
        if item == 2:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        return read_stderr().splitlines()[-1], read_stderr()

    outcomes = dict(forked_map(crash_at_two, range(8), 3))
    crash = outcomes.pop(2)
    assert crash.reason.startswith("SIGSEGV: ")
    assert crash.reason.endswith("line native code at item 2")
    assert len(crash.reason) == len("SIGSEGV: ") + MAX_MESSAGE
    assert outcomes == {index: (f" at item {index}", "") for index in range(8) if index != 2}
    assert capfd.readouterr().err == ""


@needs_fork
def test_every_item_may_crash_or_hang(children):
    crashing = forked_map(lambda item, read_stderr: os._exit(item), [1, 2, 3], 2)
    assert dict(crashing) == {index: Crash(f"exit code {index + 1}") for index in range(3)}
    hanging = forked_map(lambda item, read_stderr: time.sleep(600), [1, 2], 1, timeout=0.1)
    assert dict(hanging) == dict.fromkeys(range(2), Crash("no answer in 0.1 s", is_timeout=True))
    assert children() == []


@needs_fork
def test_children_ignore_the_signals_that_the_parent_handles():
    def survive(number, read_stderr):
        os.kill(os.getpid(), number)
        return "alive"

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert dict(forked_map(survive, numbers, 1)) == dict.fromkeys(range(3), "alive")


@needs_fork
def test_children_of_a_process_in_which_opencv_has_threads_use_opencv():
    def resize(item, read_stderr):
        cv2.setNumThreads(1)
        return cv2.resize(large, (512, 512)).shape

    before, large = cv2.getNumThreads(), np.zeros((1024, 1024, 3), np.uint8)
    cv2.setNumThreads(4)
    try:
        cv2.resize(large, (2048, 2048))
        assert sorted(forked_map(resize, [0, 1], 2, timeout=30)) == [(0, (512, 512, 3)), (1, (512, 512, 3))]
        assert cv2.getNumThreads() == 4
    finally:
        cv2.setNumThreads(before)


@pytest.mark.parametrize("hangs", [False, True], ids=["between items", "in an item"])
def test_children_end_when_the_parent_is_killed(hangs):
    """One that hangs never sees by itself that its parent is gone."""
    script = (
        "import os, sys, time; from unet_trainer.system.concurrency import forked_map\n"
        "def work(item, read_stderr):\n    time.sleep(600 if item == 'hang' else 0.05); return os.getpid()\n"
        "outcomes = forked_map(work, [*range(30), *['hang'] * int(sys.argv[1]), *range(30)], 3)\n"
        "print(*sorted({next(outcomes)[1] for _ in range(30)}), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(3 * hangs)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        were_running = list(map(is_running, pids))
        parent.kill()
        parent.wait()
        try:
            assert set(were_running) == {True}
            wait_until(lambda: not any(map(is_running, pids)))
        finally:
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)


def test_threads_do_the_work_where_processes_cannot_be_forked(monkeypatch):
    monkeypatch.setattr(concurrency, "CAN_FORK", False)
    outcomes = dict(forked_map(lambda item, read_stderr: (os.getpid(), item, read_stderr()), range(10), 3))
    assert outcomes == {index: (os.getpid(), index, "") for index in range(10)}
    with pytest.raises(ZeroDivisionError):
        list(forked_map(lambda item, read_stderr: 1 // item, [1, 0], 2))


def test_a_call_that_hangs_is_given_up(never):
    with pytest.raises(ReadTimeout):
        call_with_timeout(never, 0.2)


def test_outcomes_come_in_the_order_of_the_items_and_an_exception_at_its_turn():
    second_is_done = threading.Event()

    def work(item):
        if item == 0:
            assert second_is_done.wait(LIMIT)
        if item == 1:
            second_is_done.set()
        if item == 3:
            raise ValueError("the fourth")
        return item * 10

    taken = []
    with pytest.raises(ValueError, match="the fourth"):
        taken.extend(read_ahead(work, range(9), 2))
    assert taken == [(0, 0), (1, 10), (2, 20)]
    assert list(read_ahead(work, [], 2)) == []


def test_many_small_items_come_in_order_each_once_and_no_more_than_the_bound_wait():
    begun, taken, most = [], 0, 0
    for item, outcome in read_ahead(lambda item: begun.append(item) or -item, range(400), 2, lambda _: 1, 64, 64):
        assert (item, outcome) == (taken, -taken)
        taken, most = taken + 1, max(most, len(begun) - taken)
    assert (sorted(begun), taken) == (list(range(400)), 400)
    assert most <= 64 + 2 * concurrency.GROUP  # and those under way

    def fail(item):
        if item == 77:
            raise ValueError("the 77th")

    before = []
    with pytest.raises(ValueError, match="the 77th"):
        before.extend(read_ahead(fail, range(400), 2))
    assert len(before) == 77


def test_as_many_large_outcomes_wait_as_the_bound_holds():
    """Of two to four bytes, with room for ten: three, once their size is known."""
    begun, most = [], []
    ahead = read_ahead(lambda item: begun.append(item) or item, range(60), 2, lambda item: 2 + item % 3, 10)
    for taken, _ in ahead:
        time.sleep(0.001)
        most.append(len(begun) - taken)
    assert max(most) <= 5
    assert 2 <= max(most[5:]) <= 3


def test_several_threads_call_and_one_that_hangs_is_given_up(never):
    barrier = threading.Barrier(3)
    assert [item for item, _ in read_ahead(lambda item: barrier.wait(LIMIT), range(6), 3)] == list(range(6))
    with pytest.raises(ReadTimeout):
        list(read_ahead(lambda item: never(), range(4), 2, timeout=0.1))
