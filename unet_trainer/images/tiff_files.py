"""TIFF, BigTIFF and GeoTIFF files through tifffile: decoded whole or by blocks, and where on Earth they lie."""

import contextlib
import io
import math
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import cv2
import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.file_bytes import ReadError, open_file
from unet_trainer.system.console import first_line
from unet_trainer.system.resources import count_cores

Pixels = NDArray[Any]  # OpenCV's type stubs know no dtype
Part = tuple[slice, slice]  # rows and columns, with a start and a stop

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_CHANNELS = 64  # an axis of an array that is longer holds rows or columns
BOMB_PIXELS = 100_000_000  # smaller images are decoded whatever their file size
BOMB_RATIO = 200  # pixels per byte of file; more is a decompression bomb
NO_MEMORY = "there is not enough memory to decode it"

ORIENTATION = 0x0112  # EXIF and TIFF tag
NODATA = 42113  # tag of GDAL
TURNS = range(2, 9)  # orientations other than upright
SIDEWAYS = range(5, 9)  # those that swap height and width
ROWS_FLIPPED, COLUMNS_FLIPPED = (3, 4, 7, 8), (2, 3, 6, 7)  # after that
WHITE_IS_0, RGB, PALETTE, YCBCR = 0, 2, 3, 6  # values of PhotometricInterpretation
ALPHAS = (1, 2)  # values of ExtraSamples; with any other value the sample is a channel
JPEGS = (6, 7)  # values of Compression
PIXEL_SCALE, TIE_POINTS, TRANSFORMATION = 33550, 33922, 34264  # tags of a GeoTIFF
GEO_TAGS = (PIXEL_SCALE, TIE_POINTS, TRANSFORMATION, 34735, 34736, 34737)  # and its keys, with what they point to
USER_DEFINED = 32767  # a key of a coordinate reference system without a number

Affine = tuple[float, float, float, float, float, float]


