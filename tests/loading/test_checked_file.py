"""Records with checksums: what was written is read back, in parts too, and what changed since is not."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest

from unet_trainer.loading import checked_file
from unet_trainer.loading.checked_file import BLOCK, CheckedFile, CheckedWriter, ContentDamage, file_bytes, num_blocks

LENGTHS = (10, BLOCK, 2 * BLOCK + 5, 0, 1)
RECORDS = [(sum(LENGTHS[:index]), length) for index, length in enumerate(LENGTHS)]
CONTENT = [np.random.default_rng(index).bytes(length) for index, length in enumerate(LENGTHS)]


@pytest.fixture
def path(tmp_path):
    with (tmp_path / "file").open("w+b", buffering=0) as file:
        writer = CheckedWriter(file, RECORDS)
        for index in (2, 0, 4, 1, 3):  # in any order
            writer.write(index, CONTENT[index])
        writer.finish()
    return tmp_path / "file"


def test_parts_of_records_are_read_as_they_were_written(path):
    assert path.stat().st_size == file_bytes(RECORDS) == sum(LENGTHS) + 4 * (1 + 1 + 3 + 0 + 1) + 16
    file = CheckedFile(path, RECORDS)
    for index, content in enumerate(CONTENT):
        for start, stop in ((0, len(content)), (3, 7), (BLOCK - 2, BLOCK + 2), (2 * BLOCK, 2 * BLOCK + 1)):
            if stop <= len(content):
                assert file.read(index, start, stop).tobytes() == content[start:stop]
    assert not file.read(0, 0, 10).flags.writeable


@pytest.mark.parametrize("place", [0, 9, 10, 10 + BLOCK - 1, 10 + BLOCK, sum(LENGTHS) - 1])
def test_one_changed_bit_is_noticed_in_its_block_and_in_no_other(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    file = CheckedFile(path, RECORDS)
    damaged = []
    for index, (start, length) in enumerate(RECORDS):
        for block in range(num_blocks(length)):
            try:
                file.read(index, block * BLOCK, min(length, (block + 1) * BLOCK))
            except ContentDamage:
                damaged.append((start + block * BLOCK) <= place < start + min(length, (block + 1) * BLOCK))
    assert damaged == [True]


@pytest.mark.parametrize("missing", [1, 20, 40, BLOCK])
def test_a_file_that_is_too_short_is_damaged(path, missing):
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(ContentDamage):
        CheckedFile(path, RECORDS)


def test_a_file_of_other_records_is_damaged(path):
    with pytest.raises(ContentDamage, match="table of checksums"):
        CheckedFile(path, [(0, 10)])


def test_an_error_of_the_disk_is_damage_with_its_reason(path, monkeypatch):
    file = CheckedFile(path, RECORDS)

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pread", fail)
    with pytest.raises(ContentDamage, match="Input/output error"):
        file.read(0, 0, 10)


def test_a_block_that_a_forked_process_has_checked_is_not_checked_again(path, monkeypatch):
    file = CheckedFile(path, RECORDS)
    process = multiprocessing.get_context("fork").Process(target=file.read, args=(1, 0, BLOCK))
    process.start()
    process.join(60)
    monkeypatch.setattr(checked_file.zlib, "crc32", lambda content: pytest.fail("checked again"))
    assert file.read(1, 5, 9).tobytes() == CONTENT[1][5:9]


def test_where_there_is_no_pread_the_same_is_read_and_written(tmp_path, path, monkeypatch):
    monkeypatch.delattr("os.pread")
    monkeypatch.delattr("os.pwrite")
    again = tmp_path / "again"
    with again.open("w+b", buffering=0) as file:
        writer = CheckedWriter(file, RECORDS)
        for index, content in enumerate(CONTENT):
            writer.write(index, content)
        writer.finish()
    assert again.read_bytes() == path.read_bytes()
    assert CheckedFile(again, RECORDS).read(2, 5, 9).tobytes() == CONTENT[2][5:9]
