"""What the files of a dataset hold, and the cache of it, so that the next start reads only new and changed files.

The cache is an SQLite file, of which a start reads the rows of its own files. It only saves time: where it is damaged
it is made anew, and where it cannot be written (a full or read-only disk) nothing is kept."""

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, TypeAdapter

from unet_trainer.data.near_duplicates import is_thumbnail
from unet_trainer.images.file_bytes import Stamp, StoredFile, file_stamp
from unet_trainer.images.mask_shapes import MaskStructure

# Of another name whenever facts mean something else.
TABLE, COLUMNS = "facts_9", "file BLOB PRIMARY KEY, stamp TEXT NOT NULL, facts BLOB NOT NULL"
NUM_ASKED, NUM_HELD = 500, 5000  # rows that are read and written at a time; SQLite before 3.32 takes 999 values
WAIT_SECONDS = 10.0  # for another run that writes
MAX_CACHED_VALUES = 4096  # of one mask; a mask with more values is read at every start


class ImageFacts(NamedTuple):
    """What an image file holds. Named tuples are checked four times as fast as dataclasses."""

    height: int
    width: int
    channels: int  # without alpha
    dtype: str
    mean: tuple[float, ...]  # of each channel, alpha included
    std: tuple[float, ...]
    low: float  # of all values but an opacity
    high: float
    alpha: Literal["", "opacity", "band"]  # what the channel behind the others holds, if it is tagged as alpha
    is_turned: bool  # rotated or mirrored because of its EXIF orientation
    digest: str  # of the file's bytes
    pixels: str  # digest of the values without opacity, of one channel if all are equal
    missing: tuple[int, ...]  # values of each channel that are no data, as find_missing tells; empty: none
    marks: tuple[str, ...]  # what these hold
    tag: float | None  # of GDAL, if whole numbers are missing by it
    nodata: float | str  # the setting that this was measured with; ignore is measured as fill
    thumbnail: str  # empty: nothing to see, or missing values

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def num_values(self) -> int:
        return self.height * self.width * self.channels

    @property
    def content(self) -> str:
        """The same for images that are identical, however they were saved."""
        return f"{self.size} {self.dtype} {self.pixels}"

    @property
    def is_grey(self) -> bool:
        """Whether there is one channel, or three that are equal, by their statistics."""
        return self.channels in (1, 3) and len(set(self.mean)) == len(set(self.std)) == 1

    @property
    def is_consistent(self) -> bool:
        num_measured = self.channels + (self.alpha != "")
        has_all = len(self.mean) == len(self.std) == num_measured > 0 and len(self.missing) in (0, num_measured)
        return self.height > 0 < self.width and has_all and is_thumbnail(self.thumbnail)

    def as_read(self, channels: int) -> "ImageFacts":
        """As a model of so many channels takes it: with alpha if it is one of them, else without."""
        if not self.alpha:
            return self
        num_kept = channels if channels == self.channels + 1 else self.channels
        mean, std, missing = self.mean[:num_kept], self.std[:num_kept], self.missing[:num_kept]
        return self._replace(channels=num_kept, mean=mean, std=std, missing=missing, alpha="")


class MaskFacts(NamedTuple):
    """What a mask file holds."""

    height: int
    width: int
    counts: dict[int, int]  # value → number of pixels
    digest: str
    is_lossy: bool = False  # compressed in a way that changes values, as JPEG does
    is_alpha: bool = False  # the values are those of the alpha channel
    structure: MaskStructure | None = None  # None: fewer than three values
    palette: dict[int, int] | None = None  # of a mask with a palette, value → 0xRRGGBB, of the values that occur
    thumbnail: str = ""  # of where it differs from its most frequent value

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width

    @property
    def is_consistent(self) -> bool:
        is_counted = sum(self.counts.values()) == self.height * self.width
        return self.height > 0 < self.width and is_counted and is_thumbnail(self.thumbnail)


class PairFacts(NamedTuple):
    """The facts of each file, or the reason why it cannot be used."""

    image: ImageFacts | str
    mask: MaskFacts | str


Kind = Literal["image", "mask"]  # as the fields of a Pair are named
Facts = ImageFacts | MaskFacts
FINITE = ConfigDict(allow_inf_nan=False)
ADAPTERS: dict[Kind, TypeAdapter[Any]] = {
    "image": TypeAdapter(list[ImageFacts | None], config=FINITE),
    "mask": TypeAdapter(list[MaskFacts | None], config=FINITE),
}


