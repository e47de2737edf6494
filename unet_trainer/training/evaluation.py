"""Evaluates a model on a dataset: loss and scores from sums over all pixels of the set, whatever its batches."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import class_names
from unet_trainer.images.drawing import to_display
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.images.tiling import Tiles, resize_mask
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
from unet_trainer.runs.tables import image_score, val_scores_text
from unet_trainer.training.async_device import AsyncReader
from unet_trainer.training.state import wide_float

# N,H,W,C images, N,H,W masks, with_logits → sums for the loss, and N,K,K confusion matrices or N,K,H,W logits
EvalForward = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
NUM_SAMPLES = 4  # validation images that are shown
# H,W,C for the model, the area of it that is shown, and of that area H,W,3 uint8 and H,W class ids of the truth
Sample = tuple[Pixels, tuple[slice, slice], Pixels, Pixels]


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
    was_searching = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False  # a search does not pay for a few images
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
        self.loss_sums = torch.zeros(sum(loss.sum_lengths), dtype=wide_float(device), device=device)
        self.matrix = torch.zeros(num_ids, num_ids, dtype=torch.int64, device=device)
        self.sample_counts: list[torch.Tensor] = []  # of each batch: as metrics.class_counts
        self.num_images = 0
        # images before the first batch that is not finite
        self.first_bad = torch.full((), -1, dtype=torch.int64, device=device)
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
    """Forward without gradients, for a model in evaluation mode. The loss is that of what the model sees; scores are
    counted at the masks' own size."""

    forward: EvalForward
    segmenter: Segmenter
    loss: WeightedLoss
    device: torch.device
    num_parts: int = 1

    def new_metrics(self) -> EvalMetrics:
        return EvalMetrics(self.loss, self.segmenter.spec.num_classes, self.device)

    @torch.no_grad()
    def __call__(self, batch: Batch, metrics: EvalMetrics) -> None:
        for part in _parts(batch, self.num_parts):
            images, masks = to_device((part.images, part.masks), self.device)
            if part.mask_sizes is None:
                loss_sums, matrices = self.forward(images, masks, False)
            else:
                loss_sums, logits = self.forward(images, resize_masks(masks, part.mask_sizes, images.shape[1:3]), True)
                # Before the next forward pass: under CUDA graphs it overwrites the logits.
                matrices = native_confusion_matrices(logits, masks, part.mask_sizes)
            metrics.add(loss_sums, matrices, part.num_images)


def _parts(batch: Batch, num_parts: int) -> Iterator[Batch]:
    """Padding comes last, so it lies in the last parts."""
    size = -(-len(batch.images) // num_parts)
    for start in range(0, len(batch.images), size):
        num_images = min(max(batch.num_images - start, 0), size)
        sizes = None if batch.mask_sizes is None else batch.mask_sizes[start : start + size]
        yield Batch(batch.images[start : start + size], batch.masks[start : start + size], num_images, mask_sizes=sizes)


@dataclass(frozen=True)
class Evaluation:
    """Loss and scores of a dataset. `first_bad_batch`: the first whose loss is not finite, of this process or else of
    another (-1); `loss` is NaN then. `sample_counts`: samples,K,3 as metrics.class_counts has them."""

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
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> Evaluation:
    """One pass over a loader; ends early if `is_stopping`. `on_batch` is called after each batch. Each process of a job
    evaluates its own images, and all have the result of the whole set."""
    started = time.perf_counter()
    metrics = step.new_metrics()
    step.segmenter.eval()
    with contextlib.closing(loader.epoch(0, is_stopping=is_stopping)) as batches:
        for batch in batches:
            step(batch, metrics)
            on_batch(metrics)
            if is_stopping():
                break
    first_bad = int(metrics.first_bad)  # waits for the device
    counts = torch.cat(metrics.sample_counts or [metrics.matrix.new_zeros(0, len(metrics.matrix), 3)])
    samples = torch.from_numpy(loader.batches.samples[: len(counts)])
    own = metrics.loss_sums.cpu(), metrics.matrix.cpu(), first_bad < 0, counts.cpu(), samples
    loss_sums, matrices, are_finite, counts_of_ranks, of_samples = zip(*gather(own), strict=True)
    is_finite = all(are_finite)
    return Evaluation(
        loss=metrics.loss.from_sums(torch.stack(loss_sums).sum(0)) if is_finite else math.nan,
        scores=compute_scores(torch.stack(matrices).sum(0), metrics.num_classes),
        first_bad_batch=None if is_finite else first_bad // loader.batches.batch_size,  # -1 stays -1
        sample_counts=torch.cat(counts_of_ranks)[torch.cat(of_samples).argsort()],  # in the order of the set
        seconds=time.perf_counter() - started,
    )


def val_scores_csv(
    dataset: SegmentationDataset, sample_counts: NDArray[np.int64], data_dir: Path, config: ResolvedConfig
) -> str:
    """samples,K,3 counts of the dataset's samples → the table. Tiles of one image count together."""
    totals = np.zeros((len(dataset.pairs), *sample_counts.shape[1:]), np.int64)
    pairs = [dataset.tiling.pair_index(sample) for sample in range(len(sample_counts))]
    np.add.at(totals, pairs, sample_counts)
    names = class_names(config)
    scored = zip(dataset.pairs, totals.tolist(), strict=True)
    return val_scores_text([image_score(*pair.files_in(data_dir), counts, names) for pair, counts in scored])


def choose_samples(dataset: SegmentationDataset, read: Callable[[Key], tuple[Pixels, Pixels]]) -> list[Sample]:
    """A few images, spread over the set, and the same in every epoch: of one that is tiled, the tile with most pixels
    of any class but 0. `read` gives a sample of the dataset."""
    tiling, size = dataset.tiling, dataset.tiling.size
    indices = _spread(len(dataset))
    if isinstance(tiling, Tiles):
        by_pair = [list(of_pair) for _, of_pair in groupby(range(len(tiling)), key=tiling.pair_index)]

        def num_marked(index: int) -> int:
            return int(np.isin(read((0, index))[1], (0, IGNORED), invert=True).sum())

        indices = [max(by_pair[number], key=num_marked) for number in _spread(len(by_pair))]
    samples = []
    for index in indices:
        image, mask = read((0, index))
        area = tiling.tiles[index].counted if isinstance(tiling, Tiles) else (slice(None), slice(None))
        samples.append((image.copy(), area, to_display(image[area]), resize_mask(mask, size)[area]))
    return samples


def _spread(number: int) -> list[int]:
    return np.unique(np.linspace(0, number - 1, NUM_SAMPLES).round().astype(int)).tolist()
