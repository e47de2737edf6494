"""The index of shards: for each sample where its image and its mask lie in a tar file, with checksums, and facts about both.

It is a JSON file, shards.json, beside the shards that `shard` writes. Shards of other tools are indexed once: samples are found by
WebDataset's naming, in which the files of a sample share their name up to the first dot. Nothing is ever unpacked.
"""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from unet_trainer.images.file_bytes import ShardError
from unet_trainer.system.input_files import parse_json

INDEX_NAME = "shards.json"
UNFINISHED = "unfinished"  # a file that stands beside shards until their index is written
FORMAT = 1
MAX_CLASSES = 254
BLOCK = tarfile.BLOCKSIZE
NOT_PLAIN = "shards are read at any place and must be plain tar: decompress it"
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
# What damaged or hostile headers raise: wrong numbers, lengths beyond memory, headers of headers of headers.
TAR_ERRORS = (tarfile.TarError, EOFError, OverflowError, ValueError, MemoryError, RecursionError)
# Extensions of WebDataset, without the first dot, in lower case.
IMAGES = ("jpg", "jpeg", "png", "bmp", "tif", "tiff", "webp", "gif", "npy")
IMAGE_WORDS = ("image", "img", "input", "rgb", "photo")  # a.image.jpg
MASK_WORDS = ("mask", "masks", "seg", "segmentation", "label", "labels", "gt", "target", "annotation", "annot")  # a.seg.png
LOSSLESS = ("png", "tif", "tiff", "bmp", "gif", "npy")  # a mask beside a photo, a.png beside a.jpg, is one of these
CHUNK_BYTES = 2**22
PARTS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


class Member(NamedTuple):
    """A file in a shard."""

    name: str
    offset: int
    length: int
    checksum: int  # CRC-32

    @property
    def end(self) -> int:
        return self.offset + self.length


class Sample(NamedTuple):
    """An image and its mask in one shard."""

    name: str
    image: Member
    mask: Member
    part: str = ""  # train, val, test, or not divided
    group: str = ""
    image_facts: Mapping[str, Any] | None = None  # as the scan caches them
    mask_facts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Shard:
    name: str  # relative to the index, with slashes
    num_bytes: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class ShardIndex:
    shards: tuple[Shard, ...]
    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    unpaired: tuple[str, ...] = ()  # SHARD/KEY of samples of other tools without an image or without a mask
    class_file: tuple[str, str] | None = None  # name and text of the file that names the classes, if there was one

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


# The JSON file


def index_to_json(index: ShardIndex) -> str:
    """One line per sample, so that a person can read it and a tool can compare two."""
    head = {"format": FORMAT, **{name: getattr(index, name) for name in ("class_names", "num_classes", "unpaired", "class_file")}}
    shards = []
    for shard in index.shards:
        rows = ",\n".join(json.dumps(list(sample)) for sample in shard.samples)
        shards.append(f'{{"name": {json.dumps(shard.name)}, "bytes": {shard.num_bytes}, "samples": [\n{rows}\n]}}')
    return f'{json.dumps(head)[:-1]}, "shards": [\n' + ",\n".join(shards) + "\n]}\n"


def index_from_json(text: str | bytes) -> ShardIndex:
    """Raises ShardError, without the file's name, for what `index_to_json` cannot have written."""
    try:
        content = parse_json(text)
        if content["format"] != FORMAT:
            raise ShardError(f"format {content['format']!r:.20}; this version reads format {FORMAT}")
        names, number, class_file = content["class_names"], content["num_classes"], content["class_file"]
        _require(number is None or 1 <= _whole(number) <= MAX_CLASSES, number, "num_classes")
        _require(class_file is None or len(class_file) == 2, class_file, "class_file")
        index = ShardIndex(
            tuple(_shard(row) for row in content["shards"]),
            None if names is None else tuple(map(_text, names)),
            number,
            tuple(map(_text, content["unpaired"])),
            None if class_file is None else (_text(class_file[0]), _text(class_file[1])),
        )
        _require(len({shard.name for shard in index.shards}) == len(index.shards), "a shard is listed twice", "index")
        return index
    except ShardError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ShardError(f"not an index of shards ({error or type(error).__name__})") from None


def _shard(row: Any) -> Shard:
    name, num_bytes = _text(row["name"]), _whole(row["bytes"])
    is_inside = not name.startswith("/") and ".." not in PurePosixPath(name).parts
    _require(is_inside and name.endswith(".tar"), name, "name of a shard")
    return Shard(name, num_bytes, tuple(_sample(sample, num_bytes) for sample in row["samples"]))


def _sample(row: Any, num_bytes: int) -> Sample:
    name, image, mask, part, group, *facts = row
    _require(part in ("", "train", "val", "test"), part, "part")
    _require(len(facts) == 2 and all(one is None or isinstance(one, dict) for one in facts), facts, "facts")
    return Sample(_text(name), _member(image, num_bytes), _member(mask, num_bytes), part, _text(group), *facts)


def _member(row: Any, num_bytes: int) -> Member:
    name, *numbers = row
    member = Member(_text(name), *map(_whole, numbers))
    _require(member.name == path_in_shard(member.name), member.name, "name of a member")
    _require(member.end <= num_bytes, member.name, "place within its shard")
    return member


def _text(value: Any) -> str:
    _require(isinstance(value, str) and "\0" not in value, value, "text")
    value.encode("utf-8", "surrogateescape")  # a surrogate that stands for no byte of a name is a ValueError
    return str(value)


def _whole(value: Any) -> int:
    _require(type(value) is int and value >= 0, value, "whole number")
    return int(value)


def _require(is_right: bool, value: Any, what: str) -> None:
    if not is_right:
        raise ValueError(f"{what}: got {value!r:.60}")


