"""Mask files as people have them, written by real encoders: trained on with the right classes, or refused with the fix."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from PIL import Image

from train_unet import train
from unet_trainer.config import load_config
from unet_trainer.images import DataError

SIDE = 48
NUM_PAIRS = 8


def blob(index):
    """H,W of 0 and 1: a disc that wanders."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return (np.hypot(rows - 20 - index, columns - 24) < 14).astype(np.uint8)


def rings(index):
    """H,W of ids 0, 1, 2."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    distance = np.hypot(rows - 20 - index, columns - 24)
    return (distance < 18).astype(np.uint8) + (distance < 9)


def write_dataset(folder, make_mask, extension="png"):
    """`make_mask` turns a number into an array or a PIL image."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    chooser = np.random.default_rng(0)
    for index in range(NUM_PAIRS):
        image = chooser.integers(0, 60, (SIDE, SIDE, 3)) + 150 * blob(index)[:, :, None]
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"{index}.png")
        mask = make_mask(index)
        path = folder / "masks" / f"{index}.{extension}"
        if isinstance(mask, np.ndarray):
            assert cv2.imwrite(str(path), mask)
        else:
            mask.save(path)
    return folder


def palette(ids, colours):
    picture = Image.frombytes("P", ids.shape[::-1], ids.tobytes())
    picture.putpalette([channel for colour in colours for channel in colour])
    return picture


def colour(ids, colours):
    return Image.fromarray(np.array(colours, np.uint8)[ids])


def soft(index):
    """Edges of all 256 greys."""
    large = cv2.resize(blob(index) * 255, (SIDE * 4, SIDE * 4), interpolation=cv2.INTER_NEAREST)
    return cv2.resize(cv2.GaussianBlur(large, (0, 0), 3), (SIDE, SIDE), interpolation=cv2.INTER_AREA)


def with_void(ids):
    ids = ids.copy()
    ids[:4] = 255
    return ids


READ = {
    "0 and 1": (lambda i: blob(i), "png", {}, (0, 1), None),
    "0 and 255": (lambda i: blob(i) * 255, "png", {}, (0, 255), None),
    "0 and 255 with two classes": (lambda i: blob(i) * 255, "png", {"num_classes": 2}, (0, 255), None),
    "any two values": (lambda i: blob(i) * 100 + 38, "png", {}, (38, 138), None),
    "mode 1": (lambda i: Image.fromarray(blob(i).astype(bool)), "png", {}, (0, 255), None),
    "grey as RGB": (lambda i: colour(blob(i), [(0, 0, 0), (255, 255, 255)]), "png", {}, (0, 255), None),
    "bmp": (lambda i: blob(i) * 255, "bmp", {}, (0, 255), None),
    "gif": (lambda i: Image.fromarray(blob(i) * 255), "gif", {}, (0, 255), None),
    "tiff": (lambda i: blob(i) * 255, "tif", {}, (0, 255), None),
    "ids": (lambda i: rings(i), "png", {"num_classes": 3}, (0, 1, 2), None),
    "ids and void": (lambda i: with_void(rings(i)), "png", {"num_classes": 3}, (0, 1, 2), 255),
    "0, 1 and void": (lambda i: with_void(blob(i)), "png", {}, (0, 1), 255),
    "ids with the last one to ignore": (lambda i: rings(i), "png", {"num_classes": 2, "ignore_value": 2}, (0, 1), 2),
    "as many greys as classes": (lambda i: rings(i) * 120, "png", {"num_classes": 3}, (0, 120, 240), None),
    "palette by index": (
        lambda i: palette(rings(i), [(9, 9, 9), (200, 0, 0), (0, 90, 0)]),
        "png",
        {"num_classes": 3},
        (0, 1, 2),
        None,
    ),
    "one colour on black": (lambda i: colour(blob(i), [(0, 0, 0), (255, 0, 0)]), "png", {}, (0, (255, 0, 0)), None),
    "colours, given": (
        lambda i: colour(rings(i), [(0, 0, 0), (255, 0, 0), (0, 0, 255)]),
        "png",
        {"num_classes": 3, "mask_values": [[0, 0, 0], [255, 0, 0], [0, 0, 255]]},
        (0, (255, 0, 0), (0, 0, 255)),
        None,
    ),
    "trimap, given": (
        lambda i: np.array([2, 1, 3], np.uint8)[rings(i)],
        "png",
        {"mask_values": [2, 1], "ignore_value": 3},
        (2, 1),
        3,
    ),
    "16-bit ids of objects": (lambda i: rings(i).astype(np.uint16) * 700, "png", {}, "nonzero", None),
    "8-bit ids of objects, given": (lambda i: rings(i) * 9, "png", {"mask_values": "nonzero"}, "nonzero", None),
    "soft edges": (soft, "png", {}, "above 127", None),
}


