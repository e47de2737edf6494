"""Files, dicts and overrides become a Config, or one message with every problem: its key, its value and the fix."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import segmentation_models_pytorch as smp

from helpers.mutations import mutated
from helpers.project import ROOT
from unet_trainer.config import load, parsers
from unet_trainer.config.errors import ConfigError, UserError
from unet_trainer.config.load import OTHER_TOOLS_NAMES, REMOVED_KEYS, check_trackers, check_url, load_config
from unet_trainer.config.parsers import ENCODERS, seconds_of
from unet_trainer.config.safe_yaml import MAX_BYTES
from unet_trainer.config.schema import FIELDS, Config, as_dict, to_yaml


def problems(source, overrides=()):
    """The problem lines of the one message that a source is refused with."""
    with pytest.raises(ConfigError) as raised:
        load_config(source, overrides)
    headline, *lines = str(raised.value).split("\n")
    assert headline.startswith(f"{len(lines)} problem{'s' if len(lines) > 1 else ''} in ")
    assert all(line.startswith("  ") for line in lines)
    return [line[2:] for line in lines]


@pytest.mark.parametrize(("line", "value"), [
    *[(f"learning_rate: {written}", 0.5) for written in ("5e-1", ".5", "0.5", "'0.5'")],
    *[(f"batch_size: {written}", 16) for written in ("16", "16.0", "1.6e1", "0016")],
    *[(f"run_name: {name}", name) for name in ("no", "007", "1e3", "12:30", "2024-01-01", "null", "~x", "é 😀")],
    *[(f"use_amp: {written}", True) for written in ("yes", "on", "true", "'yes'", "YES")],
    *[(f"grad_clip: {written}", None) for written in ("null", "~", "", "Null")],
    ("resume: 'null'", "null"),
    ("num_epochs: AUTO", "auto"),
    ("image_size: [64, 96]", (64, 96)),
    ("class_names: [no, on, 007]", ("no", "on", "007")),
    ("class_weights: [1, 1e-1, .5]", (1.0, 0.1, 0.5)),
    ("loss: dice", {"dice": 1.0}),
    ("loss: {dice: 1, cross_entropy: 5e-1}", {"dice": 1.0, "cross_entropy": 0.5}),
    ("augmentation: [HorizontalFlip, {Affine: {rotate: [-15, 1e1], fill: '0'}}]", ("HorizontalFlip", {"Affine": {"rotate": [-15, 10.0], "fill": "0"}})),
    ("time_budget: 1H30m", "1h30m"),
    ("repeats: 0.3", 1 / 3),
    ("repeats: 4.0", 4),
    ("seed: 2147483648", 2**31),
])  # fmt: skip
def test_a_value_is_read_by_the_type_of_its_key(line, value, load_text):
    found = getattr(load_text(line), line.partition(":")[0])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "\ufeff# with a byte order mark\n", "{}"])
def test_an_empty_file_is_the_defaults(load_text, text):
    assert load_text(text) == Config()


def test_a_path_may_begin_with_the_home_folder(monkeypatch, tmp_path):
    """A shell does not expand it behind data_dir=."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    config = load_config({"mask_suffix": "~mask"}, ["data_dir=~/mine"])
    assert (config.data_dir, config.mask_suffix) == (str(tmp_path / "mine"), "~mask")


def test_a_dict_with_numpy_scalars_and_paths_becomes_plain_python(load_text):
    settings = {"batch_size": np.int64(4), "num_epochs": np.float32(10), "use_amp": np.bool_(True)}
    settings |= {"class_weights": np.array([2.5]), "mask_values": (np.uint8(0), np.uint8(255))}
    transforms = [{"Affine": {"rotate": np.float64(5)}}]
    config = load_config({**settings, "data_dir": Path("data") / "mine", "augmentation": transforms})
    assert load_text(to_yaml(config, "")) == config
    assert [type(value) for value in (config.batch_size, config.num_epochs, config.use_amp)] == [int, int, bool]
    assert type(config.augmentation[0]["Affine"]["rotate"]) is float


