"""Config: frozen, complete, with an explanation for each key; and what follows from its values."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

from unet_trainer.config.dump import as_dict
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import FIELDS, Config, as_shape, class_names, id_names, is_demo_dir


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().batch_size = 4


def test_configs_share_no_state_with_each_other_or_with_their_source():
    source = {"loss": {"dice": 1.0}, "augmentation": [{"Affine": {"rotate": [0, 1]}}]}
    config = load_config(source)
    source["loss"]["dice"] = 5.0
    source["augmentation"][0]["Affine"]["rotate"][0] = 9
    assert config.loss == {"dice": 1.0}
    assert config.augmentation == ({"Affine": {"rotate": [0, 1]}},)
    load_config({"loss": "dice"}).loss["dice"] = 5.0
    assert load_config({"loss": "dice"}).loss == {"dice": 1.0}


def test_config_can_be_copied_and_sent_to_other_processes():
    config = load_config({"loss": "dice", "image_size": [64, 96]})
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


def test_defaults_obey_the_rules():
    assert load_config({}) == Config()
    assert load_config(as_dict(Config())) == Config()


def test_every_key_has_an_explanation_on_one_line():
    for name, field in FIELDS.items():
        assert field.metadata["doc"].strip(), name
        assert "\n" not in field.metadata["doc"], name


def test_sources_are_not_a_setting_and_do_not_make_configs_differ():
    assert "sources" not in FIELDS
    assert set(FIELDS) == {field.name for field in dataclasses.fields(Config)} - {"sources"}
    assert Config(batch_size=4, sources={"batch_size": "file"}) == Config(batch_size=4)
    assert "sources" not in repr(Config())


@pytest.mark.parametrize("spelling", ["data/demo", "data/demo/", "./data/demo", "data//demo", "data/x/../demo", Path("data/demo")])
def test_the_demo_is_recognised_however_its_path_is_spelled(spelling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_demo_dir(spelling)
    assert is_demo_dir(tmp_path / spelling)


@pytest.mark.parametrize("path", ["data", "data/demo2", "data/demo/images", "demo", "/data/demo", ""])
def test_other_folders_are_not_the_demo(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_demo_dir(path)


def test_one_side_is_a_square_image():
    assert as_shape(64) == (64, 64)
    assert as_shape((64, 96)) == (64, 96)


def test_classes_without_names_are_numbered():
    one = Config(num_classes=1)
    assert (class_names(one), id_names(one)) == (["foreground"], ["background", "foreground"])
    three = Config(num_classes=3)
    assert class_names(three) == id_names(three) == ["class 0", "class 1", "class 2"]


def test_names_of_classes_are_those_of_the_config():
    binary = Config(num_classes=1, class_names=("road",))
    assert (class_names(binary), id_names(binary)) == (["road"], ["background", "road"])
    two = Config(num_classes=2, class_names=("field", "road"))
    assert class_names(two) == id_names(two) == ["field", "road"]
