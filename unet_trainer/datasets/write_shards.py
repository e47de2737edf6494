"""Writes the pairs of a dataset as tar shards in WebDataset's naming, with an index. The files go in byte for byte.

NAME-000000.tar, NAME-000001.tar, ...; NAME-train-000000.tar where the data is divided. In each KEY.jpg and KEY.mask.png, ... The
index is written last: shards without one are unfinished.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from unet_trainer.datasets.pairs import FoundPairs, Pair
from unet_trainer.datasets.scan import ImageFacts, MaskFacts, plain_facts
from unet_trainer.images.file_bytes import DataError, ReadError, content_digest, file_stamp, read_bytes
from unet_trainer.shards.remote_files import MissingFile, RemoteFiles, is_url, url_join
from unet_trainer.shards.shard_index import INDEX_NAME, UNFINISHED, Member, Sample, Shard, ShardIndex, index_to_json
from unet_trainer.shards.tar_files import BLOCK, ShardError, TarMember, TarWriter, size_in_tar
from unet_trainer.system.atomic_files import DRAFT, write_atomically
from unet_trainer.system.os_errors import cannot
from unet_trainer.system.resources import free_disk
from unet_trainer.system.shared_locks import is_in_use, lock_shared


@dataclass(frozen=True)
class ScannedPair:
    """A pair, and what the scan found in its files; None of test pairs, which are not read before they are used."""

    pair: Pair
    image: ImageFacts | None = None
    mask: MaskFacts | None = None


class Destination(Protocol):
    """Where shards are written to."""

    def names(self) -> list[str]:
        """Of the files that are there."""

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        """Raises UserError."""

    def delete(self, name: str) -> None: ...

    def marked(self) -> contextlib.AbstractContextManager[None]:
        """The file UNFINISHED stands there until the block has ended well. Raises UserError."""


@dataclass(frozen=True)
class LocalDestination:
    folder: Path

    def names(self) -> list[str]:
        try:
            return [path.name for path in self.folder.iterdir()] if self.folder.exists() else []
        except OSError as error:
            raise cannot(f"--out: {self.folder}", "be read", error) from None

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / name, fill)
        except OSError as error:
            raise cannot(f"--out: {self.folder / name}", "be written", error, self.folder) from None

    def delete(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        mark = self.folder / UNFINISHED
        if mark.is_file() and is_in_use(mark):
            raise DataError(f"--out: another shard command is writing to {self.folder}; wait for it, or name another place")
        self.write(UNFINISHED, _say_unfinished)
        handle = os.open(mark, os.O_RDONLY)
        try:
            lock_shared(handle)
            yield
        finally:
            os.close(handle)
        self.delete(UNFINISHED)


@dataclass(frozen=True)
class RemoteDestination:
    """Each shard is written to a temporary file, and uploaded whole."""

    url: str
    files: RemoteFiles
    workspace: Path

    def names(self) -> list[str]:
        try:
            return [url.removeprefix(f"{self.url}/") for url in self.files.find(self.url)]
        except MissingFile:
            return []

    def write(self, name: str, fill: Callable[[BinaryIO], object]) -> None:
        try:
            self.workspace.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.workspace) as folder:
                draft = Path(folder) / "shard"
                with draft.open("wb") as file:
                    fill(file)
                self.files.write(url_join(self.url, name), draft)
        except OSError as error:
            raise cannot(f"{self.workspace}", "be written to", error, self.workspace) from None

    def delete(self, name: str) -> None:
        with contextlib.suppress(ShardError):
            self.files.delete(url_join(self.url, name))

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        self.write(UNFINISHED, _say_unfinished)
        yield
        self.delete(UNFINISHED)


def _say_unfinished(file: BinaryIO) -> None:
    file.write(b"These shards are being written; shards.json comes last.\n")


def destination(out: str, workspace: Path) -> Destination:
    return RemoteDestination(out.rstrip("/"), RemoteFiles(), workspace) if is_url(out) else LocalDestination(Path(out))


def refuse_other_files(place: Destination, out: str) -> None:
    """Raises DataError if shards are there: nothing is overwritten but what an earlier start of this command left unfinished."""
    names = place.names()
    shards = sorted(name for name in names if name.endswith(".tar") or name == INDEX_NAME)
    if INDEX_NAME in names or (shards and UNFINISHED not in names):
        raise DataError(f"--out: there are shards in {out} ({shards[0]}); name another place, or delete them first")


def refuse_full_disk(place: Destination, pairs: Sequence[ScannedPair]) -> None:
    """Raises DataError before anything is written."""
    if isinstance(place, LocalDestination):
        needed = sum(_num_bytes(file) + 2 * BLOCK for scanned in pairs for file in (scanned.pair.image, scanned.pair.mask))
        free = free_disk(place.folder)
        if needed > free:
            raise DataError(f"--out: {place.folder} needs {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free there")


def write_shards(
    found: FoundPairs, pairs: Sequence[ScannedPair], name: str, place: Destination, shard_bytes: int, tick: Callable[[], object]
) -> ShardIndex:
    """Writes all pairs, in their order; `tick` is called after each. Raises UserError."""
    keys = _keys([scanned.pair for scanned in pairs])
    stem = re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_") or "data"
    shards = []
    with place.marked():
        _delete_unfinished(place, stem)
        for part, positions in _by_part([scanned.pair for scanned in pairs]):
            prefix = f"{stem}-{part}" if part else stem
            for number, some in enumerate(_divide(positions, pairs, keys, shard_bytes)):
                chosen = [(pairs[index], keys[index]) for index in some]
                shards.append(_write_shard(f"{prefix}-{number:06d}.tar", chosen, place, tick))
        index = ShardIndex(tuple(shards), found.class_names, found.num_classes, class_file=found.class_file)
        place.write(INDEX_NAME, lambda file: file.write(index_to_json(index).encode("utf-8", "surrogateescape")))
    return index


def _delete_unfinished(place: Destination, stem: str) -> None:
    """What an earlier start left: its shards may be more than those that are written now. There are no others: see
    refuse_other_files."""
    own = re.compile(rf"{re.escape(stem)}(-train|-val|-test)?-\d{{6}}\.tar")
    for name in place.names():
        draft = DRAFT.fullmatch(name)
        if own.fullmatch(draft["name"] if draft else name):
            place.delete(name)


def _by_part(pairs: Sequence[Pair]) -> list[tuple[str, list[int]]]:
    """Positions of the pairs of each part, in their order."""
    found: dict[str, list[int]] = {}
    for index, pair in enumerate(pairs):
        found.setdefault(pair.part or "", []).append(index)
    return list(found.items())


def _keys(pairs: Sequence[Pair]) -> list[str]:
    """WebDataset's keys: the pairs' names, with no dot, since a key ends at the first; and each once."""
    taken: set[str] = set()
    keys = []
    for pair in pairs:
        plain = re.sub(r"[.\\\0]", "_", pair.name).strip("/") or "image"
        key, number = plain, 2
        while key in taken:
            key, number = f"{plain}-{number}", number + 1
        taken.add(key)
        keys.append(key)
    return keys


def _member_names(pair: Pair, key: str) -> tuple[str, str]:
    return f"{key}{pair.image.suffix.lower()}", f"{key}.mask{pair.mask.suffix.lower()}"


def _divide(positions: Sequence[int], pairs: Sequence[ScannedPair], keys: Sequence[str], shard_bytes: int) -> Iterator[list[int]]:
    """Positions of the pairs of each shard. A pair that is larger than a shard has one for itself."""
    some: list[int] = []
    num_bytes = 0
    for index in positions:
        pair = pairs[index].pair
        files = zip(_member_names(pair, keys[index]), (pair.image, pair.mask), strict=True)
        size = sum(size_in_tar(name, _num_bytes(path)) for name, path in files)
        if some and num_bytes + size > shard_bytes:
            yield some
            some, num_bytes = [], 0
        some.append(index)
        num_bytes += size
    if some:
        yield some


def _num_bytes(path: Path) -> int:
    """0 if it is gone, which reading it tells."""
    stamp = file_stamp(path)
    return 0 if stamp is None else stamp[0]


def _write_shard(name: str, pairs: Sequence[tuple[ScannedPair, str]], place: Destination, tick: Callable[[], object]) -> Shard:
    samples: list[Sample] = []
    num_bytes = 0

    def fill(file: BinaryIO) -> None:
        nonlocal num_bytes
        samples.clear()
        writer = TarWriter(file)
        for scanned, key in pairs:
            pair = scanned.pair
            image_name, mask_name = _member_names(pair, key)
            image = _add(writer, image_name, pair.image, scanned.image, pair.shown_image)
            mask = _add(writer, mask_name, pair.mask, scanned.mask, pair.shown_mask)
            facts = [None if found is None else plain_facts(found) for found in (scanned.image, scanned.mask)]
            samples.append(Sample(pair.name, image, mask, pair.part or "", pair.group, *facts))
            tick()
        writer.finish()
        num_bytes = writer.num_bytes

    place.write(name, fill)
    return Shard(name, num_bytes, tuple(samples))


def _add(writer: TarWriter, name: str, path: Path, facts: ImageFacts | MaskFacts | None, shown: str) -> Member:
    try:
        content = read_bytes(path)
    except ReadError as error:
        raise DataError(f"{shown}: {error}") from None
    if facts is not None and content_digest(content) != facts.digest:
        raise DataError(f"{shown}: changed while the shards were written; start again")
    member: TarMember = writer.add(name, content)
    return Member(*member, zlib.crc32(content))
