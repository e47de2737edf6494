"""The note about neighbours: its lines work when they are pasted."""

from __future__ import annotations

import pytest

from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import parse_yaml
from unet_trainer.datasets.group_pattern import add_groups
from unet_trainer.datasets.name_patterns import find_groupings, find_left_and_right
from unet_trainer.datasets.neighbour_notes import describe_neighbours, describe_neighbours_across
from unet_trainer.datasets.neighbours import Likeness, Neighbours
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.splits import split_pairs

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


def test_one_long_sequence_is_split_into_blocks(tmp_path):
    paths = [f"frame{number:04d}.png" for number in range(60)]
    note = describe_neighbours(sequence(paths), pairs_of(paths, tmp_path), tmp_path, 0.2, None)
    assert note.text.endswith("blocks of the sequence can validate, with a gap:\n  split: blocks")
    assert "(frame0030, frame0031, frame0032)" in note.text
    assert pasted(note.text)[1].split == "blocks"


def test_groups_too_large_to_validate_on_give_way_to_blocks(tmp_path):
    """Two videos: one of them would be half of the images."""
    paths = [path for path in VIDEOS if path[9] in "01"]
    note = describe_neighbours(sequence(paths), pairs_of(paths, tmp_path), tmp_path, 0.1, None)
    assert note.settings == {"split": "blocks"}


def test_fewer_groups_than_folds_give_way_to_blocks(tmp_path):
    assert describe_neighbours(sequence(VIDEOS), pairs_of(VIDEOS, tmp_path), tmp_path, 0.2, 8).settings == {"split": "blocks"}
    assert "group_pattern" in describe_neighbours(sequence(VIDEOS), pairs_of(VIDEOS, tmp_path), tmp_path, 0.2, 5).settings


@pytest.mark.parametrize("template", ["images/{}_{}.png", "Image_{}{}.jpg"])
def test_both_eyes_of_a_person_stay_together(tmp_path, template):
    paths = [template.format(number, side) for number in range(21, 41) for side in "LR"]
    pairs = pairs_of(paths, tmp_path)
    note = describe_neighbours(Neighbours((find_left_and_right(paths),), None, False), pairs, tmp_path, 0.2, None)
    assert note.text.startswith("images of one number are of the same subject by their names (")
    grouped = add_groups(pairs, pasted(note.text)[1].group_pattern, tmp_path)
    split = split_pairs(FoundPairs(grouped, ""), [()] * len(pairs), [""] * len(pairs), val_fraction=0.2, seed=42)
    assert not {pair.group for pair in split.train} & {pair.group for pair in split.val}
    assert len(split.val) == 8


def test_groups_that_cannot_be_split_are_not_mentioned_if_there_is_no_sequence(tmp_path):
    paths = [path for path in VIDEOS if path[9] in "01"]
    neighbours = sequence(paths)._replace(is_sequence=False)
    assert describe_neighbours(neighbours, pairs_of(paths, tmp_path), tmp_path, 0.05, None) is None


def test_a_split_that_is_given_is_only_described():
    assert describe_neighbours_across(Likeness(80, (0.95, 0.02))) == (
        "validation images are like their neighbours in train: the most similar training image is the one before or after in the "
        "numbering in 95% of cases (chance: 2%); val_iou shows how well the model knows these sequences, not new ones"
    )
