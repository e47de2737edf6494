"""One pass of a model over pairs of images and masks: counts for every image, at the masks' own size. And what it leaves in a
folder: evaluation.json, evaluation.csv with a row for each image, and pictures of the worst.

    files → read ahead in threads → predicted in batches, here → scored in threads → counts

Images, masks and predictions live as long as they are on this way; what stays are the counts of each image and the predictions of
the few worst ones.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unet_trainer.config.errors import CheckpointError
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.drawing import error_sheet, to_display
from unet_trainer.images.file_bytes import DataError, ReadError, read_bytes, shown_path
from unet_trainer.images.image_decoding import Pixels, encode_image, read_image
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, read_mask
from unet_trainer.images.tiling import Size, fit_image, resize_mask, tile_images
from unet_trainer.inference.engine import Engine, TorchEngine
from unet_trainer.inference.inputs import EvaluationData
from unet_trainer.inference.predictor import ModelInput, Predictor, all_ids, band_ids, batch_pixels, tile_starts
from unet_trainer.inference.scores import (
    Count,
    EvaluatedSet,
    confusion_matrix,
    count_image,
    mean_over,
    number,
    scores_from_counts,
)
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.model.metrics import compute_scores
from unet_trainer.model.segmenter import MAX_SIDE, SegmenterSpec
from unet_trainer.system.atomic_files import make_own_folder, write_bytes_atomically, write_text_atomically
from unet_trainer.system.concurrency import WriteBehind, read_ahead
from unet_trainer.system.console import csv_line, first_line, json_text
from unet_trainer.system.input_files import read_json
from unet_trainer.system.os_errors import cannot, named_file
from unet_trainer.system.resources import count_cores
from unet_trainer.training.checkpoint_file import read_checkpoint, write_checkpoint
from unet_trainer.training.run import Run
from unet_trainer.training.run_folder import BEST, LAST
from unet_trainer.training.time_budget import MIN_TILE_SECONDS, tile_seconds

NUM_WORST = 10
MAX_THREADS = 4  # that read, and as many that score
JSON_FILE, CSV_FILE, PICTURES = "evaluation.json", "evaluation.csv", "worst"
FORMAT = 1
MAX_NAME = 80  # characters of an image's name in that of its picture
MAX_BYTES_AHEAD = 2**29  # of images and masks that are read and not yet predicted, about


class Sample(NamedTuple):
    number: int  # among the pairs
    given: ModelInput
    truth: Pixels  # H,W ids


Predicted = tuple[int, Pixels, Pixels]  # index of the image, H,W ids of truth and prediction


def read_sample(predictor: Predictor, data: EvaluationData, index: int) -> Sample:
    """As training's validation reads it, so that the network sees the same pixels. Raises DataError."""
    pair, spec, resize_masks = data.pairs[index], predictor.spec, data.source.config.resize_masks
    # As in loading/dataset.py: a JPEG may be decoded at a fraction where it is made smaller in any case.
    min_side = None if resize_masks else predictor.min_side
    path = pair.image
    try:
        image, size, is_missing = spec.image.decode(read_bytes(path), min_side)
        given = predictor.prepare(image, size)
        path = pair.mask
        truth = data.coding.encode(read_mask(path))
    except DataError as error:
        why = error if isinstance(error, ReadError) else f"{error}; it has changed since it was looked at"
        raise DataError(f"{shown_path(path)}: {why}") from None
    if resize_masks:
        truth = resize_mask(truth, size)
    if is_missing is not None and spec.image.ignores_nodata and truth.shape == size:
        truth = np.where(is_missing, np.uint8(IGNORED), truth)
    if size != data.images[index].size or truth.shape != size or (truth == UNKNOWN).any():
        raise DataError(f"{shown_path(pair.image)} or its mask {shown_path(pair.mask)} has changed since it was looked at")
    return Sample(index, given, truth)


