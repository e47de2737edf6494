"""Annotations in place of masks: finds the files of labelling tools in a folder, and draws them as masks of class ids,
once, which are kept under checkpoint_dir.

0 is the background, 1 the first class. Only files in the folder of images can be meant, whatever path an annotation
names. A format that is not read is named for what it is, with what to do.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from unet_trainer.config.schema import Config
from unet_trainer.datasets import annotation_readers as readers
from unet_trainer.datasets.annotation_readers import FORMATS, AnnotatedImage, Shape, path_pieces
from unet_trainer.datasets.converted import Conversion, Converted, Converter
from unet_trainer.datasets.layouts import Listing, describe_results, list_files, part_in, walk
from unet_trainer.datasets.pairs import (
    NUM_NAMED,
    FoundPairs,
    Pair,
    Part,
    Problem,
    composed,
    divided,
    first_few,
    path_in,
)
from unet_trainer.datasets.rasterize import Canvas
from unet_trainer.images.file_bytes import DataError, ReadError, file_stamp, naming
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, Pixels, describe_file, read_image
from unet_trainer.images.mask_decoding import IGNORED
from unet_trainer.images.row_writers import is_result
from unet_trainer.system import input_files
from unet_trainer.system.console import Console, counted

EXTENSIONS = frozenset([".json", ".geojson", ".xml", ".txt", ".csv", ".ndjson", ".jsonl"])
COCO_TASKS = (
    "captions_",
    "person_keypoints_",
    "image_info_",
    "panoptic_",
    "stuff_",
)  # COCO's own files beside instances_
NUM_LOOKED_AT = 20  # files without an extension, texts that may be labels, and items of a JSON document
MAX_CLASSES = 253  # 0 is the background; 254 and 255 are taken
IGNORE_NAME = "__ignore__"  # LabelMe's name for pixels that are ignored

LEFT_OUT = "left_out"  # shapes without a pixel
OVERLAP = "overlap"  # pixels that shapes of different classes claim
# What is said of shapes that are not drawn as their outline, and what is done with them.
NOTES: Mapping[str, tuple[str, str]] = {
    LEFT_OUT: ("object", "left out, without an area (a point, a line) or outside of the image"),
    readers.LINE: ("line", "drawn 10 pixels wide, as the tool does"),
    readers.RECTANGLE: ("rectangle", "filled, as the tool does: the mask has its corners, not the object's outline"),
    readers.IN_CROWD: ("crowd region", "(iscrowd) drawn as part of its class, below all objects"),
}

EXPORT = "export COCO, with polygons or masks"
VGG = f"a project of the VGG Image Annotator, which is not read; {EXPORT} (Annotation, Export)"
SUPERVISELY = f"Supervisely's own JSON, which is not read; {EXPORT}, or PNG masks"
HUGGING_FACE = (
    "a table of Hugging Face, which is not read; set split_file to a CSV with the columns image and mask, or give the "
    "pairs from Python (train_data=)"
)
# Keys of a JSON document, or of the first one in a list or dict of them → its format, or what it is and what to do if
# it is not read. The first that fits counts.
KINDS_OF_JSON = {
    "segments_info": (
        "COCO panoptic, whose masks are in its PNG files; use COCO's instances, or convert these to class ids"
    ),
    "images annotations categories": "COCO",
    "shapes imagePath": "LabelMe",
    "objects size": SUPERVISELY,
    "title shape": SUPERVISELY,
    "_via_img_metadata": VGG,
    "filename regions": VGG,
    "annotations images": (
        "COCO without categories (captions?), so that its classes are not known; use the instances file"
    ),
    "image_id category_id": "COCO results (predictions), without the images; use the annotation file",
    "data annotations": f"Label Studio's own JSON, which is not read; {EXPORT}, or PNG masks",
    "annotator annotation_id": f"Label Studio's JSON-MIN, which is not read; {EXPORT}, or PNG masks",
    "data_row projects": f"Labelbox's own JSON, which is not read; {EXPORT}",
    "items categories": f"Datumaro's own JSON, which is not read; {EXPORT} (datum convert -f coco_instances)",
    "type features": (
        "GeoJSON; of QuPath, export its labelled images; of a map, burn it into masks first (gdal_rasterize)"
    ),
    "imgHeight imgWidth objects": "Cityscapes' polygons; use the PNG masks (gtFine_labelIds) that lie beside them",
}


KINDS_OF_XML = {  # by what is near the start of the file
    r"<annotations\b": f"CVAT's XML, which is not read; {EXPORT}, or PNG masks (CVAT exports COCO 1.0 and VOC masks)",
    r"<annotation\b": "Pascal VOC's XML, with boxes, and a box is no mask; its masks are in SegmentationClass, if any",
}


class UnknownAnnotations(DataError):
    """There are annotations, none of them of a format that is read."""


class Annotations(NamedTuple):
    """What the annotation files of a dataset hold."""

    tool: str  # a key of FORMATS
    files: str  # what was read, for people: "annotations/instances_train.json"
    declared: list[str]  # names of the classes, in their order
    class_order: str
    images: list[AnnotatedImage]
    notices: list[str]


def find_annotations(
    config: Config, data_dir: Path, console: Console | None = None, listing: Listing | None = None
) -> FoundPairs | None:
    """The pairs of images and masks drawn from annotations; None if there are no annotations in data_dir. Raises
    DataError.

    mask_dir may be the folder of the annotations, or one file.
    """
    place, image_root = data_dir / (config.mask_dir or ""), data_dir / (config.image_dir or "")
    texts = [place] if place.is_file() else sorted(walk(place, listing=listing, endings=(*EXTENSIONS,)))
    if not texts or not image_root.is_dir():
        return None
    images = list_files(image_root, listing=listing)
    results, polygons = [path for path in images if is_result(path)], [path for path in texts if is_result(path)]
    if len(polygons) < len(texts):  # else training is meant to use them
        results += polygons
    left_out = set(results)
    index = ImageIndex(image_root, [path for path in images if path not in left_out])
    annotations = _read([path for path in texts if path not in left_out], index, data_dir)
    if annotations is None:
        return None
    drawn = draw_masks(
        annotations, index, Converter(data_dir, Path(config.checkpoint_dir), console), config.class_names
    )
    return replace(drawn, notices=(*drawn.notices, describe_results(results))) if results else drawn


def _read(texts: Sequence[Path], index: "ImageIndex", data_dir: Path) -> Annotations | None:
    """The annotations in the one format that there is; raises DataError for several, and for those that are not
    read."""
    if any(path.name.startswith("instances_") for path in texts):  # COCO's captions and so on are not opened
        texts = [path for path in texts if not path.name.startswith(COCO_TASKS)]
    files: dict[str, list[tuple[Path, Any]]] = defaultdict(list)
    unknown: list[str] = []
    broken: list[str] = []
    for path in texts:
        if path.suffix.lower() == ".txt":
            files["YOLO"] += [(path, None)] if index.knows(path.stem) else []
        elif not path.name.startswith("sample_submission"):  # an example of an answer, of Kaggle
            try:
                kind, content = _kind_of(path)
                if not kind and path.suffix.lower() in (".json", ".xml") and index.knows(path.stem):
                    what = f"has the name of an image, and is {path.suffix[1:].upper()} of no tool that is read"
                    unknown.append(f"{path} {what}; if it is the annotation, {EXPORT}; else add masks")
                files[kind].append((path, content))
            except UnknownAnnotations as error:
                unknown.append(str(error))
            except DataError as error:
                broken.append(str(error))
    with_text = (path for path, _ in files["YOLO"] if (stamp := file_stamp(path)) is not None and stamp[0] > 0)
    if not any(readers.looks_like_labels(path) for path in islice(with_text, NUM_LOOKED_AT)):
        files["YOLO"] = []
    kinds = [kind for kind in FORMATS if files[kind]]
    cannot = f"{counted(len(broken), 'annotation file')} that cannot be read:\n  " + "\n  ".join(broken[:NUM_NAMED])
    if not kinds and (unknown or broken):
        raise UnknownAnnotations(unknown[0] if unknown else cannot)
    if not kinds:
        return None
    if len(kinds) > 1:
        raise DataError(
            f"mask_dir: annotations of {' and '.join(kinds)} in {data_dir}; set mask_dir to the folder or file of one"
        )
    if broken:
        raise DataError(cannot)
    if not index.files:
        text = f"{kinds[0]} annotations, but no image in {index.root}; set image_dir to the folder of the images"
        raise DataError("\n  ".join([text, *describe_other_files(index.root)]))
    return _read_files(kinds[0], files[kinds[0]], index, data_dir)


def _kind_of(path: Path) -> tuple[str, Any]:
    """The format of a file, "" for no annotation, and its content; raises DataError, UnknownAnnotations if it is not
    read."""
    if path.suffix.lower() == ".xml":
        with readers.inside(path), input_files.open_file(path) as file:
            head = file.read(2**12).decode("utf-8", "replace")
        if what := next((what for mark, what in KINDS_OF_XML.items() if re.search(mark, head)), None):
            raise UnknownAnnotations(f"{path} is {what}")
        return "", None
    if path.suffix.lower() == ".csv":
        with readers.inside(path):
            header = readers.read_header(path)
            if "region_shape_attributes" in header:
                raise UnknownAnnotations(f"{path} is {VGG}")
            if path.name == "metadata.csv":
                raise UnknownAnnotations(f"{path} is {HUGGING_FACE}")
            if (columns := readers.find_run_columns(header)) is None:
                return "", None
            return "run lengths", (columns, input_files.read_text(path, readers.MAX_FILE_BYTES, "utf-8-sig"))
    if path.name == "metadata.jsonl":
        raise UnknownAnnotations(f"{path} is {HUGGING_FACE}")
    if path.suffix.lower() not in (".json", ".geojson"):
        what = "holds a JSON document in each line, as Labelbox exports, which is not read"
        raise UnknownAnnotations(f"{path} {what}; {EXPORT}")
    with readers.inside(path):
        content = input_files.read_json(path, readers.MAX_FILE_BYTES)
    if isinstance(content, dict):
        content.pop("imageData", None)  # LabelMe's picture, megabytes of text
    kind = kind_of_json(content)
    if kind and kind not in FORMATS:
        raise UnknownAnnotations(f"{path} is {kind}")
    return kind, content


def kind_of_json(content: Any) -> str:
    """The format of a JSON document; of another tool's, what it is and what to do; "" if it is no annotation."""
    inside = content.values() if isinstance(content, dict) else content if isinstance(content, list) else []
    firsts = [item[0] if isinstance(item, list) and item else item for item in islice(inside, NUM_LOOKED_AT)]
    keys = [set(document) for document in (content, *firsts) if isinstance(document, dict)]
    return next(
        (what for wanted, what in KINDS_OF_JSON.items() if any(found.issuperset(wanted.split()) for found in keys)), ""
    )


