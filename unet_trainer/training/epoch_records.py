"""What is kept of an epoch beside its row in metrics.csv: the line of events.jsonl and, of the best one, val_scores.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import class_names
from unet_trainer.datasets.pairs import path_in
from unet_trainer.loading.dataset import SegmentationDataset
from unet_trainer.loading.wait_advice import EpochTimes
from unet_trainer.runs.history import Row
from unet_trainer.runs.val_scores import image_score, val_scores_text
from unet_trainer.training.evaluation import Evaluation


def epoch_facts(row: Row, found: Evaluation, improved: bool, times: EpochTimes | None, config: ResolvedConfig) -> dict[str, Any]:
    """As the event has them: row, scores of each class, confusion matrix, seconds of each stage."""
    scores = found.scores
    columns = (scores.per_class_iou, scores.per_class_dice, scores.per_class_precision, scores.per_class_recall)
    classes = {
        name: {"iou": iou, "dice": dice, "precision": precision, "recall": recall}
        for name, iou, dice, precision, recall in zip(class_names(config), *columns, strict=True)
    }
    stages = {"train_seconds": row["seconds"] - found.seconds, "val_seconds": found.seconds}
    if times is not None:
        stages |= {"read_seconds_per_image": times.read_seconds, "augment_seconds_per_image": times.augment_seconds}
    return {**row, "best": improved, "stages": stages, "classes": classes, "confusion": scores.confusion}


def val_scores_csv(dataset: SegmentationDataset, sample_counts: NDArray[np.int64], data_dir: Path, config: ResolvedConfig) -> str:
    """samples,K,3 counts of the dataset's samples → the table. Tiles of one image count together."""
    totals = np.zeros((len(dataset.pairs), *sample_counts.shape[1:]), np.int64)
    pairs = [dataset.tiling.pair_index(sample) for sample in range(len(sample_counts))]
    np.add.at(totals, pairs, sample_counts)
    names = class_names(config)
    return val_scores_text(
        [
            image_score(path_in(data_dir, pair.image), path_in(data_dir, pair.mask), counts, names)
            for pair, counts in zip(dataset.pairs, totals.tolist(), strict=True)
        ]
    )
