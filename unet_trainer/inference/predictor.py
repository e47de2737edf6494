"""One image of any size → logits at its own size, in bands of rows: ids, probabilities and files are made from the
bands, so that memory does not grow with the image.

    fit: resize    the whole image at the size that the model was trained at; logits are upsampled
    fit: crop      overlapping tiles at native resolution, of the size that validation had; an image that is no
                   larger than a tile is one, mirrored to the size of training's crops where it is smaller than those
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from unet_trainer.config.errors import UserError
from unet_trainer.config.parsers import tile_side
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.image_spec import ImageReader, ImageSpec
from unet_trainer.images.tiling import OVERLAP, Size, fit_image, mirrored_to, spread_tiles
from unet_trainer.inference.engine import (
    Custom,
    Engine,
    Precision,
    SymmetricEngine,
    find_model,
    host_batch,
    load_engine,
)
from unet_trainer.loading.sample_reader import model_pixels, of_known_kind
from unet_trainer.loading.worker_pool import to_device
from unet_trainer.model.metrics import upsampled_rows
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.system.concurrency import read_ahead
from unet_trainer.system.console import counted

SIGMA = 1 / 8  # of the Gaussian, in tiles
GPU_BATCH_PIXELS, CPU_BATCH_PIXELS = 16 * 512**2, 4 * 512**2  # that go through the network at once
GPU_WHOLE, CPU_WHOLE = 2048**2, 1024**2  # pixels of the largest image whose logits are computed all at once
FAR = 4  # fit: resize: times larger or smaller than every training image, and objects look like none of them


# Logits of one image in bands of rows. Tiles start at evenly spread places, half a tile or less apart, and their logits
# are added up with Gaussian weights in a buffer of K × tile × width. Rows that no later tile touches are complete and
# leave it, so that memory is that of the buffer, whatever the image's height.


@dataclass(frozen=True)
class WholeLogits:
    logits: torch.Tensor  # K,h,w float32
    size: Size

    def bands(self) -> Iterator[torch.Tensor]:
        """K,rows,W float32 on the engine's device, from top to bottom."""
        if self.logits.shape[1:] == self.size:
            return iter([self.logits])
        return (rows[0] for _, rows in upsampled_rows(self.logits.unsqueeze(0), self.size))


def batch_pixels(device: torch.device) -> int:
    return GPU_BATCH_PIXELS if device.type == "cuda" else CPU_BATCH_PIXELS


