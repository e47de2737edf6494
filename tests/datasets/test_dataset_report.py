"""A whole dataset at a glance: what can be used, what is wrong with the rest and how to mend it, what the user should know."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import load_config
from unet_trainer.datasets.class_statistics import absent_classes, class_table, describe_classes, ignored_share
from unet_trainer.datasets.dataset_report import build_dataset_report, describe_sizes, find_dataset
from unet_trainer.datasets.layouts import Kind
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.images.image_files import DataError
from unet_trainer.images.image_spec import IMAGENET_MEAN
from unet_trainer.system.console import Console

HEIGHT, WIDTH = 20, 30


class Dataset:
    """Six pairs of noise with a square each; tests replace files."""

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

    def survey(self, **settings):
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


def only_problem(survey):
    (problem,) = survey.problems
    return problem


# Clean data


def test_clean_data_are_divided_and_nothing_is_said(data):
    survey = data.survey()
    assert (survey.blocking_message, survey.problems, survey.questions, survey.notices) == ("", [], [], [])
    assert survey.kind == Kind(3, "uint8")
    assert survey.coding.mask_values == (0, 255)
    assert (len(survey.split.train), len(survey.split.val)) == (5, 1)
    assert (survey.form.mean, survey.statistics_reason) == (IMAGENET_MEAN, "ImageNet's, for 8-bit RGB")
    assert [pair.name for pair in survey.pairs] == ["0", "1", "2", "3", "4", "5"]


def test_statistics_are_those_of_the_training_images_alone(data):
    for index in range(6):
        data.image(index, noise(index, 1, np.uint16, 4000 + 10_000 * index))
    survey = data.survey()
    train = [noise(int(pair.name), 1, np.uint16, 4000 + 10_000 * int(pair.name)).astype(float) for pair in survey.split.train]
    assert survey.form.mean == pytest.approx((np.mean(train),), rel=1e-5)
    assert survey.form.std == pytest.approx((np.std(train),), rel=1e-5)
    assert survey.statistics_reason == "of the training images"


def test_facts_come_in_the_order_of_the_pairs_that_are_asked_for(data):
    for index in range(6):
        data.image(index, np.full((HEIGHT, WIDTH, 3), 10 * index, np.uint8))
    survey = data.survey()
    images, masks = survey.facts_of([survey.pairs[4], survey.pairs[1]])
    assert [image.mean[0] for image in images] == [40, 10]
    assert len(masks) == 2


def test_a_data_dir_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"data_dir: .*nowhere does not exist; need a folder with images/ and masks/"):
        find_dataset(load_config({"data_dir": str(tmp_path / "nowhere")}))


# Files that cannot be used


def test_unreadable_files_are_named_with_their_reasons_and_their_pairs_are_left_out(data):
    image, mask = data.folder / "images/1.png", data.folder / "masks/4.png"
    image.write_bytes(image.read_bytes()[:200])
    mask.write_bytes(b"")
    survey = data.survey()
    assert [pair.name for pair in survey.pairs] == ["0", "2", "3", "5"]
    problem = only_problem(survey)
    assert (problem.kind, problem.lines) == ("unreadable", (f"{image}: the file is cut off", f"{mask}: the file is empty"))
    assert survey.blocking_message == (
        f"2 files that cannot be used:\n  {image}: the file is cut off\n  {mask}: the file is empty\n"
        "  Fix: mend the files or take them away, with their partners"
    )


def test_nothing_that_can_be_read_is_refused_without_a_split(data):
    for index in range(6):
        (data.folder / f"images/{index}.png").write_text("hello")
    survey = data.survey()
    assert (survey.pairs, survey.split, len(only_problem(survey).lines)) == ([], None, 6)
    assert survey.blocking_message.startswith("6 files that cannot be used:")


def test_leftovers_and_other_problems_stand_in_one_refusal(data):
    (data.folder / "masks/5.png").unlink()
    (data.folder / "images/0.png").write_bytes(b"")
    survey = data.survey()
    assert [problem.kind for problem in survey.problems] == ["no_mask", "unreadable"]
    assert survey.blocking_message.startswith("images and masks do not pair up:")
    assert survey.blocking_message.count("images/5.png") == 1
    assert "images/0.png: the file is empty" in survey.blocking_message


def test_a_refusal_names_twenty_files_of_a_kind(data):
    for index in range(6, 30):
        data.image(index, noise(index))
        data.mask(index, square())
        (data.folder / f"images/{index}.png").write_bytes(b"")
    assert "\n  … and 4 more\n" in data.survey().blocking_message


# Sizes


def test_a_mask_of_another_size_but_the_same_shape_can_be_resized(data):
    data.mask(2, square(size=(HEIGHT // 2, WIDTH // 2)))
    survey = data.survey()
    problem = only_problem(survey)
    assert (problem.kind, problem.title) == ("sizes", "masks that are not of their image's size")
    assert problem.lines == (f"{data.folder / 'masks/2.png'}: 15×10, its image {data.folder / 'images/2.png'} is 30×20",)
    assert problem.fix == "resize_masks: true brings masks of the same shape to the size of their images"
    assert len(survey.pairs) == 5
    resized = data.survey(resize_masks=True)
    assert (resized.blocking_message, len(resized.pairs)) == ("", 6)
    assert resized.notices == ["1 masks are brought to the size of their images (resize_masks)"]


@pytest.mark.parametrize("resize_masks", [False, True])
def test_a_mask_of_another_shape_cannot_be_resized(data, resize_masks):
    data.mask(2, square(size=(HEIGHT, HEIGHT)))
    problem = only_problem(data.survey(resize_masks=resize_masks))
    assert problem.lines == (f"{data.folder / 'masks/2.png'}: 20×20, its image {data.folder / 'images/2.png'} is 30×20",)
    assert problem.fix == "sizes in a pair must agree"


def test_a_size_that_is_a_pixel_off_by_rounding_is_the_same_shape(data):
    """A third of 20×31 is 7×10."""
    data.image(2, np.random.default_rng(0).integers(0, 256, (20, 31, 3), np.uint8))
    data.mask(2, square(size=(7, 10)))
    assert data.survey(resize_masks=True).blocking_message == ""


def test_an_image_turned_by_exif_whose_mask_is_not_is_told(data):
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = io.BytesIO()
    Image.fromarray(noise(9)).save(stored, "JPEG", exif=exif)
    image = data.replace_image(3, "3.jpg", stored.getvalue())
    survey = data.survey()
    assert only_problem(survey).lines == (
        f"{data.folder / 'masks/3.png'}: 30×20, its image {image} is 20×30 (turned by its EXIF orientation; the mask is not)",
    )
    data.mask(3, square(size=(WIDTH, HEIGHT)))
    turned = data.survey()
    assert (turned.blocking_message, turned.notices) == ("", ["1 of 6 images are turned as their EXIF orientation says"])


# Images unlike the others


@pytest.mark.parametrize(
    ("pixels", "reason"),
    [
        (noise(9, 3, np.uint16, 60_000), "16-bit, the others are 8-bit"),
        (noise(9, 1, np.uint16, 60_000), "16-bit, the others are 8-bit"),
    ],
)
def test_an_image_of_another_depth_is_told(data, pixels, reason):
    data.image(4, pixels)
    survey = data.survey()
    problem = only_problem(survey)
    assert (problem.kind, problem.title) == ("form", "images unlike the others")
    assert problem.lines == (f"{data.folder / 'images/4.png'}: {reason}",)
    assert problem.fix == "all images of a dataset have the same depth and channels: convert these or take them away"
    assert [pair.name for pair in survey.pairs] == ["0", "1", "2", "3", "5"]
    assert len(survey.images) == len(survey.masks) == 5


def test_an_image_of_other_channels_is_told(data):
    stored = io.BytesIO()
    np.save(stored, noise(9, 5))
    image = data.replace_image(4, "4.npy", stored.getvalue())
    assert only_problem(data.survey()).lines == (f"{image}: 5 channels, need 3",)


def test_the_number_of_channels_may_be_given(data):
    data.image(4, noise(9, 1))
    survey = data.survey(in_channels=1)
    assert survey.kind == Kind(1, "uint8")
    assert len(only_problem(survey).lines) == 5
    assert only_problem(survey).lines[0].endswith("0.png: 3 channels, need 1")


def test_statistics_for_another_number_of_channels_are_refused(data):
    with pytest.raises(ConfigError) as raised:
        data.survey(image_mean=[1, 2], image_std=[1, 2, 3, 4])
    assert str(raised.value) == (
        "image_mean: got 2 values; the images have 3 channels\nimage_std: got 4 values; the images have 3 channels"
    )


# Masks


def test_values_that_are_no_class_are_told_with_file_and_share(data):
    odd = square()
    odd[0, :6] = 7
    odd[1, :3] = 9
    data.mask(1, odd)
    problem = only_problem(data.survey(mask_values=[0, 255]))
    assert (problem.kind, problem.title) == ("values", "masks with values that are no class (classes have 0, 255)")
    assert problem.lines == (f"{data.folder / 'masks/1.png'}: 7 (1.0% of pixels), 9 (0.5% of pixels)",)
    assert problem.fix == "mend the masks, or name the values in mask_values or ignore_value"


def test_values_that_cannot_be_decided_are_a_question_with_the_files_that_hold_them(data):
    odd = square()
    odd[0, 0] = 7
    data.mask(1, odd)
    survey = data.survey()
    assert (survey.problems, survey.coding) == ([], None)
    (question,) = survey.questions
    assert question.startswith("mask_values: auto cannot tell what the values in the masks mean")
    assert f"Rarest: 7 in 1 of 6 masks, e.g. {data.folder / 'masks/1.png'}" in question
    assert survey.blocking_message == question


def test_one_group_is_a_question_too(data):
    survey = data.survey(group_pattern="images")
    assert survey.split is None
    assert survey.blocking_message == (
        "only 6 pairs in 1 group (or with identical images); need at least 2, one to train on and one to validate on"
    )


def test_the_table_shows_values_names_and_shares(data):
    """25 of 600 pixels of each mask; the upper rows of one are void."""
    void = square(1)
    void[15:] = 255
    for index in range(6):
        data.mask(index, void if index == 0 else square(1))
    config = load_config({"data_dir": str(data.folder), "num_classes": 3, "class_names": ["sky", "road", "cow"]})
    survey = data.survey(num_classes=3)
    counted = 6 * 600 - 150
    table = class_table(config, survey)
    assert [(values, name) for values, name, _ in table] == [("0", "sky"), ("1", "road"), ("2", "cow")]
    assert [share for _, _, share in table] == pytest.approx([1 - 150 / counted, 150 / counted, 0])
    assert ignored_share(survey) == pytest.approx(150 / 3600)
    assert absent_classes(config, survey) == ["cow"]
    assert describe_classes(config, survey) == (
        "0 → sky 95.7%, 1 → road 4.3%, 2 → cow 0.0% of pixels; 255 is ignored, 4.2% of all pixels "
        "(class ids; 255 beside them is taken as void)"
    )


def test_sizes_are_shown_by_how_often_they_occur(data):
    for index, width in enumerate((30, 31, 31, 32, 33, 33)):
        data.image(index, np.random.default_rng(index).integers(0, 256, (20, width, 3), np.uint8))
        data.mask(index, square(size=(20, width)))
    images = data.survey().images
    assert describe_sizes(images) == "31×20, 33×20, 30×20 and 1 more sizes"
    assert describe_sizes(images, 9) == "31×20, 33×20, 30×20, 32×20"


# What the user should know


def test_alpha_that_is_dropped_is_said(data):
    data.image(0, noise(0, 4))
    data.image(5, noise(5, 4))
    assert data.survey().notices == ["alpha is left out of 2 of 6 images"]


def test_grey_beside_colour_is_said(data):
    data.image(2, noise(2, 1))
    survey = data.survey()
    assert survey.notices == ["1 of 6 images are grey; each gets 3 equal channels"]
    assert survey.blocking_message == ""


def test_grey_images_alone_are_nothing_to_mention(data):
    for index in range(6):
        data.image(index, noise(index, 1))
    survey = data.survey()
    assert (survey.kind, survey.notices) == (Kind(1, "uint8"), [])


def test_flat_images_are_said(data):
    data.image(2, np.full((HEIGHT, WIDTH, 3), 77, np.uint8))
    assert data.survey().notices == [f"1 images are of one colour throughout: {data.folder / 'images/2.png'}"]


def test_masks_that_are_void_throughout_are_said(data):
    for index in range(6):
        data.mask(index, square(1))
    data.mask(3, np.full((HEIGHT, WIDTH), 255, np.uint8))
    partly = square(1)
    partly[15:] = 255
    data.mask(4, partly)  # the rest of it counts
    assert data.survey().notices == [f"1 masks are ignored throughout and teach nothing: {data.folder / 'masks/3.png'}"]


def test_identical_images_are_said_and_those_with_other_masks_once_more(data):
    data.image(1, noise(0))
    data.image(3, noise(2))
    data.mask(3, square()[::-1].copy())
    images = data.folder / "images"
    assert data.survey().notices == [
        "4 images are identical to another one; each lot stays on one side: "
        f"{images / '0.png'} = {images / '1.png'}, {images / '2.png'} = {images / '3.png'}",
        f"1 lots of identical images have masks that differ: {images / '2.png'} = {images / '3.png'}",
    ]


# A split that is given


def test_a_run_that_goes_on_keeps_its_folds_as_they_were(data):
    """The table of the run says what validates; num_folds said it when the run began."""
    pairs = tuple(
        Pair(f"{index}", data.folder / f"images/{index}.png", data.folder / f"masks/{index}.png", "val" if index < 2 else "train")
        for index in range(6)
    )
    config = load_config({"data_dir": str(data.folder), "checkpoint_dir": str(data.checkpoints), "num_folds": 3, "fold": 1})
    survey = build_dataset_report(config, Console(io.StringIO()), FoundPairs(pairs, "as the run began"))
    assert survey.blocking_message == ""
    assert [pair.name for pair in survey.split.val] == ["0", "1"]


def test_looking_leaves_the_data_as_they_are(data):
    def state():
        return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in data.folder.rglob("*")}

    before = state()
    data.survey()
    assert state() == before


def test_void_that_leaves_a_single_class_is_a_question(data):
    """Masks in {0, 255} and three classes: 255 beside dense ids is void, but here it is all that there is to learn."""
    (question,) = data.survey(num_classes=3).questions
    assert question.startswith(
        "mask_values: with 255 as void, no class but class 0 is left in any mask, and there is nothing to learn."
    )
    assert "Set num_classes: 1 if 255 is the foreground, or mask_values to the values of the 3 classes" in question
    assert data.survey(num_classes=3, ignore_value=255).questions == []  # said by the user: it is only warned of
    assert data.survey(num_classes=1).questions == []
