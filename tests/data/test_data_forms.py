"""Forms in which data is published, drawn with two objects an image: each gives the same images and class ids with data_dir alone."""

import csv
import io
import json
import re

import numpy as np
import pytest
import tifffile

from unet_trainer.config.load import load_config
from unet_trainer.data.dataset_report import build_dataset_report
from unet_trainer.data.pairs import Question
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import encode_image, read_image
from unet_trainer.images.mask_decoding import read_mask
from unet_trainer.system.console import Console

HEIGHT, WIDTH, COUNT = 20, 24, 6


def head(index):
    mask = np.zeros((HEIGHT, WIDTH), np.bool_)
    mask[2 + index : 8 + index, 3:9] = True
    return mask


def tail(index):
    mask = np.zeros((HEIGHT, WIDTH), np.bool_)
    mask[5 : 9 + index, 14:20] = True
    return mask


NAMES = ("background", "head", "tail")
CLASSES = (("head", head), ("tail", tail))


def ids(index):
    return (head(index) + 2 * tail(index)).astype(np.uint8)


def photo(index):
    noise = np.random.default_rng(index).integers(0, 60, (HEIGHT, WIDTH, 3))
    return (noise + 90 * ids(index)[:, :, None]).astype(np.uint8)


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_image(pixels, path.suffix))


