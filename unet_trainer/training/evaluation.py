"""Evaluates a model on a dataset: loss and scores from sums over all pixels of the set, whatever its batches."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from unet_trainer.images.drawing import to_display
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.images.tiling import Size, Tile, Tiles, resize_mask
from unet_trainer.loading.dataset import Batch, Key, SegmentationDataset
from unet_trainer.loading.loader import Loader
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.losses import WeightedLoss
from unet_trainer.model.metrics import (
    Scores,
    class_counts,
    compute_scores,
    confusion_matrices,
    native_confusion_matrices,
    predicted_ids,
    resize_masks,
)
from unet_trainer.model.precision import Numerics
from unet_trainer.model.segmenter import Segmenter
from unet_trainer.system.distributed import ALONE, Job
from unet_trainer.training.async_device import AsyncReader
from unet_trainer.training.state import wide_float
from unet_trainer.training.step import micro_batches

# N,H,W,C images, N,H,W masks, with_logits → sums for the loss, and N,K,K confusion matrices or N,K,H,W logits
EvalForward = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
NUM_SAMPLES = 4  # validation images that are shown
MAX_SIDE = 768  # of what is shown of an image that is tiled, in its own pixels: each tile costs a forward pass


def build_eval_forward(segmenter: Segmenter, loss: WeightedLoss, numerics: Numerics) -> EvalForward:
    def forward(images: torch.Tensor, masks: torch.Tensor, with_logits: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with numerics.autocast():
            logits = segmenter(images)
        loss_sums = loss.eval_sums(logits, masks)
        if with_logits:
            return loss_sums, logits
        return loss_sums, confusion_matrices(predicted_ids(logits), masks, logits.shape[1])

    return forward


@torch.no_grad()
def predict(segmenter: Segmenter, images: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """N,H,W,C images on any device → N,H,W class ids."""
    segmenter.eval()
    was_searching, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False  # does not pay for a few images
    try:
        with numerics.autocast():
            return predicted_ids(segmenter(images.to(numerics.device)))
    finally:
        torch.backends.cudnn.benchmark = was_searching


class EvalMetrics:
    """Sums for the loss, the confusion matrix of a dataset and the counts of each of its samples, on the device."""

    def __init__(self, loss: WeightedLoss, num_classes: int, device: torch.device) -> None:
        num_ids = max(2, num_classes)
        self.loss = loss
        self.num_classes = num_classes
        self.loss_sums = torch.zeros(loss.num_sums(), dtype=wide_float(device), device=device)
        self.matrix = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=device)
        self.sample_counts: list[torch.Tensor] = []  # of each batch: as metrics.class_counts
        self.num_images = 0
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)  # images before the first batch that is not finite
        self._reader = AsyncReader(device)

    def add(self, loss_sums: torch.Tensor, matrices: torch.Tensor, num_images: int) -> None:
        """N,K,K confusion matrices, the first `num_images` of images, the others of padding."""
        is_bad = ~torch.isfinite(loss_sums).all() & (self.first_bad < 0)
        self.first_bad.copy_(torch.where(is_bad, self.num_images, self.first_bad))
        self.loss_sums += loss_sums
        self.matrix += matrices.sum(0)
        self.sample_counts.append(class_counts(matrices[:num_images]))
        self.num_images += num_images

    def peek(self) -> tuple[float, float] | None:
        """Loss and IoU as they were a moment ago, None when there is nothing new. Never waits for the device."""
        seen = self._reader.poll([self.loss_sums, self.matrix], 0)
        if seen is None:
            return None
        loss_sums, matrix = seen[0]
        return self.loss.from_sums(loss_sums), compute_scores(matrix, self.num_classes).iou


@dataclass
class EvalStep:
    """Forward without gradients, for a model in evaluation mode. The loss is that of what the model sees; scores are counted at
    the masks' own size."""

    forward: EvalForward
    segmenter: Segmenter
    loss: WeightedLoss
    device: torch.device
    num_parts: int = 1

    def new_metrics(self) -> EvalMetrics:
        return EvalMetrics(self.loss, self.segmenter.spec.num_classes, self.device)

    @torch.no_grad()
    def __call__(self, batch: Batch, metrics: EvalMetrics) -> None:
        for part in micro_batches(batch, self.num_parts):
            images, masks = to_device((part.images, part.masks), self.device)
            if part.mask_sizes is None:
                loss_sums, matrices = self.forward(images, masks, False)
            else:
                loss_sums, logits = self.forward(images, resize_masks(masks, part.mask_sizes, images.shape[1:3]), True)
                # Before the next forward pass: under CUDA graphs it overwrites the logits.
                matrices = native_confusion_matrices(logits, masks, part.mask_sizes)
            metrics.add(loss_sums, matrices, part.num_images)