def evaluate(
    predictor: Predictor,
    data: EvaluationData,
    threshold: float | None = None,
    with_lines: bool = False,
    as_trained: bool = False,
    tick: Callable[[], object] = lambda: None,
) -> EvaluatedSet:
    """`threshold`: see predicted_ids. `with_lines`: what clDice needs. `as_trained`: fit: crop: tiles as training's validation
    takes them, not blended. `tick` is called after each image. Raises DataError."""
    spec, num_images, lock = predictor.spec, len(data.pairs), threading.Lock()
    first_id = spec.num_ids - len(spec.class_names)  # with one class, the background is not reported
    order = sorted(range(num_images), key=lambda index: (data.images[index].size, index))  # images of one size make a batch
    num_threads = min(MAX_THREADS, count_cores())
    counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * num_images
    confusion = np.zeros((spec.num_ids, spec.num_ids), np.int64)
    num_wrong, num_counted = np.zeros(num_images, np.int64), np.zeros(num_images, np.int64)
    worst: list[tuple[tuple[float, float, str], int, Pixels]] = []

    def count(index: int, truth: Pixels, ids: Pixels) -> None:
        nonlocal confusion, worst
        found, counts[index] = count_image(truth, ids, spec.num_ids, first_id, with_lines)
        num_counted[index] = found.sum()
        num_wrong[index] = num_counted[index] - found.trace()
        rank = badness(counts[index], num_wrong[index], num_counted[index], data.pairs[index].name)
        with lock:
            confusion += found
            worst = sorted([*worst, (rank, index, ids)], key=lambda entry: entry[:2])[:NUM_WORST]
            tick()

    read, num_bytes = partial(read_sample, predictor, data), lambda sample: sample.given.pixels.nbytes + sample.truth.nbytes
    samples = read_ahead(read, order, num_threads, num_bytes, MAX_BYTES_AHEAD, 2 * MAX_THREADS)
    with contextlib.closing(samples), WriteBehind(num_threads, MAX_BYTES_AHEAD) as counting:
        for predicted in predict_samples(predictor, (sample for _, sample in samples), threshold, as_trained):
            counting.submit(partial(count, *predicted), 2 * predicted[1].nbytes)
    return EvaluatedSet(np.stack(counts), confusion, num_wrong, num_counted, [(index, ids) for _, index, ids in worst])


def badness(counts: NDArray[np.int64], num_wrong: int, num_counted: int, name: str) -> tuple[float, float, str]:
    """Sorts images from the worst on: by the mean IoU of their classes, then by the share of their pixels that is wrong.

    Images without an IoU, where no class is in truth or prediction, come last.
    """
    iou = float(mean_over(scores_from_counts(counts)["iou"], axis=-1))
    return (2.0 if math.isnan(iou) else iou, -num_wrong / max(1, num_counted), name)


