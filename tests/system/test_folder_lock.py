"""A folder is one process's at a time, and free again when that process is gone, however it went."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from helpers.project import ROOT
from unet_trainer.config.errors import UserError
from unet_trainer.system import folder_lock as lock

HOLD = """
import sys, time; from pathlib import Path; from unet_trainer.system.folder_lock import FolderLock
with FolderLock() as lock:
    lock.take(Path(sys.argv[1]), print)
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


def take(folder):
    said = []
    with lock.FolderLock() as mine:
        mine.take(folder, said.append)
    return said


def test_a_folder_that_nobody_holds_is_taken_again_and_again(tmp_path):
    assert [take(tmp_path), take(tmp_path)] == [[], []]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_the_one_before_took_with_it_counts_for_nothing(tmp_path, monkeypatch):
    """Else two would hold a folder: one by the file that is gone, one by the file of that name."""
    monkeypatch.setattr(lock, "_is_same", lambda file, path: bool(tries.append(path.unlink()) or len(tries) > 2))
    tries = []
    (said,) = take(tmp_path)
    assert len(tries) == 3
    assert "another process trains there" in said


def test_a_folder_of_another_process_is_refused_with_its_number(tmp_path, holder, monkeypatch):
    child = holder(60)
    monkeypatch.setattr(lock, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(UserError, match=rf"in use: process {child.pid} on .* trains there; end it first"):
        take(tmp_path)


def test_one_who_is_about_to_end_is_waited_for_and_the_wait_is_told(tmp_path, holder):
    child = holder(1)
    (said,) = take(tmp_path)
    assert f"process {child.pid} on " in said
    assert child.wait() == 0


def test_a_kill_frees_the_folder(tmp_path, holder):
    child = holder(60)
    child.kill()
    child.wait()
    started = time.monotonic()
    assert take(tmp_path) == []
    assert time.monotonic() - started < 5


def test_workers_do_not_hold_it(tmp_path):
    """They may live a moment longer than the training process."""
    script = HOLD.replace('print("held"', 'import os; os.fork() or time.sleep(5); print("held"').replace("float(sys.argv[2])", "0")
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout.readline() == "held\n"
        parent.wait()
        assert take(tmp_path) == []
        parent.kill()


def test_where_nothing_can_be_locked_training_goes_on(tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", no_locks)
    assert take(tmp_path) == []
    monkeypatch.setattr(lock, "fcntl", None)
    assert take(tmp_path) == []
    assert take(tmp_path / "no such folder") == []
