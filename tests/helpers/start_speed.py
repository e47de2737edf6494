"""How long `check` and the start of training take on this machine: 10,000 JPEGs with PNG masks of 128 × 128, in a temporary folder.

python tests/helpers/start_speed.py [--pairs 10000] [--size 128]
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from train_unet import main
from unet_trainer.config.load import load_config
from unet_trainer.training.session import Session
from unet_trainer.training.setup import set_up


def write_pairs(data, number, size):
    for kind in ("images", "masks"):
        (data / kind).mkdir(parents=True)
    rows, columns = np.mgrid[:size, :size]

    def write(index):
        rng = np.random.default_rng(index)
        row, column, radius = (
            rng.integers(size // 4, 3 * size // 4),
            rng.integers(size // 4, 3 * size // 4),
            rng.integers(8, size // 4),
        )
        mask = ((np.hypot(rows - row, columns - column) < radius) * 255).astype(np.uint8)
        image = cv2.GaussianBlur(rng.integers(0, 256, (size, size, 3), np.uint8), (0, 0), 3) // 2
        image[mask > 0] += 90
        cv2.imwrite(str(data / f"images/{index:06d}.jpg"), image)
        cv2.imwrite(str(data / f"masks/{index:06d}.png"), mask)

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(write, range(number)))


@contextmanager
def timed(what):
    """Prints seconds of the wall clock and of the processors, those of child processes included."""
    before, started = os.times(), time.perf_counter()
    yield
    after = os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    print(f"{what}: {time.perf_counter() - started:.1f} s, {cpu:.1f} s of CPU time")


def run(number, size):
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write_pairs(data, number, size)
        words = [f"data_dir={data}", f"checkpoint_dir={folder}/checkpoints"]
        with timed(f"check of {number} pairs"), redirect_stdout(io.StringIO()):
            assert main(["check", *words]) == 0
        with timed("check again"), redirect_stdout(io.StringIO()):
            assert main(["check", *words]) == 0
        small = [
            "encoder=tu-mobilenetv3_small_050",
            "image_size=64",
            "batch_size=8",
            "num_epochs=1",
            "encoder_weights=null",
            "cache=none",
        ]
        for what, where in (("start of training", f"{folder}/others"), ("start of training after check", f"{folder}/checkpoints")):
            config = load_config(
                {}, [*(word for word in words if not word.startswith("checkpoint_dir=")), *small, f"checkpoint_dir={where}"]
            )
            with timed(what), redirect_stdout(io.StringIO()), Session() as session:
                set_up(config, session)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=128)
    given = parser.parse_args()
    run(given.pairs, given.size)
