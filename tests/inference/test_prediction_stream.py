"""Many images into files: batches, large images, bad files, interruptions and bounds."""

import io
import json

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from helpers.brightness_engine import BrightnessEngine
from helpers.image_bytes import cv2_bytes, tiff_bytes
from helpers.predicting import files_in, write_model
from helpers.steps import make_spec
from unet_trainer.images import image_spec
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.inference import prediction_stream
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import Kinds, PredictionFolder
from unet_trainer.inference.prediction_stream import PredictionStream
from unet_trainer.inference.predictor import LoadedModel, Predictor, load
from unet_trainer.system.console import Console

SIZES = ((20, 30), (24, 16), (20, 30), (20, 30), (24, 16), (33, 9), (20, 30))


@pytest.fixture
def images(tmp_path):
    """PNGs of several sizes, and their pixels by name."""
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    pixels = {}
    for number, size in enumerate(SIZES):
        pixels[f"{number}"] = random.integers(0, 256, (*size, 3), np.uint8)
        (tmp_path / f"images/{number}.png").write_bytes(cv2_bytes(".png", pixels[f"{number}"][:, :, ::-1]))
    return pixels


def inputs_of(tmp_path, names, suffix=".png"):
    return [Input(tmp_path / f"images/{name}{suffix}", name) for name in names]


def stream(tmp_path, kinds=None, spec=None, engine=None, threshold=None, batch_size=4, out="out", **predictor):
    engine = engine or BrightnessEngine(spec or make_spec(fit="crop", image_size=(8, 8), tile=(64, 64)))
    folder = PredictionFolder(tmp_path / out, engine.card.spec, kinds or Kinds())
    folder.out.mkdir(exist_ok=True)
    return PredictionStream(Predictor(engine, **predictor), folder, Console(io.StringIO()), threshold, batch_size)


def mask(tmp_path, name):
    return np.array(Image.open(tmp_path / f"out/{name}.png"))


def test_every_image_gets_its_own_mask(tmp_path, images):
    predicting = stream(tmp_path)
    outcome = predicting.run(inputs_of(tmp_path, images))
    assert (outcome.num_written, outcome.failed) == (7, [])
    assert predicting.bar.num_done == 7
    for name, pixels in images.items():
        np.testing.assert_array_equal(mask(tmp_path, name), pixels[:, :, 0] > 128)
    assert files_in(tmp_path / "out") == sorted(f"{name}.png" for name in images)


@pytest.mark.parametrize("is_large", [False, True])
def test_a_resizing_model_gives_each_image_its_own_size(tmp_path, images, monkeypatch, is_large):
    if is_large:  # the results are written in bands
        monkeypatch.setattr(prediction_stream, "MAX_ELEMENTS", 100)
        monkeypatch.setattr("unet_trainer.model.metrics.MAX_ELEMENTS", 100)
    predicting = stream(tmp_path, spec=make_spec(fit="resize", image_size=(32, 32)), batch_size=7)
    predicting.run(inputs_of(tmp_path, images))
    assert predicting.predictor.engine.shapes == [(7, 32, 32, 3)]
    model = load_like(predicting)
    for name, pixels in images.items():
        np.testing.assert_array_equal(mask(tmp_path, name), model(pixels))


def load_like(predicting):
    """The same engine, one image at a time."""
    return LoadedModel(BrightnessEngine(predicting.folder.spec))


@pytest.mark.parametrize("kind", ["png", "npy"])
def test_probabilities_are_those_of_the_model(tmp_path, images, kind):
    spec = make_spec(ImageSpec(3, "uint8", (128.0,) * 3, (50.0,) * 3, 0, 255), fit="crop")

    class Soft(BrightnessEngine):
        def logits(self, images):
            return super().logits(images) / 50

    stream(tmp_path, Kinds(probabilities=kind), engine=Soft(spec)).run(inputs_of(tmp_path, images))
    for name, pixels in images.items():
        expected = 1 / (1 + np.exp(-(pixels[:, :, 0].astype(float) - 128) / 50))
        path = tmp_path / f"out/probabilities/{name}.{kind}"
        stored = np.load(path) if kind == "npy" else np.array(Image.open(path)) / 65535  # all 16 bits
        np.testing.assert_allclose(stored, expected, atol=1e-5)


