"""Processes that write the files of images: the same files as threads, their faults, their bounds and their end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.image_bytes import cv2_bytes, tiff_bytes
from helpers.predicting import BrightnessEngine
from helpers.steps import make_spec
from unet_trainer.images.image_files import ReadError
from unet_trainer.inference import prediction_files, writer_processes
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import Kinds, PredictionFolder
from unet_trainer.inference.prediction_stream import PredictionStream
from unet_trainer.inference.predictor import Predictor
from unet_trainer.inference.writer_processes import TEXT_BYTES, WriterProcesses, _Ring, start_writers
from unet_trainer.loading.worker_backends import CAN_FORK, WorkerError

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")

GEO_TAGS = [(33550, 12, 3, (0.5, 0.5, 0.0), True), (33922, 12, 6, (0.0, 0.0, 0.0, 100.0, 200.0, 0.0), True)]
SIZES = ((20, 30), (24, 16), (20, 30), (20, 30), (24, 16), (33, 9), (20, 30))


class Progress:
    def __init__(self):
        self.num_done = 0

    def images_done(self, number):
        self.num_done += number

    @contextlib.contextmanager
    def large_image(self, path, num_tiles):
        yield lambda number: None


class Soft(BrightnessEngine):
    """Probabilities between 0 and 1, of as many ids as the spec has."""

    def logits(self, images):
        two = super().logits(images) / 50
        return two if self.card.spec.num_ids == 2 else torch.cat([two, -two[:, 1:]], 1)


@pytest.fixture
def given(tmp_path):
    """PNGs of several sizes, and a GeoTIFF."""
    random = np.random.default_rng(0)
    (tmp_path / "images/sub").mkdir(parents=True)
    found = []
    for number, size in enumerate(SIZES):
        pixels = random.integers(0, 256, (*size, 3), np.uint8)
        is_geo = number == 4
        name = f"sub/{number}" if number % 2 else f"{number}"
        found.append(Input(tmp_path / f"images/{name}.{'tif' if is_geo else 'png'}", name))
        found[-1].path.write_bytes(tiff_bytes(pixels, extratags=GEO_TAGS) if is_geo else cv2_bytes(".png", pixels))
    return found


def predict(tmp_path, given, kinds=None, num_processes=2, out="out", spec=None, engine=None, started=None, batch_size=4, **options):
    """`num_processes` 0: threads. Returns the stream after its run. `started` is called with the processes."""
    engine = engine or Soft(spec or make_spec(fit="crop"))
    folder = PredictionFolder(tmp_path / out, engine.card.spec, kinds or Kinds())
    folder.out.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        processes = None
        if num_processes:
            processes = stack.enter_context(WriterProcesses(given, num_processes, **options))
        stream = PredictionStream(Predictor(engine), folder, Progress(), batch_size=batch_size, processes=processes)
        if started is not None:
            started(processes)
        stream.run(given)
    return stream


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KINDS = [
    Kinds(),
    Kinds(values=True, overlay=True, probabilities="png"),
    Kinds(probabilities="npy"),
    Kinds(overlay=True, polygons=True),  # by threads, whatever is asked for
]


@pytest.mark.parametrize("num_classes", [1, 3])
@pytest.mark.parametrize("kinds", KINDS)
def test_processes_write_the_bytes_that_threads_write(tmp_path, given, kinds, num_classes):
    spec = make_spec(fit="crop", num_classes=num_classes)
    contents = []
    for out, num_processes in (("threads", 0), ("processes", 3)):
        stream = predict(tmp_path, given, kinds, num_processes, out, spec)
        assert (stream.outcome.num_written, stream.outcome.failed, stream.progress.num_done) == (7, [], 7)
        contents.append(files_in(tmp_path / out))
    assert contents[0] == contents[1]
    assert {"0.png", "sub/1.png", "4.png", "4.tif"} <= set(contents[0])


def test_a_resizing_model_gives_each_image_its_own_size(tmp_path, given):
    spec = make_spec(fit="resize", image_size=(32, 32))
    predict(tmp_path, given, Kinds(probabilities="png"), 0, "threads", spec, batch_size=7)
    predict(tmp_path, given, Kinds(probabilities="png"), 2, "processes", spec, batch_size=7)
    assert files_in(tmp_path / "threads") == files_in(tmp_path / "processes")
    assert np.array(Image.open(tmp_path / "processes/0.png")).shape == (20, 30)
