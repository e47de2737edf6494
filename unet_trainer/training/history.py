"""metrics.csv, with one row for each epoch, and result.json."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.input_files import read_text

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
MAX_EPOCHS = 10**9


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
    """The rows of a table that write_metrics wrote; empty cells are left out. Raises OSError, and ValueError for another table."""
    try:
        table = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
        rows = [{name: float(value) for name, value in row.items() if value} for row in table]
    except (csv.Error, TypeError) as error:  # TypeError: a row of more cells than there are columns
        raise ValueError(str(error)) from None
    if any(not 0 < row.get("epoch", 0) < MAX_EPOCHS for row in rows):
        raise ValueError("a row without the number of its epoch")
    return rows


def finite(value: Any) -> Any:
    """JSON has no NaN: it becomes null."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    write_text_atomically(path, json.dumps(finite(result), indent=2, allow_nan=False) + "\n")
