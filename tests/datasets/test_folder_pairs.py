"""Which files of common folders are pairs, which stay unpaired, and which part they belong to."""

from __future__ import annotations

import hashlib
import os
import random
import re

import pytest

from unet_trainer.config.load import load_config
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.folder_pairs import find_pairs
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.splits import split_pairs
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import IMAGE_EXTENSIONS


def touch(folder, *names):
    """Pairing opens no file, so empty files are enough."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def names(pairs):
    return [pair.name for pair in pairs]


def stems(pairs):
    return [(pair.image.stem, pair.mask.stem) for pair in pairs]


FIX = (
    "  set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, "
    "or split_file to a CSV with the columns image and mask"
)


def found_in(data_dir, **settings):
    return find_dataset(load_config({"data_dir": str(data_dir), **settings}))


def split_of(data_dir, **settings):
    """By names only: the files are not read."""
    found = found_in(data_dir, **settings)
    if found.blocking_message:
        raise DataError(found.blocking_message)
    nothing = [""] * len(found.pairs)
    return split_pairs(found, nothing, nothing, val_fraction=settings.get("val_fraction", 0.2), seed=42)


def error_message(call, *arguments, **options):
    with pytest.raises(DataError) as raised:
        call(*arguments, **options)
    return str(raised.value)


def numbered(count):
    return [f"{i:03d}.png" for i in range(count)]


# Pairing


def test_files_pair_by_name_whatever_their_extension(tmp_path):
    touch(tmp_path / "images", "b.jpg", "a.PNG", "c.tiff")
    touch(tmp_path / "masks", "a.png", "b.png", "c.bmp")
    assert find_pairs(tmp_path / "images", tmp_path / "masks") == [
        Pair("a", tmp_path / "images/a.PNG", tmp_path / "masks/a.png"),
        Pair("b", tmp_path / "images/b.jpg", tmp_path / "masks/b.png"),
        Pair("c", tmp_path / "images/c.tiff", tmp_path / "masks/c.bmp"),
    ]


def test_mask_suffix_is_removed_from_the_names_of_masks(tmp_path):
    touch(tmp_path / "images", "a.jpg", "b_mask.jpg")
    touch(tmp_path / "masks", "a_mask.png", "b_mask_mask.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks", "_mask")) == ["a", "b_mask"]


def test_dots_in_names_are_kept(tmp_path):
    touch(tmp_path / "images", "cell.v1.png", "cell.v2.png")
    touch(tmp_path / "masks", "cell.v1.png", "cell.v2.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks")) == ["cell.v1", "cell.v2"]


def test_subfolders_are_searched_and_are_part_of_the_name(tmp_path):
    touch(tmp_path / "images", "p1/001.png", "p2/001.png", "p2/deep/3.png")
    touch(tmp_path / "masks", "p1/001_m.png", "p2/001_m.png", "p2/deep/3_m.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks", "_m")) == ["p1/001", "p2/001", "p2/deep/3"]


def test_hidden_files_and_other_extensions_are_ignored(tmp_path):
    touch(tmp_path / "images", "a.png", ".DS_Store", "._a.png", ".cache/b.png", "Thumbs.db", "notes.txt")
    touch(tmp_path / "masks", "a.png", "._a.png", "classes.json")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks")) == ["a"]


def test_a_folder_named_like_an_image_is_no_image(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png/c.png")
    touch(tmp_path / "masks", "a.png", "b.png/c.png")
    assert names(find_pairs(tmp_path / "images", tmp_path / "masks")) == ["a", "b.png/c"]


def test_images_without_masks_and_masks_without_images_are_named_together(tmp_path):
    touch(tmp_path / "images", "a.png", "b.jpg", "c.png")
    touch(tmp_path / "masks", "a_m.png", "d_m.png")
    images, masks = tmp_path / "images", tmp_path / "masks"
    assert error_message(find_pairs, images, masks, "_m").splitlines() == [
        "images and masks do not pair up:",
        "  the best rule pairs 1 of 3 images, a.png with a_m.png",
        f"  2 images without a mask in {masks} (such as b_m.png): {images / 'b.jpg'}, {images / 'c.png'}",
        f"  1 mask without an image in {images}: {masks / 'd_m.png'}",
        FIX,
    ]


def test_five_unpaired_files_are_named_and_the_others_counted(tmp_path):
    touch(tmp_path / "images", *numbered(9))
    touch(tmp_path / "masks", "000.png")
    message = error_message(find_pairs, tmp_path / "images", tmp_path / "masks")
    assert "8 images without a mask" in message
    assert message.endswith(f"{tmp_path / 'images/005.png'} and 3 more\n{FIX}")


def test_names_that_no_rule_pairs_are_refused_with_the_keys_to_set(tmp_path):
    images, masks = tmp_path / "images", tmp_path / "masks"
    touch(images, "a.png", "b.png")
    touch(masks, "c_mask.png", "d_mask.png")
    assert error_message(find_pairs, images, masks).splitlines() == [
        "images and masks do not pair up:",
        "  no rule pairs any of them (same names, a common prefix or suffix, zeros before numbers)",
        f"  2 images without a mask in {masks} (such as a.png): {images / 'a.png'}, {images / 'b.png'}",
        f"  2 masks without an image in {images}: {masks / 'c_mask.png'}, {masks / 'd_mask.png'}",
        FIX,
    ]


def test_masks_without_the_suffix_are_ignored(tmp_path):
    """A second annotator's masks in the same folder."""
    touch(tmp_path / "images", "a.png", "b.png")
    touch(tmp_path / "masks", "a_one.png", "b_one.png", "a_two.png", "b_two.png")
    pairs = find_pairs(tmp_path / "images", tmp_path / "masks", "_two")
    assert [pair.mask.name for pair in pairs] == ["a_two.png", "b_two.png"]


