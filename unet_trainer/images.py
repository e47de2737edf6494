"""Reads and writes image files. Values keep their depth, and nothing is converted in silence.

OpenCV decodes; its habits that damage data (16 bit cut to 8, palettes turned into colours, further pages and channels left out,
cut-off files accepted) are stopped here.
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unet_trainer.config import UserError

Pixels = NDArray[Any]  # OpenCV's type stubs know no dtype

IMAGE_EXTENSIONS = frozenset([".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".npy"])
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
JPEG_START, JPEG_END, JPEG_SCAN = b"\xff\xd8\xff", b"\xff\xd9", b"\xda"
GIF_START, NPY_START, BMP_START = b"GIF8", b"\x93NUMPY", b"BM"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_GREY_ALPHA, PNG_COLOUR_ALPHA, PNG_PALETTE = 4, 6, 3  # colour types
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_SAMPLES, TIFF_EXTRA_SAMPLES = 258, 262, 277, 338
TIFF_IS_PALETTE = 3
TIFF_ALPHAS = (1, 2)  # an extra sample that is none of these is a channel
ORIENTATION = 0x0112
COLOUR = 1 << 24  # a mask's colour that is no grey: COLOUR + 0xRRGGBB
MAX_CHANNELS = 64  # an axis of an array that is longer holds rows or columns
BOMB_PIXELS, BOMB_RATIO = 100_000_000, 200  # so many pixels, and as many from a byte: no picture is that empty

# Its decoder messages carry no file name; the errors raised here do.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
logging.getLogger("tifffile").setLevel(logging.CRITICAL)
Image.MAX_IMAGE_PIXELS = None  # PIL would warn about any large image; refuse_bomb stands in for it


class DataError(UserError):
    """The data cannot be trained on; the message names the files and the fix."""


class ReadError(DataError):
    """A file that cannot be read as an image; the message is the reason alone, the caller knows the file."""


def read_image(path: Path) -> Pixels:
    """H,W,C in the file's own depth."""
    return decode_image(read_bytes(path))


def read_mask(path: Path) -> Pixels:
    """H,W whole numbers as they stand in the file: uint8 or uint16, a palette's index and not its colour; int32 for colours."""
    return decode_mask(read_bytes(path))


def read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReadError(error.strerror or str(error)) from None
    if not data:
        raise ReadError("the file is empty")
    return data


def decode_image(data: bytes) -> Pixels:
    """H,W,C in the file's own depth: RGB, grey or as many channels as there are. Alpha is dropped, EXIF rotation applied."""
    if data.startswith(NPY_START):
        return _channels_last(_decode_npy(data))
    if data.startswith(TIFF_STARTS):
        return _decode_tiff(data)
    if data.startswith(GIF_START):
        return _decode_with_pil(data, "RGB")
    image = _decode(data, cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH)
    if image.ndim == 2:
        return image[:, :, None]
    if _png_colour_type(data) == PNG_GREY_ALPHA:
        return image[:, :, :1]
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def decode_mask(data: bytes) -> Pixels:
    """H,W whole numbers: see read_mask."""
    if data.startswith(NPY_START):
        return _whole_numbers(np.squeeze(_decode_npy(data)))
    if data.startswith(GIF_START):  # its palette is made anew for each file: the colour is the value, not the index
        return np.ascontiguousarray(_join_colours(_decode_with_pil(data, "RGB")))
    if _has_palette(data):
        return _decode_with_pil(data)
    if data.startswith(TIFF_STARTS):
        mask = _decode_tiff(data)
    else:
        mask = _decode(data, cv2.IMREAD_UNCHANGED)
        if mask.ndim == 3:  # blue, green, red, and perhaps alpha
            mask = mask[:, :, 2::-1] if mask.shape[2] >= 3 else mask[:, :, :1]
    if _png_bits(data) in (2, 4):  # OpenCV stretches few bits to 255
        mask = mask // (255 // (2 ** _png_bits(data) - 1))
    return _whole_numbers(mask)


def _whole_numbers(mask: Pixels) -> Pixels:
    if mask.dtype == np.bool_:
        mask = mask.astype(np.uint8)
    if mask.ndim == 3 and mask.shape[2] in (1, 3):
        mask = mask[:, :, 0] if mask.shape[2] == 1 else _join_colours(mask)
    if mask.ndim != 2 or mask.size == 0:
        raise ReadError(f"an array of shape {mask.shape}; a mask has one value, or a colour, for each pixel")
    if mask.dtype == np.uint8 or (mask.dtype == np.int32 and mask.max() >= COLOUR):
        return np.ascontiguousarray(mask)
    low, high = mask.min(), mask.max()
    if not (low >= 0 and high <= 65535 and (np.issubdtype(mask.dtype, np.integer) or (mask == np.floor(mask)).all())):
        raise ReadError(f"{mask.dtype} values from {low} to {high}; need whole numbers from 0 to 65535")
    return np.ascontiguousarray(mask.astype(np.uint8 if high <= 255 else np.uint16))


