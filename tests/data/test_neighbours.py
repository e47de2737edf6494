"""Which images are like their neighbours: videos, slices and patients are found, unrelated images are not."""

import io
import re
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.data.leakage import find_neighbours, find_neighbours_across
from unet_trainer.data.pairs import FoundPairs, Pair
from unet_trainer.data.scan import scan_pairs
from unet_trainer.data.splits import add_groups, build_split
from unet_trainer.system.console import Console

SIZE = 32


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
    """A window that moves over a large scene, two pixels a frame, seen by a camera with a little noise."""
    rng = np.random.default_rng(seed)
    scene = smooth_noise(rng, SIZE + 2 * count, 3 + count // 2) // 2
    frames = [scene[:SIZE, 2 * index : 2 * index + SIZE] * 2 for index in range(count)]
    return [
        (f"{name}{first + step * index:04d}", frame + rng.integers(0, 2, frame.shape, np.uint8))
        for index, frame in enumerate(frames)
    ]


def tiles(name, seed, stride):
    """Of a scene of 96 × 96."""
    scene, starts = smooth_noise(np.random.default_rng(seed), 96, 12), range(0, 96 - SIZE + 1, stride)
    return [(f"{name}_{top}_{left}", scene[top : top + SIZE, left : left + SIZE]) for top in starts for left in starts]


def unrelated(names, seed=0):
    rng = np.random.default_rng(seed)
    return [(name, smooth_noise(rng)) for name in names]


def config_of(tmp_path):
    return load_config({"data_dir": str(tmp_path), "checkpoint_dir": str(tmp_path / "checkpoints")})


def facts_of(pairs):
    facts = [pair.image for pair in scan_pairs(pairs, Console(io.StringIO()))]
    return [SimpleNamespace(thumbnail="") if isinstance(image, str) else image for image in facts]


def said(finding):
    return str(finding) if finding else ""


def found(pairs, tmp_path):
    """The note, and the settings that it gives."""
    finding = find_neighbours(config_of(tmp_path), pairs, facts_of(pairs), Console(io.StringIO()))
    return said(finding), finding.values[-1] if finding else {}


def found_across(train, val):
    return said(find_neighbours_across(train, val, facts_of([*train, *val]), Console(io.StringIO())))


def test_a_video_is_a_sequence_of_similar_images(dataset, tmp_path):
    pairs = dataset(video("frame", 40, 0))
    text, settings = found(pairs, tmp_path)
    assert settings == {"split": "blocks"}
    assert int(re.search(r"\(frame0020, .*\): .* in (\d+)% of cases \(chance: 10%\)", text)[1]) > 90
    assert text.endswith("blocks of the sequence can validate, with a gap:\n  split: blocks")


def test_several_videos_are_groups_by_a_pattern_that_splits_the_data_when_it_is_pasted(dataset, tmp_path):
    pairs = dataset([frame for index in range(5) for frame in video(f"v{index}_", 10, index, first=100, step=30)])
    note, settings = found(pairs, tmp_path)
    why = (
        r"images are like their neighbours in the numbering \(v0_0100, v0_0130, v0_0160\): the most similar image is a "
    )
    effect = (
        "A random split puts them into train and val, and val_iou is too good; 5 groups of 10 images can stay together:"
    )
    assert re.match(rf"{why}neighbour in .* {effect}\n", note)
    assert parse_yaml("\n".join(line.strip() for line in note.splitlines()[1:])) == settings
    grouped = add_groups(pairs, load_config(settings).group_pattern, tmp_path)
    split = build_split(config_of(tmp_path), FoundPairs(grouped, ""), [()] * len(pairs), [""] * len(pairs))
    assert (len(split.val), len({pair.group for pair in split.val})) == (10, 1)


@pytest.mark.parametrize(("stride", "is_told"), [(16, True), (24, True), (32, False)])
def test_tiles_that_overlap_are_groups_of_one_image_each(stride, is_told, dataset, tmp_path):
    """They need not look alike: a quarter of the pixels is shared at a stride of 24, none at 32."""
    pairs = dataset([tile for index in range(8) for tile in tiles(f"slide{index}", index, stride)])
    note, settings = found(pairs, tmp_path)
    assert ("images are tiles that overlap (slide0_0_0, " in note) == is_told
    if is_told:
        assert len({pair.group for pair in add_groups(pairs, settings["group_pattern"], tmp_path)}) == 8
    across = found_across(pairs[::2], pairs[1::2])
    assert ("100% of the validation images are tiles that share pixels with" in across) == is_told


@pytest.mark.parametrize("width", [0, 6], ids=["padded above and below", "between bars, with a margin"])
def test_padding_is_no_overlap(width, dataset, tmp_path):
    """Unrelated images with the same brown around them, as letterboxes and pages of a program have it."""
    frames = [
        (name, cv2.copyMakeBorder(image, 4, 8, width, width, cv2.BORDER_CONSTANT, value=(60, 90, 120)))
        for name, image in unrelated([f"photo{number:03d}" for number in range(40)])
    ]
    for _, image in frames if width else ():
        image[1:3] = (200, 30, 30)
    pairs = dataset(frames)
    assert found(pairs, tmp_path) == ("", {})
    assert found_across(pairs[::2], pairs[1::2]) == ""


def test_images_of_one_patient_that_are_alike_are_groups(dataset, tmp_path):
    """Numbers do not count: a, b and c are no numbers."""
    rng, frames = np.random.default_rng(0), []
    for patient in range(12):
        base = smooth_noise(rng)
        frames += [
            (f"p{patient}_{view}", (base * 0.9 + smooth_noise(rng) * 0.1).astype(np.uint8))
            for view in ("front", "side", "top")
        ]
    note, _ = found(dataset(frames), tmp_path)
    assert note.startswith("images are like their neighbours by name (p0_front, p0_side, p0_top)")
    assert "12 groups of 3 images" in note


@pytest.mark.parametrize("names", [
    [f"horse{number:03d}" for number in range(60)],
    [f"{kind}_{number}" for kind in ("cat", "dog") for number in range(20)],
    [f"{number * 2654435761 % 2**32:08x}" for number in range(40)],
], ids=["horses", "kinds", "hashes"])  # fmt: skip
def test_unrelated_images_are_no_neighbours_whatever_their_names(dataset, tmp_path, names):
    assert found(dataset(unrelated(names)), tmp_path) == ("", {})


def nowhere(folder, *stems):
    """Pairs whose files do not exist: nothing is read of them."""
    return [Pair(stem, folder / f"{stem}.jpg", folder / "m.png") for stem in stems]


def test_both_eyes_of_a_person_are_known_by_name_alone(tmp_path):
    note, _ = found(nowhere(tmp_path, *(f"{number}_{side}" for number in range(21, 31) for side in "LR")), tmp_path)
    assert note.startswith("images of one number are of the same subject by their names (21_L, 21_R)")
    assert "10 groups of 2 images" in note


def test_augmented_versions_of_one_image_are_known_by_name_alone(tmp_path):
    stems = [f"{name}_jpg.rf.{version:032x}" for name in "abcdef" for version in range(2)]
    pairs = nowhere(tmp_path, *stems)
    note, settings = found(pairs, tmp_path)
    assert note.startswith(f"images of one original are of the same subject by their names ({stems[0]}, {stems[1]})")
    groups = {pair.group for pair in add_groups(pairs, settings["group_pattern"], tmp_path)}
    assert groups == {f"{name}_jpg" for name in "abcdef"}
    note = "1 image with versions in train and in val by their names: c_jpg; val_iou is too good"
    assert found_across(pairs[:5], pairs[5:]) == note
    assert found_across(pairs[:6], pairs[6:]) == ""


def test_validation_frames_between_training_frames_are_found(dataset, tmp_path):
    frames = video("frame", 60, 0)
    val = dataset([frames[index] for index in range(20, 40, 2)], "val", "val")
    train = dataset([frame for index, frame in enumerate(frames) if index not in range(20, 40, 2)], "train", "train")
    note = found_across(train, val)
    assert int(re.search(r"numbering in (\d+)% of cases", note)[1]) > 90


def test_validation_images_of_other_sequences_are_no_neighbours(dataset, tmp_path):
    train = dataset(video("a", 30, 0), "train", "train")
    assert found_across(train, dataset(video("b", 10, 1), "val", "val")) == ""