@pytest.mark.parametrize(("name", "value", "needed"), [
    *[("learning_rate", value, "need a positive number, e.g. 1e-3, or auto") for value in ("fast", 0, float("nan"), None, 10**400)],
    *[("batch_size", value, "need a whole number from 1 to 65536, e.g. 8, or auto") for value in (0, 2.5, "16 images", [8], True, "1e300")],
    ("fold", -1, "need a whole number of at least 0, e.g. 0"),
    ("val_fraction", 1, "need a number above 0 and below 1, e.g. 0.2"),
    ("rare_class_crops", 1.1, "need a number at least 0 and at most 1, e.g. 0.33"),
    ("ema_decay", 1.0, "need a number above 0 and below 1, e.g. 0.999, or auto, or null"),
    ("use_amp", 1, "need true or false, or auto"),
    ("amp_dtype", "fp16", "need one of bfloat16, float16; did you mean float16?"),
    ("optimizer", "adamW", "need one of adamw, adam, sgd; did you mean adamw?"),
    ("image_size", [64, 64, 64], "or a list of 2, each a whole number from 32 to 8192, e.g. 512 or [512, 768], or auto"),
    ("decoder_channels", [64, 32], "need a list of 5, each a whole number from 1 to 4096"),
    ("loss", {"dcie": 1}, "dcie: did you mean dice?"),
    ("loss", "", "a weighted sum, e.g. {dice: 1, bce: 1}, or auto"),
    ("loss", {"dice": -1}, "a weighted sum, e.g. {dice: 1, bce: 1}, or auto"),
    ("data_dir", "", "need text, e.g. data/mine"),
    ("data_dir", "a\ud800", "need text, e.g. data/mine"),
    ("mask_suffix", 3, "need text, e.g. _mask"),
    ("augmentation", "stronk", "did you mean strong?"),
    ("augmentation", [{"Affine": 15}], "or a list such as [HorizontalFlip, {Affine: {rotate: [-15, 15]}}], or auto"),
    ("augmentation", [{"Affine": {"rotate": object()}}], "parameters are numbers, text, true, false or null"),
    ("group_pattern", "(p", "need a regular expression, e.g. '(patient\\d+)_', or null (missing )"),
    ("time_budget", "10 min", "need a time with its unit, e.g. 10m, 2h or 1h30m, or null"),
    ("repeats", 1.5, "need a whole number up to 100000, or a share below 1, e.g. 4 or 0.25, or auto"),
    *[("device", name, "need auto, cpu, cuda, cuda:N or mps") for name in ("gpu", "cuda:10000", "cuda:٣")],
    *[("run_name", name, "without slashes (checkpoint_dir says where), e.g. run") for name in ("a/b", "..", "a\nb", "é" * 101)],
    *[("mask_values", value, "need auto, nonzero, above 127, or a list") for value in ("above 65535", "below 3", [0], [0, []], [0, [[1, 2], 3]], [0, None], 3)],
    ("mask_values", [0, [300, 301, 302]], "three values of one class are [[300], [301], [302]]"),
    ("ignore_value", "red", "need a value from 0 to 65535, a colour, or a list of several, e.g. 255, or null"),
], ids=lambda case: ascii(case)[:40])  # fmt: skip
def test_a_wrong_value_is_answered_with_key_value_and_fix(name, value, needed):
    (line,) = problems({name: value})
    assert line.startswith(f"{name}: got ")
    assert needed in line
    assert line.isprintable()


