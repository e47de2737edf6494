"""The checks that all readers of annotation files share."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.image_bytes import cv2_bytes
from unet_trainer.datasets import annotations
from unet_trainer.datasets.annotations import (
    EntryError,
    as_name,
    as_points,
    as_size,
    check_points,
    choose_classes,
    decode_bitmap,
    is_background,
    read_json,
    read_text,
    show,
)
from unet_trainer.images.file_bytes import DataError


@pytest.mark.parametrize(("data", "reason"), [
    (b'{"a": [1, 2', r"is not valid JSON \(line 1: .*\); was it cut off"),
    (b'{"a": 1,\n"b" 2}', r"is not valid JSON \(line 2: Expecting ':' delimiter\)"),
    (b"", "is not valid JSON"),
    (b"\xff\xfe\xfa", "is not JSON that can be read"),
    (b"[" * 100_000, "is nested too deeply"),
    (b'{"a":' * 100_000, "is nested too deeply"),
    (b"9" * 10_000, "is not JSON that can be read"),
])  # fmt: skip
def test_json_that_cannot_be_read_is_refused_in_one_line(tmp_path, data, reason):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(DataError, match=reason) as raised:
        read_json(path)
    assert len(str(raised.value)) < 200 + len(str(path))
    assert "\n" not in str(raised.value)


def test_json_with_a_byte_order_mark_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(path) == {"a": 1}


def test_a_huge_file_is_not_opened(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("[1, 2, 3]")
    monkeypatch.setattr(annotations, "MAX_FILE_BYTES", 4)
    with pytest.raises(DataError, match=r"a\.json has 0\.0 GiB; annotation files of up to .* are read: divide it"):
        read_json(path)
    with pytest.raises(DataError, match="is larger than 0 MiB"):
        read_text(path, 4)


def test_missing_and_binary_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json cannot be read \(No such file or directory\)"):
        read_json(tmp_path / "gone.json")
    (tmp_path / "a.txt").write_bytes(b"\xff\xff")
    with pytest.raises(DataError, match=r"a\.txt cannot be read \(it is not UTF-8\)"):
        read_text(tmp_path / "a.txt", 100)


def test_names_are_on_one_line():
    assert as_name("  a \n b ", "name") == "a b"
    for wrong in ("", "   ", None, 3, "a\x1b[31m", "n" * 101):
        with pytest.raises(EntryError, match=r"name is .*; need a text of 1 to 100 characters"):
            as_name(wrong, "name")


def test_sizes_are_whole_positive_and_possible():
    assert as_size(3, 4.0) == (3, 4)
    for wrong in (0, -1, 2.5, "3", None, True, 2**21, float("nan"), float("inf")):
        with pytest.raises(EntryError, match=r"height is .*; need a whole number of pixels"):
            as_size(wrong, 4)
    with pytest.raises(EntryError, match=r"1000000×1000000 pixels; images of up to"):
        as_size(1_000_000, 1_000_000)


def test_points_are_pairs_of_numbers():
    assert as_points([[1, 2], [3.5, 4, 0.9]], "points").tolist() == [[1, 2], [3.5, 4]]
    assert check_points([], "points").shape == (0, 2)
    assert check_points([1, 2.5], "points").dtype == np.float64


def test_a_bitmap_of_any_depth_is_its_pixels_that_are_not_0():
    bitmap = np.array([[0, 7]], np.uint8)
    for picture in (bitmap, bitmap.astype(np.uint16) * 256, np.repeat(bitmap[:, :, None], 3, 2)):
        assert decode_bitmap(cv2_bytes(".png", picture), "mask", 1, 2).tolist() == [[False, True]]
    with pytest.raises(EntryError, match="mask is not a picture that can be decoded"):
        decode_bitmap(cv2_bytes(".png", bitmap)[:45], "mask", 1, 2)


def test_only_classes_that_occur_are_kept_in_the_order_of_the_declaration():
    classes, notices = choose_classes(["b", "background", "a", "c", "a", "__ignore__"], {"a", "b", "__ignore__"}, "COCO", "x.json")
    assert classes == ("b", "a")
    assert notices == ["1 class without any object left out: c"]
    with pytest.raises(DataError, match=r"x\.json \(COCO\) holds no object of any class"):
        choose_classes(["a", "background"], {"background"}, "COCO", "x.json")
    names = [f"c{number}" for number in range(254)]
    with pytest.raises(DataError, match="has 254 classes; need at most 253"):
        choose_classes(names, names, "COCO", "x.json")


def test_names_of_the_background():
    assert [is_background(name) for name in ("background", "_background_", "Background", "ground")] == [True, True, True, False]


def test_a_long_value_is_shortened_in_a_message():
    assert show("a" * 100) == "'" + "a" * 58 + "…"
    assert show(10**5000) == "a int"
