"""Tar files: where each member lies in one, and writing one. Nothing is ever unpacked."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from unet_trainer.config.errors import UserError

BLOCK = tarfile.BLOCKSIZE
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
NOT_PLAIN = "shards are read at any place and must be plain tar: decompress it"
TAR_ERRORS = (tarfile.TarError, EOFError, OverflowError, UnicodeError, ValueError)  # ValueError: a header with a wrong number


class ShardError(UserError):
    """A shard that cannot be read or written: the message names it, the reason and the fix."""


class TarMember(NamedTuple):
    """A file inside a tar file: where its bytes lie."""

    name: str
    offset: int
    length: int


def list_members(file: BinaryIO) -> Iterator[TarMember]:
    """The plain files in a tar file, in their order; a hard link is a second name of one before it. Reads headers only.

    Also of several archives that were joined (cat a.tar b.tar). Raises ShardError, without the file's name: the samples after a
    damaged header, or of a file that was cut off between two members, would be missing in silence, as tarfile has it.
    """
    start = file.read(6)
    file.seek(0)
    compression = next((name for magic, name in COMPRESSED.items() if start.startswith(magic)), None)
    if compression is not None:
        raise ShardError(f"compressed ({compression}); {NOT_PLAIN}")
    known: dict[str, TarMember] = {}
    position: int | None = 0
    try:
        while position is not None:
            file.seek(position)
            with tarfile.open(fileobj=file, mode="r:") as archive:
                while (info := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined] # which it would keep for extracting
                    if info.issparse():
                        raise ShardError(f"{info.name} in it is stored as a sparse file; write it again without tar's --sparse")
                    if info.isreg():
                        known[info.name] = TarMember(info.name, info.offset_data, info.size)
                    elif info.islnk() and info.linkname in known:
                        known[info.name] = known[info.linkname]._replace(name=info.name)
                    else:
                        continue
                    yield known[info.name]
                position = _next_archive(file, archive.offset)
    except TAR_ERRORS as error:
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"no whole tar file ({error or type(error).__name__})") from None


def _next_archive(file: BinaryIO, end: int) -> int | None:
    """Where another archive begins after one that ends here; None if it was the last. Raises ShardError if this is no end."""
    file.seek(end)
    block = file.read(BLOCK)
    if not block:
        raise ShardError("it has no mark of its end: cut off? copy it again; if nothing is missing: truncate -s +1024 FILE adds it")
    if any(block):
        raise ShardError(f"no whole tar file (what stands at byte {end} is no header)")
    while block and not any(block):
        end += len(block)
        block = file.read(BLOCK)
    return end if block else None


class TarWriter:
    """Writes a tar file whose bytes depend on names and contents alone: no times, no owners."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.num_bytes = 0

    def add(self, name: str, content: bytes) -> TarMember:
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o644
        # A long name, or one that is not ASCII, takes a header more, as every tar of today reads it.
        self._write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        offset = self.num_bytes
        self._write(content)
        self._write(bytes(-len(content) % BLOCK))
        return TarMember(name, offset, len(content))

    def finish(self) -> None:
        """Two empty blocks mark the end; filled up to the size of a record."""
        end = self.num_bytes + 2 * BLOCK
        self._write(bytes(2 * BLOCK + -end % tarfile.RECORDSIZE))

    def _write(self, content: bytes) -> None:
        self.file.write(content)
        self.num_bytes += len(content)


def size_in_tar(name: str, length: int) -> int:
    """Bytes that a file takes in a tar file, header included."""
    stored = io.BytesIO()
    writer = TarWriter(stored)
    writer.add(name, b"")
    return writer.num_bytes + -(-length // BLOCK) * BLOCK