def _read_files(tool: str, files: Sequence[tuple[Path, Any]], index: "ImageIndex", data_dir: Path) -> Annotations:
    """What the files of one format hold; raises DataError."""
    form, names = FORMATS[tool], None
    if tool == "YOLO":
        names = readers.read_names(data_dir, sorted({path.parent for path, _ in files}))
    declared: dict[str, None] = {}
    images: list[AnnotatedImage] = []
    notices: list[str] = []
    missing: list[str] = []
    for path, content in files:
        if names is not None:
            with readers.inside(path):
                content = names, input_files.read_text(path, readers.MAX_LABEL_BYTES, "utf-8-sig")
        with readers.inside(f"{path} ({tool})"):
            classes, listed, notes = form.parse(path, content)
        declared |= dict.fromkeys(classes)
        notices += notes
        # If one of the names with folders is here with all of them, p2/1.png is not p1/1.png where p2 is missing.
        with_folders = any(len(path_pieces(image.name)) > 1 and index.knows(image.name) for image in listed)
        folders = path.relative_to(data_dir).parts[:-1] if path.is_relative_to(data_dir) else ()
        near = path.parent
        shown = path_in(data_dir, path)
        for image in listed:
            part = image.part or (None if form.is_one_each else part_in([path.stem])) or part_in(folders)
            found = index.find(image.name, near, part, with_folders)
            if found is None and form.is_one_each:
                found = index.find(path.stem, near, part, False)
            if found is None:
                missing.append(f"{path.name} ({image.name or 'no imagePath'})" if form.is_one_each else image.name)
                continue
            part = (names.part_of(path_in(data_dir, found)) if names else None) or part or index.part_of(found)
            where = shown if form.is_one_each else f"{shown}, image {image.name!r:.250}"
            images.append(image._replace(image=found, part=part, source=path, where=where))
    listing = [path_in(data_dir, path) for path, _ in files]
    shown = ", ".join(listing)
    if form.is_one_each:
        kind = "text file" if names else "JSON file"
        shown = f"{counted(len(listing), kind)} such as {PurePosixPath(listing[0]).name}"
    if not images:
        is_renamed = any(index.knows(PurePosixPath(name.replace("\\", "/")).stem) for name in missing)
        fix = (
            "files of these names have another extension: rename either"
            if is_renamed
            else "set image_dir to their folder"
        )
        raise DataError(f"{shown} ({tool}): none of their images is in {index.root} ({first_few(missing)}); {fix}")
    order = form.class_order if declared or tool == "COCO" else "in alphabetical order"
    if names is not None:
        order = f"in the order of {names.file}" if names.names else order
        # Images without a label file are all background; those of a part without any label file are left out.
        paths, parts, empty = {image.image for image in images}, {image.part for image in images}, []
        for path in index.files:
            part, shown_path = names.part_of(path_in(data_dir, path)) or index.part_of(path), path_in(data_dir, path)
            if path not in paths and part in parts:
                empty.append(AnnotatedImage(path.name, [], None, part, path, None, shown_path))
        images += empty
        if (
            listed := [image for image in images if names.part_of(path_in(data_dir, image.image))]
            if names.lists
            else []
        ):
            if len(listed) < len(images):
                notices.append(f"{counted(len(images) - len(listed), 'image')} in no list of {names.file} left out")
            images = listed
        if not names.names:
            notices.append("no data.yaml or classes.txt with the names of the classes: they are numbers")
        if empty:
            what = f"{counted(len(empty), 'image')} without a label file, {first_few(image.name for image in empty)}"
            notices.append(f"all background, as in YOLO: {what}")
    if missing:
        notices.append(
            f"{counted(len(missing), 'image')} of {shown} without a readable file left out: {first_few(missing)}"
        )
    used = {entry.label for image in images for entry in image.entries}
    return Annotations(tool, shown, [*declared, *sorted(used)], order, images, notices)


