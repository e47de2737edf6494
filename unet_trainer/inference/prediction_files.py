"""The files of a prediction, written some rows at a time under temporary names: all files of an image are there, or none.

OUT/a/b.png                   class ids, with a palette          OUT/a/b.tif   the same, where the image is a GeoTIFF
OUT/values/a/b.png            the mask values of the dataset     (of values and probabilities too)
OUT/overlays/a/b.png          the image, with the classes drawn over it
OUT/probabilities/a/b.png     16 bit, of the foreground; with more classes OUT/probabilities/1-name/a/b.png each; or .npy
OUT/polygons.json             COCO, of all images                OUT/a/b.geojson   where the image is a GeoTIFF
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.images.drawing import display_range, overlay_rows, to_display
from unet_trainer.images.image_files import COLOUR, Pixels
from unet_trainer.images.image_readers import ImageReader, open_reader, read_small
from unet_trainer.images.mask_coding import MaskCoding
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
    was_written_here,
)
from unet_trainer.images.tiff_files import Georeference, read_georeference
from unet_trainer.images.tiling import Size
from unet_trainer.inference.inputs import Input
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.atomic_files import Draft, discard_drafts
from unet_trainer.system.console import json_text

ProbabilityFormat = Literal["png", "npy"]

VALUES, OVERLAYS = "values", "overlays"  # folders in OUT, beside PROBABILITIES
COCO_NAME = "polygons.json"
SAMPLE_SIDE = 512  # of the reduced image that tells how a large one is to be displayed
FULL = 65535  # a probability of 1 in a PNG


@dataclass(frozen=True)
class Kinds:
    """What is written besides the class ids."""

    values: bool = False
    overlay: bool = False
    probabilities: ProbabilityFormat | None = None
    polygons: bool = False


class Rows(NamedTuple):
    """Results of some rows of an image."""

    ids: Pixels  # rows,W uint8
    probabilities: Pixels | None  # M,rows,W of the stored ids: uint16 for PNG, float32 for .npy


class PredictionFolder:
    """Where results go, and in which form."""

    def __init__(self, out: Path, spec: SegmenterSpec, kinds: Kinds) -> None:
        self.out, self.spec, self.kinds = out, spec, kinds
        self.values = value_table(spec.coding, spec.num_ids) if kinds.values else np.zeros(0)
        self.colours = np.zeros((256, 3), np.uint8)
        self.colours[: spec.num_ids] = spec.id_colours
        # Two ids: the foreground's probability says all.
        self.probable_ids = [1] if spec.num_ids == 2 else list(range(spec.num_ids))

    def discard_drafts(self, name: str, processes: Sequence[int]) -> None:
        """Deletes what processes that were killed left behind of the files of one image."""
        for path in self.files(name):
            for written in {path, path.with_suffix(".tif")}:
                for process in processes:
                    discard_drafts(written, process)

    def mask(self, name: str) -> Path:
        return self.out / f"{name}.png"

    def files(self, name: str) -> list[Path]:
        """Of one image, whatever its format; its mask is written last."""
        found = []
        if self.kinds.values:
            found.append(self.out / VALUES / f"{name}.png")
        if self.kinds.overlay:
            found.append(self.out / OVERLAYS / f"{name}.png")
        return [*found, *self.probability_files(name), self.mask(name)]

    def probability_files(self, name: str) -> list[Path]:
        folder = self.out / PROBABILITIES
        if self.kinds.probabilities is None:
            return []
        if self.kinds.probabilities == "npy":
            return [folder / f"{name}.npy"]
        if len(self.probable_ids) == 1:
            return [folder / f"{name}.png"]
        return [folder / class_folder(class_id, self.spec.id_names[class_id]) / f"{name}.png" for class_id in self.probable_ids]

    def is_done(self, name: str) -> bool:
        return all(path.is_file() for path in self.files(name))

    def refuse_overwriting(self, inputs: Sequence[Input]) -> None:
        """Raises UserError if two results would have one name, or one would replace an image or a file that is no result, such as
        a mask of the dataset."""
        sources = {_real(given.path) for given in inputs}
        owners: dict[Path, Path] = {}
        if self.kinds.polygons:
            _refuse_foreign(self.out / COCO_NAME, beside=self.mask(inputs[0].name))
        for given in inputs:
            may_be_geotiff = given.path.suffix.lower() in (".tif", ".tiff")
            for path in self.files(given.name):
                for written in (path, path.with_suffix(".tif")) if may_be_geotiff and path.suffix == ".png" else (path,):
                    if _real(written) in sources:
                        raise UserError(f"--out: {written} is one of the images, and would be overwritten; choose another folder")
                    _refuse_foreign(written, beside=path)
                if owners.setdefault(path, given.path) != given.path:
                    raise UserError(f"{owners[path]} and {given.path}: both would write {path}; predict them in two commands")
            if may_be_geotiff and self.kinds.polygons:
                _refuse_foreign(self.mask(given.name).with_suffix(".geojson"), beside=self.mask(given.name))


@lru_cache(maxsize=4096)
def _real_folder(folder: Path) -> Path:
    return folder.resolve()


def _real(path: Path) -> Path:
    return _real_folder(path.parent) / path.name


def class_folder(class_id: int, name: str) -> str:
    """A name that every file system takes."""
    plain = re.sub(r"[^\w-]+", "_", name).strip("_")[:80]
    return f"{class_id}-{plain}" if plain else str(class_id)


def _refuse_foreign(path: Path, beside: Path) -> None:
    """Raises UserError where a result would replace a file that predict did not write. `beside`: a PNG of the same run, since early
    versions marked no others. Arrays have no mark."""
    if path.suffix != ".npy" and path.is_file() and not (was_written_here(path) or was_written_here(beside)):
        raise UserError(f"--out: {path} is there and is no result of predict; choose another folder")


def value_table(coding: MaskCoding, num_ids: int) -> Pixels:
    """By class id: the value that masks of the dataset have, K uint8 or uint16, or K,3 uint8 for colours.

    Where any value above a threshold is foreground, the highest that is not ignored stands for it. Raises UserError.
    """
    values = list(coding.values or ())
    if coding.values is None:
        most = 255 if coding.threshold < 255 else 65535
        values = [0, next(value for value in range(most, coding.threshold, -1) if value not in coding.ignored)]
        if 0 in coding.ignored and coding.threshold > 0:
            values[0] = 1
    values = values[:num_ids]
    if max(values) < COLOUR:
        return np.array(values, np.uint8 if max(values) <= 255 else np.uint16)
    if any(255 < value < COLOUR for value in values):
        raise UserError("--values: the dataset's masks have both colours and 16-bit values, which no single file can hold")
    return np.array(
        [((value >> 16) & 255, (value >> 8) & 255, value & 255) if value >= COLOUR else (value,) * 3 for value in values], np.uint8
    )


class ImageFiles:
    """The files of one image. Its rows come from top to bottom; then `finish` or `discard`.

    `picture`: the image where it is in memory, for the overlay; else it is read again. Raises OSError, and ReadError where the
    image can no longer be read.
    """

    def __init__(self, folder: PredictionFolder, given: Input, size: Size, picture: ImageReader | None = None) -> None:
        self.folder, self.given, self.size, self.picture = folder, given, size, picture
        self.georeference = georeference_of(given.path)
        self.drafts: list[Draft] = []
        self.writers: list[tuple[RowWriter, Callable[[Rows], Pixels]]] = []
        self.resources = contextlib.ExitStack()
        self.ids: list[Pixels] = []  # kept for the polygons
        try:
            self._open_all()
        except BaseException:
            self.discard()
            raise

    def _open_all(self) -> None:
        folder, kinds, name = self.folder, self.folder.kinds, self.given.name
        if kinds.values:
            table = folder.values
            channels = 3 if table.ndim == 2 else 1
            self._add_rasters(folder.out / VALUES / f"{name}.png", lambda rows: table[rows.ids], table.dtype, channels)
        if kinds.overlay:
            writer = PngWriter(self._draft(folder.out / OVERLAYS / f"{name}.png").file, self.size, np.uint8, 3, None, "picture")
            self.writers.append((OverlayWriter(writer, self._open_picture(), folder.colours, self.size), lambda rows: rows.ids))
        paths, num_stored = folder.probability_files(name), len(folder.probable_ids)
        if kinds.probabilities == "npy":
            shape = self.size if num_stored == 1 else (*self.size, num_stored)
            self.writers.append((NpyWriter(self._draft(paths[0]).file, shape, np.float32), partial(_planes, shape=shape)))
        else:
            for index, path in enumerate(paths):
                self._add_rasters(path, partial(_plane, index=index), np.dtype(np.uint16), content="picture")
        self._add_rasters(folder.mask(name), lambda rows: rows.ids, np.dtype(np.uint8), palette=folder.spec.id_colours)

    def _add_rasters(
        self,
        path: Path,
        take: Callable[[Rows], Pixels],
        dtype: np.dtype[np.generic],
        channels: int = 1,
        palette: Palette | None = None,
        content: Content = "mask",
    ) -> None:
        """A PNG and, with a georeference, a GeoTIFF, which is given its name first: the mask's PNG is the last file of all."""
        if self.georeference is not None:
            file = self._draft(path.with_suffix(".tif")).file
            self.writers.append((TiffWriter(file, self.size, dtype, channels, palette, self.georeference.tags, content), take))
        self.writers.append((PngWriter(self._draft(path).file, self.size, dtype, channels, palette, content), take))

    def _draft(self, path: Path) -> Draft:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.drafts.append(Draft(path))
        return self.drafts[-1]

    def _open_picture(self) -> ImageReader:
        if self.picture is not None:
            return self.picture
        spec = self.folder.spec.image
        found = read_small(self.given.path, spec)
        return self.resources.enter_context(open_reader(self.given.path, spec)) if found is None else ImageReader(found[0])

    def write(self, rows: Rows) -> None:
        for writer, take in self.writers:
            writer.write(take(rows))
        if self.folder.kinds.polygons:
            self.ids.append(rows.ids)

    def all_ids(self) -> Pixels:
        """H,W, where polygons are wanted."""
        return self.ids[0] if len(self.ids) == 1 else np.concatenate(self.ids)

    def finish(self) -> None:
        """Gives the files their names."""
        try:
            for writer, _ in self.writers:
                writer.finish()
            for draft in self.drafts:
                draft.keep()
        finally:
            self.discard()

    def discard(self) -> None:
        """Deletes what has not got its name."""
        for draft in self.drafts:
            draft.discard()
        self.resources.close()


