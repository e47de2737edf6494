"""What may stand in the place of a file and is none: each is refused, and never waited for."""

import os
import shutil

import pytest

from helpers.mutations import mutated

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def _link(target):
    return lambda path: path.symlink_to(target)


NO_FILES = {
    "pipe": lambda path: os.mkfifo(path),
    "zeros": _link("/dev/zero"),
    "pages": _link("/proc/self/pagemap"),
    "loop": lambda path: path.symlink_to(path.name),
    "broken link": _link("none"),
    "folder": lambda path: path.mkdir(),
}


def spoil(path, files, chooser, rng):
    """Replaces a file by what is none, by a link to another one, or by its own bytes with changes; returns what was done."""
    kind = chooser.choice([*NO_FILES, "link", "bytes", "bytes", "empty", "deep"])
    if kind in NO_FILES:
        replace_by(kind, path)
    elif kind == "link":
        other = chooser.choice(files)
        path.unlink()
        path.symlink_to(other.absolute())
    else:
        changed = {
            "empty": lambda: b"",
            "deep": lambda: b"[" * 200_000,
            "bytes": lambda: mutated(path.read_bytes(), rng),
        }[kind]()
        path.write_bytes(changed)
    return kind


def replace_by(kind, path):
    """A file by one of NO_FILES."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    NO_FILES[kind](path)
