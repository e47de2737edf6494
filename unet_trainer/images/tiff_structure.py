"""The structure of a TIFF or BigTIFF file: its directories and their tags. The one place that walks from directory to directory.

Nothing is decoded here, and a hostile file costs no more than an honest one: the walk has a bound and never enters a directory
twice, numbers are read only where the file has them. Everything else that opens a TIFF (OpenCV, PIL, tifffile) is given a file
whose structure was read here first.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
BIGTIFF_VERSIONS = (b"+\0", b"\0+")

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, SAMPLES, PLANAR = 256, 257, 258, 259, 262, 277, 284
ORIENTATION, EXTRA_SAMPLES, SUB_DIRECTORIES = 274, 338, 330
# Tags that say where the pixels are and how they are stored. One of these without a value is damage; any other may be empty.
STRUCTURAL = frozenset(
    (254, 255, WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, 266, 273, ORIENTATION, SAMPLES, 278, 279, PLANAR, 317, 320, 322, 323,
     324, 325, SUB_DIRECTORIES, EXTRA_SAMPLES, 339)
)  # fmt: skip
SHORT = 3
INTEGERS = {1: "B", SHORT: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}  # type of a tag → struct format
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # bytes of a value

MAX_DIRECTORIES = 100_000
MAX_DEPTH = 4  # of directories inside others
MAX_VALUES = 64  # of a tag; longer ones are tables, of which only the length is looked at
MAX_TAGS = 4096  # of a directory; real ones have tens


class TiffDamage(ValueError):
    """The file is no whole TIFF; the message says where."""


class Tag(NamedTuple):
    kind: int
    length: int
    values: tuple[int, ...]  # whole numbers; empty for other types and for tables


@dataclass(frozen=True)
class Directory:
    """A page, or a smaller copy of one."""

    offset: int
    tags: Mapping[int, Tag]

    def number(self, tag: int, default: int) -> int:
        found = self.tags.get(tag)
        return found.values[0] if found is not None and found.values else default

    @property
    def num_values(self) -> int:
        """Pixels times channels."""
        return self.number(WIDTH, 0) * self.number(HEIGHT, 0) * max(1, self.number(SAMPLES, 1))

    @property
    def value_bytes(self) -> int:
        return -(-max(self.tags[BITS].values or (1,)) // 8) if BITS in self.tags else 1


class TiffStructure(NamedTuple):
    pages: Sequence[Directory]  # those that follow each other
    inner: Sequence[Directory]  # those inside of pages: smaller copies of a pyramid
    is_big: bool

    @property
    def num_values(self) -> int:
        """Of all pages: what a reader of the whole file decodes."""
        return sum(page.num_values for page in self.pages)

    @property
    def num_bytes(self) -> int:
        return sum(page.num_values * page.value_bytes for page in self.pages)


def read_structure(data: bytes) -> TiffStructure:
    """Raises TiffDamage."""
    return _Walk(io.BytesIO(data), len(data)).structure()


def read_file_structure(file: BinaryIO) -> TiffStructure:
    """Of a file that is too large to be read whole; its position is moved. Raises TiffDamage and OSError."""
    return _Walk(file, file.seek(0, os.SEEK_END)).structure()


class _Walk:
    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size
        start = self._bytes(0, 4)
        if start not in TIFF_STARTS:
            raise TiffDamage("it does not begin as a TIFF")
        self.order = "<" if start[:2] == b"II" else ">"
        self.is_big = start[2:] in BIGTIFF_VERSIONS
        self.pointer, self.count, self.entry_bytes = ("Q", "Q", 20) if self.is_big else ("I", "H", 12)
        self.pointer_bytes, self.count_bytes = struct.calcsize(self.pointer), struct.calcsize(f"<{self.count}")
        self.seen: set[int] = set()

    def structure(self) -> TiffStructure:
        (first,) = self._numbers(self.pointer, 1, 8 if self.is_big else 4)
        if first == 0:
            raise TiffDamage("it has no directory")
        pages = self._chain(first)
        inner: list[Directory] = []
        level = pages
        for _ in range(MAX_DEPTH):
            level = [found for page in level for offset in self._inner_offsets(page) for found in self._chain(offset)]
            inner += level
        if any(SUB_DIRECTORIES in directory.tags for directory in level):
            raise TiffDamage(f"directories lie inside of directories more than {MAX_DEPTH} deep")
        return TiffStructure(pages, inner, self.is_big)

    def _chain(self, offset: int) -> list[Directory]:
        found = []
        while offset:
            if offset in self.seen:
                raise TiffDamage("its directories point back at each other")
            if len(self.seen) == MAX_DIRECTORIES:
                raise TiffDamage(f"it has more than {MAX_DIRECTORIES} directories")
            self.seen.add(offset)
            directory, offset = self._directory(offset)
            found.append(directory)
        return found

    def _inner_offsets(self, page: Directory) -> tuple[int, ...]:
        tag = page.tags.get(SUB_DIRECTORIES)
        if tag is None:
            return ()
        if not tag.values:
            raise TiffDamage("its table of inner directories cannot be read")
        return tag.values

    def _directory(self, offset: int) -> tuple[Directory, int]:
        """The directory, and the offset of the next one; 0: there is none."""
        (num_tags,) = self._numbers(self.count, 1, offset)
        if num_tags > MAX_TAGS:
            raise TiffDamage(f"a directory of {num_tags} tags")
        place = offset + self.count_bytes
        entries = self._bytes(place, num_tags * self.entry_bytes)
        tags: dict[int, Tag] = {}
        for start in range(0, len(entries), self.entry_bytes):
            number, kind, count = struct.unpack_from(f"{self.order}HH{self.pointer}", entries, start)
            if number in STRUCTURAL and number not in tags:
                tags[number] = self._tag(number, kind, count, entries[start + 4 + self.pointer_bytes : start + self.entry_bytes])
        (following,) = self._numbers(self.pointer, 1, place + len(entries))
        return Directory(offset, tags), following

    def _tag(self, number: int, kind: int, count: int, inline: bytes) -> Tag:
        if count == 0:
            raise TiffDamage(f"tag {number} has no value")
        num_bytes = SIZES.get(kind, 0) * count
        if num_bytes > self.size:
            raise TiffDamage(f"tag {number} is longer than the file")
        if kind not in INTEGERS or count > MAX_VALUES:
            return Tag(kind, count, ())
        if num_bytes <= len(inline):
            return Tag(kind, count, struct.unpack_from(f"{self.order}{count}{INTEGERS[kind]}", inline))
        (place,) = struct.unpack_from(f"{self.order}{self.pointer}", inline)
        return Tag(kind, count, self._numbers(INTEGERS[kind], count, place))

    def _numbers(self, kind: str, count: int, offset: int) -> tuple[int, ...]:
        layout = f"{self.order}{count}{kind}"
        return struct.unpack(layout, self._bytes(offset, struct.calcsize(layout)))

    def _bytes(self, offset: int, length: int) -> bytes:
        if offset + length > self.size:
            raise TiffDamage("the file is cut off")
        self.file.seek(offset)
        found = self.file.read(length)
        if len(found) < length:  # it has become shorter meanwhile
            raise TiffDamage("the file is cut off")
        return found
