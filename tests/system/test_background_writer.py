"""Saving in the background: in order, one at a time, the newest state, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from unet_trainer.system.background_writer import BackgroundWriter, is_any_busy


class Disk:
    """Notes what is written; the first job waits until it may go on."""

    def __init__(self):
        self.written = []
        self.may_go_on = threading.Event()
        self.has_begun = threading.Event()

    def slow(self, name):
        def write():
            self.has_begun.set()
            assert self.may_go_on.wait(30)
            self.written.append(name)

        return write

    def quick(self, name):
        return lambda: self.written.append(name)


def test_training_goes_on_while_a_save_is_in_flight_and_a_newer_state_replaces_the_waiting_one():
    disk, saver = Disk(), BackgroundWriter()
    saver.submit({"last": disk.slow("last 1")})
    assert disk.has_begun.wait(30)
    assert saver.is_busy()
    saver.submit({"best": disk.quick("best 2"), "last": disk.quick("last 2")})
    saver.submit({"last": disk.quick("last 3")})
    assert disk.written == []
    disk.may_go_on.set()
    saver.wait()
    assert disk.written == ["last 1", "best 2", "last 3"]  # best before the state that speaks of it
    assert not saver.is_busy()


def fail():
    raise OSError(28, "No space left on device")


def test_an_error_comes_out_at_the_next_call_and_once():
    saver = BackgroundWriter()
    saver.submit({"last": fail})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    disk = Disk()
    saver.submit({"last": disk.quick("last")})
    saver.wait()
    assert disk.written == ["last"]


def test_what_a_full_disk_refused_comes_along_with_the_next_save():
    disk, saver = Disk(), BackgroundWriter(needs={"last": "best"})
    attempts = []

    def full_once():
        attempts.append(1)
        if len(attempts) == 1:
            fail()
        disk.written.append("best 1")

    saver.submit({"best": full_once, "last": disk.quick("last 1")})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert disk.written == []  # nothing that speaks of a best.pt that is not there
    saver.submit({"last": disk.quick("last 2")})
    saver.wait()
    assert disk.written == ["best 1", "last 2"]


def test_no_thread_stays():
    saver = BackgroundWriter()
    before = threading.active_count()
    for _ in range(20):
        saver.submit({"last": lambda: None})
    saver.wait()
    assert threading.active_count() == before


def test_a_saver_that_is_abandoned_ends_its_work_and_forgets_the_rest():
    """A run that fails must not leave the process with a thread inside torch: it would end in an abort."""
    disk, saver = Disk(), BackgroundWriter()
    saver.submit({"last": disk.slow("last 1")})
    assert disk.has_begun.wait(30)
    saver.submit({"best": disk.quick("best 2"), "bad": fail})
    threading.Timer(0.2, disk.may_go_on.set).start()
    saver.abandon()
    assert disk.written == ["last 1"]
    assert not saver.is_busy()
    saver.wait()  # and there is no error left to raise


def test_a_job_that_fails_keeps_no_other_from_being_done_but_those_that_need_it():
    disk, saver = Disk(), BackgroundWriter(needs={"last": "best"})
    saver.submit({"best": disk.quick("best"), "samples": fail, "metrics": disk.quick("metrics"), "last": disk.quick("last")})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert disk.written == ["best", "metrics", "last"]
    assert list(saver.waiting) == ["samples"]
    saver.submit({"best": fail, "metrics": disk.quick("metrics 2"), "last": disk.quick("last 2")})
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    assert disk.written[3:] == ["metrics 2"]
    assert list(saver.waiting) == ["samples", "best", "last"]


def test_what_is_no_matter_of_the_disk_is_not_tried_again():
    disk, saver = Disk(), BackgroundWriter(needs={"last": "best"})

    def bad():
        raise ValueError("not finite")

    saver.submit({"best": bad, "metrics": disk.quick("metrics"), "last": disk.quick("last")})
    with pytest.raises(ValueError, match="not finite"):
        saver.wait()
    assert disk.written == ["metrics"]


def test_a_thread_that_cannot_be_started_is_an_error_that_is_heard(monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    disk, saver = Disk(), BackgroundWriter()
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(OSError, match="no thread to write with"):
        saver.submit({"last": disk.quick("last")})
    monkeypatch.undo()
    assert not saver.is_busy()
    saver.submit({})
    saver.wait()
    assert disk.written == ["last"]


def test_it_is_known_whether_any_save_is_under_way():
    disk, saver = Disk(), BackgroundWriter()
    assert not is_any_busy()
    saver.submit({"last": disk.slow("last")})
    assert disk.has_begun.wait(30)
    assert is_any_busy()
    disk.may_go_on.set()
    saver.wait()
    assert not is_any_busy()