def test_an_image_whose_mask_lacks_the_suffix_is_named(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png")
    touch(tmp_path / "masks", "a_mask.png", "b.png")
    assert "1 image without a mask" in error_message(find_pairs, tmp_path / "images", tmp_path / "masks", "_mask")


def test_a_suffix_that_no_mask_has_is_refused_with_examples(tmp_path):
    touch(tmp_path / "images", "a.png")
    touch(tmp_path / "masks", "a_gt.png")
    assert error_message(find_pairs, tmp_path / "images", tmp_path / "masks", "_mask") == (
        f"mask_suffix: no name in {tmp_path / 'masks'} ends in '_mask'; such as a_gt.png; set:\n  mask_suffix: _gt"
    )


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        ("images", "\n  set split_file to a CSV with the columns image and mask, which says what belongs together"),
        ("masks", "; set one of these:\n  mask_suffix: .bmp\n  mask_suffix: .png"),
    ],
)
def test_two_files_of_one_name_are_refused_and_none_is_to_be_deleted(tmp_path, folder, advice):
    touch(tmp_path / "images", "a.png")
    touch(tmp_path / "masks", "a.png")
    touch(tmp_path / folder, "a.bmp")
    first, second = tmp_path / folder / "a.bmp", tmp_path / folder / "a.png"
    message = error_message(find_pairs, tmp_path / "images", tmp_path / "masks")
    assert message == f"images and masks do not pair up:\n  {first} and {second} have the same name{advice}"


def test_an_extension_as_mask_suffix_chooses_among_masks_of_one_name(tmp_path):
    touch(tmp_path / "images", "a.jpg")
    touch(tmp_path / "masks", "a.png", "a.bmp")
    (pair,) = find_pairs(tmp_path / "images", tmp_path / "masks", ".bmp")
    assert pair.mask.name == "a.bmp"


def test_missing_folders_are_refused_with_the_folders_found(tmp_path):
    touch(tmp_path / "before", "a.png")
    touch(tmp_path / "after", "a.png")
    touch(tmp_path, "readme.txt")
    assert error_message(split_of, tmp_path) == (
        f"data_dir: no folder of images (images, imgs, ...) and no folder of masks (masks, labels, ...) in {tmp_path}; "
        f"{tmp_path} holds after/, before/; set:\n  image_dir: after\n  mask_dir: before"
    )
    assert error_message(find_pairs, tmp_path / "x", tmp_path / "y") == (
        f"no folder {tmp_path / 'x'} and no folder {tmp_path / 'y'}; set image_dir and mask_dir to the folders' names"
    )


def test_a_missing_mask_folder_is_named(tmp_path):
    touch(tmp_path / "images", "a.png")
    assert error_message(split_of, tmp_path) == (
        f"data_dir: no folder of masks (masks, labels, ...) in {tmp_path}; {tmp_path} holds images/; "
        "set mask_dir to the folder to use, or split_file to a CSV"
    )


def test_a_folder_without_images_is_refused_with_the_known_extensions(tmp_path):
    extensions = ", ".join(sorted(IMAGE_EXTENSIONS))
    assert ".jpg, " in extensions
    touch(tmp_path / "images", "a.heic", "b.dcm", "README")
    touch(tmp_path / "masks")
    first, *others = error_message(split_of, tmp_path).splitlines()
    assert first == f"no images in {tmp_path / 'images'}; need files with one of {extensions}; it holds .dcm, .heic files"
    assert [line.split(";")[0] for line in others] == [
        "  1 file such as images/a.heic: a photo in Apple's HEIC format",
        "  1 file such as images/b.dcm: a DICOM file",
    ]
    touch(tmp_path / "images", "a.png")
    first, *others = error_message(split_of, tmp_path).splitlines()
    assert first == f"no masks in {tmp_path / 'masks'}; need files with one of {extensions}"
    assert len(others) == 2


def test_a_data_dir_that_is_missing_or_not_a_folder_is_refused(tmp_path):
    missing = tmp_path / "nothing"
    assert error_message(split_of, missing) == f"data_dir: {missing} does not exist; need a folder with images/ and masks/"
    touch(tmp_path, "file")
    file = tmp_path / "file"
    assert error_message(split_of, file) == f"data_dir: {file} is not a folder; need a folder with images/ and masks/"


def test_folders_of_other_names_are_set_in_the_config(tmp_path):
    touch(tmp_path / "img", *numbered(4))
    touch(tmp_path / "gt", *numbered(4))
    split = split_of(tmp_path, image_dir="img", mask_dir="gt")
    assert len(split.train) + len(split.val) == 4


# Names that differ

REAL_FOLDERS = {  # image and mask of the same number
    "suffix": ("{:02d}.jpg", "{:02d}_mask.png"),
    "DRIVE": ("{:02d}_training.tif", "{:02d}_manual1.png"),
    "cell tracking": ("t{:03d}.tif", "man_seg{:03d}.tif"),
    "words": ("{:03d}_image.png", "{:03d}_annotation.png"),
    "CHASE": ("Image_{:02d}L.jpg", "Image_{:02d}L_1stHO.png"),
    "prefixes": ("img_{}.png", "mask_{}.png"),
    "prefix of the masks": ("{}.png", "gt-{}.png"),
    "padding": ("img_{}.png", "mask_{:03d}.png"),
    "padding alone": ("{}.png", "{:04d}.png"),
    "padding in the middle": ("p{}_left.png", "p{:03d}_left_label.png"),
    "a year before": ("2020_{}.png", "2020_{}_manual1.png"),
    "a suffix of the images": ("{}_sat.jpg", "{}_mask.png"),
}


@pytest.mark.parametrize("numbers", [range(1, 13), [7, 8], [10, 20, 30], [100, 110], [3]], ids=str)
@pytest.mark.parametrize("kind", REAL_FOLDERS)
def test_names_with_common_prefixes_and_suffixes_pair_up(tmp_path, kind, numbers):
    image, mask = REAL_FOLDERS[kind]
    touch(tmp_path / "images", *(image.format(number) for number in numbers))
    touch(tmp_path / "masks", *(mask.format(number) for number in numbers))
    expected = {image.format(number): mask.format(number) for number in numbers}
    if len(numbers) == 1 and kind == "cell tracking":  # a single name shows no common prefix
        assert error_message(find_pairs, tmp_path / "images", tmp_path / "masks").endswith(FIX)
    else:
        pairs = find_pairs(tmp_path / "images", tmp_path / "masks")
        assert {pair.image.name: pair.mask.name for pair in pairs} == expected


