"""Config: frozen, complete, explained; written as YAML it reads back as the same config; what follows from its values."""

import compileall
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import generated_files
from helpers.generated_files import GENERATED
from helpers.project import ROOT
from unet_trainer.config.load import load_config
from unet_trainer.config.parsers import split_values
from unet_trainer.config.schema import (
    FIELDS,
    Config,
    as_dict,
    class_names,
    implied_num_classes,
    is_demo_dir,
    to_yaml,
)

VIOLET, PURPLE = (64, 0, 128), (64, 0, 192)
SPECIAL_TEXTS = [
    "no", "On", "007", "1e3", "0x1f", "1_000", "2001-01-01", "12:30", "~", "null", "nULL", "tRUE", "=", "<<", "...", "---", " lead",
    "trail ", "# c", "a # b", "a: b", "- x", "? x", "*a", "&a", "!t", "%d", "@x", "`x", "{a", "[b", "a,b", "a]b", "|", ">", "'q'",
    '"q"', "it's", "\\", "é😀", "\x85x", "a\u2028b", "\ufeffx", "\tx", "a\x07b", "\x1b[31m", "\x7f", "a\u200bb", "x y " * 100,
]  # fmt: skip


def test_the_defaults_obey_the_rules_and_every_key_is_explained_on_one_line():
    assert load_config({}) == load_config(as_dict(Config())) == Config()
    sentences = [field.metadata["sentence"] for field in FIELDS.values()]
    assert all(text and "\n" not in text for text in sentences)


@pytest.mark.parametrize("path", GENERATED)
def test_what_follows_from_the_keys_is_up_to_date(path):
    written = (ROOT / path).read_text(encoding="utf-8")
    assert written == GENERATED[path](), f"{path}: {generated_files.__doc__}"
    assert [name for name in FIELDS if name not in written and name != "loss"] == []


def test_keys_are_explained_where_there_is_no_source(tmp_path):
    """As in a program that is packed into one file: of the package there are compiled files alone."""
    shutil.copytree(ROOT / "unet_trainer/config", tmp_path / "unet_trainer/config")
    shutil.copytree(ROOT / "unet_trainer/system", tmp_path / "unet_trainer/system")
    (tmp_path / "unet_trainer/__init__.py").touch()
    compileall.compile_dir(tmp_path, legacy=True, quiet=1)
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    program = (
        "from unet_trainer.config import schema; print(schema.__file__); "
        "print(schema.to_yaml(schema.Config(), ''), end='')"
    )
    printed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    file, _, text = printed.stdout.partition("\n")
    assert file.endswith(".pyc")
    assert text == to_yaml(Config(), "")


def test_the_demo_is_recognised_however_its_path_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spellings = ("data/demo", "data/demo/", "./data/demo", "data//demo", Path("data/demo"), tmp_path / "data" / "demo")
    assert all(map(is_demo_dir, spellings))
    assert not any(is_demo_dir(path) for path in ("data", "data/demo2", "data/demo/images", "/data/demo", ""))


@pytest.mark.parametrize("text", SPECIAL_TEXTS, ids=ascii)
def test_a_text_written_as_yaml_comes_back_as_the_same_text(text, load_text):
    settings = {"data_dir": text, "resume": text, "class_names": [text], "augmentation": [{"Affine": {text: [text]}}]}
    config = load_config(settings)
    assert load_text(to_yaml(config, "")) == config


def test_numbers_and_lists_written_as_yaml_come_back_equal(load_text):
    rng = random.Random(0)
    parameters = [{"Affine": {"b": [1e-20, 1e20, None, True, 3]}}, {"Transpose": None}]
    for _ in range(30):
        settings = {
            "mask_values": rng.choice(["auto", "above 9", [0, [1, 2], [64, 0, 128]], rng.sample(range(255), 3)]),
            "image_size": [rng.randint(32, 8192), rng.randint(32, 8192)],
            "image_mean": [rng.uniform(-1e5, 1e5) for _ in range(5)],
            "loss": {name: 10.0 ** rng.uniform(-9, 9) for name in rng.sample(["dice", "focal", "lovasz"], 2)},
            "learning_rate": 10.0 ** rng.uniform(-300, 300),
            "augmentation": rng.choice(["none", [], parameters]),
            "use_amp": rng.random() < 0.5,
        }
        config = load_config(settings)
        assert load_text(to_yaml(config, "Settings of a run\nof two lines")) == config


def test_yaml_of_a_config_has_one_line_per_key_with_its_explanation_or_reason():
    config = load_config({"data_dir": "a\nb: c", "num_epochs": 3})
    text = to_yaml(config, "Header\n\nof three lines", {"seed": "decided: 8\ncores"})
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert text.startswith("# Header\n#\n# of three lines\n\n# Data\n")
    assert [line.partition(":")[0] for line in lines] == list(FIELDS)
    assert f"num_epochs: 3  # {FIELDS['num_epochs'].metadata['sentence']}" in lines
    assert "seed: 42  # decided: 8 cores" in lines
    assert 'data_dir: "a\\nb: c"  # folder with' in lines[0]


@pytest.mark.parametrize(("written", "values"), [
    ([5], [5]),
    ([1, 2], [1, 2]),
    ([64, 0, 128], [VIOLET]),  # three numbers always are a colour
    ([[1], [2], [3]], [1, 2, 3]),  # three values that are one class
    ([1, 2, 3, 4], [1, 2, 3, 4]),
    ([[64, 0, 128], [64, 0, 192]], [VIOLET, PURPLE]),
    ([7, [8], [64, 0, 128]], [7, 8, VIOLET]),
])  # fmt: skip
def test_each_way_to_write_a_class_reads_as_these_values_and_reads_back_the_same(written, values, load_text):
    config = load_config({"mask_values": [0, written], "ignore_value": 9})
    assert load_text(to_yaml(config, "")) == config
    assert list(split_values(config.mask_values[1])) == values


@pytest.mark.parametrize(("settings", "number"), [
    ({"class_weights": "auto"}, None),
    ({"class_names": ["sky", "road", "pole"]}, 3),
    ({"class_weights": [1, 2]}, 2),
    ({"mask_values": "nonzero"}, 1),
    ({"mask_values": [0, [1, 2]]}, 1),
    ({"mask_values": [0, 1, 2]}, 3),
    ({"mask_values": [0, 1], "class_names": ["field", "road"]}, 2),
])  # fmt: skip
def test_other_settings_tell_the_number_of_classes(settings, number):
    config = load_config(settings)
    assert implied_num_classes(config) == number


def test_two_classes_of_one_name_are_told_apart():
    config = Config(num_classes=4, class_names=("sky", "car", "void", "void"))
    assert class_names(config) == ["sky", "car", "void (2)", "void (3)"]
