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
    (errno.EACCES, "Permission denied"),
    (errno.EPERM, "Operation not permitted"),
    (errno.ENOSPC, "No space left on device; make room"),
    (errno.EDQUOT, f"{os.strerror(errno.EDQUOT)}; make room within your quota"),
    (errno.EROFS, "Read-only file system; choose a folder on a disk that can be written to"),
    (errno.EIO, "Input/output error; the disk or its connection fails; look at the system's log"),
    (errno.ENOTDIR, "Not a directory; a part of that path is a file, not a folder"),
    (errno.ENAMETOOLONG, "File name too long"),
    (errno.EMFILE, "Too many open files; allow more with ulimit -n 4096"),
    (errno.ECONNRESET, "Connection reset by peer"),
]


@pytest.mark.parametrize(("number", "text"), SENTENCES, ids=[errno.errorcode[number] for number, _ in SENTENCES])
def test_an_error_of_the_machine_names_the_file_the_cause_and_what_to_do(number, text):
    assert is_of_the_machine(made(number))
    assert sentence(made(number)) == text
    assert sentence(made(number, "/nowhere/a")) == f"/nowhere/a: {text}"
    assert sentence(made(number, b"/nowhere/a")) == f"/nowhere/a: {text}"


def test_a_machine_without_temporary_folders_is_told_how_to_name_one():
    error = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    assert is_of_the_machine(error)
    assert sentence(error) == "there is no folder for temporary files that can be written to; name one: TMPDIR=FOLDER"


def test_a_machine_without_threads_is_told_what_to_do():
    assert is_of_the_machine(RuntimeError("can't start new thread"))
    assert sentence(RuntimeError("can't start new thread")).startswith(
        "no more threads may be started; allow more with"
    )


@pytest.mark.parametrize(
    ("text", "reason"), [("", "Cannot allocate memory"), ("Unable to allocate 9 GiB", "Unable to allocate 9 GiB")]
)
def test_no_memory_is_of_the_machine(text, reason):
    assert is_of_the_machine(MemoryError(text))
    assert sentence(MemoryError(text)) == f"{reason}; end other programs"


@pytest.mark.parametrize(
    "error",
    [
        made(errno.ENOENT),
        made(errno.EEXIST),
        made(errno.EINVAL),
        OSError("odd"),
        RuntimeError("odd"),
        ValueError("odd"),
    ],
)
def test_a_bug_keeps_its_traceback(error):
    assert not is_of_the_machine(error)


def test_a_disk_that_takes_no_more_files_is_not_answered_with_the_advice_to_make_room(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=100, f_favail=0, f_bavail=10))
    expected = "No inodes left on device: it has room, but for no more files; delete files there, however small"
    assert sentence(made(errno.ENOSPC, str(tmp_path / "a"))) == f"{tmp_path / 'a'}: {expected}"


def test_a_message_for_what_the_user_named_begins_with_the_option():
    found = cannot("--json: a.json", "be written", made(errno.EACCES))
    assert isinstance(found, UserError)
    assert str(found) == "--json: a.json cannot be written (Permission denied)"
    assert str(cannot("--out: a", "be made", made(errno.EROFS))).endswith(
        "(Read-only file system); choose a folder on a disk that can be written to"
    )
