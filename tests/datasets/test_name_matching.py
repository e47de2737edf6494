"""What the rules remove from names, and what they never remove. Whole folders are in test_pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from unet_trainer.datasets.name_matching import (
    File,
    Rule,
    best_match,
    extensions_of_shared_names,
    has_ending,
    is_channel_folder,
    mask_kinds,
    mask_marks,
    match_names,
    name_files,
    without_ending,
)

IMAGES = Path("images")


def files(*names):
    """`sub/a` is the file a of the folder sub/."""
    found = []
    for name in names:
        folder, slash, stem = name.rpartition("/")
        found.append(File(Path(f"{name}.png"), folder + slash, stem))
    return found


def matched(images, masks, folder=IMAGES):
    """The pairs of the best rule, or None if it leaves files unpaired; and the rule."""
    match = best_match(files(*images), files(*masks), folder)
    pairs = {image.folder + image.stem: mask.folder + mask.stem for image, mask in match.pairs}
    return (pairs if match.is_complete else None), match.rule


@pytest.mark.parametrize(
    ("images", "masks", "rule"),
    [
        (["a", "b"], ["a", "b"], Rule()),
        (["a", "b"], ["a_mask", "b_mask"], Rule(("", ""), ("", "_mask"))),
        (["21_training", "22_training"], ["21_manual1", "22_manual1"], Rule(("", "_training"), ("", "_manual1"))),
        (["t000", "t001"], ["man_seg000", "man_seg001"], Rule(("t", ""), ("man_seg", ""))),
        (["001_image", "002_image"], ["001_annotation", "002_annotation"], Rule(("", "_image"), ("", "_annotation"))),
        (["1", "2"], ["001", "002"], Rule(ignores_padding=True)),
        (["img_7", "img_8"], ["mask_007", "mask_008"], Rule(("img_", ""), ("mask_", ""), True)),
        (["cat_img"], ["cat_mask"], Rule(("", "_img"), ("", "_mask"))),  # a single name: only known words
    ],
)
def test_the_simplest_rule_that_pairs_all_is_used(images, masks, rule):
    assert matched(images, masks) == (dict(zip(images, masks, strict=True)), rule)


def test_a_common_prefix_ends_where_a_number_begins():
    """All names begin with t00, but the numbers are 000 and 001."""
    assert matched(["t000", "t001"], ["s000", "s001"])[1] == Rule(("t", ""), ("s", ""))
    assert matched(["0a", "10a"], ["0b", "10b"])[1] == Rule(("", "a"), ("", "b"))


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        (["s1_a", "s1_b"], ["s2_a", "s2_b"]),
        (["a_1", "b_1"], ["a_2", "b_2"]),
        (["a", "b"], ["a_2", "b_2"]),
        (["t1", "t2"], ["u2", "u3"]),
        (["x"], ["y"]),
    ],
)
def test_numbers_that_differ_are_never_removed(images, masks):
    assert matched(images, masks)[0] is None


def test_without_a_complete_rule_the_one_that_pairs_most_is_used():
    match = best_match(files("1_img", "2_img", "3_img"), files("1_m", "2_m"), IMAGES)
    assert [(image.stem, mask.stem) for image, mask in match.pairs] == [("1_img", "1_m"), ("2_img", "2_m")]
    assert ([image.stem for image in match.images], match.masks, match.is_complete) == (["3_img"], [], False)


def test_a_name_that_occurs_twice_is_not_paired():
    match = match_names(files("a", "a"), files("a"), Rule())
    assert (match.pairs, len(match.images), len(match.masks)) == ([], 2, 1)


def test_files_of_a_pair_are_in_the_same_subfolder():
    assert matched(["p/a", "q/a"], ["p/a", "q/a"])[0] == {"p/a": "p/a", "q/a": "q/a"}
    assert matched(["p/a", "p/b"], ["q/a", "q/b"])[0] is None


def test_the_core_of_a_name_has_no_affixes_padding_and_channel():
    rule = Rule(("img_", "_x"), ("m", ""), ignores_padding=True, drops_channel=True)
    assert rule.image_core("img_007_x_0000") == "7"
    assert rule.mask_core("m000") == "0"
    assert rule.mask_core("other12") == "other12"


@pytest.mark.parametrize(("folder", "is_one"), [("imagesTr", True), ("IMAGESTR", True), ("images", False), ("imagesTs", False)])
def test_channel_numbers_are_removed_only_in_the_folder_of_nnunet(folder, is_one):
    assert is_channel_folder(Path("data") / folder) is is_one
    names = ["a_0000", "b_0000", "cc_0000"]
    rule = matched(names, ["a", "b", "cc"], Path("data") / folder)[1]
    assert rule == (Rule(drops_channel=True) if is_one else Rule())


def test_files_of_two_channels_are_not_paired():
    assert matched(["a_0000", "b_0001"], ["a", "b"], Path("imagesTr"))[0] is None


def test_what_images_and_masks_share_after_the_name_is_not_removed():
    """In most cities of Cityscapes every frame has the number 000019."""
    pairs, rule = matched(["a_01_000019_left8bit", "b_02_000019_left8bit"], ["a_01_000019_gt", "b_02_000019_gt"])
    assert pairs == {"a_01_000019_left8bit": "a_01_000019_gt", "b_02_000019_left8bit": "b_02_000019_gt"}
    assert rule == Rule(("", "_left8bit"), ("", "_gt"))


def test_masks_of_some_of_the_images_pair_up_though_they_share_more():
    match = best_match(files("s1_01", "s1_02", "s2_01", "s2_02"), files("s1_01_mask", "s1_02_mask"), IMAGES)
    assert [(image.stem, mask.stem) for image, mask in match.pairs] == [("s1_01", "s1_01_mask"), ("s1_02", "s1_02_mask")]


# Marks, endings, extensions


@pytest.mark.parametrize(
    ("stem", "marks"),
    [
        ("a_mask", ["_mask"]), ("a-GT", ["-gt"]), ("a.label", [".label"]), ("mask_a", ["mask_"]), ("mask", ["mask"]),
        ("gt_a_mask", ["gt_", "_mask"]), ("a_ground_truth", ["_ground_truth"]), ("a_1stHO", ["_1stho"]), ("21_manual1", ["_manual1"]),
        ("unmasked", []), ("damask", []), ("segment_1", []), ("a_mask_2", []), ("label", ["label"]), ("a", []),
        ("a_gtFine_labelTrainIds", ["_labeltrainids"]), ("labels", ["labels"]),
    ],
)  # fmt: skip
def test_marks_of_masks_are_whole_words_at_either_end(stem, marks):
    assert mask_marks(stem) == marks


def test_names_are_compared_in_one_form_of_unicode(tmp_path):
    """An archive made on macOS holds ä as a and its dots."""
    composed, decomposed = "k\u00e4fer/\u00fc.png", "ka\u0308fer/u\u0308.png"
    (image,), (mask,) = name_files([tmp_path / composed], tmp_path), name_files([tmp_path / decomposed], tmp_path)
    assert image.path != mask.path
    assert best_match([image], [mask], IMAGES).pairs == [(image, mask)]
    assert (image.folder, image.stem) == ("k\u00e4fer/", "\u00fc")


def test_a_prefix_comes_before_the_folder(tmp_path):
    paths = [tmp_path / "a.png", tmp_path / "sub/b.png"]
    assert [file.folder for file in name_files(paths, tmp_path, "seq1/")] == ["seq1/", "seq1/sub/"]


@pytest.mark.parametrize(
    ("name", "suffix", "expected"),
    [
        ("a_mask.png", "_mask", "a"),
        ("a.png", ".png", "a"),
        ("a.PNG", ".png", "a"),
        ("a.jpg", ".png", None),
        ("a.v1.png", ".v1", "a"),
    ],
)
def test_mask_suffix_is_an_ending_of_the_name_or_an_extension(name, suffix, expected):
    file = File(Path(name), "", Path(name).stem)
    assert has_ending(file, suffix) == (expected is not None)
    if expected is not None:
        assert without_ending([file], suffix)[0].stem == expected


def test_extensions_of_names_that_several_files_share():
    paths = [Path(name) for name in ("a.jpg", "a.png", "b.JPEG", "b.png", "c.png", "d.tif", "d.tiff")]
    assert extensions_of_shared_names([File(path, "", path.stem) for path in paths]) == [{".jpg", ".png"}, {".jpg", ".png"}]


# The rule of train, and several kinds of masks


def test_the_preferred_rule_comes_first():
    """Of the only validation image, dog_01, the names alone do not tell that cat is an affix."""
    rule = best_match(files("cat_01", "cat_02"), files("01_cat", "02_cat"), IMAGES).rule
    assert rule == Rule(("cat_", ""), ("", "_cat"))
    alone = best_match(files("cat_03"), files("03_cat"), IMAGES)
    assert not alone.is_complete
    assert best_match(files("cat_03"), files("03_cat"), IMAGES, rule).is_complete


def test_a_preferred_rule_that_does_not_fit_is_not_used():
    match = best_match(files("a", "b"), files("a", "b"), IMAGES, Rule(("", ""), ("", "_mask"), True))
    assert match.is_complete
    match = best_match(files("x_1", "x_2"), files("x_1_gt", "x_2_gt"), IMAGES, Rule(("", ""), ("", "_mask")))
    assert match.is_complete


def test_several_kinds_of_masks_are_named_the_ones_to_train_on_first():
    images = files("aachen/x_1_leftImg8bit", "aachen/x_2_leftImg8bit")
    ends = ("color", "instanceIds", "labelIds", "labelTrainIds")
    masks = files(*(f"aachen/x_{number}_gtFine_{end}" for number in (1, 2) for end in ends))
    assert mask_kinds(images, masks) == {
        "_gtFine_labelTrainIds": 2, "_gtFine_labelIds": 2, "_gtFine_color": 2, "_gtFine_instanceIds": 2,
    }  # fmt: skip


def test_one_kind_of_masks_is_not_several():
    assert mask_kinds(files("a", "b"), files("a_x", "b_x")) == {}
    assert mask_kinds(files("a", "b", "c"), files("a_x", "b_x", "c_x", "a_y")) == {}
    assert mask_kinds(files("a", "b"), files("a", "b", "a_y", "b_y")) == {"": 2, "_y": 2}
