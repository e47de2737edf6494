"""The files of a prediction, written some rows at a time under temporary names: all files of an image are there, or
none.

OUT/a/b.png                   class ids, with a palette          OUT/a/b.tif   the same, where the image is a GeoTIFF
OUT/values/a/b.png            the mask values of the dataset     (of values and probabilities too)
OUT/overlays/a/b.png          the image, with the classes drawn over it
OUT/probabilities/a/b.png     16 bit, of the foreground; of several classes OUT/probabilities/1-name/a/b.png; or .npy
OUT/polygons.json             COCO, of all images                OUT/a/b.geojson   where the image is a GeoTIFF
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from PIL import Image

from unet_trainer.config.errors import UserError
from unet_trainer.images.drawing import display_range, overlay_rows, to_display
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageReader, open_reader, read_small
from unet_trainer.images.mask_decoding import COLOUR, MaskCoding
from unet_trainer.images.mask_shapes import Polygon, find_polygons, joined_rings
from unet_trainer.images.row_writers import MARK, PROBABILITIES, Content, NpyWriter, PngWriter, RowWriter, TiffWriter
from unet_trainer.images.tiff_files import Georeference, read_georeference
from unet_trainer.images.tiling import Size
from unet_trainer.inference.inputs import Input
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.atomic_files import Draft, Kind, check_replaceable, write_text_atomically
from unet_trainer.system.console import json_text

RESULT = Kind("result of predict", b".*" + MARK.encode())
ARRAY = Kind(".npy array", rb"\x93NUMPY")
VALUES, OVERLAYS = "values", "overlays"  # folders in OUT, beside PROBABILITIES
COCO_NAME = "polygons.json"
TIFF_SUFFIXES = (".tif", ".tiff")
SAMPLE_SIDE = 512  # of the reduced image that tells how a large one is to be displayed
FULL = 65535  # a probability of 1 in a PNG
# Results of some rows of an image: rows,W uint8 ids; if they are wanted, M,rows,W probabilities of the stored ids,
# uint16 for PNG, float32 for .npy.
Rows = Sequence[Pixels]


@dataclass(frozen=True)
class Kinds:
    """What is written besides the class ids."""

    values: bool = False
    overlay: bool = False
    probabilities: Literal["png", "npy"] | None = None
    polygons: bool = False


class Output(NamedTuple):
    """One file of an image: what it holds of the results, and its form."""

    path: Path
    take: Callable[[Rows], Pixels]
    dtype: DTypeLike = np.uint8
    channels: int = 1
    palette: Sequence[tuple[int, int, int]] | None = None
    content: Content = "mask"


class PredictionFolder:
    """Where results go, and in which form."""

    def __init__(self, out: Path, spec: SegmenterSpec, kinds: Kinds) -> None:
        self.out, self.spec, self.kinds = out, spec, kinds
        # once: asking the system for each image would cost as much as drawing its mask
        self.make_folder = cache(lambda folder: folder.mkdir(parents=True, exist_ok=True))
        self.values = value_table(spec.coding, spec.num_ids) if kinds.values else np.zeros(0)
        self.colours = np.zeros((256, 3), np.uint8)
        self.colours[: spec.num_ids] = spec.id_colours
        # Two ids: the foreground's probability says all.
        self.probable_ids = [1] if spec.num_ids == 2 else list(range(spec.num_ids))

    def mask(self, name: str) -> Path:
        return self.out / f"{name}.png"

    def outputs(self, name: str) -> list[Output]:
        """Of one image, besides its overlay, GeoTIFFs and polygons; its mask is written last."""
        kinds, outputs = self.kinds, list[Output]()
        if kinds.values:
            path, channels = self.out / VALUES / f"{name}.png", 3 if self.values.ndim == 2 else 1
            outputs.append(Output(path, lambda rows: self.values[rows[0]], self.values.dtype, channels))
        if kinds.probabilities == "npy":
            path, channels = self.out / PROBABILITIES / f"{name}.npy", len(self.probable_ids)
            outputs.append(Output(path, lambda rows: np.moveaxis(rows[1], 0, 2), np.float32, channels))
        for index, class_id in enumerate(self.probable_ids if kinds.probabilities == "png" else ()):
            plain = re.sub(r"[^\w-]+", "_", self.spec.id_names[class_id]).strip("_")[:80]  # for any file system
            inner = "" if len(self.probable_ids) == 1 else f"{class_id}-{plain}".removesuffix("-")
            take = partial(lambda index, rows: rows[1][index], index)
            path = self.out / PROBABILITIES / inner / f"{name}.png"
            outputs.append(Output(path, take, np.uint16, content="picture"))
        return [*outputs, Output(self.mask(name), lambda rows: rows[0], palette=self.spec.id_colours)]

    def overlay(self, name: str) -> Path:
        return self.out / OVERLAYS / f"{name}.png"

    def files(self, name: str) -> list[Path]:
        return [output.path for output in self.outputs(name)] + [self.overlay(name)] * self.kinds.overlay

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
                    raise UserError(f"{other} and {image}: both would write {path}; give each its own --out")
            if image.suffix.lower() in TIFF_SUFFIXES:  # it may be a GeoTIFF
                files += [path.with_suffix(".tif") for path in files if path.suffix == ".png"]
                files += [self.mask(name).with_suffix(".geojson")] if self.kinds.polygons else []
            for path in files:
                if real_folder(path.parent) / path.name in sources:
                    raise UserError(f"--out: {path} is one of the images, and would be overwritten; choose another")
                check_replaceable("--out", path, ARRAY if path.suffix == ".npy" else RESULT)


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


@contextlib.contextmanager
def image_files(
    folder: PredictionFolder, image: Input, size: Size, picture: ImageReader | None = None
) -> Iterator[Callable[[Rows], None]]:
    """Yield what takes the rows of one image from top to bottom; then its files get their names. After an exception
    there are none.

    `picture`: the image where it is in memory, for the overlay; else it is read again. Raises OSError, and ReadError
    where the image can no longer be read."""
    georeference, spec = georeference_of(image.path), folder.spec.image
    drafts: list[Draft] = []
    writers: list[tuple[RowWriter, Callable[[Rows], Pixels]]] = []  # the mask's PNG is last
    with contextlib.ExitStack() as stack:

        def draft(path: Path) -> BinaryIO:
            folder.make_folder(path.parent)
            drafts.append(Draft(path))
            stack.callback(drafts[-1].discard)
            return drafts[-1].file

        if folder.kinds.overlay:
            if picture is None:
                small = read_small(image.path, spec)
                reader = open_reader(image.path, spec)
                picture = stack.enter_context(reader) if small is None else ImageReader(small.pixels)
            png = PngWriter(draft(folder.overlay(image.name)), size, np.uint8, 3, content="picture")
            writers.append((OverlayWriter(png, picture, folder.colours, size[1]), lambda rows: rows[0]))
        for path, take, dtype, channels, palette, content in folder.outputs(image.name):
            if path.suffix == ".npy":
                writers.append((NpyWriter(draft(path), (*size, channels) if channels > 1 else size, dtype), take))
                continue
            if georeference is not None:
                file = draft(path.with_suffix(".tif"))
                writers.append((TiffWriter(file, size, dtype, channels, palette, georeference.tags), take))
            writers.append((PngWriter(draft(path), size, dtype, channels, palette, content), take))

        def write(rows: Rows) -> None:
            for writer, take in writers:
                writer.write(take(rows))

        yield write
        for writer, _ in writers:
            writer.finish()
        for each in drafts:
            each.keep()


def georeference_of(path: Path) -> Georeference | None:
    return read_georeference(path) if path.suffix.lower() in TIFF_SUFFIXES else None


class OverlayWriter:
    """Reads the rows of the image as the ids of those rows come, and draws. One row behind: outlines depend on the row
    below."""

    def __init__(self, writer: RowWriter, picture: ImageReader, colours: Pixels, width: int) -> None:
        self.writer, self.picture, self.colours, self.columns = writer, picture, colours, slice(0, width)
        self.ids = np.empty((0, width), np.uint8)  # the last row that was drawn, and the one that waits
        self.num_drawn, self.shown = 0, None
        if picture.read(slice(0, 1), slice(0, 1)).dtype != np.uint8:
            self.shown = display_range(picture.read_resized((SAMPLE_SIDE, SAMPLE_SIDE)))

    def write(self, rows: Pixels, is_last: bool = False) -> None:
        ids = np.concatenate([self.ids, rows])
        first, stop = min(self.num_drawn, 1), len(ids) if is_last else len(ids) - 1
        if stop > first:
            place = slice(self.num_drawn, self.num_drawn + stop - first)
            image = to_display(self.picture.read(place, self.columns), self.shown)
            above, below = ids[:1] if first else None, None if is_last else ids[-1:]
            self.writer.write(overlay_rows(image, ids[first:stop], above, below, self.colours))
            self.num_drawn = place.stop
        self.ids = ids[-2:] if self.num_drawn else ids

    def finish(self) -> None:
        self.write(self.ids[:0], is_last=True)
        self.writer.finish()


# Polygons are made from the masks at the end, of an earlier run too, in the order of the images.


def image_polygons(folder: PredictionFolder, number: int, image: Input) -> tuple[dict[str, Any], list[Any]] | None:
    """Entry and annotations of an image in the COCO file; None of a GeoTIFF, which gets a file of its own."""
    path, georeference = folder.mask(image.name), georeference_of(image.path)
    with Image.open(path) as mask:
        ids = np.array(mask)
    if ids.max() >= folder.spec.num_ids:
        raise UserError(f"{path}: class {ids.max()} is none of this model's; leave out --skip-existing")
    if georeference is not None and georeference.transform is not None:
        write_geojson(path.with_suffix(".geojson"), ids, folder.spec, georeference)
        return None
    entry = {"id": number, "file_name": f"{image.name}{image.path.suffix}"}
    entry |= {"width": ids.shape[1], "height": ids.shape[0]}
    return entry, [_annotation(class_id, polygon) for class_id, polygon in find_polygons(ids)]


def write_coco(folder: PredictionFolder, found: Iterable[tuple[dict[str, Any], list[Any]]]) -> None:
    """Write what `image_polygons` found in each image as it comes, unless there is no image."""
    categories = [{"id": class_id, "name": name} for class_id, name in enumerate(folder.spec.id_names)][1:]
    head = json_text({"info": {"description": MARK}, "categories": categories})[:-1]
    images, number, draft = list[dict[str, Any]](), 0, Draft(folder.out / COCO_NAME)
    try:
        draft.file.write(f'{head},\n"annotations": ['.encode())
        for entry, polygons in found:
            images.append(entry)
            for polygon in polygons:
                number += 1
                annotation = json_text({"id": number, "image_id": entry["id"], **polygon})
                draft.file.write(f"{',' if number > 1 else ''}\n{annotation}".encode())
        draft.file.write(f'],\n"images": {json_text(images)}}}\n'.encode())
        if images:
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
    """A feature for each object, in the image's own reference system, which `crs` names as GDAL and QGIS read it."""
    content: dict[str, Any] = {"type": "FeatureCollection", "generator": MARK}
    if georeference.epsg is not None:
        content["crs"] = {"type": "name", "properties": {"name": f"urn:ogc:def:crs:EPSG::{georeference.epsg}"}}
    features: list[dict[str, Any]] = []
    for class_id, polygon in find_polygons(ids):
        about = {"class_id": class_id, "class": spec.id_names[class_id], "pixels": polygon.num_pixels}
        # Closed; where north is up, the outer ring runs anticlockwise on the map, holes clockwise.
        rings = [georeference.places(ring)[::-1] for ring in (polygon.outer, *polygon.holes)]
        geometry = {"type": "Polygon", "coordinates": [[*ring.tolist(), ring[0].tolist()] for ring in rings]}
        features.append({"type": "Feature", "properties": about, "geometry": geometry})
    write_text_atomically(path, json_text({**content, "features": features}) + "\n")
