"""Datasets as users have them, written by real encoders: how they enter training, or why they are refused."""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
import textwrap

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from helpers.image_bytes import exif
from helpers.mask_files import (
    NUM_PAIRS,
    SIDE,
    bands,
    blob,
    colour,
    objects,
    palette,
    rings,
    soft,
    transparent,
    voc,
    with_last_ignored,
    with_void,
    write_dataset,
)
from helpers.steps import CPU, CPU_FACTS
from train_unet import train
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config
from unet_trainer.datasets.dataset_report import CheckedDataset
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import read_mask
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.system.console import Console
from unet_trainer.training.build import build_dataset, build_loaders
from unet_trainer.training.components import Loaders
from unet_trainer.training.settings import build_settings


@dataclasses.dataclass
class Prepared:
    """What a run has before it builds a model."""

    written: Config  # read back from the text of config.yaml
    dataset: CheckedDataset
    loaders: Loaders
    printed: str


@pytest.fixture
def prepare(tiny_config, tmp_path):
    """Does what training does with a dataset before it builds a model."""

    def prepare(data_dir, **overrides):
        config = load_config(tiny_config, {"data_dir": str(data_dir), **overrides})
        output = io.StringIO()
        console = Console(output)
        dataset = build_dataset(config, console, None)
        settings = build_settings(config, CPU_FACTS, dataset, console)
        loaders = build_loaders(settings.taken, dataset, CPU, console)
        (tmp_path / "config.yaml").write_text(settings.to_yaml("written by a test"), encoding="utf-8")
        return Prepared(load_config(tmp_path / "config.yaml"), dataset, loaders, output.getvalue())

    return prepare


