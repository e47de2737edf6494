"""The index of shards and the tar files: written and read back, hostile ones refused, other tools' shards indexed."""

import gzip
import io
import json
import tarfile
import zlib

import pytest

from helpers.shards import write_tar
from unet_trainer.data.shard_index import (
    BLOCK,
    Member,
    Sample,
    Shard,
    ShardIndex,
    add_member,
    index_from_json,
    index_shard,
    index_to_json,
    list_members,
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
        ShardIndex(()),
        ShardIndex((Shard("a.tar", 0, ()),), unpaired=("a.tar/x",), class_file=("classes.txt", "sky\nroad\n")),
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
    assert list(list_members("x.tar", io.BytesIO(data))) == [member[:3] for member in members]
    assert {member.name: data[member.offset : member.end] for member in members} == FILES


def tar_of(**kinds):
    """A tar file of members of these kinds."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind in kinds.items():
            info = tarfile.TarInfo(f"{name}.png")
            info.type, info.linkname, info.size = kind, "a.png", 3 if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"abc"))
    return file.getvalue()


def test_folders_and_links_are_no_members_and_hard_links_are_refused_with_the_fix():
    """Samples of hard links would be missing without a word."""
    data = tar_of(d=tarfile.DIRTYPE, link=tarfile.SYMTYPE, pipe=tarfile.FIFOTYPE, a=tarfile.REGTYPE)
    ((name, offset, length),) = list_members("x.tar", io.BytesIO(data))
    assert (name, data[offset : offset + length]) == ("a.png", b"abc")
    why = r"b\.png is a hard link or a sparse file: pack the files again, with tar --hard"
    with pytest.raises(ShardError, match=why):
        list(list_members("x.tar", io.BytesIO(tar_of(b=tarfile.LNKTYPE))))


def header(size, kind=tarfile.REGTYPE):
    """Of a member, with a size that tarfile would not write, in base 256."""
    info = tarfile.TarInfo("a.png")
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (size % 256**12).to_bytes(12, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def damaged_header():
    data, members = written()
    damaged = bytearray(data)
    damaged[members[2].offset - BLOCK + 150] ^= 1  # its checksum
    return bytes(damaged)


END = bytes(2 * BLOCK)
NESTED = tarfile.TarInfo._create_pax_generic_header({"comment": "x"}, tarfile.XHDTYPE, "utf-8") * 3000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(written()[0]), "compressed has to be decompressed"),
        (b"", "not a complete tar file"),
        (written()[0][: written()[1][2].offset + 10], "not a complete tar file"),
        (written()[0][: 3 * BLOCK], "no end marker"),  # between two members: tarfile takes it for whole
        (written()[0] + b"signature", "not a complete tar file"),
        (damaged_header(), "not a complete tar file"),
        (2 * written()[0], r"not a complete tar file \(no end marker, .*tar -xif"),  # two archives, joined with cat
        (header(-512) + END, "not a complete tar file"),
        (3 * header(0) + header(-512) + written()[0], "not a complete tar file"),
        (header(-512, tarfile.XHDTYPE) + END, "tar file"),
        (header(2**62, tarfile.GNUTYPE_LONGNAME) + END, "tar file"),
        (NESTED + END, "not a complete tar file"),
    ],
)
def test_what_is_no_whole_tar_file_is_refused_and_never_read_endlessly(data, message):
    with pytest.raises(ShardError, match=message):
        for _ in zip(range(1000), list_members("x.tar", io.BufferedReader(io.BytesIO(data))), strict=False):
            pass


@pytest.mark.parametrize(
    ("name", "part", "image", "mask"),
    [
        ("train/a-000.tar", "train", "a.jpg", "a.png"),
        ("cells_val_000.tar", "val", "a.png", "a.mask.png"),
        ("Test-1.tar", "test", "./a.webp", "./a.gt.bmp"),
        ("contest-0.tar", "", "train/cells/a.jpg", "train/cells/a.seg.png"),
        ("train-val-0.tar", "", "a.input.png", "a.target.png"),
    ],
)
def test_pairs_of_other_tools_are_found_by_their_names_and_the_part_by_that_of_the_shard(
    tmp_path, name, part, image, mask
):
    write_tar(tmp_path / "a.tar", {mask: b"mask", "a.json": b"{}", "a.txt": b"caption", image: b"image"})
    data = (tmp_path / "a.tar").read_bytes()
    shard, unpaired = index_shard(name, len(data), io.BytesIO(data))
    (sample,) = shard.samples
    assert (sample.part, unpaired) == (part, [])
    for member, name, content in ((sample.image, image, b"image"), (sample.mask, mask, b"mask")):
        assert (data[member.offset : member.end], member.checksum) == (content, zlib.crc32(content))
        assert member.name == name.removeprefix("./")
