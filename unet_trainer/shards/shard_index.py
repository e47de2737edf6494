"""The index of shards: for each sample where its image and its mask lie, with checksums; and facts about both, if they are known.

It is a JSON file, shards.json, beside the shards that `shard` writes. Shards of other tools are indexed once: samples are told by
WebDataset's naming, in which the files of a sample share their name up to the first dot.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from unet_trainer.shards.tar_files import ShardError, TarMember, list_members

INDEX_NAME = "shards.json"
UNFINISHED = "unfinished"  # a file that stands beside shards until their index is written
FORMAT = 1
MAX_CLASSES = 254
# Extensions of WebDataset, without the first dot, in lower case.
IMAGES = ("jpg", "jpeg", "png", "bmp", "tif", "tiff", "webp", "gif", "npy")
IMAGE_WORDS = ("image", "img", "input", "rgb", "photo")  # a.image.jpg
MASK_WORDS = ("mask", "masks", "seg", "segmentation", "label", "labels", "gt", "target", "annotation", "annot")  # a.seg.png
LOSSLESS = ("png", "tif", "tiff", "bmp", "gif", "npy")  # a mask beside a photo, a.png beside a.jpg, is one of these
CHUNK_BYTES = 2**22


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
    image_facts: Mapping[str, Any] | None = None  # as the scan remembers them
    mask_facts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Shard:
    name: str  # as seen from the index, with slashes
    num_bytes: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class ShardIndex:
    shards: tuple[Shard, ...]
    class_names: tuple[str, ...] | None = None
    num_classes: int | None = None
    unpaired: tuple[str, ...] = field(default=())  # SHARD/KEY of samples of other tools without an image or without a mask
    class_file: tuple[str, str] | None = None  # name and text of the file that names the classes, if there was one

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def index_to_json(index: ShardIndex) -> str:
    """One line a sample: a person can read it, and a tool compare two."""
    lines = ["{", f'"format": {FORMAT},']
    lines += [f'"class_names": {json.dumps(index.class_names)}, "num_classes": {json.dumps(index.num_classes)},']
    lines += [f'"unpaired": {json.dumps(index.unpaired)}, "class_file": {json.dumps(index.class_file)},', '"shards": [']
    for number, shard in enumerate(index.shards):
        lines.append(f'{{"name": {json.dumps(shard.name)}, "bytes": {shard.num_bytes}, "samples": [')
        rows = [json.dumps(list(sample)) for sample in shard.samples]
        lines += [f"{row}," for row in rows[:-1]] + rows[-1:]
        lines.append("]}" if number == len(index.shards) - 1 else "]},")
    return "\n".join([*lines, "]}"]) + "\n"


def index_from_json(text: str | bytes) -> ShardIndex:
    """Raises ShardError, without the file's name, for what `index_to_json` cannot have written."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ShardError(f"format {content['format']!r:.20}; this version reads format {FORMAT}")
        names, number = content["class_names"], content["num_classes"]
        if number is not None and not 1 <= _whole(number) <= MAX_CLASSES:
            raise ValueError(f"num_classes {number}")
        shards = tuple(_shard(row) for row in content["shards"])
        index = ShardIndex(
            shards,
            None if names is None else tuple(_text(name) for name in names),
            None if number is None else _whole(number),
            tuple(_text(name) for name in content["unpaired"]),
            _class_file(content["class_file"]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"no index of shards ({error or type(error).__name__})") from None
    if len({shard.name for shard in shards}) < len(shards):
        raise ShardError("a shard stands in it twice")
    return index


def _class_file(row: Any) -> tuple[str, str] | None:
    if row is None:
        return None
    name, text = row
    return _text(name), _text(text)


def _shard(row: Any) -> Shard:
    name, num_bytes = _text(row["name"]), _whole(row["bytes"])
    if name.startswith("/") or ".." in PurePosixPath(name).parts or not name.endswith(".tar"):
        raise ValueError(f"{name!r:.60} is no name of a shard")
    return Shard(name, num_bytes, tuple(_sample(sample, num_bytes) for sample in row["samples"]))


def _sample(row: Any, num_bytes: int) -> Sample:
    name, image, mask, part, group, image_facts, mask_facts = row
    for facts in (image_facts, mask_facts):
        if facts is not None and not isinstance(facts, dict):
            raise ValueError("facts that are none")
    if part not in ("", "train", "val", "test"):
        raise ValueError(f"part {part!r:.20}")
    return Sample(_text(name), _member(image, num_bytes), _member(mask, num_bytes), part, _text(group), image_facts, mask_facts)


def _member(row: Any, num_bytes: int) -> Member:
    name, offset, length, checksum = row
    member = Member(_text(name), _whole(offset), _whole(length), _whole(checksum))
    if member.name != path_in_shard(member.name):
        raise ValueError(f"{member.name!r:.60} is no name of a member")
    if member.end > num_bytes:
        raise ValueError(f"{member.name!r:.60} lies beyond the end of its shard")
    return member


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r:.40} is no text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is no whole number")
    return value


