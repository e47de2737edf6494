"""The files of a prediction, written some rows at a time under temporary names: all files of an image are there, or
none.

OUT/a/b.png                   class ids, with a palette          OUT/a/b.tif   the same, where the image is a GeoTIFF
OUT/values/a/b.png            the mask values of the dataset     (of values and probabilities too)
OUT/overlays/a/b.png          the image, with the classes drawn over it
OUT/probabilities/a/b.png     16 bit, of the foreground; of several classes OUT/probabilities/1-name/a/b.png; or .npy
OUT/polygons.json             COCO, of all images                OUT/a/b.geojson   where the image is a GeoTIFF
"""

import contextlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from unet_trainer.config.errors import UserError
from unet_trainer.images.drawing import display_range, overlay_rows, to_display
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageReader, open_reader, read_small
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding
from unet_trainer.images.mask_shapes import Polygon, find_polygons, joined_rings, signed_area
from unet_trainer.images.row_writers import (
    MARK,
    PROBABILITIES,
    Content,
    NpyWriter,
    Palette,
    PngWriter,
    RowWriter,
    TiffWriter,
)
from unet_trainer.images.tiff_files import Georeference, read_georeference
from unet_trainer.images.tiling import Size
from unet_trainer.inference.inputs import Input
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.atomic_files import Draft, Kind, check_replaceable
from unet_trainer.system.console import json_text

RESULT = Kind("result of predict", b".*" + MARK.encode())
ARRAY = Kind(".npy array", rb"\x93NUMPY")
VALUES, OVERLAYS = "values", "overlays"  # folders in OUT, beside PROBABILITIES
COCO_NAME = "polygons.json"
TIFF_SUFFIXES = (".tif", ".tiff")
SAMPLE_SIDE = 512  # of the reduced image that tells how a large one is to be displayed
FULL = 65535  # a probability of 1 in a PNG


@dataclass(frozen=True)
class Kinds:
    """What is written besides the class ids."""

    values: bool = False
    overlay: bool = False
    probabilities: Literal["png", "npy"] | None = None
    polygons: bool = False


class Rows(NamedTuple):
    """Results of some rows of an image."""

    ids: Pixels  # rows,W uint8
    # M,rows,W of the stored ids, if they are wanted: uint16 for PNG, float32 for .npy
    probabilities: Pixels = np.zeros(0)


class Output(NamedTuple):
    """One file of an image."""

    path: Path
    take: Callable[[Rows], Pixels] = lambda rows: rows.ids  # what it holds of the results
    dtype: DTypeLike = np.uint8
    channels: int = 1
    palette: Palette = None
    content: Content = "mask"
    is_overlay: bool = False


