"""A split as a CSV file with the columns image, mask, split and group: a user's split_file, or the split.csv of a run,
which has the names of the pairs, digests of their content and the boxes of blocks besides."""

import contextlib
import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from unet_trainer.config.schema import Config
from unet_trainer.data.converted import Converter
from unet_trainer.data.csv_tables import Row, read_header, read_table
from unet_trainer.data.formats.large_image import cut_blocks
from unet_trainer.data.listing import Listing, refuse_missing, resolved, walk
from unet_trainer.data.names import PARTS
from unet_trainer.data.pairs import NUM_NAMED, Box, FoundPairs, Pair, Part, first_few, path_in
from unet_trainer.data.place import Place
from unet_trainer.data.shards import find_in_shards
from unet_trainer.data.splits import UNUSED, Split
from unet_trainer.images.file_bytes import DataError, is_file
from unet_trainer.system.console import counted, csv_line

COLUMNS = ("image", "mask", "split", "group", "name", "content")
BOX = "box"  # a further column, where there are blocks of images: top, left, bottom and right in pixels
MAX_TABLES = 100  # files that are looked at for a table that is not read


def find(place: Place, config: Config) -> list[Pair] | None:
    """The pairs in the rows of split_file; None where it is not set. Of shards, the table says which to use."""
    if config.split_file is None:
        return None
    tables = list(dict.fromkeys([Path(config.split_file), place.data_dir / config.split_file]))
    if (path := next((each for each in tables if each.is_file()), None)) is None:
        raise DataError(f"split_file: no file {' or '.join(map(str, tables))}")
    if (stored := find_in_shards(config, place.listing)) is None:
        refuse_missing(place.data_dir, [config.image_dir, config.mask_dir], place.listing)
    pairs = place.take(read_split_csv(path, place.data_dir, stored, place.converter))
    if config.group_pattern and any(pair.group for pair in pairs):
        what = f"{config.split_file} has groups of its own; leave out the pattern, or the column"
        raise DataError(f"group_pattern: {what}")
    return pairs


def read_split_csv(
    path: Path, data_dir: Path, now: FoundPairs | None = None, converter: Converter | None = None
) -> FoundPairs:
    """The pairs in the rows of a CSV file, with paths relative to data_dir; raises DataError with every problem.

    `now`: pairs that are there; rows of the same name stand for those whose files were made from others."""
    there = (*now.pairs, *now.test) if now else ()
    made = {pair.name: pair for pair in there if pair.box is None and (pair.image_origin or pair.mask_origin)}
    stored = {file: file for pair in there for file in (pair.image, pair.mask)}  # of shards, those that can be read
    pairs, unused, problems, num_unusable = list[Pair](), list[Pair](), list[str](), 0
    gone: Counter[Path | None] = Counter()  # folders, by the number of rows that have files there
    lines: dict[tuple[Path, str], int] = {}
    for number, row in _read_rows(path):
        pair, problem = _read_pair(row, data_dir, made, stored)
        if row.get("split", "").strip() == UNUSED:
            unused.append(pair)
            continue
        missing = [] if problem else [file for file in pair.user_files if not is_file(file)]
        place = pair.user_files[0], row.get(BOX, "").strip()
        above = ([each for each in file.parents if each.is_relative_to(data_dir)] for file in missing)
        folders = [next((each for each in reversed(its) if not each.exists()), None) for its in above]
        if missing:
            problem = f"no file {' and no file '.join(map(str, missing))}"
        elif not problem and (first := lines.setdefault(place, number)) != number:
            problem = f"{place[0]} is in line {first} too"
        if problem and pair.part == "test":  # stops no training
            num_unusable += 1
        elif folders and all(folders):
            gone.update(dict.fromkeys(folders, 1))
        elif problem:
            problems.append(f"line {number}: {problem}")
        else:
            pairs.append(pair)
    if len({pair.part is None for pair in pairs if pair.part != "test"}) > 1:
        problems.append("some rows have a split and some have none; fill in all or leave the column out")
    problems = [*(f"no folder {folder} ({counted(count, 'row')})" for folder, count in gone.items()), *problems]
    if problems:
        more = [f"… and {len(problems) - NUM_NAMED} more"] if len(problems) > NUM_NAMED else []
        if not pairs and not gone:
            more.append("Paths are as seen from data_dir, such as images/a.png, in UTF-8")
        raise DataError("\n  ".join([f"split_file: {path}:", *problems[:NUM_NAMED], *more]))
    if all(pair.part == "test" for pair in pairs):
        raise DataError(f"split_file: {path} has no row of train or val")
    if converter is not None and any(pair.box for pair in pairs):
        pairs = cut_blocks(converter, pairs)
    left_out = f"{counted(num_unusable, 'row')} of test in {path.name} that cannot be used left out"
    notices = (left_out,) if num_unusable else ()
    return FoundPairs((), path.name, unused=tuple(unused), notices=notices).with_pairs(pairs)


