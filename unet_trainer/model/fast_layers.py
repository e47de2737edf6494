"""Layers that compute the same as those of torch and segmentation-models-pytorch, but faster: in a compiled step on a
GPU, and on ARM processors.

They hold the same parameters under the same names: checkpoints do not depend on them. docs/performance.md has the
figures."""

import platform
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any, TypeGuard

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from segmentation_models_pytorch.decoders.unet.decoder import UnetDecoderBlock

LANES = 8  # tensor cores take channels in multiples of this
POOL = torch.nn.MaxPool2d(3, stride=2, padding=1).extra_repr()
SMALL = 2**17  # values, up to which ArmConv takes all places of the kernel at once: fewer calls


# Cells. A 3×3 convolution of pixels is one of cells of 2×2 pixels, with four times the channels at half the side:
#
#     . . | . .     Pixel i of a cell (0 or 1, along one side) takes from pixel u of the cell that lies a cells away
#     . a | b .     (-1, 0 or 1) by tap 2a + u - i, if that is one of -1, 0, 1. Here a is pixel 1 of its cell: its taps
#     ----+----     are pixel 0 (tap -1) and itself (tap 0), and b, pixel 0 of the next cell: 2 + 0 - 1 = tap 1.
#     . . | . .
#     . . | . .     After a nearest upsampling the pixels of a cell are equal, and the taps on them add up: upsampling
#                   and convolution are one convolution at the low resolution, and the large map is never made.
#
# Few channels on large maps are what convolutions of a GPU are slowest at. Weights are rearranged in each step, so
# parameters and checkpoints are those of the plain layers. In memory a cell is (its 2 rows, its 2 columns, channels),
# channels innermost.


