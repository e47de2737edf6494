"""Which images are like their neighbours: videos, slices and patients are found, unrelated images are not."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from helpers.shards import pairs_on_a_dead_remote
from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.datasets.neighbours import (
    Likeness,
    Neighbours,
    Reader,
    describe_neighbours,
    find_groupings,
    find_neighbours,
    find_neighbours_across,
)
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.splits import add_groups, split_pairs
from unet_trainer.images.file_bytes import DataError
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


def test_what_was_measured_is_read_from_the_cache(dataset, tmp_path, monkeypatch):
    pairs = dataset(video("frame", 20, 0))
    first = found(pairs, tmp_path, tmp_path / "cache")
    monkeypatch.setattr("unet_trainer.datasets.neighbours.forked_map", None)  # nothing is read again
    assert found(pairs, tmp_path, tmp_path / "cache") == first


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


def test_the_first_error_of_a_remote_shard_ends_it(tmp_path):
    """Each of them is tried again for half a minute: all together would take hours."""
    pairs, num_asked = pairs_on_a_dead_remote(tmp_path, [f"frame_{number:03d}" for number in range(40)])
    with pytest.raises(
        DataError, match=r"http://dead/x/dead.tar/.*: http://dead/x/dead.tar cannot be read \(connection refused; 2 tries\)"
    ):
        find_neighbours(pairs, Path(), BINARY, Reader())
    assert num_asked() == 2


# The note: its lines work when they are pasted

VIDEOS = [f"train/000{video}TP_{number:06d}.png" for video in range(5) for number in range(6690, 6990, 30)]


def pairs_of(paths, root):
    return [Pair(path.rpartition(".")[0], root / path, root / "m.png") for path in paths]


def sequence(paths, groupings=None):
    groupings = find_groupings(paths) if groupings is None else groupings
    return Neighbours(
        tuple(groupings), Likeness(len(paths), (0.79, 0.01), {g.pattern: (0.9, 0.2) for g in groupings}, 0.74, 0.31), True
    )


def pasted(text):
    """The settings in the lines of a note, read as a config."""
    lines = "\n".join(line.strip() for line in text.splitlines()[1:])
    return parse_yaml(lines), load_config(parse_yaml(lines))


def test_a_note_ends_in_a_pattern_that_splits_the_data_when_it_is_pasted(tmp_path):
    pairs = pairs_of(VIDEOS, tmp_path)
    note = describe_neighbours(sequence(VIDEOS), pairs, tmp_path, 0.2, None)
    assert note.text == (
        "images are like their neighbours in the numbering (0000TP_006690, 0000TP_006720, 0000TP_006750): the most similar image is a "
        "neighbour in 79% of cases (chance: 1%), and copying a neighbour's mask scores IoU 0.74 (another's 0.31). A random split puts "
        "them into train and val, and val_iou is too good; 5 groups of 10 images can stay together:\n"
        "  group_pattern: ([^/]+)_[^/_]+$"
    )
    given, config = pasted(note.text)
    assert given == note.settings
    grouped = add_groups(pairs, config.group_pattern, tmp_path)
    split = split_pairs(FoundPairs(grouped, ""), [()] * len(pairs), [""] * len(pairs), val_fraction=0.2, seed=42)
    assert (len(split.val), len({pair.group for pair in split.val})) == (10, 1)
