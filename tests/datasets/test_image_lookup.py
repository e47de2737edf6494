"""Which file an annotation means by a name: folders, other systems, several files of one name."""

from __future__ import annotations

import unicodedata

import pytest

from unet_trainer.datasets.image_lookup import ImageIndex, part_in, part_of_file
from unet_trainer.images.file_bytes import DataError


@pytest.mark.parametrize(("names", "part"), [
    (["instances_train2017"], "train"), (["valid"], "val"), (["images", "Test"], "test"), (["train_val"], ""), (["trainval"], ""),
    (["default"], ""), ([], ""), (["tr"], ""), (["strain"], ""), (["my-validation-set"], "val"), (["train", "train"], "train"),
])  # fmt: skip
def test_the_part_is_read_from_names(names, part):
    assert part_in(names) == part


def test_the_part_of_a_file(tmp_path):
    assert part_of_file(tmp_path / "train" / "a.json", tmp_path, by_name=False) == "train"
    assert part_of_file(tmp_path / "train" / "val.json", tmp_path, by_name=True) == "val"
    assert part_of_file(tmp_path / "train" / "val.json", tmp_path, by_name=False) == "train"
    assert part_of_file(tmp_path / "test" / "a.json", tmp_path / "other", by_name=False) == ""


def index_of(root, *names):
    return ImageIndex(root, [root / name for name in names])


def test_by_name_by_folders_and_by_stem(tmp_path):
    index = index_of(tmp_path, "images/a.jpg", "images/b.png", "more/b.png")
    assert index.find("a.jpg", tmp_path) == tmp_path / "images/a.jpg"
    assert index.find("somewhere/else/a.jpg", tmp_path) == tmp_path / "images/a.jpg"
    assert index.find("more/b.png", tmp_path) == tmp_path / "more/b.png"
    assert index.find("c.jpg", tmp_path) is None
    assert index.find("a", tmp_path) is None
    assert index.find("a", tmp_path, by_stem=True) == tmp_path / "images/a.jpg"
    for name in ("", "/", "..", "."):
        assert index.find(name, tmp_path) is None


def test_the_file_nearest_to_the_annotations_wins(tmp_path):
    index = index_of(tmp_path, "one/a.jpg", "one/deep/a.jpg", "two/a.jpg")
    assert index.find("a.jpg", tmp_path / "two") == tmp_path / "two/a.jpg"
    assert index.find("a.jpg", tmp_path / "one") == tmp_path / "one/a.jpg"


def test_several_files_are_refused_with_their_names(tmp_path):
    index = index_of(tmp_path, "one/a.jpg", "two/a.jpg")
    with pytest.raises(DataError, match=r"image_dir: a\.jpg could be one/a\.jpg, two/a\.jpg; set image_dir"):
        index.find("a.jpg", tmp_path)


def test_a_file_of_another_part_is_none(tmp_path):
    index = index_of(tmp_path, "train/1.png", "val/2.png", "3.png")
    assert index.find("1.png", tmp_path, "val") is None
    assert index.find("val/1.png", tmp_path) is None
    assert index.find("val/2.png", tmp_path, "train") == tmp_path / "val/2.png"  # its own folder says more
    assert index.find("3.png", tmp_path, "val") == tmp_path / "3.png"
    assert index.part_of(tmp_path / "train/1.png") == "train"


def test_folders_count_where_they_are_known(tmp_path):
    """Of p1 and p2 only p1 is here: p2/1.png is not p1/1.png."""
    index = index_of(tmp_path, "data/p1/1.png", "data/p1/2.png")
    assert index.knows_folders(["p2/1.png", "p1/2.png"])
    assert not index.knows_folders(["p2/1.png", "upload/2.png", "1.png", ""])
    assert index.find("p2/1.png", tmp_path, with_folders=True) is None
    assert index.find("p1/1.png", tmp_path, with_folders=True) == tmp_path / "data/p1/1.png"
    assert index.find("1.png", tmp_path, with_folders=True) == tmp_path / "data/p1/1.png"


def test_names_of_other_systems_are_found(tmp_path):
    index = index_of(tmp_path, unicodedata.normalize("NFD", "Zürich.JPG"))
    assert index.find(unicodedata.normalize("NFC", "Zürich.jpg"), tmp_path) == index.files[0]
    assert index.find("C:\\photos\\zürich.jpg", tmp_path) == index.files[0]


def test_files_that_differ_in_case_only_are_told_apart(tmp_path):
    index = index_of(tmp_path, "a.jpg", "A.jpg")
    assert index.find("A.jpg", tmp_path) == tmp_path / "A.jpg"
    assert index.find("a.jpg", tmp_path) == tmp_path / "a.jpg"
