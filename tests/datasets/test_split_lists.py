"""The lists of PASCAL VOC. Whole datasets with lists are in test_folder_pairs."""

from __future__ import annotations

import os
from pathlib import Path

from unet_trainer.datasets.layouts import Folders
from unet_trainer.datasets.name_matching import File, Match, Rule
from unet_trainer.datasets.split_lists import find_split_lists


def write(root, **lists):
    folder = root / "ImageSets/Segmentation"
    folder.mkdir(parents=True)
    for name, content in lists.items():
        (folder / f"{name}.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    return [Folders(root / "JPEGImages", root / "SegmentationClass")]


def file(stem):
    return File(Path(f"{stem}.png"), "", stem)


def test_each_name_has_the_part_of_its_list(tmp_path):
    lists = find_split_lists(write(tmp_path, train="a\nb\r\n\n", val="c 1\n", test="d", trainval="a\nb\nc\n"))
    assert lists.parts == {"a": "train", "b": "train", "c": "val", "d": "test"}
    assert lists.describe() == "ImageSets/Segmentation/train.txt and val.txt and test.txt"


def test_a_name_in_two_lists_does_not_train(tmp_path):
    assert find_split_lists(write(tmp_path, train="a\nb\n", val="b\n")).parts == {"a": "train", "b": "val"}


def test_trainval_alone_is_to_be_divided(tmp_path):
    assert find_split_lists(write(tmp_path, trainval="a\nb\n", test="c\n")).parts == {"a": None, "b": None, "c": "test"}


def test_a_dataset_without_lists_has_none(tmp_path):
    assert find_split_lists([Folders(tmp_path / "images", tmp_path / "masks")]) is None
    assert find_split_lists(write(tmp_path, val="a\n")) is None  # nothing to train on


def test_names_that_are_not_utf_8_are_read(tmp_path):
    assert list(find_split_lists(write(tmp_path, train=b"K\xe4fer\n", val=b"b\n")).parts) == [os.fsdecode(b"K\xe4fer"), "b"]


def test_a_match_is_restricted_to_what_is_listed(tmp_path):
    lists = find_split_lists(write(tmp_path, train="a\nc\ne\n", val="b\n", test="x\n"))
    pairs = [(file(stem), file(stem)) for stem in ("a", "b", "z")]
    match = lists.restrict(Match(Rule(), pairs, [file("c"), file("d"), file("x")], [file("m")]))
    assert ([image.stem for image, _ in match.pairs], [image.stem for image in match.images], match.masks) == (
        ["a", "b"],
        ["c"],
        [],
    )
    assert (lists.num_unlisted, lists.missing()) == (2, ["e"])  # z and d; e has no image
