"""What the files of a dataset hold, and the cache of it, so that the next start reads only new and changed files.

The cache is an SQLite file, of which a start reads the rows of its own files. It only saves time: where it is damaged
it is made anew, and where it cannot be written (a full or read-only disk) nothing is kept."""

import base64
import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cv2
import numpy as np
from pydantic import ConfigDict, TypeAdapter

from unet_trainer.images.file_bytes import Stamp, StoredFile, file_stamp
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.images.mask_shapes import MaskStructure

# Of another name whenever facts mean something else.
TABLE, COLUMNS = "facts_9", "file BLOB PRIMARY KEY, stamp TEXT NOT NULL, facts BLOB NOT NULL"
NUM_ASKED, NUM_HELD = 500, 5000  # rows that are read and written at a time; SQLite before 3.32 takes 999 values
WAIT_SECONDS = 10.0  # for another run that writes
MAX_CACHED_VALUES = 4096  # of one mask; a mask with more values is read at every start

SIDE = 16  # of a thumbnail
OVERSAMPLING = 4  # pixels each way that make one of it: this keeps fractions of a grey level of dark images
MIDDLE, CONTRAST = 128, 32  # mean and standard deviation of a thumbnail's pixels


def thumbnail_of(image: Pixels) -> str:
    """Encode an H,W,C image of any depth as a small grey one; empty if it is of one value."""
    image = np.ascontiguousarray(image[:, :, :3])
    if image.dtype not in (np.uint8, np.uint16, np.float32):  # others OpenCV cannot average
        image = image.astype(np.float32)
    image = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) if image.shape[2] == 3 else image[:, :, 0]
    pixels = cv2.resize(image, (SIDE * OVERSAMPLING, SIDE * OVERSAMPLING), interpolation=cv2.INTER_AREA)
    small = pixels.astype(np.float64).reshape(SIDE, OVERSAMPLING, SIDE, OVERSAMPLING).mean((1, 3))
    mean, spread = small.mean(), small.std()
    if not spread > 1e-3 * abs(mean):  # NaN too
        return ""
    scaled = MIDDLE + CONTRAST * (small - mean) / spread
    return base64.b64encode(scaled.round().clip(0, 255).astype(np.uint8).tobytes()).decode()


def decode_thumbnails(thumbnails: Sequence[str]) -> Pixels:
    """N,SIDE*SIDE; 0 where there is nothing to see."""
    pixels = b"".join(base64.b64decode(text) or bytes(SIDE**2) for text in thumbnails)
    return np.frombuffer(pixels, np.uint8).reshape(-1, SIDE**2).astype(np.float32)


def is_thumbnail(text: str) -> bool:
    return len(base64.b64decode(text)) in (0, SIDE**2)


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
            chunk = paths[start : start + NUM_ASKED]
            files = {_key(kind, path): path for path in chunk}
            select = (
                f"SELECT file, stamp, CAST(facts AS BLOB) FROM {TABLE} WHERE file IN ({', '.join('?' * len(files))})"
            )
            rows = self._run(select, [*files])
            known = {key: content for key, stamp, content in rows if stamp == str(file_stamp(files[key]))}
            contents = [_stored_facts(path) or known.get(_key(kind, path)) or b"null" for path in chunk]
            yield from (facts if self._holds(facts) else None for facts in _parse(kind, contents))

    def _holds(self, facts: Any) -> bool:
        try:
            return facts is not None and facts.is_consistent and getattr(facts, "nodata", self.nodata) == self.nodata
        except ValueError:
            return False

    def add(self, kind: Kind, path: Path, facts: Facts, stamp: Stamp) -> None:
        """`stamp` of the file when it was read."""
        if isinstance(facts, ImageFacts) or len(facts.counts) <= MAX_CACHED_VALUES:
            self.new.append((_key(kind, path), str(stamp), _dump(kind, facts)))
        if len(self.new) >= NUM_HELD:
            self.save()

    def save(self) -> None:
        """Write what was added."""
        rows, self.new = self.new, []
        self._run(f"INSERT OR REPLACE INTO {TABLE} VALUES (?, ?, ?)", rows, is_repeated=True)

    def _run(self, statement: str, values: Sequence[Any], is_repeated: bool = False) -> list[Any]:
        """The rows that it finds; none where the file cannot be used, and one that is damaged is deleted. It is open
        during this call only: forked processes must not share it."""
        path = self.path
        if path is None or path.is_symlink() or (path.exists() and not path.is_file()):  # a link could lead anywhere
            return []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(path, timeout=WAIT_SECONDS)) as file, file:
                file.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} ({COLUMNS})")
                return (file.executemany if is_repeated else file.execute)(statement, values).fetchall()
        except (OSError, sqlite3.OperationalError):  # the disk is full or read-only, or others write for very long
            self.path = None  # each further call could wait as long
        except (sqlite3.DatabaseError, UnicodeDecodeError):
            for damaged in (path, path.with_name(f"{path.name}-journal")):
                with contextlib.suppress(OSError):
                    damaged.unlink()
        return []


def _parse(kind: Kind, contents: Sequence[bytes]) -> list[Any]:
    """The facts in rows; None of what a scan cannot have written. All at once takes half of the time."""
    with contextlib.suppress(ValueError):
        found: list[Any] = ADAPTERS[kind].validate_json(b"[" + b",".join(contents) + b"]")
        if len(found) == len(contents):
            return found
    return [None] if len(contents) == 1 else [facts for content in contents for facts in _parse(kind, [content])]


def _stored_facts(path: Path) -> bytes:
    """Of a file in shards, as their index has them."""
    with contextlib.suppress(RecursionError):  # of a hostile index
        return json.dumps(path.facts).encode() if isinstance(path, StoredFile) and path.facts is not None else b""
    return b""


def _key(kind: Kind, path: Path) -> bytes:
    return os.fsencode(f"{path.absolute()}:{kind}")


def _dump(kind: Kind, facts: Facts) -> bytes:
    return ADAPTERS[kind].dump_json([facts])[1:-1]


def plain_facts(kind: Kind, facts: Facts) -> dict[str, Any]:
    """As a JSON file holds them."""
    return dict(zip(facts._fields, json.loads(_dump(kind, facts)), strict=True))
