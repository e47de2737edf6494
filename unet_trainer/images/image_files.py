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
from tokenize import TokenError
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unet_trainer.config.errors import UserError

Pixels = NDArray[Any]  # OpenCV's type stubs know no dtype

IMAGE_EXTENSIONS = frozenset([".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".npy"])
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
JPEG_START, JPEG_END, JPEG_SCAN = b"\xff\xd8\xff", b"\xff\xd9", b"\xda"
GIF_START, NPY_START, BMP_START = b"GIF8", b"\x93NUMPY", b"BM"
TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_GREY_ALPHA, PNG_COLOUR_ALPHA, PNG_PALETTE = 4, 6, 3  # colour types
TIFF_BITS, TIFF_PHOTOMETRIC, TIFF_SAMPLES, TIFF_PLANAR, TIFF_EXTRA_SAMPLES = 258, 262, 277, 284, 338
TIFF_WHITE_IS_0, TIFF_IS_PALETTE, TIFF_COLOURS = 0, 3, (2, 6)  # RGB and YCbCr
TIFF_ALPHAS = (1, 2)  # an extra sample that is none of these is a channel
ORIENTATION = 0x0112
TURNS = range(2, 9)  # orientations other than upright
REDUCED = {  # by a factor, which saves most of the decoding: flags for grey and for colour
    2: (cv2.IMREAD_REDUCED_GRAYSCALE_2, cv2.IMREAD_REDUCED_COLOR_2),
    4: (cv2.IMREAD_REDUCED_GRAYSCALE_4, cv2.IMREAD_REDUCED_COLOR_4),
    8: (cv2.IMREAD_REDUCED_GRAYSCALE_8, cv2.IMREAD_REDUCED_COLOR_8),
}
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


def read_image(path: Path, least: int | None = None) -> Pixels:
    """H,W,C in the file's own depth; a JPEG perhaps at a half, a quarter or an eighth, if both sides stay at least so long."""
    return decode_image(read_bytes(path), least)


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


def decode_image(data: bytes, least: int | None = None) -> Pixels:
    """H,W,C in the file's own depth: RGB, grey or as many channels as there are. Alpha is dropped, EXIF rotation applied."""
    flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
    if least is not None and data.startswith(JPEG_START):
        flags = _reduced(data, least) or flags
    if data.startswith(NPY_START):
        return _channels_last(_decode_npy(data))
    if data.startswith(TIFF_STARTS):
        return _decode_tiff(data)
    if data.startswith(GIF_START):
        return _decode_with_pil(data, "RGB")
    image = _decode(data, flags)
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
        tags = _tiff_tags(data)
        if tags.get(TIFF_PHOTOMETRIC) == (TIFF_WHITE_IS_0,) and tags.get(TIFF_BITS) == (8,):
            mask = 255 - mask  # OpenCV gives brightness, but ids are meant
    else:
        mask = _decode(data, cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH)  # turned by EXIF, as images are
        mask = mask[:, :, ::-1] if mask.ndim == 3 else mask
    if _png_bits(data) in (2, 4):  # OpenCV stretches few bits to 255
        mask = mask // (255 // (2 ** _png_bits(data) - 1))
    return _whole_numbers(mask)


def _whole_numbers(mask: Pixels) -> Pixels:
    if mask.dtype == np.bool_:
        mask = mask.astype(np.uint8)
    has_colours = False
    if mask.ndim == 3 and mask.shape[2] in (1, 3):
        joined = mask[:, :, 0] if mask.shape[2] == 1 else _join_colours(mask)
        has_colours, mask = joined.dtype != mask.dtype, joined
    if mask.ndim != 2 or mask.size == 0:
        raise ReadError(f"an array of shape {mask.shape}; a mask has one value, or a colour, for each pixel")
    if mask.dtype == np.uint8 or has_colours:
        return np.ascontiguousarray(mask)
    low, high = mask.min().item(), mask.max().item()
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
    if data[:4] == b"RIFF" and len(data) > 24 and data[12:16] in (b"VP8X", b"VP8L"):  # an extended WebP; a lossless one
        return bool(data[20 if data[12:16] == b"VP8X" else 24] & 16)
    return _png_colour_type(data) in (PNG_GREY_ALPHA, PNG_COLOUR_ALPHA)


def is_16bit(data: bytes) -> bool:
    """Whether a PNG or TIFF stores 16 bits a value, whatever the values are."""
    return _png_bits(data) == 16 or (data.startswith(TIFF_STARTS) and _tiff_tags(data).get(TIFF_BITS) == (16,))


def is_turned(data: bytes) -> bool:
    """Whether decode_image turns or mirrors the picture as its EXIF orientation says."""
    if data.startswith(TIFF_STARTS):
        tags = _tiff_tags(data)
        return tags.get(ORIENTATION, (1,))[0] in TURNS and _is_plain_tiff(tags)
    if not data.startswith((JPEG_START, PNG_START, b"RIFF")):
        return False
    if b"Exif" not in data[:65536] and b"eXIf" not in data and not (data[:4] == b"RIFF" and b"EXIF" in data):
        return False
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.getexif().get(ORIENTATION, 1) in TURNS
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
    except (ValueError, OSError, EOFError, SyntaxError, TokenError, OverflowError, MemoryError) as error:  # a broken header
        reason = "it holds Python objects" if "pickle" in str(error) else (str(error).splitlines() or [type(error).__name__])[0]
        raise ReadError(f"cannot be decoded ({reason})") from None
    if array.dtype.kind not in "buif" or array.size == 0:
        raise ReadError(f"an array of {array.dtype} and shape {array.shape}; need numbers for pixels")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _decode_tiff(data: bytes) -> Pixels:
    """H,W,C. OpenCV reads one page of grey or colour; tifffile the rest."""
    tags = _tiff_tags(data)
    if _is_plain_tiff(tags):
        try:
            image = _decode(data, cv2.IMREAD_UNCHANGED)
        except ReadError:
            return _decode_with_tifffile(data, tags)
        if image.ndim == 2:
            return image[:, :, None]
        # OpenCV's own way is faster, but for a few depths only
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB) if image.dtype == np.uint8 else np.ascontiguousarray(image[:, :, ::-1])
    image = _decode_with_tifffile(data, tags)
    return image[:, :, :-1] if _tiff_has_alpha(tags) else image


def _is_plain_tiff(tags: Mapping[int, tuple[int, ...]]) -> bool:
    """Of three samples that are no colours OpenCV reads one alone, and it mixes up 16-bit channels that lie one after the other."""
    samples = tags.get(TIFF_SAMPLES, (0,))[0]
    is_colour = samples == 3 and tags.get(TIFF_PHOTOMETRIC, (0,))[0] in TIFF_COLOURS and tags.get(TIFF_PLANAR, (1,))[0] == 1
    return samples == 1 or is_colour


def _decode_with_tifffile(data: bytes, tags: Mapping[int, tuple[int, ...]]) -> Pixels:
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
        if "imagecodecs" in str(error):
            return _decode_compressed_tiff(data, tags)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ReadError(f"cannot be decoded ({reason})") from None
    if array.size == 0 or array.dtype.kind not in "buif":
        raise ReadError("not an image that can be decoded" if is_whole else "the file is cut off")
    return _channels_last(array)


def _decode_compressed_tiff(data: bytes, tags: Mapping[int, tuple[int, ...]]) -> Pixels:
    """LZW, JPEG and the like, for which tifffile needs a further package."""
    if set(tags.get(TIFF_BITS, ())) == {8} and tags[TIFF_SAMPLES] == (4,):  # OpenCV would multiply 8-bit colours by their alpha
        return _decode_with_pil(data)
    try:
        done, pages = cv2.imdecodemulti(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise ReadError(f"cannot be decoded ({error.err})") from None
    if done and len(pages) > 1 and {page.shape for page in pages} == {pages[0].shape[:2]}:
        return np.dstack(pages)
    is_colour = tags.get(TIFF_PHOTOMETRIC) == (2,) and tags.get(TIFF_PLANAR, (1,))[0] == 1
    if done and is_colour and len(pages) == 1 and pages[0].shape[2:] == (4,):
        return np.ascontiguousarray(pages[0][:, :, [2, 1, 0, 3]])
    raise ReadError("its compression needs another package; save it without compression, or run pip install imagecodecs")


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


def is_reduced(full: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Whether an image of the full height and width can have come out of decode_image with the found ones."""
    return any(tuple(-(-side // factor) for side in full) == found for factor in (1, *REDUCED))


def _reduced(data: bytes, least: int) -> int | None:
    """OpenCV's flag for the smallest size at which both sides are at least so long; None for the full one."""
    position = 2
    while data[position : position + 1] == b"\xff" and len(data) > position + 9:
        marker = data[position + 1]
        if marker == 0xFF:  # a marker may be preceded by any number of these
            position += 1
            continue
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # the frame's header
            height, width, components = struct.unpack_from(">HHB", data, position + 5)
            factor = next((factor for factor in sorted(REDUCED, reverse=True) if _fits(height, width, factor, least)), None)
            return None if factor is None else REDUCED[factor][components != 1]
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None


def _fits(height: int, width: int, factor: int, least: int) -> bool:
    """Sides that the factor does not divide are rounded up, and what is resized then would not lie where its mask does."""
    return height % factor == width % factor == 0 and min(height, width) // factor >= least


def _has_jpeg_end(data: bytes) -> bool:
    """Whether the end marker follows the picture's own data: a thumbnail before it has one too, and a phone's video may follow."""
    position = 2
    while data[position : position + 1] == b"\xff" and data[position + 1 : position + 2] != JPEG_SCAN:
        if data[position + 1 : position + 2] == b"\xff":  # a marker may be preceded by any number of these
            position += 1
            continue
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return JPEG_END in data[position:]