class TileGrid:
    """Where the tiles of images of one size lie, and what each of their pixels weighs. `blends`: they overlap by half,
    and all their pixels count; else they are those of training's validation, and each pixel counts in one."""

    def __init__(self, engine: Engine, size: Size, tile: Size, blends: bool = True) -> None:
        self.engine, self.tile = engine, tile
        self.on_tiles: Callable[[int], object] = lambda num_tiles: None  # called as tiles are done
        # Along each side; a pixel has the product of both. Nowhere 0, so that every pixel has a mean.
        offsets = [(torch.arange(side, dtype=torch.float64) - (side - 1) / 2) / (SIGMA * side) for side in tile]
        weights = [torch.exp(-0.5 * each**2 * blends).clamp_min(1e-4) for each in offsets]
        self.weights = (weights[0][:, None] * weights[1]).float().to(engine.device)
        axes, sums = [], []
        for length, side, its_weights in zip(size, tile, weights, strict=True):
            total, axis = torch.zeros(max(length, side), dtype=torch.float64), list[tuple[int, slice]]()
            for start, own in spread_tiles(length, side, 0.5 if blends else OVERLAP):
                counted = slice(0, side) if blends else own
                total[start : start + side][counted] += its_weights[counted]
                axis.append((start, counted))
            axes.append(axis)
            sums.append(total[:length].float().to(engine.device))
        self.tops, self.lefts = axes  # along each side: where a tile starts, and which of its pixels count
        self.rows, self.columns = sums  # along each side of the image: the sum of the weights of all tiles

    def add(self, total: torch.Tensor, images: torch.Tensor, tops: Sequence[tuple[int, slice]]) -> None:
        """Add the weighted logits of the tiles at these rows of N,H,W,C images to N,K,H,W, all images together."""
        height, width = self.tile
        places = [(top, left, rows, columns) for top, rows in tops for left, columns in self.lefts]
        num_calls = -(-len(places) * len(images) * height * width // batch_pixels(self.engine.device))
        num_at_once = -(-len(places) // num_calls)
        for start in range(0, len(places), num_at_once):
            some = places[start : start + num_at_once]
            tiles = [images[:, top : top + height, left : left + width] for top, left, *_ in some]
            logits = self.engine.logits(torch.cat(tiles))
            for (top, left, rows, columns), its_logits in zip(some, logits.split(len(images)), strict=True):
                area = total[:, :, top : top + height, left : left + width]
                area[:, :, rows, columns] += (its_logits * self.weights)[:, :, rows, columns]
            self.on_tiles(len(some))

    @torch.inference_mode()
    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C images of this size, no side less than the tile's → N,K,H,W float32 on the engine's device."""
        num_images, height, width = images.shape[:3]
        (images,) = to_device((images,), self.engine.device)  # once, and cut there
        num_ids = self.engine.card.spec.num_ids
        total = torch.zeros(num_images, num_ids, height, width, device=self.engine.device)
        self.add(total, images, self.tops)
        return total.div_(self.rows[:, None] * self.columns)


class TiledLogits:
    """Logits of a large image, computed band by band while they are asked for."""

    def __init__(self, grid: TileGrid, reader: ImageReader, prepare: Callable[[Pixels], Pixels] | None = None) -> None:
        self.grid, self.reader, self.prepare, self.size = grid, reader, prepare, reader.size
        self.num_tiles = len(grid.tops) * len(grid.lefts)

    def bands(self) -> Iterator[torch.Tensor]:
        (height, width), grid, device = self.size, self.grid, self.grid.engine.device
        rows, columns = grid.tile
        total = torch.zeros(1, grid.engine.card.spec.num_ids, rows, max(width, columns), device=device)
        ends = [*(top for top, _ in grid.tops[1:]), min(grid.tops[-1][0] + rows, height)]
        with contextlib.closing(self._strips()) as strips:
            for (top, counted), following, strip in zip(grid.tops, ends, strips, strict=True):
                (images,) = to_device((host_batch([strip], device),), device)
                grid.add(total, images, [(0, counted)])
                num_done = following - top
                yield total[0, :, :num_done, :width] / (grid.rows[top:following, None] * grid.columns)
                total[:, :, : rows - num_done] = total[:, :, num_done:].clone()
                total[:, :, rows - num_done :] = 0

    def _strips(self) -> Generator[Pixels, None, None]:
        """The pixels of each row of tiles. Rows that two of them share are read once; the next is read meanwhile."""
        (height, width), tops, rows = self.size, [top for top, _ in self.grid.tops], self.grid.tile[0]
        new_rows = [slice(0, min(rows, height)), *(slice(before + rows, top + rows) for before, top in pairwise(tops))]

        def read(some: slice) -> Pixels:
            pixels = self.reader.read(some, slice(0, width))
            return pixels if self.prepare is None else self.prepare(pixels)

        strip: Pixels | None = None
        with contextlib.closing(read_ahead(read, new_rows, num_threads=1, max_items=1)) as parts:
            for _, pixels in parts:
                strip = pixels if strip is None else np.concatenate([strip[len(pixels) :], pixels])
                yield mirrored_to(strip, self.grid.tile)


Logits = WholeLogits | TiledLogits  # bands() may be called once only


def predicted_ids(logits: torch.Tensor, threshold: float | None = None) -> torch.Tensor:
    """…,K,H,W logits → …,H,W uint8 ids there. `threshold`: least probability of the foreground, of two ids."""
    if logits.shape[-3] == 2:
        least = 0.0 if threshold is None else float(np.log(threshold) - np.log1p(-threshold))
        return (logits.select(-3, 1) - logits.select(-3, 0) > least).to(torch.uint8)
    return logits.max(-3).indices.to(torch.uint8)


def all_ids(logits: Logits, threshold: float | None = None) -> Pixels:
    """H,W uint8 ids of the whole image."""
    return np.concatenate([predicted_ids(band, threshold).cpu().numpy() for band in logits.bands()])


# Images, from what the user gives to logits.


def chosen_tile(value: Any, spec: SegmenterSpec, key: str = "--tile") -> Size | None:
    """The tile that an option asks for; None: the model's own. Raises UserError."""
    if value is None:
        return None
    side = tile_side(value, key)
    if spec.fit == "resize":
        what = f"the model sees whole images at {spec.image_size[1]}×{spec.image_size[0]} (fit: resize), not tiles"
        raise UserError(f"{key}: got {side}; {what}; leave it out")
    return side, side


class ModelInput(NamedTuple):
    """An image as the network sees it, and the size that its result has."""

    pixels: Pixels  # h,w,C uint8 or float32
    size: Size  # fit: crop: of the upper left part that is the image


class Predictor:
    """Prepares images, runs them through an engine, in batches where they have one size. `blends`: see TileGrid."""

    def __init__(self, engine: Engine, tile: Size | None = None, whole: int | None = None, blends: bool = True) -> None:
        self.engine, self.spec, self.blends = engine, engine.card.spec, blends
        self.tile = tile or self.spec.tile or self.spec.image_size
        self.least_size = self.spec.image_size if blends else self.tile  # fit: crop: smaller images are mirrored to it
        self.whole = whole or (GPU_WHOLE if engine.device.type == "cuda" else CPU_WHOLE)
        # To which a JPEG may be decoded at a fraction of its size; as in training.
        self.min_side = 2 * max(self.spec.image_size) if self.spec.fit == "resize" else None
        self.far_sizes: list[Size] = []  # of images whose scale is far from training's

    def describe_input(self) -> str:
        """What the network sees of an image, for the user."""
        if self.spec.fit == "resize":
            return f"; the model sees them at {self.spec.image_size[1]}×{self.spec.image_size[0]}"
        if not self.blends:
            return f", in tiles of {self.tile[1]}×{self.tile[0]} as training's validation has them"
        reason = " (as in validation)" if self.tile == self.spec.tile else " (--tile)"
        reason = ", as trained" if self.tile == self.spec.image_size else reason
        return f", in blended tiles of {self.tile[1]}×{self.tile[0]}{reason}"

    def is_large(self, size: Size) -> bool:
        """Whether the logits of an image of this size are computed in bands of rows."""
        return self.spec.fit == "crop" and size[0] * size[1] > self.whole

    def prepare(self, pixels: Pixels, size: Size) -> ModelInput:
        """H,W,C as model_pixels gives them. `size`: of the image, which may have been read at less than its own."""
        least, most = self.spec.source_sides or (0.0, math.inf)
        if not least / FAR <= math.sqrt(size[0] * size[1]) <= most * FAR:
            self.far_sizes.append(size)
        if self.spec.fit == "resize":
            return ModelInput(fit_image(pixels, self.spec.image_size), size)
        return ModelInput(mirrored_to(pixels, self.least_size), size)

    def take_scale_warning(self) -> str | None:
        """Of the images since the last call that were seen at another scale than any of training."""
        far_sizes, self.far_sizes = self.far_sizes, []
        if not far_sizes or self.spec.source_sides is None:
            return None
        (height, width), (rows, columns), (least, most) = far_sizes[0], self.spec.image_size, self.spec.source_sides
        images, side = counted(len(far_sizes), "image is", "images are"), math.sqrt(rows * columns)
        scale = f"{width}×{height} pixels become {columns}×{rows}, scaled by {side / math.sqrt(height * width):.2g}"
        scale += f" (training's by {side / most:.2g} to {side / least:.2g})"
        fix = f"give parts of them of about {most:.0f}×{most:.0f} pixels, or train with fit=crop"
        return f"{images} seen at a scale far from training's: {scale}; results are likely poor: {fix}"

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """N,H,W,C inputs of one shape on the host → N,K,H,W."""
        tile = self._tile_of((images.shape[1], images.shape[2]))
        if self.spec.fit == "resize" or tile == tuple(images.shape[1:3]):
            return self.engine.logits(images)
        return self._grid((images.shape[1], images.shape[2])).logits(images)

    def _grid(self, size: Size) -> TileGrid:
        return TileGrid(self.engine, size, self._tile_of(size), self.blends)

    def _tile_of(self, size: Size) -> Size:
        """That of an image of this size: no larger than the image, unless it is mirrored to `least_size`."""
        sides = zip(self.tile, size, self.least_size, strict=True)
        height, width = (min(side, max(length, least)) for side, length, least in sides)
        return height, width

    def at_size(self, logits: torch.Tensor, size: Size) -> torch.Tensor:
        """…,K,h,w of an input without what was mirrored; those of a resized image stay as they are."""
        return logits[..., : size[0], : size[1]] if self.spec.fit == "crop" else logits

    def predict(self, inputs: Sequence[ModelInput]) -> list[Logits]:
        """Of inputs of one shape, which are all large, and their logits in bands, or none is."""
        if self.is_large(inputs[0].size):
            readers = [ImageReader(image.pixels[: image.size[0], : image.size[1]]) for image in inputs]
            return [TiledLogits(self._grid(reader.size), reader) for reader in readers]
        logits = self.logits(host_batch([image.pixels for image in inputs], self.engine.device))
        sizes = [image.size for image in inputs]
        return [WholeLogits(self.at_size(one, size), size) for one, size in zip(logits, sizes, strict=True)]

    def predict_image(self, image: Pixels) -> Logits:
        """Of one H,W,C or H,W image in the files' own units, in bands if it is large. Raises ReadError."""
        pixels = array_pixels(image, self.spec.image)
        return self.predict([self.prepare(pixels, (pixels.shape[0], pixels.shape[1]))])[0]

    def predict_large(self, reader: ImageReader) -> Logits:
        """Of an image that is read in bands of rows."""
        if self.spec.fit == "resize":
            pixels = model_pixels(reader.read_resized(self.spec.image_size), self.spec.image)
            return self.predict([self.prepare(pixels, reader.size)])[0]
        return TiledLogits(self._grid(reader.size), reader, partial(model_pixels, spec=self.spec.image))


def array_pixels(image: Pixels, spec: ImageSpec) -> Pixels:
    """H,W,C or H,W in the files' own units → as in a batch, missing data filled. Raises ReadError."""
    image = image[:, :, None] if image.ndim == 2 else image
    if image.ndim != 3 or image.size == 0:
        raise ReadError(f"an array of shape {image.shape}; need height, width and {spec.channels} channels")
    return spec.to_batch(spec.fill(of_known_kind(image, spec))[0])


# A trained model for Python: `from unet_trainer import load; model = load("checkpoints/demo"); mask = model(image)`.


class LoadedModel:
    """Called with an image (numpy, height × width × channels or height × width, in the files' own units, any size) it
    gives the class id of every pixel. May be called from several threads."""

    def __init__(self, engine: Engine, tile: int | None = None) -> None:
        self.engine, self.card = engine, engine.card
        self.predictor = Predictor(engine, chosen_tile(tile, self.card.spec, "tile"))
        self.classes, self.colours = list(self.card.spec.id_names), list(self.card.spec.id_colours)  # by class id

    def __call__(self, image: ArrayLike, threshold: float | None = None) -> Pixels:
        """H,W,C image → H,W uint8 class ids. `threshold`: least probability of the foreground, with one class."""
        if threshold is not None and not (0 < threshold < 1 and self.card.spec.num_ids == 2):
            raise ValueError(f"threshold: got {threshold}; need a number between 0 and 1, and a model of two class ids")
        return all_ids(self._logits(image), threshold)

    def probabilities(self, image: ArrayLike) -> Pixels:
        """H,W,C image → H,W,K float32: the probability of each class id."""
        bands = self._logits(image).bands()
        return np.concatenate([band.softmax(0).permute(1, 2, 0).cpu().numpy() for band in bands])

    def _logits(self, image: ArrayLike) -> Logits:
        logits = self.predictor.predict_image(_pixels(image, self.card.spec.image.channels))
        if (warning := self.predictor.take_scale_warning()) is not None:
            warnings.warn(warning, stacklevel=3)
        return logits


def _pixels(image: ArrayLike, channels: int) -> Pixels:
    """Without the alpha channel of RGBA or grey, unless the model has so many `channels`: as files are read."""
    if isinstance(image, str | PathLike):
        raise DataError(f"got the path {image}; need its pixels: model(PIL.Image.open({str(image)!r}))")
    mode = getattr(image, "mode", None)
    if mode in ("P", "PA", "CMYK", "YCbCr", "HSV", "LAB"):  # numpy would take these numbers for brightness
        raise DataError(f"an image of PIL with mode {mode}, whose numbers are no brightness; give image.convert('RGB')")
    pixels = np.asarray(image)
    if mode == "1":  # bool in numpy; in files black and white are 0 and 255
        pixels = pixels * np.uint8(255)
    depth = pixels.shape[2] if pixels.ndim == 3 else 0
    has_alpha = pixels.dtype.kind == "u" and depth in (2, 4) and depth != channels
    return pixels[:, :, :-1] if has_alpha and depth - 1 in (1, channels) else pixels


def load(
    run: str | Path,
    device: str = "auto",
    precision: Precision = "auto",
    raw: bool = False,
    tta: bool = False,
    tile: int | None = None,
    *,
    model: Custom = None,
) -> LoadedModel:
    """A run (its folder or name: best.pt is taken), a .pt file or an exported .onnx file. `raw`: the weights as
    trained, not their average. `tta`: means over the mirrored and turned images that training had. `tile`: of
    fit: crop, the side of the tiles, instead of the one that training chose. `model`: the network of a run with a
    custom model, as train(model=...) took it. Raises UserError."""
    engine = load_engine(find_model(run, raw=raw), device, precision, raw, model)
    return LoadedModel(SymmetricEngine(engine, engine.card.symmetries) if tta else engine, tile)