class PredictionFolder:
    """Where results go, and in which form."""

    def __init__(self, out: Path, spec: SegmenterSpec, kinds: Kinds) -> None:
        self.out, self.spec, self.kinds = out, spec, kinds
        self.made: set[Path] = set()
        self.values = value_table(spec.coding, spec.num_ids) if kinds.values else np.zeros(0)
        self.colours = np.zeros((256, 3), np.uint8)
        self.colours[: spec.num_ids] = spec.id_colours
        # Two ids: the foreground's probability says all.
        self.probable_ids = [1] if spec.num_ids == 2 else list(range(spec.num_ids))

    def make_folder(self, folder: Path) -> None:
        if folder not in self.made:  # asking the system for each image would cost as much as drawing its mask
            folder.mkdir(parents=True, exist_ok=True)
            self.made.add(folder)

    def mask(self, name: str) -> Path:
        return self.out / f"{name}.png"

    def outputs(self, name: str) -> list[Output]:
        """Of one image, besides GeoTIFFs and polygons; its mask is written last."""
        kinds, outputs = self.kinds, list[Output]()
        if kinds.values:
            path, channels = self.out / VALUES / f"{name}.png", 3 if self.values.ndim == 2 else 1
            outputs.append(Output(path, lambda rows: self.values[rows.ids], self.values.dtype, channels))
        if kinds.overlay:
            path = self.out / OVERLAYS / f"{name}.png"
            outputs.append(Output(path, channels=3, content="picture", is_overlay=True))
        if kinds.probabilities == "npy":
            path, channels = self.out / PROBABILITIES / f"{name}.npy", len(self.probable_ids)
            outputs.append(Output(path, lambda rows: np.moveaxis(rows.probabilities, 0, 2), np.float32, channels))
        for index, class_id in enumerate(self.probable_ids if kinds.probabilities == "png" else ()):
            inner = "" if len(self.probable_ids) == 1 else class_folder(class_id, self.spec.id_names[class_id])
            path = self.out / PROBABILITIES / inner / f"{name}.png"
            outputs.append(Output(path, partial(_plane, index), np.uint16, content="picture"))
        return [*outputs, Output(self.mask(name), palette=self.spec.id_colours)]

    def files(self, name: str) -> list[Path]:
        return [output.path for output in self.outputs(name)]

    def is_done(self, name: str) -> bool:
        return all(path.is_file() for path in self.files(name))

    def refuse_overwriting(self, inputs: Sequence[Input]) -> None:
        """Raises UserError if two results would have one name, or one would replace an image or a file that is no
        result, such as a mask of the dataset."""
        real_folder = cache(Path.resolve)
        sources = {real_folder(path.parent) / path.name for path, _ in inputs}
        owners: dict[str, Path] = {}
        if self.kinds.polygons:
            check_replaceable("--out", self.out / COCO_NAME, RESULT)
        for image, name in inputs:
            files = self.files(name)
            for path in files:
                other = owners.setdefault(str(path).casefold(), image)  # some file systems ignore case
                if other != image:
                    fix = "predict them in two commands with different --out"
                    fix = fix if other.parent == image.parent else f"name the folder above them, or {fix}"
                    raise UserError(f"{other} and {image}: both would write {path}; {fix}")
            if image.suffix.lower() in TIFF_SUFFIXES:  # it may be a GeoTIFF
                files += [path.with_suffix(".tif") for path in files if path.suffix == ".png"]
                files += [self.mask(name).with_suffix(".geojson")] if self.kinds.polygons else []
            for path in files:
                if real_folder(path.parent) / path.name in sources:
                    what = f"{path} is one of the images, and would be overwritten"
                    raise UserError(f"--out: {what}; choose another folder")
                check_replaceable("--out", path, ARRAY if path.suffix == ".npy" else RESULT)


def _plane(index: int, rows: Rows) -> Pixels:
    return rows.probabilities[index]


def class_folder(class_id: int, name: str) -> str:
    """A name that every file system takes."""
    plain = re.sub(r"[^\w-]+", "_", name).strip("_")[:80]
    return f"{class_id}-{plain}" if plain else str(class_id)


def value_table(coding: MaskCoding, num_ids: int) -> Pixels:
    """By class id: the value that masks of the dataset have, K uint8 or uint16, or K,3 uint8 for colours. Of a
    threshold, the highest value that is not ignored stands for the foreground. Raises UserError."""
    values = list(coding.values or ())
    if coding.values is None:
        most = 255 if coding.threshold < 255 else 65535
        above = next(value for value in range(most, coding.threshold, -1) if value not in coding.ignored)
        values = [1 if 0 in coding.ignored and coding.threshold > 0 else 0, above]
    values = values[:num_ids]
    if max(values) < COLOUR:
        return np.array(values, np.uint8 if max(values) <= 255 else np.uint16)
    if any(255 < value < COLOUR for value in values):
        what = "the dataset's masks have both colours and 16-bit values, which no single file can hold"
        raise UserError(f"--values: {what}")
    rgb = [(value >> 16, value >> 8, value) if value >= COLOUR else (value,) * 3 for value in values]
    return (np.array(rgb) & 255).astype(np.uint8)


