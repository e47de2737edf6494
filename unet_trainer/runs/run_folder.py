"""Run folders under checkpoint_dir: finds one to resume, makes one for a new run. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from unet_trainer.config.errors import UserError
from unet_trainer.runs.errors import CheckpointError

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
DAMAGED = "damaged.pt"  # a last.pt that could not be read
SETTINGS = "settings.json"  # value, source and reason of every setting
SPLIT_CSV = "split.csv"  # which pairs train and which validate


def find_run(name: str, checkpoint_dir: Path) -> Path:
    """What RUN on the command line means: the folder of a run, by its name or path, or a .pt file."""
    candidates = (Path(name), checkpoint_dir / name)
    try:
        for candidate in candidates:
            if candidate.is_file() or has_checkpoint(candidate):
                return candidate
        for candidate in candidates:
            if candidate.is_dir():
                raise CheckpointError(f"{candidate} has no {LAST}; there is nothing to go on from")
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None
    runs = [folder.name for folder in _by_age(checkpoint_dir)]
    there = f"; {checkpoint_dir} holds {', '.join(runs[:5])}" if runs else f"; {checkpoint_dir} holds no runs"
    raise CheckpointError(f"no run {name}{there}")


def find_resume_source(resume: str | None, run_name: str, checkpoint_dir: Path) -> Path | None:
    """What to resume from, if anything: a run's folder, or the .pt file that was named."""
    if resume is None:
        return None
    if resume != "auto":
        return find_run(resume, checkpoint_dir)
    folder = checkpoint_dir / run_name
    return folder if has_checkpoint(folder) else None


def newest_run(checkpoint_dir: Path) -> Path:
    """The folder of the run that was saved last."""
    found = _by_age(checkpoint_dir)
    if not found:
        raise CheckpointError(f"nothing to go on from: no {LAST} under {checkpoint_dir}")
    return found[0]


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a state to resume from. A crash on a file system without hard links may leave previous.pt alone."""
    return (folder / LAST).is_file() or (folder / PREVIOUS).is_file()


def _by_age(checkpoint_dir: Path) -> list[Path]:
    files = sorted(
        (path for name in (LAST, PREVIOUS) for path in checkpoint_dir.glob(f"*/{name}")),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    return list(dict.fromkeys(path.parent for path in files))


def new_run_folder(checkpoint_dir: Path, run_name: str) -> Path:
    """checkpoint_dir/run_name, numbered when it exists: a new run never writes into an old one's folder."""
    checkpoint_dir.mkdir(parents=True, exist_ok=True)  # here: below, a broken link would look like a name that is taken, for ever
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


def start_folder(resume: str | None, run_name: str, checkpoint_dir: Path) -> Path:
    """A folder for a new run. With resume: auto the name is kept, or the next start would not find it."""
    try:
        if resume == "auto":
            folder = checkpoint_dir / run_name
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        return new_run_folder(checkpoint_dir, run_name)
    except OSError as error:
        raise UserError(f"checkpoint_dir: {checkpoint_dir} cannot be written to ({error.strerror})") from None
