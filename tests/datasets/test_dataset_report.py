"""The report on a dataset, and the checked dataset that it becomes."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.report_data import HEIGHT, WIDTH, Dataset, square
from unet_trainer.datasets.dataset_report import describe_sizes
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import IMAGENET_MEAN


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def test_a_dataset_without_problems_is_checked(data):
    report = data.report()
    dataset = report.checked()
    assert (dataset.pairs, dataset.images, dataset.masks) == (tuple(report.pairs), tuple(report.images), tuple(report.masks))
    assert (dataset.kind, dataset.coding, dataset.image_spec, dataset.split) == (
        report.kind,
        report.coding,
        report.image_spec,
        report.split,
    )


def test_a_dataset_with_a_problem_or_a_question_is_not_checked_and_the_error_is_the_whole_message(data):
    (data.folder / "images/1.png").write_bytes(b"")
    odd = square()
    odd[0, 0] = 7
    data.mask(2, odd)
    report = data.report()
    with pytest.raises(DataError) as raised:
        report.checked()
    assert str(raised.value) == report.blocking_message
    assert "1 file that cannot be used:" in str(raised.value)
    assert "mask_values: auto cannot tell" in str(raised.value)


def test_the_facts_of_some_pairs_are_in_their_order(data):
    for index in range(6):
        data.image(index, np.full((HEIGHT, WIDTH, 3), 10 * index, np.uint8))
        data.mask(index, square(1) * (index + 1))
    dataset = data.report(mask_values="nonzero").checked()
    images, masks = dataset.facts_of([dataset.pairs[4], dataset.pairs[1]])
    assert [image.mean[0] for image in images] == [40, 10]
    assert [sorted(mask.counts) for mask in masks] == [[0, 5], [0, 2]]


def test_resolve_gets_the_facts_of_the_dataset(data):
    """25 of 600 pixels of each mask are foreground."""
    data.image(0, np.zeros((24, 32, 3), np.uint8))
    data.mask(0, np.zeros((24, 32), np.uint8))
    dataset = data.report().checked()
    facts = dataset.facts()
    assert (facts.channels, facts.mean, facts.statistics_reason) == (3, IMAGENET_MEAN, "ImageNet's, for 8-bit RGB")
    assert (facts.mask_values, facts.ignore_value, facts.mask_reason) == ((0, 255), None, "0 and 255")
    foreground = 125 / (5 * 600 + 24 * 32)
    assert facts.class_shares == pytest.approx([1 - foreground, foreground])
    assert facts.train_sizes == [(24, 32) if pair.name == "0" else (HEIGHT, WIDTH) for pair in dataset.split.train]


def test_the_most_frequent_sizes_are_shown_first(data):
    for index, width in enumerate((30, 31, 31, 32, 33, 33)):
        data.image(index, np.random.default_rng(index).integers(0, 256, (20, width, 3), np.uint8))
        data.mask(index, square(size=(20, width)))
    images = data.report().images
    assert describe_sizes(images) == "31×20, 33×20, 30×20 and 1 more size"
    assert describe_sizes(images, 9) == "31×20, 33×20, 30×20, 32×20"
