"""Shards that are written hold the files byte for byte, in their order and parts; unfinished ones are known as such."""

from __future__ import annotations

import os
import tarfile

import pytest

from unet_trainer.config.schema import Config
from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.scan import scan_pairs
from unet_trainer.datasets.shard_index import INDEX_NAME, UNFINISHED, index_from_json, index_to_json
from unet_trainer.datasets.shard_store import Files
from unet_trainer.datasets.shards import ScannedPair, find_in_shards, refuse_other_files, write_shards
from unet_trainer.images.file_bytes import DataError, read_bytes


@pytest.fixture
def pairs(tiny_data):
    images = sorted((tiny_data / "images").iterdir())
    masks = sorted((tiny_data / "masks").iterdir())
    return [Pair(image.stem, image, mask) for image, mask in zip(images, masks, strict=True)]


def scanned(pairs):
    return [ScannedPair(pair, facts.image, facts.mask) for pair, facts in zip(pairs, scan_pairs(pairs, 1), strict=True)]


def contents(folder):
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            found |= {f"{path.name}/{info.name}": archive.extractfile(info).read() for info in archive}
    return found


def test_the_files_are_written_byte_for_byte_with_their_facts(tmp_path, pairs):
    ticks = []
    place = Files(str(tmp_path / "out"))
    index = write_shards(FoundPairs(tuple(pairs), ""), scanned(pairs), "my data!", place, 10**9, lambda: ticks.append(1))
    suffix = pairs[0].image.suffix
    assert contents(tmp_path / "out") == {
        f"my_data-000000.tar/{name}": path.read_bytes()
        for pair in pairs
        for name, path in ((f"{pair.name}{suffix}", pair.image), (f"{pair.name}.mask{pair.mask.suffix}", pair.mask))
    }
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["my_data-000000.tar", INDEX_NAME]
    read = index_from_json((tmp_path / "out" / INDEX_NAME).read_text())
    assert read == index_from_json(index_to_json(index))
    assert [sample.name for sample in read.shards[0].samples] == [pair.name for pair in pairs]
    assert read.shards[0].samples[0].image_facts["height"] == 64
    assert len(ticks) == 12


def test_parts_have_shards_of_their_own_and_groups_are_kept(tmp_path, pairs):
    parts = ["train", "train", "val", "test"]
    some = [Pair(pair.name, pair.image, pair.mask, part, f"g{part}") for pair, part in zip(pairs, parts, strict=False)]
    index = write_shards(FoundPairs(tuple(some), ""), scanned(some), "x", Files(str(tmp_path)), 10**9, lambda: None)
    assert [shard.name for shard in index.shards] == ["x-train-000000.tar", "x-val-000000.tar", "x-test-000000.tar"]
    assert [(sample.part, sample.group) for shard in index.shards for sample in shard.samples] == [
        (part, f"g{part}") for part in parts
    ]


def test_names_of_any_bytes_survive(tmp_path, pairs):
    names = ["a b", "line\nbreak", os.fsdecode(b"\xff\xfe"), "é", "e\u0301", "x" * 240, "%41", "quote'\"", "{0..9}"]
    some = [Pair(name, pair.image, pair.mask) for name, pair in zip(names, pairs, strict=False)]
    write_shards(FoundPairs(tuple(some), ""), scanned(some), "x", Files(str(tmp_path / "out")), 10**9, lambda: None)
    found = find_in_shards(Config(data_dir=str(tmp_path / "out"), checkpoint_dir=str(tmp_path / "runs")))
    assert [pair.name for pair in found.pairs] == names
    assert [read_bytes(pair.image) for pair in found.pairs] == [pair.image.read_bytes() for pair in some]
    (tmp_path / "out" / INDEX_NAME).unlink()  # as if another tool had written them
    again = find_in_shards(Config(data_dir=str(tmp_path / "out"), checkpoint_dir=str(tmp_path / "runs")))
    assert [read_bytes(pair.mask) for pair in again.pairs] == [pair.mask.read_bytes() for pair in some]


def test_a_file_that_changes_meanwhile_is_told(tmp_path, pairs):
    copy = tmp_path / "a.png"
    copy.write_bytes(pairs[0].image.read_bytes())
    some = scanned([Pair("a", copy, pairs[0].mask)])
    copy.write_bytes(pairs[1].image.read_bytes())
    with pytest.raises(DataError, match=r"a.png: changed while the shards were written; start again"):
        write_shards(FoundPairs((), ""), some, "x", Files(str(tmp_path / "out")), 10**9, lambda: None)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_only_what_an_earlier_start_left_unfinished_is_overwritten(tmp_path, pairs, monkeypatch):
    place = Files(str(tmp_path / "out"))
    refuse_other_files(place)
    write = Files.write

    def interrupted(self, name, fill):
        if name == "x-000002.tar":
            raise KeyboardInterrupt
        write(self, name, fill)

    monkeypatch.setattr(Files, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_shards(FoundPairs(tuple(pairs), ""), scanned(pairs), "x", place, 25_000, lambda: None)
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [UNFINISHED, "x-000000.tar", "x-000001.tar"]
    refuse_other_files(place)
    (tmp_path / "out/.x-000001.tar.8e1ryv1v.tmp").write_bytes(b"left by a kill")
    (tmp_path / "out/mine.txt").write_bytes(b"")
    write_shards(FoundPairs(tuple(pairs), ""), scanned(pairs), "x", place, 10**9, lambda: None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.txt", INDEX_NAME, "x-000000.tar"]
    with pytest.raises(DataError, match=r"--out: there are shards in .* \(shards.json\)|x-000000.tar\)"):
        refuse_other_files(place)


def test_shards_are_uploaded_whole(tmp_path, pairs):
    remote, local = Files(f"memory://{tmp_path.name}/out/", workspace=tmp_path / "work"), Files(str(tmp_path / "local"))
    for place in (remote, local):
        refuse_other_files(place)
        write_shards(FoundPairs(tuple(pairs), ""), scanned(pairs), "x", place, 25_000, lambda: None)
    assert remote.find() == sorted(local.find())
    assert [remote.read(name) for name in local.find()] == [local.read(name) for name in local.find()]
    assert not list((tmp_path / "work").iterdir())
    with pytest.raises(DataError, match="there are shards in"):
        refuse_other_files(remote)


def test_two_commands_do_not_write_to_one_place(tmp_path, pairs):
    place = Files(str(tmp_path))

    def other_command():
        with pytest.raises(DataError, match="another shard command is writing to"):
            write_shards(FoundPairs((), ""), scanned(pairs[:1]), "x", place, 10**9, lambda: None)

    write_shards(FoundPairs((), ""), scanned(pairs[:1]), "x", place, 10**9, other_command)
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX_NAME, "x-000000.tar"]
