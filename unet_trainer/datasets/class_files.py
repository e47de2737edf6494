"""Files that name the classes of masks: label_colors.txt (CamVid), class_dict.csv, _classes.csv (Roboflow), labelmap.txt (CVAT),
and lists of names (class_names.txt of LabelMe, codes.txt, classes.txt).

Reads them where they lie, in data_dir or between it and the masks. A file in another form is left alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.mask_coding import as_number
from unet_trainer.system.input_files import read_text

MAX_BYTES = 256 * 1024
VOID_NAMES = frozenset(["void", "unlabeled", "unlabelled", "unlabel", "ignore", "ignored", "dontcare", "unannotated"])
NO_ID = "__ignore__"  # the first line of LabelMe's list; the ids begin with the line behind it
BACKGROUND_NAMES = frozenset(["background", "bg", "_background_", "other", "none"])
PATTERNS = {
    "label_colors.txt": re.compile(r"(?P<r>\d{1,3})[\s,]+(?P<g>\d{1,3})[\s,]+(?P<b>\d{1,3})[\s,]+(?P<name>\S.*)"),  # 9 9 9 Animal
    "labelmap.txt": re.compile(r"(?P<name>[^:]+):(?P<r>\d{1,3}),(?P<g>\d{1,3}),(?P<b>\d{1,3})(?::.*)?"),  # name:r,g,b:parts:actions
}
NAMES = ("label_colors.txt", "class_dict.csv", "_classes.csv", "labelmap.txt", "class_names.txt", "codes.txt", "classes.txt")


@dataclass(frozen=True)
class NamedClass:
    """A class of a file. `value` is its number in a mask, a colour where `is_colour`; None: the file gives names only."""

    name: str
    value: int | None
    is_colour: bool = False

    @property
    def is_void(self) -> bool:
        return re.sub(r"[\W_]+", "", self.name).lower() in VOID_NAMES

    @property
    def is_background(self) -> bool:
        return self.name.strip().lower() in BACKGROUND_NAMES


@dataclass(frozen=True)
class ClassFile:
    path: Path
    classes: tuple[NamedClass, ...]

    @property
    def has_values(self) -> bool:
        return all(one.value is not None for one in self.classes)

    @property
    def has_colours(self) -> bool:
        return any(one.is_colour for one in self.classes)


def find_class_file(data_dir: Path, pairs: Sequence[Pair]) -> ClassFile | None:
    """The first file of a known name and form, nearest to the masks; one with values before one with names only."""
    above = {place for folder in {pair.mask.parent for pair in pairs} for place in (folder, *folder.parents)}
    inside = [place for place in above if data_dir in place.parents]
    folders = [*sorted(inside, key=lambda place: (-len(place.parts), str(place))), data_dir]
    found = [file for folder in folders for name in NAMES if (file := _read(folder / name)) is not None]
    return next((file for file in found if file.has_values), found[0] if found else None)


def _read(path: Path) -> ClassFile | None:
    try:
        return parse_class_file(path, read_text(path, MAX_BYTES, "utf-8-sig"))
    except (OSError, ValueError):
        return None


def parse_class_file(path: str | Path, text: str) -> ClassFile | None:
    """A file of a known name, by its text."""
    path = Path(path)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    classes = _parse(path.name, lines) if path.name in NAMES else []
    found = [one for one in classes if one is not None]
    values = [one.value for one in found if one.value is not None]
    is_whole = 2 <= len(found) <= 256 and len(found) == len(classes)
    are_distinct = len({one.name for one in found}) == len(found) and len(set(values)) == len(values)
    return ClassFile(path, tuple(found)) if is_whole and are_distinct else None


def _parse(name: str, lines: Sequence[str]) -> list[NamedClass | None]:
    """None for a line that cannot be read."""
    if name in PATTERNS:
        lines = [line for line in lines if name != "labelmap.txt" or not line.startswith("#")]
        matches = [PATTERNS[name].fullmatch(line) for line in lines]
        return [_coloured(match["name"], match.group("r", "g", "b")) if match else None for match in matches]
    if not name.endswith(".csv"):
        # A name per line, in the order of the ids. Names without a background are those of objects in boxes.
        classes = [NamedClass(line, None) for line in lines if line != NO_ID]
        return [*classes] if any(one.is_background or one.is_void for one in classes) else []
    header, *rows = [[cell.strip() for cell in row] for row in csv.reader(lines)] or [[]]
    header = [cell.lower() for cell in header]
    if name == "_classes.csv":
        is_known = header[:2] == ["pixel value", "class"]
        read = [NamedClass(row[1], int(row[0])) if len(row) >= 2 and row[0].isdecimal() else None for row in rows]
    else:
        is_known = header[1:4] == ["r", "g", "b"] and header[0] in ("name", "class", "label")
        read = [_coloured(row[0], row[1:4]) if len(row) >= 4 else None for row in rows]
    return read if is_known else []


def _coloured(name: str, channels: Sequence[str]) -> NamedClass | None:
    if not name or not all(channel.isdecimal() and int(channel) <= 255 for channel in channels):
        return None
    red, green, blue = (int(channel) for channel in channels)
    return NamedClass(name, as_number((red, green, blue)), is_colour=True)
