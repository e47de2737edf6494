"""Which shards data_dir names, and how they are opened: with their own index, or with one that is made once."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from helpers.shard_server import serving
from helpers.shards import write_index_of, write_tar
from unet_trainer.config.schema import Config
from unet_trainer.datasets import shard_places
from unet_trainer.datasets.shard_places import ShardPlace, find_place, open_shards
from unet_trainer.images.file_bytes import DataError
from unet_trainer.shards.shard_index import INDEX_NAME, ShardIndex, index_to_json
from unet_trainer.shards.shard_store import find_member
from unet_trainer.system.console import Console

FIRST, SECOND = {"a": (b"image a", b"mask a")}, {"b": (b"image b", b"mask b"), "c": (b"image c", b"mask c")}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shards"


@pytest.fixture
def index(folder):
    """Shards x-000.tar and x-001.tar, not yet with their index."""
    return write_index_of(folder, **{"x-000": FIRST, "x-001": SECOND})


@pytest.fixture
def config(folder, tmp_path):
    return lambda data_dir=folder, **others: Config(data_dir=str(data_dir), checkpoint_dir=str(tmp_path / "runs"), **others)


def write_index(folder, index):
    (folder / INDEX_NAME).write_text(index_to_json(index))


def names(store):
    return [sample.name for shard in store.index.shards for sample in shard.samples]


@pytest.mark.parametrize("data_dir", ["https://host/a.tar.gz", "s3://b/a-{0..3}.tar.zst", "data/a.TGZ"])
def test_compressed_shards_are_refused_by_name(data_dir):
    with pytest.raises(DataError, match=r"^data_dir: .* must be plain tar: decompress it; an archive of folders .* unpacked$"):
        find_place(data_dir)


@pytest.mark.parametrize(
    ("data_dir", "root", "shards"),
    [
        ("s3://bucket/cells", "s3://bucket/cells", None),
        ("s3://bucket/cells/", "s3://bucket/cells", None),
        ("s3:/bucket/cells", "s3://bucket/cells", None),
        ("https://host:80/x/shards.json", "https://host:80/x", None),
        ("gs://b/x/a-7.tar", "gs://b/x", ("a-7.tar",)),
        ("gs://b/a-{08..11}.tar", "gs://b", ("a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar")),
        ("data/a-{0..1}.tar", "data", ("a-0.tar", "a-1.tar")),
    ],
)
def test_urls_and_patterns_name_shards(data_dir, root, shards):
    assert find_place(data_dir) == ShardPlace(root, shards)


def test_folders_are_known_by_what_they_hold(tmp_path, folder, index):
    assert find_place(str(folder)) == ShardPlace(str(folder))
    write_index(folder, index)
    assert find_place(str(folder)) == find_place(str(folder / INDEX_NAME)) == ShardPlace(str(folder))
    assert find_place(str(tmp_path / "missing")) is None
    (tmp_path / "plain/images").mkdir(parents=True)
    (tmp_path / "plain/images/a.png").write_bytes(b"")
    shutil.copy(folder / "x-000.tar", tmp_path / "plain/backup.tar")
    assert find_place(str(tmp_path / "plain")) is None
    (tmp_path / "odd.tar").mkdir()
    assert find_place(str(tmp_path / "odd.tar")) is None


@pytest.mark.parametrize("pattern", ["a-{5..2}.tar", "a-{0..99999999}.tar"])
def test_a_pattern_without_numbers_or_with_too_many_is_refused(pattern):
    with pytest.raises(DataError, match=r"data_dir: .*need \{FIRST\.\.LAST\}"):
        find_place(f"data/{pattern}")


def test_other_data_are_not_opened(tmp_path, config):
    assert open_shards(config(tmp_path)) is None


def test_the_index_beside_the_shards_is_used(folder, index, config, tmp_path):
    write_index(folder, ShardIndex(index.shards, ("sky", "road"), 2))
    store = open_shards(config())
    assert (names(store), store.index.class_names, store.index.num_classes) == (["a", "b", "c"], ("sky", "road"), 2)
    assert find_member(folder / "x-001.tar/c.png").read() == b"image c"
    assert not (tmp_path / "runs").exists()


def test_some_of_the_shards_can_be_named(folder, index, config):
    write_index(folder, index)
    assert names(open_shards(config(folder / "x-001.tar"))) == ["b", "c"]
    assert names(open_shards(config(folder / "x-{000..001}.tar"))) == ["a", "b", "c"]


@pytest.mark.parametrize("how", ["missing", "longer"])
def test_shards_that_are_missing_or_changed_are_told_at_the_start(folder, index, config, how):
    write_index(folder, index)
    if how == "missing":
        (folder / "x-001.tar").unlink()
    else:
        (folder / "x-001.tar").write_bytes((folder / "x-001.tar").read_bytes() * 2)
    message = {"missing": r"x-001.tar: No such file", "longer": r"has 20480 bytes, and 10240 by the index"}[how]
    with pytest.raises(DataError, match=f"data_dir: .*{message}"):
        open_shards(config())


def test_a_damaged_index_is_told(folder, index, config):
    (folder / INDEX_NAME).write_text("{")
    with pytest.raises(DataError, match=r"shards.json: no index of shards .*write the shards again with shard"):
        open_shards(config())


def test_shards_of_other_tools_are_read_once(folder, index, config, monkeypatch):
    write_tar(folder / "more/y-val-0.tar", {"d.jpg": b"image d", "d.seg.png": b"mask d", "e.jpg": b"alone"})
    read = []
    index_one = shard_places._index_one
    monkeypatch.setattr(
        shard_places, "_index_one", lambda place, name, *others: (read.append(name), index_one(place, name, *others))[1]
    )
    for expected in (["more/y-val-0.tar", "x-000.tar", "x-001.tar"], []):
        read.clear()
        store = open_shards(config(), Console())
        assert names(store) == ["d", "a", "b", "c"]
        assert store.index.unpaired == ("more/y-val-0.tar/e",)
        assert read == expected
    assert find_member(folder / "more/y-val-0.tar/d.seg.png").read() == b"mask d"
    write_tar(folder / "x-001.tar", {"z.jpg": b"image", "z.png": b"mask"})
    assert names(open_shards(config())) == ["d", "a", "z"]
    assert read == ["x-001.tar"]


def test_a_damaged_note_of_what_was_read_is_made_anew(folder, index, config, tmp_path):
    open_shards(config())
    (note,) = (tmp_path / "runs/.shards").glob("index-*.json")
    for damage in ("", "[]", json.dumps({"stamps": {}, "index": "x"})):
        note.write_text(damage)
        assert names(open_shards(config())) == ["a", "b", "c"]


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else False, reason="root may write anywhere")
def test_where_nothing_can_be_written_shards_are_read_all_the_same(folder, index, config, tmp_path):
    (tmp_path / "runs").mkdir(mode=0o555)
    assert names(open_shards(config())) == ["a", "b", "c"]


def test_a_broken_shard_of_another_tool_is_named(folder, config):
    folder.mkdir()
    (folder / "x.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(DataError, match=r"data_dir: .*x.tar: no whole tar file"):
        open_shards(config())


@pytest.fixture
def server(folder, index):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with serving(folder) as found:
        yield found


def test_remote_shards_are_opened_with_their_index_and_kept_as_they_are_read(server, folder, index, config, tmp_path):
    write_index(folder, index)
    store = open_shards(config(server.url), Console())
    assert names(store) == ["a", "b", "c"]
    assert store.read("x-001.tar", "b.png") == b"image b"
    assert store.cache.allocated() > 0
    assert store.cache.folder.parent == tmp_path / "runs/.shards"
    num_requests = sum(server.requests.values())
    assert open_shards(config(server.url)) is store  # within one process it is not read again
    assert sum(server.requests.values()) == num_requests


def test_remote_shards_of_other_tools_are_indexed_once(server, config):
    store = open_shards(config(server.url), Console())
    assert names(store) == ["a", "b", "c"]
    assert store.read("x-001.tar", "c.mask.png") == b"mask c"
    num_bytes = server.num_bytes
    shard_places._opened.clear()
    assert names(open_shards(config(f"{server.url}/"))) == ["a", "b", "c"]
    assert server.num_bytes - num_bytes < 1000  # the list of the folder


def test_remote_shards_can_be_named_by_a_pattern(server, config):
    assert names(open_shards(config(f"{server.url}/x-{{000..001}}.tar"))) == ["a", "b", "c"]


def test_with_cache_gb_0_nothing_is_kept(server, folder, index, config, tmp_path):
    write_index(folder, index)
    store = open_shards(config(server.url, cache_gb=0.0))
    assert store.read("x-001.tar", "b.png") == b"image b"
    assert store.cache is None
    assert not list((tmp_path / "runs").glob("**/*.tar"))


def test_a_small_disk_keeps_less_and_says_so(server, folder, index, config, monkeypatch, capsys):
    write_index(folder, index)
    monkeypatch.setattr(shard_places, "free_disk", lambda folder: 20_000)
    store = open_shards(config(server.url), Console())
    assert "half of what is free on the disk" in "".join(capsys.readouterr())
    assert store.cache.keeps("x-000.tar", 5000)
    assert not store.cache.keeps("x-001.tar", 10_000)


def test_a_place_without_shards_is_told(server, folder, config):
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(DataError, match=r"data_dir: http://.*: no shards.json there, and no .tar files"):
        open_shards(config(server.url))
    with pytest.raises(DataError, match=r"data_dir: http://.*"):
        open_shards(config(f"{server.url}/missing"))


def test_shards_that_are_not_finished_are_refused(folder, index, config):
    (folder / "unfinished").write_bytes(b"")
    with pytest.raises(DataError, match=r"the shards there are not finished .*start shard again"):
        open_shards(config())
    write_index(folder, index)
    assert names(open_shards(config())) == ["a", "b", "c"]


def test_remote_shards_that_are_not_finished_are_refused(server, folder, config):
    (folder / "unfinished").write_bytes(b"")
    with pytest.raises(DataError, match="not finished"):
        open_shards(config(server.url))


@pytest.mark.parametrize("url", ["http://h/a.tar?sig=abc", "https://h/x#y"])
def test_a_url_with_a_query_is_refused(url):
    with pytest.raises(DataError, match=r"with \? or #"):
        find_place(url)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    with pytest.raises(DataError, match=r"put it into ~/\.netrc") as raised:
        find_place("https://bob:s3cret@host/x")
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("pattern", ["{train,val}-0.tar", "a-{0..1}-{0..1}.tar"])
def test_other_patterns_are_refused(pattern):
    with pytest.raises(DataError, match=r"one \{FIRST\.\.LAST\} is understood"):
        find_place(f"s3://b/{pattern}")


def test_some_shards_of_a_place_and_then_others_are_what_they_are(server, folder, index, config):
    write_index(folder, index)
    for _ in range(2):
        assert names(open_shards(config(f"{server.url}/x-000.tar"))) == ["a"]
        assert names(open_shards(config(f"{server.url}/x-001.tar"))) == ["b", "c"]


def test_named_shards_need_no_index(server, folder, config):
    (folder / INDEX_NAME).write_text("<html>not found</html>")
    assert names(open_shards(config(f"{server.url}/x-{{000..001}}.tar"))) == ["a", "b", "c"]


def test_another_tools_remote_shards_are_fetched_once_to_be_indexed(server, folder, config):
    open_shards(config(server.url))
    total = sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert total <= server.num_bytes < total + 2000  # and a list of the folder


def test_a_server_that_gives_whole_files_is_told_and_each_shard_kept(server, folder, index, config, capsys):
    write_index(folder, index)
    server.every = (1, "whole")
    store = open_shards(config(server.url), Console())
    assert "gives whole files only" in "".join(capsys.readouterr())
    for name in ("b", "c"):
        store.read("x-001.tar", f"{name}.png")
    assert server.requests["/x-001.tar"] == 1