def test_the_rule_shows_a_pair_as_an_example(tmp_path):
    touch(tmp_path / "images", "t000.tif", "t001.tif", "t002.tif")
    touch(tmp_path / "masks", "man_seg000.tif", "man_seg001.tif", "man_seg002.tif")
    assert split_of(tmp_path).rule == "images/ + masks/, paired like t000 ↔ man_seg000; val_fraction 0.2, seed 42"


def test_the_rule_with_a_mask_suffix_shows_a_pair_as_an_example(tmp_path):
    touch(tmp_path / "images", "a.jpg", "b.jpg")
    touch(tmp_path / "masks", "a_x.png", "b_x.png")
    assert split_of(tmp_path, mask_suffix="_x").rule == "images/ + masks/, paired like a ↔ a_x; val_fraction 0.2, seed 42"


def test_another_rule_for_val_is_named(tmp_path):
    touch(tmp_path / "train/images", "a.png", "b.png")
    touch(tmp_path / "train/masks", "a.png", "b.png")
    touch(tmp_path / "val/images", "c.png")
    touch(tmp_path / "val/masks", "c_mask.png")
    rule = split_of(tmp_path).rule
    assert rule == "train/images/ + train/masks/, same names, val paired like c ↔ c_mask; folders train and val"


def test_equal_names_come_before_other_rules(tmp_path):
    """1 and 01 are the same number, but two names."""
    touch(tmp_path / "images", "1.png", "01.png", "a1.png")
    touch(tmp_path / "masks", "1.png", "01.png", "a1.png")
    assert stems(find_pairs(tmp_path / "images", tmp_path / "masks")) == [("01", "01"), ("1", "1"), ("a1", "a1")]


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        (["t000", "t001"], ["man_seg001", "man_seg002"]),  # shifted by one
        (["1", "2"], ["1_mask", "3_mask"]),
        (["001"], ["002"]),
        (["img_3"], ["mask_5"]),
        (["dog_img"], ["cat_mask"]),
        (["s1_a", "s1_b"], ["s2_a", "s2_b"]),  # two series
        (["a_1", "b_1"], ["a_2", "b_2"]),  # two frames
        (["2020_a", "2020_b"], ["2021_a", "2021_b"]),
        (["a", "b"], ["a_2", "b_2"]),  # a number is no suffix
        (["10", "20"], ["1", "2"]),
        (["x10", "x20"], ["x100", "x200"]),
        (["1", "01"], ["1_mask", "001_mask"]),  # two images of one number
        (["1", "2"], ["1_mask", "2_label"]),  # nothing that all masks share
    ],
)
def test_different_numbers_or_names_are_never_paired(tmp_path, images, masks):
    touch(tmp_path / "images", *(f"{stem}.png" for stem in images))
    touch(tmp_path / "masks", *(f"{stem}.png" for stem in masks))
    message = error_message(find_pairs, tmp_path / "images", tmp_path / "masks")
    assert message.startswith("images and masks do not pair up:\n")
    assert message.endswith(FIX)


def test_the_error_shows_what_the_best_rule_pairs(tmp_path):
    images, masks = tmp_path / "images", tmp_path / "masks"
    touch(images, "21_training.tif", "22_training.tif", "23_training.tif")
    touch(masks, "21_manual1.png", "22_manual1.png")
    assert error_message(find_pairs, images, masks).splitlines() == [
        "images and masks do not pair up:",
        "  the best rule pairs 2 of 3 images, 21_training.tif with 21_manual1.png",
        f"  1 image without a mask in {masks} (such as 23_manual1.png): {images / '23_training.tif'}",
        f"{FIX}; or, to train on the 2 pairs and leave out 1 image without a mask; set:",
        "  unpaired: skip",
    ]


def test_files_of_different_subfolders_are_not_paired(tmp_path):
    images, masks = tmp_path / "images", tmp_path / "masks"
    touch(images, "p1/a.jpg", "p2/b.jpg")
    touch(masks, "p1/b.png", "p2/a.png", "p3/c.png")
    message = error_message(find_pairs, images, masks)
    assert "no rule pairs any of them" in message
    touch(tmp_path / "other", "p3/a.png", "p4/b.png")
    message = error_message(find_pairs, images, tmp_path / "other")
    assert "  a pair must be in one subfolder, but these images are in p1/, p2/ and these masks in p3/, p4/\n" in message


def test_masks_in_the_only_subfolder_pair_up_with_images_that_are_in_none(tmp_path):
    touch(tmp_path / "images", "a.jpg", "b.jpg")
    touch(tmp_path / "annotations", "trimaps/a.png", "trimaps/b.png", "xmls/a.xml", "list.txt")
    found = found_in(tmp_path)
    assert stems(found.pairs) == [("a", "a"), ("b", "b")]
    assert (found.rule, found.notices) == ("images/ + annotations/, same names", ())
    assert stems(found_in(tmp_path, mask_dir="annotations/trimaps").pairs) == [("a", "a"), ("b", "b")]


def test_affixes_are_common_to_all_subfolders_and_pairs_are_in_one(tmp_path):
    touch(tmp_path / "images", "p1/001_img.png", "p1/002_img.png", "p2/001_img.png")
    touch(tmp_path / "masks", "p1/001_seg.png", "p1/002_seg.png", "p2/001_seg.png")
    pairs = find_pairs(tmp_path / "images", tmp_path / "masks")
    assert names(pairs) == ["p1/001_img", "p1/002_img", "p2/001_img"]
    assert [pair.mask.parent.name for pair in pairs] == ["p1", "p1", "p2"]


WORDS = ["", "", "_mask", "img_", "_training", "_manual1", "man_seg", "t", "-GT", " (copy)"]
AFFIXES = ["", "", "_mask", "img", "_1", "1", "0", "t", "_L", "cam2", "x", "_manual1", "00", "a", "-0", "2020_", "ab", "_00"]


def random_stems(chooser):
    letters = chooser.choice(["01", "012", "ab0", "ab", "a0_", "0123456789"])
    if chooser.random() < 0.4:
        start, step = chooser.randrange(30), chooser.choice([1, 1, 10, 9])
        return [f"{start + step * index:0{chooser.choice([1, 3])}d}" for index in range(chooser.randint(1, 14))]
    return list({"".join(chooser.choices(letters, k=chooser.randint(1, 5))) for _ in range(chooser.randint(1, 12))})


