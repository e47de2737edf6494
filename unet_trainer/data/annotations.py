"""Annotations instead of masks: finds the files of labelling tools in a folder, and draws them as masks of class ids,
once. 0 is the background, 1 the first class. A format that is not read is named for what it is, with what to do."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from unet_trainer.config.schema import Config
from unet_trainer.data.csv_tables import read_header
from unet_trainer.data.formats import coco, labelme, rle_table, yolo
from unet_trainer.data.formats.objects import AnnotatedFolder, Annotations, File, draw_masks
from unet_trainer.data.formats.values import MAX_FILE_BYTES, NUM_LOOKED_AT, has_keys, inside
from unet_trainer.data.listing import Listing, describe_results, list_files, walk
from unet_trainer.data.pairs import Pair, Question
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, describe_file
from unet_trainer.images.row_writers import is_result
from unet_trainer.system import input_files
from unet_trainer.system.console import counted

# Name → what reads the annotations of a place, None if there are none of this format; raises DataError.
FORMATS = {"COCO": coco.find, "LabelMe": labelme.find, "YOLO": yolo.find, "run lengths": rle_table.find}
EXTENSIONS = frozenset([".json", ".xml", ".txt", ".csv", ".jsonl"])
# COCO's own files beside instances_
COCO_TASKS = ("captions_", "person_keypoints_", "image_info_", "panoptic_", "stuff_")

EXPORT = "export COCO, with polygons or masks"
PAIRS = "set split_file to a CSV with the columns image and mask, or give the pairs from Python (train_data=)"
HUGGING_FACE = f"is a table of Hugging Face, which is not read; {PAIRS}"
OTHER_TOOL = f"which is not read; {EXPORT}, or PNG masks"
VGG = f"is a project of the VGG Image Annotator, {OTHER_TOOL}"
# What a JSON document is, and what to do → keys of it, or of the first one in a list or dict of it. The first counts.
OTHER_JSON = {
    "is COCO panoptic, whose masks are in its PNG files; use instances, or convert these to class ids": "segments_info",
    f"is Supervisely's own JSON, {OTHER_TOOL}": "objects size|title shape",
    VGG: "_via_img_metadata|filename regions",
    "is COCO without categories (captions?), its classes are not known; use the instances file": "annotations images",
    f"is Label Studio's own JSON, {OTHER_TOOL}": "data annotations|annotator annotation_id",
}
CVAT = f"is CVAT's XML, {OTHER_TOOL} (CVAT exports COCO 1.0 and VOC masks)"
VOC = "is Pascal VOC's XML, with boxes, and a box is no mask; its masks are in SegmentationClass, if any"


class UnknownAnnotations(Question):
    """There are annotations, none of them of a format that is read."""


def find_annotations(place: Place, config: Config) -> list[Pair] | None:
    """The pairs of images and drawn masks; None without annotations in data_dir or mask_dir. Raises DataError."""
    data_dir, listing = place.data_dir, place.listing
    folder, image_root = data_dir / (config.mask_dir or ""), data_dir / (config.image_dir or "")
    texts = [folder] if folder.is_file() else sorted(walk(folder, listing=listing, endings=(*EXTENSIONS,)))
    if not texts or not image_root.is_dir():
        return None
    images = list_files(image_root, listing=listing)
    results, polygons = [path for path in images if is_result(path)], [path for path in texts if is_result(path)]
    results += polygons if len(polygons) < len(texts) else []  # else training is meant to use them
    left_out = {*results}
    images = [path for path in images if path not in left_out]
    has_instances = any(path.name.startswith("instances_") for path in texts)
    skipped = (*(COCO_TASKS if has_instances else ()), "sample_submission")  # an example of an answer, of Kaggle
    contents: list[File] = []
    broken = ""
    for path in (path for path in texts if path not in left_out and not path.name.startswith(skipped)):
        try:
            with inside(path):
                contents.append((path, _read(path)))
        except DataError as error:
            broken = broken or str(error)
    folder_place = AnnotatedFolder(data_dir, image_root, images, contents, config.class_names or ())
    tools: dict[str, Annotations | DataError] = {}
    for name, find in FORMATS.items():
        try:
            if (annotations := find(folder_place)) is not None:
                tools[name] = annotations
        except DataError as error:  # raised below, if there is only this format
            tools[name] = error
    if len(tools) > 1:
        several = f"annotations of {' and '.join(tools)} in {data_dir}"
        raise DataError(f"mask_dir: {several}; set mask_dir to the folder or file of one")
    for path, content in () if tools else contents:
        if description := _describe(path, content, folder_place):
            raise UnknownAnnotations(f"{path} {description}")
    if broken:
        raise DataError(broken) if tools else UnknownAnnotations(broken)
    for result in tools.values():
        if isinstance(result, DataError):
            raise result
        pairs = place.take(draw_masks(folder_place, result, place.converter))
        place.notices += [describe_results(results)] if results else []
        return pairs
    return None


def _read(path: Path) -> Any:
    """The document of JSON, the header of a table, or the start of XML."""
    suffix = path.suffix.lower()
    if suffix == ".json":
        content = input_files.read_json(path, MAX_FILE_BYTES)
        if isinstance(content, dict):
            content.pop("imageData", None)  # LabelMe's picture, megabytes of text
        return content
    if suffix == ".xml":
        with input_files.open_file(path) as file:
            return file.read(2**12).decode("utf-8", "replace")
    return read_header(path) if suffix == ".csv" else None


def _describe(path: Path, content: Any, place: AnnotatedFolder) -> str:
    """What a file of another tool is, and what to do; "" if it is no annotation."""
    suffix, what = path.suffix.lower(), ""
    if path.name in ("metadata.csv", "metadata.jsonl"):
        return HUGGING_FACE
    if suffix == ".json":
        what = next((what for what, keys in OTHER_JSON.items() if has_keys(content, keys)), "")
    elif suffix == ".xml" and (root := re.search(r"<(annotations?)\b", content)):
        what = CVAT if root[1] == "annotations" else VOC
    if not what and suffix in (".json", ".xml") and place.knows(path.stem):
        what = f"has the name of an image, and is {suffix[1:].upper()} of no tool that is read"
        what = f"{what}; if it is the annotation, {EXPORT}; else add masks"
    return what


def describe_other_files(folder: Path, listing: Listing | None = None) -> list[str]:
    """What the files are that could hold images and are not read, a line for each of the most frequent kinds."""
    by_extension: dict[str, list[Path]] = defaultdict(list)
    for path in walk(folder, listing=listing):
        if path.suffix.lower() not in IMAGE_EXTENSIONS | EXTENSIONS:
            by_extension[path.suffix.lower()].append(path)
    lines = []
    for paths in sorted(by_extension.values(), key=len, reverse=True):
        if what := next(filter(None, map(describe_file, paths[:NUM_LOOKED_AT])), None):
            lines.append(f"{counted(len(paths), 'file')} such as {paths[0].relative_to(folder)}: {what}")
    return lines[:3]
