"""A split as a CSV file with the columns image, mask, split and group: a user's split_file, or the split.csv of a run,
which has the names of the pairs, digests of their content and the boxes of blocks besides."""

import contextlib
import csv
import io
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from unet_trainer.data.converted import Converter, cut_blocks
from unet_trainer.data.listing import Listing, resolved, walk
from unet_trainer.data.name_matching import PARTS
from unet_trainer.data.pairs import NUM_NAMED, Box, FoundPairs, Pair, Part, first_few, path_in
from unet_trainer.data.splits import UNUSED, Split
from unet_trainer.images.file_bytes import DataError, is_file
from unet_trainer.system import input_files
from unet_trainer.system.console import counted, csv_line

COLUMNS = ("image", "mask", "split", "group", "name", "content")
BOX = "box"  # a further column, where there are blocks of images: top, left, bottom and right in pixels
MAX_BYTES = 2**30
MAX_TABLES, MAX_HEADER = 100, 2**14  # files that are looked at for a table that is not read; bytes of a header

Row = dict[str, str]  # column → cell


def read_split_csv(
    path: Path, data_dir: Path, now: FoundPairs | None = None, converter: Converter | None = None
) -> FoundPairs:
    """The pairs in the rows of a CSV file, with paths relative to data_dir; raises DataError with every problem.

    `now`: pairs that are there; rows of the same name stand for those whose files were made from others."""
    rows, there = _read_rows(path), (*now.pairs, *now.test) if now else ()
    made = {pair.name: pair for pair in there if pair.box is None and (pair.image_origin or pair.mask_origin)}
    stored = {file: file for pair in there for file in (pair.image, pair.mask)}  # of shards, those that can be read
    pairs, test, unused, problems = list[Pair](), list[Pair](), list[Pair](), list[str]()
    gone: Counter[Path | None] = Counter()  # folders, by the number of rows that have files there
    lines: dict[tuple[Path, str], int] = {}
    num_unusable = 0  # rows of test
    for number, row in rows:
        pair, problem = _read_pair(row, data_dir, made, stored)
        if row.get("split", "").strip() == UNUSED:
            unused.append(pair)
            continue
        missing = [] if problem else [file for file in pair.user_files if not is_file(file)]
        place = pair.user_files[0], row.get(BOX, "").strip()
        if missing:
            problem = f"no file {' and no file '.join(map(str, missing))}"
        elif not problem and (first := lines.setdefault(place, number)) != number:
            problem = f"{place[0]} is in line {first} too"
        folders = dict.fromkeys(_missing_folder(file, data_dir) for file in missing)
        if not problem:
            (test if pair.part == "test" else pairs).append(pair)
        elif pair.part == "test":
            num_unusable += 1
        elif folders and None not in folders:
            gone.update([*folders])
        else:
            problems.append(f"line {number}: {problem}")
    if len({pair.part is None for pair in pairs}) > 1:
        problems.append("some rows have a split and some have none; fill in all or leave the column out")
    problems = [*(f"no folder {folder} ({counted(count, 'row')})" for folder, count in gone.items()), *problems]
    if problems:
        more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
        if not pairs and not gone:
            more.append("Paths are as seen from data_dir, such as images/a.png, in UTF-8")
        raise DataError("\n  ".join([f"split_file: {path}:", *problems[:NUM_NAMED], *more]))
    if not pairs:
        raise DataError(f"split_file: {path} has no row of train or val")
    left_out = f"{counted(num_unusable, 'row')} of test in {path.name} that cannot be used left out"
    if converter is not None and any(pair.box for pair in (*pairs, *test)):
        pairs, test = cut_blocks(converter, pairs), cut_blocks(converter, test)
    notices = (left_out,) if num_unusable else ()
    return FoundPairs(tuple(pairs), path.name, test=tuple(test), unused=tuple(unused), notices=notices)


def _read_pair(row: Row, data_dir: Path, made: Mapping[str, Pair], stored: Mapping[Path, Path]) -> tuple[Pair, str]:
    """The pair of a row, whether its files are there or not, and what is wrong with the row."""
    cells = {column: row.get(column, "").strip() for column in (*COLUMNS, BOX)}
    part, place = PARTS.get(cells["split"].lower()), cells[BOX]
    image, mask = (_find_file(data_dir, row.get(column, "")) for column in ("image", "mask"))
    image, mask = stored.get(image, image), stored.get(mask, mask)
    name = row["name"] if cells["name"] else path_in(data_dir, image).removesuffix(image.suffix)
    group = row.get("group", "") if "name" in row else cells["group"]  # a run's own are not stripped
    known, origins = made.get(name), ("", "")
    if known is not None:
        image, mask, origins = known.image, known.mask, (known.image_origin, known.mask_origin)
    pair = Pair(name, image, mask, part, group, *origins, cells["content"])
    if part is None and cells["split"]:
        return pair, f"split {cells['split']!r}; need train, val or test"
    if known is None and not (cells["image"] and cells["mask"]):
        return pair, "need an image and a mask"
    if not place:
        return pair, ""
    is_box = re.fullmatch(r"[0-9]{1,9}( +[0-9]{1,9}){3}", place)
    box = Box(image, mask, *map(int, place.split())) if is_box else None
    if box is None or box.top >= box.bottom or box.left >= box.right:
        return pair, f"{BOX} {place!r}; need top, left, bottom and right in pixels, such as 0 0 512 512"
    return box.pair(name if cells["name"] else box.name_in(name), part, group, cells["content"]), ""


