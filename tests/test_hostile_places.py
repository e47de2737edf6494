"""Places that cannot be read or written: one sentence that names the cause, the right exit code, and nothing harmed.

Each was an attack that broke something. Those that need no process of their own stand with their modules.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from helpers.ordinary_user import run_in_child, run_script
from helpers.project import ROOT, TINY_MODEL
from helpers.runs import words
from unet_trainer.data.formats import demo
from unet_trainer.data.formats.demo import write_demo


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places") / "data"
    write_demo(folder, 6, side=32)
    return folder


@pytest.fixture
def open_again(tmp_path):
    """Folders whose permissions a test takes away, which pytest could not delete."""
    closed = []

    def close(folder, mode):
        folder.chmod(mode)
        closed.append(folder)
        return folder

    yield close
    for folder in closed:
        folder.chmod(0o755)


def training(data, tmp_path, **settings):
    config = {"data_dir": str(data), "checkpoint_dir": str(tmp_path / "runs"), "run_name": "run", "image_size": 32}
    config |= {"batch_size": 2, "num_epochs": 1, "num_workers": 0, "device": "cpu"}
    return words({**TINY_MODEL, **config, **settings})


def assert_one_sentence(answer, code, *parts):
    assert answer[0] == code, answer
    assert "Traceback" not in answer[1], answer[1]
    errors = [line for line in answer[1].splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1, answer[1]
    for part in parts:
        assert part in errors[0], errors[0]
    assert ".tmp" not in errors[0]


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_streams_change_neither_the_exit_code_nor_a_file(data, tmp_path):
    closed = "<&- >&- 2>&-"
    script = f"{sys.executable} {ROOT / 'train_unet.py'}"
    report = tmp_path / "report.json"
    good = f"{script} check data_dir={data} checkpoint_dir={tmp_path / 'runs'} --json {report} {closed}"
    assert subprocess.run(["/bin/sh", "-c", good], timeout=300, check=False).returncode == 0
    assert report.read_text().startswith('{\n  "ok": true')
    bad = f"{script} check data_dir=/none {closed}"
    assert subprocess.run(["/bin/sh", "-c", bad], timeout=300, check=False).returncode == 2


def test_python_without_docstrings_is_refused_in_a_sentence(data, tmp_path):
    answer = run_script("check", f"data_dir={data}", interpreter=["-OO"])
    assert_one_sentence(answer, 2, "python -OO", "-O")


@pytest.mark.parametrize("closed", ["images", ".."])  # above it: no r is needed
def test_a_folder_that_may_not_be_read_is_named_with_the_permission(closed, tmp_path, open_again):
    data = tmp_path / "above" / "data"
    write_demo(data, 2, side=32)
    folder = open_again((data / closed).resolve(), 0o444)
    answer = run_in_child("check", f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}", as_user=True)
    assert_one_sentence(answer, 2, "data_dir: ", "Permission denied", str(folder))


def test_an_image_that_may_not_be_read_is_named_with_the_permission(tmp_path):
    write_demo(tmp_path / "data", 3, side=32)
    closed = tmp_path / "data" / "images" / "cells_001.jpg"
    closed.chmod(0)
    places = f"data_dir={tmp_path / 'data'}", f"checkpoint_dir={tmp_path / 'runs'}"
    code, said = run_in_child("check", *places, as_user=True)
    assert code == 2
    assert "Traceback" not in said
    assert f"images/{closed.name}: " in said
    assert "Permission denied" in said


@pytest.mark.parametrize("mode", [0o000, 0o555], ids=oct)
def test_a_checkpoint_dir_that_may_not_be_used_is_told_before_anything_is_trained(mode, data, tmp_path, open_again):
    (tmp_path / "runs").mkdir()
    open_again(tmp_path / "runs", mode)
    answer = run_in_child(*training(data, tmp_path), as_user=True)
    assert_one_sentence(answer, 2, f"checkpoint_dir: {tmp_path / 'runs'}", "Permission denied")
    if mode == 0:
        answer = run_in_child("--resume", f"checkpoint_dir={tmp_path / 'runs'}", as_user=True)
        assert_one_sentence(answer, 2, f"{tmp_path / 'runs'} cannot be read", "Permission denied")


def test_a_run_folder_without_w_is_told_before_an_epoch_is_trained_and_an_unreadable_state_is_kept(
    data, tmp_path, open_again
):
    assert run_in_child(*training(data, tmp_path))[0] == 0
    folder = tmp_path / "runs" / "run"
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    open_again(folder, 0o555)
    answer = run_in_child("--resume", folder, "num_epochs=2", as_user=True)
    assert_one_sentence(answer, 2, f"{folder} cannot be written to (Permission denied)")
    assert "Epoch 2" not in answer[1]
    folder.chmod(0o755)
    for name in ("last.pt", "best.pt"):
        (folder / name).chmod(0)
        answer = run_in_child("--resume", folder, "num_epochs=2", as_user=True)
        assert_one_sentence(answer, 2, f"{folder / name} cannot be read (Permission denied)")
        (folder / name).chmod(0o644)
        assert {path.name: path.read_bytes() for path in folder.glob("*.pt")} == before


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of some size; skips where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        try:
            failed = subprocess.run(command, capture_output=True, check=False).returncode != 0
        except OSError:
            failed = True
        if failed:
            pytest.skip("a small disk cannot be mounted here")
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def fill(disk, num_left=0):
    with (disk / "filler").open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        file.truncate(max(0, file.tell() - num_left))


def test_a_disk_that_is_full_at_the_start_and_on_resume_is_one_sentence(data, tmp_path, small_disk):
    disk = small_disk("size=1m")
    fill(disk, num_left=4096)  # a folder fits, and nothing in it
    settings = training(data, tmp_path, checkpoint_dir=str(disk))
    answer = run_in_child(*settings)
    assert_one_sentence(answer, 2, "cannot be written to (No space left on device)", "make room")
    (disk / "filler").unlink()
    answer = run_in_child(*settings, "resume=auto")  # room for some files, not for the state of the epoch
    assert_one_sentence(answer, 3, "could not be written (No space left on device; make room)", "nothing is saved")
    subprocess.run(["mount", "-o", "remount,size=60m", str(disk)], check=True)
    assert run_in_child(*settings, "resume=auto")[0] == 0
    state = (disk / "run" / "last.pt").read_bytes()
    fill(disk)
    answer = run_in_child("--resume", disk / "run", "num_epochs=2")
    assert_one_sentence(answer, 2, f"{disk / 'run'} cannot be written to (No space left on device)", "make room")
    assert (disk / "run" / "last.pt").read_bytes() == state


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs POSIX signals")
def test_a_killed_demo_leaves_nothing_that_the_next_start_does_not_remove(tmp_path, monkeypatch):
    drafts = tmp_path / "data"
    command = [sys.executable, str(ROOT / "train_unet.py"), "check"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as child:
        while not list(drafts.glob(".demo-*/*/masks/*")):
            assert child.poll() is None
        child.kill()
    monkeypatch.setattr(demo, "NUM_IMAGES", 2)
    assert demo.ensure_demo(drafts / "demo")
    assert [path.name for path in drafts.iterdir()] == ["demo"]
