"""Runs and what they leave in their folders."""

import hashlib
import json

import pytest
import torch

from train_unet import train


def words(settings):
    """A config dict as command-line words."""
    return [f"{name}={json.dumps(value) if not isinstance(value, str) else value}" for name, value in settings.items()]


def weights_digest(folder, name="last.pt"):
    """SHA-256 of every tensor of the model and its average, bit for bit."""
    content = torch.load(folder / name, weights_only=True, map_location="cpu")
    total = hashlib.sha256()
    for model in [content["model"], *([content["ema"]["model"]] if content.get("ema") else [])]:
        for tensor_name, tensor in model.items():
            total.update(tensor_name.encode())
            total.update(tensor.numpy().tobytes())
    return total.hexdigest()


def timeless_rows(folder):
    """metrics.csv without what depends on the clock."""
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    timed = [rows[0].index(name) for name in ("seconds", "images_per_second", "data_wait")]
    return [[value for index, value in enumerate(row) if index not in timed] for row in rows]


def stop_after(epoch):
    """For on_epoch: as if Ctrl-C came after this epoch."""

    def stop(row):
        if row["epoch"] == epoch:
            raise KeyboardInterrupt

    return stop


def flip_a_bit(path):
    """In the middle of the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def train_until(epoch, config, **settings):
    """Trains until Ctrl-C comes after this epoch."""
    with pytest.raises(KeyboardInterrupt):
        train(config, stop_after(epoch), **settings)


def assert_same_run(one, other):
    """The folders hold the same last and best weights, bit for bit, and the same rows but for times."""
    for name in ("last.pt", "best.pt"):
        assert weights_digest(one, name) == weights_digest(other, name), name
    assert timeless_rows(one) == timeless_rows(other)
