"""Small models, batches and steps on the CPU."""

import io
import math
from unittest import mock

import torch

from helpers.project import TINY_MODEL
from unet_trainer.config.auto import resolve
from unet_trainer.config.facts import DatasetFacts, HardwareFacts
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import as_shape
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter, SegmenterSpec, build_spec
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_components
from unet_trainer.training.state import EpochMetrics
from unet_trainer.training.step import Group, TrainStep

CPU = torch.device("cpu")
FLOAT32 = Numerics(CPU, "float32")
CPU_FACTS = HardwareFacts("cpu", "a CPU", has_bfloat16=True, has_float16=False, num_cores=2)


def silent_console():
    return Console(io.StringIO())


def make_spec(image=RGB_8BIT, num_classes=1, **others):
    names = tuple(f"class {index}" for index in range(num_classes)) if num_classes > 1 else ("background", "foreground")
    colours = tuple((index, index, index) for index in range(len(names)))
    values = {"image_size": (32, 32), "fit": "resize", "architecture": "unet"}
    values |= {"encoder": TINY_MODEL["encoder"], "decoder_channels": tuple(TINY_MODEL["decoder_channels"])}
    coding = MaskCoding(tuple(range(len(names))))
    return SegmenterSpec(image, coding, num_classes, names, colours, **{**values, **others})


def make_settings(image=RGB_8BIT, hardware=CPU_FACTS, find_weights=lambda encoder: (None, "none are here"), **settings):
    """Resolved settings of a tiny model on a dataset with images of this spec."""
    defaults = {**TINY_MODEL, "image_size": 32, "batch_size": 2, "device": "cpu", "num_classes": 1}
    config = load_config({**defaults, **settings})
    num_ids = max(2, config.num_classes)
    facts = DatasetFacts(
        channels=image.channels,
        mean=image.mean,
        std=image.std,
        statistics_reason="of a test",
        mask_values=tuple(range(num_ids)),
        ignore_value=None,
        mask_reason="class ids",
        class_shares=[1 / num_ids] * num_ids,
        train_sizes=[as_shape(config.image_size)],
    )
    return resolve(config, hardware, facts, find_weights=find_weights)


def tiny_components(image=RGB_8BIT, num_batches=4, settings=None, **others):
    """Model, loss, optimizer and steps of TINY_MODEL, in training mode."""
    settings = settings or make_settings(image, **others)
    config = settings.taken
    spec = build_spec(config, image, MaskCoding(tuple(range(max(2, config.num_classes)))))
    components = build_components(config, spec, torch.device(config.device), num_batches, silent_console())
    components.set_training_mode(0)
    return components


class KnownCosts:
    """In place of a StepProbe: every step costs the same, and none is tried. None: it cannot be measured."""

    seconds_left = math.inf

    def __init__(self, cost):
        self.cost = cost
        self.asked = []  # the configs
        self.failure = "" if cost is not None else "of a test"

    def __call__(self, config):
        self.asked.append(config)
        return self.cost

    def install(self, monkeypatch):
        """From here on, settings are decided with these costs."""
        monkeypatch.setattr("unet_trainer.training.settings.StepProbe", lambda *_: self)
        return self


class SmallNetwork(torch.nn.Module):
    """Encoder, decoder and head with batch norm in under 500 parameters: a step takes a few milliseconds."""

    def __init__(self, in_channels=3, num_classes=1, norm=torch.nn.BatchNorm2d):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Conv2d(in_channels, 4, 3, padding=1), norm(4), torch.nn.ReLU())
        self.decoder = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3, padding=1), norm(4), torch.nn.ReLU())
        self.segmentation_head = torch.nn.Sequential(torch.nn.Conv2d(4, num_classes, 1))

    def forward(self, pixels):
        return self.segmentation_head(self.decoder(self.encoder(pixels)))


def small_components(image=RGB_8BIT, num_batches=4, settings=None, **others):
    """As tiny_components, with a SmallNetwork in place of a U-Net."""
    build_network = "unet_trainer.training.build.build_network"
    with mock.patch(build_network, lambda spec, weights: SmallNetwork(spec.image.channels, spec.num_classes)):
        return tiny_components(image, num_batches, settings, **others)


def make_batch(num_images, seed=0, side=16):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num_images, side, side, 3), dtype=torch.uint8, generator=generator)
    masks = (images[..., 0] > 128).to(torch.uint8)
    return Batch(images, masks, num_images)


def plain_segmenter(seed=0):
    """No batch norm: the gradient of a batch is the mean of its images' gradients."""
    torch.manual_seed(seed)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 1))
    return Segmenter(make_spec(), network, channels_last=True)


def make_step(segmenter, numerics=FLOAT32, loss="bce", loss_weight=1.0, optimizer=None, scaler=None, **options):
    optimizer = optimizer or torch.optim.SGD(segmenter.parameters(), lr=0.1, fused=True)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    return TrainStep(segmenter, WeightedLoss({loss: loss_weight}, 1, None), numerics, optimizer, scaler, **options)


def take_step(step, *batches, metrics=None, learning_rate=1e-2, first_batch=0):
    """One whole step: the gradients of these batches, then the optimizer."""
    metrics = metrics or EpochMetrics(1, step.device)
    step(Group(batches, len(batches), first_batch), learning_rate, metrics)
    return metrics


def weights(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()])


def everything(components):
    """Copies of all that a step may change: weights, statistics, the optimizer's state, the average and its count."""
    state = components.state
    tensors = list(state.segmenter.state_dict().values())
    if state.ema is not None:
        tensors += [*state.ema.segmenter.state_dict().values(), state.ema.num_updates]
    tensors += [value for entry in state.optimizer.state.values() for value in entry.values()]
    return [tensor.clone() for tensor in tensors]


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
