"""What all images of a dataset share: channels, depth, value range, the statistics that normalise them, and what marks
values without data. Such values are filled with the mean, so that a network sees 0 there. And images as a model of such
a spec takes them, read whole or in parts."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cv2
import numpy as np

from unet_trainer.images.file_bytes import ReadError, open_file, read_bytes
from unet_trainer.images.image_decoding import NPY_START, EncodedImage, Pixels, map_npy, picture_size
from unet_trainer.images.tiff_files import TIFF_STARTS, TiffImage, read_errors
from unet_trainer.images.tiling import Size, fit_image, resize_image

IMAGENET_MEAN = (123.675, 116.28, 103.53)  # of 8-bit RGB
IMAGENET_STD = (58.395, 57.12, 57.375)
MISSING = 1e30  # larger numbers of floats mark values without data, as NaN does
LARGE_PIXELS = 2**25  # images of more pixels are not decoded ahead, and are read by blocks where their format allows it
SMALL_BYTES = 2**20  # that most images have, and the header of nearly every one
ROWS_AT_ONCE = 256  # that are averaged at a time
DEPTH_NAMES = {"uint8": "8-bit", "uint16": "16-bit", "int16": "signed 16-bit", "float": "float"}


@dataclass(frozen=True)
class ImageSpec:
    """How images enter a batch, uint8 or float32, and the statistics that the device normalises them with."""

    channels: int
    depth: str  # a key of DEPTH_NAMES, or another dtype
    mean: tuple[float, ...]  # of each channel, in the files' own units
    std: tuple[float, ...]
    low: float  # lowest and highest value that occur; augmentations from a list see this range as 0 to 1
    high: float
    # values of the training images that mark missing data, besides NaN and what is beyond MISSING
    nodata: tuple[float, ...] = ()
    ignores_nodata: bool = False  # pixels without data count in no loss and no metric
    is_nodata_set: bool = False  # by the user: whole numbers are missing in files without a tag too

    @property
    def is_8bit(self) -> bool:
        return self.depth == "uint8"

    def to_batch(self, image: Pixels) -> Pixels:
        """H,W,C pixels of a file → H,W,C as in the batch, uint8 or float32."""
        image = np.repeat(image, self.channels, axis=2) if image.shape[2] == 1 < self.channels else image
        return image if self.is_8bit else image.astype(np.float32)

    def decode(self, data: bytes | EncodedImage, min_side: int | None = None) -> "Decoded":
        """The image in a file, as a model of this spec takes it. Raises ReadError."""
        file = EncodedImage(data) if isinstance(data, bytes) else data
        image = file.decode(min_side, self.channels)
        factor, _ = file.reduction(min_side)
        filled, is_missing = self.fill(image, file.nodata)
        size = image.shape[0] * factor, image.shape[1] * factor
        return Decoded(filled, size, None if is_missing is None else np.all(is_missing, axis=2))

    def fill(self, image: Pixels, tag: float | None = None) -> tuple[Pixels, Pixels | None]:
        """H,W,C pixels, values without data replaced by the mean; and where these are, as in find_missing. `tag`: of
        their file, which marks them too; whole numbers only where it was one in training: 0 may be black elsewhere."""
        is_float = image.dtype.kind == "f"
        marks = (*self.nodata, tag) if is_float else (tag,) if tag in self.nodata else ()
        marks = self.nodata if self.is_nodata_set and not is_float else marks
        is_missing = find_missing(image, [mark for mark in marks if mark is not None])
        if is_missing is None:
            return image, None
        mean = np.array(self.mean if image.shape[2] == self.channels else [np.mean(self.mean)])
        return np.where(is_missing, (mean if is_float else mean.round()).astype(image.dtype), image), is_missing

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std), "nodata": list(self.nodata)}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "ImageSpec":
        """Checkpoints of earlier versions say nothing of missing data."""
        lists = {name: tuple(content.get(name, ())) for name in ("mean", "std", "nodata")}
        return ImageSpec(**{**content, **lists})


class Decoded(NamedTuple):
    """An image as a model takes it."""

    pixels: Pixels  # H,W,C
    size: tuple[int, int]  # of the whole: a JPEG may be decoded at a fraction
    is_missing: Pixels | None  # H,W: where no channel had data; None: no value was missing


RGB_8BIT = ImageSpec(3, "uint8", IMAGENET_MEAN, IMAGENET_STD, 0.0, 255.0)


def find_missing(image: Pixels, marks: Iterable[float] = ()) -> Pixels | None:
    """H,W,C of bool: where an image has no data; None: it has data everywhere. Of floats NaN, what is beyond MISSING
    and the marks. Of whole numbers, pixels of which all channels hold a mark."""
    dtype, given = image.dtype, np.array([*marks], np.float64)
    if dtype.kind != "f" and not given.size:
        return None
    with np.errstate(over="ignore", invalid="ignore"):  # a mark may be beyond what the depth can hold
        held = given.astype(dtype)
    if dtype.kind != "f":
        held = held[(held == given) & (dtype.kind in "ui")]
        is_missing = np.broadcast_to(np.isin(image, held).all(axis=2, keepdims=True), image.shape)
    else:
        low, high, limit = image.min(), image.max(), dtype.type(min(MISSING, float(np.finfo(dtype).max)))
        if -limit <= low and high <= limit:  # not with NaN
            held = held[(low <= held) & (held <= high)]
            if not held.size:
                return None
        is_missing = np.isin(image, held) | ~((image >= -limit) & (image <= limit))
    return is_missing if is_missing.any() else None


def depth_name(depth: str) -> str:
    return DEPTH_NAMES.get(depth, depth)


# Images that are read in parts, so that one of many gigabytes needs no more memory than the part that is looked at.


class ImageReader:
    """An image in memory (H,W,C), an array mapped into memory, or a TIFF file that is read by blocks."""

    def __init__(self, source: Pixels | TiffImage, spec: ImageSpec | None = None) -> None:
        """`spec` by which missing data is filled; None: it is filled already."""
        self.source, self.spec = source, spec
        self.size: Size = source.stored_size if isinstance(source, TiffImage) else source.shape[:2]
        self.has_missing = False  # some of what was read was missing, and was filled

    @property
    def in_memory(self) -> Pixels | None:
        """The pixels, unless they are read from a TIFF file."""
        return None if isinstance(self.source, TiffImage) else self.source

    def read(self, rows: slice, columns: slice) -> Pixels:
        """H,W,C of a part, in the file's own depth. Raises ReadError."""
        part = np.ascontiguousarray(self.source[rows, columns])
        nodata = self.source.nodata if isinstance(self.source, TiffImage) else None
        filled, is_missing = (part, None) if self.spec is None else self.spec.fill(part, nodata)
        self.has_missing |= is_missing is not None
        return filled

    def read_resized(self, size: Size) -> Pixels:
        """H,W,C of the whole image, at about this size or larger, pixels averaged."""
        if isinstance(self.source, np.memmap | TiffImage):
            return average_rows(self.read, self.size, size)
        return fit_image(self.read(slice(0, self.size[0]), slice(0, self.size[1])), size)


