"""Folders with images and annotation files, and the masks that are drawn from them."""

from __future__ import annotations

import json
import shutil

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


def annotate_masks(source, target, label=lambda index: "cat"):
    """A copy of the images of a folder, with COCO run lengths in place of its masks; all that is not 0 is one object an image."""
    (target / "images").mkdir(parents=True)
    names, images, annotations = [], [], []
    for index, path in enumerate(sorted((source / "images").iterdir())):
        shutil.copy(path, target / "images")
        mask = read_mask(next((source / "masks").glob(f"{path.stem}.*")))
        changes = np.flatnonzero(np.diff(mask.T.ravel() != 0, prepend=False, append=False))
        runs = np.diff(changes, prepend=0, append=mask.size).tolist()
        if label(index) not in names:
            names.append(label(index))
        images.append({"id": index, "file_name": path.name, "width": mask.shape[1], "height": mask.shape[0]})
        segmentation = {"counts": runs if runs[-1] else runs[:-1], "size": list(mask.shape)}
        category = 1 + names.index(label(index))
        annotations.append({"id": index, "image_id": index, "category_id": category, "iscrowd": 0, "segmentation": segmentation})
    categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (target / "annotations.json").write_text(json.dumps(content))
    return target


def masks_of(found):
    return {pair.name: ["".join(map(str, row)) for row in read_mask(pair.mask).tolist()] for pair in found.pairs}
