"""Split files as users write them, and as a run writes its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unet_trainer.datasets.pairs import Box, Pair
from unet_trainer.datasets.splits import listed_images, read_split_csv, split_csv_text
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.atomic_files import write_text_atomically

NEEDED = "need image and mask, and optionally split and group"


@pytest.fixture
def data(tmp_path):
    """Reading a split file opens no image, so empty files are enough."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for name in ("a", "b", "c", "d", "e f", "g,h"):
            (tmp_path / folder / f"{name}.png").touch()
    return tmp_path


def read(data, text, name="split.csv"):
    file = data / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_split_csv(file, data)


def error_message(data, text):
    with pytest.raises(DataError) as raised:
        read(data, text)
    return str(raised.value).replace(str(data), "DATA")


def pair(data, name, part=None, group=""):
    return Pair(f"images/{name}", data / f"images/{name}.png", data / f"masks/{name}.png", part, group)


# What is read


@pytest.mark.parametrize(
    "text",
    [
        "image,mask,split,group\nimages/a.png,masks/a.png,train,p1\nimages/b.png,masks/b.png,val,p2\n",
        "image;mask;split;group\nimages/a.png;masks/a.png;train;p1\nimages/b.png;masks/b.png;val;p2\n",
        "image\tmask\tsplit\tgroup\nimages/a.png\tmasks/a.png\ttrain\tp1\nimages/b.png\tmasks/b.png\tval\tp2\n",
        "\ufeffimage,mask,split,group\r\nimages/a.png,masks/a.png,train,p1\r\nimages/b.png,masks/b.png,val,p2\r\n",
        '"image","mask","split","group"\n"images/a.png","masks/a.png","train","p1"\n"images/b.png","masks/b.png","val","p2"',
        " Image , MASK ,Split,group\n images/a.png , masks/a.png , Train , p1 \nimages/b.png,masks/b.png, VAL ,p2\n\n , ,,\n",
        "group,split,mask,image\np1,training,masks/a.png,images/a.png\np2,validation,masks/b.png,images/b.png\n",
        "image,mask,split,group\n./images/a.png,masks/a.png,tr,p1\nimages/b.png,masks//b.png,valid,p2\n",
    ],
    ids=["comma", "semicolon", "tab", "BOM and Windows", "quoted", "spaces and empty lines", "another order", "other paths"],
)
def test_a_split_file_may_be_written_in_many_ways(data, text):
    found = read(data, text)
    assert found.pairs == (pair(data, "a", "train", "p1"), pair(data, "b", "val", "p2"))
    assert (found.rule, found.blocking_message, found.problems, found.is_divided) == ("split.csv", "", (), True)


# What is refused


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("image,split\nimages/a.png,train\n", "image, split"),
        ("mask\nmasks/a.png\n", "mask"),
        ("image,mask,patient\nimages/a.png,masks/a.png,p1\n", "image, mask, patient"),
        ("image,mask,image\nimages/a.png,masks/a.png,images/b.png\n", "image, mask, image"),
        ("images/a.png,masks/a.png\n", "images/a.png, masks/a.png"),
        ("", "none"),
    ],
    ids=["no mask", "no image", "unknown", "twice", "no header", "empty"],
)
def test_missing_and_unknown_columns_are_refused_with_the_columns_found(data, text, columns):
    assert error_message(data, text) == f"split_file: DATA/split.csv has the columns {columns}; {NEEDED}"


def test_every_problem_is_named_with_its_line(data):
    text = (
        "image,mask,split\n"
        "images/a.png,masks/a.png,train\n"
        "images/x.png,masks/y.png,train\n"
        "images/b.png,masks/b.png,holdout\n"
        "\n"
        "images/a.png,masks/c.png,val\n"
        "images/d.png,,train\n"
        "images/c.png,masks/c.png,\n"
    )
    assert error_message(data, text).splitlines() == [
        "split_file: DATA/split.csv:",
        "  line 3: no file DATA/images/x.png",
        "  line 3: no file DATA/masks/y.png",
        "  line 4: split 'holdout'; need train, val or test",
        "  line 6: DATA/images/a.png is in line 2 too",
        "  line 7: need an image and a mask",
        "  some rows have a split and some have none; fill in all or leave the column out",
    ]


def test_paths_of_another_machine_are_answered_with_what_is_needed(data):
    assert error_message(data, "image;mask\nC:\\bob\\a.png;/home/bob/b.png\n").splitlines()[1:] == [
        "  line 2: no file DATA/C:\\bob\\a.png",
        "  line 2: no file /home/bob/b.png",
        "  No row has its files: paths are as seen from data_dir, such as images/a.png",
    ]


# Writing


def test_test_pairs_and_unused_ones_are_written_and_read_back(data):
    train, val, test, unused = (
        (pair(data, "a", "train"),),
        (pair(data, "b", "val"),),
        (pair(data, "c", "test"),),
        (pair(data, "d"),),
    )
    found = read(data, split_csv_text(train, val, data, test, unused))
    assert (found.pairs, found.test, found.unused, found.notices) == (train + val, test, unused, ())


@pytest.mark.parametrize(
    "name", [" a", "a ", "a\rb", "\ra", "a\r\nb", "a\nb", '"a"', "a,b", "a;b", "\ta", "K\udce4fer", "ä", "a\u0308", "#a", "'a'"]
)
def test_any_name_survives_being_written_and_read(data, name):
    """Also those with spaces, line breaks and bytes that are not UTF-8: else the run could never go on."""
    for folder in ("images", "masks"):
        (data / folder / f"{name}.png").touch()
    pairs = (pair(data, name, "train", group=name), pair(data, "b", "val"))
    write_text_atomically(data / "mine.csv", split_csv_text(pairs[:1], pairs[1:], data))
    assert read_split_csv(data / "mine.csv", data).pairs == pairs


def test_blocks_are_written_with_the_users_files_and_their_boxes(data):
    image, mask = data / "images/a.png", data / "masks/a.png"
    boxes = Box(image, mask, 0, 0, 20, 30), Box(image, mask, 25, 0, 40, 30)
    train, val = (box.pair(box.name_in("a"), part) for box, part in zip(boxes, ("train", "val"), strict=True))
    cut = replace(train, image=data / "checkpoints/0.tiff", mask=data / "checkpoints/0.png")
    text = split_csv_text([cut], [val], data)
    assert text.splitlines()[0] == "image,mask,split,group,name,content,box"
    assert text.splitlines()[1].startswith("images/a.png,masks/a.png,train,")
    assert read(data, text).pairs == (train, val)


@pytest.mark.parametrize(
    "box", ["1 2 3", "0 0 9 0", "5 0 5 9", "0 0 -1 9", "0 0 1e3 9", "0 0 9 9999999999", "a b c d", "1 2 3 4 5"]
)
def test_a_box_that_is_none_is_told_with_its_line(data, box):
    message = error_message(data, f"image,mask,split,box\nimages/a.png,masks/a.png,train,{box}\n")
    assert f"line 2: box {box!r}; need top, left, bottom and right in pixels, such as 0 0 512 512" in message


# Through the config


def test_a_nul_and_a_link_that_leads_to_itself_are_no_reason_for_a_traceback(data):
    (data / "loop.png").symlink_to("loop.png")
    (data / "split.csv").write_text("image,mask,split\nloop.png,loop.png,train\na\0b,a,train\n")
    assert listed_images(data / "split.csv", data, "train") == [data.resolve() / "loop.png", data / "a\0b"]
