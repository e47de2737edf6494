"""The index: written and read back, wrong ones refused, and shards of other tools indexed by WebDataset's naming."""

from __future__ import annotations

import io
import json
import zlib

import pytest

from helpers.shards import write_tar
from unet_trainer.shards.shard_index import (
    Member,
    Sample,
    Shard,
    ShardIndex,
    index_from_json,
    index_shard,
    index_to_json,
    part_by_name,
    path_in_shard,
)
from unet_trainer.shards.tar_files import ShardError

SAMPLE = Sample("cells/a", Member("a.png", 512, 10, 7), Member("a.mask.png", 1536, 0, 0), "val", "patient 1", {"height": 3}, None)
INDEX = ShardIndex((Shard("x/a-000000.tar", 4096, (SAMPLE, SAMPLE._replace(name="b"))), Shard("b.tar", 512, ())), ("sky", "Weg"), 2)


def indexed(tmp_path, files, name="a.tar"):
    write_tar(tmp_path / "a.tar", files)
    size = (tmp_path / "a.tar").stat().st_size
    ticks = []
    with (tmp_path / "a.tar").open("rb") as file:
        shard, unpaired = index_shard(name, file, size, ticks.append)
    assert sum(ticks) == size
    return shard, unpaired


@pytest.mark.parametrize(
    "index",
    [INDEX, ShardIndex(()), ShardIndex((Shard("a.tar", 0, ()),), unpaired=("a.tar/x",), class_file=("classes.txt", "sky\nroad\n"))],
)
def test_an_index_is_read_back_as_it_was(index):
    assert index_from_json(index_to_json(index)) == index
    assert index_from_json(index_to_json(index).encode()) == index


def test_each_sample_has_a_line():
    assert sum("cells/a" in line for line in index_to_json(INDEX).splitlines()) == 1
    assert (INDEX.num_samples, INDEX.num_bytes) == (2, 4608)


def changed(change):
    content = json.loads(index_to_json(INDEX))
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no index of shards"),
        ("[1, 2]", "no index of shards"),
        ('{"format": 1}', "no index of shards"),
        (changed(lambda content: content.update(format=9)), "format 9; this version reads format 1"),
        (changed(lambda content: content["shards"][0].update(name="../a.tar")), "no name of a shard"),
        (changed(lambda content: content["shards"][0].update(name="/etc/a.tar")), "no name of a shard"),
        (changed(lambda content: content["shards"][0].update(name="passwd")), "no name of a shard"),
        (changed(lambda content: content["shards"].append(content["shards"][0])), "stands in it twice"),
        (changed(lambda content: content["shards"][0].update(bytes=-1)), "no whole number"),
        (changed(lambda content: content["shards"][0].update(bytes=1500)), "beyond the end of its shard"),
        (changed(lambda content: content["shards"][0]["samples"][0].pop()), "no index of shards"),
        (changed(lambda content: content["shards"][0]["samples"][0][1].__setitem__(1, "5")), "no whole number"),
        (changed(lambda content: content["shards"][0]["samples"][0][1].__setitem__(1, True)), "no whole number"),
        (changed(lambda content: content["shards"][0]["samples"][0][1].__setitem__(0, "/a.png")), "no name of a member"),
        (changed(lambda content: content["shards"][0]["samples"][0].__setitem__(3, "holdout")), "part 'holdout'"),
        (changed(lambda content: content["shards"][0]["samples"][0].__setitem__(5, [1])), "facts that are none"),
        (changed(lambda content: content.update(class_names=[1])), "is no text"),
        (changed(lambda content: content.update(num_classes=3000000)), "num_classes 3000000"),
        (changed(lambda content: content.update(num_classes=0)), "num_classes 0"),
        (changed(lambda content: content.update(class_file=["a"])), "no index of shards"),
        (changed(lambda content: content.update(class_file=["a", 5])), "is no text"),
        ("[" * 100_000, "no index of shards"),
    ],
)
def test_what_is_no_index_is_refused(text, message):
    with pytest.raises(ShardError, match=message):
        index_from_json(text)


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("a.jpg", "a.png"),
        ("a.JPEG", "a.PNG"),
        ("a.jpg", "a.seg.png"),
        ("a.png", "a.mask.png"),
        ("a.tif", "a.label.tif"),
        ("./a.webp", "./a.gt.bmp"),
        ("train/cells/a.jpg", "train/cells/a.seg.png"),
        ("a.npy", "a.mask.npy"),
        ("a.jpg", "a.mask.jpg"),
        ("a.jpg", "a.gif"),
        ("a.image.jpg", "a.mask.png"),
        ("a.input.png", "a.target.png"),
        ("a.png", "a.segmentation.png"),
        ("a.jpg", "a.masks.png"),
    ],
)
def test_pairs_of_other_tools_are_found_by_their_names(tmp_path, image, mask):
    others = {"a.json": b"{}", "a.cls": b"3", "a.txt": b"caption"}
    shard, unpaired = indexed(tmp_path, {mask: b"mask", **others, image: b"image"})
    (sample,) = shard.samples
    data = (tmp_path / "a.tar").read_bytes()
    assert [data[member.offset : member.end] for member in (sample.image, sample.mask)] == [b"image", b"mask"]
    assert [member.checksum for member in (sample.image, sample.mask)] == [zlib.crc32(b"image"), zlib.crc32(b"mask")]
    assert (sample.image.name, sample.mask.name) == (path_in_shard(image), path_in_shard(mask))
    assert not unpaired


def test_samples_without_one_image_and_one_mask_are_listed(tmp_path):
    files = {
        "a.jpg": b"",
        "b.seg.png": b"",
        "c.jpg": b"",
        "c.png": b"",
        "c.seg.png": b"",
        "d.json": b"",
        "e.jpg": b"",
        "e.png": b"",
    }
    shard, unpaired = indexed(tmp_path, files)
    assert [sample.name for sample in shard.samples] == ["e"]
    assert unpaired == ["a.tar/a", "a.tar/b", "a.tar/c"]  # of c it is not clear which is the image; d is no image


def test_an_archive_of_folders_has_no_samples(tmp_path):
    shard, unpaired = indexed(tmp_path, {"images/a.jpg": b"", "masks/a.png": b""})
    assert not shard.samples
    assert len(unpaired) == 2


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("train/a-000.tar", "train"),
        ("cells_val_000.tar", "val"),
        ("cells-validation-000.tar", "val"),
        ("Test-1.tar", "test"),
        ("training.tar", "train"),
        ("cells-000.tar", ""),
        ("contest-000.tar", ""),
        ("train-val-0.tar", ""),
    ],
)
def test_the_name_of_a_shard_says_its_part(name, part):
    assert part_by_name(name) == part


def test_the_part_goes_to_the_samples(tmp_path):
    shard, _ = indexed(tmp_path, {"a.jpg": b"", "a.png": b""}, "val/x-0.tar")
    assert shard.samples[0].part == "val"


def test_a_shard_that_is_cut_off_is_refused(tmp_path):
    write_tar(tmp_path / "a.tar", {"a.jpg": bytes(3000), "a.png": b"x"})
    with pytest.raises(ShardError, match=r"it ends within a\.jpg"):
        index_shard("a.tar", io.BytesIO((tmp_path / "a.tar").read_bytes()[:1000]), 1000)