class ImageFiles(contextlib.ExitStack):
    """The files of one image; use it in `with`. Its rows come from top to bottom, then `finish` gives the files their
    names. What has none at the end is deleted.

    `picture`: the image where it is in memory, for the overlay; else it is read again. Raises OSError, and ReadError
    where the image can no longer be read."""

    def __init__(self, folder: PredictionFolder, image: Input, size: Size, picture: ImageReader | None = None) -> None:
        super().__init__()
        self.folder, self.image, self.size, self.picture = folder, image, size, picture
        self.drafts: list[Draft] = []
        self.writers: list[tuple[RowWriter, Callable[[Rows], Pixels]]] = []
        self.ids: list[Pixels] = []  # kept for the polygons
        georeference = georeference_of(image.path)
        with contextlib.ExitStack() as unless_opened:
            unless_opened.push(self)
            for output in folder.outputs(image.name):
                self.writers += [(writer, output.take) for writer in self._open(output, georeference)]
            unless_opened.pop_all()

    def _open(self, output: Output, georeference: Georeference | None) -> Iterator[RowWriter]:
        """In the order in which they are given their names: the mask's PNG is the last file of all."""
        path, _, dtype, channels, palette, content, is_overlay = output
        if path.suffix == ".npy":
            shape = (*self.size, channels) if channels > 1 else self.size
            yield NpyWriter(self._draft(path), shape, dtype)
            return
        if georeference is not None and not is_overlay:
            file = self._draft(path.with_suffix(".tif"))
            yield TiffWriter(file, self.size, dtype, channels, palette, georeference.tags)
        png = PngWriter(self._draft(path), self.size, dtype, channels, palette, content)
        if not is_overlay:
            yield png
            return
        picture, spec = self.picture, self.folder.spec.image
        if picture is None:
            path, small = self.image.path, read_small(self.image.path, spec)
            picture = self.enter_context(open_reader(path, spec)) if small is None else ImageReader(small.pixels)
        yield OverlayWriter(png, picture, self.folder.colours, self.size)

    def _draft(self, path: Path) -> BinaryIO:
        self.folder.make_folder(path.parent)
        self.drafts.append(Draft(path))
        self.callback(self.drafts[-1].discard)
        return self.drafts[-1].file

    def write(self, rows: Rows) -> None:
        for writer, take in self.writers:
            writer.write(take(rows))
        if self.folder.kinds.polygons:
            self.ids.append(rows.ids)

    def finish(self) -> None:
        """Give the files their names."""
        for writer, _ in self.writers:
            writer.finish()
        for draft in self.drafts:
            draft.keep()


def georeference_of(path: Path) -> Georeference | None:
    return read_georeference(path) if path.suffix.lower() in TIFF_SUFFIXES else None


class OverlayWriter:
    """Reads the rows of the image as the ids of those rows come, and draws. One row behind: outlines depend on the row
    below."""

    def __init__(self, writer: PngWriter, picture: ImageReader, colours: Pixels, size: Size) -> None:
        self.writer, self.picture, self.colours, self.size = writer, picture, colours, size
        self.above: Pixels | None = None
        self.waiting = np.empty((0, size[1]), np.uint8)
        self.num_written, self.shown = 0, None
        if picture.read(slice(0, 1), slice(0, 1)).dtype != np.uint8:
            self.shown = display_range(picture.read_resized((SAMPLE_SIDE, SAMPLE_SIDE)))

    def write(self, rows: Pixels) -> None:
        ids = np.concatenate([self.waiting, rows])
        if len(ids) > 1:
            self._draw(ids[:-1], ids[-1:])
            self.above = ids[-2:-1]
        self.waiting = ids[-1:]

    def finish(self) -> None:
        self._draw(self.waiting, None)
        self.writer.finish()

    def _draw(self, ids: Pixels, below: Pixels | None) -> None:
        rows = slice(self.num_written, self.num_written + len(ids))
        image = to_display(self.picture.read(rows, slice(0, self.size[1])), self.shown)
        self.writer.write(overlay_rows(image, ids, self.above, below, self.colours))
        self.num_written = rows.stop


