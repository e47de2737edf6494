"""Copies and photographs of one object: they are found, stay together in a random split, and others are no copies."""

import io
import re

import cv2
import numpy as np
import pytest

from unet_trainer.config.load import load_config
from unet_trainer.data.dataset_report import build_dataset_report
from unet_trainer.data.file_facts import thumbnail_of
from unet_trainer.data.leakage import build_views, find_near_duplicates, find_series
from unet_trainer.system.console import Console

NUM_IMAGES = 24


def smooth_noise(rng, cells=6, size=64):
    noise = rng.uniform(20, 220, (cells, cells, 3)).astype(np.float32)
    return cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC).clip(0, 255).astype(np.uint8)


def nuclei(rng, count=6, size=256):
    """Small bright discs on black, as under a microscope."""
    image = np.full((size, size), 6, np.uint8)
    for _ in range(count):
        centre, radius, value = rng.integers(0, size, 2).tolist(), int(rng.integers(5, 12)), int(rng.integers(60, 220))
        cv2.circle(image, centre, radius, value, -1)
    return cv2.cvtColor(cv2.GaussianBlur(image, (0, 0), 1), cv2.COLOR_GRAY2BGR)


def as_jpeg(image, quality=75):
    return cv2.imdecode(cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], cv2.IMREAD_COLOR)


def pairs_in(images):
    thumbnails = [thumbnail_of(image if image.ndim == 3 else image[:, :, None]) for image in images]
    return find_near_duplicates(build_views(thumbnails))


@pytest.fixture
def dataset(tmp_path):
    """Writes images by name and a mask for each: a square, or the one of the same name."""

    def write(images, masks=None, part="."):
        for name, image in images.items():
            mask = np.zeros(image.shape[:2], np.uint8)
            mask[5:20, 5:25] = 255
            for folder, pixels in (("images", image), ("masks", (masks or {}).get(name, mask))):
                path = tmp_path / "data" / part / folder / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                assert cv2.imwrite(str(path), np.ascontiguousarray(pixels))

    return write


@pytest.fixture
def check(tmp_path):
    def check(**settings):
        places = {"data_dir": str(tmp_path / "data"), "checkpoint_dir": str(tmp_path / "checkpoints")}
        return build_dataset_report(load_config({**places, **settings}), Console(io.StringIO()))

    return check


COPIES = {
    "JPEG of quality 50": lambda image: as_jpeg(image, 50),
    "flipped, as JPEG": lambda image: as_jpeg(image[:, ::-1].copy()),
    "upside down": lambda image: image[::-1],
    "turned by a quarter": lambda image: np.rot90(image),
    "turned and flipped": lambda image: np.rot90(image[::-1], 3),
    "80 % of the size": lambda image: cv2.resize(image, None, fx=0.8, fy=0.8),
    "grey": lambda image: cv2.cvtColor(image, cv2.COLOR_RGB2GRAY),
    "brighter": lambda image: np.clip(image * 1.05 + 10, 0, 255).astype(np.uint8),
}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("make_image", [smooth_noise, nuclei])
def test_each_copy_is_found_and_no_other(make_copy, make_image):
    rng = np.random.default_rng(0)
    images = [make_image(rng) for _ in range(NUM_IMAGES)]
    assert pairs_in([*images, *map(make_copy, images)]) == [(index, NUM_IMAGES + index) for index in range(NUM_IMAGES)]


def test_copies_stay_on_one_side_of_a_random_split(dataset, check):
    """Half of them re-encoded, half of them flipped."""
    rng = np.random.default_rng(0)
    images = {f"a{number:02d}": smooth_noise(rng) for number in range(NUM_IMAGES)}
    dataset(images)
    copies = {f"b{name[1:]}": as_jpeg(image) if int(name[1:]) % 2 else image[:, ::-1] for name, image in images.items()}
    dataset(copies)
    report = check()
    val = {pair.name for pair in report.split.val}
    assert {name[1:] for name in val if name[0] == "a"} == {name[1:] for name in val if name[0] == "b"}
    assert len(val) == 10
    (note,) = report.notices
    kinds = r"\(re-encoded, resized, flipped or turned\)"
    what = f"48 images are nearly the same as another one {kinds}; they stay on one side: "
    assert re.match(rf"{what}\S+a00\.png ≈ \S+b00\.png, \S+a01\.png ≈ \S+b01\.png, .* and 21 more$", note)