def without_zeros(stem):
    return f"{int(stem)}" if stem.isdigit() else stem


@pytest.mark.parametrize("seed", range(10))
def test_names_with_random_affixes_are_paired_correctly_or_refused(tmp_path, seed):
    chooser = random.Random(seed)
    num_paired = 0
    for case in range(80):
        cores = random_stems(chooser)
        start, end, mask_start, mask_end = chooser.choices(chooser.choice([WORDS, AFFIXES]), k=4)
        changes_padding = chooser.random() < 0.3 and len({without_zeros(core) for core in cores}) == len(cores)
        truth = {
            f"{start}{core}{end}": f"{mask_start}{without_zeros(core) if changes_padding else core}{mask_end}" for core in cores
        }
        masks = list(truth.values())
        is_cut = chooser.random() < 0.2
        if is_cut:
            masks.pop()
        folder = tmp_path / str(case)
        touch(folder / "images", *(f"{stem}.jpg" for stem in truth))
        touch(folder / "masks", *(f"{stem}.png" for stem in masks))
        try:
            found = dict(stems(find_pairs(folder / "images", folder / "masks")))
        except DataError:
            continue
        assert found == truth, (cores, start, end, mask_start, mask_end)
        assert not is_cut
        num_paired += 1
    assert num_paired > 15  # refusing everything would pass too


@pytest.mark.parametrize("seed", range(5))
def test_what_is_paired_beside_skipped_files_is_paired_correctly(tmp_path, seed):
    """Masks of some of the images only, with random affixes that do not run into the numbers."""
    chooser = random.Random(seed)
    num_paired = 0
    for case in range(60):
        cores = random_stems(chooser)
        affixes = [affix for affix in chooser.choice([WORDS, AFFIXES]) if not re.search(r"^\d|\d$", affix)]
        start, end, mask_start, mask_end = chooser.choices(affixes, k=4)
        truth = {f"{start}{core}{end}": f"{mask_start}{core}{mask_end}" for core in cores}
        kept = chooser.sample(sorted(truth), chooser.randint(1, len(truth)))
        folder = tmp_path / str(case)
        touch(folder / "images", *(f"{stem}.jpg" for stem in truth))
        touch(folder / "masks", *(f"{truth[stem]}.png" for stem in kept))
        try:
            found = dict(stems(found_in(folder, unpaired="skip").pairs))
        except DataError:
            continue
        assert found.items() <= truth.items(), (cores, start, end, mask_start, mask_end, kept)
        num_paired += len(found)
    assert num_paired > 30


# Image and mask side by side


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("{}.jpg", "{}_mask.png"),
        ("{}.png", "{}_label.png"),
        ("{}.png", "{}_seg.png"),
        ("{}.png", "{}-GT.png"),
        ("{}_image.png", "{}_annotation.png"),
        ("{}_sat.jpg", "{}_mask.png"),
        ("{}.png", "mask_{}.png"),
        ("img_{}.png", "gt_{}.png"),
        ("seg_{}.png", "seg_{}_mask.png"),  # seg_ is on every name
        ("p{0}/scan_{0}.tif", "p{0}/scan_{0}_mask.tif"),
        ("case{}/image.png", "case{}/mask.png"),
        ("Image_{}L.jpg", "Image_{}L_1stHO.png"),
    ],
)
def test_images_and_masks_in_one_folder_are_told_apart(tmp_path, image, mask):
    numbers = ["01", "02", "03"]
    touch(tmp_path, *(name.format(number) for number in numbers for name in (image, mask)), "notes.txt")
    split = split_of(tmp_path)
    pairs = sorted((*split.train, *split.val), key=lambda pair: pair.name)
    assert [(pair.image, pair.mask) for pair in pairs] == [
        (tmp_path / image.format(number), tmp_path / mask.format(number)) for number in numbers
    ]
    assert split.rule.startswith(f"image and mask side by side, paired like {pairs[0].image.stem} ↔ {pairs[0].mask.stem}; val")


def test_side_by_side_in_train_and_val_folders(tmp_path):
    touch(tmp_path / "train", "a.jpg", "a_mask.png", "b.jpg", "b_mask.png")
    touch(tmp_path / "valid", "c.jpg", "c_mask.png")
    touch(tmp_path / "test", "d.jpg")
    split = split_of(tmp_path)
    assert (names(split.train), names(split.val)) == (["a", "b"], ["c"])
    assert split.rule == "image and mask side by side in train/, paired like a ↔ a_mask; folders train and valid"


@pytest.mark.parametrize("settings", [{"image_dir": "photos"}, {"image_dir": "photos", "mask_dir": "photos"}, {}])
def test_side_by_side_in_a_folder_for_images(tmp_path, settings):
    touch(tmp_path / "photos", "a.jpg", "a_mask.png", "b.jpg", "b_mask.png")
    rule = "image and mask side by side in photos/, paired like a ↔ a_mask; val_fraction 0.2, seed 42"
    assert split_of(tmp_path, **settings).rule == rule


def test_masks_of_two_annotators_in_one_folder_need_a_suffix(tmp_path):
    for number in ("01L", "01R"):
        touch(tmp_path, *(f"Image_{number}{end}" for end in (".jpg", "_1stHO.png", "_2ndHO.png")))
    assert error_message(split_of, tmp_path) == (
        f"cannot tell images from masks in {tmp_path}: several kinds of names could be masks: _1stho (2 files), _2ndho (2 files); "
        "set one of these:\n  mask_suffix: _1stHO\n  mask_suffix: _2ndHO"
    )
    split = split_of(tmp_path, mask_suffix="_1stHO")
    assert sorted(stems((*split.train, *split.val))) == [("Image_01L", "Image_01L_1stHO"), ("Image_01R", "Image_01R_1stHO")]