class CocoFile:
    """Polygons of all images. They are added in any order and from any thread, and wait in a temporary file; `finish`
    writes them in the order of the images. To be closed."""

    def __init__(self, path: Path, spec: SegmenterSpec) -> None:
        self.path, self.spec, self.lock = path, spec, threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.waiting: BinaryIO = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        # by number: about the image, and where its annotations wait: start, lines
        self.images: dict[int, tuple[dict[str, Any], int, int]] = {}
        self.close = self.waiting.close

    def add(self, index: int, file_name: str, ids: Pixels) -> None:
        """Add the image with this number among all inputs."""
        lines = [f"{json.dumps(_annotation(class_id, polygon))}\n".encode() for class_id, polygon in find_polygons(ids)]
        about = {"id": index + 1, "file_name": file_name, "width": ids.shape[1], "height": ids.shape[0]}
        with self.lock:
            self.images[index] = about, self.waiting.tell(), len(lines)
            self.waiting.writelines(lines)

    def finish(self) -> None:
        """Write the file, unless there is no image."""
        if not self.images:
            return
        in_order = [self.images[index] for index in sorted(self.images)]
        ids = range(1, self.spec.num_ids)
        categories = json_text([{"id": class_id, "name": self.spec.id_names[class_id]} for class_id in ids])
        images = ",".join(f"\n{json_text(about)}" for about, _, _ in in_order)
        head = f'{{"info": {{"description": "{MARK}"}},\n"categories": {categories},\n"images": [{images}],\n'

        def annotations() -> Iterator[bytes]:
            number = 0
            for about, start, num_lines in in_order:
                self.waiting.seek(start)
                for _ in range(num_lines):
                    number += 1
                    yield f'{{"id": {number}, "image_id": {about["id"]}, '.encode() + self.waiting.readline()[1:-1]

        _write_list(self.path, f'{head}"annotations": ', annotations())


def _write_list(path: Path, head: str, entries: Iterable[bytes]) -> None:
    """Write a JSON file that ends in a list, entry by entry."""
    draft = Draft(path)
    try:
        draft.file.write(f"{head}[".encode())
        for number, entry in enumerate(entries):
            draft.file.write((b",\n" if number else b"\n") + entry)
        draft.file.write(b"]}\n")
        draft.keep()
    finally:
        draft.discard()


def _annotation(class_id: int, polygon: Polygon) -> dict[str, Any]:
    """COCO has no holes: a polygon with some is one ring that goes to each and back."""
    left, top = polygon.outer.min(0).tolist()
    right, bottom = polygon.outer.max(0).tolist()
    ring, box = joined_rings(polygon).ravel().tolist(), [left, top, right - left, bottom - top]
    return {"category_id": class_id, "segmentation": [ring], "area": polygon.num_pixels, "bbox": box, "iscrowd": 0}


def write_geojson(path: Path, ids: Pixels, spec: SegmenterSpec, georeference: Georeference) -> None:
    """A feature for each object, in the coordinates of the image's own reference system, which `crs` names as GDAL and
    QGIS read it."""
    head: dict[str, Any] = {"type": "FeatureCollection", "generator": MARK}
    if georeference.epsg is not None:
        head["crs"] = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{georeference.epsg}"}}

    def features() -> Iterator[bytes]:
        for class_id, polygon in find_polygons(ids):
            about = {"class_id": class_id, "class": spec.id_names[class_id], "pixels": polygon.num_pixels}
            geometry = {"type": "Polygon", "coordinates": _coordinates(polygon, georeference)}
            yield json_text({"type": "Feature", "properties": about, "geometry": geometry}).encode()

    _write_list(path, f'{json.dumps(head)[:-1]}, "features": ', features())


def _coordinates(polygon: Polygon, georeference: Georeference) -> list[list[list[float]]]:
    """Closed rings; the outer one runs anticlockwise on the map, holes clockwise."""
    rings = []
    for index, ring in enumerate((polygon.outer, *polygon.holes)):
        places = georeference.places(ring)
        if (signed_area(places) > 0) != (index == 0):
            places = places[::-1]
        rings.append(np.concatenate([places, places[:1]]).tolist())
    return rings