def write_csv(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def photos(data, place="images", suffix=".png"):
    for index in range(COUNT):
        write(data / place / f"s{index:02d}{suffix}", photo(index))


# Run lengths in a CSV


def runs(mask):
    """Start and length of each run down the columns, from 1."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.T.ravel(), [0]]).astype(np.int8)))
    return " ".join(f"{start + 1} {stop - start}" for start, stop in edges.reshape(-1, 2))


def rle_of_one_class(data):
    photos(data, "train_images")
    rows = [(f"s{index:02d}.png", runs(mask)) for index in range(COUNT) for mask in (head(index), tail(index))]
    write_csv(data / "train.csv", ("ImageId", "EncodedPixels"), *rows)


def rle_with_classes(data):
    photos(data, "train")
    rows = [(f"s{index:02d}", name, runs(mask(index))) for index in range(COUNT) for name, mask in CLASSES]
    write_csv(data / "train.csv", ("ImageId", "Label", "EncodedPixels"), *rows)
    write_csv(data / "sample_submission.csv", ("ImageId", "Label", "EncodedPixels"), ("t00", "head", "1 1"))


def rle_with_joined_ids(data):
    photos(data, "train_images", ".jpg")
    masks = (head, tail, None)
    rows = [(f"s{index:02d}.jpg_{number}", runs(mask(index)) if mask else "") for index in range(COUNT)
            for number, mask in enumerate(masks, start=1)]  # fmt: skip
    write_csv(data / "train.csv", ("ImageId_ClassId", "EncodedPixels"), *rows)


# nnU-Net


def nnunet(data):
    for index in range(COUNT):
        for channel in range(2):
            write(data / f"Dataset001_Fish/imagesTr/s{index:02d}_{channel:04d}.png", photo(index)[:, :, channel])
        write(data / f"Dataset001_Fish/labelsTr/s{index:02d}.png", ids(index))
        write(data / f"Dataset001_Fish/imagesTs/t{index:02d}_0000.png", photo(index)[:, :, 0])
        write(data / f"Dataset001_Fish/imagesTs/t{index:02d}_0001.png", photo(index)[:, :, 1])
    text = {"channel_names": {"0": "red", "1": "green"}, "numTraining": COUNT, "file_ending": ".png"}
    text["labels"] = {"background": 0, "head": 1, "tail": 2}
    (data / "Dataset001_Fish/dataset.json").write_text(json.dumps(text))


# Masks of classes by their names


def suffixes(data, images="images", masks="masks"):
    photos(data, images)
    for index in range(COUNT):
        for name, mask in CLASSES:
            write(data / masks / f"s{index:02d}_{name}.png", (mask(index) * 255).astype(np.uint8))


def suffixes_beside(data):
    suffixes(data, ".", ".")


def objects_beside(data):
    for index in range(COUNT):
        write(data / f"benign/benign ({index + 1}).png", photo(index))
        write(data / f"benign/benign ({index + 1})_mask.png", (head(index) * 255).astype(np.uint8))
        if index % 2:
            write(data / f"benign/benign ({index + 1})_mask_1.png", (tail(index) * 255).astype(np.uint8))


# A repository


def devkit(data):
    for index in range(COUNT):
        write(data / f"VOCdevkit/VOC2012/JPEGImages/2007_{index:06d}.jpg", photo(index))
        write(data / f"VOCdevkit/VOC2012/SegmentationClass/2007_{index:06d}.png", ids(index))
        write(data / f"VOCdevkit/VOC2012/SegmentationObject/2007_{index:06d}.png", ids(index))
    for name, numbers in (("train", range(4)), ("val", range(4, COUNT)), ("trainval", range(COUNT))):
        path = data / f"VOCdevkit/VOC2012/ImageSets/Segmentation/{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"2007_{number:06d}\n" for number in numbers))
    for name in ("docs/logo.png", "docs/images/curve.png", "scripts/plot.png", "img/street.jpg", "banner.png"):
        write(data / name, photo(9))
    (data / "README.md").write_text("A repository.\n")


# Volumes, of two slices each


def volume(number, make):
    return np.stack([make(2 * number), make(2 * number + 1)])


def grey(index):
    return photo(index)[:, :, :1]


def tiff_volumes(data):
    for number in range(3):
        for place, make in (("images", lambda index: grey(index)[:, :, 0]), ("masks", ids)):
            (data / place).mkdir(parents=True, exist_ok=True)
            tifffile.imwrite(data / place / f"v{number}.tif", volume(number, make), photometric="minisblack")


def write_nifti(path, pixels):
    nibabel = pytest.importorskip("nibabel")
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(pixels.T, np.eye(4)), path)


def nifti(data):
    for number in range(3):
        pixels = volume(number, lambda index: grey(index)[:, :, 0].astype(np.int16))
        write_nifti(data / f"a/images/v{number}.nii", pixels)
        write_nifti(data / f"a/labels/v{number}.nii", volume(number, ids))


def nifti_of_nnunet(data):
    for number in range(3):
        for channel in range(2):
            pixels = volume(number, lambda index, channel=channel: photo(index)[:, :, channel].astype(np.int16))
            write_nifti(data / f"Dataset001_Fish/imagesTr/v{number}_{channel:04d}.nii.gz", pixels)
        write_nifti(data / f"Dataset001_Fish/labelsTr/v{number}.nii.gz", volume(number, ids))
    text = {"labels": {name: value for value, name in enumerate(NAMES)}}
    (data / "Dataset001_Fish/dataset.json").write_text(json.dumps(text))


# The report of each


FORMS = {
    rle_of_one_class: ("object",),
    rle_with_classes: NAMES,
    rle_with_joined_ids: ("background", "class 1", "class 2"),
    nnunet: NAMES,
    tiff_volumes: (None,) * 3,
    nifti: (None,) * 3,
    nifti_of_nnunet: NAMES,
    suffixes: NAMES,
    devkit: (None,) * 3,
    suffixes_beside: NAMES,
}


CHANGED = {
    **dict.fromkeys([nnunet, nifti_of_nnunet], lambda index: photo(index)[:, :, :2]),
    **dict.fromkeys([tiff_volumes, nifti], grey),
}


@pytest.fixture
def report(tmp_path):
    def report(**settings):
        places = {"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints")}
        return build_dataset_report(load_config({**places, **settings}), Console(io.StringIO()))

    return report


@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_a_form_of_data_is_read_without_a_setting(make, tmp_path, report):
    make(tmp_path / "data")
    found = report()
    assert (found.blocking_message, found.questions) == ("", [])
    names = FORMS[make]
    assert (found.classes.num_classes, found.classes.class_names) == (len(names), names if any(names) else None)
    for index, pair in enumerate(sorted(found.pairs, key=lambda pair: pair.name)):
        wanted = ids(index) if len(names) > 1 else ids(index) > 0
        assert np.array_equal(read_mask(pair.mask), wanted)
        assert np.array_equal(read_image(pair.image), CHANGED.get(make, photo)(index)) or pair.image.suffix == ".jpg"
    assert len(found.pairs) == COUNT
    train, val = ({pair.name.split("/")[0] for pair in pairs} for pairs in (found.split.train, found.split.val))
    assert not train & val or not make.__name__.startswith(("nifti", "tiff"))


@pytest.mark.parametrize(
    "cell",
    ["1 2 3", "0 2", "1 x", "9" * 30 + " 1", "480 2", "1 400 1 400", "100 3 20 3 19 4 18 4 19 3", f"{2**63 - 1} 5"],
)
def test_run_lengths_that_do_not_fit_the_image_are_refused(cell, tmp_path, report):
    photos(tmp_path / "data", "train")
    write_csv(tmp_path / "data/train.csv", ("ImageId", "EncodedPixels"), ("s00", "1 2"), ("s01", cell))
    reason = r"train\.csv, image 's01': line 3: run lengths .*; need (pairs|runs that follow each other)"
    assert re.search(reason, report().blocking_message)


def test_several_masks_of_an_image_are_its_objects(tmp_path, report):
    objects_beside(tmp_path / "data")
    found = report()
    assert (len(found.pairs), found.problems, found.classes.num_classes) == (COUNT, [], 1)
    wanted = [head(0), head(1) | tail(1), head(2), head(3) | tail(3), head(4), head(5) | tail(5)]
    assert all(np.array_equal(read_mask(pair.mask) > 0, mask) for pair, mask in zip(found.pairs, wanted, strict=True))


@pytest.mark.parametrize(
    ("endings", "values"),
    [
        (("color", "labels"), 2),  # views of one mask
        (("expert1", "expert2"), 2),
        (("reader_a", "reader_b"), 2),
        (("0", "1"), 2),  # objects or readers
        (("head", "tail"), 5),  # more than two values
    ],
)
def test_endings_that_may_be_something_else_than_classes_are_asked_about(endings, values, tmp_path, report):
    photos(tmp_path / "data")
    pixels = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % values
    for name in (f"s{index:02d}_{ending}.png" for index in range(COUNT) for ending in endings):
        write(tmp_path / "data/masks" / name, pixels)
    asked = rf"do not pair up: .*; set one of these:\n  mask_suffix: _{endings[0]}\n  mask_suffix: _{endings[1]}$"
    with pytest.raises(Question, match=asked):
        report()


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "data/train.parquet"])
def test_tables_of_hugging_face_are_named_with_what_to_do(name, tmp_path, report):
    photos(tmp_path / "data", "data")
    (tmp_path / "data" / name).write_text("file_name,mask_file_name\ns00.png,x.png\n")
    with pytest.raises(DataError, match=rf"{name}:? .*a table of Hugging Face.* give (the pairs|them) from Python"):
        report()