def test_two_marks_that_both_pair_all_files_are_refused(tmp_path):
    touch(tmp_path, "gt_1.png", "gt_2.png", "1_mask.png", "2_mask.png")
    assert "could be masks: _mask (2 files), gt_ (2 files); set:\n  mask_suffix: _mask" in error_message(split_of, tmp_path)


def test_side_by_side_without_a_mark_is_refused(tmp_path):
    touch(tmp_path, "a.png", "b.png")
    assert error_message(split_of, tmp_path) == (
        f"cannot tell images from masks in {tmp_path}: no file is named like a mask (X_mask, X_label, gt_X, ...), "
        "such as a.png, b.png; set mask_suffix, image_dir and mask_dir to two folders, or split_file to a CSV with the columns image "
        "and mask"
    )


def test_side_by_side_with_an_unknown_suffix_needs_mask_suffix(tmp_path):
    touch(tmp_path, "a.png", "a_lesion.png", "b.png", "b_lesion.png")
    assert error_message(split_of, tmp_path).endswith("; set:\n  mask_suffix: _lesion")
    split = split_of(tmp_path, mask_suffix="_lesion")
    assert sorted(stems((*split.train, *split.val))) == [("a", "a_lesion"), ("b", "b_lesion")]
    assert error_message(split_of, tmp_path, mask_suffix="_x") == (
        f"mask_suffix: no name in {tmp_path} ends in '_x'; such as a.png, a_lesion.png, b.png, b_lesion.png; set:\n"
        "  mask_suffix: _lesion"
    )


@pytest.mark.parametrize("files", [["a.jpg", "a.png", "b.JPEG", "b.PNG"], ["x/a.jpg", "x/a.bmp", "y/a.jpg", "y/a.bmp"]])
def test_a_jpeg_and_another_file_of_its_name_are_image_and_mask(tmp_path, files):
    touch(tmp_path, *files)
    found = found_in(tmp_path)
    assert [(pair.image, pair.mask) for pair in found.pairs] == [(tmp_path / files[i], tmp_path / files[i + 1]) for i in (0, 2)]
    assert found.rule == f"image and mask side by side, paired like {found.pairs[0].image.name} ↔ {found.pairs[0].mask.name}"


def test_side_by_side_by_extension_in_train_and_val(tmp_path):
    touch(tmp_path / "train", "a.jpg", "a.png", "b.jpg", "b.png")
    touch(tmp_path / "val", "c.jpg", "c.png")
    split = split_of(tmp_path)
    assert (names(split.train), names(split.val)) == (["a", "b"], ["c"])


def test_files_of_one_name_that_could_both_be_the_image_are_asked_for(tmp_path):
    touch(tmp_path, "a.tif", "a.png", "b.tif", "b.png")
    assert error_message(split_of, tmp_path).splitlines() == [
        f"cannot tell images from masks in {tmp_path}:",
        f"  {tmp_path / 'a.png'} and {tmp_path / 'a.tif'} have the same name",
        f"  {tmp_path / 'b.png'} and {tmp_path / 'b.tif'} have the same name; set one of these:",
        "  mask_suffix: .png",
        "  mask_suffix: .tif",
    ]
    assert found_in(tmp_path, mask_suffix=".tif").pairs[0] == Pair("a", tmp_path / "a.png", tmp_path / "a.tif")


@pytest.mark.parametrize("more", ["b.png", "b.gif"])
def test_extensions_that_do_not_separate_images_from_masks_are_refused(tmp_path, more):
    touch(tmp_path, "a.jpg", "a.png", "b.tif", more)
    message = error_message(split_of, tmp_path)
    assert message.startswith(f"cannot tell images from masks in {tmp_path}:\n  {tmp_path / 'a.jpg'} and {tmp_path / 'a.png'}")
    assert "mask_suffix: .png" in message


def test_three_files_of_one_name_need_a_split_file(tmp_path):
    touch(tmp_path, "a.jpg", "a.png", "a.tif")
    assert error_message(split_of, tmp_path).endswith(
        "\n  set split_file to a CSV with the columns image and mask, which says what belongs together"
    )


def test_an_image_without_a_mask_side_by_side_by_extension_may_be_skipped(tmp_path):
    touch(tmp_path, "a.jpg", "a.png", "b.jpg", "b.png", "c.jpg")
    assert error_message(split_of, tmp_path).endswith("\n  unpaired: skip")
    assert names(found_in(tmp_path, unpaired="skip").pairs) == ["a", "b"]


def test_side_by_side_with_an_unpaired_image_is_refused(tmp_path):
    touch(tmp_path, "a.jpg", "a_mask.png", "b.jpg", "b_mask.png", "c.jpg")
    message = error_message(split_of, tmp_path)
    assert "the best rule pairs 2 of 3 images, a.jpg with a_mask.png\n" in message
    assert f"1 image without a mask in {tmp_path} (such as c_mask.png): {tmp_path / 'c.jpg'}\n" in message


# nnU-Net


def test_the_only_channel_of_a_case_pairs_with_its_label(tmp_path):
    touch(tmp_path / "imagesTr", "cell_001_0000.png", "cell_002_0000.png", "liver_0000.png")
    touch(tmp_path / "labelsTr", "cell_001.png", "cell_002.png", "liver.png")
    touch(tmp_path / "imagesTs", "cell_003_0000.png")
    touch(tmp_path, "dataset.json")
    split = split_of(tmp_path)
    expected = [("cell_001_0000", "cell_001"), ("cell_002_0000", "cell_002"), ("liver_0000", "liver")]
    assert sorted(stems((*split.train, *split.val))) == expected
    assert split.rule == "imagesTr/ + labelsTr/, paired like cell_001_0000 ↔ cell_001; val_fraction 0.2, seed 42"


def test_several_channel_files_of_a_case_are_refused(tmp_path):
    touch(tmp_path / "imagesTr", "a_0000.png", "a_0001.png", "b_0000.png", "b_0001.png")
    touch(tmp_path / "labelsTr", "a.png", "b.png")
    assert error_message(split_of, tmp_path) == (
        f"image_dir: {tmp_path / 'imagesTr'} has 2 channel files for a (a_0000.png, a_0001.png); an image must be one file: "
        "merge its channels, or set image_dir to a folder with one channel"
    )


