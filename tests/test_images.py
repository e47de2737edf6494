"""Files as people have them, written by OpenCV and PIL: what is read, what is refused, and with which words."""

from __future__ import annotations

import hashlib
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from unet_trainer.config import UserError
from unet_trainer.images import COLOUR, DataError, ReadError, encode_image, read_image, read_mask, write_image

IDS = np.array([[0, 1, 2], [3, 2, 1]], np.uint8)
RED_GREEN_BLUE = [0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255]


def picture(height=40, width=60):
    """A smooth colour picture that JPEG keeps well."""
    y, x = np.mgrid[0:height, 0:width]
    return np.dstack([x * 4, y * 5, np.full_like(x, 90)]).astype(np.uint8)


def noise(height=80, width=80, high=256):
    return np.random.default_rng(0).integers(0, high, (height, width), np.uint8)


def palette_png(path, ids, colours=tuple(RED_GREEN_BLUE)):
    image = Image.new("P", ids.shape[::-1])
    image.putdata(ids.ravel().tolist())
    image.putpalette(list(colours))
    image.save(path)
    return path


def reason(read, path):
    with pytest.raises(ReadError) as raised:
        read(path)
    return str(raised.value)


# Images


def test_an_rgb_image_is_read_as_rgb(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    read = read_image(tmp_path / "a.png")
    assert (read.dtype, read.shape) == (np.uint8, (40, 60, 3))
    assert np.array_equal(read, picture())


def test_a_jpeg_is_read_nearly_as_it_was(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.jpg", quality=95)
    assert np.abs(read_image(tmp_path / "a.jpg").astype(int) - picture()).mean() < 3


@pytest.mark.parametrize("extension", [".png", ".bmp", ".tif", ".tiff"])
def test_lossless_formats_come_back_as_written(tmp_path, extension):
    write_image(tmp_path / f"a{extension}", picture())
    assert np.array_equal(read_image(tmp_path / f"a{extension}"), picture())


def test_alpha_is_dropped(tmp_path):
    alpha = np.full((40, 60, 1), 7, np.uint8)
    Image.fromarray(np.concatenate([picture(), alpha], 2), "RGBA").save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), picture())


def test_grey_becomes_three_equal_channels(tmp_path):
    grey = picture()[:, :, 0]
    Image.fromarray(grey).save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), np.dstack([grey] * 3))


def test_a_palette_image_is_read_in_its_colours(tmp_path):
    read = read_image(palette_png(tmp_path / "a.png", IDS))
    assert read[0].tolist() == [[0, 0, 0], [255, 0, 0], [0, 255, 0]]
    assert read[1, 0].tolist() == [0, 0, 255]


def test_the_content_decides_about_the_format_and_not_the_extension(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.jpg", format="PNG")
    assert np.array_equal(read_image(tmp_path / "a.jpg"), picture())


def test_a_photo_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # held upright
    Image.fromarray(picture(40, 60)).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (60, 40, 3)


def test_a_name_with_spaces_and_accents_is_read(tmp_path):
    path = tmp_path / "Zellen – größer 1.png"
    write_image(path, picture())
    assert np.array_equal(read_image(path), picture())


def test_a_16_bit_image_is_refused_and_not_cut_to_8_bit(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), noise().astype(np.uint16) * 200)
    assert reason(read_image, tmp_path / "a.png") == (
        "uint16 pixels; only 8-bit images can be read so far, convert the file to 8 bit"
    )
    assert cv2.imread(str(tmp_path / "a.png")).dtype == np.uint8  # why: OpenCV's default cuts in silence


# Files that are no images


def test_a_truncated_jpeg_is_refused(tmp_path):
    path = tmp_path / "a.jpg"
    write_image(path, np.dstack([noise()] * 3))
    path.write_bytes(path.read_bytes()[:2000])
    assert reason(read_image, path) == "the file is cut off"
    assert reason(read_mask, path) == "the file is cut off"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_a_truncated_png_is_refused(tmp_path, share):
    path = tmp_path / "a.png"
    write_image(path, noise())
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert reason(read_image, path) == "the file is cut off"
    assert reason(read_mask, path) == "the file is cut off"


def test_a_truncated_palette_mask_is_refused(tmp_path):
    path = palette_png(tmp_path / "a.png", noise(high=4))
    path.write_bytes(path.read_bytes()[:-200])
    assert reason(read_mask, path) == "the file is cut off"


def test_a_palette_mask_with_damaged_pixels_is_refused(tmp_path):
    path = palette_png(tmp_path / "a.png", noise(high=4))
    data = bytearray(path.read_bytes())
    middle = data.index(b"IDAT") + 200
    data[middle : middle + 20] = bytes(20)
    path.write_bytes(data)
    assert reason(read_mask, path).startswith("cannot be decoded (")


def test_a_png_with_damaged_pixels_is_refused(tmp_path):
    path = tmp_path / "a.png"
    write_image(path, noise())
    data = bytearray(path.read_bytes())
    middle = data.index(b"IDAT") + 200
    data[middle : middle + 20] = bytes(20)
    path.write_bytes(data)
    for read in (read_image, read_mask):
        assert reason(read, path) == "not an image that can be decoded"


@pytest.mark.parametrize("extension", [".bmp", ".tif", ".webp"])
def test_other_formats_are_refused_when_truncated(tmp_path, extension):
    path = tmp_path / f"a{extension}"
    write_image(path, np.dstack([noise()] * 3))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert reason(read_image, path) == "not an image that can be decoded"


@pytest.mark.parametrize("read", [read_image, read_mask])
def test_an_empty_file_is_refused(tmp_path, read):
    (tmp_path / "a.png").touch()
    assert reason(read, tmp_path / "a.png") == "the file is empty"