def write_image(folder: PredictionFolder, given: Input, rows: Rows) -> None:
    """All files of an image whose rows are all there. Raises as ImageFiles does."""
    size = rows.ids.shape[0], rows.ids.shape[1]
    files = ImageFiles(folder, given, size)
    try:
        files.write(rows)
        files.finish()
    finally:
        files.discard()


def georeference_of(path: Path) -> Georeference | None:
    return read_georeference(path) if path.suffix.lower() in (".tif", ".tiff") else None


def _plane(rows: Rows, index: int) -> Pixels:
    assert rows.probabilities is not None
    return rows.probabilities[index]


def _planes(rows: Rows, shape: tuple[int, ...]) -> Pixels:
    """As an array of this shape has them: H,W,M, or H,W of a single one."""
    assert rows.probabilities is not None
    return rows.probabilities[0] if len(shape) == 2 else np.moveaxis(rows.probabilities, 0, 2)


class OverlayWriter:
    """Reads the rows of the image as the ids of those rows come, and draws. One row behind: outlines depend on the row below."""

    def __init__(self, writer: PngWriter, picture: ImageReader, colours: Pixels, size: Size) -> None:
        self.writer, self.picture, self.colours, self.size = writer, picture, colours, size
        self.above: Pixels | None = None
        self.waiting = np.empty((0, size[1]), np.uint8)
        self.num_written = 0
        corner = picture.read(slice(0, 1), slice(0, 1))
        self.shown = None if corner.dtype == np.uint8 else display_range(picture.read_resized((SAMPLE_SIDE, SAMPLE_SIDE)))

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
    """Images may be added in any order and from any thread; the file has them in theirs. Annotations go to a temporary file as
    they come: only those of images that wait for one before them are in memory. To be finished or discarded."""

    def __init__(self, path: Path, spec: SegmenterSpec, num_images: int) -> None:
        self.lock = threading.Lock()
        self.num_images = num_images
        self.waiting: dict[int, tuple[str, Size, list[dict[str, Any]]] | None] = {}
        self.next_index = 0
        self.num_written = self.num_annotations = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.draft = Draft(path)
        self.annotations: BinaryIO = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 # closed when it is finished
        categories = [{"id": class_id, "name": spec.id_names[class_id]} for class_id in range(1, spec.num_ids)]
        self._write(self.draft.file, f'{{"info": {{"description": "{MARK}"}},\n"categories": {json_text(categories)},\n"images": [')

    def add(self, index: int, file_name: str, size: Size, ids: Pixels) -> None:
        """The image with this place among all inputs."""
        found = [_annotation(class_id, polygon) for class_id, polygon in find_polygons(ids)]
        self._release(index, (file_name, size, found))

    def leave_out(self, index: int) -> None:
        """An image that could not be read, or has a file of its own."""
        self._release(index, None)

    def finish(self) -> None:
        assert self.next_index == self.num_images, f"{self.next_index} of {self.num_images} images"
        self._write(self.draft.file, '],\n"annotations": [')
        self.annotations.seek(0)
        shutil.copyfileobj(self.annotations, self.draft.file)
        self._write(self.draft.file, "]}\n")
        self.draft.keep()
        self.annotations.close()

    def discard(self) -> None:
        self.draft.discard()
        self.annotations.close()

    def _release(self, index: int, content: tuple[str, Size, list[dict[str, Any]]] | None) -> None:
        with self.lock:
            self.waiting[index] = content
            while self.next_index in self.waiting:
                following = self.waiting.pop(self.next_index)
                self.next_index += 1
                if following is not None:
                    self._append(self.next_index, *following)

    def _append(self, image_id: int, file_name: str, size: Size, found: list[dict[str, Any]]) -> None:
        image = {"id": image_id, "file_name": file_name, "width": size[1], "height": size[0]}
        self._write(self.draft.file, f"{',' if self.num_written else ''}\n{json_text(image)}")
        self.num_written += 1
        for annotation in found:
            separator = "," if self.num_annotations else ""
            self.num_annotations += 1
            line = json.dumps({"id": self.num_annotations, "image_id": image_id, **annotation})
            self._write(self.annotations, f"{separator}\n{line}")

    def _write(self, file: BinaryIO, text: str) -> None:
        file.write(text.encode())


