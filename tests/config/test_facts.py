"""Facts that settings are decided from: the kind of hardware, and what an augmentation may do to images."""

from __future__ import annotations

import pytest

from unet_trainer.config.facts import HardwareFacts, Measurements, chance_of


def told(share, num_pairs, share_in_views=0.5):
    """Measurements of images that can be told from their vertical mirror image so often."""
    return Measurements(
        num_pairs=num_pairs,
        structure=10.0,
        relative_structure=0.1,
        thickness=5.0,
        size_spread=1.0,
        brightness_spread=0.0,
        has_colour=False,
        told={"vertical_flip": share},
        told_in_views={"vertical_flip": share_in_views},
        has_sides=False,
    )


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:3", "cuda"), ("mps", "mps")])
def test_kind_of_hardware_is_the_device_without_its_number(device, kind):
    assert HardwareFacts(device, "", True, True, 1).kind == kind


def test_the_chance_of_heads():
    assert chance_of(0, 3) == 1
    assert chance_of(2, 3) == 0.5
    assert chance_of(3, 3) == 0.125


@pytest.mark.parametrize(
    ("share", "num_pairs", "is_kept"),
    [
        (0.5, 100, True),
        (0.84, 100, True),  # some images look upright, most do not
        (0.86, 100, False),
        (1.0, 4, True),  # 4 of 4 by chance: once in 16 times
        (1.0, 5, True),  # 1 / 32 = 0.031
        (1.0, 6, False),  # 1 / 64 = 0.016
        (0.9, 10, False),  # 11 / 1024 = 0.011
    ],
)
def test_a_difference_that_few_images_show_by_chance_forbids_nothing(share, num_pairs, is_kept):
    assert told(share, num_pairs).keeps_labels("vertical_flip", in_views=False) is is_kept


def test_whole_images_and_crops_are_judged_apart():
    whole = told(1.0, 100)
    assert (whole.share_told("vertical_flip", in_views=False), whole.share_told("vertical_flip", in_views=True)) == (1.0, 0.5)
    assert not whole.keeps_labels("vertical_flip", in_views=False)
    assert whole.keeps_labels("vertical_flip", in_views=True)
