"""Images and masks that are no plain files (polygons, a file an object or class, pages of a stack, blocks of a large
image) as plain ones: written once, under checkpoint_dir/.converted, and again when a source has changed. Everything
after this sees files only; messages name the files that they come from."""

import contextlib
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from unet_trainer.data.pairs import Pair
from unet_trainer.images import image_decoding
from unet_trainer.images.file_bytes import DataError, file_stamp
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.system.atomic_files import write_bytes_atomically
from unet_trainer.system.concurrency import Crash, ReadStderr, forked_map
from unet_trainer.system.console import Console
from unet_trainer.system.json_cache import read_cache, write_cache
from unet_trainer.system.resources import count_cores

FORMAT, INDEX = 2, "index.json"
Index = dict[str, tuple[str, dict[str, int]]]  # name of a file → digest of its sources, and its facts
FEW = 8  # files for which another child process does not pay


class Conversion(NamedTuple):
    """A file to make. `make` gives its pixels or bytes, and counts of what they hold; raises DataError."""

    name: str  # relative path, without extension
    sources: Sequence[Path]
    make: Callable[[], tuple[Pixels | bytes, Mapping[str, int]]]
    extension: str = ".png"


class Converted(NamedTuple):
    """The outcome of a conversion: the file and its facts, or the reason why there is none."""

    path: Path
    facts: Mapping[str, int]
    problem: str = ""


@dataclass(frozen=True)
class Converter:
    """Writes the converted files of a dataset, in child processes and with a progress bar if there is a console."""

    data_dir: Path
    checkpoint_dir: Path
    console: Console | None = None
    num_processes: int | None = None  # None: by the number of files

    def write(self, kind: str, settings: Any, conversions: Sequence[Conversion], label: str) -> list[Converted]:
        """The outcome of each; raises DataError for a source that is missing. `settings`: what the files depend on
        besides their sources, e.g. the names of the classes."""
        # split.csv names these files: absolute, because its paths are relative to data_dir.
        name = f"{kind}-{_digest([FORMAT, str(self.data_dir.resolve()), settings])[:12]}"
        folder = self.checkpoint_dir.absolute() / ".converted" / name
        index: Index = {}
        with contextlib.suppress(ValueError):
            index = TypeAdapter(Index).validate_python(read_cache(folder / INDEX))
        names = [ascii(conversion.name) for conversion in conversions]  # JSON takes no broken UTF-8
        sources = [_digest_files(conversion.sources) for conversion in conversions]
        made, waiting = list[Converted](), list[int]()
        for number, conversion in enumerate(conversions):
            path = folder / f"{conversion.name}{conversion.extension}"
            digest, facts = index.get(names[number], ("", {}))
            is_made = digest == sources[number] and path.is_file()
            made.append(Converted(path, facts if is_made else {}))
            waiting += [] if is_made else [number]

        def convert(number: int, _: ReadStderr) -> Converted:
            path = made[number].path
            try:
                pixels, facts = conversions[number].make()
                data = pixels if isinstance(pixels, bytes) else image_decoding.encode_image(pixels, path.suffix)
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes_atomically(path, data)
                return Converted(path, facts)
            except DataError as error:
                return Converted(path, {}, str(error))
            except OSError as error:
                where = "converted masks are kept under checkpoint_dir"
                return Converted(path, {}, f"{path} cannot be written ({error.strerror}); {where}")

        bar = (self.console or Console(io.StringIO())).bar(label, len(waiting), keep=False)  # silent without one
        outcomes = forked_map(convert, waiting, self.num_processes or min(count_cores(), 1 + len(waiting) // FEW))
        try:
            with bar as shown, contextlib.closing(outcomes):
                for number, outcome in ((waiting[position], outcome) for position, outcome in outcomes):
                    if isinstance(outcome, Crash):
                        outcome = made[number]._replace(problem=f"reading it crashed ({outcome.reason})")
                    if not outcome.problem:
                        index[names[number]] = sources[number], dict(outcome.facts)
                    made[number] = outcome
                    shown.tick()
        finally:
            if waiting:
                write_cache(folder / INDEX, index)
        return made

    def write_pairs(self, kind: str, wanted: Sequence[tuple[Pair, Conversion, Conversion]], label: str) -> list[Pair]:
        """The pairs with the files that are made for image and mask. Raises DataError for bad sources."""
        files = self.write(kind, None, [conversion for _, *sides in wanted for conversion in sides], label)
        if problem := next((file.problem for file in files if file.problem), ""):
            raise DataError(problem)
        made = zip(wanted, files[::2], files[1::2], strict=True)
        return [replace(pair, image=image.path, mask=mask.path) for (pair, *_), image, mask in made]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _digest_files(paths: Sequence[Path]) -> str:
    """Another one where a file has changed; raises DataError where one is missing."""
    stamps = {str(path): file_stamp(path) for path in paths}
    if gone := next((name for name, stamp in stamps.items() if stamp is None), None):
        raise DataError(f"{gone}: No such file or directory")
    return _digest(stamps)
