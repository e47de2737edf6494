"""Groups of pairs by group_pattern. The pattern is the user's, and some patterns take years for one name: it has a time limit."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from unet_trainer.datasets.name_matching import composed
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.problems import first_few
from unet_trainer.images.file_bytes import DataError
from unet_trainer.system.forked_map import Crash, ReadStderr, forked_map
from unet_trainer.system.names import one_line

CHUNK = 10_000  # paths that are matched within the limit; ordinary patterns take a microsecond for one
SECONDS = 20.0


def add_groups(pairs: Sequence[Pair], pattern: str, data_dir: Path, seconds: float = SECONDS) -> tuple[Pair, ...]:
    """The pairs with their groups: what the pattern matches in the path inside data_dir, or its first bracket if it has one."""
    paths = [pair.path_in(data_dir) for pair in pairs]
    groups = _match(pattern, paths, seconds)
    unmatched = [path for path, group in zip(paths, groups, strict=True) if group is None]
    if unmatched:
        raise DataError(
            f"group_pattern: {pattern!r} matches nothing in {len(unmatched)} of {len(pairs)} paths, such as {first_few(unmatched)}"
        )
    return tuple(replace(pair, group=group or "") for pair, group in zip(pairs, groups, strict=True))


def _match(pattern: str, paths: Sequence[str], seconds: float) -> list[str | None]:
    """The group of each path; None where nothing matches. In a child process, because no thread can interrupt a match."""
    compiled = re.compile(composed(pattern))
    current = mmap.mmap(-1, 8)  # the path that is being matched, shared with the child

    def match(start: int, read_stderr: ReadStderr) -> list[str | None]:
        found = []
        for index in range(start, min(start + CHUNK, len(paths))):
            current[:] = struct.pack("q", index)
            match = compiled.search(paths[index])
            found.append(None if match is None else match.group(1 if compiled.groups else 0) or "")
        return found

    groups: list[str | None] = []
    for _, outcome in forked_map(match, range(0, len(paths), CHUNK), 1, timeout=seconds):
        if isinstance(outcome, Crash):
            path = one_line(paths[struct.unpack("q", current)[0]])
            raise DataError(
                f"group_pattern: {pattern!r} has not decided about {path} after {seconds:g} s; a repeat inside of a repeat, "
                r"like (a+)+, takes for ever where nothing matches: write a simpler one, e.g. ^([^_]+)_"
            )
        groups += outcome
    return groups
