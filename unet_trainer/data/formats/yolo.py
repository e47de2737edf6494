"""YOLO segmentation: a text file for each image, a line for each object: class x1 y1 x2 y2 ..., in shares of width and
height. The names of the classes come from data.yaml (or classes.txt). An image without a label file, or with an empty
one, is all background, as Ultralytics has it."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.data.formats.objects import AnnotatedFolder, AnnotatedImage, Annotations, Entry
from unet_trainer.data.formats.shapes import Patch, fill_polygon
from unet_trainer.data.formats.values import NO_MASK, NUM_LOOKED_AT, as_name, as_points, inside, note, path_pieces
from unet_trainer.data.pairs import Part, first_few, path_in
from unet_trainer.images.file_bytes import ReadError, file_stamp
from unet_trainer.system import input_files

CLASS_NUMBER = re.compile(r"[0-9]{1,4}")
NAME_FILES = ("classes.txt", "obj.names", "classes.names", "labels.txt")
MAX_LABEL_BYTES = 2**26
BOX_NUMBERS = 4
FURTHEST = 2.0  # shares of the image beyond which coordinates are pixels


def find(place: AnnotatedFolder) -> Annotations | None:
    annotations = Annotations("YOLO", "by number", "the smaller object is on top")
    files = [file for file in place.contents if file[0].suffix.lower() == ".txt" and place.knows(file[0].stem)]
    with_text = (path for path, _ in files if (stamp := file_stamp(path)) is not None and stamp[0] > 0)
    if not any(map(_looks_like_labels, islice(with_text, NUM_LOOKED_AT))):
        return None
    names = _read_names(place.data_dir, sorted({path.parent for path, _ in files}))
    annotations.collect(place, files, partial(_parse, names), one_each="text file")

    def part_of(path: Path) -> Part | None:
        return names.part_of(path_in(place.data_dir, path))

    images = [image._replace(part=part_of(image.image) or image.part) for image in annotations.images]
    labelled, parts = ({getattr(image, name) for image in images} for name in ("image", "part"))
    # Images without a label file are all background; those of a part without any label file are left out.
    for path in place.images:
        if path not in labelled and (part := part_of(path) or place.part_of(path)) in parts:
            images.append(AnnotatedImage(path.name, [], None, part, path, path, path_in(place.data_dir, path)))
    listed = [image for image in images if part_of(image.image)] if len(names.parts) > 1 else []
    annotations.images = listed or images
    others = (image.image.name for image in images if listed and not part_of(image.image))
    annotations.notices += note("image", others, f"in no list of {names.file} left out")
    if names.names:
        annotations.class_order = f"in the order of {names.file}"
    else:
        annotations.notices.append("no data.yaml or classes.txt with the names of the classes: they are numbers")
    return annotations


def _looks_like_labels(path: Path) -> bool:
    """Whether the first line is a class number and coordinates."""
    try:
        with input_files.open_file(path) as file:
            head = file.read(2**16).decode("utf-8-sig", "ignore").lstrip()
        words = head.partition("\n")[0].split()[:100]
        return len(words) > BOX_NUMBERS and bool(CLASS_NUMBER.fullmatch(words[0])) and bool([*map(float, words)])
    except (OSError, ValueError):
        return False


class Names(NamedTuple):
    """The names of the classes and the file that has them; and what train, val and test are in it: folders, below "",
    and the lines of the lists that it names, below the name of the image."""

    names: Sequence[str] = ()
    file: str = ""
    parts: Mapping[str, Sequence[tuple[Part, str]]] = {}

    def part_of(self, image: str) -> Part | None:
        """The part that lists the image, with more or fewer folders before it: val before test, and what either lists
        must not train. Or the one of whose folders, such as ../train/images, one stands in this order above it; None if
        none does, or those of several."""
        above, path = f"/{image.rpartition('/')[0]}/", f"/{image}"
        lines = self.parts.get(image.rpartition("/")[2], ())
        if listed := {part for part, line in lines if path.endswith(f"/{line}") or f"/{line}".endswith(path)}:
            return max(listed, key=("train", "test", "val").index)
        parts = {part for part, folder in self.parts.get("", ()) if folder and f"/{folder}/" in above}
        return parts.pop() if len(parts) == 1 else None


def _read_names(data_dir: Path, label_folders: Sequence[Path]) -> Names:
    """From the YAML file in data_dir, or from a list of names there or beside the labels."""
    yamls = [path for pattern in ("*.yaml", "*.yml") for path in data_dir.glob(pattern)]
    yamls.sort(key=lambda path: (path.stem not in ("data", "dataset"), path.name))
    folders = dict.fromkeys([data_dir, *label_folders, *(folder.parent for folder in label_folders)])
    lists = [folder / name for folder in folders for name in NAME_FILES if (folder / name).is_file()]
    for path in (*yamls, *lists):
        with inside(path):
            lines = _read_lines(path)
            content = {"names": [*filter(str.strip, lines)]} if path in lists else parse_yaml("\n".join(lines))
            if isinstance(content, dict) and content.get("names"):
                return Names(_as_list(content["names"]), path.name, _find_parts(content, data_dir))
    return Names()


def _find_parts(content: Mapping[str, Any], data_dir: Path) -> Mapping[str, Sequence[tuple[Part, str]]]:
    parts: dict[str, list[tuple[Part, str]]] = defaultdict(list)
    for part, value in ((part, content.get(part)) for part in get_args(Part)):
        items = value if isinstance(value, list) else [value]
        for name in ("/".join(path_pieces(item)) for item in items if isinstance(item, str)):
            parts[""].append((part, name))
            if name.endswith(".txt") and (data_dir / name).is_file():  # the images of the part, a line each
                for pieces in filter(None, (path_pieces(line.strip()) for line in _read_lines(data_dir / name))):
                    parts[pieces[-1]].append((part, "/".join(pieces)))
    return parts


def _as_list(names: Any) -> list[str]:
    if isinstance(names, dict):  # with the numbers from 0 as its keys
        if set(names) != {str(number) for number in range(len(names))}:
            raise ReadError(f"names has the keys {first_few(names)}; need the numbers from 0 to {len(names) - 1}")
        names = [names[str(number)] for number in range(len(names))]
    if not isinstance(names, list):
        raise ReadError(f"names is {names!r:.60}; need a list")
    return [as_name(name) for name in names]


def _read_lines(path: Path) -> list[str]:
    return input_files.read_text(path, MAX_LABEL_BYTES, "utf-8-sig").splitlines()


def _parse(names: Names, annotations: Annotations, path: Path, _: None) -> Sequence[AnnotatedImage]:
    entries, used = [], set()
    for number, line in enumerate(_read_lines(path), start=1):
        if not (words := line.split()):
            continue
        if not CLASS_NUMBER.fullmatch(words[0]) or (names.names and int(words[0]) >= len(names.names)):
            known = f"a number below {len(names.names)}, the number of names in {names.file}"
            raise ReadError(f"line {number}: class {words[0]!r:.60}; need {known if names.names else 'a class number'}")
        used.add(int(words[0]))
        label = names.names[int(words[0])] if names.names else f"class {words[0]}"
        entries.append(Entry(label, f"line {number}", partial(_draw, words[1:])))
    annotations.declared += names.names or [f"class {number}" for number in sorted(used)]
    # images/train/a.jpg for labels/train/a.txt, or beside it
    *folders, name = path.with_suffix("").parts
    below = folders[len(folders) - [*reversed(folders), "labels"].index("labels") :] if "labels" in folders else []
    return [AnnotatedImage("/".join([*below, name]), entries)]


def _draw(words: Sequence[str], height: int, width: int) -> Patch:
    if len(words) == BOX_NUMBERS:
        raise ReadError(NO_MASK)
    points = as_points(words)
    if points.size and abs(points).max() > FURTHEST:
        raise ReadError(f"{abs(points).max():g} is no share of the image; need numbers from 0 to 1, not pixels")
    return fill_polygon((points * (width, height)).round(6), height, width)  # 0.7 × 10 is 7, not 6.999…
