"""What the page of `try` shows of one image: the image, its class ids and probabilities small enough for a browser, and the mask
at the image's own size. Knows nothing of HTTP.
"""

from __future__ import annotations

import io
import json
import math
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images import image_headers as headers
from unet_trainer.images.drawing import to_display
from unet_trainer.images.file_bytes import ReadError, read_bytes
from unet_trainer.images.image_files import Pixels, decode_image, encode_image, read_mask, refuse_bomb
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_coding import IGNORED, UNKNOWN, MaskCoding
from unet_trainer.images.tiling import Size, fit_image, resize_mask
from unet_trainer.inference.logits import TiledLogits, band_ids
from unet_trainer.inference.predictor import Predictor, check_image
from unet_trainer.inference.scores import confusion_matrix
from unet_trainer.model.metrics import compute_scores

MAX_PIXELS = 100_000_000  # of an image that the page takes
MAX_DECODED_BYTES = 8 * MAX_PIXELS  # of a TIFF, whose pages and channels its size does not tell
DISPLAY_PIXELS, DISPLAY_SIDE = 2048**2, 8192  # a browser draws them without delay; canvases have a longest side
PROBABILITY_BYTES = 16 * 2**20  # of all classes together
THUMBNAIL = 96  # longest side
OnProgress = Callable[[int, int], object]
LARGER = "python train_unet.py predict takes larger ones"


def predict_for_page(
    predictor: Predictor, image: Pixels, truth: Pixels | None = None, on_progress: OnProgress = lambda done, total: None
) -> bytes:
    """One message: the length of a JSON header (4 bytes, little endian), the header, and the arrays that it lists.

    H,W,C image in the files' own units, and H,W class ids of the truth. Raises DataError for an image that the model does not
    know. `on_progress` is called with the tiles of a large image that are done, and all; what it raises ends the work.
    """
    spec = predictor.spec
    started = time.perf_counter()
    logits = predictor.predict_image(image)
    if isinstance(logits, TiledLogits):
        _report_tiles(logits, on_progress)
    display, grid = display_size(logits.size), probability_size(logits.size, spec.num_ids)
    grid_rows, columns = (_positions(length, new_length) for length, new_length in zip(logits.size, grid, strict=True))
    ids = np.empty(logits.size, np.uint8)
    probabilities = np.empty((spec.num_ids, *grid), np.uint8)  # 255 is 1.0
    for band in logits.bands():
        ids[band.rows] = band_ids(band.logits)
        first, last = np.searchsorted(grid_rows, (band.rows.start, band.rows.stop))
        rows, its_columns = (torch.from_numpy(places) for places in (grid_rows[first:last] - band.rows.start, columns))
        picked = band.logits.index_select(1, rows.to(band.logits.device)).index_select(2, its_columns.to(band.logits.device))
        probabilities[:, first:last] = (picked.softmax(0) * 255).round().to(torch.uint8).cpu().numpy()
    seconds = time.perf_counter() - started
    shown = np.ix_(*(_positions(length, new_length) for length, new_length in zip(logits.size, display, strict=True)))
    parts = {"ids": ids[shown].tobytes(), "probabilities": probabilities.tobytes()}
    header: dict[str, Any] = {
        "height": logits.size[0],
        "width": logits.size[1],
        "display": list(display),
        "probability_grid": list(probabilities.shape),
        "shares": (np.bincount(ids.reshape(-1), minlength=spec.num_ids) / ids.size).tolist(),
        "seconds": seconds,
        "device": predictor.engine.description,
        "warning": predictor.take_scale_warning(),
        "truth_shares": None,
        "iou": None,
        "class_iou": None,
    }
    if truth is not None:
        confusion = confusion_matrix(truth, ids, spec.num_ids)
        scores = compute_scores(torch.from_numpy(confusion), spec.num_classes)
        parts["truth"] = truth[shown].tobytes()
        header["truth_shares"] = (confusion.sum(1) / max(1, confusion.sum())).tolist()
        header["iou"] = None if math.isnan(scores.iou) else scores.iou
        header["class_iou"] = scores.per_class_iou
    parts["image"] = encode_image(to_display(fit_image(check_image(image, spec.image), display)), ".png")
    parts["mask"] = encode_index_png(ids, spec.id_colours)
    header["parts"] = {name: len(part) for name, part in parts.items()}
    text = json.dumps(header, allow_nan=False).encode()
    return b"".join([struct.pack("<I", len(text)), text, *parts.values()])