# Name → (mask file, extension, settings, mask_values and ignore_value in config.yaml, class ids of each pixel)
MASK_KINDS = {
    "0 and 1": (blob, "png", {}, (0, 1), None, blob),
    "0 and 255": (lambda i: blob(i) * 255, "png", {}, (0, 255), None, blob),
    "0 and 255 with two classes": (lambda i: blob(i) * 255, "png", {"num_classes": 2}, (0, 255), None, blob),
    "0 and any other value": (lambda i: blob(i) * 100, "png", {}, (0, 100), None, blob),
    "two values, given": (lambda i: blob(i) * 100 + 38, "png", {"mask_values": [138, 38]}, (138, 38), None, lambda i: 1 - blob(i)),
    "white on transparent": (lambda i: transparent(blob(i), 255), "png", {}, (0, 255), None, blob),
    "black on transparent": (lambda i: transparent(blob(i), 0), "png", {}, (0, 255), None, blob),
    "mode 1": (lambda i: Image.fromarray(blob(i).astype(bool)), "png", {}, (0, 255), None, blob),
    "grey as RGB": (lambda i: colour(blob(i), [(0, 0, 0), (255, 255, 255)]), "png", {}, (0, 255), None, blob),
    "bmp": (lambda i: blob(i) * 255, "bmp", {}, (0, 255), None, blob),
    "gif": (lambda i: Image.fromarray(blob(i) * 255), "gif", {}, (0, 255), None, blob),
    "tiff": (lambda i: blob(i) * 255, "tif", {}, (0, 255), None, blob),
    "ids": (rings, "png", {"num_classes": 3}, (0, 1, 2), None, rings),
    "ids, found": (rings, "png", {}, (0, 1, 2), None, rings),
    "ids and void, found": (lambda i: with_void(rings(i)), "png", {}, (0, 1, 2), 255, lambda i: with_void(rings(i))),
    "ids 0 to 20 and void as in VOC, found": (voc, "png", {}, tuple(range(21)), 255, voc),
    "ids 0 to 11 with the last one ignored, found": (
        bands,
        "png",
        {"ignore_value": 11},
        tuple(range(11)),
        11,
        lambda i: with_last_ignored(bands(i), 11),
    ),
    "ids of which two are one class and two are ignored": (
        bands,
        "png",
        {"mask_values": [0, [1, 2], 3, 4, 5, 6, 7, 8, 9], "ignore_value": [10, 11]},
        (0, (1, 2), *range(3, 10)),
        (10, 11),
        lambda i: np.array([0, 1, 1, 2, 3, 4, 5, 6, 7, 8, IGNORED, IGNORED], np.uint8)[bands(i)],
    ),
    "values of no class that count nowhere": (
        rings,
        "png",
        {"mask_values": [0, 1], "unknown_values": "ignore"},
        (0, 1),
        None,
        lambda i: with_last_ignored(rings(i), 2),
    ),
    "ids and void": (lambda i: with_void(rings(i)), "png", {"num_classes": 3}, (0, 1, 2), 255, lambda i: with_void(rings(i))),
    "ids 0 to 11 and void": (
        lambda i: with_void(bands(i)),
        "png",
        {"num_classes": 12},
        tuple(range(12)),
        255,
        lambda i: with_void(bands(i)),
    ),
    "ids 0 to 11 with the last one ignored": (
        bands,
        "png",
        {"num_classes": 11, "ignore_value": 11},
        tuple(range(11)),
        11,
        lambda i: with_last_ignored(bands(i), 11),
    ),
    "0, 1 and void": (lambda i: with_void(blob(i)), "png", {}, (0, 1), 255, lambda i: with_void(blob(i))),
    "ids with the last one ignored": (
        rings,
        "png",
        {"num_classes": 2, "ignore_value": 2},
        (0, 1),
        2,
        lambda i: with_last_ignored(rings(i), 2),
    ),
    "as many greys as classes": (lambda i: rings(i) * 120, "png", {"num_classes": 3}, (0, 120, 240), None, rings),
    "palette by index": (
        lambda i: palette(rings(i), [(9, 9, 9), (200, 0, 0), (0, 90, 0)]),
        "png",
        {"num_classes": 3},
        (0, 1, 2),
        None,
        rings,
    ),
    "one colour on black": (lambda i: colour(blob(i), [(0, 0, 0), (255, 0, 0)]), "png", {}, (0, (255, 0, 0)), None, blob),
    "colours, given": (
        lambda i: colour(rings(i), [(0, 0, 0), (255, 0, 0), (0, 0, 255)]),
        "png",
        {"num_classes": 3, "mask_values": [[0, 0, 0], [255, 0, 0], [0, 0, 255]]},
        ((0, 0, 0), (255, 0, 0), (0, 0, 255)),
        None,
        rings,
    ),
    "colours of which two are one class": (
        lambda i: colour(bands(i) % 4, [(0, 0, 0), (64, 0, 128), (64, 0, 192), (9, 9, 9)]),
        "png",
        {"mask_values": [0, [[64, 0, 128], [64, 0, 192]]], "ignore_value": [9, 9, 9]},
        (0, ((64, 0, 128), (64, 0, 192))),
        (9, 9, 9),
        lambda i: np.array([0, 1, 1, IGNORED], np.uint8)[bands(i) % 4],
    ),
    "trimap, given": (
        lambda i: np.array([2, 1, 3], np.uint8)[rings(i)],
        "png",
        {"mask_values": [2, 1], "ignore_value": 3},
        (2, 1),
        3,
        lambda i: with_last_ignored(rings(i), 2),
    ),
    "16-bit object ids": (
        lambda i: np.where(objects(i, 3) > 0, objects(i, 3) + 50 * i, 0).astype(np.uint16),
        "png",
        {},
        "nonzero",
        None,
        lambda i: objects(i, 3) > 0,
    ),
    "few small ids in 16 bit": (lambda i: rings(i).astype(np.uint16), "png", {}, (0, 1, 2), None, rings),
    "few small ids in 16 bit as TIFF": (lambda i: rings(i).astype(np.uint16), "tif", {}, (0, 1, 2), None, rings),
    "8-bit object ids, given": (lambda i: rings(i) * 9, "png", {"mask_values": "nonzero"}, "nonzero", None, lambda i: rings(i) > 0),
    "soft edges": (soft, "png", {}, "above 127", None, lambda i: soft(i) > 127),
}