def _join_colours(channels: Pixels) -> Pixels:
    """H,W,3 RGB → H,W: brightness where the three agree, COLOUR + 0xRRGGBB elsewhere."""
    red, green, blue = (channels[:, :, index] for index in range(3))
    is_grey = (blue == green) & (green == red)
    if is_grey.all():
        return blue
    if channels.dtype != np.uint8:
        raise ReadError(f"a colour mask of {channels.dtype}; need 8 bit")
    joined = COLOUR + (red.astype(np.int32) << 16) + (green.astype(np.int32) << 8) + blue
    return np.where(is_grey, blue, joined).astype(np.int32)


def to_channels(image: Pixels, channels: int) -> Pixels:
    """Grey becomes as many equal channels as are wanted; anything else stays."""
    return np.repeat(image, channels, axis=2) if image.shape[2] == 1 and channels > 1 else image


def drops_alpha(data: bytes) -> bool:
    """Whether decode_image leaves an alpha channel out."""
    if data.startswith(TIFF_STARTS):
        return _tiff_has_alpha(_tiff_tags(data))
    if data[:4] == b"RIFF" and data[12:16] == b"VP8X":  # an extended WebP
        return bool(data[20] & 16)
    return _png_colour_type(data) in (PNG_GREY_ALPHA, PNG_COLOUR_ALPHA)


def is_turned(data: bytes) -> bool:
    """Whether decode_image turns or mirrors the picture as its EXIF orientation says."""
    if not data.startswith((JPEG_START, PNG_START, b"RIFF")) or (b"Exif" not in data[:65536] and b"eXIf" not in data):
        return False
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.getexif().get(ORIENTATION, 1) != 1
    except (OSError, SyntaxError, ValueError, struct.error):
        return False


def refuse_bomb(data: bytes, expected: tuple[int, int] | None = None) -> None:
    """Raises ReadError for a small file that unfolds to a huge picture, unless it has the expected height and width."""
    if data.startswith(NPY_START) or len(data) * BOMB_RATIO > 2**34:
        return
    try:
        with Image.open(io.BytesIO(data)) as picture:  # reads the header alone
            width, height = picture.size
    except (OSError, SyntaxError, ValueError, TypeError, struct.error, OverflowError):
        return  # the decoder says what is wrong
    if width * height > max(BOMB_PIXELS, len(data) * BOMB_RATIO) and (height, width) != expected:
        raise ReadError(f"{len(data) / 1e6:.2g} MB that unfold to {width}×{height} pixels: a decompression bomb")


def write_image(path: Path, pixels: Pixels) -> None:
    """Writes H,W or H,W,3 RGB in the format that the extension names."""
    path.write_bytes(encode_image(pixels, path.suffix))


def encode_image(pixels: Pixels, extension: str) -> bytes:
    stored = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.ndim == 3 else pixels
    done, buffer = cv2.imencode(extension, stored)
    assert done, extension
    return buffer.tobytes()


