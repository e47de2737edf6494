"""TIFF, BigTIFF and GeoTIFF files through tifffile: decoded, or mapped into memory, and where on Earth they lie."""

import contextlib
import io
import math
import shutil
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.file_bytes import ReadError, open_file
from unet_trainer.system.console import first_line

Pixels = NDArray[Any]  # OpenCV's type stubs know no dtype
Affine = tuple[float, float, float, float, float, float]

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
COLOUR_CHANNELS = 3  # so many values count as one pixel
MAX_CHANNELS = 64  # an axis of an array that is longer holds rows or columns
BOMB_PIXELS = 100_000_000  # smaller images are decoded whatever their file size
BOMB_RATIO = 200  # pixels per byte of file; more is a decompression bomb
NO_MEMORY = "there is not enough memory to decode it"

ORIENTATION, NODATA = 274, 42113  # tags of EXIF and of GDAL
# Orientations: those other than upright; those that swap height and width; those that are then flipped.
TURNS, SIDEWAYS, ROWS_FLIPPED, COLUMNS_FLIPPED = range(2, 9), range(5, 9), (3, 4, 7, 8), (2, 3, 6, 7)
WHITE_IS_0, RGB, PALETTE, YCBCR = 0, 2, 3, 6  # values of PhotometricInterpretation
ALPHAS, JPEGS = (1, 2), (6, 7)  # values of ExtraSamples, with others a sample is a channel; and of Compression
PIXEL_SCALE, TIE_POINTS, TRANSFORMATION = 33550, 33922, 34264  # tags of a GeoTIFF
GEO_TAGS = (PIXEL_SCALE, TIE_POINTS, TRANSFORMATION, 34735, 34736, 34737)  # and its keys, with what they point to
USER_DEFINED = 32767  # a key of a coordinate reference system without a number


