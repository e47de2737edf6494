"""The moving average of weights and buffers: by hand, and what it must not touch."""

from __future__ import annotations

import pytest
import torch

from helpers.steps import make_spec, plain_segmenter
from unet_trainer.model.optimizer import Ema
from unet_trainer.model.segmenter import Segmenter

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def one_number(value, count):
    """A segmenter with one weight, one float buffer and one counter that matter."""
    segmenter = Segmenter(make_spec(), torch.nn.BatchNorm2d(1), channels_last=False)
    write(segmenter, value, count)
    return segmenter


@torch.no_grad()
def write(segmenter, value, count):
    segmenter.network.weight.fill_(value)
    segmenter.network.running_mean.fill_(10 * value)
    segmenter.network.num_batches_tracked.fill_(count)


def with_batch_norm():
    segmenter = plain_segmenter()
    segmenter.network.insert(1, torch.nn.BatchNorm2d(4))
    return segmenter.train()


def train_once(segmenter):
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(segmenter.parameters(), lr=0.1)
    segmenter(images).square().mean().backward()
    optimizer.step()


def snapshot(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(before, module):
    return [name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])]


def test_the_average_equals_the_hand_computed_one_over_three_updates():
    segmenter = one_number(0.0, 0)
    ema = Ema(segmenter, decay=0.999)
    average = ema.segmenter.network
    expected = 0.0
    for update, value, kept in ((1, 1.0, 2 / 11), (2, 2.0, 3 / 12), (3, 3.0, 4 / 13)):  # kept = (1 + n) / (10 + n)
        write(segmenter, value, count=update * 7)
        ema.update(GOOD)
        expected = kept * expected + (1 - kept) * value
        assert average.weight.item() == pytest.approx(expected, rel=1e-6)
        assert average.running_mean.item() == pytest.approx(10 * expected, rel=1e-6)  # buffers are averaged too
        assert average.num_batches_tracked.item() == update * 7  # counters are copied
    assert expected == pytest.approx(2.601399, abs=1e-6)
    assert ema.num_updates == 3


def test_the_average_is_a_copy_in_evaluation_mode_without_gradients():
    segmenter = with_batch_norm()
    train_once(segmenter)  # gradients are there
    ema = Ema(segmenter, decay=0.9)
    assert segmenter.training
    assert not ema.segmenter.training
    assert not any(parameter.requires_grad for parameter in ema.segmenter.parameters())
    assert all(parameter.requires_grad for parameter in segmenter.parameters())
    assert all(parameter.grad is None for parameter in ema.segmenter.parameters())
    before = snapshot(ema.segmenter)
    train_once(segmenter)
    assert changed(before, ema.segmenter) == []
    ema.update(GOOD)
    assert changed(before, ema.segmenter) == list(before)
    assert all(parameter.grad is None for parameter in ema.segmenter.parameters())


def test_a_bad_step_leaves_the_average_its_buffers_and_its_count_as_they_are():
    segmenter = with_batch_norm()
    ema = Ema(segmenter, decay=0.9)
    train_once(segmenter)
    ema.update(GOOD)
    before = snapshot(ema.segmenter)
    train_once(segmenter)
    ema.update(BAD)
    assert changed(before, ema.segmenter) == []
    assert ema.num_updates == 1
