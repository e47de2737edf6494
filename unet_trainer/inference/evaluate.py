"""One pass of a model over pairs of images and masks: counts for every image, at the masks' own size. What it leaves in
a folder: evaluation.json, evaluation.csv with a row for each image, and pictures of the worst.

    files → read ahead in threads → predicted in batches, here → scored in threads → counts

Only the counts of each image and the predictions of the few worst ones stay in memory.
"""

import contextlib
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer.data.pairs import Pair
from unet_trainer.images.drawing import error_sheet, to_display
from unet_trainer.images.image_decoding import Pixels, encode_image, read_image
from unet_trainer.images.mask_decoding import IGNORED, read_mask
from unet_trainer.images.mask_shapes import thin
from unet_trainer.images.tiling import fit_image, resize_mask
from unet_trainer.inference.evaluation_data import EvaluationData
from unet_trainer.inference.predictor import ModelInput, Predictor, all_ids, batch_pixels
from unet_trainer.inference.scores import BOUNDARY_RATIO, Count, EvaluatedSet, image_scores, number, scores_from_counts
from unet_trainer.loading.sample_reader import PairSize, read_pair
from unet_trainer.model.metrics import confusion_matrix
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.runs.tables import badness
from unet_trainer.system.atomic_files import (
    Kind,
    check_replaceable,
    make_own_folder,
    write_bytes_atomically,
    write_text_atomically,
)
from unet_trainer.system.concurrency import WriteBehind, read_ahead
from unet_trainer.system.console import csv_line, json_text
from unet_trainer.system.input_files import read_json
from unet_trainer.system.os_errors import cannot, named_file
from unet_trainer.system.resources import count_cores

NUM_WORST = 10
SQUARE = np.ones((3, 3), np.uint8)
MAX_THREADS = 4  # that read, and as many that score
JSON_FILE, CSV_FILE, PICTURES = "evaluation.json", "evaluation.csv", "worst"
FORMAT = 1
MAX_NAME = 80  # characters of an image's name in that of its picture
MAX_BYTES_AHEAD = 2**29  # of images and masks that are read and not yet predicted, about


def read_sample(predictor: Predictor, data: EvaluationData, index: int) -> tuple[ModelInput, Pixels]:
    """Read a pair as training's validation does, so that the network sees the same pixels. Raises DataError."""
    pair, resize_masks = data.pairs[index], data.source.config.resize_masks
    known = PairSize(data.images[index].size, data.masks[index].size)
    # As in loading/dataset.py: a JPEG may be decoded at a fraction where it is made smaller in any case.
    min_side = None if resize_masks else predictor.min_side
    pixels, truth = read_pair(pair, predictor.spec.image, data.coding, known, resize_masks, min_side)
    return predictor.prepare(pixels, known.image), truth


