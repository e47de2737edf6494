"""The forward pass as a CUDA graph: what the engine computes, and the engine itself wherever there can be no graph."""

from __future__ import annotations

import pytest
import torch

from helpers.checkpoints import random_batch, random_segmenter, save_model, small_segmenter, small_spec
from helpers.steps import SmallNetwork, make_spec
from unet_trainer.inference import forward_graphs
from unet_trainer.inference.engine import TorchEngine
from unet_trainer.inference.forward_graphs import MAX_GRAPHS, NUM_BEFORE_CAPTURE, ForwardGraphs

SPEC = small_spec(num_classes=3)
REAL = make_spec(encoder="resnet18", decoder_channels=(8, 8, 8, 8, 8))


@pytest.fixture
def engine(monkeypatch, tmp_path):
    build = "unet_trainer.inference.engine.build_network"
    monkeypatch.setattr(build, lambda spec, encoder_weights: SmallNetwork(spec.image.channels, spec.num_classes))
    return TorchEngine(save_model(tmp_path / "best.pt", small_segmenter(SPEC)), device="cpu")


class FakeGraph:
    def __init__(self, engine, shape, dtype):
        self.shape, self.dtype = shape, dtype

    def replay(self, images):
        return self


def test_on_a_cpu_the_engine_computes(engine):
    graphs, images = ForwardGraphs(engine), random_batch(SPEC, 2, 32, 32)
    for _ in range(NUM_BEFORE_CAPTURE + 1):
        assert torch.equal(graphs.logits(images), engine.logits(images))
    assert graphs.graphs == {}


def test_a_shape_that_comes_again_and_again_gets_a_graph_and_others_do_not(engine, monkeypatch):
    monkeypatch.setattr(forward_graphs, "_Graph", FakeGraph)
    graphs = ForwardGraphs(engine)
    images, other = random_batch(SPEC, 2, 32, 32), random_batch(SPEC, 1, 32, 32)
    engine.device = torch.device("cuda")  # asked before a capture; the network itself stays on the CPU
    monkeypatch.setattr(engine, "logits", lambda images: "computed")
    found = [graphs.logits(images) for _ in range(NUM_BEFORE_CAPTURE)]
    assert found[:-1] == ["computed"] * (NUM_BEFORE_CAPTURE - 1)
    assert (found[-1].shape, found[-1].dtype) == ((2, 32, 32, 3), torch.uint8)
    assert graphs.logits(other) == "computed"


def test_the_number_of_graphs_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(forward_graphs, "_Graph", FakeGraph)
    engine.device = torch.device("cuda")
    graphs = ForwardGraphs(engine)
    for side in (32, 64, 96, 128):
        graphs.prepare((1, side, side, 3), torch.uint8)
    assert len(graphs.graphs) == MAX_GRAPHS


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
