"""Files and words that are almost right: real ones with some bytes, fields or words changed at random."""

import copy
import struct

import cv2
import numpy as np
from PIL import Image

from helpers.image_bytes import cv2_bytes, exif, npy_bytes, pil_bytes, tiff_bytes

NUMBERS = (0, 1, 2, 7, 8, 127, 128, 255, 256, 32767, 32768, 65535, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)


def image_files():
    """Name → bytes of a small file of every format that is read, written by several encoders in several kinds."""
    rng = np.random.default_rng(0)
    rgb = rng.integers(0, 256, (20, 24, 3)).astype(np.uint8)
    grey, ids, deep = rgb[:, :, 0], rgb[:, :, 0] // 64, rgb.astype(np.uint16) * 257
    palette = Image.fromarray(ids)
    palette.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    five = rng.integers(0, 65536, (20, 24, 5)).astype(np.uint16)
    return {
        "jpg": cv2_bytes(".jpg", rgb),
        "turned.jpg": pil_bytes("JPEG", rgb, exif=exif(6)),
        "progressive.jpg": pil_bytes("JPEG", rgb, progressive=True),
        "cmyk.jpg": pil_bytes("JPEG", rgb, "CMYK"),
        "png": cv2_bytes(".png", rgb),
        "deep.png": cv2_bytes(".png", deep),
        "alpha.png": pil_bytes("PNG", rgb, "RGBA"),
        "grey_alpha.png": pil_bytes("PNG", rgb, "LA"),
        "palette.png": pil_bytes("PNG", palette),
        "one_bit.png": pil_bytes("PNG", grey, "1"),
        "bmp": cv2_bytes(".bmp", rgb),
        "palette.bmp": pil_bytes("BMP", palette),
        "webp": cv2_bytes(".webp", rgb),
        "lossless.webp": pil_bytes("WEBP", rgb, lossless=True),
        "alpha.webp": pil_bytes("WEBP", np.dstack([rgb, grey]), exif=exif(6)),
        "gif": pil_bytes("GIF", palette),
        "animated.gif": pil_bytes("GIF", palette, save_all=True, append_images=[palette]),
        "tif": tiff_bytes(rgb, photometric="rgb"),
        "big.tif": tiff_bytes(rgb, photometric="rgb", bigtiff=True),
        "big_endian.tif": tiff_bytes(deep, photometric="rgb", byteorder=">"),
        "tiles.tif": tiff_bytes(rgb, photometric="rgb", tile=(16, 16), compression="zlib"),
        "lzw.tif": pil_bytes("TIFF", rgb, compression="tiff_lzw"),
        "packbits.tif": pil_bytes("TIFF", rgb, compression="packbits"),
        "jpeg.tif": pil_bytes("TIFF", rgb, compression="jpeg"),
        "fax.tif": pil_bytes("TIFF", grey, "1", compression="group4"),
        "palette.tif": pil_bytes("TIFF", palette),
        "rgba.tif": pil_bytes("TIFF", rgb, "RGBA", compression="tiff_adobe_deflate"),
        "turned.tif": pil_bytes("TIFF", rgb, tiffinfo={274: 6}),
        "pages.tif": tiff_bytes(five[:, :, :3].transpose(2, 0, 1), photometric="minisblack", compression="zlib"),
        "planes.tif": tiff_bytes(five.transpose(2, 0, 1), photometric="minisblack", planarconfig="separate"),
        "floats.tif": tiff_bytes(rng.normal(size=(20, 24)).astype(np.float32), compression="zlib"),
        "cv2.tif": cv2_bytes(".tif", deep),
        "pyramid.tif": _pyramid(grey),
        "npy": npy_bytes(rgb),
        "floats.npy": npy_bytes(rng.normal(size=(5, 20, 24)).astype(np.float32)),
        "fortran.npy": npy_bytes(np.asfortranarray(five)),
    }


def _pyramid(grey):
    import io

    import tifffile

    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as writer:
        writer.write(grey, subifds=1, tile=(16, 16))
        writer.write(cv2.resize(grey, (12, 10)), subfiletype=1)
    return stream.getvalue()


def mutated(data, rng, others=()):
    """The bytes with one to six changes, most of them near the beginning, where headers are, or near the end."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 7))):
        if len(changed) < 8:
            break
        place = _place(len(changed), rng)
        kind = int(rng.integers(8))
        if kind <= 1:
            changed[place] = int(rng.integers(256))
        elif kind == 2:
            changed[place] ^= 1 << int(rng.integers(8))
        elif kind == 3:  # another number, in either order and of either size
            layout = "<>"[int(rng.integers(2))] + "HIQ"[int(rng.integers(3))]
            size = struct.calcsize(layout)
            number = NUMBERS[int(rng.integers(len(NUMBERS)))] if rng.random() < 0.8 else int(rng.integers(len(changed)))
            if place + size <= len(changed):
                struct.pack_into(layout, changed, place, number % 256**size)
        elif kind == 4:
            del changed[place : place + int(rng.integers(1, 40))]
        elif kind == 5:
            changed[place:place] = changed[place : place + int(rng.integers(1, 40))]
        elif kind == 6:
            del changed[place:]
        elif others:
            other = others[int(rng.integers(len(others)))]
            changed[place:] = other[place:] if rng.random() < 0.5 else other[-40:]
    return bytes(changed)


def _place(length, rng):
    share = rng.random()
    if share < 0.5:
        return int(rng.integers(min(length, 160)))
    return int(rng.integers(max(0, length - 400), length)) if share < 0.75 else int(rng.integers(length))


def mutated_json(content, chooser):
    """The value with one to three changes somewhere in it: gone, renamed, repeated, or another value."""

    def places(value, path=()):
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(place for name, item in items for place in places(item, (*path, name)))]

    for _ in range(chooser.randint(1, 3)):
        *path, last = chooser.choice(places(content)[1:] or [(None,)])
        if last is None:
            break
        parent = content
        for name in path:
            parent = parent[name]
        kind = chooser.choice(["gone", "renamed", "repeated", "other", "other", "other"])
        if kind == "gone":
            del parent[last]
        elif kind == "renamed" and isinstance(parent, dict):
            parent[f"{last}x"] = parent.pop(last)
        elif kind == "repeated" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[last]))
        else:
            parent[last] = copy.deepcopy(chooser.choice(JSON_VALUES))
    return content


def _nested(depth):
    return [_nested(depth - 1)] if depth else []


NAN, INFINITY = float("nan"), float("inf")
NUMBERS_OF_JSON = (0, -1, 7, 1e308, NAN, INFINITY, 10**30, 10**400, 2**63)
WORDS_OF_JSON = ("", "x", "é\ud800", "finished", "<script>", "9" * 50)
LISTS_OF_JSON = ([], [1], [[1]], [None], ["a", "b"], [[1, 2], [3, 4]], [[1, 2], [3]], _nested(50), _nested(400))
JSON_VALUES = (None, True, *NUMBERS_OF_JSON, *WORDS_OF_JSON, *LISTS_OF_JSON, {}, {"a": 1}, {"epoch": 3}, {"iou": []})