class ScanCache:
    """Facts of earlier scans, by the path of their file. Not found are those of a file that has changed, or of an image
    that was measured with another `nodata`."""

    def __init__(self, path: Path | None, nodata: float | str = "fill") -> None:
        """`path` None: nothing is kept."""
        self.path, self.nodata = path, "fill" if nodata == "ignore" else nodata
        self.new: list[tuple[bytes, str, bytes]] = []  # rows that are not yet written

    def find(self, kind: Kind, paths: Sequence[Path]) -> Iterator[Any]:
        """The facts of each file, None where they are unknown. The index of shards may have them too."""
        for start in range(0, len(paths), NUM_ASKED):
            contents = self._contents(kind, paths[start : start + NUM_ASKED])
            yield from (facts if self._holds(facts) else None for facts in _parse(kind, contents))

    def _holds(self, facts: Any) -> bool:
        try:
            return facts is not None and facts.is_consistent and getattr(facts, "nodata", self.nodata) == self.nodata
        except ValueError:
            return False

    def _contents(self, kind: Kind, paths: Sequence[Path]) -> list[bytes]:
        keys = [_key(kind, path) for path in paths]
        rows, contents = self._read(keys), []
        for path, key in zip(paths, keys, strict=True):
            stamp, content = rows.get(key, ("", b""))
            if isinstance(path, StoredFile) and path.facts is not None:
                with contextlib.suppress(RecursionError):  # of a hostile index
                    content = json.dumps(path.facts).encode()
            elif not stamp or stamp != str(file_stamp(path)):
                content = b""
            contents.append(content or b"null")
        return contents

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, tuple[str, bytes]]:
        select = f"SELECT file, stamp, CAST(facts AS BLOB) FROM {TABLE} WHERE file IN ({', '.join('?' * len(keys))})"
        rows = self._run(lambda file: file.execute(select, keys).fetchall())
        return {key: (stamp, content) for key, stamp, content in rows or ()}

    def add(self, kind: Kind, path: Path, facts: Facts, stamp: Stamp) -> None:
        """`stamp` of the file when it was read."""
        if isinstance(facts, ImageFacts) or len(facts.counts) <= MAX_CACHED_VALUES:
            self.new.append((_key(kind, path), str(stamp), _dump(kind, facts)))
        if len(self.new) >= NUM_HELD:
            self.save()

    def save(self) -> None:
        """Write what was added."""
        rows, self.new = self.new, []
        self._run(lambda file: file.executemany(f"INSERT OR REPLACE INTO {TABLE} VALUES (?, ?, ?)", rows), bool(rows))

    def _run(self, action: Callable[[sqlite3.Connection], Any], creates: bool = False) -> Any:
        """None where there is no file, or none that can be used; one that is damaged is deleted. It is open during this
        call only: forked processes must not share it."""
        path = self.path
        if path is None:
            return None
        try:
            if path.is_symlink() or not (path.is_file() or (creates and not path.exists())):
                return None  # a link could lead anywhere
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as file, file:
                file.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({COLUMNS})")
                return action(file)
        except (OSError, sqlite3.OperationalError):  # the disk is full or read-only, or others write for very long
            self.path = None  # each further call could wait as long
            return None
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            for damaged in (path, path.with_name(f"{path.name}-journal")):
                with contextlib.suppress(OSError):
                    damaged.unlink()
            return None


def _parse(kind: Kind, contents: Sequence[bytes]) -> list[Any]:
    """The facts in rows; None of what a scan cannot have written. All at once takes half of the time."""
    with contextlib.suppress(ValueError):
        found: list[Any] = ADAPTERS[kind].validate_json(b"[" + b",".join(contents) + b"]")
        if len(found) == len(contents):
            return found
    return [None] if len(contents) == 1 else [facts for content in contents for facts in _parse(kind, [content])]


def _key(kind: Kind, path: Path) -> bytes:
    return os.fsencode(f"{path.absolute()}:{kind}")


def _dump(kind: Kind, facts: Facts) -> bytes:
    return ADAPTERS[kind].dump_json([facts])[1:-1]


def plain_facts(kind: Kind, facts: Facts) -> dict[str, Any]:
    """As a JSON file holds them."""
    return dict(zip(facts._fields, json.loads(_dump(kind, facts)), strict=True))
