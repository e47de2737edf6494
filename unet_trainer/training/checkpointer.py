"""Saves a run in its folder: the state, the best weights, the metrics, the settings; and restores the last good state.

Files are written in the background. What cannot be written ends the run.
"""

import contextlib
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from unet_trainer import __version__
from unet_trainer.config.errors import CheckpointError, NonFinite, TrainingFailed, UnreadableFile, UserError
from unet_trainer.config.resolved_config import Settings
from unet_trainer.datasets.splits import Split, split_csv_text
from unet_trainer.images.image_decoding import Pixels, encode_image
from unet_trainer.model.segmenter import Segmenter, network_weights
from unet_trainer.system.atomic_files import make_own_folder, write_bytes_atomically, write_text_atomically
from unet_trainer.system.concurrency import BackgroundWriter, Jobs
from unet_trainer.system.console import Console, first_line
from unet_trainer.system.os_errors import explain, named_file, with_advice
from unet_trainer.training.async_device import HostCopy
from unet_trainer.training.checkpoint_file import read_run, verify_checkpoint, write_checkpoint
from unet_trainer.training.history import EventLog, Row, write_metrics, write_result
from unet_trainer.training.resume import split_names
from unet_trainer.training.run_folder import (
    BEST,
    CONFIG_TITLE,
    CONFIG_YAML,
    LAST,
    LOG,
    METRICS_CSV,
    PREVIOUS,
    SAMPLES,
    SETTINGS,
    SPLIT_CSV,
    VAL_SCORES,
    has_checkpoint,
    new_run_folder,
    resume_command,
)
from unet_trainer.training.state import TrainState


