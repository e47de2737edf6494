"""Images that are read in parts, so that one of many gigabytes needs no more memory than the part that is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from unet_trainer.images.image_files import Pixels
from unet_trainer.images.tiling import Size, fit_image


class ImageReader(Protocol):
    @property
    def size(self) -> Size: ...

    def read(self, rows: slice, columns: slice) -> Pixels:
        """H,W,C of a part, in the file's own depth. Raises ReadError."""

    def read_resized(self, size: Size) -> Pixels:
        """H,W,C of the whole image, at about this size or larger, pixels averaged."""


@dataclass(frozen=True)
class ArrayReader:
    """An image that is in memory."""

    pixels: Pixels  # H,W,C

    @property
    def size(self) -> Size:
        return self.pixels.shape[0], self.pixels.shape[1]

    def read(self, rows: slice, columns: slice) -> Pixels:
        return np.ascontiguousarray(self.pixels[rows, columns])

    def read_resized(self, size: Size) -> Pixels:
        return fit_image(self.pixels, size)
