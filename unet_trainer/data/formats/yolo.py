"""YOLO segmentation: a text file for each image, a line for each object: class x1 y1 x2 y2 ..., in shares of width and
height. The names of the classes come from data.yaml (or classes.txt). An image without a label file, or with an empty
one, is all background, as Ultralytics has it."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import inside, path_pieces
from unet_trainer.data.formats.objects import NO_MASK, SMALLER_ON_TOP, AnnotatedImage, Annotations, Shape, as_name
from unet_trainer.data.formats.shapes import as_points, fill_polygon
from unet_trainer.data.pairs import Pair, Part, path_in
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.system import input_files

NAME_FILES = ("classes.txt", "obj.names", "classes.names", "labels.txt")
MAX_LABEL_BYTES = 2**26
BOX_NUMBERS = 4
FURTHEST = 2.0  # shares of the image beyond which coordinates are pixels


def find(place: Place, config: Config) -> list[Pair] | None:
    annotations = Annotations(place, config, "YOLO", "by number", SMALLER_ON_TOP, "text file")
    folder, images = annotations.folder, annotations.images
    if not (files := folder.files_of("YOLO")):
        return None
    data = DataYaml(place.data_dir, sorted({path.parent for path, _ in files}))
    annotations.read(partial(_parse, data))
    given = {path: images.get(path) or AnnotatedImage(path, [], folder.part_of(path), path) for path in folder.images}
    given = {path: image._replace(part=data.part_of(path) or image.part) for path, image in given.items()}
    # Images without a label file are all background; those of a part without any label file are left out.
    parts = {given[path].part for path in images}
    annotations.images = {path: image for path, image in given.items() if image.part in parts}
    if data.names:
        annotations.class_order = f"in the order of {data.file}"
    else:
        annotations.notices.append("no data.yaml or classes.txt with the names of the classes: they are numbers")
    return annotations.draw()


class DataYaml:
    """The names of the classes, and the folders of train, val and test."""

    def __init__(self, data_dir: Path, label_folders: Sequence[Path]) -> None:
        self.data_dir, self.file, self.names = data_dir, "", list[str]()
        self.folders: list[tuple[Part, str]] = []
        yamls = sorted(data_dir.glob("*.y*ml"), key=lambda path: (path.stem not in ("data", "dataset"), path.name))
        folders = dict.fromkeys([data_dir, *label_folders, *(folder.parent for folder in label_folders)])
        lists = [folder / name for folder in folders for name in NAME_FILES if (folder / name).is_file()]
        for path in (*yamls, *lists):
            with inside(path):
                lines = _read_lines(path)
                content = {"names": [*filter(str.strip, lines)]} if path in lists else parse_yaml("\n".join(lines))
                if isinstance(content, dict) and content.get("names"):
                    self.file, self.names = path.name, _as_list(content["names"])
                    self.folders = [pair for part in get_args(Part) for pair in _folders(part, content.get(part))]
                    return

    def part_of(self, image: Path) -> Part | None:
        """The one of whose folders, such as ../train/images, one stands in this order above the image."""
        path = f"/{path_in(self.data_dir, image)}"
        parts = {part for part, folder in self.folders if folder and f"/{folder}/" in path}
        return parts.pop() if len(parts) == 1 else None


def _folders(part: Part, value: Any) -> Iterator[tuple[Part, str]]:
    for item in value if isinstance(value, list) else [value]:
        name = "/".join(path_pieces(item)) if isinstance(item, str) else ""
        if name.endswith(".txt"):
            fix = "name the folder of its images, or those of every part in a CSV as split_file"
            raise ReadError(f"{part} is a list of files, {name}, which is not read; {fix}")
        yield part, name


def _as_list(names: Any) -> list[str]:
    if isinstance(names, dict):  # with the numbers from 0 as its keys
        names = [names[str(number)] for number in range(len(names))]
    if not isinstance(names, list):
        raise ReadError(f"names is {names!r:.60}; need a list")
    return [as_name(name) for name in names]


def _read_lines(path: Path) -> list[str]:
    return input_files.read_text(path, MAX_LABEL_BYTES, "utf-8-sig").splitlines()


def _parse(data: DataYaml, annotations: Annotations, path: Path, _: None) -> None:
    names, shapes, used = data.names, list[Shape](), set[int]()
    for number, words in enumerate(map(str.split, _read_lines(path)), start=1):
        if words:
            if not re.fullmatch("[0-9]{1,4}", words[0]) or (names and int(words[0]) >= len(names)):
                need = f" below {len(names)}, the number of names in {data.file}" if names else ""
                raise ReadError(f"line {number}: class {words[0]!r:.60}; need a class number{need}")
            used.add(int(words[0]))
            label = names[int(words[0])] if names else f"class {words[0]}"
            shapes.append(Shape(label, f"line {number}", partial(_draw, words[1:])))
    annotations.classes += names or [f"class {number}" for number in sorted(used)]
    # images/train/a.jpg for labels/train/a.txt, or beside it
    *folders, name = path.with_suffix("").parts
    below = folders[len(folders) - [*reversed(folders), "labels"].index("labels") :] if "labels" in folders else []
    annotations.add(path, "/".join([*below, name]), shapes)


def _draw(words: Sequence[str], canvas: Pixels) -> None:
    if len(words) == BOX_NUMBERS:
        raise ReadError(NO_MASK)
    points = as_points(words)
    if points.size and abs(points).max() > FURTHEST:
        raise ReadError(f"{abs(points).max():g} is no share of the image; need numbers from 0 to 1, not pixels")
    fill_polygon(canvas, (points * canvas.shape[::-1]).round(6))  # 0.7 × 10 is 7, not 6.999…
