"""A report on a dataset: usable pairs, problems with their fixes, kind of images, split."""

from __future__ import annotations

import io
import json
import shutil

import cv2
import numpy as np
import pytest

from helpers.image_bytes import exif, npy_bytes, pil_bytes
from helpers.report_data import HEIGHT, WIDTH, Dataset, noise, only_problem, square
from unet_trainer.config.errors import ConfigError
from unet_trainer.config.load import load_config
from unet_trainer.datasets.build_report import build_dataset_report
from unet_trainer.datasets.class_statistics import class_ids
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.image_kind import ImageKind
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.problems import Question
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_spec import IMAGENET_MEAN
from unet_trainer.system.console import Console


@pytest.fixture
def data(tmp_path):
    return Dataset(tmp_path)


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
        "2 files that cannot be used:\n  Fix: repair these files, or remove them together with their partners\n"
        f"  {image}: the file is cut off\n  {mask}: the file is empty"
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


def test_ten_files_of_a_problem_are_named_and_the_others_counted(data):
    for index in range(6, 30):
        data.image(index, noise(index))
        data.mask(index, square())
        (data.folder / f"images/{index}.png").write_bytes(b"")
    assert data.report().blocking_message.endswith("\n  … and 14 more")


# Sizes


def test_a_mask_of_another_size_with_the_same_aspect_ratio_can_be_resized(data):
    data.mask(2, square(size=(HEIGHT // 2, WIDTH // 2)))
    report = data.report()
    problem = only_problem(report)
    assert (problem.kind, problem.title) == ("sizes", "1 mask of another size than its image")
    assert problem.lines == (f"{data.folder / 'masks/2.png'}: 15×10, its image {data.folder / 'images/2.png'} is 30×20",)
    assert problem.fix == "resize_masks: true resizes masks with the aspect ratio of their images"
    assert (problem.settings, len(report.pairs)) == ({"resize_masks": True}, 6)  # judged as if it were resized
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
    assert (rotated.blocking_message, rotated.notices) == ("", ["1 of 6 images is rotated by the EXIF orientation"])


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
    assert (problem.kind, problem.title) == ("kind", "1 image of another kind than the others")
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


def test_a_split_that_is_impossible_is_a_question(data):
    report = data.report(group_pattern="images")
    assert report.split is None
    assert report.blocking_message == (
        "only 6 pairs in 1 group (or with identical images); need at least 2, one to train on and one to validate on"
    )


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