def _decode(data: bytes, flags: int) -> Pixels:
    _refuse_cut_off(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise ReadError(f"cannot be decoded ({error.err})") from None
    if image is None:
        raise ReadError("not an image that can be decoded")
    return image


def _decode_with_pil(data: bytes, mode: str | None = None) -> Pixels:
    """Of a palette the indices, which OpenCV does not give, or the picture in another of PIL's modes."""
    _refuse_cut_off(data)
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return np.array(picture if mode is None else picture.convert(mode), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, struct.error) as error:  # PIL's ways to say broken
        raise ReadError(f"cannot be decoded ({error})") from None


def _decode_npy(data: bytes) -> Pixels:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        reason = "it holds Python objects" if "pickle" in str(error) else str(error).splitlines()[0]
        raise ReadError(f"cannot be decoded ({reason})") from None
    if array.dtype.kind not in "buif" or array.size == 0:
        raise ReadError(f"an array of {array.dtype} and shape {array.shape}; need numbers for pixels")
    return array


def _decode_tiff(data: bytes) -> Pixels:
    """H,W,C. OpenCV reads one page of up to three channels; tifffile the rest."""
    tags = _tiff_tags(data)
    if tags.get(TIFF_SAMPLES, (0,))[0] in (1, 3):
        try:
            image = _decode(data, cv2.IMREAD_UNCHANGED)
        except ReadError:
            return _decode_with_tifffile(data)
        return image[:, :, None] if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    image = _decode_with_tifffile(data)
    return image[:, :, :-1] if _tiff_has_alpha(tags) else image


def _decode_with_tifffile(data: bytes) -> Pixels:
    import tifffile  # seldom needed: the import costs a tenth of a second

    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            is_whole = all(
                offset + length <= len(data)
                for page in file.pages
                for offset, length in zip(page.dataoffsets, page.databytecounts, strict=True)
            )
            array = file.asarray() if is_whole else np.empty(0)
    except Exception as error:  # it raises whatever a broken file leads to
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ReadError(f"cannot be decoded ({reason})") from None
    if array.size == 0 or array.dtype.kind not in "buif":
        raise ReadError("not an image that can be decoded" if is_whole else "the file is cut off")
    return _channels_last(array)


def _tiff_tags(data: bytes) -> Mapping[int, tuple[int, ...]]:
    """Small whole-number tags of a TIFF that has one page; empty for several pages, for BigTIFF and for a broken one."""
    order = "<" if data[:2] == b"II" else ">"
    try:
        start = struct.unpack_from(f"{order}I", data, 4)[0]
        count = struct.unpack_from(f"{order}H", data, start)[0]
        tags = {}
        for entry in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, length = struct.unpack_from(f"{order}HHI", data, entry)
            if kind == 3 and length <= 64:  # 16-bit numbers
                place = entry + 8 if length <= 2 else struct.unpack_from(f"{order}I", data, entry + 8)[0]
                tags[tag] = struct.unpack_from(f"{order}{length}H", data, place)
        following = struct.unpack_from(f"{order}I", data, start + 2 + 12 * count)[0]
    except struct.error:
        return {}
    if data[2:4] in (b"+\0", b"\0+") or following:
        return {}
    return {TIFF_SAMPLES: (1,), **tags}


def _tiff_has_alpha(tags: Mapping[int, tuple[int, ...]]) -> bool:
    extra = tags.get(TIFF_EXTRA_SAMPLES, ())
    return len(extra) > 0 and extra[-1] in TIFF_ALPHAS


def _channels_last(array: Pixels) -> Pixels:
    """H,W or C,H,W or H,W,C → H,W,C."""
    squeezed = array.reshape([side for side in array.shape if side > 1]) if array.ndim > 3 else array
    if squeezed.ndim == 2:
        return squeezed[:, :, None]
    if squeezed.ndim != 3 or min(squeezed.shape[0], squeezed.shape[2]) > MAX_CHANNELS or squeezed.shape[0] == squeezed.shape[2]:
        raise ReadError(f"an array of shape {array.shape}; need height, width and up to {MAX_CHANNELS} channels, first or last")
    return squeezed if squeezed.shape[2] < squeezed.shape[0] else np.ascontiguousarray(np.moveaxis(squeezed, 0, 2))


def _has_palette(data: bytes) -> bool:
    if data.startswith(TIFF_STARTS):
        return _tiff_tags(data).get(TIFF_PHOTOMETRIC) == (TIFF_IS_PALETTE,)
    if data.startswith(BMP_START) and len(data) > 30 and data[28] <= 8:
        try:
            with Image.open(io.BytesIO(data)) as picture:
                return picture.mode == "P"  # a palette of greys in their order is mode L
        except (OSError, SyntaxError, ValueError, struct.error):
            return False
    return _png_colour_type(data) == PNG_PALETTE


def _png_colour_type(data: bytes) -> int | None:
    return data[25] if data.startswith(PNG_START) and len(data) > 25 else None


def _png_bits(data: bytes) -> int:
    return data[24] if data.startswith(PNG_START) and len(data) > 24 else 0


def _refuse_cut_off(data: bytes) -> None:
    """OpenCV fills the missing part of a cut-off JPEG with grey and says nothing."""
    if (data.startswith(PNG_START) and PNG_END not in data[-4096:]) or (data.startswith(JPEG_START) and not _has_jpeg_end(data)):
        raise ReadError("the file is cut off")


def _has_jpeg_end(data: bytes) -> bool:
    """Whether the end marker follows the picture's own data: a thumbnail before it has one too, and a phone's video may follow."""
    position = 2
    while data[position : position + 1] == b"\xff" and data[position + 1 : position + 2] != JPEG_SCAN:
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return JPEG_END in data[position:]