@pytest.mark.parametrize("kind", READ)
def test_masks_are_read_right_and_the_mapping_is_written_down(kind, tiny_config, tmp_path, capsys):
    make_mask, extension, settings, mask_values, ignore_value = READ[kind]
    data = write_dataset(tmp_path / "data", make_mask, extension)
    result = train(tiny_config, data_dir=data, num_epochs=1, **settings)
    said = capsys.readouterr().out
    written = load_config(result.run_dir / "config.yaml")
    assert written.mask_values == mask_values
    assert written.ignore_value == ignore_value
    line = next(line for line in said.splitlines() if line.startswith("  Masks:"))
    shares = [float(word[:-1]) for word in line.split() if word.endswith("%") or word.endswith("%,") for word in [word.rstrip(",")]]
    assert len(shares) == max(2, written.num_classes)
    foreground = np.mean([(blob(index) > 0).mean() for index in range(NUM_PAIRS)])
    if written.num_classes == 1 and ignore_value is None and "object" not in kind:
        assert shares[1] == pytest.approx(100 * foreground, abs=1.5)


def test_a_mask_saved_as_jpeg_is_thresholded_and_said(tiny_config, tmp_path, capsys):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255, "jpg")
    result = train(tiny_config, data_dir=data, num_epochs=1)
    assert str(load_config(result.run_dir / "config.yaml").mask_values).startswith("above 12")
    assert "cut in the middle" in capsys.readouterr().out


REFUSED = {
    "three greys for one class": (
        lambda i: rings(i) * 100,
        {},
        ["0: ", "100: ", "200: ", "num_classes: 3 with mask_values: [0, 100, 200]"],
    ),
    "8-bit ids of objects": (lambda i: blob(i) * (1 + i), {}, ["num_classes: 9", "mask_values: nonzero"]),
    "colours without an order": (
        lambda i: colour(rings(i), [(0, 0, 0), (255, 0, 0), (0, 0, 255)]),
        {"num_classes": 3},
        ["#ff0000: ", "mask_values: [0, [0, 0, 255], [255, 0, 0]]"],
    ),
    "a photograph": (lambda i: np.random.default_rng(i).integers(0, 256, (SIDE, SIDE), np.uint8), {}, ["… 256 values in all"]),
    "a value that is no class": (lambda i: rings(i), {"mask_values": [0, 1]}, ["8 mask values that are no class", "0.png: 2 ("]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_masks_that_could_mean_several_things_are_refused_with_the_lines_to_choose_from(kind, tiny_config, tmp_path):
    make_mask, settings, parts = REFUSED[kind]
    data = write_dataset(tmp_path / "data", make_mask)
    with pytest.raises(DataError) as raised:
        train(tiny_config, data_dir=data, **settings)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(("value", "missing"), [(0, "foreground"), (255, "background")])
def test_a_set_of_one_value_is_warned_about(value, missing, tiny_config, tmp_path, capsys):
    data = write_dataset(tmp_path / "data", lambda i: np.full((SIDE, SIDE), value, np.uint8))
    train(tiny_config, data_dir=data, num_epochs=1)
    assert f"Warning: no pixel of {missing} in any mask" in capsys.readouterr().out


def test_class_weights_follow_from_the_masks_and_are_written_down(tiny_config, tmp_path, capsys):
    data = write_dataset(tmp_path / "data", rings)
    result = train(tiny_config, data_dir=data, num_epochs=1, num_classes=3, class_weights="auto")
    weights = load_config(result.run_dir / "config.yaml").class_weights
    assert len(weights) == 3
    assert weights[0] < weights[1] < weights[2]
    assert "Weights:" in capsys.readouterr().out
    binary = train(tiny_config, data_dir=data, num_epochs=1, mask_values="nonzero", class_weights="auto")
    assert len(load_config(binary.run_dir / "config.yaml").class_weights) == 1
