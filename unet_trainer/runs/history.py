"""metrics.csv, with one row for each epoch, and result.json."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet_trainer.runs.event_log import finite
from unet_trainer.system.atomic_files import write_text_atomically

Row = dict[str, float | int]

COLUMNS = (
    "epoch",
    "train_loss",
    "val_loss",
    "train_iou",
    "val_iou",
    "val_dice",
    "learning_rate",
    "seconds",
    "images_per_second",
    "data_wait",
    "skipped_steps",
    "nan_steps",
    "peak_memory_gib",
    "peak_reserved_gib",
)
RENAMED = {"peak_memory_gb": "peak_memory_gib", "peak_reserved_gb": "peak_reserved_gib"}  # by earlier versions


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a column, without the rows that do not have it: an earlier version may have written them."""
    return [float(row[name]) for row in rows if name in row]


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Writes the whole table, so that a resumed run leaves no epoch in it twice."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([_cell(row.get(name)) for name in COLUMNS])
    write_text_atomically(path, text.getvalue())


def _cell(value: float | int | None) -> str:
    """Empty for a column that the version which trained this epoch did not have."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a table that write_metrics wrote, now or in an earlier version; empty cells are left out."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [upgrade_row(row) for row in rows]


def upgrade_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of an earlier version under today's column names."""
    return {RENAMED.get(name, name): value for name, value in row.items()}


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    write_text_atomically(path, json.dumps(finite(result), indent=2, allow_nan=False) + "\n")
