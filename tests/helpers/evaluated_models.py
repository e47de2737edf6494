"""Models to evaluate: one that takes bright pixels for the foreground, and small trained runs; and pairs of any size."""

import cv2
import numpy as np
import pytest

from helpers.killed_runs import leave_out_pictures
from helpers.project import TINY_MODEL
from train_unet import train
from unet_trainer.data.formats.demo import draw_sample
from unet_trainer.data.pairs import Pair
from unet_trainer.images.image_decoding import write_image


def write_pairs(folder, images_and_masks):
    """images/0.png, masks/0.png, ... → pairs."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    pairs = []
    for number, (image, mask) in enumerate(images_and_masks):
        paths = folder / "images" / f"{number}.png", folder / "masks" / f"{number}.png"
        write_image(paths[0], image)
        write_image(paths[1], mask)
        pairs.append(Pair(str(number), *paths))
    return pairs


def bright(ids):
    """H,W of 0 and 1 → an image in which BrightnessEngine sees exactly these."""
    return np.repeat(np.where(ids == 1, 200, 50).astype(np.uint8)[:, :, None], 3, axis=2)


# Sizes that no batch shares, a JPEG that may be decoded at half its size for an image of 32, and one that is smaller than that.
SIZES = [(64, 64), (50, 70), (136, 144), (28, 90), (64, 64), (40, 40), (96, 80), (33, 65)]


def write_cells(folder):
    """Pairs of SIZES, cut from the demo; every second one is in train/, the others in val/."""
    for number, (height, width) in enumerate(SIZES):
        image, mask = (
            cv2.resize(pixels, (width, height), interpolation=cv2.INTER_NEAREST) for pixels in draw_sample(number, 192)
        )
        part = folder / ("val" if number % 2 == 0 or number == 3 else "train")
        for name in ("images", "masks"):
            (part / name).mkdir(parents=True, exist_ok=True)
        write_image(part / "images" / f"{number}.jpg", image)
        write_image(part / "masks" / f"{number}.png", mask)
    return folder


def train_tiny(data_dir, checkpoint_dir, run_name, **settings):
    """A run of a few steps on write_cells; returns the result."""
    small = {
        "image_size": 32,
        "batch_size": 2,
        "num_epochs": 2,
        "learning_rate": 1e-2,
        "num_workers": 0,
        "device": "cpu",
    }
    places = {"data_dir": str(data_dir), "checkpoint_dir": str(checkpoint_dir), "run_name": run_name}
    with pytest.MonkeyPatch.context() as patch:
        leave_out_pictures(patch.setattr)
        return train({**TINY_MODEL, **small, **places, **settings})
