"""A file is written completely or not at all: whatever fails, the old content or the new is there, and nothing else; and paths that
the user names."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.project import ROOT
from unet_trainer.config.errors import UserError
from unet_trainer.system.atomic_files import (
    CHECK_JSON,
    HTML_PAGE,
    Draft,
    Kind,
    check_output,
    check_replaceable,
    delete_drafts,
    write_output,
    write_text_atomically,
)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")
TEXT = Kind("text", b"")


@pytest.fixture
def file(tmp_path):
    """A file with content to lose."""
    path = tmp_path / "last.pt"
    path.write_bytes(b"old")
    return path


def test_drafts_of_killed_writers_are_deleted_and_nothing_else(file):
    """A name that only looks like one is somebody else's, and so is a folder or a link."""
    ours = ".last.pt.k2j3_a9b.tmp", ".previous.pt.123-4.tmp", ".epoch_0001.png.00000000.tmp"
    others = "notes.tmp", ".report.docx.tmp", ".last.pt.tmp", ".report.k2j3_a9b.tmp", ".last.pt.K2J3_A9B.tmp"
    for name in (*ours, *others):
        (file.parent / name).touch()
    (file.parent / ".last.pt.11111111.tmp").mkdir()
    (file.parent / ".last.pt.22222222.tmp").symlink_to("notes.tmp")
    delete_drafts(file.parent, ["last.pt", "previous.pt", "epoch_*.png"])
    kept = sorted([*others, "last.pt", ".last.pt.11111111.tmp", ".last.pt.22222222.tmp"])
    assert sorted(path.name for path in file.parent.iterdir()) == kept


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
def test_an_error_names_the_file_and_never_its_draft(step, file, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file.parent / ".last.pt.k2j3_a9b.tmp"))

    with monkeypatch.context() as patch:
        patch.setattr(os if step == "fsync" else Path, step, refuse)
        with pytest.raises(OSError, match=re.escape(str(file))) as caught:
            write_text_atomically(file, "new")
    assert (caught.value.errno, caught.value.filename, caught.value.filename2) == (errno.ENOSPC, str(file), None)
    assert ".tmp" not in str(caught.value)
    assert file.read_bytes() == b"old"
    assert list(file.parent.iterdir()) == [file], "a temporary file was left behind"


@pytest.mark.parametrize("write", [lambda path: write_text_atomically(path, "new"), Draft], ids=["whole", "piecewise"])
def test_a_pipe_is_never_replaced_by_a_file(write, tmp_path):
    pipe = tmp_path / "last.pt"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="a pipe, a socket or a device; need a file"):
        write(pipe)
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_is_replaced_and_what_it_leads_to_stays_as_it_is(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file)
    write_text_atomically(link, "new")
    assert (link.is_symlink(), link.read_text(), file.read_text()) == (False, "new", "old")


# Paths that the user names: links are followed, files replaced whole, devices, pipes and folders refused.


def refusal(call, *arguments):
    with pytest.raises(UserError) as raised:
        call(*arguments)
    return str(raised.value)


def test_a_link_is_followed_to_a_file_that_is_there_or_not_yet(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link, chain = tmp_path / "elsewhere" / "a.json", tmp_path / "link", tmp_path / "chain"
    link.symlink_to("elsewhere/a.json")
    chain.symlink_to("link")
    for text in ("first", "second"):
        check_output("--json", chain, TEXT)
        write_output("--json", chain, text)
        assert (chain.is_symlink(), link.is_symlink(), target.read_text()) == (True, True, text)


@pytest.mark.parametrize(
    ("kind", "old", "is_replaced"),
    [
        (HTML_PAGE, b"<!doctype html>\n<html>", True),
        (HTML_PAGE, b"\n<!DOCTYPE HTML>", True),
        (HTML_PAGE, b"PK\x03\x04 weights", False),
        (HTML_PAGE, b"", False),
        (CHECK_JSON, b'{\n  "ok": false,\n', True),
        (CHECK_JSON, b'{"images": [], "annotations": []}', False),
        (None, b"seed: 1", False),
    ],
)
def test_a_file_is_replaced_by_its_own_kind_alone_also_behind_a_link(file, kind, old, is_replaced):
    link = file.with_name("link")
    file.write_bytes(old)
    link.symlink_to(file.name)
    for path in (file, link):
        with contextlib.nullcontext() if is_replaced else pytest.raises(UserError) as raised:
            check_output("--out", path, kind)
        if not is_replaced:
            words = "exists; name another file" if kind is None else f"is there and is no {kind.name}; choose another"
            assert str(raised.value).startswith(f"--out: {file} {words}")
    assert file.read_bytes() == old


def test_a_link_that_the_user_did_not_name_is_refused(tmp_path):
    (tmp_path / "report.html").symlink_to("elsewhere.html")
    refused = refusal(check_replaceable, "--out", tmp_path / "report.html", HTML_PAGE)
    assert refused.startswith(f"--out: {tmp_path}/report.html is a link to elsewhere.html; remove it, or choose")
    check_replaceable("--out", tmp_path / "none.html", HTML_PAGE)


@pytest.mark.parametrize(
    ("target", "reason"), [("/dev/null", "a pipe, a socket or a device; need a file"), (None, "folder|directory")]
)
def test_what_is_no_file_is_refused_and_stays(target, reason, tmp_path):
    path = tmp_path / "a"
    path.symlink_to(target) if target else path.mkdir()
    for refused in (refusal(check_output, "--json", path, TEXT), refusal(write_output, "--json", path, "new")):
        assert refused.startswith("--json: ")
        assert re.search(reason, refused)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_told_before_the_work(tmp_path):
    (tmp_path / "link").symlink_to("none/a.json")
    for path in (tmp_path / "none/a.json", tmp_path / "link"):
        assert refusal(check_output, "--json", path, TEXT).startswith(f"--json: there is no folder {tmp_path}/none")


SAY = """
import sys; from pathlib import Path; from unet_trainer.system.atomic_files import write_output
print("before"); write_output("--json", Path(sys.argv[1]), "text\\n"); print("after")
"""


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_standard_output_is_written_to_in_its_place_also_where_it_is_a_file(name, tmp_path):
    with (tmp_path / "said.txt").open("w+") as file:
        for stdout in (file, subprocess.PIPE):
            done = subprocess.run([sys.executable, "-c", SAY, name], stdout=stdout, text=True, cwd=ROOT, check=True)
            assert (done.stdout or (tmp_path / "said.txt").read_text()) == "before\ntext\nafter\n"
