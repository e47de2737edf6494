"""Folders of a dataset that this user may not list or search. They would look empty, and their images be missed in silence."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.images.file_bytes import DataError

FIX = "need the permissions r and x on it (chmod u+rx), or another user"


def refuse_unreadable(data_dir: Path, others: Sequence[str | None] = ()) -> None:
    """Raises DataError for the first such folder: data_dir, one above it, one below it, or one of `others`, named relative to it.

    Hidden folders are not searched for images, and may be closed.
    """
    for folder in (data_dir, *(data_dir / other for other in others if other is not None)):
        _refuse_above(folder)
    for place, folders, _ in os.walk(data_dir):
        folders[:] = [name for name in folders if not name.startswith(".")]
        closed = next((Path(place, name) for name in sorted(folders) if not os.access(Path(place, name), os.R_OK | os.X_OK)), None)
        if closed is not None:
            raise DataError(f"data_dir: {closed} cannot be read (Permission denied); {FIX}")


def _refuse_above(folder: Path) -> None:
    try:
        folder.stat()
    except PermissionError:
        closed = next((place for place in reversed(folder.absolute().parents) if not os.access(place, os.X_OK)), folder)
        raise DataError(f"data_dir: {folder} cannot be read (Permission denied on {closed}); {FIX}") from None
    except OSError:  # told where it is looked for
        return
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"data_dir: {folder} cannot be read (Permission denied); {FIX}")
