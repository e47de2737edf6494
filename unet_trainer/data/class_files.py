"""Files beside the masks that name the classes: a name each, and the value or colour of it where the file has them."""

import contextlib
import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet_trainer.data.pairs import Pair
from unet_trainer.images.mask_decoding import as_number
from unet_trainer.system.input_files import parse_json, read_text

MAX_BYTES = 256 * 1024
VOID_NAME = re.compile("void|unlabell?ed|unlabel|ignored?|dontcare|unannotated")
BACKGROUND_NAME = re.compile("background|bg|back|none|nothing|unlabell?ed|void|others?|rest")
NO_ID = "__ignore__"  # the first line of LabelMe's list; the ids begin with the line behind it
COLOUR = r"(?P<r>\d+)[\s,]+(?P<g>\d+)[\s,]+(?P<b>\d+)"
# The forms of a line: `9 9 9 Animal` of CamVid, `name:r,g,b:parts:actions` of CVAT and VOC. Columns of CSV files.
LINES = {"label_colors.txt": rf"{COLOUR}[\s,]+(?P<name>\S.*)", "labelmap.txt": rf"(?P<name>[^:]+):{COLOUR}(:.*)?"}
COLUMNS = {"class_dict.csv": ["name", "r", "g", "b"], "_classes.csv": ["value", "name"]}  # the latter of Roboflow
SPELLINGS = {"pixel value": "value", "class": "name"}
# {"labels": {"tumour": 1}} of nnU-Net; a name a line, in the order of the ids.
NAMES = ("dataset.json", *LINES, *COLUMNS, "classes.txt", "class_names.txt")


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
    places = {Path(pair.mask_origin or pair.mask).parent for pair in pairs}
    inside = {each for place in places for each in (place, *place.parents) if data_dir in each.parents}
    found: list[ClassFile] = []
    for folder in (*sorted(inside, key=lambda place: (-len(place.parts), str(place))), data_dir):
        for name in NAMES:
            with contextlib.suppress(OSError, ValueError):
                file = parse_class_file(folder / name, read_text(folder / name, MAX_BYTES, "utf-8-sig"))
                found += [] if file is None else [file]
    return next((file for file in found if file.values), found[0] if found else None)


def parse_class_file(path: str | Path, text: str) -> ClassFile | None:
    """A file of a known name, by its text; None if it has another form."""
    try:
        records = _parse(Path(path).name, text)
        names = tuple(record["name"].strip() for record in records)
        colours = [tuple(int(record[channel]) for channel in "rgb") for record in records if "r" in record]
        values = tuple(int(record["value"]) for record in records if "value" in record)
    except (ValueError, LookupError, AttributeError, TypeError, csv.Error):  # a line in another form
        return None
    are_valid = all(0 <= channel < 256 for colour in colours for channel in colour)
    values = values or tuple(as_number((red, green, blue)) for red, green, blue in colours)
    are_distinct = len(set(names)) == len(names) and len(set(values)) == len(values)
    if not are_valid or not are_distinct or not all(names) or not 2 <= len(names) <= 256:
        return None
    return ClassFile(Path(path), names, values, bool(colours))


def _parse(name: str, text: str) -> list[dict[str, Any]]:
    """Name and value, or red, green and blue, of each class; none if the text has another form."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if name.endswith(".json"):
        named = sorted((int(value), name) for name, value in parse_json(text)["labels"].items())
        return [{"name": name, "value": value} for value, name in named]
    if name in COLUMNS:
        rows = csv.reader(lines, skipinitialspace=True, delimiter=";" if ";" in lines[0] else ",")
        header, *cells = [[cell.strip() for cell in row] for row in rows]
        header = [SPELLINGS.get(cell.lower(), cell.lower()) for cell in header]
        return [dict(zip(header, row, strict=True)) for row in cells] if header == COLUMNS[name] else []
    if name in LINES:
        matches = [re.fullmatch(LINES[name], line) for line in lines if not line.startswith("#")]
        return [match.groupdict() for match in matches if match is not None] if all(matches) else []
    names = [line for line in lines if line != NO_ID]
    is_of_pixels = any(is_background(each) or is_void(each) for each in names)  # and not of objects in boxes
    return [{"name": each} for each in names] if is_of_pixels else []
