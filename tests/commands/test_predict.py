"""`python train_unet.py predict`: what it writes, what it says, and its exit codes."""

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from PIL import Image

from helpers.image_bytes import cv2_bytes, exif, pil_bytes, tiff_bytes
from helpers.killed_runs import start, wait_until
from helpers.predicting import GEO_TAGS, files_in, predict_slowly, write_model
from train_unet import main
from unet_trainer.images.row_writers import PngWriter
from unet_trainer.inference import engine as engines
from unet_trainer.inference.engine import load_engine
from unet_trainer.inference.predictor import load
from unet_trainer.system.atomic_files import Draft

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Runs with random weights: binary, and of three classes that were trained without symmetries."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "checkpoints/binary/best.pt", fit="crop")
    write_model(folder / "checkpoints/binary/last.pt", fit="crop", seed=1)
    write_model(folder / "checkpoints/three/best.pt", augmentation="none", num_classes=3)
    return folder


@pytest.fixture(scope="module")
def cached_engine():
    """Building a network takes longer than all else; the models are read once, whatever their path from here."""
    loaded = {}

    def load_once(path, device="auto", precision="auto", raw=False):
        key = path.resolve(), device, precision, raw
        if key not in loaded:
            loaded[key] = load_engine(path, device, precision, raw)
        return loaded[key]

    return load_once


