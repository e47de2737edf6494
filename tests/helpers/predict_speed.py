"""How fast `predict` is on this machine: 1,000 JPEGs of 512 × 512 and a U-Net with random weights, in a temporary folder.

python tests/helpers/predict_speed.py [--images 1000] [--encoder resnet34] [further options of predict, e.g. --batch-size 32]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import cv2  # noqa: E402
import numpy as np  # noqa: E402

from helpers.predicting import write_model  # noqa: E402
from train_unet import main  # noqa: E402

SIDE = 512


def write_photo(path):
    """Smooth areas, edges and grain: about as many bytes as a photograph."""
    random = np.random.default_rng(int(path.stem))
    coarse = cv2.resize(random.integers(0, 256, (12, 12, 3), np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    for _ in range(20):
        centre, axes = random.integers(0, SIDE, 2).tolist(), random.integers(8, 90, 2).tolist()
        cv2.ellipse(coarse, centre, axes, int(random.integers(180)), 0, 360, random.integers(0, 256, 3).tolist(), -1)
    grain = random.normal(0, 6, coarse.shape)
    cv2.imwrite(str(path), (coarse + grain).clip(0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])


def run(num_images, encoder, options):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "images").mkdir()
        with ThreadPoolExecutor() as threads:
            list(threads.map(write_photo, [folder / f"images/{number:04}.jpg" for number in range(num_images)]))
        model = write_model(folder / "run/best.pt", encoder=encoder, decoder_channels=None, fit="resize", image_size=(SIDE, SIDE))
        return main(["predict", str(model), str(folder / "images"), "--out", str(folder / "out"), "--time", *options])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--encoder", default="resnet34")
    given, others = parser.parse_known_args()
    sys.exit(run(given.images, given.encoder, others))
