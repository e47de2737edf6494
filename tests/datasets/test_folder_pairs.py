"""Which files of common folders are pairs, which stay unpaired, and which part they belong to."""

import random

import numpy as np
import pytest
import tifffile

from helpers import layouts
from helpers.samples import find_pairs
from unet_trainer.config.load import load_config
from unet_trainer.datasets.dataset_report import find_dataset
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.splits import build_split
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS


def touch(folder, *names):
    """Pairing opens no file, so empty files are enough."""
    for path in (folder, *(folder / name for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if path == folder else path.touch()


def names(pairs):
    return [pair.name for pair in pairs]


def stems(pairs):
    return [(pair.image.stem, pair.mask.stem) for pair in pairs]


FIX = (
    "  Fix: add the masks; or set mask_suffix to what follows the image's name in the mask's name, image_dir and mask_dir to other folders, "
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
    return build_split(load_config(settings), found, nothing, nothing)


def error_message(call, *arguments, **options):
    with pytest.raises(DataError) as raised:
        call(*arguments, **options)
    return str(raised.value)


def test_images_without_masks_and_masks_without_images_are_named_together(tmp_path):
    images, masks = tmp_path / "images", tmp_path / "masks"
    touch(images, "a.png", "b.jpg", "c.png")
    touch(masks, "a_m.png", "d_m.png")
    assert error_message(find_pairs, images, masks, "_m").splitlines() == [
        f"2 images without a mask in {masks} (the best rule pairs 1 of 3, a.png with a_m.png):",
        FIX,
        *(f"  {images / name}" for name in ("b.jpg", "c.png")),
        f"1 mask without an image in {images}:",
        "  Fix: add their images",
        f"  {masks / 'd_m.png'}",
    ]


@pytest.mark.parametrize(("folder", "advice"), [
    ("images", "; set split_file to a CSV with the columns image and mask, which says what belongs together"),
    ("masks", "; set one of these:\n  mask_suffix: .bmp\n  mask_suffix: .png"),
])  # fmt: skip
def test_two_files_of_one_name_are_refused_and_none_is_to_be_deleted(tmp_path, folder, advice):
    touch(tmp_path / "images", "a.png")
    touch(tmp_path / "masks", "a.png")
    touch(tmp_path / folder, "a.bmp")
    first, second = tmp_path / folder / "a.bmp", tmp_path / folder / "a.png"
    message = error_message(find_pairs, tmp_path / "images", tmp_path / "masks")
    assert message == f"images and masks do not pair up: {first}, {second} have the same name{advice}"


def test_a_folder_without_images_is_refused_with_the_known_extensions(tmp_path):
    touch(tmp_path / "images", "a.heic", "b.dcm", "README")
    touch(tmp_path / "masks")
    first, *others = error_message(split_of, tmp_path).splitlines()
    there = f"{tmp_path} holds images/ (no image file), masks/ (no image file); need files with one of "
    assert f"{there}{', '.join(sorted(IMAGE_EXTENSIONS))}; set" in first
    assert [line.split(";")[0] for line in others] == [
        "  1 file such as images/a.heic: a photo in Apple's HEIC format",
        "  1 file such as images/b.dcm: a DICOM file",
    ]
    touch(tmp_path / "images", "a.png")
    first, *others = error_message(split_of, tmp_path).splitlines()
    assert "no folder of masks" in first
    assert len(others) == 2


def test_files_that_are_not_read_are_named_where_their_masks_are_skipped_too(tmp_path):
    touch(tmp_path / "images", "a.png", "b.png", "c.jfif")
    touch(tmp_path / "masks", "a.png", "b.png", "c.png")
    for unpaired in ("error", "skip"):
        notices = found_in(tmp_path, unpaired=unpaired).notices
        assert "1 file such as images/c.jfif: a JPEG under another name; rename it to .jpg" in notices


REAL_FOLDERS = {  # image and mask of the same number
    "suffix": ("{:02d}.jpg", "{:02d}_mask.png"),
    "DRIVE": ("{:02d}_training.tif", "{:02d}_manual1.png"),
    "cell tracking": ("t{:03d}.tif", "man_seg{:03d}.tif"),
    "words": ("{:03d}_image.png", "{:03d}_annotation.png"),
    "CHASE": ("Image_{:02d}L.jpg", "Image_{:02d}L_1stHO.png"),
    "prefixes": ("img_{}.png", "mask_{}.png"),
    "prefix of the masks": ("{}.png", "gt-{}.png"),
    "a year before": ("2020_{}.png", "2020_{}_manual1.png"),
    "a suffix of the images": ("{}_sat.jpg", "{}_mask.png"),
}


@pytest.mark.parametrize("numbers", [range(1, 13), [3]], ids=str)
@pytest.mark.parametrize("kind", REAL_FOLDERS)
def test_names_with_common_prefixes_and_suffixes_pair_up(tmp_path, kind, numbers):
    image, mask = REAL_FOLDERS[kind]
    touch(tmp_path / "images", *(image.format(number) for number in numbers))
    touch(tmp_path / "masks", *(mask.format(number) for number in numbers))
    expected = {image.format(number): mask.format(number) for number in numbers}
    if len(numbers) == 1 and kind == "cell tracking":  # a single name shows no common prefix
        assert FIX in error_message(find_pairs, tmp_path / "images", tmp_path / "masks")
    else:
        pairs = find_pairs(tmp_path / "images", tmp_path / "masks")
        assert {pair.image.name: pair.mask.name for pair in pairs} == expected


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        (["t000", "t001"], ["man_seg001", "man_seg002"]),  # shifted by one
        (["1", "2"], ["1_mask", "3_mask"]), (["001"], ["002"]), (["10", "20"], ["1", "2"]),
        (["s1_a", "s1_b"], ["s2_a", "s2_b"]), (["a_1", "b_1"], ["a_2", "b_2"]),  # two series, two frames
        (["a", "b"], ["a_2", "b_2"]),  # a number is no suffix
        (["1", "01"], ["1_mask", "001_mask"]), (["img_1", "img_2"], ["mask_001", "mask_002"]),  # zeros before the number
        (["1", "2"], ["1_mask", "2_label"]),  # nothing that all masks share
    ],
)  # fmt: skip
def test_different_numbers_or_names_are_never_paired(tmp_path, images, masks):
    touch(tmp_path / "images", *(f"{stem}.png" for stem in images))
    touch(tmp_path / "masks", *(f"{stem}.png" for stem in masks))
    assert FIX in error_message(find_pairs, tmp_path / "images", tmp_path / "masks")


WORDS = ["", "", "_mask", "img_", "_training", "_manual1", "man_seg", "t", "-GT", " (copy)"]
AFFIXES = ["", "", "_mask", "img", "_1", "1", "0", "t", "_L", "cam2", "x", "_manual1", "00", "a", "-0", "2020_", "ab", "_00"]  # fmt: skip


def random_stems(chooser):
    letters = chooser.choice(["01", "012", "ab0", "ab", "a0_", "0123456789"])
    if chooser.random() < 0.4:
        start, step = chooser.randrange(30), chooser.choice([1, 1, 10, 9])
        return [f"{start + step * index:0{chooser.choice([1, 3])}d}" for index in range(chooser.randint(1, 14))]
    return list({"".join(chooser.choices(letters, k=chooser.randint(1, 5))) for _ in range(chooser.randint(1, 12))})


@pytest.mark.parametrize("seed", range(2))
def test_names_with_random_affixes_are_paired_correctly_or_refused(tmp_path, seed):
    chooser = random.Random(seed)
    num_paired = 0
    for case in range(80):
        cores = random_stems(chooser)
        start, end, mask_start, mask_end = chooser.choices(chooser.choice([WORDS, AFFIXES]), k=4)
        truth = {f"{start}{core}{end}": f"{mask_start}{core}{mask_end}" for core in cores}
        is_cut = chooser.random() < 0.2
        touch(tmp_path / f"{case}/images", *(f"{stem}.jpg" for stem in truth))
        touch(tmp_path / f"{case}/masks", *(f"{stem}.png" for stem in [*truth.values()][is_cut:]))
        try:
            found = dict(stems(find_pairs(tmp_path / f"{case}/images", tmp_path / f"{case}/masks")))
        except DataError:
            continue
        assert found == truth, (cores, start, end, mask_start, mask_end)
        assert not is_cut
        num_paired += 1
    assert num_paired > 15  # refusing everything would pass too


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("{}.jpg", "{}_mask.png"), ("{}.png", "{}-GT.png"), ("{}_sat.jpg", "{}_mask.png"), ("img_{}.png", "gt_{}.png"),
        ("seg_{}.png", "seg_{}_mask.png"), ("p{0}/scan_{0}.tif", "p{0}/scan_{0}_mask.tif"),
        ("case{}/image.png", "case{}/mask.png"), ("Image_{}L.jpg", "Image_{}L_1stHO.png"),
    ],
)  # fmt: skip
def test_images_and_masks_in_one_folder_are_told_apart(tmp_path, image, mask):
    numbers = ["01", "02", "03"]
    touch(tmp_path, *(name.format(number) for number in numbers for name in (image, mask)), "notes.txt")
    found = found_in(tmp_path)
    assert [(pair.image, pair.mask) for pair in found.pairs] == [
        (tmp_path / image.format(number), tmp_path / mask.format(number)) for number in numbers
    ]
    first = found.pairs[0]
    assert found.rule == f"image and mask side by side, paired like {first.image.stem} ↔ {first.mask.stem}"
    assert found.blocking_message == ""


