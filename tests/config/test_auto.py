"""Each setting that is left open follows from what was measured in the data, the hardware and the time."""

import dataclasses

import pytest

from helpers.resolving import AMPERE, CPU, FREE, MEASURED, UPRIGHT, settings_of
from unet_trainer.config import auto_images, auto_training
from unet_trainer.config.facts import StepCost

SIZES = [(1000, 1000)]


def measured(**values):
    """Large structures in images that have an up, whose crops have none."""
    large = {"structure": 100.0, "relative_structure": 0.3, "size_spread": 4.0}
    large["chance_in_views"] = dict.fromkeys(FREE, 0.5)
    return dataclasses.replace(MEASURED, **{**large, **values})


def names(transforms):
    return [next(iter(item)) for item in transforms]


@pytest.mark.parametrize(
    ("share", "fit"), [(0.5, "resize"), (0.2, "resize"), (0.19, "crop"), (0.02, "crop"), (0.0, "resize")]
)
def test_large_structures_need_the_whole_image_and_small_ones_native_resolution(share, fit):
    assert auto_images.choose_fit(measured(relative_structure=share), SIZES)[0] == fit


@pytest.mark.parametrize(("sizes", "fit"), [
    ([(285, 122), (293, 257), (300, 330)], "resize"),  # a crop of 256² is most of them
    ([(256, 256)] * 8 + [(1024, 1024)] * 2, "crop"),  # some are large: resized they would lose their details
    ([(512, 512)] * 9, "crop"),  # four crops take the time of one whole image
])  # fmt: skip
def test_small_images_are_seen_whole_where_a_crop_would_be_most_of_them(sizes, fit):
    assert auto_images.choose_fit(measured(relative_structure=0.06, structure=20.0), sizes)[0] == fit


@pytest.mark.parametrize(("sizes", "thickness", "budget", "size"), [
    ([(2000, 4000)] * 2, 100.0, None, (352, 736)),  # sqrt(512² / 8 Mpx) = 0.181: 362 × 724, in multiples of 32
    ([(1200, 1200), (1210, 1210)], 12.0, None, (512, 512)),  # 12 · 512 / 1205 = 5.1 pixels
    ([(1200, 1200), (1210, 1210)], 5.0, None, (960, 960)),  # 5 · 0.8 = 4 pixels
    ([(1200, 1200), (1210, 1210)], 2.0, None, (1024, 1024)),  # up to a megapixel
    ([(380, 510), (381, 511)], 50.0, 3600.0, (224, 288)),  # on a CPU they are smaller
    ([(380, 510), (381, 511)], 50.0, 240.0, (128, 192)),  # in a short time smaller still
])  # fmt: skip
def test_large_images_keep_their_shape_and_thin_structures_four_pixels(sizes, thickness, budget, size):
    chosen, reason = auto_images.choose_image_size("resize", sizes, measured(thickness=thickness), bool(budget), budget)
    assert chosen == size
    assert (f"{thickness:.0f} pixels thin" in reason) == (thickness < 10)


@pytest.mark.parametrize(("structure", "side"), [(5, 256), (40, 320), (500, 512)])
def test_a_crop_shows_several_structures(structure, side):
    assert auto_images.choose_image_size("crop", [(2000, 2000)], measured(structure=structure), on_cpu=False)[0] == side


@pytest.mark.parametrize(("fit", "first", "degrees", "words"), [
    ("resize", ["HorizontalFlip", "Affine", "RandomBrightnessContrast"], 5, "have an up (98% are recognised"),
    ("crop", ["HorizontalFlip", "VerticalFlip", "RandomRotate90"], 180, "are flipped upside down too (50% are"),
])  # fmt: skip
def test_images_with_an_up_are_neither_turned_upside_down_nor_far_and_others_are(fit, first, degrees, words):
    transforms, reason = auto_images.choose_augmentation(measured(), fit, 3)
    assert names(transforms)[:3] == first
    assert names(transforms)[-1] == "HueSaturationValue"
    assert next(item["Affine"]["rotate"] for item in transforms if "Affine" in item) == [-degrees, degrees]
    assert words in reason


def test_light_is_left_alone_where_each_image_is_normalised_by_itself():
    for is_8bit, colours in ((True, ["HueSaturationValue"]), (False, [])):
        transforms, _ = auto_images.choose_augmentation(measured(), "resize", 3, is_8bit, "image")
        assert names(transforms) == ["HorizontalFlip", "Affine", *colours]


