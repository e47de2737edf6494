"""What a config leaves open is decided once, with a reason; what it sets is kept; config.yaml repeats the run elsewhere."""

import dataclasses

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
    STEP,
    TURING,
    decided,
    found_weights,
    open_settings,
    settings_of,
)
from unet_trainer.config import auto, auto_training
from unet_trainer.config.auto import CPU_ENCODERS, CPU_ENCODERS_FROM_NOTHING, WANTED_VIEWS, resolve
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.config.load import load_config
from unet_trainer.config.resolved_config import MACHINE_KEYS
from unet_trainer.config.schema import FIELDS, Config, as_dict

EVERYTHING_SET = {
    **FIXED_RECIPE, "device": "cpu", "num_workers": 3, "num_classes": 1, "mask_values": [0, 1], "mask_tolerance": 0,
    "in_channels": 1, "image_mean": [0.5], "image_std": [0.25], "normalize": "image", "image_size": 64,
    "crops_per_image": 5, "repeats": 2, "class_weights": [2.0], "encoder": "resnet50", "encoder_weights": "imagenet",
    "encoder_lr_factor": 0.5, "early_stopping_patience": 7, "ema_decay": 0.99,
}  # fmt: skip


class Trials:
    """Stands in for trials of the step: keeps what it was asked and answers by encoder, or by batch size."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def __call__(self, config):
        self.asked.append(config)
        return self.answers[config.encoder] if config.encoder in self.answers else self.answers[config.batch_size]


def test_what_is_left_open_is_decided_with_a_reason_here_for_a_gpu():
    dataset = dataclasses.replace(DATASET, measurements=MEASURED)
    gpu = dataclasses.replace(AMPERE, free_memory=8 * 2**30, host_memory=2**34)
    settings = open_settings(gpu, dataset, measure_step=lambda config: STEP)
    open_keys = {name for name, field in FIELDS.items() if getattr(Config(), name) == "auto"}
    assert len(open_keys) > 25
    assert set(decided(settings)) == open_keys - {"resume"}
    for hardware in ALL_HARDWARE:
        assert "auto" not in as_dict(open_settings(hardware).taken).values()
    assert all(reason.strip() for reason in decided(settings).values())
    assert settings["time_budget"][1:] == ("default", "")
    taken = settings.taken
    assert (taken.device, taken.num_workers, taken.use_amp, taken.compile_model) == ("cuda", 7, True, True)
    assert (taken.in_channels, taken.image_mean, taken.image_std) == (4, DATASET.mean, DATASET.std)
    assert (taken.mask_values, taken.ignore_value) == ((0, 255), None)
    assert (taken.fit, taken.image_size, taken.crops_per_image) == ("crop", 64, 2)  # images of 64×128 in the median
    names = [next(iter(transform)) for transform in taken.augmentation]
    assert names[:3] == ["HorizontalFlip", "VerticalFlip", "RandomRotate90"]
    assert (taken.encoder, taken.encoder_weights) == ("resnet34", "imagenet")
    assert taken.decoder_channels is None
    assert taken.cutmix == 0.5
    assert (taken.loss, taken.class_weights) == ({"dice": 1.0, "cross_entropy": 1.0}, None)
    assert (taken.batch_size, taken.repeats, taken.num_epochs) == (16, 160, 100)  # 60 steps of 16 from 3 × 2 crops
    assert (taken.learning_rate, taken.weight_decay, taken.warmup_epochs) == (2e-3, 0.05, 3.0)
    assert (taken.ema_decay, taken.early_stopping_patience, taken.cache) == (round(1 - 10 / 6000, 5), 30, "ram")


def test_what_the_config_sets_is_kept():
    trials = Trials({})
    for hardware in (CPU, AMPERE):
        settings = open_settings(hardware, measure_step=trials, find_weights=pytest.fail, **EVERYTHING_SET)
        kept = {**as_dict(load_config(EVERYTHING_SET)), "device": hardware.device}
        assert as_dict(settings.taken) == kept
        assert set(decided(settings)) == {"device"}
    assert trials.asked == []


@pytest.mark.parametrize(("given", "cutmix"), [
    ({"num_epochs": 50, "repeats": 2}, 0.5),
    ({"num_epochs": 99}, 0.0),
    ({"num_epochs": 100, "augmentation": "default"}, 0.0),  # what was set means what it meant
    ({"num_epochs": 100, "augmentation": "default", "cutmix": 0.3}, 0.3),
    ({"num_epochs": 49, "fit": "crop", "image_size": 64, "crops_per_image": 4}, 0.0),  # 4 crops are twice a median image
    ({"num_epochs": 50, "fit": "crop", "image_size": 64, "crops_per_image": 4}, 0.5),
], ids=str)  # fmt: skip
def test_images_are_mixed_where_each_of_their_pixels_comes_a_hundred_times(given, cutmix):
    dataset = dataclasses.replace(DATASET, train_sizes=[(64, 128)] * 3)
    settings = open_settings(dataset=dataset, **{"fit": "resize", "image_size": 64, **given})
    assert settings.taken.cutmix == cutmix
    assert load_config(settings.repeatable_dict()).cutmix == cutmix


@pytest.mark.parametrize(("num_epochs", "has_more"), [(19, False), (20, True)])
def test_images_that_come_seldom_are_flipped_and_no_more(num_epochs, has_more):
    dataset = dataclasses.replace(DATASET, measurements=MEASURED)
    settings = open_settings(dataset=dataset, fit="resize", image_size=64, num_epochs=num_epochs, repeats=1)
    names = [next(iter(transform)) for transform in settings.taken.augmentation]
    assert names[0] == "HorizontalFlip"
    assert ("Affine" in names) == has_more
    assert ("too seldom for more than flips" in settings["augmentation"].reason) != has_more


def test_the_classes_that_were_found_are_taken_with_their_reasons():
    values = {"mask_values": (0, (1, 2), (64, 0, 128)), "class_shares": [0.5, 0.3, 0.2], "mask_tolerance": 31}
    values |= {"num_classes": 3, "num_classes_reason": "3 classes in label_colors.txt"}
    values |= {"class_names": ("sky", "road", "pole"), "mask_reason": "by label_colors.txt"}
    found = dataclasses.replace(DATASET, **values)
    settings = settings_of(dataset=found)
    assert (settings.taken.num_classes, settings.taken.class_names) == (3, ("sky", "road", "pole"))
    assert settings.taken.mask_tolerance == 31
    lines = settings.to_yaml("a run").splitlines()
    assert "num_classes: 3  # decided: 3 classes in label_colors.txt" in lines
    assert "class_names: [sky, road, pole]  # decided: by label_colors.txt" in lines
    assert ("num_classes", "3", "3 classes in label_colors.txt") in settings.describe()
    given = settings_of(dataset=found, num_classes=2, class_names=["a", "b"], mask_tolerance=0).taken
    assert (given.num_classes, given.class_names, given.mask_tolerance) == (2, ("a", "b"), 0)


@pytest.mark.parametrize("name", ["default", "strong"])
def test_augmentation_that_is_named_stays_as_it_is(name):
    seen = dataclasses.replace(DATASET, channels=3, measurements=MEASURED)
    assert settings_of(dataset=seen, augmentation=name, fit="resize")["augmentation"] == (name, "config", "")


def test_on_a_cpu_the_largest_encoder_is_taken_that_sees_enough_images_in_the_time():
    """An hour of steps of 8 images: 2.4 s a step give 12,000 images."""
    slow, enough = StepCost(2.5, 0.0, 0), StepCost(2.4, 0.0, 0)
    assert auto.CPU_BUDGET / 2.4 * 8 == WANTED_VIEWS
    for index, (encoder, widths) in enumerate(CPU_ENCODERS):
        trials = Trials({name: enough if place >= index else slow for place, (name, _) in enumerate(CPU_ENCODERS)})
        settings = open_settings(measure_step=trials)
        assert (settings.taken.encoder, settings.taken.decoder_channels) == (encoder, widths)
        asked = list(reversed(CPU_ENCODERS[max(0, index - 1) :]))  # the smallest first, up to one that is too slow
        assert [(config.encoder, config.decoder_channels) for config in trials.asked] == asked
        assert settings["encoder"].reason == "3.3 images/s: 12,000 images in 60 min"
        assert settings["decoder_channels"].source == ("default" if widths is None else "decided")


def test_the_encoder_is_the_same_whether_or_not_the_epochs_are_set():
    """In an hour of steps of 8 images a CPU sees 14,400 with the third encoder, and 7,200 with the next larger one."""
    costs = {name: StepCost(cost, 0.0, 0) for (name, _), cost in zip(CPU_ENCODERS, (9.0, 4.0, 2.0, 1.0), strict=True)}
    for given in ({}, {"num_epochs": 2}):
        taken = open_settings(measure_step=Trials(costs), batch_size=8, **given).taken
        assert (taken.encoder, taken.decoder_channels) == ("tu-mobilenetv3_small_100", (96, 48, 32, 24, 16))
    assert open_settings(num_epochs=2, encoder_weights=None).taken.encoder == CPU_ENCODERS_FROM_NOTHING[-1][0]
    assert open_settings(AMPERE, measure_step=lambda config: STEP, num_epochs=2).taken.encoder == "resnet34"


def test_without_pretrained_weights_a_small_encoder_is_one_that_learns_from_nothing():
    names = {encoder for encoder, _ in (*CPU_ENCODERS, *CPU_ENCODERS_FROM_NOTHING)}
    costs = dict.fromkeys(names, StepCost(0.5, 0.0, 0))
    given = {"measure_step": Trials(costs), "time_budget": "4m"}
    given_up = open_settings(**given, find_weights=lambda encoder: (None, "no network"))
    for taken in (given_up.taken, open_settings(**given, encoder_weights=None).taken):
        assert (taken.encoder, taken.decoder_channels, taken.encoder_weights) == (*CPU_ENCODERS_FROM_NOTHING[-1], None)
    pretrained = open_settings(**given).taken
    assert (pretrained.encoder, pretrained.encoder_weights) == (CPU_ENCODERS[-1][0], "imagenet")
    asked = open_settings(**given, encoder="tu-mobilenetv3_small_050", encoder_weights=None).taken
    assert asked.encoder == "tu-mobilenetv3_small_050"
    wide_enough = (64, 32, 16, 16, 16)
    assert open_settings(**given, decoder_attention="scse").taken.decoder_channels == wide_enough


def test_what_was_spent_before_training_is_not_planned_for():
    costs = dict.fromkeys([encoder for encoder, _ in CPU_ENCODERS], StepCost(0.5, 0.0, 0))
    whole = open_settings(measure_step=Trials(costs), time_budget="10m")
    rest = open_settings(measure_step=Trials(costs), time_budget="10m", seconds_spent=lambda: 540.0)
    assert "in 10 min" in whole["encoder"].reason
    assert "in 60 s" in rest["encoder"].reason
    assert rest["num_epochs"].reason.startswith("960 augmented images are what 60 s allow")
    late = open_settings(measure_step=Trials(costs), time_budget="10m", seconds_spent=lambda: 700.0)
    assert late.taken.num_epochs == 1


@pytest.mark.parametrize(("values", "taken"), [
    ({"warmup_epochs": 300}, {"warmup_epochs": 50.0}),
    ({"batch_parts": 64}, {"batch_parts": 8}),
])  # fmt: skip
def test_what_is_set_and_does_not_go_with_what_is_decided_gives_way_with_a_reason(values, taken):
    settings = open_settings(measure_step=lambda config: StepCost(1e-4, 0.0, 0), **values)
    ((name, value),) = taken.items()
    assert settings.taken.num_epochs == 100
    assert getattr(settings.taken, name) == value
    assert settings[name].reason
    load_config(settings.repeatable_dict())


@pytest.mark.parametrize(("answers", "batch_size", "tried"), [
    ({16: STEP}, 16, [16]),
    ({16: TOO_LARGE, 8: STEP}, 8, [16, 8]),
    ({16: TOO_LARGE, 8: StepCost(0.5, 0.01, 2**34), 4: STEP}, 4, [16, 8, 4]),  # measured, and more than there is
    ({16: TOO_LARGE, 8: TOO_LARGE, 4: TOO_LARGE, 2: STEP}, 2, [16, 8, 4, 2]),
    (dict.fromkeys((16, 8, 4, 2, 1), TOO_LARGE), 1, [16, 8, 4, 2, 1]),
    ({16: None}, 16, [16]),  # it failed for another reason: a smaller batch would fail as well
])  # fmt: skip
def test_a_batch_that_memory_does_not_hold_is_halved(answers, batch_size, tried):
    trials = Trials(answers)
    gpu = dataclasses.replace(AMPERE, free_memory=2**33)
    taken = open_settings(gpu, measure_step=trials).taken
    assert [config.batch_size for config in trials.asked] == tried
    assert taken.batch_size == batch_size
    assert {(one.num_epochs, one.time_budget, one.compile_model) for one in trials.asked} == {(1, None, False)}


@pytest.mark.parametrize(("hardware", "values", "is_tried"), [
    (CPU, {"num_epochs": 3}, True),  # the encoder
    (CPU, {"num_epochs": 3, "encoder": "resnet18"}, False),
    (CPU, {"num_epochs": "auto"}, True),
    (AMPERE, {"num_epochs": 3, "batch_size": 4, "compile_model": False}, False),
    (AMPERE, {"num_epochs": "auto", "batch_size": 4, "compile_model": False}, False),  # a GPU has no limit of its own
    (AMPERE, {"num_epochs": "auto", "batch_size": 4, "compile_model": False, "time_budget": "1h"}, True),
    (AMPERE, {"num_epochs": 3, "batch_size": 4, "compile_model": "auto"}, True),
    (AMPERE, {"num_epochs": 3, "batch_size": "auto", "compile_model": False}, True),
    (APPLE, {"num_epochs": 3, "batch_size": 4, "compile_model": "auto"}, False),  # not compiled in any case
])  # fmt: skip
def test_a_step_is_tried_only_where_something_depends_on_its_cost(hardware, values, is_tried):
    trials = Trials(dict.fromkeys((1, 2, 3, 4, 8, 16), STEP))
    open_settings(hardware, measure_step=trials, **values)
    assert bool(trials.asked) is is_tried


@pytest.mark.parametrize(("hardware", "asked", "chosen", "reason"), [
    (AMPERE, "bfloat16", "bfloat16", "NVIDIA A100 computes in it"),
    (TURING, "bfloat16", "float16", "Tesla T4 has no fast bfloat16, which needs Ampere or newer; float16 instead"),
    (KEPLER, "float16", "float32", "Tesla K80 has no fast float16; float32 instead"),
    (CPU, "bfloat16", "bfloat16", "x86_64 computes in it"),
    (CPU, "float16", "float32", "x86_64 has no fast float16; float32 instead"),
])  # fmt: skip
def test_mixed_precision_takes_what_the_hardware_has_and_says_why(hardware, asked, chosen, reason):
    assert auto_training.choose_number_format(asked, hardware) == (chosen, reason)
    settings = settings_of(hardware, use_amp=True, amp_dtype=asked)
    assert settings.taken.number_format == chosen
    decided = [name for name in ("use_amp", "amp_dtype") if settings[name].source == "decided"]
    expected = [] if chosen == asked else ["use_amp"] if chosen == "float32" else ["amp_dtype"]
    assert decided == expected
    assert [settings[name].reason for name in decided] == [reason] * len(decided)


def in_job(hardware, num_processes):
    return dataclasses.replace(hardware, num_processes=num_processes, num_local_processes=num_processes)


def test_the_learning_rate_follows_the_effective_batch_of_all_processes():
    alone = settings_of(AMPERE, batch_size=16, learning_rate="auto").taken.learning_rate
    four = settings_of(in_job(AMPERE, 4), batch_size=16, learning_rate="auto").taken.learning_rate
    assert four == pytest.approx(2 * alone)  # its square root
    # The factor of the linear rule is applied where the model is built, so that config.yaml runs with any number of processes.
    scaled = settings_of(in_job(AMPERE, 4), batch_size=16, learning_rate="auto", scale_lr=True)
    assert scaled.taken.learning_rate == alone


def test_processes_of_a_machine_share_one_cache():
    num_bytes = 3 * 64 * 64 * (4 + 1)  # three resized images of four channels, and their masks
    hardware = dataclasses.replace(AMPERE, host_memory=8 * num_bytes)
    assert settings_of(in_job(hardware, 4), cache="auto").taken.cache == "ram"


def test_synchronised_batch_norm_is_not_compiled():
    for hardware, is_compiled in ((in_job(AMPERE, 2), False), (AMPERE, True)):  # one process has nothing to synchronise
        assert settings_of(hardware, sync_batchnorm=True, compile_model=True).taken.compile_model is is_compiled


# Settings


def test_the_repeatable_config_has_what_was_taken_but_of_the_machine_what_was_asked_for():
    settings = settings_of(TURING, use_amp=True, amp_dtype="bfloat16", compile_model=True, batch_size=8)
    settings.change("compiling failed", compile_model=False)
    settings.change("out of memory", batch_parts=2)
    repeatable = settings.repeatable()
    assert type(repeatable) is Config
    asked, taken = ("auto", "auto", True, "bfloat16", True, "none"), ("cuda:1", 7, True, "float16", False, "none")
    assert tuple(getattr(repeatable, name) for name in MACHINE_KEYS) == asked
    assert tuple(getattr(settings.taken, name) for name in MACHINE_KEYS) == taken
    assert (repeatable.batch_parts, repeatable.in_channels, repeatable.mask_values) == (2, 4, (0, 255))
    assert settings.repeatable_dict() == as_dict(repeatable)
    assert load_config(settings.repeatable_dict()) == repeatable


def test_what_changes_the_numbers_is_written_as_it_was_chosen():
    """Elsewhere auto may choose otherwise, and a resumed run would not have the same bits."""
    gpu = dataclasses.replace(AMPERE, host_memory=2**34)
    for hardware, chosen in ((gpu, True), (dataclasses.replace(CPU, host_memory=2**34), False)):
        settings = open_settings(hardware, measure_step=lambda config: STEP)
        repeatable = settings.repeatable()
        assert (repeatable.use_amp, repeatable.compile_model) == (chosen, chosen)
        assert (settings.taken.cache, repeatable.cache) == ("ram", "auto")  # it changes no numbers
        assert f"use_amp: {str(chosen).lower()}  # here {str(chosen).lower()}: " in settings.to_yaml("")
    settings.change("compiling failed", compile_model=False)
    assert settings.repeatable().compile_model is False


def test_with_a_time_budget_the_number_of_epochs_stays_open():
    settings = open_settings(measure_step=lambda config: STEP, time_budget="30m")
    repeatable = settings.repeatable()
    assert (repeatable.num_epochs, repeatable.time_budget) == ("auto", "30m")
    assert load_config(settings.repeatable_dict()) == repeatable
    (line,) = [line for line in settings.to_yaml("").splitlines() if line.startswith("num_epochs:")]
    assert line.startswith(f"num_epochs: auto  # here {settings.taken.num_epochs}: ")
    assert "30 min allow" in line
    faster = resolve(repeatable, CPU, DATASET, lambda config: dataclasses.replace(STEP, seconds=0.25), found_weights)
    assert faster.taken.num_epochs == pytest.approx(2 * settings.taken.num_epochs, rel=0.05)
    assert faster.taken.repeats == settings.taken.repeats


@pytest.mark.parametrize("monitor", ["val_iou", "val_dice"])
def test_without_a_class_to_score_in_validation_the_loss_is_monitored(monitor):
    empty = dataclasses.replace(DATASET, has_val_classes=False)
    settings = settings_of(dataset=empty, monitor=monitor)
    assert settings.taken.monitor == "val_loss"
    assert decided(settings)["monitor"] == f"no validation mask has a class to score, so there is no {monitor}"
    assert settings_of(monitor=monitor).taken.monitor == monitor
    assert "monitor" not in decided(settings_of(dataset=empty, monitor="val_loss"))
