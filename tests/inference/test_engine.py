"""What computes logits from a checkpoint: the network as it was trained, nothing of what served training, any size."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import random_batch, random_segmenter, save_model, small_segmenter, small_spec
from helpers.steps import SmallNetwork, make_spec
from unet_trainer.config.errors import CheckpointError
from unet_trainer.inference.engine import (
    NUM_BEFORE_CAPTURE,
    ForwardGraphs,
    SymmetricEngine,
    TorchEngine,
    build_segmenter,
)
from unet_trainer.model.fast_layers import DecoderBlock, StemConv, use_fast_layers
from unet_trainer.model.network import add_auxiliary_heads

SPEC = small_spec(num_classes=3)
REAL = make_spec(encoder="resnet18", decoder_channels=(8, 8, 8, 8, 8))
TINY = make_spec(decoder_channels=(8, 8, 8, 8, 8))


@pytest.fixture
def small_networks(monkeypatch):
    build = "unet_trainer.inference.engine.build_network"
    monkeypatch.setattr(build, lambda spec, encoder_weights: SmallNetwork(spec.image.channels, spec.num_classes))


@pytest.fixture
def engine(small_networks, tmp_path):
    return TorchEngine(save_model(tmp_path / "best.pt", small_segmenter(SPEC)), device="cpu")


def test_an_engine_computes_what_the_model_computed_before_it_was_saved(engine):
    images = random_batch(SPEC, 2, 37, 50)
    assert torch.equal(engine.logits(images), small_segmenter(SPEC)(images))
    assert (engine.description, engine.device.type, engine.card.spec) == ("cpu, float32", "cpu", SPEC)


def test_layers_for_speed_and_heads_of_training_leave_no_trace(tmp_path):
    """A compiled run on a GPU with deep supervision saves these."""
    segmenter = random_segmenter(REAL)
    images = random_batch(REAL, 1, 64, 64)
    expected = segmenter(images)
    add_auxiliary_heads(segmenter.network, num_classes=1)
    use_fast_layers(segmenter.network)
    assert {DecoderBlock, StemConv} <= {type(module) for module in segmenter.network.modules()}
    weights = dict(segmenter.network.state_dict())  # plain, as a run saves it
    assert any(name.startswith("auxiliary.") for name in weights)
    _, built = build_segmenter(save_model(tmp_path / "last.pt", segmenter, model=weights))
    assert not {DecoderBlock, StemConv} & {type(module) for module in built.network.modules()}
    assert not hasattr(built.network, "auxiliary")
    assert torch.equal(built(images), expected)
    assert not any(parameter.requires_grad for parameter in built.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "tu-mobilenetv2_050"}, "the weights do not fit unet with tu-mobilenetv2_050 as it is built here .Missing key"),
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


# Mirrored and turned images


def test_logits_are_the_mean_over_the_views_turned_back(engine):
    images = random_batch(SPEC, 1, 32, 48)
    by_hand = engine.logits(images) + engine.logits(images.flip(2).contiguous()).flip(3)
    by_hand += engine.logits(images.flip(1).contiguous()).flip(2) + engine.logits(images.flip(1, 2).contiguous()).flip(2, 3)
    symmetric = SymmetricEngine(engine, ("horizontal_flip", "vertical_flip"))
    assert torch.allclose(symmetric.logits(images), by_hand / 4, atol=1e-6)
    assert symmetric.description == "cpu, float32, mean of 4 views"


# CUDA graphs


@pytest.mark.gpu
def test_a_graph_gives_what_the_engine_gives_for_every_batch(tmp_path):
    engine = TorchEngine(save_model(tmp_path / "best.pt", random_segmenter(REAL)), device="cuda")
    graphs = ForwardGraphs(engine)
    images = random_batch(REAL, NUM_BEFORE_CAPTURE + 6, 64, 64)
    batches = [images[number : number + 4] for number in range(NUM_BEFORE_CAPTURE + 3)]
    for images in batches:
        assert torch.allclose(graphs.logits(images), engine.logits(images), atol=1e-3)
    assert [graph is not None for graph in graphs.graphs.values()] == [True]
    assert torch.allclose(graphs.logits(batches[0][:2]), engine.logits(batches[0][:2]), atol=1e-3)
