"""metrics.csv: a row for each epoch."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.input_files import read_text

Row = dict[str, float | int]

COLUMNS = (
    "epoch", "train_loss", "val_loss", "train_iou", "val_iou", "val_dice", "learning_rate", "seconds",
    "images_per_second",
    "data_wait", "skipped_steps", "nan_steps", "peak_memory_gib", "peak_reserved_gib",
)  # fmt: skip


def column(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a column, without the rows that do not have it: an earlier version may have written them."""
    return [float(row[name]) for row in rows if name in row]


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Writes the whole table, so that a resumed run leaves no epoch in it twice."""
    text = io.StringIO()
    # columns that a row lacks are empty
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    write_text_atomically(path, text.getvalue())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a table that write_metrics wrote; empty cells are left out."""
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    return [{name: float(value) for name, value in row.items() if value} for row in table]
