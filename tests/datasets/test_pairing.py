"""Images and masks of folders, told apart by their names; and what is said where they cannot be. Whole datasets are in test_folder_pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from unet_trainer.datasets.layouts import Folders
from unet_trainer.datasets.name_matching import File, Match, Rule
from unet_trainer.datasets.pairing import (
    collect_files,
    describe_unpaired,
    list_images,
    refuse_channels,
    unpaired_problems,
    ways_out,
)
from unet_trainer.datasets.problems import Choice, Question
from unet_trainer.images.file_bytes import DataError


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def collected(root, *folders, mask_suffix=""):
    images, masks = collect_files(folders, mask_suffix)
    return tuple([file.path.relative_to(root).as_posix() for file in files] for files in (images, masks))


def test_files_of_several_sequences_are_named_by_their_sequence(tmp_path):
    touch(tmp_path, "s1/i/a.png", "s1/m/a.png", "s2/i/a.png", "s2/m/a.png")
    folders = [Folders(tmp_path / name / "i", tmp_path / name / "m", f"{name}/") for name in ("s1", "s2")]
    images, masks = collect_files(folders, "")
    assert (
        [(file.folder, file.stem) for file in images]
        == [("s1/", "a"), ("s2/", "a")]
        == [(file.folder, file.stem) for file in masks]
    )
    assert list_images(folders) == images


def test_a_folder_inside_the_other_and_those_of_other_parts_are_left_out(tmp_path):
    touch(tmp_path, "a.png", "masks/a.png", "test/b.png")
    folders = Folders(tmp_path, tmp_path / "masks", without=(tmp_path / "test",))
    assert collected(tmp_path, folders) == (["a.png"], ["masks/a.png"])


def test_a_folder_without_images_says_what_it_holds(tmp_path):
    touch(tmp_path, "images/a.heic", "masks/a.png")
    with pytest.raises(DataError, match=r"no images in .*images; need files with one of .*; it holds \.heic files"):
        collect_files([Folders(tmp_path / "images", tmp_path / "masks")], "")


def test_a_mark_and_a_shared_name_in_one_folder_are_asked_for(tmp_path):
    """a.png may be the mask of a.jpg, or a_mask.png is and a.png a copy."""
    touch(tmp_path, "a.jpg", "a.png", "a_mask.png")
    with pytest.raises(Question, match="cannot tell images from masks") as raised:
        collect_files([Folders(tmp_path, tmp_path)], "")
    assert raised.value.choices == (Choice("", {"mask_suffix": ".png"}),)


def test_several_marks_are_offered_as_they_are_written(tmp_path):
    touch(tmp_path, "a.jpg", "a_GT.png", "a_Seg.png")
    with pytest.raises(Question) as raised:
        collect_files([Folders(tmp_path, tmp_path)], "")
    assert [choice.settings for choice in raised.value.choices] == [{"mask_suffix": "_GT"}, {"mask_suffix": "_Seg"}]
    assert collected(tmp_path, Folders(tmp_path, tmp_path), mask_suffix="_Seg") == (["a.jpg"], ["a_Seg.png"])


def files(*stems):
    return [File(Path(f"{stem}.png"), "", stem) for stem in stems]


def test_unpaired_files_are_described_and_listed():
    match = Match(Rule(("", ""), ("", "_m")), [(files("a")[0], files("a_m")[0])], files("b", "c"), files("d_m"))
    assert describe_unpaired(match, Path("images"), Path("masks"), "").splitlines() == [
        "images and masks do not pair up:",
        "  the best rule pairs 1 of 3 images, a.png with a_m.png",
        "  2 images without a mask in masks (such as b_m.png): b.png, c.png",
        "  1 mask without an image in images: d_m.png",
    ]
    assert [(problem.kind, problem.lines) for problem in unpaired_problems(match, Path("images"), Path("masks"))] == [
        ("no_mask", ("b.png", "c.png")),
        ("no_image", ("d_m.png",)),
    ]


def test_skipping_is_offered_only_where_pairs_are_left():
    assert ways_out(1, "3 images without a mask")[1] == []
    text, choices = ways_out(148, "352 images without a mask")
    assert (choices, text.endswith("to train on the 148 pairs and leave out 352 images without a mask")) == (
        [Choice("", {"unpaired": "skip"})],
        True,
    )


def test_channel_files_are_refused_in_the_folder_of_nnu_net_only():
    images, masks = files("a_0000", "a_0001"), files("a")
    refuse_channels(images, masks, Path("images"))
    with pytest.raises(DataError, match="has 2 channel files for a"):
        refuse_channels(images, masks, Path("imagesTr"))
