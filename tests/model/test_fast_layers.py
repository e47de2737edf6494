"""The fast layers compute the same as the plain ones, forward and backward, with the same parameters."""

import copy

import pytest
import segmentation_models_pytorch as smp
import torch
from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoderBlock

from unet_trainer.model import fast_layers
from unet_trainer.model.fast_layers import (
    ArmConv,
    BatchNorm,
    DecoderBlock,
    HeadConv,
    LastDecoderBlock,
    MaxPool,
    StemConv,
    to_pixels,
    use_arm_convolutions,
    use_fast_layers,
)


def gradients(module, inputs):
    module.zero_grad()
    inputs = inputs.clone().requires_grad_()
    output = module(inputs)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return [output.detach(), inputs.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(fast, plain, inputs):
    for ours, theirs in zip(gradients(fast, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 4])
def test_the_stem_equals_a_convolution_of_stride_two(channels):
    plain = torch.nn.Conv2d(channels, 5, 7, 2, 3, bias=channels == 1, dtype=torch.float64)
    fast = copy.deepcopy(plain)
    fast.__class__ = StemConv
    assert_same(fast, plain, torch.randn(2, channels, 32, 48, dtype=torch.float64))


@pytest.mark.parametrize("size", [(8, 12), (7, 12), (8, 9)])
def test_a_pool_has_the_maxima_and_gradients_of_the_plain_one(size):
    torch.manual_seed(0)
    many_are_equal = torch.randint(-2, 3, (2, 5, *size)).double()
    for features in (torch.randn(2, 5, *size, dtype=torch.float64), many_are_equal):
        assert_same(MaxPool(3, 2, 1), torch.nn.MaxPool2d(3, 2, 1), features)


def test_a_pool_passes_on_what_is_not_finite():
    features = torch.randn(1, 1, 6, 6)
    features[0, 0, 2, 3] = torch.nan  # in windows 1 and 2
    pooled = MaxPool(3, 2, 1)(features.requires_grad_())
    assert pooled.isnan()[0, 0].tolist() == [[False] * 3, [False, True, True], [False] * 3]


@pytest.fixture(scope="module")
def resnet():
    """Read-only by agreement: tests copy it."""
    torch.manual_seed(0)
    return smp.Unet("resnet18", encoder_weights=None, decoder_channels=(16, 8, 8, 8, 8)).double()


def kinds(network):
    return [type(module) for module in network.modules()]


def test_a_whole_network_computes_the_same_under_the_same_names(resnet):
    fast = copy.deepcopy(resnet)
    use_fast_layers(fast)
    fast_kinds = DecoderBlock, LastDecoderBlock, StemConv, HeadConv, MaxPool
    assert [kinds(fast).count(kind) for kind in fast_kinds] == [4, 1, 1, 1, 1]
    assert list(fast.state_dict()) == list(resnet.state_dict())
    plain = copy.deepcopy(resnet)
    assert_same(fast, plain, torch.randn(2, 3, 32, 64, dtype=torch.float64))
    fast.encoder.eval(), plain.encoder.eval()  # as a frozen one
    assert_same(fast, plain, torch.randn(2, 3, 32, 64, dtype=torch.float64))
    for ours, theirs in zip(fast.buffers(), plain.buffers(), strict=True):  # statistics, and how many batches were seen
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", [DecoderBlock, LastDecoderBlock])
@pytest.mark.parametrize(("size", "skip_channels"), [((9, 11), 3), ((9, 11), 0), ((10, 12), 3), ((10, 12), 0)])
def test_a_block_takes_odd_sizes_and_skips(kind, size, skip_channels):
    """Of encoders whose stages do not halve: the plain layers, where cells do not fit."""
    torch.manual_seed(0)
    fast = UnetDecoderBlock(4, skip_channels, 8).double()
    plain = copy.deepcopy(fast)
    fast.__class__ = kind
    features = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    skip = torch.randn(2, skip_channels, *size, dtype=torch.float64)  # MiT and ConvNeXt have stages without channels
    made = fast(features, *size, skip)
    made = to_pixels(made) if made.shape[1] == 32 else made
    torch.testing.assert_close(made, plain(features, *size, skip))


def test_blocks_with_attention_are_left_as_they_are():
    options = {"encoder_weights": None, "decoder_channels": (16,) * 5, "decoder_attention_type": "scse"}
    network = smp.Unet("resnet18", **options).double()
    fast = copy.deepcopy(network)
    use_fast_layers(fast)
    assert kinds(fast).count(UnetDecoderBlock) == 5
    assert_same(fast, network, torch.randn(2, 3, 32, 64, dtype=torch.float64))


def test_the_undo_restores_the_class_of_every_layer(resnet):
    network = copy.deepcopy(resnet)
    before = kinds(network)
    undo = use_fast_layers(network)
    num_exchanged = sum(one is not other for one, other in zip(before, kinds(network), strict=True))
    assert num_exchanged == 8 + kinds(network).count(BatchNorm)
    undo()
    assert kinds(network) == before
    assert not network.encoder._forward_pre_hooks
    undo()  # a second time changes nothing
    assert kinds(network) == before


@pytest.mark.parametrize(
    ("channels", "outputs", "side", "stride", "padding", "groups"),
    [
        (3, 5, 3, 1, 1, 1),
        (4, 1, 1, 1, 0, 1),
        (2, 3, 7, 1, 3, 1),
        (3, 2, 3, 1, 0, 1),
        (4, 4, 3, 1, 1, 4),
        (4, 4, 5, 2, 2, 4),
        (4, 4, 3, 2, 1, 4),
    ],
)
@pytest.mark.parametrize("small", [0, 2**30], ids=["by place", "at once"])
def test_gradients_for_arm_are_those_of_torch(channels, outputs, side, stride, padding, groups, small, monkeypatch):
    monkeypatch.setattr(fast_layers, "SMALL", small)
    plain = torch.nn.Conv2d(channels, outputs, side, stride, padding, groups=groups, dtype=torch.float64)
    plain = plain.to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    fast.__class__ = ArmConv
    inputs = torch.randn(2, channels, 8, 11, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    assert_same(fast, plain, inputs)


@pytest.mark.parametrize(("machine", "num_layers"), [("aarch64", 24), ("x86_64", 0)])
def test_layers_that_gain_are_exchanged_on_arm_alone(machine, num_layers, monkeypatch):
    """Of resnet18 all but those of stride 2, among them the stem."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    network = smp.Unet("resnet18", encoder_weights=None)
    names = list(network.state_dict())
    use_arm_convolutions(network)
    assert sum(type(layer) is ArmConv for layer in network.modules()) == num_layers
    assert list(network.state_dict()) == names