def describe_other_files(folder: Path, listing: Listing | None = None) -> list[str]:
    """What the files are that could hold images and are not read, a line for each of the most frequent kinds."""
    by_extension: dict[str, list[Path]] = defaultdict(list)
    for path in walk(folder, listing=listing):
        if path.suffix.lower() not in IMAGE_EXTENSIONS | EXTENSIONS:
            by_extension[path.suffix.lower()].append(path)
    kinds = [
        (paths, [what for path in paths[:NUM_LOOKED_AT] if (what := describe_file(path))])
        for paths in by_extension.values()
    ]
    found = [(paths, what[0]) for paths, what in kinds if what]
    found.sort(key=lambda kind: -len(kind[0]))
    return [
        f"{counted(len(paths), 'file')} such as {paths[0].relative_to(folder)}: {what}" for paths, what in found[:3]
    ]


class ImageIndex:
    """The image files of a folder, found by the names that annotations give them."""

    def __init__(self, root: Path, files: Iterable[Path]) -> None:
        self.root, self.files = root, list(files)
        self._by_name: dict[str, list[Path]] = defaultdict(list)  # a, a.png, train/a, train/a.png, images/train/a, ...
        for path in self.files:
            *folders, _ = _plain(path_in(root, path)).split("/")
            for name in {_plain(path.name), _plain(path.stem)}:
                for start in range(len(folders) + 1):
                    self._by_name["/".join([*folders[start:], name])].append(path)

    def knows(self, name: str) -> bool:
        return "/".join(map(_plain, path_pieces(name))) in self._by_name

    def part_of(self, path: Path) -> Part | None:
        """train, val or test by the folders above an image."""
        return part_in(path_in(self.root, path).split("/")[:-1])

    def find(self, name: str, near: Path, part: Part | None, with_folders: bool) -> Path | None:
        """The file for a name, possibly with folders before it; None if there is none. Raises DataError if several are
        possible.

        Of several files with the same name, the one whose folders agree most, then those below `near`, then those of
        the part. A file of another part than `part` is none: val/1.png is not the 1.png of train. `with_folders`: all
        folders must agree."""
        pieces = path_pieces(name) or [""]
        part, plain = part_in(pieces[:-1]) or part, [_plain(piece) for piece in pieces]
        found: list[Path] = []
        for start in range(1 if with_folders else len(pieces)):
            same = self._by_name.get("/".join(plain[start:]), [])
            found = found or [path for path in same if not part or self.part_of(path) in (None, part)]

        def rank(path: Path) -> tuple[bool, ...]:
            place = path.is_relative_to(near), path.parent == near
            return _plain(path.name) == plain[-1], *place, self.part_of(path) == part, path.name == pieces[-1]

        highest = max(map(rank, found), default=())
        best = [path for path in found if rank(path) == highest]
        if len(best) > 1:
            paths = first_few(path_in(self.root, path) for path in best)
            raise DataError(f"image_dir: {name} could be {paths}; set image_dir to the folder that is meant")
        return best[0] if best else None


