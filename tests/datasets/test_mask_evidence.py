"""What the values of many masks look like together: soft edges, ids of objects, void, noise, groups, palettes."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from helpers.mask_facts import SIDE, facts_of, objects, soft_discs, stripes, with_border
from unet_trainer.datasets.mask_evidence import MaskEvidence, swapped_palettes
from unet_trainer.datasets.scan import MaskFacts
from unet_trainer.images.image_files import COLOUR

RED, GREEN = COLOUR + 0xFF0000, COLOUR + 0x00FF00


def evidence_of(make, number=8, **others):
    return MaskEvidence([facts_of(make(index), **others) for index in range(number)])


def counts_of(*counts, ignored=()):
    """A mask for each dict value → pixels."""
    return MaskEvidence([MaskFacts(1, sum(count.values()), count, "") for count in counts], ignored)


def test_pixels_and_masks_of_each_value_are_counted_without_those_that_are_left_out():
    evidence = counts_of({0: 6, 7: 2, 255: 4}, {0: 8}, ignored=[255])
    assert (evidence.seen, evidence.counts, evidence.holders) == ([0, 7], {0: 14, 7: 2}, {0: 2, 7: 1})
    assert (evidence.share(7), evidence.share(0, 7)) == (2 / 16, 1.0)
    assert evidence.without([7]).seen == [0]
    assert evidence.without([7]).ignored == {255}


# Soft edges


def test_thin_greys_beside_both_ends_are_split_in_the_middle():
    assert evidence_of(soft_discs).edge_threshold() == 127


def test_values_of_a_mask_saved_as_jpeg_are_split_in_the_middle():
    """The values of a real file: 0 to 45 and 211 to 255."""
    counts = dict.fromkeys(range(46), 40) | {0: 9000} | dict.fromkeys(range(211, 256), 20) | {255: 3000}
    assert counts_of(counts).edge_threshold() == 127


def test_a_grey_class_between_the_ends_is_no_soft_edge():
    def with_class(index):
        mask = soft_discs(index)
        mask[88:94, 2:90] = 128  # 6 % of the pixels
        return mask

    assert evidence_of(with_class).edge_threshold() is None


def test_one_mask_with_a_grey_class_is_enough():
    """All masks together have few greys between, and the one that has them in a region of its own is seen."""
    masks = [soft_discs(index) for index in range(30)]
    masks[7][88:94, 2:40] = 128
    assert MaskEvidence([facts_of(mask) for mask in masks]).edge_threshold() is None


def test_ids_that_were_made_visible_are_no_soft_edge():
    """Few objects have the brightest value: ids × 30, on a background of more than 90 %."""
    evidence = evidence_of(lambda index: (objects(index, 8, 3) * 30).astype(np.uint8))
    assert evidence.share(0) > 0.9
    assert evidence.edge_threshold() is None


def test_ten_grey_classes_on_a_large_background_are_no_soft_edge():
    evidence = evidence_of(lambda index: (objects(0, 10, 3) * 25).astype(np.uint8))
    assert evidence.share(0) > 0.94
    assert evidence.edge_threshold() is None


def test_few_values_or_ends_close_to_each_other_are_not_split():
    assert counts_of({0: 9000, 255: 1000, 128: 1}).edge_threshold() is None
    assert counts_of(dict.fromkeys(range(100), 1) | {0: 9000, 99: 5000}).edge_threshold() is None
    assert counts_of(dict.fromkeys(range(0, 1000, 100), 5)).edge_threshold() is None


def test_ids_and_void_are_no_soft_edge():
    """As in VOC: nearly all values are close to 0, and 255 is far from all of them."""
    assert counts_of(dict.fromkeys(range(21), 100) | {0: 9000, 255: 500}).edge_threshold() is None


# Ids of objects


@pytest.mark.parametrize("scale", [1, 7, 30])
def test_ids_that_count_up_in_each_mask_are_those_of_objects(scale):
    assert evidence_of(lambda index: (objects(index, 2 + 3 * index) * scale % 256).astype(np.uint8)).are_objects


def test_ids_of_objects_that_were_cut_off_at_255_are_recognised():
    """The last value then has many objects; the others still count up."""
    assert evidence_of(lambda index: (objects(index, 1 + index) * 30).clip(0, 255).astype(np.uint8), number=12).are_objects


def test_ids_that_begin_anywhere_are_those_of_objects():
    def track(index):
        ids = objects(index, 6)
        return np.where(ids > 0, ids + 10 * index, 0).astype(np.uint16)

    assert evidence_of(track).are_objects


def test_the_same_ids_in_every_mask_are_classes():
    assert not evidence_of(lambda index: objects(index, 10).astype(np.uint8)).are_objects


def test_ids_of_several_pieces_are_classes():
    assert not evidence_of(lambda index: stripes(4, index)).are_objects
    assert not evidence_of(lambda index: stripes(2 + index % 4)).are_objects  # 1, 2, 3, 4 ids, each in several stripes


def test_ids_without_a_background_are_no_objects():
    assert not evidence_of(lambda index: (objects(index, 2 + 3 * index) + 1).astype(np.uint8)).are_objects


def test_values_of_one_mask_each_can_hardly_be_classes():
    assert counts_of(*({0: 9, index: 1} for index in range(1, 9))).occur_once
    assert not counts_of(*({0: 9, 1: 1, 2: 1} for _ in range(8)), {0: 9, 3: 1}).occur_once
    assert not counts_of({0: 9, 1: 1}, {0: 9, 2: 1}).occur_once  # too few masks to say


def test_classes_lie_in_regions_and_greys_of_a_photograph_do_not():
    assert evidence_of(lambda index: stripes(5, index)).has_regions
    assert not evidence_of(lambda index: np.random.default_rng(index).integers(0, 256, (SIDE, SIDE), np.uint8)).has_regions


# Void


def test_a_thin_last_value_between_the_others_may_be_void():
    assert evidence_of(lambda index: with_border(stripes(3, index, width=24), 3)).last_may_be_void
    assert evidence_of(lambda index: with_border((objects(index, 1, 30) > 0).astype(np.uint8), 2)).last_may_be_void


def test_a_last_value_as_thick_as_the_others_is_a_class():
    assert not evidence_of(lambda index: stripes(4, index)).last_may_be_void
    assert not evidence_of(lambda index: objects(index, 5).astype(np.uint8)).last_may_be_void


def test_a_last_value_in_few_masks_or_in_many_pixels_is_a_class():
    thin = [with_border(stripes(3, index, width=24), 3) if index < 4 else stripes(3, index, width=24) for index in range(8)]
    assert not MaskEvidence([facts_of(mask) for mask in thin]).last_may_be_void
    assert not evidence_of(lambda index: with_border(stripes(3, index, width=24), 3, width=6)).last_may_be_void  # 19 % of pixels


def test_a_value_beside_classes_is_told_from_another_coding():
    assert counts_of({0: 5, 1: 3, 255: 1}, {0: 5}).is_beside_classes(255)
    assert not counts_of({0: 5, 255: 1}, {0: 5, 1: 1}).is_beside_classes(255)
    assert counts_of({0: 5, 255: 1}, {0: 5}).is_beside_classes(255)  # there is no class that it could be beside


# Noise and groups


def test_rare_values_of_one_mask_are_noise():
    masks = [{0: 9000, 255: 1000} for _ in range(5)]
    masks[3] = {0: 9000, 255: 990, 7: 6, RED: 4}
    assert counts_of(*masks).noise == [7, RED]
    assert counts_of(*masks).holder_of(RED) == 3
    assert counts_of(*masks[2:]).noise == []  # three masks
    assert counts_of(*[{0: 9000, 1: 1000}] * 5, {0: 9000, 1: 1000, 2: 1}).noise == []  # a rare class: 0, 1, 2
    masks[3] = {0: 9000, 255: 900, 7: 100}  # 0.2 % of all pixels
    assert counts_of(*masks).noise == []


def test_colours_close_to_a_more_frequent_one_are_grouped_with_it():
    evidence = counts_of({RED: 50, RED - 0x050000: 4, 0: 30, 5: 3, GREEN: 10, 300: 2})
    assert [(group.value, group.num_values, group.pixels) for group in evidence.groups] == [
        (RED, 2, 54),
        (0, 2, 33),
        (GREEN, 1, 10),
        (300, 1, 2),
    ]


def test_groups_of_masks_saved_as_jpeg_are_wide():
    colours = np.array([[0, 0, 0], [200, 0, 0]], np.uint8)[(objects(0, 5, 7) > 0).astype(int)]
    decoded = cv2.imdecode(cv2.imencode(".jpg", colours)[1], cv2.IMREAD_COLOR).astype(np.int32)
    joined = COLOUR + (decoded[:, :, 2] << 16) + (decoded[:, :, 1] << 8) + decoded[:, :, 0]
    evidence = MaskEvidence([facts_of(joined, is_lossy=True)])
    assert evidence.is_lossy
    assert evidence.noise == []
    first, second = evidence.groups[:2]
    assert (first.pixels + second.pixels) / evidence.total > 0.95


# Palettes


def with_palette(**palette):
    return MaskFacts(1, 2, {0: 1, 1: 1}, "", palette={int(name[1:]): colour for name, colour in palette.items()})


def test_a_colour_at_another_place_of_a_palette_is_found():
    masks = [with_palette(_0=0, _1=0xFFFFFF), with_palette(_0=0, _1=0xFFFFFF), with_palette(_0=0xFFFFFF, _1=0)]
    assert swapped_palettes(masks) == {2: (0, 0xFFFFFF)}
    assert swapped_palettes(masks[:2]) == {}


def test_other_colours_at_the_same_places_mean_the_same():
    assert (
        swapped_palettes([with_palette(_0=0, _1=0xFFFFFF), with_palette(_0=0, _1=0xFF0000), facts_of(np.eye(3, dtype=np.uint8))])
        == {}
    )


def test_a_palette_of_one_colour_tells_nothing():
    assert swapped_palettes([with_palette(_0=0, _1=0), with_palette(_0=7, _1=0)]) == {}
