"""Facts that settings are decided from: the kind of hardware, and what an augmentation may do to images."""

from __future__ import annotations

import pytest

from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, Measurements, StepCost


def told(share, chance, share_in_views=0.5):
    """Measurements of images that can be told from their vertical mirror image so often, and by chance with this probability."""
    return Measurements(
        num_pairs=100,
        structure=10.0,
        relative_structure=0.1,
        thickness=5.0,
        size_spread=1.0,
        brightness_spread=0.0,
        has_colour=False,
        told={"vertical_flip": share},
        told_in_views={"vertical_flip": share_in_views},
        has_sides=False,
        chance={"vertical_flip": chance},
        chance_in_views={"vertical_flip": 1.0},
    )


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:3", "cuda"), ("mps", "mps")])
def test_kind_of_hardware_is_the_device_without_its_number(device, kind):
    assert HardwareFacts(device, "", True, True, 1).kind == kind


@pytest.mark.parametrize(
    ("share", "chance", "is_kept"),
    [(0.5, 0.6, True), (0.84, 0.0, True), (0.86, 0.0, False), (1.0, 0.03, True), (1.0, 0.02, False)],
)
def test_a_difference_that_images_may_show_by_chance_forbids_nothing(share, chance, is_kept):
    assert told(share, chance).keeps_labels("vertical_flip", in_views=False) is is_kept


def test_a_step_that_memory_does_not_hold_is_not_possible():
    assert not TOO_LARGE.is_possible
    assert StepCost(1.0, 1.0, 2**40).is_possible


def test_whole_images_and_crops_are_judged_apart():
    whole = told(1.0, 0.0)
    assert (whole.share_told("vertical_flip", in_views=False), whole.share_told("vertical_flip", in_views=True)) == (1.0, 0.5)
    assert not whole.keeps_labels("vertical_flip", in_views=False)
    assert whole.keeps_labels("vertical_flip", in_views=True)