@pytest.fixture
def here(models, tmp_path, monkeypatch, cached_engine):
    """A working folder with runs and images."""
    monkeypatch.setattr(engines, "load_engine", cached_engine)
    (tmp_path / "checkpoints").symlink_to(models / "checkpoints")
    pixels = RANDOM.integers(0, 256, (40, 60, 3), np.uint8)
    for name in ("images/a.png", "images/sub/b.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2_bytes(".png", pixels))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_is_predicted_with_its_structure_and_it_says_what_was_written(here, capsys):
    assert main(["predict", "binary", "images", "--out", "out"]) == 0
    assert files_in(here / "out") == ["a.png", "sub/b.png"]
    said, complaints = capsys.readouterr()
    assert complaints == ""
    model = "checkpoints/binary/best.pt: unet with tu-test_efficientnet, epoch 3, val IoU 0.5000; on cpu, float32"
    assert model in said
    assert re.search(r"Predicted 2 images in [\d.]+ s \([\d.]+ images/s\)", said)
    assert "class ids in PNGs with a palette (0 background, 1 foreground)" in said
    command = re.search(r"in Python (numpy\.array\(PIL\.Image\.open\('.*'\)\))", said)[1]
    read = eval(command, {"numpy": np, "PIL": PIL})
    np.testing.assert_array_equal(read, load("checkpoints/binary")(np.array(Image.open("images/a.png"))))
    assert set(np.unique(read)) <= {0, 1}


def test_every_kind_of_file_is_announced_and_a_geotiff_has_its_mask_and_polygons_in_its_coordinates(here, capsys):
    pixels = RANDOM.integers(0, 256, (40, 60, 3), np.uint8)
    (here / "images/field.tif").write_bytes(tiff_bytes(pixels, extratags=GEO_TAGS))
    kinds = ["--values", "--overlay", "--probabilities", "--polygons"]
    assert main(["predict", "three", "images/a.png", "images/field.tif", "--out", "out", *kinds]) == 0
    said = capsys.readouterr().out
    for line in (
        "out/values: the values of the dataset's masks",
        "out/overlays",
        "out/probabilities: 16-bit PNGs, 65535 is 1",
        "out/polygons.json: COCO",
        "masks of GeoTIFFs also as .tif and polygons as .geojson, with their coordinates",
    ):
        assert line in said
    files = files_in(here / "out")
    assert {"a.png", "overlays/a.png", "polygons.json", "probabilities/2-class_2/a.png", "values/a.png"} <= set(files)
    assert {"field.geojson", "field.png", "field.tif"} <= set(files)


def test_a_second_start_skips_what_is_done(here, capsys):
    assert main(["predict", "binary", "images/a.png", "--out", "out"]) == 0
    before = (here / "out/a.png").stat().st_mtime_ns
    killed, running = (10_000, ".b.png.123-456.tmp"), (0, ".c.png.123-456.tmp")
    for seconds, name in (killed, running):
        (here / "out" / name).write_bytes(b"half")
        os.utime(here / "out" / name, (time.time() - seconds,) * 2)
    assert main(["predict", "binary", "images", "--out", "out", "--skip-existing"]) == 0
    assert [path.name for path in (here / "out").glob("*.tmp")] == [".c.png.123-456.tmp"]
    (here / "out/.c.png.123-456.tmp").unlink()
    assert (here / "out/a.png").stat().st_mtime_ns == before
    assert files_in(here / "out") == ["a.png", "sub/b.png"]
    said = capsys.readouterr().out
    assert "2, 1 of them done before" in said
    assert "Predicted 1 image in " in said
    assert main(["predict", "binary", "images", "--out", "out", "--skip-existing", "--polygons"]) == 0
    assert "Predicted 0 images.\n" in (said := capsys.readouterr().out)
    assert "polygons:      out/polygons.json: COCO" in said  # of the masks that are there
    assert main(["predict", "binary", "images", "--out", "new", "--polygons"]) == 0
    assert (here / "out/polygons.json").read_text() == (here / "new/polygons.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["three", "images", "--threshold", "0.4"], "--threshold: for a model of two class ids; checkpoints/three/best.pt has 3"),
        (["binary", "images", "--threshold", "50"], "--threshold: got 50; need a probability between 0 and 1"),
        (["binary", "images", "--batch-size", "0"], "--batch-size: got 0; need 1 or more"),
        (["images/a.png", "images"], "images/a.png is not a checkpoint"),
        (["binary", "images", "--device", "cuda:99"], "device: cuda:99 "),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_told_in_one_message(here, capsys, words, message):
    assert main(["predict", *words, "--out", "out"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"Error: {message}")
    assert complaint.count("\n") == 1
    assert not (here / "out").exists()


def test_a_disk_that_is_full_is_told_and_what_is_there_is_whole(here, capsys, monkeypatch):
    keep = Draft.keep

    def keep_the_first(self):
        if self.path.name != "a.png":
            raise OSError(28, "No space left on device", str(self.path))
        keep(self)

    monkeypatch.setattr(Draft, "keep", keep_the_first)
    assert main(["predict", "binary", "images", "--out", "out", "--batch-size", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "Error: --out: out cannot be written to (out/sub/b.png: No space left on device; make room); 1 image done"
    )
    assert files_in(here / "out") == ["a.png"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_leaves_whole_files(here, number):
    pixels = (here / "images/a.png").read_bytes()
    for index in range(40):
        (here / f"images/{index:02}.png").write_bytes(pixels)
    log = here / "log"
    places = [str(here / name) for name in ("checkpoints/binary", "images", "out")]
    given = ["predict", *places[:2], "--out", places[2], "--batch-size", "4"]
    process = start(predict_slowly, given, log)
    wait_until(lambda: process.exitcode is not None or len(list((here / "out").glob("[0-9]*.png"))) >= 4)
    assert process.exitcode is None
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == (-number if number == signal.SIGKILL else 128 + number)
    left = files_in(here / "out")
    masks = [name for name in left if not name.endswith(".tmp")]
    for name in masks:
        np.array(Image.open(here / "out" / name))
    assert 4 <= len(masks) < 42
    if number != signal.SIGKILL:  # which leaves no time to tidy up
        assert masks == left
        said = log.read_text()
        assert f"{len(masks)} of 42 images done; --skip-existing continues from there" in said
        assert said.endswith(f"Error: interrupted by {number.name}\n")
    assert main([*given, "--skip-existing"]) == 0
    assert len([name for name in files_in(here / "out") if name.endswith(".png")]) == 42


def test_results_lie_among_the_images_if_that_is_said_and_match_them_as_they_are_displayed(here, capsys):
    picture = RANDOM.integers(0, 256, (40, 60, 3), np.uint8)
    (here / "turned.jpg").write_bytes(pil_bytes("JPEG", picture, quality=100, exif=exif(6)))
    assert main(["predict", "binary", "turned.jpg", "--out", "."]) == 2
    assert "Error: --out: got .; turned.png would lie among the images" in capsys.readouterr().err
    assert main(["predict", "binary", "turned.jpg", "--out", ".", "--among-images"]) == 0
    mask = np.array(Image.open("turned.png"))
    assert mask.shape == (60, 40)
    shown = np.rot90(np.array(Image.open("turned.jpg")), -1)  # turned clockwise
    expected = load("checkpoints/binary")(np.ascontiguousarray(shown))
    assert (mask == expected).mean() > 0.95  # decoders of JPEG differ a little


@pytest.mark.parametrize("word", ["link", "checkpoints/three/best.pt"])
def test_a_second_model_among_the_images_is_refused_by_name(here, capsys, word):
    for name in ("config.yaml", "split.csv", "samples/epoch_0001.png"):  # a picture, but no image
        path = here / "runs/other" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((here / "images/a.png").read_bytes() if path.suffix == ".png" else b"")
    Path("link").symlink_to("runs/other")
    assert main(["predict", "binary", "images", word, "--out", "out"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"Error: {word} is a model, not images; predict takes one model, its first word")
    assert not (here / "out").exists()


def test_polygons_of_masks_that_another_model_made_are_refused_by_name(here, capsys):
    Path("images/map.tif").write_bytes(tiff_bytes(np.zeros((40, 60, 3), np.uint8), extratags=GEO_TAGS))
    Path("out").mkdir()
    with Path("out/map.png").open("wb") as file:
        writer = PngWriter(file, (40, 60), np.uint8)
        writer.write(np.full((40, 60), 2, np.uint8))
        writer.finish()
    assert main(["predict", "binary", "images/map.tif", "--out", "out", "--skip-existing", "--polygons"]) == 2
    assert "out/map.png: class 2 is none of this model's; leave out --skip-existing" in capsys.readouterr().err
