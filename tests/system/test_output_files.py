"""Paths that the user names: devices and pipes are written to, links followed, files replaced whole, disks refused."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import threading

import pytest

from helpers.project import ROOT
from unet_trainer.config.errors import UserError
from unet_trainer.system.atomic_files import check_output, write_output

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")


def write(path, text="new"):
    check_output("--json", path)
    write_output("--json", path, text)


def test_a_file_is_made_or_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path)
    assert path.read_text() == "new"

    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"^--json: .*a\.json cannot be written \(No space left on device\); make room$"):
        write(path, "newer")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed_to_a_file_that_is_there_or_not_yet(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link, chain = tmp_path / "elsewhere" / "a.json", tmp_path / "link", tmp_path / "chain"
    link.symlink_to("elsewhere/a.json")
    chain.symlink_to("link")
    for text in ("first", "second"):
        write(chain, text)
        assert (chain.is_symlink(), link.is_symlink(), target.read_text()) == (True, True, text)


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    thread = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    thread.start()
    write(pipe, "x" * 200_000)  # more than a pipe holds
    thread.join(60)
    assert read == ["x" * 200_000]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert list(tmp_path.iterdir()) == [pipe]


def node(path, kind, major, minor):
    """A device node of the test's own; never one of the machine's."""
    try:
        os.mknod(path, kind | 0o666, os.makedev(major, minor))
    except OSError:
        pytest.skip("device nodes can be made by root alone")
    return path


@pytest.mark.parametrize(("minor", "reason"), [(3, None), (7, "No space left on device")], ids=["null", "full"])
def test_a_device_is_written_to_and_stays_one(minor, reason, tmp_path):
    path = node(tmp_path / "device", stat.S_IFCHR, 1, minor)
    with contextlib.nullcontext() if reason is None else pytest.raises(UserError, match=reason):
        write(path)
    assert stat.S_ISCHR(path.lstat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_is_refused_before_it_is_opened(tmp_path):
    path = node(tmp_path / "disk", stat.S_IFBLK, 7, 250)
    for call in (check_output, lambda option, path: write_output(option, path, "new")):
        with pytest.raises(UserError, match=r"--json: .*disk cannot be written \(it is a disk\)"):
            call("--json", path)


def test_a_folder_is_refused(tmp_path):
    for call in (check_output, lambda option, path: write_output(option, path, "new")):
        with pytest.raises(UserError, match=r"--json: .* cannot be written \(it is a folder\); name a file"):
            call("--json", tmp_path)


def test_a_missing_folder_is_told_before_the_work(tmp_path):
    with pytest.raises(UserError, match=rf"--json: there is no folder {tmp_path}/none$"):
        check_output("--json", tmp_path / "none" / "a.json")
    (tmp_path / "link").symlink_to("none/a.json")
    with pytest.raises(UserError, match=rf"--json: there is no folder {tmp_path}/none$"):
        check_output("--json", tmp_path / "link")


SAY = """
import sys; from pathlib import Path; from unet_trainer.system.atomic_files import write_output
print("before"); write_output("--json", Path(sys.argv[1]), "text\\n"); print("after")
"""


@pytest.mark.parametrize("name", ["/dev/stdout", "/proc/self/fd/1"])
def test_standard_output_is_written_to_in_its_place_also_where_it_is_a_file(name, tmp_path):
    if not os.path.exists(name):  # noqa: PTH110 (of a link to a closed pipe Path would say the same)
        pytest.skip(f"there is no {name}")
    path = tmp_path / "said.txt"
    with path.open("w") as file:
        subprocess.run([sys.executable, "-c", SAY, name], stdout=file, cwd=ROOT, check=True, timeout=60)
    assert path.read_text() == "before\ntext\nafter\n"
    done = subprocess.run([sys.executable, "-c", SAY, name], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    assert done.stdout == "before\ntext\nafter\n"