@pytest.mark.parametrize("read", [read_image, read_mask])
def test_text_named_png_is_refused(tmp_path, read):
    (tmp_path / "a.png").write_text("no picture\n")
    assert reason(read, tmp_path / "a.png") == "not an image that can be decoded"


@pytest.mark.parametrize("read", [read_image, read_mask])
def test_a_missing_file_and_a_folder_are_refused(tmp_path, read):
    assert reason(read, tmp_path / "none.png") == "No such file or directory"
    (tmp_path / "folder.png").mkdir()
    assert reason(read, tmp_path / "folder.png") == "Is a directory"


def test_what_is_refused_is_the_users_to_mend():
    assert issubclass(ReadError, DataError)
    assert issubclass(DataError, UserError)


# Masks


def test_a_grey_mask_keeps_its_values(tmp_path):
    write_image(tmp_path / "a.png", IDS)
    mask = read_mask(tmp_path / "a.png")
    assert (mask.dtype, mask.tolist()) == (np.uint8, IDS.tolist())


def test_a_palette_mask_is_read_by_index_and_not_by_colour(tmp_path):
    path = palette_png(tmp_path / "a.png", IDS)
    assert read_mask(path).tolist() == IDS.tolist()
    assert cv2.imread(str(path), cv2.IMREAD_GRAYSCALE).max() > 3  # why: OpenCV gives the grey of the colour


def test_a_palette_of_16_colours_is_read_by_index_too(tmp_path):
    image = Image.new("P", (3, 2))
    image.putdata(IDS.ravel().tolist())
    image.putpalette(RED_GREEN_BLUE)
    image.save(tmp_path / "a.png", bits=4)
    assert read_mask(tmp_path / "a.png").tolist() == IDS.tolist()


def test_a_mask_of_one_bit_is_read_as_0_and_255(tmp_path):
    Image.fromarray(IDS > 1).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        assert image.mode == "1"
    assert read_mask(tmp_path / "a.png").tolist() == [[0, 0, 255], [255, 255, 0]]


def test_an_rgb_mask_with_equal_channels_is_read_as_grey(tmp_path):
    Image.fromarray(np.dstack([IDS] * 3)).save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png").tolist() == IDS.tolist()


def test_an_rgba_mask_with_equal_channels_is_read_without_its_alpha(tmp_path):
    Image.fromarray(np.dstack([IDS, IDS, IDS, np.full_like(IDS, 255)]), "RGBA").save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png").tolist() == IDS.tolist()


def test_a_colour_mask_is_read_as_one_number_a_colour(tmp_path):
    colours = np.array([[[255, 0, 0], [0, 128, 7]], [[0, 0, 0], [255, 255, 255]]], np.uint8)
    Image.fromarray(colours).save(tmp_path / "a.png")
    assert read_mask(tmp_path / "a.png").tolist() == [[COLOUR + 0xFF0000, COLOUR + 0x008007], [0, 255]]


def test_a_16_bit_colour_mask_is_refused(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), picture().astype(np.uint16))
    assert reason(read_mask, tmp_path / "a.png") == "a 16-bit colour mask; need 8 bit"


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_masks_of_few_bits_keep_their_values(bits, tmp_path):
    """OpenCV stretches them to 255. One bit stays {0, 255}, as every reader has it."""
    ids = np.arange(2**bits, dtype=np.uint8).reshape(1, -1).repeat(8, 0)
    packed = np.packbits(np.unpackbits(ids[:, :, None], axis=2)[:, :, 8 - bits :].reshape(8, -1), axis=1)
    rows = b"".join(b"\0" + row.tobytes() for row in packed)

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", ids.shape[1], 8, bits, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    (tmp_path / "a.png").write_bytes(content)
    assert read_mask(tmp_path / "a.png").tolist() == (ids * (255 if bits == 1 else 1)).tolist()


def test_a_16_bit_mask_with_small_values_is_read(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), IDS.astype(np.uint16))
    mask = read_mask(tmp_path / "a.png")
    assert (mask.dtype, mask.tolist()) == (np.uint8, IDS.tolist())


def test_a_16_bit_mask_keeps_large_values(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), IDS.astype(np.uint16) * 300)
    mask = read_mask(tmp_path / "a.png")
    assert (mask.dtype, mask.tolist()) == (np.uint16, (IDS.astype(int) * 300).tolist())


def test_a_mask_of_fractions_is_refused(tmp_path):
    cv2.imwrite(str(tmp_path / "a.tif"), IDS.astype(np.float32) / 2)
    assert reason(read_mask, tmp_path / "a.tif") == "float32 values from 0.0 to 1.5; need whole numbers from 0 to 65535"


def test_a_mask_with_negative_values_is_refused(tmp_path):
    cv2.imwrite(str(tmp_path / "a.tif"), IDS.astype(np.int16) - 1)
    assert reason(read_mask, tmp_path / "a.tif") == "int16 values from -1 to 2; need whole numbers from 0 to 65535"


# Writing


def test_the_extension_names_the_format():
    assert encode_image(picture(), ".png").startswith(b"\x89PNG")
    assert encode_image(picture(), ".jpg").startswith(b"\xff\xd8\xff")


def test_reading_leaves_the_files_as_they_are(tmp_path):
    write_image(tmp_path / "a.jpg", picture())
    palette_png(tmp_path / "b.png", IDS)
    before = {path: (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    read_image(tmp_path / "a.jpg")
    read_image(tmp_path / "b.png")
    read_mask(tmp_path / "b.png")
    assert {path: (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before