class TiffImage:
    """The first series of a TIFF file, at full size. Channels are samples, planes or pages. Raises ReadError."""

    def __init__(self, file: BinaryIO) -> None:
        with read_errors():
            self.series: Any = _open(file).series[0]
            self.num_bytes = file.seek(0, io.SEEK_END)
            self.pages, page = list(self.series.pages), self.series.keyframe
            samples, is_single = int(page.samplesperpixel), len(self.pages) == 1
            is_colour = samples == 3 and page.photometric in (RGB, YCBCR) and page.planarconfig == 1
            is_plain = is_single and (samples == 1 or is_colour)  # a tag of one page or sample is not of all channels
            self.stored_size = int(page.imagelength), int(page.imagewidth)
            self.num_channels = samples * len(self.pages)
            self.orientation = int(page.tags.valueof(ORIENTATION, 1)) if is_plain else 1
            self.is_lossy = is_single and page.compression in JPEGS
            extra: Any = page.extrasamples if is_single and samples > 1 else ()
            self.has_alpha = len(extra) > 0 and int(extra[-1]) in ALPHAS
            self.is_ycbcr = is_plain and page.photometric == YCBCR and page.compression not in JPEGS
            self.is_white_0 = is_plain and samples == 1 and page.photometric == WHITE_IS_0
            has_palette = is_plain and page.photometric == PALETTE and page.colormap is not None
            self.palette: Pixels | None = (page.colormap.T >> 8).astype(np.uint8) if has_palette else None
            self.nodata: float | None = None  # the value of pixels without data
            with contextlib.suppress(KeyError, ValueError, TypeError):
                value = float(page.tags[NODATA].value)
                self.nodata = value if math.isfinite(value) else None

    def refuse_bomb(self, expected: tuple[int, int] | None = None) -> None:
        """Raises ReadError for a small file of a huge image, in all pages and channels, unless its size is expected."""
        (height, width), num_values = self.stored_size, math.prod(int(side) for side in self.series.shape)
        num_pixels = max(height * width, num_values // COLOUR_CHANNELS)
        if num_pixels > height * width or expected != self.stored_size:
            pages = f" on {len(self.pages)} pages" if len(self.pages) > 1 else ""
            refuse_bomb(self.num_bytes, num_pixels, f"{width}×{height} pixels{pages}")

    def read_all(self, channels: int | None = None, as_ids: bool = False) -> Pixels:
        """H,W,C of the whole image. `as_ids` as in `as_shown`."""
        with read_errors():
            return np.ascontiguousarray(self.as_shown(self.stored(), channels, as_ids))

    def stored(self, is_mapped: bool = False) -> Pixels:
        """H,W,C as stored, but upright. Mapped into memory: from the file if it is not compressed, else decompressed
        into a temporary one."""
        with read_errors():
            for page in filter(None, self.pages):
                for offset, num_bytes in zip(page.dataoffsets, page.databytecounts, strict=True):
                    if min(offset, num_bytes) < 0:  # the tag may have a type with a sign
                        raise ReadError(f"a block of {num_bytes} bytes at {offset}")
                    if offset + num_bytes > self.num_bytes:
                        raise ReadError("the file is cut off")
            if is_mapped and self.series.dataoffset is None:
                room, folder = shutil.disk_usage(tempfile.gettempdir()).free, tempfile.gettempdir()
                if self.series.nbytes > room:  # the system would end the process when the disk is full
                    need = f"{self.series.nbytes / 1e9:.3g} GB decompressed, and {folder} has {room / 1e9:.3g}"
                    raise ReadError(f"{need}; set TMPDIR to a folder with more room")
            array = self.series.asarray(out="memmap") if is_mapped else self.series.asarray(maxworkers=1)
            if array.size == 0 or array.dtype.kind not in "buif":
                raise ReadError("not an image that can be decoded")
            planes, _, height, width, samples = self.series.keyframe.shaped  # of planes and samples, one is 1
            is_one = len(self.pages) == 1 and array.size == planes * height * width * samples
            if is_one and self.num_channels <= MAX_CHANNELS:
                array = array.reshape(planes, height, width, samples)
                array = array[0] if planes == 1 else np.moveaxis(array[..., 0], 0, 2)
            else:
                array = with_channels_last(array)
            return upright(array, self.orientation)

    def as_shown(self, stored: Pixels, channels: int | None, as_ids: bool = False) -> Pixels:
        """H,W,C of a part. Alpha is dropped unless it is one of the `channels` that are wanted. `as_ids`: without the
        colours of a palette, and where white is 0."""
        stored = stored.astype(stored.dtype.newbyteorder("="), copy=False)
        if self.has_alpha and channels != self.num_channels:
            stored = stored[:, :, :-1]
        if stored.dtype == np.bool_:
            return np.where(stored ^ self.is_white_0, np.uint8(255), np.uint8(0))
        if self.is_ycbcr:  # JPEG is decoded to RGB
            return cv2.cvtColor(np.ascontiguousarray(stored[:, :, [0, 2, 1]]), cv2.COLOR_YCrCb2RGB)
        if as_ids:
            return stored
        if self.palette is not None:
            return self.palette[stored[:, :, 0]]
        return 255 - stored if self.is_white_0 and stored.dtype == np.uint8 else stored


def refuse_bomb(num_bytes: int, num_pixels: int, what: str) -> None:
    """Raises ReadError for a small file of a huge image."""
    if num_pixels > max(BOMB_PIXELS, num_bytes * BOMB_RATIO):
        raise ReadError(f"{num_bytes / 1e6:.2g} MB that decompress to {what}: a decompression bomb")


@contextlib.contextmanager
def read_errors() -> Iterator[None]:
    """Whatever a broken file raises inside becomes a ReadError."""
    try:
        yield
    except ReadError:
        raise
    except MemoryError:
        raise ReadError(NO_MEMORY) from None
    except Exception as error:
        what = f"cannot be decoded ({getattr(error, 'err', '') or first_line(error)})"  # err: OpenCV's, in short
        raise ReadError(getattr(error, "strerror", None) or what) from None


@contextlib.contextmanager
def open_pages(path: Path) -> Iterator[Any]:
    """A TiffFile of tifffile, to look at its pages. Raises ReadError, also for what is raised inside."""
    with open_file(path) as file, read_errors():
        yield _open(file)


def _open(file: BinaryIO) -> Any:
    """A TiffFile whose directories come to an end: tifffile follows a long loop of them for ever. Raises ReadError."""
    import tifffile  # takes a tenth of a second, and most datasets have no TIFF

    file.seek(0)
    tiff: Any = tifffile.TiffFile(file)
    try:
        layout, offset, seen = tiff.tiff, tiff.pages.first.offset, set[int]()
        while offset:
            if offset in seen:
                raise ReadError("cannot be decoded (its directories point back at each other)")
            seen.add(offset)
            file.seek(offset)
            (count,) = struct.unpack(layout.tagnoformat, file.read(layout.tagnosize))
            file.seek(count * layout.tagsize, io.SEEK_CUR)
            (offset,) = struct.unpack(layout.offsetformat, file.read(layout.offsetsize))
    except (LookupError, struct.error):  # a directory, the first one or a later one, lies beyond the end
        raise ReadError("the file is cut off") from None
    return tiff


def upright(stored: Pixels, orientation: int) -> Pixels:
    """The pixels as displayed, by their EXIF orientation: transposed, for some, and then flipped."""
    pixels = stored.swapaxes(0, 1) if orientation in SIDEWAYS else stored
    pixels = pixels[::-1] if orientation in ROWS_FLIPPED else pixels
    return pixels[:, ::-1] if orientation in COLUMNS_FLIPPED else pixels


def with_channels_last(array: Pixels) -> Pixels:
    """H,W or C,H,W or H,W,C → H,W,C, as a view. Raises ReadError."""
    squeezed = array.reshape([side for side in array.shape if side > 1]) if array.ndim > 3 else array
    if squeezed.ndim == 2:
        return squeezed[:, :, None]
    first, last = (squeezed.shape[0], squeezed.shape[2]) if squeezed.ndim == 3 else (0, 0)
    if first == last or min(first, last) > MAX_CHANNELS:
        need = f"need height, width and up to {MAX_CHANNELS} channels, first or last"
        raise ReadError(f"an array of shape {array.shape}; {need}")
    return squeezed if last < first else np.moveaxis(squeezed, 0, 2)


@dataclass(frozen=True)
class Georeference:
    """Where on Earth the pixels of a GeoTIFF lie."""

    tags: tuple[tuple[int, int, int, Any, bool], ...]  # as they are in the file, in the form that tifffile writes
    # a, b, c, d, e, f: the corner at (column, row) lies at (a·column + b·row + c, d·column + e·row + f)
    transform: Affine | None
    epsg: int | None  # number of the coordinate reference system

    def places(self, corners: Pixels) -> Pixels:
        """n,2 (column, row) of pixel corners → n,2 coordinates."""
        assert self.transform is not None
        matrix = np.reshape(self.transform, (2, 3))
        return corners.astype(float) @ matrix[:, :2].T + matrix[:, 2]


def read_georeference(path: Path) -> Georeference | None:
    """None where the file is no GeoTIFF, or is shown turned: its coordinates are of the pixels as stored."""
    try:
        with open_pages(path) as found:
            tags = {tag.code: tag for tag in found.pages.first.tags if tag.code in (*GEO_TAGS, ORIENTATION)}
            keys = found.pages.first.geotiff_tags or {}
            values = {code: tag.value for code, tag in tags.items()}
    except ReadError:  # reading its pixels tells why
        return None
    if values.pop(ORIENTATION, 1) != 1 or not values.keys() & {PIXEL_SCALE, TIE_POINTS, TRANSFORMATION}:
        return None
    copied = tuple((code, int(tags[code].dtype), tags[code].count, value, True) for code, value in values.items())
    numbers = [int(keys[name]) for name in ("ProjectedCSTypeGeoKey", "GeographicTypeGeoKey") if name in keys]
    epsg = next((number for number in numbers if number != USER_DEFINED), None)
    return Georeference(copied, _transform(values, is_point=keys.get("GTRasterTypeGeoKey", 1) == 2), epsg)


def _transform(values: dict[int, Any], is_point: bool) -> Affine | None:
    """None for ground control points alone. `is_point`: coordinates are those of the pixels' centres."""
    if len(values.get(TRANSFORMATION, ())) == 16:
        a, b, _, c, d, e, _, f = values[TRANSFORMATION][:8]
    elif len(values.get(PIXEL_SCALE, ())) >= 2 and len(values.get(TIE_POINTS, ())) >= 6:
        (width, height), (column, row, _, x, y, _) = values[PIXEL_SCALE][:2], values[TIE_POINTS][:6]
        a, b, c, d, e, f = width, 0.0, x - column * width, 0.0, -height, y + row * height
    else:
        return None
    return (a, b, c - (a + b) / 2, d, e, f - (d + e) / 2) if is_point else (a, b, c, d, e, f)
