"""What images, folders, patterns and CSV files mean, and the names of their results."""

from pathlib import Path

import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.inference.inputs import find_inputs, refuse_among_images


def make(folder, *names, content=b"x"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Images in two folders below each other, beside other files; the working folder."""
    make(tmp_path, "data/a.png", "data/sub/b.JPG", "data/sub/deep/c.tif", "other/e.png")
    make(tmp_path, "data/notes.txt", "data/.hidden/d.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*words, out="out"):
    return [(path.as_posix(), name) for path, name in find_inputs(list(words), Path(out))]


IN_DATA = [("data/a.png", "a"), ("data/sub/b.JPG", "sub/b"), ("data/sub/deep/c.tif", "sub/deep/c")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data"], IN_DATA),  # with its subfolders, without other and hidden files
        (["data/a.png", "data/sub/b.JPG"], IN_DATA[:2]),
        (["data/a.png", "other/e.png"], [("data/a.png", "data/a"), ("other/e.png", "other/e")]),
        (["data/*/*"], IN_DATA[1:2]),  # the folders behind its fixed part
        (["data/**/*"], IN_DATA),
        (["o*/e.png"], [("other/e.png", "other/e")]),
        (["a[1].png"], [("a[1].png", "a[1]")]),  # a file, though it looks like a pattern
    ],
)
def test_words_become_images_with_the_names_of_their_results(folder, words, expected):
    (folder / "a[1].png").write_bytes(b"x")
    assert found(*words) == expected


def test_results_of_other_predictions_and_forms_that_are_not_read_are_left_out_and_told(folder):
    """Beside the images, or in a folder of their own; an image whose result has its name is no clash."""
    results = "data/old/a.png", "data/sub/b.png", "data/old/c.TIF"
    make(folder, *results, content=b"II*\0 unet-trainer predict and pixels")
    make(folder, "data/d.heic", "data/sub/e.HEIC")
    notes = []
    inputs = find_inputs(["data"], Path("out"), notes.append)
    assert [(path.as_posix(), name) for path, name in inputs] == IN_DATA
    assert notes[0].startswith("left out of data: 2 files such as d.heic: a photo in Apple's HEIC format; convert")
    assert notes[1:] == ["3 results of an earlier predict in data left out, such as data/old/a.png"]
    assert found("data/old/a.png") == [("data/old/a.png", "a")]  # by its own name
    with pytest.raises(UserError, match="data/old holds no image but 2 results of predict; known are"):
        find_inputs(["data/old"], Path("out"))


@pytest.mark.parametrize(("words", "out"), [(["data/sub/b.JPG"], "data/sub"), (["data/*/*"], "link")])
def test_results_among_the_images_are_refused(folder, words, out):
    (folder / "link").symlink_to(folder / "data")
    expected = rf"^--out: got {out}; {out}/\S+\.png would lie among the images, .*\. Choose another folder, "
    with pytest.raises(UserError, match=expected) as told:
        refuse_among_images(find_inputs(words, Path(out)), Path(out))
    assert str(told.value).endswith(f"e.g. --out {Path(out).parent / 'predictions'}, or add --among-images")


@pytest.mark.parametrize(
    ("names", "images"),
    [
        (["images/a.png", "masks/a.png", "notes/b.png"], ["images/a"]),
        (["train/images/a.png", "train/labels/a.png", "test/b.png"], ["test/b", "train/images/a"]),
        (["day/a.jpg", "day/a_mask.png", "day/b.jpg", "day/b_mask.png"], ["day/a", "day/b"]),
        (["control/a.png", "target/a.png"], ["control/a", "target/a"]),  # nothing says that these are masks
        (["masks/a.png"], ["masks/a"]),
    ],
)
def test_of_a_dataset_the_images_are_inputs_and_the_masks_are_not(tmp_path, names, images):
    make(tmp_path, *names)
    notes = []
    assert [name for _, name in find_inputs([str(tmp_path)], Path("out"), notes.append)] == images
    num_others = len(names) - len(images)
    assert len(notes) == (num_others > 0)
    if notes:
        start = f"{tmp_path} is a dataset: {len(images)} image{'s' * (len(images) > 1)} in it; {num_others} mask"
        assert notes[0].startswith(start)
    for masks in tmp_path.glob("masks"):  # they are inputs where their folder is named
        assert [name for _, name in find_inputs([str(masks)], Path("out"))] == ["a"]


def test_links_to_other_folders_are_followed_but_none_in_a_circle(folder):
    make(folder, "elsewhere/d.png")
    for link, target in {"data/monday": "elsewhere", "data/all": "", "elsewhere/back": "data"}.items():
        (folder / link).symlink_to(folder / target)
    assert found("data") == [IN_DATA[0], ("data/monday/d.png", "monday/d"), *IN_DATA[1:]]


def test_results_inside_of_the_folder_are_no_inputs(folder):
    make(folder, "data/out/a.png", content=b"\x89PNG unet-trainer predict and pixels")
    make(folder, "data/out/a.npy", content=b"of a prediction that was killed")
    assert found("data", out="data/out") == IN_DATA
    assert found("data/**/*.png", out=folder / "data/out") == IN_DATA[:1]


@pytest.mark.parametrize(
    ("table", "text", "expected"),
    [
        ("data/list.csv", "\ufeffsplit;Image\nval;a.png\n;sub/b.JPG\n\nval;\n", IN_DATA[:2]),  # relative to itself
        ("other/list.csv", "image\ndata/a.png\n", [("data/a.png", "data/a")]),  # as seen from here
        ("other/up.csv", "image\n../data/a.png\n", [("other/../data/a.png", "a")]),
        ("run/split.csv", "image,mask,split,group,name\na.png,m.png,train,,a\nsub/b.JPG,m.png,val,,b\n", IN_DATA[:2]),
        ("list.csv", "image\n{0}/data/a.png\n{0}/other/e.png", [("{0}/data/a.png", "data/a"), ("{0}/other/e.png", "other/e")]),
    ],
)  # fmt: skip
def test_a_csv_names_images(folder, table, text, expected):
    """Of the split of a run, images of its data; of whole paths, the folders in which they differ are kept."""
    make(folder, "run/config.yaml", content=b"data_dir: data\n")
    (folder / table).write_text(text.format(folder), encoding="utf-8")
    assert found(table) == [(path.format(folder), name) for path, name in expected]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("", "got an empty name; need images"),
        ("missing.png", "missing.png: no such file or folder"),
        ("data/sub/deep/empty", "data/sub/deep/empty holds no image; known are .bmp, "),
        ("none.csv", "none.csv names no image"),
        ("column.csv", "column.csv has the columns path, mask; need one named image"),
        ("gone.csv", r"gone.csv: 1 of its 2 images are not there: gone.png"),
    ],
)
def test_what_names_no_image_is_refused(folder, word, message):
    (folder / "data/sub/deep/empty").mkdir()
    (folder / "none.csv").write_text("image\n")
    (folder / "column.csv").write_text("path,mask\na,b\n")
    (folder / "gone.csv").write_text("image\ndata/a.png\ngone.png\n")
    with pytest.raises(UserError, match=message):
        found(word)
