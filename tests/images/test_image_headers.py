"""What the header of a file says before it is decoded. How files with these properties are decoded is in test_image_files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from helpers.image_bytes import exif, npy_bytes, pil_bytes
from unet_trainer.images.image_files import decode_image
from unet_trainer.images.image_headers import (
    displayed_size,
    has_palette,
    is_cut_off,
    is_lossy,
    is_turned,
    palette_colours,
    picture_size,
)

COLOUR = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
GREY = COLOUR[:, :, 0]
FOUR = np.dstack([COLOUR, GREY])
FORMATS = ["PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF"]


def palette_image():
    image = Image.fromarray(GREY // 64)
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    return image


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_indices_into_colours_are_a_palette_and_greys_are_not(kind):
    data = pil_bytes(kind, palette_image())
    assert has_palette(data)
    assert palette_colours(data)[:4] == [(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert palette_colours(data[:30]) == []
    for other in (GREY, COLOUR):  # a BMP of greys has a table of greys in order
        assert not has_palette(pil_bytes(kind, other))
        assert palette_colours(pil_bytes(kind, other)) == []


def test_compression_that_changes_values_is_told():
    lossy = [("JPEG", GREY, {}), ("WEBP", COLOUR, {}), ("WEBP", FOUR, {}), ("TIFF", COLOUR, {"compression": "jpeg"})]
    exact = [("PNG", GREY, {}), ("WEBP", FOUR, {"lossless": True}), ("TIFF", COLOUR, {"compression": "tiff_lzw"})]
    assert all(is_lossy(pil_bytes(kind, pixels, **options)) for kind, pixels, options in lossy)
    assert not any(is_lossy(pil_bytes(kind, pixels, **options)) for kind, pixels, options in exact)
    assert not is_lossy(npy_bytes(GREY))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_orientations_2_to_8_turn_an_image_and_its_size(kind):
    for orientation in range(10):
        data = pil_bytes(kind, COLOUR, exif=exif(orientation))
        assert is_turned(data) == (2 <= orientation <= 8)
        if kind != "TIFF":
            assert displayed_size(data) == decode_image(data).shape[:2]
    assert not is_turned(b"\xff\xd8\xff Exif and nothing else")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_without_its_end_is_cut_off(kind):
    data = pil_bytes(kind, COLOUR)
    assert not is_cut_off(data)
    assert not is_cut_off(data + bytes(100))  # a phone's video may follow
    for length in (len(data) - 20, len(data) // 2, 10):
        assert is_cut_off(data[:length])
    assert not is_cut_off(pil_bytes("BMP", COLOUR)[:100])  # its decoder notices it


def test_the_end_of_a_thumbnail_is_not_the_end_of_a_jpeg():
    thumbnail = pil_bytes("JPEG", COLOUR[:5, :5])
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    whole = pil_bytes("JPEG", COLOUR)
    data = whole[:2] + segment + whole[2:]
    assert not is_cut_off(data)
    assert is_cut_off(data[:-2])


def test_the_size_is_read_without_the_pixels():
    for kind in FORMATS:
        data = pil_bytes(kind, COLOUR)
        assert picture_size(data[: len(data) * 3 // 4] if kind in ("PNG", "JPEG") else data) == (20, 30)
    for data in (b"no image", npy_bytes(COLOUR)):
        assert picture_size(data) is None
        assert displayed_size(data) is None
