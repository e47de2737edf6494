"""Image files that are written some rows at a time, from top to bottom, so that a result of any size never lies in
memory: PIL would take the whole picture. Each writer leaves its file open."""

import contextlib
import math
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike

from unet_trainer.images.image_decoding import PNG_START, Pixels
from unet_trainer.images.tiling import Size
from unet_trainer.system.input_files import open_file

Content = Literal["mask", "picture"]
Palette = Sequence[tuple[int, int, int]] | None

# among the first bytes of every file that is written here, but of .npy, which has no place for it
MARK, MARK_BYTES = "unet-trainer predict", 1024
MARKED = (".png", ".tif", ".json")  # files that carry it
PROBABILITIES = "probabilities"  # folder of predict's arrays
# Masks are runs of equal values: for those alone zlib is 3 times faster, and the files are no larger.
PACKERS = {"mask": partial(zlib.compressobj, 6, strategy=zlib.Z_RLE), "picture": partial(zlib.compressobj, 1)}
MEMORY_BYTES = 2**30  # of the rows of a TIFF that wait in memory
BIGTIFF_BYTES = 2**32 - 2**25  # a TIFF that may become larger has 64-bit offsets


class RowWriter(Protocol):
    def write(self, rows: Pixels) -> None:
        """The next rows: n,W or n,W,C."""

    def finish(self) -> None: ...


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


@dataclass
class PngWriter:
    """Grey of 8 or 16 bit, RGB of 8 bit, or indices into a palette."""

    file: BinaryIO
    size: Size
    dtype: DTypeLike
    channels: int = 1
    palette: Palette = None
    content: Content = "mask"

    def __post_init__(self) -> None:
        self.depth, self.packer = np.dtype(self.dtype).newbyteorder(">"), PACKERS[self.content]()
        self.above = np.zeros((1, self.size[1] * self.channels * self.depth.itemsize), np.uint8)
        kind = 3 if self.palette is not None else 2 if self.channels == 3 else 0  # the colour type
        header = struct.pack(">IIBBBBB", self.size[1], self.size[0], 8 * self.depth.itemsize, kind, 0, 0, 0)
        self.file.write(PNG_START + _png_chunk(b"IHDR", header) + _png_chunk(b"tEXt", b"Software\0" + MARK.encode()))
        if self.palette is not None:
            self.file.write(_png_chunk(b"PLTE", b"".join(map(bytes, self.palette))))

    def write(self, rows: Pixels) -> None:
        stored = np.ascontiguousarray(rows.astype(self.depth, copy=False)).view(np.uint8).reshape(len(rows), -1)
        filtered = np.full((len(rows), 1 + stored.shape[1]), 2, np.uint8)  # a row is the difference to the one above
        np.subtract(stored[:1], self.above, out=filtered[:1, 1:])
        np.subtract(stored[1:], stored[:-1], out=filtered[1:, 1:])
        self.above = stored[-1:].copy()
        if packed := self.packer.compress(filtered):  # type: ignore[arg-type] # any buffer
            self.file.write(_png_chunk(b"IDAT", packed))

    def finish(self) -> None:
        self.file.write(_png_chunk(b"IDAT", self.packer.flush()) + _png_chunk(b"IEND", b""))


def _png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


@dataclass
class TiffWriter:
    """As PngWriter, in strips of deflate, with the tags of a GeoTIFF as a Georeference holds them. tifffile writes
    whole arrays: the rows wait in memory, those of large files in a temporary file beside the result."""

    file: BinaryIO
    size: Size
    dtype: DTypeLike
    channels: int = 1
    palette: Palette = None
    tags: Sequence[Any] = ()

    def __post_init__(self) -> None:
        self.num_rows, shape = 0, self.size if self.channels == 1 else (*self.size, self.channels)
        if math.prod(shape) * np.dtype(self.dtype).itemsize <= MEMORY_BYTES:
            self.pixels: Pixels = np.empty(shape, self.dtype)
        else:
            with tempfile.TemporaryFile(dir=Path(self.file.name).parent) as rows:  # stays as long as it is mapped
                self.pixels = np.memmap(rows, self.dtype, "w+", shape=shape)

    def write(self, rows: Pixels) -> None:
        self.pixels[self.num_rows : self.num_rows + len(rows)] = rows
        self.num_rows += len(rows)

    def finish(self) -> None:
        import tifffile

        options: dict[str, Any] = {"photometric": "rgb" if self.channels == 3 else "minisblack"}
        if self.palette is not None:
            table = np.pad(np.array(self.palette, np.uint16) * 257, ((0, 256 - len(self.palette)), (0, 0)))
            options = {"photometric": "palette", "colormap": table.T}
        is_big = self.pixels.nbytes > BIGTIFF_BYTES
        options |= {"description": MARK, "software": MARK, "metadata": None, "extratags": self.tags}
        tifffile.imwrite(self.file, self.pixels, bigtiff=is_big, compression="zlib", **options)


def is_result(path: Path) -> bool:
    """Whether predict wrote a file; False for one that cannot be read. Of arrays, the mask has the mark."""
    if path.suffix == ".npy":
        folder = next((above for above in path.parents if above.name == PROBABILITIES), None)
        return folder is not None and is_result(folder.parent / path.relative_to(folder).with_suffix(".png"))
    with contextlib.suppress(OSError):
        if path.suffix.lower() in MARKED and path.is_file():
            with open_file(path) as file:
                return MARK.encode() in file.read(MARK_BYTES)
    return False
