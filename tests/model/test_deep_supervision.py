"""Auxiliary heads learn in training, and leave no trace in the model that is used."""

from __future__ import annotations

import pytest
import torch

from helpers.steps import FLOAT32, make_batch, make_spec, tiny_components
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.network import SHARES, STRIDES, add_auxiliary_heads, auxiliary_loss, build_network, forward_with_auxiliary
from unet_trainer.model.segmenter import Segmenter, deployable_weights
from unet_trainer.training.step import build_train_forward


@pytest.fixture
def segmenter():
    torch.manual_seed(0)
    spec = make_spec(num_classes=3, encoder="resnet18", decoder_attention="scse")
    network = build_network(spec, None)
    add_auxiliary_heads(network, 3)
    return Segmenter(spec, network, channels_last=True)


def images(height=64, width=64):
    return torch.randint(0, 256, (2, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_the_logits_are_those_of_the_network_itself(segmenter):
    segmenter.eval()
    with torch.no_grad():
        logits, _ = forward_with_auxiliary(segmenter, images(64, 96))
        assert torch.equal(logits, segmenter(images(64, 96)))


def test_the_loss_is_the_weighted_sum_over_strided_masks():
    loss = WeightedLoss({"cross_entropy": 1.0}, 3, None)
    masks = torch.randint(0, 3, (2, 48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    auxiliary = [torch.randn(2, 3, 64 // stride, 64 // stride) for stride in STRIDES]
    expected = 0.0
    for logits, stride, share in zip(auxiliary, STRIDES, SHARES, strict=True):
        small = masks[:, stride // 2 :: stride, stride // 2 :: stride].long()
        expected += share * torch.nn.functional.cross_entropy(logits[:, :, : small.shape[1], : small.shape[2]], small)
    assert auxiliary_loss(loss, auxiliary, masks, None) == pytest.approx(float(expected), rel=1e-5)


def test_training_adds_the_losses_of_the_heads(segmenter):
    loss = WeightedLoss({"cross_entropy": 1.0}, 3, None)
    masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
    segmenter.eval()
    plain, _ = build_train_forward(segmenter, loss, FLOAT32)(images(), masks, None)
    plain = plain.detach()
    value, _ = build_train_forward(segmenter, loss, FLOAT32, deep_supervision=0.5)(images(), masks, None)
    with torch.no_grad():
        _, auxiliary = forward_with_auxiliary(segmenter, images())
    assert float(value.detach()) == pytest.approx(float(plain + 0.5 * auxiliary_loss(loss, auxiliary, masks, None)), rel=1e-5)


def test_the_model_that_is_used_has_no_heads(segmenter):
    bare = build_network(segmenter.spec, None)
    weights = deployable_weights(segmenter)
    assert weights.keys() == bare.state_dict().keys()
    bare.load_state_dict(weights)


@pytest.mark.real_network
def test_a_step_trains_the_heads():
    components = tiny_components(deep_supervision=0.5, image_size=64)
    heads = components.state.segmenter.network.auxiliary
    before = [parameter.detach().clone() for parameter in heads.parameters()]
    step = components.train_step
    step.begin_group(1, 0)
    step(make_batch(2, side=64), components.state.metrics)
    step.optimizer_step(components.state.metrics, learning_rate=1e-2)
    after = list(heads.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
