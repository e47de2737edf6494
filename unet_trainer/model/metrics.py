"""IoU and Dice of a whole dataset, from one confusion matrix that is summed on the device, at the size of the masks.
The mean is over the classes in the truth: a stray pixel of another class costs the class whose pixel it takes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F

from unet_trainer.images.tiling import Size, nearest_positions
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.baselines import overlap_ratios, ratio

MAX_ELEMENTS = 2**23  # logits that are upsampled at a time; a CPU is slower with a quarter and with four times as many
MAX_COUNTERS = 2**16  # over several copies of the matrix, so that atomic additions seldom collide


def predicted_ids(class_logits: torch.Tensor) -> torch.Tensor:
    """N,K,H,W → N,H,W class ids."""
    return class_logits.argmax(1)


def confusion_matrix(predicted: torch.Tensor, truth: torch.Tensor, num_ids: int) -> torch.Tensor:
    """N,H,W ids → num_ids,num_ids int64: rows truth, columns prediction. Truth outside 0..num_ids-1 is ignored."""
    return confusion_matrices(predicted.reshape(1, -1), truth.reshape(1, -1), num_ids)[0]


def confusion_matrices(predicted: torch.Tensor, truth: torch.Tensor, num_ids: int) -> torch.Tensor:
    """N,... ids → N,num_ids,num_ids int64: one matrix for each image, as confusion_matrix has it. Shapes depend on no
    value and nothing waits for the device, unlike bincount."""
    num_images = len(truth)
    predicted, truth = predicted.flatten(1), truth.flatten(1)
    if num_ids == 2:  # four sums, which a compiled step computes in one pass
        is_one = predicted == 1
        cells = [(truth == row) & column for row in (0, 1) for column in (~is_one, is_one)]
        return torch.stack([cell.sum(1) for cell in cells], 1).view(num_images, 2, 2)
    truth = truth.long()
    num_cells = num_ids * num_ids
    places = torch.where(truth < num_ids, truth * num_ids + predicted, num_cells)  # ignored: a cell that is dropped
    num_lanes = max(1, min(256, MAX_COUNTERS // (num_cells * max(1, num_images))))
    lanes = torch.arange(truth.shape[1], device=truth.device) % num_lanes
    lanes = lanes + torch.arange(num_images, device=truth.device).unsqueeze(1) * num_lanes
    counts = torch.zeros(num_images * num_lanes * (num_cells + 1), dtype=torch.int64, device=truth.device)
    places = (lanes * (num_cells + 1) + places).view(-1)
    counts = counts.scatter_add(0, places, torch.ones_like(places))
    return counts.view(num_images, num_lanes, num_cells + 1).sum(1)[:, :num_cells].view(num_images, num_ids, num_ids)


def class_counts(matrices: torch.Tensor) -> torch.Tensor:
    """N,K,K confusion matrices → N,K,3: pixels of each class in both, in truth, in prediction."""
    return torch.stack([matrices.diagonal(dim1=1, dim2=2), matrices.sum(2), matrices.sum(1)], 2)


@dataclass(frozen=True)
class Scores:
    """`classes`: IoU, Dice, precision and recall of each class that is reported; None: undefined, as all are of a class
    that is not in the truth."""

    classes: list[dict[str, float | None]]
    confusion: list[list[int]]  # that they were computed from: rows truth, columns prediction

    @property
    def per_class_iou(self) -> list[float | None]:
        return [scores["iou"] for scores in self.classes]

    @property
    def iou(self) -> float:
        return self._mean("iou")

    @property
    def dice(self) -> float:
        return self._mean("dice")

    def _mean(self, name: str) -> float:
        present = [value for scores in self.classes if (value := scores[name]) is not None]
        return sum(present) / len(present) if present else math.nan


def compute_scores(matrix: torch.Tensor, num_classes: int) -> Scores:
    """From a summed confusion matrix. With one class the foreground alone is reported."""
    on_host = matrix.cpu()
    counts = class_counts(on_host.double().unsqueeze(0))[0].tolist()[1 if num_classes == 1 else 0 :]
    classes = []
    for hits, truth, predicted in counts:
        ratios = overlap_ratios(hits, truth, predicted)
        classes.append({name: ratio(*parts) if truth else None for name, parts in ratios.items()})
    return Scores(classes, on_host.tolist())


# Scores are counted at the masks' own size, the loss at the model's. Nothing waits for the device, and memory does not
# grow with the masks: logits are upsampled a few rows at a time.


def resize_masks(masks: torch.Tensor, sizes: Sequence[Size], size: Sequence[int]) -> torch.Tensor:
    """N,H,W ids, each with its own size in the upper left corner → N,h,w, the pixels that tiling.resize_mask takes.
    There may be fewer sizes than masks: the others are padding, ignored everywhere."""
    height, width = size
    own = [*sizes, *([(1, 1)] * (len(masks) - len(sizes)))]
    rows_and_columns = [np.concatenate([nearest_positions(h, height), nearest_positions(w, width)]) for h, w in own]
    positions = torch.from_numpy(np.stack(rows_and_columns))
    if masks.is_cuda:
        positions = positions.pin_memory()  # else the copy may wait for others before it
    (positions,) = to_device((positions,), masks.device)
    images = torch.arange(len(masks), device=masks.device).view(-1, 1, 1)
    return masks[images, positions[:, :height].unsqueeze(2), positions[:, height:].unsqueeze(1)]


def native_confusion_matrices(logits: torch.Tensor, masks: torch.Tensor, sizes: Sequence[Size]) -> torch.Tensor:
    """N,K,K counts of N,K,h,w logits, upsampled to each mask's own size, against N,H,W ids as in `resize_masks`."""
    num_ids = logits.shape[1]
    counts = torch.zeros(len(logits), num_ids, num_ids, dtype=torch.int64, device=logits.device)
    stop = 0
    for size, images in groupby(sizes):  # those next to each other of one size are counted together
        start, stop = stop, stop + len(list(images))
        num_at_once = max(1, MAX_ELEMENTS // (num_ids * max(size[1], logits.shape[3])))
        for first in range(start, stop, num_at_once):
            some = slice(first, min(first + num_at_once, stop))
            for rows, upsampled in upsampled_rows(logits[some], size):
                ids = upsampled.max(1).indices  # as predicted_ids; argmax is 30 times slower on CPUs in this format
                counts[some] += confusion_matrices(ids, masks[some, rows, : size[1]], num_ids)
    return counts


def select_images(tensor: torch.Tensor, images: Sequence[int]) -> torch.Tensor:
    """Those of these ascending numbers, without an index tensor, which would have to be copied to the device."""
    if images[-1] - images[0] + 1 == len(images):
        return tensor[images[0] : images[-1] + 1]
    return torch.stack([tensor[image] for image in images])


def upsampled_rows(logits: torch.Tensor, size: Size) -> Iterator[tuple[slice, torch.Tensor]]:
    """F.interpolate(logits, size, mode="bilinear"), some rows at a time: which rows, and N,K,rows,W."""
    height, width = size
    num_images, num_ids, num_rows, num_columns = logits.shape
    num_at_once = max(1, MAX_ELEMENTS // (num_images * num_ids * max(width, num_columns)))
    for start in range(0, height, num_at_once):
        stop = min(start + num_at_once, height)
        # Row i lies at (i + ½) · num_rows / height - ½ of the logits; in integers, so that no rounding adds up.
        place = ((2 * torch.arange(start, stop, device=logits.device) + 1) * num_rows - height).clamp_min(0)
        above = place // (2 * height)
        share = (place % (2 * height)).to(logits.dtype) / (2 * height)
        below = (above + 1).clamp_max(num_rows - 1)
        blended = torch.lerp(logits.index_select(2, above), logits.index_select(2, below), share.unsqueeze(1))
        yield slice(start, stop), F.interpolate(blended, (stop - start, width), mode="bilinear")
