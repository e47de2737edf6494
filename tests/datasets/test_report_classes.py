"""Classes that masks tell, values that belong to none, and questions about them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from helpers.report_data import HEIGHT, WIDTH, Dataset, only_problem, square
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import load_config
from unet_trainer.datasets.build_report import build_dataset_report
from unet_trainer.datasets.class_statistics import class_ids
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.system.console import Console


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def test_values_of_no_class_are_a_problem_with_file_and_share(data):
    odd = square()
    odd[0, :6] = 7
    odd[1, :3] = 9
    data.mask(1, odd)
    problem = only_problem(data.report(mask_values=[0, 255]))
    assert (problem.kind, problem.title) == ("values", "1 mask with values that belong to no class (the classes are 0, 255)")
    assert problem.lines == (f"{data.folder / 'masks/1.png'}: 7 (1.0% of pixels), 9 (0.5% of pixels)",)
    assert problem.fix == (
        "correct the masks, or add the values to mask_values or ignore_value; with unknown_values: ignore they count nowhere"
    )
    ignored = data.report(mask_values=[0, 255], unknown_values="ignore")
    assert ignored.blocking_message == ""
    assert class_ids(ignored.masks[1], ignored.coding) == {0: 600 - 25 - 9, 1: 25, IGNORED: 9}
    assert data.report(mask_values=[0, 255], ignore_value=[7, 9]).blocking_message == ""
    assert data.report(mask_values=[[0, 9], [7, 255]]).blocking_message == ""


def test_three_values_written_as_a_colour_are_told_how_to_be_written(data):
    """[1, 2, 3] is a colour; as three values that are one class it is written [[1], [2], [3]]."""
    for index in range(6):
        data.mask(index, square(1 + index % 3))
    fix = only_problem(data.report(mask_values=[0, [1, 2, 3]])).fix
    assert fix == "[1, 2, 3] is a colour, and no mask has it; three values that are one class are written [[1], [2], [3]]"
    assert "are written [[1], [2], [3]]" in only_problem(data.report(mask_values=[0, 9], ignore_value=[1, 2, 3])).fix
    assert data.report(mask_values=[0, [[1], [2], [3]]]).blocking_message == ""


def test_values_with_several_meanings_are_a_question_with_the_files_that_hold_them(data):
    odd = square()
    odd[0, 0] = 7
    data.mask(1, odd)
    report = data.report()
    assert (report.problems, report.coding, report.classes) == ([], None, None)
    (question,) = map(str, report.questions)
    assert question.startswith("mask_values: auto cannot tell what the values in the masks mean")
    assert f"In one mask only, perhaps noise: 7 in {data.folder / 'masks/1.png'}" in question
    assert report.blocking_message == question
    assert report.choices[0].settings == {"num_classes": 1, "mask_values": (0, 255), "unknown_values": "ignore"}
    assert data.report(**report.choices[0].settings).blocking_message == ""


@pytest.mark.parametrize("value", [0, 255, 7])
def test_masks_of_a_single_value_are_refused_with_the_reason(data, value):
    for index in range(6):
        data.mask(index, np.full((HEIGHT, WIDTH), value, np.uint8))
    (question,) = map(str, data.report().questions)
    assert question == (
        f"there is nothing to learn: every pixel of all 6 masks is {value}; are these the masks (mask_dir), "
        "and were they written right?"
    )
    assert list(map(str, data.report(num_classes=1).questions)) == [question]


@pytest.mark.parametrize(
    ("settings", "every"),
    [
        ({"mask_values": "above 255"}, "background (mask_values: above 255)"),
        ({"mask_values": [[0, 255], 9]}, "background (mask_values: [[0, 255], 9])"),
        ({"mask_values": [9, [0, 255], 7], "class_names": ["sky", "road", "cow"]}, "road (mask_values: [9, [0, 255], 7])"),
        ({"ignore_value": 255}, "0"),
        ({"ignore_value": [0, 255]}, "ignored (ignore_value: [0, 255])"),
    ],
)
def test_settings_that_leave_one_class_are_refused_with_the_reason(data, settings, every):
    (question,) = map(str, data.report(**settings).questions)
    assert question.startswith(f"there is nothing to learn: every pixel of all 6 masks is {every}; ")


def test_settings_that_contradict_the_number_of_classes_that_was_found_are_refused(data):
    for index in range(6):
        mask = square(1)
        mask[10:15, 10:20] = 2
        data.mask(index, mask)
    assert data.report().classes.num_classes == 3
    with pytest.raises(ConfigError, match=r"^loss: bce is for num_classes: 1; with 3 classes use cross_entropy$"):
        data.report(loss="bce")


def test_a_mask_in_the_alpha_channel_is_read_and_said(data):
    for index in range(6):
        shape = square() if index else np.zeros((HEIGHT, WIDTH), np.uint8)  # an image without objects
        data.mask(index, np.dstack([np.full((HEIGHT, WIDTH, 3), 255, np.uint8), shape]))
    report = data.report()
    assert report.blocking_message == ""
    assert report.notices == ["the alpha channel of 6 of 6 masks is the mask; their colour is the same everywhere"]
    assert [class_ids(mask, report.coding) for mask in report.masks] == [{0: 600}] + [{0: 575, 1: 25}] * 5


def test_palettes_in_another_order_are_a_problem(data):
    """The same picture, once with black first and once with white first."""
    for index in range(6):
        ids = (square() > 0).astype(np.uint8)
        image = Image.frombytes("P", (WIDTH, HEIGHT), (1 - ids if index == 4 else ids).tobytes())
        image.putpalette([255, 255, 255, 0, 0, 0] if index == 4 else [0, 0, 0, 255, 255, 255])
        image.save(data.folder / f"masks/{index}.png")
    problem = only_problem(data.report())
    masks = data.folder / "masks"
    assert (problem.kind, problem.lines) == ("palettes", (f"{masks / '4.png'}: #ffffff is 0, in {masks / '0.png'} it is 1",))


def test_a_class_file_names_the_classes(data):
    """Three classes in colours, as CamVid has them."""
    colours = np.array([[0, 0, 0], [128, 0, 0], [0, 128, 0], [64, 0, 128]], np.uint8)
    for index in range(6):
        ids = np.zeros((HEIGHT, WIDTH), np.uint8)
        ids[:4], ids[6:12], ids[12:] = 1, 2, 3
        data.mask(index, colours[ids][:, :, ::-1])
    assert "mask_values: [0, [0, 128, 0], [64, 0, 128], [128, 0, 0]]" in str(data.report().questions[0])
    lines = ["64 0 128\tPole", "128 0 0\tCar", "0 128 0\tTree", "0 0 0\tVoid"]
    (data.folder / "label_colors.txt").write_text("\n".join(lines))
    report = data.report()
    assert report.blocking_message == ""
    assert report.coding.mask_values == ((64, 0, 128), (128, 0, 0), (0, 128, 0))
    decided = report.decided(load_config({}))
    assert (decided.num_classes, decided.class_names) == (3, ("Pole", "Car", "Tree"))
    facts = report.checked().facts()
    assert (facts.num_classes, facts.class_names, facts.ignore_value) == (3, ("Pole", "Car", "Tree"), 0)
    assert facts.num_classes_reason == "3 classes in label_colors.txt"


def test_void_only_in_masks_without_classes_is_a_question(data):
    """Masks in {0, 255} among masks in {0, 1}: 255 may be void, or the foreground."""
    for index in range(6):
        data.mask(index, square(255 if index % 2 else 1))
    report = data.report()
    (question,) = map(str, report.questions)
    assert "255 occurs only in masks that hold no class but 0: is it void, or another mark of the foreground?" in question
    assert [choice.settings["mask_values"] for choice in report.choices[:2]] == [(0, (1, 255)), (0, 1)]
    assert data.report(ignore_value=255).questions == []
    assert data.report(mask_values=[0, [1, 255]]).questions == []


def test_void_beside_a_single_class_is_a_question(data):
    """Masks in {0, 255} and three classes: 255 beside class ids is void, but here nothing else could be learnt."""
    report = data.report(num_classes=3)
    assert len(report.questions) == 1
    assert report.choices[0].settings == {"num_classes": 1, "mask_values": (0, 255)}
    assert data.report(num_classes=1).questions == []


# Masks that are made from other files


def test_classes_that_the_files_of_masks_name_are_taken_with_them(data):
    """Of three classes one is in few masks, and 255 in masks without a class: read as plain masks, that would be a question."""
    for index in range(6):
        data.mask(index, square(1) if index else square(255))
    pairs = tuple(Pair(f"{index}", data.folder / f"images/{index}.png", data.folder / f"masks/{index}.png") for index in range(6))
    found = FoundPairs(pairs, "drawn", num_classes=3, class_names=("background", "sea", "whale"))

    def report(**settings):
        config = load_config({"data_dir": str(data.folder), "checkpoint_dir": str(data.checkpoints), **settings})
        return build_dataset_report(config, Console(io.StringIO()), found)

    drawn = report()
    assert drawn.blocking_message == ""
    assert (drawn.classes.num_classes, drawn.classes.class_names) == (3, ("background", "sea", "whale"))
    assert (drawn.coding.mask_values, drawn.coding.ignore_value) == ((0, 1, 2), 255)
    assert drawn.classes.num_classes_reason == "as the files have that the masks are made from"
    named = report(class_names=["a", "b", "c"])
    assert named.decided(load_config({"class_names": ["a", "b", "c"]})).class_names == ("a", "b", "c")
    assert report(mask_values="nonzero").classes.num_classes == 1
    assert len(report(num_classes=1).questions) == 1
