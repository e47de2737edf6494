"""Images that are read in parts, so that one of many gigabytes needs no more memory than the part that is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import cv2
import numpy as np

from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import ReadError, open_file, read_bytes
from unet_trainer.images.image_files import Pixels, check_tiff, decode_image, decode_image_and_size, map_npy
from unet_trainer.images.image_headers import NPY_START, TIFF_STARTS
from unet_trainer.images.tiff_blocks import TiffBlocks
from unet_trainer.images.tiff_structure import HEIGHT, WIDTH
from unet_trainer.images.tiling import Size, fit_image, resize_image

LARGE_PIXELS = 2**25  # images of more pixels are not decoded ahead, and are read by blocks where their format allows it
HEADER_BYTES = 2**20  # that tell the size of an image
ROWS_AT_ONCE = 256  # that are averaged at a time
TRANSPOSED = (5, 6, 7, 8)  # orientations of which rows and columns are exchanged


class ImageReader(Protocol):
    @property
    def size(self) -> Size: ...

    def read(self, rows: slice, columns: slice) -> Pixels:
        """H,W,C of a part, in the file's own depth. Raises ReadError."""

    def read_resized(self, size: Size) -> Pixels:
        """H,W,C of the whole image, at about this size or larger, pixels averaged."""


@dataclass(frozen=True)
class ArrayReader:
    """An image that is in memory, or a file that is mapped into it."""

    pixels: Pixels  # H,W,C

    @property
    def size(self) -> Size:
        return self.pixels.shape[0], self.pixels.shape[1]

    def read(self, rows: slice, columns: slice) -> Pixels:
        return np.ascontiguousarray(self.pixels[rows, columns])

    def read_resized(self, size: Size) -> Pixels:
        if isinstance(self.pixels, np.memmap):
            return average_rows(self.read, self.size, size)
        return fit_image(self.pixels, size)


@dataclass(frozen=True)
class BlockReader:
    """A TIFF file that is read block by block, turned as its orientation says."""

    blocks: TiffBlocks

    @property
    def size(self) -> Size:
        height, width = self.blocks.size
        return (width, height) if self.blocks.orientation in TRANSPOSED else (height, width)

    def read(self, rows: slice, columns: slice) -> Pixels:
        if self.blocks.orientation == 1:
            return self.blocks.read(rows, columns)
        return np.ascontiguousarray(self._read_turned(rows, columns))

    def _read_turned(self, rows: slice, columns: slice) -> Pixels:
        """Of the image as displayed, which is the stored one flipped and, for some orientations, transposed before."""
        orientation, (height, width) = self.blocks.orientation, self.size
        if flips_rows := orientation in (3, 4, 7, 8):
            rows = slice(height - rows.stop, height - rows.start)
        if flips_columns := orientation in (2, 3, 6, 7):
            columns = slice(width - columns.stop, width - columns.start)
        is_transposed = orientation in TRANSPOSED
        pixels = self.blocks.read(columns, rows).swapaxes(0, 1) if is_transposed else self.blocks.read(rows, columns)
        pixels = pixels[::-1] if flips_rows else pixels
        return pixels[:, ::-1] if flips_columns else pixels

    def read_resized(self, size: Size) -> Pixels:
        return average_rows(self.read, self.size, size)


@contextlib.contextmanager
def open_reader(path: Path, channels: int | None = None) -> Iterator[ImageReader]:
    """TIFF files by blocks, arrays mapped into memory, all others decoded whole. `channels` of the model, if known: an alpha
    channel beyond them is dropped. Raises ReadError."""
    with open_file(path) as file:
        start = file.read(8)
    if start.startswith(NPY_START):
        yield ArrayReader(map_npy(path))
    elif start.startswith(TIFF_STARTS):
        with TiffBlocks(path, channels) as blocks:
            yield BlockReader(blocks)
    else:
        yield ArrayReader(decode_image(read_bytes(path)))


def read_small(path: Path, channels: int, min_side: int | None = None) -> tuple[Pixels, Size] | None:
    """H,W,C and the size of an image, or None, with nothing decoded, if it is large. `channels` as in open_reader.

    A JPEG may be decoded at 1/2 to 1/8 while both sides stay at least `min_side`; the size is that of the whole. Raises ReadError.
    """
    with open_file(path) as file:
        data = file.read(HEADER_BYTES)
        if not data:
            raise ReadError("the file is empty")
        if _num_pixels(path, file, data) > LARGE_PIXELS:
            return None
        file.seek(len(data))
        data += file.read()
    if data.startswith(TIFF_STARTS):
        return _read_small_tiff(path, data, channels)
    return decode_image_and_size(data, min_side)


def _read_small_tiff(path: Path, data: bytes, channels: int) -> tuple[Pixels, Size]:
    """By blocks where decode_image cannot, or does not know that a channel is alpha."""
    try:
        image = decode_image(data)
    except ReadError as error:
        try:
            with TiffBlocks(path, channels) as blocks:
                image = blocks.read(slice(0, blocks.size[0]), slice(0, blocks.size[1]))
        except ReadError:
            raise error from None
    if image.shape[2] == channels + 1:
        with TiffBlocks(path, channels) as blocks:
            image = image[:, :, :channels] if blocks.drops_alpha else image
    return image, (image.shape[0], image.shape[1])


def average_rows(read: Callable[[slice, slice], Pixels], size: Size, new_size: Size) -> Pixels:
    """H,W,C of an image that is read some rows at a time, at the new size, each pixel the mean of the area that it covers.

    A side that would not shrink stays as it is. Equal to fit_image but for rounding.
    """
    height, width = size
    new_height, new_width = min(height, new_size[0]), min(width, new_size[1])
    corner = read(slice(0, 1), slice(0, 1))
    total = np.zeros((new_height, new_width, corner.shape[2]), np.float32)
    for top in range(0, height, ROWS_AT_ONCE):
        bottom = min(top + ROWS_AT_ONCE, height)
        rows = read(slice(top, bottom), slice(0, width))
        narrow = resize_image(rows.astype(np.float32), (new_width, bottom - top), cv2.INTER_AREA)
        # New row i covers the rows from i · height / new_height on; shares in whole numbers, so that no rounding adds up.
        first, last = top * new_height // height, -(-bottom * new_height // height)
        starts = np.arange(first, last)[:, None] * height
        places = np.arange(top, bottom)[None] * new_height
        shares = (np.minimum(starts + height, places + new_height) - np.maximum(starts, places)).clip(0) / height
        total[first:last] += np.tensordot(shares.astype(np.float32), narrow, 1)
    if corner.dtype.kind in "ui":
        limits = np.iinfo(corner.dtype)  # float32 rounds the highest of 32 bits up; such a cast differs between processors
        total = total.astype(np.float64).round().clip(limits.min, limits.max)
    return total.astype(corner.dtype)


def _num_pixels(path: Path, file: BinaryIO, start: bytes) -> int:
    """From the header; 0 where it does not say, and decoding will tell why."""
    if start.startswith(NPY_START):
        array = map_npy(path)
        return array.shape[0] * array.shape[1] if isinstance(array, np.memmap) else 0
    if start.startswith(TIFF_STARTS):
        first = check_tiff(file).pages[0]
        return first.number(HEIGHT, 0) * first.number(WIDTH, 0)
    height, width = headers.stored_size(start) or headers.size_in_file(file) or (0, 0)
    return height * width
