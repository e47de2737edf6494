"""Where on Earth the pixels of a GeoTIFF lie: read from its tags, which results carry on unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.images.file_bytes import ReadError, open_file
from unet_trainer.images.image_files import Pixels, check_tiff
from unet_trainer.images.image_headers import ORIENTATION, TIFF_STARTS
from unet_trainer.images.row_writers import ASCII, DOUBLE, SHORT, TiffTag

PIXEL_SCALE, TIE_POINTS, TRANSFORM, KEYS, KEY_DOUBLES, KEY_TEXTS = 33550, 33922, 34264, 34735, 34736, 34737
TAG_KINDS = {
    PIXEL_SCALE: DOUBLE, TIE_POINTS: DOUBLE, TRANSFORM: DOUBLE, KEYS: SHORT, KEY_DOUBLES: DOUBLE, KEY_TEXTS: ASCII,
}  # fmt: skip
RASTER_TYPE, PIXEL_IS_POINT = 1025, 2  # a key and a value: coordinates are those of the pixels' centres
PROJECTED, GEOGRAPHIC, USER_DEFINED = 3072, 2048, 32767  # keys of the CRS, and their value for one without a number

Affine = tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class Georeference:
    tags: tuple[TiffTag, ...]  # as they are in the file
    transform: Affine | None  # a, b, c, d, e, f: the corner at (column, row) lies at (a·column + b·row + c, d·column + e·row + f)
    epsg: int | None  # number of the coordinate reference system

    def places(self, corners: Pixels) -> Pixels:
        """n,2 (column, row) of pixel corners → n,2 coordinates."""
        assert self.transform is not None
        a, b, c, d, e, f = self.transform
        column, row = corners[:, 0].astype(float), corners[:, 1].astype(float)
        return np.stack([a * column + b * row + c, d * column + e * row + f], 1)


def read_georeference(path: Path) -> Georeference | None:
    """None where the file is no GeoTIFF, or is shown turned: its coordinates are of the pixels as stored."""
    try:
        with open_file(path) as file:
            if not file.read(4).startswith(TIFF_STARTS):
                return None
            check_tiff(file)
    except (OSError, ReadError):
        return None
    import tifffile

    try:
        with tifffile.TiffFile(path) as found:
            own = found.pages.first.tags
            values = {tag: _listed(own[tag].value) for tag in TAG_KINDS if tag in own}
            orientation = own.valueof(ORIENTATION, 1)
    except Exception:  # a broken file may raise anything here; reading its pixels tells why
        return None
    if not values.keys() & {PIXEL_SCALE, TRANSFORM, TIE_POINTS} or orientation != 1:
        return None
    tags = tuple(TiffTag(tag, TAG_KINDS[tag], content) for tag, content in values.items())
    keys = _keys(values.get(KEYS, []))
    crs = next((keys[name] for name in (PROJECTED, GEOGRAPHIC) if keys.get(name, USER_DEFINED) != USER_DEFINED), None)
    return Georeference(tags, _transform(values, keys.get(RASTER_TYPE) == PIXEL_IS_POINT), crs)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [*value.encode("utf-8"), 0]
    return [value] if isinstance(value, int | float) else list(value)


def _keys(directory: list[int]) -> dict[int, int]:
    """Keys whose value is a number in the directory itself; each has four numbers: key, where its value is, how many, value."""
    entries = [directory[start : start + 4] for start in range(4, len(directory), 4)]
    return {entry[0]: entry[3] for entry in entries if len(entry) == 4 and entry[1] == 0}


def _transform(values: dict[int, list[Any]], is_point: bool) -> Affine | None:
    """None for ground control points alone, which are no affine map."""
    if len(values.get(TRANSFORM, [])) == 16:
        matrix = values[TRANSFORM]
        a, b, c, d, e, f = matrix[0], matrix[1], matrix[3], matrix[4], matrix[5], matrix[7]
    elif len(values.get(PIXEL_SCALE, [])) >= 2 and len(values.get(TIE_POINTS, [])) >= 6:
        scale, (column, row, _, x, y, _) = values[PIXEL_SCALE], values[TIE_POINTS][:6]
        a, b, c, d, e, f = scale[0], 0.0, x - column * scale[0], 0.0, -scale[1], y + row * scale[1]
    else:
        return None
    if is_point:
        c, f = c - (a + b) / 2, f - (d + e) / 2
    return a, b, c, d, e, f