@contextlib.contextmanager
def open_reader(path: Path, spec: ImageSpec) -> Iterator[ImageReader]:
    """Upright TIFF files by blocks, arrays mapped into memory, all others decoded whole. `spec` of the model: an alpha
    channel beyond its channels is dropped, missing data filled. Raises ReadError."""
    with open_file(path) as file:
        start = file.read(8)
        if start.startswith(TIFF_STARTS):
            with contextlib.closing(TiffImage(file, spec.channels)) as tiff:
                if tiff.orientation == 1:
                    yield ImageReader(tiff, spec)
                    return
    if start.startswith(NPY_START):
        yield ImageReader(map_npy(path), spec)
    else:
        yield ImageReader(spec.decode(read_bytes(path)).pixels)


def read_small(path: Path, spec: ImageSpec, min_side: int | None = None) -> Decoded | None:
    """An image, or None, with nothing decoded, if it is large. A JPEG may be decoded at 1/2 to 1/8 while both sides
    stay at least `min_side`; the size is that of the whole. Raises ReadError."""
    with open_file(path) as file:
        # Most files whole: each call to the system lets other threads take the GIL.
        image = EncodedImage(file.read(SMALL_BYTES))
        if _num_pixels(path, file, image) > LARGE_PIXELS:
            return None
        if len(image.data) == SMALL_BYTES:
            with read_errors():  # a file may claim to be larger than all memory
                file.seek(0)
                image = EncodedImage(file.read())
    if not image.data:
        raise ReadError("the file is empty")
    return spec.decode(image, min_side)


def average_rows(read: Callable[[slice, slice], Pixels], size: Size, new_size: Size) -> Pixels:
    """H,W,C of an image that is read some rows at a time, at the new size, each pixel the mean of the area that it
    covers. A side that would not shrink stays as it is. Equal to fit_image but for rounding."""
    height, width = size
    new_height, new_width = min(height, new_size[0]), min(width, new_size[1])
    corner = read(slice(0, 1), slice(0, 1))
    total = np.zeros((new_height, new_width, corner.shape[2]), np.float32)
    for top in range(0, height, ROWS_AT_ONCE):
        bottom = min(top + ROWS_AT_ONCE, height)
        rows = read(slice(top, bottom), slice(0, width))
        narrow = resize_image(rows.astype(np.float32), (new_width, bottom - top), cv2.INTER_AREA)
        # New row i covers the rows from i · height / new_height on; in whole numbers, so that no rounding adds up.
        first, last = top * new_height // height, -(-bottom * new_height // height)
        starts = np.arange(first, last)[:, None] * height
        places = np.arange(top, bottom)[None] * new_height
        shares = (np.minimum(starts + height, places + new_height) - np.maximum(starts, places)).clip(0) / height
        total[first:last] += np.tensordot(shares.astype(np.float32), narrow, 1)
    if corner.dtype.kind in "ui":
        limits = np.iinfo(corner.dtype)  # float32 rounds the highest of 32 bits up; processors cast that differently
        total = total.astype(np.float64).round().clip(limits.min, limits.max)
    return total.astype(corner.dtype)


def _num_pixels(path: Path, file: BinaryIO, start: EncodedImage) -> int:
    """From the header; 0 where it does not say, and decoding will tell why."""
    if start.data.startswith(NPY_START):
        array = map_npy(path)
        return array.shape[0] * array.shape[1] if isinstance(array, np.memmap) else 0
    if start.is_tiff:
        height, width = TiffImage(file).stored_size
    else:
        height, width = start.stored_size or picture_size(file) or (0, 0)
    return height * width