def test_bad_files_are_named_and_the_rest_is_done(tmp_path, images):
    given = inputs_of(tmp_path, images)
    given[1].path.write_bytes(b"just text")
    given[3].path.write_bytes(cv2_bytes(".png", np.zeros((4, 4, 3), np.uint16)))
    given[5].path.unlink()
    outcome = stream(tmp_path, Kinds(polygons=True)).run(given)
    assert outcome.num_written == 4
    assert [(path.name, reason) for path, reason in outcome.failed] == [
        ("1.png", "not an image that can be decoded"),
        ("3.png", "16-bit values; the model was trained on 8-bit images"),
        ("5.png", "No such file or directory"),
    ]
    listed = json.loads((tmp_path / "out/polygons.json").read_text())["images"]
    assert [image["file_name"] for image in listed] == ["0.png", "2.png", "4.png", "6.png"]


@pytest.mark.parametrize(("fit", "is_large"), [("crop", False), ("crop", True), ("resize", True)])
def test_a_large_tiff_is_streamed(tmp_path, monkeypatch, fit, is_large):
    """Tiled from memory, or mapped into it; beside others."""
    if is_large:
        monkeypatch.setattr(image_spec, "LARGE_PIXELS", 100)
    (tmp_path / "images").mkdir()
    pixels = cv2.resize(np.random.default_rng(0).integers(0, 256, (13, 15, 3), np.uint8), (150, 130))
    for name, content in {"a": pixels, "b": 255 - pixels}.items():
        (tmp_path / f"images/{name}.tif").write_bytes(tiff_bytes(content, tile=(32, 32)))
    spec = make_spec(fit=fit, image_size=(64, 64))
    predicting = stream(tmp_path, Kinds(overlay=True), spec, tile=(64, 64), whole=100)
    assert predicting.run(inputs_of(tmp_path, "ab", ".tif")).num_written == 2
    expected = pixels[:, :, 0] > 128 if fit == "crop" else load_like(predicting)(pixels)
    assert (mask(tmp_path, "a") == expected).mean() > (0.999 if fit == "crop" else 0.98)
    assert mask(tmp_path, "b").mean() == pytest.approx(1 - mask(tmp_path, "a").mean(), abs=0.05)
    assert files_in(tmp_path / "out") == ["a.png", "b.png", "overlays/a.png", "overlays/b.png"]