@pytest.mark.parametrize("kind", MASK_KINDS)
def test_masks_become_the_class_ids_they_mean_and_the_coding_is_written_down(kind, prepare, tmp_path):
    make_mask, extension, settings, mask_values, ignore_value, truth = MASK_KINDS[kind]
    data = write_dataset(tmp_path / "data", make_mask, extension)
    run = prepare(data, **settings)
    assert run.written.mask_values == mask_values
    assert run.written.ignore_value == ignore_value
    for pair in run.dataset.pairs:
        assert np.array_equal(run.dataset.coding.encode(read_mask(pair.mask)), truth(int(pair.name)))
    (batch,) = run.loaders.val.epoch(0)
    assert set(batch.masks[: batch.num_images].unique().tolist()) <= set(np.unique([truth(i) for i in range(NUM_PAIRS)]).tolist())
    line = next(line for line in run.printed.splitlines() if line.startswith("  Masks:"))
    num_ids = max(2, run.written.num_classes)
    counted = np.bincount(np.concatenate([truth(i).ravel() for i in range(NUM_PAIRS)]), minlength=256)[:num_ids]
    shares = re.findall(r" ([\d.]+)%", line.partition(" of pixels")[0])
    assert shares == [f"{100 * share:.1f}" for share in (counted / counted.sum())[:8]]


@pytest.mark.parametrize("kind", ["ids and void", "trimap, given"])
def test_masks_with_ignored_pixels_are_trained_on(kind, tiny_config, tmp_path):
    make_mask, extension, settings, _, _, _ = MASK_KINDS[kind]
    data = write_dataset(tmp_path / "data", make_mask, extension)
    result = train(tiny_config, data_dir=data, num_epochs=1, **settings)
    assert 0 <= result.best_val_iou <= 1


def test_a_mask_saved_as_jpeg_is_split_by_a_threshold(prepare, tmp_path):
    run = prepare(write_dataset(tmp_path / "data", lambda i: blob(i) * 255, "jpg"))
    assert re.fullmatch(r"above 12\d", run.written.mask_values)
    assert re.search(r"\(greys around \d+ and \d+, split at 12\d\)", run.printed)
    for pair in run.dataset.pairs:
        assert np.array_equal(run.dataset.coding.encode(read_mask(pair.mask)), blob(int(pair.name)))


