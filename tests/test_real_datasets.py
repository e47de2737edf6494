"""Datasets as people have them, written by real encoders: trained on as they are meant, or refused with the fix."""

from __future__ import annotations

import csv
import re
import shutil

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from train_unet import train
from unet_trainer.config.load import load_config
from unet_trainer.images.image_files import DataError
from unet_trainer.images.image_spec import IMAGENET_MEAN, IMAGENET_STD
from unet_trainer.runs.errors import CheckpointError

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


def bands(index):
    """H,W of ids 0 to 11, four rows each."""
    return np.repeat((np.arange(12, dtype=np.uint8) + index) % 12, 4)[:, None].repeat(SIDE, 1)


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
    "ids 0 to 11 and void": (lambda i: with_void(bands(i)), "png", {"num_classes": 12}, tuple(range(12)), 255),
    "ids 0 to 11 with the last one to ignore": (
        lambda i: bands(i),
        "png",
        {"num_classes": 11, "ignore_value": 11},
        tuple(range(11)),
        11,
    ),
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
    shares = [float(share) for share in re.findall(r" ([\d.]+)%", line.partition(" of pixels")[0])]
    assert len(shares) == min(max(2, written.num_classes), 8)
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
    "a value that is no class": (
        lambda i: rings(i),
        {"mask_values": [0, 1]},
        ["8 masks with values that are no class", "0.png: 2 ("],
    ),
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


# Images


def photograph(index, channels=3):
    """H,W,C floats from 0 to 1, brighter in the disc."""
    values = np.random.default_rng(index).uniform(0, 0.6, (SIDE, SIDE, channels)) + 0.4 * blob(index)[:, :, None]
    return values * np.linspace(1, 0.5, channels)


