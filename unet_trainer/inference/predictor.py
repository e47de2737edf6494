"""One image of any size → logits at its own size, in bands of rows: ids, probabilities and files are made from the bands, so that
memory does not grow with the image.

    fit: resize    the whole image at the size that the model was trained at; logits are upsampled
    fit: crop      the whole image at native resolution, or overlapping tiles where it is large
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels
from unet_trainer.images.image_readers import ArrayReader, ImageReader
from unet_trainer.images.image_spec import ImageSpec, depth_name, refuse_missing_mark
from unet_trainer.images.tiling import Size, fit_image
from unet_trainer.inference.engine import Engine, host_batch
from unet_trainer.inference.logits import Logits, WholeLogits
from unet_trainer.inference.tiled import TiledLogits

GPU_WHOLE, CPU_WHOLE = 2048**2, 1024**2  # pixels that go through the network at once
MIN_TILE = 512  # side of a tile: larger than a small crop of training, whose borders would be a large share of it


class ModelInput(NamedTuple):
    """An image as the network sees it, and the size that its result has."""

    pixels: Pixels  # h,w,C uint8 or float32
    size: Size


class Predictor:
    """Prepares images, runs them through an engine, in batches where they have one size."""

    def __init__(self, engine: Engine, tile: int | None = None, whole: int | None = None) -> None:
        self.engine = engine
        self.spec = engine.card.spec
        self.tile = tile or max(MIN_TILE, *self.spec.image_size)
        self.whole = whole or (GPU_WHOLE if engine.device.type == "cuda" else CPU_WHOLE)

    @property
    def min_side(self) -> int | None:
        """To which a JPEG may be decoded at a fraction of its size; as in training."""
        return 2 * max(self.spec.image_size) if self.spec.fit == "resize" else None

    def is_tiled(self, size: Size) -> bool:
        return self.spec.fit == "crop" and size[0] * size[1] > self.whole

    def prepare(self, image: Pixels, size: Size | None = None) -> ModelInput:
        """H,W,C or H,W pixels in the files' own units, checked against the spec. `size`: of the result, if the image was read at
        less than its own. Raises DataError."""
        pixels = check_image(image, self.spec.image)
        size = size or (pixels.shape[0], pixels.shape[1])
        return ModelInput(fit_image(pixels, self.spec.image_size) if self.spec.fit == "resize" else pixels, size)

    def predict(self, inputs: Sequence[ModelInput]) -> list[Logits]:
        """Of inputs of one shape that are not tiled."""
        logits = self.engine.logits(host_batch([given.pixels for given in inputs], self.engine.device))
        return [WholeLogits(one, given.size) for one, given in zip(logits, inputs, strict=True)]

    def predict_image(self, image: Pixels) -> Logits:
        """Of one image, tiled if it is large."""
        if image.ndim not in (2, 3) or not self.is_tiled((image.shape[0], image.shape[1])):
            return self.predict([self.prepare(image)])[0]
        pixels = image[:, :, None] if image.ndim == 2 else image
        check_image(pixels[:1, :1], self.spec.image)
        return self.predict_large(ArrayReader(pixels))

    def predict_large(self, reader: ImageReader) -> Logits:
        """Of an image that is read block by block."""
        if self.spec.fit == "resize":
            pixels = check_image(reader.read_resized(self.spec.image_size), self.spec.image)
            return self.predict([ModelInput(fit_image(pixels, self.spec.image_size), reader.size)])[0]
        return TiledLogits(self.engine, reader, self.tile, lambda pixels: check_image(pixels, self.spec.image))


def check_image(image: Pixels, spec: ImageSpec) -> Pixels:
    """H,W,C or H,W → H,W,C as a batch has it; raises DataError for another depth, other channels
    than the model knows, values that are not finite, and marks for missing data."""
    if image.ndim == 2:
        image = image[:, :, None]
    if image.ndim != 3 or image.size == 0:
        raise DataError(f"an array of shape {image.shape}; need height, width and {spec.channels} channels")
    if image.shape[2] not in (1, spec.channels):
        raise DataError(f"{image.shape[2]} channels; the model was trained on images of {spec.channels}")
    depth = "float" if image.dtype.kind == "f" else image.dtype.name  # in any byte order
    if depth != spec.depth:
        raise DataError(f"{depth_name(depth)} values; the model was trained on {depth_name(spec.depth)} images")
    if depth != "float":
        return spec.to_batch(image)
    with np.errstate(over="ignore"):  # a float64 may be infinite as the float32 of a batch
        batch = spec.to_batch(image)
    if num_bad := image.size - int(np.isfinite(batch[:, :, : image.shape[2]]).sum()):
        raise DataError(f"{num_bad} of {image.size} values are NaN or infinite")
    refuse_missing_mark(float(image.min()), float(image.max()))
    return batch
