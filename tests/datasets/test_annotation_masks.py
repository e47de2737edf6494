"""Masks drawn from annotations: once, again when something has changed, in the order of class_names if that is set."""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from helpers.annotated import Folder
from unet_trainer.datasets import annotation_masks
from unet_trainer.datasets.annotation_masks import draw_mask
from unet_trainer.datasets.annotations import AnnotatedImage, EntryError, Shape
from unet_trainer.datasets.rasterize import box_corners, fill_polygon
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import read_mask
from unet_trainer.system.console import Console

BOXES = {"cat": [[0, 0], [4, 0], [4, 1], [0, 1]], "dog": [[0, 1], [4, 1], [4, 2], [0, 2]]}


@pytest.fixture
def folder(tmp_path):
    """Three images with LabelMe files of two classes."""
    folder = Folder(tmp_path)
    for name in ("a", "b", "c"):
        folder.image(f"{name}.png")
        write_labels(folder, name, "cat", "dog")
    return folder


def write_labels(folder, name, *labels):
    shapes = [{"label": label, "points": BOXES[label], "shape_type": "polygon"} for label in labels]
    content = {"version": "5.0", "shapes": shapes, "imagePath": f"{name}.png", "imageHeight": 3, "imageWidth": 4}
    return folder.write(f"{name}.json", content)


@pytest.fixture
def drawn(monkeypatch):
    """Names of the images whose masks were drawn, in order."""
    names = []

    def draw(image, *others):
        names.append(image.image.name)
        return draw_mask(image, *others)

    monkeypatch.setattr(annotation_masks, "draw_mask", draw)
    return names


def test_a_mask_is_drawn_once_and_again_when_its_file_or_its_image_has_changed(folder, drawn):
    first = folder.find()
    assert drawn == ["a.png", "b.png", "c.png"]
    assert folder.find() == first
    assert len(drawn) == 3
    os.utime(folder.path / "b.json", ns=(1, 1))
    folder.image("c.png")
    folder.find()
    assert drawn[3:] == ["b.png", "c.png"]
    first.pairs[0].mask.unlink()
    folder.find()
    assert drawn[5:] == ["a.png"]


def test_nothing_is_written_beside_the_data_and_paths_are_absolute(folder, monkeypatch, tmp_path):
    before = sorted(folder.path.iterdir())
    monkeypatch.chdir(tmp_path)
    folder.checkpoints = folder.checkpoints.relative_to(tmp_path)
    found = folder.find()
    assert sorted(folder.path.iterdir()) == before
    assert all(pair.mask.is_absolute() and pair.mask.is_file() for pair in found.pairs)  # split.csv is read from data_dir


def test_notes_are_repeated_at_the_next_start(folder, drawn):
    shapes = [{"label": "cat", "points": [[0, 0], [4, 0], [4, 3]]}, {"label": "dog", "points": [[0, 0], [1, 1]]}]
    folder.write("a.json", {"shapes": [*shapes, {"label": "dog", "points": BOXES["dog"]}], "imagePath": "a.png"})
    first, second = folder.find().notices, folder.find().notices
    assert (
        first
        == second
        == (
            "1 outline of fewer than 3 points left out: in a.png",
            "2 pixels in 1 image in objects of several classes; the later shape is on top: a.png",
        )
    )
    assert len(drawn) == 3


def test_another_class_gives_other_files(folder):
    """A run that began before keeps its masks: their ids would have other meanings."""
    before = folder.find()
    BOXES["ant"] = BOXES["cat"]
    write_labels(folder, "c", "ant")
    after = folder.find()
    assert after.class_names == ("background", "ant", "cat", "dog")
    assert read_mask(before.pairs[0].mask)[0, 0] == 1
    assert read_mask(after.pairs[0].mask)[0, 0] == 2


def test_class_names_decide_the_ids(folder):
    names = ["background", "dog", "bird", "cat"]
    found = folder.find(class_names=names)
    assert found.class_names == tuple(names)
    assert found.num_classes == 4
    assert folder.masks(class_names=names)["a"] == ["3333", "1111", "0000"]


