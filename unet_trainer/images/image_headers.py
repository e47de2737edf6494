"""What the bytes of an image file say before it is decoded: depth, palette, alpha, orientation, size, and whether it is complete.

Decodes no pixels. For a broken header the functions return what they return for a file without the property; decoding it fails.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import BinaryIO

from PIL import Image

from unet_trainer.images.tiff_structure import HEIGHT, SHORT, TIFF_STARTS, WIDTH, TiffDamage, TiffStructure, read_structure

PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND"
JPEG_START, JPEG_END = b"\xff\xd8\xff", b"\xff\xd9"
GIF_START, NPY_START, BMP_START, WEBP_START = b"GIF8", b"\x93NUMPY", b"BM", b"RIFF"

PNG_GREY_ALPHA, PNG_COLOUR_ALPHA, PNG_PALETTE = 4, 6, 3  # colour types
JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of a frame header, which holds the size
JPEG_SCANS = frozenset({0xDA})  # the marker before the pixel data

TIFF_BITS, TIFF_COMPRESSION, TIFF_PHOTOMETRIC, TIFF_SAMPLES, TIFF_PLANAR, TIFF_EXTRA_SAMPLES = 258, 259, 262, 277, 284, 338  # tags
TIFF_JPEGS = (6, 7)  # values of TIFF_COMPRESSION
TIFF_WHITE_IS_0, TIFF_RGB, TIFF_IS_PALETTE, TIFF_YCBCR = 0, 2, 3, 6  # values of TIFF_PHOTOMETRIC
TIFF_ALPHAS = (1, 2)  # values of TIFF_EXTRA_SAMPLES; with any other value the sample is a channel

ORIENTATION = 0x0112  # EXIF and TIFF tag
TURNS = range(2, 9)  # orientations other than upright
SIDEWAYS = range(5, 9)  # those that swap height and width

TiffTags = Mapping[int, tuple[int, ...]]

Image.MAX_IMAGE_PIXELS = None  # PIL would warn about any large image; image_files.refuse_bomb replaces that check
# What PIL raises for a broken header.
PIL_ERRORS = (OSError, SyntaxError, ValueError, TypeError, struct.error, OverflowError)


def has_alpha(data: bytes) -> bool:
    """Whether there is an alpha channel, which decode_image drops."""
    if data.startswith(TIFF_STARTS):
        return tiff_has_alpha(tiff_tags(data))
    if data.startswith(WEBP_START) and len(data) > 24 and data[12:16] in (b"VP8X", b"VP8L"):  # extended or lossless
        return bool(data[20 if data[12:16] == b"VP8X" else 24] & 16)
    return png_colour_type(data) in (PNG_GREY_ALPHA, PNG_COLOUR_ALPHA)


def has_palette(data: bytes) -> bool:
    """Whether the pixels are indices into a table of colours. A palette of greys in order does not count."""
    if data.startswith(TIFF_STARTS):
        return tiff_tags(data).get(TIFF_PHOTOMETRIC) == (TIFF_IS_PALETTE,)
    if data.startswith(BMP_START) and len(data) > 30 and data[28] <= 8:
        try:
            with Image.open(io.BytesIO(data)) as picture:
                return picture.mode == "P"  # PIL gives mode L for greys in order
        except PIL_ERRORS:
            return False
    return png_colour_type(data) == PNG_PALETTE


def palette_colours(data: bytes) -> list[tuple[int, int, int]]:
    """Red, green and blue of each index; empty for a file without a palette."""
    if not has_palette(data):
        return []
    try:
        with Image.open(io.BytesIO(data)) as picture:
            channels = picture.getpalette("RGB") or []
    except PIL_ERRORS:
        return []
    return list(zip(channels[::3], channels[1::3], channels[2::3], strict=True))


def is_lossy(data: bytes) -> bool:
    """Whether compression may have changed the values: JPEG, also inside a TIFF, and lossy WebP."""
    if data.startswith(TIFF_STARTS):
        return tiff_tags(data).get(TIFF_COMPRESSION, (1,))[0] in TIFF_JPEGS
    if data.startswith(WEBP_START):
        return b"VP8 " in data[12:16] or (data[12:16] == b"VP8X" and b"VP8L" not in data[:65536])
    return data.startswith(JPEG_START)


def is_turned(data: bytes) -> bool:
    """Whether decode_image rotates or mirrors the pixels because of the EXIF orientation."""
    if data.startswith(TIFF_STARTS):
        tags = tiff_tags(data)
        return tags.get(ORIENTATION, (1,))[0] in TURNS and is_plain_tiff(tags)
    if not data.startswith((JPEG_START, PNG_START, WEBP_START)):
        return False
    if b"Exif" not in data[:65536] and b"eXIf" not in data and not (data.startswith(WEBP_START) and b"EXIF" in data):
        return False  # saves the time that PIL needs
    try:
        with Image.open(io.BytesIO(data)) as picture:
            return picture.getexif().get(ORIENTATION, 1) in TURNS
    except PIL_ERRORS:
        return False


def is_cut_off(data: bytes) -> bool:
    """Whether the end of a PNG or JPEG is missing. OpenCV fills the missing part of a JPEG with grey and reports nothing."""
    if data.startswith(PNG_START):
        return PNG_END not in data[-4096:]
    return data.startswith(JPEG_START) and not _has_jpeg_end(data)


def picture_size(data: bytes) -> tuple[int, int] | None:
    """Height and width as stored, before any EXIF rotation; None where PIL cannot read the header."""
    try:
        with Image.open(io.BytesIO(data)) as picture:  # reads the header only
            width, height = picture.size
    except PIL_ERRORS:
        return None
    return height, width


def size_in_file(file: BinaryIO) -> tuple[int, int] | None:
    """As picture_size, of a file of which not all is in memory. Its position is moved."""
    file.seek(0)
    try:
        picture = Image.open(file)  # closing it would close the file
    except PIL_ERRORS:
        return None
    width, height = picture.size
    return height, width


def displayed_size(data: bytes) -> tuple[int, int] | None:
    """As picture_size, but after the EXIF rotation that decode_image applies to a JPEG, PNG or WebP."""
    try:
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
            is_on_its_side = is_turned(data) and picture.getexif().get(ORIENTATION, 1) in SIDEWAYS
    except PIL_ERRORS:
        return None
    return (width, height) if is_on_its_side else (height, width)


def stored_size(data: bytes) -> tuple[int, int] | None:
    """As picture_size; without PIL, which takes longer, for JPEG and PNG, and for TIFF, of which PIL knows fewer kinds."""
    frame = jpeg_frame(data)
    if frame is not None:
        return frame[:2]
    if data.startswith(PNG_START) and len(data) >= 24:
        width, height = struct.unpack_from(">II", data, 16)
        return height, width
    if data.startswith(TIFF_STARTS):
        try:
            first = read_structure(data).pages[0]
        except TiffDamage:
            return None
        return first.number(HEIGHT, 0), first.number(WIDTH, 0)
    return picture_size(data)


def jpeg_frame(data: bytes) -> tuple[int, int, int] | None:
    """Height, width and number of components of a JPEG; None for other files and where there is no frame header."""
    position = _find_jpeg_marker(data, JPEG_FRAMES) if data.startswith(JPEG_START) else len(data)
    if len(data) < position + 10 or data[position] != 0xFF or data[position + 1] not in JPEG_FRAMES:
        return None
    height, width, components = struct.unpack_from(">HHB", data, position + 5)
    return height, width, components


def _has_jpeg_end(data: bytes) -> bool:
    """Whether the end marker follows the pixel data: a thumbnail before it has an end marker too, and other data may follow."""
    pixels = _find_jpeg_marker(data, JPEG_SCANS)
    return data.endswith(JPEG_END, pixels) or data.find(JPEG_END, pixels) >= 0


def _find_jpeg_marker(data: bytes, wanted: frozenset[int]) -> int:
    """Position of the first marker of these kinds, or where the chain of segments breaks off."""
    position = 2
    while data[position : position + 1] == b"\xff" and len(data) > position + 1 and data[position + 1] not in wanted:
        if data[position + 1] == 0xFF:  # a marker may be preceded by any number of fill bytes
            position += 1
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return position


def png_colour_type(data: bytes) -> int | None:
    return data[25] if data.startswith(PNG_START) and len(data) > 25 else None


def png_bits(data: bytes) -> int:
    """Bits per value; 0 for other files."""
    return data[24] if data.startswith(PNG_START) and len(data) > 24 else 0


def tiff_tags(data: bytes) -> TiffTags:
    """The 16-bit tags of a TIFF with one page; empty for several pages, for BigTIFF and for a broken file."""
    try:
        return single_page_tags(read_structure(data))
    except TiffDamage:
        return {}


def single_page_tags(structure: TiffStructure) -> TiffTags:
    """As tiff_tags."""
    if structure.is_big or len(structure.pages) != 1:
        return {}
    tags = structure.pages[0].tags
    return {TIFF_SAMPLES: (1,), **{number: tag.values for number, tag in tags.items() if tag.kind == SHORT and tag.values}}


def is_plain_tiff(tags: TiffTags) -> bool:
    """Whether OpenCV decodes it right: one page of grey or of interleaved colours.

    Of three samples that are no colours it reads only one, and it mixes up 16-bit channels that are stored plane by plane.
    """
    samples = tags.get(TIFF_SAMPLES, (0,))[0]
    is_colour = tags.get(TIFF_PHOTOMETRIC, (0,))[0] in (TIFF_RGB, TIFF_YCBCR) and tags.get(TIFF_PLANAR, (1,))[0] == 1
    return samples == 1 or (samples == 3 and is_colour)


def tiff_has_alpha(tags: TiffTags) -> bool:
    extra = tags.get(TIFF_EXTRA_SAMPLES, ())
    return len(extra) > 0 and extra[-1] in TIFF_ALPHAS
