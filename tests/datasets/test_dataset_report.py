"""The report on a dataset: usable pairs, problems with their fixes, questions and notices, and the checked dataset."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace

import cv2
import numpy as np
import pytest
from PIL import Image

from helpers.image_bytes import exif, npy_bytes, pil_bytes
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import load_config
from unet_trainer.datasets.build_report import build_dataset_report
from unet_trainer.datasets.class_statistics import class_ids
from unet_trainer.datasets.dataset_report import describe_sizes
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.image_kind import ImageKind
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import Question
from unet_trainer.images.image_files import DataError
from unet_trainer.images.image_spec import IMAGENET_MEAN
from unet_trainer.images.mask_coding import IGNORED
from unet_trainer.system.console import Console

HEIGHT, WIDTH = 20, 30


class Dataset:
    """Six pairs of noise and a mask with a square; tests replace files."""

    def __init__(self, folder):
        self.folder = folder / "data"
        self.checkpoints = folder / "checkpoints"
        (self.folder / "images").mkdir(parents=True)
        (self.folder / "masks").mkdir()
        for index in range(6):
            self.image(index, noise(index))
            self.mask(index, square())

    def image(self, index, pixels):
        assert cv2.imwrite(str(self.folder / f"images/{index}.png"), pixels)

    def mask(self, index, pixels):
        assert cv2.imwrite(str(self.folder / f"masks/{index}.png"), pixels)

    def replace_image(self, index, name, data):
        (self.folder / f"images/{index}.png").unlink()
        path = self.folder / "images" / name
        path.write_bytes(data)
        return path

    def report(self, **settings):
        config = load_config({"data_dir": str(self.folder), "checkpoint_dir": str(self.checkpoints), **settings})
        return build_dataset_report(config, Console(io.StringIO()))


def noise(seed, channels=3, dtype=np.uint8, high=256):
    return np.random.default_rng(seed).integers(0, high, (HEIGHT, WIDTH, channels)).astype(dtype)


def square(value=255, size=(HEIGHT, WIDTH)):
    mask = np.zeros(size, np.uint8)
    mask[4:9, 3:8] = value
    return mask


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


def only_problem(report):
    (problem,) = report.problems
    return problem


# Clean data


def test_a_clean_dataset_has_a_split_and_no_messages(data):
    report = data.report()
    assert (report.blocking_message, report.problems, report.questions, report.notices) == ("", [], [], [])
    assert report.kind == ImageKind(3, "uint8")
    assert report.coding.mask_values == (0, 255)
    assert (len(report.split.train), len(report.split.val)) == (5, 1)
    assert (report.image_spec.mean, report.statistics_reason) == (IMAGENET_MEAN, "ImageNet's, for 8-bit RGB")
    assert [pair.name for pair in report.pairs] == ["0", "1", "2", "3", "4", "5"]


def test_statistics_are_those_of_the_training_images_alone(data):
    for index in range(6):
        data.image(index, noise(index, 1, np.uint16, 4000 + 10_000 * index))
    report = data.report()
    train = [noise(int(pair.name), 1, np.uint16, 4000 + 10_000 * int(pair.name)).astype(float) for pair in report.split.train]
    assert report.image_spec.mean == pytest.approx((np.mean(train),), rel=1e-5)
    assert report.image_spec.std == pytest.approx((np.std(train),), rel=1e-5)
    assert report.statistics_reason == "of the training images"


def test_a_missing_data_dir_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data_dir: .*nowhere does not exist; need a folder with images/ and masks/"):
        find_dataset(load_config({"data_dir": str(tmp_path / "nowhere")}))


# The checked dataset


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
    assert "1 files that cannot be used:" in str(raised.value)
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


# Files that cannot be used


def test_unreadable_files_are_named_with_their_reasons_and_their_pairs_are_left_out(data):
    image, mask = data.folder / "images/1.png", data.folder / "masks/4.png"
    image.write_bytes(image.read_bytes()[:200])
    mask.write_bytes(b"")
    report = data.report()
    assert [pair.name for pair in report.pairs] == ["0", "2", "3", "5"]
    problem = only_problem(report)
    assert (problem.kind, problem.lines) == ("unreadable", (f"{image}: the file is cut off", f"{mask}: the file is empty"))
    assert report.blocking_message == (
        f"2 files that cannot be used:\n  {image}: the file is cut off\n  {mask}: the file is empty\n"
        "  Fix: repair these files, or remove them together with their partners"
    )


def test_a_dataset_without_a_readable_pair_has_no_split(data):
    for index in range(6):
        (data.folder / f"images/{index}.png").write_text("hello")
    report = data.report()
    assert (report.pairs, report.split, len(only_problem(report).lines)) == ([], None, 6)
    assert report.blocking_message.startswith("6 files that cannot be used:")
    with pytest.raises(DataError, match="6 files that cannot be used:"):
        report.checked()


def test_unpaired_files_and_other_problems_are_in_one_message(data):
    (data.folder / "masks/5.png").unlink()
    (data.folder / "images/0.png").write_bytes(b"")
    report = data.report()
    assert [problem.kind for problem in report.problems] == ["no_mask", "unreadable"]
    assert report.blocking_message.startswith("images and masks do not pair up:")
    assert report.blocking_message.count("images/5.png") == 1
    assert "images/0.png: the file is empty" in report.blocking_message


def test_twenty_files_of_a_problem_are_named_and_the_others_counted(data):
    for index in range(6, 30):
        data.image(index, noise(index))
        data.mask(index, square())
        (data.folder / f"images/{index}.png").write_bytes(b"")
    assert "\n  … and 4 more\n" in data.report().blocking_message


# Sizes


def test_a_mask_of_another_size_with_the_same_aspect_ratio_can_be_resized(data):
    data.mask(2, square(size=(HEIGHT // 2, WIDTH // 2)))
    report = data.report()
    problem = only_problem(report)
    assert (problem.kind, problem.title) == ("sizes", "masks of another size than their images")
    assert problem.lines == (f"{data.folder / 'masks/2.png'}: 15×10, its image {data.folder / 'images/2.png'} is 30×20",)
    assert problem.fix == "resize_masks: true resizes masks with the aspect ratio of their images"
    assert len(report.pairs) == 5
    resized = data.report(resize_masks=True)
    assert (resized.blocking_message, len(resized.pairs)) == ("", 6)
    assert resized.notices == ["1 mask resized to the size of the image (resize_masks)"]


@pytest.mark.parametrize("resize_masks", [False, True])
def test_a_mask_with_another_aspect_ratio_cannot_be_resized(data, resize_masks):
    data.mask(2, square(size=(HEIGHT, HEIGHT)))
    problem = only_problem(data.report(resize_masks=resize_masks))
    assert problem.lines == (f"{data.folder / 'masks/2.png'}: 20×20, its image {data.folder / 'images/2.png'} is 30×20",)
    assert problem.fix == "an image and its mask must have the same size"


def test_a_difference_of_one_pixel_by_rounding_is_the_same_aspect_ratio(data):
    """A third of 20×31 is 7×10."""
    data.image(2, np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8))
    data.mask(2, square(size=(7, 10)))
    assert data.report(resize_masks=True).blocking_message == ""


def test_an_image_rotated_by_exif_with_an_unrotated_mask_is_a_problem(data):
    image = data.replace_image(3, "3.jpg", pil_bytes("JPEG", noise(9), exif=exif(6)))
    problem = only_problem(data.report())
    assert problem.fix == "rotate the masks too, or save the images without EXIF orientation"
    assert problem.lines == (
        f"{data.folder / 'masks/3.png'}: 30×20, its image {image} is 20×30 (rotated by its EXIF orientation; the mask is not)",
    )
    data.mask(3, square(size=(WIDTH, HEIGHT)))
    rotated = data.report()
    assert (rotated.blocking_message, rotated.notices) == ("", ["1 of 6 images are rotated by their EXIF orientation"])


def test_a_mask_of_another_size_of_a_rotated_image_is_not_blamed_on_exif(data):
    image = data.replace_image(3, "3.jpg", pil_bytes("JPEG", noise(9), exif=exif(6)))
    data.mask(3, square(size=(25, 25)))
    assert only_problem(data.report()).lines == (f"{data.folder / 'masks/3.png'}: 25×25, its image {image} is 20×30",)


# Images of another kind


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (noise(9, 3, np.uint16, 60_000), "16-bit, the others are 8-bit"),
        (noise(9, 1, np.uint16, 60_000), "16-bit, the others are 8-bit"),
    ],
)
def test_an_image_of_another_depth_is_a_problem(data, pixels, reason):
    data.image(4, pixels)
    report = data.report()
    problem = only_problem(report)
    assert (problem.kind, problem.title) == ("kind", "images of another kind than the others")
    assert problem.lines == (f"{data.folder / 'images/4.png'}: {reason}",)
    assert problem.fix == "all images of a dataset must have the same depth and channels: convert or remove these"
    assert [pair.name for pair in report.pairs] == ["0", "1", "2", "3", "5"]
    assert len(report.images) == len(report.masks) == 5


def test_an_image_with_another_number_of_channels_is_a_problem(data):
    image = data.replace_image(4, "4.npy", npy_bytes(noise(9, 5)))
    assert only_problem(data.report()).lines == (f"{image}: 5 channels, need 3",)


def test_the_number_of_channels_may_be_given(data):
    data.image(4, noise(9, 1))
    report = data.report(in_channels=1)
    assert report.kind == ImageKind(1, "uint8")
    assert len(only_problem(report).lines) == 5
    assert only_problem(report).lines[0].endswith("0.png: 3 channels, need 1")
    assert only_problem(report).fix == "in_channels: 1 does not fit them; leave it out, or convert the images"


def test_statistics_for_another_number_of_channels_are_refused(data):
    with pytest.raises(ConfigError) as raised:
        data.report(image_mean=[1, 2], image_std=[1, 2, 3, 4])
    assert str(raised.value) == (
        "image_mean: got 2 values; the images have 3 channels\nimage_std: got 4 values; the images have 3 channels"
    )


# Masks


def test_values_of_no_class_are_a_problem_with_file_and_share(data):
    odd = square()
    odd[0, :6] = 7
    odd[1, :3] = 9
    data.mask(1, odd)
    problem = only_problem(data.report(mask_values=[0, 255]))
    assert (problem.kind, problem.title) == ("values", "masks with values that belong to no class (the classes are 0, 255)")
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
    (question,) = report.questions
    assert question.startswith("mask_values: auto cannot tell what the values in the masks mean")
    assert f"In one mask only, perhaps noise: 7 in {data.folder / 'masks/1.png'}" in question
    assert report.blocking_message == question
    assert report.choices[0].settings == {"num_classes": 1, "mask_values": (0, 255), "unknown_values": "ignore"}
    assert data.report(**report.choices[0].settings).blocking_message == ""


@pytest.mark.parametrize("value", [0, 255, 7])
def test_masks_of_a_single_value_are_refused_with_the_reason(data, value):
    for index in range(6):
        data.mask(index, np.full((HEIGHT, WIDTH), value, np.uint8))
    (question,) = data.report().questions
    assert question == (
        f"there is nothing to learn: every pixel of all 6 masks is {value}; are these the masks (mask_dir), "
        "and were they written right?"
    )
    assert data.report(num_classes=1).questions == [question]


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
    (question,) = data.report(**settings).questions
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
    assert "mask_values: [0, [0, 128, 0], [64, 0, 128], [128, 0, 0]]" in data.report().questions[0]
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


def test_a_split_that_is_impossible_is_a_question(data):
    report = data.report(group_pattern="images")
    assert report.split is None
    assert report.blocking_message == (
        "only 6 pairs in 1 group (or with identical images); need at least 2, one to train on and one to validate on"
    )


def test_void_only_in_masks_without_classes_is_a_question(data):
    """Masks in {0, 255} among masks in {0, 1}: 255 may be void, or the foreground."""
    for index in range(6):
        data.mask(index, square(255 if index % 2 else 1))
    report = data.report()
    (question,) = report.questions
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


def test_the_most_frequent_sizes_are_shown_first(data):
    for index, width in enumerate((30, 31, 31, 32, 33, 33)):
        data.image(index, np.random.default_rng(index).integers(0, 256, (20, width, 3), np.uint8))
        data.mask(index, square(size=(20, width)))
    images = data.report().images
    assert describe_sizes(images) == "31×20, 33×20, 30×20 and 1 more sizes"
    assert describe_sizes(images, 9) == "31×20, 33×20, 30×20, 32×20"


# Notices


def test_dropped_alpha_gives_a_notice(data):
    data.image(0, noise(0, 4))
    data.image(5, noise(5, 4))
    assert data.report().notices == ["the alpha channel of 2 of 6 images is dropped"]


def test_grey_among_colour_gives_a_notice(data):
    data.image(2, noise(2, 1))
    report = data.report()
    assert report.notices == ["1 of 6 images are grey; each gets 3 equal channels"]
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
        f"1 sets of identical images have masks that differ: {images / '2.png'} = {images / '3.png'}",
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


def test_what_was_found_besides_pairs_is_in_the_report(data):
    for name in ("images", "masks"):
        (data.folder / "test" / name).mkdir(parents=True)
        (data.folder / "test" / name / "90.png").write_bytes(b"not even an image")
    (data.folder / "masks/5.png").unlink()
    report = data.report(unpaired="skip")
    assert report.notices == [f"1 image without a mask left out (unpaired: skip), e.g. {data.folder / 'images/5.png'}"]
    assert [pair.name for pair in report.split.test] == ["90"]  # training reads none of it
    assert report.blocking_message == ""


def test_problems_of_converted_masks_name_the_users_files(data):
    """A file for each class, of another size than the image."""
    for index in range(6):
        (data.folder / f"masks/{index}.png").unlink()
        for name in ("sea", "whale"):
            (data.folder / "masks" / name).mkdir(exist_ok=True)
            size = (HEIGHT, WIDTH) if index else (HEIGHT + 8, WIDTH)
            assert cv2.imwrite(
                str(data.folder / f"masks/{name}/{index}.png"), square(size=size) if name == "sea" else np.zeros(size, np.uint8)
            )
    report = data.report(num_classes=3)
    assert only_problem(report).lines == (
        f"{data.folder / 'masks/sea/0.png'} and 1 more: 30×28, its image {data.folder / 'images/0.png'} is 30×20",
    )


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


# A split that is given


def test_a_resumed_run_keeps_its_split(data):
    """Its split.csv tells what validates; num_folds was used when the run began."""
    pairs = tuple(
        Pair(f"{index}", data.folder / f"images/{index}.png", data.folder / f"masks/{index}.png", "val" if index < 2 else "train")
        for index in range(6)
    )
    config = load_config({"data_dir": str(data.folder), "checkpoint_dir": str(data.checkpoints), "num_folds": 3, "fold": 1})
    report = build_dataset_report(config, Console(io.StringIO()), FoundPairs(pairs, "as the run began"))
    assert report.blocking_message == ""
    assert [pair.name for pair in report.split.val] == ["0", "1"]


def test_a_report_changes_no_file(data):
    def state():
        return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in data.folder.rglob("*")}

    before = state()
    data.report()
    assert state() == before


class AnnotatedDataset(Dataset):
    """Six images with a COCO file in place of masks: a square of the class cat in each, a dog in the first three."""

    def __init__(self, folder):
        super().__init__(folder)
        shutil.rmtree(self.folder / "masks")
        self.write()

    def write(self, names=("cat", "dog")):
        square, corner = [3, 4, 8, 4, 8, 9, 3, 9], [20, 10, 30, 10, 30, 20, 20, 20]
        images = [{"id": index, "file_name": f"{index}.png", "width": WIDTH, "height": HEIGHT} for index in range(6)]
        annotations = [{"id": index, "image_id": index, "category_id": 1, "segmentation": [square]} for index in range(6)]
        if len(names) > 1:
            annotations += [{"id": 6 + index, "image_id": index, "category_id": 2, "segmentation": [corner]} for index in range(3)]
        categories = [{"id": number, "name": name} for number, name in enumerate(names, start=1)]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (self.folder / "annotations.json").write_text(json.dumps(content))


def test_annotations_are_found_where_there_are_no_masks(tmp_path):
    report = AnnotatedDataset(tmp_path).report()
    assert report.blocking_message == ""
    assert (report.found.num_classes, report.found.class_names) == (3, ("background", "cat", "dog"))
    assert report.coding.values == (0, 1, 2)
    dataset = report.checked()
    assert dataset.masks[0].counts == {0: 600 - 25 - 100, 1: 25, 2: 100}
    assert len(dataset.split.train) + len(dataset.split.val) == 6
    assert (dataset.classes.num_classes, dataset.classes.class_names) == (3, ("background", "cat", "dog"))


def test_masks_win_over_annotations(tmp_path):
    dataset = AnnotatedDataset(tmp_path)
    (dataset.folder / "masks").mkdir()
    for index in range(6):
        dataset.mask(index, square())
    assert dataset.report().found.num_classes is None


def test_the_classes_of_annotations_are_taken_where_the_config_leaves_them_open(tmp_path):
    dataset = AnnotatedDataset(tmp_path)

    def settled(**settings):
        report = dataset.report(**settings)
        decided = report.decided(load_config(settings))
        return decided.num_classes, decided.class_names

    names = ("background", "cat", "dog")
    assert settled() == (3, names)
    assert settled(num_classes=3) == (3, names)
    dataset.write(["cat"])
    assert settled() == (1, ("cat",))


def test_what_annotations_leave_out_is_a_notice_and_what_is_wrong_a_problem(tmp_path):
    dataset = AnnotatedDataset(tmp_path)
    dataset.image(6, noise(6))
    dataset.image(5, noise(5)[:10])
    report = dataset.report()
    assert "1 image file that no annotation names left out: images/6.png" in report.notices
    assert "annotations.json, image '5.png': annotated at 30×20, and the file 5.png has 30×10 pixels" in report.blocking_message
    assert len(report.pairs) == 5


def test_ignored_shapes_are_void(tmp_path):
    dataset = Dataset(tmp_path)
    shutil.rmtree(dataset.folder / "masks")
    for index in range(6):
        shapes = [
            {"label": "cat", "points": [[3, 4], [8, 4], [8, 9], [3, 9]]},
            {"label": "__ignore__", "points": [[20, 10], [30, 10], [30, 20], [20, 20]]},
        ]
        (dataset.folder / f"images/{index}.json").write_text(json.dumps({"shapes": shapes, "imagePath": f"{index}.png"}))
    report = dataset.report()
    assert (report.coding.values, report.coding.ignore_value) == ((0, 1), 255)
    assert class_ids(report.masks[0], report.coding) == {0: 475, 1: 25, 255: 100}


def test_files_that_are_no_images_are_named_where_images_are_expected(tmp_path):
    dataset = Dataset(tmp_path)
    for path in (dataset.folder / "images").iterdir():
        path.rename(path.with_suffix(".heic"))
    with pytest.raises(
        DataError, match=r"no images in .*\n  6 files such as images/0\.heic: a photo in Apple's HEIC format; convert"
    ):
        dataset.report()


def test_some_files_that_are_no_images_are_named_with_the_masks_that_miss_them(tmp_path):
    dataset = Dataset(tmp_path)
    (dataset.folder / "images/3.png").rename(dataset.folder / "images/3.HEIC")
    message = dataset.report().blocking_message
    assert "1 mask without an image" in message
    assert "1 file such as images/3.HEIC: a photo in Apple's HEIC format" in message


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    dataset = Dataset(tmp_path)
    (dataset.folder / "images/3.png").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "images/3.png: a pointer of git-lfs, not the file itself; run git lfs pull" in dataset.report().blocking_message


def test_where_masks_can_be_chosen_from_annotations_that_are_not_read_are_no_matter(tmp_path):
    dataset = Dataset(tmp_path)
    (dataset.folder / "labels").mkdir()
    for path in (dataset.folder / "masks").iterdir():
        shutil.copy(path, dataset.folder / "labels")
    (dataset.folder / "broken.json").write_text("{")
    with pytest.raises(Question, match=r"mask_dir: 2 folders in .* could hold the masks"):
        dataset.report()
    shutil.rmtree(dataset.folder / "labels")
    shutil.rmtree(dataset.folder / "masks")
    with pytest.raises(DataError, match=r"1 annotation file that cannot be read:\n  .*broken\.json is not valid JSON"):
        dataset.report()


def test_an_archive_is_told_to_be_unpacked(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/nuclei.zip").write_bytes(b"PK\x03\x04")
    with pytest.raises(
        DataError, match=r"no folder of images .*\n  1 file such as nuclei\.zip: an archive; unpack it, and set data_dir"
    ):
        find_dataset(load_config({"data_dir": str(tmp_path / "data")}))
