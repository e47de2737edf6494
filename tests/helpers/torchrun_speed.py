"""What torchrun costs: images/s of plain python and of `torchrun --nproc-per-node=1` (NCCL), in turns, on drawn images.

python tests/helpers/torchrun_speed.py [--rounds 2] [--images 1024] [--epochs 6] [further settings, e.g. batch_size=64]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT)]

from unet_trainer.datasets.demo import draw_sample  # noqa: E402
from unet_trainer.images.image_decoding import write_image  # noqa: E402
from unet_trainer.training.history import column, read_metrics  # noqa: E402

SETTINGS = ["image_size=512", "fit=resize", "encoder_weights=null", "early_stopping_patience=null", "cache=none", "repeats=1"]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun, one process": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1"],
}


def draw(folder, index):
    image, mask = draw_sample(index, side=512)
    write_image(folder / "images" / f"{index:05d}.jpg", image)
    write_image(folder / "masks" / f"{index:05d}.png", mask)


def measure(launcher, folder, name, epochs, further):
    """Images/s of each epoch but the first, which starts the workers."""
    settings = [*SETTINGS, f"data_dir={folder / 'data'}", f"checkpoint_dir={folder / 'runs'}", f"run_name={name}"]
    command = [
        *LAUNCHERS[launcher],
        str(ROOT / "train_unet.py"),
        str(ROOT / "configs/fast.yaml"),
        *settings,
        f"num_epochs={epochs}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *further], env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        sys.exit(f"{launcher} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return column(read_metrics(folder / "runs" / name / "metrics.csv")[1:], "images_per_second")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--epochs", type=int, default=6)
    given, further = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("images", "masks"):
            (folder / "data" / part).mkdir(parents=True)
        with ProcessPoolExecutor() as pool:
            list(pool.map(partial(draw, folder / "data"), range(given.images), chunksize=8))
        found = {launcher: [] for launcher in LAUNCHERS}
        for number in range(given.rounds):
            for launcher, rates in found.items():
                measured = measure(launcher, folder, f"{launcher.split(',')[0]}-{number}", given.epochs, further)
                print(f"round {number + 1}, {launcher}: {', '.join(f'{rate:.0f}' for rate in measured)} images/s", flush=True)
                rates += measured
        medians = {launcher: statistics.median(rates) for launcher, rates in found.items()}
        plain, job = medians.values()
        print(f"medians: {', '.join(f'{launcher} {rate:.1f}' for launcher, rate in medians.items())} images/s")
        print(f"torchrun is at {job / plain:.1%} of plain python")


if __name__ == "__main__":
    main()