def test_files_of_one_name_that_could_both_be_the_image_are_asked_for(tmp_path):
    touch(tmp_path, "a.tif", "a.png", "b.tif", "b.png")
    assert error_message(split_of, tmp_path) == (
        f"cannot tell images from masks in {tmp_path}: several kinds of names could be masks: .png (2 files), .tif (2 files); "
        "set one of these:\n  mask_suffix: .png\n  mask_suffix: .tif"
    )
    assert found_in(tmp_path, mask_suffix=".tif").pairs[0] == Pair("a", tmp_path / "a.png", tmp_path / "a.tif")


def test_the_only_channel_of_a_case_pairs_with_its_label(tmp_path):
    touch(tmp_path / "imagesTr", "cell_001_0000.png", "cell_002_0000.png", "liver_0000.png")
    touch(tmp_path / "labelsTr", "cell_001.png", "cell_002.png", "liver.png")
    touch(tmp_path / "imagesTs", "cell_003_0000.png")
    touch(tmp_path, "dataset.json")
    found = found_in(tmp_path)
    assert stems(found.pairs) == [("cell_001_0000", "cell_001"), ("cell_002_0000", "cell_002"), ("liver_0000", "liver")]
    assert found.rule == "imagesTr/ + labelsTr/, paired like cell_001_0000 ↔ cell_001"