@dataclass(frozen=True)
class Evaluation:
    """Loss and scores of a dataset. `first_bad_batch`: the first whose loss is not finite, of this process or else of another (-1);
    `loss` is NaN then.

    `sample_counts`: samples,K,3 on the device, as metrics.class_counts has them.
    """

    loss: float
    scores: Scores
    first_bad_batch: int | None
    sample_counts: torch.Tensor
    seconds: float


def evaluate(
    step: EvalStep,
    loader: Loader,
    on_batch: Callable[[EvalMetrics], object] = lambda metrics: None,
    is_stopping: Callable[[], bool] = lambda: False,
    processes: Job = ALONE,
) -> Evaluation:
    """One pass over a loader. `on_batch` is called after each batch and may raise to end the pass. Each process of a job evaluates
    its own images, and all have the result of the whole set."""
    started = time.perf_counter()
    metrics = step.new_metrics()
    step.segmenter.eval()
    with contextlib.closing(loader.epoch(0, is_stopping=is_stopping)) as batches:
        for batch in batches:
            step(batch, metrics)
            on_batch(metrics)
    first_bad = int(metrics.first_bad)  # waits for the device
    counts = torch.cat(metrics.sample_counts or [metrics.matrix.new_zeros(0, len(metrics.matrix), 3)])
    samples = torch.from_numpy(loader.batches.own[: len(counts)])
    found = EvalSums(metrics.loss_sums.cpu(), metrics.matrix, counts, samples, first_bad < 0)
    if not processes.is_alone:
        found = add_up([EvalSums(**part) for part in processes.all_gather(found.on_host()._asdict())])
    own_bad_batch = -1 if first_bad < 0 else first_bad // loader.batches.batch_size
    return Evaluation(
        loss=metrics.loss.from_sums(found.loss_sums) if found.is_finite else math.nan,
        scores=compute_scores(found.matrix, metrics.num_classes),
        first_bad_batch=None if found.is_finite else own_bad_batch,
        sample_counts=found.sample_counts,
        seconds=time.perf_counter() - started,
    )


class EvalSums(NamedTuple):
    """What one process has found, or all of them."""

    loss_sums: torch.Tensor
    matrix: torch.Tensor
    sample_counts: torch.Tensor  # samples,K,3
    samples: torch.Tensor  # their numbers in the set
    is_finite: bool

    def on_host(self) -> EvalSums:
        return self._replace(matrix=self.matrix.cpu(), sample_counts=self.sample_counts.cpu())


def add_up(parts: Sequence[EvalSums]) -> EvalSums:
    """Of the whole set: counts are whole numbers, so the sum does not depend on who counted what."""
    samples, order = torch.cat([part.samples for part in parts]).sort()
    counts = torch.cat([part.sample_counts for part in parts])
    return EvalSums(
        torch.stack([part.loss_sums for part in parts]).sum(0),
        torch.stack([part.matrix for part in parts]).sum(0),
        counts[order],
        samples,
        all(part.is_finite for part in parts),
    )


@dataclass(frozen=True)
class Placed:
    """Where the counted part of a sample stands in a picture: its rows and columns in both."""

    picture: int
    source: tuple[slice, slice]
    target: tuple[slice, slice]


@dataclass(frozen=True)
class SampleImages:
    """`inputs` go through the model; `pictures` and `truths` are shown beside what `stitch` makes of the result."""

    inputs: Pixels  # N,H,W,C
    pictures: Sequence[Pixels]  # H,W,3 uint8
    truths: Sequence[Pixels]  # H,W class ids
    places: Sequence[Placed]  # of each input

    def stitch(self, ids: Pixels) -> list[Pixels]:
        """N,H,W predicted ids of the inputs → those of each picture."""
        return _stitch(ids, self.places, [truth.shape for truth in self.truths])