def _annotation(class_id: int, polygon: Polygon) -> dict[str, Any]:
    """COCO has no holes: a polygon with some is one ring that goes to each and back."""
    left, top = polygon.outer.min(0).tolist()
    right, bottom = polygon.outer.max(0).tolist()
    return {
        "category_id": class_id,
        "segmentation": [joined_rings(polygon).ravel().tolist()],
        "area": polygon.num_pixels,
        "bbox": [left, top, right - left, bottom - top],
        "iscrowd": 0,
    }


def write_geojson(path: Path, ids: Pixels, spec: SegmenterSpec, georeference: Georeference) -> None:
    """A feature for each object, in the coordinates of the image's own reference system, which `crs` names as GDAL and QGIS read
    it."""
    head: dict[str, Any] = {"type": "FeatureCollection", "generator": MARK}
    if georeference.epsg is not None:
        head["crs"] = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{georeference.epsg}"}}
    draft = Draft(path)
    try:
        draft.file.write(f'{json.dumps(head)[:-1]}, "features": ['.encode())
        separator = ""
        for class_id, polygon in find_polygons(ids):
            feature = {
                "type": "Feature",
                "properties": {"class_id": class_id, "class": spec.id_names[class_id], "pixels": polygon.num_pixels},
                "geometry": {"type": "Polygon", "coordinates": _coordinates(polygon, georeference)},
            }
            draft.file.write(f"{separator}\n{json_text(feature)}".encode())
            separator = ","
        draft.file.write(b"]}\n")
        draft.keep()
    finally:
        draft.discard()


def _coordinates(polygon: Polygon, georeference: Georeference) -> list[list[list[float]]]:
    """Closed rings; the outer one runs anticlockwise on the map, holes clockwise."""
    rings = []
    for index, ring in enumerate((polygon.outer, *polygon.holes)):
        places = georeference.places(ring)
        if (signed_area(places) > 0) != (index == 0):
            places = places[::-1]
        rings.append(np.concatenate([places, places[:1]]).tolist())
    return rings
