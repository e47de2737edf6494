"""Names what is not finite in a batch: pixels of a file, weights, a layer's output, a term of the loss, a gradient.

Runs the batch once, eagerly, with hooks on every layer. Slow: only for training that cannot go on. Leaves gradients behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.transfer import to_device
from unet_trainer.model.losses import TERMS, WeightedLoss
from unet_trainer.model.native_resolution import resize_masks
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter


def explain(segmenter: Segmenter, loss: WeightedLoss, numerics: Numerics, batch: Batch, files: Sequence[Path]) -> str:
    """What is not finite, the cause before its effects; empty if everything is finite."""
    network = segmenter.network
    found = _bad_pixels(batch, files)
    bad_weights = [name for name, tensor in network.state_dict().items() if not torch.isfinite(tensor).all()]
    if bad_weights:
        found.append(f"the weights {bad_weights[0]} are not finite")
    images, masks = to_device((batch.images, batch.masks), numerics.device)
    if batch.mask_sizes is not None:
        masks = resize_masks(masks, batch.mask_sizes, images.shape[1:3])
    bad_layers: list[str] = []
    hooks = [
        module.register_forward_hook(_bad_output_hook(name, bad_layers))
        for name, module in network.named_modules()
        if not list(module.children())
    ]
    try:
        with numerics.autocast():
            logits = segmenter(images)
    finally:
        for hook in hooks:
            hook.remove()
    if bad_layers:
        found.append(f"the first layer whose output is not finite is {bad_layers[0]}")
    target = loss.target(logits, masks)
    terms = {name: weight * loss.value(name, TERMS[name].sums(target)) for name, weight in loss.weights.items()}
    bad_terms = [name for name, term in terms.items() if not torch.isfinite(term)]
    if bad_terms:
        found.append(f"the loss term {', '.join(bad_terms)} is not finite")
    elif not found and logits.requires_grad:
        torch.stack(list(terms.values())).sum().backward()
        bad_gradients = [
            name for name, weight in network.named_parameters() if weight.grad is not None and not torch.isfinite(weight.grad).all()
        ]
        found += [f"the loss is finite, the gradient of {bad_gradients[0]} is not"] if bad_gradients else []
    return "; ".join(found)


def _bad_pixels(batch: Batch, files: Sequence[Path]) -> list[str]:
    if not batch.images.is_floating_point():
        return []
    bad = [file for image, file in zip(batch.images, files, strict=False) if not torch.isfinite(image).all()]
    return [f"{', '.join(str(file) for file in bad)} holds pixels that are NaN or infinite"] if bad else []


def _bad_output_hook(name: str, bad_layers: list[str]) -> Any:
    """A forward hook that appends the layer's name to `bad_layers` if its output is not finite."""

    def record(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else [output]
        if any(torch.is_tensor(item) and not torch.isfinite(item).all() for item in outputs):
            bad_layers.append(name or type(module).__name__)

    return record
