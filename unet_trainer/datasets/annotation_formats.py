"""Annotations that are no masks: finds the files of labelling tools in a folder, knows their formats, and has them drawn as masks.

A format that is not read is named for what it is, with what to do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from unet_trainer.datasets.annotation_masks import draw_masks
from unet_trainer.datasets.annotations import Annotations, read_json
from unet_trainer.datasets.coco import is_coco, read_coco
from unet_trainer.datasets.cvat import read_cvat, xml_root
from unet_trainer.datasets.file_tree import list_files, walk
from unet_trainer.datasets.image_lookup import ImageIndex
from unet_trainer.datasets.labelme import is_labelme, read_labelme
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.datasets.supervisely import is_supervisely, is_supervisely_meta, read_supervisely
from unet_trainer.datasets.yolo_seg import find_labels, looks_like_labels, read_yolo_seg
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.foreign_formats import describe_file
from unet_trainer.images.image_files import IMAGE_EXTENSIONS
from unet_trainer.system.console import Console, counted

EXTENSIONS = frozenset([".json", ".xml", ".txt", ".ndjson", ".jsonl"])
COCO_TASKS = ("captions_", "person_keypoints_", "image_info_", "panoptic_", "stuff_")  # COCO's own files beside instances_
EXPORT = "export COCO, with polygons or masks"
NUM_LOOKED_AT = 20  # files without an extension, and texts that may be labels
NUM_NAMED = 10  # files that cannot be read
MAX_LISTED = 3  # kinds of files that are no images
Content = tuple[Path, Mapping[str, Any]]


class UnknownAnnotations(DataError):
    """There are annotations, none of them of a format that is read."""


def find_annotations(
    data_dir: Path,
    checkpoint_dir: Path,
    image_dir: str | None = None,
    mask_dir: str | None = None,
    class_names: Sequence[str] | None = None,
    console: Console | None = None,
) -> FoundPairs | None:
    """The pairs of images and masks drawn from annotations; None if there are no annotations in data_dir. Raises DataError.

    `mask_dir` may be the folder of the annotations, or one file.
    """
    place = data_dir if mask_dir is None else data_dir / mask_dir
    texts = _list_annotations(place, checkpoint_dir)
    if not texts:
        return None
    image_root = data_dir if image_dir is None else data_dir / image_dir
    if not image_root.is_dir():
        return None
    skipped = checkpoint_dir.resolve()
    images = [path for path in list_files(image_root) if not path.resolve().is_relative_to(skipped)]
    index = ImageIndex(image_root, images)
    annotations = _read(texts, index, data_dir)
    return None if annotations is None else draw_masks(annotations, index, data_dir, checkpoint_dir, class_names, console)


def _list_annotations(place: Path, checkpoint_dir: Path) -> list[Path]:
    """The files in a folder that may be annotations, sorted, without hidden ones and those of runs."""
    if place.is_file():
        return [place]
    skipped = checkpoint_dir.resolve()
    found = [here / name for here, names in walk(place) for name in names if Path(name).suffix.lower() in EXTENSIONS]
    return sorted(path for path in found if not path.resolve().is_relative_to(skipped) or place.resolve().is_relative_to(skipped))


def _read(texts: Sequence[Path], index: ImageIndex, data_dir: Path) -> Annotations | None:
    """The annotations in the one format that there is; raises DataError for several, and for those that are not read."""
    by_kind, unknown, broken = _sort_json([path for path in texts if path.suffix.lower() == ".json"])
    cvat_files, xml_unknown = _sort_xml([path for path in texts if path.suffix.lower() == ".xml"])
    unknown += xml_unknown
    lines = [path for path in texts if path.suffix.lower() in (".ndjson", ".jsonl")]
    unknown += [f"{path} holds a JSON document in each line, as Labelbox exports, which is not read; {EXPORT}" for path in lines]
    labels = find_labels([path for path in texts if path.suffix.lower() == ".txt"], index, data_dir)
    if not any(looks_like_labels(path) for path in _first_with_text(labels)):
        labels = {}
    kinds = [
        *(kind for kind in ("COCO", "LabelMe", "Supervisely") if by_kind[kind]),
        *(["CVAT"] if cvat_files else []),
        *(["YOLO"] if labels else []),
    ]
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
    if by_kind["COCO"]:
        return read_coco(by_kind["COCO"], index, data_dir)
    if by_kind["LabelMe"]:
        return read_labelme(by_kind["LabelMe"], index, data_dir)
    if by_kind["Supervisely"]:
        return read_supervisely(by_kind["Supervisely"], by_kind["meta"], index, data_dir)
    return read_cvat(cvat_files, index, data_dir) if cvat_files else read_yolo_seg(labels, index, data_dir)


def _sort_json(paths: Sequence[Path]) -> tuple[dict[str, list[Content]], list[str], list[str]]:
    """JSON files by kind; what the others are; and why some cannot be read. COCO's captions and so on are not opened."""
    if any(path.name.startswith("instances_") for path in paths):
        paths = [path for path in paths if not path.name.startswith(COCO_TASKS)]
    by_kind: dict[str, list[Content]] = defaultdict(list)
    unknown: list[str] = []
    broken: list[str] = []
    for path in paths:
        try:
            content = read_json(path)
        except DataError as error:
            broken.append(str(error))
            continue
        if isinstance(content, dict):
            content.pop("imageData", None)  # LabelMe's picture, megabytes of text
        for kind, is_kind in (
            ("COCO", is_coco),
            ("LabelMe", is_labelme),
            ("Supervisely", is_supervisely),
            ("meta", is_supervisely_meta),
        ):
            if is_kind(content):
                by_kind[kind].append((path, content))
                break
        else:
            what = describe_json(content)
            unknown += [f"{path} is {what}"] if what else []
    return by_kind, unknown, broken


