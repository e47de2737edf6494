"""The split as a CSV file with the columns image, mask, split and group: a user's split_file, or the split.csv of a run."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from unet_trainer.datasets.layouts import PARTS
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part, path_in
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.image_files import DataError

PART_NAMES: tuple[Part, ...] = ("train", "val", "test")
COLUMNS = ("image", "mask", "split", "group", "name")
MAX_BYTES = 256 * 2**20
NUM_NAMED = 10  # problems shown before "and N more"


def read_split_csv(path: Path, data_dir: Path, parts: Collection[Part] = ("train", "val")) -> FoundPairs:
    """The pairs in the rows of a CSV file, with paths relative to data_dir; raises DataError with every problem.

    Rows of other parts than those that are asked for are not used. Rows without a part belong to all but test.
    """
    rows = _read_rows(path)
    problems: list[str] = []
    pairs: list[Pair] = []
    lines: dict[Path, int] = {}
    num_unused: Counter[str] = Counter()
    for number, row in rows:
        part = PARTS.get(row.get("split", "").strip().lower(), row.get("split", "").strip())
        if part not in ("", "train", "val", "test"):
            problems.append(f"line {number}: split {part!r}; need train, val or test")
            continue
        if part not in parts and (part or set(parts) == {"test"}):
            num_unused[part or "no split"] += 1
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
        its_part = next((known for known in PART_NAMES if known == part), None)
        pairs.append(Pair(name, image, mask, its_part, row.get("group", "").strip()))
    if len({pair.part is None for pair in pairs}) > 1:
        problems.append("some rows have a split and some have none; fill in all or leave the column out")
    if problems:
        raise DataError(f"split_file: {path}:\n  " + "\n  ".join(_cut(problems)))
    if not pairs:
        raise DataError(f"split_file: {path} has no row of {' or '.join(parts)}")
    skipped = "".join(f", {count} rows of {part} not used" for part, count in num_unused.items())
    return FoundPairs(tuple(pairs), f"{path.name}{skipped}")


def listed_images(path: Path, data_dir: Path, part: Part) -> set[Path]:
    """The images in the rows of a part, as absolute paths, whether they are there or not. Raises DataError."""
    rows = _read_rows(path)
    return {
        (data_dir / row["image"].strip()).resolve() for _, row in rows if PARTS.get(row.get("split", "").strip().lower()) == part
    }


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