AMBIGUOUS_MASKS = {
    "three greys for one class": (
        lambda i: rings(i) * 100,
        {},
        ["0: ", "100: ", "200: ", "num_classes: 3\n    mask_values: [0, 100, 200]"],
    ),
    "two values": (lambda i: blob(i) * 100 + 38, {}, ["Which of the two is the background?", "mask_values: [138, 38]"]),
    "a trimap": (
        lambda i: np.array([2, 1, 3], np.uint8)[rings(i)],
        {},
        ["mask_values: [2, 1]\n    ignore_value: 3", "num_classes: 3\n    mask_values: [1, 2, 3]"],
    ),
    "an id for each mask": (lambda i: blob(i) * (1 + i), {}, ["num_classes: 9", "mask_values: nonzero"]),
    "8-bit object ids": (
        lambda i: objects(i, 2 + i).astype(np.uint8),
        {},
        ["look like ids of objects", "config:\n    # every object is foreground\n    num_classes: 1\n    mask_values: nonzero"],
    ),
    "8-bit object ids made visible": (
        lambda i: (objects(i, 2 + i) * 30).astype(np.uint8),
        {"num_classes": 1},
        ["look like ids of objects", "config:\n    # every object is foreground\n    num_classes: 1\n    mask_values: nonzero"],
    ),
    "ten grey classes": (
        lambda i: (objects(i, 10) * 25).astype(np.uint8),
        {},
        ["num_classes: 11\n    mask_values: [0, 25, 50, 75, 100,", "mask_values: nonzero"],
    ),
    "palettes in another order": (
        lambda i: palette(blob(i) if i % 2 else 1 - blob(i), [(0, 0, 0), (9, 9, 9)] if i % 2 else [(9, 9, 9), (0, 0, 0)]),
        {},
        ["4 masks whose palette has another order", "1.png: #000000 is 0, in "],
    ),
    "nothing but background": (lambda i: blob(i) * 0, {}, ["there is nothing to learn: every pixel of all 8 masks is 0;"]),
    "nothing but foreground": (lambda i: blob(i) * 0 + 255, {}, ["there is nothing to learn: every pixel of all 8 masks is 255;"]),
    "colours without an order": (
        lambda i: colour(rings(i), [(0, 0, 0), (255, 0, 0), (0, 0, 255)]),
        {"num_classes": 3},
        ["#ff0000: ", "mask_values: [0, [0, 0, 255], [255, 0, 0]]"],
    ),
    "a photograph": (lambda i: np.random.default_rng(i).integers(0, 256, (SIDE, SIDE), np.uint8), {}, ["… 256 values in all"]),
    "a value of no class": (rings, {"mask_values": [0, 1]}, ["8 masks with values that belong to no class", "0.png: 2 ("]),
    "ids and void with another number of classes": (
        lambda i: with_void(rings(i)),
        {"num_classes": 1},
        ["num_classes: 3\n    ignore_value: 255"],
    ),
    "two codings": (
        lambda i: blob(i) * (255 if i % 2 else 1),
        {},
        ["255 occurs only in masks that hold no class but 0"],
    ),
}


@pytest.mark.parametrize("kind", AMBIGUOUS_MASKS)
def test_masks_with_several_meanings_are_refused_with_the_lines_to_choose_from(kind, prepare, tmp_path):
    make_mask, settings, parts = AMBIGUOUS_MASKS[kind]
    data = write_dataset(tmp_path / "data", make_mask)
    with pytest.raises(DataError) as raised:
        prepare(data, **settings)
    for part in parts:
        assert part in str(raised.value)


def test_two_codings_are_accepted_once_the_user_has_decided(prepare, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * (255 if i % 2 else 1))
    assert prepare(data, ignore_value=255).written.ignore_value == 255


@pytest.mark.parametrize(
    "kind", ["three greys for one class", "two values", "a trimap", "8-bit object ids", "colours without an order"]
)
def test_the_lines_of_a_question_train_as_they_are(kind, prepare, tiny_config, tmp_path):
    make_mask, settings, _ = AMBIGUOUS_MASKS[kind]
    data = write_dataset(tmp_path / "data", make_mask)
    with pytest.raises(DataError) as raised:
        prepare(data, **settings)
    lines = str(raised.value).partition("One of these goes into the config:\n")[2].partition("\n\n")[0]
    (tmp_path / "mine.yaml").write_text(textwrap.dedent(lines))
    answer = load_config(tmp_path / "mine.yaml")
    given = {name: getattr(answer, name) for name in answer.sources}
    assert "mask_values" in given
    run = prepare(data, **{**settings, **given})
    assert run.written.num_classes == answer.num_classes
    (batch,) = run.loaders.val.epoch(0)
    assert batch.masks.max() <= IGNORED


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
    with pytest.raises(CheckpointError, match="num_classes: 3 in the checkpoint, 4 now; it decides the classes"):
        train(tiny_config, data_dir=data, num_epochs=3, resume="auto", num_classes=4)


def test_names_of_a_class_file_are_those_of_the_scores(tiny_config, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: colour(rings(i), [(0, 0, 0), (128, 0, 0), (0, 128, 0)]))
    (data / "class_dict.csv").write_text("name,r,g,b\nrest,0,0,0\nring,128,0,0\ncore,0,128,0\n")
    result = train(tiny_config, data_dir=data, num_epochs=1)
    assert list(result.per_class_iou) == ["rest", "ring", "core"]
    written = load_config(result.run_dir / "config.yaml")
    assert (written.num_classes, written.mask_values) == (3, (0, (128, 0, 0), (0, 128, 0)))
    assert written.class_names == ("rest", "ring", "core")


