"""What all images of a dataset share: channels, depth, value range, the statistics that normalise them, and what marks
values without data. Such values are filled with the mean, so that a network sees 0 there. And images as a model of such
a spec takes them, read whole or in parts."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from unet_trainer.images.file_bytes import ReadError, open_file, read_bytes
from unet_trainer.images.image_decoding import EncodedImage, Pixels, map_npy
from unet_trainer.images.mask_decoding import as_lists, as_tuples
from unet_trainer.images.tiff_files import TiffImage, read_errors
from unet_trainer.images.tiling import Size, fit_image, resize_image

IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of 8-bit RGB
MISSING = 1e30  # larger numbers of floats mark values without data, as NaN does
LARGE_PIXELS = 2**25  # images of more pixels are not decoded ahead, and are mapped where their format allows it
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
        return {name: as_lists(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> "ImageSpec":
        """Checkpoints of earlier versions say nothing of missing data."""
        return ImageSpec(**{name: as_tuples(value) for name, value in content.items()})


class Decoded(NamedTuple):
    """An image as a model takes it."""

    pixels: Pixels  # H,W,C
    size: tuple[int, int]  # of the whole: a JPEG may be decoded at a fraction
    is_missing: Pixels | None  # H,W: where no channel had data; None: no value was missing


RGB_8BIT = ImageSpec(3, "uint8", IMAGENET_MEAN, IMAGENET_STD, 0.0, 255.0)


def find_missing(image: Pixels, marks: Iterable[float] = ()) -> Pixels | None:
    """H,W,C of bool: where an image has no data; None: it has data everywhere. Of floats NaN, what is beyond MISSING
    and the marks. Of whole numbers, pixels of which all channels hold a mark."""
    if image.dtype.kind == "f":
        low, high, limit = image.min(), image.max(), min(MISSING, float(np.finfo(image.dtype).max))
        with np.errstate(over="ignore"):  # a mark may be beyond what the depth can hold
            marked = np.array([*marks], np.float64).astype(image.dtype)
        if -limit <= low and high <= limit and not ((low <= marked) & (marked <= high)).any():  # not with NaN
            return None
        is_missing: Pixels = np.isin(image, marked) | ~((image >= -limit) & (image <= limit))
    else:
        depth = np.iinfo(image.dtype) if image.dtype.kind in "ui" else None
        held = [mark for mark in marks if depth and float(mark).is_integer() and depth.min <= mark <= depth.max]
        if not held:
            return None
        is_marked = np.isin(image, np.array(held).astype(image.dtype)).all(axis=2, keepdims=True)
        is_missing = np.broadcast_to(is_marked, image.shape)
    return is_missing if is_missing.any() else None


def depth_name(depth: str) -> str:
    return DEPTH_NAMES.get(depth, depth)


# Images that are read in parts, so that one of many gigabytes needs no more memory than the part that is looked at.


class ImageReader:
    """An image in memory or mapped into it: H,W,C as stored."""

    def __init__(self, stored: Pixels, spec: ImageSpec | None = None, tiff: TiffImage | None = None) -> None:
        """`spec` by which missing data is filled; None: it is filled already. `tiff` whose pixels these are."""
        self.stored, self.spec, self.tiff = stored, spec, tiff
        self.size: Size = (stored.shape[0], stored.shape[1])
        self.has_missing = False  # some of what was read was missing, and was filled

    def read(self, rows: slice, columns: slice) -> Pixels:
        """H,W,C of a part, in the file's own depth. Raises ReadError."""
        part, nodata = np.ascontiguousarray(self.stored[rows, columns]), None
        if self.spec is None:
            return part
        if self.tiff is not None:
            part, nodata = self.tiff.as_shown(part, self.spec.channels), self.tiff.nodata
        filled, is_missing = self.spec.fill(part, nodata)
        self.has_missing |= is_missing is not None
        return filled

    def read_resized(self, size: Size) -> Pixels:
        """H,W,C of the whole image at this size, pixels averaged; a side of a mapped one never grows."""
        if self.spec is None:
            return fit_image(self.stored, size)
        (height, width), narrow = self.size, []  # as high as the image is, and as wide as the result
        for top in range(0, height, ROWS_AT_ONCE):
            rows = self.read(slice(top, min(top + ROWS_AT_ONCE, height)), slice(0, width))
            narrow.append(resize_image(rows.astype(np.float32), (min(width, size[1]), len(rows)), cv2.INTER_AREA))
        whole = resize_image(np.concatenate(narrow), (narrow[0].shape[1], min(height, size[0])), cv2.INTER_AREA)
        if rows.dtype.kind in "ui":
            limits = np.iinfo(rows.dtype)  # float32 rounds the highest of 32 bits up; processors cast that differently
            whole = whole.astype(np.float64).round().clip(limits.min, limits.max)
        return whole.astype(rows.dtype)


@contextlib.contextmanager
def open_reader(path: Path, spec: ImageSpec) -> Iterator[ImageReader]:
    """TIFF files and arrays mapped into memory, all others decoded whole. `spec` of the model: an alpha channel beyond
    its channels is dropped, missing data filled. Raises ReadError."""
    with open_file(path) as file:
        kind = EncodedImage(file.read(8)).kind
        if kind == "TIFF":
            tiff = TiffImage(file)
            tiff.refuse_bomb()
            yield ImageReader(tiff.stored(is_mapped=True), spec, tiff)
        elif kind == "NPY":
            yield ImageReader(map_npy(path), spec)
        else:
            yield ImageReader(spec.decode(read_bytes(path)).pixels)


def read_small(path: Path, spec: ImageSpec, min_side: int | None = None) -> Decoded | None:
    """An image, or None, with nothing decoded, if it is large. `min_side` as in EncodedImage.decode; the size is that
    of the whole. Raises ReadError."""
    with open_file(path) as file, read_errors():  # a file may claim to be larger than all memory
        image = EncodedImage(file.read(SMALL_BYTES))  # most files whole: threads wait for the GIL after each call
        if image.kind == "TIFF":
            size = TiffImage(file).stored_size
        else:
            size = map_npy(path).shape[:2] if image.kind == "NPY" else image.stored_size or (0, 0)
        if math.prod(size) > LARGE_PIXELS:
            return None
        if len(image.data) == SMALL_BYTES:
            file.seek(0)
            image = EncodedImage(file.read())
    if not image.data:
        raise ReadError("the file is empty")
    return spec.decode(image, min_side)
