"""Checkpoints of models that nobody trained: random weights, with a spec, as a run would have saved them."""

import numpy as np
import torch

from helpers.steps import SmallNetwork, make_spec
from unet_trainer.images.image_spec import RGB_8BIT, ImageSpec
from unet_trainer.inference.engine import ModelCard
from unet_trainer.model.network import build_network
from unet_trainer.model.segmenter import Segmenter, network_weights
from unet_trainer.training.checkpoint import write_checkpoint

CONFIG = {"augmentation": [{"HorizontalFlip": {"p": 0.5}}], "ema_decay": None}
GREY_16BIT = ImageSpec(1, "uint16", (3000.0,), (700.0,), 0.0, 9000.0)
FOUR_FLOATS = ImageSpec(4, "float", (0.5, 0.4, 0.3, 2.0), (0.2, 0.2, 0.2, 1.5), -1.0, 7.0)


def small_spec(image=RGB_8BIT, **others):
    """At native resolution."""
    return make_spec(image, fit="crop", **others)


def random_segmenter(spec, seed=0, build=build_network):
    """In use, not in training. Normalisation has statistics, so that leaving it out, or training with it, would be seen."""
    torch.manual_seed(seed)
    network = build(spec, None)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean, 0, 0.3)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    head = network.segmentation_head[0]
    torch.nn.init.normal_(head.weight, 0, 3)  # so that more than one class occurs
    torch.nn.init.zeros_(head.bias)
    return Segmenter(spec, network, channels_last=True).eval().requires_grad_(False)


def small_segmenter(spec, seed=0):
    return random_segmenter(spec, seed, lambda spec, weights: SmallNetwork(spec.image.channels, spec.num_classes))


def make_card(spec, **values):
    return ModelCard(
        spec, **{"symmetries": ("horizontal_flip",), "run_name": "run", "epoch": 3, "val_iou": 0.5, **values}
    )


def save_model(path, segmenter, **content):
    """As best.pt."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"version": "0.9.0", "spec": segmenter.spec.to_dict(), "config": CONFIG, "decisions": {}}
    write_checkpoint(
        path, {**about, "epoch": 3, "metrics": {"val_iou": 0.5}, "model": network_weights(segmenter), **content}
    )
    return path


def random_image(spec, height, width, seed=0):
    """H,W,C in the files' own depth."""
    chooser = np.random.default_rng(seed)
    image = spec.image
    pixels = chooser.normal(image.mean, image.std, (height, width, image.channels))
    if image.depth == "float":
        return pixels.astype(np.float32)
    return pixels.round().clip(0, np.iinfo(image.depth).max).astype(image.depth)


def random_batch(spec, count, height, width):
    """N,H,W,C as a batch has it."""
    return torch.from_numpy(
        np.stack([spec.image.to_batch(random_image(spec, height, width, seed)) for seed in range(count)])
    )
