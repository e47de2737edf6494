"""Keeps a run in its folder: the state, the best weights, the table, the settings; and brings the last good state back.

Writes in the background. What cannot be written ends the run or is told, as `on_save_error` says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from unet_trainer.atomic import write_text_atomically
from unet_trainer.checkpoint import TrainState, best_content, last_content, read_run, write_checkpoint
from unet_trainer.config import Config, UserError, as_dict, to_yaml
from unet_trainer.console import Console
from unet_trainer.guard import NonFinite
from unet_trainer.history import Row, write_metrics
from unet_trainer.host_copy import HostCopy
from unet_trainer.images import Pixels, write_image
from unet_trainer.memory import one_line
from unet_trainer.runs import BEST, LAST, PREVIOUS, SPLIT_TABLE, TrainingFailed, has_checkpoint
from unet_trainer.saver import Job, Saver
from unet_trainer.splits import Split
from unet_trainer.tables import table_text

RETRY_SECONDS = 60  # within an epoch, after a save that went wrong


class Keeper:
    """What a run leaves on disk; each file whole or as it was."""

    def __init__(self, folder: Path, config: Config, state: TrainState, split: Split, console: Console) -> None:
        self.folder = folder
        self.config = config  # as it is now: running out of memory may change it
        self.state = state
        self.split = split
        self.console = console
        self.saver = Saver(needs={LAST: BEST})  # a state that speaks of a best.pt that is not there is none
        self.saved_at = time.monotonic()
        self.failed_at: float | None = None  # when a save went wrong
        self.held: dict[str, Job] = {}  # of epochs that ended while an earlier state was still being written
        self.start: HostCopy | None = self._copy_state()  # where this start began, until a later state is on disk

    def _copy_state(self, best: HostCopy | None = None) -> HostCopy:
        return HostCopy(last_content(self.state, as_dict(self.config), self.split), best)

    @property
    def resume_command(self) -> str:
        return f"python train_unet.py --resume {shlex.quote(str(self.folder))}"

    def describe(self) -> str:
        """What there is to go on from."""
        if not self.folder.is_dir():
            return f"{self.folder} is no longer there"
        state = next((file for file in (self.folder / LAST, self.folder / PREVIOUS) if file.is_file()), None)
        return "nothing is saved" if state is None else f"{state} is whole; to go on: {self.resume_command}"

    def write_config(self) -> None:
        """What the run is trained with, to run again or to go on with."""
        self.attempt(partial(_write_config, self.config, self.folder))

    def write_split(self) -> None:
        """Which pairs train and which validate, so that a run that goes on keeps to it."""
        text = table_text(self.split.train, self.split.val, Path(self.config.data_dir))
        self.attempt(lambda: write_text_atomically(self.folder / SPLIT_TABLE, text))

    def save_epoch(self, row: Row, best_model: torch.nn.Module | None, draw_samples: Callable[[], Callable[[], Pixels]]) -> None:
        """A finished epoch, whose state is final; with the model if it is the best so far."""
        jobs: dict[str, Job] = {}
        best = None
        if best_model is not None:
            best = HostCopy(best_content(best_model, as_dict(self.config), self.state.epoch, row))
            picture = self.folder / "samples" / f"epoch_{self.state.epoch:04d}.png"
            # Before last.pt: a crash in between leaves an epoch that is done again, not a best.pt that is older than its score.
            jobs[BEST] = partial(_write_best, self.folder / BEST, best)
            draw = self._draw(draw_samples)
            if draw is not None:
                jobs["samples"] = partial(_write_picture, picture, draw)
        jobs["metrics.csv"] = partial(write_metrics, self.folder / "metrics.csv", [dict(row) for row in self.state.history])
        if self.saver.is_busy():
            # Epochs shorter than a save: a copy would only wait, to be replaced by a newer one. It is made when the disk is free.
            self.held |= jobs  # with the state, or going back would leave a best.pt of an epoch that was never there
        else:
            self.save_state(jobs, best)

    def _draw(self, draw_samples: Callable[[], Callable[[], Pixels]]) -> Callable[[], Pixels] | None:
        """A picture is no reason to lose the epoch that it shows."""
        try:
            return draw_samples()
        except (RuntimeError, MemoryError, UserError) as error:
            self.console.warn(f"no picture of epoch {self.state.epoch}: {one_line(error)}")
            return None

    def save_state(self, before: Mapping[str, Job] | None = None, best: HostCopy | None = None, with_config: bool = True) -> None:
        """The state as it is now, from which a run goes on as if it had never stopped."""
        copy = self._copy_state(best)

        def write_last() -> None:
            write_checkpoint(self.folder / LAST, copy.content(), previous=self.folder / PREVIOUS)
            self.start = None

        self.saved_at = time.monotonic()
        self.failed_at = None
        jobs: dict[str, Job] = {**self.held, **(before or {}), LAST: write_last}
        self.held = {}
        if with_config:
            jobs["config.yaml"] = partial(_write_config, self.config, self.folder)
        self.attempt(lambda: self.saver.submit(jobs))

    def save_state_if_due(self) -> None:
        """Within an epoch, every checkpoint_minutes, or when the last epoch's end was not saved yet; and when an earlier save
        went wrong: it is heard of at once, and tried again a minute later."""
        minutes, now = self.config.checkpoint_minutes, time.monotonic()
        if self.saver.error is not None:
            self.attempt(self.saver.raise_error)
        is_due = bool(self.held) or (minutes is not None and now - self.saved_at > 60 * minutes)
        if self.failed_at is not None:
            is_due = now - self.failed_at > RETRY_SECONDS
        if is_due and not self.saver.is_busy():
            self.save_state()

    def finish(self) -> None:
        """Waits until everything is written, the state as it is now included; what could not be is tried once more."""
        if self.held:
            self.save_state()
        self._wait()

    def _wait(self) -> None:
        def wait() -> None:
            try:
                self.saver.wait()
            except OSError:
                self.saver.submit({})  # once more, what could not be written
                self.saver.wait()

        self.attempt(wait)

    def unwritten(self) -> list[str]:
        """Those of best.pt and last.pt that the disk did not take."""
        return [name for name in (BEST, LAST) if name in self.saver.waiting]

    def keep_what_there_is(self, state_is_whole: bool) -> None:
        """Before a run fails: the state as it is, or, if there is nothing else to go on from, the start."""
        start = self.start
        try:
            if state_is_whole:
                self.save_state()
            self.held = {}
            self._wait()
        except NonFinite as error:
            self.console.warn(str(error))
        if start is not None and not has_checkpoint(self.folder):
            self.attempt(lambda: write_checkpoint(self.folder / LAST, start.content()))

    def go_back(self) -> None:
        """The state that was saved last comes back, or else the start."""
        self.held = {}
        with contextlib.suppress(NonFinite):  # that is what it goes back from
            self._wait()
        start = self.start
        # A copy, because the state that is loaded changes in place.
        content = read_run(self.folder, self.console.warn) if start is None else HostCopy(start.content()).content()
        self.state.load_state_dict(content)

    def attempt(self, write: Callable[[], object]) -> None:
        """Writes, or does what on_save_error says."""
        try:
            write()
        except OSError as error:
            self.failed_at = time.monotonic()
            reason = str(error)
            if error.strerror is not None:
                reason = f"{error.filename or self.folder} could not be written ({error.strerror})"
            if self.config.on_save_error == "stop":
                self.saver.abandon()
                advice = "Make room, or set" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Set"
                raise TrainingFailed(f"{reason}; {self.describe()}. {advice} on_save_error: continue to train on") from None
            self.console.warn(f"{reason}; training goes on (on_save_error: continue)")


def _write_config(config: Config, folder: Path) -> None:
    header = f"Settings of this run. To run them again: python train_unet.py {shlex.quote(str(folder / 'config.yaml'))}"
    kept = dataclasses.replace(config, resume=None, run_name=folder.name)
    write_text_atomically(folder / "config.yaml", to_yaml(kept, header))


def _write_best(path: Path, copy: HostCopy) -> None:
    write_checkpoint(path, copy.content())


def _write_picture(path: Path, draw: Callable[[], Pixels]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_image(path, draw())