def write_images(folder, write):
    """`write(index, path without extension)` writes an image and returns the array that its file stands for."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    arrays = {}
    for index in range(NUM_PAIRS):
        arrays[f"{index}"] = write(index, folder / f"images/{index}")
        Image.fromarray(blob(index) * 255).save(folder / f"masks/{index}.png")
    return arrays


def microscopy(index, path):
    """Findings: a 16-bit TIFF with values from 32995 to 34996, which PIL turns into white."""
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


def colour_file(extension, kind=None, **options):
    def write(index, path):
        pixels = (photograph(index) * 255).astype(np.uint8)
        Image.fromarray(pixels).save(f"{path}.{extension}", kind, **options)
        return pixels

    return write


def with_alpha(index, path):
    pixels = (photograph(index) * 255).astype(np.uint8)
    Image.fromarray(np.dstack([pixels, blob(index) * 200 + 55])).save(f"{path}.png")
    return pixels


def turned(index, path):
    """Stored lying, shown upright: the array is the shown one."""
    pixels = (photograph(index) * 255).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    Image.fromarray(np.rot90(pixels).copy()).save(f"{path}.jpg", exif=exif, quality=100, subsampling=0)
    return pixels


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
    "turned by EXIF": (turned, "8-bit RGB"),
}


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_images_keep_their_depth_and_channels_and_their_statistics_are_stored(kind, tiny_config, tmp_path, capsys):
    write, described = IMAGE_KINDS[kind]
    arrays = write_images(tmp_path / "data", write)
    result = train(tiny_config, data_dir=tmp_path / "data", num_epochs=1)
    said = capsys.readouterr().out
    written = load_config(result.run_dir / "config.yaml")
    channels = arrays["0"].shape[2]
    assert written.in_channels == channels
    assert f"Images:     {described}; 48×48 → 32×32; normalised with" in said
    rows = csv.DictReader((result.run_dir / "split.csv").read_text().splitlines())
    pixels = np.concatenate([arrays[row["name"]].reshape(-1, channels) for row in rows if row["split"] == "train"]).astype(float)
    if described == "8-bit RGB":
        assert (written.image_mean, written.image_std) == (IMAGENET_MEAN, IMAGENET_STD)
    else:
        assert written.image_mean == pytest.approx(pixels.mean(0), rel=1e-5)
        assert written.image_std == pytest.approx(pixels.std(0), rel=1e-5)
    stored = torch.load(result.run_dir / "best.pt", weights_only=True)["config"]
    assert (stored["in_channels"], stored["image_mean"], stored["image_std"]) == (
        channels,
        list(written.image_mean),
        list(written.image_std),
    )
    assert ("alpha is left out of 8 of 8 images" in said) == (kind == "alpha")
    assert ("8 of 8 images are turned" in said) == (kind == "turned by EXIF")


def test_microscopy_that_others_read_as_white_is_learnt(tiny_config, tmp_path):
    write_images(tmp_path / "data", microscopy)
    settings = {"num_epochs": 12, "learning_rate": 0.01, "augmentation": "none", "image_size": 48, "val_fraction": 0.25}
    assert train(tiny_config, data_dir=tmp_path / "data", **settings).best_val_iou > 0.4


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
def test_folders_as_they_are_downloaded_train_with_nothing_but_data_dir(kind, tiny_config, tmp_path, capsys):
    image, mask, rule = NAMES[kind]
    for index in range(1, NUM_PAIRS + 1):
        write_pair(tmp_path / "data", image.format(index), mask.format(index), index)
    train(tiny_config, data_dir=tmp_path / "data", num_epochs=1)
    said = capsys.readouterr().out
    assert f"{rule}; val_fraction 0.2, seed 42)" in said
    assert "0 → background" in said


def test_train_and_val_folders_beside_their_annotations(tiny_config, tmp_path, capsys):
    for index in range(1, 9):
        part = "val" if index > 6 else "train"
        write_pair(tmp_path / "data", f"{part}/{index}.png", f"{part}annot/{index}.png", index)
    train(tiny_config, data_dir=tmp_path / "data", num_epochs=1)
    assert "6 train, 2 val (train/ + trainannot/, same names; folders train and val)" in capsys.readouterr().out


def test_images_without_masks_are_refused_by_name(tiny_config, tmp_path):
    write_images(tmp_path / "data", grey)
    (tmp_path / "data/masks/3.png").unlink()
    with pytest.raises(DataError) as raised:
        train(tiny_config, data_dir=tmp_path / "data")
    masks, image = tmp_path / "data/masks", tmp_path / "data/images/3.png"
    assert f"1 image without a mask in {masks} (such as 3.png): {image}" in str(raised.value)


# Sizes and copies


def test_masks_of_another_size_train_with_resize_masks_alone(tiny_config, tmp_path, capsys):
    write_images(tmp_path / "data", grey)
    for index in range(0, NUM_PAIRS, 2):
        half = cv2.resize(blob(index) * 255, (SIDE // 2, SIDE // 2), interpolation=cv2.INTER_NEAREST)
        cv2.imwrite(str(tmp_path / f"data/masks/{index}.png"), half)
    with pytest.raises(DataError, match=r"(?s)4 masks that are not of their image's size:.*resize_masks: true brings masks"):
        train(tiny_config, data_dir=tmp_path / "data")
    train(tiny_config, data_dir=tmp_path / "data", resize_masks=True, num_epochs=1)
    assert "4 masks are brought to the size of their images (resize_masks)" in capsys.readouterr().out
    train(tiny_config, data_dir=tmp_path / "data", resize_masks=True, num_epochs=1, fit="crop")


def test_byte_identical_images_never_train_and_validate(tiny_config, tmp_path, capsys):
    write_images(tmp_path / "data", grey)
    for index in range(4):
        shutil.copy(tmp_path / f"data/images/{index}.png", tmp_path / f"data/images/{index + 4}.png")
    result = train(tiny_config, data_dir=tmp_path / "data", num_epochs=1, val_fraction=0.5)
    rows = csv.DictReader((result.run_dir / "split.csv").read_text().splitlines())
    sides = {int(row["name"]): row["split"] for row in rows}
    assert [sides[index] for index in range(4)] == [sides[index + 4] for index in range(4)]
    assert sorted(sides.values()) == ["train"] * 4 + ["val"] * 4
    assert "8 images are identical to another one; each lot stays on one side:" in capsys.readouterr().out


def test_masks_of_two_codings_in_one_set_are_refused_and_not_half_of_them_ignored(tiny_config, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * (255 if i % 2 else 1))
    with pytest.raises(DataError, match="255 occurs only in masks that hold no class but 0"):
        train(tiny_config, data_dir=data)
    result = train(tiny_config, data_dir=data, num_epochs=1, ignore_value=255)
    assert load_config(result.run_dir / "config.yaml").ignore_value == 255


def test_ids_beside_void_are_offered_as_they_are(tiny_config, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: with_void(rings(i)))
    with pytest.raises(DataError, match="num_classes: 3   # 255 beside the ids is taken as void"):
        train(tiny_config, data_dir=data)


def test_a_pattern_beside_groups_of_a_table_is_refused(tiny_config, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255)
    rows = [f"images/{index}.png,masks/{index}.png,p{index % 4}" for index in range(NUM_PAIRS)]
    (data / "table.csv").write_text("\n".join(["image,mask,group", *rows]))
    with pytest.raises(DataError, match=r"group_pattern: table\.csv has groups of its own"):
        train(tiny_config, data_dir=data, split_file="table.csv", group_pattern=r"(\d)")


def test_statistics_that_look_like_0_to_1_are_warned_about(tiny_config, tmp_path, capsys):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255)
    train(tiny_config, data_dir=data, num_epochs=1, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
    assert "these look like 0 to 1" in capsys.readouterr().out


def test_another_fold_cannot_be_gone_on_with(tiny_config, tmp_path):
    data = write_dataset(tmp_path / "data", lambda i: blob(i) * 255)
    run = train(tiny_config, data_dir=data, num_epochs=1, num_folds=2, fold=0)
    with pytest.raises(CheckpointError, match="fold: 0 in the checkpoint, 1 now; it decides which images validate"):
        train(tiny_config, data_dir=data, num_epochs=2, num_folds=2, fold=1, resume=str(run.run_dir))


@pytest.mark.parametrize("extension", ["png", "tif"])
def test_few_objects_in_16_bit_masks_are_objects_too(tiny_config, tmp_path, extension):
    data = write_dataset(tmp_path / "data", lambda i: rings(i).astype(np.uint16), extension)
    result = train(tiny_config, data_dir=data, num_epochs=1)
    assert load_config(result.run_dir / "config.yaml").mask_values == "nonzero"
