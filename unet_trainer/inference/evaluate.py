"""One pass of a model over pairs of images and masks: counts for every image, at the masks' own size.

    files → read ahead in threads → predicted in batches, here → scored in threads → counts

Images, masks and predictions live as long as they are on this way; what stays are the counts of each image and the predictions of
the few worst ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.file_bytes import DataError, ReadError, shown_path
from unet_trainer.images.image_files import Pixels, read_image_and_size, read_mask
from unet_trainer.images.image_readers import ArrayReader
from unet_trainer.images.mask_coding import UNKNOWN, MaskCoding
from unet_trainer.images.tiling import Size, crop_pair, resize_mask, tile_images
from unet_trainer.inference.image_scores import ImageCounts, count_image, mean_over, scores_from_counts
from unet_trainer.inference.logits import all_ids, band_ids
from unet_trainer.inference.predictor import ModelInput, Predictor
from unet_trainer.system.ordered_map import ordered_map
from unet_trainer.system.resources import count_cores

Tiles = Literal["blended", "as-trained"]

NUM_WORST = 10
MAX_THREADS = 4  # that read, and as many that score
MAX_BYTES_AHEAD = 2**29  # of images and masks that are read and not yet predicted, about
BATCH_PIXELS = {"cuda": 16 * 512**2, "cpu": 4 * 512**2}  # of the images that go through the network at once


@dataclass(frozen=True)
class Options:
    threshold: float | None = None  # least probability of the foreground, of two ids
    with_lines: bool = False  # what clDice needs
    tiles: Tiles = "blended"  # fit: crop; as-trained: as training's validation takes them


@dataclass(frozen=True)
class Sample:
    index: int
    given: ModelInput
    truth: Pixels  # H,W ids


@dataclass(frozen=True)
class Predicted:
    index: int
    truth: Pixels
    ids: Pixels  # H,W


@dataclass(frozen=True)
class Worst:
    """An image among the worst and what the model made of it."""

    index: int
    ids: Pixels


@dataclass(frozen=True)
class EvaluatedSet:
    """Counts of all images, in the order of the pairs."""

    counts: NDArray[np.int64]  # N, classes that are reported, columns of image_scores.Count
    confusion: NDArray[np.int64]  # K,K of all ids, summed: rows truth, columns prediction
    num_wrong: NDArray[np.int64]  # pixels of each image that are predicted wrongly
    num_counted: NDArray[np.int64]  # pixels of each image that are not ignored
    worst: Sequence[Worst]  # the worst first


@dataclass(frozen=True)
class PairReader:
    """Reads pairs as training's validation does, so that the network sees the same pixels."""

    pairs: Sequence[Pair]
    sizes: Sequence[Size]  # of the images, when they were scanned
    coding: MaskCoding
    resize_masks: bool
    predictor: Predictor

    def read(self, index: int) -> Sample:
        """Raises DataError."""
        pair, spec = self.pairs[index], self.predictor.spec
        path = pair.image
        try:
            # As in loading/dataset.py: a JPEG may be decoded at a fraction where it is made smaller in any case.
            min_side = 2 * max(spec.image_size) if spec.fit == "resize" and not self.resize_masks else None
            image, size = read_image_and_size(path, min_side)
            path = pair.mask
            truth = self.coding.encode(read_mask(path))
            path = pair.image
            given = self.predictor.prepare(image, size)
        except ReadError as error:
            raise DataError(f"{shown_path(path)}: {error}") from None
        except DataError as error:
            raise DataError(f"{shown_path(path)}: {error}; it has changed since it was looked at") from None
        if self.resize_masks:
            truth = resize_mask(truth, size)
        if size != self.sizes[index] or truth.shape != size or (truth == UNKNOWN).any():
            raise DataError(f"{shown_path(pair.image)} or its mask {shown_path(pair.mask)} has changed since it was looked at")
        return Sample(index, given, truth)

    def num_ahead(self) -> int:
        """How many pairs may be read ahead: by the memory that the largest takes."""
        image = self.predictor.spec.image
        largest = max(height * width for height, width in self.sizes) * (image.channels * (1 if image.is_8bit else 4) + 1)
        return max(1, min(2 * MAX_THREADS, MAX_BYTES_AHEAD // largest))


def evaluate(reader: PairReader, options: Options, tick: Callable[[], object] = lambda: None) -> EvaluatedSet:
    """`tick` is called after each image. Raises DataError."""
    spec, num_images = reader.predictor.spec, len(reader.pairs)
    first_id = spec.num_ids - len(spec.class_names)  # with one class, the background is not reported
    count = partial(_count, num_ids=spec.num_ids, first_id=first_id, with_lines=options.with_lines)
    order = sorted(range(num_images), key=lambda index: (reader.sizes[index], index))  # images of one size make a batch
    num_threads = min(MAX_THREADS, count_cores())
    counts: NDArray[np.int64] | None = None
    confusion = np.zeros((spec.num_ids, spec.num_ids), np.int64)
    num_wrong, num_counted = np.zeros(num_images, np.int64), np.zeros(num_images, np.int64)
    worst: list[tuple[tuple[float, float, str], Worst]] = []
    with (
        contextlib.closing(ordered_map(reader.read, order, num_threads, reader.num_ahead())) as samples,
        contextlib.closing(predict_samples(reader.predictor, samples, options)) as predictions,
        contextlib.closing(ordered_map(count, predictions, num_threads, 2 * num_threads)) as counted_images,
    ):
        for predicted, found in counted_images:
            index = predicted.index
            if counts is None:
                counts = np.zeros((num_images, *found.counts.shape), np.int64)
            counts[index] = found.counts
            confusion += found.confusion
            num_counted[index] = found.confusion.sum()
            num_wrong[index] = num_counted[index] - found.confusion.trace()
            rank = badness(found.counts, num_wrong[index] / max(1, num_counted[index]), reader.pairs[index].name)
            worst = sorted([*worst, (rank, Worst(index, predicted.ids))], key=lambda entry: entry[0])[:NUM_WORST]
            tick()
    assert counts is not None
    return EvaluatedSet(counts, confusion, num_wrong, num_counted, [one for _, one in worst])


def badness(counts: NDArray[np.int64], wrong_share: float, name: str) -> tuple[float, float, str]:
    """Sorts images from the worst on: by the mean IoU of their classes, then by the share of their pixels that is wrong.

    Images without an IoU, where no class is in truth or prediction, come last.
    """
    iou = float(mean_over(scores_from_counts(counts)["iou"], axis=-1))
    return (2.0 if math.isnan(iou) else iou, -wrong_share, name)


def _count(predicted: Predicted, num_ids: int, first_id: int, with_lines: bool) -> tuple[Predicted, ImageCounts]:
    return predicted, count_image(predicted.truth, predicted.ids, num_ids, first_id, with_lines)


def predict_samples(predictor: Predictor, samples: Iterable[Sample], options: Options) -> Generator[Predicted, None, None]:
    """In the order of the samples; those of one shape that follow each other go through the network together."""
    batch: list[Sample] = []
    for sample in samples:
        is_alone = predictor.spec.fit == "crop" and (options.tiles == "as-trained" or predictor.is_tiled(sample.given.size))
        is_full = len(batch) >= _batch_size(predictor, sample)
        if batch and (is_alone or is_full or batch[0].given.pixels.shape != sample.given.pixels.shape):
            yield from _predict_batch(predictor, batch, options)
            batch = []
        if is_alone:
            yield Predicted(sample.index, sample.truth, _predict_tiles(predictor, sample, options))
        else:
            batch.append(sample)
    if batch:
        yield from _predict_batch(predictor, batch, options)


def _batch_size(predictor: Predictor, sample: Sample) -> int:
    height, width = sample.given.pixels.shape[:2]
    return max(1, BATCH_PIXELS["cuda" if predictor.engine.device.type == "cuda" else "cpu"] // (height * width))


def _predict_batch(predictor: Predictor, batch: Sequence[Sample], options: Options) -> Iterator[Predicted]:
    logits = predictor.predict([sample.given for sample in batch])
    for sample, its_logits in zip(batch, logits, strict=True):
        yield Predicted(sample.index, sample.truth, all_ids(its_logits, options.threshold))


def _predict_tiles(predictor: Predictor, sample: Sample, options: Options) -> Pixels:
    if options.tiles == "as-trained":
        return tiled_ids_as_trained(predictor, sample, options.threshold)
    return all_ids(predictor.predict_large(ArrayReader(sample.given.pixels)), options.threshold)


def tiled_ids_as_trained(predictor: Predictor, sample: Sample, threshold: float | None) -> Pixels:
    """H,W ids from the tiles of training's validation: each pixel from the one tile that it counts in."""
    size = predictor.spec.image_size
    ids = np.empty(sample.given.size, np.uint8)
    tiles = tile_images([sample.given.size], size).tiles
    num_at_once = max(1, BATCH_PIXELS["cuda" if predictor.engine.device.type == "cuda" else "cpu"] // (size[0] * size[1]))
    for start in range(0, len(tiles), num_at_once):
        some = tiles[start : start + num_at_once]
        crops = [crop_pair(sample.given.pixels, sample.truth, tile.top, tile.left, size)[0] for tile in some]
        for tile, logits in zip(some, predictor.engine.logits(torch.from_numpy(np.stack(crops))), strict=True):
            rows, columns = slice(*tile.rows), slice(*tile.columns)
            counted_rows = slice(tile.rows[0] - tile.top, tile.rows[1] - tile.top)
            counted_columns = slice(tile.columns[0] - tile.left, tile.columns[1] - tile.left)
            ids[rows, columns] = band_ids(logits, threshold)[counted_rows, counted_columns]
    return ids
