"""What the values of masks are decided to mean, with which reason, and what is left to the user."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from helpers.mask_facts import facts_of, objects, soft_discs, stripes, with_border
from unet_trainer.config.load import load_config
from unet_trainer.datasets.class_files import ClassFile, NamedClass
from unet_trainer.datasets.coding_choice import choose_classes, present_classes
from unet_trainer.datasets.mask_evidence import MaskEvidence
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import COLOUR, decode_mask
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, given_coding

RED, GREEN, BLUE = COLOUR + 0xFF0000, COLOUR + 0x00FF00, COLOUR + 0x0000FF


def evidence_of(seen, ignore_value=None, num_masks=4, **others):
    """Masks that all hold these values, 100 pixels of each."""
    counts = dict.fromkeys(seen, 100)
    masks = [MaskFacts(10, 10 * len(counts), counts, "", **others) for _ in range(num_masks)]
    return MaskEvidence(masks, given_coding("nonzero", ignore_value).ignored)


def decide(seen, num_classes="auto", ignore_value=None, class_file=None, **settings):
    config = load_config({"num_classes": num_classes, "ignore_value": ignore_value, **settings})
    return choose_classes(config, evidence_of(seen, config.ignore_value), class_file)


def decide_masks(make, number=8, class_file=None, is_lossy=False, **settings):
    config = load_config(settings)
    evidence = MaskEvidence(
        [facts_of(make(index), is_lossy=is_lossy) for index in range(number)],
        given_coding("nonzero", config.ignore_value).ignored,
    )
    return choose_classes(config, evidence, class_file)


# The number of classes is given


@pytest.mark.parametrize(
    ("num_classes", "ignore_value", "seen", "expected"),
    [
        (1, None, [0, 1], (0, 1)),
        (1, None, [0, 255], (0, 255)),
        (2, None, [0, 1], (0, 1)),
        (2, None, [0, 255], (0, 255)),
        (3, None, [0, 1, 2], (0, 1, 2)),
        (3, None, [0, 2], (0, 1, 2)),  # a class may be absent
        (254, None, [0, 253], tuple(range(254))),
        (1, 255, [0, 1, 255], (0, 1)),
        (3, 255, [0, 1, 2, 255], (0, 1, 2)),
        (11, 11, list(range(12)), tuple(range(11))),
        (9, [9, 10], list(range(11)), tuple(range(9))),
        (1, 128, [0, 128, 255], (0, 255)),
        (1, None, [0, 128], (0, 128)),
        (1, None, [0, 4000], (0, 4000)),
        (2, None, [38, 75], (38, 75)),
        (3, None, [0, 128, 255], (0, 128, 255)),  # as many greys as classes
        (3, None, [1, 2, 3], (1, 2, 3)),
        (1, None, [0, RED], (0, (255, 0, 0))),  # one colour on black
        (2, None, [0, RED], (0, (255, 0, 0))),
    ],
)
def test_values_become_the_classes_that_there_are(num_classes, ignore_value, seen, expected):
    chosen = decide(seen, num_classes, ignore_value)
    assert chosen.coding.mask_values == expected
    assert chosen.num_classes == num_classes
    assert set(chosen.coding.ignored) == set(
        given_coding("nonzero", load_config({"ignore_value": ignore_value}).ignore_value).ignored
    )


@pytest.mark.parametrize(
    ("num_classes", "seen"),
    [
        (1, [38, 75]),  # either may be the background
        (1, [1, 2]),
        (1, [1, 2, 3]),
        (1, [0, 100, 200]),
        (1, list(range(30))),
        (1, [0, 700, 1400]),  # three classes, or two objects
        (3, [0, 255]),  # with 255 as void there would be nothing to learn
        (3, list(range(12))),
        (3, [0, RED, GREEN]),  # colours have no order
        (2, [RED, GREEN]),
        (2, [0, 1, 2]),
        (1, [*range(21), 255]),  # ids and void are no soft edges
    ],
)
def test_what_could_mean_several_things_is_left_to_the_user(num_classes, seen):
    assert decide(seen, num_classes) is None


@pytest.mark.parametrize("num_classes", [1, 11, 3])
def test_255_beside_ids_is_taken_as_void(num_classes):
    chosen = decide([*range(max(2, num_classes)), 255], num_classes)
    assert chosen.coding.mask_values == tuple(range(max(2, num_classes)))
    assert (chosen.coding.ignore_value, chosen.coding.reason) == (255, "class ids; 255 is taken as void")
    assert decide([0, 2, 255], 3).coding.ignore_value == 255


def test_255_in_other_masks_than_the_classes_may_be_another_coding():
    masks = [facts_of((objects(index, 3) > 0).astype(np.uint8) * (255 if index % 2 else 1)) for index in range(6)]
    for num_classes in (1, "auto"):
        assert choose_classes(load_config({"num_classes": num_classes}), MaskEvidence(masks)) is None


# The number of classes is open


@pytest.mark.parametrize(
    ("seen", "num_classes", "reason"),
    [
        ([0, 1], 1, "the masks hold two values, 0 and 1"),
        ([0, 255], 1, "the masks hold two values, 0 and 255"),
        ([0, 7], 1, "the masks hold two values, 0 and 7"),
        ([0, 4000], 1, "the masks hold two values, 0 and 4000"),
        ([0, RED], 1, "the masks hold two values, 0 and #ff0000"),
        ([0, 1, 2], 3, "the masks hold ids 0 to 2"),
        (list(range(11)), 11, "the masks hold ids 0 to 10"),
        (list(range(254)), 254, "the masks hold ids 0 to 253"),
        ([0, 1, 255], 1, "the masks hold two values, 0 and 1; 255 beside them is taken as void"),
        ([*range(21), 255], 21, "the masks hold ids 0 to 20; 255 beside them is taken as void"),
        ([1, 2, 3, 4], 4, "the masks hold ids 1 to 4"),
    ],
)
def test_the_masks_tell_the_number_of_classes(seen, num_classes, reason):
    chosen = decide(seen)
    assert (chosen.num_classes, chosen.num_classes_reason) == (num_classes, reason)
    assert present_classes(chosen.coding, evidence_of(seen)) - {IGNORED} == set(range(max(2, num_classes)))


@pytest.mark.parametrize(
    "seen",
    [
        [38, 75],
        [1, 2],
        [1, 255],
        [1, 2, 3],  # a trimap, or three classes
        [0, 128, 255],  # three classes, or a border
        [0, 1, 2, 4],  # 3 occurs in no mask
        [0, RED, GREEN],
        [RED, GREEN],
        list(range(0, 200, 10)),
    ],
)
def test_masks_that_do_not_tell_are_left_to_the_user(seen):
    assert decide(seen) is None


def test_classes_are_dense_without_the_values_that_are_ignored():
    chosen = decide(list(range(12)), ignore_value=11)
    assert (chosen.num_classes, chosen.coding.mask_values, chosen.coding.ignore_value) == (11, tuple(range(11)), 11)
    several = decide([*range(10), 250, RED], ignore_value=[250, [255, 0, 0]])
    assert (several.num_classes, several.coding.ignored) == (10, (250, RED))


@pytest.mark.parametrize(
    ("settings", "num_classes", "reason"),
    [
        ({"class_names": ["field", "road"]}, 2, "one for each of class_names"),
        ({"class_names": ["road"]}, 1, "one for each of class_names"),
        ({"class_weights": [1, 2]}, 2, "one for each of class_weights"),
        ({"mask_values": [0, 1]}, 1, "mask_values tells two classes apart"),
        ({"mask_values": "nonzero"}, 1, "mask_values tells two classes apart"),
        ({"mask_values": [0, 1, 2]}, 3, "one for each of mask_values"),
    ],
)
def test_other_settings_tell_the_number_of_classes(settings, num_classes, reason):
    chosen = decide([0, 1], **settings)
    assert (chosen.num_classes, chosen.num_classes_reason) == (num_classes, reason)


def test_a_thin_last_id_may_be_void_and_is_left_to_the_user():
    assert decide_masks(lambda index: with_border(stripes(3, index, width=24), 3)) is None
    assert decide_masks(lambda index: with_border(stripes(3, index, width=24), 3), num_classes=4).num_classes == 4
    assert decide_masks(lambda index: with_border(stripes(3, index, width=24), 3), ignore_value=3).num_classes == 3
    assert decide_masks(lambda index: stripes(4, index)).num_classes == 4


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_ids_of_objects_are_left_to_the_user_in_8_and_in_16_bit(dtype):
    assert decide_masks(lambda index: objects(index, 2 + 3 * index).astype(dtype)) is None
    assert decide_masks(lambda index: objects(index, 2 + 3 * index).astype(dtype), num_classes=1) is None


def test_few_small_ids_in_16_bit_are_classes_as_in_8_bit():
    chosen = decide_masks(lambda index: stripes(3, index).astype(np.uint16))
    assert (chosen.num_classes, chosen.coding.mask_values) == (3, (0, 1, 2))


def test_ids_of_objects_beyond_255_are_one_foreground():
    def track(index):
        ids = objects(index, 6)
        return np.where(ids > 0, ids + 60 * index, 0).astype(np.uint16)

    chosen = decide_masks(track)
    assert (chosen.num_classes, chosen.coding.mask_values) == (1, "nonzero")
    assert chosen.coding.reason == "16-bit object ids: any value but 0 is foreground"
    assert chosen.num_classes_reason == "the masks hold ids of objects, up to 426"


def test_soft_edges_are_two_classes_with_a_threshold():
    chosen = decide_masks(soft_discs)
    assert (chosen.num_classes, chosen.coding.mask_values) == (1, "above 127")
    assert chosen.coding.reason == "greys around 0 and 255, split at 127"


def test_photographs_are_no_masks():
    assert decide_masks(lambda index: np.random.default_rng(index).integers(0, 200, (96, 96), np.uint8)) is None


# Masks saved as JPEG

PALETTE = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [64, 0, 128]], np.uint8)


def jpeg(colours, ids, quality=90):
    """The mask that is read from a JPEG of these colours (RGB)."""
    done, data = cv2.imencode(".jpg", np.array(colours, np.uint8)[ids][:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    assert done
    return decode_mask(data.tobytes())


def large_discs(index):
    """Ids 0 to 3 in regions of 20 pixels and more."""
    ids = np.zeros((96, 96), np.uint8)
    for number in range(3):
        cv2.circle(ids, (20 + 28 * number, 30 + 30 * ((number + index) % 2)), 14, number + 1, -1)
    return ids


def test_colours_saved_as_jpeg_go_to_the_nearest_one_that_is_given():
    chosen = decide_masks(lambda index: jpeg(PALETTE, large_discs(index)), is_lossy=True, mask_values=PALETTE.tolist())
    assert (chosen.num_classes, chosen.coding.tolerance) == (4, 48)
    assert chosen.coding.reason.startswith("masks saved as JPEG: the nearest value, if it is within 48;")
    ids = chosen.coding.encode(jpeg(PALETTE, large_discs(1)))
    counts = ids != IGNORED
    assert counts.mean() > 0.97
    assert (ids == large_discs(1))[counts].mean() > 0.99


def test_one_colour_on_black_saved_as_jpeg_is_the_foreground():
    colours = [[0, 0, 0], [255, 0, 0]]
    chosen = decide_masks(lambda index: jpeg(colours, (large_discs(index) > 0).astype(int)), is_lossy=True)
    assert chosen.num_classes == 1
    assert chosen.coding.mask_values[0] == 0
    assert chosen.coding.tolerance >= 120
    ids = chosen.coding.encode(jpeg(colours, (large_discs(1) > 0).astype(int)))
    assert (ids == (large_discs(1) > 0)).mean() > 0.98


def test_as_many_greys_as_classes_saved_as_jpeg_are_found():
    greys = np.repeat(np.array([[0], [85], [170], [255]]), 3, axis=1)
    chosen = decide_masks(lambda index: jpeg(greys, large_discs(index)), is_lossy=True, num_classes=4)
    assert chosen.coding.mask_values == (0, 85, 170, 255)
    assert chosen.coding.tolerance == 42
    assert (chosen.coding.encode(jpeg(greys, large_discs(0))) == large_discs(0)).mean() > 0.95


def test_several_colours_saved_as_jpeg_have_no_order_and_are_left_to_the_user():
    assert decide_masks(lambda index: jpeg(PALETTE, large_discs(index)), is_lossy=True) is None
    assert decide_masks(lambda index: jpeg(PALETTE, large_discs(index)), is_lossy=True, num_classes=4) is None


def test_colours_too_close_to_each_other_for_jpeg_get_no_tolerance():
    """5 and 10 cannot be told apart once JPEG has changed them; values of no class are a problem then."""
    chosen = decide_masks(lambda index: jpeg(PALETTE, large_discs(index)), is_lossy=True, mask_values=[0, 5, 10, [128, 0, 0]])
    assert chosen.coding.tolerance == 0
    evidence = MaskEvidence([facts_of(jpeg(PALETTE, large_discs(0)))])
    assert UNKNOWN in present_classes(chosen.coding, evidence)


def test_a_tolerance_that_mixes_two_classes_is_refused():
    with pytest.raises(DataError) as raised:
        decide([0, 100], mask_values=[0, 100], mask_tolerance=60)
    assert str(raised.value) == "mask_tolerance: got 60; need at most 49: 0 and 100 differ by 100 only"


def test_many_pixels_close_to_no_class_are_refused_with_their_colours():
    with pytest.raises(DataError) as raised:
        decide([0, 100, RED], mask_values=[0, 100], mask_tolerance=20)
    assert str(raised.value) == (
        "mask_values: 33.3% of the pixels are within 20 (mask_tolerance) of no class, most of them near #ff0000; add these to "
        "mask_values or ignore_value, or save the masks as PNG"
    )


def test_masks_without_loss_get_no_tolerance():
    assert decide([0, 100, 103], mask_values=[0, 100]).coding.tolerance == 0


# Class files


def class_file(*classes, name="label_colors.txt"):
    """Classes as (name, value)."""
    found = [NamedClass(title, value, value is not None and name != "_classes.csv") for title, value in classes]
    return ClassFile(Path(name), tuple(found))


def test_a_class_file_gives_values_names_and_void_in_its_order():
    file = class_file(("Sky", BLUE), ("Road", RED), ("Void", 0), ("Tree", GREEN), ("Tunnel", COLOUR + 9))
    chosen = decide([0, RED, GREEN, BLUE], class_file=file)
    assert chosen.coding.mask_values == ((0, 0, 255), (255, 0, 0), (0, 255, 0))
    assert (chosen.num_classes, chosen.class_names) == (3, ("Sky", "Road", "Tree"))
    assert chosen.coding.ignored == (0,)
    assert chosen.num_classes_reason == "3 classes in label_colors.txt, 1 more occur in no mask"
    assert (chosen.coding.reason, chosen.class_names_reason) == ("by label_colors.txt", "by label_colors.txt")


def test_names_that_are_given_are_kept_beside_a_class_file():
    file = class_file(("Sky", BLUE), ("Road", RED), ("Tree", GREEN))
    chosen = decide([RED, GREEN, BLUE], class_file=file, class_names=["a", "b", "c"])
    assert (chosen.class_names, chosen.coding.mask_values[0]) == (None, (0, 0, 255))


def test_values_beside_those_of_the_class_file_are_left_to_the_user():
    file = class_file(("Sky", BLUE), ("Road", RED), ("Tree", GREEN))
    assert decide([BLUE, RED, GREEN, COLOUR + 77], class_file=file) is None
    assert decide([BLUE, RED, GREEN], num_classes=2, class_file=file) is None


def test_void_in_most_pixels_may_be_the_background_and_is_left_to_the_user():
    file = class_file(("unlabeled", 0), ("Road", RED), ("Tree", GREEN))
    masks = [MaskFacts(10, 100, {0: 900, RED: 50, GREEN: 50}, "")] * 4
    assert choose_classes(load_config({}), MaskEvidence(masks), file) is None
    rare = [MaskFacts(10, 100, {0: 400, RED: 300, GREEN: 300}, "")] * 4
    assert choose_classes(load_config({}), MaskEvidence(rare), file).coding.ignored == (0,)


def test_a_file_of_two_classes_names_the_foreground():
    for file in (
        class_file(("background", 0), ("road", 255)),
        class_file(("road", 255), ("background", 0)),
        class_file(("road", 255), ("rest", 0)),
    ):
        chosen = decide([0, 255], class_file=file)
        assert (chosen.num_classes, chosen.class_names, chosen.coding.mask_values) == (1, ("road",), (0, 255))
    both = decide([0, 255], 2, class_file=class_file(("background", 0), ("road", 255)))
    assert (both.num_classes, both.class_names) == (2, ("background", "road"))


def test_pixel_values_of_roboflow_are_ids_also_where_one_is_absent():
    file = class_file(("background", 0), ("cat", 1), ("dog", 2), ("cow", 3), name="_classes.csv")
    chosen = decide([0, 1, 3], class_file=file)
    assert (chosen.num_classes, chosen.coding.mask_values) == (4, (0, 1, 2, 3))
    assert chosen.class_names == ("background", "cat", "dog", "cow")
    assert decide([0, 1, 3, 255], class_file=file).coding.ignored == (255,)


def test_a_list_of_names_names_ids_in_its_order():
    names = class_file(("Sky", None), ("Road", None), ("Void", None), name="codes.txt")
    chosen = decide([0, 1, 2], class_file=names)
    assert (chosen.num_classes, chosen.class_names, chosen.coding.ignored) == (1, ("Road",), (2,))
    four = class_file(("a", None), ("b", None), ("c", None), ("background", None), name="codes.txt")
    assert decide([0, 1, 2, 3], class_file=four).class_names == ("a", "b", "c", "background")
    assert decide([0, 1, 2], class_file=four).class_names is None  # another number of ids


def test_a_palette_links_the_indices_of_masks_to_the_colours_of_a_class_file():
    file = class_file(("Road", RED), ("Sky", BLUE), ("Void", COLOUR + 0xE0E0C0), ("rest", 0))
    palette = {0: 0, 1: 0x0000FF, 2: 0xFF0000, 5: 0xE0E0C0}
    masks = [MaskFacts(10, 40, {0: 100, 1: 100, 2: 100, 5: 100}, "", palette=palette)] * 4
    chosen = choose_classes(load_config({}), MaskEvidence(masks), file)
    assert chosen.coding.mask_values == (2, 1, 0)
    assert (chosen.class_names, chosen.coding.ignored) == (("Road", "Sky", "rest"), (5,))


def test_colours_of_a_class_file_saved_as_jpeg_are_found():
    file = class_file(("rest", 0), ("car", COLOUR + 0x800000), ("tree", COLOUR + 0x008000), ("pole", COLOUR + 0x400080))
    chosen = decide_masks(lambda index: jpeg(PALETTE, large_discs(index)), is_lossy=True, class_file=file)
    assert (chosen.num_classes, chosen.class_names, chosen.coding.tolerance) == (4, ("rest", "car", "tree", "pole"), 48)
    assert chosen.coding.reason.startswith("by label_colors.txt; masks saved as JPEG")
