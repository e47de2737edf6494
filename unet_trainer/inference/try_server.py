"""The server behind the page of `try`: hands out the page, runs the images that it sends. Standard library only.

    GET   /KEY/                 the page
    GET   /KEY/facts            the model and the names of its validation images, JSON
    GET   /KEY/progress         tiles of the large image that is being computed, JSON
    GET   /KEY/validation/N     a thumbnail of a validation image, JPEG
    POST  /KEY/validation/N     its result, see predict_for_page
    POST  /KEY/predict          the result of the image in the body

Nothing is written to disk, and no other path names a file. Who gets an answer: see system/local_server.py. Of an image
the page gets the image, its class ids and probabilities small enough for a browser, and the mask at the image's own
size."""

import io
import json
import math
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images import image_decoding as headers
from unet_trainer.images.drawing import to_display
from unet_trainer.images.file_bytes import ReadError, read_bytes
from unet_trainer.images.image_decoding import Pixels, decode_image, encode_image, refuse_bomb
from unet_trainer.images.image_spec import ImageSpec, depth_name
from unet_trainer.images.mask_decoding import IGNORED, UNKNOWN, MaskCoding, read_mask
from unet_trainer.images.tiling import Size, fit_image, resize_mask
from unet_trainer.inference.predictor import Predictor, TiledLogits, check_image, predicted_ids
from unet_trainer.inference.scores import confusion_matrix
from unet_trainer.model.metrics import compute_scores
from unet_trainer.system.console import counted
from unet_trainer.system.local_server import (
    JSON_TYPE,
    LocalHandler,
    LocalServer,
    RequestRefused,
    content_security_policy,
)

MAX_PIXELS = 100_000_000  # of an image that the page takes
MAX_DECODED_BYTES = 8 * MAX_PIXELS  # of a TIFF, whose pages and channels its size does not tell
DISPLAY_PIXELS, DISPLAY_SIDE = 2048**2, 8192  # a browser draws them without delay; canvases have a longest side
PROBABILITY_BYTES = 16 * 2**20  # of all classes together
THUMBNAIL = 96  # longest side
OnTiles = Callable[[int, int], object]
LARGER = "python train_unet.py predict takes larger ones"
PAGE = Path(__file__).with_name("try_page.html")
MAX_UPLOAD = 64 * 2**20  # bytes
UPLOAD_LIMIT = f"the page takes files of up to {MAX_UPLOAD // 2**20} MiB, and {LARGER}"
MAX_WAITING = 4  # images that are held in memory: one runs, the others wait
NUM_THUMBNAILS = 2  # that are made at a time
UPLOAD_SECONDS = 120  # for a whole upload
CLIENT_SECONDS = 0.25  # between looks whether the browser is still there
CHUNK = 2**20


class TryServer(LocalServer):
    """Serves one model. Images run one at a time, in one thread: torch's threads belong to the thread that calls
    them."""

    is_busy = False

    def __init__(self, address: tuple[str, int], predictor: Predictor, pairs: Sequence[Pair], note: str = "") -> None:
        """`note`: why there are no validation images. Raises OSError if the address cannot be used."""
        self.predictor = predictor
        self.pairs, self.note = list(pairs), note
        self.page = read_bytes(PAGE)
        self.page_policy = content_security_policy(self.page.decode())
        self.facts = json.dumps(model_facts(predictor, self.pairs, note), allow_nan=False).encode()
        self.places = threading.BoundedSemaphore(MAX_WAITING)
        self.thumbnail_places = threading.BoundedSemaphore(NUM_THUMBNAILS)
        self.worker = ThreadPoolExecutor(1, "inference")
        self.progress = (0, 0)  # tiles that are done, and all, of the image that is being computed
        super().__init__(address, PageHandler)

    def warm_up(self) -> None:
        """Runs an empty image before the first one: memory and threads are made ready. Does not wait."""
        spec = self.predictor.spec
        image = torch.zeros(
            1, *spec.image_size, spec.image.channels, dtype=torch.uint8 if spec.image.is_8bit else torch.float32
        )
        self.worker.submit(self.predictor.engine.logits, image)

    def run(self, compute: Callable[[], bytes]) -> bytes:
        """In the thread for images."""
        self.is_busy = True
        try:
            return compute()
        finally:
            self.is_busy, self.progress = False, (0, 0)