def test_copies_in_given_folders_are_a_notice_and_stay_where_they_are(dataset, check):
    rng = np.random.default_rng(0)
    images = {f"a{number:02d}": smooth_noise(rng) for number in range(12)}
    dataset(images, part="train")
    val = {f"v{number}": smooth_noise(rng) for number in range(3)}
    dataset({**val, "copy": as_jpeg(images["a07"][::-1].copy())}, part="val")
    report = check()
    assert (len(report.split.train), len(report.split.val)) == (12, 4)
    (note,) = report.notices
    assert note.startswith("1 of 4 validation images nearly the same as training images (re-encoded, resized, flipped ")
    assert re.search(r"val/images/copy\.png ≈ \S+train/images/a07\.png; val_iou is too good$", note)


def test_a_scene_that_stands_is_split_although_all_of_it_is_nearly_the_same(dataset, check):
    """Groups of 9, 1, 1 and 1 images cannot give a split of 9 and 3."""
    rng = np.random.default_rng(0)
    images, scene = {str(number): smooth_noise(rng) for number in range(3)}, smooth_noise(rng)
    dataset(images | {f"s{letter}": as_jpeg(scene, 60 + 4 * place) for place, letter in enumerate("abcdefghi")})
    report = check(val_fraction=0.25)
    assert len(report.split.val) == 3
    assert any(" nearly the same as training images" in note for note in report.notices)


def dull(kind, rng):
    rows, columns = np.mgrid[:96, :96] / 96
    if kind == "gradient":
        slopes = rng.normal(size=2)
        return (110 + 60 * (slopes[0] * (rows - 0.5) + slopes[1] * (columns - 0.5))).clip(0, 255).astype(np.uint8)
    if kind == "empty":
        return (rng.integers(5, 60) + rng.integers(0, 4, rows.shape)).astype(np.uint8)
    if kind == "one colour":
        return np.full(rows.shape, rng.integers(256), np.uint8)
    if kind == "padded":
        return cv2.copyMakeBorder(smooth_noise(rng, size=48) // 4, 24, 24, 0, 48, cv2.BORDER_CONSTANT, value=(230,) * 3)
    if kind == "disc":  # an eye's background: a bright disc, nothing in it
        return cv2.circle(rng.integers(0, 4, rows.shape, np.uint8), (48, 48), 40, int(rng.integers(80, 220)), -1)
    return nuclei(rng, count=int(kind[0]))


@pytest.mark.parametrize(
    "kind", ["gradient", "empty", "one colour", "padded", "disc", "1 nucleus", "3 nuclei", "8 nuclei"]
)
def test_dull_images_are_no_copies_of_each_other(kind):
    rng = np.random.default_rng(0)
    assert pairs_in([dull(kind, rng) for _ in range(120)]) == []


def test_of_many_images_every_copy_is_found():
    """Images are compared in cells of a hash: copies must not fall between them."""
    rng = np.random.default_rng(0)
    images = [smooth_noise(rng) for _ in range(1200)]
    copies = [as_jpeg(np.rot90(image, index % 4), 90) for index, image in enumerate(images[:300])]
    assert pairs_in([*images, *copies]) == [(index, 1200 + index) for index in range(300)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float64])
def test_depth_and_channels_do_not_matter(dtype):
    image = smooth_noise(np.random.default_rng(0))[:, :, :1]
    assert thumbnail_of(image.astype(dtype) * 3 + 1000) == thumbnail_of(image)
    assert thumbnail_of(np.dstack([image] * 5)) == thumbnail_of(image)
    assert thumbnail_of(np.full((9, 9, 1), np.nan)) == thumbnail_of(np.full((1, 1, 1), 7, dtype)) == ""


