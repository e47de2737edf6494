"""A Config written as YAML is read back as the same Config, whatever its texts and numbers."""

from __future__ import annotations

import random
import string

import pytest

from unet_trainer.config.dump import as_dict, to_plain, to_yaml, value_text
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import FIELDS, Config

SPECIAL_TEXTS = [
    "no", "On", "007", "1e3", "0x1f", "1_000", "2001-01-01", "12:30", "~", "null", "NULL", "nULL", "tRUE", "=", "<<", "...", "---",
    " lead", "trail ", "# c", "a # b", "a: b", "- x", "? x", "*a", "&a", "!t", "%d", "@x", "`x", "{a", "[b", "a,b", "a]b", "|", ">",
    "'q'", '"q"', "it's", "\\", "é😀", "\x85x", "a\u2028b", "\ufeffx", "\tx", "a\x07b", "\x1b[31m", "\x7f", "a\u200bb",
    "x y " * 100,
]  # fmt: skip


def random_config(rng):
    """A valid config with a random value for many keys."""

    def word():
        return rng.choice([*SPECIAL_TEXTS, "".join(rng.choices(string.ascii_letters + " .-_", k=8)) + "x"])

    num_classes = rng.choice([1, 1, 2, 5])
    num_epochs = rng.randint(2, 1000)
    parameters = [rng.uniform(-9, 9), rng.randint(-99, 99), 10.0 ** rng.randint(-20, 20), None, True, word(), [word(), 1.0]]
    settings = {
        "data_dir": word(),
        "image_dir": rng.choice([None, word()]),
        "mask_suffix": rng.choice(["", word()]),
        "num_classes": num_classes,
        "class_names": rng.choice([None, [word() for _ in range(num_classes)]]),
        "mask_values": rng.choice(["auto", rng.sample(range(255), max(2, num_classes))]),
        "ignore_value": rng.choice([None, 255]),
        "image_size": rng.choice([rng.randint(32, 8192), [rng.randint(32, 8192), rng.randint(32, 8192)]]),
        "split_file": rng.choice([None, word()]),
        "group_pattern": rng.choice([None, r"(p\d+)_[^'\"#]: {2}", r"^\w+$", "null", "1e3"]),
        "num_folds": rng.choice([None, 5]),
        "fit": rng.choice(["resize", "crop"]),
        "crops_per_image": rng.choice(["auto", 7]),
        "rare_class_crops": rng.random(),
        "in_channels": rng.choice(["auto", rng.randint(1, 64)]),
        "image_mean": rng.choice(["auto", [rng.uniform(-1e5, 1e5) for _ in range(5)]]),
        "image_std": rng.choice(["auto", [10.0 ** rng.uniform(-9, 9) for _ in range(5)]]),
        "augmentation": rng.choice(
            ["none", "strong", [], [word(), {word(): {word(): p for p in parameters}}, {"Transpose": None}]]
        ),
        "num_workers": rng.choice(["auto", 0, 7]),
        "encoder": word(),
        "decoder_channels": rng.choice([None, [rng.randint(1, 4096) for _ in range(5)]]),
        "loss": {name: 10.0 ** rng.uniform(-9, 9) for name in rng.sample(["dice", "focal", "lovasz", "cross_entropy"], 2)},
        "class_weights": rng.choice([None, [10.0 ** rng.uniform(-9, 9) for _ in range(num_classes)]]),
        "num_epochs": num_epochs,
        "learning_rate": 10.0 ** rng.uniform(-300, 300),
        "warmup_epochs": rng.choice([0, rng.uniform(0, num_epochs - 0.01)]),
        "grad_clip": rng.choice([None, 10.0 ** rng.uniform(-5, 5)]),
        "early_stopping_patience": rng.choice([None, rng.randint(1, num_epochs - 1)]),
        "device": rng.choice(["auto", "cpu", "cuda", "cuda:3", "mps"]),
        "use_amp": rng.random() < 0.5,
        "run_name": rng.choice(["no", "007", "1e3", "~", "null", "#1", "é 😀", "-", "a: b"]),
        "resume": rng.choice([None, "auto", word()]),
        "seed": rng.randint(0, 2**31),
    }
    return load_config(settings)


@pytest.mark.parametrize("seed", range(60))
def test_config_written_as_yaml_comes_back_equal(seed, load_text):
    config = random_config(random.Random(seed))
    assert load_text(to_yaml(config, "Settings of a run\nof two lines")) == config


@pytest.mark.parametrize("text", SPECIAL_TEXTS, ids=ascii)
def test_text_written_as_yaml_comes_back_as_the_same_text(text, load_text):
    config = load_config({"data_dir": text, "resume": text, "class_names": [text], "augmentation": [{"Affine": {text: [text]}}]})
    assert load_text(to_yaml(config, "")) == config


def test_yaml_of_a_config_has_one_line_per_key_with_its_comment():
    text = to_yaml(load_config({"data_dir": "a\nb: c", "num_epochs": 3}), "Header\n\nof three lines")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.startswith("# Header\n#\n# of three lines\n\n# Data\n")
    assert [line.partition(":")[0] for line in lines] == list(FIELDS)
    assert f"num_epochs: 3  # {FIELDS['num_epochs'].metadata['doc']}" in lines
    assert 'data_dir: "a\\nb: c"  # folder with' in lines[0]


def test_reason_replaces_the_explanation_of_its_key():
    text = to_yaml(Config(), "", {"num_workers": "decided: 8\ncores", "seed": ""})
    assert "num_workers: auto  # decided: 8 cores\n" in text
    assert "seed: 42  # split, weights, order and augmentation follow from it\n" in text


def test_plain_values_have_no_tuples():
    assert to_plain((1, ("a", {"b": (2.0,)}), None)) == [1, ["a", {"b": [2.0]}], None]
    plain = as_dict(Config(image_size=(64, 96), mask_values=((0, 0, 0), (255, 0, 0))))
    assert list(plain) == list(FIELDS)
    assert (plain["image_size"], plain["mask_values"]) == ([64, 96], [[0, 0, 0], [255, 0, 0]])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (0.001, "0.001"),
        ("auto", "auto"),
        ("1e3", "'1e3'"),
        ("null", "'null'"),
        ([1, [2, 3]], "[1, [2, 3]]"),
        ({"b": 1.0, "a": 2.0}, "{b: 1.0, a: 2.0}"),
        ("é " * 200, "'" + "é " * 200 + "'"),
    ],
)
def test_value_is_written_on_one_line(value, text):
    assert value_text(value) == text