class DecoderBlock(UnetDecoderBlock):
    """Upsampling and its part of the first convolution are one; the skip's part is added. Nothing is concatenated."""

    def forward(
        self,
        feature_map: torch.Tensor,
        target_height: int,
        target_width: int,
        skip_connection: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if (target_height, target_width) != (2 * feature_map.shape[2], 2 * feature_map.shape[3]):
            return super().forward(feature_map, target_height, target_width, skip_connection)
        convolution, norm, activation = self.conv1
        channels = feature_map.shape[1]
        of_map, of_skip = convolution.weight.split([channels, convolution.in_channels - channels], dim=1)
        pixels = to_pixels(F.conv2d(feature_map, upsampling_weight(of_map), padding=1))
        if skip_connection is not None and skip_connection.shape[1]:  # some encoders have stages without channels
            pixels = pixels + F.conv2d(skip_connection, of_skip, padding=1)
        return self.conv2(activation(norm(pixels)))


class LastDecoderBlock(UnetDecoderBlock):
    """Without a skip its output stays in cells, which HeadConv takes."""

    def forward(
        self,
        feature_map: torch.Tensor,
        target_height: int,
        target_width: int,
        skip_connection: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_doubled = (target_height, target_width) == (2 * feature_map.shape[2], 2 * feature_map.shape[3])
        if (skip_connection is not None and skip_connection.shape[1]) or not is_doubled:
            return super().forward(feature_map, target_height, target_width, skip_connection)
        cells = _norm_pixels(self.conv1, F.conv2d(feature_map, upsampling_weight(self.conv1[0].weight), padding=1))
        return _norm_pixels(self.conv2, F.conv2d(cells, cell_weight(self.conv2[0].weight), padding=1))


def _norm_pixels(block: torch.nn.Sequential, cells: torch.Tensor) -> torch.Tensor:
    """What follows the convolution treats each pixel alike: N,4C,H,W cells are N,C,H,4W pixels of some order, without a
    copy."""
    batch, channels, height, width = cells.shape
    pixels = cells.permute(0, 2, 3, 1).reshape(batch, height, 4 * width, channels // 4).permute(0, 3, 1, 2)
    _, norm, activation = block
    return activation(norm(pixels)).permute(0, 2, 3, 1).reshape(batch, height, width, channels).permute(0, 3, 1, 2)


def to_pixels(cells: torch.Tensor) -> torch.Tensor:
    """N,4C,H,W → N,C,2H,2W."""
    batch, channels, height, width = cells.shape
    places = cells.permute(0, 2, 3, 1).reshape(batch, height, width, 2, 2, channels // 4).permute(0, 1, 3, 2, 4, 5)
    return places.reshape(batch, 2 * height, 2 * width, channels // 4).permute(0, 3, 1, 2)


# Sums of products of three, which a compiler writes out: einsum would multiply matrices, slower and in TF32.


def _taps(like: torch.Tensor) -> torch.Tensor:
    """i,u,a,t: 1 where pixel i takes from pixel u of the cell a away by tap t, else 0."""
    two, three = torch.arange(2, device=like.device), torch.arange(3, device=like.device) - 1
    return (three == 2 * three[:, None] + two[:, None, None] - two[:, None, None, None]).to(like.dtype)


def cell_weight(weight: torch.Tensor) -> torch.Tensor:
    """O,C,3,3 for pixels → 4O,4C,3,3 for cells. Channels come last in memory, as for StemConv."""
    taps, (outputs, channels) = _taps(weight), weight.shape[:2]
    rows = (weight.permute(0, 2, 3, 1)[:, None, None, None] * taps[..., None, None]).sum(4)  # o,i,u,a,x,c
    cells = (rows[:, :, :, :, None, None, None] * taps[..., None]).sum(7)  # o,i,u,a,j,v,b,c
    return cells.permute(1, 4, 0, 3, 6, 2, 5, 7).reshape(4 * outputs, 3, 3, 4 * channels).permute(0, 3, 1, 2)


def upsampling_weight(weight: torch.Tensor) -> torch.Tensor:
    """O,C,3,3 for pixels that are repeated 2×2 → 4O,C,3,3 for the pixels before."""
    taps, (outputs, channels) = _taps(weight).sum(1), weight.shape[:2]
    rows = (weight.permute(0, 2, 3, 1)[:, None, None] * taps[..., None, None]).sum(3)  # o,i,a,x,c
    cells = (rows[:, :, :, None, None] * taps[..., None]).sum(5)  # o,i,a,j,b,c
    return cells.permute(1, 3, 0, 2, 4, 5).reshape(4 * outputs, 3, 3, channels).permute(0, 3, 1, 2)


class HeadConv(torch.nn.Conv2d):
    """Few output channels, padded to a multiple of 8: with one alone, cuDNN converts the memory layout back and forth.
    Takes pixels or cells, and returns pixels."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        are_cells = features.shape[1] == 4 * self.in_channels
        weight = cell_weight(self.weight) if are_cells else self.weight
        missing = -weight.shape[0] % LANES
        padded = F.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
        logits = F.conv2d(features, padded, padding=self.padding)[:, : weight.shape[0]]
        logits = to_pixels(logits) if are_cells else logits
        return logits if self.bias is None else logits + self.bias[:, None, None]


class StemConv(torch.nn.Conv2d):
    """7×7 with stride 2 on a few channels, as 4×4 with stride 1 on four times as many: 2×2 pixels become channels of
    one. Shapes, for 3 channels and 64 outputs:

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
        weight = F.pad(self.weight.permute(0, 2, 3, 1), (0, 0, 1, 0, 1, 0)).reshape(
            self.out_channels, 4, 2, 4, 2, channels
        )
        weight = weight.permute(0, 1, 3, 5, 2, 4).reshape(self.out_channels, 4, 4, 4 * channels)
        weight = F.pad(weight, (0, missing)).permute(0, 3, 1, 2)
        return F.conv2d(pixels, weight, self.bias)


class MaxPool(torch.nn.MaxPool2d):
    """3×3 with stride 2. In training it keeps which of the nine was taken, as one byte."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if features.shape[2] % 2 or features.shape[3] % 2 or not features.requires_grad:
            return super().forward(features)
        return _Pool.apply(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Pool(torch.autograd.Function):
    """N,H,W,C → N,H/2,W/2,C. A window is three rows and columns: the last of the cell of 2×2 before, and both of its
    own."""

    @staticmethod
    def forward(ctx: Any, pixels: torch.Tensor) -> torch.Tensor:
        height, width = pixels.shape[1:3]
        padded = F.pad(pixels, (0, 0, 1, 0, 1, 0), value=-torch.inf)
        window = [padded[:, y : y + height - 1 : 2, x : x + width - 1 : 2] for y in range(3) for x in range(3)]
        largest = reduce(torch.maximum, window)
        taken = torch.zeros_like(largest, dtype=torch.uint8)
        for place in range(8, -1, -1):  # of equal ones the first
            taken = torch.where(window[place] == largest, place, taken)
        ctx.save_for_backward(taken)
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Each pixel takes from the windows that took it: that of its cell and, if it is the cell's last, the one
        behind. Written out for the four pixels of a cell, of which a compiler makes two kernels; of a sum, four."""
        (taken,) = ctx.saved_tensors

        def given(place: int, down: int = 0, right: int = 0) -> torch.Tensor:
            """By the window so many cells away, if it took this place."""
            behind = (0, 0, 0, right, 0, down)
            value, index = (
                F.pad(one, behind, value=fill)[:, down:, right:] for one, fill in ((gradient, 0), (taken, 9))
            )
            return torch.where(index == place, value, 0)

        upper = given(4), given(5) + given(3, right=1)
        lower = given(7) + given(1, down=1), given(8) + given(6, right=1) + given(2, down=1) + given(0, 1, 1)
        cells = torch.stack([torch.stack(row, 3) for row in (upper, lower)], 2)  # N,h,2,w,2,C
        return cells.flatten(3, 4).flatten(1, 2)


class BatchNorm(torch.nn.BatchNorm2d):
    """Does not count its batches: count_batches does, for all norms in one launch."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        parts = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(features, *parts, self.training, self.momentum or 0.0, self.eps)


def count_batches(norms: Iterable[torch.nn.BatchNorm2d]) -> None:
    counts = [norm.num_batches_tracked for norm in norms if norm.training and norm.num_batches_tracked is not None]
    if counts:
        torch._foreach_add_(counts, 1)


def _is_plain(block: UnetDecoderBlock) -> bool:
    """With a norm, which makes a bias of no use, and without attention."""
    attention = block.get_submodule("attention1.attention")
    return block.get_submodule("conv1.0").bias is None and type(attention) is torch.nn.Identity


def _is_conv(layer: object, side: int, stride: int) -> TypeGuard[torch.nn.Conv2d]:
    """A plain convolution of this size, padded to keep the size of the map but for the stride."""
    if type(layer) is not torch.nn.Conv2d:
        return False
    geometry = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    return geometry == ((side,) * 2, (stride,) * 2, (side // 2,) * 2, (1, 1), 1, "zeros")


def use_fast_layers(network: torch.nn.Module) -> Callable[[], None]:
    """Swaps, in place, the layers that have a faster version here, and returns a function that undoes it. Sides must be
    even."""
    swapped: list[tuple[torch.nn.Module, type[torch.nn.Module]]] = []

    def swap(module: torch.nn.Module, faster: type[torch.nn.Module]) -> None:
        swapped.append((module, type(module)))
        module.__class__ = faster

    head = getattr(network, "segmentation_head", [None])[0]
    # others may do more with the decoder's output
    takes_cells = type(network) is smp.Unet and _is_conv(head, 3, stride=1)
    blocks = [module for module in network.modules() if type(module) is UnetDecoderBlock]
    for block in blocks:
        if block.interpolation_mode == "nearest" and _is_plain(block):
            swap(block, LastDecoderBlock if block is blocks[-1] and takes_cells else DecoderBlock)
    if _is_conv(head, 3, stride=1) or _is_conv(head, 1, stride=1):
        swap(head, HeadConv)
    for module in network.modules():
        if _is_conv(module, 7, stride=2) and module.in_channels <= 4:
            swap(module, StemConv)
        if type(module) is torch.nn.MaxPool2d and module.extra_repr() == POOL and not module.return_indices:
            swap(module, MaxPool)
    hooks = []
    encoder = getattr(network, "encoder", None)  # each forward pass calls it
    if isinstance(encoder, torch.nn.Module):
        norms = [layer for layer in network.modules() if type(layer) is torch.nn.BatchNorm2d]
        norms = [norm for norm in norms if norm.track_running_stats and norm.momentum is not None]
        hooks = [encoder.register_forward_pre_hook(lambda *_: count_batches(norms))]
        for norm in norms:
            swap(norm, BatchNorm)

    def restore() -> None:
        for hook in hooks:
            hook.remove()
        for module, original in swapped:
            module.__class__ = original

    return restore


# Gradients of convolutions on ARM processors under Linux, where oneDNN computes them at a half to a fiftieth of the
# speed of its forward pass. That of the input is computed as a forward pass, with the kernel turned by 180° and its
# channels swapped; that of the weight as a matrix product for each row of the kernel or, where each channel is by
# itself, as a sum for each place of it.


class Convolution(torch.autograd.Function):
    """Kernels k×k without dilation, and stride 1, or one channel each. Shapes are N,C,H,W, channels last in memory."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, stride: int, padding: int, groups: int
    ) -> torch.Tensor:
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
        if groups == 1:
            columns = seen[..., row, :].transpose(3, 4).reshape(-1, side * channels)
            torch.mm(given.reshape(-1, outputs).t(), columns, out=found[:, row].view(outputs, -1))
            continue
        for column in range(side):
            found[:, row, column, 0] = (seen[..., row, column] * given).sum((0, 1, 2))
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
        if type(layer) is torch.nn.Conv2d and _is_square(layer):
            is_depthwise = 1 < layer.groups == layer.in_channels == layer.out_channels
            if is_depthwise or (layer.groups == 1 and layer.stride == (1, 1)):
                layer.__class__ = ArmConv


def _is_square(layer: torch.nn.Conv2d) -> bool:
    """With padding of zeros, and no dilation."""
    if isinstance(layer.padding, str) or layer.dilation != (1, 1) or layer.padding_mode != "zeros":
        return False
    sides = (layer.kernel_size, layer.stride, layer.padding)
    return all(one == other for one, other in sides) and layer.padding[0] < layer.kernel_size[0]
