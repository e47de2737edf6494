"""How fast prediction is, beside what bounds it: reading alone, the forward pass alone, and a plain loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.tiling import fit_image
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
    """As in the examples of segmentation-models-pytorch: read, normalise, forward in float32, threshold or argmax, write, one image
    after the other. None for models and images that it does not fit: 8-bit RGB and torch."""
    spec = engine.card.spec
    if not isinstance(engine, TorchEngine) or spec.image.channels != 3 or not spec.image.is_8bit:
        return None
    network, device = engine.segmenter.network, engine.device
    mean, std = (np.array(values, np.float32) for values in (spec.image.mean, spec.image.std))

    def predict(given: Input) -> None:
        read = cv2.imread(str(given.path))
        if read is None:
            raise DataError(f"--time: {given.path} is not read by OpenCV; name images that are")
        image = cv2.cvtColor(read, cv2.COLOR_BGR2RGB)
        height, width = image.shape[:2]
        if spec.fit == "resize":
            image = fit_image(image, spec.image_size)
        image = np.pad(image, ((0, -image.shape[0] % 32), (0, -image.shape[1] % 32), (0, 0)), mode="edge")
        pixels = ((image.astype(np.float32) - mean) / std).transpose(2, 0, 1)
        with torch.no_grad():
            logits = network(torch.from_numpy(np.ascontiguousarray(pixels)).unsqueeze(0).to(device))
            ids = logits.sigmoid()[0, 0] > 0.5 if logits.shape[1] == 1 else logits.argmax(1)[0]
        mask = ids.cpu().numpy().astype(np.uint8)
        mask = cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST) if spec.fit == "resize" else mask[:height, :width]
        cv2.imwrite(str(folder / f"{given.path.stem}.png"), mask)

    predict(inputs[0])
    _synchronize(device)
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