def test_a_case_without_one_of_the_channels_of_others_is_refused(tmp_path):
    touch(tmp_path / "imagesTr", "a_0000.png", "a_0001.png", "b_0001.png")
    touch(tmp_path / "labelsTr", "a.png", "b.png")
    assert error_message(split_of, tmp_path) == (
        f"image_dir: {tmp_path / 'imagesTr'} has 2 channel files for others, and for b b_0001.png; need b_0000, b_0001"
    )


@pytest.mark.parametrize("first", [0, 1])
def test_as_many_masks_that_are_numbered_from_another_number_are_not_left_out_but_to_be_renamed(first, tmp_path):
    touch(tmp_path / "images", *(f"img_{index + first:03d}.jpg" for index in range(30)))
    touch(tmp_path / "masks", *(f"mask_{index + 1 - first:03d}.png" for index in range(30)))
    message = error_message(split_of, tmp_path)
    assert "if images and masks are numbered from different numbers, rename the masks" in message
    assert "unpaired: skip" not in message


@pytest.mark.parametrize("place", ["", "VOCdevkit/VOC2012"])
def test_the_lists_of_voc_are_the_split(tmp_path, place):
    layouts.voc(tmp_path / place)
    touch(tmp_path / place / "SegmentationObject", "2007_000000.png")
    touch(tmp_path / place / "Annotations", "2007_000000.xml")
    found = found_in(tmp_path)
    expected = [(f"2007_{number:06d}", "train" if number < 4 else "val") for number in range(layouts.COUNT)]
    assert [(pair.name, pair.part) for pair in found.pairs] == expected
    folders = f"JPEGImages/ + {place and f'{place}/'}SegmentationClass/"
    assert found.rule.endswith(f"{folders}, same names; ImageSets/Segmentation/train.txt and val.txt")
    assert (found.blocking_message, found.notices) == ("", ("3 images in no list of ImageSets/Segmentation left out",))


