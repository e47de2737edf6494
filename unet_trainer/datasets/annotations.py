"""What the readers of annotation files share: the annotated images and shapes that they give, and the checks of what they read.

An annotation file is anyone's: every value is checked where it is used, and what is wrong is refused with the file and the entry.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.rasterize import Patch
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.image_headers import picture_size
from unet_trainer.system.console import counted

MAX_FILE_BYTES = 2**30
MAX_SIDE, MAX_PIXELS = 2**20, 2**30
MAX_COORDINATE = 1e7  # pixels; an outline may leave its image, not the continent
MAX_NAME = 100  # characters
MAX_SHOWN, MAX_PATH = 60, 250  # characters of a value and of a file's name in a message
MAX_CLASSES = 253  # 0 is the background; 254 and 255 are taken

BACKGROUND_NAMES = frozenset(["background", "_background_", "__background__"])  # these are class 0
IGNORE_NAME = "__ignore__"  # LabelMe's name for pixels that count nowhere

# Why a shape is not drawn as its outline, or not at all. The texts stand after a number of shapes.
SHORT, NO_AREA, LINE, RECTANGLE, IN_CROWD, NO_PIXEL = "short", "no_area", "line", "rectangle", "crowd", "no_pixel"


class EntryError(DataError):
    """An entry of an annotation file that cannot be used: the message is the reason; the caller adds file and entry."""


class Shape(NamedTuple):
    """One object: the name of its class and its pixels, None if it has none to draw; `note` is one of the above."""

    label: str
    patch: Patch | None
    note: str = ""


ReadShapes = Callable[[int, int], Iterable[Shape]]  # height, width → shapes in their order in the file; raises EntryError


@dataclass(frozen=True)
class AnnotatedImage:
    """An image file, and how to read the shapes in it."""

    image: Path
    part: str  # train, val, test, or "" if the data is not divided
    sources: tuple[Path, ...]  # the annotation files
    where: str  # names the entry in a message: "instances.json, image 'a.jpg'"
    size: tuple[int, int] | None  # height and width that the annotation states
    num_shapes: int
    read_shapes: ReadShapes


@dataclass
class Annotations:
    """What a reader found in the annotation files of a dataset."""

    tool: str  # "COCO", "LabelMe", ...
    files: str  # what was read, for people: "annotations/instances_train.json"
    classes: tuple[str, ...]  # without the background; the first is class 1
    class_order: str  # "by category id"
    images: list[AnnotatedImage]
    smaller_on_top: bool  # else the later shape
    overlap_rule: str  # "the smaller object is on top"
    notices: list[str] = field(default_factory=list)


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises DataError with one sentence."""
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None
    if size > MAX_FILE_BYTES:
        raise DataError(
            f"{path} has {size / 2**30:.1f} GiB; annotation files of up to {MAX_FILE_BYTES / 2**30:g} GiB are read: "
            "divide it, for example into train and val"
        )
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); was it cut off?") from None
    except (ValueError, RecursionError, MemoryError) as error:
        reasons = {RecursionError: "it is nested too deeply", MemoryError: "memory is too small for it"}
        raise DataError(f"{path} is not JSON that can be read ({reasons.get(type(error)) or str(error)[:100]})") from None


def read_text(path: Path, max_bytes: int) -> str:
    try:
        if path.stat().st_size > max_bytes:
            raise DataError(f"{path} is larger than {max_bytes // 2**20} MiB")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8'})") from None


def show(value: object, most: int = MAX_SHOWN) -> str:
    """A value for a message, on one line and not long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def entry_name(path: Path, data_dir: Path, name: str) -> str:
    """An image in an annotation file, for a message: coco.json, image 'a.png'."""
    return f"{relative(path, data_dir)}, image {show(name, MAX_PATH)}"


def relative(path: Path, data_dir: Path) -> str:
    return str(path.relative_to(data_dir) if path.is_relative_to(data_dir) else path)


def as_list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise EntryError(f"{what} is {show(value)}; need a list")
    return value


def as_dict(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EntryError(f"{what} is {show(value)}; need an object with keys")
    return value


def as_name(value: object, what: str) -> str:
    """A class name or a file name: printable, on one line."""
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise EntryError(f"{what} is {show(value)}; need a text of 1 to {MAX_NAME} characters")
    return name


def as_number(value: object, what: str) -> float:
    """A finite number that is no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_COORDINATE <= value <= MAX_COORDINATE:
        raise EntryError(f"{what} is {show(value)}; need a number of pixels")
    return float(value)


