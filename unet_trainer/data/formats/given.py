"""Data from Python: the arrays of a caller as files, named by the digest of what was written."""

import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unet_trainer.config.errors import UserError
from unet_trainer.images.file_bytes import MAX_BYTES
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.system import input_files
from unet_trainer.system.locks import draft_folder
from unet_trainer.system.os_errors import cannot


class Pairs(Protocol):
    """A list, a torch Dataset: anything with a length that gives (image, mask) for a number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def write_given(parts: Mapping[str, Pairs | None], folder: Path) -> Path:
    """Reads every pair once, in order, and returns the folder that holds them as .npy files, named by the digest of
    what was written. Where an earlier call wrote the same, damaged files are replaced. `parts`: train and val; without
    val the run splits. Raises UserError."""
    given = {part: pairs for part, pairs in parts.items() if pairs is not None}
    for part, pairs in given.items():
        if not (hasattr(pairs, "__len__") and hasattr(pairs, "__getitem__")):
            need = "a list, or an object with a length that gives (image, mask) for an index"
            raise UserError(f"{part}_data: got {type(pairs).__name__}; need {need}")
        if len(pairs) == 0:
            raise UserError(f"{part}_data: it is empty; need (image, mask) pairs")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with draft_folder(folder, ".draft-") as drafts:
            for part, pairs in given.items():
                for index in range(len(pairs)):
                    for kind, array in _read_arrays(part, pairs, index).items():
                        path = drafts / "data" / (part if "val" in given else "") / kind / f"{index:06d}.npy"
                        path.parent.mkdir(parents=True, exist_ok=True)
                        np.save(path, array, allow_pickle=False)
            digests = _digests_in(drafts / "data")
            made = folder / hashlib.sha256(repr(digests).encode()).hexdigest()[:16]
            try:
                if made.is_dir() and _digests_in(made) != digests:  # damaged since it was written
                    made.rename(drafts / "damaged")
                (drafts / "data").rename(made)  # fails where an earlier call, or another process, wrote the same
            except OSError:
                if not made.is_dir():
                    raise
            return made
    except OSError as error:
        raise cannot(f"checkpoint_dir: {folder}", "take the data", error, folder) from None


def _read_arrays(part: str, pairs: Pairs, index: int) -> dict[str, Pixels]:
    try:
        image, mask = pairs[index]
        return {"images": as_pixels(image), "masks": as_pixels(mask)}
    except Exception as error:  # the caller's code may raise anything
        what = f"{part}_data[{index}]: {type(error).__name__}: {error}"
        raise UserError(f"{what}; need (image, mask), see docs/extending.md") from error


def _digests_in(folder: Path) -> dict[str, str]:
    """By the path in the folder; of links, and of files that cannot be read, there are none."""
    digests: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        digests[name := path.relative_to(folder).as_posix()] = ""
        with contextlib.suppress(OSError):
            digests[name] = hashlib.sha256(input_files.read_bytes(path, MAX_BYTES, follow=False)).hexdigest()
    return digests


def as_pixels(array: Any) -> Pixels:
    """H,W or H,W,C; a torch tensor has its channels first. Raises ValueError or TypeError."""
    if hasattr(array, "detach"):
        array = np.asarray(array.detach().cpu())
        array = np.moveaxis(array, 0, -1) if array.ndim == 3 else array
    array = np.asarray(array)
    if array.ndim == 3 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or array.dtype.kind not in "buif" or 0 in array.shape:
        raise ValueError(f"got {array.dtype} of shape {array.shape}")
    return np.ascontiguousarray(array.astype(np.uint8) if array.dtype == bool else array)
