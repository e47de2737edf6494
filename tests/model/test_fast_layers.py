"""The fast layers compute what the ordinary ones compute, forward and backward, with the same parameters."""

from __future__ import annotations

import copy

import pytest
import segmentation_models_pytorch as smp
import torch

from unet_trainer.model.fast_layers import DecoderBlock, HeadConv, StemConv, repeat_pixels, use_fast_layers


def gradients(module, inputs):
    module.zero_grad()
    inputs = inputs.clone().requires_grad_()
    output = module(inputs)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return [output.detach(), inputs.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(fast, plain, inputs):
    for ours, theirs in zip(gradients(fast, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_pixels_are_repeated_two_by_two():
    features = torch.arange(4.0).view(1, 1, 2, 2)
    assert repeat_pixels(features)[0, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    random = torch.randn(2, 5, 3, 7)
    assert torch.equal(repeat_pixels(random), torch.nn.functional.interpolate(random, scale_factor=2, mode="nearest"))


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("size", [(32, 32), (64, 96)])
def test_the_stem_equals_a_convolution_of_stride_two(channels, size):
    plain = torch.nn.Conv2d(channels, 5, 7, 2, 3, bias=channels == 1, dtype=torch.float64)
    fast = copy.deepcopy(plain)
    fast.__class__ = StemConv
    assert_same(fast, plain, torch.randn(2, channels, *size, dtype=torch.float64))


@pytest.mark.parametrize("classes", [1, 3, 9])
def test_the_head_equals_a_convolution_with_few_outputs(classes):
    plain = torch.nn.Conv2d(16, classes, 3, padding=1, dtype=torch.float64)
    fast = copy.deepcopy(plain)
    fast.__class__ = HeadConv
    assert_same(fast, plain, torch.randn(2, 16, 12, 20, dtype=torch.float64))


@pytest.mark.parametrize(("kind", "arguments"), [(StemConv, (3, 8, 7, 2, 3)), (HeadConv, (16, 1, 3, 1, 1))], ids=["stem", "head"])
def test_a_gradient_lies_in_memory_as_its_weight_does(kind, arguments):
    """Else torch copies it to some other place, a new one from time to time, and what was recorded for the old one is of no use."""
    layer = torch.nn.Conv2d(*arguments).to(memory_format=torch.channels_last)
    layer.__class__ = kind
    output = layer(torch.randn(2, arguments[0], 32, 32).contiguous(memory_format=torch.channels_last))
    (gradient,) = torch.autograd.grad(output.square().sum(), layer.weight)
    assert gradient.stride() == layer.weight.stride()


def test_a_whole_model_computes_the_same_and_saves_the_same():
    torch.manual_seed(0)
    plain = smp.Unet("resnet18", encoder_weights=None, decoder_channels=(16, 8, 8, 8, 8)).double()
    fast = copy.deepcopy(plain)
    use_fast_layers(fast)
    kinds = [type(module) for module in fast.modules()]
    assert kinds.count(DecoderBlock) == 5
    assert kinds.count(StemConv) == 1
    assert kinds.count(HeadConv) == 1
    assert list(fast.state_dict()) == list(plain.state_dict())
    assert_same(fast, plain, torch.randn(2, 3, 64, 96, dtype=torch.float64))


def test_other_layers_are_left_as_they_are():
    for model in (
        smp.Unet("tu-mobilenetv3_small_050", encoder_weights=None, classes=8),
        smp.Linknet("resnet18", encoder_weights=None, classes=8, in_channels=5),
    ):
        before = [type(module) for module in model.modules()]
        use_fast_layers(model)
        after = [type(module) for module in model.modules()]
        assert StemConv not in after
        assert HeadConv not in after
        assert [kind for kind in after if kind is not DecoderBlock] == [
            kind for kind in before if kind.__name__ != "UnetDecoderBlock"
        ]
