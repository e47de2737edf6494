"""Folders with images and annotation files, and the masks that are drawn from them."""

from __future__ import annotations

import json

import cv2
import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.datasets.annotations import find_annotations
from unet_trainer.images.mask_decoding import read_mask


class Folder:
    """A data folder; images are noise, so that no two are identical."""

    def __init__(self, tmp_path):
        self.path = tmp_path / "data"
        self.checkpoints = tmp_path / "checkpoints"
        self.path.mkdir()
        self.num_images = 0

    def image(self, name, width=4, height=3):
        self.num_images += 1
        pixels = np.random.default_rng(self.num_images).integers(0, 256, (height, width, 3)).astype(np.uint8)
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), pixels)
        return path

    def write(self, name, content):
        """A text as it is, anything else as JSON."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def find(self, **settings):
        return find_annotations(Config(checkpoint_dir=str(self.checkpoints), **settings), self.path)

    def masks(self, **settings):
        """Name → rows of class ids as text."""
        return masks_of(self.find(**settings))


def masks_of(found):
    return {pair.name: ["".join(map(str, row)) for row in read_mask(pair.mask).tolist()] for pair in found.pairs}