def test_different_channels_of_different_cases_are_refused(tmp_path):
    touch(tmp_path / "imagesTr", "a_0000.png", "b_0001.png")
    touch(tmp_path / "labelsTr", "a.png", "b.png")
    assert error_message(split_of, tmp_path).endswith(FIX)


def test_numbered_frames_are_not_channels(tmp_path):
    touch(tmp_path / "imagesTr", "a_0000.png", "a_0001.png", "a_0002.png")
    touch(tmp_path / "labelsTr", "a_0000.png", "a_0001.png")
    assert "the best rule pairs 2 of 3 images" in error_message(split_of, tmp_path)
    touch(tmp_path / "labelsTr", "a_0002.png")
    assert split_of(tmp_path).rule.startswith("imagesTr/ + labelsTr/, same names")


# train and val folders


def test_train_and_val_folders_above_images_and_masks_are_the_split(tmp_path):
    for part, files in (("train", ["a.png", "b.png"]), ("val", ["c.png"])):
        touch(tmp_path / part / "images", *files)
        touch(tmp_path / part / "masks", *files)
    split = split_of(tmp_path)
    rule = "train/images/ + train/masks/, same names; folders train and val"
    assert (names(split.train), names(split.val), split.rule) == (["a", "b"], ["c"], rule)


def test_train_and_val_folders_below_images_and_masks_are_the_split(tmp_path):
    for part, files in (("train", ["a.png", "b.png"]), ("val", ["c.png"]), ("test", ["d.png"])):
        touch(tmp_path / "images" / part, *files)
        touch(tmp_path / "masks" / part, *files)
    split = split_of(tmp_path)
    rule = "images/train/ + masks/train/, same names; folders train and val"
    assert (names(split.train), names(split.val), split.rule) == (["a", "b"], ["c"], rule)


def test_a_train_folder_alone_is_split_by_fraction(tmp_path):
    touch(tmp_path / "train/images", *numbered(10))
    touch(tmp_path / "train/masks", *numbered(10))
    split = split_of(tmp_path, val_fraction=0.3)
    assert (len(split.train), len(split.val), split.rule) == (
        7,
        3,
        "train/images/ + train/masks/, same names; val_fraction 0.3, seed 42",
    )


def test_a_val_folder_without_its_masks_is_refused(tmp_path):
    touch(tmp_path / "train/images", "a.png")
    touch(tmp_path / "train/masks", "a.png")
    touch(tmp_path / "val/images", "b.png")
    assert error_message(split_of, tmp_path).startswith(f"no folder {tmp_path / 'val/masks'}; {tmp_path / 'val'} holds images/")


def test_absolute_folders_are_split_like_others(tmp_path):
    touch(tmp_path / "here/img", *numbered(10))
    touch(tmp_path / "there/gt", *numbered(10))
    settings = {"image_dir": str(tmp_path / "here/img"), "mask_dir": str(tmp_path / "there/gt")}
    split = split_of(tmp_path, **settings)
    assert (len(split.train), len(split.val), split.rule) == (
        8,
        2,
        "here/img/ + there/gt/, same names; val_fraction 0.2, seed 42",
    )
    assert not set(split.train) & set(split.val)


def test_absolute_folders_may_hold_train_and_val(tmp_path):
    for part, files in (("train", ["a.png", "b.png"]), ("val", ["c.png"])):
        touch(tmp_path / "here" / part, *files)
        touch(tmp_path / "there" / part, *files)
    split = split_of(tmp_path, image_dir=str(tmp_path / "here"), mask_dir=str(tmp_path / "there"))
    assert (names(split.train), names(split.val)) == (["a", "b"], ["c"])


# Unpaired files


def test_unpaired_files_are_listed_beside_the_pairs(tmp_path):
    images, masks = tmp_path / "images", tmp_path / "masks"
    touch(images, "a.png", "b.png", "c.png", "d.png")
    touch(masks, "a.png", "b.png", "e.png")
    found = found_in(tmp_path)
    assert names(found.pairs) == ["a", "b"]
    assert found.blocking_message.startswith("images and masks do not pair up:\n")
    fix = "add the partner, or set mask_suffix, image_dir and mask_dir so that they pair up; unpaired: skip leaves them out"
    assert [(problem.kind, problem.title, problem.lines, problem.fix) for problem in found.problems] == [
        ("no_mask", f"2 images without a mask in {masks}", (str(images / "c.png"), str(images / "d.png")), fix),
        ("no_image", f"1 mask without an image in {images}", (str(masks / "e.png"),), fix),
    ]


def test_unpaired_files_of_train_and_of_val_are_in_one_message(tmp_path):
    touch(tmp_path / "train/images", "a.png", "b.png")
    touch(tmp_path / "train/masks", "a.png")
    touch(tmp_path / "val/images", "c.png")
    touch(tmp_path / "val/masks", "c.png", "d.png")
    found = found_in(tmp_path)
    assert [(pair.name, pair.part) for pair in found.pairs] == [("a", "train"), ("c", "val")]
    assert [(problem.kind, problem.lines) for problem in found.problems] == [
        ("no_mask", (str(tmp_path / "train/images/b.png"),)),
        ("no_image", (str(tmp_path / "val/masks/d.png"),)),
    ]
    assert found.blocking_message.count("images and masks do not pair up:") == 2


def test_complete_pairs_have_no_problems_and_may_be_divided(tmp_path):
    touch(tmp_path / "one/images", "a.png")
    touch(tmp_path / "one/masks", "a.png")
    found = found_in(tmp_path / "one")
    assert (found.blocking_message, found.problems, found.is_divided) == ("", (), False)
    for part in ("train", "val"):
        touch(tmp_path / "two" / part / "images", "a.png")
        touch(tmp_path / "two" / part / "masks", "a.png")
    assert found_in(tmp_path / "two").is_divided


# unpaired: skip


