"""Masks and images that are no plain files (polygons, one file an object or class, pages of a stack) as plain ones.

Each is written once, under checkpoint_dir/.converted, and again when a file that it comes from has changed. Everything after this
(scan, split, loader, cache) sees files only; messages name the files that they come from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unet_trainer.images.image_files import DataError, Pixels, encode_image
from unet_trainer.system.atomic_files import write_atomically, write_text_atomically

FORMAT = 1


class ConvertedFiles:
    """The converted files of one dataset. `settings`: what they depend on besides their sources, e.g. the names of the classes."""

    def __init__(self, data_dir: Path, checkpoint_dir: Path, kind: str, settings: Any = None) -> None:
        key = json.dumps([FORMAT, str(data_dir.resolve()), kind, settings], default=str)
        self.folder = checkpoint_dir / ".converted" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        self._index = self.folder / "index.json"
        self._known: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError):  # without its index everything is written anew
            self._known = dict(json.loads(self._index.read_text(encoding="utf-8")))

    def path(self, name: str, extension: str = ".png") -> Path:
        return self.folder / f"{name}{extension}"

    def write(self, name: str, sources: Sequence[Path], make: Callable[[], Pixels], extension: str = ".png") -> Path:
        """The file for `name`, a relative path without extension. `make` gives its pixels and is called only if it is missing or
        one of its sources has changed."""
        path = self.path(name, extension)
        stamp = [[str(source), *_stamp(source)] for source in sources]
        if self._known.get(name) == stamp and path.is_file():
            return path
        data = encode_image(make(), extension)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: file.write(data))
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror}); converted masks are kept under checkpoint_dir") from None
        self._known[name] = stamp
        return path

    def save_index(self) -> None:
        """After the last file: what was written is found again at the next start."""
        with contextlib.suppress(OSError):  # then it is written anew
            write_text_atomically(self._index, json.dumps(self._known))


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return [status.st_size, status.st_mtime_ns]