def test_class_names_of_other_classes_are_refused(folder):
    with pytest.raises(
        DataError,
        match=r"class_names: dog of 3 JSON files such as a\.json is not in it; leave it out, or list .*: background, cat, dog",
    ):
        folder.find(class_names=["background", "cat", "hound"])


def test_a_single_class_may_be_called_anything(folder):
    for name in ("a", "b", "c"):
        write_labels(folder, name, "cat")
    assert folder.find(class_names=["Katze"]).class_names == ("cat",)
    assert folder.masks(class_names=["background", "Katze"])["a"] == ["1111", "0000", "0000"]


def test_many_masks_are_drawn_in_child_processes_with_a_bar(folder, drawn):
    for number in range(12):
        folder.image(f"{number}.png")
        write_labels(folder, str(number), "cat")
    steps = []

    class Terminal(Console):
        @contextmanager
        def bar(self, label, total, keep=True):
            steps.append((label, total))
            yield SimpleNamespace(tick=lambda: steps.append(1))

    found = folder.find(console=Terminal(io.StringIO()))
    assert steps == [("Drawing masks from annotations:", 15), *[1] * 15]
    assert drawn == []  # not in this process
    assert len(folder.masks()) == len(found.pairs) == 15


def test_an_image_that_is_annotated_twice_is_refused(folder):
    folder.write("again.json", {"shapes": [], "imagePath": "a.png"})
    with pytest.raises(DataError, match=r"a\.png is annotated twice: a\.json and again\.json; remove one of them, or set mask_dir"):
        folder.find()


def test_an_image_that_cannot_be_read_is_a_problem_of_its_own(folder):
    (folder.path / "b.png").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    found = folder.find()
    assert [pair.name for pair in found.pairs] == ["a", "c"]
    (line,) = found.problems[0].lines
    assert line.startswith("b.json: the file b.png: a pointer of git-lfs, not the file itself; run git lfs pull")


def test_a_decompression_bomb_gets_no_mask(folder):
    from helpers.image_bytes import grey_png

    (folder.path / "b.png").write_bytes(grey_png(60000, 60000, 8, b""))
    folder.write("b.json", {"shapes": [], "imagePath": "b.png"})
    (line,) = folder.find().problems[0].lines
    assert "60000×60000 pixels: a decompression bomb" in line


def test_names_that_differ_in_their_extension_only_stay_apart(folder):
    folder.image("a.jpg")
    folder.write("a2.json", {"shapes": [{"label": "cat", "points": BOXES["cat"]}], "imagePath": "a.jpg"})
    assert sorted(folder.masks()) == ["a.jpg", "a.png", "b", "c"]
    assert folder.masks()["a.jpg"] == ["1111", "0000", "0000"]


def test_a_part_alone_does_not_divide_the_data(folder):
    for name in ("a", "b"):
        folder.image(f"train/{name}.png")
        content = {"shapes": [{"label": "cat", "points": BOXES["cat"]}], "imagePath": f"{name}.png"}
        folder.write(f"train/{name}.json", content)
    assert {pair.part for pair in folder.find().pairs} == {None}


def annotated(path, size, *shapes):
    return AnnotatedImage(path, "", (), "a.json", size, len(shapes), lambda height, width: shapes)


def test_a_mask_has_the_size_of_its_image(folder):
    patch = fill_polygon(box_corners(0, 0, 2, 3), 3, 4)
    ids, notes = draw_mask(annotated(folder.path / "a.png", None, Shape("cat", patch)), {"cat": 5}, False)
    assert ids.tolist() == [[5, 5, 0, 0]] * 3
    assert notes == {}
    with pytest.raises(EntryError, match=r"annotated at 3×4, and the file a\.png has 4×3 pixels$"):
        draw_mask(annotated(folder.path / "a.png", (4, 3)), {}, False)


@pytest.mark.parametrize("name", ["a.tif", "a.gif", "a.npy", "a.webp", "a.bmp", "a.jpg"])
def test_the_size_of_every_kind_of_image_is_known(folder, name):
    import numpy as np
    from PIL import Image

    path = folder.path / name
    pixels = np.random.default_rng(0).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    if name.endswith(".npy"):
        np.save(path, pixels)
    else:
        Image.fromarray(pixels).save(path)
    assert draw_mask(annotated(path, (5, 6)), {}, True)[0].shape == (5, 6)
