"""Which folders hold the images and which the masks, in common layouts; ambiguous layouts are refused."""

from __future__ import annotations

import pytest

from unet_trainer.datasets.layouts import Folders, find_layout, holds_masks_too
from unet_trainer.images.file_bytes import DataError


def fill(root, *folders):
    """Layouts are found by names, so an empty file in each folder is enough."""
    for folder in folders:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "a.png").touch()


def found(root, image_dir=None, mask_dir=None):
    """(images, masks) to train on, the same for val or None, and the phrase for the parts."""
    layout = find_layout(root, image_dir, mask_dir)
    train, val = (
        (folders[0].images.relative_to(root).as_posix(), folders[0].masks.relative_to(root).as_posix()) if folders else None
        for folders in (layout.train, layout.val)
    )
    return train, val, layout.parts


def found_test(root):
    """(images, masks) of test; masks is None if there is no such folder."""
    layout = find_layout(root, None, None)
    return [
        (
            folders.images.relative_to(root).as_posix(),
            folders.masks.relative_to(root).as_posix() if folders.masks.is_dir() else None,
        )
        for folders in layout.test
    ]


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
    assert (layout.train, layout.val, layout.test) == ((Folders(tmp_path / images, tmp_path / masks),), (), ())
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
    assert found_test(tmp_path) == ([folders(test)] if test else [])
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


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        (["test"], ("test", None)),
        (["test/images"], ("test/images", None)),
        (["test/images", "test/masks"], ("test/images", "test/masks")),
        (["test", "testannot"], ("test", "testannot")),
        (["imagesTs"], ("imagesTs", None)),
        (["images_test", "masks_test"], ("images_test", "masks_test")),
    ],
    ids=str,
)
def test_a_test_folder_is_found_and_not_trained_on(tmp_path, test, expected):
    fill(tmp_path, "images", "masks", *test)
    assert found(tmp_path) == (("images", "masks"), None, "")
    assert found_test(tmp_path) == [expected]


def test_an_ambiguous_test_folder_stops_no_training(tmp_path):
    fill(tmp_path, "images", "masks", "test/images", "test/masks", "test/gt")
    assert found(tmp_path) == (("images", "masks"), None, "")
    assert found_test(tmp_path) == []


def test_a_test_folder_inside_the_images_is_no_part_of_them(tmp_path):
    fill(tmp_path, "images", "images/test", "masks", "masks/test")
    (train,) = find_layout(tmp_path, None, None).train
    assert train == Folders(tmp_path / "images", tmp_path / "masks", without=(tmp_path / "images/test", tmp_path / "masks/test"))
    assert found_test(tmp_path) == [("images/test", "masks/test")]


def test_a_test_folder_beside_images_that_lie_in_data_dir(tmp_path):
    fill(tmp_path, ".", "masks", "test")
    (train,) = find_layout(tmp_path, None, None).train
    assert train == Folders(tmp_path, tmp_path / "masks", without=(tmp_path / "test",))


# Sequences, and folders around everything


@pytest.mark.parametrize("place", ["", "train/"])
def test_each_sequence_may_have_folders_of_its_own(tmp_path, place):
    fill(tmp_path, *(f"{place}{name}/{kind}" for name in ("seq1", "seq2") for kind in ("images", "masks")))
    layout = find_layout(tmp_path, None, None)
    assert layout.train == tuple(
        Folders(tmp_path / place / name / "images", tmp_path / place / name / "masks", f"{name}/") for name in ("seq1", "seq2")
    )
    assert (layout.val, layout.phrase) == ((), f"{place}*/images/ + {place}*/masks/ in 2 folders")


def test_sequences_may_be_divided_into_train_val_and_test(tmp_path):
    for part, names in (("train", ["a", "b"]), ("val", ["c"]), ("test", ["d"])):
        fill(tmp_path, *(f"{part}/{name}/{kind}" for name in names for kind in ("images", "masks")))
    layout = find_layout(tmp_path, None, None)
    assert [[folders.name for folders in part] for part in (layout.train, layout.val, layout.test)] == [
        ["a/", "b/"],
        ["c/"],
        ["d/"],
    ]
    assert layout.parts == "folders train and val"


def test_a_folder_with_images_and_masks_beside_images_is_no_sequence(tmp_path):
    """A backup beside the data."""
    for name in ("a.jpg", "a_mask.png"):
        (tmp_path / name).touch()
    fill(tmp_path, "backup/images", "backup/masks")
    assert [folders.images for folders in find_layout(tmp_path, None, None).train] == [tmp_path]


def test_the_2018_data_science_bowl_is_known_by_its_folders(tmp_path):
    fill(tmp_path, "stage1_train/0a/images", "stage1_train/0a/masks", "stage1_test/1b/images")
    layout = find_layout(tmp_path, None, None)
    assert [folders.name for folders in (*layout.train, *layout.test)] == ["0a/", "1b/"]
    assert not layout.test[0].masks.exists()


def test_sequences_with_two_folders_of_masks_need_mask_dir(tmp_path):
    fill(tmp_path, *(f"{name}/{kind}" for name in ("a", "b") for kind in ("images", "masks", "labels")))
    assert len(find_layout(tmp_path, None, "labels").train) == 2
    assert find_layout(tmp_path, None, "labels").train[1].masks == tmp_path / "b/labels"


def test_a_folder_around_everything_is_entered(tmp_path):
    fill(tmp_path, "download/mine/images", "download/mine/masks", "checkpoints/.scan", "checkpoints/check")
    layout = find_layout(tmp_path, None, None)
    assert layout.train == (Folders(tmp_path / "download/mine/images", tmp_path / "download/mine/masks"),)
    assert layout.phrase == "download/mine/images/ + download/mine/masks/"


