"""What tar files hold. The index of shards (shards.json) says where image and mask of each sample lie, with checksums
and facts; shards of other tools are read through once, by WebDataset's naming. Nothing is ever unpacked."""

import io
import json
import posixpath
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter

from unet_trainer.data.names import part_in
from unet_trainer.images.file_bytes import ShardError
from unet_trainer.system.console import one_line
from unet_trainer.system.input_files import parse_json

INDEX_NAME, FORMAT = "shards.json", 2
BLOCK = tarfile.BLOCKSIZE
# What damaged or hostile headers raise: wrong numbers, lengths beyond memory, headers of headers of headers.
TAR_ERRORS = (tarfile.TarError, EOFError, OverflowError, ValueError, MemoryError, RecursionError)
END_BYTES = 2**20  # behind the end of an archive that must be zeros: the rest of its last record
# Extensions and words of WebDataset's names, in lower case.
IMAGES = ("jpg", "jpeg", "png", "bmp", "tif", "tiff", "webp", "gif", "npy")
LOSSLESS = ("png", "tif", "tiff", "bmp", "gif", "npy")  # a mask beside a photo, a.png beside a.jpg, is one of these
IMAGE_WORDS = ("image", "img", "input", "rgb", "photo")  # a.image.jpg
MASK_WORDS = ("mask", "masks", "seg", "segmentation", "label", "labels", "gt", "target", "annotation", "annot")


def _require_text(value: str) -> str:
    value.encode("utf-8", "surrogateescape")  # a surrogate that stands for no byte of a name is a ValueError
    if "\0" in value:
        raise ValueError("it holds a NUL")
    return value


def _require_inside(path: str) -> str:
    if not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise ValueError(f"{path!r:.60} is no path below the shards")
    return path


Natural = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, AfterValidator(_require_text)]
InnerPath = Annotated[Text, AfterValidator(_require_inside)]


class Member(NamedTuple):
    """A file in a shard."""

    name: InnerPath
    offset: Natural
    length: Natural
    checksum: Natural  # CRC-32

    @property
    def end(self) -> int:
        return self.offset + self.length


class Sample(NamedTuple):
    """An image and its mask in one shard."""

    name: Text
    image: Member
    mask: Member
    part: Literal["", "train", "val", "test"] = ""  # empty: not divided
    group: Text = ""
    image_facts: dict[str, Any] | None = None  # that the scan found
    mask_facts: dict[str, Any] | None = None


@dataclass(frozen=True)
class Shard:
    name: Annotated[InnerPath, Field(pattern=r"\.tar$")]  # relative to the index, with slashes
    num_bytes: Natural
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class ShardIndex:
    shards: tuple[Shard, ...]
    class_names: tuple[Text, ...] | None = None
    unpaired: tuple[Text, ...] = ()  # SHARD/KEY of samples of other tools without an image or without a mask
    class_file: tuple[Text, Text] | None = None  # name and text of the file that names the classes, if there was one

    @property
    def num_samples(self) -> int:
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)


def index_to_json(index: ShardIndex) -> str:
    return json.dumps({"format": FORMAT, **asdict(index)})


def index_from_json(text: str | bytes) -> ShardIndex:
    """Raises ShardError, without the file's name, for what `index_to_json` cannot have written."""
    try:
        content = parse_json(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r:.20}; this version reads format {FORMAT}")
        index: ShardIndex = TypeAdapter(ShardIndex).validate_python(content)
        if len({shard.name for shard in index.shards}) < len(index.shards):
            raise ValueError("a shard is listed twice")
        for shard in index.shards:
            if any(member.end > shard.num_bytes for sample in shard.samples for member in (sample.image, sample.mask)):
                raise ValueError(f"a file lies beyond the end of {shard.name}")
    except (ValueError, LookupError, TypeError) as error:
        reason = one_line(str(error) or type(error).__name__)
        raise ShardError(f"not an index of shards ({reason:.200}); write them again with shard") from None
    return index


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> Member:
    """Append a file. Its header depends on name and content alone: no times, no owners."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    archive.addfile(info, io.BytesIO(content))
    padded = -(-len(content) // BLOCK) * BLOCK
    return Member(name, archive.offset - padded, len(content), zlib.crc32(content))


def list_members(shard: str, file: BinaryIO) -> Iterator[tuple[str, int, int]]:
    """Name, offset and length of the plain files in a tar file. Raises ShardError, also where tarfile takes a damaged
    header, or a file that was cut off between two members, for the end."""
    position = 0
    try:
        with tarfile.TarFile(fileobj=file, mode="r") as archive:
            while (info := archive.next()) is not None:
                if info.size < 0 or archive.offset <= position:  # it would be read again, endlessly
                    raise ValueError(f"the member at byte {info.offset} has a size of {info.size} bytes")
                position = archive.offset
                archive.members.clear()  # type: ignore[attr-defined] # which it would keep for extracting
                if info.islnk() or info.issparse():
                    fix = "pack the files again, with tar --hard-dereference and without --sparse"
                    raise ValueError(f"{info.name} is a hard link or a sparse file: {fix}")
                if info.isreg():
                    yield info.name, info.offset_data, info.size
            file.seek(archive.offset)
        rest = file.read(END_BYTES)
        if not rest or any(rest):
            fix = "copy it again; if tar files were joined, unpack it with tar -xif FILE and pack the files again"
            raise ValueError(f"no end marker, or something behind it, at byte {archive.offset}: {fix}")
    except TAR_ERRORS as error:
        reason = error or type(error).__name__
        fix = "one that is compressed has to be decompressed"
        raise ShardError(f"{shard}: not a complete tar file ({reason}); {fix}") from None


def index_shard(name: str, num_bytes: int, file: BinaryIO) -> tuple[Shard, list[str]]:
    """The samples of a shard of any tool, and those that lack an image or a mask. Raises ShardError."""
    by_key: dict[str, list[Member]] = {}  # the files of a sample share their path up to the first dot of its last part
    for raw, offset, length in list_members(name, file):
        path = posixpath.normpath(raw.lstrip("/"))  # ./a.jpg is a.jpg
        stem, *words = posixpath.basename(path).split(".")
        if stem and words and words[-1].lower() in IMAGES:
            file.seek(offset)
            content = file.read(min(length, num_bytes))  # a damaged header may have any length
            if len(content) < length:
                raise ShardError(f"{name}: it ends within {raw}")
            key = posixpath.join(posixpath.dirname(path), stem)
            by_key.setdefault(key, []).append(Member(path, offset, length, zlib.crc32(content)))
    found = {key: _image_and_mask(members) for key, members in by_key.items()}
    part = part_in([name]) or ""  # train/a-000.tar and a-val-000.tar say their part
    samples = tuple(Sample(key, *pair, part) for key, pair in found.items() if pair is not None)
    return Shard(name, num_bytes, samples), [f"{name}/{key}" for key, pair in found.items() if pair is None]


def _image_and_mask(members: Sequence[Member]) -> tuple[Member, Member] | None:
    """a.jpg or a.image.jpg with a.seg.png, a.mask.png or a.png; None if there is no such pair, or more than one."""
    words = {member: posixpath.basename(member.name).lower().split(".")[1:] for member in members}
    images = [member for member in members if len(words[member]) == 1 or words[member][-2] in IMAGE_WORDS]
    masks = [member for member in members if len(words[member]) > 1 and words[member][-2] in MASK_WORDS]
    if not masks and len(images) == 2:  # a.jpg and a.png
        masks = [member for member in images if words[member][0] in LOSSLESS]
        images = [member for member in images if member not in masks]
    return (images[0], masks[0]) if len(images) == len(masks) == 1 else None