@dataclass(eq=False)
class Checkpointer:
    """Writes a run's files, each complete or as it was before.

    Files wait in one ordered list, `waiting`, for the next save of the state: those of an epoch that ended while the
    disk was busy, and those that a disk error kept from being written. best.pt is written before the last.pt that
    refers to it, and last.pt not at all if best.pt failed: a crash in between repeats an epoch. best.pt is never
    written without the state of its epoch, so that a rollback does not leave a best.pt of an epoch that was rolled
    back."""

    folder: Path
    settings: Settings
    state: TrainState
    split: Split
    console: Console
    is_ours: Callable[[], bool] = lambda: True  # whether the folder is still the one that the run has locked
    events: EventLog = field(default_factory=EventLog)
    drawings: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # by their file
    writer: BackgroundWriter = field(default_factory=lambda: BackgroundWriter({LAST: BEST}), init=False)
    waiting: Jobs = field(default_factory=dict, init=False)
    saved_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.num_test = len(self.split.test)
        self.initial: HostCopy | None = self._copy_state()  # the state at this start, until a later one is on disk

    def _copy_state(self, best: HostCopy | None = None) -> HostCopy:
        return HostCopy({**self._about_run(), "split": split_names(self.split), **self.state.state_dict()}, best)

    def _about_run(self) -> dict[str, Any]:
        """What every checkpoint of the run holds."""
        return {
            "version": __version__,
            "spec": self.state.segmenter.spec.to_dict(),
            "config": self.settings.repeatable_dict(),
            "decisions": self.settings.decisions_dict(),
        }

    def describe_saved(self) -> str:
        """What there is to go on from."""
        if not self.folder.is_dir():
            return f"{self.folder} is no longer there"
        state = next((file for file in (self.folder / LAST, self.folder / PREVIOUS) if file.is_file()), None)
        return (
            "there is no state to go on from"
            if state is None
            else f"the last save is {state}; to go on: {resume_command(self.folder)}"
        )

    def write_config(self) -> None:
        """What the run is trained with, to repeat it or to go on with it."""
        header = f"{CONFIG_TITLE} To run them again: python train_unet.py {shlex.quote(str(self.folder / CONFIG_YAML))}"
        text = self.settings.to_yaml(header, resume=None, run_name=self.folder.name)
        write_text_atomically(self.folder / CONFIG_YAML, text)
        write_result(self.folder / SETTINGS, self.settings.explained())

    def write_split(self) -> None:
        """Which pairs train and which validate, so that a resumed run keeps to it."""
        write_text_atomically(self.folder / SPLIT_CSV, split_csv_text(self.split, Path(self.settings.taken.data_dir)))

    def save_epoch(
        self,
        row: Row,
        best: Segmenter | None,
        draw_samples: Callable[[], Callable[[], Pixels]],
        make_scores: Callable[[], str],
    ) -> None:
        """A finished epoch, whose state is final; `best` is the evaluated model if it is the best so far.

        `draw_samples` is called for the best only; what it returns is called in the background, and so is
        `make_scores`."""
        # The folder is read when a job is written: it may have become another one since, see _leave_folder.
        best_copy, name = None, f"epoch_{self.state.epoch:04d}.png"
        if best is not None:
            best_copy = self._copy_best(row, best)
            self.waiting[BEST] = partial(self._write_best, best_copy)
            self.waiting[VAL_SCORES] = lambda: write_text_atomically(self.folder / VAL_SCORES, make_scores())
            try:
                draw = draw_samples()
                self.waiting[SAMPLES] = lambda: self._write_picture(name, draw())
            except (RuntimeError, MemoryError, UserError) as error:  # which do not end the epoch that the picture shows
                self.console.warn(f"no picture of epoch {self.state.epoch}: {first_line(error)}")
        history = [dict(row) for row in self.state.history]
        self.waiting[METRICS_CSV] = lambda: write_metrics(self.folder / METRICS_CSV, history)
        # else an epoch is shorter than a save: a copy of the state would only be replaced
        if not self.writer.is_busy():
            self.save_state(best=best_copy)

    def check_best(self) -> str | None:
        """What became of best.pt if it is missing or damaged and its weights are lost: the run then has no best epoch.

        If the state is that of the best epoch, the file is written anew, with a warning. Raises UnreadableFile where it
        cannot be
        read: it may be whole.
        """
        state, path = self.state, self.folder / BEST
        best_epoch = state.early_stopping.best_epoch
        if best_epoch == 0 or BEST in self.waiting:
            return None
        try:
            verify_checkpoint(path)
            return None
        except UnreadableFile:
            raise
        except CheckpointError as error:
            damage = str(error)
        if (state.epoch, state.batch) == (best_epoch, 0):
            copy = self._copy_best(state.history[-1], state.eval_segmenter)
            self.attempt(lambda: self._write_best(copy))
            self.console.warn(f"{damage}; it is written anew from this state, which is that of the best epoch")
            return None
        state.forget_best()
        return f"{damage}: the weights of epoch {best_epoch}, the best so far, are lost"

    def _copy_best(self, row: Row, best: Segmenter) -> HostCopy:
        return HostCopy(
            {**self._about_run(), "epoch": self.state.epoch, "metrics": dict(row), "model": network_weights(best)}
        )

    def _write_best(self, copy: HostCopy) -> None:
        write_checkpoint(self.folder / BEST, copy.content())

    def _write_picture(self, name: str, picture: Pixels) -> None:
        folder = self.folder / SAMPLES
        make_own_folder(folder)
        write_bytes_atomically(folder / name, encode_image(picture, ".png"))

    def save_state(self, best: HostCopy | None = None, with_config: bool = True) -> None:
        """The state as it is now, with all that waits for it. Waits for a save under way."""
        self.writer.wait()
        self._collect()
        copy = self._copy_state(best)
        if not self.is_ours():
            self._leave_folder(copy)

        def write_last() -> None:
            write_checkpoint(self.folder / LAST, copy.content(), previous=self.folder / PREVIOUS)
            self.initial = None

        self.waiting.pop(LAST, None)  # of a save that failed: the new one must come after best.pt
        jobs: Jobs = {"events": self.events.sync, **self.waiting, LAST: write_last}
        if with_config:
            jobs[CONFIG_YAML] = self.write_config
        jobs |= self.drawings
        self.waiting = {}
        self.saved_at = time.monotonic()
        self.attempt(lambda: self.writer.start(jobs))

    def _leave_folder(self, state: HostCopy | None) -> NoReturn:
        """Nothing is written into a folder that another process has deleted, replaced or locked since this run locked
        it. Saves the state, or else the one whose save has failed, in a new folder beside it; ends the run."""
        lost = self.folder
        what = (
            f"{lost} {'is another folder now' if lost.exists() else 'is gone'}, deleted, moved or taken by "
            "another process"
        )
        waiting, self.waiting = self.waiting, {}
        if state is None and LAST not in waiting:
            state = self.initial
        try:
            # Never under the same name: a start with resume: auto may take it at this moment.
            self.folder = new_run_folder(lost.parent, f"{re.sub(r'-[0-9]+$', '', lost.name)}-2")
            self.console.log_to(self.folder / LOG)
            self.events.open(self.folder)
            self.write_config()
            self.write_split()
            write_metrics(self.folder / METRICS_CSV, self.state.history)
            if BEST in waiting:
                waiting[BEST]()
            if state is not None:
                write_checkpoint(self.folder / LAST, state.content())
            elif LAST in waiting:
                waiting[LAST]()
        except OSError as error:
            raise TrainingFailed(
                f"{what}; the state is lost, it could not be saved elsewhere ({with_advice(error)})"
            ) from None
        self.initial = None
        if not has_checkpoint(self.folder):
            raise TrainingFailed(f"{what}; the state is lost")
        raise TrainingFailed(
            f"{what}; the state is saved as {self.folder / LAST}; to go on: {resume_command(self.folder)}"
        )

    def save_if_due(self) -> None:
        if self.is_due():
            self.save_state()

    def is_due(self) -> bool:
        """Within an epoch: every checkpoint_minutes, and when files wait and the disk is free."""
        if self.writer.is_busy():
            return False
        self._collect()
        minutes, now = self.settings.taken.checkpoint_minutes, time.monotonic()
        return bool(self.waiting) or (minutes is not None and now - self.saved_at > 60 * minutes)

    def finish(self) -> None:
        """Waits until everything is written; what could not be written is tried once more."""
        if self.waiting:
            self.save_state()
        self.writer.wait()
        if self.writer.unwritten:  # not reported yet: the second try may succeed
            unwritten, error = self.writer.collect()
            if error is not None and not isinstance(error, OSError):  # no second try cures it
                raise error
            self.attempt(lambda: self.writer.start(unwritten))
            self.writer.wait()
        self._collect()

    def _collect(self) -> None:
        """Handles what became of the last save: unwritten files wait for the next one."""
        unwritten, error = self.writer.collect()
        self.waiting = {**unwritten, **self.waiting}
        if isinstance(error, OSError):
            self._handle_save_error(error)
        elif error is not None:
            raise error

    def save_on_failure(self, state_is_whole: bool) -> None:
        """Before a run fails: the state as it is, or, if there is nothing else to go on from, that of the start."""
        initial = self.initial
        try:
            if state_is_whole:
                self.save_state()
            else:
                self.waiting = {}
            self.finish()
        except TrainingFailed:
            raise
        except NonFinite as error:
            self.console.warn(str(error))
        except (RuntimeError, MemoryError) as error:  # where memory ran out, there may be none for a copy of the state
            self.console.warn(f"the state could not be saved: {first_line(error)}")
        if initial is not None and not has_checkpoint(self.folder):
            self.attempt(lambda: write_checkpoint(self.folder / LAST, initial.content()))

    def restore_last(self) -> None:
        """Loads the state that was saved last, or else that of the start."""
        self.waiting = {}
        self.writer.wait()
        with contextlib.suppress(NonFinite):  # that is what it is restored from
            self._collect()
        self.waiting = {}
        initial = self.initial
        # A copy, because the state that is loaded changes in place.
        content = read_run(self.folder, self.console.warn) if initial is None else HostCopy(initial.content()).content()
        self.state.load_state_dict(content)

    def attempt(self, write: Callable[[], object]) -> None:
        """Writes; raises TrainingFailed where the disk refuses."""
        try:
            write()
        except OSError as error:
            self._handle_save_error(error)

    def _handle_save_error(self, error: OSError) -> NoReturn:
        what, todo = str(error), getattr(error, "advice", "")
        if error.strerror is not None:
            path = Path(named_file(error) or self.folder)
            why, todo = explain(error, path)
            what = f"{path} could not be written ({why})"
        self.writer.cancel()
        if not self.is_ours():
            self._leave_folder(None)
        todo = f". {todo[0].upper()}{todo[1:]}" if todo else ""
        raise TrainingFailed(f"{what}; {self.describe_saved()}{todo}") from None


@dataclass(eq=False)
class FollowingCheckpointer:
    """What the other ranks of a torchrun job have in its place: rank 0 writes for all, and sends them what it
    restores."""

    folder: Path
    num_test = 0

    def _leave_to_rank_0(self, *_: Any, **__: Any) -> None:
        pass

    write_config = write_split = save_epoch = save_state = save_if_due = save_on_failure = _leave_to_rank_0
    restore_last = finish = attempt = check_best = _leave_to_rank_0

    def is_due(self) -> bool:
        return False

    def describe_saved(self) -> str:
        if self.folder.is_dir() and not has_checkpoint(self.folder):  # it may be another machine's
            return "nothing is saved yet"
        return f"to go on: {resume_command(self.folder)}"


AnyCheckpointer = Checkpointer | FollowingCheckpointer
