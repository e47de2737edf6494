"""Image files that are written some rows at a time, from top to bottom, so that a result of any size never lies in
memory: PIL would take the whole picture. Each writer leaves its file open."""

import math
import struct
import tempfile
import zlib
from collections.abc import Sequence
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
MARK = "unet-trainer predict"
MARK_BYTES = 1024
MARKED = (".png", ".tif", ".json")  # files that carry it
PROBABILITIES = "probabilities"  # folder of predict's arrays
GREY, RGB, INDEXED = 0, 2, 3  # colour types of PNG
UP = 2  # a PNG's row is stored as the difference to the row above
# Masks are runs of equal values: for those alone zlib is 3 times faster, and the files are no larger.
PACKERS = {"mask": partial(zlib.compressobj, 6, strategy=zlib.Z_RLE), "picture": partial(zlib.compressobj, 1)}

STRIP_BYTES = 2**18
BIGTIFF_BYTES = 2**32 - 2**25  # a TIFF that may become larger has 64-bit offsets
MEMORY_BYTES = 2**30  # of rows that wait in memory


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
        palette: Palette = None,
        content: Content = "mask",
    ) -> None:
        self.file = file
        self.num_bits = 8 * np.dtype(dtype).itemsize
        kind = INDEXED if palette is not None else RGB if channels == 3 else GREY
        self.above = np.zeros((1, size[1] * channels * self.num_bits // 8), np.uint8)
        self.packer = PACKERS[content]()
        header = struct.pack(">IIBBBBB", size[1], size[0], self.num_bits, kind, 0, 0, 0)
        colours = b"" if palette is None else _png_chunk(b"PLTE", b"".join(map(bytes, palette)))
        mark = _png_chunk(b"tEXt", b"Software\0" + MARK.encode())
        file.write(PNG_START + _png_chunk(b"IHDR", header) + mark + colours)

    def write(self, rows: Pixels) -> None:
        stored = rows.astype(f">u{self.num_bits // 8}", copy=False)
        pixels = np.ascontiguousarray(stored).view(np.uint8).reshape(len(rows), -1)
        filtered = np.empty((pixels.shape[0], 1 + pixels.shape[1]), np.uint8)
        filtered[:, 0] = UP
        np.subtract(pixels[:1], self.above, out=filtered[:1, 1:])
        np.subtract(pixels[1:], pixels[:-1], out=filtered[1:, 1:])
        self.above = pixels[-1:].copy()
        if packed := self.packer.compress(filtered):  # type: ignore[arg-type] # any buffer
            self.file.write(_png_chunk(b"IDAT", packed))

    def finish(self) -> None:
        self.file.write(_png_chunk(b"IDAT", self.packer.flush()) + _png_chunk(b"IEND", b""))


def _png_chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def was_written_here(path: Path) -> bool:
    """Whether a file carries the mark; not one that is not there. Raises OSError."""
    if not path.is_file():
        return False
    with open_file(path) as file:
        return MARK.encode() in file.read(MARK_BYTES)


def is_result(path: Path) -> bool:
    """Whether predict wrote a file; False for one that cannot be read. Of arrays, the mask has the mark."""
    try:
        if path.suffix == ".npy":
            folder = next((above for above in path.parents if above.name == PROBABILITIES), None)
            return folder is not None and was_written_here(folder.parent / path.relative_to(folder).with_suffix(".png"))
        return path.suffix.lower() in MARKED and was_written_here(path)
    except OSError:
        return False


class TiffWriter:
    """Grey of 8 or 16 bit, RGB of 8 bit, or indices into a palette, in strips of deflate. tifffile writes whole arrays:
    the rows wait in memory, those of large files in a temporary file beside the result."""

    def __init__(
        self,
        file: BinaryIO,
        size: Size,
        dtype: DTypeLike,
        channels: int = 1,
        palette: Palette = None,
        tags: Sequence[Any] = (),
    ) -> None:
        """`tags`: of a GeoTIFF, as a Georeference holds them."""
        self.file, self.palette, self.tags, self.num_rows = file, palette, tags, 0
        shape = size if channels == 1 else (*size, channels)
        if math.prod(shape) * np.dtype(dtype).itemsize <= MEMORY_BYTES:
            self.pixels: Pixels = np.empty(shape, dtype)
        else:
            with tempfile.TemporaryFile(dir=Path(file.name).parent) as rows:  # stays as long as it is mapped
                self.pixels = np.memmap(rows, dtype, "w+", shape=shape)

    def write(self, rows: Pixels) -> None:
        self.pixels[self.num_rows : self.num_rows + len(rows)] = rows
        self.num_rows += len(rows)

    def finish(self) -> None:
        import tifffile

        colours = np.zeros((3, 256), np.uint16)
        if self.palette is not None:
            colours[:, : len(self.palette)] = np.array(self.palette, np.uint16).T * 257
        kind = "palette" if self.palette is not None else "rgb" if self.pixels.ndim == 3 else "minisblack"
        with tifffile.TiffWriter(self.file, bigtiff=self.pixels.nbytes > BIGTIFF_BYTES) as writer:
            writer.write(
                self.pixels,
                photometric=kind,
                colormap=colours if self.palette is not None else None,
                compression="zlib",
                rowsperstrip=min(len(self.pixels), max(1, STRIP_BYTES // self.pixels[:1].nbytes)),
                description=MARK,  # behind the directory, before the table of strips
                software=MARK,
                metadata=None,
                extratags=self.tags,
            )


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
