"""Many images into files: batches, large images, bad files, interruptions and bounds."""

import io
import json
import os
import signal

import cv2
import numpy as np
import pytest
from PIL import Image

from helpers.brightness_engine import BrightnessEngine
from helpers.image_bytes import cv2_bytes, tiff_bytes
from helpers.predicting import GEO_TAGS, files_in, write_model
from helpers.steps import make_spec
from unet_trainer.images import image_spec
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.inference import prediction_stream, stream_processes
from unet_trainer.inference.inputs import Input
from unet_trainer.inference.prediction_files import ImageFiles, Kinds, PredictionFolder
from unet_trainer.inference.prediction_stream import PredictionStream, measure_rates
from unet_trainer.inference.predictor import Predictor, load
from unet_trainer.inference.stream_processes import StreamProcesses
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.system.atomic_files import Draft
from unet_trainer.system.concurrency import CAN_FORK, read_ahead
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


def stream(
    tmp_path, kinds=None, spec=None, engine=None, threshold=None, batch_size=4, out="out", processes=None, **predictor
):
    engine = engine or BrightnessEngine(spec or make_spec(fit="crop", image_size=(8, 8), tile=(64, 64)))
    folder = PredictionFolder(tmp_path / out, engine.card.spec, kinds or Kinds())
    folder.out.mkdir(exist_ok=True)
    return PredictionStream(
        Predictor(engine, **predictor), folder, Console(io.StringIO()), threshold, batch_size, processes
    )


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
    from unet_trainer.inference.predictor import LoadedModel

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
        if kind == "npy":
            np.testing.assert_allclose(np.load(tmp_path / f"out/probabilities/{name}.npy"), expected, atol=1e-6)
        else:
            stored = np.array(Image.open(tmp_path / f"out/probabilities/{name}.png"))
            assert stored.max() > 40000  # needs all 16 bits
            np.testing.assert_allclose(stored / 65535, expected, atol=1e-5)


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
    """Tiled from memory, or read by blocks; beside others."""
    if is_large:
        monkeypatch.setattr(image_spec, "LARGE_PIXELS", 100)
    (tmp_path / "images").mkdir()
    pixels = cv2.resize(np.random.default_rng(0).integers(0, 256, (13, 15, 3), np.uint8), (150, 130))
    for name in ("a", "b"):
        (tmp_path / f"images/{name}.tif").write_bytes(
            tiff_bytes(pixels if name == "a" else 255 - pixels, tile=(32, 32))
        )
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


@pytest.mark.parametrize("is_large", [False, True])
def test_an_interruption_leaves_whole_files_only(tmp_path, images, monkeypatch, is_large):
    if is_large:
        monkeypatch.setattr(image_spec, "LARGE_PIXELS", 100)
        given = [Input(tmp_path / f"images/{name}.tif", name) for name in images]
        for path, name in given:
            path.write_bytes(tiff_bytes(np.tile(images[name], (5, 2, 1))))
    else:
        given = inputs_of(tmp_path, images)

    class Interrupting(BrightnessEngine):
        def logits(self, images):
            if len(self.shapes) == 2:
                raise KeyboardInterrupt
            return super().logits(images)

    predicting = stream(
        tmp_path,
        Kinds(overlay=True, polygons=True),
        engine=Interrupting(make_spec(fit="crop")),
        tile=(32, 32),
        whole=10**6 if not is_large else 1,
    )
    with pytest.raises(KeyboardInterrupt):
        predicting.run(given)
    left = files_in(tmp_path / "out")
    assert not any(name.endswith((".tmp", ".json")) for name in left)
    masks = [name for name in left if "/" not in name]
    assert len(masks) < len(given)
    for name in left:
        Image.open(tmp_path / "out" / name).load()
    assert {f"overlays/{name}" for name in masks} <= set(left)
    again = stream(tmp_path, Kinds(overlay=True, polygons=True))
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


needs_fork = pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")


@pytest.fixture
def with_geotiff(tmp_path, images):
    """Inputs of all images in two folders, one of them a GeoTIFF."""
    (tmp_path / "images/4.tif").write_bytes(tiff_bytes(images["4"], extratags=GEO_TAGS))
    return [
        Input(tmp_path / f"images/{name}.{'tif' if name == '4' else 'png'}", f"sub/{name}" if int(name) % 2 else name)
        for name in images
    ]


def contents(folder):
    return {name: (folder / name).read_bytes() for name in files_in(folder)}


@needs_fork
@pytest.mark.parametrize(
    "kinds", [Kinds(values=True, overlay=True, probabilities="png"), Kinds(probabilities="npy"), Kinds(polygons=True)]
)
def test_processes_write_the_bytes_that_threads_write(tmp_path, with_geotiff, kinds):
    assert stream(tmp_path, kinds, out="threads").run(with_geotiff).num_written == 7
    with StreamProcesses(2) as processes:
        predicting = stream(tmp_path, kinds, out="processes", processes=processes)
        assert predicting.run(with_geotiff).num_written == 7
    assert contents(tmp_path / "threads") == contents(tmp_path / "processes")
    assert {"0.png", "sub/1.png", "4.png", "4.tif"} <= set(files_in(tmp_path / "threads"))
    assert not any(worker.is_alive() for worker in processes.writers.workers.processes)


