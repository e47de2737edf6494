"""Tar files: members where tarfile and tar see them, the same bytes for the same content, and files that are none."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import tarfile

import pytest

from unet_trainer.shards.tar_files import BLOCK, ShardError, TarWriter, list_members, size_in_tar

FILES = {
    "a.jpg": b"x" * 1000,
    "a.mask.png": b"",
    "folder/b.png": bytes(range(256)) * 2,
    "l" * 180 + ".png": b"long name",
    "Größe_名前.png": b"not ASCII",
}


def written(files=FILES):
    file = io.BytesIO()
    writer = TarWriter(file)
    members = [writer.add(name, content) for name, content in files.items()]
    writer.finish()
    return file.getvalue(), members


def test_what_is_written_is_what_tarfile_reads():
    data, _ = written()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {info.name: archive.extractfile(info).read() for info in archive} == FILES


@pytest.mark.skipif(shutil.which("tar") is None, reason="there is no tar here")
def test_tar_unpacks_it(tmp_path):
    data, _ = written()
    (tmp_path / "a.tar").write_bytes(data)
    subprocess.run(["tar", "xf", "a.tar"], cwd=tmp_path, check=True)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == FILES


def test_offsets_are_where_the_content_lies():
    data, members = written()
    assert list(list_members(io.BytesIO(data))) == members
    assert {member.name: data[member.offset : member.offset + member.length] for member in members} == FILES
    assert members[0].offset == BLOCK
    assert len(data) % tarfile.RECORDSIZE == 0


def test_the_same_content_gives_the_same_bytes():
    assert written()[0] == written()[0]


@pytest.mark.parametrize("name", list(FILES))
def test_the_size_in_a_tar_file_is_known_before_it_is_written(name):
    file = io.BytesIO()
    writer = TarWriter(file)
    writer.add(name, FILES[name])
    assert size_in_tar(name, len(FILES[name])) == writer.num_bytes == len(file.getvalue())


def test_folders_and_links_are_no_members():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind in (("d", tarfile.DIRTYPE), ("link.png", tarfile.SYMTYPE), ("pipe", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        info = tarfile.TarInfo("d/" + "x" * 120 + ".png")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    (member,) = list_members(io.BytesIO(file.getvalue()))
    assert member.length == 3
    assert file.getvalue()[member.offset :][:3] == b"abc"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(written()[0]), r"compressed \(gzip\).*decompress it"),
        (b"\xfd7zXZ\0 and more", r"compressed \(xz\)"),
        (b"no tar file at all" * 100, "no whole tar file"),
        (b"", "no whole tar file"),
        (written()[0][:700], "no whole tar file"),
        (b"\xff" * 2048, "no whole tar file"),
    ],
)
def test_what_is_no_whole_tar_file_is_refused(data, message):
    with pytest.raises(ShardError, match=message):
        list(list_members(io.BytesIO(data)))


def test_a_file_that_is_cut_off_within_its_content_is_refused():
    data, members = written()
    with pytest.raises(ShardError, match="no whole tar file"):
        list(list_members(io.BytesIO(data[: members[2].offset + 10])))


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_file_that_is_cut_off_between_two_members_is_refused(number):
    """tarfile takes it for whole: the members after it would be missing in silence."""
    data, _ = written()
    ends = [start for start in range(BLOCK, len(data), BLOCK) if len(members_of(data[:start] + bytes(2 * BLOCK))) == number]
    with pytest.raises(ShardError, match=r"no mark of its end: cut off\?"):
        list(list_members(io.BytesIO(data[: ends[-1]])))


def members_of(data):
    try:
        return list(list_members(io.BytesIO(data)))
    except ShardError:
        return []


def test_a_damaged_header_in_the_middle_is_refused():
    data, members = written()
    damaged = bytearray(data)
    damaged[members[2].offset - BLOCK + 150] ^= 1  # its checksum
    with pytest.raises(ShardError, match=r"no whole tar file \(what stands at byte \d+ is no header\)"):
        list(list_members(io.BytesIO(bytes(damaged))))


def test_all_members_of_archives_that_were_joined_are_found():
    first, _ = written()
    second, _ = written({"c.jpg": b"c" * 700, "c.png": b"d"})
    joined = first + second
    members = list(list_members(io.BytesIO(joined)))
    assert {member.name: joined[member.offset : member.offset + member.length] for member in members} == {
        **FILES,
        "c.jpg": b"c" * 700,
        "c.png": b"d",
    }


def test_what_follows_the_end_and_is_no_archive_is_refused():
    with pytest.raises(ShardError, match="no whole tar file"):
        list(list_members(io.BytesIO(written()[0] + b"signature")))


def test_a_hard_link_is_a_second_name_of_a_member_before_it():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, kind, target in (
            ("a.png", tarfile.REGTYPE, ""),
            ("b.png", tarfile.LNKTYPE, "a.png"),
            ("c.png", tarfile.LNKTYPE, "x"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, 0 if target else 3
            archive.addfile(info, io.BytesIO(b"abc"))
    first, second = list_members(io.BytesIO(file.getvalue()))
    assert (second.name, second.offset, second.length) == ("b.png", first.offset, 3)
