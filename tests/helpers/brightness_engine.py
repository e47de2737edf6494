"""A model whose result can be worked out by hand: the class of a pixel is its brightness."""

from __future__ import annotations

import dataclasses
import threading

import torch

from helpers.steps import CPU, make_spec
from unet_trainer.images.drawing import class_colours
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.inference.model_files import ModelCard
from unet_trainer.inference.predictor import Predictor


class BrightnessEngine:
    """Of K ids, the one whose level (0, 255/(K-1), ..., 255) is nearest to the mean of the channels; each 10 levels are 1 logit."""

    device, description = CPU, "cpu, float32"

    def __init__(self, image=RGB_8BIT, num_classes=1, **spec):
        found = make_spec(image, num_classes, **{"fit": "crop", **spec})
        found = dataclasses.replace(found, id_colours=class_colours(found.num_ids))
        self.card = ModelCard(found, (), "bright", 3, 0.75)
        self.levels = torch.linspace(0, 255, self.card.spec.num_ids).view(1, -1, 1, 1)
        self.is_free = threading.Event()  # an image waits for it
        self.is_free.set()
        self.num_inside = self.most_inside = 0  # calls at one time
        self.num_calls = 0  # that are done

    def logits(self, images):
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        assert self.is_free.wait(20)
        self.num_calls += 1
        brightness = images.float().mean(3).unsqueeze(1)  # N,1,H,W
        self.num_inside -= 1
        return -(brightness - self.levels).abs() / 10


def bright_predictor(image=RGB_8BIT, num_classes=1, **spec):
    return Predictor(BrightnessEngine(image, num_classes, **spec))
