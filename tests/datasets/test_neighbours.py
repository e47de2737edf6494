"""Which images are like their neighbours: videos, slices and patients are found, unrelated images are not."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from unet_trainer.datasets.neighbours import Likeness, Reader, find_neighbours, find_neighbours_across
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.mask_coding import MaskCoding

SIZE = 32
BINARY = MaskCoding((0, 255), reason="0 and 255")


def smooth_noise(rng, size=SIZE, cells=6):
    noise = rng.uniform(0, 255, (cells, cells, 3)).astype(np.float32)
    return cv2.resize(noise, (size, size), interpolation=cv2.INTER_CUBIC).clip(0, 255).astype(np.uint8)


@pytest.fixture
def dataset(tmp_path):
    """Writes images and their masks, `frames` being (name, image): the mask is what is bright."""

    def write(frames, part=None, folder="images"):
        pairs = []
        for name, image in frames:
            paths = [tmp_path / place / f"{name}.png" for place in (folder, f"{folder}_masks")]
            mask = (image[:, :, 0] > 128).astype(np.uint8) * 255
            for path, pixels in zip(paths, (image, mask), strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                assert cv2.imwrite(str(path), pixels)
            pairs.append(Pair(name, *paths, part))
        return pairs

    return write


def video(name, count, seed, first=0, step=1):
    """A window that moves over a large scene, two pixels a frame."""
    scene = smooth_noise(np.random.default_rng(seed), SIZE + 2 * count, 3 + count // 2)
    return [(f"{name}{first + step * index:04d}", scene[:SIZE, 2 * index : 2 * index + SIZE]) for index in range(count)]


def unrelated(names, seed=0):
    rng = np.random.default_rng(seed)
    return [(name, smooth_noise(rng)) for name in names]


def found(pairs, tmp_path, cache=None):
    return find_neighbours(pairs, tmp_path, BINARY, Reader(cache_folder=cache))


def test_a_video_is_a_sequence_of_similar_images(dataset, tmp_path):
    neighbours = found(dataset(video("frame", 40, 0)), tmp_path)
    assert (neighbours.is_sequence, neighbours.groupings) == (True, ())
    share, chance = neighbours.likeness.by_number
    assert share > 0.9
    assert chance == pytest.approx((36 * 4 + 2 * 3 + 2 * 2) / (40 * 39))  # two on each side, fewer at the ends
    assert neighbours.likeness.neighbour_iou > neighbours.likeness.other_iou + 0.2


def test_several_videos_are_groups(dataset, tmp_path):
    frames = [frame for index in range(4) for frame in video(f"v{index}_", 10, index, first=100, step=30)]
    neighbours = found(dataset(frames), tmp_path)
    assert neighbours.is_sequence
    assert set(neighbours.groupings[0].groups) == {"v0", "v1", "v2", "v3"}


def test_images_of_one_patient_that_are_alike_are_groups(dataset, tmp_path):
    """Names do not count: a, b and c are no numbers."""
    rng, frames = np.random.default_rng(0), []
    for patient in range(12):
        base = smooth_noise(rng)
        frames += [
            (f"p{patient}_{view}", (base * 0.9 + smooth_noise(rng) * 0.1).astype(np.uint8)) for view in ("front", "side", "top")
        ]
    neighbours = found(dataset(frames), tmp_path)
    assert not neighbours.is_sequence
    assert len(set(neighbours.groupings[0].groups)) == 12


@pytest.mark.parametrize(
    "names",
    [
        [f"horse{number:03d}" for number in range(60)],
        [f"{number}_training" for number in range(21, 41)],
        [f"{kind}_{number}" for kind in ("cat", "dog") for number in range(20)],
        [f"p{patient}_{view}" for patient in range(12) for view in ("front", "side", "top")],
        [f"{number * 2654435761 % 2**32:08x}" for number in range(40)],
    ],
    ids=["horses", "DRIVE", "kinds", "patients", "hashes"],
)
def test_unrelated_images_are_no_neighbours_whatever_their_names(dataset, tmp_path, names):
    assert found(dataset(unrelated(names)), tmp_path) is None


def test_two_kinds_of_light_are_no_groups(dataset, tmp_path):
    """By day and by night: alike in each group, and still different images."""
    frames = [
        (name, image // (4 if name.startswith("night") else 1))
        for name, image in unrelated([f"{kind}_{i}" for kind in ("day", "night") for i in range(20)])
    ]
    assert found(dataset(frames), tmp_path) is None


def test_kinds_of_objects_that_look_alike_are_no_groups(dataset, tmp_path):
    """Leaves of a species on paper of one colour, twenty each: whoever splits by species validates on unknown ones."""
    rng, frames = np.random.default_rng(0), []
    for kind in range(6):
        paper = rng.uniform(0, 255, 3)
        frames += [
            (f"{chr(97 + kind)}_{chr(97 + number)}", (smooth_noise(rng) * 0.2 + paper * 0.8).astype(np.uint8))
            for number in range(20)
        ]
    assert found(dataset(frames), tmp_path) is None


def test_both_eyes_of_a_person_are_known_by_name_alone(tmp_path):
    """No file is read: there is none."""
    pairs = [Pair(f"{n}_{side}", tmp_path / f"{n}_{side}.png", tmp_path / "m.png") for n in range(21, 31) for side in "LR"]
    neighbours = found(pairs, tmp_path)
    assert (neighbours.likeness, len(set(neighbours.groupings[0].groups))) == (None, 10)


def test_few_images_and_names_without_numbers_are_not_measured(tmp_path):
    pairs = [Pair(f"f{index}", tmp_path / f"f{index}.png", tmp_path / "m.png") for index in range(15)]
    assert found(pairs, tmp_path) is None
    letters = [Pair(name, tmp_path / f"{name}.png", tmp_path / "m.png") for name in "abcdefghijklmnopqrst"]
    assert found(letters, tmp_path) is None


def test_of_many_images_some_hundred_are_read(tmp_path):
    totals = []
    many = [Pair(f"f{index}", tmp_path / f"f{index}.png", tmp_path / "m.png") for index in range(3000)]

    def show_bar(total):
        totals.append(total)
        raise InterruptedError  # enough is known

    with pytest.raises(InterruptedError):
        find_neighbours(many, tmp_path, None, Reader(show_bar=show_bar))
    assert totals == [240]


def test_what_was_measured_is_read_from_the_cache(dataset, tmp_path, monkeypatch):
    pairs = dataset(video("frame", 20, 0))
    first = found(pairs, tmp_path, tmp_path / "cache")
    monkeypatch.setattr("unet_trainer.datasets.neighbours.forked_map", None)  # nothing is read again
    assert found(pairs, tmp_path, tmp_path / "cache") == first


def test_a_file_that_cannot_be_read_any_more_leaves_it_open(dataset, tmp_path):
    pairs = dataset(video("frame", 20, 0))
    pairs[3].image.write_bytes(b"")
    assert found(pairs, tmp_path) is None


# A split that is given


def test_validation_frames_between_training_frames_are_found(dataset):
    frames = video("frame", 60, 0)
    val = dataset([frames[index] for index in range(20, 40, 2)], "val", "val")
    train = dataset([frame for index, frame in enumerate(frames) if index not in range(20, 40, 2)], "train", "train")
    likeness = find_neighbours_across(train, val, Reader())
    assert likeness.by_number[0] > 0.9


def test_validation_images_of_other_sequences_are_no_neighbours(dataset):
    train = dataset(video("a", 30, 0), "train", "train")
    assert find_neighbours_across(train, dataset(video("b", 10, 1), "val", "val"), Reader()) is None


def test_unrelated_validation_images_of_one_numbering_are_no_neighbours(dataset):
    frames = unrelated([f"x{number}" for number in range(60)])
    train, val = dataset(frames[::2], "train", "train"), dataset(frames[1::2], "val", "val")
    assert find_neighbours_across(train, val, Reader()) is None


@pytest.mark.parametrize(
    ("share", "chance", "num_images", "expected"),
    [(0.79, 0.01, 367, True), (0.03, 0.01, 328, False), (0.45, 0.2, 20, False), (0.72, 0.5, 300, True), (0.6, 0.5, 300, False)],
)
def test_alike_is_far_more_often_than_by_chance(share, chance, num_images, expected):
    assert Likeness(num_images, (share, chance)).is_alike((share, chance)) == expected
