"""Deep supervision: auxiliary heads on inner decoder stages of a U-Net, whose losses are added in training.

The heads belong to the network while it is trained, so that optimizer, averages and last.pt hold them; a model that is used has
none: best.pt leaves them out.

    decoder stage   size of its output   weight of its loss
    1               1/8                  1/4 of deep_supervision
    2               1/4                  1/2
    3               1/2                  1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.segmenter import AUXILIARY, Segmenter, class_logits

STAGES = (1, 2, 3)  # of the decoder, counted from 0; each doubles the size, from 1/16 on
STRIDES = (8, 4, 2)
SHARES = (0.25, 0.5, 1.0)


def add_auxiliary_heads(network: torch.nn.Module, num_classes: int) -> None:
    blocks = list(network.get_submodule("decoder.blocks").children())
    channels = [blocks[stage].get_submodule("conv2.0").get_parameter("weight").shape[0] for stage in STAGES]
    network.add_module(AUXILIARY, torch.nn.ModuleList(torch.nn.Conv2d(number, num_classes, 1) for number in channels))


def forward_with_auxiliary(segmenter: Segmenter, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """N,H,W,C images → N,K,H,W logits and those of each auxiliary head, at its stage's own size (of the padded image)."""
    network, pixels = segmenter.network, segmenter.prepare(images)
    features = network.get_submodule("encoder")(pixels)
    decoder = network.get_submodule("decoder")
    shapes = [feature.shape[2:] for feature in features][::-1]
    skips = features[1:][::-1]  # the deepest first
    inner = decoder.get_submodule("center")(skips[0])
    outputs = []
    for index, block in enumerate(decoder.get_submodule("blocks").children()):
        height, width = shapes[index + 1]
        skip = skips[index + 1] if index + 1 < len(skips) else None
        inner = block(inner, height, width, skip_connection=skip)
        outputs.append(inner)
    heads = network.get_submodule(AUXILIARY).children()
    auxiliary = [class_logits(head(outputs[stage])) for stage, head in zip(STAGES, heads, strict=True)]
    logits = class_logits(network.get_submodule("segmentation_head")(inner))
    return logits[:, :, : images.shape[1], : images.shape[2]], auxiliary


def auxiliary_loss(
    loss: WeightedLoss, auxiliary: Sequence[torch.Tensor], masks: torch.Tensor, batch_masks: torch.Tensor | None
) -> torch.Tensor:
    """The weighted sum of the heads' losses, against masks of which every second, fourth or eighth pixel is taken."""
    total = torch.zeros((), device=masks.device)
    for logits, stride, share in zip(auxiliary, STRIDES, SHARES, strict=True):
        start = stride // 2
        small = masks[:, start::stride, start::stride]
        batch = None if batch_masks is None else batch_masks[:, start::stride, start::stride]
        total = total + share * loss(logits[:, :, : small.shape[1], : small.shape[2]], small, batch)
    return total
