"""Files that name the classes of masks: label_colors.txt (CamVid), class_dict.csv, _classes.csv (Roboflow), labelmap.txt (CVAT),
and lists of names (codes.txt, classes.txt).

Reads them where they lie, in data_dir or between it and the masks. A file in another form is left alone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.mask_coding import as_number

MAX_BYTES = 256 * 1024
VOID_NAMES = frozenset(["void", "unlabeled", "unlabelled", "unlabel", "ignore", "ignored", "dontcare", "unannotated"])
BACKGROUND_NAMES = frozenset(["background", "bg", "_background_", "other", "none"])


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
    found = [file for folder in _folders(data_dir, pairs) for name in READERS if (file := _read(folder / name)) is not None]
    return next((file for file in found if file.has_values), found[0] if found else None)


def parse_class_file(name: str, text: str) -> ClassFile | None:
    """A file of a known name, by its text."""
    return _parse(Path(name), text) if name in READERS else None


def _folders(data_dir: Path, pairs: Sequence[Pair]) -> list[Path]:
    """The folders of the masks and those above them, up to data_dir."""
    folders: dict[Path, None] = {}
    for folder in {pair.mask.parent for pair in pairs}:
        for place in (folder, *folder.parents):
            if data_dir not in (place, *place.parents):
                break
            folders[place] = None
    return sorted(folders, key=lambda place: (-len(place.parts), str(place))) + ([] if data_dir in folders else [data_dir])


def _read(path: Path) -> ClassFile | None:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return _parse(path, path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError):
        return None


def _parse(path: Path, text: str) -> ClassFile | None:
    lines = text.splitlines()
    classes = READERS[path.name]([line for line in lines if line.strip()])
    if not 2 <= len(classes) <= 256 or len({one.name for one in classes}) != len(classes):
        return None
    values = [one.value for one in classes if one.value is not None]
    return ClassFile(path, tuple(classes)) if len(set(values)) == len(values) else None


def _read_label_colors(lines: Iterable[str]) -> list[NamedClass]:
    """`64 128 64  Animal`"""
    classes = []
    for line in lines:
        match = re.fullmatch(r"\s*(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\d{1,3})[\s,]+(\S.*?)\s*", line)
        if match is None:
            return []
        classes.append(_coloured(match[4], match[1], match[2], match[3]))
    return _complete(classes)


def _read_class_dict(lines: Iterable[str]) -> list[NamedClass]:
    """`name,r,g,b`"""
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    header = [cell.lower() for cell in rows[0]] if rows else []
    if header[:4] not in (["name", "r", "g", "b"], ["class", "r", "g", "b"], ["label", "r", "g", "b"]):
        return []
    return _complete([_coloured(row[0], *row[1:4]) if len(row) >= 4 else None for row in rows[1:]])


def _read_roboflow(lines: Iterable[str]) -> list[NamedClass]:
    """`Pixel Value, Class`"""
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    if not rows or [cell.lower() for cell in rows[0][:2]] != ["pixel value", "class"]:
        return []
    return _complete([NamedClass(row[1], int(row[0])) if len(row) >= 2 and row[0].isdecimal() else None for row in rows[1:]])


def _read_labelmap(lines: Iterable[str]) -> list[NamedClass]:
    """`name:r,g,b:parts:actions`"""
    classes = []
    for line in lines:
        if line.lstrip().startswith("#"):
            continue
        match = re.fullmatch(r"([^:]+):(\d{1,3}),(\d{1,3}),(\d{1,3})(:.*)?", line.strip())
        classes.append(None if match is None else _coloured(match[1], match[2], match[3], match[4]))
    return _complete(classes)


def _read_names(lines: Iterable[str]) -> list[NamedClass]:
    """A name a line, in the order of the ids. Names without a background are those of objects in boxes."""
    classes = [NamedClass(line.strip(), None) for line in lines]
    return classes if any(one.is_background or one.is_void for one in classes) else []


def _coloured(name: str, *channels: str) -> NamedClass | None:
    if not name or not all(channel.isdecimal() and int(channel) <= 255 for channel in channels):
        return None
    red, green, blue = (int(channel) for channel in channels)
    return NamedClass(name, as_number((red, green, blue)), is_colour=True)


def _complete(classes: Sequence[NamedClass | None]) -> list[NamedClass]:
    """The classes, or none of them if a line could not be read."""
    found = [one for one in classes if one is not None]
    return found if len(found) == len(classes) else []


READERS: dict[str, Callable[[Iterable[str]], list[NamedClass]]] = {
    "label_colors.txt": _read_label_colors,
    "class_dict.csv": _read_class_dict,
    "_classes.csv": _read_roboflow,
    "labelmap.txt": _read_labelmap,
    "codes.txt": _read_names,
    "classes.txt": _read_names,
}
