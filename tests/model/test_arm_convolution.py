"""The gradients for ARM processors are those of torch. They are computed on every processor here."""

from __future__ import annotations

import copy

import pytest
import segmentation_models_pytorch as smp
import torch

from unet_trainer.model import arm_convolution
from unet_trainer.model.arm_convolution import ArmConv, use_arm_convolutions


def gradients(layer, inputs):
    inputs = inputs.clone().requires_grad_()
    output = layer(inputs)
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return [output.detach(), inputs.grad, *(parameter.grad for parameter in layer.parameters())]


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
def test_gradients_are_those_of_torch(channels, outputs, side, stride, padding, groups, small, monkeypatch):
    monkeypatch.setattr(arm_convolution, "SMALL", small)
    plain = torch.nn.Conv2d(channels, outputs, side, stride, padding, groups=groups, dtype=torch.float64)
    plain = plain.to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    fast.__class__ = ArmConv
    inputs = torch.randn(2, channels, 8, 11, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    for ours, theirs in zip(gradients(fast, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


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
