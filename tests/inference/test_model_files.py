"""The file of a model: found by what a user names, read whatever wrote it, refused in one sentence where it cannot be used."""

from __future__ import annotations

import copy
import json

import cv2
import numpy as np
import pytest
import torch

from helpers.checkpoints import GREY_16BIT, random_image, save_model, small_segmenter, small_spec
from helpers.small_runs import ROW, Wrapper, make_run, older_content
from helpers.steps import make_settings, small_components
from unet_trainer import __version__
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD, RGB_8BIT, ImageSpec
from unet_trainer.inference.model_files import BEFORE_VERSIONS, SMP_CARD, find_model, read_model
from unet_trainer.model.deep_supervision import AUXILIARY
from unet_trainer.model.segmenter import network_weights
from unet_trainer.runs.checkpoint_file import write_checkpoint
from unet_trainer.runs.errors import CheckpointError

SPEC = small_spec()


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(SPEC)


def same_weights(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# What RUN | FILE means


def test_a_run_means_its_best_weights_by_name_or_folder(segmenter, tmp_path):
    best = save_model(tmp_path / "checkpoints/demo/best.pt", segmenter)
    assert find_model("demo", tmp_path / "checkpoints") == best  # deployed alone, without last.pt
    assert find_model(best.parent) == find_model(best) == best


def test_the_last_state_is_named_where_there_is_no_best_yet(segmenter, tmp_path):
    last = save_model(tmp_path / "run/last.pt", segmenter)
    with pytest.raises(CheckpointError, match=r"has no best.pt yet; name .*last.pt to use the last state"):
        find_model(last.parent)
    assert find_model(last.parent, raw=True) == last


def test_a_folder_without_a_model_is_told_as_such(segmenter, tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(CheckpointError, match=r"photos is no run's folder \(no best.pt\); name one, or a .pt or .onnx file$"):
        find_model(tmp_path / "photos")
    with pytest.raises(CheckpointError, match="photos is no run's folder"):
        find_model("photos", tmp_path)


def test_without_a_name_the_run_that_was_saved_last_is_taken(segmenter, tmp_path):
    for name in ("old", "new"):
        save_model(tmp_path / name / "last.pt", segmenter)
        save_model(tmp_path / name / "best.pt", segmenter)
    assert find_model(None, tmp_path) == tmp_path / "new/best.pt"


@pytest.mark.parametrize("name", ["model.pt2", "model.torchscript", "model_smp"])
def test_an_export_for_other_programs_is_known_as_such(name, tmp_path):
    file = tmp_path / name / SMP_CARD if name == "model_smp" else tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"is an export for other programs; name its run, or export that as \.onnx"):
        find_model(tmp_path / name)


# Weights and card


def test_a_checkpoint_gives_its_weights_and_what_is_known_of_them(segmenter, tmp_path):
    card, weights = read_model(save_model(tmp_path / "nuclei/best.pt", segmenter))
    assert same_weights(weights, network_weights(segmenter))
    assert (card.spec, card.run_name, card.epoch, card.val_iou, card.version) == (SPEC, "nuclei", 3, 0.5, "0.9.0")
    assert card.symmetries == ("horizontal_flip",)


def test_a_checkpoint_of_a_run_names_the_version_that_wrote_it(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run")
    run.checkpointer.state.history.append(dict(ROW))
    run.checkpointer.save_epoch(ROW, run.components.state.segmenter, lambda: lambda: np.zeros((2, 2, 3), np.uint8), lambda: str)
    run.checkpointer.finish()
    for name in ("best.pt", "last.pt"):
        assert read_model(tmp_path / "run" / name)[0].version == __version__


def test_a_score_that_is_no_number_is_none(segmenter, tmp_path):
    card, _ = read_model(save_model(tmp_path / "best.pt", segmenter, metrics={"val_iou": float("nan")}))
    assert card.val_iou is None
    json.loads(card.to_json())


def test_prefixes_of_compiled_and_distributed_models_and_heads_of_training_are_left_out(segmenter, tmp_path):
    weights = network_weights(segmenter)
    prefixed = {f"module._orig_mod.{name}": tensor for name, tensor in weights.items()}
    path = save_model(tmp_path / "best.pt", segmenter, model={**prefixed, f"{AUXILIARY}.0.weight": torch.zeros(1)})
    assert same_weights(read_model(path)[1], weights)


def test_a_state_has_averaged_weights_and_raw_ones(tmp_path):
    components = small_components(settings=make_settings(ema_decay=0.9))
    state = components.state
    with torch.no_grad():
        for parameter in state.segmenter.parameters():
            parameter.add_(1.0)
    about = {"spec": state.segmenter.spec.to_dict(), "config": {"ema_decay": 0.9}, "decisions": {}, "split": {}}
    write_checkpoint(tmp_path / "last.pt", {**about, **state.state_dict()})
    averaged, raw = (read_model(tmp_path / "last.pt", raw)[1] for raw in (False, True))
    assert same_weights(averaged, network_weights(state.ema.segmenter))
    assert same_weights(raw, network_weights(state.segmenter))
    assert not same_weights(averaged, raw)


def test_raw_weights_are_refused_where_only_averaged_ones_are(segmenter, tmp_path):
    path = save_model(tmp_path / "best.pt", segmenter, config={"ema_decay": 0.999})
    with pytest.raises(
        CheckpointError, match=r"^\S*best.pt holds averaged weights alone; the raw ones are in last.pt of the same run$"
    ):
        read_model(path, raw=True)
    assert read_model(save_model(path, segmenter, config={"ema_decay": None}), raw=True)  # they are the raw ones


def test_a_compiled_model_is_saved_under_its_own_names(segmenter, tmp_path):
    wrapped = copy.copy(segmenter)
    wrapped._modules = {**segmenter._modules, "network": Wrapper(Wrapper(segmenter.network, "_orig_mod"), "module")}
    assert all(name.startswith("network.module._orig_mod.") for name in wrapped.state_dict())
    assert same_weights(read_model(save_model(tmp_path / "best.pt", wrapped))[1], network_weights(segmenter))


# Earlier formats


def write_format(path, number, content):
    """Without the digest that format 1 did not have."""
    if number == 1:
        torch.save({**content, "format": 1}, path)
    else:
        write_checkpoint(path, {**content, "format": number})


def early_config(**settings):
    """As formats 1 and 2 have it, all decided."""
    config = {"num_classes": 1, "class_names": None, "mask_values": [0, 255], "ignore_value": None, "image_size": 64}
    config |= {"architecture": "unet", "encoder": "resnet18", "decoder_channels": [8, 8, 8, 8, 8], "augmentation": "default"}
    return {**config, "ema_decay": None, "data_dir": "data", **settings}


IMAGE_SETTINGS = {"fit": "crop", "in_channels": 3, "image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("settings", [{}, IMAGE_SETTINGS], ids=["before other images could be read", "8-bit RGB"])
def test_the_spec_of_an_early_format_is_that_of_its_config(number, settings, segmenter, tmp_path):
    weights = network_weights(segmenter)
    content = {"config": early_config(**settings), "epoch": 7, "metrics": {"val_iou": 0.9}, "model": weights}
    write_format(tmp_path / "best.pt", number, content)
    card, found = read_model(tmp_path / "best.pt")
    assert same_weights(found, weights)
    assert (card.epoch, card.val_iou, card.version) == (7, 0.9, BEFORE_VERSIONS)
    assert card.symmetries == ("horizontal_flip", "vertical_flip")
    spec = card.spec
    assert (spec.image, spec.num_classes, spec.id_names) == (RGB_8BIT, 1, ("background", "foreground"))
    assert (spec.coding.values, spec.image_size, spec.fit) == ((0, 255), (64, 64), settings.get("fit", "resize"))
    assert (spec.encoder, spec.decoder_channels, spec.decoder_attention) == ("resnet18", (8, 8, 8, 8, 8), "none")


def test_colours_names_and_sides_of_an_early_format_are_kept(segmenter, tmp_path):
    settings = {"num_classes": 3, "mask_values": [0, 7, [255, 0, 0]], "class_names": ["road", "sky", "car"]}
    settings |= {"image_size": [64, 96], "ignore_value": 255, "decoder_channels": None}
    write_format(tmp_path / "best.pt", 2, {"config": early_config(**settings), "model": network_weights(segmenter)})
    spec = read_model(tmp_path / "best.pt")[0].spec
    assert spec.coding.mask_values == (0, 7, (255, 0, 0))
    assert (spec.coding.ignore_value, spec.id_names, spec.image_size) == (255, ("road", "sky", "car"), (64, 96))


def test_a_state_of_an_early_format_gives_its_model(tmp_path):
    state = small_components().state
    for number in (1, 2):
        content = older_content(state, number)
        content["config"] = early_config()
        write_format(tmp_path / "last.pt", number, content)
        assert same_weights(read_model(tmp_path / "last.pt")[1], network_weights(state.segmenter))


def test_format_3_has_its_spec(segmenter, tmp_path):
    card, _ = read_model(save_model(tmp_path / "best.pt", segmenter, format=3))
    assert card.spec == SPEC


GREY_SETTINGS = {"fit": "crop", "in_channels": 1, "image_mean": [3000.0], "image_std": [700.0]}


def test_the_depth_of_an_early_format_is_that_of_the_images_it_was_trained_with(segmenter, tmp_path):
    """Its config does not say it."""
    for name in ("images", "masks"):
        (tmp_path / "data" / name).mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "data/images/a.png"), random_image(small_spec(GREY_16BIT), 8, 8))
    cv2.imwrite(str(tmp_path / "data/masks/a.png"), np.zeros((8, 8), np.uint8))
    (tmp_path / "split.csv").write_text("image,mask,split\nimages/a.png,masks/a.png,train\n")
    content = {"config": early_config(**GREY_SETTINGS, data_dir=str(tmp_path / "data")), "model": network_weights(segmenter)}
    write_format(tmp_path / "best.pt", 2, content)
    image = read_model(tmp_path / "best.pt")[0].spec.image
    assert (image.channels, image.depth, image.mean, image.std) == (1, "uint16", (3000.0,), (700.0,))
    (tmp_path / "data/images/a.png").unlink()
    with pytest.raises(CheckpointError, match="an early version and does not say which depth its images have") as refusal:
        read_model(tmp_path / "best.pt")
    assert "\n" not in str(refusal.value)


# Files that cannot be used


def test_a_foreign_or_hostile_file_is_refused_as_resume_does(tmp_path, segmenter):
    class Hostile:
        def __reduce__(self):
            return print, ("run",)

    torch.save({"format": 4, "config": {}, "model": Hostile()}, tmp_path / "hostile.pt")
    torch.save(network_weights(segmenter), tmp_path / "foreign.pt")
    (tmp_path / "noise.pt").write_bytes(bytes(range(256)) * 20)
    damaged = bytearray(save_model(tmp_path / "damaged.pt", segmenter).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(damaged)
    for name, message in {
        "hostile.pt": "it holds more than tensors and primitives",
        "foreign.pt": "is no checkpoint of this trainer",
        "noise.pt": "is no checkpoint that can be read",
        "damaged.pt": "is damaged: its bytes do not match its digest",
        "missing.pt": "no checkpoint",
    }.items():
        with pytest.raises(CheckpointError, match=message) as refusal:
            read_model(tmp_path / name)
        assert "\n" not in str(refusal.value)


@pytest.fixture
def unchecked(monkeypatch):
    """What is saved is not looked at, as if another program had saved it."""
    monkeypatch.setattr("unet_trainer.runs.checkpoint_file._first_non_finite", lambda stored: None)


SPEC_CONTENT = SPEC.to_dict()


@pytest.mark.parametrize(
    "content",
    [
        {"model": None},
        {"model": {"a": 1}},
        {"model": {1: torch.zeros(1)}},
        {"spec": {}},
        {"spec": "unet"},
        {"spec": {**SPEC_CONTENT, "num_classes": -1}},
        {"spec": {**SPEC_CONTENT, "image_size": [10**9, 10**9]}},
        {"spec": {**SPEC_CONTENT, "id_names": ["one"]}},
        {"spec": {**SPEC_CONTENT, "image": {**SPEC_CONTENT["image"], "mean": [0.0]}}},
        {"spec": {**SPEC_CONTENT, "image": {**SPEC_CONTENT["image"], "gamma": 2.2}}},
        {"spec": {**SPEC_CONTENT, "coding": {"values": [0, 2**80], "threshold": 0, "ignore_value": None}}},
        {"config": None},
        {"config": {}, "spec": None},
        {"config": early_config(mask_values="auto"), "spec": None},
        {"metrics": [1]},
        {"metrics": {"val_iou": "high"}},
        {"epoch": "third"},
        {"version": 9},
        {"ema": {"model": 3}},
    ],
    ids=lambda content: " ".join(content),
)
def test_a_whole_file_with_content_that_no_run_saves_is_refused_in_one_sentence(content, segmenter, tmp_path, unchecked):
    path = save_model(tmp_path / "best.pt", segmenter, **content)
    with pytest.raises(CheckpointError, match="is no checkpoint that can be used") as refusal:
        read_model(path)
    assert "\n" not in str(refusal.value)


def test_weights_that_are_not_finite_are_named(segmenter, tmp_path, unchecked):
    weights = {**network_weights(segmenter), "encoder.0.bias": torch.tensor([float("nan")] * 4)}
    with pytest.raises(CheckpointError, match=r"no checkpoint that can be used \(encoder\.0\.bias is not finite\)"):
        read_model(save_model(tmp_path / "best.pt", segmenter, model=weights))


def test_statistics_of_other_images_are_kept_as_they_are(tmp_path):
    spec = small_spec(ImageSpec(2, "int16", (-20.5, 7.0), (3.0, 4.0), -100.0, 100.0))
    card, _ = read_model(save_model(tmp_path / "best.pt", small_segmenter(spec)))
    assert card.spec == spec
