"""The training step: accumulation, parts of a batch, clipping, precision, skipped steps."""

import math

import pytest
import torch

from helpers.steps import (
    CPU,
    make_batch,
    make_step,
    plain_segmenter,
    small_components,
    take_step,
    tiny_components,
    weights,
)
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.loader import cut_boxes, paste_pieces
from unet_trainer.training.state import EpochMetrics


def test_accumulation_equals_the_big_batch():
    whole, parts = plain_segmenter(), plain_segmenter()
    batch = make_batch(8)
    take_step(make_step(whole), batch, learning_rate=0.5)
    small = (Batch(*pair, 2) for pair in zip(batch.images.split(2), batch.masks.split(2), strict=True))
    take_step(make_step(parts), *small, learning_rate=0.5)
    assert torch.allclose(weights(whole), weights(parts), atol=1e-7)
    assert not torch.allclose(weights(whole), weights(plain_segmenter()), atol=1e-3)


def test_a_step_of_several_batches_adds_into_no_memory_of_a_backward_pass_before():
    """Which a replayed graph overwrites: after a step of one batch gradients are new tensors."""
    step, batch = make_step(plain_segmenter()), make_batch(2)
    take_step(step, batch)
    of_one = [parameter.grad for parameter in step.parameters]
    take_step(step, batch, batch, batch)
    of_three = [parameter.grad for parameter in step.parameters]
    assert not {id(one) for one in of_one} & {id(three) for three in of_three}
    take_step(step, batch, batch)
    assert all(one is other for one, other in zip(of_three, (each.grad for each in step.parameters), strict=True))


def encoder_and_decoder(components):
    network = components.state.segmenter.network
    return tuple(
        torch.cat([parameter.detach().flatten() for parameter in part.parameters()])
        for part in (network.encoder, network.decoder)
    )


def test_the_encoder_moves_by_its_factor_and_the_decoder_by_the_whole():
    """The first step of SGD is proportional to the rate."""
    moved = []
    for factor in (1.0, 0.25):
        components = small_components(optimizer="sgd", weight_decay=0.0, encoder_lr_factor=factor)
        before = encoder_and_decoder(components)
        take_step(components.train_step, make_batch(4), learning_rate=0.5)
        after = encoder_and_decoder(components)
        moved.append([now - then for then, now in zip(before, after, strict=True)])
    (encoder, decoder), (slow_encoder, same_decoder) = moved
    assert encoder.abs().max() > 1e-4
    torch.testing.assert_close(slow_encoder, encoder / 4, rtol=1e-3, atol=1e-7)
    assert torch.equal(same_decoder, decoder)


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_gradients_are_clipped_after_unscaling(scale):
    """The length of an SGD step is learning rate × clipped norm, whatever the loss scale."""
    segmenter = plain_segmenter()
    before = weights(segmenter)
    step = make_step(segmenter, scaler=torch.amp.GradScaler("cpu", init_scale=scale), grad_clip=0.01)
    take_step(step, make_batch(4), learning_rate=1.0)
    assert (weights(segmenter) - before).norm().item() == pytest.approx(0.01, rel=1e-3)


def test_mixed_precision_computes_convolutions_in_bfloat16_and_keeps_weights_and_optimizer_state_in_float32():
    components = tiny_components(use_amp=True, amp_dtype="bfloat16", ema_decay=0.9)
    seen, state = [], components.state
    for module in state.segmenter.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    metrics = take_step(components.train_step, make_batch(2, side=32))
    assert set(seen) == {torch.bfloat16}
    tensors = [*state.segmenter.state_dict().values(), *state.ema.segmenter.state_dict().values()]
    tensors += [value for entry in state.optimizer.state.values() for value in entry.values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32, torch.int64}  # int64: batch norm's counter
    assert math.isfinite(metrics.loss())


def test_gradients_reach_every_layer_and_padding_counts_nowhere_at_any_size():
    components = tiny_components()
    batch = make_batch(2, side=70)
    batch = Batch(batch.images[:, :50], batch.masks[:, :50], 2)
    metrics = EpochMetrics(1, CPU)
    step, segmenter = components.train_step, components.state.segmenter
    before = weights(segmenter)
    take_step(step, batch, metrics=metrics)
    assert int(metrics.matrix.sum()) == 2 * 50 * 70
    gradients = [parameter.grad.abs().sum().item() for parameter in segmenter.parameters()]
    assert all(math.isfinite(gradient) for gradient in gradients)
    assert sum(gradient > 0 for gradient in gradients) > 0.9 * len(gradients)
    assert not torch.equal(weights(segmenter), before)


def test_a_batch_in_parts_has_the_gradient_and_the_loss_of_the_whole():
    """Means over pixels, on a model without batch norm. Three parts of eight images are of unequal size."""
    whole, parts = plain_segmenter(), plain_segmenter()
    batch = make_batch(8)
    for mask, num_ignored in zip(batch.masks, [0, 100, 256, 30, 200, 0, 250, 5], strict=True):  # of 256 pixels
        mask.view(-1)[:num_ignored] = 255
    expected, metrics = (
        take_step(make_step(segmenter, loss="cross_entropy", num_parts=num_parts), batch, learning_rate=0.5)
        for segmenter, num_parts in ((whole, 1), (parts, 3))
    )
    assert torch.allclose(weights(whole), weights(parts), atol=1e-7)
    assert not torch.allclose(weights(whole), weights(plain_segmenter()), atol=1e-3)
    assert metrics.loss() == pytest.approx(expected.loss(), rel=1e-6)
    assert torch.equal(metrics.matrix, expected.matrix)
    assert metrics.num_images == 8


@pytest.mark.parametrize("num_parts", [1, 2])
def test_pieces_of_other_images_are_trained_on_with_their_masks(num_parts):
    """CutMix takes them from the whole batch, whatever the parts that it goes through the model in."""
    mixed, expected = plain_segmenter(), plain_segmenter()
    batch = make_batch(4)
    boxes = cut_boxes((0, 0, 0), 4, (16, 16), 1.0)
    images, masks = paste_pieces(batch.images, batch.masks, boxes)
    assert not torch.equal(masks, batch.masks)
    found = take_step(make_step(mixed, num_parts=num_parts), batch._replace(cut_boxes=boxes), learning_rate=0.5)
    known = take_step(
        make_step(expected, num_parts=num_parts), batch._replace(images=images, masks=masks), learning_rate=0.5
    )
    assert torch.equal(weights(mixed), weights(expected))
    assert torch.equal(found.matrix, known.matrix)
