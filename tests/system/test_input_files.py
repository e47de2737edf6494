"""Every file that is read: a regular one, opened without waiting, bounded; what is wrong with it is an OSError with a reason."""

import errno
import os

import pytest

from helpers.no_files import needs_pipes
from unet_trainer.system.input_files import NOT_A_FILE, open_file, open_handle, read_bytes, read_json, read_text


def reason(call, *arguments):
    with pytest.raises(OSError) as caught:
        call(*arguments)
    return caught.value.strerror


def test_a_file_is_read_whole_as_bytes_text_and_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [1]}\r\n')
    assert read_bytes(path, 15) == path.read_bytes()
    assert read_text(path, encoding="utf-8-sig") == '{"a": [1]}\r\n'
    assert read_json(path) == {"a": [1]}
    with open_file(path) as file:
        assert (file.read(3), file.seek(0), file.name) == (b"\xef\xbb\xbf", 0, str(path))
    (tmp_path / "empty").touch()
    assert read_bytes(tmp_path / "empty", 0) == b""


@needs_pipes
def test_pipes_devices_and_folders_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        assert {reason(call, tmp_path / name) for call in (read_bytes, open_file)} == {NOT_A_FILE}
    assert reason(read_bytes, tmp_path) == "Is a directory"


def test_a_link_is_followed_unless_the_reader_says_otherwise(tmp_path):
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "link").symlink_to("target")
    assert read_bytes(tmp_path / "link") == b"x"
    for call in (read_bytes, read_json, open_file, open_handle):
        with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
            call(tmp_path / "link", follow=False)


def test_a_file_of_more_bytes_than_its_reader_takes_is_refused_with_both_numbers(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(5 * 2**30 + 2**29)  # a hole: it takes no room
    assert reason(read_bytes, path) == "5905.6 MB; need at most 1073.7"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[" * 200_000, b"1" * 5000, b""])
def test_what_is_no_json_is_a_value_error(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError):
        read_json(tmp_path / "a.json")
