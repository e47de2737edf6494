"""Items are worked on in child processes: every outcome arrives, a crash costs one item, and no child outlives its use."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.project import ROOT
from unet_trainer.system import forked_map as forked_map_module
from unet_trainer.system.forked_map import MAX_MESSAGE, Crash, forked_map

pytestmark = pytest.mark.skipif(not forked_map_module.CAN_FORK, reason="processes are forked on Linux only")


def square(item, read_stderr):
    return item * item


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def children():
    """Calls give the child processes that a test has started: other tests may have some of their own."""
    before = set(multiprocessing.active_children())
    return lambda: [child for child in multiprocessing.active_children() if child not in before]


# Outcomes


@pytest.mark.parametrize("num_children", [1, 3, 40])
def test_every_item_has_its_outcome_once(num_children, children):
    outcomes = list(forked_map(square, range(20), num_children))
    assert sorted(outcomes) == [(index, index * index) for index in range(20)]
    assert children() == []


def test_no_items_start_no_children(monkeypatch):
    monkeypatch.setattr(forked_map_module, "_start", None)
    assert list(forked_map(square, [], 2)) == []


def test_no_more_children_than_items():
    pids = {pid for _, pid in forked_map(lambda item, read_stderr: os.getpid(), range(2), 16)}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_set_up_is_called_once_in_each_child():
    calls = []
    outcomes = dict(
        forked_map(lambda item, read_stderr: (os.getpid(), list(calls)), range(10), 2, lambda: calls.append(os.getpid()))
    )
    assert all(called == [pid] for pid, called in outcomes.values())
    assert calls == []


def test_outcomes_arrive_as_they_are_done(tmp_path):
    """The first item waits for the second one to have been received."""
    received = tmp_path / "received"

    def work(item, read_stderr):
        if item == 0:
            wait_until(received.exists)
        return item

    order = []
    for index, _ in forked_map(work, range(2), 2):
        order.append(index)
        received.touch()
    assert order == [1, 0]


def test_an_exception_is_raised_with_its_traceback(children):
    def fail_at_three(item, read_stderr):
        if item == 3:
            raise ValueError("item 3 is bad")
        return item

    with pytest.raises(RuntimeError) as raised:
        list(forked_map(fail_at_three, range(6), 2))
    message = str(raised.value)
    assert message.startswith("a child process failed:\nTraceback (most recent call last):\n")
    assert "in fail_at_three\n" in message
    assert message.endswith("ValueError: item 3 is bad\n")
    assert children() == []


def test_an_outcome_that_cannot_be_pickled_is_an_error_and_not_a_crash():
    with pytest.raises(RuntimeError, match=r"a child process failed:\n(.|\n)*cannot pickle '_thread.lock' object"):
        list(forked_map(lambda item, read_stderr: threading.Lock(), [0], 1))


# Crashes


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
@pytest.mark.parametrize("num_children", [1, 3])
def test_a_child_killed_by_a_signal_costs_one_item_and_what_it_printed_is_kept(number, num_children):
    def crash_at_two(item, read_stderr):
        os.write(2, f"native code\n at item {item}\n".encode())
        if item == 2:
            os.kill(os.getpid(), number)
        read_stderr()
        return item

    outcomes = dict(forked_map(crash_at_two, range(8), num_children, faulthandler.disable))
    assert outcomes.pop(2) == Crash(f"{number.name}: native code at item 2")
    assert outcomes == {index: index for index in range(8) if index != 2}


def test_every_item_may_crash():
    outcomes = dict(forked_map(lambda item, read_stderr: os._exit(item), range(1, 6), 2))
    assert outcomes == {index: Crash(f"exit code {index + 1}") for index in range(5)}


def test_the_message_of_a_crash_is_its_end_on_one_line():
    def crash(item, read_stderr):
        os.write(2, b"line\n" * 1000 + b"the last line\n")
        os._exit(1)

    ((_, found),) = forked_map(crash, [0], 1)
    assert found.reason.startswith("exit code 1: ")
    assert found.reason.endswith("line line the last line")
    assert len(found.reason) == len("exit code 1: ") + MAX_MESSAGE


# Standard error


def test_no_temporary_directory_is_needed(monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: pytest.fail("a file in the temporary directory"))
    assert list(forked_map(lambda item, read_stderr: os.write(2, b"x") and read_stderr(), [0], 1)) == [(0, "x")]


def test_an_item_that_never_ends_is_given_up_and_the_others_are_done(children):
    outcomes = dict(forked_map(lambda item, read_stderr: time.sleep(600) if item == 1 else item, range(4), 2, timeout=1))
    assert outcomes == {0: 0, 1: Crash("no answer in 1 s", is_timeout=True), 2: 2, 3: 3}
    assert children() == []


def test_standard_error_of_a_child_is_read_by_its_function():
    def work(item, read_stderr):
        os.write(2, f"first {item}\n".encode())
        first = read_stderr()
        os.write(2, "second é\n".encode())
        return first, read_stderr(), read_stderr()

    outcomes = dict(forked_map(work, range(4), 2))
    assert outcomes == {index: (f"first {index}\n", "second é\n", "") for index in range(4)}


def test_standard_error_of_this_process_is_never_redirected(capfd, tmp_path):
    """Another thread writes to it while the children work; what they print does not arrive there."""
    has_written = tmp_path / "has written"
    file = os.fstat(2)

    def work(item, read_stderr):
        os.write(2, b"of a child\n")
        wait_until(has_written.exists)
        return read_stderr().count("of a child") > 0

    def write():
        time.sleep(0.1)
        os.write(2, b"of a thread\n")
        has_written.touch()

    thread = threading.Thread(target=write)
    thread.start()
    for _, has_read in forked_map(work, range(4), 2):
        assert has_read
        assert os.path.samestat(os.fstat(2), file)
        os.write(2, b"of the consumer\n")
    thread.join()
    assert capfd.readouterr().err == "of a thread\n" + "of the consumer\n" * 4


# Signals


def test_children_ignore_the_signals_that_the_parent_handles():
    def signal_itself(item, read_stderr):
        os.kill(os.getpid(), item)
        return "alive"

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert [outcome for _, outcome in forked_map(signal_itself, numbers, 1)] == ["alive"] * 3


def test_signals_are_handled_while_this_process_waits(tmp_path):
    handled = tmp_path / "handled"
    before = signal.signal(signal.SIGALRM, lambda number, frame: handled.touch())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        outcomes = list(forked_map(lambda item, read_stderr: wait_until(handled.exists), [0], 1))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert outcomes == [(0, None)]


# The end of children


def test_children_end_when_the_consumer_stops_early(children):
    outcomes = forked_map(lambda item, read_stderr: item or time.sleep(60), [1, 0, 0], 3)
    assert next(outcomes) == (0, 1)
    started = children()
    assert len(started) == 3
    outcomes.close()
    assert children() == []
    assert not [child.pid for child in started if is_running(child.pid)]


def test_children_end_when_the_consumer_raises(children):
    def consume():
        for _ in forked_map(square, range(100), 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert children() == []


def test_children_end_when_the_parent_is_killed():
    script = (
        "import os, time; from unet_trainer.system.forked_map import forked_map\n"
        "outcomes = forked_map(lambda item, read_stderr: time.sleep(0.05) or os.getpid(), range(100), 3)\n"
        "print(*sorted({next(outcomes)[1] for _ in range(30)}), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        children = [int(word) for word in parent.stdout.readline().split()]
        assert len(children) == 3
        assert all(is_running(child) for child in children)
        parent.kill()
        parent.wait()
        try:
            wait_until(lambda: not any(is_running(child) for child in children))
        finally:
            for child in filter(is_running, children):
                os.kill(child, signal.SIGKILL)


def test_a_child_that_dies_idle_is_not_waited_for(monkeypatch, tmp_path):
    """Its closed connection is always ready: waiting for it would be a busy loop."""
    calls, real = [], multiprocessing.connection.wait
    monkeypatch.setattr(multiprocessing.connection, "wait", lambda *arguments: calls.append(1) or real(*arguments))
    go_on = tmp_path / "go on"
    outcomes = forked_map(lambda item, read_stderr: (wait_until(go_on.exists) if item else None, os.getpid()), [0, 1], 2)
    _, (_, idle) = next(outcomes)
    os.kill(idle, signal.SIGKILL)
    threading.Timer(0.2, go_on.touch).start()
    assert next(outcomes)[0] == 1
    assert len(calls) <= 3
    outcomes.close()


# Threads


@pytest.fixture(params=["no fork", "daemon"])
def no_processes(request, monkeypatch):
    if request.param == "no fork":
        monkeypatch.setattr(forked_map_module, "CAN_FORK", False)
    else:  # a daemonic process may have no children
        monkeypatch.setattr(multiprocessing, "current_process", lambda: SimpleNamespace(daemon=True))


def test_threads_do_the_work_where_processes_cannot_be_forked(no_processes):
    outcomes = dict(forked_map(lambda item, read_stderr: (os.getpid(), item * item, read_stderr()), range(10), 3))
    assert outcomes == {index: (os.getpid(), index * index, "") for index in range(10)}


def test_an_exception_in_a_thread_is_raised_as_it_is(no_processes):
    with pytest.raises(ZeroDivisionError):
        list(forked_map(lambda item, read_stderr: 1 // item, [1, 0], 2))


def test_threads_begin_no_more_items_when_the_consumer_stops_early(no_processes):
    begun = []
    outcomes = forked_map(lambda item, read_stderr: begun.append(item) or time.sleep(0.01), range(1000), 1)
    next(outcomes)
    outcomes.close()
    assert len(begun) < 1000


def test_no_temporary_folder_is_needed(monkeypatch):
    """As with a root that is mounted read-only."""
    monkeypatch.setattr("tempfile._candidate_tempdir_list", list)
    monkeypatch.setattr("tempfile.tempdir", None)
    assert [outcome for _, outcome in forked_map(lambda item, read_stderr: item + 1, [1], 1)] == [2]