class PageHandler(LocalHandler):
    server: TryServer

    def do_POST(self) -> None:  # noqa: N802 (as http.server names it)
        self.answer(self._post)

    def explain(self, error: Exception) -> tuple[HTTPStatus, str] | None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            device = self.server.predictor.engine.device
            return HTTPStatus.INSUFFICIENT_STORAGE, f"the image needs more memory than {device} has free"
        return None

    def get(self, path: str) -> None:
        if path == "":
            self.send(
                self.server.page, "text/html; charset=utf-8", {"Content-Security-Policy": self.server.page_policy}
            )
        elif path == "facts":
            self.send(self.server.facts, JSON_TYPE)
        elif path == "progress":
            self.send(json.dumps(dict(zip(("done", "all"), self.server.progress, strict=True))).encode(), JSON_TYPE)
        elif (pair := self._named_pair(path)) is not None:
            with self.server.thumbnail_places:
                picture = thumbnail(pair.image)
            self.send(picture, "image/jpeg")
        else:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "nothing here")

    def _post(self, path: str) -> None:
        pair = self._named_pair(path)
        if pair is None and path != "predict":
            raise RequestRefused(HTTPStatus.NOT_FOUND, "nothing here")
        num_bytes = self._content_length()
        if not self.server.places.acquire(blocking=False):
            raise RequestRefused(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WAITING} images are waiting already; try again in a moment"
            )
        try:
            data = self._read_body(num_bytes)
            result = self._wait_for(self.server.worker.submit(self.server.run, lambda: self._predict(pair, data)))
        finally:
            self.server.places.release()
        self.send(result, "application/octet-stream")

    def _wait_for(self, result: Future[bytes]) -> bytes:
        """Gives its place up if the browser leaves before its turn comes."""
        while not wait([result], CLIENT_SECONDS).done:
            if self._is_client_gone() and result.cancel():
                raise ConnectionAbortedError
        return result.result()

    def _predict(self, pair: Pair | None, data: bytes) -> bytes:
        predictor, truth = self.server.predictor, None
        image = decode_for_page(data if pair is None else read_bytes(pair.image), predictor.spec.image)
        if pair is not None:
            try:
                truth = read_truth(pair.mask, predictor.spec.coding, (image.shape[0], image.shape[1]))
            except ReadError as error:
                raise ReadError(f"its mask {pair.mask.name}: {error}") from None
        return predict_for_page(predictor, image, truth, self._on_tiles)

    def _on_tiles(self, num_tiles: int, num_more: int) -> None:
        self.server.progress = (self.server.progress[0] + num_more, num_tiles)
        if self._is_client_gone():
            raise ConnectionAbortedError  # nothing is computed for nobody

    def _is_client_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _named_pair(self, path: str) -> Pair | None:
        found = re.fullmatch(r"validation/([0-9]{1,9})", path)
        return self.server.pairs[int(found[1])] if found and int(found[1]) < len(self.server.pairs) else None

    def _content_length(self) -> int:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit()):
            raise RequestRefused(HTTPStatus.LENGTH_REQUIRED, "the request does not say how long it is")
        num_bytes = int(text[:16])  # longer numbers are cut off: they are too large in any case
        if num_bytes > MAX_UPLOAD:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{num_bytes / 2**20:.0f} MiB; {UPLOAD_LIMIT}")
        return num_bytes

    def _read_body(self, num_bytes: int) -> bytes:
        parts, num_read, deadline = [], 0, time.monotonic() + UPLOAD_SECONDS
        while num_read < num_bytes:
            part = self.rfile.read1(min(CHUNK, num_bytes - num_read))
            if not part or time.monotonic() > deadline:
                raise RequestRefused(HTTPStatus.BAD_REQUEST, "the upload was cut off")
            num_read += len(part)
            parts.append(part)
        return b"".join(parts)


def model_facts(predictor: Predictor, pairs: Sequence[Pair], note: str) -> dict[str, Any]:
    """What the page says of the model, and what it needs to ask for images."""
    card, spec = predictor.engine.card, predictor.spec
    height, width = spec.image_size
    return {
        **card.facts(),
        "classes": [
            {"name": name, "colour": list(colour)} for name, colour in zip(spec.id_names, spec.id_colours, strict=True)
        ],
        "first_scored": 1 if spec.num_classes == 1 else 0,  # class id of the first IoU
        "image_size": f"{height}×{width}",
        "fit": spec.fit,
        "images": f"{depth_name(spec.image.depth)}, {counted(spec.image.channels, 'channel')}",
        "device": predictor.engine.description,
        "max_upload": MAX_UPLOAD,
        "upload_limit": UPLOAD_LIMIT,
        "validation": [pair.name for pair in pairs],
        "note": note,
    }


