"""What images, folders, patterns and CSV files mean, and the names of their results."""

from __future__ import annotations

from pathlib import Path

import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.inference.inputs import Input, find_inputs, refuse_among_images, refuse_same_names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Images in two folders below each other, beside other files; the working folder."""
    for name in ("data/a.png", "data/sub/b.JPG", "data/sub/deep/c.tif", "data/notes.txt", "data/.hidden/d.png", "other/e.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words, out="out"):
    return [(path.as_posix(), name) for path, name in find_inputs(list(words), Path(out))]


def test_images_of_several_folders_keep_the_folders_in_which_they_differ(folder):
    assert found("data/a.png", "data/sub/b.JPG") == [("data/a.png", "a"), ("data/sub/b.JPG", "sub/b")]
    assert found("data/a.png", "other/e.png") == [("data/a.png", "data/a"), ("other/e.png", "other/e")]


def test_a_folder_is_taken_with_its_subfolders_without_other_and_hidden_files(folder):
    assert found("data") == [("data/a.png", "a"), ("data/sub/b.JPG", "sub/b"), ("data/sub/deep/c.tif", "sub/deep/c")]


def test_a_pattern_keeps_the_folders_behind_its_fixed_part(folder):
    assert found("data/*/*") == [("data/sub/b.JPG", "sub/b")]
    assert found("data/**/*") == [("data/a.png", "a"), ("data/sub/b.JPG", "sub/b"), ("data/sub/deep/c.tif", "sub/deep/c")]
    assert found(str(folder / "oth*/e.png")) == [(str(folder / "other/e.png"), "other/e")]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(folder):
    (folder / "a[1].png").write_bytes(b"x")
    assert found("a[1].png") == [("a[1].png", "a[1]")]


def test_results_of_other_predictions_in_the_folder_are_left_out_and_told(folder):
    """Beside the images, or in a folder of their own; an image whose result has its name is no clash."""
    (folder / "data/old").mkdir()
    for name in ("data/old/a.png", "data/sub/b.png", "data/old/c.TIF"):
        (folder / name).write_bytes(b"II*\0 unet-trainer predict and pixels")
    notes = []
    inputs = find_inputs(["data"], Path("out"), notes.append)
    refuse_same_names(inputs)
    assert [path.as_posix() for path, _ in inputs] == ["data/a.png", "data/sub/b.JPG", "data/sub/deep/c.tif"]
    assert notes == ["3 results of an earlier predict in data left out, such as data/old/a.png"]
    assert found("data/old/a.png") == [("data/old/a.png", "a")]  # by its own name
    with pytest.raises(UserError, match="data/old holds no image but 2 results of predict; known are"):
        find_inputs(["data/old"], Path("out"))


@pytest.mark.parametrize(("words", "out"), [(["data"], "data"), (["data/sub/b.JPG"], "data/sub"), (["data/*/*"], "link")])
def test_results_among_the_images_are_refused(folder, words, out):
    (folder / "link").symlink_to(folder / "data")
    with pytest.raises(
        UserError, match=rf"^--out: got {out}; {out}/\S+\.png would lie among the images, .*\. Choose another"
    ) as told:
        refuse_among_images(find_inputs(words, Path(out)), Path(out))
    assert str(told.value).endswith(f"e.g. --out {Path(out).parent / 'predictions'}, or add --among-images")


def test_results_inside_of_the_folder_are_no_inputs(folder):
    (folder / "data/out").mkdir()
    (folder / "data/out/a.png").write_bytes(b"x")
    assert [path for path, _ in found("data", out="data/out")] == ["data/a.png", "data/sub/b.JPG", "data/sub/deep/c.tif"]
    assert [path for path, _ in found("data/**/*.png", out=folder / "data/out")] == ["data/a.png"]
    assert len(found("data", out="data")) == 4  # the folder itself: that no image is overwritten is seen to elsewhere


def test_a_csv_names_images_relative_to_itself(folder):
    (folder / "data/list.csv").write_text("\ufeffsplit;Image\nval;a.png\n;sub/b.JPG\n\nval;\n", encoding="utf-8")
    assert found("data/list.csv") == [("data/a.png", "a"), ("data/sub/b.JPG", "sub/b")]


def test_a_csv_may_name_images_as_seen_from_here_or_with_whole_paths(folder):
    (folder / "list.csv").write_text(f"image\n{folder / 'other/e.png'}\n")
    assert found("list.csv") == [(str(folder / "other/e.png"), "e")]
    (folder / "other/list.csv").write_text("image\ndata/a.png\n")
    assert found("other/list.csv") == [("data/a.png", "data/a")]
    (folder / "other/up.csv").write_text("image\n../data/a.png\n")
    assert found("other/up.csv") == [("other/../data/a.png", "a")]


def test_the_split_of_a_run_names_images_of_its_data(folder):
    run = folder / "checkpoints/run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("data_dir: data\n")
    (run / "split.csv").write_text("image,mask,split,group,name\na.png,m.png,train,,a\nsub/b.JPG,m.png,val,,b\n")
    assert found("checkpoints/run/split.csv") == [("data/a.png", "a"), ("data/sub/b.JPG", "sub/b")]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "got an empty name; need images"),
        ("long.csv", "long.csv has the columns x{60}; need one named image"),
        ("missing.png", "missing.png: no such file or folder"),
        ("data/.hidden/x*.png", r"data/.hidden/x\*.png matches no image; known are .bmp, "),
        ("data/sub/deep/empty", "data/sub/deep/empty holds no image; known are .bmp, "),
        ("none.csv", "none.csv names no image"),
        ("column.csv", "column.csv has the columns path, mask; need one named image"),
        ("gone.csv", r"gone.csv: 1 of its 2 images are not there: gone.png"),
        ("binary.csv", "binary.csv: 1 of its 1 images are not there: \udcff\udcfe"),
    ],
)
def test_what_names_no_image_is_refused(folder, word, message):
    (folder / "data/sub/deep/empty").mkdir()
    (folder / "long.csv").write_text("x" * 3000)
    (folder / "none.csv").write_text("image\n")
    (folder / "column.csv").write_text("path,mask\na,b\n")
    (folder / "gone.csv").write_text("image\ndata/a.png\ngone.png\n")
    (folder / "binary.csv").write_bytes(b"image\n\xff\xfe\n")
    with pytest.raises(UserError, match=message):
        found(word)


def test_images_whose_results_would_have_one_name_are_refused():
    with pytest.raises(UserError) as refusal:
        refuse_same_names([Input(Path("data/a.jpg"), "a"), Input(Path("data/A.png"), "A")])  # one name where case is ignored
    assert str(refusal.value) == (
        "images whose results would have the same name:\n  data/a.jpg and data/A.png: both would be A.png\n"
        "  Predict them in two commands with different --out; a pattern takes one kind: 'data/*.jpg'"
    )
    with pytest.raises(UserError, match=r"\n  Name the folder above them, or predict them in two commands with different --out$"):
        refuse_same_names([Input(Path("a/x.jpg"), "x"), Input(Path("b/x.jpg"), "x")])
