"""What an evaluation leaves in a folder: evaluation.json, evaluation.csv with a row for each image, and pictures of the worst.

Each file is written whole or not at all, evaluation.json last. The same evaluation writes the same bytes. Pictures of the one
before, as its evaluation.json lists them, are deleted; nothing else in the folder is touched.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet_trainer.datasets.pairs import Pair, path_in
from unet_trainer.images.drawing import error_picture, to_display
from unet_trainer.images.image_files import encode_image, read_image, read_mask
from unet_trainer.images.tiling import fit_image, resize_mask
from unet_trainer.inference.evaluate import EvaluatedSet, badness
from unet_trainer.inference.evaluation_data import EvaluationData
from unet_trainer.inference.scores import Count, mean_over, number, scores_from_counts
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.atomic_files import make_own_folder, write_bytes_atomically, write_text_atomically
from unet_trainer.system.console import csv_line, json_text
from unet_trainer.system.input_files import read_json
from unet_trainer.system.os_errors import cannot, named_file

JSON_FILE, CSV_FILE, PICTURES = "evaluation.json", "evaluation.csv", "worst"
FORMAT = 1
MAX_NAME = 80  # characters of an image's name in that of its picture


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
        files = [path_in(data_dir, pairs[index].image), path_in(data_dir, pairs[index].mask)]
        lines.append(csv_line([*files, *(values[index] for values in columns.values())]))
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
        where = path_in(data.source.data_dir, pair.image)
        title = f"{place}. {where}: {'no IoU' if math.isnan(iou) else f'IoU {iou:.4f}'}"
        ending = re.sub(r"[^\w.-]+", "_", pair.name)[-MAX_NAME:]  # without what file systems treat specially
        name = f"{PICTURES}/{place:02d}_{ending}.png"
        picture = error_picture(image, truth, ids, spec.id_names, title, spec.has_background)
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
