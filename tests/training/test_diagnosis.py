"""What is not finite is named: file, weights, layer, term of the loss, gradient."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from helpers.steps import make_batch, small_components
from unet_trainer.model import losses
from unet_trainer.training import diagnosis

FILES = [Path("images/a.tif"), Path("images/b.tif")]


@pytest.fixture
def components():
    return small_components(loss={"bce": 1.0, "dice": 1.0})


def explain(components, batch=None):
    batch = batch or make_batch(2, side=32)
    return diagnosis.explain(components.state.segmenter, components.loss, components.numerics, batch, FILES)


def test_nothing_is_found_where_all_is_finite(components):
    assert explain(components) == ""


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pixel_is_named_by_its_file(value, components):
    batch = make_batch(2, side=32)
    images = batch.images.float()
    images[1, 5, 6, 0] = value
    assert explain(components, batch._replace(images=images)) == (
        "images/b.tif holds pixels that are NaN or infinite; the first layer whose output is not finite is encoder.0; "
        "the loss term bce, dice is not finite"
    )


def test_padding_of_a_short_batch_belongs_to_no_file(components):
    batch = make_batch(4, side=32)
    images = batch.images.float()
    images[3, 5, 6, 0] = math.nan
    assert explain(components, batch._replace(images=images, num_images=2)).startswith("the first layer whose output")


def test_the_first_layer_is_named_and_not_those_after_it(components):
    components.state.segmenter.network.get_submodule("decoder.1").register_forward_hook(
        lambda module, inputs, output: output * math.inf
    )
    assert explain(components).startswith("the first layer whose output is not finite is decoder.1; the loss term ")


def test_weights_are_named_before_their_effects(components):
    with torch.no_grad():
        components.state.segmenter.network.get_parameter("segmentation_head.0.weight")[0, 0, 0, 0] = math.nan
    assert explain(components).startswith("the weights segmentation_head.0.weight are not finite; the first layer ")


def replace_dice(monkeypatch, value):
    """`value` of the logits in place of the Dice loss."""
    term = losses.TERMS["dice"]._replace(sums=lambda target: target.logits, value=lambda logits, *more: value(logits))
    monkeypatch.setitem(losses.TERMS, "dice", term)


def test_a_term_of_the_loss_is_named(monkeypatch, components):
    replace_dice(monkeypatch, lambda logits: logits.sum() * math.nan)
    assert explain(components) == "the loss term dice is not finite"


def test_a_gradient_is_named_where_the_loss_is_finite(monkeypatch, components):
    replace_dice(monkeypatch, lambda logits: (logits.sum() * 0).sqrt())  # the square root has an infinite slope at 0
    assert explain(components) == "the loss is finite, the gradient of encoder.0.weight is not"


def test_a_model_without_gradients_is_explained_too(components):
    """The average of the weights, which validation uses."""
    components.state.segmenter.requires_grad_(False)
    assert explain(components) == ""


def test_a_batch_with_masks_at_native_resolution_is_explained_too(monkeypatch, components):
    batch = make_batch(2, side=32)
    masks = torch.nn.functional.pad(batch.masks.repeat_interleave(2, 1), (0, 8), value=255)  # 64×32, padded to 64×40
    native = batch._replace(masks=masks, mask_sizes=((64, 32), (64, 32)))
    assert explain(components, native) == ""
    replace_dice(monkeypatch, lambda logits: logits.sum() * math.nan)
    assert explain(components, native) == explain(components, batch) == "the loss term dice is not finite"


def test_no_hook_remains(components):
    explain(components)
    assert not any(module._forward_hooks for module in components.state.segmenter.modules())
    components.state.segmenter.network.get_submodule("decoder.1").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        explain(components)
    assert not any(module._forward_hooks for module in components.state.segmenter.modules())


def fail(*arguments):
    raise RuntimeError("out of memory")
