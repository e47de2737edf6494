"""What bounds the speed of prediction is measured on the images themselves."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.image_bytes import cv2_bytes
from helpers.predicting import BrightnessEngine, write_model
from helpers.steps import make_spec
from unet_trainer.images.file_bytes import DataError
from unet_trainer.inference import prediction_timing
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.loaded_model import load
from unet_trainer.inference.prediction_files import Kinds, PredictionFolder
from unet_trainer.inference.prediction_stream import PredictionStream
from unet_trainer.inference.prediction_timing import Rates, measure_rates
from unet_trainer.inference.predictor import Predictor


@pytest.fixture
def inputs(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(
            cv2_bytes(".png", np.random.default_rng(ord(name)).integers(0, 256, (40, 50, 3), np.uint8))
        )
    return [Input(tmp_path / f"{name}.png", name) for name in "abc"]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(prediction_timing, "FORWARD_SECONDS", 0.01)


def stream(engine, tmp_path, **options):
    return PredictionStream(
        Predictor(engine, **options), PredictionFolder(tmp_path / "out", engine.card.spec, Kinds()), None, batch_size=2
    )


@pytest.mark.parametrize("num_classes", [1, 3])
def test_all_rates_are_measured_and_the_plain_loop_writes_the_same_masks(inputs, tmp_path, num_classes):
    path = write_model(tmp_path / "run/best.pt", fit="crop", num_classes=num_classes)
    model = load(path, device="cpu")
    (tmp_path / "plain").mkdir()
    rates = measure_rates(stream(model.engine, tmp_path), inputs, tmp_path / "plain")
    assert min(rates.reading, rates.forward, rates.plain) > 0
    import cv2

    for image, name in inputs:
        pixels = cv2.cvtColor(cv2.imread(str(image)), cv2.COLOR_BGR2RGB)
        written = cv2.imread(str(tmp_path / f"plain/{name}.png"), cv2.IMREAD_UNCHANGED)
        assert written.shape == (40, 50)
        assert (written == model(pixels)).mean() > 0.999


def test_the_forward_pass_is_timed_with_the_batches_of_the_stream(inputs, tmp_path):
    engine = BrightnessEngine(make_spec(fit="crop"))
    rates = measure_rates(stream(engine, tmp_path), inputs, tmp_path)
    assert set(engine.shapes) == {(2, 40, 50, 3)}
    assert rates.plain is None  # no network of torch


def test_images_that_are_all_tiled_have_no_such_rates(inputs, tmp_path):
    with pytest.raises(DataError, match="--time: for images that can be read and go through the network whole"):
        measure_rates(stream(BrightnessEngine(make_spec(fit="crop")), tmp_path, whole=1), inputs, tmp_path)


def test_the_bound_is_the_lower_of_reading_and_forward():
    assert Rates(3.0, 2.0, None).bound == 2.0
    assert Rates(3.0, 4.0, 1.0).bound == 3.0
