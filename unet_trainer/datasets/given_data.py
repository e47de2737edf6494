"""Data that a Python caller brings, as files: all that reads, checks, splits and scores a folder works on it, and a run can be
resumed and evaluated without it."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.system.os_errors import cannot


class Pairs(Protocol):
    """A list, a torch Dataset: anything with a length that gives (image, mask) for a number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def write_given(parts: Mapping[str, Pairs | None], folder: Path) -> Path:
    """Reads every pair once, in order, and returns the folder that holds them as .npy files, named by their content. `parts`: train
    and val; without val the run splits. Raises UserError."""
    for part, pairs in parts.items():
        if pairs is not None and len(pairs) == 0:
            raise UserError(f"{part}_data: it is empty; need (image, mask) pairs")
    draft = folder / f".draft-{uuid.uuid4().hex[:12]}"
    digest = hashlib.sha256()
    try:
        for part, pairs in parts.items():
            place = draft if parts.get("val") is None else draft / part
            for index in range(0 if pairs is None else len(pairs)):
                try:
                    image, mask = pairs[index]  # type: ignore[index] # a range of None is empty
                    arrays = {"images": as_pixels(image), "masks": as_pixels(mask)}
                except (TypeError, ValueError, IndexError) as error:
                    raise UserError(f"{part}_data[{index}]: {error}; need (image, mask), see docs/extending.md") from error
                for kind, array in arrays.items():
                    path = place / kind / f"{index:06d}.npy"
                    try:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        np.save(path, array, allow_pickle=False)
                    except OSError as error:
                        raise cannot(f"checkpoint_dir: {folder}", "take the data", error, folder) from None
                    digest.update(f"{path.relative_to(draft)} {array.dtype} {array.shape} ".encode())
                    digest.update(array.data)
        made = folder / digest.hexdigest()[:16]
        if not made.is_dir():  # else an earlier call wrote the same
            with contextlib.suppress(OSError):  # another process was faster
                draft.replace(made)
            made.stat()
        return made
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def as_pixels(given: Any) -> Pixels:
    """H,W or H,W,C. A torch tensor has its channels first; one channel alone needs no axis. Raises ValueError or TypeError."""
    is_tensor = hasattr(given, "detach")
    array = np.asarray(given.detach().cpu() if is_tensor else given)
    if is_tensor and array.ndim == 3:
        array = np.moveaxis(array, 0, -1)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or array.dtype.kind not in "buif" or 0 in array.shape:
        raise ValueError(f"got {array.dtype} of shape {array.shape}")
    array = array.astype(np.uint8) if array.dtype == bool else array
    return np.ascontiguousarray(array)
