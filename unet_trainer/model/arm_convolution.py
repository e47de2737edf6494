"""Gradients of convolutions on ARM processors under Linux, where oneDNN computes them at a half to a fiftieth of the speed of its
forward pass (docs/performance.md). That of the input is computed as a forward pass, with the kernel turned by 180° and its channels
swapped; that of the weight as a matrix product for each place of the kernel or, where each channel is by itself, as a sum.

The layers hold the same parameters under the same names, and their forward pass is that of torch.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F

SMALL = 2**17  # values, up to which all places of the kernel are taken at once: fewer calls


class Convolution(torch.autograd.Function):
    """Kernels k×k without dilation, and stride 1, or one channel each. Shapes are N,C,H,W, channels last in memory."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, stride: int, padding: int, groups: int) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.numbers = stride, padding, groups
        return F.conv2d(inputs, weight, None, stride, padding, 1, groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inputs, weight), (stride, padding, groups) = ctx.saved_tensors, ctx.numbers
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            of_inputs = _of_inputs(gradient, inputs.shape, weight, stride, padding, groups)
        if ctx.needs_input_grad[1]:
            of_weight = _of_weight(gradient, inputs, weight, stride, padding, groups)
        return of_inputs, of_weight, None, None, None


def _of_inputs(
    gradient: torch.Tensor, shape: torch.Size, weight: torch.Tensor, stride: int, padding: int, groups: int
) -> torch.Tensor:
    side = weight.shape[2]
    if stride > 1:  # zeros between
        spread = gradient.new_zeros(*shape[:2], *(length - side + 1 + 2 * padding for length in shape[2:]))
        spread = spread.contiguous(memory_format=torch.channels_last)
        spread[:, :, ::stride, ::stride] = gradient
        gradient = spread
    turned = weight.flip(2, 3)
    turned = turned if groups > 1 else turned.transpose(0, 1).contiguous(memory_format=torch.channels_last)
    return F.conv2d(gradient, turned, None, 1, side - 1 - padding, 1, groups)


def _of_weight(
    gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor, stride: int, padding: int, groups: int
) -> torch.Tensor:
    outputs, channels, side, _ = weight.shape
    padded = F.pad(inputs.permute(0, 2, 3, 1), (0, 0, padding, padding, padding, padding))
    given = gradient.permute(0, 2, 3, 1)
    seen = padded.unfold(1, side, stride).unfold(2, side, stride)  # N,H,W,C, row and column of the kernel
    if seen.numel() <= SMALL:
        if groups > 1:
            return (seen * given[..., None, None]).sum((0, 1, 2))[:, None]
        columns = seen.permute(0, 1, 2, 4, 5, 3).reshape(-1, side * side * channels)
        return (given.reshape(-1, outputs).t() @ columns).view(outputs, side, side, channels).permute(0, 3, 1, 2)
    found = weight.new_empty(outputs, side, side, channels)
    for row in range(side):
        for column in range(side):
            if groups > 1:
                found[:, row, column, 0] = (seen[..., row, column] * given).sum((0, 1, 2))
            else:
                places = seen[..., row, column].reshape(-1, channels)
                torch.mm(given.reshape(-1, outputs).t(), places, out=found[:, row, column])
    return found.permute(0, 3, 1, 2)


class ArmConv(torch.nn.Conv2d):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(inputs)
        numbers = self.stride[0], self.padding[0], self.groups
        outputs: torch.Tensor = Convolution.apply(inputs, self.weight, *numbers)
        return outputs if self.bias is None else outputs + self.bias[:, None, None]


def use_arm_convolutions(network: torch.nn.Module) -> None:
    """In place, where it pays: in float32, with channels last."""
    if platform.machine() != "aarch64" or not torch.backends.mkldnn.is_available():
        return
    for layer in network.modules():
        if type(layer) is torch.nn.Conv2d and _is_square(layer) and layer.dilation == (1, 1) and layer.padding_mode == "zeros":
            is_depthwise = 1 < layer.groups == layer.in_channels == layer.out_channels
            if is_depthwise or (layer.groups == 1 and layer.stride == (1, 1)):
                layer.__class__ = ArmConv


def _is_square(layer: torch.nn.Conv2d) -> bool:
    if isinstance(layer.padding, str):
        return False
    sides = (layer.kernel_size, layer.stride, layer.padding)
    return all(one == other for one, other in sides) and layer.padding[0] < layer.kernel_size[0]