def _report_tiles(logits: TiledLogits, on_progress: OnProgress) -> None:
    num_done, num_tiles = 0, logits.num_tiles

    def count(num_more: int) -> None:
        nonlocal num_done
        num_done += num_more
        on_progress(num_done, num_tiles)

    logits.on_tiles = count


def display_size(size: Size) -> Size:
    return _scaled(size, min(1.0, math.sqrt(DISPLAY_PIXELS / (size[0] * size[1])), DISPLAY_SIDE / max(size)))


def probability_size(size: Size, num_ids: int) -> Size:
    """That of the displayed image, less where the classes are many."""
    height, width = display_size(size)
    return _scaled((height, width), min(1.0, math.sqrt(PROBABILITY_BYTES / (num_ids * height * width))))


def _scaled(size: Size, factor: float) -> Size:
    return max(1, int(size[0] * factor)), max(1, int(size[1] * factor))


def _positions(length: int, new_length: int) -> NDArray[np.int64]:
    """The rows, or columns, that stand for all where fewer are shown. Not averaged: ids have no mean, and probabilities are to be
    those of the class that is shown."""
    return ((np.arange(new_length) + 0.5) * length / new_length).astype(np.int64)


def encode_index_png(ids: Pixels, colours: Sequence[tuple[int, int, int]]) -> bytes:
    """A PNG whose values are the class ids, and which viewers show in the classes' colours."""
    picture = Image.fromarray(ids)
    picture.putpalette([value for colour in colours for value in colour])
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def decode_for_page(data: bytes, spec: ImageSpec | None = None, min_side: int | None = None) -> Pixels:
    """H,W,C, as a model of this spec takes it. Raises ReadError for what is no image, and for one too large for the page before it
    is decoded."""
    if not data:
        raise ReadError("the file is empty")
    refuse_bomb(data)
    size = None if data.startswith(headers.NPY_START) else headers.picture_size(data)
    if size is not None and size[0] * size[1] > MAX_PIXELS:
        raise ReadError(f"{size[1]}×{size[0]} pixels; the page takes up to {MAX_PIXELS // 10**6} megapixels, and {LARGER}")
    tiff = headers.tiff_header(data)
    if tiff is not None and (num_bytes := tiff.series.nbytes) > MAX_DECODED_BYTES:
        raise ReadError(f"a TIFF of {num_bytes / 1e9:.1f} GB; the page takes up to {MAX_DECODED_BYTES / 1e9:.1f} GB, and {LARGER}")
    return decode_image(data, min_side) if spec is None else spec.decode(data, min_side).pixels


def predict_pair(predictor: Predictor, pair: Pair, on_progress: OnProgress = lambda done, total: None) -> bytes:
    """Of a validation image, with its mask. Raises DataError with the reason."""
    image = decode_for_page(read_bytes(pair.image), predictor.spec.image)
    try:
        truth = read_truth(pair.mask, predictor.spec.coding, (image.shape[0], image.shape[1]))
    except ReadError as error:
        raise ReadError(f"its mask {pair.mask.name}: {error}") from None
    return predict_for_page(predictor, image, truth, on_progress)


def read_truth(path: Path, coding: MaskCoding, size: Size) -> Pixels:
    """H,W class ids at the image's size; IGNORED where a value belongs to no class. Raises ReadError."""
    ids = resize_mask(coding.encode(read_mask(path)), size)
    return np.where(ids == UNKNOWN, np.uint8(IGNORED), ids)


def thumbnail(path: Path) -> bytes:
    """A small JPEG of an image file. Raises ReadError."""
    image = decode_for_page(read_bytes(path), min_side=THUMBNAIL)
    step = max(1, min(image.shape[:2]) // (2 * THUMBNAIL))  # of a large image, enough pixels to average
    shown = to_display(image[::step, ::step])
    size = _scaled((shown.shape[0], shown.shape[1]), THUMBNAIL / max(shown.shape[:2]))
    return encode_image(fit_image(shown, size), ".jpg")