def index_shard(
    name: str, file: BinaryIO, num_bytes: int, tick: Callable[[int], object] = lambda num_bytes: None
) -> tuple[Shard, list[str]]:
    """The samples of a shard of any tool, and those that lack an image or a mask. Reads all of it, once; `tick` is called with the
    number of bytes that were read. Raises ShardError, without the shard's name."""
    members: list[TarMember] = []
    checked: dict[TarMember, Member] = {}
    done = 0
    for member in list_members(file):
        members.append(member)
        if _extension(member).rpartition(".")[2] in IMAGES:  # in one pass: reading a remote shard again would fetch it again
            checked[member] = Member(path_in_shard(member.name), member.offset, member.length, _checksum(file, member))
        end = member.offset + member.length
        tick(max(0, end - done))  # a hard link names an earlier one
        done = max(done, end)
    tick(num_bytes - done)
    samples, unpaired = [], []
    part = part_by_name(name)
    for key, group in _by_key(members).items():
        found = _image_and_mask(group)
        if found is None:
            if any(_extension(member).rpartition(".")[2] in IMAGES for member in group):
                unpaired.append(f"{name}/{key}")
            continue
        samples.append(Sample(key, checked[found[0]], checked[found[1]], part))
    return Shard(name, num_bytes, tuple(samples)), unpaired


def _checksum(file: BinaryIO, member: TarMember) -> int:
    file.seek(member.offset)
    left, checksum = member.length, 0
    while left:
        part = file.read(min(left, CHUNK_BYTES))
        if not part:
            raise ShardError(f"it ends within {member.name}")
        checksum = zlib.crc32(part, checksum)
        left -= len(part)
    return checksum


def part_by_name(name: str) -> str:
    """train/a-000.tar and a-val-000.tar say their part."""
    words = name.lower().removesuffix(".tar").replace("/", "-").replace("_", "-").replace(".", "-").split("-")
    parts = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
    found = {parts[word] for word in words if word in parts}
    return found.pop() if len(found) == 1 else ""


def path_in_shard(name: str) -> str:
    """A member's name as it stands in a path below that of its shard: ./a.jpg is a.jpg."""
    return PurePosixPath(name.lstrip("/")).as_posix() if "/" in name or not name else name


def _by_key(members: Sequence[TarMember]) -> dict[str, list[TarMember]]:
    """The files of each sample: WebDataset's key is the path up to the first dot of its last part."""
    found: dict[str, list[TarMember]] = {}
    for member in members:
        folder, slash, name = path_in_shard(member.name).rpartition("/")
        key, dot, _ = name.partition(".")
        if dot and key:
            found.setdefault(f"{folder}{slash}{key}", []).append(member)
    return found


def _extension(member: TarMember) -> str:
    return member.name.rpartition("/")[2].partition(".")[2].lower()


def _has_word(member: TarMember, wanted: Sequence[str]) -> bool:
    """a.seg.png, a.mask.tif."""
    *words, last = _extension(member).split(".")
    return bool(words) and words[-1] in wanted and last in IMAGES


def _image_and_mask(group: Sequence[TarMember]) -> tuple[TarMember, TarMember] | None:
    """a.jpg or a.image.jpg with a.seg.png or a.mask.png, or with a.png. None if there is no such pair, or more than one."""
    images = [member for member in group if _extension(member) in IMAGES or _has_word(member, IMAGE_WORDS)]
    masks = [member for member in group if _has_word(member, MASK_WORDS)]
    if not masks and len(images) == 2:  # a.jpg and a.png
        masks = [member for member in images if _extension(member) in LOSSLESS]
        images = [member for member in images if member not in masks]
    return (images[0], masks[0]) if len(images) == len(masks) == 1 else None


def iterate_samples(index: ShardIndex) -> Iterator[tuple[Shard, Sample]]:
    for shard in index.shards:
        for sample in shard.samples:
            yield shard, sample
