"""Pairs: how they are named, and their groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from unet_trainer.config.load import load_config
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.group_pattern import add_groups
from unet_trainer.datasets.pairs import FoundPairs, Pair, path_in
from unet_trainer.images.file_bytes import DataError


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found_in(data_dir, **settings):
    return find_dataset(load_config({"data_dir": str(data_dir), **settings}))


def error_message(call, *arguments, **options):
    with pytest.raises(DataError) as raised:
        call(*arguments, **options)
    return str(raised.value)


def test_messages_name_what_the_user_knows():
    plain = Pair("a", Path("images/a.png"), Path("masks/a.png"))
    assert (plain.shown_image, plain.shown_mask) == ("images/a.png", "masks/a.png")
    made = Pair("s/3", Path("/c/s/3.png"), Path("/c/m/3.png"), image_origin="s.tif, page 3", mask_origin="labels.tif, page 3")
    assert (made.shown_image, made.shown_mask) == ("s.tif, page 3", "labels.tif, page 3")


def test_a_page_of_a_stack_is_grouped_by_its_name():
    page = Pair("s1/03", Path("/checkpoints/.converted/x/3.png"), Path("m.png"), image_origin="s1.tif, page 3")
    assert page.path_in(Path("/data")) == "s1/03.png"
    assert add_groups([page], r"(s\d)/", Path("/data"))[0].group == "s1"


def test_found_pairs_are_divided_if_some_validate():
    pair = Pair("a", Path("a.png"), Path("b.png"))
    assert not FoundPairs((pair,), "").is_divided
    assert FoundPairs((pair, Pair("b", Path("c.png"), Path("d.png"), "val")), "").is_divided


# Groups


def grouped(tmp_path, pattern, *images):
    touch(tmp_path / "images", *images)
    touch(tmp_path / "masks", *images)
    return [pair.group for pair in found_in(tmp_path, group_pattern=pattern).pairs]


def test_a_group_is_the_match_of_the_first_bracket(tmp_path):
    files = ["p01_1.png", "p01_2.png", "p02_1.png"]
    assert grouped(tmp_path, r"(p\d+)_(\d)", *files) == ["p01", "p01", "p02"]


def test_a_group_is_the_whole_match_where_there_is_no_bracket(tmp_path):
    assert grouped(tmp_path, r"p\d+", "p01_1.png", "p01_2.png", "p02_1.png") == ["p01", "p01", "p02"]


def test_a_group_may_be_a_folder(tmp_path):
    files = ["night/1.png", "night/2.png", "noon/1.png"]
    assert grouped(tmp_path, r"images/(\w+)/", *files) == ["night", "night", "noon"]


def test_a_bracket_without_a_match_gives_no_group(tmp_path):
    assert grouped(tmp_path, r"(p\d+)?_x", "p1_x.png", "_x.png") == ["", "p1"]


def test_paths_that_the_pattern_does_not_match_are_refused(tmp_path):
    touch(tmp_path / "images", "p1_a.png", "b.png", "c.png")
    touch(tmp_path / "masks", "p1_a.png", "b.png", "c.png")
    message = error_message(found_in, tmp_path, group_pattern=r"p(\d+)_")
    assert message == r"group_pattern: 'p(\\d+)_' matches nothing in 2 of 3 paths, such as images/b.png, images/c.png"


def test_a_path_outside_data_dir_is_kept_whole(tmp_path):
    assert path_in(tmp_path / "data", tmp_path / "data/images/a.png") == "images/a.png"
    assert path_in(tmp_path / "data", tmp_path / "other/a.png") == (tmp_path / "other/a.png").as_posix()
    pairs = add_groups([Pair("a", tmp_path / "other/a.png", tmp_path / "m.png")], "other/(.)", tmp_path / "data")
    assert pairs[0].group == "a"