def test_an_unknown_encoder_and_a_missing_data_dir_are_told_with_the_other_mistakes(tmp_path):
    lines = problems({"encoder": "resnet35", "data_dir": str(tmp_path / "no"), "lr": 1})
    assert lines == [
        "encoder: got 'resnet35'; need the name of an encoder, e.g. resnet34 (did you mean resnet34?)",
        "lr: unknown key; the name here is learning_rate",
        f"data_dir: {tmp_path / 'no'} does not exist; need a folder with images/ and masks/",
    ]
    for name in ("tu-convnext_tiny", *smp.encoders.encoders, *ENCODERS):
        assert load_config({"encoder": name, "data_dir": "elsewhere"}).encoder == name
    assert problems({"encoder": "convnext_tiny"})[0].endswith("(did you mean tu-convnext_tiny?)")
    for data_dir in ("data/demo", "s3://bucket/mine", str(tmp_path)):
        assert len(problems({"lr": 1, "data_dir": data_dir})) == 1


def test_an_encoder_is_known_without_the_libraries_that_have_it():
    program = (
        "import sys; from unet_trainer.config.load import load_config; load_config({'encoder': 'efficientnet-b7'});"
    )
    program += "print({'torch', 'timm', 'segmentation_models_pytorch'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "set()\n"


def test_a_long_value_is_cut_in_the_message():
    (line,) = problems({"learning_rate": "x" * 100_000})
    assert line == f"learning_rate: got '{'x' * 58}…; need a positive number, e.g. 1e-3, or auto"
    (line,) = problems({"learning_rate": 10**5000})  # more digits than Python prints
    assert line.startswith("learning_rate: got a number of thousands of digits; need a positive number")


def test_every_key_can_be_wrong_at_once():
    lines = problems({name: object() for name in FIELDS})
    assert [line.partition(":")[0] for line in lines] == list(FIELDS)
    assert all("; need " in line for line in lines)


@pytest.mark.parametrize(("name", "answer"), [
    ("lr", "the name here is learning_rate"),
    ("bf16", "the name here is use_amp and amp_dtype"),
    ("precison", "did you mean amp_dtype?"),
    ("Batch-Size", "did you mean batch_size?"),
    ("learning_rat", "did you mean learning_rate?"),
    ("initial_checkpoint", "the name here is init_from"),
    *[(name, "the name here is encoder_weights (the encoder), init_from (a model) or resume (a run)") for name in ("weights", "pretrained", "checkpoint")],
    ("colour", "configs/default.yaml lists every key"),
    (1, "configs/default.yaml lists every key"),
])  # fmt: skip
def test_an_unknown_key_is_answered_with_the_right_one(name, answer):
    assert problems({name: 1}) == [f"{name}: unknown key; {answer}"]


def test_an_unprintable_key_is_shown_in_printable_form():
    assert problems({"a\nb\x1b[31m": 1}) == [r"'a\nb\x1b[31m': unknown key; configs/default.yaml lists every key"]


def test_names_of_other_tools_lead_to_keys_that_exist():
    for other, ours in OTHER_TOOLS_NAMES.items():
        assert other not in FIELDS
        assert set(re.findall(r"(?<!\()\b[a-z][a-z_0-9]+\b(?![^(]*\))", ours)) - {"and", "or"} <= set(FIELDS), other


