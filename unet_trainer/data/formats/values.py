"""Checks of what is in annotation files. They are anyone's: what is not as its tool writes it fails where it is used,
and `inside` says in which entry."""

import contextlib
import csv
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import cv2
import numpy as np

from unet_trainer.config.safe_yaml import YamlError
from unet_trainer.data.pairs import composed, first_few
from unet_trainer.images.file_bytes import DataError, ReadError
from unet_trainer.images.image_decoding import Pixels
from unet_trainer.system.console import counted, first_line

MAX_FILE_BYTES = 2**30
MAX_COORDINATE = 1e7  # pixels; an outline may leave its image, not the continent
MAX_TEXT = 100  # characters of the name of a class, and of what Python says of a wrong value
NUM_LOOKED_AT = 20  # items of a JSON document, texts that may be labels, files without an extension
NO_MASK = "a box without an outline, and a box is no mask; export polygons or masks, or remove it"
# What a value of a wrong type, or one that is missing, raises where it is used.
MALFORMED: tuple[type[Exception], ...] = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
MALFORMED += (RecursionError, cv2.error, csv.Error)


@contextlib.contextmanager
def inside(name: object) -> Iterator[None]:
    """Name the file or the entry in an error, which becomes a DataError of one sentence."""
    try:
        yield
    except (DataError, YamlError) as error:
        raise DataError(f"{name}: {error}") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise DataError(f"{name}: it is not UTF-8 text, as some programs save it; save it as UTF-8") from None
    except MALFORMED as error:
        reason = first_line(error)[:MAX_TEXT] + " is missing" * isinstance(error, KeyError)
        fix = "was it cut off, or edited by hand? Correct it, or export it again"
        raise DataError(f"{name}: {reason}; {fix}") from None


def has_keys(content: Any, keys: str) -> bool:
    """Whether a JSON document, or the first one in a list or dict of it, has all these keys, or those behind a |."""
    items = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    firsts = (item[0] if isinstance(item, list) and item else item for item in islice(items, NUM_LOOKED_AT))
    documents = [document for document in (content, *firsts) if isinstance(document, dict)]
    return any({*wanted.split()} <= document.keys() for wanted in keys.split("|") for document in documents)


def as_name(value: object, what: str = "the name of a class") -> str:
    """The name of a class: printable, on one line."""
    name = " ".join(value.split()) if isinstance(value, str) else ""
    if not name or len(name) > MAX_TEXT or not name.isprintable():
        raise ReadError(f"{what} is {value!r:.60}; need a text of 1 to {MAX_TEXT} characters")
    return name


def as_size(height: Any, width: Any) -> tuple[int, int] | None:
    """Height and width, as numbers or as text; None if there is neither."""
    if height is None and width is None:
        return None
    if not all(re.fullmatch(r"[0-9]{1,9}(\.0+)?", str(side)) for side in (height, width)):
        raise ReadError(f"height is {height!r:.60} and width {width!r:.60}; need whole numbers of pixels")
    return int(float(height)), int(float(width))


def as_points(value: Any) -> Pixels:
    """N,2 float64 from [[x, y], ...] or [x, y, x, y, ...], none of it NaN or so large that nothing can be drawn."""
    try:
        numbers = np.array(value, np.float64)
    except (TypeError, ValueError):
        raise ReadError(f"coordinates are {value!r:.60}; need numbers, as many for each point") from None
    if not (np.abs(numbers) <= MAX_COORDINATE).all():
        raise ReadError(f"a coordinate that is no number, or beyond {MAX_COORDINATE:.0f} pixels")
    if numbers.ndim == 1 and numbers.size % 2 == 0:
        numbers = numbers.reshape(-1, 2)
    if numbers.ndim != 2 or numbers.shape[1] < 2:
        raise ReadError(f"{counted(numbers.size, 'number')}, {value!r:.60}; need x and y for each point")
    return numbers[:, :2]


def path_pieces(name: str) -> list[str]:
    """Folders and name, whatever system wrote them."""
    return [piece for piece in PurePosixPath(name.replace("\\", "/")).parts if piece not in ("/", ".", "..")]


def plain(name: str) -> str:
    """Equal for names that differ in case or in the form of accents only: a name may come from another system."""
    return composed(name).casefold()


def note(noun: str, names: Iterable[str], what: str) -> list[str]:
    """A line about all of these names; none without any."""
    names = [*names]
    number = counted(len(names), noun, "classes" if noun == "class" else None)
    return [f"{number} {what}: {first_few(names)}"] if names else []
