"""What the rules remove from names, and what they never remove. Whole folders are in test_pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from unet_trainer.datasets.name_matching import File, Rule, best_match, is_channel_folder, match_names

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