@pytest.mark.parametrize(("settings", "answer"), [
    ({"warmup_epochs": 5, "num_epochs": 5}, "warmup_epochs: 5 leaves nothing of num_epochs: 5; need fewer"),
    ({"time_budget": "10m", "num_epochs": 5}, "leave one of them out (time_budget: null or num_epochs: auto)"),
    ({"num_classes": 3, "class_weights": [1, 2]}, "class_weights: got 2 values; need 3, one for each of num_classes"),
    ({"class_names": ["a", "b", "c"], "class_weights": [1, 2]}, "need 3, one for each of class_names"),
    ({"num_classes": 3, "mask_values": [0, 255]}, "mask_values: got [0, 255]; need 3 different values, one a class"),
    ({"mask_values": [7, 7]}, "mask_values: got [7, 7]; need 2 different values, background first"),
    ({"mask_values": [0, 5, [5, 5, 5]]}, "mask_values: got [0, 5, [5, 5, 5]]; need 3 different values, one a class"),
    ({"num_classes": 3, "mask_values": "nonzero"}, "mask_values: nonzero tells two classes apart, num_classes: 3"),
    ({"mask_values": [0, [1, 2]], "ignore_value": [9, 2]}, "ignore_value: 2 is also in mask_values; need another, or null"),
    ({"num_classes": 3, "ignore_value": [9, 2]}, "ignore_value: 2 is the id of a class (num_classes: 3); set mask_values"),
    ({"mask_values": [0, 1, 2], "loss": "bce"}, "loss: bce is for num_classes: 1; with 3 classes use cross_entropy"),
    ({"fold": 1}, "fold: got 1; need num_folds to be set"),
    ({"num_folds": 5, "fold": 5}, "fold: got 5; need 0 to 4"),
    ({"split": "blocks", "group_pattern": "(a)"}, "split: blocks divides a sequence, group_pattern keeps it together"),
    ({"architecture": "fpn", "decoder_channels": [64, 32, 16, 8, 8]}, "decoder_channels: not for architecture: fpn"),
    ({"batch_parts": 9, "batch_size": 8}, "batch_parts: 9 is more than batch_size: 8; need at most that"),
    ({"architecture": "fpn", "decoder_attention": "scse"}, "decoder_attention: scse is for unet and unetplusplus"),
    ({"decoder_attention": "scse", "decoder_channels": [64, 32, 16, 16, 8]}, "scse needs decoder_channels of at least 16"),
], ids=str)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(settings, answer):
    (line,) = problems(settings)
    assert answer in line


@pytest.mark.parametrize("settings", [
    {"warmup_epochs": 4.5, "early_stopping_patience": 5, "num_epochs": 5},
    {"num_classes": 3, "class_weights": [1, 2, 3], "class_names": ["a", "b", "c"], "mask_values": [2, 0, 1]},
    {"num_classes": 3, "ignore_value": 3},
    {"ignore_value": 11},  # how many classes there are is seen in the masks
    {"mask_values": [0, [1, 2], [[64, 0, 128], [64, 0, 192]]], "ignore_value": [255, 11], "unknown_values": "ignore"},
    {"image_size": [8192, 32], "num_folds": 5, "fold": 4, "run_name": "a" * 200, "device": "cuda:0"},
    {"in_channels": 64, "image_mean": [-0.5], "image_std": [1e-3], "split_file": "split.csv", "group_pattern": r"^(p\d+)[_-]"},
    {"num_classes": 2, "mask_values": "above 127", "batch_parts": 9, "batch_size": "auto"},
    {"time_budget": "10m", "num_epochs": "auto", "early_stopping_patience": 99, "warmup_epochs": 99},
    {"decoder_attention": "scse", "decoder_channels": [16, 16, 16, 16, 16]},
], ids=str)  # fmt: skip
def test_settings_just_inside_the_limits_are_taken(settings):
    config = as_dict(load_config(settings))
    assert {name: config[name] for name in settings} == settings


def test_all_problems_come_in_one_message_in_the_order_of_the_file(load_text, tmp_path):
    text = "lr: 1e-3\nbatch_size: none\nseed: 1\nnum_classes: 3\nloss: bce\nnum_epochs: 50\nwarmup_epochs: few\n"
    with pytest.raises(ConfigError) as raised:
        load_text(text, ["epochs=3", "grad_clip", "amp_dtype=bf16"])
    headline, *lines = str(raised.value).split("\n")
    assert headline == f"7 problems in {tmp_path / 'mine.yaml'}:"
    assert lines[0] == "  'grad_clip': need key=value, e.g. batch_size=16"
    keys = [line.strip().partition(":")[0] for line in lines[1:]]
    assert keys == ["lr", "batch_size", "warmup_epochs", "epochs", "amp_dtype", "loss"]