def _plain(name: str) -> str:
    """Equal for names that differ in case or in the form of accents only: a name may come from another operating
    system."""
    return composed(name).casefold()


def is_background(name: str) -> bool:
    """Also _background_ and __background__."""
    return name.lower().strip("_") == "background"


def draw_masks(
    annotations: Annotations, index: ImageIndex, converter: Converter, class_names: Sequence[str] | None
) -> FoundPairs:
    """The pairs of annotated images and drawn masks. `class_names` is the setting, if it is set. Raises DataError."""
    form = FORMATS[annotations.tool]
    if annotations.tool == "LabelMe":
        annotations = _join_spellings(annotations, class_names or ())
    first: dict[Path, AnnotatedImage] = {}
    for image in annotations.images:
        if (other := first.setdefault(image.image, image)) is not image:
            twice = f"{image.image} is annotated twice: {other.where} and {image.where}"
            raise DataError(f"{twice}; remove one of them, or set mask_dir to the annotations that count")
    classes, notices = choose_classes(annotations, class_names)
    ids = {name: number for number, name in enumerate(classes, start=1)}
    smaller_on_top = form.overlap_rule.startswith("the smaller")
    images = annotations.images
    if not any(image.entries for image in images if image.part == "test"):
        # Test images without a single object were not annotated: all of them background would be a wrong truth.
        images = [image for image in images if image.part != "test"] or images
    if len(images) < len(annotations.images):
        notices.append(
            f"{counted(len(annotations.images) - len(images), 'test image')} left out: none has any annotation"
        )
    if annotations.tool == "run lengths" and not next(
        entry.content[1] for image in annotations.images for entry in image.entries
    ):
        notices.append(f"the run lengths of {annotations.files} are read along the rows, not down the columns")
    conversions = [
        Conversion(
            path_in(index.root, image.image).lstrip("/"),
            [*([image.source] if image.source else []), image.image],
            partial(draw_mask, image, form.read_shape, ids, smaller_on_top),
        )
        for image in images
    ]
    label = "Drawing masks from annotations:"
    drawn = converter.write(annotations.tool.lower(), [classes, smaller_on_top], conversions, label)
    pairs: list[Pair] = []
    bad: dict[bool, list[str]] = {False: [], True: []}  # by whether it is of test, which stops no training
    for image, mask in zip(images, drawn, strict=True):
        if mask.problem:
            bad[image.part == "test"].append(f"{image.where}: {mask.problem}")
        else:
            name = path_in(index.root, image.image.with_suffix(""))
            pairs.append(Pair(name, image.image, mask.path, image.part, mask_origin=image.where))
    fix = "correct these entries, or their image files, or remove them"
    problem = Problem("annotations", "annotation", "that cannot be used", tuple(bad[False]), fix)
    notices = [*annotations.notices, *notices, *_notices(annotations, images, drawn, index)]
    if bad[True]:
        notices.append(f"{counted(len(bad[True]), 'test image')} left out: {first_few(bad[True], 3)}")
    rule = f"{annotations.files} ({annotations.tool}), drawn as masks, classes {annotations.class_order}"
    names = classes if len(classes) == 1 else ("background", *classes)
    found = divided(pairs, rule, [problem], class_names=names, notices=tuple(notices))
    if not found.pairs:
        raise DataError(found.blocking_message or f"{annotations.files} has no image to train on")
    return found