def predict_samples(
    predictor: Predictor, samples: Iterable[Sample], threshold: float | None, as_trained: bool
) -> Generator[Predicted, None, None]:
    """In the order of the samples; those of one shape that follow each other go through the network together."""
    batch: list[Sample] = []

    def predict_batch() -> Iterator[Predicted]:
        logits = predictor.predict([sample.given for sample in batch]) if batch else []
        for sample, its_logits in zip(batch, logits, strict=True):
            yield sample.number, sample.truth, all_ids(its_logits, threshold)
        batch.clear()

    for sample in samples:
        is_alone = predictor.spec.fit == "crop" and (as_trained or predictor.is_large(sample.given.size))
        shape = sample.given.pixels.shape
        most = max(1, batch_pixels(predictor.engine.device) // (shape[0] * shape[1]))
        if is_alone or len(batch) >= most or (batch and batch[0].given.pixels.shape != shape):
            yield from predict_batch()
        if not is_alone:
            batch.append(sample)
        elif as_trained:
            yield sample.number, sample.truth, tiled_ids_as_trained(predictor, sample, threshold)
        else:
            yield sample.number, sample.truth, all_ids(predictor.predict_input(sample.given), threshold)
    yield from predict_batch()


def tiled_ids_as_trained(predictor: Predictor, sample: Sample, threshold: float | None) -> Pixels:
    """H,W ids from the tiles of training's validation: each pixel from the one tile that it counts in."""
    size = predictor.spec.image_size
    ids = np.empty(sample.given.size, np.uint8)
    tiles = tile_images([sample.given.size], size).tiles
    num_at_once = max(1, batch_pixels(predictor.engine.device) // (size[0] * size[1]))
    for start in range(0, len(tiles), num_at_once):
        some = tiles[start : start + num_at_once]
        crops = [sample.given.pixels[tile.top : tile.top + size[0], tile.left : tile.left + size[1]] for tile in some]
        for tile, logits in zip(some, predictor.engine.logits(torch.from_numpy(np.stack(crops))), strict=True):
            (top, bottom), (left, right) = tile.rows, tile.columns
            inside = slice(top - tile.top, bottom - tile.top), slice(left - tile.left, right - tile.left)
            ids[top:bottom, left:right] = band_ids(logits, threshold)[inside]
    return ids


# What it leaves in a folder. Each file is written whole or not at all, evaluation.json last. The same evaluation writes the same
# bytes. Pictures of the one before, as its evaluation.json lists them, are deleted; nothing else in the folder is touched.


def make_folder(folder: Path, is_named: bool) -> None:
    """Before the work is done, so that a folder that cannot be written to is told at once. `is_named`: by the user, who may name a
    link; one in a run's folder could lead anywhere."""
    try:
        if not is_named:
            make_own_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot(f"--out: {folder}", "be written to", error, folder) from None


def csv_text(evaluated: EvaluatedSet, pairs: Sequence[Pair], data_dir: Path, class_names: Sequence[str]) -> str:
    """A row for each image, the worst first. With several classes: their mean, then each class. Undefined: an empty cell."""
    scores = scores_from_counts(evaluated.counts)
    columns: dict[str, Sequence[Any]] = {}
    if len(class_names) > 1:
        columns |= {f"mean_{score}": [_cell(value) for value in mean_over(values, axis=-1)] for score, values in scores.items()}
    for class_index, name in enumerate(class_names):
        suffix = f" {name}" if len(class_names) > 1 else ""
        columns |= {f"{score}{suffix}": [_cell(value) for value in values[:, class_index]] for score, values in scores.items()}
        for title, count in (("truth_pixels", Count.TRUTH), ("predicted_pixels", Count.PREDICTION)):
            columns[f"{title}{suffix}"] = evaluated.counts[:, class_index, count].tolist()
    columns |= {"wrong_pixels": evaluated.num_wrong.tolist(), "counted_pixels": evaluated.num_counted.tolist()}
    lines = [csv_line(["image", "mask", *columns])]
    ranks = zip(evaluated.counts, evaluated.num_wrong, evaluated.num_counted, (pair.name for pair in pairs), strict=True)
    for _, index in sorted((badness(*rank), index) for index, rank in enumerate(ranks)):
        lines.append(csv_line([*pairs[index].files_in(data_dir), *(values[index] for values in columns.values())]))
    return "".join(lines)


def write_evaluation(
    folder: Path, content: Mapping[str, Any], evaluated: EvaluatedSet, data: EvaluationData, spec: SegmenterSpec
) -> None:
    """All files. `content`: of evaluation.json, besides the worst images. Raises UserError."""
    try:
        earlier = _listed_pictures(folder)
        pictures = _write_pictures(folder, evaluated, data, spec)
        write_text_atomically(folder / CSV_FILE, csv_text(evaluated, data.pairs, data.source.data_dir, spec.class_names))
        everything = {"format": FORMAT, **content, "worst": pictures}
        write_text_atomically(folder / JSON_FILE, json_text(everything, indent=2, allow_nan=False) + "\n")
        for name in earlier - {picture["picture"] for picture in pictures}:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise cannot(f"--out: {named_file(error) or folder}", "be written to", error, folder) from None


def _write_pictures(folder: Path, evaluated: EvaluatedSet, data: EvaluationData, spec: SegmenterSpec) -> list[dict[str, Any]]:
    """Of the worst images; what was written, as evaluation.json lists it."""
    ious = mean_over(scores_from_counts(evaluated.counts)["iou"], axis=-1)
    make_own_folder(folder / PICTURES)
    listed = []
    for place, (index, ids) in enumerate(evaluated.worst, start=1):
        pair, iou = data.pairs[index], ious[index]
        image = fit_image(to_display(read_image(pair.image)), (ids.shape[0], ids.shape[1]))
        truth = resize_mask(data.coding.encode(read_mask(pair.mask)), (ids.shape[0], ids.shape[1]))
        where, _ = pair.files_in(data.source.data_dir)
        title = f"{place}. {where}: {'no IoU' if math.isnan(iou) else f'IoU {iou:.4f}'}"
        ending = re.sub(r"[^\w.-]+", "_", pair.name)[-MAX_NAME:]  # without what file systems treat specially
        name = f"{PICTURES}/{place:02d}_{ending}.png"
        picture = error_sheet([(image, truth, ids)], spec.id_names, spec.has_background, title)
        write_bytes_atomically(folder / name, encode_image(picture, ".png"))
        listed.append({"image": where, "iou": number(iou), "picture": name})
    return listed


def _listed_pictures(folder: Path) -> set[str]:
    """Pictures that an earlier evaluation wrote into this folder."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        names = {str(entry["picture"]) for entry in read_json(folder / JSON_FILE)["worst"]}
        return {name for name in names if re.fullmatch(rf"{PICTURES}/\d\d_[^/\\]+\.png", name)}
    return set()


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


# Which tile a model of fit: crop is used with, measured at the end of training. A network that pools over its whole input, as
# squeeze-and-excite does, sees something else in a larger tile than in training; larger tiles have fewer borders. So the size of
# training's crops and larger ones are tried as `predict` would use them, on the same parts of validation images, and the best goes
# into the spec of best.pt and last.pt.

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
        return f"{_shown(self.best)}{how}: IoU {self.iou[self.best]:.4f} on the fullest part of {images}, blended ({others})"


def _shown(tile: Size) -> str:
    return f"{tile[1]}×{tile[0]}"


def choose_tile(run: Run) -> None:
    """Of the best epoch's weights. No error of it fails a run that is done."""
    best, dataset = run.checkpointer.folder / BEST, run.loaders.val.dataset
    try:
        engine = TorchEngine(best, str(run.components.numerics.device))
        if engine.card.spec.tile is not None:  # a run that had ended before
            return
        seconds = min(tile_seconds(run), max(MIN_TILE_SECONDS, run.budget.left()))
        with run.console.bar(f"Trying larger tiles, {seconds:.0f} s at most:", len(dataset.pairs), keep=False) as bar:
            found = measure_tiles(engine, dataset, seconds, bar.tick)
        for path in (best, best.with_name(LAST)):
            content = read_checkpoint(path)
            write_checkpoint(path, {**content, "spec": {**content["spec"], "tile": list(found.best)}})
        shown = found.describe()
    except (CheckpointError, DataError, OSError, RuntimeError, MemoryError) as error:
        shown = f"{_shown(run.config.shape)}, as trained ({first_line(error)})"
    run.console.say(f"Tile for predict and evaluate: {shown}")


def measure_tiles(
    engine: Engine, dataset: SegmentationDataset, seconds: float, tick: Callable[[], object] = lambda: None
) -> TileScores:
    """IoU at each size on as many validation images as there is time for. Of a large image, the part that holds most is taken.
    Raises DataError with the reason where nothing can be measured."""
    started, spec = time.monotonic(), engine.card.spec
    tiles = candidate_tiles(spec.image_size, [size.image for size in dataset.sizes], Predictor(engine).whole)
    if len(tiles) == 1:
        raise DataError("no validation image is larger")
    tile_seconds = _time_tile(engine)
    while len(tiles) > 1 and MIN_IMAGES * _count_tiles(tiles) * tile_seconds > seconds:
        tiles.pop()
    if len(tiles) == 1:
        raise DataError(f"there is no time to try larger ones, {tile_seconds:.2g} s for each tile")
    predictors = {tile: Predictor(engine, tile) for tile in tiles}
    matrices = {tile: np.zeros((spec.num_ids, spec.num_ids), np.int64) for tile in tiles}
    order = np.random.default_rng(0).permutation(len(dataset.pairs))
    for num_images, index in enumerate(order, start=1):
        image, truth = _fullest_part(*dataset.decode(int(index)), tiles[-1])
        for tile, predictor in predictors.items():
            ids = all_ids(predictor.predict_input(predictor.as_input(image, truth.shape)))
            matrices[tile] += confusion_matrix(truth, ids, spec.num_ids)
        tick()
        if (time.monotonic() - started) * (num_images + 1) / num_images > seconds:
            break
    iou = {tile: compute_scores(torch.from_numpy(matrix), spec.num_classes).iou for tile, matrix in matrices.items()}
    if not np.isfinite(list(iou.values())).all():
        raise DataError("no class is in the images")
    return TileScores(iou, num_images, len(order))


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