class TiffImage:
    """The first series of a TIFF file, at full size. Channels are samples, planes or pages.

    `image[rows, columns]` decodes the blocks of that part; several threads may read. To be closed, with its file.
    `channels` of the model: alpha is dropped unless it is one of them. Raises ReadError.
    """

    def __init__(self, file: BinaryIO, channels: int | None = None) -> None:
        self.file, self.channels = file, channels
        self.lock, self.file_lock = threading.Lock(), threading.Lock()
        self.last_blocks: dict[int, Pixels] = {}  # the lowest row of them that was read: the next part may begin there
        self.threads: ThreadPoolExecutor | None = None
        with read_errors():
            self.series: Any = _open(file).series[0]
            self.num_bytes = file.seek(0, io.SEEK_END)
            self.first: Any = self.series.keyframe
            self.pages = list(self.series.pages)
            self._describe(self.first)

    def _describe(self, first: Any) -> None:
        samples, is_single = int(first.samplesperpixel), len(self.pages) == 1
        is_colour = first.photometric in (RGB, YCBCR) and first.planarconfig == 1
        is_plain = is_single and (samples == 1 or (samples == 3 and is_colour))
        self.stored_size = int(first.imagelength), int(first.imagewidth)
        self.num_values = math.prod(int(side) for side in self.series.shape)
        self.num_channels = samples * len(self.pages)
        # where pages are channels, a tag of one is not of all of them
        self.orientation = int(first.tags[ORIENTATION].value) if is_plain and ORIENTATION in first.tags else 1
        self.is_lossy = is_single and first.compression in JPEGS
        extra: Any = first.extrasamples if is_single and samples > 1 else ()
        self.has_alpha = len(extra) > 0 and int(extra[-1]) in ALPHAS
        self.is_ycbcr = is_plain and first.photometric == YCBCR and first.compression not in JPEGS
        self.is_white_0 = is_plain and samples == 1 and first.photometric == WHITE_IS_0
        has_palette = is_plain and first.photometric == PALETTE and first.colormap is not None
        self.palette: Pixels | None = (first.colormap.T >> 8).astype(np.uint8) if has_palette else None
        self.nodata: float | None = None  # of pixels without data, by the tag of GDAL
        with contextlib.suppress(KeyError, ValueError, TypeError):
            value = float(first.tags[NODATA].value)
            self.nodata = value if math.isfinite(value) else None

    def close(self) -> None:
        if self.threads is not None:
            self.threads.shutdown(cancel_futures=True)
        self.file.close()

    def read_all(self, channels: int | None = None, as_ids: bool = False) -> Pixels:
        """H,W,C of the whole image. `as_ids`: as stored, without the colours of a palette, and where white is 0."""
        with read_errors():
            for page in filter(None, self.pages):
                for offset, num_bytes in zip(page.dataoffsets, page.databytecounts, strict=True):
                    self._check_place(offset, num_bytes)
            array = self.series.asarray(maxworkers=1)
            if array.size == 0 or array.dtype.kind not in "buif":
                raise ReadError("not an image that can be decoded")
            planes, _, height, width, samples = self.first.shaped
            is_one = len(self.pages) == 1 and array.size == planes * height * width * samples
            if is_one and self.num_channels <= MAX_CHANNELS:
                array = np.moveaxis(array.reshape(planes, height, width, samples), 0, 2).reshape(height, width, -1)
            else:
                array = with_channels_last(array)
            return np.ascontiguousarray(upright(self._as_shown(array, channels, as_ids), self.orientation))

    def __getitem__(self, part: Part) -> Pixels:
        """H,W,C of a part of the image as stored."""
        rows, columns = part
        with read_errors():
            self._refuse_other_layouts()
            stored = self._read_run(rows) if self.first.is_final else self._read_blocks(rows)
            return np.ascontiguousarray(self._as_shown(stored[:, columns], self.channels))

    def _as_shown(self, stored: Pixels, channels: int | None, as_ids: bool = False) -> Pixels:
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

    def _refuse_other_layouts(self) -> None:
        """Raises ReadError unless the image is made of the blocks of its pages."""
        first, shape = self.first, tuple(self.series.shape)
        is_whole = self.num_values == math.prod(self.stored_size) * self.num_channels and first.imagedepth == 1
        has_planes = len(self.pages) > 1 and first.samplesperpixel > 1
        if not is_whole or None in self.pages or has_planes or self.num_channels > MAX_CHANNELS:
            raise ReadError(f"a TIFF of shape {shape}, which is not read by blocks")
        if min(*self.stored_size, *self._block_size) < 1:
            raise ReadError(f"{self.stored_size[1]}×{self.stored_size[0]} pixels in blocks of no size")

    @property
    def _planes(self) -> list[tuple[Any, int]]:
        """Pages, and planes of a page, that hold the channels."""
        num_planes = int(self.first.samplesperpixel) if self.first.planarconfig == 2 else 1
        return [(page, plane) for page in self.pages for plane in range(num_planes)]

    @property
    def _block_size(self) -> tuple[int, int]:
        """Height and width of a tile or strip."""
        if self.first.is_tiled:
            return int(self.first.tilelength), int(self.first.tilewidth)
        return min(int(self.first.rowsperstrip), self.stored_size[0]), self.stored_size[1]

    def _read_run(self, rows: slice) -> Pixels:
        """Of an uncompressed file whose rows lie one behind the other, however high its blocks are."""
        (height, width), planes = self.stored_size, self._planes
        dtype = self.first.dtype.newbyteorder(self.first.parent.byteorder)
        row_shape = (width, self.num_channels // len(planes))
        row_bytes = math.prod(row_shape) * dtype.itemsize
        places = [page.dataoffsets[0] + (plane * height + rows.start) * row_bytes for page, plane in planes]
        runs = [self._bytes(place, (rows.stop - rows.start) * row_bytes) for place in places]
        parts = [np.frombuffer(run, dtype).reshape(-1, *row_shape) for run in runs]
        return np.concatenate(parts, 2).astype(self.first.dtype, copy=False)

    def _read_blocks(self, rows: slice) -> Pixels:
        height, _ = self._block_size
        wanted = range(rows.start // height, -(-rows.stop // height))
        with self.lock:
            known = self.last_blocks
            parts = [known[index] if index in known else self._row_of_blocks(index) for index in wanted]
            self.last_blocks = {wanted[-1]: parts[-1]}
        top = wanted[0] * height
        return np.concatenate(parts)[rows.start - top : rows.stop - top]

    def _row_of_blocks(self, row: int) -> Pixels:
        """rows,W,C: all blocks beside each other."""
        down, across = (-(-side // block) for side, block in zip(self.stored_size, self._block_size, strict=True))
        self.threads = self.threads or ThreadPoolExecutor(count_cores(), "TIFF blocks")
        planes = []
        for page, plane in self._planes:
            first = (plane * down + row) * across
            planes.append(self.threads.map(partial(self._block, page), range(first, first + across)))
        return np.concatenate([np.concatenate(list(blocks), 1) for blocks in planes], 2)

    def _block(self, page: Any, index: int) -> Pixels:
        """H,W,C of one tile or strip, cut to the image. An empty one, of a sparse file, has no data."""
        offset, num_bytes = int(page.dataoffsets[index]), int(page.databytecounts[index])
        data = self._bytes(offset, num_bytes) if num_bytes else None
        (_, _, top, left, _), (_, height, width, channels) = self.first.decode(None, index)[1:]
        if data is not None and height * width > max(BOMB_PIXELS, num_bytes * BOMB_RATIO):
            raise ReadError(f"a block of {width}×{height} pixels in {num_bytes} bytes: a decompression bomb")
        height, width = min(height, self.stored_size[0] - top), min(width, self.stored_size[1] - left)
        if data is None:
            return np.full((height, width, channels), self.first.nodata, self.first.dtype)
        decoded: Pixels = self.first.decode(data, index, jpegtables=page.jpegtables)[0]
        return decoded[0, :height, :width].astype(self.first.dtype, copy=False)  # of one bit: to bool

    def _check_place(self, offset: int, num_bytes: int) -> None:
        if min(offset, num_bytes) < 0:  # the tag may have a type with a sign
            raise ReadError(f"a block of {num_bytes} bytes at {offset}")
        if offset + num_bytes > self.num_bytes:
            raise ReadError("the file is cut off")

    def _bytes(self, offset: int, num_bytes: int) -> bytes:
        self._check_place(offset, num_bytes)
        with self.file_lock:
            self.file.seek(offset)
            return self.file.read(num_bytes)


@contextlib.contextmanager
def read_errors() -> Iterator[None]:
    """Whatever a broken file raises inside becomes a ReadError."""
    try:
        yield
    except ReadError:
        raise
    except MemoryError:
        raise ReadError(NO_MEMORY) from None
    except OSError as error:
        raise ReadError(error.strerror or f"cannot be decoded ({first_line(error)})") from None
    except Exception as error:
        reason = getattr(error, "err", "") or first_line(error)  # err: OpenCV's, in short
        raise ReadError(f"cannot be decoded ({reason})") from None


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
        a, b, c, d, e, f = self.transform
        column, row = corners.T.astype(float)
        return np.stack([a * column + b * row + c, d * column + e * row + f], 1)


def read_georeference(path: Path) -> Georeference | None:
    """None where the file is no GeoTIFF, or is shown turned: its coordinates are of the pixels as stored."""
    try:
        with open_pages(path) as found:
            page = found.pages.first
            tags = tuple(
                (int(tag.code), int(tag.dtype), tag.count, tag.value, True) for tag in page.tags if tag.code in GEO_TAGS
            )
            orientation, keys = page.tags.valueof(ORIENTATION, 1), page.geotiff_tags or {}
    except ReadError:  # reading its pixels tells why
        return None
    values = {code: value for code, _, _, value, _ in tags}
    if orientation != 1 or not values.keys() & {PIXEL_SCALE, TIE_POINTS, TRANSFORMATION}:
        return None
    numbers = [int(keys[name]) for name in ("ProjectedCSTypeGeoKey", "GeographicTypeGeoKey") if name in keys]
    epsg = next((number for number in numbers if number != USER_DEFINED), None)
    return Georeference(tags, _transform(values, is_point=keys.get("GTRasterTypeGeoKey", 1) == 2), epsg)


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
