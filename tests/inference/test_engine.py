"""What computes logits from a checkpoint: the network as it was trained, nothing of what served training, any size."""

import pytest
import torch

from helpers.checkpoints import random_batch, random_segmenter, save_model, small_segmenter, small_spec
from helpers.steps import SmallNetwork, make_settings, make_spec, small_components
from unet_trainer.config.errors import CheckpointError
from unet_trainer.inference.engine import (
    SMP_CARD,
    SymmetricEngine,
    TorchEngine,
    build_segmenter,
    find_model,
    read_model,
    symmetries_of,
)
from unet_trainer.model.fast_layers import DecoderBlock, StemConv, use_fast_layers
from unet_trainer.model.segmenter import network_weights
from unet_trainer.training.checkpoint import write_checkpoint

SPEC = small_spec(num_classes=3)
REAL = make_spec(encoder="resnet18", decoder_channels=(8, 8, 8, 8, 8))
TINY = make_spec(decoder_channels=(8, 8, 8, 8, 8))


@pytest.fixture
def engine(monkeypatch, tmp_path):
    build = "unet_trainer.inference.engine.build_network"
    monkeypatch.setattr(build, lambda spec, encoder_weights: SmallNetwork(spec.image.channels, spec.num_classes))
    return TorchEngine(save_model(tmp_path / "best.pt", small_segmenter(SPEC)), device="cpu")


def test_an_engine_computes_what_the_model_computed_before_it_was_saved(engine):
    images = random_batch(SPEC, 2, 37, 50)
    assert torch.equal(engine.logits(images), small_segmenter(SPEC)(images))
    assert (engine.description, engine.device.type, engine.card.spec) == ("cpu, float32", "cpu", SPEC)


def test_layers_for_speed_leave_no_trace(tmp_path):
    """A compiled run on a GPU saves these."""
    segmenter = random_segmenter(REAL)
    images = random_batch(REAL, 1, 64, 64)
    expected = segmenter(images)
    use_fast_layers(segmenter.network)
    assert {DecoderBlock, StemConv} <= {type(module) for module in segmenter.network.modules()}
    weights = dict(segmenter.network.state_dict())  # plain, as a run saves it
    _, built = build_segmenter(save_model(tmp_path / "last.pt", segmenter, model=weights))
    assert not {DecoderBlock, StemConv} & {type(module) for module in built.network.modules()}
    assert torch.equal(built(images), expected)
    assert not any(parameter.requires_grad for parameter in built.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"encoder": "tu-mobilenetv2_050"},
            "do not fit unet with tu-mobilenetv2_050 as it is built here .*Missing key",
        ),
        ({"encoder": "resnet81"}, "encoder: got 'resnet81'; did you mean"),
        ({"decoder_channels": [16, 8, 8, 8, 8]}, "size mismatch for decoder"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_sentence(changes, message, tmp_path):
    path = save_model(tmp_path / "best.pt", random_segmenter(TINY), spec={**TINY.to_dict(), **changes})
    with pytest.raises(CheckpointError, match=message) as refusal:
        TorchEngine(path)
    assert "\n" not in str(refusal.value)


def test_a_batch_that_does_not_fit_into_memory_is_halved(engine, monkeypatch):
    images = random_batch(SPEC, 5, 32, 32)
    expected = engine.logits(images)
    sizes = []
    forward = engine.segmenter.forward

    def forward_of_two(given):
        sizes.append(len(given))
        if len(given) > 2:
            raise torch.OutOfMemoryError
        return forward(given)

    monkeypatch.setattr(engine.segmenter, "forward", forward_of_two)
    assert torch.allclose(engine.logits(images), expected, atol=1e-6)
    assert sizes == [5, 2, 3, 1, 2]


def test_logits_are_the_mean_over_the_views_turned_back(engine):
    images = random_batch(SPEC, 1, 32, 48)
    axes = [(), (1,), (2,), (1, 2)]  # of N,H,W,C; logits are N,K,H,W
    views = [engine.logits(images.flip(each).contiguous()).flip([axis + 1 for axis in each]) for each in axes]
    symmetric = SymmetricEngine(engine, ("horizontal_flip", "vertical_flip"))
    assert torch.allclose(symmetric.logits(images), sum(views) / 4, atol=1e-6)
    assert symmetric.description == "cpu, float32, mean of 4 views"


# The file of a model


FILE_SPEC = small_spec()


@pytest.fixture(scope="module")
def segmenter():
    return small_segmenter(FILE_SPEC)


def same_weights(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


FOREIGN = r"is an export for other programs; name its run, or export that as \.onnx"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("photos", r"photos is not a run folder \(no best.pt\); name one, or a .pt or .onnx file$"),
        ("run", r"run has no best.pt; name .*last.pt to use the last state"),
        ("model.pt2", FOREIGN),
        ("model_smp", FOREIGN),
    ],
)
def test_what_is_no_model_is_answered_with_what_to_name(name, message, segmenter, tmp_path):
    last = save_model(tmp_path / "run/last.pt", segmenter)
    assert find_model(last.parent, raw=True) == last
    (tmp_path / "photos").mkdir()
    (tmp_path / "model_smp").mkdir()
    for file in ("model.pt2", f"model_smp/{SMP_CARD}"):
        (tmp_path / file).write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=message):
        find_model(tmp_path / name)


def test_a_checkpoint_gives_its_weights_and_what_is_known_of_them(segmenter, tmp_path):
    card, weights = read_model(save_model(tmp_path / "nuclei/best.pt", segmenter))
    assert same_weights(weights, network_weights(segmenter))
    assert (card.spec, card.run_name, card.epoch, card.val_iou, card.version) == (FILE_SPEC, "nuclei", 3, 0.5, "0.9.0")
    assert card.symmetries == ("horizontal_flip",)


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
    path = save_model(tmp_path / "best.pt", state.segmenter, config={"ema_decay": 0.999})
    message = r"^\S*best.pt holds averaged weights alone; the raw ones are in last.pt of the same run$"
    with pytest.raises(CheckpointError, match=message):
        read_model(path, raw=True)
    assert read_model(save_model(path, state.segmenter, config={"ema_decay": None}), raw=True)  # they are the raw ones


NAN = {**network_weights(small_segmenter(FILE_SPEC)), "encoder.0.bias": torch.tensor([float("nan")] * 4)}


@pytest.mark.parametrize(
    "content",
    [
        {"model": {"a": 1}},
        {"model": NAN},
        {"spec": {**FILE_SPEC.to_dict(), "image_size": [10**9, 10**9]}},
        {"spec": None},
        {"config": None},
        {"metrics": {"val_iou": "high"}},
        {"epoch": "third"},
        {"ema": {"model": 3}},
    ],
    ids=lambda content: " ".join(content),
)
def test_a_whole_file_with_content_that_no_run_saves_is_refused_in_one_sentence(
    content, segmenter, tmp_path, monkeypatch
):
    # As if another program had saved it.
    monkeypatch.setattr("unet_trainer.training.checkpoint._first_non_finite", lambda stored: None)
    path = save_model(tmp_path / "best.pt", segmenter, **content)
    with pytest.raises(CheckpointError, match="is not a checkpoint") as refusal:
        read_model(path)
    assert "\n" not in str(refusal.value)
    assert ("encoder.0.bias is not finite" in str(refusal.value)) == (content.get("model") is NAN)


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
