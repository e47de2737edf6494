"""Image files that are written some rows at a time, from top to bottom, so that a result of any size never lies in memory.

OpenCV and PIL take whole arrays only. Each writer is given an open file and leaves it open.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.image_headers import PNG_START
from unet_trainer.images.tiling import Size

Content = Literal["mask", "picture"]
Palette = Sequence[tuple[int, int, int]]

MARK = "unet-trainer predict"  # among the first bytes of every file that is written here, but of .npy, which has no place for it
MARK_BYTES = 128
GREY, RGB, INDEXED = 0, 2, 3  # colour types of PNG
UP = 2  # a PNG's row is stored as the difference to the row above
CHUNK_BYTES = 2**16
# Level and strategy of zlib. Masks are runs of equal values: for those alone it is 3 times faster, and the files are no larger.
COMPRESSION = {"mask": (6, zlib.Z_RLE), "picture": (1, zlib.Z_DEFAULT_STRATEGY)}

BYTE, ASCII, SHORT, LONG, DOUBLE, LONG8 = 1, 2, 3, 4, 12, 16  # types of a TIFF's tags
TAG_FORMATS = {BYTE: "B", ASCII: "B", SHORT: "H", LONG: "I", DOUBLE: "d", LONG8: "Q"}
STRIP_BYTES = 2**18
BIGTIFF_BYTES = 2**32 - 2**25  # a TIFF that may become larger has 64-bit offsets


class RowWriter(Protocol):
    def write(self, rows: Pixels) -> None:
        """The next rows: n,W or n,W,C."""

    def finish(self) -> None: ...


class PngWriter:
    """Grey of 8 or 16 bit, RGB of 8 bit, or indices into a palette."""

    def __init__(
        self,
        file: BinaryIO,
        size: Size,
        dtype: DTypeLike,
        channels: int = 1,
        palette: Palette | None = None,
        content: Content = "mask",
    ) -> None:
        self.file = file
        self.num_bits = 8 * np.dtype(dtype).itemsize
        kind = INDEXED if palette is not None else RGB if channels == 3 else GREY
        self.above = np.zeros((1, size[1] * channels * self.num_bits // 8), np.uint8)
        level, strategy = COMPRESSION[content]
        self.packer = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, strategy)
        self.packed: list[bytes] = []
        file.write(_png_header(size, self.num_bits, kind, None if palette is None else tuple(palette)))

    def write(self, rows: Pixels) -> None:
        stored = rows.astype(f">u{self.num_bits // 8}", copy=False)
        pixels = np.ascontiguousarray(stored).view(np.uint8).reshape(len(rows), -1)
        filtered = np.empty((len(pixels), 1 + pixels.shape[1]), np.uint8)
        filtered[:, 0] = UP
        np.subtract(pixels[:1], self.above, out=filtered[:1, 1:])
        np.subtract(pixels[1:], pixels[:-1], out=filtered[1:, 1:])
        self.above = pixels[-1:].copy()
        self.packed.append(self.packer.compress(filtered))  # type: ignore[arg-type] # any buffer
        if sum(map(len, self.packed)) >= CHUNK_BYTES:
            self._flush()

    def finish(self) -> None:
        self.packed.append(self.packer.flush())
        self._flush()
        self.file.write(PNG_END)

    def _flush(self) -> None:
        self.file.write(_png_chunk(b"IDAT", b"".join(self.packed)))
        self.packed = []


def _png_chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(content, zlib.crc32(name))
    return b"".join((struct.pack(">I", len(content)), name, content, struct.pack(">I", checksum)))


PNG_END = _png_chunk(b"IEND", b"")


@lru_cache(maxsize=64)
def _png_header(size: Size, num_bits: int, kind: int, palette: tuple[tuple[int, int, int], ...] | None) -> bytes:
    """All that stands before the pixels."""
    chunks = [
        PNG_START,
        _png_chunk(b"IHDR", struct.pack(">IIBBBBB", size[1], size[0], num_bits, kind, 0, 0, 0)),
        _png_chunk(b"tEXt", b"Software\0" + MARK.encode()),
    ]
    if palette is not None:
        chunks.append(_png_chunk(b"PLTE", bytes(value for colour in palette for value in colour)))
    return b"".join(chunks)


def was_written_here(path: Path) -> bool:
    """Whether a file carries the mark; not one that is not there. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(MARK_BYTES)


class TiffTag(NamedTuple):
    tag: int
    kind: int  # a key of TAG_FORMATS
    values: Sequence[int] | Sequence[float]


