"""The files of a prediction, written some rows at a time under temporary names: all files of an image are there, or none.

OUT/a/b.png                   class ids, with a palette          OUT/a/b.tif   the same, where the image is a GeoTIFF
OUT/values/a/b.png            the mask values of the dataset     (of values and probabilities too)
OUT/overlays/a/b.png          the image, with the classes drawn over it
OUT/probabilities/a/b.png     16 bit, of the foreground; with more classes OUT/probabilities/1-name/a/b.png each; or .npy
OUT/polygons.json             COCO, of all images                OUT/a/b.geojson   where the image is a GeoTIFF
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.images.georeference import Georeference, read_georeference
from unet_trainer.images.image_files import COLOUR, Pixels
from unet_trainer.images.image_readers import ArrayReader, ImageReader, open_reader, read_small
from unet_trainer.images.mask_coding import MaskCoding
from unet_trainer.images.overlays import display_range, overlay_rows, to_display
from unet_trainer.images.row_writers import Content, NpyWriter, Palette, PngWriter, RowWriter, TiffWriter, was_written_here
from unet_trainer.images.tiling import Size
from unet_trainer.inference.inputs import Input
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.atomic_files import Draft, discard_drafts

ProbabilityFormat = Literal["png", "npy"]

VALUES, OVERLAYS, PROBABILITIES = "values", "overlays", "probabilities"  # folders in OUT
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
        self.made: set[Path] = set()
        # Two ids: the foreground's probability says all.
        self.probable_ids = [1] if spec.num_ids == 2 else list(range(spec.num_ids))

    def make(self, folder: Path) -> None:
        if folder not in self.made:
            folder.mkdir(parents=True, exist_ok=True)
            self.made.add(folder)

    def discard_drafts(self, name: str, process: int) -> None:
        """Deletes what a process that was killed left behind of the files of one image."""
        for path in self.files(name):
            for written in {path, path.with_suffix(".tif")}:
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

    def __init__(
        self,
        folder: PredictionFolder,
        given: Input,
        size: Size,
        georeference: Georeference | None = None,
        picture: ImageReader | None = None,
    ) -> None:
        self.folder, self.given, self.size, self.georeference, self.picture = folder, given, size, georeference, picture
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
        folder, kinds, spec = self.folder, self.folder.kinds, self.folder.spec
        if kinds.values:
            table = folder.values
            channels = 3 if table.ndim == 2 else 1
            path = folder.out / VALUES / f"{self.given.name}.png"
            self._add_rasters(path, lambda rows: table[rows.ids], table.dtype, channels=channels)
        if kinds.overlay:
            writer = PngWriter(
                self._draft(folder.out / OVERLAYS / f"{self.given.name}.png").file, self.size, np.uint8, 3, None, "picture"
            )
            self.writers.append((OverlayWriter(writer, self._open_picture(), folder.colours, self.size), lambda rows: rows.ids))
        self._open_probabilities()
        palette = spec.id_colours
        self._add_rasters(folder.mask(self.given.name), lambda rows: rows.ids, np.dtype(np.uint8), palette=palette)

    def _open_probabilities(self) -> None:
        paths = self.folder.probability_files(self.given.name)
        num_stored = len(self.folder.probable_ids)
        if self.folder.kinds.probabilities == "npy":
            shape = self.size if num_stored == 1 else (*self.size, num_stored)
            writer = NpyWriter(self._draft(paths[0]).file, shape, np.float32)
            self.writers.append((writer, lambda rows: _plane(rows, 0) if num_stored == 1 else np.moveaxis(_stored(rows), 0, 2)))
            return
        for index, path in enumerate(paths):
            self._add_rasters(path, lambda rows, index=index: _plane(rows, index), np.dtype(np.uint16), content="picture")  # type: ignore[misc]

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
        self.folder.make(path.parent)
        self.drafts.append(Draft(path))
        return self.drafts[-1]

    def _open_picture(self) -> ImageReader:
        if self.picture is not None:
            return self.picture
        channels = self.folder.spec.image.channels
        found = read_small(self.given.path, channels)
        return self.resources.enter_context(open_reader(self.given.path, channels)) if found is None else ArrayReader(found[0])

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
    files = ImageFiles(folder, given, size, georeference_of(given.path))
    try:
        files.write(rows)
        files.finish()
    finally:
        files.discard()


def georeference_of(path: Path) -> Georeference | None:
    return read_georeference(path) if path.suffix.lower() in (".tif", ".tiff") else None


def _stored(rows: Rows) -> Pixels:
    assert rows.probabilities is not None
    return rows.probabilities


def _plane(rows: Rows, index: int) -> Pixels:
    return _stored(rows)[index]


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
