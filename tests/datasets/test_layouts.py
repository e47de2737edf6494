"""Which folders hold the images and which the masks, in common layouts; ambiguous layouts are refused."""

import os

import pytest

from helpers import layouts
from unet_trainer.config.load import load_config
from unet_trainer.datasets.dataset_report import find_dataset
from unet_trainer.datasets.layouts import find_layout
from unet_trainer.images.file_bytes import DataError


def fill(root, *folders):
    """Layouts are found by names, so an empty file in each folder is enough."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "a.png").touch()


def found(root, image_dir=None, mask_dir=None):
    """(images, masks) to train on, the same for val or None, and the phrase for the parts."""
    layout = find_layout(root, image_dir, mask_dir)
    return places(root, layout, "train"), places(root, layout, "val"), layout.divided


def places(root, layout, part):
    """(images, masks) of a part; None if there is none."""
    groups = layout.parts.get(part)
    return groups and tuple(group and group.place.relative_to(root).as_posix() for group in groups)


def found_test(root):
    """(images, masks) of test; masks is None if there is no such folder."""
    return places(root, find_layout(root, None, None), "test")


def error_message(root, image_dir=None, mask_dir=None):
    with pytest.raises(DataError) as raised:
        find_layout(root, image_dir, mask_dir)
    return str(raised.value)


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("imgs", "masks"), ("Image", "Mask"), ("IMAGES", "Labels"), ("images", "annotations"), ("img_dir", "ann_dir"),
        ("imagesTr", "labelsTr"), ("images", "GT"), ("images", "Ground Truth"), ("JPEGImages", "SegmentationClass"),
        ("input", "target"), ("images", "1st_manual"), ("train", "trainannot"), ("train", "train_gt"), ("train", "masks"),
        ("images_train", "masks_train"), ("training", "training_labels"),
    ],
)  # fmt: skip
def test_folders_are_known_by_their_names(tmp_path, images, masks):
    fill(tmp_path, images, masks)
    assert found(tmp_path) == ((images, masks), None, "")
    assert find_layout(tmp_path, None, None).phrase == f"{images}/ + {masks}/"


@pytest.mark.parametrize(
    "template",
    [
        ("{}/images", "{}/masks"), ("{}/img", "{}/gt"), ("images/{}", "masks/{}"), ("img_dir/{}", "ann_dir/{}"),
        ("leftImg8bit/{}", "gtFine/{}"), ("{}", "{}annot"), ("{}", "{}_labels"), ("{}", "{}_masks"), ("{}", "masks/{}"),
        ("{}/{}_images", "{}/{}_masks"), ("{}", "{}/masks"),
    ],
    ids=str,
)  # fmt: skip
def test_train_and_val_may_be_above_below_or_in_the_name(tmp_path, template):
    def folders(part):
        return tuple(text.format(part, part) for text in template)

    fill(tmp_path, *folders("Training"), *folders("VALID"), *folders("test"))
    assert found(tmp_path) == (folders("Training"), folders("VALID"), "folders Training and VALID")
    assert found_test(tmp_path) == folders("test")


@pytest.mark.parametrize("ending", ["2017", "_set", "-data", " split", "_v2"])
def test_the_name_of_a_part_may_have_a_year_or_say_that_it_is_a_set(tmp_path, ending):
    for template in ("{}/images", "{}/masks"), ("images/{}", "annotations/{}"):
        train, val, test = (
            tuple(text.format(f"{part}{ending}") for text in template) for part in ("train", "val", "test")
        )
        fill(tmp_path / template[0][:2], *train, *val, *test)
        assert found(tmp_path / template[0][:2]) == (train, val, f"folders train{ending} and val{ending}")
        assert found_test(tmp_path / template[0][:2]) == test


def test_our_own_folders_are_never_data(tmp_path):
    """data_dir: . beside checkpoints/: its sheets and samples were taken for images at the second start."""
    fill(tmp_path, "images", "masks")
    before = found(tmp_path)
    ours = "checkpoints/check", "checkpoints/run/samples", "checkpoints/.scan", "runs/mine/samples", "run/train/images"
    fill(tmp_path, *ours)
    (tmp_path / "runs/.converted").mkdir()
    for name in ("config.yaml", "split.csv"):
        (tmp_path / "run" / name).touch()
    assert found(tmp_path) == before


@pytest.mark.parametrize("checkpoint_dir", ["images", "masks", "train", "mine", "mine/images", "."])
def test_a_folder_of_data_that_is_the_checkpoint_dir_too_keeps_its_data(tmp_path, checkpoint_dir):
    """The second check found no folder of images."""
    root = "train/" if checkpoint_dir == "train" else "mine/" if "mine" in checkpoint_dir else ""
    fill(tmp_path, f"{root}images", f"{root}masks")
    before = [find_layout(tmp_path, None, None).parts["train"][index].files for index in (0, 1)]
    place = tmp_path / checkpoint_dir
    fill(place, "check", ".scan", ".given/0123456789abcdef/images", ".converted/objects-0/train", "run/samples")
    for name in ("config.yaml", "split.csv"):
        (place / "run" / name).touch()
    assert [find_layout(tmp_path, None, None).parts["train"][index].files for index in (0, 1)] == before


@pytest.mark.parametrize("mark", [".scan", ".converted", ".given", ".shards"])
def test_a_checkpoint_dir_is_known_by_any_folder_that_is_kept_there(tmp_path, mark):
    fill(tmp_path, "images", "masks")
    before = find_layout(tmp_path, None, None).parts
    fill(tmp_path, f"images/mine/{mark}", "images/mine/check")
    assert find_layout(tmp_path, None, None).parts == before


def test_folders_may_be_links_also_such_that_lead_in_a_circle(tmp_path):
    fill(tmp_path, "elsewhere/photos", "elsewhere/truth")
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/images").symlink_to(tmp_path / "elsewhere/photos")
    (tmp_path / "data/train/masks").symlink_to(tmp_path / "elsewhere/truth")
    (tmp_path / "data/train/around").symlink_to(tmp_path / "data")
    assert found(tmp_path / "data") == (("train/images", "train/masks"), None, "")
    fill(tmp_path, "elsewhere/photos/more")
    (tmp_path / "data/train/images/latest").symlink_to("more")  # what lies below images/ is not followed
    assert [file.folder for file in find_layout(tmp_path / "data", None, None).parts["train"][0].files] == ["", "more/"]


def test_a_link_beside_the_data_is_not_searched(tmp_path, monkeypatch):
    """It may lead to a whole disk."""
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    (tmp_path / "data/notes").mkdir(parents=True)
    for name in ("data/a.png", "data/a_mask.png", "data/b.png", "data/b_mask.png"):
        (tmp_path / name).touch()
    fill(tmp_path, "elsewhere/deep/deeper")
    (tmp_path / "data/old").symlink_to(tmp_path / "elsewhere")
    assert {file.folder for file in find_layout(tmp_path / "data", None, None).parts["train"][0].files} == {""}
    assert not any("deeper" in path for path in listed)


@pytest.mark.parametrize(("there", "settings", "expected"), [
    (["a", "b"], ("a", "b"), ("a", "b")),
    (["images", "masks", "a"], ("a", None), ("a", "masks")),
    (["images", "masks", "labels"], (None, "labels"), ("images", "labels")),
    (["train/images", "train/masks", "train/labels"], (None, "labels"), ("train/images", "train/labels")),
    (["01", "01_GT/SEG"], ("01", "01_GT/SEG"), ("01", "01_GT/SEG")),
    (["images", "images/masks"], (".", "images/masks"), (".", "images/masks")),
    (["images", "train/images", "masks"], ("images", "masks"), ("images", "masks")),
    (["images", "train/images", "masks", "train/masks"], ("train/images", "train/masks"), ("train/images", "train/masks")),
])  # fmt: skip
def test_folders_that_are_set_are_used_instead_of_a_search(tmp_path, there, settings, expected):
    fill(tmp_path, *there)
    assert found(tmp_path, *settings)[0] == expected


HOLD = "could hold the"


@pytest.mark.parametrize(("there", "message"), [
    (["images", "imgs", "masks"], f"image_dir: 2 folders in ROOT {HOLD} images: images/, imgs/; set one of these:\n  image_dir: images\n"),
    (  # DRIVE: mask/ is the field of view, and its names would pair
        ["training/images", "training/1st_manual", "training/mask", "test/images", "test/mask"],
        f"mask_dir: 2 folders in ROOT {HOLD} masks: training/1st_manual/, training/mask/; set one of these:\n  mask_dir: 1st_manual",
    ),
    (["images", "masks", "train/images", "train/masks"], f"image_dir: 2 folders in ROOT {HOLD} images: images/, train/images/; set one"),
    (["train", "train_masks", "trainannot"], f"mask_dir: 2 folders in ROOT {HOLD} masks: train_masks/, trainannot/; set one of these"),
    (["train/images", "train/masks", "val/images", "val/masks", "val/gt"], f"mask_dir: 2 folders in ROOT {HOLD} masks: val/gt/, val/masks/"),
    (["images/val", "images/test", "masks/val"], "data_dir: ROOT holds images/val/ but no train/; set:\n  image_dir: images/val\n  mask_dir"),
    (["train", "trainannot", "val"], "no masks of ROOT/val; ROOT holds train/, trainannot/, val/; add them, or to train and validate on one"),
    ([".", "test/images"], "data_dir: no folder of images (images, imgs, ...) and no folder of masks"),  # files beside test/ may be anything
    (["masks"], "data_dir: no folder of images (images, imgs, ...) in ROOT; ROOT holds masks/; set image_dir to the folder to use, or split_file"),
])  # fmt: skip
def test_an_ambiguous_layout_is_refused_with_the_key_to_set(tmp_path, there, message):
    fill(tmp_path, *there)
    assert error_message(tmp_path).startswith(message.replace("ROOT", str(tmp_path)))


def test_a_val_folder_without_masks_beside_a_train_folder_with_both_is_named(tmp_path):
    """DeepGlobe"""
    fill(tmp_path, "train", "valid")
    (tmp_path / "train/1_sat.jpg").touch()
    (tmp_path / "train/1_mask.png").touch()
    message = error_message(tmp_path)
    assert message.startswith(f"no masks of {tmp_path / 'valid'}; ")
    assert message.endswith("; set:\n  image_dir: train\n  mask_dir: train")


def test_folders_of_unknown_names_are_named_and_not_guessed(tmp_path):
    fill(tmp_path, "before", "after", "notes")
    message = error_message(tmp_path)
    assert message.endswith(
        "holds after/, before/, notes/; set image_dir and mask_dir to the folders to use, or split_file to a CSV"
    )
    assert found(tmp_path, "before", "after")[0] == ("before", "after")


@pytest.mark.parametrize(
    "name", ["plain", "sequences", "bowl", "voc", "classes", "few_masks", "parts", "coco", "labelme"]
)
def test_each_folder_of_the_data_is_listed_once(name, tmp_path, monkeypatch):
    getattr(layouts, name)(tmp_path / "data")
    (tmp_path / "data/notes/old").mkdir(parents=True)
    (tmp_path / "data/train.txt").write_text("0\n")
    folders = sorted(str(path) for path in (tmp_path / "data").rglob("") if path.is_dir())
    listed = []
    for function in ("scandir", "listdir"):
        original = getattr(os, function)
        monkeypatch.setattr(os, function, lambda path=".", of=original: listed.append(os.fspath(path)) or of(path))
    find_dataset(load_config({"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints")}))
    assert sorted(path for path in listed if path.startswith(str(tmp_path / "data"))) == folders
