"""The files of labelling tools in a place, read once: which tool wrote each, and which image it means. What is in them
is anyone's: a wrong value is named with its file and entry, and a file of another tool with what to do."""

import contextlib
import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import cv2

from unet_trainer.config.safe_yaml import YamlError
from unet_trainer.config.schema import Config
from unet_trainer.data.csv_tables import read_header
from unet_trainer.data.listing import Listing, describe_results, list_files, walk
from unet_trainer.data.names import part_in
from unet_trainer.data.pairs import Pair, Part, Question, composed, first_few, path_in
from unet_trainer.data.place import Place
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import IMAGE_EXTENSIONS, describe_file
from unet_trainer.images.row_writers import is_result
from unet_trainer.system import input_files
from unet_trainer.system.console import counted, first_line

File = tuple[Path, Any]  # and its content, of JSON

ENDINGS = (".json", ".xml", ".txt", ".csv", ".jsonl")
MAX_FILE_BYTES = 2**30
MAX_REASON = 100  # characters of what Python says of a wrong value
NUM_LOOKED_AT = 20  # files of one extension
# What a value of a wrong type, or one that is missing, raises where it is used.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, cv2.error, csv.Error)
JSON_KEYS = {"COCO": {"images", "annotations", "categories"}, "LabelMe": {"shapes", "imagePath"}}
# COCO's own files beside instances_
COCO_TASKS = ("captions_", "person_keypoints_", "image_info_", "panoptic_", "stuff_")
YOLO_LINE = re.compile(r"\s*[0-9]{1,4}([ \t]+[-+.e0-9]+){4}\s", re.IGNORECASE)  # class, and four numbers or more
# Of tables of run lengths, role → names of columns, in lower case without separators, the likeliest first.
COLUMNS = {
    "image": (image := ["imageid", "image", "imagename", "filename", "imagefile", "file", "img", "imgid", "id"]),
    "label": (label := ["classid", "class", "classname", "categoryid", "category", "label", "defecttype"]),
    "runs": ["encodedpixels", "rle", "rlemask", "maskrle", "encoding", "rleencoding", "encodedrle"],
    "joined": [first + second for first in image for second in label],  # ImageId_ClassId: a.jpg_1
}

# What is not read: words of the file's name and text; what it is; what to do. The first row that fits counts.
EXPORT = "export COCO, with polygons or masks, or PNG masks"
TABLE = "set split_file to a CSV with the columns image and mask, or give the pairs from Python (train_data=)"
ROWS = "run lengths that may go along the rows", "need them down the columns, in a column EncodedPixels"
OTHERS = (
    ("file:metadata.", "a table of Hugging Face", TABLE),
    ('"objects" "size"', "Supervisely's own JSON", EXPORT),
    ('"_via_img_metadata"', "a project of the VGG Image Annotator", EXPORT),
    ('"filename" "regions"', "a project of the VGG Image Annotator", EXPORT),
    ('"caption"', "COCO without categories (captions?), whose classes are not known", "use instances"),
    ('"annotations" "data"', "Label Studio's own JSON", EXPORT),
    ('"annotator" "annotation_id"', "Label Studio's own JSON", EXPORT),
    ("<annotations", "CVAT's XML", f"{EXPORT} (CVAT exports COCO 1.0 and VOC masks)"),
    ("<annotation", "Pascal VOC's XML, with boxes, and a box is no mask", "its masks are in SegmentationClass, if any"),
    ("id,annotation", *ROWS),
    ("id,class,segmentation", *ROWS),
)


class UnknownAnnotations(Question):
    """There are annotations, none of them of a format that is read."""


@contextlib.contextmanager
def inside(name: object) -> Iterator[None]:
    """Name the file or the entry in an error, which becomes a DataError of one sentence."""
    try:
        yield
    except (DataError, YamlError) as error:
        raise DataError(f"{name}: {error}") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: it is not UTF-8 text, as some programs save it; save it as UTF-8") from None
    except MALFORMED as error:
        reason = first_line(error)[:MAX_REASON] + " is missing" * isinstance(error, KeyError)
        fix = "was it cut off, or edited by hand? Correct it, or export it again"
        raise DataError(f"{name}: {reason}; {fix}") from None


