"""YOLO segmentation labels: a text file for each image, a line for each object: class x1 y1 x2 y2 ...

Coordinates are shares of width and height. The names of the classes come from data.yaml (or classes.txt). An image without a label
file, or with an empty one, is all background, as Ultralytics has it. Lines with four numbers are boxes, which are no masks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from unet_trainer.config.safe_yaml import YamlError, parse_yaml
from unet_trainer.datasets.annotations import (
    SHORT,
    AnnotatedImage,
    Annotations,
    EntryError,
    Shape,
    as_name,
    check_points,
    choose_classes,
    read_text,
    relative,
    show,
)
from unet_trainer.datasets.image_lookup import ImageIndex, part_of_file
from unet_trainer.datasets.problems import first_few
from unet_trainer.datasets.rasterize import fill_polygon
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.console import counted

MAX_LABEL_BYTES = 64 * 2**20
MAX_NAMES_BYTES = 2**20
NAME_FILES = ("classes.txt", "obj.names", "classes.names", "labels.txt")
CLASS_NUMBER = re.compile(r"[0-9]{1,4}")
BOX_NUMBERS = 4
MAX_LOOKED_AT = 2**16  # characters of the first line
DECIMALS = 6  # of a pixel; shares of an image are not exact
FURTHEST = 2.0  # shares of the image beyond which coordinates are pixels


def looks_like_labels(path: Path) -> bool:
    """Whether the first line is a class number and coordinates."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            line = next((line for line in iter(lambda: file.readline(MAX_LOOKED_AT), "") if line.strip()), "")
    except (OSError, UnicodeDecodeError):
        return False
    words = line.split()[: -1 if len(line) == MAX_LOOKED_AT else None]  # without a number that is cut off
    return len(words) > BOX_NUMBERS and bool(CLASS_NUMBER.fullmatch(words[0])) and _as_numbers(words[1:]) is not None


def _as_numbers(words: Sequence[str]) -> list[float] | None:
    try:
        return [float(word) for word in words]
    except ValueError:
        return None


def find_labels(texts: Sequence[Path], index: ImageIndex, data_dir: Path) -> dict[Path, list[Path]]:
    """Image → its label file: the same name beside it, or in labels/ in place of images/; else all texts of that name."""
    by_stem: dict[str, list[Path]] = defaultdict(list)
    for path in texts:
        by_stem[path.stem].append(path)
    labels = {}
    for image in index.files:
        part = index.part_of(image)
        candidates = by_stem.get(image.stem, [])
        candidates = [path for path in candidates if part_of_file(path, data_dir, by_name=False) in ("", part)]
        usual = [path for path in candidates if path.parent in (image.parent, _labels_folder(image.parent))]
        if candidates:
            labels[image] = usual or candidates
    return labels


def _labels_folder(folder: Path) -> Path:
    """labels/ in place of the last images/ of a path."""
    parts = list(folder.parts)
    for position in reversed(range(len(parts))):
        if parts[position].lower() == "images":
            return Path(*parts[:position], "labels", *parts[position + 1 :])
    return folder


def read_yolo_seg(found: Mapping[Path, Sequence[Path]], index: ImageIndex, data_dir: Path) -> Annotations:
    """The annotations in the label files that find_labels has found; raises DataError."""
    for image, paths in found.items():
        if len(paths) > 1:
            raise DataError(f"mask_dir: {image} could have the labels {first_few(paths)}; set mask_dir to their folder")
    labels = {image: paths[0] for image, paths in found.items()}
    names, names_file, folders = _read_names(data_dir, sorted({path.parent for path in labels.values()}))
    parts = {image: _part_by_yaml(relative(image, data_dir), folders) or index.part_of(image) for image in index.files}
    labelled = {parts[image] for image in labels}  # images of a part without any label file are left out
    unlabelled = [image for image in index.files if image not in labels]
    used: set[int] = set()
    num_lines = num_boxes = 0
    images: list[AnnotatedImage] = []
    for image in index.files:
        if parts[image] not in labelled:
            continue
        path = labels.get(image)
        lines = [] if path is None else _read_lines(path)
        for number, words in lines:
            if not CLASS_NUMBER.fullmatch(words[0]) or (names and int(words[0]) >= len(names)):
                known = f"a number below {len(names)}, the number of names in {names_file}" if names else "a class number"
                raise DataError(f"{path}, line {number}: class {show(words[0])}; need {known}")
            used.add(int(words[0]))
            num_boxes += len(words) == BOX_NUMBERS + 1
        num_lines += len(lines)
        part = parts[image]
        where = relative(path or image, data_dir)
        read = partial(_read_shapes, path, names)
        images.append(AnnotatedImage(image, part, () if path is None else (path,), where, None, len(lines), read))
    files = f"{counted(len(labels), 'text file')} such as {min(labels.values()).name}"
    if num_lines and num_lines == num_boxes:
        raise DataError(
            f"{files} (YOLO) hold boxes only, {counted(num_boxes, 'line')} of class, x, y, width and height, and a box is no mask; "
            "export the segmentation format (YOLO-seg: class x1 y1 x2 y2 ...)"
        )
    declared = names or [_number_name(number) for number in sorted(used)]
    classes, notices = choose_classes(declared, {_name(number, names) for number in used}, "YOLO", files)
    order = f"in the order of {names_file}" if names else "by number"
    if not names:
        notices.append("no data.yaml or classes.txt with the names of the classes: they are numbers")
    background = [image for image in unlabelled if parts[image] in labelled]
    if background:
        names_of = first_few(image.name for image in background)
        notices.append(f"all background, as in YOLO: {counted(len(background), 'image')} without a label file, {names_of}")
    return Annotations("YOLO", files, classes, order, images, True, "the smaller object is on top", notices)


