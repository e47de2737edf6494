"""One process at a time holds the lock of a folder; the lock is released when that process ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from helpers.project import ROOT
from unet_trainer.config.errors import UserError
from unet_trainer.system import folder_lock

HOLD = """
import sys, time; from pathlib import Path; from unet_trainer.system.folder_lock import FolderLock
with FolderLock() as lock:
    lock.acquire(Path(sys.argv[1]), print)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def holder(tmp_path):
    """Starts another process that holds the folder for some seconds."""
    children = []

    def start(seconds):
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        children.append(child)
        assert child.stdout.readline() == "held\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def acquire(folder):
    """Locks and unlocks; returns the notices."""
    notices = []
    with folder_lock.FolderLock() as lock:
        lock.acquire(folder, notices.append)
    return notices


def test_a_folder_that_is_not_locked_is_locked_again_and_again(tmp_path):
    assert [acquire(tmp_path), acquire(tmp_path)] == [[], []]
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_the_previous_holder_deleted_does_not_count(tmp_path, monkeypatch):
    """Else two processes would hold the lock: one of the deleted file, one of the new file."""
    tries = []

    def is_same_file(self):
        tries.append(self.path.unlink(missing_ok=True))
        return len(tries) > 2

    monkeypatch.setattr(folder_lock.FolderLock, "is_same_file", is_same_file)
    (notice,) = acquire(tmp_path)
    assert len(tries) == 4  # the last one when it is released
    assert "another process trains there" in notice


def test_a_folder_locked_by_another_process_is_refused_with_its_number(tmp_path, holder, monkeypatch):
    child = holder(60)
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.3)
    with pytest.raises(UserError, match=rf"in use: process {child.pid} on .* trains there; end it first"):
        acquire(tmp_path)


def test_a_process_that_is_about_to_end_is_waited_for_with_a_notice(tmp_path, holder):
    child = holder(0.5)
    (notice,) = acquire(tmp_path)
    assert f"process {child.pid} on " in notice
    assert child.wait() == 0


def test_a_killed_process_releases_the_lock(tmp_path, holder):
    child = holder(60)
    child.kill()
    child.wait()
    assert acquire(tmp_path) == []  # without a notice: it did not wait


def test_forked_workers_do_not_hold_the_lock(tmp_path):
    """They may outlive a training process that was killed."""
    script = HOLD.replace('print("held", flush=True)', "import os; worker = os.fork(); worker and print(worker, flush=True)")
    command = [sys.executable, "-c", script, str(tmp_path), "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        try:
            assert acquire(tmp_path) == []
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_file_system_without_locks_is_not_an_error(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", no_locks)
    assert acquire(tmp_path) == []
    monkeypatch.setattr(folder_lock, "fcntl", None)
    assert acquire(tmp_path) == []
    assert acquire(tmp_path / "no such folder") == []


def test_a_folder_shows_whether_a_process_holds_it(holder, tmp_path):
    assert not folder_lock.is_locked(tmp_path)
    child = holder(60)
    assert folder_lock.is_locked(tmp_path)
    child.kill()
    child.wait()
    assert (tmp_path / ".lock").exists()  # left by the kill
    assert not folder_lock.is_locked(tmp_path)


def test_asking_in_the_process_that_holds_a_folder_does_not_release_it(tmp_path):
    """A POSIX lock is gone when its process closes any handle of the file."""
    script = "import sys; from pathlib import Path; from unet_trainer.system.folder_lock import is_locked; print(is_locked(Path(sys.argv[1])))"
    with folder_lock.FolderLock() as lock:
        lock.acquire(tmp_path, pytest.fail)
        assert folder_lock.is_locked(tmp_path)
        other = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True)
        assert other.stdout == "True\n"
    assert not folder_lock.is_locked(tmp_path)


def test_two_runs_of_one_process_cannot_hold_one_folder(tmp_path, monkeypatch):
    """The system would give both the same lock, and take it from both when one of them is done."""
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.3)
    with folder_lock.FolderLock() as first:
        first.acquire(tmp_path, print)
        with pytest.raises(UserError, match="in use: another run of this process trains there"):
            acquire(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path)
        with pytest.raises(UserError, match="another run of this process"):
            acquire(tmp_path / "link")
        assert first.is_ours()
        (tmp_path / "other").mkdir()
        assert acquire(tmp_path / "other") == []
    assert acquire(tmp_path) == []


def test_a_folder_that_is_made_anew_or_moved_away_is_no_longer_ours(tmp_path, holder):
    folder = tmp_path / "run"
    folder.mkdir()
    with folder_lock.FolderLock() as lock:
        lock.acquire(folder, print)
        assert lock.is_ours()
        folder.rename(tmp_path / "moved")
        assert not lock.is_ours()
        folder.mkdir()
        assert not lock.is_ours()
        (folder / ".lock").write_text("another's")
    assert (folder / ".lock").read_text() == "another's"  # only one's own file is deleted


def test_a_lock_file_that_was_deleted_alone_is_made_again(tmp_path):
    with folder_lock.FolderLock() as lock:
        lock.acquire(tmp_path, print)
        (tmp_path / ".lock").unlink()
        assert lock.is_ours()
        assert (tmp_path / ".lock").read_text() == f"process {os.getpid()} on {folder_lock.socket.gethostname()}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_has_locked_since_is_no_longer_ours(tmp_path, holder):
    with folder_lock.FolderLock() as lock:
        lock.acquire(tmp_path, print)
        (tmp_path / ".lock").unlink()
        child = holder(60)
        assert not lock.is_ours()
        assert f"process {child.pid} on " in (tmp_path / ".lock").read_text()


def test_a_lock_file_that_is_a_link_is_not_written_through(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    assert acquire(tmp_path / "run") == []
    assert target.read_text() == "content"


def test_a_full_disk_does_not_keep_the_lock_from_being_held_and_released(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_lock.os, "pwrite", full)
    with folder_lock.FolderLock() as lock:
        lock.acquire(tmp_path, print)
        assert (lock.is_held, lock.is_ours()) == (True, True)
    assert list(tmp_path.iterdir()) == []
