"""Writes the pairs of a dataset as tar shards in WebDataset's naming, with an index. The files go in byte for byte.

NAME-000000.tar, NAME-000001.tar, ...; NAME-train-000000.tar where the data is divided. In each KEY.jpg and KEY.mask.png, ... The
index is written last: shards without one are unfinished.
"""

from __future__ import annotations

import contextlib
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, plain_facts
from unet_trainer.datasets.shard_index import (
    INDEX_NAME,
    UNFINISHED,
    Member,
    Sample,
    Shard,
    ShardIndex,
    add_member,
    index_to_json,
    size_in_tar,
)
from unet_trainer.datasets.shard_store import Files, MissingFile
from unet_trainer.images.file_bytes import DataError, ReadError, content_digest, file_stamp, read_bytes
from unet_trainer.system.atomic_files import DRAFT
from unet_trainer.system.input_files import open_handle
from unet_trainer.system.locks import is_in_use, lock_shared
from unet_trainer.system.resources import free_disk


class ScannedPair(NamedTuple):
    """A pair, and what the scan found in its files; None of test pairs, which are not read before they are used."""

    pair: Pair
    image: ImageFacts | None = None
    mask: MaskFacts | None = None

    def members(self, key: str) -> list[tuple[str, Path, ImageFacts | MaskFacts | None, str]]:
        """Of both files the name in a shard, the path, the facts, and the path as messages name it."""
        pair = self.pair
        return [
            (f"{key}{pair.image.suffix.lower()}", pair.image, self.image, pair.shown_image),
            (f"{key}.mask{pair.mask.suffix.lower()}", pair.mask, self.mask, pair.shown_mask),
        ]

    def size_in_tar(self, key: str) -> int:
        """Of both files; one that is gone has no bytes, which reading it tells."""
        return sum(size_in_tar(name, (file_stamp(path) or [0])[0]) for name, path, _, _ in self.members(key))


def refuse_other_files(files: Files) -> None:
    """Raises DataError if shards are there: nothing is overwritten but what an earlier start of this command left unfinished."""
    names = _names(files)
    shards = sorted(name for name in names if name.endswith(".tar") or name == INDEX_NAME)
    if INDEX_NAME in names or (shards and UNFINISHED not in names):
        raise DataError(f"--out: there are shards in {files.root} ({shards[0]}); name another place, or delete them first")


def _names(files: Files) -> list[str]:
    """Of the files at the top of the place, hidden ones too."""
    try:
        return files.find() if files.is_remote else [path.name for path in Path(files.root).iterdir()]
    except (FileNotFoundError, MissingFile):
        return []
    except OSError as error:
        raise DataError(f"--out: {files.root} cannot be read ({error.strerror})") from None


def write_shards(
    found: FoundPairs, pairs: Sequence[ScannedPair], name: str, files: Files, shard_bytes: int, tick: Callable[[], object]
) -> ShardIndex:
    """Writes all pairs, in their order; `tick` is called after each. Raises UserError."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "data"
    by_part: dict[str, list[tuple[ScannedPair, str]]] = {}
    for scanned, key in zip(pairs, _keys([scanned.pair for scanned in pairs]), strict=True):
        by_part.setdefault(scanned.pair.part or "", []).append((scanned, key))
    if not files.is_remote:
        needed = sum(scanned.size_in_tar(key) for members in by_part.values() for scanned, key in members)
        free = free_disk(Path(files.root))
        if needed > free:
            raise DataError(f"--out: {files.root} needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free there")
    shards = []
    with _marked_unfinished(files):
        # What an earlier start left: its shards may be more than those that are written now.
        own = re.compile(rf"{re.escape(stem)}(-train|-val|-test)?-\d{{6}}\.tar")
        for other in _names(files):
            draft = DRAFT.fullmatch(other)
            if own.fullmatch(draft["name"] if draft else other) or (draft and draft["name"] in (INDEX_NAME, UNFINISHED)):
                files.delete(other)
        for part, members in by_part.items():
            prefix = f"{stem}-{part}" if part else stem
            for number, some in enumerate(_divide(members, shard_bytes)):
                shards.append(_write_shard(f"{prefix}-{number:06d}.tar", some, files, tick))
        index = ShardIndex(tuple(shards), found.class_names, found.num_classes, class_file=found.class_file)
        files.write(INDEX_NAME, lambda file: file.write(index_to_json(index).encode("utf-8", "surrogateescape")))
    return index


@contextlib.contextmanager
def _marked_unfinished(files: Files) -> Iterator[None]:
    """The file UNFINISHED stands there until the block has ended well, in a local folder locked by this process."""
    mark = Path(files.place(UNFINISHED))
    if not files.is_remote and mark.is_file() and not mark.is_symlink() and is_in_use(mark):
        raise DataError(f"--out: another shard command is writing to {files.root}; wait for it, or name another place")
    files.write(UNFINISHED, lambda file: file.write(b"These shards are being written; shards.json comes last.\n"))
    with contextlib.ExitStack() as stack:
        if not files.is_remote:
            handle = open_handle(mark, follow=False)
            stack.callback(os.close, handle)
            lock_shared(handle)
        yield
    files.delete(UNFINISHED)


def _keys(pairs: Sequence[Pair]) -> list[str]:
    """WebDataset's keys: the pairs' names, with no dot, since a key ends at the first; and each once."""
    taken: dict[str, None] = {}
    for pair in pairs:
        plain = re.sub(r"[.\\\0]", "_", pair.name).strip("/") or "image"
        key, number = plain, 2
        while key in taken:
            key, number = f"{plain}-{number}", number + 1
        taken[key] = None
    return list(taken)


def _divide(members: Sequence[tuple[ScannedPair, str]], shard_bytes: int) -> list[list[tuple[ScannedPair, str]]]:
    """The pairs of each shard. A pair that is larger than a shard has one for itself."""
    shards: list[list[tuple[ScannedPair, str]]] = []
    left = 0
    for scanned, key in members:
        size = scanned.size_in_tar(key)
        if not shards or size > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append((scanned, key))
        left -= size
    return shards


def _write_shard(name: str, members: Sequence[tuple[ScannedPair, str]], files: Files, tick: Callable[[], object]) -> Shard:
    samples: list[Sample] = []
    num_bytes = 0

    def fill(file: BinaryIO) -> None:
        nonlocal num_bytes
        with tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
            for scanned, key in members:
                image, mask = (_add(archive, *member) for member in scanned.members(key))
                facts = [None if found is None else plain_facts(found) for found in (scanned.image, scanned.mask)]
                samples.append(Sample(scanned.pair.name, image, mask, scanned.pair.part or "", scanned.pair.group, *facts))
                tick()
        num_bytes = file.tell()

    files.write(name, fill)
    return Shard(name, num_bytes, tuple(samples))


def _add(archive: tarfile.TarFile, name: str, path: Path, facts: ImageFacts | MaskFacts | None, shown: str) -> Member:
    try:
        content = read_bytes(path)
    except ReadError as error:
        raise DataError(f"{shown}: {error}") from None
    if facts is not None and content_digest(content) != facts.digest:
        raise DataError(f"{shown}: changed while the shards were written; start again")
    return add_member(archive, name, content)
