"""Small datasets on disk, and their reports."""

import io

import cv2
import numpy as np

from unet_trainer.commands.data_check import build_answered_report
from unet_trainer.config.load import load_config
from unet_trainer.data.dataset_report import build_dataset_report
from unet_trainer.system.console import Console

HEIGHT, WIDTH = 20, 30


class Dataset:
    """Six pairs of noise and a mask with a square; tests replace files."""

    def __init__(self, folder):
        self.folder = folder / "data"
        self.checkpoints = folder / "checkpoints"
        (self.folder / "images").mkdir(parents=True)
        (self.folder / "masks").mkdir()
        for index in range(6):
            self.image(index, noise(index))
            self.mask(index, square())

    def image(self, index, pixels):
        assert cv2.imwrite(str(self.folder / f"images/{index}.png"), pixels)

    def mask(self, index, pixels):
        assert cv2.imwrite(str(self.folder / f"masks/{index}.png"), pixels)

    def config(self, **settings):
        return load_config({"data_dir": str(self.folder), "checkpoint_dir": str(self.checkpoints), **settings})

    def report(self, **settings):
        return build_dataset_report(self.config(**settings), Console(io.StringIO()))

    def answered(self, **settings):
        return build_answered_report(self.config(**settings), Console(io.StringIO()))


def noise(seed):
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)


def square(value=255, size=(HEIGHT, WIDTH)):
    mask = np.zeros(size, np.uint8)
    mask[4:9, 3:8] = value
    return mask
