"""The split as a CSV file with the columns image, mask, split and group: a user's split_file, or the split.csv of a run, which has
the names of the pairs and digests of their content besides.

Names that are not UTF-8 are written as the bytes that they are, and read back.
"""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.datasets.file_tree import resolved
from unet_trainer.datasets.layouts import PARTS
from unet_trainer.datasets.pairs import FoundPairs, Pair, Part, path_in
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.file_bytes import DataError, is_file
from unet_trainer.system.console import UNDECODED, counted, csv_line
from unet_trainer.system.input_files import read_text

COLUMNS = ("image", "mask", "split", "group", "name", "content")
UNUSED = "unused"  # split of the rows that neither train nor validate nor test
MAX_BYTES = 256 * 2**20
NUM_NAMED = 10  # problems shown before "and N more"


def read_split_csv(path: Path, data_dir: Path, converted: Sequence[Pair] = ()) -> FoundPairs:
    """The pairs in the rows of a CSV file, with paths relative to data_dir; raises DataError with every problem.

    `converted`: pairs whose files were made from others. Rows of the same name stand for them, wherever the files lie now.
    """
    rows = _read_rows(path)
    made = {pair.name: pair for pair in converted if pair.image_origin or pair.mask_origin}
    problems: list[str] = []
    pairs: list[Pair] = []
    test: list[Pair] = []
    unused: list[Pair] = []
    lines: dict[Path, int] = {}
    num_unusable = 0  # rows of test
    for number, row in rows:
        split = row.get("split", "").strip()
        part = PARTS.get(split.lower())
        if part is None and split not in ("", UNUSED):
            problems.append(f"line {number}: split {split!r}; need train, val or test")
            continue
        image, mask = (_find_file(data_dir, row.get(column, "")) for column in ("image", "mask"))
        name = row["name"] if row.get("name", "").strip() else _name_of(image, data_dir)
        if (known := made.get(name)) is not None:
            image, mask = known.image, known.mask
        if split == UNUSED:
            unused += [Pair(name, image, mask)] if image and mask else []
            continue
        if part == "test" and not (image and mask and is_file(image) and is_file(mask)):
            num_unusable += 1
            continue
        if image is None or mask is None:
            problems.append(f"line {number}: need an image and a mask")
            continue
        missing = [f"line {number}: no file {file}" for file in (image, mask) if not is_file(file)]
        if missing:
            problems += missing
            continue
        if image in lines:
            problems.append(f"line {number}: {image} is in line {lines[image]} too")
        lines.setdefault(image, number)
        group = row.get("group", "") if "name" in row else row.get("group", "").strip()
        origins = (known.image_origin, known.mask_origin) if known is not None else ("", "")
        (test if part == "test" else pairs).append(Pair(name, image, mask, part, group, *origins, row.get("content", "").strip()))
    if len({pair.part is None for pair in pairs}) > 1:
        problems.append("some rows have a split and some have none; fill in all or leave the column out")
    if problems:
        more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
        if any(UNDECODED.search(cell) for _, row in rows for cell in row.values()):
            more.append("The file is not UTF-8 text, as some programs save CSV files; save it as UTF-8")
        raise DataError("\n  ".join([f"split_file: {path}:", *problems[:NUM_NAMED], *more]))
    if not pairs:
        raise DataError(f"split_file: {path} has no row of train or val")
    notices = (f"{counted(num_unusable, 'row')} of test in {path.name} without both files left out",) if num_unusable else ()
    return FoundPairs(tuple(pairs), path.name, test=tuple(test), unused=tuple(unused), notices=notices)


def _name_of(image: Path | None, data_dir: Path) -> str:
    return "" if image is None or not image.name else path_in(data_dir, image).removesuffix(image.suffix)


def _find_file(data_dir: Path, cell: str) -> Path | None:
    """The file that a cell names: as it stands there, without the spaces around it, or in another form of Unicode."""
    if not cell.strip():
        return None
    spellings = (cell, cell.strip(), *(unicodedata.normalize(form, cell.strip()) for form in ("NFC", "NFD")))
    return next((path for text in spellings if is_file(path := data_dir / text)), data_dir / cell.strip())


def listed_images(path: Path, data_dir: Path, part: Part) -> set[Path]:
    """The images in the rows of a part, as absolute paths, whether they are there or not. Raises DataError."""
    images = [row["image"] for _, row in _read_rows(path) if PARTS.get(row.get("split", "").strip().lower()) == part]
    return {resolved(_find_file(data_dir, image) or data_dir) for image in images}


def listed_contents(path: Path, part: Part) -> set[str]:
    """Digests of the pairs in the rows of a part, where the table has them: the same files in another place have the same."""
    rows = [row for _, row in _read_rows(path) if PARTS.get(row.get("split", "").strip().lower()) == part]
    return {content for row in rows if (content := row.get("content", "").strip())}


def _read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells of each row that is not empty; commas, semicolons or tabs between cells."""
    try:
        text = read_text(path, MAX_BYTES, "utf-8-sig", "surrogateescape")
    except OSError as error:
        raise DataError(f"split_file: {path} cannot be read ({error.strerror or error})") from None
    first = text.split("\n", 1)[0]
    separator = max(",;\t", key=first.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)  # a name may hold a \r
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


def split_csv_text(
    train: Sequence[Pair], val: Sequence[Pair], data_dir: Path, test: Sequence[Pair] = (), unused: Sequence[Pair] = ()
) -> str:
    """The text of a CSV file that read_split_csv reads back as the same pairs."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for part, pairs in (("train", train), ("val", val), ("test", test), (UNUSED, unused)):
        rows += [
            (path_in(data_dir, pair.image), path_in(data_dir, pair.mask), part, pair.group, pair.name, pair.content)
            for pair in pairs
        ]
    return "".join(csv_line(row) for row in rows)