def _find_file(data_dir: Path, cell: str) -> Path:
    """The file that a cell names: as it stands there, without spaces, in another form of Unicode, or as on Windows."""
    forms = [unicodedata.normalize(form, cell.strip()) for form in ("NFC", "NFD")]
    spellings = (cell, cell.strip(), *forms, *(text.replace("\\", "/") for text in forms))
    return next((path for text in spellings if is_file(path := data_dir / text)), data_dir / cell.strip())


def _missing_folder(file: Path, data_dir: Path) -> Path | None:
    """data_dir or the first folder on the way from it to the file that is not there."""
    folders = [folder for folder in reversed(file.parents) if folder.is_relative_to(data_dir)]
    return next((folder for folder in folders if not folder.exists()), None)


def listed_files(path: Path, data_dir: Path, part: Part) -> tuple[list[Path], set[str]]:
    """Of the rows of a part, the images as absolute paths, and digests of the pairs, where the table has them."""
    rows = [row for _, row in _read_rows(path) if PARTS.get(row.get("split", "").strip().lower()) == part]
    contents = {content for row in rows if (content := row.get("content", "").strip())}
    return [resolved(_find_file(data_dir, row["image"])) for row in rows], contents


def _read_rows(path: Path) -> list[tuple[int, Row]]:
    """Line number and cells of each row that is not empty."""
    header, rows = read_table(path, f"split_file: {path}")
    if not {"image", "mask"} <= {*header} <= {*COLUMNS, BOX} or len({*header}) < len(header):
        columns = first_few((f"{cell:.60}" for cell in header), 10) or "none"
        need = "need image and mask, and optionally split and group"
        raise DataError(f"split_file: {path} has the columns {columns}; {need}, in UTF-8")
    return rows


def read_table(path: Path, name: str, errors: str = "surrogateescape") -> tuple[list[str], list[tuple[int, Row]]]:
    """The header of a CSV file, in lower case, and line number and cells of each row with text. Raises DataError."""
    limit = csv.field_size_limit(MAX_BYTES)
    try:
        text = input_files.read_text(path, MAX_BYTES, "utf-8-sig", errors)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text))  # a name may hold a \r
        header = _clean_header(next(reader, []))
        rows, line = [], reader.line_num + 1  # in which a row begins
        for cells in reader:
            if any(cell.strip() for cell in cells):
                rows.append((line, dict(zip(header, cells, strict=False))))
            line = reader.line_num + 1
        return header, rows
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from None
    except csv.Error as error:
        raise DataError(f"{name} is not a CSV file ({error})") from None
    finally:
        csv.field_size_limit(limit)


def read_header(path: Path) -> list[str]:
    """The columns of a CSV file, by its first bytes, in lower case. Raises OSError."""
    with input_files.open_file(path) as file:
        text = file.read(MAX_HEADER).decode("utf-8-sig", "replace")
    return _clean_header(next(csv.reader(text.splitlines()[:1], delimiter=_separator(text)), []))


def _clean_header(cells: Sequence[str]) -> list[str]:
    """Without the empty ones at the end, as spreadsheets write them where cells beside the table were once filled."""
    header = [cell.strip().lower() for cell in cells]
    while header and not header[-1]:
        header.pop()
    return header


def _separator(text: str) -> str:
    """Of the cells: Excel writes semicolons where numbers have commas."""
    return max(",;\t", key=text.split("\n", 1)[0].count)


def describe_unread_tables(data_dir: Path, listing: Listing) -> list[str]:
    """What to set to use the CSV files with columns of images and masks, a line if there are some."""
    files = walk(data_dir, listing=listing, endings=(".csv", ".tsv"))
    tables, others = [], set[str]()
    for file in islice(files, MAX_TABLES):
        with contextlib.suppress(OSError, csv.Error):
            columns = {*read_header(file)} - {""}
            if {"image", "mask"} <= columns and ("split" in columns or columns <= {*COLUMNS, BOX}):
                tables.append(file)
                others |= columns - {*COLUMNS, BOX}
    if not tables:
        return []
    verb, value = ("is", path_in(data_dir, tables[0])) if len(tables) == 1 else ("are", "one of them, with all rows")
    without = f", without its columns {first_few(sorted(others))}" if others else ""
    use = f"to use the pairs and the split there, set split_file: {value}{without}"
    return [f"{first_few(tables)} {verb} not read; {use}"]


def split_csv_text(split: Split, data_dir: Path) -> str:
    """The text of a CSV file that read_split_csv reads back as the same pairs."""
    has_boxes = any(pair.box for pair in (*split.train, *split.val, *split.test))
    rows: list[tuple[str, ...]] = [(*COLUMNS, BOX) if has_boxes else COLUMNS]
    for part, pairs in (("train", split.train), ("val", split.val), ("test", split.test), (UNUSED, split.unused)):
        for pair in pairs:
            files = (path_in(data_dir, file) for file in pair.user_files)
            boxes = [" ".join(map(str, pair.box[2:])) if pair.box else ""] if has_boxes else []
            rows.append((*files, part, pair.group, pair.name, pair.content, *boxes))
    return "".join(csv_line(row) for row in rows)
