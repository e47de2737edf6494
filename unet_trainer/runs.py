"""Where runs are: a folder each under checkpoint_dir. Finds one to go on with, makes one for a new run. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from unet_trainer.config import UserError

LAST, BEST = "last.pt", "best.pt"
SPLIT_TABLE = "split.csv"  # which pairs train and which validate


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file and the reason."""


def find_run(name: str, checkpoint_dir: Path) -> Path:
    """The checkpoint that RUN means: a run's name or folder, or a .pt file."""
    candidates = (Path(name), checkpoint_dir / name)
    try:
        for file in (path for candidate in candidates for path in (candidate, candidate / LAST)):
            if file.is_file():
                return file
        for candidate in candidates:
            if candidate.is_dir():
                raise CheckpointError(f"{candidate} has no {LAST}; there is nothing to go on from")
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None
    runs = [path.parent.name for path in _by_age(checkpoint_dir)]
    there = f"; {checkpoint_dir} holds {', '.join(runs[:5])}" if runs else f"; {checkpoint_dir} holds no runs"
    raise CheckpointError(f"no run {name}{there}")


def newest_run(checkpoint_dir: Path) -> Path:
    """The checkpoint that was written last."""
    found = _by_age(checkpoint_dir)
    if not found:
        raise CheckpointError(f"nothing to go on from: no {LAST} under {checkpoint_dir}")
    return found[0]


def _by_age(checkpoint_dir: Path) -> list[Path]:
    return sorted(checkpoint_dir.glob(f"*/{LAST}"), key=lambda path: path.stat().st_mtime, reverse=True)


def new_run_folder(checkpoint_dir: Path, run_name: str) -> Path:
    """checkpoint_dir/run_name, numbered when it exists: a new run never writes into an old one's folder."""
    checkpoint_dir.mkdir(parents=True, exist_ok=True)  # here, or a link to nowhere would read as "the name is taken" for ever
    base, number = re.sub(r"-\d+$", "", run_name), 1  # the settings of fast-2, run again, make fast-3
    folder = checkpoint_dir / run_name
    while True:
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            folder = checkpoint_dir / f"{base}-{number}"
        else:
            return folder
