"""What may stand in the place of a file and is none: each is refused, and never waited for."""

import os
import shutil

import pytest

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


def replace_by(kind, path):
    """A file by one of NO_FILES."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    NO_FILES[kind](path)
