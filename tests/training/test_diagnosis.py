"""What is not finite is named: file, weights, layer, term of the loss, gradient."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from test_step import make_batch, tiny_machine

from unet_trainer.model import losses
from unet_trainer.training import diagnosis

FILES = [Path("images/a.tif"), Path("images/b.tif")]


def explain(machine, batch=None):
    return diagnosis.explain(machine.state.model, machine.loss, machine.numerics, batch or make_batch(2, side=32), FILES)


def test_nothing_is_found_where_all_is_finite():
    assert explain(tiny_machine()) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pixel_is_named_by_its_file(value):
    batch = make_batch(2, side=32)
    images = batch.images.float()
    images[1, 5, 6, 0] = value
    found = explain(tiny_machine(), batch._replace(images=images))
    assert found.startswith(
        "images/b.tif holds pixels that are NaN or infinite; the first layer whose output is not finite is encoder."
    )


def test_the_first_layer_is_named_and_not_those_that_it_spoils():
    machine = tiny_machine()
    machine.state.model.get_submodule("decoder.blocks.1.conv1.0").register_forward_hook(
        lambda module, inputs, output: output * math.inf
    )
    found = explain(machine)
    assert found.startswith("the first layer whose output is not finite is decoder.blocks.1.conv1.0; the loss term ")


def test_weights_are_named_before_what_comes_of_them():
    machine = tiny_machine()
    with torch.no_grad():
        machine.state.model.get_parameter("segmentation_head.0.weight")[0, 0, 0, 0] = math.nan
    assert explain(machine).startswith("the weights segmentation_head.0.weight are not finite; ")


def test_a_term_of_the_loss_is_named(monkeypatch):
    monkeypatch.setitem(losses.TERMS, "dice", lambda target: target.logits.sum() * math.nan)
    assert explain(tiny_machine(loss={"bce": 1.0, "dice": 1.0})) == "the loss term dice is not finite"


def test_a_gradient_is_named_where_the_loss_is_fine(monkeypatch):
    monkeypatch.setitem(losses.TERMS, "dice", lambda target: (target.logits.sum() * 0).sqrt())  # the root's slope at 0
    assert explain(tiny_machine(loss="dice")).startswith("the loss is finite, the gradient of encoder.")


def test_no_hook_stays():
    machine = tiny_machine()
    explain(machine)
    assert not any(module._forward_hooks for module in machine.state.model.modules())
