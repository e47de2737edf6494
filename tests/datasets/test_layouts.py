"""Which folders hold the images and which the masks, in common layouts; ambiguous layouts are refused."""

from __future__ import annotations

import re

import pytest

from unet_trainer.datasets.layouts import Folders, find_layout, find_test_folders, has_marks, list_files, mask_marks
from unet_trainer.images.image_files import DataError


def fill(root, *folders):
    """Layouts are found by names, so an empty file in each folder is enough."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "a.png").touch()


def found(root, image_dir=None, mask_dir=None):
    """(images, masks) to train on, the same for val or None, and the phrase for the parts."""
    layout = find_layout(root, image_dir, mask_dir)
    train, val = (
        None if folders is None else (folders.images.relative_to(root).as_posix(), folders.masks.relative_to(root).as_posix())
        for folders in (layout.train, layout.val)
    )
    return train, val, layout.parts


def error_message(root, image_dir=None, mask_dir=None):
    with pytest.raises(DataError) as raised:
        find_layout(root, image_dir, mask_dir)
    return str(raised.value)


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("images", "masks"), ("imgs", "masks"), ("img", "mask"), ("Image", "Mask"), ("IMAGES", "Labels"), ("image", "label"),
        ("images", "annotations"), ("images", "annotation"), ("images", "annots"), ("img_dir", "ann_dir"), ("imagesTr", "labelsTr"),
        ("images", "gt"), ("images", "GT"), ("images", "ground_truth"), ("images", "groundtruth"), ("images", "Ground Truth"),
        ("images", "segmentation"), ("images", "segmentations"), ("JPEGImages", "SegmentationClass"), ("inputs", "targets"),
        ("input", "target"), ("frames", "masks"), ("photos", "trimaps"), ("images", "1st_manual"), ("train", "trainannot"),
        ("train", "train_labels"), ("train", "train_masks"), ("train", "train_mask"), ("train", "train_gt"), ("train", "masks"),
        ("train_images", "train_masks"), ("images_train", "masks_train"), ("training", "training_labels"),
    ],
)  # fmt: skip
def test_folders_are_known_by_their_names(tmp_path, images, masks):
    fill(tmp_path, images, masks)
    layout = find_layout(tmp_path, None, None)
    assert (layout.train, layout.val) == (Folders(tmp_path / images, tmp_path / masks), None)
    assert (layout.phrase, layout.parts) == (f"{images}/ + {masks}/", "")


@pytest.mark.parametrize("train", ["train", "training", "Train"])
@pytest.mark.parametrize("val", ["val", "valid", "validation", "VAL"])
@pytest.mark.parametrize("test", ["test", None])
@pytest.mark.parametrize(
    "template",
    [
        ("{}/images", "{}/masks"), ("{}/img", "{}/gt"), ("images/{}", "masks/{}"), ("img_dir/{}", "ann_dir/{}"),
        ("leftImg8bit/{}", "gtFine/{}"), ("{}", "{}annot"), ("{}", "{}_labels"), ("{}", "{}_masks"), ("{}", "masks/{}"),
        ("{}/{}_images", "{}/{}_masks"), ("{}", "{}/masks"),
    ],
    ids=str,
)  # fmt: skip
def test_train_and_val_may_be_above_below_or_in_the_name(tmp_path, template, train, val, test):
    def folders(part):
        return tuple(text.format(part, part) for text in template)

    fill(tmp_path, *folders(train), *folders(val), *(folders(test) if test else ()))
    pair_of_folders, val_folders, parts = found(tmp_path)
    assert (pair_of_folders, val_folders) == (folders(train), folders(val))
    assert parts == f"folders {train} and {val}"


def test_the_name_of_the_part_may_be_part_of_the_folders_name(tmp_path):
    fill(tmp_path, "train_images", "train_masks", "val_images", "val_masks", "test_images")
    assert found(tmp_path) == (
        ("train_images", "train_masks"),
        ("val_images", "val_masks"),
        "folders train_images and val_images",
    )


def test_undivided_images_are_trained_on_beside_a_val_folder(tmp_path):
    fill(tmp_path, "images", "masks", "val/images", "val/masks")
    assert found(tmp_path) == (("images", "masks"), ("val/images", "val/masks"), "folders images and val")


@pytest.mark.parametrize("test", [["test"], ["test/images"], ["test/images", "test/masks"], ["test", "testannot"], ["imagesTs"]])
def test_a_test_folder_is_not_used(tmp_path, test):
    fill(tmp_path, "images", "masks", *test)
    assert found(tmp_path) == (("images", "masks"), None, "")


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        ("test/images", "test/masks"), ("images/test", "masks/test"), ("test_images", "test_labels"), ("imagesTs", "labelsTs"),
        ("test", "testannot"), ("testing/img", "testing/gt"),
    ],
)  # fmt: skip
def test_a_test_folder_is_found_by_those_who_ask_for_it(tmp_path, images, masks):
    fill(tmp_path, *(re.sub("test(ing)?|Ts", lambda found: {"Ts": "Tr"}.get(found[0], "train"), name) for name in (images, masks)))
    assert find_test_folders(tmp_path, None, None) is None
    fill(tmp_path, images, masks)
    assert find_test_folders(tmp_path, None, None) == Folders(tmp_path / images, tmp_path / masks)


def test_a_test_folder_without_masks_is_none(tmp_path):
    fill(tmp_path, "train/images", "train/masks", "test/images")
    assert find_test_folders(tmp_path, None, None) is None


def test_a_test_folder_may_hold_masks_beside_their_images(tmp_path):
    fill(tmp_path, "train", "test")
    for folder in ("train", "test"):
        (tmp_path / folder / "a_mask.png").touch()
    assert find_test_folders(tmp_path, None, None) == Folders(tmp_path / "test", tmp_path / "test")


def test_two_test_folders_are_refused_with_the_key_to_set(tmp_path):
    fill(tmp_path, "train/images", "train/masks", "test/images", "test/masks", "test/labels")
    with pytest.raises(DataError, match=r"^mask_dir: 2 folders .*test/labels/, test/masks/"):
        find_test_folders(tmp_path, None, None)


def test_images_in_data_dir_beside_a_folder_of_masks(tmp_path):
    fill(tmp_path, ".", "masks")
    layout = find_layout(tmp_path, None, None)
    assert layout.train == Folders(tmp_path, tmp_path / "masks")


def test_folders_without_images_are_no_candidates(tmp_path):
    fill(tmp_path, "images", "masks")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/a.txt").touch()
    (tmp_path / "img").mkdir()
    assert found(tmp_path) == (("images", "masks"), None, "")


def test_candidates_are_named_even_if_none_holds_an_image(tmp_path):
    fill(tmp_path, "masks")
    (tmp_path / "images").mkdir()
    (tmp_path / "img").mkdir()
    assert "could hold the images: images/, img/; set image_dir: images or image_dir: img" in error_message(tmp_path)


def test_a_folder_of_another_part_inside_train_is_not_trained_on(tmp_path):
    fill(tmp_path, "train/images", "train/masks", "train/test_images", "train/val_masks")
    assert found(tmp_path) == (("train/images", "train/masks"), None, "")


def test_hidden_folders_are_not_searched(tmp_path):
    fill(tmp_path, "images", "masks", ".masks", ".images")
    assert found(tmp_path)[0] == ("images", "masks")


# image_dir and mask_dir


@pytest.mark.parametrize(
    ("there", "settings", "expected"),
    [
        (["a", "b"], ("a", "b"), ("a", "b")),
        (["images", "masks", "a"], ("a", None), ("a", "masks")),
        (["images", "masks", "labels"], (None, "labels"), ("images", "labels")),
        (["train/images", "train/masks", "train/labels"], (None, "labels"), ("train/images", "train/labels")),
        (["01", "01_GT/SEG"], ("01", "01_GT/SEG"), ("01", "01_GT/SEG")),
        (["images", "train/images", "masks"], ("images", "masks"), ("images", "masks")),
        (["images", "train/images", "masks", "train/masks"], ("train/images", "train/masks"), ("train/images", "train/masks")),
    ],
)
def test_folders_that_are_set_are_used_instead_of_a_search(tmp_path, there, settings, expected):
    fill(tmp_path, *there)
    assert found(tmp_path, *settings)[0] == expected


@pytest.mark.parametrize("template", ["{}/x", "x/{}"])
def test_folders_that_are_set_may_be_divided(tmp_path, template):
    for part in ("train", "val"):
        fill(tmp_path, template.format(part), template.replace("x", "y").format(part))
    train, val = ((template.format(part), template.replace("x", "y").format(part)) for part in ("train", "val"))
    assert found(tmp_path, "x", "y") == (train, val, "folders train and val")


@pytest.mark.parametrize(("settings", "key"), [(("nothing", None), "image_dir"), ((None, "nothing"), "mask_dir")])
def test_a_missing_folder_that_is_set_is_refused(tmp_path, settings, key):
    fill(tmp_path, "images", "masks")
    assert error_message(tmp_path, *settings) == (
        f"{key}: no folder {tmp_path / 'nothing'}; {tmp_path} holds images/, masks/; set {key} to the folder's name"
    )


# Refusals


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            ["images", "imgs", "masks"],
            "image_dir: 2 folders in ROOT could hold the images: images/, imgs/; set image_dir: images or image_dir: imgs",
        ),
        (
            ["images", "masks", "labels"],
            "mask_dir: 2 folders in ROOT could hold the masks: labels/, masks/; set mask_dir: labels or mask_dir: masks",
        ),
        (  # DRIVE: mask/ is the field of view, and its names would pair
            ["training/images", "training/1st_manual", "training/mask", "test/images", "test/mask"],
            "mask_dir: 2 folders in ROOT could hold the masks: training/1st_manual/, training/mask/; "
            "set mask_dir: 1st_manual or mask_dir: mask",
        ),
        (
            ["images", "masks", "train/images", "train/masks"],
            "image_dir: 2 folders in ROOT could hold the images: images/, train/images/; "
            "set image_dir: images or image_dir: train/images",
        ),
        (
            ["train", "train_masks", "trainannot"],
            "mask_dir: 2 folders in ROOT could hold the masks: train_masks/, trainannot/; "
            "set mask_dir: train_masks or mask_dir: trainannot",
        ),
        (
            ["train/images", "train/masks", "val/images", "val/masks", "val/gt"],
            "mask_dir: 2 folders in ROOT could hold the masks: val/gt/, val/masks/; set mask_dir: gt or mask_dir: masks",
        ),
        (
            ["images/val", "images/test", "masks/val"],
            "image_dir: ROOT/images holds test/ and val/ but no train/; set image_dir to the folder to train on",
        ),
        (
            ["images/train", "images/val", "masks/train"],
            "no folder ROOT/masks/val; ROOT/images holds train/, val/; "
            "add it, or set image_dir and mask_dir to the folders to train on",
        ),
        (
            ["train", "trainannot", "val"],
            "no folder ROOT/valannot; ROOT holds train/, trainannot/, val/; "
            "add it, or set image_dir and mask_dir to the folders to train on",
        ),
        (
            ["val/images", "val/masks"],
            "data_dir: no folder of images (images, imgs, ...) and no folder of masks (masks, labels, ...) in ROOT; ROOT holds val/; "
            "set image_dir and mask_dir to the folders to use",
        ),
        (  # files beside test/ may be anything
            [".", "test/images"],
            "data_dir: no folder of images (images, imgs, ...) and no folder of masks (masks, labels, ...) in ROOT; ROOT holds test/; "
            "set image_dir and mask_dir to the folders to use",
        ),
        (
            ["masks"],
            "data_dir: no folder of images (images, imgs, ...) in ROOT; ROOT holds masks/; set image_dir to the folder to use",
        ),
        (
            [],
            "data_dir: no folder of images (images, imgs, ...) and no folder of masks (masks, labels, ...) in ROOT; "
            "ROOT holds no folder; set image_dir and mask_dir to the folders to use",
        ),
    ],
)
def test_an_ambiguous_layout_is_refused_with_the_key_to_set(tmp_path, there, message):
    fill(tmp_path, *there)
    assert error_message(tmp_path) == message.replace("ROOT", str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((None, "1st_manual"), (("training/images", "training/1st_manual"), ("val/images", "val/1st_manual"))),
        ((None, "mask"), (("training/images", "training/mask"), ("val/images", "val/mask"))),
    ],
)
def test_the_fix_in_the_error_works(tmp_path, settings, expected):
    fill(tmp_path, *(f"{part}/{kind}" for part in ("training", "val") for kind in ("images", "1st_manual", "mask")))
    assert "set mask_dir: 1st_manual or mask_dir: mask" in error_message(tmp_path)
    assert found(tmp_path, *settings)[:2] == expected


# Files


def test_files_with_an_image_extension_are_listed_unless_hidden(tmp_path):
    for name in ("b.PNG", "a.jpg", ".c.png", "Thumbs.db", "notes.txt", "sub/d.tif", ".hidden/e.png", "masks/f.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    files = list_files(tmp_path, without=tmp_path / "masks")
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["a.jpg", "b.PNG", "sub/d.tif"]


@pytest.mark.parametrize(
    ("stem", "marks"),
    [
        ("a_mask", ["_mask"]), ("a-GT", ["-gt"]), ("a.label", [".label"]), ("mask_a", ["mask_"]), ("mask", ["mask"]),
        ("gt_a_mask", ["gt_", "_mask"]), ("a_ground_truth", ["_ground_truth"]), ("a_1stHO", ["_1stho"]), ("21_manual1", ["_manual1"]),
        ("unmasked", []), ("damask", []), ("segment_1", []), ("a_mask_2", []), ("label", ["label"]), ("a", []),
    ],
)  # fmt: skip
def test_marks_of_masks_are_whole_words_at_either_end(stem, marks):
    assert mask_marks(stem) == marks


def test_marks_count_only_if_some_names_have_none(tmp_path):
    image, mask, other = tmp_path / "a.png", tmp_path / "a_mask.png", tmp_path / "a_x.png"
    assert has_marks([image, mask], "")
    assert not has_marks([mask], "")
    assert not has_marks([image, other], "")
    assert has_marks([image, other], "_x")


def test_a_broken_link_is_listed_and_a_link_to_a_folder_is_not(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "b.png").symlink_to(tmp_path)
    assert list_files(tmp_path) == [tmp_path / "a.png"]
