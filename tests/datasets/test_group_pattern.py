"""Groups by a pattern of the user's: in the path inside data_dir, and never for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from unet_trainer.datasets import group_pattern
from unet_trainer.datasets.group_pattern import add_groups
from unet_trainer.datasets.pairs import Pair
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system import forked_map

DATA = Path("data")


def pairs(*names):
    return [Pair(name, DATA / "images" / f"{name}.png", DATA / "masks" / f"{name}.png") for name in names]


@pytest.mark.parametrize("chunk", [1, 2, 10_000])
def test_groups_keep_the_order_of_the_pairs(chunk, monkeypatch):
    monkeypatch.setattr(group_pattern, "CHUNK", chunk)
    found = add_groups(pairs("p1_a", "p2_a", "p1_b"), r"images/(p\d+)_", DATA)
    assert [pair.group for pair in found] == ["p1", "p2", "p1"]
    assert [pair.name for pair in found] == ["p1_a", "p2_a", "p1_b"]


@pytest.mark.skipif(not forked_map.CAN_FORK, reason="needs processes that can be killed")
def test_a_pattern_that_backtracks_for_ever_is_told_with_the_name_that_it_hangs_at():
    with pytest.raises(DataError) as caught:
        add_groups(pairs("a1", "a" * 60), r"^images/((a+)+)+\d$|\d\.", DATA, seconds=1)
    assert str(caught.value).startswith(
        f"group_pattern: '^images/((a+)+)+\\\\d$|\\\\d\\\\.' has not decided about images/{'a' * 60}.png after 1 s; a repeat inside"
    )


def test_what_matches_nothing_is_named():
    with pytest.raises(
        DataError, match=r"^group_pattern: 'q' matches nothing in 2 of 2 paths, such as images/a\.png, images/b\.png$"
    ):
        add_groups(pairs("a", "b"), "q", DATA)