def choose_samples(dataset: SegmentationDataset, read: Callable[[Key], tuple[Pixels, Pixels]]) -> SampleImages:
    """A few images, spread over the set; the same in every epoch. `read` gives a sample of the dataset."""
    if isinstance(dataset.tiling, Tiles):
        return _choose_tiles(dataset.tiling, read)
    pairs = [read((0, index)) for index in _spread(len(dataset))]
    height, width = dataset.tiling.size
    whole = slice(0, height), slice(0, width)
    return SampleImages(
        np.stack([image for image, _ in pairs]),
        [to_display(image) for image, _ in pairs],
        [resize_mask(mask, dataset.tiling.size) for _, mask in pairs],
        [Placed(index, whole, whole) for index in range(len(pairs))],
    )


def _spread(number: int) -> list[int]:
    return np.unique(np.linspace(0, number - 1, NUM_SAMPLES).round().astype(int)).tolist()


def _choose_tiles(tiling: Tiles, read: Callable[[Key], tuple[Pixels, Pixels]]) -> SampleImages:
    by_pair = [list(indices) for _, indices in groupby(range(len(tiling)), key=tiling.pair_index)]
    inputs: list[Pixels] = []
    truths: list[Pixels] = []
    places: list[Placed] = []
    shapes: list[Size] = []
    for picture, chosen in enumerate(_spread(len(by_pair))):
        indices = by_pair[chosen]
        tiles = {index: tiling.tiles[index] for index in indices}
        held = {index: _num_marked(read((0, index))[1]) for index in indices}
        rows = _best_range({tiles[index].rows for index in indices}, [(tiles[index].rows, held[index]) for index in indices])
        inside = [index for index in indices if rows[0] <= tiles[index].rows[0] < rows[1]]
        columns = _best_range({tiles[index].columns for index in inside}, [(tiles[index].columns, held[index]) for index in inside])
        for index in (index for index in inside if columns[0] <= tiles[index].columns[0] < columns[1]):
            places.append(_place(tiles[index], picture, rows[0], columns[0]))
            image, truth = read((0, index))  # of the pair that was read last
            inputs.append(image)
            truths.append(truth)
        shapes.append((rows[1] - rows[0], columns[1] - columns[0]))
    return SampleImages(
        np.stack(inputs),
        [to_display(image) for image in _stitch(np.stack(inputs), places, shapes)],
        _stitch(np.stack(truths), places, shapes),
        places,
    )


def _num_marked(ids: Pixels) -> int:
    """Pixels of any class but 0: what is shown of a large image should hold some."""
    return int(((ids != 0) & (ids != IGNORED)).sum())


def _best_range(ranges: set[tuple[int, int]], held: Sequence[tuple[tuple[int, int], int]]) -> tuple[int, int]:
    """Of adjoining ranges along an axis, as many as MAX_SIDE allows, and one at least: those that hold most."""
    ordered = sorted(ranges)
    best = ordered[0]
    most = -1
    for first in range(len(ordered)):
        last = max([first, *(place for place in range(first, len(ordered)) if ordered[place][1] - ordered[first][0] <= MAX_SIDE)])
        start, stop = ordered[first][0], ordered[last][1]
        number = sum(count for (low, high), count in held if start <= low and high <= stop)
        if number > most:
            best, most = (start, stop), number
    return best


def _place(tile: Tile, picture: int, top: int, left: int) -> Placed:
    (first_row, last_row), (first_column, last_column) = tile.rows, tile.columns
    return Placed(
        picture,
        (slice(first_row - tile.top, last_row - tile.top), slice(first_column - tile.left, last_column - tile.left)),
        (slice(first_row - top, last_row - top), slice(first_column - left, last_column - left)),
    )


def _stitch(samples: Pixels, places: Sequence[Placed], shapes: Sequence[Size]) -> list[Pixels]:
    pictures = [np.zeros((*shape, *samples.shape[3:]), samples.dtype) for shape in shapes]
    for sample, place in zip(samples, places, strict=True):
        pictures[place.picture][place.target] = sample[place.source]
    return pictures
