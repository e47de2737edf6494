"""Files in shards: local and remote, checked, fetched ahead and kept; damage and changes told."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from helpers.shard_server import serving
from helpers.shards import write_index_of, write_tar
from unet_trainer.shards import shard_store
from unet_trainer.shards.range_cache import RangeCache
from unet_trainer.shards.remote_files import RemoteFiles
from unet_trainer.shards.shard_index import Sample, Shard, ShardIndex
from unet_trainer.shards.shard_store import ShardStore, find_member, find_store, open_store
from unet_trainer.shards.tar_files import ShardError

IMAGES = {f"k{number}": (bytes([number]) * 700, bytes([100 + number]) * 300) for number in range(6)}
FIRST, SECOND = dict(list(IMAGES.items())[:3]), dict(list(IMAGES.items())[3:])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shards"


@pytest.fixture
def index(folder):
    return write_index_of(folder, a=FIRST, b=SECOND)


class FolderFiles(RemoteFiles):
    """A folder as if it were remote. Counts what is fetched."""

    def __init__(self, folder):
        super().__init__(())
        self.folder, self.fetched = folder, []
        self.spoil = lambda content: content

    def read(self, url, start=0, stop=None):
        self.fetched.append((url.removeprefix("s3://b/"), start, stop))
        return self.spoil((self.folder / url.removeprefix("s3://b/")).read_bytes()[start:stop])

    def size(self, url):
        return (self.folder / url.removeprefix("s3://b/")).stat().st_size


@pytest.fixture
def remote(folder, index):
    return ShardStore("s3://b", index, None, FolderFiles(folder))


def contents(store):
    names = [(shard.name, member.name) for shard in store.index.shards for sample in shard.samples for member in sample[1:3]]
    return [store.read(*name) for name in names]


EXPECTED = [content for pair in IMAGES.values() for content in pair]


def test_every_file_is_read_from_a_folder(folder, index):
    assert contents(ShardStore(str(folder), index)) == EXPECTED


def test_every_file_is_read_from_a_remote_place_and_a_pair_is_fetched_at_once(remote):
    assert contents(remote) == EXPECTED
    assert len(remote.files.fetched) == 6


def test_an_image_far_from_its_mask_is_fetched_alone(folder):
    files = {f"{key}.png": image for key, (image, _) in IMAGES.items()} | {
        f"{key}.mask.png": mask for key, (_, mask) in IMAGES.items()
    }
    members = write_tar(folder / "a.tar", files)
    samples = tuple(Sample(key, members[f"{key}.png"], members[f"{key}.mask.png"]) for key in IMAGES)
    store = ShardStore(
        "s3://b", ShardIndex((Shard("a.tar", (folder / "a.tar").stat().st_size, samples),)), None, FolderFiles(folder)
    )
    assert contents(store) == EXPECTED
    assert sum(stop - start for _, start, stop in store.files.fetched) == 6 * 1000


def test_what_was_fetched_is_kept_and_found_by_the_next_start(folder, index, tmp_path):
    for _ in range(2):
        cache = RangeCache(tmp_path / "cache", "s3://b", index.shards, 10**9)
        store = ShardStore("s3://b", index, cache, FolderFiles(folder))
        assert contents(store) == EXPECTED
    assert store.files.fetched == []


def test_what_is_damaged_in_the_cache_is_fetched_again(folder, index, tmp_path):
    cache = RangeCache(tmp_path / "cache", "s3://b", index.shards, 10**9)
    contents(ShardStore("s3://b", index, cache, FolderFiles(folder)))
    (kept,) = cache.folder.glob("*-a.tar")
    data = bytearray(kept.read_bytes())
    data[index.shards[0].samples[1].mask.offset + 5] ^= 1
    kept.write_bytes(data)
    for expected in (1, 0):
        store = ShardStore("s3://b", index, cache, FolderFiles(folder))
        assert contents(store) == EXPECTED
        assert len(store.files.fetched) == expected


def test_no_more_is_kept_than_was_allowed(folder, index, tmp_path):
    cache = RangeCache(tmp_path / "cache", "s3://b", index.shards, index.shards[0].num_bytes)
    contents(ShardStore("s3://b", index, cache, FolderFiles(folder)))
    store = ShardStore("s3://b", index, cache, FolderFiles(folder))
    assert contents(store) == EXPECTED
    assert {name for name, _, _ in store.files.fetched} == {"b.tar"}


def test_what_is_read_ahead_is_fetched_side_by_side_and_once(remote):
    together = threading.Barrier(6, timeout=60)
    spoil = remote.files.spoil
    remote.files.spoil = lambda content: (together.wait(), spoil(content))[1]  # passes only if all six are under way at once
    files = [remote.find(shard.name, member.name) for shard in remote.index.shards for one in shard.samples for member in one[1:3]]
    remote.read_ahead(files)
    remote.read_ahead(files)
    assert contents(remote) == EXPECTED
    assert len(remote.files.fetched) == 6


def test_what_is_read_ahead_is_bounded(remote, monkeypatch):
    monkeypatch.setattr(shard_store, "AHEAD_BYTES", 4000)
    files = [remote.find(shard.name, one.image.name) for shard in remote.index.shards for one in shard.samples]
    remote.read_ahead(files)
    assert contents(remote) == EXPECTED
    assert sum(span.stop - span.start for span in remote._process.spans) <= 8000


def test_an_error_while_reading_ahead_is_told_when_it_is_read_and_the_next_try_is_a_new_one(remote):
    def refuse(content):
        raise ShardError("s3://b/a.tar cannot be read")

    remote.files.spoil = refuse
    remote.read_ahead([remote.find("a.tar", "k0.png")])
    with pytest.raises(ShardError, match="cannot be read"):
        remote.read("a.tar", "k0.png")
    remote.files.spoil = lambda content: content
    assert remote.read("a.tar", "k0.png") == IMAGES["k0"][0]


def test_content_that_came_damaged_is_fetched_again(remote):
    answers = iter([True, True, False])
    remote.files.spoil = lambda content: bytes(len(content)) if next(answers) else content
    assert remote.read("a.tar", "k1.png") == IMAGES["k1"][0]


def test_a_remote_shard_that_has_changed_is_told(remote):
    remote.files.spoil = lambda content: bytes(len(content))
    with pytest.raises(ShardError, match=r"not what the index says of it .*have changed since they were indexed"):
        remote.read("a.tar", "k1.png")


def test_a_local_shard_that_has_changed_or_is_gone_is_told(folder, index):
    store = ShardStore(str(folder), index)
    store.check()
    data = bytearray((folder / "a.tar").read_bytes())
    data[index.shards[0].samples[0].image.offset] ^= 1
    (folder / "a.tar").write_bytes(data)
    with pytest.raises(ShardError, match="not what the index says of it"):
        store.read("a.tar", "k0.png")
    assert store.read("a.tar", "k1.png") == IMAGES["k1"][0]
    (folder / "a.tar").write_bytes(data[:600])
    with pytest.raises(ShardError, match=r"a.tar has 600 bytes, and 10240 by the index: .*write them again with shard"):
        store.check()
    with pytest.raises(ShardError, match="not what the index says"):
        store.read("a.tar", "k1.png")
    (folder / "b.tar").unlink()
    with pytest.raises(ShardError, match=r"b.tar: No such file or directory; the index names it"):
        ShardStore(str(folder), ShardIndex(index.shards[1:])).check()
    with pytest.raises(ShardError, match=r"b.tar: No such file"):
        store.read("b.tar", "k4.png")


def test_remote_shards_of_another_size_are_told(remote, folder):
    (folder / "b.tar").write_bytes(bytes(100))
    with pytest.raises(ShardError, match=r"s3://b/b.tar has 100 bytes, and 10240 by the index"):
        remote.check()


def test_many_shards_are_read_with_few_open_files(folder, monkeypatch):
    monkeypatch.setattr(shard_store, "MAX_HANDLES", 2)
    shards = {f"s{number}": {f"k{number}": (bytes([number]), b"m")} for number in range(10)}
    store = ShardStore(str(folder), write_index_of(folder, **shards))
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for _ in range(2):
        assert contents(store) == [content for number in range(10) for content in (bytes([number]), b"m")]
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


def test_threads_and_forked_processes_read_at_once(folder, index, remote):
    local = ShardStore(str(folder), index)
    for store in (local, remote):
        results = []
        threads = [
            threading.Thread(target=lambda into, store: into.append(contents(store)), args=(results, store)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        child = os.fork()
        if not child:
            os._exit(0 if contents(store) == EXPECTED else 1)
        for thread in threads:
            thread.join(60)
        assert results == [EXPECTED] * 8
        assert os.waitpid(child, 0)[1] == 0


def test_paths_below_a_shard_are_its_files(folder, index):
    path = folder / "a.tar/k0.png"
    assert find_member(path) is None
    store = open_store(ShardStore(str(folder), index))
    found = find_member(path)
    assert found is not None
    assert found.read() == IMAGES["k0"][0]
    assert find_store(str(folder)) is store
    for other in (
        folder / "a.tar",
        folder / "a.tar/none.png",
        folder / "c.tar/k0.png",
        Path("a.tar/k0.png"),
        folder.parent / "k0.png",
    ):
        assert find_member(other) is None


def test_paths_are_found_relative_to_the_current_folder_behind_urls_and_in_folders_of_shards(folder, index, monkeypatch):
    monkeypatch.chdir(folder)
    open_store(ShardStore(".", index))
    assert find_member(Path("b.tar/k4.png")) is not None
    nested = ShardIndex((Shard("x.tar.d/c.tar", 10240, tuple(index.shards[0].samples)),))
    open_store(ShardStore("https://host/x", nested))
    found = find_member(Path("https://host/x/x.tar.d/c.tar/k1.png"))
    assert found is not None
    assert found.shard == "x.tar.d/c.tar"


def test_the_stamp_of_a_file_tells_other_content(folder, index):
    store = ShardStore(str(folder), index)
    one, other = store.find("a.tar", "k0.png"), store.find("a.tar", "k1.png")
    assert one.stamp == store.find("a.tar", "k0.png").stamp != other.stamp


def test_a_web_server_that_fails_now_and_then_changes_nothing(folder, index, tmp_path):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    with serving(folder) as server:
        server.faults.extend([503, "cut", "garbage", 0.1, "hang up", "whole"])
        cache = RangeCache(tmp_path / "cache", server.url, index.shards, 10**9)
        store = ShardStore(server.url, index, cache, RemoteFiles((0.01,) * 6))
        store.check()
        store.read_ahead([store.find(shard.name, one.image.name) for shard in index.shards for one in shard.samples])
        assert contents(store) == EXPECTED
        assert not server.faults


def test_what_was_read_is_not_kept_in_memory(remote):
    remote.read_ahead([remote.find(shard.name, one.image.name) for shard in remote.index.shards for one in shard.samples])
    assert contents(remote) == EXPECTED
    assert not remote._process.spans
    assert remote._process.num_bytes == 0


def test_of_a_server_that_gives_whole_files_each_shard_is_fetched_once(folder, index, tmp_path):
    cache = RangeCache(tmp_path / "cache", "s3://b", index.shards, 10**9)
    store = ShardStore("s3://b", index, cache, FolderFiles(folder))
    store.gives_whole_files = True
    store.read_ahead([store.find(shard.name, one.image.name) for shard in index.shards for one in shard.samples])
    assert contents(store) == EXPECTED
    assert sorted(store.files.fetched) == [("a.tar", 0, None), ("b.tar", 0, None)]


def test_stores_of_one_root_with_other_shards_stay_open_beside_each_other(folder, index):
    for number, key in enumerate("ab"):
        open_store(ShardStore(str(folder), ShardIndex(index.shards[number : number + 1])), key)
    assert find_member(folder / "a.tar/k0.png") is not None
    assert find_member(folder / "b.tar/k4.png") is not None
    assert find_store("a").index.shards == index.shards[:1]