def evaluate(
    predictor: Predictor,
    data: EvaluationData,
    threshold: float | None = None,
    with_lines: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> EvaluatedSet:
    """Count every image. `threshold`: see predicted_ids; `with_lines`: what clDice needs. Raises DataError."""
    spec, num_images, lock = predictor.spec, len(data.pairs), threading.Lock()
    first_id = spec.num_ids - len(spec.class_names)  # with one class, the background is not reported
    # images of one size make a batch
    order = sorted(range(num_images), key=lambda index: (data.images[index].size, index))
    num_threads = min(MAX_THREADS, count_cores())
    counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * num_images
    confusion = np.zeros((spec.num_ids, spec.num_ids), np.int64)
    num_wrong, num_counted = np.zeros((2, num_images), np.int64)
    worst: list[tuple[tuple[float, float, str], int, Pixels]] = []

    def count(index: int, truth: Pixels, ids: Pixels) -> None:
        nonlocal confusion, worst
        found, counts[index] = count_image(truth, ids, spec.num_ids, first_id, with_lines)
        num_counted[index] = found.sum()
        num_wrong[index] = num_counted[index] - found.trace()
        iou = image_scores(counts[index][None])["iou"][0]
        rank = badness(number(iou), num_wrong[index], num_counted[index], data.pairs[index].name)
        with lock:
            confusion += found
            worst = sorted([*worst, (rank, index, ids)], key=lambda entry: entry[:2])[:NUM_WORST]
            tick()

    def kind(entry: tuple[int, tuple[ModelInput, Pixels]]) -> tuple[tuple[int, ...], bool]:
        image = entry[1][0]
        return image.pixels.shape, predictor.is_large(image.size)  # neighbours of one go through the network together

    def num_bytes(sample: tuple[ModelInput, Pixels]) -> int:
        return sample[0].pixels.nbytes + sample[1].nbytes

    read = partial(read_sample, predictor, data)
    samples = read_ahead(read, order, num_threads, num_bytes, MAX_BYTES_AHEAD, 2 * MAX_THREADS)
    with contextlib.closing(samples), WriteBehind(num_threads, MAX_BYTES_AHEAD) as counting:
        for ((height, width, *_), _), alike in groupby(samples, kind):
            num_at_once = max(1, batch_pixels(predictor.engine.device) // (height * width))
            while batch := list(islice(alike, num_at_once)):
                all_logits = predictor.predict([image for _, (image, _) in batch])
                for (index, (_, truth)), logits in zip(batch, all_logits, strict=True):
                    ids = all_ids(logits, threshold)
                    counting.submit(partial(count, index, truth, ids), 2 * ids.nbytes)
    return EvaluatedSet(np.stack(counts), confusion, num_wrong, num_counted, [(index, ids) for _, index, ids in worst])


def count_image(
    truth: Pixels, predicted: Pixels, num_ids: int, first_id: int = 0, with_lines: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """H,W ids of one image → their K,K confusion matrix, and the columns of Count for the classes from `first_id` on.
    IGNORED in truth is of no class for boundaries and centre lines either. `with_lines`: what clDice needs."""
    confusion = confusion_matrix(torch.from_numpy(predicted), torch.from_numpy(truth), num_ids).numpy()
    counts = np.zeros((num_ids - first_id, len(Count) if with_lines else Count.TRUTH_LINE), np.int64)
    counts[:, Count.HITS] = confusion.diagonal()[first_id:]
    counts[:, Count.TRUTH] = confusion.sum(1)[first_id:]
    counts[:, Count.PREDICTION] = confusion.sum(0)[first_id:]
    width = max(1, round(BOUNDARY_RATIO * math.hypot(*truth.shape)))  # of boundary regions, in pixels
    is_counted = (truth != IGNORED).view(np.uint8)
    for class_id, row in enumerate(counts, first_id):
        if not row[Count.TRUTH] and not row[Count.PREDICTION]:
            continue
        masks: list[Pixels] = [(truth == class_id).view(np.uint8), (predicted == class_id).view(np.uint8) & is_counted]
        left, top, columns, rows = cv2.boundingRect(cv2.bitwise_or(*masks))  # outside of it both are empty
        box = slice(top, top + rows), slice(left, left + columns)
        in_truth, in_prediction = (np.ascontiguousarray(mask[box]) for mask in masks)
        # The pixels within `width` steps, also diagonal ones, of a pixel outside; what lies beyond the box is outside.
        boundaries = [
            mask - cv2.erode(mask, SQUARE, iterations=width, borderType=cv2.BORDER_CONSTANT, borderValue=0)
            for mask in (in_truth, in_prediction)
        ]
        row[Count.BOUNDARY_HITS] = cv2.countNonZero(cv2.bitwise_and(*boundaries))
        row[Count.BOUNDARY_UNION] = cv2.countNonZero(cv2.bitwise_or(*boundaries))
        if with_lines:
            lines = ((in_truth, in_prediction, Count.TRUTH_LINE), (in_prediction, in_truth, Count.PREDICTION_LINE))
            for mask, other, column in lines:
                line = thin(mask)
                row[column : column + 2] = cv2.countNonZero(line), cv2.countNonZero(cv2.bitwise_and(line, other))
    return confusion, counts


# What it leaves in a folder. Each file is written whole or not at all, evaluation.json last, and the same evaluation
# writes the same bytes. Of what is there, the pictures that its evaluation.json lists are deleted.


def make_folder(folder: Path, is_named: bool) -> None:
    """Check before the work is done that results can be written. `is_named`: by the user, who may name a link; one in
    a run's folder could lead anywhere."""
    try:
        if not is_named:
            make_own_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot(f"--out: {folder}", "be written to", error, folder) from None
    check_replaceable("--out", folder / JSON_FILE, Kind("JSON file", rb"\s*\{"))
    check_replaceable("--out", folder / CSV_FILE, Kind("table of evaluate", b"image,mask,"))


def csv_text(evaluated: EvaluatedSet, pairs: Sequence[Pair], data_dir: Path, class_names: Sequence[str]) -> str:
    """A row for each image, the worst first; of several classes their mean, then each. An undefined cell is empty."""
    scores, means = scores_from_counts(evaluated.counts), image_scores(evaluated.counts)
    columns: dict[str, Sequence[Any]] = {}
    if len(class_names) > 1:
        columns |= {f"mean_{score}": [*map(_cell, values)] for score, values in means.items()}
    for class_index, name in enumerate(class_names):
        suffix = f" {name}" if len(class_names) > 1 else ""
        columns |= {f"{score}{suffix}": [*map(_cell, values[:, class_index])] for score, values in scores.items()}
        for title, count in (("truth_pixels", Count.TRUTH), ("predicted_pixels", Count.PREDICTION)):
            columns[f"{title}{suffix}"] = evaluated.counts[:, class_index, count].tolist()
    columns |= {"wrong_pixels": evaluated.num_wrong.tolist(), "counted_pixels": evaluated.num_counted.tolist()}
    names = [pair.name for pair in pairs]
    ranks = [*map(badness, map(number, means["iou"]), evaluated.num_wrong, evaluated.num_counted, names)]
    rows = [[*pair.files_in(data_dir), *cells] for pair, *cells in zip(pairs, *columns.values(), strict=True)]
    in_order = [rows[index] for index in sorted(range(len(rows)), key=ranks.__getitem__)]
    return "".join(map(csv_line, [["image", "mask", *columns], *in_order]))


def write_evaluation(
    folder: Path, content: Mapping[str, Any], evaluated: EvaluatedSet, data: EvaluationData, spec: SegmenterSpec
) -> None:
    """Write all files. `content`: of evaluation.json, besides the worst images. Raises UserError."""
    try:
        earlier: set[str] = set()  # pictures that another evaluation wrote into this folder
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            names = {str(entry["picture"]) for entry in read_json(folder / JSON_FILE)["worst"]}
            earlier = {name for name in names if re.fullmatch(rf"{PICTURES}/\d\d_[^/\\]+\.png", name)}
        pictures = _write_pictures(folder, evaluated, data, spec)
        table = csv_text(evaluated, data.pairs, data.source.data_dir, spec.class_names)
        write_text_atomically(folder / CSV_FILE, table)
        everything = {"format": FORMAT, **content, "worst": pictures}
        write_text_atomically(folder / JSON_FILE, json_text(everything, indent=2, allow_nan=False) + "\n")
        for name in earlier - {picture["picture"] for picture in pictures}:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise cannot(f"--out: {named_file(error) or folder}", "be written to", error, folder) from None


def _write_pictures(
    folder: Path, evaluated: EvaluatedSet, data: EvaluationData, spec: SegmenterSpec
) -> list[dict[str, Any]]:
    """Draw the worst images; return what was written, as evaluation.json lists it."""
    ious = image_scores(evaluated.counts)["iou"]
    make_own_folder(folder / PICTURES)
    listed = []
    for place, (index, ids) in enumerate(evaluated.worst, start=1):
        pair, iou = data.pairs[index], ious[index]
        size = ids.shape[0], ids.shape[1]
        image = fit_image(to_display(read_image(pair.image)), size)
        truth = resize_mask(data.coding.encode(read_mask(pair.mask)), size)
        where, _ = pair.files_in(data.source.data_dir)
        title = f"{place}. {where}: {'no IoU' if math.isnan(iou) else f'IoU {iou:.4f}'}"
        ending = re.sub(r"[^\w.-]+", "_", pair.name)[-MAX_NAME:]  # without what file systems treat specially
        name = f"{PICTURES}/{place:02d}_{ending}.png"
        picture = error_sheet([(image, truth, ids)], spec.id_names, spec.has_background, title)
        check_replaceable("--out", folder / name, Kind("PNG", b"\x89PNG"))
        write_bytes_atomically(folder / name, encode_image(picture, ".png"))
        listed.append({"image": where, "iou": number(iou), "picture": name})
    return listed


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"
