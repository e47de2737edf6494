"""metrics.csv, a row for each epoch, and val_scores.csv, what the model of the best epoch makes of each validation
image. Pixels are kept beside scores: they add up, so that intervals follow from them. Imports no torch."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet_trainer.model.baselines import overlap_ratios, ratio
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.console import csv_line
from unet_trainer.system.input_files import read_text

Row = dict[str, float | int]

COLUMNS = (
    "epoch", "train_loss", "val_loss", "train_iou", "val_iou", "val_dice", "learning_rate", "seconds",
    "images_per_second",
    "data_wait", "skipped_steps", "nan_steps", "peak_memory_gib", "peak_reserved_gib",
)  # fmt: skip
MAX_PIXELS = 2**48  # of an image; the sum over all of them is an int64
NO_IOU = 2.0  # sorts images in which no class occurs behind all others
COUNTS = ("hit_pixels", "truth_pixels", "predicted_pixels")


def column(rows: Sequence[Row], name: str) -> list[float]:
    """Without the rows that do not have it."""
    return [float(row[name]) for row in rows if name in row]


def write_metrics(path: Path, rows: Sequence[Row]) -> None:
    """Write the whole table, so that a resumed run leaves no epoch in it twice. Cells that a row lacks are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})
    write_text_atomically(path, text.getvalue())


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a table that write_metrics wrote; empty cells are left out."""
    table = csv.DictReader(io.StringIO(read_text(path), newline=""))
    return [{name: float(value) for name, value in row.items() if value} for row in table]


@dataclass(frozen=True)
class ClassCounts:
    """Pixels of one class in one image."""

    hits: int  # in truth and in prediction
    truth: int
    predicted: int

    def score(self, kind: str) -> float | None:
        return ratio(*overlap_ratios(self.hits, self.truth, self.predicted)[kind])

    @property
    def iou(self) -> float | None:
        return self.score("iou")


@dataclass(frozen=True)
class ImageScore:
    """A validation image: its files as seen from data_dir, and the counts of each class that is reported."""

    image: str
    mask: str
    classes: dict[str, ClassCounts]
    wrong_pixels: int
    counted_pixels: int  # that are not ignored

    @property
    def iou(self) -> float | None:
        return self.score("iou")

    def score(self, kind: str) -> float | None:
        """The mean over the classes in the image's truth, or of one class its own; None: undefined."""
        several = len(self.classes) > 1
        scores = [counts.score(kind) for counts in self.classes.values() if counts.truth or not several]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known else None


def image_score(image: str, mask: str, counts: Sequence[Sequence[int]], class_names: Sequence[str]) -> ImageScore:
    """`counts`: of every class id, the pixels in both, in truth, in prediction. `class_names`: of those reported."""
    reported = counts[len(counts) - len(class_names) :]
    num_counted, num_right = sum(truth for _, truth, _ in counts), sum(hits for hits, _, _ in counts)
    classes = {name: ClassCounts(*one) for name, one in zip(class_names, reported, strict=True)}
    return ImageScore(image, mask, classes, num_counted - num_right, num_counted)


def badness(iou: float | None, wrong_pixels: int, counted_pixels: int, name: str) -> tuple[float, float, str]:
    """Sorts images from the worst on: by IoU, then by the share of wrong pixels; images without an IoU come last."""
    return (NO_IOU if iou is None else iou, -wrong_pixels / max(1, counted_pixels), name)


def worst_first(scores: Sequence[ImageScore]) -> list[ImageScore]:
    return sorted(scores, key=lambda score: badness(score.iou, score.wrong_pixels, score.counted_pixels, score.image))


def val_scores_text(scores: Sequence[ImageScore]) -> str:
    """The table: the mean over the classes of an image, then each class."""
    header = ["image", "mask", "iou", "dice"]
    for name in scores[0].classes if scores else ():
        header += [f"iou {name}", *(f"{count} {name}" for count in COUNTS)]
    lines = [csv_line([*header, "wrong_pixels", "counted_pixels"])]
    for score in worst_first(scores):
        row = [score.image, score.mask, _cell(score.iou), _cell(score.score("dice"))]
        for counts in score.classes.values():
            row += [_cell(counts.iou), *map(str, (counts.hits, counts.truth, counts.predicted))]
        lines.append(csv_line([*row, score.wrong_pixels, score.counted_pixels]))
    return "".join(lines)


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def read_val_scores(path: Path) -> list[ImageScore]:
    """The table as it was written. Raises OSError, and ValueError for another table."""
    try:
        table = csv.DictReader(io.StringIO(read_text(path, errors="surrogateescape"), newline=""))
        return [_read_row(row) for row in table]
    except (csv.Error, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"no table of scores ({error})") from None


def _read_row(row: dict[str, str]) -> ImageScore:
    start, classes = f"{COUNTS[0]} ", {}
    for name in [column.removeprefix(start) for column in row if column.startswith(start)]:
        classes[name] = found = ClassCounts(*(_count(row[f"{count} {name}"]) for count in COUNTS))
        if found.hits > min(found.truth, found.predicted):
            raise ValueError(f"{row['image']!r:.60}: more pixels are right than there are")
    if not classes:
        raise ValueError("no class has counts of pixels")
    return ImageScore(row["image"], row["mask"], classes, _count(row["wrong_pixels"]), _count(row["counted_pixels"]))


def _count(cell: str) -> int:
    if not 0 <= int(cell) <= MAX_PIXELS:
        raise ValueError(f"{cell:.20} is no number of pixels")
    return int(cell)