def test_colours_saved_as_jpeg_are_read_as_the_nearest(prepare, tmp_path):
    colours = [(0, 0, 0), (128, 0, 0), (0, 0, 128)]
    data = write_dataset(tmp_path / "data", lambda i: rings(i))
    for index in range(NUM_PAIRS):
        (data / f"masks/{index}.png").unlink()
        colour(rings(index), colours).save(data / f"masks/{index}.jpg", quality=95, subsampling=0)
    run = prepare(data, mask_values=[list(one) for one in colours])
    assert "(masks saved as JPEG: the nearest value, if it is within 48; pixels between two count nowhere)" in run.printed
    assert run.written.mask_tolerance == 48
    for pair in run.dataset.pairs:
        ids, truth = run.dataset.coding.encode(read_mask(pair.mask)), rings(int(pair.name))
        assert (ids == truth).mean() > 0.95
        assert np.array_equal(ids[ids != IGNORED], truth[ids != IGNORED])


def test_class_weights_follow_from_the_masks_and_are_written_down(prepare, tmp_path):
    def with_rare_class(index):
        ids = blob(index)
        ids[20 + index, 23:25] = 2  # two pixels
        return ids

    data = write_dataset(tmp_path / "data", with_rare_class)
    run = prepare(data, num_classes=3, class_weights="auto")
    assert len(run.written.class_weights) == 3
    assert run.written.class_weights[0] < run.written.class_weights[1] < run.written.class_weights[2]
    assert "Weights:" in run.printed
    binary = prepare(data, mask_values="nonzero", class_weights="auto")
    assert binary.written.class_weights is None
    assert "Weights:" not in binary.printed


# Images


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


def floats(index, path):
    pixels = (photograph(index, 1)[:, :, 0] * 2 - 1).astype(np.float32)
    np.save(f"{path}.npy", pixels)
    return pixels[:, :, None]


def five_channels(index, path):
    pixels = (photograph(index, 5) * 255).astype(np.uint8)
    tifffile.imwrite(f"{path}.tif", pixels)
    return pixels


def wide_colour(index, path):
    pixels = (photograph(index) * 65535).astype(np.uint16)
    assert cv2.imwrite(f"{path}.png", pixels[:, :, ::-1])
    return pixels


def grey(index, path):
    pixels = (photograph(index, 1)[:, :, 0] * 255).astype(np.uint8)
    Image.fromarray(pixels).save(f"{path}.png")
    return pixels[:, :, None]


def as_pil_reads(path):
    with Image.open(path) as image:
        return np.array(image)


def colour_file(extension, kind=None, **options):
    def write(index, path):
        Image.fromarray((photograph(index) * 255).astype(np.uint8)).save(f"{path}.{extension}", kind, **options)
        return as_pil_reads(f"{path}.{extension}")

    return write


def with_alpha(index, path):
    pixels = (photograph(index) * 255).astype(np.uint8)
    Image.fromarray(np.dstack([pixels, blob(index) * 200 + 55])).save(f"{path}.png")
    return pixels


def rotated(index, path):
    """Stored rotated; the array is the image as it is shown."""
    pixels = (photograph(index) * 255).astype(np.uint8)
    Image.fromarray(np.rot90(pixels).copy()).save(f"{path}.jpg", exif=exif(6))
    return np.rot90(as_pil_reads(f"{path}.jpg"), -1)


