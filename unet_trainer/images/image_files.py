"""Reads and writes image files. Values keep their depth, and nothing is converted silently.

OpenCV decodes PNG, JPEG, WebP and BMP, tifffile TIFF. Where OpenCV would damage data (palettes turned into colours, cut-off files
accepted), PIL decodes instead, or the file is refused.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageOps

from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import ReadError, open_file, read_bytes
from unet_trainer.images.image_headers import GIF_START, NPY_START, describe_content, tiff_header
from unet_trainer.images.tiff_files import (
    BOMB_PIXELS,
    BOMB_RATIO,
    TIFF_STARTS,
    Pixels,
    TiffImage,
    read_errors,
    upright,
    with_channels_last,
)

IMAGE_EXTENSIONS = frozenset([".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".npy"])
# Factor → OpenCV's flags for grey and for colour. A JPEG decoded at a fraction of its size costs much less time.
REDUCED = {
    2: (cv2.IMREAD_REDUCED_GRAYSCALE_2, cv2.IMREAD_REDUCED_COLOR_2),
    4: (cv2.IMREAD_REDUCED_GRAYSCALE_4, cv2.IMREAD_REDUCED_COLOR_4),
    8: (cv2.IMREAD_REDUCED_GRAYSCALE_8, cv2.IMREAD_REDUCED_COLOR_8),
}
AS_STORED = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
COLOUR = 1 << 24  # a mask's colour that is not grey is the number COLOUR + 0xRRGGBB
COLOUR_CHANNELS = 3  # so many values count as one pixel

# The decoders' own messages name no file; the errors raised here are shown with the file's name.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
logging.getLogger("tifffile").setLevel(logging.CRITICAL)


def read_image(path: Path, min_side: int | None = None) -> Pixels:
    """H,W,C in the file's own depth. A JPEG may be decoded at 1/2 to 1/8 while both sides stay at least `min_side`."""
    return decode_image(read_bytes(path), min_side)


def read_mask(path: Path) -> Pixels:
    """H,W whole numbers as they are in the file: uint8 or uint16, a palette's index and not its colour (but see
    image_headers.mask_values_of); int32 for colours.

    A picture in one colour with a varying alpha channel is a mask in its alpha channel.
    """
    return decode_mask(read_bytes(path))


def decode_image(data: bytes, min_side: int | None = None, channels: int | None = None) -> Pixels:
    """H,W,C in the file's own depth: RGB, grey or as many channels as there are. EXIF rotation is applied; alpha is dropped, unless
    it is one of the `channels` that are wanted.

    A decompression bomb is refused before it is decoded. Raises ReadError.
    """
    refuse_bomb(data)
    with read_errors():
        return _decode_image(data, min_side, channels)


def _decode_image(data: bytes, min_side: int | None, channels: int | None) -> Pixels:
    if data.startswith(NPY_START):
        return np.ascontiguousarray(with_channels_last(_decode_npy(data)))
    if data.startswith(TIFF_STARTS):
        return TiffImage(io.BytesIO(data), channels).read_all()
    if data.startswith(GIF_START):
        return _decode_with_pil(data, "RGB")
    keeps_alpha = channels is not None and headers.channels_with_alpha(data) == channels
    if keeps_alpha and (image := _decode(data, cv2.IMREAD_UNCHANGED)).shape[2:] == (4,):  # which is not turned
        wanted = [0, 3] if headers.png_colour_type(data) == headers.PNG_GREY_ALPHA else [2, 1, 0, 3]
        return np.ascontiguousarray(upright(image[:, :, wanted], headers.orientation_of(data)))
    _, flags = _reduction(data, min_side)
    image = _decode(data, flags)
    if image.ndim == 2:
        return image[:, :, None]
    if headers.png_colour_type(data) == headers.PNG_GREY_ALPHA:
        return image[:, :, :1]
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


class DecodedMask(NamedTuple):
    """H,W whole numbers, and whether they are those of the alpha channel."""

    values: Pixels
    is_alpha: bool