# What the page shows of one image.


def predict_for_page(
    predictor: Predictor,
    image: Pixels,
    truth: Pixels | None = None,
    on_tiles: OnTiles = lambda num_tiles, num_more: None,
) -> bytes:
    """One message: the length of a JSON header (4 bytes, little endian), the header, and the arrays that it lists.

    H,W,C image in the files' own units, and H,W class ids of the truth. Raises DataError for an image that the model
    does not know. `on_tiles` is called with the number of tiles of a large image, and of those that were done just now;
    what it raises ends the work.
    """
    spec = predictor.spec
    started = time.perf_counter()
    logits = predictor.predict_image(image)
    if isinstance(logits, TiledLogits):
        logits.on_tiles = partial(on_tiles, logits.num_tiles)
    scale = min(1.0, math.sqrt(DISPLAY_PIXELS / math.prod(logits.size)), DISPLAY_SIDE / max(logits.size))
    display = _scaled(logits.size, scale)
    grid = _scaled(display, min(1.0, math.sqrt(PROBABILITY_BYTES / (spec.num_ids * math.prod(display)))))
    grid_rows, columns = (_positions(length, new_length) for length, new_length in zip(logits.size, grid, strict=True))
    ids = np.empty(logits.size, np.uint8)
    probabilities = np.empty((spec.num_ids, *grid), np.uint8)  # 255 is 1.0
    top = 0
    for band in logits.bands():
        bottom = top + band.shape[1]
        ids[top:bottom] = predicted_ids(band).cpu().numpy()
        first, last = np.searchsorted(grid_rows, (top, bottom))
        rows, its_columns = (
            torch.from_numpy(places).to(band.device) for places in (grid_rows[first:last] - top, columns)
        )
        picked = band.index_select(1, rows).index_select(2, its_columns)
        probabilities[:, first:last] = (picked.softmax(0) * 255).round().to(torch.uint8).cpu().numpy()
        top = bottom
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
    picture, file = (
        Image.fromarray(ids),
        io.BytesIO(),
    )  # its values are the class ids; viewers show the classes' colours
    picture.putpalette([value for colour in spec.id_colours for value in colour])
    picture.save(file, "PNG")
    parts["mask"] = file.getvalue()
    header["parts"] = {name: len(part) for name, part in parts.items()}
    text = json.dumps(header, allow_nan=False).encode()
    return b"".join([struct.pack("<I", len(text)), text, *parts.values()])


def _scaled(size: Size, factor: float) -> Size:
    return max(1, int(size[0] * factor)), max(1, int(size[1] * factor))


def _positions(length: int, new_length: int) -> NDArray[np.int64]:
    """The rows, or columns, that stand for all where fewer are shown. Not averaged: ids have no mean, and probabilities
    are to be those of the class that is shown."""
    return ((np.arange(new_length) + 0.5) * length / new_length).astype(np.int64)


def decode_for_page(data: bytes, spec: ImageSpec | None = None, min_side: int | None = None) -> Pixels:
    """H,W,C, as a model of this spec takes it. Raises ReadError for what is no image, and for one too large for the
    page before it is decoded."""
    if not data:
        raise ReadError("the file is empty")
    refuse_bomb(data)
    size = None if data.startswith(headers.NPY_START) else headers.picture_size(data)
    if size is not None and size[0] * size[1] > MAX_PIXELS:
        raise ReadError(
            f"{size[1]}×{size[0]} pixels; the page takes up to {MAX_PIXELS // 10**6} megapixels, and {LARGER}"
        )
    tiff = headers.tiff_header(data)
    if tiff is not None and (num_bytes := tiff.series.nbytes) > MAX_DECODED_BYTES:
        raise ReadError(
            f"a TIFF of {num_bytes / 1e9:.1f} GB; the page takes up to {MAX_DECODED_BYTES / 1e9:.1f} GB, and {LARGER}"
        )
    return decode_image(data, min_side) if spec is None else spec.decode(data, min_side).pixels


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