def describe_json(content: object) -> str | None:
    """What a JSON document of another tool is, and what to do; None if it is no annotation."""
    first = content[0] if isinstance(content, list) and content else None
    keys = set(content) if isinstance(content, dict) else set()
    item_keys = set(first) if isinstance(first, dict) else set()
    values = [value for value in content.values() if isinstance(value, dict)] if isinstance(content, dict) else []
    if {"_via_img_metadata", "_via_settings"} & keys or any({"filename", "regions"} <= set(value) for value in values[:1]):
        return f"a project of the VGG Image Annotator, which is not read; {EXPORT} (Annotation, Export)"
    if {"annotations", "images"} <= keys and _has_key(content, "annotations", "segments_info"):
        return "COCO panoptic, whose masks are in its PNG files; use COCO's instances, or convert the PNG files to class ids"
    if {"annotations", "images"} <= keys and "categories" not in keys:
        return "COCO without categories (captions?), so that its classes are not known; use the instances file"
    if {"image_id", "category_id"} <= item_keys:
        return "COCO results (predictions), without the images; use the annotation file"
    if {"data", "annotations"} <= item_keys or {"data", "completions"} <= item_keys:
        return "Label Studio's own JSON, which is not read; export COCO, or YOLO with polygons (brush labels: PNG masks)"
    if {"data_row", "projects"} <= item_keys or {"data_row", "projects"} <= keys or "Labeled Data" in item_keys:
        return f"Labelbox's own JSON, which is not read; {EXPORT}"
    if {"items", "categories"} <= keys:
        return f"Datumaro's own JSON, which is not read; {EXPORT} (datum convert -f coco_instances)"
    if {"image", "annotations"} <= item_keys:
        return f"CreateML's JSON with boxes, and a box is no mask; {EXPORT}"
    if {"item", "annotations"} <= keys or {"dataset", "image", "annotations"} <= keys:
        return f"Darwin JSON of V7, which is not read; {EXPORT}"
    if {"metadata", "instances"} <= keys:
        return f"SuperAnnotate's own JSON, which is not read; {EXPORT}"
    if "type" in keys and "features" in keys:
        return "GeoJSON, in coordinates of a map; burn it into masks first (rasterio.features.rasterize, gdal_rasterize)"
    if {"imgHeight", "imgWidth", "objects"} <= keys:
        return "Cityscapes' polygons; use the PNG masks (gtFine_labelIds) that lie beside them"
    return None


def _has_key(content: object, name: str, key: str) -> bool:
    items = content.get(name) if isinstance(content, dict) else None
    return isinstance(items, list) and bool(items) and isinstance(items[0], dict) and key in items[0]


def _sort_xml(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """CVAT's files, and what others are."""
    cvat_files: list[Path] = []
    unknown: list[str] = []
    for path in paths:
        root = xml_root(path)
        if root == "annotations":
            cvat_files.append(path)
        elif root == "annotation" and not unknown:
            what = "Pascal VOC's XML, with boxes, and a box is no mask; its masks are in SegmentationClass, if it has any"
            unknown.append(f"{path} is {what}")
    return cvat_files, unknown


def _first_with_text(labels: Mapping[Path, Sequence[Path]]) -> list[Path]:
    with_text = (path for paths in labels.values() for path in paths if path.stat().st_size > 0)
    return list(islice(with_text, NUM_LOOKED_AT))


def describe_other_files(folder: Path) -> list[str]:
    """What the files are that could hold images and are not read, a line for each kind."""
    kinds: Counter[str] = Counter()
    examples: dict[str, Path] = {}
    num_looked_at = 0
    for place, names in walk(folder):
        for name in names:
            path = place / name
            if path.suffix.lower() in IMAGE_EXTENSIONS | EXTENSIONS:
                continue
            if not path.suffix:
                num_looked_at += 1
                if num_looked_at > NUM_LOOKED_AT:
                    continue
            what = describe_file(path)
            if what:
                kinds[what] += 1
                examples.setdefault(what, path.relative_to(folder))
    return [f"{counted(number, 'file')} such as {examples[what]}: {what}" for what, number in kinds.most_common(MAX_LISTED)]
