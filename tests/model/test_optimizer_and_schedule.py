"""The learning rate at steps where it can be computed by hand, and how optimizers are built."""

import math

import pytest
import torch

from helpers.steps import make_spec
from unet_trainer.model.optimizer_and_schedule import Ema, LearningRate, parameter_groups
from unet_trainer.model.segmenter import Segmenter


def test_the_warm_up_rises_in_equal_steps_to_the_peak():
    rate = LearningRate(0.5, "cosine", num_epochs=5, steps_per_epoch=5, num_warmup_steps=5)
    assert [rate.at(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert rate.at(5) == pytest.approx(0.5)
    rate.end = 10  # the time ends sooner: the warm-up is as much shorter
    assert [rate.at(step) for step in range(3)] == pytest.approx([0.25, 0.5, 0.5])


def test_cosine_halves_in_the_middle_and_ends_at_0():
    # 20 steps after the warm-up.
    rate = LearningRate(1.0, "cosine", num_epochs=5, steps_per_epoch=5, num_warmup_steps=5)
    assert rate.at(5 + 5) == pytest.approx(0.5 * (1 + math.sqrt(0.5)))
    assert rate.at(5 + 10) == pytest.approx(0.5)
    assert rate.at(5 + 15) == pytest.approx(0.5 * (1 - math.sqrt(0.5)))
    assert 0 < rate.at(24) < 0.01
    assert rate.at(25) == pytest.approx(0.0)
    assert rate.at(40) == pytest.approx(0.0)  # never rises again


def test_poly_falls_with_the_power_0_9_and_ends_at_0():
    rate = LearningRate(2.0, "poly", num_epochs=4, steps_per_epoch=5)
    assert rate.at(10) == pytest.approx(2 * 0.5**0.9)
    assert rate.at(15) == pytest.approx(2 * 0.25**0.9)
    assert rate.at(20) == 0.0
    assert rate.at(30) == 0.0


def test_plateau_drops_after_each_patience_without_improvement():
    rate = LearningRate(1.0, "plateau", num_epochs=50, steps_per_epoch=1, plateau_patience=2, plateau_factor=0.1)
    for epochs_since_best, expected in enumerate([1, 1, 0.1, 0.1, 0.01, 0.01]):
        rate.end_epoch(epochs_since_best)
        assert rate.at(0) == pytest.approx(expected)


def test_biases_and_normalisation_have_no_weight_decay():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 2),
        torch.nn.LayerNorm(2),
    )
    decayed, plain = parameter_groups(model, 0.01)
    conv, norm, _, linear, layer_norm = model
    assert {id(p) for p in decayed["params"]} == {id(conv.weight), id(linear.weight)}
    assert {id(p) for p in plain["params"]} == {
        id(p) for p in (conv.bias, linear.bias, *norm.parameters(), *layer_norm.parameters())
    }
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)


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


def test_the_average_equals_the_hand_computed_one_over_three_updates():
    segmenter = one_number(0.0, 0)
    ema = Ema(segmenter, decay=0.999)
    average = ema.segmenter.network
    expected = 0.0
    for update, value, kept in ((1, 1.0, 2 / 11), (2, 2.0, 3 / 12), (3, 3.0, 4 / 13)):  # kept = (1 + n) / (10 + n)
        write(segmenter, value, count=update * 7)
        ema.update(torch.tensor(True))
        expected = kept * expected + (1 - kept) * value
        assert average.weight.item() == pytest.approx(expected, rel=1e-6)
        assert average.running_mean.item() == pytest.approx(10 * expected, rel=1e-6)  # buffers are averaged too
        assert average.num_batches_tracked.item() == update * 7  # counters are copied
    assert expected == pytest.approx(2.601399, abs=1e-6)
    assert ema.num_updates == 3


def test_a_weight_that_has_two_names_moves_once():
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Conv2d(1, 1, 1))
    network[1].weight = network[0].weight
    segmenter = Segmenter(make_spec(), network, channels_last=False)
    torch.nn.init.zeros_(network[0].weight)
    ema = Ema(segmenter, decay=0.5)
    torch.nn.init.ones_(network[0].weight)
    ema.num_updates += 100  # the decay has risen to 0.5
    ema.update(torch.tensor(True))
    assert ema.segmenter.network[1].weight.item() == 0.5
