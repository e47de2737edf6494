"""Files that are no images are named for what they are, by their content or their extension."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile

import numpy as np
import pytest

from unet_trainer.images import foreign_formats as formats
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.foreign_formats import describe_content, describe_file, extension_of
from unet_trainer.images.image_files import decode_image, decode_mask


def zip_bytes():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a.txt", "a")
    return stream.getvalue()


def tar_bytes():
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return stream.getvalue()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
CASES = [
    (LFS, formats.LFS),
    (zip_bytes(), formats.ARCHIVE),
    (tar_bytes(), formats.ARCHIVE),
    (gzip.compress(b"a"), formats.ARCHIVE),
    (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", formats.HEIC),
    (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", formats.HEIC),
    (b"\0\0\0\x20ftypavif\0\0\0\0", formats.AVIF),
    (b"\0\0\0\x20ftypisom\0\0\x02\0isomiso2avc1mp41", formats.VIDEO),
    (b"\0\0\0\x14ftypqt  \0\0\0\0qt  ", formats.VIDEO),
    (b"RIFF\x24\0\0\0AVI LIST", formats.VIDEO),
    (b"\x1aE\xdf\xa3\x01\0\0\0", formats.VIDEO),
    (bytes(128) + b"DICM\x02\0\0\0UL", formats.DICOM),
    (b"\x5c\x01\0\0" + bytes(340) + b"n+1\0" + bytes(100), formats.NIFTI),
    (b"\x1c\x02\0\0n+2\0\r\n\x1a\n", formats.NIFTI),
    (b"\x89HDF\r\n\x1a\n" + bytes(20), formats.HDF5),
    (b"<!DOCTYPE html><html><head><title>404</title>", formats.WEB_PAGE),
    (b"\n <html lang=en>", formats.WEB_PAGE),
    (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg">', formats.SVG),
    (b"%PDF-1.7\n", formats.PDF),
    (b'{"shapes": []}', formats.ANNOTATION),
]


@pytest.mark.parametrize(("data", "text"), CASES)
def test_content_is_recognised_and_says_so_where_an_image_is_expected(data, text):
    assert describe_content(data) == text
    for decode in (decode_image, decode_mask):
        with pytest.raises(ReadError) as raised:
            decode(data)
        assert str(raised.value) == text


def test_real_pictures_are_not_taken_for_anything_else():
    import cv2

    for extension in (".png", ".jpg", ".bmp", ".webp", ".tif"):
        done, buffer = cv2.imencode(extension, np.zeros((8, 8, 3), np.uint8))
        assert done
        assert describe_content(buffer.tobytes()) is None
    assert describe_content(b"some text") is None
    assert describe_content(b"") is None


@pytest.mark.parametrize(("name", "text"), [
    ("IMG_0001.HEIC", formats.HEIC), ("scan.dcm", formats.DICOM), ("brain.nii", formats.NIFTI), ("brain.nii.gz", formats.NIFTI),
    ("data.zip", formats.ARCHIVE), ("data.tar.gz", formats.TAR), ("data.tgz", formats.TAR), ("clip.MOV", formats.VIDEO), ("a.b.mp4", formats.VIDEO),
    ("x.mha", formats.VOLUME), ("x.mat", formats.HDF5), ("a.png", None), ("a.csv", None), ("notes.txt", None),
])  # fmt: skip
def test_extensions_are_known(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(b"anything")
    assert describe_file(path) == text


def test_without_an_extension_the_content_tells(tmp_path):
    path = tmp_path / "IM000001"
    path.write_bytes(bytes(128) + b"DICM")
    assert describe_file(path) == formats.DICOM
    assert describe_file(tmp_path / "gone") is None
    assert extension_of(path) == ""


def test_each_sentence_says_what_to_do():
    for text in {*formats.EXTENSIONS.values(), *formats.STARTS.values()}:
        what, _, fix = text.partition("; ")
        assert what.startswith("a")
        assert len(fix) > 10
