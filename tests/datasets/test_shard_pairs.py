"""The pairs in shards: names, parts, groups and origins; samples that lack something; settings that do not fit."""

from __future__ import annotations

import dataclasses

import pytest

from helpers.shards import write_shard, write_tar
from unet_trainer.config.schema import Config
from unet_trainer.datasets.find_dataset import find_dataset
from unet_trainer.datasets.shard_pairs import describe_size, find_in_shards
from unet_trainer.images.file_bytes import DataError, read_bytes
from unet_trainer.shards.shard_index import INDEX_NAME, ShardIndex, index_to_json

ONE, OTHER = (b"image", b"mask"), (b"image 2", b"mask 2")


@pytest.fixture
def config(tmp_path):
    return Config(data_dir=str(tmp_path / "shards"), checkpoint_dir=str(tmp_path / "runs"))


def write_index(tmp_path, *shards, **others):
    (tmp_path / "shards" / INDEX_NAME).write_text(index_to_json(ShardIndex(shards, **others)))


def test_pairs_have_the_names_parts_and_groups_of_the_index(tmp_path, config):
    folder = tmp_path / "shards"
    train = write_shard(folder, "x-train-000000.tar", {"a": ONE, "b": OTHER}, part="train", group="g")
    val = write_shard(folder, "x-val-000000.tar", {"c": ONE}, part="val")
    test = write_shard(folder, "x-test-000000.tar", {"d": ONE}, part="test")
    write_index(tmp_path, train, val, test, class_names=("sky", "road"), num_classes=2)
    found = find_in_shards(config)
    assert [(pair.name, pair.part, pair.group) for pair in found.pairs] == [
        ("a", "train", "g"),
        ("b", "train", "g"),
        ("c", "val", ""),
    ]
    assert [pair.name for pair in found.test] == ["d"]
    assert found.pairs[1].image == folder / "x-train-000000.tar/b.png"
    assert found.pairs[1].shown_mask == str(folder / "x-train-000000.tar/b.mask.png")
    assert (found.class_names, found.num_classes, found.is_divided) == (("sky", "road"), 2, True)
    assert found.rule == "3 shards, 0.0307 MB"
    assert find_dataset(config) == found


def test_without_a_val_part_the_data_is_not_divided(tmp_path, config):
    write_index(tmp_path, write_shard(tmp_path / "shards", "x-train-0.tar", {"a": ONE}, part="train"))
    (pair,) = find_in_shards(config).pairs
    assert pair.part is None


def test_the_same_key_in_two_shards_is_two_pairs(tmp_path, config):
    for number in range(2):
        write_tar(
            tmp_path / f"shards/x-{number}.tar", {"a.jpg": b"image", "a.png": b"mask", f"b{number}.jpg": b"", f"b{number}.png": b""}
        )
    assert [pair.name for pair in find_in_shards(config).pairs] == ["x-0/a", "b0", "x-1/a", "b1"]


def test_samples_without_a_mask_are_told_or_left_out(tmp_path, config):
    write_tar(tmp_path / "shards/x.tar", {"a.jpg": b"image", "a.png": b"mask", "b.jpg": b"image"})
    found = find_in_shards(config)
    assert "1 sample without one image and one mask, e.g. x.tar/b" in found.blocking_message
    assert "unpaired: skip" in found.blocking_message
    assert found.suggested == {"unpaired": "skip"}
    skipped = find_in_shards(dataclasses.replace(config, unpaired="skip"))
    assert [pair.name for pair in skipped.pairs] == ["a"]
    assert not skipped.blocking_message
    assert skipped.notices == ("1 sample without one image and one mask left out (unpaired: skip)",)


def test_shards_of_the_test_part_alone_cannot_be_trained_on(tmp_path, config):
    write_index(tmp_path, write_shard(tmp_path / "shards", "x-test-0.tar", {"a": ONE, "b": ONE}, part="test"))
    found = find_in_shards(config)
    assert "all 2 samples are of the test part" in found.blocking_message
    assert len(found.test) == 2


def test_an_archive_of_folders_is_told_to_be_unpacked(tmp_path, config):
    write_tar(tmp_path / "shards/data.tar", {"images/a.jpg": b"image", "masks/a.png": b"mask"})
    with pytest.raises(DataError, match=r"data_dir: no sample with an image and a mask in the 1 shard .*has to be unpacked"):
        find_in_shards(config)


@pytest.mark.parametrize("key", ["image_dir", "mask_dir", "mask_suffix"])
def test_settings_that_shards_answer_are_refused(tmp_path, config, key):
    write_tar(tmp_path / "shards/x.tar", {"a.jpg": b"image", "a.png": b"mask"})
    with pytest.raises(DataError, match=f"{key}: .* holds shards, .* leave it out"):
        find_in_shards(dataclasses.replace(config, **{key: "x"}))


def test_groups_by_a_pattern_go_by_the_names_of_the_pairs(tmp_path, config):
    write_index(tmp_path, write_shard(tmp_path / "shards", "x.tar", {"p1_a": ONE, "p1_b": ONE, "p2_a": ONE}))
    found = find_dataset(dataclasses.replace(config, group_pattern=r"(p\d+)_"))
    assert [pair.group for pair in found.pairs] == ["p1", "p1", "p2"]


def test_a_split_file_divides_shards_by_their_names(tmp_path, config):
    write_index(tmp_path, write_shard(tmp_path / "shards", "x.tar", {"a": ONE, "b": ONE}))
    table = tmp_path / "split.csv"
    table.write_text("image,mask,split,name\nimages/b.png,masks/b.png,train,b\nx.tar/a.png,x.tar/a.mask.png,val,\n")
    found = find_dataset(dataclasses.replace(config, split_file=str(table)))
    assert [(pair.name, pair.part) for pair in found.pairs] == [("b", "train"), ("x.tar/a", "val")]
    assert found.pairs[0].image == tmp_path / "shards/x.tar/b.png"


@pytest.mark.parametrize(("num_bytes", "text"), [(67_901_440, "67.9 MB"), (1_500_000_000, "1.5 GB"), (10240, "0.0102 MB")])
def test_sizes_are_told_in_megabytes_or_gigabytes(num_bytes, text):
    assert describe_size(num_bytes) == text


def test_shards_that_the_webdataset_library_wrote_are_read(tmp_path, config):
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")
    (tmp_path / "shards").mkdir()
    with webdataset.ShardWriter(str(tmp_path / "shards/cells-%06d.tar"), maxcount=2, verbose=0) as writer:
        for number in range(5):
            writer.write(
                {"__key__": f"cell/{number}", "jpg": b"image %d" % number, "seg.png": b"mask %d" % number, "json": {"id": number}}
            )
    found = find_in_shards(config)
    assert [pair.name for pair in found.pairs] == [f"cell/{number}" for number in range(5)]
    assert [read_bytes(pair.image) for pair in found.pairs] == [b"image %d" % number for number in range(5)]
    assert [read_bytes(pair.mask) for pair in found.pairs] == [b"mask %d" % number for number in range(5)]
    assert found.rule.startswith("3 shards")


def test_images_beside_shards_are_told_to_be_left_out(tmp_path, config):
    write_index(tmp_path, write_shard(tmp_path / "shards", "x.tar", {"a": ONE}))
    (tmp_path / "shards/images").mkdir()
    (tmp_path / "shards/images/b.png").write_bytes(b"")
    (notice,) = find_in_shards(config).notices
    assert notice.startswith("1 image file beside the shards in")