def photographs(num_objects=12, num_each=5, seed=0):
    """Of each object in turn, at other exposures and a little moved: names with exposure and number, images, masks."""
    rng, images, masks, number = np.random.default_rng(seed), {}, {}, 0
    for _ in range(num_objects):
        scene, centre = smooth_noise(rng, size=80), rng.integers(20, 44, 2)
        number += int(rng.integers(900, 6000))
        for exposure in range(num_each):
            number += int(rng.integers(10, 40))
            top, left = rng.integers(7, 9, 2)
            image = scene[top : top + 64, left : left + 64] * (0.6 + 0.08 * exposure) + rng.normal(0, 4, (64, 64, 3))
            name = f"exp{exposure}_num_{number}"
            images[name] = image.clip(0, 255).astype(np.uint8)
            masks[name] = np.zeros((64, 64), np.uint8)
            cv2.circle(masks[name], (centre - (top, left)).tolist(), 6, 255, -1)
    return images, masks


def test_photographs_of_one_object_under_near_numbers_are_groups(dataset, check):
    images, masks = photographs()
    dataset(images, masks)
    report, names = check(), list(images)
    members = {}
    for pair in report.pairs:
        members.setdefault(pair.group, set()).add(pair.name)
    assert sorted(map(sorted, members.values())) == sorted(
        sorted(names[start : start + 5]) for start in range(0, 60, 5)
    )
    assert {pair.group for pair in report.split.train}.isdisjoint(pair.group for pair in report.split.val)
    assert "12 groups kept together" in report.split.rule
    (note,) = (note for note in report.notices if "near numbers" in note)
    measured = r"(\d+)% of those up to (\d+) apart are alike, (\d+)% of others"
    effect = "12 groups stay on one side, unless group_pattern or split_file sets others"
    found = re.fullmatch(rf"images with near numbers are of one object \(.*\): {measured}; {effect}", note)
    near, distance, far = map(int, found.groups())
    assert near > 90 > 40 > distance
    assert far < 10
    report = check(group_pattern=r"exp(\d)")  # the user's groups count
    assert {pair.group for pair in report.pairs} == set("01234")
    assert not any("near numbers" in note for note in report.notices)


def test_photographs_of_one_object_in_given_folders_are_a_notice(dataset, check):
    images, masks = photographs()
    names = list(images)
    for part, chosen in (("train", names[:48] + names[51:]), ("val", names[48:51])):
        dataset({name: images[name] for name in chosen}, masks, part)
    report = check()
    assert (len(report.split.train), len(report.split.val)) == (57, 3)
    (note,) = (note for note in report.notices if "near numbers" in note)
    assert note.endswith("; 3 of 3 validation images have such a one in train, and val_iou is too good")
    assert not any(pair.group for pair in report.pairs)


def test_alike_masks_alone_make_a_series():
    images, masks = photographs()
    views = [build_views([thumbnail_of(mask[:, :, None]) for mask in masks.values()], are_masks=True)]
    assert len(set(find_series(list(images), views).groups)) == 12
    rng = np.random.default_rng(1)
    noise = [build_views([thumbnail_of(smooth_noise(rng)) for _ in images])]
    assert find_series(list(images), noise) is None


@pytest.mark.parametrize("names", [
    [f"horse{number:03d}" for number in range(60)],
    [f"exp{number % 6}_num_{number // 6 * 5000 + number % 6 * 20}" for number in range(60)],
    [f"{number * 2654435761 % 2**32:08x}" for number in range(60)],
    ["same"] * 60,
    [],
], ids=["counted", "numbered like series", "hashes", "equal", "none"])  # fmt: skip
def test_unrelated_images_are_no_series_whatever_their_names(names):
    rng = np.random.default_rng(0)
    views = build_views([thumbnail_of(smooth_noise(rng)) for _ in names])
    assert find_series(names, [views]) is None
    assert find_near_duplicates(views) == []
