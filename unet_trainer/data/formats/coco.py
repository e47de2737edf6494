"""COCO JSON, which most tools export: an object is polygons, which are joined, or run lengths."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from unet_trainer.data.formats.objects import AnnotatedFolder, AnnotatedImage, Annotations, Entry
from unet_trainer.data.formats.shapes import Patch, decompress_counts, fill_counts, fill_polygon, join
from unet_trainer.data.formats.values import NO_MASK, as_name, as_points, as_size, has_keys, inside, note
from unet_trainer.data.pairs import first_few
from unet_trainer.images.file_bytes import ReadError


def find(place: AnnotatedFolder) -> Annotations | None:
    annotations = Annotations("COCO", "by category id", "the smaller object is on top")
    files = [file for file in place.contents if has_keys(file[1], "images annotations categories")]
    files = [file for file in files if not has_keys(file[1], "segments_info")]  # panoptic
    return annotations if annotations.collect(place, files, _parse) else None


def _parse(annotations: Annotations, path: Path, content: Mapping[str, Any]) -> Sequence[AnnotatedImage]:
    groups = {str(category.get("supercategory")) for category in content["categories"] if isinstance(category, dict)}
    names: dict[Any, str] = {}  # by id
    for number, category in enumerate(content["categories"], start=1):
        with inside(f"category {number}"):
            names[_new(category["id"], names)] = as_name(category["name"], "name")
    by_image: dict[Any, list[Entry]] = defaultdict(list)
    for number, annotation in enumerate(content["annotations"], start=1):
        with inside(f"annotation {number}"):
            if (category_id := annotation["category_id"]) not in names:
                raise ReadError(f"category_id is {category_id!r:.60}; need one of {first_few(names)}")
            name, is_crowd = f"annotation {annotation.get('id', number)!r:.60}", annotation.get("iscrowd") in (1, True)
            entry = Entry(names[category_id], name, partial(_draw, annotation), is_crowd=is_crowd)
            by_image[annotation["image_id"]].append(entry)
    used = {entry.label for entries in by_image.values() for entry in entries}
    images: dict[Any, AnnotatedImage] = {}  # by id
    for number, image in enumerate(content["images"], start=1):
        with inside(f"image {number}"):
            size, entries = as_size(image.get("height"), image.get("width")), by_image.pop(image["id"], [])
            images[_new(image["id"], images)] = AnnotatedImage(str(image["file_name"]), entries, size)
    orphans = [entry.name for entries in by_image.values() for entry in entries]
    annotations.notices += note("annotation", orphans, f"in {path.name} of images that it does not list, left out")
    # Roboflow lists the name of the dataset as category 0, a group of the others without objects of its own.
    in_order = sorted(names.items(), key=lambda item: (isinstance(item[0], str), item[0]))
    annotations.declared += [name for key, name in in_order if key != 0 or name in used or name not in groups]
    return [*images.values()]


def _new(key: Any, by_id: Mapping[Any, Any]) -> Any:
    if key in by_id:
        raise ReadError(f"id {key!r:.60} is used twice")
    return key


def _draw(annotation: Mapping[str, Any], height: int, width: int) -> Patch:
    if not (segmentation := annotation.get("segmentation")):
        raise ReadError(NO_MASK)
    if isinstance(segmentation, dict):
        size, counts = segmentation["size"], segmentation["counts"]
        if size != [height, width]:
            need = f"need [{height}, {width}], height and width"
            raise ReadError(f"its run lengths are for the size {size!r:.60}; {need}")
        return fill_counts(decompress_counts(counts) if isinstance(counts, str) else counts, height, width)
    polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]  # without the list around it
    return join(fill_polygon(as_points(polygon), height, width) for polygon in polygons)
