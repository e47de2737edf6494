"""CVAT for images, XML 1.1: polygons, boxes, ellipses and masks of each image; read as a stream.

A document with a DTD is refused before anything in it is read: CVAT writes none, and entities that expand without end, or that name
other files, are declared there. Shapes are drawn by z_order, then in their order in the file; boxes are filled, as in CVAT's own
mask export, and lines and points have no area.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from xml.parsers import expat

from unet_trainer.datasets.annotations import (
    MAX_FILE_BYTES,
    NO_AREA,
    RECTANGLE,
    SHORT,
    AnnotatedImage,
    Annotations,
    EntryError,
    Shape,
    as_name,
    as_number,
    as_size,
    check_points,
    choose_classes,
    entry_name,
    relative,
    show,
)
from unet_trainer.datasets.image_lookup import ImageIndex, part_in, part_of_file
from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.rasterize import box_corners, fill_ellipse, fill_polygon, paste
from unet_trainer.datasets.rle import unroll_rows
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import counted

CHUNK = 2**20
SHAPES = frozenset(["polygon", "box", "ellipse", "mask", "polyline", "points", "cuboid", "skeleton"])
FILLED = frozenset(["polygon", "box", "ellipse", "mask"])


@dataclass
class _Image:
    attributes: Mapping[str, str]
    shapes: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)  # element and attributes


class _Reader:
    """Collects labels and images from the events of the parser."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = ""
        self.labels: list[str] = []
        self.images: list[_Image] = []
        self.has_tracks = False
        self._open: list[str] = []  # elements
        self._text: list[str] = []

    def read(self) -> None:
        parser = expat.ParserCreate()
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = self._refuse_dtd
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text.append
        try:
            with self.path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    parser.Parse(chunk, False)
                parser.Parse(b"", True)
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror})") from None
        except (expat.ExpatError, LookupError, ValueError) as error:  # the last two for an unknown encoding
            raise DataError(f"{self.path} is not valid XML ({error}); was it cut off?") from None

    def _refuse_dtd(self, *_: object) -> None:
        raise DataError(f"{self.path} has a document type declaration (DTD), which CVAT never writes; it is not read")

    def _start(self, element: str, attributes: dict[str, str]) -> None:
        self.root = self.root or element
        self._text.clear()
        if element == "image" and len(self._open) == 1:
            self.images.append(_Image(attributes))
        elif element == "track" and len(self._open) == 1:
            self.has_tracks = True
        elif element in SHAPES and self._open[-1:] == ["image"] and len(self._open) == 2:
            self.images[-1].shapes.append((element, attributes))
        self._open.append(element)

    def _end(self, element: str) -> None:
        self._open.pop()
        if element == "name" and self._open[-2:] == ["labels", "label"]:
            self.labels.append("".join(self._text))
        self._text.clear()


def xml_root(path: Path) -> str:
    """The name of the first element; "" if there is none. Raises DataError for a DTD."""
    reader = _Reader(path)
    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = reader._refuse_dtd
    parser.StartElementHandler = reader._start
    try:
        with path.open("rb") as file:
            parser.Parse(file.read(65536), False)
    except DataError:
        raise
    except (OSError, expat.ExpatError, LookupError, ValueError):
        pass
    return reader.root


def read_cvat(files: Sequence[Path], index: ImageIndex, data_dir: Path) -> Annotations:
    """The annotations of one or several CVAT files; raises DataError."""
    names = ", ".join(relative(path, data_dir) for path in files)
    declared: dict[str, None] = {}
    used: set[str] = set()
    images: list[AnnotatedImage] = []
    missing: list[str] = []
    for path in files:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise DataError(f"{path} is larger than {MAX_FILE_BYTES // 2**30} GiB; export fewer images at a time")
        reader = _Reader(path)
        reader.read()
        if reader.has_tracks:
            raise DataError(f"{path} is an export of CVAT for video 1.1, with tracks; export CVAT for images 1.1, or COCO 1.0")
        try:
            declared |= dict.fromkeys(as_name(name, "the name of a label") for name in reader.labels)
        except EntryError as error:
            raise DataError(f"{path}: {error}") from None
        with_folders = index.knows_folders(found.attributes.get("name", "") for found in reader.images)
        for number, found in enumerate(reader.images):
            where = entry_name(path, data_dir, found.attributes.get("name") or f"number {number + 1}")
            part = part_in([found.attributes.get("subset", "")]) or part_of_file(path, data_dir, by_name=True)
            size, shapes = _read_image(where, found)
            used |= {label for element, _, label in shapes if element in FILLED}
            name = found.attributes["name"]
            image = index.find(name, path.parent, part, with_folders=with_folders)
            if image is None:
                missing.append(name)
                continue
            part, read = part or index.part_of(image), partial(_read_shapes, shapes)
            images.append(AnnotatedImage(image, part, (path,), where, size, len(shapes), read))
    if not images:
        raise DataError(
            f"{names} (CVAT) lists {counted(len(missing), 'image')}, and no such file is in {index.root}: {first_few(missing)}; "
            "put the images there, or set image_dir to their folder"
        )
    notices = []
    if missing:
        notices.append(f"{counted(len(missing), 'image')} of {names} without a readable file left out: {first_few(missing)}")
    classes, unused = choose_classes([*declared, *sorted(used)], used, "CVAT", names)
    order, rule = "in the order of the labels", "the higher z_order, then the later shape, is on top"
    return Annotations("CVAT", names, classes, order, images, False, rule, notices + unused)


