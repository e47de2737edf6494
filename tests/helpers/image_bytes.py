"""Arrays as the bytes of image files, written by OpenCV, PIL, tifffile and numpy."""

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


def _entries(data):
    """Byte order and offset size of a TIFF; where each entry of its first directory begins; and where the next directory is named."""
    order, is_big = ("<" if data[:2] == b"II" else ">"), data[2:4] in (b"+\0", b"\0+")
    pointer, count, length = ("Q", "Q", 20) if is_big else ("I", "H", 12)
    start = struct.unpack_from(order + pointer, data, 8 if is_big else 4)[0]
    first = start + struct.calcsize(f"<{count}")
    end = first + length * struct.unpack_from(order + count, data, start)[0]
    return order, pointer, range(first, end, length), end, start


def point_back(data):
    """The TIFF with its only directory followed by itself."""
    order, pointer, _, end, start = _entries(data)
    changed = bytearray(data)
    struct.pack_into(order + pointer, changed, end, start)
    return bytes(changed)


def change_tag(data, tag, count=None, value=None, kind=None, long_value=None):
    """The TIFF with another number of values of a tag in its first directory, another type, or another single value."""
    order, pointer, entries, _, _ = _entries(data)
    changed = bytearray(data)
    place = next(entry for entry in entries if struct.unpack_from(f"{order}H", data, entry)[0] == tag)
    if count is not None:
        struct.pack_into(order + pointer, changed, place + 4, count)
    if kind is not None:
        struct.pack_into(f"{order}H", changed, place + 2, kind)
    if long_value is not None:
        struct.pack_into(f"{order}I", changed, place + 8, long_value)
    if value is not None:
        struct.pack_into(f"{order}H", changed, place + 4 + struct.calcsize(pointer), value)
    return bytes(changed)


def shared_strip_tiff(height, width, num_pages):
    """16-bit pages of zeros, all stored as one deflated strip: a few kB that decompress to gigabytes."""
    packer = zlib.compressobj(9)
    row = bytes(2 * width)
    strip = b"".join([packer.compress(row) for _ in range(height)] + [packer.flush()])
    tags = [(256, 4, width), (257, 4, height), (258, 3, 16), (259, 3, 8), (262, 3, 1)]
    tags += [(273, 4, 8), (277, 3, 1), (278, 4, height), (279, 4, len(strip))]
    start = 8 + len(strip)
    length = 2 + 12 * len(tags) + 4
    directories = []
    for page in range(num_pages):
        following = start + (page + 1) * length if page + 1 < num_pages else 0
        entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
        directories.append(struct.pack("<H", len(tags)) + entries + struct.pack("<I", following))
    return b"II*\0" + struct.pack("<I", start) + strip + b"".join(directories)
