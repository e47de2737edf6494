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

import numpy as np

from unet_trainer.datasets.pairs import Pair, path_in
from unet_trainer.images.drawing import error_picture, to_display
from unet_trainer.images.image_files import encode_image, read_image, read_mask
from unet_trainer.images.tiling import fit_image, resize_mask
from unet_trainer.inference.evaluate import EvaluatedSet, badness
from unet_trainer.inference.evaluation_data import EvaluationData
from unet_trainer.inference.scores import (
    BOUNDARY_RATIO,
    LEVEL,
    MEAN,
    NUM_DRAWS,
    SEED,
    Comparison,
    Count,
    Floats,
    Summary,
    mean_over,
    scores_from_counts,
)
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


def worst_first(evaluated: EvaluatedSet, pairs: Sequence[Pair]) -> list[int]:
    """Indices of the images."""
    wrong_shares = evaluated.num_wrong / np.maximum(1, evaluated.num_counted)
    ranks = [badness(evaluated.counts[index], wrong_shares[index], pair.name) for index, pair in enumerate(pairs)]
    return sorted(range(len(pairs)), key=lambda index: ranks[index])


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
    lines = [csv_line(["image", "mask", *columns, "wrong_pixels", "counted_pixels"])]
    for index in worst_first(evaluated, pairs):
        files = [path_in(data_dir, pairs[index].image), path_in(data_dir, pairs[index].mask)]
        pixels = [int(evaluated.num_wrong[index]), int(evaluated.num_counted[index])]
        lines.append(csv_line([*files, *(values[index] for values in columns.values()), *pixels]))
    return "".join(lines)


def write_evaluation(
    folder: Path,
    description: Mapping[str, Any],
    summary: Summary,
    comparison: Comparison | None,
    evaluated: EvaluatedSet,
    data: EvaluationData,
    id_names: Sequence[str],
    has_background: bool = True,
) -> None:
    """All files. `description`: of model, data and settings, as it stands in evaluation.json. Raises UserError."""
    try:
        earlier = _listed_pictures(folder)
        pictures = _write_pictures(folder, evaluated, data, id_names, has_background)
        text = csv_text(evaluated, data.pairs, data.source.data_dir, summary.class_names)
        write_text_atomically(folder / CSV_FILE, text)
        content = {
            "format": FORMAT,
            **description,
            **summary_content(summary, id_names),
            "comparison": None if comparison is None else comparison_content(comparison, summary),
            "worst": pictures,
        }
        write_text_atomically(folder / JSON_FILE, json_text(content, indent=2, allow_nan=False) + "\n")
        for name in earlier - {picture["picture"] for picture in pictures}:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise cannot(f"--out: {named_file(error) or folder}", "be written to", error, folder) from None


def summary_content(summary: Summary, id_names: Sequence[str]) -> dict[str, Any]:
    """As evaluation.json has it; null: undefined."""
    rows = []
    for index, name in enumerate([*summary.class_names, MEAN]):
        row: dict[str, Any] = {
            "name": name,
            "dataset": {
                score: {"value": _number(values[index]), "interval": _numbers(summary.intervals[score][:, index])}
                for score, values in summary.dataset.items()
            },
            "mean_over_images": {score: _number(values[index]) for score, values in summary.image_means.items()},
        }
        if name != MEAN or index < len(summary.class_names):
            row["images_with_a_score"] = int(summary.num_scored[index])
            row["empty_truths"] = int(summary.empty_truths[index])
            row["empty_predictions"] = int(summary.empty_predictions[index])
        rows.append(row)
    return {
        "num_images": summary.num_images,
        "boundary_width": f"{BOUNDARY_RATIO:g} of the diagonal",
        "bootstrap": {"over": "images", "level": LEVEL, "draws": NUM_DRAWS, "seed": SEED},
        "classes": rows[:-1],
        "mean": rows[-1],
        "confusion": {"ids": list(id_names), "rows_are_truth": summary.confusion.tolist()},
    }


def comparison_content(comparison: Comparison, summary: Summary) -> dict[str, Any]:
    """Differences are this model's score minus the other's."""

    def row(index: int, name: str) -> dict[str, Any]:
        scores = {
            score: {
                "this": _number(summary.dataset[score][index]),
                "other": _number(comparison.others[score][index]),
                "difference": _number(difference[index]),
                "interval": _numbers(comparison.intervals[score][:, index]),
                "share_of_draws_above_0": _number(comparison.shares_above[score][index]),
            }
            for score, difference in comparison.differences.items()
        }
        return {"name": name, "dataset": scores}

    rows = [row(index, name) for index, name in enumerate([*summary.class_names, MEAN])]
    return {"differences": "this model minus the other", "classes": rows[:-1], "mean": rows[-1]}


def _write_pictures(
    folder: Path, evaluated: EvaluatedSet, data: EvaluationData, id_names: Sequence[str], has_background: bool
) -> list[dict[str, Any]]:
    """Of the worst images; what was written, as evaluation.json lists it."""
    ious = mean_over(scores_from_counts(evaluated.counts)["iou"], axis=-1)
    make_own_folder(folder / PICTURES)
    listed = []
    for number, worst in enumerate(evaluated.worst, start=1):
        pair, ids = data.pairs[worst.index], worst.ids
        image = fit_image(to_display(read_image(pair.image)), (ids.shape[0], ids.shape[1]))
        truth = resize_mask(data.coding.encode(read_mask(pair.mask)), (ids.shape[0], ids.shape[1]))
        iou = ious[worst.index]
        where = path_in(data.source.data_dir, pair.image)
        title = f"{number}. {where}: {'no IoU' if math.isnan(iou) else f'IoU {iou:.4f}'}"
        picture = error_picture(image, truth, ids, id_names, title, has_background)
        name = f"{PICTURES}/{number:02d}_{_file_name(pair.name)}.png"
        write_bytes_atomically(folder / name, encode_image(picture, ".png"))
        listed.append({"image": where, "iou": _number(iou), "picture": name})
    return listed


def _listed_pictures(folder: Path) -> set[str]:
    """Pictures that an earlier evaluation wrote into this folder."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        content = read_json(folder / JSON_FILE)
        names = {str(entry["picture"]) for entry in content["worst"]}
        return {name for name in names if re.fullmatch(rf"{PICTURES}/\d\d_[^/\\]+\.png", name)}
    return set()


def _file_name(name: str) -> str:
    """Of an image's name, its end without what file systems treat specially."""
    return re.sub(r"[^\w.-]+", "_", name)[-MAX_NAME:]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6f}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _numbers(values: Floats) -> list[float | None] | None:
    numbers = [_number(value) for value in values]
    return None if None in numbers else numbers