def _join_spellings(annotations: Annotations, class_names: Sequence[str]) -> Annotations:
    """Labels are typed in LabelMe: those that differ only in case or spaces are one class, with the name that
    class_names has, or that most objects have. Several names of class_names stay apart."""
    entries = [entry for image in annotations.images for entry in image.entries if entry.label != IGNORE_NAME]
    typed = Counter((entry.label, entry.content["label"]) for entry in entries)
    first = {_plain(name): name for name in reversed(class_names)}
    names = {name: name for name in class_names}
    for label, _ in Counter(sorted(entry.label for entry in entries)).most_common():
        names.setdefault(label, first.setdefault(_plain(label), label))
    notices = []
    for name in sorted({*names.values()}):
        spellings = [f"{text!r} ({count})" for (label, text), count in sorted(typed.items()) if names[label] == name]
        if len(spellings) > 1:
            notices.append(f"labels that differ only in case or spaces are one class, {name}: {first_few(spellings)}")
    images = [
        image._replace(entries=[entry._replace(label=names.get(entry.label, entry.label)) for entry in image.entries])
        for image in annotations.images
    ]
    declared = sorted({names.get(name, name) for name in annotations.declared})
    return annotations._replace(images=images, declared=declared, notices=[*annotations.notices, *notices])


def choose_classes(annotations: Annotations, class_names: Sequence[str] | None) -> tuple[tuple[str, ...], list[str]]:
    """The classes that occur, in the order of class_names (which may name more) or in their own; and notices. Raises
    DataError.

    A single class may have any name, because its id is clear.
    """
    used = {entry.label for image in annotations.images for entry in image.entries if entry.has_area}
    names = [name for name in dict.fromkeys(annotations.declared) if not is_background(name) and name != IGNORE_NAME]
    classes = tuple(name for name in names if name in used)
    what = f"{annotations.files} ({annotations.tool})"
    if not classes:
        raise DataError(f"{what} holds no object of any class, so that there is nothing to learn")
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{what} has {len(classes)} classes; need at most {MAX_CLASSES}")
    unused = [name for name in names if name not in used]
    notices = (
        [f"{counted(len(unused), 'class', 'classes')} without any object left out: {first_few(unused)}"]
        if unused
        else []
    )
    wanted = [name for name in class_names or () if not is_background(name)]
    if not wanted or len(wanted) == len(classes) == 1:
        return classes, notices
    others = [name for name in classes if name not in wanted]
    if others:
        wanted_names = first_few(["background", *classes], 40)
        raise DataError(
            f"class_names: it lacks {first_few(others)} of {annotations.files}; leave it out, or list {wanted_names}"
        )
    return tuple(wanted), notices


