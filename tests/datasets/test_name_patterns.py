"""Sequences and groups in the names of real datasets."""

from __future__ import annotations

import pytest

from unet_trainer.datasets.name_patterns import find_groupings, find_left_and_right, groups_by, in_order, places_of, share_in_runs

CAMVID = [f"train/0001TP_{number:06d}.png" for number in range(6690, 6990, 30)]
CAMVID += [f"train/0006R0_f{number:05d}.png" for number in range(930, 1230, 30)]
SLICES = [f"images/patient{patient:02d}_slice{number:03d}.png" for patient in range(4) for number in range(5)]
EYES = [f"images/{number}_{side}.png" for number in range(21, 31) for side in "LR"]
CHASE = [f"Image_{number:02d}{side}.jpg" for number in range(1, 9) for side in "LR"]
DRIVE = [f"{number}_training.tif" for number in range(21, 41)]
HORSES = [f"horse{number:03d}.jpg" for number in range(1, 21)]
SEQUENCES = [f"seq{name}/images/{number}.png" for name in "ab" for number in range(8, 12)]


def ordered(names):
    return [names[index] for index in in_order(places_of(names))]


def partition(pattern, paths):
    groups = groups_by(pattern, paths)
    return [[path for path, group in zip(paths, groups, strict=True) if group == name] for name in dict.fromkeys(groups)]


# Sequences


def test_names_are_in_the_order_of_their_numbers():
    assert ordered(["f10.png", "f9.png", "f100.png"]) == ["f9.png", "f10.png", "f100.png"]
    assert ordered(list(reversed(SEQUENCES))) == SEQUENCES
    assert ordered(["p10/a1.png", "p2/a2.png", "p2/a1.png"]) == ["p2/a1.png", "p2/a2.png", "p10/a1.png"]


def test_a_sequence_is_what_differs_in_one_number_only():
    places = places_of(CAMVID)
    assert [place.number for place in places[:3]] == [6690, 6720, 6750]
    assert len({place.sequence for place in places}) == 2
    assert len({place.sequence for place in places_of(SLICES)}) == 4
    assert len({place.sequence for place in places_of(SEQUENCES)}) == 2


def test_the_number_that_counts_may_stand_before_another_one():
    names = [f"frame{number:03d}_cam1.png" for number in range(6)] + [f"frame{number:03d}_cam2.png" for number in range(6)]
    places = places_of(names)
    assert [place.number for place in places[:4]] == [0, 1, 2, 3]
    assert len({place.sequence for place in places}) == 2


@pytest.mark.parametrize(
    ("names", "share"), [(HORSES, 1.0), (["a.png", "b.png"], 0.0), (["a1.png", "a2.png", "a3.png", "b.png"], 0.75)]
)
def test_the_share_of_names_in_sequences(names, share):
    assert share_in_runs(places_of(names)) == share


# Groups


@pytest.mark.parametrize(
    ("paths", "num_groups"),
    [(CAMVID, 2), (SLICES, 4), (EYES, 10), (CHASE, 8), (SEQUENCES, 2)],
    ids=["CamVid", "slices", "eyes", "CHASE", "seq"],
)
def test_repeated_beginnings_give_a_pattern(paths, num_groups):
    assert num_groups in [len(set(grouping.groups)) for grouping in find_groupings(paths)]


@pytest.mark.parametrize("paths", [DRIVE, HORSES, ["a.png", "b.png"]], ids=["DRIVE", "horses", "letters"])
def test_names_that_share_nothing_or_everything_give_no_pattern(paths):
    assert find_groupings(paths) == []


def test_each_way_of_grouping_is_given_once_by_a_pattern_that_gives_it():
    groupings = find_groupings(SLICES)
    parts = [tuple(map(tuple, partition(grouping.pattern, SLICES))) for grouping in groupings]
    assert len(set(parts)) == len(parts)
    assert all(groups_by(grouping.pattern, SLICES) == grouping.groups for grouping in groupings)


def test_folders_are_groups():
    (grouping,) = [found for found in find_groupings(SEQUENCES) if set(found.groups) == {"seqa", "seqb"}]
    assert grouping.pattern == "^([^/]+)/"
    deep = [f"left/train/{city}/x_{number}.png" for city in ("aachen", "bochum") for number in range(5)]
    assert {"aachen", "bochum"} in [set(grouping.groups) for grouping in find_groupings(deep)]


@pytest.mark.parametrize(("paths", "first"), [(EYES, "21"), (CHASE, "Image_01")], ids=["21_L", "Image_01L"])
def test_left_and_right_are_known_by_their_names(paths, first):
    grouping = find_left_and_right(paths)
    assert grouping.groups[:2] == [first, first]
    assert len(set(grouping.groups)) == len(paths) // 2
    assert groups_by(grouping.pattern, paths) == grouping.groups


@pytest.mark.parametrize("paths", [DRIVE, HORSES, SLICES, [f"{number}_L.png" for number in range(20)], ["1_L.png", "1_R.png"]])
def test_other_names_are_no_left_and_right(paths):
    assert find_left_and_right(paths) is None
