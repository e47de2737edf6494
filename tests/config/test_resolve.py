"""What a config leaves open is decided once, with a reason; what it sets is kept; config.yaml repeats the run elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from unet_trainer.config.data_choices import choose_crops_per_image
from unet_trainer.config.dump import as_dict
from unet_trainer.config.facts import DatasetFacts, HardwareFacts
from unet_trainer.config.load import load_config
from unet_trainer.config.resolve import MACHINE_KEYS, Decision, ResolvedConfig, Settings, resolve
from unet_trainer.config.schema import FIELDS, Config
from unet_trainer.config.training_choices import choose_num_workers, choose_number_format, class_weights

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
)
EVERYTHING_SET = {
    "device": "cpu",
    "num_workers": 3,
    "mask_values": [0, 1],
    "in_channels": 1,
    "image_mean": [0.5],
    "image_std": [0.25],
    "crops_per_image": 5,
    "class_weights": [2.0],
    "encoder_weights": "imagenet",
    "encoder_lr_factor": 0.5,
}
FOUND_WEIGHTS = EncoderFacts("imagenet", "on this machine")


def settings_of(hardware=CPU, dataset=DATASET, encoder=FOUND_WEIGHTS, **values):
    return resolve(load_config(values), hardware, dataset, encoder)


# resolve


def test_what_is_left_open_is_decided_with_a_reason():
    settings = settings_of(AMPERE, class_weights="auto", encoder_weights="auto")
    taken = settings.taken
    assert (taken.device, taken.num_workers) == ("cuda", 7)
    assert (taken.in_channels, taken.image_mean, taken.image_std) == (4, DATASET.mean, DATASET.std)
    assert (taken.mask_values, taken.ignore_value) == ((0, 255), None)
    assert (taken.crops_per_image, taken.class_weights) == (1, (4.0,))
    assert (taken.encoder_weights, taken.encoder_lr_factor) == ("imagenet", 0.2)
    decided = {name: decision.reason for name, decision in settings.decisions.items() if decision.source == "decided"}
    assert decided == {
        "device": "NVIDIA A100",
        "num_workers": "8 cores",
        "mask_values": "all masks hold 0 and 255",
        "in_channels": "as the images have",
        "image_mean": "of the training images",
        "image_std": "of the training images",
        "crops_per_image": "fit: resize has no crops",
        "class_weights": "rare classes weigh more",
        "encoder_weights": "on this machine",
        "encoder_lr_factor": "the encoder has pretrained weights",
    }


def test_what_the_config_sets_is_kept():
    settings = settings_of(**EVERYTHING_SET)
    assert as_dict(settings.taken) == as_dict(load_config(EVERYTHING_SET))
    assert {name for name, decision in settings.decisions.items() if decision.source == "decided"} == {"device"}


def test_no_auto_is_left_in_a_resolved_config():
    taken = settings_of(class_weights="auto", fit="crop", encoder_weights="auto").taken
    assert isinstance(taken, ResolvedConfig)
    assert [name for name, value in as_dict(taken).items() if value == "auto"] == []


@pytest.mark.parametrize(
    ("asked", "encoder", "taken", "reason"),
    [
        ({"encoder_weights": None}, None, (None, 1.0), "the encoder's weights are random"),
        ({"encoder_weights": "auto"}, EncoderFacts(None, "no network"), (None, 1.0), "the encoder's weights are random"),
        ({"encoder_weights": "imagenet"}, None, ("imagenet", 0.2), "the encoder has pretrained weights"),
        ({"encoder_weights": "mine.pt"}, None, ("mine.pt", 0.2), "the encoder has pretrained weights"),
        ({"encoder_weights": "auto", "encoder_lr_factor": 1.0}, FOUND_WEIGHTS, ("imagenet", 1.0), ""),
        ({"encoder_weights": "auto"}, EncoderFacts("imagenet", "as the run began", 1.0), ("imagenet", 1.0), "as the run began"),
        ({"encoder_weights": None}, EncoderFacts("imagenet", "as the run began", 0.3), (None, 0.3), "as the run began"),
    ],
)
def test_a_pretrained_encoder_learns_more_slowly_unless_the_run_began_otherwise(asked, encoder, taken, reason):
    settings = settings_of(encoder=encoder, **asked)
    assert (settings.taken.encoder_weights, settings.taken.encoder_lr_factor) == taken
    assert settings.decisions["encoder_lr_factor"].reason == reason


def test_weights_that_auto_found_are_those_of_the_repeated_run():
    settings = settings_of(encoder_weights="auto")
    assert (settings.repeatable().encoder_weights, settings.repeatable().encoder_lr_factor) == ("imagenet", 0.2)
    assert settings.reasons()["encoder_weights"] == "decided: on this machine"


def test_class_weights_that_are_off_stay_off():
    assert settings_of().taken.class_weights is None


def test_device_is_the_one_that_was_chosen():
    assert settings_of(TURING, device="auto").taken.device == "cuda:1"
    assert settings_of(CPU, device="auto").taken.device == "cpu"


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
    assert decisions["num_epochs"] == Decision("default")
    assert decisions["num_workers"] == Decision("decided", "8 cores")  # although the config names it


def test_resolved_config_keeps_the_sources():
    config = load_config({"batch_size": 4}, ["seed=7"])
    assert resolve(config, CPU, DATASET).taken.sources == {"batch_size": "config", "seed": "command line"}


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


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda", "cuda"), ("cuda:3", "cuda"), ("mps", "mps")])
def test_kind_of_hardware_is_the_device_without_its_number(device, kind):
    assert HardwareFacts(device, "", True, True, 1).kind == kind


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
    ("shares", "num_classes", "weights"),
    [
        ([0.5, 0.5], 1, (1.0,)),
        ([0.8, 0.2], 1, (4.0,)),  # 0.5 / 0.2 = 2.5 against 0.5 / 0.8 = 0.625
        ([0.2, 0.8], 1, (0.25,)),
        ([0.999, 0.001], 1, (10.0,)),  # 10 / 0.5005 = 19.98, capped
        ([1.0, 0.0], 1, (1.0,)),  # no foreground
        ([0.0, 0.0], 1, (1.0,)),
        ([0.5, 0.3, 0.2], 3, (0.6, 1.0, 1.5)),
        ([0.9, 0.09, 0.01], 3, (0.1, 1.0, 9.0)),
        ([0.98, 0.0199, 0.0001], 3, (0.1, 1.0, 10.0)),  # 0.0203 and 199 are capped
        ([0.5, 0.5, 0.0], 3, (1.0, 1.0, 1.0)),
        ([0.0, 0.0, 0.0], 3, (1.0, 1.0, 1.0)),
        ([0.7, 0.3], 2, (0.7143, 1.6667)),
    ],
)
def test_rare_classes_weigh_more_within_a_factor_of_ten(shares, num_classes, weights):
    assert class_weights(shares, num_classes) == weights


# Settings


def test_a_change_is_taken_with_its_reason():
    settings = settings_of(batch_size=8)
    settings.change("out of memory", batch_parts=2, on_oom="shrink")
    assert (settings.taken.batch_parts, settings.taken.on_oom) == (2, "shrink")
    assert (settings.taken.batch_size, settings.asked.batch_parts) == (8, 1)
    assert settings.decisions["batch_parts"] == settings.decisions["on_oom"] == Decision("decided", "out of memory")
    assert settings.decisions["batch_size"] == Decision("config")
    assert isinstance(settings.taken, ResolvedConfig)


def test_a_change_of_an_unknown_setting_is_an_error():
    with pytest.raises(TypeError, match="batchparts"):
        settings_of().change("out of memory", batchparts=2)


def test_changes_do_not_reach_the_decisions_that_settings_were_made_from():
    config, decisions = load_config({}), {"seed": Decision("default")}
    settings = Settings(config, settings_of().taken, decisions)
    settings.change("a reason", seed=1)
    assert decisions == {"seed": Decision("default")}


def test_the_repeatable_config_has_what_was_taken_but_of_the_machine_what_was_asked_for():
    settings = settings_of(TURING, use_amp=True, amp_dtype="bfloat16", compile_model=True, batch_size=8)
    settings.change("compiling failed", compile_model=False)
    settings.change("out of memory", batch_parts=2)
    repeatable = settings.repeatable()
    assert type(repeatable) is Config
    asked = ("auto", "auto", True, "bfloat16", True)
    assert tuple(getattr(repeatable, name) for name in MACHINE_KEYS) == asked
    assert tuple(getattr(settings.taken, name) for name in MACHINE_KEYS) == ("cuda:1", 7, True, "float16", False)
    assert (repeatable.batch_parts, repeatable.in_channels, repeatable.mask_values) == (2, 4, (0, 255))
    assert settings.repeatable_dict() == as_dict(repeatable)
    assert load_config(settings.repeatable_dict()) == repeatable


def test_the_repeated_run_on_the_same_hardware_takes_the_same():
    settings = settings_of(TURING, use_amp=True, class_weights="auto", fit="crop", image_size=64)
    again = resolve(settings.repeatable(), TURING, dataclasses.replace(DATASET, class_shares=[0.1, 0.9], channels=3))
    assert as_dict(again.taken) == as_dict(settings.taken)


def test_reasons_are_given_for_what_was_decided():
    settings = settings_of(TURING, use_amp=True, compile_model=True, num_workers=2)
    settings.change("compiling failed", compile_model=False)
    settings.change("out of memory", batch_parts=2)
    reasons = settings.reasons()
    assert reasons["device"] == "here cuda:1: Tesla T4"
    assert reasons["amp_dtype"].startswith("here float16: Tesla T4 has no bfloat16")
    assert reasons["compile_model"] == "here false: compiling failed"
    assert reasons["batch_parts"] == "decided: out of memory"
    assert reasons["image_mean"] == "decided: of the training images"
    assert reasons.keys().isdisjoint({"use_amp", "num_workers", "batch_size", "seed"})


def test_config_yaml_keeps_what_was_asked_of_the_machine_and_says_what_was_taken():
    settings = settings_of(CPU, use_amp=True, amp_dtype="float16")
    settings.change("out of memory", batch_parts=2)
    text = settings.to_yaml("Settings of this run", run_name="mine", resume=None)
    assert text.startswith("# Settings of this run\n")
    lines = text.splitlines()
    assert "use_amp: true  # here false: float16 is far slower than float32 on a CPU; float32 instead" in lines
    assert "num_workers: auto  # here 4: 8 cores" in lines
    assert "device: auto  # here cpu: x86_64" in lines
    assert "batch_parts: 2  # decided: out of memory" in lines
    assert "mask_values: [0, 255]  # decided: all masks hold 0 and 255" in lines
    assert f"seed: 42  # {FIELDS['seed'].metadata['doc']}" in lines
    assert f"run_name: mine  # {FIELDS['run_name'].metadata['doc']}" in lines


def test_config_yaml_runs_again(tmp_path):
    settings = settings_of(TURING, use_amp=True, class_weights="auto", run_name="first", resume="auto")
    file = tmp_path / "config.yaml"
    file.write_text(settings.to_yaml("", run_name="second", resume=None), encoding="utf-8")
    assert load_config(file) == dataclasses.replace(settings.repeatable(), run_name="second", resume=None)
    assert settings.taken.run_name == "first"


def test_decisions_as_plain_values():
    settings = settings_of(batch_size=4)
    plain = settings.decisions_dict()
    assert list(plain) == list(FIELDS)
    assert plain["batch_size"] == ["config", ""]
    assert plain["seed"] == ["default", ""]
    assert plain["num_workers"] == ["decided", "8 cores"]