def test_left_and_right_as_classes_forbid_the_horizontal_flip():
    transforms, reason = auto_images.choose_augmentation(measured(has_sides=True), "resize", 3)
    assert "HorizontalFlip" not in names(transforms)
    assert "left and right are different classes" in reason


@pytest.mark.parametrize(("share", "chance", "is_kept"), [
    (0.5, 0.6, True), (0.84, 0.0, True), (0.86, 0.0, False), (1.0, 0.03, True), (1.0, 0.02, False),
])  # fmt: skip
def test_a_difference_that_images_may_show_by_chance_forbids_nothing(share, chance, is_kept):
    found = measured(told={**UPRIGHT, "vertical_flip": share}, chance=dict.fromkeys(FREE, chance))
    assert found.keeps_labels("vertical_flip", in_views=False) is is_kept
    assert found.keeps_labels("vertical_flip", in_views=True)


def plan(num_samples, batch_size=16, cost=None, num_val=0, budget=None, **others):
    return auto_training.plan_steps(num_samples, batch_size, 1, cost, num_val, budget, **others)


@pytest.mark.parametrize("num_samples", [5, 20, 367, 2000])
def test_sets_of_up_to_a_few_thousand_images_get_the_same_number_of_steps(num_samples):
    found = plan(num_samples)
    steps = found.num_epochs * (num_samples * found.repeats // 16)
    assert steps == pytest.approx(auto_training.NUM_VIEWS / 16, rel=0.03)
    assert 45 <= found.num_epochs <= 125


def test_a_large_set_is_seen_forty_times_up_to_a_limit():
    assert plan(10_000).num_epochs == 40
    assert auto_training.wanted_views(10_000) == 400_000
    assert auto_training.wanted_views(10**6) == auto_training.MAX_VIEWS


@pytest.mark.parametrize(("num_samples", "repeats"), [
    (1600, 1),  # 58 s of training are 928 images, and an epoch of them would be the whole pass: the time ends it
    (3000, 1 / 3),
    (100, 10),
])  # fmt: skip
def test_where_one_epoch_is_all_that_there_is_time_for_it_is_as_long_as_that(num_samples, repeats):
    """Two epochs with a validation of 20 s each would leave half of 78 s for training."""
    cost = StepCost(seconds=1.0, eval_seconds=0.1, memory=0)
    found = plan(num_samples, cost=cost, num_val=200, budget=78.0)
    assert (found.num_epochs, found.repeats) == (1, repeats)
    assert found.reason.endswith(" augmented images are what 78 s allow: one epoch, as long as there is time")
    assert plan(num_samples, cost=cost, num_val=200, budget=78.0, repeats=0.5).repeats == 0.5
    assert plan(num_samples, cost=cost, num_val=200, budget=500.0).num_epochs == 2  # a tenth of the time
    longer = plan(num_samples, cost=cost, num_val=200, budget=78.0, may_end_early=True)
    assert longer.repeats >= min(1, 1.4 * repeats)
    assert (found.share, longer.share) == (1.0, pytest.approx(2 / 3))


@pytest.mark.parametrize("num_samples", [20, 100, 270, 999, 1600, 20_000, 10**6])
@pytest.mark.parametrize("budget", [40.0, 300.0, 2000.0])
@pytest.mark.parametrize("val_seconds", [0.0, 0.005, 0.01])
def test_a_run_has_eight_validations_at_least_where_they_take_a_tenth_of_the_time(num_samples, budget, val_seconds):
    """As parts of a pass over many images. 100 validations of 0.01 of the budget would take all of it: there are about ten."""
    cost = StepCost(seconds=0.5, eval_seconds=val_seconds * budget, memory=0)
    found = plan(num_samples, cost=cost, num_val=1, budget=budget, may_end_early=True)
    steps_per_epoch = num_samples // max(1, round(1 / found.repeats)) * max(1, round(found.repeats)) // 16
    num_steps = found.share * found.num_epochs * steps_per_epoch
    assert found.num_epochs >= 8
    assert found.num_epochs * val_seconds <= (0.2 if val_seconds == 0.01 else 0.15)
    assert num_steps * 0.5 == pytest.approx(budget - min(100 * val_seconds, 0.1) * budget, rel=0.03)


def test_where_eight_validations_would_take_more_there_are_fewer():
    """A validation takes 10 s: 36 s, of 360, allow four. Repeats that are set stay as they are."""
    cost = StepCost(seconds=0.5, eval_seconds=0.1, memory=0)
    found = plan(1600, cost=cost, num_val=100, budget=360.0, may_end_early=True)
    assert (found.num_epochs, found.repeats) == (4, 2)  # 162 steps of 648 would be a tenth, 200 are two passes
    assert plan(1600, cost=cost, num_val=100, budget=360.0, repeats=0.25).repeats == 0.25


def test_a_huge_set_is_passed_over_in_parts_also_where_there_is_no_limit_of_time():
    found = plan(10**6)  # MAX_VIEWS are four passes
    assert (found.num_epochs, found.repeats) == (8, 0.5)


def test_the_learning_rate_grows_with_the_root_of_the_batch():
    cases = {("adamw", 16): 2e-3, ("adamw", 64): 4e-3, ("adamw", 4): 1e-3, ("sgd", 16): 5e-2}
    assert {case: auto_training.choose_learning_rate(*case)[0] for case in cases} == cases


def test_compiling_must_save_more_than_it_costs():
    cost = StepCost(0.02, 0.001, 0)
    enough = int(auto_training.COMPILE_SECONDS / (0.5 * 0.02)) + 10
    assert auto_training.choose_compile(AMPERE, cost, enough)[0]
    assert not auto_training.choose_compile(AMPERE, cost, enough - 20)[0]
    assert not auto_training.choose_compile(CPU, cost, enough)[0]
    assert not auto_training.choose_compile(AMPERE, None, enough)[0]


def test_what_fits_into_a_quarter_of_the_memory_is_cached():
    cases = {(2, 8, 10): "ram", (3, 8, 10): "none", (1, 8, 1): "none", (1, 0, 10): "none"}  # GiB, GiB, times read
    for (size, memory, num_reads), expected in cases.items():
        hardware = dataclasses.replace(CPU, host_memory=memory * 2**30, disk=100 * 2**30)
        assert auto_training.choose_cache(size * 2**30, hardware, num_reads, 1)[0] == expected


def test_images_that_give_several_crops_are_decoded_once_on_the_disk_where_there_is_room():
    cases = {(3, 100): "disk", (3, 11): "none", (65, 1000): "none"}  # GiB, GiB of disk
    for (size, disk), expected in cases.items():
        hardware = dataclasses.replace(CPU, host_memory=8 * 2**30, disk=disk * 2**30)
        assert auto_training.choose_cache(size * 2**30, hardware, 160, 16)[0] == expected


@pytest.mark.parametrize(("num_samples", "budget"), [(25, 0.001), (47, 1.0), (33, 20.0), (1000, 20.0)])
def test_however_short_the_time_is_an_epoch_has_a_batch(num_samples, budget):
    found = plan(num_samples, cost=StepCost(0.5, 0.01, 0), num_val=5, budget=budget)
    assert found.num_epochs >= 1
    assert num_samples // max(1, round(1 / found.repeats)) >= 16


@pytest.mark.parametrize(("num_cores", "num_processes", "beside_a_gpu", "on_cpu"), [
    (1, 1, 1, 0), (2, 1, 1, 1), (8, 1, 7, 4), (128, 1, 16, 4), (64, 8, 8 * 7, 8 * 4), (4, 4, 4, 0),
])  # fmt: skip
def test_number_of_workers_follows_the_cores_that_each_process_of_a_machine_has(
    num_cores, num_processes, beside_a_gpu, on_cpu
):
    for hardware, expected in ((AMPERE, beside_a_gpu), (CPU, on_cpu)):
        machine = dataclasses.replace(hardware, num_cores=num_cores, num_local_processes=num_processes)
        assert settings_of(machine, num_workers="auto").taken.num_workers == expected


@pytest.mark.parametrize(("shares", "weights"), [
    ([0.0016, 0.0001, 0.000256], (0.632, 1.265, 1.0)),  # (0.16)^¼ and (2.56)^¼ of the median
    ([0.5, 0.4999, 0.0001], (1.0, 1.0, 2.5)),  # 4999^¼ = 8.4 is capped
    ([0.9, 1e-4, 1e-4], (0.4, 1.0, 1.0)),  # 9000^-¼ = 0.10 has a floor
    ([1e-4, 1e-4, 0.0], (1.0, 1.0, 1.0)),
    ([0.899, 0.1, 0.001], None),
    ([0.5, 0.5, 0.0], None),
    ([0.0, 0.0, 0.0], None),
])  # fmt: skip
def test_classes_below_a_thousandth_weigh_more_by_the_fourth_root_of_their_rarity(shares, weights):
    assert auto_training.choose_class_weights(shares, len(shares))[0] == weights