@pytest.mark.parametrize(("content", "answer"), [
    (b"\x89PNG\r\n\x1a\n", "not UTF-8 text; need a YAML file, saved as UTF-8"),
    ("seed: 1".encode("utf-16"), "not UTF-8 text; need a YAML file, saved as UTF-8"),
    (b"loss:\n\tdice: 1", r"line 2: not valid YAML: found character '\t' that cannot start any token; use spaces in place of tabs"),
    (b"batch_size 4", "got 'batch_size 4'; need lines of the form key: value"),
    (b"- batch_size: 4", "got [{'batch_size': '4'}]; need lines of the form key: value"),
    (b"seed: 1\nlr: 1\nseed: 2", "line 3: 'seed' is given twice; keep one"),
    (b"batch_size: 4\n---\nseed: 1", "line 2: a second document (---); need one"),
    (b"batch_size: [4", "line 1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
    (b"seed: 1\nclass_names: [a, b\nencoder: x", "line 2: not valid YAML: expected ',' or ']', but got ':'"),
    (b"seed: 1\nbatch_size:4\nencoder: x", "line 2: not valid YAML: could not find expected ':'; is a space missing behind a colon?"),
    (b"# " + "é".encode() * (MAX_BYTES // 2) + b"\nseed: wrong\n", "more than 256 KiB; a config is far smaller"),
], ids=range(11))  # fmt: skip
def test_a_file_that_is_not_a_config_is_refused(load_text, content, answer):
    with pytest.raises(ConfigError) as raised:
        load_text(content)
    assert str(raised.value).split("\n")[1:] == [f"  {answer}"]


def test_a_missing_file_names_the_nearest_or_those_that_exist(tmp_path, monkeypatch):
    (tmp_path / "one.yaml").touch()
    assert problems(tmp_path / ("q" * 200)) == [f"no such file; there are {tmp_path / 'one.yaml'}"]
    monkeypatch.chdir(ROOT)
    for name in ("fast", "configs/fsat.yaml", "Fast.yml"):
        assert problems(name) == ["no such file; did you mean configs/fast.yaml?"]
    # The missing file may set other epochs: overrides are not checked against the defaults.
    assert len(problems("configs/fsat.yaml", ["num_epochs=50", "warmup_epochs=60"])) == 1


def test_a_path_that_cannot_be_read_is_answered(tmp_path):
    (line,) = problems(tmp_path)
    assert f"is a folder; need a YAML file (to train on it: data_dir={tmp_path}" in line
    assert problems("a\0b") == ["cannot be read: its name holds a NUL"]


@pytest.mark.parametrize(("override", "value"), [
    ("loss={dice: 1, bce: 1}", {"dice": 1.0, "bce": 1.0}),
    ("augmentation=[{Affine: {rotate: [-5, 5]}}]", ({"Affine": {"rotate": [-5, 5]}},)),
    ("class_weights=", None),
    ("mask_suffix=", ""),
    ("run_name='007'", "007"),
    ('run_name="a: b"', "a: b"),
    ("run_name=a=b # c", "a=b # c"),
    ("group_pattern=[a-z]+_(p\\d+)", "[a-z]+_(p\\d+)"),
    ("ignore_value=[10, 11]", (10, 11)),
    (" batch_size =16", 16),
])  # fmt: skip
def test_an_override_is_read_like_a_line_of_the_file_and_wins_over_it(override, value):
    assert getattr(load_config({"batch_size": 4}, [override]), override.partition("=")[0].strip()) == value


@pytest.mark.parametrize(("override", "answer"), [
    ("batch_size", "'batch_size': need key=value, e.g. batch_size=16"),
    ("=3", "'=3': need key=value, e.g. batch_size=16"),
    ("run_name=", "run_name: got ''; need"),
    ("loss={dice: 1", "loss: got '{dice: 1'; line 1: not valid YAML"),
    ("loss={dice: 1, dice: 2}", "line 1: 'dice' is given twice; keep one"),
    ("class_weights=[!!float 1]", "tags are not allowed, write the plain value"),
    ("class_names=" + "[" * 1000, "…; line 1: nested deeper than 12 levels"),
], ids=range(7))  # fmt: skip
def test_a_malformed_override_is_answered(override, answer):
    (line,) = problems({}, [override])
    assert answer in line


def test_a_config_instance_is_taken_and_checked_again():
    config = Config(batch_size=4, image_size=(64, 96), loss={"dice": 2.0})
    assert load_config(config) == config
    assert load_config(config, {"batch_size": 2}) == dataclasses.replace(config, batch_size=2)
    assert problems(Config(batch_size=0))[0].startswith("batch_size: got 0; need")
    with pytest.raises(TypeError, match="a config is a Config, a dict or a path to a YAML file, not list"):
        load_config(["batch_size=4"])


def test_a_preset_can_be_tried_for_a_few_epochs(load_text):
    """The warm-up of the file is adapted to fewer epochs; one given beside num_epochs must fit it."""
    text = "num_epochs: 50\nwarmup_epochs: 3\n"
    config = load_text(text, ["num_epochs=3"])
    assert config.warmup_epochs == 1.5
    assert set(config.sources.values()) == {"command line"}
    assert load_text(text, {"num_epochs": 20}).warmup_epochs == 3
    with pytest.raises(ConfigError, match="warmup_epochs: 3 leaves nothing"):
        load_text(text, ["num_epochs=3", "warmup_epochs=3"])


def test_sources_tell_where_each_value_came_from(load_text):
    config = load_text("batch_size: 4\nseed: 1\n", ["seed=2", "use_amp=on"])
    assert config.sources == {"batch_size": "file", "seed": "command line", "use_amp": "command line"}
    assert load_config(config, {"seed": 3}).sources == {**config.sources, "seed": "argument"}
    assert load_config({"batch_size": 4}).sources == {"batch_size": "config"}
    assert Config(batch_size=4).sources == {}


def test_durations_are_read_as_seconds():
    assert [seconds_of(text) for text in ("90s", "1h30m", "1.5h", "1d")] == [90, 5400, 5400, 86400]


def test_a_missing_package_is_one_message_with_what_to_install(monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    check_trackers(load_config({}))
    for place in ("data/mine", "s3:/bucket", "ftp://host/mine", "://", ""):
        check_url("data_dir", place)
    with pytest.raises(UserError, match=r"^mlflow: the package is not installed; pip install mlflow, or set"):
        check_trackers(load_config({"mlflow": True}))
    with pytest.raises(UserError, match=r"^data_dir: s3:// needs the package s3fs: pip install s3fs$"):
        check_url("data_dir", "s3://bucket/mine")


@pytest.mark.parametrize(("name", "text", "kind", "inner"), [
    ("data.yaml", "path: ../sets/mine # root\ntrain: images/train\nval: images/val\n\nnames:\n  0: a\n", "Ultralytics' file", "../sets/mine"),
    ("data.yaml", "train: ../train/images\nval: ../valid/images\nnc: 1\nnames: ['a']\n", "Ultralytics' file", ""),
    ("data.yaml", "path: none\ntrain: a\nval: b\nnames: [a]\n", "Ultralytics' file", ""),
    ("dataset.json", '{"channel_names": {"0": "CT"}, "labels": {"background": 0}, "numTraining": 4}', "nnU-Net's dataset.json", ""),
    ("a.json", '{"images": [], "annotations": [], "categories": [{"id": 1}]}' + " " * 300_000, "a file of COCO annotations", ""),
])  # fmt: skip
def test_another_tools_file_about_a_dataset_is_named_with_the_data_dir(tmp_path, name, text, kind, inner):
    (tmp_path / "sets/mine").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / name
    path.write_text(text)
    (line,) = problems(path)
    assert line.startswith(f"it is {kind}")
    assert line.endswith(f", not a config; to use the data that it describes: data_dir={tmp_path / 'here' / inner}")


@pytest.mark.parametrize(("place", "fix"), [
    ("https://me:s3cret@host/x", "put it into ~/.netrc"),
    ("HTTP://s3cret@host/x", "put it into ~/.netrc"),
    ("s3://key:s3cret@bucket/x", "give it by the environment variables or files of its tools"),
    ("https://host/x?sig=s3cret", "a URL with ? or # (pre-signed?) names one file"),
])  # fmt: skip
def test_a_password_in_a_url_is_refused_before_anything_is_printed_and_not_repeated(place, fix):
    for check in (lambda: load_config({"data_dir": place, "lr": 1}), lambda: check_url("--out", place)):
        with pytest.raises(UserError) as raised:
            check()
        assert fix in str(raised.value)
        assert "s3cret" not in str(raised.value)
    load_config({"data_dir": "abfs://container@account.dfs.core.windows.net/x"})  # no user, and no password


def test_a_mutated_file_ends_in_a_valid_config_or_in_one_readable_message(tmp_path):
    contents = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    file = tmp_path / "mutated.yaml"
    num_valid = 0
    for number in range(150):
        content = mutated(contents[number % len(contents)], np.random.default_rng(number), contents)
        file.write_bytes(content)
        try:
            config = load_config(file)
        except ConfigError as error:
            _, *lines = str(error).split("\n")
            assert lines, content
            assert all(line.startswith("  ") and line.isprintable() and len(line) < 700 for line in lines), content
        else:
            assert load_config(config) == config, content
            num_valid += 1
    assert 3 < num_valid < 147, "the mutations are too strong, or too weak, to test much"


def test_names_of_transforms_are_known_without_their_library(monkeypatch):
    inner = {"OneOf": {"transforms": ["Affin", {"GaussNoise": {"p": 0.1}}]}}
    assert problems({"augmentation": ["HorizontalFlp", inner, "Transpose", "IntensityJiter"], "fold": 1}) == [
        "fold: got 1; need num_folds to be set",
        "augmentation: unknown transform 'HorizontalFlp'; did you mean HorizontalFlip?",
        "augmentation: unknown transform 'Affin'; did you mean Affine?",
        "augmentation: unknown transform 'IntensityJiter'; did you mean IntensityJitter?",
    ]
    for other in (
        {"OneOf": {"transforms": 5}},
        {"OneOf": {"transforms": [3, {"Affine": None}, None]}},
        {"Affine": None},
    ):
        load_config({"augmentation": [other]})  # an odd form is left to the library
    monkeypatch.setattr(parsers, "_names_in_text", lambda *_: [])  # and all of it where that has no text
    load_config({"augmentation": ["HorizontalFlp"]})


def test_every_transform_of_the_library_is_known():
    import albumentations

    names = [word for word, value in vars(albumentations).items() if isinstance(value, type)]
    transforms = [word for word in names if issubclass(getattr(albumentations, word), albumentations.BasicTransform)]
    assert len(transforms) > 100
    groups = ["OneOf", "SomeOf", "Sequential", "RandomOrder"]
    load_config({"augmentation": [*transforms, *groups, {"IntensityJitter": {}}]})


def test_settings_of_earlier_versions_are_answered_with_what_there_is_now():
    for name, instead in REMOVED_KEYS.items():
        assert problems({name: "auto"}) == [f"{name}: no longer a setting; {instead}: leave it out"]
    (problem,) = problems({"unpaired": "offset"})
    assert "need one of error, skip (offset is no longer read; rename the masks, or set split_file" in problem
    assert problems({}, ["decoder_attention=auto"])[0].endswith(
        "need one of none, scse (auto always was none: leave it out)"
    )
