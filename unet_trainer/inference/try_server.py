"""The server behind the page of `try`: hands out the page, runs the images that it sends. Standard library only.

    GET   /KEY/                 the page
    GET   /KEY/facts            the model and the names of its validation images, JSON
    GET   /KEY/progress         tiles of the large image that is being computed, JSON
    GET   /KEY/validation/N     a thumbnail of a validation image, JPEG
    POST  /KEY/validation/N     its result, see PageResult.to_bytes
    POST  /KEY/predict          the result of the image in the body

Nothing is written to disk, and no other path names a file. Who gets an answer: see system/local_server.py.
"""

from __future__ import annotations

import json
import math
import re
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch

from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.image_spec import depth_name
from unet_trainer.inference.page_result import LARGER, decode_for_page, predict_for_page, predict_pair, thumbnail
from unet_trainer.inference.predictor import Predictor
from unet_trainer.system.console import counted
from unet_trainer.system.input_files import read_bytes
from unet_trainer.system.local_server import JSON_TYPE, LocalHandler, LocalServer, RequestRefused, content_security_policy

PAGE = Path(__file__).with_name("try_page.html")
MAX_UPLOAD = 64 * 2**20  # bytes
UPLOAD_LIMIT = f"the page takes files of up to {MAX_UPLOAD // 2**20} MiB, and {LARGER}"
MAX_WAITING = 4  # images that are held in memory: one runs, the others wait
NUM_THUMBNAILS = 2  # that are made at a time
UPLOAD_SECONDS = 120  # for a whole upload
CLIENT_SECONDS = 0.25  # between looks whether the browser is still there
CHUNK = 2**20


class TryServer(LocalServer):
    """Serves one model. Images run one at a time, in one thread: torch's threads belong to the thread that calls them."""

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
        self.is_computing = False
        self.progress = (0, 0)  # tiles that are done, and all, of the image that is being computed
        super().__init__(address, PageHandler)

    def warm_up(self) -> None:
        """Runs an empty image before the first one: memory and threads are made ready. Does not wait."""
        spec = self.predictor.spec
        image = torch.zeros(1, *spec.image_size, spec.image.channels, dtype=torch.uint8 if spec.image.is_8bit else torch.float32)
        self.worker.submit(self.predictor.engine.logits, image)

    @property
    def is_busy(self) -> bool:
        return self.is_computing

    def run(self, compute: Callable[[], bytes]) -> bytes:
        """In the thread for images."""
        self.is_computing = True
        try:
            return compute()
        finally:
            self.is_computing, self.progress = False, (0, 0)


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
            self.send(self.server.page, "text/html; charset=utf-8", {"Content-Security-Policy": self.server.page_policy})
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
            raise RequestRefused(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_WAITING} images are waiting already; try again in a moment")
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
        predictor = self.server.predictor
        if pair is not None:
            return predict_pair(predictor, pair, self._on_progress)
        return predict_for_page(predictor, decode_for_page(data, predictor.spec.image), on_progress=self._on_progress)

    def _on_progress(self, num_done: int, num_tiles: int) -> None:
        self.server.progress = (num_done, num_tiles)
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
        num_bytes = int(text) if len(text) < 16 else sys.maxsize
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
        "run": card.run_name,
        "epoch": card.epoch,
        "val_iou": card.val_iou if card.val_iou is not None and math.isfinite(card.val_iou) else None,
        "version": card.version if card.version != "0" else None,  # an early one does not say
        "classes": [{"name": name, "colour": list(colour)} for name, colour in zip(spec.id_names, spec.id_colours, strict=True)],
        "first_scored": 1 if spec.num_classes == 1 else 0,  # class id of the first IoU
        "architecture": spec.architecture,
        "encoder": spec.encoder,
        "image_size": f"{height}×{width}",
        "fit": spec.fit,
        "images": f"{depth_name(spec.image.depth)}, {counted(spec.image.channels, 'channel')}",
        "device": predictor.engine.description,
        "max_upload": MAX_UPLOAD,
        "upload_limit": UPLOAD_LIMIT,
        "validation": [pair.name for pair in pairs],
        "note": note,
    }
