"""COCO JSON, which most tools export: an object is polygons, which are joined, or run lengths."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.data.annotations import inside
from unet_trainer.data.formats.objects import NO_MASK, SMALLER_ON_TOP, Annotations, Shape, as_name
from unet_trainer.data.formats.shapes import as_points, fill_counts, fill_polygon
from unet_trainer.data.pairs import Pair, first_few
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import ReadError
from unet_trainer.images.image_decoding import Pixels

PANOPTIC = "it is of COCO panoptic, with masks in PNG files; use instances, or convert these to class ids"


def find(place: Place, config: Config) -> list[Pair] | None:
    annotations = Annotations(place, config, "COCO", "by category id", SMALLER_ON_TOP)
    return annotations.draw() if annotations.read(_parse) else None


def _parse(annotations: Annotations, path: Path, content: Mapping[str, Any]) -> None:
    names: dict[Any, str] = {}  # by id
    for number, category in enumerate(content["categories"], start=1):
        with inside(f"category {number}"):
            if category["id"] in names:
                raise ReadError(f"id {category['id']!r:.60} is used twice")
            names[category["id"]] = as_name(category["name"])
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
    seen = set[Any]()
    for number, image in enumerate(content["images"], start=1):
        with inside(f"image {number}"):
            if image["id"] in seen:
                raise ReadError(f"id {image['id']!r:.60} is used twice")
            seen.add(image["id"])
            size = image.get("height"), image.get("width")
            annotations.add(path, str(image["file_name"]), shapes.pop(image["id"], []), size)
    orphans = [shape.name for its in shapes.values() for shape in its]
    annotations.note("annotation", orphans, f"in {path.name} of images that it does not list, left out")


def _draw(annotation: Mapping[str, Any], canvas: Pixels) -> None:
    if not (segmentation := annotation.get("segmentation")):
        raise ReadError(NO_MASK)
    if not isinstance(segmentation, dict):  # one polygon may be without the list around it
        for polygon in segmentation if isinstance(segmentation[0], list) else [segmentation]:
            fill_polygon(canvas, as_points(polygon))
        return
    if (size := segmentation["size"]) != [*canvas.shape]:
        raise ReadError(f"its run lengths are for the size {size!r:.60}; need {[*canvas.shape]}, height and width")
    fill_counts(canvas, segmentation["counts"])