def _number_name(number: int) -> str:
    return f"class {number}"


def _name(number: int, names: Sequence[str]) -> str:
    return names[number] if names else _number_name(number)


def _read_names(data_dir: Path, label_folders: Sequence[Path]) -> tuple[list[str], str, dict[str, list[str]]]:
    """The names of the classes, the file that has them, and the folders of train, val and test in it; empty without one."""
    yamls = sorted(
        (path for pattern in ("*.yaml", "*.yml") for path in data_dir.glob(pattern)),
        key=lambda path: (path.stem not in ("data", "dataset"), path.name),
    )
    for path in yamls:
        try:
            content = parse_yaml(read_text(path, MAX_NAMES_BYTES))
        except YamlError as error:
            raise DataError(f"{path}: {error}") from None
        if isinstance(content, dict) and content.get("names"):
            folders = {key: _paths(content[key]) for key in ("train", "val", "test") if content.get(key)}
            return _checked_names(content["names"], path), path.name, folders
    for folder in dict.fromkeys([data_dir, *label_folders, *(folder.parent for folder in label_folders)]):
        for name in NAME_FILES:
            if (folder / name).is_file():
                lines = [line.strip() for line in read_text(folder / name, MAX_NAMES_BYTES).splitlines()]
                return _checked_names([line for line in lines if line], folder / name), name, {}
    return [], "", {}


def _checked_names(names: object, path: Path) -> list[str]:
    """The list of names; a dict has the numbers from 0 as its keys."""
    if isinstance(names, dict):
        wanted = [str(number) for number in range(len(names))]
        if set(names) != set(wanted):
            raise DataError(f"{path}: names has the keys {first_few(names)}; need the numbers from 0 to {len(names) - 1}")
        names = [names[number] for number in wanted]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: names is {show(names)}; need a list of names")
    try:
        checked = [as_name(str(name), f"name {number}") for number, name in enumerate(names)]
    except EntryError as error:
        raise DataError(f"{path}: {error}") from None
    return checked


def _paths(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(item) for item in values if isinstance(item, str)]


def _part_by_yaml(image: str, folders: Mapping[str, Sequence[str]]) -> str:
    """The part whose folder in data.yaml holds the image; "" if none does, or several."""
    found = {part for part, values in folders.items() if any(_lies_in(image, value) for value in values)}
    return found.pop() if len(found) == 1 else ""


def _lies_in(image: str, folder: str) -> bool:
    """Whether the folders of a path such as ../train/images stand in this order above the image."""
    wanted = [piece for piece in PurePosixPath(folder.replace("\\", "/")).parts if piece not in ("/", ".", "..")]
    above = list(Path(image).parts[:-1])
    return bool(wanted) and any(above[start : start + len(wanted)] == wanted for start in range(len(above)))


def _read_lines(path: Path) -> list[tuple[int, list[str]]]:
    """Number and words of each line that is not empty."""
    lines = enumerate(read_text(path, MAX_LABEL_BYTES).splitlines(), start=1)
    return [(number, words) for number, line in lines if (words := line.split())]


def _read_shapes(path: Path | None, names: Sequence[str], height: int, width: int) -> Iterator[Shape]:
    for number, words in [] if path is None else _read_lines(path):
        try:
            yield _read_shape(words, names, height, width)
        except DataError as error:
            raise EntryError(f"line {number}: {error}") from None


def _read_shape(words: Sequence[str], names: Sequence[str], height: int, width: int) -> Shape:
    label = _name(int(words[0]), names)
    if len(words) == BOX_NUMBERS + 1:
        raise EntryError("four numbers, a box, among polygons, and a box is no mask; draw its outline, or remove it")
    numbers = _as_numbers(words[1:])
    if numbers is None:
        raise EntryError(f"{show(' '.join(words))}; need a class and numbers")
    points = check_points(numbers, "the line")
    if len(points) < 3:
        return Shape(label, None, SHORT)
    if abs(points).max() > FURTHEST:
        raise EntryError(f"{show(float(abs(points).max()))} is no share of the image; need numbers from 0 to 1, not pixels")
    outline = (points * (width, height)).round(DECIMALS)  # 0.7 × 10 is 7, not 6.999…
    return Shape(label, fill_polygon(outline, height, width))
