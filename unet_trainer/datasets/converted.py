"""Masks and images that are no plain files (polygons, one file an object or class, pages of a stack) as plain ones.

Each is written once, under checkpoint_dir/.converted, and again when a file that it comes from has changed. Everything after this
(scan, split, loader, cache) sees files only; messages name the files that they come from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_files import Pixels, encode_image
from unet_trainer.system.atomic_files import write_atomically, write_text_atomically
from unet_trainer.system.forked_map import Crash, ReadStderr, forked_map

FORMAT = 1
FEW = 8  # files for which starting child processes does not pay


@dataclass(frozen=True)
class Conversion:
    """A file to make. `make` gives its pixels and facts about them, plain values for JSON; raises DataError for bad sources."""

    name: str
    sources: Sequence[Path]
    make: Callable[[], tuple[Pixels, Any]]


@dataclass(frozen=True)
class Converted:
    """The outcome of a conversion: the file and its facts, or the reason why there is none."""

    path: Path
    facts: Any = None
    problem: str = ""


_Answer = tuple[Any, str, str]  # facts, the problem of the sources, and why the file cannot be written


class ConvertedFiles:
    """The converted files of one dataset. `settings`: what they depend on besides their sources, e.g. the names of the classes."""

    def __init__(self, data_dir: Path, checkpoint_dir: Path, kind: str, settings: Any = None) -> None:
        key = json.dumps([FORMAT, str(data_dir.resolve()), kind, settings], default=str)
        self.folder = checkpoint_dir / ".converted" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        self._index = self.folder / "index.json"
        self._known: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):  # without its index everything is written anew
            content = json.loads(self._index.read_text(encoding="utf-8"))
            self._known, self._facts = dict(content["stamps"]), dict(content["facts"])

    def path(self, name: str, extension: str = ".png") -> Path:
        return self.folder / f"{name}{extension}"

    def forget(self, name: str) -> None:
        """The file for `name` is written anew when it is asked for."""
        self._known.pop(name, None)

    def write(self, name: str, sources: Sequence[Path], make: Callable[[], Pixels], extension: str = ".png") -> Path:
        """The file for `name`, a relative path without extension. `make` gives its pixels and is called only if it is missing or
        one of its sources has changed."""
        path = self.path(name, extension)
        stamp = _stamps(sources)
        if self._known.get(name) == stamp and path.is_file():
            return path
        _write(path, make())
        self._known[name] = stamp
        return path

    def write_many(
        self, conversions: Sequence[Conversion], num_workers: int, tick: Callable[[], object], extension: str = ".png"
    ) -> list[Converted]:
        """As `write`, for many files at a time and in child processes; `tick` is called after each. Saves the index.

        Bad sources are told in the outcome; a file that cannot be written raises DataError.
        """
        paths = [self.path(conversion.name, extension) for conversion in conversions]
        stamps = [_stamps(conversion.sources) for conversion in conversions]
        outcomes: dict[int, Converted] = {}
        waiting: list[int] = []
        for index, (conversion, path) in enumerate(zip(conversions, paths, strict=True)):
            if self._known.get(conversion.name) == stamps[index] and conversion.name in self._facts and path.is_file():
                outcomes[index] = Converted(path, self._facts[conversion.name])
                tick()
            else:
                waiting.append(index)

        def convert(index: int, _: ReadStderr) -> _Answer:
            try:
                pixels, facts = conversions[index].make()
            except DataError as error:
                return None, str(error), ""
            try:
                _write(paths[index], pixels)
            except DataError as error:
                return None, "", str(error)
            return facts, "", ""

        try:
            answers = forked_map(convert, waiting, num_workers) if len(waiting) > FEW else _one_by_one(convert, waiting)
            with contextlib.closing(answers):
                for position, answer in answers:
                    index = waiting[position]
                    if isinstance(answer, Crash):
                        answer = None, f"reading it crashed ({answer.reason})", ""
                    facts, problem, failure = answer
                    if failure:
                        raise DataError(failure)
                    outcomes[index] = Converted(paths[index], facts, problem)
                    if not problem:
                        self._known[conversions[index].name], self._facts[conversions[index].name] = stamps[index], facts
                    tick()
        finally:
            self.save_index()
        return [outcomes[index] for index in range(len(conversions))]

    def save_index(self) -> None:
        """After the last file: what was written is found again at the next start."""
        with contextlib.suppress(OSError):  # then it is written anew
            write_text_atomically(self._index, json.dumps({"stamps": self._known, "facts": self._facts}))


def _one_by_one(
    convert: Callable[[int, ReadStderr], _Answer], items: Sequence[int]
) -> Generator[tuple[int, _Answer | Crash], None, None]:
    for position, item in enumerate(items):
        yield position, convert(item, lambda: "")


def _write(path: Path, pixels: Pixels) -> None:
    data = encode_image(pixels, path.suffix)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(data))
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror}); converted masks are kept under checkpoint_dir") from None


def _stamps(sources: Sequence[Path]) -> list[list[Any]]:
    return [[str(source), *_stamp(source)] for source in sources]


def _stamp(path: Path) -> list[int]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return [status.st_size, status.st_mtime_ns]
