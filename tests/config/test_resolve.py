"""What a config leaves open is decided once, with a reason; what it sets is kept."""

from __future__ import annotations

import dataclasses
import math

import pytest

from helpers.project import FIXED_RECIPE
from helpers.resolving import (
    ALL_HARDWARE,
    AMPERE,
    APPLE,
    CPU,
    DATASET,
    KEPLER,
    MEASURED,
    OLD_APPLE,
    STEP,
    TURING,
    decided,
    found_weights,
    open_settings,
    settings_of,
)
from unet_trainer.config.data_choices import choose_crops_per_image
from unet_trainer.config.dump import as_dict
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.resolve import decoded_bytes, resolve
from unet_trainer.config.resolved_config import Decision, ResolvedConfig
from unet_trainer.config.schema import FIELDS, MIN_ATTENTION_CHANNELS, Config
from unet_trainer.config.training_choices import (
    CPU_BUDGET,
    CPU_ENCODERS,
    WANTED_VIEWS,
    choose_class_weights,
    choose_num_workers,
    choose_number_format,
)

EVERYTHING_SET = {
    **FIXED_RECIPE,
    "device": "cpu",
    "num_workers": 3,
    "num_classes": 1,
    "mask_values": [0, 1],
    "mask_tolerance": 0,
    "in_channels": 1,
    "image_mean": [0.5],
    "image_std": [0.25],
    "image_size": 64,
    "crops_per_image": 5,
    "repeats": 2,
    "class_weights": [2.0],
    "encoder": "resnet50",
    "encoder_weights": "imagenet",
    "encoder_lr_factor": 0.5,
    "early_stopping_patience": 7,
    "ema_decay": 0.99,
}


