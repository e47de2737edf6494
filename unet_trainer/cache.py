"""Decoded pairs kept for the run: one copy in memory that all workers share, or a file that later runs find again.

A cache is filled before the first step and only read afterwards, so workers need no locks. A file that was changed since is
decoded anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from unet_trainer.config import UserError
from unet_trainer.images import Pixels

MEMORY_SHARE = 0.5  # of what is free: the rest is for the run
ALIGNMENT = 64
DRAFT = ".draft"
DRAFT_SECONDS = 24 * 3600

Place = Literal["ram", "disk"]


class Slot(NamedTuple):
    """Where a pair lies: the image, and its mask right after it."""

    start: int
    shape: tuple[int, int, int]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        height, width, channels = self.shape
        return height * width * (channels * self.itemsize + 1)


@dataclass(frozen=True)
class PixelCache:
    """The first pairs of a dataset, decoded: H,W,C images and H,W class ids."""

    slots: Sequence[Slot]
    content: torch.Tensor  # bytes, in memory that processes share

    def __len__(self) -> int:
        return len(self.slots)

    def pair(self, index: int) -> tuple[Pixels, Pixels]:
        """Views that cannot be written to."""
        image, mask = _views(self.slots[index], self.content.numpy())
        image.flags.writeable = mask.flags.writeable = False
        return image, mask


def fill_cache(
    shapes: Sequence[tuple[int, int, int]],
    itemsize: int,
    read: Callable[[int], tuple[Pixels, Pixels]],
    place: Place,
    folder: Path,
    stamp: Sequence[object],
    num_threads: int,
    tick: Callable[[], object],
    limit: int | None = None,
) -> PixelCache:
    """A cache of as many pairs as there is room for. `stamp` tells whether a file on disk still holds what `read` would give."""
    if place == "ram":
        room = free_shared_memory() if limit is None else limit
        slots = lay_out(shapes, itemsize, int(room * MEMORY_SHARE))
        content = torch.empty(_end(slots), dtype=torch.uint8).share_memory_()
        _fill(slots, content, read, num_threads, tick)
        return PixelCache(slots, content)
    digest = hashlib.sha256(json.dumps([list(stamp), itemsize, list(shapes)], default=str).encode()).hexdigest()[:24]
    path = folder / f"{digest}.pixels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        room = free_disk(folder) if limit is None else limit
        slots = lay_out(shapes, itemsize, int(room * MEMORY_SHARE))
        found = _slots_of(path, lay_out(shapes, itemsize, sys.maxsize))
        if found is not None and len(found) >= len(slots):
            return PixelCache(found, _map(path, _end(found)))
        content = _build(path, slots, read, num_threads, tick)
    except OSError as error:
        raise UserError(f"cache: disk cannot be written to {path} ({error.strerror}); set cache: none or checkpoint_dir") from None
    return PixelCache(slots, content)


def _end(slots: Sequence[Slot]) -> int:
    return slots[-1].start + slots[-1].num_bytes if slots else 0


def _slots_of(path: Path, slots: Sequence[Slot]) -> list[Slot] | None:
    """Those of the slots that the file holds; None if there is no file that holds them. A file of this name is whole."""
    if not path.exists():
        return None
    num_bytes = path.stat().st_size
    ends = [0, *(slot.start + slot.num_bytes for slot in slots)]
    return list(slots[: ends.index(num_bytes)]) if num_bytes in ends else None


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _build(
    path: Path,
    slots: Sequence[Slot],
    read: Callable[[int], tuple[Pixels, Pixels]],
    num_threads: int,
    tick: Callable[[], object],
) -> torch.Tensor:
    """Under a name of its own until it is whole: another run may be at the same."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=DRAFT)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if slots and hasattr(os, "posix_fallocate"):  # a disk that fills up later would end the process without a word
                os.posix_fallocate(file.fileno(), 0, _end(slots))
            file.truncate(_end(slots))
        content = _map(draft, _end(slots))
        _fill(slots, content, read, num_threads, tick)
        _flush(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return content


def _sweep(folder: Path) -> None:
    """Removes what runs that were killed left behind; one that is being filled is younger."""
    for draft in folder.glob(f".*{DRAFT}"):
        with contextlib.suppress(OSError):
            if time.time() - draft.stat().st_mtime > DRAFT_SECONDS:
                draft.unlink()


def lay_out(shapes: Sequence[tuple[int, int, int]], itemsize: int, most: int) -> list[Slot]:
    """Slots one behind the other for the first pairs, up to `most` bytes."""
    slots: list[Slot] = []
    start = 0
    for shape in shapes:
        slot = Slot(start, shape, itemsize)
        if start + slot.num_bytes > most:
            break
        slots.append(slot)
        start += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
    return slots


def _fill(
    slots: Sequence[Slot],
    content: torch.Tensor,
    read: Callable[[int], tuple[Pixels, Pixels]],
    num_threads: int,
    tick: Callable[[], object],
) -> None:
    raw = content.numpy()

    def fill(index: int) -> None:
        image, mask = read(index)
        image_view, mask_view = _views(slots[index], raw)
        image_view[:] = image
        mask_view[:] = mask

    with ThreadPoolExecutor(num_threads) as pool:  # decoding releases the GIL
        for _ in pool.map(fill, range(len(slots))):
            tick()


def _views(slot: Slot, raw: Pixels) -> tuple[Pixels, Pixels]:
    height, width, channels = slot.shape
    middle = slot.start + height * width * channels * slot.itemsize
    image = raw[slot.start : middle].view(np.uint8 if slot.itemsize == 1 else np.float32).reshape(slot.shape)
    return image, raw[middle : middle + height * width].reshape(height, width)


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def free_memory() -> int:
    """Bytes that a new program could take."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return pages * os.sysconf("SC_PAGE_SIZE") // 2 if pages else 4 * 2**30


def free_shared_memory() -> int:
    """Processes share memory through a file system, which a container may have little of."""
    return min(free_memory(), free_disk(Path("/dev/shm"))) if Path("/dev/shm").is_dir() else free_memory()


def free_disk(folder: Path) -> int:
    existing = next((place for place in (folder, *folder.parents) if place.exists()), Path())
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize
