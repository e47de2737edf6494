"""Images that are read in parts, so that one of many gigabytes needs no more memory than the part that is looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import cv2
import numpy as np

from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import ReadError, open_file, read_bytes
from unet_trainer.images.image_files import Pixels, map_npy
from unet_trainer.images.image_headers import NPY_START
from unet_trainer.images.image_spec import Decoded, ImageSpec
from unet_trainer.images.tiff_files import TIFF_STARTS, TiffImage
from unet_trainer.images.tiling import Size, fit_image, resize_image

LARGE_PIXELS = 2**25  # images of more pixels are not decoded ahead, and are read by blocks where their format allows it
HEADER_BYTES = 2**20  # that tell the size of an image
ROWS_AT_ONCE = 256  # that are averaged at a time


class ImageReader:
    """An image in memory (H,W,C), an array mapped into memory, or a TIFF file that is read by blocks."""

    def __init__(self, source: Pixels | TiffImage, spec: ImageSpec | None = None) -> None:
        """`spec` by which missing data is filled; None: it is filled already."""
        self.source, self.spec = source, spec
        self.size: Size = source.shape[0], source.shape[1]
        self.has_missing = False  # some of what was read was missing, and was filled

    @property
    def in_memory(self) -> Pixels | None:
        """The pixels, unless they are read from a TIFF file."""
        return None if isinstance(self.source, TiffImage) else self.source

    def read(self, rows: slice, columns: slice) -> Pixels:
        """H,W,C of a part, in the file's own depth. Raises ReadError."""
        part = np.ascontiguousarray(self.source[rows, columns])
        nodata = self.source.nodata if isinstance(self.source, TiffImage) else None
        filled = part if self.spec is None else self.spec.fill(part, nodata)
        self.has_missing |= filled is not part
        return filled

    def read_resized(self, size: Size) -> Pixels:
        """H,W,C of the whole image, at about this size or larger, pixels averaged."""
        if isinstance(self.source, np.memmap | TiffImage):
            return average_rows(self.read, self.size, size)
        return fit_image(self.read(slice(0, self.size[0]), slice(0, self.size[1])), size)


@contextlib.contextmanager
def open_reader(path: Path, spec: ImageSpec) -> Iterator[ImageReader]:
    """TIFF files by blocks, arrays mapped into memory, all others decoded whole. `spec` of the model: an alpha channel beyond its
    channels is dropped, missing data filled. Raises ReadError."""
    with open_file(path) as file:
        start = file.read(8)
        if start.startswith(TIFF_STARTS):
            with contextlib.closing(TiffImage(file, spec.channels)) as tiff:
                yield ImageReader(tiff, spec)
            return
    if start.startswith(NPY_START):
        yield ImageReader(map_npy(path), spec)
    else:
        yield ImageReader(spec.decode(read_bytes(path)).pixels)


def read_small(path: Path, spec: ImageSpec, min_side: int | None = None) -> Decoded | None:
    """An image, or None, with nothing decoded, if it is large. `spec` as in open_reader.

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
    return spec.decode(data, min_side)


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
        height, width = TiffImage(file).stored_size
    else:
        height, width = headers.stored_size(start) or headers.picture_size(file) or (0, 0)
    return height * width
