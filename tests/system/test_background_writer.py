"""Files are written in the background, in order, once; what could not be written is handed back, and no error is lost."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from helpers.project import ROOT
from unet_trainer.system.background_writer import BackgroundWriter, Job, is_any_busy


class Disk:
    """Records what is written; a slow job waits until it may go on."""

    def __init__(self):
        self.written = []
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def write(self, name):
        return lambda: self.written.append(name)

    def write_slowly(self, name):
        def write():
            self.has_begun.set()
            assert self.may_go_on.wait(30)
            self.written.append(name)

        return write


def fail():
    raise OSError(28, "No space left on device")


def fail_for_good():
    raise ValueError("not finite")


@pytest.fixture
def disk():
    disk = Disk()
    yield disk
    disk.may_go_on.set()


@pytest.fixture
def writer():
    return BackgroundWriter()


def test_the_caller_goes_on_while_files_are_written_in_order(disk, writer):
    writer.start({"best": Job(disk.write_slowly("best")), "metrics": Job(disk.write("metrics")), "last": Job(disk.write("last"))})
    assert disk.has_begun.wait(30)
    assert writer.is_busy()
    assert disk.written == []
    assert writer.collect() == ({}, None)  # nothing is known yet
    disk.may_go_on.set()
    writer.wait()
    assert not writer.is_busy()
    assert disk.written == ["best", "metrics", "last"]
    assert writer.collect() == ({}, None)


def test_a_writer_that_is_busy_takes_no_more_jobs(disk, writer):
    writer.start({"last": Job(disk.write_slowly("last 1"))})
    with pytest.raises(RuntimeError, match="the writer is busy; wait for it first"):
        writer.start({"last": Job(disk.write("last 2"))})
    disk.may_go_on.set()
    writer.wait()
    writer.start({"last": Job(disk.write("last 3"))})
    writer.wait()
    assert disk.written == ["last 1", "last 3"]


def test_an_unused_writer_has_nothing_to_wait_for(writer):
    writer.wait()
    writer.cancel()
    assert not writer.is_busy()
    assert writer.collect() == ({}, None)


def test_what_a_full_disk_refused_is_handed_back_once_with_the_error(writer):
    job = Job(fail)
    writer.start({"last": job})
    writer.wait()
    unwritten, error = writer.collect()
    assert unwritten == {"last": job}
    assert (type(error), error.errno) == (OSError, 28)
    assert writer.collect() == ({}, None)


def test_what_was_handed_back_can_be_written_by_another_start(disk, writer):
    attempts = []

    def full_once():
        attempts.append(1)
        if len(attempts) == 1:
            fail()
        disk.written.append("best")

    writer.start({"best": Job(full_once), "last": Job(disk.write("last"), requires="best")})
    writer.wait()
    assert disk.written == []
    unwritten, _ = writer.collect()
    writer.start(unwritten)
    writer.wait()
    assert disk.written == ["best", "last"]
    assert writer.collect() == ({}, None)


def test_a_failed_job_stops_only_those_that_require_it(disk, writer):
    jobs = {
        "best": Job(fail),
        "samples": Job(disk.write("samples"), requires="best"),
        "metrics": Job(disk.write("metrics")),
        "last": Job(disk.write("last"), requires="samples"),
        "config": Job(disk.write("config"), requires="metrics"),
        "other": Job(disk.write("other"), requires="of another list"),
    }
    writer.start(jobs)
    writer.wait()
    assert disk.written == ["metrics", "config", "other"]
    unwritten, error = writer.collect()
    assert list(unwritten.items()) == [(name, jobs[name]) for name in ("best", "samples", "last")]
    assert isinstance(error, OSError)


def test_an_error_that_is_not_of_the_disk_is_reported_and_its_jobs_are_not_tried_again(disk, writer):
    writer.start(
        {"best": Job(fail_for_good), "metrics": Job(disk.write("metrics")), "last": Job(disk.write("last"), requires="best")}
    )
    writer.wait()
    unwritten, error = writer.collect()
    assert unwritten == {}
    assert str(error) == "not finite"
    assert disk.written == ["metrics"]


def test_the_first_of_several_errors_is_reported(writer):
    writer.start({"samples": Job(fail_for_good), "last": Job(fail)})
    writer.wait()
    unwritten, error = writer.collect()
    assert list(unwritten) == ["last"]
    assert str(error) == "not finite"


def test_cancel_finishes_the_job_under_way_and_forgets_the_rest(disk, writer):
    """A run that fails must not leave a thread inside torch, which would abort the process."""
    writer.start({"bad": Job(fail), "last": Job(disk.write_slowly("last")), "best": Job(disk.write("best"))})
    assert disk.has_begun.wait(30)
    threading.Timer(0.05, disk.may_go_on.set).start()
    writer.cancel()
    assert disk.written == ["last"]
    assert not writer.is_busy()
    assert writer.collect() == ({}, None)


def test_a_writer_that_was_cancelled_can_be_started_again(disk, writer):
    writer.cancel()
    writer.start({"last": Job(disk.write("last"))})
    writer.wait()
    assert disk.written == ["last"]


def test_no_thread_stays(writer):
    before = threading.active_count()
    for _ in range(20):
        writer.start({"last": Job(lambda: None)})
        writer.wait()
    assert threading.active_count() == before


def test_a_thread_that_cannot_be_started_is_an_error_and_its_jobs_are_handed_back(disk, writer, monkeypatch):
    def no_thread(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    jobs = {"last": Job(disk.write("last"))}
    with pytest.raises(OSError, match=r"no thread can be started to write with \(can't start new thread\)"):
        writer.start(jobs)
    monkeypatch.undo()
    assert not writer.is_busy()
    assert not is_any_busy()
    assert writer.collect() == (jobs, None)


def test_it_is_known_whether_any_writer_is_busy(disk, writer):
    assert not is_any_busy()
    writer.start({"last": Job(disk.write_slowly("last"))})
    assert is_any_busy()
    disk.may_go_on.set()
    writer.wait()
    assert not is_any_busy()


def test_a_writer_counts_as_busy_before_its_thread_runs(disk, writer, monkeypatch):
    """The process may exit right after the start."""
    was_busy = []
    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (was_busy.append(is_any_busy()), real(thread)))
    writer.start({"last": Job(disk.write("last"))})
    writer.wait()
    assert was_busy == [True]


def test_a_failed_job_leaves_no_writer_busy(writer):
    writer.start({"last": Job(fail), "best": Job(fail_for_good)})
    writer.wait()
    assert not is_any_busy()


def test_an_interpreter_that_exits_waits_for_a_write_under_way(tmp_path):
    script = (
        "import sys, threading, time; from pathlib import Path\n"
        "from unet_trainer.system.background_writer import BackgroundWriter, Job\n"
        "def write(): time.sleep(0.2); Path(sys.argv[1]).write_text('complete')\n"
        "BackgroundWriter().start({'last': Job(write)}); raise ValueError('of another part')"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "file")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "ValueError: of another part" in done.stderr
    assert (tmp_path / "file").read_text() == "complete"
