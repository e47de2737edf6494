"""A dataset for `check`."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from helpers.class_masks import HEIGHT, WIDTH, ids_of


@pytest.fixture
def data(tmp_path):
    """Ten pairs of three classes and background."""
    folder = tmp_path / "my data"
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    chooser = np.random.default_rng(0)
    for index in range(10):
        cv2.imwrite(str(folder / f"images/{index}.png"), chooser.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))
        cv2.imwrite(str(folder / f"masks/{index}.png"), ids_of(index))
    return folder
