"""Reads and writes image files. Nothing is converted in silence: a depth or layout that would lose information is refused.

OpenCV decodes; its habits that damage data (16 bit cut to 8, palettes turned into colours, cut-off files accepted) are
stopped here.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unet_trainer.config import UserError

Pixels = NDArray[Any]  # uint8 wherever the name stands; OpenCV's type stubs know no dtype

IMAGE_EXTENSIONS = frozenset([".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif"])
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
JPEG_START, JPEG_END, JPEG_SCAN = b"\xff\xd8\xff", b"\xff\xd9", b"\xda"
GIF_START = b"GIF8"
PALETTE_COLOUR_TYPE = 3
COLOUR = 1 << 24  # a mask's colour that is no grey: COLOUR + 0xRRGGBB

# Its decoder messages carry no file name; the errors raised here do.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


class DataError(UserError):
    """The data cannot be trained on; the message names the files and the fix."""


class ReadError(DataError):
    """A file that cannot be read as an image; the message is the reason alone, the caller knows the file."""


def read_image(path: Path) -> Pixels:
    """H,W,3 uint8 RGB. Grey becomes three equal channels, alpha is dropped, EXIF rotation is applied."""
    data = _read_bytes(path)
    if data.startswith(GIF_START):
        return _decode_palette(data, "RGB")
    image = _decode(data, cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    if image.dtype != np.uint8:
        raise ReadError(f"{image.dtype} pixels; only 8-bit images can be read so far, convert the file to 8 bit")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def read_mask(path: Path) -> Pixels:
    """H,W whole numbers as they stand in the file: uint8 or uint16, a palette's index and not its colour; int32 for colours."""
    data = _read_bytes(path)
    if data.startswith(PNG_START) and data[25:26] == bytes([PALETTE_COLOUR_TYPE]):
        return _decode_palette(data)
    if data.startswith(GIF_START):  # its palette is made anew for each file: the colour is the value, not the index
        return np.ascontiguousarray(_join_colours(_decode_palette(data, "RGB")[:, :, ::-1]))
    mask = _decode(data, cv2.IMREAD_UNCHANGED)
    if data.startswith(PNG_START) and data[24] in (2, 4):  # OpenCV stretches few bits to 255
        mask = mask // (255 // (2 ** data[24] - 1))
    if not np.issubdtype(mask.dtype, np.integer) or mask.min() < 0 or mask.max() > 65535:
        raise ReadError(f"{mask.dtype} values from {mask.min()} to {mask.max()}; need whole numbers from 0 to 65535")
    if mask.ndim == 3:
        mask = _join_colours(mask[:, :, :3]) if mask.shape[2] >= 3 else mask[:, :, 0]  # grey with alpha has two
    if mask.dtype != np.uint8 and mask.max() <= 65535:  # no colours
        mask = mask.astype(np.uint8 if mask.max() <= 255 else np.uint16)
    return np.ascontiguousarray(mask)


def _join_colours(channels: Pixels) -> Pixels:
    """H,W,3 blue, green, red → H,W: brightness where the three agree, COLOUR + 0xRRGGBB elsewhere."""
    blue, green, red = (channels[:, :, index] for index in range(3))
    is_grey = (blue == green) & (green == red)
    if is_grey.all():
        return blue
    if channels.dtype != np.uint8:
        raise ReadError("a 16-bit colour mask; need 8 bit")
    joined = COLOUR + (red.astype(np.int32) << 16) + (green.astype(np.int32) << 8) + blue
    return np.where(is_grey, blue, joined).astype(np.int32)


def write_image(path: Path, pixels: Pixels) -> None:
    """Writes H,W or H,W,3 RGB in the format that the extension names."""
    path.write_bytes(encode_image(pixels, path.suffix))


def encode_image(pixels: Pixels, extension: str) -> bytes:
    stored = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.ndim == 3 else pixels
    done, buffer = cv2.imencode(extension, stored)
    assert done, extension
    return buffer.tobytes()


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReadError(error.strerror or str(error)) from None
    if not data:
        raise ReadError("the file is empty")
    return data


def _decode(data: bytes, flags: int) -> Pixels:
    _refuse_cut_off(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        raise ReadError(f"cannot be decoded ({error.err})") from None
    if image is None:
        raise ReadError("not an image that can be decoded")
    return image


def _decode_palette(data: bytes, mode: str | None = None) -> Pixels:
    """Of a palette the indices, which OpenCV does not give, or the picture in another of PIL's modes."""
    _refuse_cut_off(data)
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return np.array(picture if mode is None else picture.convert(mode), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # PIL's ways to say broken
        raise ReadError(f"cannot be decoded ({error})") from None


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