@needs_fork
def test_processes_read_what_threads_read_in_memory_that_is_used_again(tmp_path, with_geotiff, monkeypatch):
    monkeypatch.setattr(stream_processes, "NUM_READ_SLOTS", 8)
    many = [Input(path, f"{turn}/{name}") for turn in range(20) for path, name in with_geotiff]
    many.insert(50, Input(tmp_path / "images/broken.png", "broken"))
    many[50].path.write_bytes(many[0].path.read_bytes()[:60])
    spec = make_spec(fit="resize", image_size=(32, 32), source_sides=(2.0, 3.0))
    outcomes = {}
    with StreamProcesses(2) as processes:
        for out, used in (("threads", None), ("processes", processes)):
            monkeypatch.setattr(prediction_stream, "read_ahead", None if used else read_ahead)
            predicting = stream(tmp_path, spec=spec, out=out, processes=used).run(many)
            outcomes[out] = predicting.num_written, predicting.failed, sorted(predicting.predictor.far_sizes)
        assert sorted(processes.readers.free) == list(range(8))
    assert outcomes["threads"] == outcomes["processes"]
    assert outcomes["threads"][0] == 140
    assert contents(tmp_path / "threads") == contents(tmp_path / "processes")


@needs_fork
def test_images_that_cannot_be_read_leave_memory_for_the_others(tmp_path, images):
    """One of four can be read: each of a batch would hold the memory of four."""
    (tmp_path / "images/broken.png").write_bytes((tmp_path / "images/0.png").read_bytes()[:60])
    many = [Input(tmp_path / f"images/{'broken' if number % 4 else 0}.png", f"{number}") for number in range(400)]
    with StreamProcesses(2) as processes:
        outcome = stream(tmp_path, spec=make_spec(fit="resize"), processes=processes, batch_size=64).run(many)
    assert (outcome.num_written, len(outcome.failed)) == (100, 300)


@needs_fork
def test_a_process_that_dies_while_it_writes_ends_it_and_leaves_whole_files_only(tmp_path, with_geotiff, monkeypatch):
    parent, finish = os.getpid(), ImageFiles.finish

    def finish_or_die(files):
        if os.getpid() != parent and files.given.name == "sub/3":
            for draft in files.drafts:
                draft.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        finish(files)

    monkeypatch.setattr(ImageFiles, "finish", finish_or_die)
    with (
        StreamProcesses(2) as processes,
        pytest.raises(WorkerError, match=r"a process that writes results died.* while they had .*/\d.png to .*/\d.png"),
    ):
        stream(tmp_path, Kinds(values=True), processes=processes, batch_size=7).run(with_geotiff)
    left = files_in(tmp_path / "out")
    assert "sub/3.png" not in left
    for name in left:
        Image.open(tmp_path / "out" / name).load()
    assert not any(worker.is_alive() for worker in processes.writers.workers.processes)


@needs_fork
def test_in_processes_an_image_that_is_gone_counts_as_bad_and_a_full_disk_leaves_nothing(tmp_path, images, monkeypatch):
    given = inputs_of(tmp_path, images)

    class Vandal(BrightnessEngine):
        def logits(self, images):
            given[0].path.unlink(missing_ok=True)
            return super().logits(images)

    with StreamProcesses(2) as processes:
        engine = Vandal(make_spec(fit="crop"))
        outcome = stream(tmp_path, Kinds(overlay=True), engine=engine, processes=processes).run(given)
    assert [(path.name, reason) for path, reason in outcome.failed] == [("0.png", "No such file or directory")]
    assert outcome.num_written == 6
    assert "0.png" not in files_in(tmp_path / "out")

    def fail(self):
        raise OSError(28, "No space left on device", "out/1.png")

    monkeypatch.setattr(Draft, "keep", fail)
    with StreamProcesses(2) as processes, pytest.raises(OSError, match="No space left") as caught:
        stream(tmp_path, processes=processes, out="full").run(given[1:])
    assert caught.value.filename == "out/1.png"
    assert files_in(tmp_path / "full") == []


@pytest.mark.gpu
@pytest.mark.parametrize("fit", ["crop", "resize"])
def test_a_gpu_gives_what_a_cpu_gives_and_the_same_bytes_with_processes_and_threads(tmp_path, with_geotiff, fit):
    path = write_model(tmp_path / "run/best.pt", fit=fit, num_classes=3)
    many = [Input(path, f"{turn}/{name}") for turn in range(30) for path, name in with_geotiff]
    with StreamProcesses(4) as processes:
        for out, device, used in (("cpu", "cpu", None), ("threads", "cuda", None), ("processes", "cuda", processes)):
            engine = load(path, device=device).engine
            stream(tmp_path, Kinds(probabilities="npy"), engine=engine, out=out, batch_size=8, processes=used).run(many)
    assert contents(tmp_path / "threads") == contents(tmp_path / "processes")
    for name in files_in(tmp_path / "cpu/probabilities"):
        ours, theirs = (np.load(tmp_path / device / "probabilities" / name) for device in ("threads", "cpu"))
        np.testing.assert_allclose(ours, theirs, atol=0.05)  # bfloat16


def test_all_rates_are_measured_and_the_plain_loop_writes_the_same_masks(tmp_path, images, monkeypatch):
    monkeypatch.setattr(prediction_stream, "FORWARD_SECONDS", 0.01)
    path = write_model(tmp_path / "run/best.pt", fit="crop", num_classes=3, image_size=(8, 8), tile=(64, 64))
    model = load(path, device="cpu")
    (tmp_path / "plain").mkdir()
    inputs = [Input(tmp_path / "images/broken.png", "broken"), *inputs_of(tmp_path, images)]
    inputs[0].path.write_bytes(inputs[1].path.read_bytes()[:60])  # the stream says so
    rates = measure_rates(stream(tmp_path, engine=model.engine), inputs, tmp_path / "plain")
    assert min(rates.reading, rates.forward, rates.plain) > 0
    for name, pixels in images.items():
        written = cv2.imread(str(tmp_path / f"plain/{name}.png"), cv2.IMREAD_UNCHANGED)
        assert (written == model(pixels)).mean() > 0.99
