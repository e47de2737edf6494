"""Files, dicts and overrides become a Config, or one message with every problem: its key, its value and the fix."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from helpers.project import ROOT
from unet_trainer.config.dump import as_dict, to_yaml
from unet_trainer.config.errors import ConfigError, UserError
from unet_trainer.config.load import OTHER_TOOLS_NAMES, load_config
from unet_trainer.config.safe_yaml import MAX_BYTES
from unet_trainer.config.schema import ARCHITECTURES, FIELDS, LOSSES, Config


def problems(source, overrides=()):
    """The problem lines of the one message that a source is refused with."""
    with pytest.raises(ConfigError) as raised:
        load_config(source, overrides)
    headline, *lines = str(raised.value).split("\n")
    assert headline.startswith(f"{len(lines)} problem{'s' if len(lines) > 1 else ''} in ")
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


def text_problems(load_text, text):
    with pytest.raises(ConfigError) as raised:
        load_text(text)
    return [line[2:] for line in str(raised.value).split("\n")[1:]]


# Values from YAML


@pytest.mark.parametrize(("written", "value"), [("1e-3", 0.001), ("3E-4", 0.0003), (".5", 0.5), ("1", 1.0), ("'2e-3'", 0.002)])
def test_number_is_read_however_it_is_written(load_text, written, value):
    rate = load_text(f"learning_rate: {written}").learning_rate
    assert rate == value
    assert type(rate) is float


@pytest.mark.parametrize(("written", "value"), [("16", 16), ("16.0", 16), ("1.6e1", 16), ("0016", 16)])
def test_whole_number_is_an_int_however_it_is_written(load_text, written, value):
    batch_size = load_text(f"batch_size: {written}").batch_size
    assert batch_size == value
    assert type(batch_size) is int


@pytest.mark.parametrize("name", ["no", "on", "yes", "off", "true", "007", "1e3", "12:30", "2024-01-01", "null", "~x", "é 😀"])
def test_text_key_keeps_the_text(load_text, name):
    assert load_text(f"run_name: {name}").run_name == name


@pytest.mark.parametrize(
    ("written", "value"),
    [("yes", True), ("no", False), ("on", True), ("off", False), ("true", True), ("False", False), ("'yes'", True), ("NO", False)],
)
def test_boolean_key_takes_all_yaml_booleans(load_text, written, value):
    assert load_text(f"use_amp: {written}").use_amp is value


@pytest.mark.parametrize("written", ["null", "~", "", "Null"])
def test_null_is_none_for_a_key_that_may_be_none(load_text, written):
    assert load_text(f"grad_clip: {written}").grad_clip is None


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "\ufeff", "\ufeff# with a byte order mark\n", "{}"])
def test_empty_file_is_the_defaults(load_text, text):
    assert load_text(text) == Config()


def test_byte_order_mark_is_not_part_of_the_first_key(load_text):
    assert load_text("\ufeffbatch_size: 3\r\nseed: 1\r\n") == Config(batch_size=3, seed=1)


def test_lists_and_mappings_are_read_with_their_types(load_text):
    config = load_text(
        "image_size: [64, 96]\n"
        "num_classes: 3\n"
        "class_names: [no, on, 007]\n"
        "class_weights: [1, 1e-1, .5]\n"
        "mask_values: [0, 128, 255]\n"
        "loss: {dice: 1, cross_entropy: 5e-1}\n"
        "augmentation:\n"
        "  - HorizontalFlip\n"
        "  - Affine: {rotate: [-15, 1e1], fill: '0'}\n"
    )
    assert config == Config(
        image_size=(64, 96),
        num_classes=3,
        class_names=("no", "on", "007"),
        class_weights=(1.0, 0.1, 0.5),
        mask_values=(0, 128, 255),
        loss={"dice": 1.0, "cross_entropy": 0.5},
        augmentation=("HorizontalFlip", {"Affine": {"rotate": [-15, 10.0], "fill": "0"}}),
    )


# Unknown keys


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lr", "the name here is learning_rate"),
        ("epochs", "the name here is num_epochs"),
        ("batch", "the name here is batch_size"),
        ("imgsz", "the name here is image_size"),
        ("patience", "the name here is early_stopping_patience"),
        ("workers", "the name here is num_workers"),
        ("amp", "the name here is use_amp"),
        ("bf16", "the name here is use_amp and amp_dtype"),
        ("precision", "the name here is amp_dtype"),
        ("precison", "did you mean amp_dtype?"),
        ("batch-size", "did you mean batch_size?"),
        ("Batch_Size", "did you mean batch_size?"),
        ("learning_rat", "did you mean learning_rate?"),
        ("epoch", "did you mean num_epochs?"),
        ("colour", "configs/default.yaml lists every key"),
        ("", "configs/default.yaml lists every key"),
    ],
)
def test_unknown_key_is_answered_with_the_right_one(name, answer):
    assert problems({name: 1}) == [f"{name}: unknown key; {answer}"]


def test_names_of_other_tools_lead_to_keys_that_exist():
    for other, ours in OTHER_TOOLS_NAMES.items():
        assert other not in FIELDS
        assert set(ours.split(" and ")) <= set(FIELDS), other


def test_unprintable_key_is_shown_in_printable_form():
    assert problems({"a\nb\x1b[31m": 1}) == [r"'a\nb\x1b[31m': unknown key; configs/default.yaml lists every key"]


def test_key_that_is_not_text_is_an_unknown_key():
    assert problems({1: 2}) == ["1: unknown key; configs/default.yaml lists every key"]


# Wrong types and values out of range


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("learning_rate", "fast", "got 'fast'; need a positive number, e.g. 1e-3, or auto"),
        ("learning_rate", 0, "got 0; need a positive number, e.g. 1e-3, or auto"),
        ("learning_rate", -1e-3, "got -0.001; need a positive number, e.g. 1e-3, or auto"),
        ("learning_rate", float("nan"), "got nan; need a positive number, e.g. 1e-3, or auto"),
        ("learning_rate", None, "got null; need a positive number, e.g. 1e-3, or auto"),
        pytest.param("learning_rate", 10**400, f"got 1{'0' * 58}…; need a positive number, e.g. 1e-3, or auto", id="huge"),
        ("batch_size", 0, "got 0; need a whole number from 1 to 65536, e.g. 8, or auto"),
        ("batch_size", 2.5, "got 2.5; need a whole number from 1 to 65536, e.g. 8, or auto"),
        ("batch_size", "16 images", "got '16 images'; need a whole number from 1 to 65536, e.g. 8, or auto"),
        ("batch_size", [8], "got [8]; need a whole number from 1 to 65536, e.g. 8, or auto"),
        ("batch_size", True, "got True; need a whole number from 1 to 65536, e.g. 8, or auto"),
        ("seed", False, "got False; need a whole number from 0 to 2147483648, e.g. 42"),
        ("num_classes", 255, "got 255; need a whole number from 1 to 254, e.g. 1, or auto"),
        ("val_fraction", 1, "got 1; need a number above 0 and below 1, e.g. 0.2"),
        ("weight_decay", -1, "got -1; need a number at least 0, e.g. 1e-4, or auto"),
        ("grad_clip", 0, "got 0; need a positive number, e.g. 1.0, or null"),
        ("ema_decay", 1.0, "got 1.0; need a number above 0 and below 1, e.g. 0.999, or auto, or null"),
        ("use_amp", 1, "got 1; need true or false, or auto"),
        ("use_amp", "maybe", "got 'maybe'; need true or false, or auto"),
        ("amp_dtype", "bf16", "got 'bf16'; need one of bfloat16, float16; did you mean bfloat16?"),
        ("amp_dtype", "fp16", "got 'fp16'; need one of bfloat16, float16; did you mean float16?"),
        ("optimizer", "adamW", "got 'adamW'; need one of adamw, adam, sgd; did you mean adamw?"),
        ("scheduler", "step", "got 'step'; need one of cosine, poly, plateau, constant"),
        ("architecture", "unet++", f"got 'unet++'; need one of {', '.join(ARCHITECTURES)}; did you mean unet?"),
        ("num_workers", "many", "got 'many'; need auto, or a whole number from 0 to 512, e.g. 4"),
        ("image_size", "big", "got 'big'; need a whole number from 32 to 8192, e.g. 512, or a list, e.g. [512, 768], or auto"),
        (
            "image_size",
            [64, 64, 64],
            "got [64, 64, 64]; need a whole number from 32 to 8192, e.g. 512, or a list of 2 values, e.g. [512, 768], or auto",
        ),
        ("decoder_channels", [64, 32], "got [64, 32]; need a list of 5 values, e.g. [256, 128, 64, 32, 16], or null"),
        ("loss", "dcie", f"got 'dcie'; need one of {', '.join(LOSSES)}; did you mean dice?"),
        ("loss", [], "got []; need a loss or a weighted sum, e.g. {dice: 1, bce: 1}, or auto"),
        ("loss", {"dice": -1}, "got {'dice': -1}; need a positive number, e.g. 1, or auto"),
        ("data_dir", "", "got ''; need text, e.g. data/mine"),
        ("data_dir", b"data", "got b'data'; need text, e.g. data/mine"),
        ("run_name", "a\ud800", r"got 'a\ud800'; need text, e.g. run"),
        ("mask_suffix", 3, "got 3; need text, e.g. _mask"),
        ("augmentation", "stronk", "got 'stronk'; need one of auto, none, default, strong; did you mean strong?"),
        (
            "augmentation",
            "Affine",
            "got 'Affine'; need one of auto, none, default, strong, or a list such as [HorizontalFlip, {Affine: {rotate: [-15, 15]}}]",
        ),
        ("split_file", 3, "got 3; need text, e.g. split.csv, or null"),
        (
            "group_pattern",
            "(p",
            r"got '(p'; need a regular expression, e.g. '(patient\d+)_' (missing ), unterminated subpattern at position 0), or null",
        ),
        ("group_pattern", "", r"got ''; need a regular expression, e.g. '(patient\d+)_', or null"),
        ("num_folds", 1, "got 1; need a whole number from 2 to 1000, e.g. 5, or null"),
        ("fold", -1, "got -1; need a whole number of at least 0, e.g. 0"),
        ("image_size", 31, "got 31; need a whole number from 32 to 8192, e.g. 512, or a list, e.g. [512, 768], or auto"),
        ("fit", "corp", "got 'corp'; need one of auto, resize, crop; did you mean crop?"),
        ("crops_per_image", 0, "got 0; need auto, or a whole number from 1 to 10000, e.g. 4"),
        ("rare_class_crops", 1.1, "got 1.1; need a number at least 0 and at most 1, e.g. 0.33"),
        ("resize_masks", "perhaps", "got 'perhaps'; need true or false"),
        ("in_channels", 65, "got 65; need auto, or a whole number from 1 to 64, e.g. 3"),
        ("image_mean", 0.5, "got 0.5; need auto, or a list, e.g. [123.7, 116.3, 103.5]"),
        (
            "image_std",
            [1, 0],
            "got [1, 0]; need auto, or a list, e.g. [58.4, 57.1, 57.4]; in it: need a positive number, e.g. 58.4",
        ),
        ("monitor", "val_acc", "got 'val_acc'; need one of val_iou, val_dice, val_loss"),
        ("monitor", "train_iou", "got 'train_iou'; need one of val_iou, val_dice, val_loss"),
    ],
)
def test_wrong_value_is_answered_with_key_value_and_fix(name, value, answer):
    (line,) = problems({name: value})
    assert line == f"{name}: {answer}"


def test_long_value_is_cut_in_the_message():
    (line,) = problems({"learning_rate": "x" * 100_000})
    assert line == f"learning_rate: got '{'x' * 58}…; need a positive number, e.g. 1e-3, or auto"
    (line,) = problems({"learning_rate": 10**5000})  # more digits than Python prints
    assert line == "learning_rate: got a number of thousands of digits; need a positive number, e.g. 1e-3, or auto"


# Contradictions


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        (
            {"use_amp": True, "amp_dtype": "float16", "device": "cpu"},
            "amp_dtype: float16 does not go with device: cpu; use bfloat16, or use_amp: false, which is faster there",
        ),
        ({"warmup_epochs": 5, "num_epochs": 5}, "warmup_epochs: 5 leaves nothing of num_epochs: 5; need fewer"),
        (
            {"early_stopping_patience": 5, "num_epochs": 5},
            "early_stopping_patience: 5 can never be reached in num_epochs: 5; need fewer, or null",
        ),
        ({"num_classes": 3, "class_weights": [1, 2]}, "class_weights: got 2 values; need 3, one for each of num_classes"),
        ({"num_classes": 1, "class_weights": [1, 2]}, "class_weights: got 2 values; need 1, one for each of num_classes"),
        ({"num_classes": 3, "class_names": ["a"]}, "class_names: got 1 names; need 3, one for each of num_classes"),
        ({"num_classes": 3, "mask_values": [0, 255]}, "mask_values: got [0, 255]; need 3 different values, one a class"),
        ({"num_classes": 1, "mask_values": [0, 1, 2]}, "mask_values: got [0, 1, 2]; need 2 different values, background first"),
        ({"mask_values": [7, 7]}, "mask_values: got [7, 7]; need 2 different values, background first"),
        (
            {"mask_values": [0, 255], "ignore_value": 255},
            "ignore_value: 255 is also in mask_values; need another, or null",
        ),
        ({"mask_values": [0, [1, 0]]}, "mask_values: got [0, [1, 0]]; need 2 different values, background first"),
        ({"mask_values": [0, 5, [5, 5, 5]]}, "mask_values: got [0, 5, [5, 5, 5]]; need 3 different values, one a class"),
        (
            {"class_names": ["a", "b", "c"], "mask_values": [0, 255]},
            "mask_values: got [0, 255]; need 3 different values, one a class",
        ),
        (
            {"class_names": ["a", "b", "c"], "class_weights": [1, 2]},
            "class_weights: got 2 values; need 3, one for each of class_names",
        ),
        (
            {"class_names": ["a", "b", "c"], "mask_values": "nonzero"},
            "mask_values: nonzero tells two classes apart, class_names: 3 needs a value for each",
        ),
        ({"mask_values": [0, 1, 2], "loss": "bce"}, "loss: bce is for num_classes: 1; with 3 classes use cross_entropy"),
        (
            {"mask_values": [0, [1, 2]], "ignore_value": [9, 2]},
            "ignore_value: 2 is also in mask_values; need another, or null",
        ),
        (
            {"mask_values": [0, 255], "ignore_value": [[0, 0, 0], [9, 8, 7]]},
            "ignore_value: 0 is also in mask_values; need another, or null",
        ),
        (
            {"num_classes": 3, "ignore_value": [9, 2]},
            "ignore_value: 2 is the id of a class (num_classes: 3); set mask_values to the values of the classes",
        ),
        (
            {"num_classes": 3, "ignore_value": 2},
            "ignore_value: 2 is the id of a class (num_classes: 3); set mask_values to the values of the classes",
        ),
        (
            {"num_classes": 1, "ignore_value": 1},
            "ignore_value: 1 is the id of a class (num_classes: 1); set mask_values to the values of the classes",
        ),
        ({"num_classes": 3, "loss": "bce"}, "loss: bce is for num_classes: 1; with 3 classes use cross_entropy"),
        ({"fold": 1}, "fold: got 1; need num_folds to be set"),
        ({"num_folds": 5, "fold": 5}, "fold: got 5; need 0 to 4"),
        (
            {"split": "blocks", "group_pattern": "(a)"},
            "split: blocks divides a sequence, group_pattern keeps it together; leave one of them out",
        ),
        (
            {"architecture": "fpn", "decoder_channels": [64, 32, 16, 8, 8]},
            "decoder_channels: not for architecture: fpn; only for unet, unetplusplus, manet",
        ),
        (
            {"batch_parts": 9, "batch_size": 8},
            "batch_parts: 9 is more than batch_size: 8; need at most that",
        ),
        (
            {"num_classes": 3, "mask_values": "nonzero"},
            "mask_values: nonzero tells two classes apart, num_classes: 3 needs a value for each",
        ),
        (
            {"time_budget": "10m", "num_epochs": 5},
            "time_budget: 10m decides the number of epochs, and num_epochs: 5 is set; "
            "leave one of them out (time_budget: null or num_epochs: auto)",
        ),
        (
            {"architecture": "fpn", "decoder_attention": "scse"},
            "decoder_attention: scse is for unet and unetplusplus, not for architecture: fpn; use none",
        ),
        (
            {"decoder_attention": "scse", "decoder_channels": [64, 32, 16, 16, 8]},
            "decoder_attention: scse needs decoder_channels of at least 16; got [64, 32, 16, 16, 8]",
        ),
        (
            {"architecture": "unetplusplus", "deep_supervision": 0.5},
            "deep_supervision: got 0.5; need 0 with architecture: unetplusplus, it is for unet",
        ),
        ({"device": "gpu"}, "device: got 'gpu'; need auto, cpu, cuda, cuda:N or mps"),
        ({"device": "cuda:10000"}, "device: got 'cuda:10000'; need auto, cpu, cuda, cuda:N or mps"),
        ({"device": "cuda:x"}, "device: got 'cuda:x'; need auto, cpu, cuda, cuda:N or mps"),
        ({"device": "cuda:٣"}, "device: got 'cuda:٣'; need auto, cpu, cuda, cuda:N or mps"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, answer):
    assert problems(settings) == [answer]


@pytest.mark.parametrize(
    "settings",
    [
        {"use_amp": False, "amp_dtype": "float16", "device": "cpu"},
        {"use_amp": True, "amp_dtype": "float16", "device": "cuda:0"},
        {"use_amp": True, "amp_dtype": "bfloat16", "device": "cpu"},
        {"warmup_epochs": 4.5, "num_epochs": 5},
        {"early_stopping_patience": 4, "num_epochs": 5},
        {"num_classes": 3, "class_weights": [1, 2, 3], "class_names": ["a", "b", "c"], "mask_values": [2, 0, 1]},
        {"num_classes": 3, "ignore_value": 3},
        {"ignore_value": 11},  # how many classes there are is seen in the masks
        {"mask_values": [0, [1, 2], [[64, 0, 128], [64, 0, 192]]], "ignore_value": [255, 11], "unknown_values": "ignore"},
        {"mask_values": [0, 1], "class_names": ["road"]},
        {"mask_values": [0, 1], "class_names": ["field", "road"]},
        {"class_names": ["a", "b", "c"], "class_weights": [1, 2, 3]},
        {"mask_values": [0, 128, 255], "class_weights": [1, 2, 3], "mask_tolerance": 40},
        {"num_classes": 1, "ignore_value": 2},
        {"mask_values": [0, 255], "ignore_value": 1},
        {"num_classes": 1, "loss": "bce"},
        {"num_classes": 3, "loss": "cross_entropy"},
        {"image_size": 32},
        {"image_size": [8192, 32]},
        {"image_size": 100},
        {"image_size": [33, 511]},
        {"num_folds": 5, "fold": 4},
        {"num_folds": None, "fold": 0},
        {"fit": "crop", "crops_per_image": 10_000, "rare_class_crops": 1.0},
        {"rare_class_crops": 0.0},
        {"in_channels": 64, "image_mean": [-0.5], "image_std": [1e-3]},
        {"split_file": "split.csv", "group_pattern": r"^(p\d+)[_-]", "resize_masks": True},
        {"architecture": "manet", "decoder_channels": [64, 32, 16, 8, 8]},
        {"run_name": "a" * 200},
        {"run_name": "a.b-c d"},
        {"device": "mps"},
        {"batch_parts": 8, "batch_size": 8},
        {"num_classes": 2, "mask_values": "above 127"},
        {"time_budget": "10m", "num_epochs": "auto"},
        {"time_budget": None, "num_epochs": 5},
        {"early_stopping_patience": 99, "warmup_epochs": 99, "num_epochs": "auto"},
        {"early_stopping_patience": "auto", "warmup_epochs": "auto", "num_epochs": 1},
        {"batch_parts": 9, "batch_size": "auto"},
        {"num_classes": 3, "class_weights": "auto", "loss": "auto"},
        {"architecture": "fpn", "decoder_attention": "auto", "deep_supervision": "auto"},
        {"architecture": "fpn", "decoder_attention": "none", "deep_supervision": 0.0},
        {"architecture": "unetplusplus", "decoder_attention": "scse"},
        {"decoder_attention": "scse", "decoder_channels": [16, 16, 16, 16, 16]},
        {"decoder_attention": "auto", "decoder_channels": [8, 8, 8, 8, 8]},
        {"use_amp": "auto", "amp_dtype": "float16", "device": "cpu"},
    ],
)
def test_settings_just_inside_the_limits_are_taken(settings):
    config = as_dict(load_config(settings))
    assert {name: config[name] for name in settings if name != "loss"} == {n: v for n, v in settings.items() if n != "loss"}


@pytest.mark.parametrize("name", ["a/b", "/", "a\\b", "..", " . ", "a\nb", "a" * 201, "é" * 101])
def test_run_name_that_cannot_be_a_folder_name_is_refused(name):
    (line,) = problems({"run_name": name})
    assert line.startswith("run_name: got '")
    assert line.endswith("; need a plain name without slashes (checkpoint_dir says where), not longer than 200 bytes")
    assert line.isprintable()


def test_key_with_a_problem_of_its_own_is_left_out_of_contradictions():
    assert problems({"num_epochs": "few", "warmup_epochs": 99}) == [
        "num_epochs: got 'few'; need a whole number from 1 to 1000000, e.g. 50, or auto"
    ]


# All at once


def test_all_problems_come_in_one_message_in_the_order_of_the_file(load_text, tmp_path):
    with pytest.raises(ConfigError) as raised:
        load_text(
            "lr: 1e-3\n"
            "batch_size: none\n"
            "seed: 1\n"
            "seed: 2\n"
            "use_amp: perhaps\n"
            "monitor: val_acc\n"
            "num_classes: 3\n"
            "loss: bce\n"
            "num_epochs: 50\n"
            "warmup_epochs: 60\n",
            ["epochs=3", "grad_clip", "amp_dtype=bf16"],
        )
    assert str(raised.value) == (
        f"10 problems in {tmp_path / 'mine.yaml'}:\n"
        "  line 4: 'seed' is given twice; keep one\n"
        "  'grad_clip': need key=value, e.g. batch_size=16\n"
        "  lr: unknown key; the name here is learning_rate\n"
        "  batch_size: got 'none'; need a whole number from 1 to 65536, e.g. 8, or auto\n"
        "  use_amp: got 'perhaps'; need true or false, or auto\n"
        "  monitor: got 'val_acc'; need one of val_iou, val_dice, val_loss\n"
        "  epochs: unknown key; the name here is num_epochs\n"
        "  amp_dtype: got 'bf16'; need one of bfloat16, float16; did you mean bfloat16?\n"
        "  warmup_epochs: 60 leaves nothing of num_epochs: 50; need fewer\n"
        "  loss: bce is for num_classes: 1; with 3 classes use cross_entropy"
    )


def test_every_key_can_be_wrong_at_once():
    lines = problems({name: object() for name in FIELDS})
    assert [line.partition(":")[0] for line in lines] == list(FIELDS)
    assert all("; need " in line for line in lines)


def test_config_error_is_a_user_error_and_a_value_error():
    assert issubclass(ConfigError, UserError)
    assert issubclass(UserError, ValueError)


# Files that are not a config


def test_duplicate_key_is_refused_with_its_line(load_text):
    assert text_problems(load_text, "batch_size: 4\nseed: 1\nbatch_size: 8\n") == ["line 3: 'batch_size' is given twice; keep one"]


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (b"\xff\xfe\x00", "not UTF-8 text; need a YAML file"),
        (b"\x89PNG\r\n\x1a\n", "not UTF-8 text; need a YAML file"),
        (b"batch_size 4", "got 'batch_size 4'; need lines of the form key: value"),
        (b"- batch_size: 4", "got [{'batch_size': '4'}]; need lines of the form key: value"),
        (b"batch_size: 4\n---\nseed: 1", "line 2: a second document (---); need one"),
        (b"batch_size: [4", "line 1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        pytest.param(b"x" * (MAX_BYTES + 1), "more than 256 KiB; a config is far smaller", id="large"),
    ],
)
def test_file_that_is_not_a_config_is_refused(load_text, content, answer):
    assert text_problems(load_text, content) == [answer]


def test_large_file_is_refused_and_not_truncated(load_text):
    # Shorter than the limit in characters, longer in bytes.
    content = "# " + "é" * (MAX_BYTES // 2) + "\nbatch_size: wrong\n"
    assert len(content) < MAX_BYTES
    assert text_problems(load_text, content) == ["more than 256 KiB; a config is far smaller"]


def test_missing_file_names_the_nearest():
    path = ROOT / "configs" / "fsat.yaml"
    assert problems(path) == [f"no such file; did you mean {ROOT / 'configs' / 'fast.yaml'}?"]


@pytest.mark.parametrize("name", ["fast", "fsat.yaml", "Fast.yml"])
def test_missing_file_is_looked_for_among_the_presets(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert problems(name) == ["no such file; did you mean configs/fast.yaml?"]


def test_missing_file_without_a_similar_name_lists_those_that_exist(tmp_path):
    (tmp_path / "one.yaml").touch()
    (tmp_path / "two.yml").touch()
    there = f"{tmp_path / 'one.yaml'}, {tmp_path / 'two.yml'}"
    assert problems(tmp_path / ("q" * 200)) == [f"no such file; there are {there}"]


def test_overrides_are_not_checked_against_the_defaults_when_the_file_is_missing(tmp_path):
    # With the default of 50 epochs a warm-up of 60 is wrong; the missing file may say 100.
    lines = problems(tmp_path / "lost.yaml", ["warmup_epochs=60", "lr=1"])
    assert [line.partition(":")[0].partition(";")[0] for line in lines] == ["no such file", "lr"]


def test_folder_is_answered_with_the_ways_to_use_it(tmp_path):
    assert problems(tmp_path) == [
        f"{tmp_path} is a folder; need a YAML file (to train on it: data_dir={tmp_path}; to go on with a run: --resume {tmp_path})"
    ]


def test_impossible_file_name_is_answered(tmp_path):
    assert problems(tmp_path / ("a" * 300)) == ["cannot be read: File name too long"]
    assert problems("a\0b") == ["cannot be read: embedded null byte"]
    (tmp_path / "file").touch()
    assert problems(tmp_path / "file" / "x.yaml") == ["cannot be read: Not a directory"]


# Overrides


def test_overrides_win_over_the_file(load_text):
    config = load_text("batch_size: 4\nseed: 1\n", ["batch_size=16", "learning_rate=1e-4"])
    assert config == Config(batch_size=16, seed=1, learning_rate=1e-4)


def test_a_key_that_is_given_twice_on_the_command_line_is_an_error(load_text):
    with pytest.raises(ConfigError, match=r"batch_size: given twice, '16' and '32'; leave one of them out"):
        load_text("batch_size: 4\n", ["batch_size=16", "learning_rate=1e-4", "batch_size=32"])


def test_the_upper_limit_of_the_seed_is_named(load_text):
    assert load_text("seed: 2147483648\n").seed == 2**31
    with pytest.raises(ConfigError, match=r"seed: got '2147483649'; need a whole number from 0 to 2147483648, e\.g\. 42"):
        load_text("seed: 2147483649\n")


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("loss={dice: 1, bce: 1}", "loss", {"dice": 1.0, "bce": 1.0}),
        ("loss=dice", "loss", {"dice": 1.0}),
        ("augmentation=[HorizontalFlip]", "augmentation", ("HorizontalFlip",)),
        ("augmentation=[{Affine: {rotate: [-5, 5]}}]", "augmentation", ({"Affine": {"rotate": [-5, 5]}},)),
        ("class_weights=null", "class_weights", None),
        ("class_weights=", "class_weights", None),
        ("class_weights=[2.5]", "class_weights", (2.5,)),
        ("image_size=[64, 96]", "image_size", (64, 96)),
        ("mask_suffix=", "mask_suffix", ""),
        ("run_name=no", "run_name", "no"),
        ("run_name='007'", "run_name", "007"),
        ('run_name="a: b"', "run_name", "a: b"),
        ("run_name=a=b", "run_name", "a=b"),
        ("run_name=a: b # c", "run_name", "a: b # c"),
        (" batch_size =16", "batch_size", 16),
        ("use_amp=on", "use_amp", True),
        ("resume=auto", "resume", "auto"),
    ],
)
def test_override_is_read_like_a_line_of_the_file(override, name, value):
    assert getattr(load_config({}, [override]), name) == value


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("batch_size", "'batch_size': need key=value, e.g. batch_size=16"),
        ("=3", "'=3': need key=value, e.g. batch_size=16"),
        ("", "'': need key=value, e.g. batch_size=16"),
        ("batch_size=", "batch_size: got ''; need a whole number from 1 to 65536, e.g. 8, or auto"),
        ("run_name=", "run_name: got ''; need text, e.g. run"),
        ("lr=1", "lr: unknown key; the name here is learning_rate"),
        ("loss={dice: 1", "loss: got '{dice: 1'; line 1: not valid YAML: expected ',' or '}', but got '<stream end>'"),
        ("loss={dice: 1, dice: 2}", "loss: got '{dice: 1, dice: 2}'; line 1: 'dice' is given twice; keep one"),
        ("class_weights=[!!float 1]", "tags are not allowed, write the plain value"),
        pytest.param("class_names=" + "[" * 1000, "…; line 1: nested deeper than 12 levels", id="deep"),
    ],
)
def test_malformed_override_is_answered(override, answer):
    (line,) = problems({}, [override])
    assert line.endswith(answer)


def test_overrides_from_python_are_a_dict():
    assert load_config({"batch_size": 4}, {"batch_size": 2, "use_amp": True}) == Config(batch_size=2, use_amp=True)
    assert problems({}, {"lr": 1}) == ["lr: unknown key; the name here is learning_rate"]


# From Python


def test_dict_with_numpy_scalars_and_paths_becomes_plain_python(load_text):
    config = load_config(
        {
            "batch_size": np.int64(4),
            "num_epochs": np.float32(10),
            "learning_rate": np.float64(0.5),
            "use_amp": np.bool_(True),
            "class_weights": np.array([2.5]),
            "image_size": np.array([64, 96]),
            "mask_values": (np.uint8(0), np.uint8(255)),
            "data_dir": Path("data") / "mine",
            "augmentation": [{"Affine": {"rotate": np.float64(5)}}],
        }
    )
    assert config == Config(
        batch_size=4,
        num_epochs=10,
        learning_rate=0.5,
        use_amp=True,
        class_weights=(2.5,),
        image_size=(64, 96),
        mask_values=(0, 255),
        data_dir="data/mine",
        augmentation=({"Affine": {"rotate": 5.0}},),
    )
    assert [type(value) for value in (config.batch_size, config.num_epochs, config.learning_rate, config.use_amp)] == [
        int,
        int,
        float,
        bool,
    ]
    assert load_text(to_yaml(config, "")) == config


def test_source_of_another_kind_is_a_type_error():
    with pytest.raises(TypeError, match="a config is a Config, a dict or a path to a YAML file, not list"):
        load_config(["batch_size=4"])


def test_config_instance_is_taken_and_checked_again():
    config = Config(batch_size=4, image_size=(64, 96), loss={"dice": 2.0})
    assert load_config(config) == config
    assert load_config(config, ["batch_size=2"]) == dataclasses.replace(config, batch_size=2)
    assert problems(Config(batch_size=0)) == ["batch_size: got 0; need a whole number from 1 to 65536, e.g. 8, or auto"]


# Fuzz

SPECIALS = [
    *"[]{}:,#&*!|>'\"%@`-?~\\\t\r\n\0 =<", "---\n", "...\n", "<<: ", "&a ", "*a ", "!!python/object/apply:os.system ", "!!int ",
    "? ", ": ", "- ", "\n  ", "\x85", "\u2028", "\ufeff", "😀", "\u202e", "٣", "\x07", "\x1b[2J", r'"\U00110000"', r'"\ud800"',
    "%YAML 1.1\n",
]  # fmt: skip
SPLICED = [
    "null", "~", "yes", "off", "1e-3", ".inf", "-.inf", ".nan", "0", "-1", "9" * 400, "1e400", "[]", "{}", "[1, 2]", "{a: 1}", "''",
    "'no'", r'"\x00"', r'"\uD800"', r'"\UFFFFFFFF"', "[[[[", "[" * 50 + "]" * 50, "*a", "&a x", "&a [*a]", "!!float 1", "|\n  x",
    "auto", "cpu", "007", "a b", "[HorizontalFlip, {Affine: {rotate: [-15, '1e3', nULL]}}]", "{dice: 1, bce: 0.5}", "[64, 96]",
    "fpn", "../x", "x" * 300,
]  # fmt: skip


def mutate(rng, content, contents):
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        lines = content.split(b"\n")
        line, at = rng.randrange(len(lines)), rng.randrange(len(content) + 1)
        how = rng.randrange(8)
        if how == 0 and at < len(content):  # a bit flipped
            content[at] ^= 1 << rng.randrange(8)
        elif how == 1:  # some bytes lost
            del content[at : at + rng.choice([1, 2, 5, 30])]
        elif how == 2:  # some bytes of noise
            content[at:at] = rng.randbytes(rng.choice([1, 2, 4]))
        elif how == 3:  # a line doubled somewhere else
            lines.insert(rng.randrange(len(lines) + 1), lines[line])
            content = bytearray(b"\n".join(lines))
        elif how == 4:  # another value for a key
            lines[line] = lines[line].partition(b":")[0] + b": " + rng.choice(SPLICED).encode()
            content = bytearray(b"\n".join(lines))
        elif how == 5:
            content[at:at] = rng.choice(SPECIALS).encode()
        elif how == 6:  # any letters of Unicode, rare planes included
            letters = [rng.choice([rng.randrange(0x250), rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)]) for _ in range(3)]
            content[at:at] = "".join(map(chr, letters)).encode()
        elif how == 7:  # a piece of another file
            other = rng.choice(contents)
            start = rng.randrange(len(other))
            content[at:at] = other[start : start + rng.randrange(60)]
    return bytes(content)


@pytest.mark.parametrize("seed", range(10))
def test_mutated_file_ends_in_a_valid_config_or_in_one_readable_message(seed, tmp_path):
    """100 files for each seed, 1,000 in all."""
    rng = random.Random(seed)
    contents = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    file = tmp_path / "mutated.yaml"
    num_valid = 0
    for _ in range(100):
        content = mutate(rng, rng.choice(contents), contents)
        file.write_bytes(content)
        try:
            config = load_config(file)
        except ConfigError as error:
            headline, *lines = str(error).split("\n")
            assert lines, content
            assert headline == f"{len(lines)} problem{'s' if len(lines) > 1 else ''} in {file}:", content
            assert all(line.startswith("  ") and line.isprintable() and len(line) < 600 for line in lines), content
        except Exception as error:
            raise AssertionError(f"{type(error).__name__} from {content!r}") from error
        else:
            assert load_config(config) == config, content
            num_valid += 1
    assert 4 < num_valid < 96, "the mutations are too strong, or too weak, to test much"


def test_pattern_on_the_command_line_may_begin_with_a_bracket():
    assert load_config({}, ["group_pattern=[a-z]+_(p\\d+)"]).group_pattern == "[a-z]+_(p\\d+)"


def test_a_preset_can_be_tried_for_a_few_epochs(tmp_path):
    """Patience and warm-up of the file are adapted to fewer epochs; those given beside num_epochs must fit it."""
    preset = tmp_path / "preset.yaml"
    preset.write_text("num_epochs: 50\nearly_stopping_patience: 15\n")
    for overrides in (["num_epochs=4"], {"num_epochs": 4}):
        assert load_config(preset, overrides).early_stopping_patience is None
    assert load_config(preset, ["num_epochs=20"]).early_stopping_patience == 15
    preset.write_text("num_epochs: 50\nwarmup_epochs: 3\nearly_stopping_patience: 15\n")
    assert load_config(preset, ["num_epochs=3"]).warmup_epochs == 1.5
    assert load_config(preset, ["num_epochs=4"]).warmup_epochs == 3
    with pytest.raises(ConfigError, match="warmup_epochs: 3 leaves nothing"):
        load_config(preset, ["num_epochs=3", "warmup_epochs=3"])
    with pytest.raises(ConfigError, match="can never be reached"):
        load_config(preset, ["num_epochs=4", "early_stopping_patience=4"])
    with pytest.raises(ConfigError, match="can never be reached"):
        load_config(preset, ["early_stopping_patience=60"])
    with pytest.raises(ConfigError, match="num_epochs: got"):
        load_config(preset, ["num_epochs=few"])


# Sources


def test_sources_tell_where_each_value_came_from(load_text):
    assert load_text("batch_size: 4\nseed: 1\n").sources == {"batch_size": "file", "seed": "file"}
    assert load_text("batch_size: 4\nseed: 1\n", ["seed=2", "use_amp=on"]).sources == {
        "batch_size": "file",
        "seed": "command line",
        "use_amp": "command line",
    }
    assert load_config({"batch_size": 4}).sources == {"batch_size": "config"}
    assert load_config({"batch_size": 4}, {"seed": 1}).sources == {"batch_size": "config", "seed": "argument"}


def test_defaults_have_no_source():
    assert load_config({}).sources == {}
    assert Config(batch_size=4).sources == {}


def test_sources_of_a_config_are_kept_but_for_what_is_overridden(load_text):
    config = load_text("batch_size: 4\nseed: 1\n", ["use_amp=on"])
    assert load_config(config).sources == config.sources
    assert load_config(config, {"seed": 2}).sources == {"batch_size": "file", "seed": "argument", "use_amp": "command line"}
    assert config.sources["seed"] == "file"


def test_sources_of_values_adapted_to_an_override_are_those_of_the_override(load_text):
    text = "num_epochs: 50\nwarmup_epochs: 3\nearly_stopping_patience: 15\n"
    assert load_text(text, ["num_epochs=3"]).sources == dict.fromkeys(
        ("num_epochs", "warmup_epochs", "early_stopping_patience"), "command line"
    )
    assert load_text(text, {"num_epochs": 20}).sources == {
        "num_epochs": "argument",
        "warmup_epochs": "file",
        "early_stopping_patience": "file",
    }
