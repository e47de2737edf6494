"""The file of a model: found by what a user names, read whatever wrote it, refused in one sentence where it cannot be used."""

from __future__ import annotations

import json

import pytest
import torch

from helpers.checkpoints import make_card, save_model, small_segmenter, small_spec
from helpers.steps import make_settings, small_components
from unet_trainer.config.errors import CheckpointError
from unet_trainer.inference.engine import SMP_CARD, ModelCard, find_model, read_model, symmetries_of
from unet_trainer.model.network import AUXILIARY
from unet_trainer.model.segmenter import network_weights
from unet_trainer.training.checkpoint_file import write_checkpoint

SPEC = small_spec()


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(SPEC)


def same_weights(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# What RUN | FILE means


def test_the_last_state_is_named_where_there_is_no_best_yet(segmenter, tmp_path):
    last = save_model(tmp_path / "run/last.pt", segmenter)
    with pytest.raises(CheckpointError, match=r"has no best.pt yet; name .*last.pt to use the last state"):
        find_model(last.parent)
    assert find_model(last.parent, raw=True) == last


def test_a_folder_without_a_model_is_told_as_such(segmenter, tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(CheckpointError, match=r"photos is not a run folder \(no best.pt\); name one, or a .pt or .onnx file$"):
        find_model(tmp_path / "photos")
    with pytest.raises(CheckpointError, match="photos is not a run folder"):
        find_model("photos", tmp_path)


@pytest.mark.parametrize("name", ["model.pt2", "model_smp"])
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
        "hostile.pt": "more than tensors and primitives",
        "foreign.pt": "is not a checkpoint of this trainer",
        "noise.pt": "is not a checkpoint that can be read",
        "damaged.pt": "is damaged: its bytes do not match its digest",
        "missing.pt": "no checkpoint",
    }.items():
        with pytest.raises(CheckpointError, match=message) as refusal:
            read_model(tmp_path / name)
        assert "\n" not in str(refusal.value)


@pytest.fixture
def unchecked(monkeypatch):
    """What is saved is not looked at, as if another program had saved it."""
    monkeypatch.setattr("unet_trainer.training.checkpoint_file._first_non_finite", lambda stored: None)


SPEC_CONTENT = SPEC.to_dict()


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"a": 1}},
        {"spec": {**SPEC_CONTENT, "image_size": [10**9, 10**9]}},
        {"spec": {**SPEC_CONTENT, "image": {**SPEC_CONTENT["image"], "gamma": 2.2}}},
        {"spec": None},
        {"config": None},
        {"metrics": {"val_iou": "high"}},
        {"epoch": "third"},
        {"ema": {"model": 3}},
    ],
    ids=lambda content: " ".join(content),
)
def test_a_whole_file_with_content_that_no_run_saves_is_refused_in_one_sentence(content, segmenter, tmp_path, unchecked):
    path = save_model(tmp_path / "best.pt", segmenter, **content)
    with pytest.raises(CheckpointError, match="is not a checkpoint") as refusal:
        read_model(path)
    assert "\n" not in str(refusal.value)


# The card


def changed(**values):
    content = json.loads(make_card(SPEC).to_json())
    return json.dumps({**content, **values})


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"format": 1}',
        changed(format=2),
        changed(symmetries=["mirror"]),
        changed(epoch=1.5),
        changed(spec={**SPEC_CONTENT, "num_classes": 0}),
    ],
)
def test_text_that_is_no_card_is_refused(text):
    with pytest.raises((KeyError, TypeError, ValueError)):
        ModelCard.from_json(text)


@pytest.mark.parametrize(
    ("augmentation", "expected"),
    [
        ("none", ()),
        ("default", ("horizontal_flip", "vertical_flip")),
        ([{"VerticalFlip": {"p": 0.5}}, "HorizontalFlip"], ("horizontal_flip", "vertical_flip")),
        ([{"RandomRotate90": {}}, {"GaussNoise": {}}], ("quarter_turn",)),
        (["D4"], ("horizontal_flip", "vertical_flip", "quarter_turn")),
        ([7, {}], ()),
    ],
)
def test_symmetries_are_those_that_the_augmentation_taught(augmentation, expected):
    assert symmetries_of(augmentation) == expected


def test_weights_that_are_not_finite_are_named(segmenter, tmp_path, unchecked):
    weights = {**network_weights(segmenter), "encoder.0.bias": torch.tensor([float("nan")] * 4)}
    with pytest.raises(CheckpointError, match=r"not a checkpoint that can be used \(encoder\.0\.bias is not finite\)"):
        read_model(save_model(tmp_path / "best.pt", segmenter, model=weights))
