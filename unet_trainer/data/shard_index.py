"""The index of shards (shards.json): where image and mask of each sample lie in which tar file, with checksums and what
the scan found in them. It is anyone's, and checked before a byte is read by it. Nothing is ever unpacked."""

import io
import json
import tarfile
import zlib
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, TypeAdapter

from unet_trainer.images.file_bytes import ShardError
from unet_trainer.system.console import one_line
from unet_trainer.system.input_files import parse_json

INDEX_NAME, FORMAT = "shards.json", 2
BLOCK = tarfile.BLOCKSIZE


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
    """Raises ShardError for what `index_to_json` cannot have written."""
    try:
        content = parse_json(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r:.20}; this version reads format {FORMAT}")
        index: ShardIndex = TypeAdapter(ShardIndex).validate_python(content)
        if len({shard.name for shard in index.shards}) < len(index.shards):
            raise ValueError("a shard is listed twice")
        if not index.num_samples:
            raise ValueError("it lists no sample")
        for shard in index.shards:
            if any(member.end > shard.num_bytes for sample in shard.samples for member in (sample.image, sample.mask)):
                raise ValueError(f"a file lies beyond the end of {shard.name}")
    except (ValueError, LookupError, TypeError) as error:
        reason = one_line(str(error) or type(error).__name__)
        raise ShardError(f"{INDEX_NAME}: not an index of shards ({reason:.200}); write them again with shard") from None
    return index


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> Member:
    """Append a file. Its header depends on name and content alone: no times, no owners."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    archive.addfile(info, io.BytesIO(content))
    padded = -(-len(content) // BLOCK) * BLOCK
    return Member(name, archive.offset - padded, len(content), zlib.crc32(content))
