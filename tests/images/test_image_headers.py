"""What the header of a file says before it is decoded, and what a file is that is no image."""

from __future__ import annotations

import gzip
import io
import os
import tarfile

import numpy as np
import pytest
import tifffile
from PIL import Image

from helpers.image_bytes import cv2_bytes, exif, npy_bytes, pil_bytes
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import (
    decode_image,
    describe_content,
    describe_file,
    has_palette,
    is_cut_off,
    is_lossy,
    is_turned,
    look_with_pil,
    palette_colours,
)
from unet_trainer.images.mask_decoding import decode_mask

COLOUR = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
GREY = COLOUR[:, :, 0]
FOUR = np.dstack([COLOUR, GREY])


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_indices_into_colours_are_a_palette_and_greys_are_not(kind):
    image = Image.fromarray(GREY // 64)
    image.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0, 0, 0, 255])
    data = pil_bytes(kind, image)
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
def test_the_orientations_2_to_8_turn_an_image(kind):
    for orientation in range(10):
        data = pil_bytes(kind, COLOUR, exif=exif(orientation))
        assert is_turned(data) == (2 <= orientation <= 8)
    assert not is_turned(b"\xff\xd8\xff Exif and nothing else")


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_without_its_end_is_cut_off(kind):
    data = pil_bytes(kind, COLOUR)
    assert not is_cut_off(data)
    assert not is_cut_off(data + bytes(100))  # a phone's video may follow
    for length in (len(data) - 20, len(data) // 2, 10):
        assert is_cut_off(data[:length])
        for decode in (decode_image, decode_mask):
            with pytest.raises(ReadError, match="the file is cut off"):
                decode(data[:length])
    assert not is_cut_off(pil_bytes("BMP", COLOUR)[:100])  # its decoder notices it


def tar_bytes():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return stream.getvalue()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git lfs pull"),
        (b"PK\x03\x04\x14\0", "an archive; unpack it"),
        (tar_bytes(), "an archive; unpack it"),
        (gzip.compress(b"a"), "an archive; unpack it"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC format; convert it"),
        (b"\0\0\0\x20ftypavif\0\0\0\0", "an AVIF picture; convert it"),
        (b"\0\0\0\x14ftypqt  \0\0\0\0qt  ", "a video; save its frames"),
        (b"RIFF\x24\0\0\0AVI LIST", "a video; save its frames"),
        (bytes(128) + b"DICM\x02\0\0\0UL", "a DICOM file; save its slices"),
        (b"\x5c\x01\0\0" + bytes(340) + b"n+1\0" + bytes(100), "a NIfTI volume; save its slices"),
        (b"\x89HDF\r\n\x1a\n" + bytes(20), "an HDF5 or MATLAB file"),
        (b"<!DOCTYPE html><html><head><title>404</title>", "a web page; the download failed"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg">', "a vector drawing"),
        (b'{"shapes": []}', "a text, not an image"),
    ],
)
def test_content_is_recognised_and_says_so_where_an_image_is_expected(data, text):
    for decode in (decode_image, decode_mask):
        with pytest.raises(ReadError, match=text):
            decode(data)


def test_pictures_and_plain_text_are_not_taken_for_anything_else():
    for extension in (".png", ".jpg", ".bmp", ".webp", ".tif"):
        assert describe_content(cv2_bytes(extension, np.zeros((8, 8, 3), np.uint8))) is None
    assert describe_content(b"some text") is None
    assert describe_content(b"") is None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_the_extension_tells_and_without_one_the_content(tmp_path):
    names = {
        "IMG_0001.HEIC": "HEIC",
        "brain.nii.gz": "NIfTI",
        "data.zip": "archive",
        "data.tar.gz": "plain .tar",
        "a.b.mp4": "video",
    }
    for name, text in {**names, "a.png": None, "notes.txt": None}.items():
        (tmp_path / name).write_bytes(b"anything")
        found = describe_file(tmp_path / name)
        assert found is None if text is None else text in found
    (tmp_path / "IM000001").write_bytes(bytes(128) + b"DICM")
    assert "DICOM" in describe_file(tmp_path / "IM000001")
    os.mkfifo(tmp_path / "pipe")
    assert describe_file(tmp_path / "pipe") is None
    assert describe_file(tmp_path / "missing") is None


def test_what_pil_logs_about_a_file_is_not_shown(caplog):
    """It logs that it cannot show so many channels, beside raising it."""
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.zeros((8, 8, 13), np.uint16), photometric="minisblack", planarconfig="contig")
    assert look_with_pil(stream.getvalue(), lambda picture: picture.size, None) is None
    assert caplog.records == []