class TiffWriter:
    """Grey of 8 or 16 bit, RGB of 8 bit, or indices into a palette; strips of deflate. A BigTIFF where it may become too large."""

    def __init__(
        self,
        file: BinaryIO,
        size: Size,
        dtype: DTypeLike,
        channels: int = 1,
        palette: Palette | None = None,
        tags: Sequence[TiffTag] = (),
        content: Content = "mask",
    ) -> None:
        self.file, self.size, self.dtype, self.channels = file, size, np.dtype(dtype).newbyteorder("<"), channels
        self.palette, self.tags = palette, tags
        row_bytes = size[1] * channels * self.dtype.itemsize
        self.strip_rows = min(size[0], max(1, STRIP_BYTES // row_bytes))
        self.is_big = size[0] * row_bytes > BIGTIFF_BYTES
        self.level, self.strategy = COMPRESSION[content]
        self.waiting: list[Pixels] = []
        self.num_waiting = 0
        self.offsets: list[int] = []
        self.counts: list[int] = []
        self.position = file.write((b"II+\0\x08\0\0\0" + bytes(8) if self.is_big else b"II*\0" + bytes(4)) + MARK.encode())

    def write(self, rows: Pixels) -> None:
        self.waiting.append(rows.astype(self.dtype, copy=False).reshape(len(rows), -1))
        self.num_waiting += len(rows)
        if self.num_waiting >= self.strip_rows:
            whole = np.concatenate(self.waiting)
            num_done = len(whole) - len(whole) % self.strip_rows
            for top in range(0, num_done, self.strip_rows):
                self._write_strip(whole[top : top + self.strip_rows])
            self.waiting = [whole[num_done:].copy()]
            self.num_waiting = len(self.waiting[0])

    def finish(self) -> None:
        if self.num_waiting:
            self._write_strip(np.concatenate(self.waiting))
        self._write_directory()

    def _write_strip(self, rows: Pixels) -> None:
        packer = zlib.compressobj(self.level, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, self.strategy)
        packed = packer.compress(np.ascontiguousarray(rows)) + packer.flush()  # type: ignore[arg-type] # any buffer
        self.offsets.append(self.position)
        self.counts.append(len(packed))
        self.position += self.file.write(packed)

    def _write_directory(self) -> None:
        """Behind the pixels; the start of the file then says where."""
        word, kind, width = ("Q", LONG8, 8) if self.is_big else ("I", LONG, 4)
        self.position += self.file.write(bytes(self.position % 2))
        directory = self.position
        entries = sorted(self._entries(kind))
        place = directory + (8 if self.is_big else 2) + (4 + 2 * width) * len(entries) + width
        records, values_behind = [], []
        for tag, its_kind, values in entries:
            packed = struct.pack(f"<{len(values)}{TAG_FORMATS[its_kind]}", *values)
            record = struct.pack(f"<HH{word}", tag, its_kind, len(values))
            if len(packed) <= width:
                records.append(record + packed.ljust(width, b"\0"))
            else:
                packed += b"\0" * (len(packed) % 2)
                records.append(record + struct.pack(f"<{word}", place))
                values_behind.append(packed)
                place += len(packed)
        count = struct.pack("<Q" if self.is_big else "<H", len(entries))
        self.file.write(b"".join([count, *records, bytes(width), *values_behind]))
        self.file.seek(8 if self.is_big else 4)
        self.file.write(struct.pack(f"<{word}", directory))
        self.file.seek(0, 2)

    def _entries(self, kind: int) -> list[TiffTag]:
        height, width = self.size
        photometric = 3 if self.palette is not None else 2 if self.channels == 3 else 1
        entries = [
            TiffTag(256, LONG, [width]),
            TiffTag(257, LONG, [height]),
            TiffTag(258, SHORT, [8 * self.dtype.itemsize] * self.channels),
            TiffTag(259, SHORT, [8]),  # deflate
            TiffTag(262, SHORT, [photometric]),
            TiffTag(273, kind, self.offsets),
            TiffTag(277, SHORT, [self.channels]),
            TiffTag(278, LONG, [self.strip_rows]),
            TiffTag(279, kind, self.counts),
            TiffTag(284, SHORT, [1]),  # channels interleaved
            TiffTag(305, ASCII, [*MARK.encode(), 0]),  # software
            *self.tags,
        ]
        if self.palette is not None:
            colours = np.zeros((256, 3), np.uint16)
            colours[: len(self.palette)] = np.array(self.palette, np.uint16) * 257
            entries.append(TiffTag(320, SHORT, colours.T.ravel().tolist()))
        return entries


class NpyWriter:
    """An array of H,W or H,W,C for numpy.load."""

    def __init__(self, file: BinaryIO, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.file, self.dtype = file, np.dtype(dtype).newbyteorder("<")
        header: dict[str, Any] = {"descr": self.dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)

    def write(self, rows: Pixels) -> None:
        self.file.write(np.ascontiguousarray(rows.astype(self.dtype, copy=False)).data)

    def finish(self) -> None:
        """Nothing follows the pixels."""