def test_148_masks_for_500_images_are_trained_on_with_the_setting_that_the_error_proposes(tmp_path):
    touch(tmp_path / "images", *numbered(500))
    touch(tmp_path / "masks", *numbered(148))
    found = found_in(tmp_path)
    assert found.blocking_message.splitlines()[-2:] == [
        f"{FIX}; or, to train on the 148 pairs and leave out 352 images without a mask; set:",
        "  unpaired: skip",
    ]
    assert found.suggested == {"unpaired": "skip"}
    skipped = found_in(tmp_path, **found.suggested)
    assert (len(skipped.pairs), skipped.blocking_message, skipped.problems, skipped.suggested) == (148, "", (), {})
    assert skipped.notices == (f"352 images without a mask left out (unpaired: skip), e.g. {tmp_path / 'images/148.png'}",)


def test_masks_without_an_image_are_skipped_too(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png", "c.png")
    touch(tmp_path / "masks", "a.png", "b.png", "d.png", "e.png")
    (notice,) = found_in(tmp_path, unpaired="skip").notices
    assert notice.startswith("1 image without a mask and 2 masks without an image left out (unpaired: skip), e.g. ")


def test_without_any_pair_there_is_nothing_to_skip(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png")
    touch(tmp_path / "masks", "c.png", "d.png")
    message = found_in(tmp_path, unpaired="skip").blocking_message
    assert "no rule pairs any of them" in message
    assert "unpaired" not in message


def test_unpaired_files_of_val_are_skipped_as_well(tmp_path):
    touch(tmp_path / "train/images", "a.png", "b.png")
    touch(tmp_path / "train/masks", "a.png", "b.png")
    touch(tmp_path / "val/images", "c.png", "d.png")
    touch(tmp_path / "val/masks", "c.png")
    found = found_in(tmp_path, unpaired="skip")
    assert [(pair.name, pair.part) for pair in found.pairs] == [("a", "train"), ("b", "train"), ("c", "val")]
    assert found.blocking_message == ""


# PASCAL VOC


def voc(root, **lists):
    touch(root / "JPEGImages", *(f"{number}.jpg" for number in range(9)))
    touch(root / "SegmentationClass", *(f"{number}.png" for number in range(6)))
    touch(root / "SegmentationObject", *(f"{number}.png" for number in range(6)))
    touch(root / "Annotations", *(f"{number}.xml" for number in range(9)))
    touch(root / "ImageSets/Segmentation")
    for name, ids in lists.items():
        (root / f"ImageSets/Segmentation/{name}.txt").write_text("".join(f"{number}\n" for number in ids))


@pytest.mark.parametrize("place", ["", "VOCdevkit/VOC2012"])
def test_the_lists_of_voc_are_the_split(tmp_path, place):
    voc(tmp_path / place, train=[0, 1, 2], val=[3, 4], trainval=[0, 1, 2, 3, 4])
    found = found_in(tmp_path)
    assert [(pair.name, pair.part) for pair in found.pairs] == [
        ("0", "train"),
        ("1", "train"),
        ("2", "train"),
        ("3", "val"),
        ("4", "val"),
    ]
    assert found.rule.endswith(
        "JPEGImages/ + " + (place and f"{place}/") + "SegmentationClass/, same names; ImageSets/Segmentation/train.txt and val.txt"
    )
    assert (found.blocking_message, found.notices) == ("", ("4 images in no list of ImageSets/Segmentation left out",))


def test_listed_test_images_are_kept_and_those_without_masks_are_no_problem(tmp_path):
    voc(tmp_path, train=[0, 1], val=[2], test=[3, 8])
    found = found_in(tmp_path)
    assert (names(found.pairs), names(found.test), found.blocking_message) == (["0", "1", "2"], ["3"], "")


def test_a_list_without_val_is_divided_by_fraction(tmp_path):
    voc(tmp_path, trainval=[0, 1, 2, 3, 4])
    found = found_in(tmp_path)
    assert ({pair.part for pair in found.pairs}, found.is_divided) == ({None}, False)
    assert len(split_of(tmp_path).val) == 1


def test_listed_images_without_a_mask_are_unpaired(tmp_path):
    voc(tmp_path, train=[0, 1, 7], val=[3])
    found = found_in(tmp_path)
    assert f"1 image without a mask in {tmp_path / 'SegmentationClass'}" in found.blocking_message
    assert found_in(tmp_path, unpaired="skip").blocking_message == ""


def test_listed_names_without_an_image_are_named(tmp_path):
    voc(tmp_path, train=[0, 1, 77], val=[3])
    assert found_in(tmp_path).blocking_message == (
        "1 name in ImageSets/Segmentation without an image, e.g. 77; set:\n  unpaired: skip"
    )
    assert found_in(tmp_path, unpaired="skip").blocking_message == ""


def test_two_years_of_voc_have_lists_of_their_own(tmp_path):
    voc(tmp_path / "VOC2007", train=[0, 1], val=[2])
    voc(tmp_path / "VOC2012", train=[0], val=[1])
    found = found_in(tmp_path)
    assert [(pair.name, pair.part) for pair in found.pairs] == [
        ("VOC2007/0", "train"), ("VOC2007/1", "train"), ("VOC2007/2", "val"), ("VOC2012/0", "train"), ("VOC2012/1", "val"),
    ]  # fmt: skip


# Cityscapes


def cityscapes(root):
    for part, names_there in (("train", {"aachen": 2, "bochum": 1}), ("val", {"lindau": 1}), ("test", {"bonn": 1})):
        for city, count in names_there.items():
            for number in range(count):
                stem = f"{city}_00000{number}_000019"
                touch(root / "leftImg8bit" / part / city, f"{stem}_leftImg8bit.png")
                ends = ("color.png", "instanceIds.png", "labelIds.png", "polygons.json", "labelTrainIds.png")
                touch(root / "gtFine" / part / city, *(f"{stem}_gtFine_{end}" for end in ends))


def test_of_the_masks_of_cityscapes_the_right_one_is_offered_by_name(tmp_path):
    cityscapes(tmp_path)
    assert error_message(found_in, tmp_path) == (
        f"mask_suffix: {tmp_path / 'gtFine/train'} holds 4 kinds of masks for the same images: _gtFine_labelTrainIds (3), "
        "_gtFine_labelIds (3), _gtFine_color (3), _gtFine_instanceIds (3); set one of these:\n"
        "  mask_suffix: _gtFine_labelTrainIds\n  mask_suffix: _gtFine_labelIds\n  mask_suffix: _gtFine_color\n"
        "  mask_suffix: _gtFine_instanceIds"
    )


@pytest.mark.parametrize("kind", ["labelTrainIds", "labelIds"])
def test_cityscapes_pairs_up_with_the_proposed_setting_and_val_by_the_rule_of_train(tmp_path, kind):
    """A single validation image tells no rule of its own."""
    cityscapes(tmp_path)
    found = found_in(tmp_path, mask_suffix=f"_gtFine_{kind}")
    assert [(pair.name, pair.part, pair.mask.name) for pair in found.pairs] == [
        ("aachen/aachen_000000_000019_leftImg8bit", "train", f"aachen_000000_000019_gtFine_{kind}.png"),
        ("aachen/aachen_000001_000019_leftImg8bit", "train", f"aachen_000001_000019_gtFine_{kind}.png"),
        ("bochum/bochum_000000_000019_leftImg8bit", "train", f"bochum_000000_000019_gtFine_{kind}.png"),
        ("lindau/lindau_000000_000019_leftImg8bit", "val", f"lindau_000000_000019_gtFine_{kind}.png"),
    ]
    assert (found.blocking_message, names(found.test)) == ("", ["bonn/bonn_000000_000019_leftImg8bit"])


# Sequences


def test_images_of_several_sequences_pair_up_inside_each(tmp_path):
    for name in ("seq1", "seq2"):
        touch(tmp_path / name / "images", "001.png", "002.png")
        touch(tmp_path / name / "masks", "001_m.png", "002_m.png")
    found = found_in(tmp_path)
    assert names(found.pairs) == ["seq1/001", "seq1/002", "seq2/001", "seq2/002"]
    assert all(pair.image.parts[-3] == pair.mask.parts[-3] for pair in found.pairs)
    assert found.rule == "*/images/ + */masks/ in 2 folders, paired like 001 ↔ 001_m"


def test_unpaired_images_of_sequences_are_named_with_all_their_folders(tmp_path):
    for name in ("seq1", "seq2"):
        touch(tmp_path / name / "images", "001.png", "002.png", "003.png")
        touch(tmp_path / name / "masks", "001.png", "002.png")
    message = found_in(tmp_path).blocking_message
    assert (
        f"2 images without a mask in {tmp_path / '*' / 'masks'} (such as 003.png): {tmp_path / 'seq1/images/003.png'}, " in message
    )


def test_a_folder_of_one_image_and_one_mask_is_a_pair_whatever_their_names(tmp_path):
    for case, image, mask in (("p1", "scan", "outline"), ("p2", "photo", "final")):
        touch(tmp_path / case / "images", f"{image}.png")
        touch(tmp_path / case / "masks", f"{mask}.png")
    assert [(pair.name, pair.mask.name) for pair in found_in(tmp_path).pairs] == [
        ("p1/scan", "outline.png"),
        ("p2/photo", "final.png"),
    ]


# Test data


@pytest.mark.parametrize(
    ("test", "kept", "notices"),
    [
        ({"test/images": ["x.png", "y.png"], "test/masks": ["x.png", "y.png"]}, ["x", "y"], ()),
        ({"test/images": ["x.png"]}, [], ("1 test image without masks in test/images/",)),
        ({"test": ["x.png", "y.png"]}, [], ("2 test images without masks in test/",)),
        (
            {"test/images": ["x.png", "y.png"], "test/masks": ["x.png"]},
            ["x"],
            ("1 image without a mask in test/images/, left out",),
        ),
    ],
    ids=str,
)
def test_a_test_folder_is_said_and_kept_for_evaluate(tmp_path, test, kept, notices):
    for part, files in {"train": ["a.png", "b.png"], "val": ["c.png"]}.items():
        touch(tmp_path / part / "images", *files)
        touch(tmp_path / part / "masks", *files)
    for folder, files in test.items():
        touch(tmp_path / folder, *files)
    found = found_in(tmp_path)
    assert (names(found.pairs), names(found.test), found.notices) == (["a", "b", "c"], kept, notices)
    assert {pair.part for pair in found.test} <= {"test"}
    assert names(split_of(tmp_path).test) == kept


def test_masks_of_test_that_cannot_be_used_are_said_and_stop_no_training(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png")
    touch(tmp_path / "masks", "a.png", "b.png")
    touch(tmp_path / "test/images", "x.png", "x.jpg")
    touch(tmp_path / "test/masks", "x.png")
    found = found_in(tmp_path)
    assert (names(found.pairs), found.test, found.blocking_message) == (["a", "b"], (), "")
    assert found.notices[0].startswith("test/images/ cannot be used by evaluate: images and masks do not pair up")


# Names


def test_composed_and_decomposed_names_pair_up(tmp_path):
    """NFC and NFD: the masks came from an archive made on macOS."""
    touch(tmp_path / "images", "K\u00e4fer.jpg", "Z\u00fcge.jpg")
    touch(tmp_path / "masks", "Ka\u0308fer.png", "Zu\u0308ge.png")
    found = found_in(tmp_path)
    assert (names(found.pairs), found.rule) == (["K\u00e4fer", "Z\u00fcge"], "images/ + masks/, same names")
    assert [pair.group for pair in found_in(tmp_path, group_pattern="(\u00e4|\u00fc)").pairs] == ["\u00e4", "\u00fc"]


def test_names_that_are_not_utf_8_pair_up(tmp_path):
    touch(tmp_path / "images", os.fsdecode(b"K\xe4fer.jpg"), "b.jpg")
    touch(tmp_path / "masks", os.fsdecode(b"K\xe4fer.png"), "b.png")
    assert names(found_in(tmp_path).pairs) == ["K\udce4fer", "b"]


def test_finding_and_splitting_change_no_file(tmp_path):
    for folder in ("images", "masks"):
        touch(tmp_path / folder, *numbered(4))
        for path in (tmp_path / folder).iterdir():
            path.write_bytes(path.name.encode())

    def state():
        return {
            path: (path.stat().st_mtime_ns, path.is_file() and hashlib.sha256(path.read_bytes()).digest())
            for path in tmp_path.rglob("*")
        }

    before = state()
    split_of(tmp_path)
    assert state() == before
