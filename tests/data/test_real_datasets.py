"""Datasets as users have them, written by real encoders: how they enter training, or why they are refused."""

import io
import re
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from helpers.image_bytes import exif
from helpers.layouts import disc, photo, write
from helpers.mask_files import NUM_PAIRS, SIDE, bands, blob, colour, rings, soft, with_void, write_dataset
from helpers.runs import stop_after
from helpers.steps import CPU, CPU_FACTS
from train_unet import main, train
from unet_trainer import load
from unet_trainer.config.errors import CheckpointError
from unet_trainer.config.load import load_config
from unet_trainer.images.image_decoding import EncodedImage
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD
from unet_trainer.images.mask_decoding import IGNORED, read_mask
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset, build_loaders
from unet_trainer.training.settings import build_settings


@pytest.fixture
def prepare(tiny_config, tmp_path):
    """Does what training does with a dataset before it builds a model; `written`: read back from config.yaml."""

    def prepare(data_dir, **overrides):
        config = load_config(tiny_config, {"data_dir": str(data_dir), **overrides})
        output = io.StringIO()
        console = Console(output)
        dataset = build_dataset(config, console, None)
        settings = build_settings(config, CPU_FACTS, dataset, console)
        loaders = build_loaders(settings.taken, dataset, CPU, console)
        (tmp_path / "config.yaml").write_text(settings.to_yaml("written by a test"), encoding="utf-8")
        written = load_config(tmp_path / "config.yaml")
        return SimpleNamespace(written=written, dataset=dataset, loaders=loaders, printed=output.getvalue())

    return prepare


# Name → mask file, settings, mask_values and ignore_value in config.yaml, class ids of each pixel
MASK_KINDS = {
    "ids and void": (lambda i: with_void(rings(i)), {}, (0, 1, 2), 255, lambda i: with_void(rings(i))),
    "colours of which two are one class": (
        lambda i: colour(bands(i) % 4, [(0, 0, 0), (64, 0, 128), (64, 0, 192), (9, 9, 9)]),
        {"mask_values": [0, [[64, 0, 128], [64, 0, 192]]], "ignore_value": [9, 9, 9]},
        (0, ((64, 0, 128), (64, 0, 192))),
        (9, 9, 9),
        lambda i: np.array([0, 1, 1, IGNORED], np.uint8)[bands(i) % 4],
    ),
    "soft edges": (soft, {}, "above 127", None, lambda i: soft(i) > 127),
}


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_masks_become_the_class_ids_they_mean_and_the_coding_is_written_down(kind, prepare, tmp_path):
    make_mask, settings, mask_values, ignore_value, truth = MASK_KINDS[kind]
    run = prepare(write_dataset(tmp_path / "data", make_mask), **settings)
    assert run.written.mask_values == mask_values
    assert run.written.ignore_value == ignore_value
    for pair in run.dataset.pairs:
        assert np.array_equal(run.dataset.coding.encode(read_mask(pair.mask)), truth(int(pair.name)))
    (batch,) = run.loaders.val.epoch(0)
    all_ids = set(np.unique([truth(i) for i in range(NUM_PAIRS)]).tolist())
    assert set(batch.masks[: batch.num_images].unique().tolist()) <= all_ids
    line = next(line for line in run.printed.splitlines() if line.startswith("  Masks:"))
    num_ids = max(2, run.written.num_classes)
    counted = np.bincount(np.concatenate([truth(i).ravel() for i in range(NUM_PAIRS)]), minlength=256)[:num_ids]
    shares = re.findall(r" ([\d.]+)%", line.partition(" of pixels")[0])
    assert shares == [f"{100 * share:.1f}" for share in (counted / counted.sum())[:8]]


def test_the_number_of_classes_is_decided_said_and_written_down(tiny_config, tmp_path, capsys):
    """Trained, and resumed with the same settings: auto is what the run began with."""
    data = write_dataset(tmp_path / "data", lambda i: with_void(rings(i)))
    result = train(tiny_config, data_dir=data, num_epochs=1, resume="auto")
    assert "num_classes: 3  (the masks hold ids 0 to 2; 255 beside them is taken as void)" in capsys.readouterr().out
    text = (result.run_dir / "config.yaml").read_text(encoding="utf-8")
    assert "\nnum_classes: 3  # decided: the masks hold ids 0 to 2; 255 beside them is taken as void\n" in text
    assert list(result.per_class_iou) == ["class 0", "class 1", "class 2"]
    again = train(tiny_config, data_dir=data, num_epochs=2, resume="auto")
    assert (again.run_dir, len(again.per_class_iou)) == (result.run_dir, 3)
    with pytest.raises(CheckpointError, match="num_classes: 3 in the checkpoint, 4 now"):
        train(tiny_config, data_dir=data, num_epochs=3, resume="auto", num_classes=4)


