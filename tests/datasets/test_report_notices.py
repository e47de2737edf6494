"""What a user should know about a dataset that can be trained on."""

from __future__ import annotations

import io
from dataclasses import replace

import cv2
import numpy as np
import pytest

from helpers.report_data import HEIGHT, WIDTH, Dataset, noise, square
from unet_trainer.config.load import load_config
from unet_trainer.datasets.build_report import build_dataset_report
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.image_kind import ImageKind
from unet_trainer.datasets.pairs import FoundPairs
from unet_trainer.system.console import Console


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def test_dropped_alpha_gives_a_notice(data):
    data.image(0, noise(0, 4))
    data.image(5, noise(5, 4))
    assert data.report().notices == ["the alpha channel of 2 of 6 images is dropped"]


def test_grey_among_colour_gives_a_notice(data):
    data.image(2, noise(2, 1))
    report = data.report()
    assert report.notices == ["1 of 6 images is grey; each gets 3 equal channels"]
    assert report.blocking_message == ""


def test_grey_images_only_give_no_notice(data):
    for index in range(6):
        data.image(index, noise(index, 1))
    report = data.report()
    assert (report.kind, report.notices) == (ImageKind(1, "uint8"), [])


def test_images_of_a_single_colour_give_a_notice(data):
    data.image(2, np.full((HEIGHT, WIDTH, 3), 77, np.uint8))
    assert data.report().notices == [f"1 image of a single colour: {data.folder / 'images/2.png'}"]


def test_masks_of_void_only_give_a_notice(data):
    for index in range(6):
        data.mask(index, square(1))
    data.mask(3, np.full((HEIGHT, WIDTH), 255, np.uint8))
    partly = square(1)
    partly[15:] = 255
    data.mask(4, partly)  # the rest of it is not ignored
    assert data.report().notices == [f"1 mask with ignored pixels only: {data.folder / 'masks/3.png'}"]


def test_identical_images_give_a_notice_and_another_if_their_masks_differ(data):
    data.image(1, noise(0))
    data.image(3, noise(2))
    data.mask(3, square()[::-1].copy())
    images = data.folder / "images"
    assert data.report().notices == [
        "4 images are identical to another one; identical images stay on one side: "
        f"{images / '0.png'} = {images / '1.png'}, {images / '2.png'} = {images / '3.png'}",
        f"1 set of identical images with masks that differ: {images / '2.png'} = {images / '3.png'}",
    ]


def test_groups_of_one_image_each_give_a_notice(data):
    assert data.report(group_pattern=r"images/(\d)").notices == ["every group has only one image; is group_pattern right?"]


def test_given_statistics_from_0_to_1_for_8_bit_images_give_a_notice(data):
    notice = "image_mean and image_std are in the files' own units, 0 to 255 here; these look like 0 to 1"
    assert data.report(image_mean=[0.5, 0.5, 0.5], image_std=[0.2, 0.2, 0.2]).notices == [notice]
    assert data.report(image_mean=[128, 128, 128], image_std=[50, 50, 50]).notices == []


# Neighbours, classes and test data


def write_video(data, count, first=0, name="frame"):
    """A window that moves over a scene."""
    for index in range(6):
        for folder in ("images", "masks"):
            (data.folder / folder / f"{index}.png").unlink(missing_ok=True)
    scene = cv2.resize(noise(0), (WIDTH * 8, HEIGHT), interpolation=cv2.INTER_CUBIC)
    for index in range(count):
        assert cv2.imwrite(str(data.folder / f"images/{name}{first + index:03d}.png"), scene[:, 4 * index : 4 * index + WIDTH])
        assert cv2.imwrite(str(data.folder / f"masks/{name}{first + index:03d}.png"), square())


def test_a_video_gives_a_notice_with_a_line_that_ends_it(data):
    write_video(data, 40)
    report = data.report()
    (notice,) = report.notices
    assert notice.startswith("images are like their neighbours in the numbering (frame020, frame021, frame022): ")
    assert notice.endswith(":\n  split: blocks")
    assert report.advised == {"split": "blocks"}
    mended = data.report(**report.advised)
    (notice,) = mended.notices
    assert notice.endswith("pairs between the blocks of train and val left out, as a gap")
    assert (mended.advised, len(mended.split.val)) == ({}, 8)


def test_a_given_split_that_cuts_a_video_gives_a_notice(data):
    write_video(data, 40)
    for kind in ("images", "masks"):
        for part in ("train", "val"):
            (data.folder / part / kind).mkdir(parents=True)
        for index, path in enumerate(sorted((data.folder / kind).iterdir())):
            path.rename(data.folder / ("val" if index in range(10, 30, 2) else "train") / kind / path.name)
        (data.folder / kind).rmdir()
    (notice,) = data.report().notices
    assert notice.startswith("validation images are like their neighbours in train: ")


def test_groups_end_the_notice(data):
    write_video(data, 40)
    assert data.report(group_pattern=r"frame(\d\d)").notices == []


def test_a_resumed_run_is_not_told_again(data):
    write_video(data, 20)
    config = load_config({"data_dir": str(data.folder), "checkpoint_dir": str(data.checkpoints)})
    found = find_dataset(config)
    given = FoundPairs(
        tuple(replace(pair, part="val" if index % 5 == 0 else "train") for index, pair in enumerate(found.pairs)), ""
    )
    assert build_dataset_report(config, Console(io.StringIO()), given).notices == []
