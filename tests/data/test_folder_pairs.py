"""Which files of folders are pairs and of which part they are, by names alone; and what is asked where names do not say it."""

import os
import random
import re

import numpy as np
import pytest
import tifffile

from helpers import layouts
from unet_trainer.config.load import load_config
from unet_trainer.data.find import find_dataset
from unet_trainer.data.splits import build_split
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS


def touch(root, *names):
    """Empty files, which are enough: pairing opens none. A name without a dot is a folder that gets a.png."""
    for name in names:
        path = root / name if "." in name.rpartition("/")[2] else root / name / "a.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def found_in(data_dir, **settings):
    return find_dataset(load_config({"data_dir": str(data_dir), **settings}))


def paths_in(data_dir, pairs):
    return [tuple(path.relative_to(data_dir).as_posix() for path in (pair.image, pair.mask)) for pair in pairs]


def refusal(data_dir, **settings):
    """Why the data cannot be trained on, with data_dir as ROOT."""
    try:
        message = found_in(data_dir, **settings).blocking_message
    except DataError as error:
        message = str(error)
    return message.replace(str(data_dir), "ROOT")


# What is found

NUMBERS = [f"{number:02d}" for number in range(1, 13)]
FOLDERS = [
    ("imgs", "masks"), ("Image", "Mask"), ("IMAGES", "Labels"), ("images", "annotations"), ("img_dir", "ann_dir"), ("images", "GT"),
    ("imagesTr", "labelsTr"), ("images", "Ground Truth"), ("JPEGImages", "SegmentationClass"), ("input", "target"), ("images", "1st_manual"),
    ("train", "trainannot"), ("train", "train_gt"), ("train", "masks"), ("images_train", "masks_train"), ("training", "training_labels"),
    ("download/mine/images", "download/mine/masks"), (".", "masks"), ("patient1/images", "patient1/masks"),
]  # fmt: skip
NAMES = [
    ("{}_training.tif", "{}_manual1.gif"), ("t{}.tif", "man_seg{}.tif"), ("{}_image.png", "{}_annotation.png"), ("{}.jpg", "{}_mask.png"),
    ("Image_{}L.jpg", "Image_{}L_1stHO.png"), ("img_{}.png", "mask_{}.png"), ("{}.png", "gt-{}.png"), ("2020_{}.png", "2020_{}_manual1.png"),
    ("{}_sat.jpg", "{}_mask.png"), ("a.b.{}.jpg", "a.b.{}.png"), ("set/{}.jpg", "set/{}_m.png"), ("{}_0000.png", "{}.png"),
]  # fmt: skip
SIDE_BY_SIDE = [
    ("{}.jpg", "{}_mask.png"), ("{}.png", "{}-GT.png"), ("{}_sat.jpg", "{}_mask.png"), ("img_{}.png", "gt_{}.png"), ("{}.jpg", "{}.png"),
    ("seg_{}.png", "seg_{}_mask.png"), ("p{0}/scan_{0}.tif", "p{0}/scan_{0}_mask.tif"), ("case{}/image.png", "case{}/mask.png"),
    ("Image_{}L.jpg", "Image_{}L_1stHO.png"),
]  # fmt: skip
FORMS = [
    *((f"{images}/{{}}.jpg".removeprefix("./"), f"{masks}/{{}}.png") for images, masks in FOLDERS),
    *((f"images/{image}", f"masks/{mask}") for image, mask in NAMES),
    *SIDE_BY_SIDE,
]


@pytest.mark.parametrize("numbers", [NUMBERS, ["03"]], ids=["12", "1"])
@pytest.mark.parametrize(("image", "mask"), FORMS)
def test_a_usual_folder_is_paired_by_its_names(tmp_path, image, mask, numbers):
    expected = [(image.format(number), mask.format(number)) for number in numbers]
    touch(tmp_path, *(name for pair in expected for name in pair), "notes.txt")
    if len(numbers) == 1 and ("t{}" in image or mask.endswith("_m.png")):  # known words alone, of a single name
        assert "1 image without a mask" in refusal(tmp_path)
    else:
        found = found_in(tmp_path)
        assert (paths_in(tmp_path, found.pairs), found.blocking_message) == (expected, "")