def _read_pair(row: Row, data_dir: Path, made: Mapping[str, Pair], stored: Mapping[Path, Path]) -> tuple[Pair, str]:
    """The pair of a row, whether its files are there or not, and what is wrong with the row."""
    cells = {column: row.get(column, "").strip() for column in (*COLUMNS, BOX)}
    part, place = PARTS.get(cells["split"].lower()), cells[BOX]
    image, mask = (_find_file(data_dir, row.get(column, "")) for column in ("image", "mask"))
    image, mask = stored.get(image, image), stored.get(mask, mask)
    name = row["name"] if cells["name"] else path_in(data_dir, image).removesuffix(image.suffix)
    group = row.get("group", "") if "name" in row else cells["group"]  # a run's own are not stripped
    pair = Pair(name, image, mask, part, group, content=cells["content"])
    if known := made.get(name):
        pair = replace(known, part=part, group=group, content=cells["content"])
        image, mask = known.image, known.mask
    if part is None and cells["split"]:
        return pair, f"split {cells['split']!r}; need train, val or test"
    if known is None and not (cells["image"] and cells["mask"]):
        return pair, "need an image and a mask"
    if not place:
        return pair, ""
    if re.fullmatch(r"[0-9]{1,9}( +[0-9]{1,9}){3}", place):
        box = Box(image, mask, *map(int, place.split()))
        if box.top < box.bottom and box.left < box.right:
            return box.pair(name if cells["name"] else box.name_in(name), part, group, cells["content"]), ""
    return pair, f"{BOX} {place!r}; need top, left, bottom and right in pixels, such as 0 0 512 512"


def _find_file(data_dir: Path, cell: str) -> Path:
    """The file that a cell names: as it stands there, without spaces, in another form of Unicode, or as on Windows."""
    forms = [unicodedata.normalize(form, cell.strip()) for form in ("NFC", "NFD")]
    spellings = (cell, cell.strip(), *forms, *(text.replace("\\", "/") for text in forms))
    return next((path for text in spellings if is_file(path := data_dir / text)), data_dir / cell.strip())


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


def describe_unread_tables(data_dir: Path, listing: Listing) -> list[str]:
    """What to set to use the CSV files with columns of images and masks, a line if there are some."""
    tables = dict[Path, set[str]]()  # with their columns that split_file does not know
    for file in islice(walk(data_dir, listing=listing, endings=(".csv", ".tsv")), MAX_TABLES):
        with contextlib.suppress(OSError, csv.Error):
            columns = {*read_header(file)} - {""}
            others = columns - {*COLUMNS, BOX}
            if {"image", "mask"} <= columns and ("split" in columns or not others):
                tables[file] = others
    if not tables:
        return []
    verb, value = ("is", path_in(data_dir, *tables)) if len(tables) == 1 else ("are", "one of them, with all rows")
    others = set[str]().union(*tables.values())
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
