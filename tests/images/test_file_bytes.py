"""The bytes of a file, on a disk or in a shard, and what tells one from another."""

import os
import time

import pytest

from helpers.shards import write_index_of
from unet_trainer.data.shard_store import Files, ShardStore
from unet_trainer.images.file_bytes import ReadError, file_stamp, is_file, open_file, read_bytes


def test_a_file_on_a_disk_and_one_in_a_shard_are_read_alike(tmp_path):
    (tmp_path / "plain.png").write_bytes(b"an image")
    store = ShardStore(Files(str(tmp_path)), write_index_of(tmp_path, a={"k": (b"an image", b"")}))
    for path in (tmp_path / "plain.png", store.find((tmp_path / "a.tar/k.png").as_posix())):
        assert read_bytes(path) == b"an image"
        assert file_stamp(path) == file_stamp(path) is not None
        assert is_file(path)
        with open_file(path) as file:
            assert (file.read(2), file.seek(3), file.read()) == (b"an", 3, b"image")


def test_what_is_not_there_has_no_stamp_and_is_told(tmp_path):
    (tmp_path / "a.tar").touch()
    for path in (tmp_path / "none.png", tmp_path / "a.tar/none.png"):
        assert file_stamp(path) is None
        assert not is_file(path)
        with pytest.raises(ReadError, match=r"No such file|Not a directory"):
            read_bytes(path)
    (tmp_path / "a.png").symlink_to("/mnt/none/a.png")
    with pytest.raises(ReadError, match=r"a link to /mnt/none/a\.png, which does not exist"):
        read_bytes(tmp_path / "a.png")


def test_files_of_the_same_size_and_time_that_are_swapped_have_other_stamps(tmp_path):
    """As files from one archive may be."""
    one, two, aside = (tmp_path / name for name in ("1.npy", "2.npy", "aside"))
    for path, text in ((one, "a"), (two, "b")):
        path.write_text(text)
        os.utime(path, (1e9, 1e9))
    before = file_stamp(one)
    time.sleep(0.02)  # ctime has a resolution of a few milliseconds
    for source, target in ((one, aside), (two, one), (aside, two)):
        source.rename(target)
    assert file_stamp(one) != before
    assert file_stamp(one) == file_stamp(one)
