"""Hardware, a dataset and settings that are resolved for them."""

from helpers.project import FIXED_RECIPE
from unet_trainer.config.auto import resolve
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import FIELDS

AMPERE = HardwareFacts("cuda", "NVIDIA A100", has_bfloat16=True, has_float16=True, num_cores=8)
TURING = HardwareFacts("cuda:1", "Tesla T4", has_bfloat16=False, has_float16=True, num_cores=8)
KEPLER = HardwareFacts("cuda", "Tesla K80", has_bfloat16=False, has_float16=False, num_cores=8)
CPU = HardwareFacts("cpu", "x86_64", has_bfloat16=True, has_float16=False, num_cores=8)
APPLE = HardwareFacts("mps", "Apple GPU", has_bfloat16=True, has_float16=True, num_cores=8)
OLD_APPLE = HardwareFacts("mps", "Apple GPU", has_bfloat16=False, has_float16=True, num_cores=8)
ALL_HARDWARE = [AMPERE, TURING, KEPLER, CPU, APPLE, OLD_APPLE]

DATASET = DatasetFacts(
    channels=4,
    mean=(1.0, 2.0, 3.0, 4.0),
    std=(5.0, 6.0, 7.0, 8.0),
    statistics_reason="of the training images",
    mask_values=(0, 255),
    ignore_value=None,
    mask_reason="all masks hold 0 and 255",
    class_shares=[0.8, 0.2],
    train_sizes=[(64, 64), (128, 64), (256, 256)],
    num_classes=1,
    num_classes_reason="the masks hold two values",
)
FREE = {"horizontal_flip": 0.5, "vertical_flip": 0.5, "quarter_turn": 0.5}
UPRIGHT = {"horizontal_flip": 0.5, "vertical_flip": 0.98, "quarter_turn": 1.0}
MEASURED = Measurements(
    num_pairs=100,
    structure=20.0,
    relative_structure=0.1,
    thickness=20.0,
    size_spread=2.0,
    brightness=0.5,
    brightness_spread=0.1,
    has_colour=True,
    told=UPRIGHT,
    told_in_views=FREE,
    has_sides=False,
    chance=dict.fromkeys(("horizontal_flip", "vertical_flip", "quarter_turn"), 0.0),
    chance_in_views=dict.fromkeys(("horizontal_flip", "vertical_flip", "quarter_turn"), 0.0),
)
STEP = StepCost(seconds=0.5, eval_seconds=0.01, memory=2**30)


def found_weights(encoder):
    return "imagenet", "on this machine"


def settings_of(hardware=CPU, dataset=DATASET, measure_step=lambda config: None, find_weights=found_weights, **values):
    """What the recipe sets is set; `values` may open it again with auto."""
    return resolve(
        load_config({**FIXED_RECIPE, "image_size": 64, **values}), hardware, dataset, measure_step, find_weights
    )


def open_settings(
    hardware=CPU,
    dataset=DATASET,
    measure_step=lambda config: None,
    find_weights=found_weights,
    seconds_spent=lambda: 0.0,
    **values,
):
    """Everything is auto but `values`."""
    return resolve(load_config(values), hardware, dataset, measure_step, find_weights, seconds_spent)


def decided(settings):
    return {name: settings[name].reason for name in FIELDS if settings[name].is_decided}