PARTS = [
    ("{}/images", "{}/masks"), ("{}/img", "{}/gt"), ("images/{}", "masks/{}"), ("img_dir/{}", "ann_dir/{}"), ("leftImg8bit/{}", "gtFine/{}"),
    ("{}", "{}annot"), ("{}", "{}_labels"), ("{}", "masks/{}"), ("{0}/{0}_images", "{0}/{0}_masks"), ("{}", "{}/masks"),
    ("{}/s1/images", "{}/s1/masks"),
]  # fmt: skip
NAMES_OF_PARTS = [
    ("train2017", "val2017", "test2017"),
    ("train_set", "val_v2", "test-data"),
    ("tr", "valid", "testing"),
]


@pytest.mark.parametrize(("template", "names"), [
    *((template, ("Training", "VALID", "test")) for template in PARTS),
    *((template, names) for template in PARTS[:3:2] for names in NAMES_OF_PARTS),
])  # fmt: skip
def test_train_val_and_test_may_be_above_below_or_in_the_names_of_folders(tmp_path, template, names):
    places = {name: tuple(text.format(name) for text in template) for name in names}
    touch(tmp_path, *(f"{folder}/{name}.png" for name, folders in places.items() for folder in folders))
    found = found_in(tmp_path)
    expected = [tuple(f"{folder}/{name}.png" for folder in places[name]) for name in names]
    assert (paths_in(tmp_path, found.pairs), paths_in(tmp_path, found.test)) == (expected[:2], expected[2:])
    assert [pair.part for pair in (*found.pairs, *found.test)] == ["train", "val", "test"]
    assert found.rule.endswith(f"folders {names[0]} and {names[1]}") or found.rule.endswith("_images and VALID_images")


@pytest.mark.parametrize(("there", "settings", "expected"), [
    (["a", "b"], ("a", "b"), ("a", "b")),
    (["images", "masks", "a"], ("a", None), ("a", "masks")),
    (["images", "masks", "labels"], (None, "labels"), ("images", "labels")),
    (["train/images", "train/masks", "train/labels"], (None, "labels"), ("train/images", "train/labels")),
    (["01", "01_GT/SEG"], ("01", "01_GT/SEG"), ("01", "01_GT/SEG")),
    (["images", "images/masks"], ("images", "images/masks"), ("images", "images/masks")),
    (["images", "train/images", "masks"], ("images", "masks"), ("images", "masks")),
    (["images", "train/images", "masks", "train/masks"], ("train/images", "train/masks"), ("train/images", "train/masks")),
])  # fmt: skip
def test_folders_that_are_set_are_used_instead_of_a_search(tmp_path, there, settings, expected):
    touch(tmp_path, *there)
    found = found_in(tmp_path, **dict(zip(("image_dir", "mask_dir"), settings, strict=True)))
    assert paths_in(tmp_path, found.pairs) == [tuple(f"{folder}/a.png" for folder in expected)]
    (tmp_path / "other").mkdir()
    around = found_in(tmp_path / "other/..", **dict(zip(("image_dir", "mask_dir"), settings, strict=True)))
    assert paths_in(tmp_path / "other/..", around.pairs) == [tuple(f"{folder}/a.png" for folder in expected)]


def test_folders_that_are_set_may_lie_outside_of_data_dir(tmp_path):
    touch(tmp_path, "data/images", "data/masks", "truth/a.png")
    for mask_dir in (str(tmp_path / "truth"), "../truth"):
        (pair,) = found_in(tmp_path / "data", mask_dir=mask_dir).pairs
        assert pair.mask.resolve() == tmp_path / "truth/a.png"


# What is asked


