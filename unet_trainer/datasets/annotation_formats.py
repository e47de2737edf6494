"""Annotations that are no masks: finds the files of labelling tools in a folder, knows their formats, and has them drawn as masks.

A format that is not read is named for what it is, with what to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from unet_trainer.config.schema import Config
from unet_trainer.datasets import annotation_readers as readers
from unet_trainer.datasets.annotations import (
    AnnotatedImage,
    Annotations,
    EntryError,
    ImageIndex,
    Shape,
    draw_masks,
    part_of_file,
)
from unet_trainer.datasets.converted import Converter
from unet_trainer.datasets.file_tree import describe_results, list_files, resolved, walk
from unet_trainer.datasets.pairs import FoundPairs, path_in
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.file_bytes import DataError, file_stamp
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.images.image_headers import describe_file
from unet_trainer.images.row_writers import is_result
from unet_trainer.system.console import Console, counted

EXTENSIONS = frozenset([".json", ".xml", ".txt", ".ndjson", ".jsonl"])
COCO_TASKS = ("captions_", "person_keypoints_", "image_info_", "panoptic_", "stuff_")  # COCO's own files beside instances_
NUM_LOOKED_AT = 20  # files without an extension, and texts that may be labels
NUM_NAMED = 10  # files that cannot be read


class Format(NamedTuple):
    """A format whose files list images. One file for each image, or one for many."""

    parse: Callable[[Path, Any], readers.Parsed]
    read_shape: Callable[[Any, int, int], Shape]
    is_one_each: bool
    class_order: str
    overlap_rule: str


FORMATS = {
    "COCO": Format(readers.parse_coco, readers.coco_shape, False, "by category id", "the smaller object is on top"),
    "LabelMe": Format(readers.parse_labelme, readers.labelme_shape, True, "in alphabetical order", "the later shape is on top"),
    "Supervisely": Format(
        readers.parse_supervisely, readers.supervisely_shape, True, "in the order of meta.json", "the later object is on top"
    ),
    "CVAT": Format(
        readers.parse_cvat,
        readers.cvat_shape,
        False,
        "in the order of the labels",
        "the higher z_order, then the later shape, is on top",
    ),
}

EXPORT = "export COCO, with polygons or masks"
# Keys of a JSON document, or of the first one in a list or dict of them → what it is, and what to do. The first that fits counts.
OTHER_JSON: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(keys.split()), what)
    for keys, what in (
        ("_via_img_metadata", f"a project of the VGG Image Annotator, which is not read; {EXPORT} (Annotation, Export)"),
        ("filename regions", f"a project of the VGG Image Annotator, which is not read; {EXPORT} (Annotation, Export)"),
        ("segments_info", "COCO panoptic, whose masks are in its PNG files; use COCO's instances, or convert these to class ids"),
        ("annotations images", "COCO without categories (captions?), so that its classes are not known; use the instances file"),
        ("image_id category_id", "COCO results (predictions), without the images; use the annotation file"),
        ("data annotations", "Label Studio's own JSON, which is not read; export COCO, YOLO with polygons, or PNG masks"),
        ("data completions", "Label Studio's own JSON, which is not read; export COCO, YOLO with polygons, or PNG masks"),
        ("data_row projects", f"Labelbox's own JSON, which is not read; {EXPORT}"),
        ("items categories", f"Datumaro's own JSON, which is not read; {EXPORT} (datum convert -f coco_instances)"),
        ("dataset image annotations", f"Darwin JSON of V7, which is not read; {EXPORT}"),
        ("item annotations", f"Darwin JSON of V7, which is not read; {EXPORT}"),
        ("image annotations", f"CreateML's JSON with boxes, and a box is no mask; {EXPORT}"),
        ("metadata instances", f"SuperAnnotate's own JSON, which is not read; {EXPORT}"),
        ("type features", "GeoJSON, in coordinates of a map; burn it into masks first (gdal_rasterize)"),
        ("imgHeight imgWidth objects", "Cityscapes' polygons; use the PNG masks (gtFine_labelIds) that lie beside them"),
    )
)  # fmt: skip


class UnknownAnnotations(DataError):
    """There are annotations, none of them of a format that is read."""


def find_annotations(config: Config, data_dir: Path, console: Console | None = None) -> FoundPairs | None:
    """The pairs of images and masks drawn from annotations; None if there are no annotations in data_dir. Raises DataError.

    mask_dir may be the folder of the annotations, or one file.
    """
    place = data_dir / (config.mask_dir or "")
    image_root = data_dir / (config.image_dir or "")
    checkpoint_dir = Path(config.checkpoint_dir)
    skipped = checkpoint_dir.resolve()
    texts = [here / name for here, names in walk(place) for name in names if Path(name).suffix.lower() in EXTENSIONS]
    if not place.resolve().is_relative_to(skipped):
        texts = [path for path in texts if not resolved(path).is_relative_to(skipped)]
    texts = [place] if place.is_file() else sorted(texts)
    if not texts or not image_root.is_dir():
        return None
    images = [path for path in list_files(image_root) if not resolved(path).is_relative_to(skipped)]
    results = [path for path in images if is_result(path)]
    polygons = [path for path in texts if is_result(path)]
    if len(polygons) < len(texts):  # else training is meant to use them
        results += polygons
    left_out = set(results)
    index = ImageIndex(image_root, [path for path in images if path not in left_out])
    annotations = _read([path for path in texts if path not in left_out], index, data_dir)
    if annotations is None:
        return None
    drawn = draw_masks(annotations, index, Converter(data_dir, checkpoint_dir, console), config.class_names)
    return replace(drawn, notices=(*drawn.notices, describe_results(results))) if results else drawn


def _read(texts: Sequence[Path], index: ImageIndex, data_dir: Path) -> Annotations | None:
    """The annotations in the one format that there is; raises DataError for several, and for those that are not read."""
    if any(path.name.startswith("instances_") for path in texts):  # COCO's captions and so on are not opened
        texts = [path for path in texts if not path.name.startswith(COCO_TASKS)]
    files: dict[str, list[tuple[Path, Any]]] = defaultdict(list)
    unknown: list[str] = []
    broken: list[str] = []
    for path in texts:
        try:
            kind, content = _kind_of(path)
        except UnknownAnnotations as error:
            unknown.append(str(error))
        except DataError as error:
            broken.append(str(error))
        else:
            files[kind].append((path, content))
    labels = readers.find_labels([path for path, _ in files["text"]], index, data_dir)
    with_text = (path for paths in labels.values() for path in paths if (stamp := file_stamp(path)) is not None and stamp[0] > 0)
    has_labels = any(readers.looks_like_labels(path) for path in islice(with_text, NUM_LOOKED_AT))
    kinds = [*(kind for kind in FORMATS if files[kind]), *(["YOLO"] if has_labels else [])]
    if len(kinds) > 1:
        raise DataError(f"mask_dir: annotations of {' and '.join(kinds)} in {data_dir}; set mask_dir to the folder or file of one")
    cannot = f"{counted(len(broken), 'annotation file')} that cannot be read:\n  " + "\n  ".join(broken[:NUM_NAMED])
    if not kinds:
        if unknown or broken:
            raise UnknownAnnotations(unknown[0] if unknown else cannot)
        return None
    if broken:
        raise DataError(cannot)
    if not index.files:
        text = f"{kinds[0]} annotations, but no image in {index.root}; set image_dir to the folder of the images"
        raise DataError("\n  ".join([text, *describe_other_files(index.root)]))
    if has_labels:
        return readers.read_yolo(labels, index, data_dir)
    metas = files["meta"] if kinds == ["Supervisely"] else []
    return _read_files(kinds[0], [*metas, *files[kinds[0]]], index, data_dir)


def _kind_of(path: Path) -> tuple[str, Any]:
    """The format of a file, and its content if it is JSON; raises DataError, UnknownAnnotations for a format that is not read."""
    extension = path.suffix.lower()
    if extension == ".txt":
        return "text", None
    if extension == ".xml":
        root = readers.read_xml(path)
        if root.tag == "annotation":
            what = "Pascal VOC's XML, with boxes, and a box is no mask; its masks are in SegmentationClass, if it has any"
            raise UnknownAnnotations(f"{path} is {what}")
        return "CVAT" if root.tag == "annotations" else "", root
    if extension != ".json":
        what = "holds a JSON document in each line, as Labelbox exports, which is not read"
        raise UnknownAnnotations(f"{path} {what}; {EXPORT}")
    content = readers.read_json(path)
    kind = kind_of_json(content)
    what = "" if kind else describe_json(content)
    if what:
        raise UnknownAnnotations(f"{path} is {what}")
    return kind, content


def kind_of_json(content: Any) -> str:
    """COCO, LabelMe, Supervisely, meta (of Supervisely), or "" for others."""
    if not isinstance(content, dict):
        return ""
    content.pop("imageData", None)  # LabelMe's picture, megabytes of text
    if all(isinstance(content.get(key), list) for key in ("images", "annotations", "categories")):
        is_panoptic = any(isinstance(item, dict) and "segments_info" in item for item in content["annotations"][:1])
        return "" if is_panoptic else "COCO"
    if isinstance(content.get("shapes"), list) and "imagePath" in content:
        return "LabelMe"
    if isinstance(content.get("objects"), list) and isinstance(content.get("size"), dict):
        return "Supervisely"
    classes = content.get("classes")
    is_meta = isinstance(classes, list) and all(isinstance(item, dict) and {"title", "shape"} <= set(item) for item in classes)
    return "meta" if is_meta else ""


def describe_json(content: Any) -> str:
    """What a JSON document of another tool is, and what to do; "" if it is no annotation."""
    inside = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
    first = next((item[0] if isinstance(item, list) and item else item for item in inside), None)
    annotations = content.get("annotations") if isinstance(content, dict) else None
    documents = [content, first, annotations[0] if isinstance(annotations, list) and annotations else None]
    keys = [set(document) for document in documents if isinstance(document, dict)]
    return next((what for wanted, what in OTHER_JSON if any(wanted <= found for found in keys)), "")


def _read_files(tool: str, files: Sequence[tuple[Path, Any]], index: ImageIndex, data_dir: Path) -> Annotations:
    """The annotations of files that list their images; raises DataError."""
    form = FORMATS[tool]
    declared: dict[str, None] = {}
    images: list[AnnotatedImage] = []
    notices: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    for path, content in files:
        try:
            parsed = form.parse(path, content)
        except EntryError as error:
            raise DataError(f"{path} ({tool}): {error}") from None
        declared |= dict.fromkeys(parsed.declared)
        notices += parsed.notices
        with_folders = index.knows_folders(image.name for image in parsed.images)
        for image in parsed.images:
            used |= {entry.label for entry in image.entries}
            part = image.part or part_of_file(path, data_dir, by_name=not form.is_one_each)
            near = path.parent.parent if tool == "Supervisely" else path.parent  # ds/img beside ds/ann
            found = index.find(image.name, near, part, with_folders)
            if found is None and form.is_one_each:
                found = index.find(path.stem, near, part, False)
            if found is None:
                missing.append(f"{path.name} ({image.name or 'no imagePath'})" if form.is_one_each else image.name)
                continue
            where = (
                path_in(data_dir, path) if form.is_one_each else f"{path_in(data_dir, path)}, image {readers.show(image.name, 250)}"
            )
            images.append(replace(image, image=found, part=part or index.part_of(found), sources=(path,), where=where))
    listing = [path for path, content in files if kind_of_json(content) != "meta"]
    names = ", ".join(path_in(data_dir, path) for path in listing)
    if form.is_one_each:
        names = f"{counted(len(listing), 'JSON file')} such as {listing[0].name}"
    if not images:
        raise DataError(
            f"{names} ({tool}), and none of their images is in {index.root}: {first_few(missing)}; "
            "put the images there, or set image_dir to their folder"
        )
    if missing:
        notices.append(f"{counted(len(missing), 'image')} of {names} without a readable file left out: {first_few(missing)}")
    order = form.class_order if declared or tool == "COCO" else "in alphabetical order"
    return Annotations(tool, names, [*declared, *sorted(used)], order, form.overlap_rule, form.read_shape, images, notices)


def describe_other_files(folder: Path) -> list[str]:
    """What the files are that could hold images and are not read, a line for each of the most frequent kinds."""
    kinds: Counter[str] = Counter()
    examples: dict[str, Path] = {}
    others = [here / name for here, names in walk(folder) for name in names]
    others = [path for path in others if path.suffix.lower() not in IMAGE_EXTENSIONS | EXTENSIONS]
    without_extension = [path for path in others if not path.suffix]
    for path in [*(path for path in others if path.suffix), *without_extension[:NUM_LOOKED_AT]]:
        what = describe_file(path)
        if what:
            kinds[what] += 1
            examples.setdefault(what, path.relative_to(folder))
    return [f"{counted(number, 'file')} such as {examples[what]}: {what}" for what, number in kinds.most_common(3)]
