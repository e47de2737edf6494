"""COCO JSON, which most tools export: an object is polygons, which are joined, or run lengths."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import inside
from unet_trainer.data.formats.objects import NO_MASK, SMALLER_ON_TOP, Annotations, Shape, as_name
from unet_trainer.data.formats.shapes import Canvas, as_points, fill_counts, fill_polygon
from unet_trainer.data.pairs import Pair, first_few
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import ReadError

PANOPTIC = "it is of COCO panoptic, with masks in PNG files; use instances, or convert these to class ids"


def find(place: Place, config: Config) -> list[Pair] | None:
    annotations = Annotations(place, config, "COCO", "by category id", SMALLER_ON_TOP)
    return annotations.draw() if annotations.read(_parse) else None


def _parse(annotations: Annotations, path: Path, content: Mapping[str, Any]) -> None:
    names: dict[Any, str] = {}  # by id
    for number, category in enumerate(content["categories"], start=1):
        with inside(f"category {number}"):
            names[_new(category["id"], names)] = as_name(category["name"])
    shapes: dict[Any, list[Shape]] = defaultdict(list)  # by image
    for number, annotation in enumerate(content["annotations"], start=1):
        with inside(f"annotation {number}"):
            if "segments_info" in annotation:
                raise ReadError(PANOPTIC)
            if (category_id := annotation["category_id"]) not in names:
                raise ReadError(f"category_id is {category_id!r:.60}; need one of {first_few(names)}")
            name, is_crowd = f"annotation {annotation.get('id', number)!r:.60}", annotation.get("iscrowd") in (1, True)
            shapes[annotation["image_id"]].append(Shape(names[category_id], name, partial(_draw, annotation), is_crowd))
    # Roboflow lists the name of the dataset as category 0, a group of the others without objects of its own.
    used = {shape.label for its in shapes.values() for shape in its}
    groups = {str(category.get("supercategory")) for category in content["categories"]}
    in_order = sorted(names.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    annotations.classes += [name for key, name in in_order if key != 0 or name in used or name not in groups]
    seen: dict[Any, int] = {}
    for number, image in enumerate(content["images"], start=1):
        with inside(f"image {number}"):
            seen[_new(image["id"], seen)] = number
            size = image.get("height"), image.get("width")
            annotations.add(path, str(image["file_name"]), shapes.pop(image["id"], []), size)
    orphans = [shape.name for its in shapes.values() for shape in its]
    annotations.note("annotation", orphans, f"in {path.name} of images that it does not list, left out")


def _new(key: Any, known: Mapping[Any, Any]) -> Any:
    if key in known:
        raise ReadError(f"id {key!r:.60} is used twice")
    return key


def _draw(annotation: Mapping[str, Any], canvas: Canvas) -> None:
    if not (segmentation := annotation.get("segmentation")):
        raise ReadError(NO_MASK)
    if not isinstance(segmentation, dict):  # one polygon may be without the list around it
        for polygon in segmentation if isinstance(segmentation[0], list) else [segmentation]:
            fill_polygon(canvas, as_points(polygon))
    elif segmentation["size"] == [*canvas.pixels.shape]:
        fill_counts(canvas, segmentation["counts"])
    else:
        need = f"need {[*canvas.pixels.shape]}, height and width"
        raise ReadError(f"its run lengths are for the size {segmentation['size']!r:.60}; {need}")
