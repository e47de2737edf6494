"""Layers that compute the same as those of segmentation-models-pytorch, but faster in a compiled step on a GPU.

They hold the same parameters under the same names: checkpoints do not depend on them. docs/performance.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoderBlock

LANES = 8  # tensor cores take channels in multiples of this


class DecoderBlock(UnetDecoderBlock):
    """Doubles the feature map by repeating pixels: the gradient is a sum over 2×2 instead of an index_put."""

    def forward(
        self, feature_map: torch.Tensor, target_height: int, target_width: int, skip_connection: torch.Tensor | None = None
    ) -> torch.Tensor:
        if (target_height, target_width) != (2 * feature_map.shape[2], 2 * feature_map.shape[3]):
            return super().forward(feature_map, target_height, target_width, skip_connection)
        feature_map = repeat_pixels(feature_map)
        if skip_connection is not None:
            feature_map = self.attention1(torch.cat([feature_map, skip_connection], dim=1))
        return self.attention2(self.conv2(self.conv1(feature_map)))


def repeat_pixels(features: torch.Tensor) -> torch.Tensor:
    """N,C,H,W → N,C,2H,2W, channels last inside: each pixel becomes 2×2."""
    batch, channels, height, width = features.shape
    rows = features.permute(0, 2, 3, 1)[:, :, None, :, None, :].expand(batch, height, 2, width, 2, channels)
    return rows.reshape(batch, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)


class HeadConv(torch.nn.Conv2d):
    """Few output channels, padded to a multiple of 8: with one alone, cuDNN converts the memory layout back and forth."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        missing = -self.out_channels % LANES
        weight = F.pad(self.weight, (0, 0, 0, 0, 0, 0, 0, missing))
        bias = None if self.bias is None else F.pad(self.bias, (0, missing))
        return F.conv2d(features, weight, bias, self.stride, self.padding)[:, : self.out_channels]


class StemConv(torch.nn.Conv2d):
    """7×7 with stride 2 on a few channels, as 4×4 with stride 1 on four times as many: 2×2 pixels become channels of one.

    Shapes, for 3 channels and 64 outputs:

        images   N,3,H,W     → N,H/2,W/2,12 (2×2 pixels side by side in the channels) → 16 channels (zeros up to LANES)
        weight   64,3,7,7    → 64,7,7,3 → 64,8,8,3 (a zero row and column in front) → 64,4,4,12 → 16 channels
        padding  3 pixels of the image are 2 cells before and 1 cell behind, with the zero row and column of the weight

    Channels come last throughout, so that the weight's gradient has the weight's memory layout and is not copied.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = images.shape
        missing = -4 * channels % LANES
        pixels = images.permute(0, 2, 3, 1).reshape(batch, height // 2, 2, width // 2, 2, channels)
        pixels = pixels.permute(0, 1, 3, 5, 2, 4).reshape(batch, height // 2, width // 2, 4 * channels)
        pixels = F.pad(pixels, (0, missing, 2, 1, 2, 1)).permute(0, 3, 1, 2)
        weight = F.pad(self.weight.permute(0, 2, 3, 1), (0, 0, 1, 0, 1, 0)).reshape(self.out_channels, 4, 2, 4, 2, channels)
        weight = weight.permute(0, 1, 3, 5, 2, 4).reshape(self.out_channels, 4, 4, 4 * channels)
        weight = F.pad(weight, (0, missing)).permute(0, 3, 1, 2)
        return F.conv2d(pixels, weight, self.bias)


def use_fast_layers(network: torch.nn.Module) -> Callable[[], None]:
    """Swaps, in place, the layers that have a faster version here, and returns a function that undoes it. Sides must be even."""
    swapped: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []

    def swap(module: torch.nn.Module, faster: type[torch.nn.Module]) -> None:
        swapped.append((module, type(module)))
        module.__class__ = faster

    for module in network.modules():
        if type(module) is UnetDecoderBlock and module.interpolation_mode == "nearest":
            swap(module, DecoderBlock)
        elif type(module) is torch.nn.Conv2d and module.in_channels <= 4:
            shape = (module.kernel_size, module.stride, module.padding, module.dilation, module.groups, module.padding_mode)
            if shape == ((7, 7), (2, 2), (3, 3), (1, 1), 1, "zeros"):
                swap(module, StemConv)
    head = getattr(network, "segmentation_head", [None])[0]
    if type(head) is torch.nn.Conv2d and head.out_channels % LANES and head.groups == 1 and head.dilation == (1, 1):
        swap(head, HeadConv)

    def restore() -> None:
        for module, original in swapped:
            module.__class__ = original

    return restore
