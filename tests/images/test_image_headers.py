"""What the header of a file says before it is decoded. How files with these properties are decoded is in test_image_files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from helpers.image_bytes import exif, npy_bytes, pil_bytes, tiff_bytes
from unet_trainer.images.image_files import decode_image
from unet_trainer.images.image_headers import (
    TIFF_BITS,
    TIFF_PHOTOMETRIC,
    TIFF_SAMPLES,
    displayed_size,
    has_alpha,
    has_palette,
    is_cut_off,
    is_lossy,
    is_plain_tiff,
    is_turned,
    jpeg_frame,
    palette_colours,
    picture_size,
    png_bits,
    png_colour_type,
    tiff_tags,
)

COLOUR = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
GREY = COLOUR[:, :, 0]
FOUR = np.dstack([COLOUR, GREY])
FORMATS = ["PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF"]


def palette_image():
    image = Image.fromarray(GREY // 64)
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    return image


@pytest.mark.parametrize("kind", FORMATS)
def test_an_rgb_image_has_no_alpha(kind):
    assert not has_alpha(pil_bytes(kind, COLOUR))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_an_rgba_image_has_alpha(kind):
    assert has_alpha(pil_bytes(kind, FOUR))


def test_grey_with_alpha_has_alpha_and_a_fourth_channel_is_none():
    assert has_alpha(pil_bytes("PNG", COLOUR, "LA"))
    assert has_alpha(pil_bytes("WEBP", FOUR, lossless=True))
    assert not has_alpha(pil_bytes("WEBP", COLOUR, lossless=True))
    assert not has_alpha(tiff_bytes(FOUR, photometric="rgb", extrasamples=["unspecified"]))
    assert not has_alpha(npy_bytes(FOUR))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_indices_into_colours_are_a_palette_and_greys_are_not(kind):
    assert has_palette(pil_bytes(kind, palette_image()))
    assert not has_palette(pil_bytes(kind, GREY))  # a BMP of greys has a table of greys in order
    assert not has_palette(pil_bytes(kind, COLOUR))


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_the_colours_of_a_palette_are_read(kind):
    assert palette_colours(pil_bytes(kind, palette_image()))[:4] == [(0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255)]
    assert palette_colours(pil_bytes(kind, COLOUR)) == []
    assert palette_colours(pil_bytes(kind, palette_image())[:30]) == []


def test_compression_that_changes_values_is_told():
    for data in (
        pil_bytes("JPEG", GREY),
        pil_bytes("JPEG", COLOUR),
        pil_bytes("WEBP", COLOUR),
        pil_bytes("WEBP", FOUR),
        pil_bytes("TIFF", COLOUR, compression="jpeg"),
    ):
        assert is_lossy(data)
    for data in (
        pil_bytes("PNG", GREY),
        pil_bytes("WEBP", COLOUR, lossless=True),
        pil_bytes("WEBP", FOUR, lossless=True),
        pil_bytes("TIFF", COLOUR),
        pil_bytes("TIFF", COLOUR, compression="tiff_lzw"),
        npy_bytes(GREY),
    ):
        assert not is_lossy(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize(("orientation", "turned"), [(0, False), (1, False), (2, True), (6, True), (8, True), (9, False)])
def test_the_orientations_2_to_8_turn_an_image(kind, orientation, turned):
    assert is_turned(pil_bytes(kind, COLOUR, exif=exif(orientation))) == turned


def test_a_file_without_orientation_is_not_turned():
    assert not is_turned(pil_bytes("JPEG", COLOUR))
    assert not is_turned(b"\xff\xd8\xff Exif and nothing else")
    assert not is_turned(npy_bytes(COLOUR))


def test_a_tiff_that_opencv_does_not_decode_is_not_turned():
    """tifffile, which decodes it, ignores the orientation."""
    tag = [(274, 3, 1, 6, True)]
    assert is_turned(tiff_bytes(GREY, extratags=tag))
    assert not is_turned(tiff_bytes(FOUR, photometric="minisblack", planarconfig="contig", extratags=tag))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_without_its_end_is_cut_off(kind):
    data = pil_bytes(kind, COLOUR)
    assert not is_cut_off(data)
    assert not is_cut_off(data + bytes(100))  # a phone's video may follow
    for length in (len(data) - 20, len(data) // 2, 10):
        assert is_cut_off(data[:length])


def test_the_end_of_a_thumbnail_is_not_the_end_of_a_jpeg():
    thumbnail = pil_bytes("JPEG", COLOUR[:5, :5])
    segment = b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail
    whole = pil_bytes("JPEG", COLOUR)
    data = whole[:2] + segment + whole[2:]
    assert not is_cut_off(data)
    assert b"\xff\xd9" in data[:-2]
    assert is_cut_off(data[:-2])


def test_other_formats_are_never_cut_off():
    """Their decoders notice it."""
    assert not is_cut_off(pil_bytes("BMP", COLOUR)[:100])
    assert not is_cut_off(b"text")


@pytest.mark.parametrize("kind", FORMATS)
def test_the_size_is_read_without_the_pixels(kind):
    data = pil_bytes(kind, COLOUR)
    assert picture_size(data) == (20, 30)
    if kind in ("PNG", "JPEG"):
        assert picture_size(data[: len(data) * 3 // 4]) == (20, 30)


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_size_as_it_is_shown_is_that_of_the_decoded_image(kind, orientation):
    data = pil_bytes(kind, COLOUR, exif=exif(orientation))
    assert displayed_size(data) == decode_image(data).shape[:2]


def test_a_file_without_a_header_has_no_size():
    assert picture_size(b"no image") is None
    assert displayed_size(b"no image") is None
    assert picture_size(npy_bytes(COLOUR)) is None


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"quality": 30, "exif": exif(6), "comment": b"\xff\xc0 no marker"}])
def test_the_frame_of_a_jpeg_holds_its_size_and_components(options):
    assert jpeg_frame(pil_bytes("JPEG", COLOUR, **options)) == (20, 30, 3)
    assert jpeg_frame(pil_bytes("JPEG", GREY, **options)) == (20, 30, 1)


def test_fill_bytes_before_a_marker_are_skipped():
    data = pil_bytes("JPEG", COLOUR)
    marker = data.index(b"\xff\xc0")
    assert jpeg_frame(data[:marker] + b"\xff\xff\xff" + data[marker:]) == (20, 30, 3)


def test_a_huffman_table_before_the_frame_is_not_taken_for_it():
    data = pil_bytes("JPEG", COLOUR)
    table, frame = data.index(b"\xff\xc4"), data.index(b"\xff\xc0")
    length = 2 + int.from_bytes(data[table + 2 : table + 4], "big")
    assert jpeg_frame(data[:frame] + data[table : table + length] + data[frame:]) == (20, 30, 3)


def test_what_is_no_jpeg_has_no_frame():
    whole = pil_bytes("JPEG", COLOUR)
    for data in (
        b"",
        b"\xff\xd8\xff",
        whole[: whole.index(b"\xff\xc0") + 8],
        pil_bytes("PNG", COLOUR),
        b"\xff\xd8\xff\xe0\x00\x04ab" + bytes(20),
    ):
        assert jpeg_frame(data) is None


def test_the_header_of_a_png_holds_bits_and_colour_type():
    assert (png_bits(pil_bytes("PNG", GREY)), png_colour_type(pil_bytes("PNG", GREY))) == (8, 0)
    assert (png_bits(pil_bytes("PNG", GREY > 9)), png_colour_type(pil_bytes("PNG", FOUR))) == (1, 6)
    for data in (b"\x89PNG\r\n\x1a\n", pil_bytes("JPEG", GREY)):
        assert (png_bits(data), png_colour_type(data)) == (0, None)


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_tags_of_a_tiff_are_read_in_either_byte_order(order):
    tags = tiff_tags(tiff_bytes(COLOUR, photometric="rgb", byteorder=order))
    assert (tags[TIFF_BITS], tags[TIFF_PHOTOMETRIC], tags[TIFF_SAMPLES]) == ((8, 8, 8), (2,), (3,))


def test_several_pages_bigtiff_and_broken_files_have_no_tags():
    one = tiff_bytes(GREY)
    pages = tiff_bytes(np.stack([GREY] * 3), photometric="minisblack")
    for data in (pages, tiff_bytes(GREY, bigtiff=True), one[:20], b"II*\0", b"II*\0\xff\xff\xff\xff"):
        assert tiff_tags(data) == {}
    assert tiff_tags(one)[TIFF_SAMPLES] == (1,)


@pytest.mark.parametrize(
    ("array", "options", "is_plain"),
    [
        (GREY, {}, True),
        (COLOUR, {"photometric": "rgb"}, True),
        (COLOUR, {"photometric": "minisblack", "planarconfig": "contig"}, False),
        (np.moveaxis(COLOUR, 2, 0).copy(), {"photometric": "rgb", "planarconfig": "separate"}, False),
        (FOUR, {"photometric": "rgb"}, False),
        (GREY, {"bigtiff": True}, False),
    ],
    ids=["grey", "rgb", "three channels", "plane by plane", "rgba", "bigtiff"],
)
def test_opencv_decodes_one_page_of_grey_or_interleaved_colour(array, options, is_plain):
    assert is_plain_tiff(tiff_tags(tiff_bytes(array, **options))) == is_plain