def decode_image_and_size(data: bytes, min_side: int | None, channels: int | None = None) -> tuple[Pixels, tuple[int, int]]:
    """As decode_image, and height and width at full size."""
    image = decode_image(data, min_side, channels)
    factor, _ = _reduction(data, min_side)
    return image, (image.shape[0] * factor, image.shape[1] * factor)


def decode_mask(data: bytes) -> Pixels:
    """H,W whole numbers: see read_mask."""
    return decode_mask_or_alpha(data).values


def decode_mask_or_alpha(data: bytes) -> DecodedMask:
    """The mask, and where it was found: of a picture in one colour with holes in it, the alpha channel is the mask."""
    with read_errors():
        tiff = TiffImage(io.BytesIO(data), as_ids=True) if data.startswith(TIFF_STARTS) else None
        mask = _decode_mask_values(data) if tiff is None else _tiff_mask_values(tiff)
        has_alpha = headers.channels_with_alpha(data) > 0 if tiff is None else tiff.has_alpha
        if has_alpha and (mask == mask.flat[0]).all():
            alpha = _decode_alpha(data)
            if alpha is not None and alpha.shape == mask.shape:
                varies, is_invisible = alpha.min() < alpha.max(), alpha.max() == 0
                if varies or (is_invisible and mask.flat[0] != 0):  # the mask of an image without objects
                    return DecodedMask(alpha, True)
        return DecodedMask(mask, False)


def _tiff_mask_values(tiff: TiffImage) -> Pixels:
    mask = tiff.read_all()
    if tiff.palette is None:
        return _whole_numbers(mask)
    return _shown_values(mask[:, :, 0], headers.mask_values_of([(red, green, blue) for red, green, blue in tiff.palette.tolist()]))


def _decode_mask_values(data: bytes) -> Pixels:
    if data.startswith(NPY_START):
        return _whole_numbers(np.squeeze(_decode_npy(data)))
    if data.startswith(GIF_START):  # each file has a palette of its own: the colour is the value, not the index
        return np.ascontiguousarray(_join_colours(_decode_with_pil(data, "RGB")))
    if headers.has_palette(data):
        return _shown_values(_decode_with_pil(data), headers.mask_values_of(headers.palette_colours(data)))
    mask = _decode(data, AS_STORED)  # applies EXIF rotation, as for images
    if headers.png_bits(data) in (2, 4):  # OpenCV scales values of few bits to 255
        mask = mask // (255 // (2 ** headers.png_bits(data) - 1))
    return _whole_numbers(mask[:, :, ::-1] if mask.ndim == 3 else mask)


def _shown_values(indices: Pixels, values: Sequence[int]) -> Pixels:
    """H,W indices of a palette → the value of each; the indices themselves where two that occur have the same value."""
    if values == list(range(len(values))) or indices.max() >= len(values):
        return indices
    lookup, used = np.array(values, np.uint8), cv2.calcHist([indices], [0], None, [256], [0, 256]).ravel()[: len(values)] > 0
    return lookup[indices] if len({*lookup[used].tolist()}) == np.count_nonzero(used) else indices


def _whole_numbers(mask: Pixels) -> Pixels:
    """H,W or H,W,C → H,W uint8, uint16 or, for colours, int32; raises ReadError for anything else."""
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
    """H,W,3 RGB → H,W: the brightness of grey pixels, COLOUR + 0xRRGGBB for others."""
    red, green, blue = (channels[:, :, index] for index in range(3))
    is_grey = (blue == green) & (green == red)
    if is_grey.all():
        return blue
    if channels.dtype != np.uint8:
        raise ReadError(f"a colour mask of {channels.dtype}; need 8 bit")
    joined = COLOUR + (red.astype(np.int32) << 16) + (green.astype(np.int32) << 8) + blue
    return np.where(is_grey, blue, joined).astype(np.int32)


def to_channels(image: Pixels, channels: int) -> Pixels:
    """Repeats the channel of a grey image; returns any other image as it is."""
    return np.repeat(image, channels, axis=2) if image.shape[2] == 1 and channels > 1 else image


