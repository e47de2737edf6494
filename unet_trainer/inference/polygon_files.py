"""Polygons of what was predicted: one COCO file of all images, or a GeoJSON file for each GeoTIFF, in its own coordinates."""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from unet_trainer.images.georeference import Georeference
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.mask_outlines import Polygon, find_polygons, joined_rings, signed_area
from unet_trainer.images.row_writers import MARK
from unet_trainer.images.tiling import Size
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.atomic_files import Draft
from unet_trainer.system.names import json_text


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
        places: NDArray[np.float64] = georeference.places(ring)
        if (signed_area(places) > 0) != (index == 0):
            places = places[::-1]
        rings.append(np.concatenate([places, places[:1]]).tolist())
    return rings
