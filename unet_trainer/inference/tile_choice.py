"""Which tile a model of fit: crop is used with, measured at the end of training on validation images.

A network that pools over its whole input, as squeeze-and-excite does, sees something else in a larger tile than in training; larger
tiles have fewer borders. So the size of training's crops and larger ones are tried as `predict` would use them, on the same parts
of validation images, and the best goes into the spec of best.pt and last.pt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.tiling import Size, tile_images
from unet_trainer.inference.engine import Engine, TorchEngine
from unet_trainer.inference.logits import all_ids, tile_starts
from unet_trainer.inference.predictor import Predictor
from unet_trainer.inference.scores import confusion_matrix
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.model.metrics import compute_scores
from unet_trainer.model.segmenter import MAX_SIDE
from unet_trainer.system.console import first_line
from unet_trainer.training.checkpoint_file import read_checkpoint, write_checkpoint
from unet_trainer.training.errors import CheckpointError
from unet_trainer.training.run import Run
from unet_trainer.training.run_folder import BEST, LAST
from unet_trainer.training.time_budget import MIN_TILE_SECONDS, tile_seconds

FACTORS = (1, 2, 4)  # of the size of training's crops
MIN_IMAGES = 4  # fewer sizes are tried where there is no time for so many images


@dataclass(frozen=True)
class TileScores:
    iou: Mapping[Size, float]  # the size of training first
    num_images: int
    num_all: int  # validation images

    @property
    def best(self) -> Size:
        """Training's size, unless a larger one is better."""
        return max(self.iou, key=lambda tile: self.iou[tile])

    def describe(self) -> str:
        """For the user: the tile, and why."""
        how = ", as trained" if self.best == next(iter(self.iou)) else ""
        others = ", ".join(f"{_shown(tile)} {iou:.4f}" for tile, iou in self.iou.items() if tile != self.best)
        of = "" if self.num_images == self.num_all else f" of {self.num_all}"
        images = f"{self.num_images}{of} validation images" if self.num_all > 1 else "the validation image"
        return f"{_shown(self.best)}{how}: IoU {self.iou[self.best]:.4f} on {images}, blended ({others})"


def _shown(tile: Size) -> str:
    return f"{tile[1]}×{tile[0]}"


def choose_tile(run: Run) -> None:
    """Of the best epoch's weights. No error of it fails a run that is done."""
    best, dataset = run.checkpointer.folder / BEST, run.loaders.val.dataset
    found: TileScores | str
    try:
        engine = TorchEngine(best, str(run.components.numerics.device))
        if engine.card.spec.tile is not None:  # a run that had ended before
            return
        seconds = min(tile_seconds(run), max(MIN_TILE_SECONDS, run.budget.left()))
        with run.console.bar(f"Trying larger tiles, {seconds:.0f} s at most:", len(dataset.pairs), keep=False) as bar:
            found = measure_tiles(engine, dataset, seconds, bar.tick)
        if isinstance(found, TileScores):
            for path in (best, best.with_name(LAST)):
                write_tile(path, found.best)
    except (CheckpointError, DataError, OSError, RuntimeError, MemoryError) as error:
        found = first_line(error)
    shown = found.describe() if isinstance(found, TileScores) else f"{_shown(run.config.shape)}, as trained ({found})"
    run.console.say(f"Tile for predict and evaluate: {shown}")


def measure_tiles(
    engine: Engine, dataset: SegmentationDataset, seconds: float, tick: Callable[[], object] = lambda: None
) -> TileScores | str:
    """IoU at each size on as many validation images as there is time for, or why none was measured. Of a large image, the part
    that holds most is taken."""
    started, spec = time.monotonic(), engine.card.spec
    tiles = candidate_tiles(spec.image_size, [size.image for size in dataset.sizes], Predictor(engine).whole)
    if len(tiles) == 1:
        return "no validation image is larger"
    tile_seconds = _time_tile(engine)
    while len(tiles) > 1 and MIN_IMAGES * _count_tiles(tiles) * tile_seconds > seconds:
        tiles.pop()
    if len(tiles) == 1:
        return f"there is no time to try larger ones, {tile_seconds:.2g} s for each tile"
    predictors = {tile: Predictor(engine, tile) for tile in tiles}
    matrices = {tile: np.zeros((spec.num_ids, spec.num_ids), np.int64) for tile in tiles}
    order = np.random.default_rng(0).permutation(len(dataset.pairs))
    num_images = 0
    for index in order:
        image, truth = _fullest_part(*dataset.decode(int(index)), tiles[-1])
        for tile, predictor in predictors.items():
            ids = all_ids(predictor.predict_input(predictor.as_input(image, truth.shape)))
            matrices[tile] += confusion_matrix(truth, ids, spec.num_ids)
        num_images += 1
        tick()
        if (time.monotonic() - started) * (num_images + 1) / num_images > seconds:
            break
    iou = {tile: compute_scores(torch.from_numpy(matrix), spec.num_classes).iou for tile, matrix in matrices.items()}
    return TileScores(iou, num_images, len(order)) if np.isfinite(list(iou.values())).all() else "no class is in the images"


def candidate_tiles(trained: Size, image_sizes: list[Size], most_pixels: int) -> list[Size]:
    """Training's size and larger ones, up to one that holds every image."""
    tiles = [trained]
    for factor in FACTORS[1:]:
        height, width = trained[0] * factor, trained[1] * factor
        is_of_use = any(size[0] > tiles[-1][0] or size[1] > tiles[-1][1] for size in image_sizes)
        if is_of_use and height * width <= most_pixels and max(height, width) <= MAX_SIDE:
            tiles.append((height, width))
    return tiles


def _time_tile(engine: Engine) -> float:
    """Seconds for one of training's size, of four together; the first call loads kernels."""
    spec = engine.card.spec
    images = torch.zeros(4, *spec.image_size, spec.image.channels, dtype=torch.uint8 if spec.image.is_8bit else torch.float32)
    engine.logits(images).cpu()
    started = time.monotonic()
    engine.logits(images).cpu()  # waits for the device
    return (time.monotonic() - started) / len(images)


def _count_tiles(tiles: Sequence[Size]) -> float:
    """That an image as large as the last of these takes in all of them, in tiles of the first size."""
    height, width = tiles[-1]
    counts = [len(tile_starts(height, rows)) * len(tile_starts(width, columns)) for rows, columns in tiles]
    return sum(count * math.prod(tile) for count, tile in zip(counts, tiles, strict=True)) / math.prod(tiles[0])


def _fullest_part(image: Pixels, truth: Pixels, size: Size) -> tuple[Pixels, Pixels]:
    """No larger than this: the one with the most pixels of any class but 0."""
    marked = (truth != 0) & (truth != IGNORED)
    corners = [(tile.top, tile.left) for tile in tile_images([(truth.shape[0], truth.shape[1])], size).tiles]
    places = [(slice(top, top + size[0]), slice(left, left + size[1])) for top, left in corners]
    best = max(places, key=lambda place: int(marked[place].sum()))
    return image[best], truth[best]


def write_tile(path: Path, tile: Size) -> None:
    """Into the spec of a checkpoint. Raises CheckpointError or OSError."""
    content = read_checkpoint(path)
    write_checkpoint(path, {**content, "spec": {**content["spec"], "tile": list(tile)}})