def test_the_lists_of_cvat_are_the_split_and_a_line_is_a_name_with_its_spaces(tmp_path):
    names = ("frame 1", "frame 2", "set a/frame 3", "4")
    for folder, suffix in (("JPEGImages", "jpg"), ("SegmentationClass", "png")):
        touch(tmp_path / folder, *(f"{name}.{suffix}" for name in names))
    touch(tmp_path / "ImageSets/Segmentation", "Train.txt", "Validation.txt", "Test.txt")
    for name, lines in (("Train", "frame 1\n4 -1\n"), ("Validation", "frame 2\n"), ("Test", "set a/frame 3\n")):
        (tmp_path / f"ImageSets/Segmentation/{name}.txt").write_text(lines)
    found = found_in(tmp_path)
    parts = {pair.name: pair.part for pair in (*found.pairs, *found.test)}
    assert (parts, found.blocking_message) == (
        {"frame 1": "train", "frame 2": "val", "set a/frame 3": "test", "4": "train"},
        "",
    )


def test_pages_belong_to_the_part_of_their_file(tmp_path):
    layouts.voc(tmp_path)
    for number in (0, 4):
        for folder, suffix in (("JPEGImages", "jpg"), ("SegmentationClass", "png")):
            (tmp_path / folder / f"2007_{number:06d}.{suffix}").unlink()
            pages = np.arange(7 * 20 * 30, dtype=np.uint8).reshape(7, 20, 30) % 3
            tifffile.imwrite(tmp_path / folder / f"2007_{number:06d}.tif", pages, photometric="minisblack")
    parts = {pair.name: pair.part for pair in found_in(tmp_path).pairs}
    assert [name for name, part in parts.items() if part == "train"][:8] == [
        *(f"2007_000000/{page}" for page in range(7)),
        "2007_000001",
    ]
    assert parts["2007_000004/6"] == "val"


def test_lists_that_are_not_read_are_named(tmp_path):
    for kind in ("images", "masks"):
        touch(tmp_path / kind, "0.png", "1.png")
    touch(tmp_path, "train.txt", "val.txt")
    (notice,) = found_in(tmp_path).notices
    assert notice.startswith(
        f"{tmp_path / 'train.txt'} and val.txt are not read; to divide the images as they do, set "
    )
    for name in ("train.txt", "val.txt"):
        (tmp_path / name).write_text("epoch 1\n")  # a log
    assert found_in(tmp_path).notices == ()
    touch(tmp_path / "splits", "test_files.txt")
    (tmp_path / "splits/test_files.txt").write_text("images\\1.png masks\\1.png\n")
    (notice,) = found_in(tmp_path).notices
    assert notice.startswith(f"{tmp_path / 'splits/test_files.txt'} is not read; to divide the images")


def test_listed_names_without_an_image_block_unless_they_are_to_be_skipped(tmp_path):
    layouts.voc(tmp_path)
    (tmp_path / "JPEGImages/2007_000001.jpg").unlink()
    found = found_in(tmp_path)
    (problem,) = found.problems
    assert (problem.lines, problem.settings) == (("2007_000001",), {"unpaired": "skip"})
    assert "1 name in ImageSets/Segmentation without an image" in found.blocking_message
    skipped = found_in(tmp_path, **problem.settings)
    assert (len(skipped.pairs), skipped.blocking_message) == (layouts.COUNT - 1, "")
    assert "1 listed name without an image left out (unpaired: skip)" in skipped.notices


@pytest.mark.parametrize(("test", "kept", "notices"), [
    ({"test/images": ["x.png", "y.png"], "test/masks": ["x.png", "y.png"]}, ["x", "y"], ()),
    ({"test/images": ["x.png"]}, [], ("1 test image without masks in test/images/",)),
    ({"test": ["x.png", "y.png"]}, [], ("2 test images without masks in test/",)),
    ({"test/images": ["x.png", "y.png"], "test/masks": ["x.png"]}, ["x"], ("1 image without a mask in test/images/, left out",)),
], ids=str)  # fmt: skip
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


def test_composed_and_decomposed_names_pair_up(tmp_path):
    """NFC and NFD: the masks came from an archive made on macOS."""
    touch(tmp_path / "images", "K\u00e4fer.jpg", "Z\u00fcge.jpg")
    touch(tmp_path / "masks", "Ka\u0308fer.png", "Zu\u0308ge.png")
    found = found_in(tmp_path)
    assert (names(found.pairs), found.rule) == (["K\u00e4fer", "Z\u00fcge"], "images/ + masks/, same names")
    assert [pair.group for pair in found_in(tmp_path, group_pattern="(\u00e4|\u00fc)").pairs] == ["\u00e4", "\u00fc"]