IMAGE_KINDS = {
    "16-bit microscopy": (microscopy, "16-bit grey"),
    "float arrays": (floats, "float grey"),
    "five channels": (five_channels, "8-bit 5 channels"),
    "16-bit colour": (wide_colour, "16-bit RGB"),
    "grey": (grey, "8-bit grey"),
    "alpha": (with_alpha, "8-bit RGB"),
    "PNG named jpg": (colour_file("jpg", "PNG"), "8-bit RGB"),
    "JPEG": (colour_file("jpg"), "8-bit RGB"),
    "WebP": (colour_file("webp", lossless=True), "8-bit RGB"),
    "BMP": (colour_file("bmp"), "8-bit RGB"),
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
    assert ("the alpha channel of 8 of 8 images is dropped" in run.printed) == (kind == "alpha")
    assert ("8 of 8 images are rotated by the EXIF orientation" in run.printed) == (kind == "rotated by EXIF")
    (batch,) = run.loaders.val.epoch(0)
    assert batch.images.dtype == (torch.uint8 if described.startswith("8-bit") else torch.float32)
    for image, pair in zip(batch.images.numpy().astype(float), run.dataset.split.val, strict=False):  # the batch is padded
        difference = np.abs(image - arrays[pair.name])
        if kind in ("JPEG", "rotated by EXIF"):  # OpenCV and PIL round differently
            assert difference.mean() < 1
        else:
            assert difference.max() == 0


@pytest.mark.parametrize("kind", ["float arrays", "five channels"])
def test_a_checkpoint_holds_the_channels_and_statistics_of_its_images(kind, tiny_config, tmp_path):
    write, _ = IMAGE_KINDS[kind]
    arrays = write_images(tmp_path / "data", write)
    result = train(tiny_config, data_dir=tmp_path / "data", num_epochs=1)
    written = load_config(result.run_dir / "config.yaml")
    stored = torch.load(result.run_dir / "best.pt", weights_only=True)["config"]
    assert (stored["in_channels"], stored["image_mean"], stored["image_std"]) == (
        arrays["0"].shape[2],
        list(written.image_mean),
        list(written.image_std),
    )


def test_16_bit_microscopy_is_learnt(tiny_config, tmp_path):
    write_images(tmp_path / "data", microscopy)
    settings = {"fit": "crop", "crops_per_image": 6, "image_size": 48, "augmentation": "none", "val_fraction": 0.25}
    result = train(tiny_config, data_dir=tmp_path / "data", num_epochs=1, learning_rate=0.01, **settings)  # 9 steps
    assert result.best_val_iou > 0.4


# Names

NAMES = {
    "suffix": ("images/{:02d}.jpg", "masks/{:02d}_mask.png", "images/ + masks/, paired like 01 ↔ 01_mask"),
    "side by side": ("{:02d}.jpg", "{:02d}_mask.png", "image and mask side by side, paired like 01 ↔ 01_mask"),
    "DRIVE": (
        "training/images/{:02d}_training.tif",
        "training/1st_manual/{:02d}_manual1.gif",
        "training/images/ + training/1st_manual/, paired like 01_training ↔ 01_manual1",
    ),
    "cell tracking": ("images/t{:03d}.tif", "masks/man_seg{:03d}.tif", "paired like t001 ↔ man_seg001"),
    "words": ("{:03d}_image.png", "{:03d}_annotation.png", "side by side, paired like 001_image ↔ 001_annotation"),
    "CHASE": ("Image_{:02d}L.jpg", "Image_{:02d}L_1stHO.png", "side by side, paired like Image_01L ↔ Image_01L_1stHO"),
    "CamVid": ("train/{:03d}.png", "trainannot/{:03d}.png", "train/ + trainannot/, same names"),
    "nnU-Net": ("imagesTr/case_{:03d}_0000.png", "labelsTr/case_{:03d}.png", "paired like case_001_0000 ↔ case_001"),
    "mmseg": ("img_dir/train/{}.png", "ann_dir/train/{}.png", "img_dir/train/ + ann_dir/train/, same names"),
}


def write_pair(root, image, mask, index):
    for name, pixels in ((image, (photograph(index) * 255).astype(np.uint8)), (mask, blob(index) * 255)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / name)


@pytest.mark.parametrize("kind", NAMES)
def test_downloaded_folders_need_no_setting_but_data_dir(kind, prepare, tmp_path):
    image, mask, rule = NAMES[kind]
    for index in range(1, NUM_PAIRS + 1):
        write_pair(tmp_path / "data", image.format(index), mask.format(index), index)
    printed = prepare(tmp_path / "data").printed
    assert f"{rule}; val_fraction 0.2, seed 42)" in printed
    assert "0 → background" in printed


def test_train_and_val_folders_beside_their_annotations(prepare, tmp_path):
    for index in range(1, 9):
        part = "val" if index > 6 else "train"
        write_pair(tmp_path / "data", f"{part}/{index}.png", f"{part}annot/{index}.png", index)
    rule = "6 train, 2 val (train/ + trainannot/, same names; folders train and val)"
    assert rule in prepare(tmp_path / "data").printed


def test_an_image_without_a_mask_is_refused_by_name(prepare, tmp_path):
    write_images(tmp_path / "data", grey)
    (tmp_path / "data/masks/3.png").unlink()
    with pytest.raises(DataError) as raised:
        prepare(tmp_path / "data")
    masks, image = tmp_path / "data/masks", tmp_path / "data/images/3.png"
    assert f"1 image without a mask in {masks} (such as 3.png): {image}" in str(raised.value)


# Sizes, copies and groups


def test_masks_of_another_size_need_resize_masks(prepare, tmp_path):
    write_images(tmp_path / "data", grey)
    for index in range(0, NUM_PAIRS, 2):
        half = cv2.resize(blob(index) * 255, (SIDE // 2, SIDE // 2), interpolation=cv2.INTER_NEAREST)
        cv2.imwrite(str(tmp_path / f"data/masks/{index}.png"), half)
    with pytest.raises(DataError, match=r"(?s)4 masks of another size than their images:.*resize_masks: true resizes masks"):
        prepare(tmp_path / "data")
    for fit in ("resize", "crop"):
        run = prepare(tmp_path / "data", resize_masks=True, fit=fit)
        assert "4 masks resized to the size of the image (resize_masks)" in run.printed
        for batch in run.loaders.train.epoch(0):
            assert batch.masks.shape[1:] == batch.images.shape[1:3] == (32, 32)
        for batch in run.loaders.val.epoch(0):  # masks have the size of the image's file
            assert batch.images.shape[1:3] == (32, 32)
            assert batch.masks.shape[1:] == ((SIDE, SIDE) if fit == "resize" else (32, 32))


def test_identical_images_are_never_in_train_and_in_val(prepare, tmp_path):
    write_images(tmp_path / "data", grey)
    for index in range(4):
        shutil.copy(tmp_path / f"data/images/{index}.png", tmp_path / f"data/images/{index + 4}.png")
    run = prepare(tmp_path / "data", val_fraction=0.5)
    val = {int(pair.name) for pair in run.dataset.split.val}
    assert len(val) == 4
    assert all((index in val) == (index + 4 in val) for index in range(4))
    assert "8 images are identical to another one; identical images stay on one side:" in run.printed


def test_a_group_pattern_beside_the_groups_of_a_split_file_is_refused(prepare, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255)
    rows = [f"images/{index}.png,masks/{index}.png,p{index % 4}" for index in range(NUM_PAIRS)]
    (data / "table.csv").write_text("\n".join(["image,mask,group", *rows]))
    with pytest.raises(DataError, match=r"group_pattern: table\.csv has groups of its own"):
        prepare(data, split_file="table.csv", group_pattern=r"(\d)")


def test_given_statistics_from_0_to_1_give_a_notice(prepare, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255)
    run = prepare(data, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
    assert "these look like 0 to 1" in run.printed


def test_a_run_cannot_be_resumed_with_another_fold(tiny_config, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255)
    run = train(tiny_config, data_dir=data, num_epochs=1, num_folds=2, fold=0)
    with pytest.raises(CheckpointError, match="fold: 0 in the checkpoint, 1 now; it decides which images validate"):
        train(tiny_config, data_dir=data, num_epochs=2, num_folds=2, fold=1, resume=str(run.run_dir))