FIX = (
    "set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, "
    "or split_file to a CSV with the columns image and mask"
)
HOLD, TWICE = "could hold the", "images and masks in ROOT/images and ROOT/masks do not pair up:"
FOUR = ["a.jpg", "a_x.png", "b.jpg", "b_x.png"]
QUESTIONS = {  # folders and files → the beginning of the message, and its end
    "two folders of images": (["images", "imgs", "masks"], f"image_dir: 2 folders in ROOT {HOLD} images: images/, imgs/; set one of these:\n  image_dir: images\n  image_dir: imgs", ""),
    "DRIVE, where mask/ is the field of view": (["training/images", "training/1st_manual", "training/mask", "test/images"], "mask_dir: 2 folders in ROOT", ":\n  mask_dir: 1st_manual\n  mask_dir: mask"),
    "all and train": (["images", "masks", "train/images", "train/masks"], f"image_dir: 2 folders in ROOT {HOLD} images: images/, train/images/; set", ""),
    "two folders of train": (["train", "train_masks", "trainannot"], f"mask_dir: 2 folders in ROOT {HOLD} masks: train_masks/, trainannot/; set", ""),
    "two folders of val": (["train/images", "train/masks", "val/images", "val/masks", "val/gt"], f"mask_dir: 2 folders in ROOT {HOLD} masks: val/gt/, val/", ""),
    "val without masks": (["train", "trainannot", "val"], "no masks of ROOT/val; ROOT holds train/, trainannot/, val/; add them, or to train and", ""),
    "DeepGlobe": (["train/1_sat.jpg", "train/1_mask.png", "valid/2_sat.jpg"], "no masks of ROOT/valid; ", "; set:\n  image_dir: train\n  mask_dir: train"),
    "files beside test": (["a.png", "test/images"], "cannot tell images from masks in ROOT: no folder of masks (masks, labels, ...), and no file is named like a mask (X_mask, gt_X, ...); ROOT holds test/; there is ", ""),
    "masks alone": (["masks"], "data_dir: no folder of images (images, imgs, ...) in ROOT; ROOT holds masks/; set image_dir to the folder to use, or", ""),
    "unknown names": (["before", "after"], "cannot tell the folder of images from that of masks: ROOT holds after/, before/; set one of these:\n  # before holds", "image_dir: before\n  mask_dir: after"),
    "one of them known": (["photos/a.jpg", "annotated/a.png"], "cannot tell the folder of images from that of masks: ROOT holds annotated/, photos/; set one", "image_dir: photos\n  mask_dir: annotated"),
    "ISIC": (["T1-2_Input/a.jpg", "T1-2_Input/b.jpg", "T1_GroundTruth/a_seg.png", "T1_GroundTruth/b_seg.png"], "cannot tell the folder of images", "image_dir: T1_GroundTruth\n  mask_dir: T1-2_Input"),
    "cell tracking": (["01/t0.tif", "01/t1.tif", "01_GT/SEG/man_seg0.tif", "01_GT/SEG/man_seg1.tif"], "data_dir: no folder of images (images, imgs, ...) in ROOT; ROOT holds 01/, 01_GT/; set one of these:\n  # 01_GT/SEG holds the masks\n  image_dir: '01'\n  mask_dir: 01_GT/SEG\n", "image_dir: 01_GT/SEG\n  mask_dir: '01'"),
    "one folder, no mark": (FOUR, "cannot tell images from masks in ROOT: no folder of masks", "; there is a.jpg, b.jpg beside a_x.png, b_x.png; set:\n  mask_suffix: _x"),
    "one folder, two marks": (["a.jpg", "a_1stHO.png", "a_2ndHO.png"], "images and masks in ROOT do not pair up: 1 image without a mask, 2 masks without an image; there is a.jpg beside a_1stHO.png, a_2ndHO.png; ", "set one of these:\n  mask_suffix: _1stHO\n  mask_suffix: _2ndHO"),
    "one folder, two endings": (["a.tif", "a.png", "b.tif", "b.png"], "cannot tell", "a.png, a.tif, b.png and 1 more; set one of these:\n  mask_suffix: .png\n  mask_suffix: .tif"),
    "two kinds of masks": (["images/a.png", "masks/a_x.png", "masks/a_y.png"], f"{TWICE} 1 image without a mask, 2 masks without an image; there is a.png beside a_x.png, a_y.png; ", "set one of these:\n  mask_suffix: _x\n  mask_suffix: _y"),
    "two images of a name": (["images/a.bmp", "images/a.png", "masks/a.png"], f"{TWICE} 2 images without a mask, 1 mask without an image; there is a.bmp, a.png beside a.png", FIX),
    "two masks of a name": (["images/a.png", "masks/a.bmp", "masks/a.png"], f"{TWICE} 1 image without a mask, 2 masks without an image; there is a.png beside a.bmp, a.png", ":\n  mask_suffix: .bmp\n  mask_suffix: .png"),
    "val alone pairs up": (["train/images/a.png", "train/masks/b.png", "val/images/c.png", "val/masks/c.png"], "images and masks in ROOT/train/images and ROOT/train/masks do not pair up: 1 image without a mask, 1 mask without an image; there is a.png beside b.png; ", FIX),
    "a channel that is missing": (["imagesTr/a_0000.png", "imagesTr/a_0001.png", "imagesTr/b_0001.png", "labelsTr/a.png"], "image_dir: ROOT/imagesTr has 2 channel files for", "and for b b_0001.png; need b_0000, b_0001"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_could_be_meant_in_several_ways_is_one_question(tmp_path, name):
    there, start, end = QUESTIONS[name]
    touch(tmp_path, *there)
    message = refusal(tmp_path)
    assert message.startswith(start)
    assert message.endswith(end)


def test_two_images_of_one_name_beside_others_that_pair_up_are_named(tmp_path):
    touch(tmp_path, "images/a.png", "images/a.jpg", "images/b.png", "masks/a.png", "masks/b.png")
    found = found_in(tmp_path)
    assert len(found.pairs) == 1
    assert {problem.kind for problem in found.problems} == {"no_mask", "no_image"}
    for problem in found.problems:
        assert problem.fix == "a.jpg, a.png have the same name: rename or remove those that have no partner"
        assert problem.settings == {}  # skip would leave out both images, and a mask


@pytest.mark.parametrize(("settings", "there", "message"), [
    ({"mask_suffix": "_y"}, FOUR, "mask_suffix: no name in ROOT ends in '_y'; there is a.jpg, b.jpg beside a_x.png, b_x.png; set:\n  mask_suffix: _x"),
    ({"mask_dir": "labels"}, ["images", "masks"], "mask_dir: no folder ROOT/labels; ROOT holds images/, masks/; set one of these:\n  mask_dir: images\n"),
    ({"mask_dir": "a/b"}, ["images", "masks"], "mask_dir: no folder ROOT/a/b; ROOT holds images/, masks/"),
])  # fmt: skip
def test_a_setting_that_finds_nothing_is_answered_by_what_is_there(tmp_path, settings, there, message):
    touch(tmp_path, *there)
    assert refusal(tmp_path, **settings).startswith(message)


@pytest.mark.parametrize(("there", "mask_suffix", "expected"), [
    (["a.jpg", "a_1stHO.png", "a_2ndHO.png"], "_2ndHO", ("a.jpg", "a_2ndHO.png")),
    (["a.tif", "a.png"], ".tif", ("a.png", "a.tif")),
    (["images/a.png", "masks/a_x.png", "masks/a_y.png"], "_y", ("images/a.png", "masks/a_y.png")),
    (["images/a.png", "masks/a.bmp", "masks/a.png"], ".bmp", ("images/a.png", "masks/a.bmp")),
])  # fmt: skip
def test_mask_suffix_says_which_files_are_the_masks(tmp_path, there, mask_suffix, expected):
    touch(tmp_path, *there)
    found = found_in(tmp_path, mask_suffix=mask_suffix)
    assert (paths_in(tmp_path, found.pairs), found.blocking_message) == ([expected], "")


def test_images_without_masks_and_masks_without_images_are_named_with_what_to_do(tmp_path):
    touch(tmp_path, "images/a.png", "images/b.jpg", "images/c.png", "masks/a_m.png", "masks/d_m.png")
    assert refusal(tmp_path, mask_suffix="_m").splitlines() == [
        "2 images without a mask in ROOT/masks:",
        f"  Fix: add the masks; or {FIX}", "  ROOT/images/b.jpg", "  ROOT/images/c.png",
        "1 mask without an image in ROOT/images:", "  Fix: add their images", "  ROOT/masks/d_m.png",
    ]  # fmt: skip
    touch(tmp_path, "images/d.png")
    (problem,) = found_in(tmp_path, mask_suffix="_m").problems
    assert (len(problem.lines), problem.settings) == (2, {"unpaired": "skip"})
    skipped = found_in(tmp_path, mask_suffix="_m", unpaired="skip")
    assert (len(skipped.pairs), skipped.blocking_message) == (2, "")
    images = (
        f"2 images without a mask in {tmp_path / 'masks'} left out (unpaired: skip), e.g. {tmp_path / 'images/b.jpg'}"
    )
    assert skipped.notices == (images,)


@pytest.mark.parametrize("first", [0, 1])
def test_as_many_masks_that_are_numbered_from_another_number_are_not_left_out_but_to_be_renamed(first, tmp_path):
    touch(tmp_path, *(f"images/img_{index + first:03d}.jpg" for index in range(30)))
    touch(tmp_path, *(f"masks/mask_{index + 1 - first:03d}.png" for index in range(30)))
    message = refusal(tmp_path)
    assert "if images and masks are numbered from different numbers, rename the masks" in message
    assert "unpaired: skip" not in message


@pytest.mark.parametrize(("images", "masks"), [
    (["t000", "t001"], ["man_seg001", "man_seg002"]),  # shifted by one
    (["1", "2"], ["1_mask", "3_mask"]), (["001"], ["002"]), (["10", "20"], ["1", "2"]),
    (["s1_a", "s1_b"], ["s2_a", "s2_b"]), (["a_1", "b_1"], ["a_2", "b_2"]),  # two series, two frames
    (["a", "b"], ["a_2", "b_2"]),  # a number is no suffix
    (["1", "01"], ["1_mask", "001_mask"]), (["img_1", "img_2"], ["mask_001", "mask_002"]),  # zeros before the number
    (["1", "2"], ["1_mask", "2_label"]),  # nothing that all masks share
])  # fmt: skip
def test_different_numbers_or_names_are_never_paired(tmp_path, images, masks):
    touch(tmp_path, *(f"images/{stem}.png" for stem in images), *(f"masks/{stem}.png" for stem in masks))
    assert re.search("images? without a mask", refusal(tmp_path))


WORDS = ["", "", "_mask", "img_", "_training", "_manual1", "man_seg", "t", "-GT", " (copy)"]
AFFIXES = ["", "", "_mask", "img", "_1", "1", "0", "t", "_L", "x", "_manual1", "00", "a", "-0", "2020_", "ab", "_00"]


def random_stems(chooser):
    letters = chooser.choice(["01", "012", "ab0", "ab", "a0_", "0123456789"])
    if chooser.random() < 0.4:
        start, step = chooser.randrange(30), chooser.choice([1, 1, 10, 9])
        return [f"{start + step * index:0{chooser.choice([1, 3])}d}" for index in range(chooser.randint(1, 14))]
    return sorted({"".join(chooser.choices(letters, k=chooser.randint(1, 5))) for _ in range(chooser.randint(1, 12))})


def test_names_with_random_affixes_are_paired_correctly_or_refused(tmp_path):
    chooser, num_paired = random.Random(0), 0
    for case in range(120):
        cores, root = random_stems(chooser), tmp_path / str(case)
        start, end, mask_start, mask_end = chooser.choices(chooser.choice([WORDS, AFFIXES]), k=4)
        truth = [(f"images/{start}{core}{end}.jpg", f"masks/{mask_start}{core}{mask_end}.png") for core in cores]
        is_cut = chooser.random() < 0.2
        touch(root, *(image for image, _ in truth), *(mask for _, mask in truth[is_cut:]))
        if not refusal(root):
            assert sorted(paths_in(root, found_in(root).pairs)) == sorted(truth)
            assert not is_cut
            num_paired += 1
    assert num_paired > 20  # refusing everything would pass too


def test_files_that_are_not_read_are_named_beside_the_extensions_that_are(tmp_path):
    touch(tmp_path, "images/a.heic", "images/b.dcm", "images/README.txt", "masks/notes.txt")
    first, *others = refusal(tmp_path).splitlines()
    there = "ROOT holds images/ (no image file), masks/ (no image file); need files with one of "
    assert f"{there}{', '.join(sorted(IMAGE_EXTENSIONS))}; set" in first
    heic = "1 file such as images/a.heic: a photo in Apple's HEIC format"
    assert [line.split(";")[0].strip() for line in others] == [heic, "1 file such as images/b.dcm: a DICOM file"]
    touch(tmp_path, "images/c.png", "masks/a.png", "masks/c.png", "images/d.png", "masks/d.png")
    for unpaired in ("error", "skip"):
        assert any(heic in notice for notice in found_in(tmp_path, unpaired=unpaired).notices)


# Lists and parts


@pytest.mark.parametrize("place", ["", "VOCdevkit/VOC2012"])
def test_the_lists_of_voc_are_the_split(tmp_path, place):
    layouts.voc(tmp_path / place)
    touch(tmp_path / place, "SegmentationObject/2007_000000.png", "Annotations/2007_000000.xml")
    found = found_in(tmp_path)
    expected = [(f"2007_{number:06d}", "train" if number < 4 else "val") for number in range(layouts.COUNT)]
    assert [(pair.name, pair.part) for pair in found.pairs] == expected
    folders = f"JPEGImages/ + {place and f'{place}/'}SegmentationClass/"
    assert found.rule.endswith(f"{folders}, same names; ImageSets/Segmentation/train.txt and val.txt")
    assert (found.blocking_message, found.notices) == ("", ("3 images in no list of ImageSets/Segmentation left out",))
    folders = {"image_dir": f"{place}/JPEGImages".lstrip("/"), "mask_dir": f"{place}/SegmentationClass".lstrip("/")}
    assert [pair.part for pair in found_in(tmp_path, **folders).pairs] == [part for _, part in expected]


def test_listed_names_without_an_image_block_unless_they_are_to_be_skipped(tmp_path):
    layouts.voc(tmp_path)
    (tmp_path / "JPEGImages/2007_000001.jpg").unlink()
    found = found_in(tmp_path)
    (problem,) = found.problems
    assert (problem.lines, problem.settings) == (("2007_000001",), {"unpaired": "skip"})
    assert "1 name in ImageSets/Segmentation without an image" in found.blocking_message
    skipped = found_in(tmp_path, **problem.settings)
    assert (len(skipped.pairs), skipped.blocking_message) == (layouts.COUNT - 1, "")
    name = "1 name in ImageSets/Segmentation without an image left out (unpaired: skip), e.g. 2007_000001"
    assert name in skipped.notices


def test_lists_of_which_no_image_is_there_are_one_problem(tmp_path):
    layouts.voc(tmp_path)
    for path in (tmp_path / "JPEGImages").iterdir():
        path.rename(path.with_name(f"other_{path.name}"))
    assert "6 names in ImageSets/Segmentation without an image" in refusal(tmp_path)


def test_the_lists_of_cvat_are_the_split_and_a_line_is_a_name_with_its_spaces(tmp_path):
    parts = {"frame 1": "train", "frame 2": "val", "set a/frame 3": "test", "4": "train"}
    touch(tmp_path, *(f"JPEGImages/{name}.jpg" for name in parts), *(f"SegmentationClass/{name}.png" for name in parts))
    for name, lines in (("Train", "frame 1\n4 -1\n"), ("Validation", "frame 2\n"), ("Test", "set a/frame 3\n")):
        touch(tmp_path, f"ImageSets/Segmentation/{name}.txt")
        (tmp_path / f"ImageSets/Segmentation/{name}.txt").write_text(lines)
    found = found_in(tmp_path)
    assert ({pair.name: pair.part for pair in (*found.pairs, *found.test)}, found.blocking_message) == (parts, "")


def test_pages_belong_to_the_part_of_their_file(tmp_path):
    layouts.voc(tmp_path)
    for number in (0, 4):
        for folder, suffix in (("JPEGImages", "jpg"), ("SegmentationClass", "png")):
            (tmp_path / folder / f"2007_{number:06d}.{suffix}").unlink()
            pages = np.arange(7 * 20 * 30, dtype=np.uint8).reshape(7, 20, 30) % 3
            tifffile.imwrite(tmp_path / folder / f"2007_{number:06d}.tif", pages, photometric="minisblack")
    parts = {pair.name: pair.part for pair in found_in(tmp_path).pairs}
    in_train = [name for name, part in parts.items() if part == "train"]
    assert in_train[:8] == [*(f"2007_000000/{page}" for page in range(7)), "2007_000001"]
    assert parts["2007_000004/6"] == "val"


@pytest.mark.parametrize(("test", "kept", "notices"), [
    (["test/images/x.png", "test/images/y.png", "test/masks/x.png", "test/masks/y.png"], ["x", "y"], ()),
    (["test/images/x.png"], [], ("1 test image without masks in test/images/",)),
    (["test/x.png", "test/y.png"], [], ("2 test images without masks in test/",)),
    (["test/images/x.png", "test/images/y.png", "test/masks/x.png"], ["x"], ("1 image without a mask, 0 masks without an image in test/images/, left out",)),
])  # fmt: skip
def test_a_test_folder_is_said_and_kept_for_evaluate(tmp_path, test, kept, notices):
    touch(tmp_path, *(f"{part}/{kind}/{part}.png" for part in ("train", "val") for kind in ("images", "masks")), *test)
    found = found_in(tmp_path)
    assert ([pair.name for pair in found.pairs], found.notices) == (["train", "val"], notices)
    split = build_split(load_config({}), found, ["", ""], ["", ""])
    assert [(pair.name, pair.part) for pair in split.test] == [(name, "test") for name in kept]


def test_composed_and_decomposed_names_pair_up(tmp_path):
    """NFC and NFD: the masks came from an archive made on macOS."""
    touch(tmp_path, "images/K\u00e4fer.jpg", "images/Z\u00fcge.jpg", "masks/Ka\u0308fer.png", "masks/Zu\u0308ge.png")
    found = found_in(tmp_path)
    assert [pair.name for pair in found.pairs] == ["K\u00e4fer", "Z\u00fcge"]
    assert found.rule == "images/ + masks/, same names"
    assert [pair.group for pair in found_in(tmp_path, group_pattern="(\u00e4|\u00fc)").pairs] == ["\u00e4", "\u00fc"]


# What is searched


def test_our_own_folders_are_never_data(tmp_path):
    """data_dir: . beside checkpoints/: its sheets and samples were taken for images at the second start."""
    touch(tmp_path, "images", "masks")
    before = found_in(tmp_path)
    touch(tmp_path, "checkpoints/check", "checkpoints/run/samples", "checkpoints/.scan/x.json", "runs/mine/samples")
    touch(tmp_path, "runs/.converted/x.json", "run/train/images", "run/config.yaml", "run/split.csv")
    touch(tmp_path, "images/mine/.shards/x.json", "images/mine/check")
    assert found_in(tmp_path) == before


@pytest.mark.parametrize("checkpoint_dir", ["images", "masks", "train", "mine", "mine/images", "."])
def test_a_folder_of_data_that_is_the_checkpoint_dir_too_keeps_its_data(tmp_path, checkpoint_dir):
    """The second check found no folder of images."""
    root = "train/" if checkpoint_dir == "train" else "mine/" if "mine" in checkpoint_dir else ""
    touch(tmp_path, f"{root}images", f"{root}masks")
    before = found_in(tmp_path)
    ours = "check", ".scan", ".given/0123456789abcdef/images", ".converted/objects-0/train", "run/samples"
    touch(tmp_path / checkpoint_dir, *(f"{name}/a.png" for name in ours), "run/config.yaml", "run/split.csv")
    assert found_in(tmp_path) == before


def test_folders_may_be_links_also_such_that_lead_in_a_circle(tmp_path):
    touch(tmp_path, "elsewhere/photos", "elsewhere/truth")
    (tmp_path / "data/train").mkdir(parents=True)
    (tmp_path / "data/train/images").symlink_to(tmp_path / "elsewhere/photos")
    (tmp_path / "data/train/masks").symlink_to(tmp_path / "elsewhere/truth")
    (tmp_path / "data/train/around").symlink_to(tmp_path / "data")
    expected = [("train/images/a.png", "train/masks/a.png")]
    assert paths_in(tmp_path / "data", found_in(tmp_path / "data").pairs) == expected
    touch(tmp_path, "elsewhere/photos/more", "elsewhere/truth/more")
    (tmp_path / "data/train/images/latest").symlink_to("more")  # what lies below images/ is not followed
    assert [pair.name for pair in found_in(tmp_path / "data").pairs] == ["a", "more/a"]


def test_a_link_beside_the_data_is_not_searched(tmp_path, monkeypatch):
    """It may lead to a whole disk."""
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(str(path)) or scandir(path))
    touch(tmp_path / "data", "a.png", "a_mask.png", "b.png", "b_mask.png", "notes/n.txt")
    touch(tmp_path, "elsewhere/deep/deeper")
    (tmp_path / "data/old").symlink_to(tmp_path / "elsewhere")
    assert [pair.name for pair in found_in(tmp_path / "data").pairs] == ["a", "b"]
    assert not any("deeper" in path for path in listed)


@pytest.mark.parametrize("name", ["plain", "sequences", "bowl", "voc", "classes", "parts", "coco", "labelme"])
def test_each_folder_of_the_data_is_listed_once(name, tmp_path, monkeypatch):
    getattr(layouts, name)(tmp_path / "data")
    touch(tmp_path, "data/notes/old/n.csv")
    folders = sorted(str(path) for path in (tmp_path / "data").rglob("") if path.is_dir())
    listed = []
    for function in ("scandir", "listdir"):
        original = getattr(os, function)
        monkeypatch.setattr(os, function, lambda path=".", of=original: listed.append(os.fspath(path)) or of(path))
    found_in(tmp_path / "data", checkpoint_dir=str(tmp_path / "checkpoints"))
    assert sorted(path for path in listed if path.startswith(str(tmp_path / "data"))) == folders