class AnnotatedFolder:
    """The images of a place, and the files that annotate them, by the tool that wrote them."""

    def __init__(self, place: Place, config: Config) -> None:
        self.data_dir, listing = place.data_dir, place.listing
        self.root, folder = (place.data_dir / (name or "") for name in (config.image_dir, config.mask_dir))
        texts = [folder] if folder.is_file() else sorted(walk(folder, listing=listing, endings=ENDINGS))
        images = list_files(self.root, listing=listing) if texts else []
        results = [path for path in (*images, *texts) if path != folder and is_result(path)]
        self.notices = [describe_results(results)] if results else []
        has_instances = any(path.name.startswith("instances_") for path in texts)
        skipped = (*(COCO_TASKS if has_instances else ()), "sample_submission")  # an example of an answer, of Kaggle
        left_out = {*results, *(path for path in texts if path.name.startswith(skipped))}
        self.images, self.texts = ([path for path in files if path not in left_out] for files in (images, texts))
        self.folders = {path.parent for path in self.images}
        self.by_end: dict[str, list[Path]] = defaultdict(list)  # the ends of its path, with and without extension
        for path in self.images:
            *folders, name = plain(path_in(self.root, path)).split("/")
            for last, start in product({name, plain(path.stem)}, range(len(folders) + 1)):
                self.by_end["/".join([*folders[start:], last])].append(path)
        self.tools: dict[str, list[File]] = defaultdict(list)
        self.broken = ""  # the first file that cannot be read, and why
        for path in self.texts:
            try:
                with inside(path):
                    self._read(path)
            except DataError as error:
                self.broken = self.broken or str(error)
        if not any(line for _, line in self.tools["YOLO"]):
            del self.tools["YOLO"]

    def _read(self, path: Path) -> None:
        """Adds the file to those of its tool, with the content of JSON."""
        kind = path.suffix.lower()
        if kind == ".txt" and plain(path.stem) in self.by_end:
            with input_files.open_file(path) as file:
                start = file.read(2**10).decode("utf-8-sig", "ignore")
            self.tools["YOLO"].append((path, YOLO_LINE.match(f"{start}\n")))
        elif kind == ".csv" and find_columns(read_header(path)):
            self.tools["run lengths"].append((path, None))
        elif kind == ".json" and isinstance(content := input_files.read_json(path, MAX_FILE_BYTES), dict):
            content.pop("imageData", None)  # LabelMe's picture, megabytes of text
            for tool in (tool for tool, keys in JSON_KEYS.items() if keys <= content.keys()):
                self.tools[tool].append((path, content))

    def files_of(self, tool: str) -> list[File]:
        """Raises DataError where there are annotations of other tools too, or broken ones."""
        if tool in self.tools and len(self.tools) > 1:
            several = f"annotations of {' and '.join(sorted(self.tools))} in {self.data_dir}"
            raise DataError(f"mask_dir: {several}; set mask_dir to the folder or file of one")
        if tool in self.tools and self.broken:
            raise DataError(self.broken)
        return self.tools.get(tool, [])

    def find_image(self, name: str, near: Path, part: Part | None) -> Path | None:
        """The file whose path ends as much as possible as the name, one below `near` rather than another. Where images
        lie in several folders the last folder counts: p2/1.png is not p1/1.png; nor is val/1.png the 1.png of train.
        Raises DataError if several are possible."""
        pieces = path_pieces(plain(name))
        part, files = part_in(pieces[:-1]) or part, list[Path]()
        for start in range(len(pieces) - (len(pieces) > 1 and len(self.folders) > 1)):
            there = self.by_end.get("/".join(pieces[start:]), ())
            files = files or [path for path in there if not part or self.part_of(path) in (None, part)]
        files = [path for path in files if path.is_relative_to(near)] or files
        if len(files) > 1:
            paths = first_few(path_in(self.root, path) for path in files)
            raise DataError(f"image_dir: {name} could be {paths}; set image_dir to the folder that is meant")
        return files[0] if files else None

    def part_of(self, path: Path) -> Part | None:
        """train, val or test by the folders above an image."""
        return part_in(path_in(self.root, path).split("/")[:-1])


def annotated_folder(place: Place, config: Config) -> AnnotatedFolder:
    """Read when the first format asks for it."""
    if "annotations" not in place.shared:
        place.shared["annotations"] = AnnotatedFolder(place, config)
    return place.shared["annotations"]


def find(place: Place, config: Config) -> list[Pair] | None:
    """Finds no pairs: the last to be asked, it names annotations that no format before it could read."""
    folder = annotated_folder(place, config)
    for path in folder.texts:
        with contextlib.suppress(OSError):  # it is the broken one, or no annotation
            text = f"file:{path.name} "
            if path.suffix.lower() in (".json", ".xml", ".csv"):
                text += input_files.read_text(path, MAX_FILE_BYTES, errors="replace")
            for words, what, fix in OTHERS:
                if all(word in text for word in words.split()):
                    raise UnknownAnnotations(f"{path} is {what}, which is not read; {fix}")
    if folder.broken:
        raise UnknownAnnotations(folder.broken)
    return None


def find_columns(header: Sequence[str]) -> dict[str, str]:
    """Role → name of the column, of a table of run lengths; of another table, none."""
    columns = {re.sub(r"[\W_]", "", cell): cell for cell in reversed(header)}
    roles = {role: next((columns[name] for name in names if name in columns), "") for role, names in COLUMNS.items()}
    found = {role: name for role, name in roles.items() if name}
    return found if "runs" in found and not {"image", "joined"}.isdisjoint(found) else {}


def path_pieces(name: str) -> list[str]:
    """Folders and name, whatever system wrote them; none leads out of a folder."""
    return [piece for piece in re.split(r"[/\\]", name.strip()) if piece not in ("", ".", "..")]


def plain(name: str) -> str:
    """Equal for names that differ in case or in the form of accents only: a name may come from another system."""
    return composed(name).casefold()


def describe_other_files(folder: Path, listing: Listing | None = None) -> list[str]:
    """What the files are that could hold images and are not read, a line for each of the most frequent kinds."""
    by_extension: dict[str, list[Path]] = defaultdict(list)
    for path in walk(folder, listing=listing):
        if path.suffix.lower() not in (*IMAGE_EXTENSIONS, *ENDINGS):
            by_extension[path.suffix.lower()].append(path)
    lines = []
    for paths in sorted(by_extension.values(), key=len, reverse=True):
        if what := next(filter(None, map(describe_file, paths[:NUM_LOOKED_AT])), None):
            lines.append(f"{counted(len(paths), 'file')} such as {paths[0].relative_to(folder)}: {what}")
    return lines[:3]
