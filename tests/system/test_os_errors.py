"""Errors of the system as sentences: the cause in its own words, what to do, and no traceback for what is no bug."""

import errno
import os
from types import SimpleNamespace

import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.system.os_errors import cannot, is_of_the_machine, sentence


def made(number, name=None):
    return OSError(number, os.strerror(number), name)


SENTENCES = [
    (made(errno.EACCES), "Permission denied"),
    (made(errno.ENOSPC), "No space left on device; make room"),
    (made(errno.EROFS), "Read-only file system; choose a folder on a disk that can be written to"),
    (made(errno.EIO), "Input/output error; the disk or its connection fails; look at the system's log"),
    (made(errno.EMFILE, "/nowhere/a"), "/nowhere/a: Too many open files; allow more with ulimit -n 4096"),
    (made(errno.ENOTDIR, b"/nowhere/a"), "/nowhere/a: Not a directory; a part of that path is a file, not a folder"),
    (MemoryError(), "Cannot allocate memory; end other programs"),
    (MemoryError("Unable to allocate 9 GiB"), "Unable to allocate 9 GiB; end other programs"),
]  # fmt: skip
BUGS = [made(errno.ENOENT), made(errno.EEXIST), made(errno.EINVAL), OSError("odd"), RuntimeError("odd")]


@pytest.mark.parametrize(("error", "text"), [*SENTENCES, *((bug, None) for bug in BUGS)], ids=str)
def test_an_error_of_the_machine_names_file_cause_and_fix_and_a_bug_keeps_its_traceback(error, text):
    assert is_of_the_machine(error) == (text is not None)
    assert text is None or sentence(error) == text


def test_a_disk_that_takes_no_more_files_is_not_answered_with_the_advice_to_make_room(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=100, f_favail=0, f_bavail=10))
    expected = "No inodes left on device: it has room, but for no more files; delete files there, however small"
    assert sentence(made(errno.ENOSPC, str(tmp_path / "a"))) == f"{tmp_path / 'a'}: {expected}"


def test_a_message_for_what_the_user_named_begins_with_the_option():
    found = cannot("--json: a.json", "be written", made(errno.EACCES))
    assert isinstance(found, UserError)
    assert str(found) == "--json: a.json cannot be written (Permission denied)"
    fix = "(Read-only file system); choose a folder on a disk that can be written to"
    assert str(cannot("--out: a", "be made", made(errno.EROFS))).endswith(fix)
