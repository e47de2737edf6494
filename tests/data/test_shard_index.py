"""The index of shards and the tar files: written and read back, hostile ones refused."""

import io
import json
import tarfile

import pytest

from unet_trainer.data.shard_index import (
    Member,
    Sample,
    Shard,
    ShardIndex,
    add_member,
    index_from_json,
    index_to_json,
)
from unet_trainer.images.file_bytes import ShardError

SAMPLE = Sample(
    "cells/a", Member("a.png", 512, 10, 7), Member("a.mask.png", 1536, 0, 0), "val", "patient 1", {"height": 3}, None
)
INDEX = ShardIndex(
    (Shard("x/a-000000.tar", 4096, (SAMPLE, SAMPLE._replace(name="b"))), Shard("b.tar", 512, ())), ("sky", "Weg")
)
FILES = {
    "a.jpg": b"x" * 1000,
    "a.mask.png": b"",
    "folder/b.png": bytes(range(256)) * 2,
    "l" * 180 + ".png": b"long name",
    "Größe_名前.png": b"not ASCII",
}


@pytest.mark.parametrize(
    "index",
    [
        INDEX,
        ShardIndex(INDEX.shards, class_file=("classes.txt", "sky\nroad\n")),
    ],
)
def test_an_index_is_read_back_as_it_was(index):
    text = index_to_json(index)
    assert index_from_json(text) == index_from_json(text.encode()) == index


def changed(change):
    content = json.loads(index_to_json(INDEX))
    change(content)
    return json.dumps(content)


def sample_with(place, value):
    return changed(lambda content: content["shards"][0]["samples"][0].__setitem__(place, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not an index of shards"),
        ("[" * 100_000, "not an index of shards"),
        (changed(lambda content: content.update(format=9)), "format 9; this version reads format 2"),
        (changed(lambda content: content.update(shards=[])), "it lists no sample"),
        (changed(lambda content: content["shards"][0].update(name="../a.tar")), "no path below the shards"),
        (changed(lambda content: content["shards"][0].update(name="\ud800.tar")), "not an index of shards"),
        (changed(lambda content: content["shards"].append(content["shards"][0])), "is listed twice"),
        (changed(lambda content: content["shards"][0].update(num_bytes=1500)), "beyond the end of x/a-000000.tar"),
        (sample_with(1, ["a.png", "5", 1, 1]), "valid integer"),
        (sample_with(1, ["a.png", -1, 1, 1]), "greater than"),
        (sample_with(1, ["/a.png", 5, 1, 1]), "no path below the shards"),
        (sample_with(3, "holdout"), "not an index of shards"),
        (sample_with(5, [1]), "valid dict"),
        (changed(lambda content: content.update(class_file=["a", 5])), "class_file"),
    ],
)
def test_what_is_no_index_is_refused(text, message):
    with pytest.raises(ShardError, match=message):
        index_from_json(text)


def written(files=FILES):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        members = [add_member(archive, name, content) for name, content in files.items()]
    return file.getvalue(), members


def test_members_lie_where_their_offsets_say_and_the_bytes_depend_on_the_content_alone():
    data, members = written()
    assert data == written()[0]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {info.name: archive.extractfile(info).read() for info in archive} == FILES
    assert {member.name: data[member.offset : member.end] for member in members} == FILES
