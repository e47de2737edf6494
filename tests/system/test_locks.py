"""One run at a time holds the lock of a folder, which is released however its process ends; files in use are known."""

import subprocess
import sys

import pytest

from helpers.project import ROOT
from unet_trainer.config.errors import UserError
from unet_trainer.system import locks
from unet_trainer.system.locks import FolderLock, is_in_use, is_locked, is_locked_here

HOLD = """
import sys, time; from pathlib import Path; from unet_trainer.system.locks import FolderLock
from unet_trainer.system.concurrency import start_process
with FolderLock() as lock:
    lock.acquire(Path(sys.argv[1]), print)
    worker = start_process(time.sleep, 60)
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def holder(tmp_path):
    """Starts another process, with a worker, that holds the folder for some seconds."""
    children = []

    def start(seconds):
        command = [sys.executable, "-c", HOLD, str(tmp_path), str(seconds)]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
        assert children[-1].stdout.readline() == "held\n"
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def acquire(folder):
    """Locks and unlocks; returns the notices."""
    notices = []
    with FolderLock() as lock:
        lock.acquire(folder, notices.append)
    return notices


def test_a_folder_locked_by_another_process_is_refused_with_its_number_until_that_is_killed(
    tmp_path, holder, monkeypatch
):
    child = holder(60)
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.3)
    why = rf"in use: process {child.pid} on .* trains there; end it first, or .* run_name"
    with pytest.raises(UserError, match=why):
        acquire(tmp_path)
    assert (is_locked(tmp_path), is_locked_here(tmp_path)) == (True, False)
    monkeypatch.undo()
    child.kill()
    child.wait()
    assert (tmp_path / ".lock").exists()
    acquire(tmp_path)  # perhaps with a notice, until the worker has ended with it
    assert not is_locked(tmp_path)


def test_a_process_that_is_about_to_end_is_waited_for_with_a_notice(tmp_path, holder):
    child = holder(0.5)
    (notice,) = acquire(tmp_path)
    assert f"process {child.pid} on " in notice


def test_without_locks_a_run_goes_on(tmp_path, monkeypatch):
    def no_locks(*arguments, **options):
        raise OSError(37, "No locks available")

    for name in ("lock_descriptor", "unlock_descriptor"):
        monkeypatch.setattr(locks, name, no_locks)
    assert acquire(tmp_path) == []
    assert acquire(tmp_path / "no such folder") == []
    (tmp_path / "file").touch()
    assert (is_in_use(tmp_path / "file"), is_locked(tmp_path)) == (None, False)


def test_two_runs_of_one_process_cannot_hold_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.3)
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with FolderLock() as first:
        first.acquire(tmp_path / "run", print)
        with pytest.raises(UserError, match="in use: another run of this process trains there"):
            acquire(tmp_path / "link")
        assert is_locked_here(tmp_path / "run")
        assert acquire(tmp_path) == []
    assert not is_locked(tmp_path / "run")


def test_a_lock_file_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    assert acquire(tmp_path / "run") == []
    assert (tmp_path / "precious").read_text() == "content"


def test_a_file_is_in_use_until_it_is_closed(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as file:
        locks.lock_descriptor(file.fileno(), blocking=False)
        assert is_in_use(path)
    assert is_in_use(path) is False
