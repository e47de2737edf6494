"""Arrays as the bytes of image files, written by OpenCV, PIL, tifffile and numpy."""

from __future__ import annotations

import io
import struct
import zlib

import cv2
import numpy as np
import tifffile
from PIL import Image

ORIENTATION = 0x0112  # EXIF tag


def cv2_bytes(extension, pixels, *options):
    """Channels in OpenCV's order: blue, green, red."""
    done, buffer = cv2.imencode(extension, pixels, *options)
    assert done
    return buffer.tobytes()


def pil_bytes(kind, pixels, mode=None, **options):
    """`pixels` is an array or a PIL image; it is converted to `mode` before it is saved."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    stream = io.BytesIO()
    (image.convert(mode) if mode else image).save(stream, kind, **options)
    return stream.getvalue()


def tiff_bytes(array, **options):
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **options)
    return stream.getvalue()


def npy_bytes(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def exif(orientation, **tags):
    """EXIF data with this orientation."""
    content = Image.Exif()
    content[ORIENTATION] = orientation
    if "maker" in tags:
        content[0x010F] = tags["maker"]
    return content


def png_chunk(name, content):
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def grey_png(width, height, bits, packed):
    """A PNG of `bits` per pixel from zlib-compressed rows."""
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", packed) + png_chunk(b"IEND", b"")


def empty_png(height, width):
    """A black PNG of one bit per pixel. Compressed row by row, so that a huge one needs no memory."""
    packer = zlib.compressobj(9)
    row = bytes(1 + -(-width // 8))
    packed = b"".join([packer.compress(row) for _ in range(height)] + [packer.flush()])
    return grey_png(width, height, 1, packed)


def damaged_jpeg(data):
    """The JPEG with wrong pixel data in the middle and its end marker in place: OpenCV decodes it, libjpeg prints a message."""
    middle = len(data) * 2 // 3
    assert data.endswith(b"\xff\xd9")
    return data[:middle] + b"\xff\xd3" * 6 + data[middle + 12 :]
