"""A file of byte records whose content is checked when it is read: a checksum of every block of a record lies behind the records.

Read with pread and not mapped into memory: a file that another program makes shorter is an error here, and no SIGBUS. Each block is
checked at its first reading in a run, by whichever process reads it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from unet_trainer.images.image_files import Pixels

BLOCK = 2**16  # bytes
MAGIC = b"unetpix1"
TAIL = struct.Struct("<8sII")  # magic, number of blocks, checksum of the table
CHECKSUM_BYTES = 4

_lock = threading.Lock()  # where there is no preadv


class ContentDamage(Exception):
    """The file does not hold what was written; the message says how."""


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK)


def file_bytes(records: Sequence[tuple[int, int]]) -> int:
    """Of a file with records of these starts and lengths, one behind the other."""
    return (sum(records[-1]) if records else 0) + CHECKSUM_BYTES * sum(num_blocks(length) for _, length in records) + TAIL.size


class CheckedWriter:
    """Writes records into an open file, in any order and from several threads; `finish` when all are written."""

    def __init__(self, file: BinaryIO, records: Sequence[tuple[int, int]]) -> None:
        self.file, self.records = file, records
        self.firsts = _first_blocks(records)
        self.checksums = np.zeros(self.firsts[-1], "<u4")

    def write(self, index: int, content: bytes) -> None:
        start, length = self.records[index]
        assert len(content) == length
        first = self.firsts[index]
        for block in range(num_blocks(length)):
            self.checksums[first + block] = zlib.crc32(content[block * BLOCK : (block + 1) * BLOCK])
        _write_at(self.file, content, start)

    def finish(self) -> None:
        table = self.checksums.tobytes()
        end = sum(self.records[-1]) if self.records else 0
        _write_at(self.file, table + TAIL.pack(MAGIC, len(self.checksums), zlib.crc32(table)), end)


class CheckedFile:
    """A finished file, open for reading; may be read from several threads and forked processes."""

    def __init__(self, path: Path, records: Sequence[tuple[int, int]]) -> None:
        """Raises OSError, and ContentDamage where the file has not these records or its table is damaged."""
        self.path, self.records = path, records
        self.firsts = _first_blocks(records)
        self.handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.handle)
        end = sum(records[-1]) if records else 0
        content = np.empty(CHECKSUM_BYTES * self.firsts[-1] + TAIL.size, np.uint8)
        self._read_into(end, content)
        stored = content.tobytes()
        magic, blocks, checksum = TAIL.unpack_from(stored, len(stored) - TAIL.size)
        table = stored[: -TAIL.size]
        if magic != MAGIC or blocks != self.firsts[-1] or checksum != zlib.crc32(table):
            raise ContentDamage("its table of checksums is damaged")
        self.checksums = np.frombuffer(table, "<u4")
        # Shared with processes that are forked from this one.
        self.is_checked = np.frombuffer(mmap.mmap(-1, max(1, blocks)), np.uint8)

    def read(self, index: int, start: int, stop: int) -> Pixels:
        """The bytes of a part of a record. Raises ContentDamage."""
        offset, length = self.records[index]
        blocks, first = range(start // BLOCK, num_blocks(stop)), self.firsts[index]
        is_checked = self.is_checked[first + blocks.start : first + blocks.stop].all()
        begin, end = (start, stop) if is_checked else (blocks.start * BLOCK, min(blocks.stop * BLOCK, length))
        content = np.empty(end - begin, np.uint8)
        self._read_into(offset + begin, content)
        if not is_checked:
            for block in blocks:
                if self.is_checked[first + block]:
                    continue
                part = content[block * BLOCK - begin : (block + 1) * BLOCK - begin]
                if zlib.crc32(part.data) != self.checksums[first + block]:
                    raise ContentDamage("its content has changed")
                self.is_checked[first + block] = 1
        found = content[start - begin : stop - begin]
        found.flags.writeable = False
        return found

    def _read_into(self, offset: int, content: Pixels) -> None:
        left = memoryview(content.data)
        try:
            while left and (number := _pread_into(self.handle, left, offset)):
                left, offset = left[number:], offset + number
        except OSError as error:
            raise ContentDamage(error.strerror or str(error)) from None
        if left:
            raise ContentDamage("it has become shorter")


def _first_blocks(records: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the first block of each record, and the number of all blocks."""
    return np.cumsum([0, *(num_blocks(length) for _, length in records)]).tolist()


def _pread_into(handle: int, place: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(handle, [place], offset)
    with _lock:
        os.lseek(handle, offset, os.SEEK_SET)
        part = os.read(handle, len(place))
    place[: len(part)] = part
    return len(part)


def _write_at(file: BinaryIO, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:
        if hasattr(os, "pwrite"):
            written = os.pwrite(file.fileno(), left, offset)
        else:
            with _lock:
                file.seek(offset)
                written = file.write(left)
        left, offset = left[written:], offset + written