def test_a_large_file_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(image_spec, "LARGE_PIXELS", 100)
    (tmp_path / "images").mkdir()
    data = tiff_bytes(np.zeros((640, 40, 3), np.uint8), rowsperstrip=8)
    (tmp_path / "images/a.tif").write_bytes(data[: len(data) // 2])
    (tmp_path / "images/b.tif").write_bytes(data)
    outcome = stream(tmp_path, tile=(64, 64), whole=100).run(inputs_of(tmp_path, "ab", ".tif"))
    assert [(path.name, reason) for path, reason in outcome.failed] == [("a.tif", "the file is cut off")]
    assert files_in(tmp_path / "out") == ["b.png"]


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", ["dataset", "image"])
def test_a_recorded_forward_pass_gives_the_bits_of_the_calls_that_it_replays(tmp_path, normalize):
    path = write_model(tmp_path / "run/best.pt", num_classes=3, normalize=normalize)
    eager, recorded = (load(path, device="cuda").engine for _ in range(2))
    recorded.record_forward()
    shapes = [(4, 64, 64, 3), (3, 40, 72, 3)]
    generator = torch.Generator().manual_seed(0)
    for shape in [*shapes, *shapes, *shapes]:
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        assert torch.equal(recorded.logits(images), eager.logits(images))
    assert [tuple(shape) for shape, _ in recorded.forward.recordings] == shapes
    assert None not in recorded.forward.recordings.values()


@pytest.mark.gpu
def test_a_network_that_waits_for_the_gpu_cannot_be_recorded_and_is_called_as_it_is(tmp_path):
    engine = load(write_model(tmp_path / "run/best.pt"), device="cuda").engine
    engine.segmenter.network.register_forward_hook(lambda module, args, out: out * float(out.max() > -1e9))
    engine.record_forward()
    images = torch.zeros(2, 64, 64, 3, dtype=torch.uint8)
    logits = [engine.logits(images).cpu() for _ in range(3)]
    assert torch.equal(logits[0], logits[2])
    assert list(engine.forward.recordings.values()) == [None]


@pytest.mark.gpu
@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_a_gpu_gives_what_a_cpu_gives(tmp_path, images, fit):
    path = write_model(tmp_path / "run/best.pt", fit=fit, num_classes=3)
    many = [Input(path, f"{turn}/{name}") for turn in range(30) for path, name in inputs_of(tmp_path, images)]
    for device in ("cpu", "cuda"):
        engine = load(path, device=device).engine
        predicting = stream(tmp_path, Kinds(probabilities="npy"), engine=engine, out=device, batch_size=8)
        predicting.warm_up()
        assert predicting.run(many).num_written == len(many)
    for name in files_in(tmp_path / "cpu/probabilities"):
        ours, theirs = (np.load(tmp_path / device / "probabilities" / name) for device in ("cuda", "cpu"))
        np.testing.assert_allclose(ours, theirs, atol=0.05)  # bfloat16


def test_an_interruption_of_a_large_image_leaves_whole_files_only(tmp_path, images, monkeypatch):
    monkeypatch.setattr(image_spec, "LARGE_PIXELS", 100)
    given = inputs_of(tmp_path, images, ".tif")
    for path, name in given:
        path.write_bytes(tiff_bytes(np.tile(images[name], (5, 2, 1))))

    class Interrupting(BrightnessEngine):
        def logits(self, images):
            if len(self.shapes) == 2:
                raise KeyboardInterrupt
            return super().logits(images)

    kinds, engine = Kinds(overlay=True, polygons=True), Interrupting(make_spec(fit="crop"))
    predicting = stream(tmp_path, kinds, engine=engine, tile=(32, 32), whole=1)
    with pytest.raises(KeyboardInterrupt):
        predicting.run(given)
    left = files_in(tmp_path / "out")
    assert not any(name.endswith((".tmp", ".json")) for name in left)
    for name in left:
        Image.open(tmp_path / "out" / name).load()
    masks = [name for name in left if "/" not in name]
    assert len(masks) < len(given)
    assert {f"overlays/{name}" for name in masks} <= set(left)
    again = stream(tmp_path, kinds)
    is_done = [again.folder.is_done(name) for _, name in given]
    assert again.run(given, is_done).num_written == len(given) - len(masks)


def test_what_is_read_ahead_does_not_grow_with_the_number_of_images(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    pixels = np.zeros((10, 10, 3), np.uint8)
    for number in range(120):
        (tmp_path / f"images/{number}.png").write_bytes(cv2_bytes(".png", pixels))
    monkeypatch.setattr(prediction_stream, "MAX_BYTES", 10 * pixels.nbytes)
    num_read, ahead = [], []
    read = prediction_stream.read_small
    monkeypatch.setattr(prediction_stream, "read_small", lambda *given: num_read.append(1) or read(*given))

    class Counting(BrightnessEngine):
        def logits(self, images):
            ahead.append(len(num_read) - sum(shape[0] for shape in self.shapes))
            return super().logits(images)

    predicting = stream(tmp_path, engine=Counting(make_spec(fit="crop")))
    predicting.run(inputs_of(tmp_path, [str(number) for number in range(120)]))
    assert len(ahead) == 30
    assert max(ahead) <= 2 * 4 + 10 + predicting.num_readers  # two batches, those that wait, those being read


def test_an_image_that_is_gone_when_its_overlay_is_drawn_counts_as_bad(tmp_path, images):
    given = inputs_of(tmp_path, images)

    class Vandal(BrightnessEngine):
        def logits(self, images):
            given[0].path.unlink(missing_ok=True)
            return super().logits(images)

    outcome = stream(tmp_path, Kinds(overlay=True), engine=Vandal(make_spec(fit="crop"))).run(given)
    assert [(path.name, reason) for path, reason in outcome.failed] == [("0.png", "No such file or directory")]
    assert outcome.num_written == 6
    assert "0.png" not in files_in(tmp_path / "out")