def refuse_bomb(data: bytes, expected: tuple[int, int] | None = None) -> None:
    """Raises ReadError for a small file that decompresses to a huge image, unless it has the expected height and width. The pages
    and channels of a TIFF are summed."""
    tiff = tiff_header(data)
    size = tiff.stored_size if tiff is not None else None if data.startswith(NPY_START) else headers.stored_size(data)
    if size is None:
        return  # the decoder says what is wrong
    height, width = size
    num_pixels, what = height * width, f"{width}×{height} pixels"
    if tiff is not None:
        num_pixels = max(num_pixels, tiff.num_values // COLOUR_CHANNELS)
        what += f" on {len(tiff.pages)} pages" if len(tiff.pages) > 1 else ""
        expected = expected if num_pixels == height * width else None
    if num_pixels > max(BOMB_PIXELS, len(data) * BOMB_RATIO) and size != expected:
        raise ReadError(f"{len(data) / 1e6:.2g} MB that decompress to {what}: a decompression bomb")


def write_image(path: Path, pixels: Pixels) -> None:
    """Writes H,W or H,W,3 RGB in the format that the extension names."""
    path.write_bytes(encode_image(pixels, path.suffix))


def encode_image(pixels: Pixels, extension: str) -> bytes:
    stored = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.ndim == 3 else pixels
    done, buffer = cv2.imencode(extension, stored)
    assert done, extension
    return buffer.tobytes()


def _reduction(data: bytes, min_side: int | None) -> tuple[int, int]:
    """The largest factor by which a JPEG can be reduced while both sides stay at least `min_side`, and OpenCV's flags for it.

    The factor must divide both sides: rounded up, the image would be stretched against its mask.
    """
    frame = None if min_side is None else headers.jpeg_frame(data)
    if frame is not None and min_side is not None:
        height, width, components = frame
        for factor in sorted(REDUCED, reverse=True):
            if height % factor == width % factor == 0 and min(height, width) // factor >= min_side:
                return factor, REDUCED[factor][components != 1]
    return 1, AS_STORED


def _decode(data: bytes, flags: int) -> Pixels:
    _refuse_cut_off(data)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if image is None:
        raise ReadError(describe_content(data) or "not an image that can be decoded")
    return image


def _decode_with_pil(data: bytes, mode: str | None = None) -> Pixels:
    """The pixels in one of PIL's modes; without a mode, of a palette the indices, which OpenCV does not give."""
    _refuse_cut_off(data)
    with Image.open(io.BytesIO(data)) as picture:
        return np.array(picture if mode is None else picture.convert(mode), dtype=np.uint8)


def _decode_alpha(data: bytes) -> Pixels | None:
    """H,W uint8, rotated as the picture is; None where PIL cannot read it."""

    def look(picture: Image.Image) -> Pixels:
        turned = ImageOps.exif_transpose(picture) if headers.is_turned(data) else picture
        return np.array(turned.convert("RGBA").getchannel("A"))

    return headers.look_with_pil(data, look, None)


def _refuse_cut_off(data: bytes) -> None:
    if headers.is_cut_off(data):
        raise ReadError("the file is cut off")


def _decode_npy(data: bytes) -> Pixels:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except ValueError as error:
        raise ReadError("cannot be decoded (it holds Python objects)") if "pickle" in str(error) else error from None
    if array.dtype.kind not in "buif" or array.size == 0:
        raise ReadError(f"an array of {array.dtype} and shape {array.shape}; need numbers for pixels")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def map_npy(path: Path) -> Pixels:
    """H,W,C of an array file, mapped into memory: what is not looked at is not read. Raises ReadError."""
    open_file(path).close()  # a pipe would be waited for
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception:  # of a broken header, anything
        array = None
    if array is None or array.dtype.kind not in "buif" or array.size == 0 or not array.dtype.isnative:
        return decode_image(read_bytes(path))  # which says what is wrong, or reads another byte order
    return with_channels_last(array)
