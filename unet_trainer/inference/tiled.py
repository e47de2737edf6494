"""Overlapping tiles over an image that is too large for the network: Gaussian-weighted logits, summed in a band of rows.

Tiles start at evenly spread places, half a tile or less apart. While the tiles of one row of tiles are computed, their logits
add up in a buffer of K × tile × width; the rows that no later tile touches are then complete and leave it. Memory is that of the
buffer, whatever the image's height.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.image_readers import ImageReader
from unet_trainer.images.tiling import Size
from unet_trainer.inference.engine import Engine, host_batch
from unet_trainer.inference.logits import Band

SIGMA = 1 / 8  # of the Gaussian, in tiles
BATCH_PIXELS = {"cuda": 16 * 512**2, "cpu": 4 * 512**2}  # of the tiles that go through the network at once


def tile_starts(length: int, tile: int) -> list[int]:
    """Evenly spread, at most half a tile apart, the first at 0 and the last at the end."""
    if length <= tile:
        return [0]
    count = 1 + -(-(length - tile) // (tile // 2))
    return [int(start) for start in np.linspace(0, length - tile, count).round()]


def tile_weights(tile: int) -> torch.Tensor:
    """Along one side; the weight of a pixel is the product of both sides'. Nowhere 0, so that every pixel has a mean."""
    offsets = (torch.arange(tile, dtype=torch.float64) - (tile - 1) / 2) / (SIGMA * tile)
    return torch.exp(-0.5 * offsets**2).clamp_min(1e-4)


def summed_weights(starts: Sequence[int], tile: int, length: int) -> torch.Tensor:
    """Along one side of the image: the sum of the weights of all tiles."""
    total = torch.zeros(max(length, tile), dtype=torch.float64)
    for start in starts:
        total[start : start + tile] += tile_weights(tile)
    return total[:length]


class TiledLogits:
    """Logits of a large image, computed band by band while they are asked for."""

    def __init__(self, engine: Engine, reader: ImageReader, tile: int, prepare: Callable[[Pixels], Pixels]) -> None:
        self.engine, self.reader, self.tile, self.prepare = engine, reader, tile, prepare
        self.on_tiles: Callable[[int], object] = lambda num_tiles: None  # called as tiles are done, for a progress bar

    @property
    def size(self) -> Size:
        return self.reader.size

    @property
    def num_tiles(self) -> int:
        height, width = self.size
        return len(tile_starts(height, self.tile)) * len(tile_starts(width, self.tile))

    def bands(self) -> Iterator[Band]:
        height, width = self.size
        tile, device = self.tile, self.engine.device
        tops, lefts = tile_starts(height, tile), tile_starts(width, tile)
        row_weights = summed_weights(tops, tile, height).float().to(device)
        column_weights = summed_weights(lefts, tile, width).float().to(device)
        side = tile_weights(tile)
        weights = (side[:, None] * side[None]).float().to(device)
        total = torch.zeros(self.engine.card.spec.num_ids, tile, max(width, tile), device=device)
        num_at_once = max(1, BATCH_PIXELS["cuda" if device.type == "cuda" else "cpu"] // tile**2)
        with contextlib.closing(self._strips(tops)) as strips:
            for index, (top, strip) in enumerate(zip(tops, strips, strict=True)):
                for batch in _batches(lefts, num_at_once):
                    images = host_batch([strip[:, left : left + tile] for left in batch], device)
                    for left, logits in zip(batch, self.engine.logits(images), strict=True):
                        total[:, :, left : left + tile] += logits * weights
                    self.on_tiles(len(batch))
                following = tops[index + 1] if index + 1 < len(tops) else min(top + tile, height)
                num_done = following - top
                divisor = row_weights[top:following, None] * column_weights
                yield Band(slice(top, following), total[:, :num_done, :width] / divisor)
                total[:, : tile - num_done] = total[:, num_done:].clone()
                total[:, tile - num_done :] = 0

    def _strips(self, tops: Sequence[int]) -> Generator[Pixels, None, None]:
        """The pixels of each row of tiles. Rows that two of them share are read once, and the next is read meanwhile."""
        height, width = self.size

        def read(top: int, bottom: int) -> Pixels:
            return self.prepare(self.reader.read(slice(top, bottom), slice(0, width)))

        strip: Pixels | None = None
        with ThreadPoolExecutor(1, "next tiles") as thread:
            coming = thread.submit(read, 0, min(self.tile, height))
            for index, top in enumerate(tops):
                pixels = coming.result()
                strip = pixels if strip is None else np.concatenate([strip[top - tops[index - 1] :], pixels])
                if index + 1 < len(tops):
                    coming = thread.submit(read, top + self.tile, tops[index + 1] + self.tile)
                yield _mirrored_to(strip, self.tile, max(width, self.tile))


def _batches(lefts: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(lefts), size):
        yield lefts[start : start + size]


def _mirrored_to(pixels: Pixels, height: int, width: int) -> Pixels:
    """Mirrored at the lower and right edge, as crops of training are, where the image is smaller than a tile."""
    bottom, right = height - pixels.shape[0], width - pixels.shape[1]
    return np.pad(pixels, ((0, bottom), (0, right), (0, 0)), mode="reflect") if bottom > 0 or right > 0 else pixels