def as_size(height: object, width: object) -> tuple[int, int]:
    sides = []
    for name, side in (("height", height), ("width", width)):
        if isinstance(side, float) and side.is_integer():
            side = int(side)
        if isinstance(side, bool) or not isinstance(side, int) or not 0 < side <= MAX_SIDE:
            raise EntryError(f"{name} is {show(side)}; need a whole number of pixels from 1 to {MAX_SIDE}")
        sides.append(side)
    if sides[0] * sides[1] > MAX_PIXELS:
        raise EntryError(f"{sides[1]}×{sides[0]} pixels; images of up to {MAX_PIXELS} are read")
    return sides[0], sides[1]


def as_points(value: object, what: str) -> Pixels:
    """N,2 float64 from [[x, y], ...]."""
    pairs = as_list(value, what)
    if any(not isinstance(pair, list) or len(pair) < 2 for pair in pairs):
        raise EntryError(f"{what} is {show(value)}; need points as [x, y]")
    return check_points([number for pair in pairs for number in pair[:2]], what)


def check_points(numbers: Sequence[Any], what: str) -> Pixels:
    """N,2 float64 from x, y, x, y, ...; raises EntryError for anything but finite numbers of a possible size."""
    wrong = next((number for number in numbers if type(number) not in (int, float)), None)
    if wrong is not None:
        raise EntryError(f"{what} holds {show(wrong)}; need numbers")
    if len(numbers) % 2:
        raise EntryError(f"{what} holds {len(numbers)} numbers; need x and y for each point")
    wrong = next((number for number in numbers if not -MAX_COORDINATE <= number <= MAX_COORDINATE), None)
    if wrong is not None:
        reason = "is no number" if isinstance(wrong, float) and math.isnan(wrong) else "lies far outside of any image"
        raise EntryError(f"{what} holds {show(wrong)}, which {reason}")
    return np.array(numbers, np.float64).reshape(-1, 2)


def decode_base64(text: object, what: str) -> bytes:
    try:
        return base64.b64decode(text if isinstance(text, str) else "?", validate=True)
    except (binascii.Error, ValueError):
        raise EntryError(f"{what} is not base64") from None


def decode_bitmap(data: bytes, what: str, height: int, width: int) -> Pixels:
    """H,W bool of a PNG with one object, not larger than its image: what is not 0 or, with alpha, not transparent."""
    size = picture_size(data)
    if size is None or size[0] > height or size[1] > width:
        found = "not a picture" if size is None else f"{size[1]}×{size[0]} pixels, larger than its image"
        raise EntryError(f"{what} is {found}")
    try:
        bitmap: Any = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        bitmap = None
    if bitmap is None:
        raise EntryError(f"{what} is not a picture that can be decoded")
    if bitmap.ndim == 3:
        bitmap = bitmap[:, :, 3] if bitmap.shape[2] == 4 else bitmap.any(axis=2)
    return bitmap.astype(np.bool_)


def read_shapes(
    read: Callable[[Mapping[str, Any], str, int, int], Shape],
    noun: str,
    entries: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    height: int,
    width: int,
) -> Iterator[Shape]:
    """The shapes of an image, each read from its entry; what is wrong with one is said with its number and label."""
    for number, (entry, label) in enumerate(zip(entries, labels, strict=True)):
        try:
            yield read(entry, label, height, width)
        except DataError as error:
            raise EntryError(f"{noun} {number + 1} ({label}): {error}") from None


def is_background(name: str) -> bool:
    return name.lower() in BACKGROUND_NAMES


def choose_classes(declared: Iterable[str], used: Iterable[str], tool: str, files: str) -> tuple[tuple[str, ...], list[str]]:
    """The classes in their order, only those that occur and without the background; and notices. Raises DataError."""
    seen = set(used)
    names = [name for name in dict.fromkeys(declared) if not is_background(name) and name != IGNORE_NAME]
    classes = tuple(name for name in names if name in seen)
    if not classes:
        raise DataError(f"{files} ({tool}) holds no object of any class, so that there is nothing to learn")
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{files} ({tool}) has {len(classes)} classes; need at most {MAX_CLASSES}")
    unused = [name for name in names if name not in seen]
    if not unused:
        return classes, []
    return classes, [f"{counted(len(unused), 'class', 'classes')} without any object left out: {first_few(unused)}"]