class Trials:
    """Stands in for trials of the step: keeps what it was asked and answers by encoder, or by batch size."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def __call__(self, config):
        self.asked.append(config)
        return self.answers[config.encoder] if config.encoder in self.answers else self.answers[config.batch_size]


# resolve


def test_what_is_left_open_is_decided_with_a_reason():
    dataset = dataclasses.replace(DATASET, measurements=MEASURED)
    gpu = dataclasses.replace(AMPERE, free_memory=8 * 2**30, host_memory=2**34)
    settings = open_settings(gpu, dataset, measure_step=lambda config: STEP)
    open_keys = {name for name, field in FIELDS.items() if getattr(Config(), name) == "auto"}
    assert open_keys >= {
        *("fit", "image_size", "augmentation", "cache", "encoder", "encoder_weights", "loss", "class_weights", "batch_size"),
        *("num_epochs", "learning_rate", "weight_decay", "warmup_epochs", "ema_decay", "early_stopping_patience", "use_amp"),
        *("compile_model", "repeats", "encoder_lr_factor", "decoder_attention", "deep_supervision", "cutmix"),
    }
    assert set(decided(settings)) == open_keys - {"resume"}
    assert all(reason.strip() for reason in decided(settings).values())
    assert settings.decisions["time_budget"] == Decision("default")


def test_the_values_that_are_decided_on_a_gpu():
    dataset = dataclasses.replace(DATASET, measurements=MEASURED)
    gpu = dataclasses.replace(AMPERE, free_memory=8 * 2**30, host_memory=2**34)
    taken = open_settings(gpu, dataset, measure_step=lambda config: STEP).taken
    assert (taken.device, taken.num_workers, taken.use_amp, taken.compile_model) == ("cuda", 7, True, True)
    assert (taken.in_channels, taken.image_mean, taken.image_std) == (4, DATASET.mean, DATASET.std)
    assert (taken.mask_values, taken.ignore_value) == ((0, 255), None)
    assert (taken.fit, taken.image_size, taken.crops_per_image) == ("crop", 64, 2)  # images of 64×128 in the median
    assert [next(iter(transform)) for transform in taken.augmentation][:3] == ["HorizontalFlip", "VerticalFlip", "RandomRotate90"]
    assert (taken.encoder, taken.encoder_weights, taken.encoder_lr_factor) == ("resnet34", "imagenet", 0.2)
    assert (taken.decoder_attention, taken.deep_supervision, taken.decoder_channels) == ("none", 0.0, None)
    assert taken.cutmix == 0.5
    assert (taken.loss, taken.class_weights) == ({"dice": 1.0, "cross_entropy": 1.0}, None)
    assert (taken.batch_size, taken.repeats, taken.num_epochs) == (16, 160, 100)  # 60 steps of 16 from 3 × 2 crops
    assert (taken.learning_rate, taken.weight_decay, taken.warmup_epochs) == (1e-3, 0.05, 3.0)
    assert (taken.ema_decay, taken.early_stopping_patience, taken.cache) == (round(1 - 10 / 6000, 5), 30, "ram")


def test_what_the_config_sets_is_kept():
    trials = Trials({})
    for hardware in (CPU, AMPERE):
        settings = open_settings(hardware, measure_step=trials, find_weights=pytest.fail, **EVERYTHING_SET)
        kept = {**as_dict(load_config(EVERYTHING_SET)), "device": hardware.device}
        assert as_dict(settings.taken) == kept
        assert set(decided(settings)) == {"device"}
    assert trials.asked == []


def test_widths_of_the_decoder_that_are_set_are_kept_beside_an_encoder_that_is_not():
    trials = Trials({encoder: StepCost(1000.0, 0.0, 0) for encoder, _ in CPU_ENCODERS})
    widths = (64, 32, 16, 8, 8)
    settings = resolve(Config(decoder_channels=widths), CPU, DATASET, trials, found_weights)
    assert (settings.taken.encoder, settings.taken.decoder_channels) == (CPU_ENCODERS[-1][0], widths)
    assert {config.decoder_channels for config in trials.asked} == {widths}


def test_no_auto_is_left_in_a_resolved_config():
    for hardware in ALL_HARDWARE:
        for settings in (open_settings(hardware), settings_of(hardware, class_weights="auto", fit="crop", encoder_weights="auto")):
            assert isinstance(settings.taken, ResolvedConfig)
            assert [name for name, value in as_dict(settings.taken).items() if value == "auto"] == []


RANDOM = "random weights: all learn alike"
PRETRAINED = "pretrained weights: they change less than those of the decoder"


@pytest.mark.parametrize(
    ("asked", "found", "taken", "reason"),
    [
        ({"encoder_weights": None}, pytest.fail, (None, 1.0), RANDOM),
        ({"encoder_weights": "auto"}, lambda encoder: (None, "no network"), (None, 1.0), RANDOM),
        ({"encoder_weights": "imagenet"}, pytest.fail, ("imagenet", 0.2), PRETRAINED),
        ({"encoder_weights": "mine.pt"}, pytest.fail, ("mine.pt", 0.2), PRETRAINED),
        ({"encoder_weights": "auto", "encoder_lr_factor": 1.0}, found_weights, ("imagenet", 1.0), ""),
    ],
)
def test_a_pretrained_encoder_learns_more_slowly(asked, found, taken, reason):
    settings = settings_of(find_weights=found, **asked)
    assert (settings.taken.encoder_weights, settings.taken.encoder_lr_factor) == taken
    assert settings.decisions["encoder_lr_factor"].reason == reason


def test_weights_are_looked_for_of_the_encoder_that_was_chosen():
    asked = []
    trials = Trials({"resnet34": StepCost(1000.0, 0.0, 0), 8: StepCost(0.001, 0.0, 0)})
    open_settings(measure_step=trials, find_weights=lambda encoder: (None, asked.append(encoder)))
    assert asked == ["resnet18"]


def test_weights_that_auto_found_are_those_of_the_repeated_run():
    settings = settings_of(encoder_weights="auto")
    assert (settings.repeatable().encoder_weights, settings.repeatable().encoder_lr_factor) == ("imagenet", 0.2)
    assert settings.reasons()["encoder_weights"] == "decided: on this machine"


def test_class_weights_that_are_off_stay_off():
    assert settings_of(num_classes=2, class_weights=None).taken.class_weights is None
    rare = dataclasses.replace(DATASET, class_shares=[0.9995, 0.0005])
    assert settings_of(dataset=rare, num_classes=2, class_weights="auto").taken.class_weights is not None
    assert settings_of(dataset=rare, num_classes=2, class_weights=None).taken.class_weights is None


@pytest.mark.parametrize(
    ("given", "cutmix"),
    [
        ({"num_epochs": 50, "repeats": 2}, 0.5),
        ({"num_epochs": 99}, 0.0),
        ({"num_epochs": 100, "augmentation": "default"}, 0.0),  # what was set means what it meant
        ({"num_epochs": 100, "augmentation": "default", "cutmix": 0.3}, 0.3),
        ({"num_epochs": 49, "fit": "crop", "image_size": 64, "crops_per_image": 4}, 0.0),  # 4 crops are twice a median image
        ({"num_epochs": 50, "fit": "crop", "image_size": 64, "crops_per_image": 4}, 0.5),
    ],
    ids=str,
)
def test_images_are_mixed_where_each_of_their_pixels_comes_a_hundred_times(given, cutmix):
    dataset = dataclasses.replace(DATASET, train_sizes=[(64, 128)] * 3)
    settings = open_settings(dataset=dataset, **{"fit": "resize", "image_size": 64, **given})
    assert settings.taken.cutmix == cutmix
    assert load_config(settings.repeatable_dict()).cutmix == cutmix


def test_widths_that_are_chosen_for_a_cpu_are_wide_enough_for_attention():
    assert all(min(widths) >= MIN_ATTENTION_CHANNELS for _, widths in CPU_ENCODERS if widths is not None)


def test_device_is_the_one_that_was_chosen():
    assert settings_of(TURING, device="auto").taken.device == "cuda:1"
    assert settings_of(CPU, device="auto").taken.device == "cpu"


def test_the_classes_that_were_found_are_taken_with_their_reasons():
    found = dataclasses.replace(
        DATASET,
        mask_values=(0, (1, 2), (64, 0, 128)),
        num_classes=3,
        num_classes_reason="3 classes in label_colors.txt",
        class_names=("sky", "road", "pole"),
        class_names_reason="by label_colors.txt",
        class_shares=[0.5, 0.3, 0.2],
        mask_tolerance=31,
    )
    settings = settings_of(dataset=found)
    assert (settings.taken.num_classes, settings.taken.class_names) == (3, ("sky", "road", "pole"))
    assert settings.taken.mask_tolerance == 31
    lines = settings.to_yaml("a run").splitlines()
    assert "num_classes: 3  # decided: 3 classes in label_colors.txt" in lines
    assert "class_names: [sky, road, pole]  # decided: by label_colors.txt" in lines
    assert ("num_classes", "3", "3 classes in label_colors.txt") in settings.describe()
    given = settings_of(dataset=found, num_classes=2, class_names=["a", "b"], mask_tolerance=0).taken
    assert (given.num_classes, given.class_names, given.mask_tolerance) == (2, ("a", "b"), 0)


def test_ignore_value_is_found_along_with_mask_values():
    found = dataclasses.replace(DATASET, ignore_value=255, mask_values=(0, 1))
    assert settings_of(dataset=found).taken.ignore_value == 255
    assert settings_of(dataset=found, ignore_value=7).taken.ignore_value == 7
    assert settings_of(dataset=found, mask_values=[0, 1]).taken.ignore_value is None  # the values that are given are all


def test_decisions_tell_the_source_of_every_value():
    config = load_config({"batch_size": 4, "num_workers": "auto"}, ["seed=7"])
    decisions = resolve(config, CPU, DATASET).decisions
    assert list(decisions) == list(FIELDS)
    assert decisions["batch_size"] == Decision("config")
    assert decisions["seed"] == Decision("command line")
    assert decisions["optimizer"] == Decision("default")
    assert decisions["num_workers"] == Decision("decided", "8 cores")  # although the config names it


def test_resolved_config_keeps_the_sources():
    config = load_config({"batch_size": 4}, ["seed=7"])
    assert resolve(config, CPU, DATASET).taken.sources == {"batch_size": "config", "seed": "command line"}


# What is measured in the data


@pytest.mark.parametrize("name", ["default", "strong"])
def test_named_augmentation_is_rewritten_for_images_that_have_an_up_alone(name):
    seen = dataclasses.replace(DATASET, channels=3, measurements=MEASURED)
    upright = settings_of(dataset=seen, augmentation=name, fit="resize")
    transforms = [next(iter(transform)) for transform in upright.taken.augmentation]
    assert "VerticalFlip" not in transforms
    assert transforms[:2] == ["HorizontalFlip", "Affine"]
    assert upright.decisions["augmentation"].reason.startswith(f"{name} without vertical flips and large turns: images have an up")
    assert load_config(upright.repeatable_dict()).augmentation == upright.taken.augmentation
    crops = settings_of(dataset=seen, augmentation=name, fit="crop")  # of which none is told from its mirror image
    assert (crops.taken.augmentation, crops.decisions["augmentation"]) == (name, Decision("config"))
    unmeasured = settings_of(augmentation=name, fit="resize")
    assert (unmeasured.taken.augmentation, unmeasured.decisions["augmentation"]) == (name, Decision("config"))


@pytest.mark.parametrize("augmentation", ["none", [{"VerticalFlip": {"p": 0.5}}]])
def test_other_augmentation_that_is_set_is_kept_for_images_that_have_an_up(augmentation):
    seen = dataclasses.replace(DATASET, measurements=MEASURED)
    settings = settings_of(dataset=seen, augmentation=augmentation)
    assert as_dict(settings.taken)["augmentation"] == augmentation
    assert settings.decisions["augmentation"] == Decision("config")


def test_without_measurements_whole_images_are_resized_and_augmented_by_default():
    taken = open_settings(encoder_weights=None).taken
    assert (taken.fit, taken.crops_per_image, taken.augmentation) == ("resize", 1, "default")


# Trials of the step


def test_on_a_cpu_the_largest_encoder_is_taken_that_sees_enough_images_in_the_time():
    """An hour of steps of 8 images: 2.4 s a step give 12,000 images."""
    slow, enough = StepCost(2.5, 0.0, 0), StepCost(2.4, 0.0, 0)
    assert CPU_BUDGET / 2.4 * 8 == WANTED_VIEWS
    for index, (encoder, widths) in enumerate(CPU_ENCODERS):
        trials = Trials({name: enough if place >= index else slow for place, (name, _) in enumerate(CPU_ENCODERS)})
        settings = open_settings(measure_step=trials)
        assert (settings.taken.encoder, settings.taken.decoder_channels) == (encoder, widths)
        asked = list(reversed(CPU_ENCODERS[max(0, index - 1) :]))  # the smallest first, up to one that is too slow
        assert [(config.encoder, config.decoder_channels) for config in trials.asked] == asked
        assert settings.decisions["encoder"].reason == "3.3 images/s on 8 cores: 12,000 images in 60 min"
        assert settings.decisions["decoder_channels"].source == ("default" if widths is None else "decided")


def test_on_a_slow_cpu_the_smallest_encoder_is_left():
    trials = Trials({encoder: StepCost(1000.0, 0.0, 0) for encoder, _ in CPU_ENCODERS})
    settings = open_settings(measure_step=trials)
    assert settings.taken.encoder == CPU_ENCODERS[-1][0]
    assert settings.taken.num_epochs == 1
    assert len(trials.asked) == 1  # the others are slower still


def test_a_shorter_time_takes_a_smaller_encoder_whose_steps_fit_into_it():
    costs = {encoder: StepCost(0.1 / 4**index, 0.0, 0) for index, (encoder, _) in enumerate(CPU_ENCODERS)}
    for encoder, cost in costs.items():
        seconds = math.ceil(WANTED_VIEWS / 8 * cost.seconds)
        taken = open_settings(measure_step=Trials(costs), time_budget=f"{seconds}s").taken
        assert taken.encoder == encoder
        num_steps = taken.num_epochs * (3 * taken.repeats // taken.batch_size)
        assert num_steps * cost.seconds <= 1.1 * seconds


def test_what_was_spent_before_training_is_not_planned_for():
    costs = dict.fromkeys([encoder for encoder, _ in CPU_ENCODERS], StepCost(0.5, 0.0, 0))
    whole = open_settings(measure_step=Trials(costs), time_budget="10m")
    rest = open_settings(measure_step=Trials(costs), time_budget="10m", seconds_spent=lambda: 540.0)
    assert "in 10 min" in whole.decisions["encoder"].reason
    assert "in 60 s" in rest.decisions["encoder"].reason
    assert rest.decisions["num_epochs"].reason.startswith("960 augmented images are what 60 s allow")
    assert open_settings(measure_step=Trials(costs), time_budget="10m", seconds_spent=lambda: 700.0).taken.num_epochs == 1


@pytest.mark.parametrize(("cost", "reason"), [(None, "no step could be tried"), (TOO_LARGE, "memory is short")])
def test_where_no_step_can_be_tried_a_cpu_gets_the_smallest_encoder(cost, reason):
    settings = open_settings(measure_step=lambda config: cost)
    assert (settings.taken.encoder, settings.taken.decoder_channels) == CPU_ENCODERS[-1]
    assert settings.decisions["encoder"].reason == f"the smallest; {reason}"


def test_an_encoder_that_memory_does_not_hold_gives_way_to_the_next():
    trials = Trials({"resnet34": TOO_LARGE, **{encoder: STEP for encoder, _ in CPU_ENCODERS[1:]}})
    assert open_settings(measure_step=trials).taken.encoder == CPU_ENCODERS[1][0]


def test_a_small_budget_gets_a_smaller_encoder_on_a_gpu_too():
    slow, fast = StepCost(1.0, 0.0, 2**30), StepCost(0.01, 0.0, 2**30)
    trials = Trials({"resnet34": slow, "resnet18": fast})
    gpu = dataclasses.replace(AMPERE, free_memory=2**33)
    assert open_settings(gpu, measure_step=trials, time_budget="1m").taken.encoder == "resnet18"
    assert open_settings(gpu, measure_step=trials).taken.encoder == "resnet34"


@pytest.mark.parametrize(
    ("values", "taken"),
    [
        ({"early_stopping_patience": 200}, {"early_stopping_patience": None}),
        ({"warmup_epochs": 300}, {"warmup_epochs": 50.0}),
        ({"batch_parts": 64}, {"batch_parts": 8}),
    ],
)
def test_what_is_set_and_does_not_go_with_what_is_decided_gives_way_with_a_reason(values, taken):
    settings = open_settings(measure_step=lambda config: StepCost(1e-4, 0.0, 0), **values)
    ((name, value),) = taken.items()
    assert settings.taken.num_epochs == 100
    assert getattr(settings.taken, name) == value
    assert settings.decisions[name].reason
    load_config(settings.repeatable_dict())


def test_a_pass_that_is_longer_than_the_budget_is_cut_into_epochs():
    many = dataclasses.replace(DATASET, train_sizes=[(64, 64)] * 5000)
    settings = open_settings(dataset=many, measure_step=lambda config: StepCost(0.5, 0.0, 0), time_budget="5m")
    steps = int(5000 * settings.taken.repeats) // 8
    assert settings.taken.repeats < 1
    assert settings.taken.num_epochs * steps * 0.5 <= 300
    assert settings.taken.num_epochs >= 5


def test_an_encoder_whose_architecture_has_no_widths_is_chosen_alone():
    trials = Trials({encoder: StepCost(1000.0, 0.0, 0) for encoder, _ in CPU_ENCODERS})
    assert open_settings(measure_step=trials, architecture="fpn").taken.decoder_channels is None


def test_an_encoder_that_is_set_is_the_one_that_is_tried():
    trials = Trials({"resnet50": STEP})
    settings = open_settings(measure_step=trials, encoder="resnet50")
    assert [(config.encoder, config.batch_size) for config in trials.asked] == [("resnet50", 8)]
    assert settings.taken.encoder == "resnet50"


@pytest.mark.parametrize(
    ("answers", "batch_size", "tried"),
    [
        ({16: STEP}, 16, [16]),
        ({16: TOO_LARGE, 8: STEP}, 8, [16, 8]),
        ({16: TOO_LARGE, 8: StepCost(0.5, 0.01, 2**34), 4: STEP}, 4, [16, 8, 4]),  # measured, and more than there is
        ({16: TOO_LARGE, 8: TOO_LARGE, 4: TOO_LARGE, 2: STEP}, 2, [16, 8, 4, 2]),
        (dict.fromkeys((16, 8, 4, 2, 1), TOO_LARGE), 1, [16, 8, 4, 2, 1]),
        ({16: None}, 16, [16]),  # it failed for another reason: a smaller batch would fail as well
    ],
)
def test_a_batch_that_memory_does_not_hold_is_halved(answers, batch_size, tried):
    trials = Trials(answers)
    gpu = dataclasses.replace(AMPERE, free_memory=2**33)
    taken = open_settings(gpu, measure_step=trials).taken
    assert [config.batch_size for config in trials.asked] == tried
    assert taken.batch_size == batch_size
    assert all(config.num_epochs == 1 and config.time_budget is None and not config.compile_model for config in trials.asked)


def test_a_batch_size_that_is_set_is_tried_alone_and_kept():
    trials = Trials({6: None})
    settings = open_settings(dataclasses.replace(AMPERE, free_memory=2**33), measure_step=trials, batch_size=6)
    assert [config.batch_size for config in trials.asked] == [6]
    assert settings.taken.batch_size == 6
    assert not settings.taken.compile_model


def test_a_batch_is_not_larger_than_an_epoch_whose_images_are_not_repeated():
    assert open_settings(num_epochs=5).taken.batch_size == 3
    assert open_settings(num_epochs=5, repeats=2).taken.batch_size == 6
    assert open_settings(num_epochs=5, repeats=4).taken.batch_size == 8


@pytest.mark.parametrize(
    ("hardware", "values", "is_tried"),
    [
        (CPU, {"num_epochs": 3}, False),  # batch and encoder do not depend on time
        (CPU, {"num_epochs": "auto"}, True),
        (AMPERE, {"num_epochs": 3, "batch_size": 4, "compile_model": False}, False),
        (AMPERE, {"num_epochs": "auto", "batch_size": 4, "compile_model": False}, False),  # a GPU has no limit of its own
        (AMPERE, {"num_epochs": "auto", "batch_size": 4, "compile_model": False, "time_budget": "1h"}, True),
        (AMPERE, {"num_epochs": 3, "batch_size": 4, "compile_model": "auto"}, True),
        (AMPERE, {"num_epochs": 3, "batch_size": "auto", "compile_model": False}, True),
        (APPLE, {"num_epochs": 3, "batch_size": 4, "compile_model": "auto"}, False),  # not compiled in any case
    ],
)
def test_a_step_is_tried_only_where_something_depends_on_its_cost(hardware, values, is_tried):
    trials = Trials(dict.fromkeys((1, 2, 3, 4, 8, 16), STEP))
    open_settings(hardware, measure_step=trials, **values)
    assert bool(trials.asked) is is_tried


def test_the_step_that_is_tried_leaves_nothing_open():
    trials = Trials({8: STEP})
    open_settings(measure_step=trials)
    assert [name for tried in trials.asked for name, value in as_dict(tried).items() if value == "auto"] == []


def test_compiling_is_chosen_where_it_saves_time_within_the_run():
    assert open_settings(AMPERE, measure_step=lambda config: STEP).taken.compile_model
    assert not open_settings(AMPERE, measure_step=lambda config: StepCost(1e-4, 0.0, 0)).taken.compile_model
    assert not open_settings(AMPERE, measure_step=lambda config: STEP, num_epochs=3).taken.compile_model
    assert not open_settings(CPU, measure_step=lambda config: STEP).taken.compile_model


# The length of a run


def test_what_is_decided_follows_the_epochs_that_are_set():
    taken = open_settings(num_epochs=200, batch_size=1, encoder_weights=None).taken
    assert (taken.num_epochs, taken.repeats) == (200, 1)
    assert (taken.warmup_epochs, taken.early_stopping_patience) == (6.0, 60)
    assert taken.ema_decay == round(1 - 10 / 600, 5)  # 3 steps an epoch
    assert taken.learning_rate == pytest.approx(2e-3 / math.sqrt(16))


def test_without_a_cost_a_time_budget_begins_with_short_epochs():
    """The first ones tell how many there can be."""
    taken = open_settings(AMPERE, time_budget="10m").taken
    assert 3 * taken.repeats // taken.batch_size <= 11


def test_no_settings_follow_the_time_unless_a_budget_is_given():
    assert not open_settings().replans()
    assert open_settings().budget() == math.inf
    budgeted = open_settings(time_budget="1h30m")
    assert budgeted.replans()
    assert budgeted.budget() == 5400.0
    assert "num_epochs" in budgeted.machine_keys()


# Number format


@pytest.mark.parametrize(
    ("hardware", "asked", "chosen", "reason"),
    [
        (AMPERE, "bfloat16", "bfloat16", "NVIDIA A100 takes it; no loss scaling needed"),
        (AMPERE, "float16", "float16", "NVIDIA A100 computes in it, with loss scaling against underflow"),
        (
            TURING,
            "bfloat16",
            "float16",
            "Tesla T4 has no bfloat16, which needs compute capability 8.0 (Ampere) or newer; float16 with loss scaling instead",
        ),
        (TURING, "float16", "float16", "Tesla T4 computes in it, with loss scaling against underflow"),
        (KEPLER, "bfloat16", "float32", "Tesla K80 has no bfloat16 arithmetic; float32 instead"),
        (KEPLER, "float16", "float32", "Tesla K80 has no float16 arithmetic; float32 instead"),
        (CPU, "bfloat16", "bfloat16", "x86_64 takes it; no loss scaling needed"),
        (CPU, "float16", "float32", "float16 is far slower than float32 on a CPU; float32 instead"),
        (APPLE, "bfloat16", "bfloat16", "Apple GPU takes it; no loss scaling needed"),
        (APPLE, "float16", "float16", "Apple GPU computes in it, with loss scaling against underflow"),
        (
            OLD_APPLE,
            "bfloat16",
            "float16",
            "Apple GPU has no bfloat16, which needs macOS 14 or newer; float16 with loss scaling instead",
        ),
        (OLD_APPLE, "float16", "float16", "Apple GPU computes in it, with loss scaling against underflow"),
    ],
)
def test_mixed_precision_takes_what_the_hardware_has_and_says_why(hardware, asked, chosen, reason):
    assert choose_number_format(asked, hardware) == (chosen, reason)
    settings = settings_of(hardware, use_amp=True, amp_dtype=asked)
    assert settings.taken.number_format == chosen
    decided = [name for name in ("use_amp", "amp_dtype") if settings.decisions[name].source == "decided"]
    expected = [] if chosen == asked else ["use_amp"] if chosen == "float32" else ["amp_dtype"]
    assert decided == expected
    assert [settings.decisions[name].reason for name in decided] == [reason] * len(decided)


@pytest.mark.parametrize("hardware", ALL_HARDWARE, ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("asked", ["bfloat16", "float16"])
def test_without_amp_everything_is_float32_and_nothing_is_decided(hardware, asked):
    settings = settings_of(hardware, use_amp=False, amp_dtype=asked)
    assert settings.taken.number_format == "float32"
    assert settings.taken.amp_dtype == asked
    assert {settings.decisions[name].source for name in ("use_amp", "amp_dtype")} == {"config"}


# Workers


@pytest.mark.parametrize(
    ("num_cores", "beside_a_gpu", "on_cpu"),
    [(1, 1, 0), (2, 1, 1), (3, 2, 1), (4, 3, 2), (8, 7, 4), (16, 15, 4), (17, 16, 4), (128, 16, 4)],
)
def test_number_of_workers_follows_the_cores(num_cores, beside_a_gpu, on_cpu):
    assert choose_num_workers(num_cores, on_cpu=False) == beside_a_gpu
    assert choose_num_workers(num_cores, on_cpu=True) == on_cpu


@pytest.mark.parametrize(("hardware", "num_workers"), [(AMPERE, 7), (APPLE, 7), (CPU, 4)])
def test_workers_are_fewer_where_the_model_needs_the_cores(hardware, num_workers):
    assert settings_of(hardware).taken.num_workers == num_workers
    assert settings_of(hardware, num_workers=0).taken.num_workers == 0


def test_one_core_is_singular():
    assert settings_of(dataclasses.replace(CPU, num_cores=1)).decisions["num_workers"] == Decision("decided", "1 core")


# Crops


@pytest.mark.parametrize(
    ("sizes", "size", "crops"),
    [
        ([(64, 64)], (64, 64), 1),
        ([(128, 128)], (64, 64), 4),
        ([(64, 128)], (64, 64), 2),
        ([(32, 32)], (64, 64), 1),  # an image smaller than a crop gives one
        ([(100, 100)], (64, 64), 2),  # 2.44
        ([(1000, 1000)], (64, 64), 16),
        ([(64, 64), (128, 128), (1000, 1000)], (64, 64), 4),  # the median area
        ([(64, 64), (128, 64)], (64, 64), 2),  # 1.5, rounded to even
        ([(128, 256)], (64, 128), 4),
    ],
)
def test_as_many_crops_as_fit_into_an_image_of_median_area(sizes, size, crops):
    found = choose_crops_per_image(sizes, size)
    assert found == crops
    assert type(found) is int


def test_crops_are_counted_for_fit_crop_alone():
    dataset = dataclasses.replace(DATASET, train_sizes=[(256, 256)])
    settings = settings_of(dataset=dataset, fit="crop", image_size=[64, 128])
    assert settings.taken.crops_per_image == 8
    assert settings.decisions["crops_per_image"].reason == "as many as fit side by side into an image of median area"
    assert settings_of(dataset=dataset, fit="resize", image_size=64).taken.crops_per_image == 1
    assert settings_of(dataset=dataset, fit="crop", image_size=64, crops_per_image=3).taken.crops_per_image == 3


# Class weights


@pytest.mark.parametrize(
    ("shares", "weights"),
    [
        ([0.0016, 0.0001, 0.000256], (0.632, 1.265, 1.0)),  # (0.16)^¼ and (2.56)^¼ of the median
        ([0.5, 0.4999, 0.0001], (1.0, 1.0, 2.5)),  # 4999^¼ = 8.4 is capped
        ([0.9, 1e-4, 1e-4], (0.4, 1.0, 1.0)),  # 9000^-¼ = 0.10 has a floor
        ([1e-4, 1e-4, 0.0], (1.0, 1.0, 1.0)),
        ([0.899, 0.1, 0.001], None),
        ([0.5, 0.5, 0.0], None),
        ([0.0, 0.0, 0.0], None),
    ],
)
def test_classes_below_a_thousandth_weigh_more_by_the_fourth_root_of_their_rarity(shares, weights):
    assert choose_class_weights(shares, len(shares))[0] == weights


def test_one_class_has_no_weight():
    assert choose_class_weights([0.99, 0.01], 1) == (None, "one class: the overlap loss counts its pixels alone")


# The processes of a job


def in_job(hardware, num_processes, num_local_processes=None):
    return dataclasses.replace(hardware, num_processes=num_processes, num_local_processes=num_local_processes or num_processes)


def test_the_learning_rate_follows_the_effective_batch_of_all_processes():
    alone = settings_of(AMPERE, batch_size=16, learning_rate="auto").taken.learning_rate
    four = settings_of(in_job(AMPERE, 4), batch_size=16, learning_rate="auto").taken.learning_rate
    assert four == pytest.approx(2 * alone)  # its square root
    given = settings_of(in_job(AMPERE, 4), batch_size=16, learning_rate=1e-3).taken.learning_rate
    assert given == 1e-3


def test_the_linear_rule_begins_from_the_rate_of_one_process():
    """The factor itself is applied where the model is built, so that config.yaml can be run again with any number of processes."""
    alone = settings_of(AMPERE, batch_size=16, learning_rate="auto").taken.learning_rate
    assert settings_of(in_job(AMPERE, 4), batch_size=16, learning_rate="auto", scale_lr=True).taken.learning_rate == alone


def test_processes_of_a_machine_share_its_cores_and_memory():
    assert choose_num_workers(64, on_cpu=False) == 16
    assert choose_num_workers(64, on_cpu=False, num_processes=8) == 8 * 7
    assert choose_num_workers(4, on_cpu=True, num_processes=4) == 0
    hardware = dataclasses.replace(AMPERE, host_memory=8 * decoded_bytes("resize", 64, DATASET))
    assert settings_of(hardware, cache="auto").taken.cache == "ram"
    assert settings_of(in_job(hardware, 4), cache="auto").taken.cache == "none"


def test_more_processes_take_fewer_steps_for_as_many_images():
    alone, eight = (open_settings(hardware, batch_size=16).taken for hardware in (AMPERE, in_job(AMPERE, 8)))
    seen = [taken.num_epochs * taken.repeats for taken in (alone, eight)]
    assert seen[0] == pytest.approx(seen[1], rel=0.05)


def test_synchronised_batch_norm_is_not_compiled():
    taken = settings_of(in_job(AMPERE, 2), sync_batchnorm=True, compile_model=True).taken
    assert not taken.compile_model
    assert settings_of(
        AMPERE, sync_batchnorm=True, compile_model=True
    ).taken.compile_model  # one process has nothing to synchronise
