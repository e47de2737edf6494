"""Shards in a folder and behind a URL: how they are opened, their pairs, their files checked and fetched ahead, what is kept."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from helpers.no_files import needs_pipes, replace_by
from helpers.shard_server import serving
from helpers.shards import write_index_of, write_shard, write_tar
from unet_trainer.config.schema import Config
from unet_trainer.data import shard_store
from unet_trainer.data.find import find_dataset
from unet_trainer.data.pairs import FoundPairs, Pair
from unet_trainer.data.scan import scan_pairs
from unet_trainer.data.shard_index import INDEX_NAME, Member, Shard, ShardIndex, index_from_json, index_to_json
from unet_trainer.data.shard_store import Files, RangeCache, ShardStore
from unet_trainer.data.shards import (
    UNFINISHED,
    find_in_shards,
    find_place,
    open_shards,
    refuse_other_files,
    write_shards,
)
from unet_trainer.images.file_bytes import DataError, ShardError, read_bytes
from unet_trainer.system.console import Console

IMAGES = {f"k{number}": (bytes([number]) * 700, bytes([100 + number]) * 300) for number in range(6)}
EXPECTED = [content for pair in IMAGES.values() for content in pair]
ONE = (b"image", b"mask")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shards"


@pytest.fixture
def index(folder):
    """Shards x-000.tar and x-001.tar, not yet with their index."""
    items = list(IMAGES.items())
    return write_index_of(folder, **{"x-000": dict(items[:3]), "x-001": dict(items[3:])})


@pytest.fixture
def config(folder, tmp_path):
    return lambda data_dir=folder, **others: Config(
        **{"data_dir": str(data_dir), "checkpoint_dir": str(tmp_path / "runs"), **others}
    )


@pytest.fixture
def server(folder, index):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with serving(folder) as found:
        yield found


def write_index(folder, index):
    (folder / INDEX_NAME).write_text(index_to_json(index))


def names(store):
    return [sample.name for shard in store.index.shards for sample in shard.samples]


def stored(store):
    return [file for _, _, *files in store.samples for file in files]


def read(store, path):
    return read_bytes(store.find(f"{Path(store.files.root).as_posix()}/{path}"))


def contents(store):
    return [read_bytes(file) for file in stored(store)]


# Places


@pytest.mark.parametrize("data_dir", ["s3://bucket/x", "s3://bucket/x/", "s3:/bucket/x", "s3://bucket/x/shards.json"])
def test_a_url_names_a_folder_of_shards(data_dir):
    assert find_place(data_dir) == "s3://bucket/x"


@pytest.mark.parametrize(
    ("data_dir", "message"),
    [
        ("data/x.TGZ", r"name the folder with shards\.json, or unpack .* train_unet.py shard"),
        ("s3://b/a-{000..011}.tar", r"name the folder with shards\.json"),
        ("http://h/a.tar?sig=abc", r"with \? or #"),
        ("https://bob:s3cret@host/x", r"put it into ~/\.netrc"),
    ],
)
def test_places_that_cannot_be_read_are_refused_by_name_without_repeating_a_password(data_dir, message):
    with pytest.raises(DataError, match=f"data_dir: .*{message}") as raised:
        find_place(data_dir)
    assert "s3cret" not in str(raised.value)


# Opening


def test_the_index_beside_the_shards_is_used(folder, index, config, tmp_path):
    write_index(folder, ShardIndex(index.shards, ("sky", "road")))
    store = open_shards(config())
    assert (names(store), store.index.class_names) == (list(IMAGES), ("sky", "road"))
    assert read(store, "x-001.tar/k4.png") == IMAGES["k4"][0]
    assert store.find(str(folder / "x-001.tar/k9.png")) is None
    assert names(open_shards(config(folder / INDEX_NAME))) == list(IMAGES)
    assert not (tmp_path / "runs").exists()


@needs_pipes
def test_an_index_that_is_a_pipe_is_refused_and_not_waited_for(folder, index, config):
    write_index(folder, index)
    replace_by("pipe", folder / INDEX_NAME)
    with pytest.raises(DataError, match=r"data_dir: .*shards.json is no file"):
        open_shards(config())


def test_shards_that_are_missing_changed_unfinished_or_damaged_are_told_at_the_start(folder, index, config):
    def refused(message):
        with pytest.raises(DataError, match=f"data_dir: .*{message}"):
            open_shards(config())

    (folder / "unfinished").write_bytes(b"")
    refused("not finished .*start shard again")
    write_index(folder, index)
    assert names(open_shards(config())) == list(IMAGES)
    (folder / "x-001.tar").write_bytes((folder / "x-001.tar").read_bytes() * 2)
    refused("has 20480 bytes, and 10240 by the index")
    (folder / "x-001.tar").unlink()
    refused("x-001.tar is not there")
    (folder / INDEX_NAME).write_text("{")
    refused("shards.json: not an index of shards .*write them again with shard")
    for path in folder.iterdir():
        path.unlink()
    (folder / "x.tar").write_bytes(b"no tar file" * 100)
    refused("there is no shards.json; shards that other tools made are not read: unpack .* shard data_dir=FOLDER")


def test_what_is_fetched_of_remote_shards_is_kept_on_the_disk_within_its_bounds(
    server, folder, index, config, tmp_path, monkeypatch
):
    write_index(folder, index)
    store = open_shards(config(server.url))
    assert read(store, "x-001.tar/k3.png") == IMAGES["k3"][0]
    (kept,) = store.cache.folder.iterdir()
    assert kept.parent.parent == tmp_path / "runs/.shards"
    assert open_shards(config(server.url, cache_gb=0.0)).cache is None
    monkeypatch.setattr(shard_store, "free_disk", lambda folder: 20_000)
    assert open_shards(config(f"{server.url}/", checkpoint_dir=str(tmp_path / "other"))).cache.kept == set()
    monkeypatch.setattr(shard_store, "free_disk", lambda folder: 25_000)
    assert open_shards(config(server.url, checkpoint_dir=str(tmp_path / "third"))).cache.kept == {"x-000.tar"}


def test_a_server_that_gives_whole_files_only_is_refused_with_what_to_do(server, folder, index, config):
    write_index(folder, index)
    server.always = "whole"
    with pytest.raises(DataError, match=r"gives whole files only, .* need a server with HTTP ranges, .* or a copy"):
        open_shards(config(server.url))


# Pairs


def test_pairs_have_the_names_parts_and_groups_of_the_index(folder, config):
    kinds = {"train": {"p1_a": ONE, "p2_b": ONE}, "val": {"c": ONE}, "test": {"d": ONE}}
    shards = [
        write_shard(folder, f"x-{part}-000000.tar", contents, part=part, group="g" if part == "train" else "")
        for part, contents in kinds.items()
    ]
    write_index(folder, ShardIndex(tuple(shards), ("sky", "road")))
    found = find_in_shards(config())
    expected = [("p1_a", "train", "g"), ("p2_b", "train", "g"), ("c", "val", "")]
    assert [(pair.name, pair.part, pair.group) for pair in found.pairs] == expected
    assert [pair.name for pair in found.test] == ["d"]
    assert found.pairs[1].image == folder / "x-train-000000.tar/p2_b.png"
    assert found.pairs[1].shown_mask == str(folder / "x-train-000000.tar/p2_b.mask.png")
    assert (found.class_names, found.num_classes, found.is_divided) == (("sky", "road"), 2, True)
    assert found.rule == "3 shards, 0.0307 MB"
    assert find_dataset(config()) == found
    write_index(folder, ShardIndex((shards[0],)))
    grouped = find_dataset(config(group_pattern=r"(p\d+)_"))
    assert [(pair.part, pair.group) for pair in grouped.pairs] == [(None, "p1"), (None, "p2")]


def test_settings_that_do_not_fit_are_told_and_keys_of_two_shards_are_two_pairs(folder, config):
    write_index(folder, write_index_of(folder, x={"a": ONE}, y={"a": ONE}))
    assert [pair.name for pair in find_in_shards(config()).pairs] == ["x/a", "y/a"]
    for key in ("image_dir", "mask_dir", "mask_suffix"):
        with pytest.raises(DataError, match=f"{key}: .* holds shards, .* leave it out"):
            find_in_shards(config(**{key: "x"}))


# Files


class FolderFiles(Files):
    """A folder as if it were remote. Counts what is fetched."""

    def __init__(self, folder):
        super().__init__(str(folder))
        self.is_remote = True
        self.fetched, self.spoil = [], lambda content: content

    def read(self, name, start=0, stop=None):
        self.fetched.append((name, start, stop))
        return self.spoil(super().read(name, start, stop))


@pytest.fixture
def remote(folder, index):
    return ShardStore(FolderFiles(folder), index)


def test_every_file_is_read_and_of_a_remote_place_ahead_and_bounded(folder, index, remote, monkeypatch):
    assert contents(ShardStore(Files(str(folder)), index)) == contents(remote) == EXPECTED
    remote.files.fetched.clear()
    remote.read_ahead(stored(remote))
    assert contents(remote) == EXPECTED
    assert len(remote.files.fetched) == 12
    assert not remote._ahead.contents  # what was read is not kept in memory
    monkeypatch.setattr(shard_store, "AHEAD_BYTES", 4000)
    remote.read_ahead(stored(remote)[:-2])
    assert 0 < sum(map(len, remote._ahead.contents.values())) <= 4000
    assert contents(remote) == EXPECTED


def test_what_fails_while_it_is_read_ahead_is_tried_again_and_told_where_it_is_read(server, folder, index):
    """Of a web server, whose parts come side by side."""
    store = ShardStore(Files(server.url, (0.01,) * 6), index)
    server.faults.extend([503, "cut", "garbage", "hang up", "whole", 500])
    store.read_ahead(stored(store))
    assert contents(store) == EXPECTED
    server.always = 503
    store.read_ahead(stored(store)[:2])
    with pytest.raises(ShardError, match=r"x-000.tar cannot be read .*503.*7 tries"):
        read_bytes(stored(store)[0])


def test_damaged_content_is_fetched_again_and_refused_if_it_stays_so(remote):
    answers = iter([True, True, False])
    remote.files.spoil = lambda content: bytes(len(content)) if next(answers) else content
    assert read(remote, "x-000.tar/k0.png") == IMAGES["k0"][0]
    remote.files.spoil = lambda content: bytes(len(content))
    with pytest.raises(ShardError, match=r"its content differs from the index .*have changed since they were indexed"):
        read(remote, "x-000.tar/k1.png")


def test_a_local_shard_that_has_changed_or_is_gone_is_told(folder, index):
    store = ShardStore(Files(str(folder)), index)
    data = bytearray((folder / "x-000.tar").read_bytes())
    data[index.shards[0].samples[0].image.offset] ^= 1
    (folder / "x-000.tar").write_bytes(data)
    with pytest.raises(ShardError, match="its content differs from the index"):
        read(store, "x-000.tar/k0.png")
    assert read(store, "x-000.tar/k1.png") == IMAGES["k1"][0]
    (folder / "x-000.tar").write_bytes(data[:600])
    with pytest.raises(ShardError, match=r"x-000.tar cannot be read \(0 of 700 bytes came\)"):
        read(store, "x-000.tar/k1.png")
    (folder / "x-001.tar").unlink()
    with pytest.raises(ShardError, match=r"x-001.tar is not there"):
        read(store, "x-001.tar/k4.png")


# What is kept of remote shards


PAGE = 4096
SHARDS = [Shard("a.tar", 10 * PAGE, ()), Shard("x/b.tar", 10 * PAGE, ())]


def test_what_was_fetched_is_found_by_the_next_start_and_damage_fetched_again(folder, index, tmp_path):
    def fetched():
        cache = RangeCache(tmp_path / "cache", "s3://b", index.shards, 10**9)
        store = ShardStore(FolderFiles(folder), index, cache)
        assert contents(store) == EXPECTED
        return len(store.files.fetched), cache

    assert fetched()[0] == 12
    number, cache = fetched()
    assert number == 0
    kept = cache.path("x-000.tar")
    data = bytearray(kept.read_bytes())
    data[index.shards[0].samples[1].mask.offset + 5] ^= 1
    kept.write_bytes(data)
    assert [fetched()[0], fetched()[0]] == [1, 0]


@needs_pipes
def test_links_are_never_written_through_and_pipes_not_waited_for(tmp_path):
    """Of the file of a shard and of its folder."""
    victim, parent = tmp_path / "victim", tmp_path / "cache"
    victim.write_bytes(b"x" * 20 * PAGE)
    place = RangeCache(parent, "s3://one", SHARDS, 100 * PAGE)
    place.path("a.tar").symlink_to(victim)
    for kind in ("link", "pipe"):
        if kind == "pipe":
            replace_by("pipe", place.path("a.tar"))
        place.write("a.tar", Member("a.png", 0, 5, 0), b"other")
        assert place.read("a.tar", Member("a.png", 0, 5, 0)) == b""
    place.folder.rename(tmp_path / "elsewhere")
    place.folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="it is a link to"):
        RangeCache(parent, "s3://one", SHARDS, 100 * PAGE)
    assert victim.read_bytes() == b"x" * 20 * PAGE


# Shards that are written: the files byte for byte, in their order and parts


@pytest.fixture
def pairs(tiny_data):
    images = sorted((tiny_data / "images").iterdir())
    masks = sorted((tiny_data / "masks").iterdir())
    return [Pair(image.stem, image, mask) for image, mask in zip(images, masks, strict=True)]


def scanned(pairs):
    return [(pair, *facts) for pair, facts in zip(pairs, scan_pairs(pairs, Console(io.StringIO())), strict=True)]


def written(pairs, place, name="x", shard_bytes=10**9, ticks=None):
    files = place if isinstance(place, Files) else Files(str(place))
    tick = (lambda: None) if ticks is None else (lambda: ticks.append(1))
    return write_shards(FoundPairs(tuple(pairs), ""), scanned(pairs), name, files, shard_bytes, tick)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def tar_contents(folder):
    found = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            found |= {f"{path.name}/{info.name}": archive.extractfile(info).read() for info in archive}
    return found


def test_the_files_are_written_byte_for_byte_with_their_facts_parts_and_groups(tmp_path, pairs):
    ticks = []
    index = written(pairs, tmp_path / "out", "my data!", ticks=ticks)
    files = ((pair, path) for pair in pairs for path in (pair.image, pair.mask))
    assert tar_contents(tmp_path / "out") == {
        f"my_data-000000.tar/{pair.name}{'.mask' if path == pair.mask else ''}{path.suffix}": path.read_bytes()
        for pair, path in files
    }
    assert names_in(tmp_path / "out") == ["my_data-000000.tar", INDEX_NAME]
    read = index_from_json((tmp_path / "out" / INDEX_NAME).read_text())
    assert read == index_from_json(index_to_json(index))
    assert [sample.name for sample in read.shards[0].samples] == [pair.name for pair in pairs]
    assert read.shards[0].samples[0].image_facts["height"] == 64
    assert len(ticks) == 12
    parts = ["train", "train", "val", "test"]
    some = [Pair(pair.name, pair.image, pair.mask, part, f"g{part}") for pair, part in zip(pairs, parts, strict=False)]
    index = written(some, tmp_path / "parts")
    assert [shard.name for shard in index.shards] == ["x-train-000000.tar", "x-val-000000.tar", "x-test-000000.tar"]
    samples = [(sample.part, sample.group) for shard in index.shards for sample in shard.samples]
    assert samples == [(part, f"g{part}") for part in parts]


def test_names_of_any_bytes_survive(tmp_path, pairs):
    names = ["a b", "line\nbreak", os.fsdecode(b"\xff\xfe"), "é", "e\u0301", "x" * 240, "%41", "quote'\"", "{0..9}"]
    some = [Pair(name, pair.image, pair.mask) for name, pair in zip(names, pairs, strict=False)]
    written(some, tmp_path / "out")
    config = Config(data_dir=str(tmp_path / "out"), checkpoint_dir=str(tmp_path / "runs"))
    found = find_in_shards(config)
    assert [pair.name for pair in found.pairs] == names
    assert [read_bytes(pair.image) for pair in found.pairs] == [pair.image.read_bytes() for pair in some]
    assert [read_bytes(pair.mask) for pair in found.pairs] == [pair.mask.read_bytes() for pair in some]


def test_a_file_that_changes_meanwhile_is_told(tmp_path, pairs):
    copy = tmp_path / "a.png"
    copy.write_bytes(pairs[0].image.read_bytes())
    some = scanned([Pair("a", copy, pairs[0].mask)])
    copy.write_bytes(pairs[1].image.read_bytes())
    with pytest.raises(DataError, match=r"a.png: changed while the shards were written; start again"):
        write_shards(FoundPairs((), ""), some, "x", Files(str(tmp_path / "out")), 10**9, lambda: None)
    assert not list((tmp_path / "out").glob("*.tar"))


def test_only_what_an_earlier_start_left_unfinished_is_overwritten(tmp_path, pairs, monkeypatch):
    out = tmp_path / "out"
    refuse_other_files(Files(str(out)))
    writing = Files.writing

    def interrupted(self, name):
        if name == "x-000002.tar":
            raise KeyboardInterrupt
        return writing(self, name)

    monkeypatch.setattr(Files, "writing", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(pairs, out, shard_bytes=25_000)
    monkeypatch.undo()
    assert names_in(out) == [UNFINISHED, "x-000000.tar", "x-000001.tar"]
    refuse_other_files(Files(str(out)))
    (out / ".x-000001.tar.8e1ryv1v.tmp").write_bytes(b"left by a kill")
    (out / "mine.txt").write_bytes(b"")
    write_tar(out / "mine/other.tar", {})  # in a folder below: not in the way
    written(pairs, out)
    assert names_in(out) == ["mine", "mine.txt", INDEX_NAME, "x-000000.tar"]
    with pytest.raises(DataError, match=r"--out: there are shards in .* \(shards.json\)|x-000000.tar\)"):
        refuse_other_files(Files(str(out)))


def test_shards_are_uploaded_whole(tmp_path, pairs):
    remote, local = Files(f"memory://{tmp_path.name}/out/"), Files(str(tmp_path / "local"))
    for place in (remote, local):
        refuse_other_files(place)
        written(pairs, place, shard_bytes=25_000)
    assert remote.find() == sorted(local.find())
    assert [remote.read(name) for name in local.find()] == [local.read(name) for name in local.find()]
    with pytest.raises(DataError, match="there are shards in"):
        refuse_other_files(remote)