def test_our_own_folders_are_never_data(tmp_path):
    """data_dir: . beside checkpoints/: its sheets and samples were taken for images at the second start."""
    fill(tmp_path, "images", "masks")
    before = found(tmp_path)
    fill(tmp_path, "checkpoints/check", "checkpoints/run/samples", "checkpoints/.scan", "runs/mine/samples", "run/train/images")
    (tmp_path / "runs/.converted").mkdir()
    for name in ("config.yaml", "split.csv"):
        (tmp_path / "run" / name).touch()
    assert found(tmp_path) == before


def test_images_in_data_dir_beside_a_folder_of_masks(tmp_path):
    fill(tmp_path, ".", "masks")
    layout = find_layout(tmp_path, None, None)
    assert layout.train == (Folders(tmp_path, tmp_path / "masks"),)


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
    assert "could hold the images: images/, img/; set one of these:\n  image_dir: images\n  image_dir: img" in error_message(
        tmp_path
    )


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
        f"{key}: no folder {tmp_path / 'nothing'}; {tmp_path} holds images/, masks/; set one of these:\n  {key}: images\n  {key}: masks"
    )


# Refusals


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            ["images", "imgs", "masks"],
            "image_dir: 2 folders in ROOT could hold the images: images/, imgs/; set one of these:\n  image_dir: images\n  image_dir: imgs",
        ),
        (
            ["images", "masks", "labels"],
            "mask_dir: 2 folders in ROOT could hold the masks: labels/, masks/; set one of these:\n  mask_dir: labels\n  mask_dir: masks",
        ),
        (  # DRIVE: mask/ is the field of view, and its names would pair
            ["training/images", "training/1st_manual", "training/mask", "test/images", "test/mask"],
            "mask_dir: 2 folders in ROOT could hold the masks: training/1st_manual/, training/mask/; set one of these:\n"
            "  mask_dir: 1st_manual\n  mask_dir: mask",
        ),
        (
            ["images", "masks", "train/images", "train/masks"],
            "image_dir: 2 folders in ROOT could hold the images: images/, train/images/; set one of these:\n"
            "  image_dir: images\n  image_dir: train/images",
        ),
        (
            ["train", "train_masks", "trainannot"],
            "mask_dir: 2 folders in ROOT could hold the masks: train_masks/, trainannot/; set one of these:\n"
            "  mask_dir: train_masks\n  mask_dir: trainannot",
        ),
        (
            ["train/images", "train/masks", "val/images", "val/masks", "val/gt"],
            "mask_dir: 2 folders in ROOT could hold the masks: val/gt/, val/masks/; set one of these:\n  mask_dir: gt\n  mask_dir: masks",
        ),
        (
            ["images/val", "images/test", "masks/val"],
            "data_dir: ROOT holds images/val/ but no train/; set:\n  image_dir: images/val\n  mask_dir: masks/val",
        ),
        (
            ["images/train", "images/val", "masks/train"],
            "no folder ROOT/masks/val; ROOT/images holds train/, val/; add it, or to train and validate on one folder; set:\n"
            "  image_dir: images/train\n  mask_dir: masks/train",
        ),
        (
            ["train", "trainannot", "val"],
            "no folder ROOT/valannot; ROOT holds train/, trainannot/, val/; add it, or to train and validate on one folder; set:\n"
            "  image_dir: train\n  mask_dir: trainannot",
        ),
        (
            ["val/images", "val/masks"],
            "data_dir: ROOT holds val/images/ but no train/; set:\n  image_dir: val/images\n  mask_dir: val/masks",
        ),
        (  # files beside test/ may be anything
            [".", "test/images"],
            "data_dir: no folder of images (images, imgs, ...) and no folder of masks (masks, labels, ...) in ROOT; ROOT holds test/; "
            "set image_dir and mask_dir to the folders to use, or split_file to a CSV",
        ),
        (
            ["masks"],
            "data_dir: no folder of images (images, imgs, ...) in ROOT; ROOT holds masks/; "
            "set image_dir to the folder to use, or split_file to a CSV",
        ),
        (
            [],
            "data_dir: no folder of images (images, imgs, ...) and no folder of masks (masks, labels, ...) in ROOT; "
            "ROOT holds no folder; set image_dir and mask_dir to the folders to use, or split_file to a CSV",
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
    assert error_message(tmp_path).endswith("set one of these:\n  mask_dir: 1st_manual\n  mask_dir: mask")
    assert found(tmp_path, *settings)[:2] == expected


def test_two_folders_of_unknown_names_whose_files_pair_up_are_proposed(tmp_path):
    """The larger files are the images."""
    for name, size in (("after", 10), ("before", 2000), ("notes", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("z.png" if name == "notes" else "a.png")).write_bytes(bytes(size))
    message = error_message(tmp_path)
    assert message.endswith("holds after/, before/, notes/; set:\n  image_dir: before\n  mask_dir: after")
    assert found(tmp_path, "before", "after")[0] == ("before", "after")


def test_a_folder_that_pairs_with_the_images_is_proposed_for_the_masks(tmp_path):
    fill(tmp_path, "images", "outlines")
    assert error_message(tmp_path).endswith(
        "in ROOT; ROOT holds images/, outlines/; set:\n  mask_dir: outlines".replace("ROOT", str(tmp_path))
    )


def test_some_marked_names_or_names_that_two_files_share_are_masks(tmp_path):
    image, mask, other, shared = (tmp_path / name for name in ("a.png", "a_mask.png", "a_x.png", "a.jpg"))
    assert holds_masks_too([image, mask], "")
    assert not holds_masks_too([mask], "")
    assert not holds_masks_too([image, other], "")
    assert holds_masks_too([image, other], "_x")
    assert holds_masks_too([image, shared], "")
