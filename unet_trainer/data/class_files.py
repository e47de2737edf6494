"""Files beside the masks that name the classes: a name each, and the value or colour of it where the file has them."""

import contextlib
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet_trainer.data.pairs import Pair
from unet_trainer.images.mask_decoding import as_number
from unet_trainer.system.input_files import parse_json, read_text

MAX_BYTES = 256 * 1024
VOID_NAME = re.compile("void|unlabell?ed|unlabel|ignored?|dontcare|unannotated")
BACKGROUND_NAME = re.compile("background|bg|back|none|nothing|unlabell?ed|void|others?|rest")
NO_ID = "__ignore__"  # the first line of LabelMe's list; the ids begin with the line behind it
RGB = r"(?P<r>\d+)[\s,]+(?P<g>\d+)[\s,]+(?P<b>\d+)"
# `9 9 9 Animal` of CamVid, `name:r,g,b:parts:actions` of CVAT and VOC. Columns of tables; the second is Roboflow's.
LINES = {"label_colors.txt": rf"{RGB}[\s,]+(?P<name>\S.*)", "labelmap.txt": rf"(?P<name>[^:]+):{RGB}(:.*)?"}
TABLES = {"class_dict.csv": ["name", "r", "g", "b"], "_classes.csv": ["pixel value", "class"]}
# {"labels": {"tumour": 1}} of nnU-Net; a name a line, in the order of the ids.
NAMES = ("dataset.json", *LINES, *TABLES, "classes.txt", "class_names.txt")


@dataclass(frozen=True)
class ClassFile:
    """The names in a file, and the value or colour of each in the masks; none if it has names only."""

    path: Path
    names: tuple[str, ...]
    values: tuple[int, ...]
    has_colours: bool


def is_void(name: str) -> bool:
    return VOID_NAME.fullmatch(re.sub(r"[\W_]+", "", name).lower()) is not None


def is_background(name: str) -> bool:
    return BACKGROUND_NAME.fullmatch(name.lower().strip("_ ")) is not None


def find_class_file(data_dir: Path, pairs: Sequence[Pair], stored: tuple[str, str] | None = None) -> ClassFile | None:
    """The first file of a known name and form, nearest to the masks; one with values before one with names only.
    `stored`: name and text of the one that shards hold."""
    if stored is not None:
        return parse_class_file(*stored)
    masks = {Path(pair.mask_origin or pair.mask) for pair in pairs}
    inside = {folder for mask in masks for folder in mask.parents if data_dir in folder.parents}
    places = (*sorted(inside, key=lambda place: (-len(place.parts), str(place))), data_dir)
    found = list[ClassFile | None]()
    for path in (place / name for place in places for name in NAMES):
        with contextlib.suppress(OSError, ValueError):
            found.append(parse_class_file(path, read_text(path, MAX_BYTES, "utf-8-sig")))
    return min(filter(None, found), key=lambda file: not file.values, default=None)


def parse_class_file(path: str | Path, text: str) -> ClassFile | None:
    """A file of a known name, by its text; None if it has another form."""
    try:
        rows = [(name.strip(), [*map(int, numbers)]) for name, *numbers in _read_rows(Path(path).name, text)]
        colours = [(red, green, blue) for _, (red, green, blue) in rows] if rows and len(rows[0][1]) == 3 else []
    except (ValueError, LookupError, AttributeError, TypeError, csv.Error):  # a line in another form
        return None
    names = tuple(name for name, _ in rows)
    values = tuple(map(as_number, colours)) or tuple(number for _, numbers in rows for number in numbers)
    are_distinct = len(set(names)) == len(names) and len(set(values)) == len(values)
    is_8bit = all(0 <= channel < 256 for colour in colours for channel in colour)
    is_whole = are_distinct and is_8bit and all(names) and 2 <= len(names) <= 256
    return ClassFile(Path(path), names, values, bool(colours)) if is_whole else None


def _read_rows(file: str, text: str) -> Sequence[Sequence[str]]:
    """The name of each class, and its value or its red, green and blue; none if the text has another form."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if file.endswith(".json"):
        return sorted(parse_json(text)["labels"].items(), key=lambda label: int(label[1]))
    if file in TABLES:
        table = csv.reader(lines, skipinitialspace=True, delimiter=";" if ";" in lines[0] else ",")
        header, *rows = [[cell.strip() for cell in row] for row in table]
        is_known = [cell.lower() for cell in header] == TABLES[file] and {len(header)} == {*map(len, rows)}
        return [row[::-1] if file.startswith("_") else row for row in rows] if is_known else []
    if file in LINES:
        matches = [re.fullmatch(LINES[file], line) for line in lines if not line.startswith("#")]
        return [match.group("name", "r", "g", "b") for match in matches if match is not None] if all(matches) else []
    names = [line for line in lines if line != NO_ID]
    is_of_pixels = any(is_background(each) or is_void(each) for each in names)  # and not of objects in boxes
    return [[each] for each in names] if is_of_pixels else []
