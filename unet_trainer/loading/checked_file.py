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

_lock = threading.Lock()  # where there is no pread


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
        stored = self._read_at(end, CHECKSUM_BYTES * self.firsts[-1] + TAIL.size)
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
        blocks = range(start // BLOCK, num_blocks(stop))
        first = self.firsts[index]
        if self.is_checked[first + blocks.start : first + blocks.stop].all():
            return np.frombuffer(self._read_at(offset + start, stop - start), np.uint8)
        begin = blocks.start * BLOCK
        content = memoryview(self._read_at(offset + begin, min(blocks.stop * BLOCK, length) - begin))
        for block in blocks:
            part = content[block * BLOCK - begin : (block + 1) * BLOCK - begin]
            if zlib.crc32(part) != self.checksums[first + block]:
                raise ContentDamage("its content has changed")
            self.is_checked[first + block] = 1
        return np.frombuffer(content[start - begin : stop - begin], np.uint8)

    def _read_at(self, offset: int, length: int) -> bytes:
        parts = []
        try:
            while length and (part := _pread(self.handle, length, offset)):
                parts.append(part)
                offset, length = offset + len(part), length - len(part)
        except OSError as error:
            raise ContentDamage(error.strerror or str(error)) from None
        if length:
            raise ContentDamage("it has become shorter")
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _first_blocks(records: Sequence[tuple[int, int]]) -> list[int]:
    """The number of the first block of each record, and the number of all blocks."""
    return np.cumsum([0, *(num_blocks(length) for _, length in records)]).tolist()


def _pread(handle: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, length, offset)
    with _lock:
        os.lseek(handle, offset, os.SEEK_SET)
        return os.read(handle, length)


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