def draw_mask(
    image: AnnotatedImage, read_shape: Callable[[Any, int, int], Shape], ids: Mapping[str, int], smaller_on_top: bool
) -> tuple[Pixels, dict[str, int]]:
    """H,W uint8 class ids of one image, and how often something is worth a note. Raises DataError without the image's
    name."""
    with naming(f"the file {image.image.name}"):
        height, width = size = read_image(image.image).shape[:2]
    if image.size is not None and image.size != size:
        turned = (
            " (is it rotated by its EXIF orientation, and the annotation is not?)" if image.size == size[::-1] else ""
        )
        annotated = f"annotated at {image.size[1]}×{image.size[0]}"
        raise ReadError(f"{annotated}, and the file {image.image.name} has {width}×{height} pixels{turned}")
    canvas = Canvas(height, width, smaller_on_top)
    notes: Counter[str] = Counter()
    for entry in image.entries:
        with readers.inside(entry.name):
            patch, note = read_shape(entry.content, height, width)
            class_id = (
                0 if is_background(entry.label) else IGNORED if entry.label == IGNORE_NAME else ids.get(entry.label, 0)
            )
            num_pixels = canvas.draw(patch, class_id, is_crowd=note == readers.IN_CROWD)
            notes[note if num_pixels else LEFT_OUT] += 1
    notes[OVERLAP] = int(np.count_nonzero(canvas.contested))
    return canvas.ids, {note: number for note, number in notes.items() if note and number}


def _notices(
    annotations: Annotations, images: list[AnnotatedImage], drawn: list[Converted], index: ImageIndex
) -> list[str]:
    notices = []
    empty = [image.image for image in images if not image.entries and image.source]
    if empty:
        names, verb = first_few(path.name for path in empty), "counts as" if len(empty) == 1 else "count as"
        notices.append(f"{counted(len(empty), 'image')} without any annotation {verb} all background: {names}")
    annotated = {image.image for image in annotations.images}
    others = [path_in(index.root, path) for path in index.files if path not in annotated]
    if others:
        notices.append(f"{counted(len(others), 'image file')} that no annotation names left out: {first_few(others)}")
    overlap = "pixel", f"in objects of several classes; {FORMATS[annotations.tool].overlap_rule}"
    for note, (noun, what) in {**NOTES, OVERLAP: overlap}.items():
        facts = [mask.facts.get(note, 0) for mask in drawn]
        if holders := [image.image.name for number, image in zip(facts, images, strict=True) if number]:
            notices.append(f"{counted(sum(facts), noun)} {what}: in {first_few(holders, 3)}")
    return notices
