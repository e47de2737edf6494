"""The split as a CSV file with the columns image, mask, split and group: a user's split_file, or the split.csv of a run."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.datasets.layouts import PARTS
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part, path_in
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.image_files import DataError

COLUMNS = ("image", "mask", "split", "group", "name")
MAX_BYTES = 256 * 2**20
NUM_NAMED = 10  # problems shown before "and N more"


def read_split_csv(path: Path, data_dir: Path) -> FoundPairs:
    """The pairs in the rows of a CSV file, with paths relative to data_dir; raises DataError with every problem."""
    rows = _read_rows(path)
    problems: list[str] = []
    pairs: list[Pair] = []
    lines: dict[Path, int] = {}
    num_test = 0
    for number, row in rows:
        part = PARTS.get(row.get("split", "").strip().lower(), row.get("split", "").strip())
        if part == "test":
            num_test += 1
            continue
        if part not in ("", "train", "val"):
            problems.append(f"line {number}: split {part!r}; need train, val or test")
            continue
        files = [data_dir / row[column].strip() for column in ("image", "mask") if row.get(column, "").strip()]
        if len(files) < 2:
            problems.append(f"line {number}: need an image and a mask")
            continue
        image, mask = files
        missing = [f"line {number}: no file {file}" for file in files if not _is_file(file)]
        if missing:
            problems += missing
            continue
        if image in lines:
            problems.append(f"line {number}: {image} is in line {lines[image]} too")
        lines.setdefault(image, number)
        name = row.get("name", "").strip() or str(Path(path_in(data_dir, image)).with_suffix(""))
        its_part: Part | None = "train" if part == "train" else "val" if part == "val" else None
        pairs.append(Pair(name, image, mask, its_part, row.get("group", "").strip()))
    if len({pair.part is None for pair in pairs}) > 1:
        problems.append("some rows have a split and some have none; fill in all or leave the column out")
    if problems:
        raise DataError(f"split_file: {path}:\n  " + "\n  ".join(_cut(problems)))
    if not pairs:
        raise DataError(f"split_file: {path} has no row of train or val")
    skipped = f", {num_test} rows of test not used" if num_test else ""
    return FoundPairs(tuple(pairs), f"{path.name}{skipped}")


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells of each row that is not empty; commas, semicolons or tabs between cells."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"split_file: {path} is larger than {MAX_BYTES // 2**20} MiB")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"split_file: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    first = text.split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    try:
        reader = csv.reader(io.StringIO(text), delimiter=separator)
        header = [cell.strip().lower() for cell in next(reader, [])]
        rows = [
            (reader.line_num, dict(zip(header, cells, strict=False))) for cells in reader if any(cell.strip() for cell in cells)
        ]
    except csv.Error as error:
        raise DataError(f"split_file: {path} is not a CSV file ({error})") from None
    unknown = sorted(set(header) - set(COLUMNS))
    if "image" not in header or "mask" not in header or unknown or len(set(header)) < len(header):
        raise DataError(
            f"split_file: {path} has the columns {first_few(header, 10) or 'none'}; "
            "need image and mask, and optionally split and group"
        )
    return rows


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long
        return False


def split_csv_text(train: Sequence[Pair], val: Sequence[Pair], data_dir: Path) -> str:
    """The text of a CSV file that read_split_csv reads back as the same pairs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for part, pairs in (("train", train), ("val", val)):
        for pair in pairs:
            writer.writerow([path_in(data_dir, pair.image), path_in(data_dir, pair.mask), part, pair.group, pair.name])
    return text.getvalue()


def _cut(problems: Sequence[str]) -> list[str]:
    more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
    return [*problems[:NUM_NAMED], *more]
