"""Logits of one image in bands of rows, of whole images or of overlapping tiles, and what is made of them: ids and probabilities.

Tiles start at evenly spread places, half a tile or less apart, and their logits are added up with Gaussian weights. A large image
is computed in bands of rows: while the tiles of one row of tiles are computed, their logits add up in a buffer of K × tile × width;
the rows that no later tile touches are then complete and leave it. Memory is that of the buffer, whatever the image's height.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageReader
from unet_trainer.images.tiling import Size, mirrored_to
from unet_trainer.inference.engine import Engine, host_batch
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.metrics import upsampled_rows

SIGMA = 1 / 8  # of the Gaussian, in tiles
BATCH_PIXELS = {"cuda": 16 * 512**2, "cpu": 4 * 512**2}  # that go through the network at once

Forward = Callable[[torch.Tensor], torch.Tensor]  # N,H,W,C images → N,K,H,W logits, which may be overwritten by the next call


class Band(NamedTuple):
    rows: slice
    logits: torch.Tensor  # K,rows,W float32 on the engine's device


@dataclass(frozen=True)
class WholeLogits:
    logits: torch.Tensor  # K,h,w float32
    size: Size

    def bands(self) -> Iterator[Band]:
        if self.logits.shape[1:] == self.size:
            yield Band(slice(0, self.size[0]), self.logits)
            return
        for rows, logits in upsampled_rows(self.logits.unsqueeze(0), self.size):
            yield Band(rows, logits[0])


def batch_pixels(device: torch.device) -> int:
    return BATCH_PIXELS["cuda" if device.type == "cuda" else "cpu"]


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


class TileGrid:
    """Where the tiles of images of one size lie, and what each of their pixels weighs."""

    def __init__(self, size: Size, tile: Size, device: torch.device) -> None:
        self.tile = tile
        self.tops, self.lefts = (tile_starts(length, side) for length, side in zip(size, tile, strict=True))
        sums = []
        for starts, side, length in zip((self.tops, self.lefts), tile, size, strict=True):
            total = torch.zeros(max(length, side), dtype=torch.float64)
            for start in starts:
                total[start : start + side] += tile_weights(side)
            sums.append(total[:length].float().to(device))
        self.rows, self.columns = sums  # along each side of the image: the sum of the weights of all tiles
        self.weights = (tile_weights(tile[0])[:, None] * tile_weights(tile[1])).float().to(device)
        self.batch_pixels = batch_pixels(device)

    def add(
        self,
        total: torch.Tensor,
        images: torch.Tensor,
        tops: Sequence[int],
        forward: Forward,
        on_tiles: Callable[[int], object] = lambda num_tiles: None,
    ) -> None:
        """Adds the weighted logits of the tiles at these rows of N,H,W,C images to N,K,H,W; tiles of all images go through the
        network together."""
        height, width = self.tile
        places = [(top, left) for top in tops for left in self.lefts]
        num_calls = -(-len(places) * len(images) * height * width // self.batch_pixels)
        num_at_once = -(-len(places) // num_calls)  # calls of one size: a graph is captured for it
        for start in range(0, len(places), num_at_once):
            some = places[start : start + num_at_once]
            logits = forward(torch.cat([images[:, top : top + height, left : left + width] for top, left in some]))
            for (top, left), its_logits in zip(some, logits.split(len(images)), strict=True):
                total[:, :, top : top + height, left : left + width] += its_logits * self.weights
            on_tiles(len(some))


@torch.inference_mode()
def blended_logits(engine: Engine, images: torch.Tensor, tile: Size, forward: Forward) -> torch.Tensor:
    """N,H,W,C images of one size, no side less than the tile's → N,K,H,W float32 on the engine's device."""
    num_images, height, width = images.shape[:3]
    (images,) = to_device((images,), engine.device)  # once, and cut there
    grid = TileGrid((height, width), tile, engine.device)
    total = torch.zeros(num_images, engine.card.spec.num_ids, height, width, device=engine.device)
    grid.add(total, images, grid.tops, forward)
    return total.div_(grid.rows[:, None] * grid.columns)


class TiledLogits:
    """Logits of a large image, computed band by band while they are asked for."""

    def __init__(self, engine: Engine, reader: ImageReader, tile: Size, prepare: Callable[[Pixels], Pixels]) -> None:
        self.engine, self.reader, self.tile, self.prepare = engine, reader, tile, prepare
        self.on_tiles: Callable[[int], object] = lambda num_tiles: None  # called as tiles are done, for a progress bar

    @property
    def size(self) -> Size:
        return self.reader.size

    @property
    def num_tiles(self) -> int:
        (height, width), (rows, columns) = self.size, self.tile
        return len(tile_starts(height, rows)) * len(tile_starts(width, columns))

    def bands(self) -> Iterator[Band]:
        (height, width), rows, device = self.size, self.tile[0], self.engine.device
        grid = TileGrid(self.size, self.tile, device)
        total = torch.zeros(1, self.engine.card.spec.num_ids, rows, max(width, self.tile[1]), device=device)
        with contextlib.closing(self._strips(grid.tops)) as strips:
            for index, (top, strip) in enumerate(zip(grid.tops, strips, strict=True)):
                (images,) = to_device((host_batch([strip], device),), device)
                grid.add(total, images, [0], self.engine.logits, self.on_tiles)
                following = grid.tops[index + 1] if index + 1 < len(grid.tops) else min(top + rows, height)
                num_done = following - top
                divisor = grid.rows[top:following, None] * grid.columns
                yield Band(slice(top, following), total[0, :, :num_done, :width] / divisor)
                total[:, :, : rows - num_done] = total[:, :, num_done:].clone()
                total[:, :, rows - num_done :] = 0

    def _strips(self, tops: Sequence[int]) -> Generator[Pixels, None, None]:
        """The pixels of each row of tiles. Rows that two of them share are read once, and the next is read meanwhile."""
        (height, width), rows = self.size, self.tile[0]

        def read(top: int, bottom: int) -> Pixels:
            return self.prepare(self.reader.read(slice(top, bottom), slice(0, width)))

        strip: Pixels | None = None
        with ThreadPoolExecutor(1, "next tiles") as thread:
            coming = thread.submit(read, 0, min(rows, height))
            for index, top in enumerate(tops):
                pixels = coming.result()
                strip = pixels if strip is None else np.concatenate([strip[top - tops[index - 1] :], pixels])
                if index + 1 < len(tops):
                    coming = thread.submit(read, top + rows, tops[index + 1] + rows)
                yield mirrored_to(strip, self.tile)


Logits = WholeLogits | TiledLogits  # bands() may be called once only


def predicted_ids(logits: torch.Tensor, threshold: float | None = None) -> torch.Tensor:
    """…,K,H,W logits → …,H,W uint8 ids, where the logits are. `threshold`: least probability of the foreground, of two ids."""
    if logits.shape[-3] == 2:
        least = 0.0 if threshold is None else float(np.log(threshold) - np.log1p(-threshold))
        return (logits.select(-3, 1) - logits.select(-3, 0) > least).to(torch.uint8)
    return logits.max(-3).indices.to(torch.uint8)


def band_ids(logits: torch.Tensor, threshold: float | None = None) -> Pixels:
    """K,rows,W logits → rows,W uint8 ids. `threshold` as in predicted_ids."""
    return predicted_ids(logits, threshold).cpu().numpy()


def all_ids(logits: Logits, threshold: float | None = None) -> Pixels:
    """H,W uint8 ids of the whole image."""
    return np.concatenate([band_ids(band.logits, threshold) for band in logits.bands()])


def all_probabilities(logits: Logits) -> Pixels:
    """H,W,K float32 of the whole image."""
    return np.concatenate([band.logits.softmax(0).permute(1, 2, 0).cpu().numpy() for band in logits.bands()])
