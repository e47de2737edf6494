"""How fast prediction is, beside what bounds it: reading alone, the forward pass alone, and a plain loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from unet_trainer.images.file_bytes import DataError, read_bytes
from unet_trainer.images.image_files import write_image
from unet_trainer.images.tiling import fit_image, resize_mask
from unet_trainer.inference.engine import Engine, TorchEngine, host_batch
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_stream import PredictionStream, one_opencv_thread
from unet_trainer.inference.predictor import ModelInput, Predictor

FORWARD_SECONDS = 2.0  # least time over which the forward pass is timed
PLAIN_SECONDS = 20.0  # after which the plain loop ends


class Rates(NamedTuple):
    """Images per second; None: not measured."""

    reading: float
    forward: float
    plain: float | None


def measure_rates(stream: PredictionStream, inputs: Sequence[Input], folder: Path) -> Rates:
    """Of images that go through the network in batches. The plain loop writes its masks into `folder`. The first use of the device
    is not counted."""
    sample: list[ModelInput] = []
    started = time.perf_counter()
    with one_opencv_thread(), stream.read_ahead(inputs) as ahead:
        for _, found in ahead:
            if isinstance(found, ModelInput) and (not sample or found.pixels.shape == sample[0].pixels.shape):
                sample = [*sample, found][: stream.batch_size_of(found.pixels.shape)]
    reading = len(inputs) / (time.perf_counter() - started)
    if not sample:
        raise DataError("--time: for images that can be read and go through the network in batches; there is none")
    predictor = stream.predictor
    return Rates(reading, _time_forward(predictor, sample), _time_plain_loop(predictor.engine, inputs, folder))


def _time_forward(predictor: Predictor, sample: Sequence[ModelInput]) -> float:
    """The batch lies in page-locked memory, as in the stream."""
    device = predictor.engine.device
    batch = host_batch([given.pixels for given in sample], device)
    for _ in range(3):
        predictor.logits(batch)
    _synchronize(device)
    num_images, started = 0, time.perf_counter()
    while (seconds := time.perf_counter() - started) < FORWARD_SECONDS:
        for _ in range(4):
            predictor.logits(batch)
            num_images += len(batch)
        _synchronize(device)
    return num_images / seconds


def _time_plain_loop(engine: Engine, inputs: Sequence[Input], folder: Path) -> float | None:
    """As in the examples of segmentation-models-pytorch: read, forward in float32, argmax, write, one image after the other. None
    for an exported file, which is no network of torch."""
    if not isinstance(engine, TorchEngine):
        return None
    spec, segmenter = engine.card.spec, engine.segmenter

    @torch.no_grad()
    def predict(given: Input) -> None:
        image = spec.image.decode(read_bytes(given.path)).pixels
        pixels = spec.image.to_batch(fit_image(image, spec.image_size) if spec.fit == "resize" else image)
        ids = segmenter(torch.from_numpy(pixels).unsqueeze(0).to(engine.device)).argmax(1)[0]
        mask = resize_mask(ids.cpu().numpy().astype(np.uint8), (image.shape[0], image.shape[1]))
        write_image(folder / f"{given.path.stem}.png", mask)

    predict(inputs[0])
    _synchronize(engine.device)
    num_images, started = 0, time.perf_counter()
    for given in inputs:
        predict(given)
        num_images += 1
        if time.perf_counter() - started > PLAIN_SECONDS:
            break
    return num_images / (time.perf_counter() - started)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
