"""How fast samples come from files, from shards and from shards behind a web server on this machine.

python tests/helpers/shard_speed.py FOLDER [--epochs 3] [--workers 2] [--size 256] [--delay 0.02]

FOLDER: a dataset. Shards of it are written to a temporary folder. Each is read by the worker pool of training, without a model, in
turns; the first pass over each is left out but for the web server, of which the first (fetched) and the later ones (kept) are told.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from helpers.shard_server import serving  # noqa: E402
from train_unet import main  # noqa: E402
from unet_trainer.config.load import load_config  # noqa: E402
from unet_trainer.datasets.dataset_report import build_dataset_report  # noqa: E402
from unet_trainer.images.tiling import WholeImages  # noqa: E402
from unet_trainer.loading.dataset import SegmentationDataset  # noqa: E402
from unet_trainer.loading.loader import Loader  # noqa: E402
from unet_trainer.loading.worker_pool import WorkerPool  # noqa: E402
from unet_trainer.system.console import Console  # noqa: E402
from unet_trainer.training.build import _pair_sizes  # noqa: E402


def build_loader(data_dir, folder, size, num_workers):
    config = load_config({"data_dir": str(data_dir), "checkpoint_dir": str(folder)})
    checked = build_dataset_report(config, Console()).checked()
    pairs = checked.split.train
    tiling = WholeImages((size, size), len(pairs), 1)
    dataset = SegmentationDataset(pairs, _pair_sizes(checked, pairs), checked.coding, checked.image_spec, tiling, None, 0)
    pool = WorkerPool(num_workers, torch.device("cpu"))
    return Loader(dataset, 16, shuffle=True, pool=pool), pool


def time_epochs(loader, epochs):
    """Images a second of each epoch."""
    found = []
    for epoch in range(epochs):
        started = time.perf_counter()
        number = sum(batch.num_images for batch in loader.epoch(epoch))
        found.append(number / (time.perf_counter() - started))
    return found


def run(given):
    with tempfile.TemporaryDirectory() as name, serving(Path(name) / "shards") as server:
        folder = Path(name)
        words = [
            f"data_dir={given.folder}",
            f"checkpoint_dir={folder / 'runs'}",
            "--out",
            str(folder / "shards"),
            "--shard-mb",
            "20",
        ]
        assert main(["shard", *words]) == 0
        server.delay = given.delay
        for place in (given.folder, folder / "shards", server.url):
            loader, pool = build_loader(place, folder / "runs", given.size, given.workers)
            speeds = time_epochs(loader, given.epochs + 1)
            pool.close()
            later = " ".join(f"{speed:.0f}" for speed in speeds[1:])
            print(f"{str(place)[-40:]:40s} first {speeds[0]:7.0f}, later {later} images/s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds that the web server waits before each answer")
    run(parser.parse_args())