# Tar files


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> Member:
    """Appends a file. Its header depends on name and content alone: no times, no owners."""
    archive.addfile(_header(name, len(content)), io.BytesIO(content))
    return Member(name, archive.offset - _padded(len(content)), len(content), zlib.crc32(content))


def size_in_tar(name: str, length: int) -> int:
    """Bytes that a file takes in a tar file, header included."""
    return len(_header(name, 0).tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")) + _padded(length)


def _header(name: str, length: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode = length, 0o644
    return info


def _padded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def list_members(file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of the plain files in a tar file, in their order; a hard link is a second name of one before it.

    Also of several archives that were joined (cat a.tar b.tar). Reads headers only. Raises ShardError, without the file's name:
    tarfile itself takes a damaged header, or a file that was cut off between two members, for the end.
    """
    size = file.seek(0, io.SEEK_END)  # a file of unknown size, as in /proc, has 0
    file.seek(0)
    start = file.read(6)
    if compression := next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None):
        raise ShardError(f"compressed ({compression}); {NOT_PLAIN}")
    known: dict[str, tuple[int, int]] = {}
    position: int | None = 0
    try:
        while position is not None:
            file.seek(position)
            with tarfile.TarFile(fileobj=file, mode="r") as archive:
                end = position
                while (info := archive.next()) is not None:
                    if info.size < 0 or archive.offset <= end:  # it would be read again, endlessly
                        raise ShardError(
                            f"not a complete tar file (the member at byte {info.offset} has a size of {info.size} bytes)"
                        )
                    end = archive.offset
                    archive.members.clear()  # type: ignore[attr-defined] # which it would keep for extracting
                    if info.issparse():
                        raise ShardError(f"{info.name} in it is stored as a sparse file; write it again without tar's --sparse")
                    if info.isreg():
                        known[info.name] = info.offset_data, info.size
                    elif info.islnk() and info.linkname in known:
                        known[info.name] = known[info.linkname]
                    else:
                        continue
                    yield info.name, *known[info.name]
                position = _next_archive(file, archive.offset, size)
    except ShardError:
        raise
    except TAR_ERRORS as error:
        raise ShardError(f"not a complete tar file ({error or type(error).__name__})") from None


def _next_archive(file: BinaryIO, end: int, size: int) -> int | None:
    """Where another archive begins after one that ends here; None if it was the last. Raises ShardError if this is no end."""
    file.seek(end)
    block = file.read(BLOCK) if end < size else b""
    if not block:
        raise ShardError(
            "its end marker is missing: was it cut off? Copy it again; if nothing is missing, truncate -s +1024 FILE adds it"
        )
    if any(block):
        raise ShardError(f"not a complete tar file (byte {end} is not a header)")
    while block and not any(block):
        end += len(block)
        block = file.read(BLOCK) if end < size else b""
    return end if block else None


# Shards of other tools


def index_shard(
    name: str, file: BinaryIO, num_bytes: int, tick: Callable[[int], object] = lambda num_bytes: None
) -> tuple[Shard, list[str]]:
    """The samples of a shard of any tool, and those that lack an image or a mask. Reads all of it, once; `tick` is called with the
    number of bytes that were read. Raises ShardError, without the shard's name."""
    by_key: dict[str, list[Member]] = {}  # WebDataset's key is the path up to the first dot of its last part
    done = 0
    for raw, offset, length in list_members(file):
        path = path_in_shard(raw)
        folder, slash, last = path.rpartition("/")
        key, _, extension = last.partition(".")
        if key and extension.lower().rpartition(".")[2] in IMAGES:
            by_key.setdefault(f"{folder}{slash}{key}", []).append(
                Member(path, offset, length, _checksum(file, raw, offset, length))
            )
        tick(max(0, offset + length - done))  # a hard link names an earlier one
        done = max(done, offset + length)
    tick(num_bytes - done)
    found = {key: _image_and_mask(members) for key, members in by_key.items()}
    words = name.lower().removesuffix(".tar").replace("/", "-").replace("_", "-").replace(".", "-").split("-")
    parts = {PARTS[word] for word in words if word in PARTS}  # train/a-000.tar and a-val-000.tar say their part
    part = parts.pop() if len(parts) == 1 else ""
    samples = tuple(Sample(key, *pair, part) for key, pair in found.items() if pair is not None)
    return Shard(name, num_bytes, samples), [f"{name}/{key}" for key, pair in found.items() if pair is None]


def _checksum(file: BinaryIO, name: str, offset: int, length: int) -> int:
    file.seek(offset)
    checksum = 0
    while length:
        part = file.read(min(length, CHUNK_BYTES))
        if not part:
            raise ShardError(f"it ends within {name}")
        checksum = zlib.crc32(part, checksum)
        length -= len(part)
    return checksum


def path_in_shard(name: str) -> str:
    """A member's name as it stands in a path below that of its shard: ./a.jpg is a.jpg."""
    return PurePosixPath(name.lstrip("/")).as_posix() if "/" in name or not name else name


def _image_and_mask(members: Sequence[Member]) -> tuple[Member, Member] | None:
    """a.jpg or a.image.jpg with a.seg.png or a.mask.png, or with a.png. None if there is no such pair, or more than one."""
    words = {member: member.name.rpartition("/")[2].lower().split(".")[1:] for member in members}
    images = [member for member in members if len(words[member]) == 1 or words[member][-2] in IMAGE_WORDS]
    masks = [member for member in members if len(words[member]) > 1 and words[member][-2] in MASK_WORDS]
    if not masks and len(images) == 2:  # a.jpg and a.png
        masks = [member for member in images if words[member][0] in LOSSLESS]
        images = [member for member in images if member not in masks]
    return (images[0], masks[0]) if len(images) == len(masks) == 1 else None
