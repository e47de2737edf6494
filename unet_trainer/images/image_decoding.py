"""Reads and writes image files, and tells what their bytes say before they are decoded. Masks: see mask_decoding.

Values keep their depth. OpenCV decodes PNG, JPEG, WebP and BMP, tifffile TIFF. Where OpenCV would damage data (palettes
turned into colours, cut-off files accepted), PIL decodes instead, or the file is refused."""

import contextlib
import io
import logging
import re
import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from unet_trainer.images import tiff_files
from unet_trainer.images.file_bytes import ReadError, open_file, read_bytes
from unet_trainer.images.tiff_files import TIFF_STARTS, Pixels, TiffImage, read_errors, with_channels_last

VOLUME_EXTENSIONS = (".nii", ".nii.gz")  # that training reads slice by slice
IMAGE_EXTENSIONS = frozenset([".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".npy"])
PNG_START = b"\x89PNG\r\n\x1a\n"
KINDS = {PNG_START: "PNG", b"\xff\xd8\xff": "JPEG", b"GIF8": "GIF", b"\x93NUMPY": "NPY", b"BM": "BMP", b"RIFF": "WEBP"}
KINDS |= dict.fromkeys(TIFF_STARTS, "TIFF")  # by how files begin
PNG_GREY_ALPHA, PNG_COLOUR_ALPHA, PNG_PALETTE = 4, 6, 3  # colour types
JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # markers of a frame header, which holds the size
JPEG_SCAN, JPEG_FILL = 0xDA, 0xFF  # the marker before the pixel data; a byte that may precede a marker
AS_STORED = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
# What PIL raises for a broken header.
PIL_ERRORS = (OSError, SyntaxError, ValueError, TypeError, struct.error, OverflowError)

# The decoders' own messages name no file; the errors raised here are shown with the file's name.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
for decoder in ("tifffile", "PIL"):
    logging.getLogger(decoder).setLevel(logging.CRITICAL)
Image.MAX_IMAGE_PIXELS = None  # PIL would warn about any large image; refuse_bomb replaces that check


def read_image(path: Path, min_side: int | None = None) -> Pixels:
    """See EncodedImage.decode."""
    return decode_image(read_bytes(path), min_side)


def decode_image(data: bytes, min_side: int | None = None) -> Pixels:
    """See EncodedImage.decode."""
    return EncodedImage(data).decode(min_side)


class EncodedImage:
    """The bytes of an image file: what they say before they are decoded, and their pixels. Of a broken header, the
    answers are those of a file without the property: decoding tells what is wrong."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.kind = next((kind for start, kind in KINDS.items() if data.startswith(start)), "")
        self.png_bits, self.png_colours = data[24:26] if self.kind == "PNG" and len(data) > 25 else bytes(2)
        self.tiff: TiffImage | None = None
        self.picture: Image.Image | None = None  # of PIL, its pixels not read yet; only where nothing faster tells
        with contextlib.suppress(ReadError, *PIL_ERRORS):
            if self.kind == "TIFF":
                self.tiff = TiffImage(io.BytesIO(data))
            elif self.kind not in ("PNG", "JPEG", "NPY") or self.png_colours == PNG_PALETTE:
                self.picture = Image.open(io.BytesIO(data))
        # of a JPEG: height, width and number of components, if there is a frame header; and where its pixels begin
        self.jpeg_frame, self.jpeg_pixels = _jpeg_segments(data if self.kind == "JPEG" else b"")
        # height and width before the image is turned; None of an array, and where the header does not say
        self.stored_size: tuple[int, int] | None = self.jpeg_frame[:2] if self.jpeg_frame is not None else None
        self.channels_with_alpha = 0  # the number of channels of a file of which the last one is alpha
        self.nodata: float | None = None  # the value of pixels without data, by the tag that GDAL writes into a TIFF
        # whether compression may have changed the values
        self.is_lossy = self.kind == "JPEG" or (self.kind == "WEBP" and b"VP8L" not in data[:65536])
        if self.png_bits:
            self.stored_size = struct.unpack_from(">II", data, 16)[::-1]
            self.channels_with_alpha = {PNG_GREY_ALPHA: 2, PNG_COLOUR_ALPHA: 4}.get(self.png_colours, 0)
        elif self.picture is not None:
            self.stored_size = self.picture.height, self.picture.width
            self.channels_with_alpha = 4 if self.kind == "WEBP" and self.picture.mode == "RGBA" else 0
        elif self.tiff is not None:
            self.stored_size, self.nodata, self.is_lossy = self.tiff.stored_size, self.tiff.nodata, self.tiff.is_lossy
            self.channels_with_alpha = self.tiff.num_channels if self.tiff.has_alpha else 0

    @cached_property
    def palette(self) -> list[tuple[int, int, int]]:
        """Red, green and blue of each index where the pixels are indices into a table of colours; else empty."""
        colours = None if self.tiff is None else self.tiff.palette
        if self.kind in ("PNG", "BMP") and self.picture is not None and self.picture.palette:
            layout, table = self.picture.palette.getdata()  # RGB, or BGR and a byte that says nothing
            values = np.frombuffer(bytes(table), np.uint8, len(table) // len(layout) * len(layout))
            colours = values.reshape(-1, len(layout))[:, [layout.index(channel) for channel in "RGB"]]
        return [] if colours is None else [(red, green, blue) for red, green, blue in colours.tolist()]

    @cached_property
    def orientation(self) -> int:
        """The EXIF orientation, by which `decode` turns the pixels; 1: upright."""
        if self.tiff is not None:
            return self.tiff.orientation
        has_exif = any(name in self.data for name in (b"Exif", b"eXIf", b"EXIF"))  # without, PIL would decode a PNG
        if self.kind in ("PNG", "JPEG", "WEBP") and has_exif:
            with contextlib.suppress(*PIL_ERRORS):
                return int(Image.open(io.BytesIO(self.data)).getexif().get(tiff_files.ORIENTATION, 1))
        return 1

    @property
    def is_turned(self) -> bool:
        """Whether `decode` rotates or mirrors the pixels."""
        return self.orientation in tiff_files.TURNS

    @property
    def is_cut_off(self) -> bool:
        """Whether the end of a PNG or JPEG is missing: OpenCV fills that part of a JPEG with grey."""
        if self.kind == "PNG":
            return b"IEND" not in self.data[-4096:]
        # a thumbnail before the pixels of a JPEG has an end marker too, and other data may follow
        pixels, end = self.jpeg_pixels, b"\xff\xd9"
        return self.kind == "JPEG" and not self.data.endswith(end, pixels) and self.data.find(end, pixels) < 0

    def refuse_bomb(self, expected: tuple[int, int] | None = None) -> None:
        """Raises ReadError for a small file of a huge image, in all pages and channels, unless its size is expected."""
        if self.tiff is not None:
            self.tiff.refuse_bomb(expected)
        elif (size := self.stored_size) is not None and size != expected:
            tiff_files.refuse_bomb(len(self.data), size[0] * size[1], f"{size[1]}×{size[0]} pixels")

    def reduction(self, min_side: int | None) -> tuple[int, int]:
        """The largest factor by which a JPEG can be reduced while both sides stay at least `min_side`, and OpenCV's
        flags. It must divide both sides: rounded up, the image would be stretched against its mask."""
        if min_side is not None and self.jpeg_frame is not None:
            height, width, components = self.jpeg_frame
            colours = "GRAYSCALE" if components == 1 else "COLOR"
            for factor in (8, 4, 2):
                if height % factor == width % factor == 0 and min(height, width) // factor >= min_side:
                    return factor, getattr(cv2, f"IMREAD_REDUCED_{colours}_{factor}")
        return 1, AS_STORED

    def decode(self, min_side: int | None = None, channels: int | None = None) -> Pixels:
        """H,W,C in the file's own depth: RGB, grey or as many channels as there are. EXIF rotation is applied; alpha is
        dropped, unless it is one of the `channels` that are wanted. A JPEG may be decoded at 1/2 to 1/8 while both
        sides stay at least `min_side`. Raises ReadError, of a decompression bomb before it is decoded."""
        self.refuse_bomb()
        with read_errors():
            if self.kind == "NPY":
                return np.ascontiguousarray(with_channels_last(decode_array(self.data)))
            if self.kind == "TIFF":
                return self.open_tiff().read_all(channels)
            if self.kind == "GIF":
                return self.with_pil("RGB")
            is_grey_alpha = self.png_colours == PNG_GREY_ALPHA
            keeps_alpha = channels is not None and self.channels_with_alpha == channels
            # which OpenCV does not turn
            if keeps_alpha and (image := self.with_opencv(cv2.IMREAD_UNCHANGED)).shape[2:] == (4,):
                wanted = [0, 3] if is_grey_alpha else [2, 1, 0, 3]
                return np.ascontiguousarray(tiff_files.upright(image[:, :, wanted], self.orientation))
            image = self.with_opencv(self.reduction(min_side)[1])
            if image.ndim == 2:
                return image[:, :, None]
            return image[:, :, :1] if is_grey_alpha else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

    def open_tiff(self) -> TiffImage:
        """Raises ReadError."""
        return self.tiff or TiffImage(io.BytesIO(self.data))

    def with_opencv(self, flags: int = AS_STORED) -> Pixels:
        if self.is_cut_off:
            raise ReadError("the file is cut off")
        image = cv2.imdecode(np.frombuffer(self.data, np.uint8), flags)
        if image is None:
            raise ReadError(describe_content(self.data) or "not an image that can be decoded")
        return image

    def with_pil(self, mode: str | None = None) -> Pixels:
        """The pixels in one of PIL's modes; without a mode, of a palette the indices, which OpenCV does not give."""
        if self.is_cut_off:
            raise ReadError("the file is cut off")
        picture = self.picture or Image.open(io.BytesIO(self.data))  # which tells what is wrong
        return np.array(picture if mode is None else picture.convert(mode), dtype=np.uint8)


def _jpeg_segments(data: bytes) -> tuple[tuple[int, int, int] | None, int]:
    """See EncodedImage. Where there is no scan: where the chain of segments breaks off."""
    position, frame = 2, None
    while len(data) > position + 1 and data[position] == 0xFF and (marker := data[position + 1]) != JPEG_SCAN:
        if frame is None and marker in JPEG_FRAMES and len(data) >= position + 10:
            frame = struct.unpack_from(">HHB", data, position + 5)
        position += 1 if marker == JPEG_FILL else 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return frame, position


def mask_values_of(colours: Sequence[tuple[int, int, int]]) -> list[int]:
    """The value of each index in a mask with this palette: the index; but of white and black, black is 0."""
    is_negative = colours[:1] == [(255, 255, 255)] and set(colours[1:]) == {(0, 0, 0)}
    return [1, 0, *range(2, len(colours))] if is_negative else list(range(len(colours)))


def decode_array(data: bytes) -> Pixels:
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
    with contextlib.suppress(Exception):  # of a broken header, anything
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.dtype.kind in "buif" and array.size and array.dtype.isnative:
            return with_channels_last(array)
    return read_image(path)  # which says what is wrong, or reads another byte order


def write_image(path: Path, pixels: Pixels) -> None:
    """Writes H,W or H,W,3 RGB in the format that the extension names."""
    path.write_bytes(encode_image(pixels, path.suffix))


def encode_image(pixels: Pixels, extension: str) -> bytes:
    if extension == ".npy":
        np.save(file := io.BytesIO(), pixels, allow_pickle=False)
        return file.getvalue()
    done, buffer = cv2.imencode(extension, cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR) if pixels.ndim == 3 else pixels)
    assert done, extension
    return buffer.tobytes()


# What is not read: extensions | how such a file begins, as a regular expression | what it is and what to do.
OTHERS = """
.heic .heif | .{4}ftyp(hei[cxms]|hevc|mif1|msf1) | a photo in Apple's HEIC format; convert it to JPEG or PNG
.avif .jfif .jpe .ppm .pgm .pnm .jp2 .jxl .tga .psd .svg .pdf | %PDF-|8BPS|.{4}ftypavi[fs] | \
a picture of a form that is not read; convert it to PNG or TIFF (magick FILE out.png)
.dcm .dicom .ima | .{128}DICM | a DICOM file; save its slices as 16-bit PNG or TIFF (pydicom reads them)
.nii .nii.gz | \\Z | a NIfTI volume; save its slices as TIFF or .npy (nibabel reads them; training takes volumes)
.czi .nd2 .lif .oib .lsm .vsi .ims | \\Z | a file of a microscope; save it as TIFF (bfconvert FILE out.tif)
.npz .h5 .hdf5 .mat .mha .mhd .nrrd | \\Z | a file of arrays; save each image in it as TIFF or .npy
.zip .tar .7z .rar .gz .tgz | PK[\x03\x05]|\x1f\x8b|7z\xbc\xaf|Rar! | an archive; unpack it, and give the folder
.mp4 .mov .avi .mkv .webm .mpg .wmv | \\Z | a video; save its frames as images (ffmpeg -i FILE frames/%06d.png)
.parquet .arrow | \\Z | a table of Hugging Face; save its images and masks as files, or give them from Python
git-lfs | version https://git-lfs | a pointer of git-lfs, not the file itself; run git lfs pull where it was cloned
html | (?i)(\xef\xbb\xbf)?\\s*<(!doctype )?html | a web page; the download failed and saved the site's answer: repeat it
text | (\xef\xbb\xbf)?\\s*(\\{|\\[|<\\?xml) | a text, not an image
"""
ROWS = [line.split(" | ") for line in OTHERS.strip().splitlines()]
BY_EXTENSION = {extension: what for extensions, _, what in ROWS for extension in extensions.split()}
HEAD_BYTES = 512


def describe_content(data: bytes) -> str | None:
    """What a file that is no image is by its first bytes, with the fix; None if it is nothing that is known here."""
    head = data[:HEAD_BYTES].decode("latin-1")
    return next((what for _, start, what in ROWS if head and re.match(start, head, re.DOTALL)), None)


def describe_file(path: Path) -> str | None:
    """What a file is by its extension or, where it has none, by its first bytes; None for anything else."""
    if suffixes := [suffix.lower() for suffix in path.suffixes]:
        return BY_EXTENSION.get("".join(suffixes[-2:])) or BY_EXTENSION.get(suffixes[-1])
    with contextlib.suppress(ReadError, OSError), open_file(path) as file:
        return describe_content(file.read(HEAD_BYTES))
    return None