def _read_image(where: str, found: _Image) -> tuple[tuple[int, int], list[tuple[str, Mapping[str, str], str]]]:
    """Its size, and element, attributes and label of each shape, the lowest first."""
    try:
        if not found.attributes.get("name"):
            raise EntryError("it has no name")
        size = as_size(_whole(found.attributes, "height"), _whole(found.attributes, "width"))
        labels = [as_name(shape.get("label"), f"the label of a {element}") for element, shape in found.shapes]
        shapes = [(element, shape, label) for (element, shape), label in zip(found.shapes, labels, strict=True)]
        return size, sorted(shapes, key=lambda shape: _whole(shape[1], "z_order", 0))
    except EntryError as error:
        raise DataError(f"{where}: {error}") from None


def _read_shapes(shapes: Sequence[tuple[str, Mapping[str, str], str]], height: int, width: int) -> Iterator[Shape]:
    for number, (element, attributes, label) in enumerate(shapes):
        try:
            yield _read_shape(element, attributes, label, height, width)
        except DataError as error:
            raise EntryError(f"{element} {number + 1} ({label}): {error}") from None


def _read_shape(element: str, attributes: Mapping[str, str], label: str, height: int, width: int) -> Shape:
    if element not in FILLED:
        return Shape(label, None, NO_AREA)
    if element == "box":
        x0, y0, x1, y1 = (_number(attributes, name) for name in ("xtl", "ytl", "xbr", "ybr"))
        corners = box_corners(x0, y0, x1, y1, _number(attributes, "rotation", 0))
        return Shape(label, fill_polygon(corners, height, width), RECTANGLE)
    if element == "ellipse":
        cx, cy, rx, ry = (_number(attributes, name) for name in ("cx", "cy", "rx", "ry"))
        return Shape(label, fill_ellipse((cx, cy), (rx, ry), height, width, _number(attributes, "rotation", 0)))
    if element == "mask":
        rows, columns = as_size(_whole(attributes, "height"), _whole(attributes, "width"))
        if rows > height or columns > width:
            raise EntryError(f"{columns}×{rows} pixels, larger than its image")
        runs = _runs(attributes.get("rle", ""))
        left, top = _whole(attributes, "left"), _whole(attributes, "top")
        return Shape(label, paste(unroll_rows(runs, rows, columns), left, top, height, width))
    points = check_points(_numbers(attributes.get("points", "")), "points")
    return Shape(label, fill_polygon(points, height, width)) if len(points) > 2 else Shape(label, None, SHORT)


def _numbers(text: str) -> list[float]:
    """The numbers of x,y;x,y;..."""
    try:
        return [float(word) for word in text.replace(";", ",").split(",")] if text.strip() else []
    except ValueError:
        raise EntryError(f"points is {show(text)}; need x,y;x,y;...") from None


def _runs(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise EntryError(f"rle is {show(text)}; need whole numbers") from None


def _number(attributes: Mapping[str, str], name: str, default: float | None = None) -> float:
    if name not in attributes and default is not None:
        return float(default)
    try:
        number = float(attributes.get(name, ""))
    except ValueError:
        raise EntryError(f"{name} is {show(attributes.get(name))}; need a number") from None
    return as_number(number, name)


def _whole(attributes: Mapping[str, str], name: str, default: float | None = None) -> int:
    number = _number(attributes, name, default)
    if not number.is_integer():
        raise EntryError(f"{name} is {number:g}; need a whole number")
    return int(number)