def photograph(index, channels=3):
    """H,W,C floats from 0 to 1, brighter in the disc."""
    values = np.random.default_rng(index).uniform(0, 0.6, (SIDE, SIDE, channels)) + 0.4 * blob(index)[:, :, None]
    return values * np.linspace(1, 0.5, channels)


def write_images(folder, write):
    """`write(index, path without extension)` writes an image and returns its pixels."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    arrays = {}
    for index in range(NUM_PAIRS):
        arrays[f"{index}"] = write(index, folder / f"images/{index}")
        Image.fromarray(blob(index) * 255).save(folder / f"masks/{index}.png")
    return arrays


def microscopy(index, path):
    """A 16-bit TIFF with values from 32995 to 34996, which PIL reads as white."""
    pixels = (32995 + 2001 * photograph(index, 1)[:, :, 0]).round().astype(np.uint16)
    pixels.flat[:2] = 32995, 34996
    assert cv2.imwrite(f"{path}.tif", pixels)
    return pixels[:, :, None]


def as_pil_reads(path):
    with Image.open(path) as image:
        return np.array(image)


def with_alpha(index, path):
    pixels = (photograph(index) * 255).astype(np.uint8)
    Image.fromarray(np.dstack([pixels, blob(index) * 200 + 55])).save(f"{path}.png")
    return pixels


def near_infrared(index, path):
    """Four bands of bytes as GDAL writes them: RGB, and the fourth is tagged as alpha."""
    pixels = (photograph(index, 4) * 255).astype(np.uint8)
    tifffile.imwrite(f"{path}.tif", pixels, photometric="rgb", extrasamples=["unassalpha"])
    return pixels


def rotated(index, path):
    """Stored rotated; the array is the image as it is shown."""
    pixels = (photograph(index) * 255).astype(np.uint8)
    Image.fromarray(np.rot90(pixels).copy()).save(f"{path}.jpg", exif=exif(6))
    return np.rot90(as_pil_reads(f"{path}.jpg"), -1)


IMAGE_KINDS = {
    "16-bit microscopy": (microscopy, "16-bit grey"),
    "alpha": (with_alpha, "8-bit RGB"),
    "a band that is tagged as alpha": (near_infrared, "8-bit 4 channels"),
    "rotated by EXIF": (rotated, "8-bit RGB"),
}


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_images_keep_depth_and_channels_and_their_statistics_are_written_down(kind, prepare, tmp_path):
    write, described = IMAGE_KINDS[kind]
    arrays = write_images(tmp_path / "data", write)
    run = prepare(tmp_path / "data", image_size=SIDE, augmentation="none")
    channels = arrays["0"].shape[2]
    assert run.written.in_channels == channels
    assert f"Images:     {described}; 48×48 → 48×48; normalised with" in run.printed
    pixels = np.concatenate([arrays[pair.name].reshape(-1, channels) for pair in run.dataset.split.train]).astype(float)
    if described == "8-bit RGB":
        assert (run.written.image_mean, run.written.image_std) == (IMAGENET_MEAN, IMAGENET_STD)
    else:
        assert run.written.image_mean == pytest.approx(pixels.mean(0), rel=1e-5)
        assert run.written.image_std == pytest.approx(pixels.std(0), rel=1e-5)
    is_dropped = "the alpha channel of 8 of 8 images is dropped (in_channels: 4 keeps it)"
    assert (is_dropped in run.printed) == (kind == "alpha")
    is_kept = f"images, tagged as alpha, is kept as a band (in_channels: {channels - 1} drops it)"
    assert (is_kept in run.printed) == ("band" in kind)
    assert ("8 of 8 images are rotated by the EXIF orientation" in run.printed) == (kind == "rotated by EXIF")
    (batch,) = run.loaders.val.epoch(0)
    assert batch.images.dtype == (torch.uint8 if described.startswith("8-bit") else torch.float32)
    images = batch.images.numpy().astype(float)
    for image, pair in zip(images, run.dataset.split.val, strict=False):  # the batch is padded
        difference = np.abs(image - arrays[pair.name])
        if kind == "rotated by EXIF":  # OpenCV and PIL round differently
            assert difference.mean() < 1
        else:
            assert difference.max() == 0


TAG = {"extratags": [(42113, "s", 0, "-9999", True)], "photometric": "minisblack"}


def holed(index):
    """H,W of bool: a tenth of an image."""
    return np.roll(np.arange(SIDE) < 5, 3 * index)[:, None].repeat(SIDE, 1)


def missing_file(mark, dtype=np.float32, tagged=False):
    """Writes a TIFF; returns its pixels, which are masked where there is no data."""

    def write(index, path):
        pixels, is_missing = (300 + 100 * photograph(index, 1)).astype(dtype), holed(index)
        pixels[is_missing] = mark
        tifffile.imwrite(f"{path}.tif", pixels[:, :, 0], **(TAG if tagged else {"photometric": "minisblack"}))
        return np.ma.masked_array(pixels, np.broadcast_to(is_missing[:, :, None], pixels.shape))

    return write


# Name → what writes the files, what is said of the marks, and fit
MISSING = {
    "NaN": (missing_file(np.nan), "NaN", "resize"),
    "the tag of GDAL in 16 bit": (missing_file(-9999, np.int16, tagged=True), "-9999", "crop"),
    "set": (missing_file(-9999), "-9999", "crop"),
}


@pytest.mark.parametrize("kind", MISSING)
def test_missing_data_is_left_out_of_the_statistics_and_filled_with_the_mean(kind, prepare, tmp_path):
    write, mark, fit = MISSING[kind]
    arrays = write_images(tmp_path / "data", write)
    setting = {"nodata": -9999} if "set" in kind else {}
    run = prepare(tmp_path / "data", image_size=SIDE, augmentation="none", fit=fit, **setting)
    channels = arrays["0"].shape[2]
    train = [arrays[pair.name].reshape(-1, channels) for pair in run.dataset.split.train]
    pixels = np.ma.concatenate(train).astype(float)
    assert run.written.image_mean == pytest.approx(pixels.mean(0), rel=1e-5)
    assert run.written.image_std == pytest.approx(pixels.std(0), rel=1e-4)
    missing = f"8 of 8 images have no data in 10.42% of their values ({mark}): left out of the statistics, and filled"
    assert missing in run.printed
    for batch in run.loaders.val.epoch(0):
        for image, pair in zip(batch.images.numpy(), run.dataset.split.val, strict=False):
            expected, mean = arrays[pair.name].astype(float).filled(np.nan), run.written.image_mean
            filled = np.where(np.isnan(expected), np.round(mean) if "16 bit" in kind else mean, expected)
            np.testing.assert_allclose(image, filled, rtol=1e-6)


def test_pixels_without_data_count_nowhere_if_the_user_says_so(prepare, tmp_path):
    write_images(tmp_path / "data", missing_file(-9999, np.int16, tagged=True))
    for setting in ("fill", "ignore"):
        run = prepare(tmp_path / "data", image_size=SIDE, augmentation="none", nodata=setting)
        (batch,) = run.loaders.val.epoch(0)
        for mask, pair in zip(batch.masks.numpy(), run.dataset.split.val, strict=False):
            truth = blob(int(pair.name))
            expected = np.where(holed(int(pair.name)), IGNORED, truth) if setting == "ignore" else truth
            np.testing.assert_array_equal(mask, expected)
        assert ("with the mean; these pixels are ignored; nodata: keep" in run.printed) == (setting == "ignore")


def test_a_model_is_evaluated_and_used_on_such_images_as_it_was_trained(tiny_config, tmp_path, capsys):
    write_images(tmp_path / "data", missing_file(-9999))
    result = train(tiny_config, data_dir=tmp_path / "data", nodata=-9999, val_fraction=0.5)
    capsys.readouterr()
    assert main(["evaluate", str(result.run_dir)]) == 0
    assert f"{result.best_val_iou:.4f}" in capsys.readouterr().out
    out = tmp_path / "out"
    assert main(["predict", str(result.run_dir), str(tmp_path / "data/images"), "--out", str(out), "--overlay"]) == 0
    assert "values without data in 8 images were filled with the mean" in capsys.readouterr().out
    model = load(result.run_dir)
    for path in (tmp_path / "data/images").iterdir():
        spec = model.card.spec.image
        filled = spec.fill(EncodedImage(path.read_bytes()).decode(channels=spec.channels), -9999.0)[0]
        np.testing.assert_array_equal(read_mask(out / f"{path.stem}.png"), model(filled))
    assert spec.nodata == (-9999.0,)  # it knows the mark when the images of training are gone


@pytest.mark.usefixtures("small_network")
def test_a_resumed_run_in_blocks_keeps_its_gap_and_its_test_pairs(tiny_config, tmp_path, capsys):
    for index in range(20):
        write(tmp_path / f"data/images/{index}.png", photo(index))
        write(tmp_path / f"data/masks/{index}.png", disc(index))
    write(tmp_path / "data/test/images/90.png", photo(5))
    write(tmp_path / "data/test/masks/90.png", disc(5))
    config = {**tiny_config, "data_dir": str(tmp_path / "data"), "split": "blocks", "run_name": "mine"}
    with pytest.raises(KeyboardInterrupt):
        train(config, on_epoch=stop_after(1))
    lines = (tmp_path / "checkpoints/mine/split.csv").read_text().splitlines()
    counts = {part: sum(line.split(",")[2] == part for line in lines) for part in ("train", "val", "test", "unused")}
    assert (counts["val"], counts["test"], counts["train"] + counts["unused"]) == (4, 1, 16)
    capsys.readouterr()
    train(config, resume=str(tmp_path / "checkpoints/mine"))
    said = capsys.readouterr().out
    assert "1 test kept for evaluate (as the run began" in said
    assert "which the run began with, and left out" not in said
