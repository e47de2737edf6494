"""Checkpoints: how the state of a run is written, verified, read and restored, with the other files that a run saves.

A checkpoint holds tensors and primitives only. It is written whole or not at all, and read with weights_only=True after
the checksums of its parts are compared. last.pt is the state, previous.pt the one before it, best.pt the weights of the
best epoch. Whether a state fits a model is checked by TrainState.load_state_dict.
"""

import contextlib
import math
import pickle
import shlex
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet_trainer import __version__
from unet_trainer.config.errors import (
    CheckpointError,
    NewerFormat,
    NonFinite,
    TrainingFailed,
    UnreadableFile,
    UserError,
)
from unet_trainer.config.resolved_config import Settings
from unet_trainer.config.schema import FIELDS, parse_value
from unet_trainer.data.formats.table import split_csv_text
from unet_trainer.data.splits import Split
from unet_trainer.images.image_decoding import Pixels, encode_image
from unet_trainer.model.segmenter import Segmenter, network_weights
from unet_trainer.runs.folder import (
    BEST,
    CONFIG_TITLE,
    CONFIG_YAML,
    DAMAGED,
    LAST,
    METRICS_CSV,
    PREVIOUS,
    SAMPLES,
    SPLIT_CSV,
    VAL_SCORES,
    has_checkpoint,
    resume_command,
)
from unet_trainer.runs.record import RunRecord
from unet_trainer.runs.tables import Row, write_metrics
from unet_trainer.system.atomic_files import atomic_open, make_own_folder, write_bytes_atomically, write_text_atomically
from unet_trainer.system.concurrency import start_thread
from unet_trainer.system.console import Console, first_line
from unet_trainer.system.input_files import NO_FILE, check_zip, open_file
from unet_trainer.system.os_errors import named_file, with_advice
from unet_trainer.training.async_device import HostCopy
from unet_trainer.training.resume import split_names
from unet_trainer.training.state import TrainState

FORMAT = 4
# What content of other types or keys than a run saves raises.
ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError)


class ForeignCheckpoint(CheckpointError):
    """A whole file of torch.save that no run has written."""


# A file.


def write_checkpoint(path: Path, content: Mapping[str, Any], previous: Path | None = None) -> None:
    """Write a file and read it back before it gets its name; `previous` then names the file that it replaced.

    Raises OSError, and NonFinite for weights that are NaN or infinite. The content is a copy on the host, as HostCopy
    makes it, so that the file loads on any machine.
    """
    stored = {"format": FORMAT, **content}
    if (bad := _first_non_finite(stored)) is not None:
        raise NonFinite(f"the weights ({bad}) are not finite and were not saved as {path}")
    with atomic_open(path, verify=_check_archive, previous=previous) as file:
        try:
            torch.save(stored, file)
        except RuntimeError as error:  # of a full disk torch says that it is at an unexpected position
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def _first_non_finite(content: Mapping[str, Any]) -> str | None:
    averaged = (content.get("ema") or {}).get("model") or {}
    return first_non_finite(content.get("model") or {}) or first_non_finite(averaged)


def first_non_finite(weights: Mapping[str, torch.Tensor]) -> str | None:
    """The name of a tensor that is NaN or infinite somewhere."""
    floats = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point() and tensor.numel()}
    # One call for all: this runs beside the training loop, and each call into torch contends for the GIL.
    largest = torch.stack(torch._foreach_norm(list(floats.values()), torch.inf)).tolist() if floats else []
    return next((name for name, norm in zip(floats, largest, strict=True) if not math.isfinite(norm)), None)


def _check_archive(path: Path) -> None:
    """Raise CheckpointError unless the file is a zip whose parts have the checksums that it states."""
    try:
        with open_file(path) as file:
            check_zip(file)
            with zipfile.ZipFile(file) as archive:
                damaged = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # a hostile file can make a reader fail in any way
        raise CheckpointError(f"{path} is not a checkpoint, or is cut off or damaged ({first_line(error)})") from None
    if damaged is not None:
        raise CheckpointError(f"{path} is damaged: the checksum of {damaged} in it is wrong")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """An OSError becomes CheckpointError or, where the file may be whole, UnreadableFile."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        if error.errno in NO_FILE:
            raise CheckpointError(f"{path} is not a file") from None
        raise UnreadableFile(f"{path} cannot be read ({with_advice(error)})") from None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of this trainer; raises CheckpointError."""
    with _reading(path):
        _check_archive(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except pickle.UnpicklingError:
            what = "it holds more than tensors and primitives"
            raise ForeignCheckpoint(f"{path} is not a checkpoint that can be read ({what})") from None
        except Exception as error:  # a hostile file can make a loader fail in any way
            raise CheckpointError(f"{path} is not a checkpoint that can be read ({first_line(error)})") from None
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is not int or not isinstance(content.get("config"), dict) or number < FORMAT:
        raise ForeignCheckpoint(f"{path} is not a checkpoint of this trainer (format {FORMAT})")
    if number > FORMAT:
        raise NewerFormat(f"{path} was written by a newer version (format {number}); this one reads format {FORMAT}")
    return content


def model_weights(path: Path, content: Mapping[str, Any], raw: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights that a checkpoint's model is used with: averaged ones where there are some, unless `raw`.
    Raises CheckpointError, and ValueError for what no run has saved."""
    averaged = (content.get("ema") or {}).get("model")
    if raw and "optimizer" not in content and content["config"].get("ema_decay") is not None:
        raise CheckpointError(f"{path} holds averaged weights alone; the raw ones are in {LAST} of the same run")
    weights = content["model"] if raw or averaged is None else averaged
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    ):
        raise ValueError("its weights are no tensors by name")
    if (bad := first_non_finite(weights)) is not None:
        raise ValueError(f"{bad} is not finite")
    return dict(weights)


def read_last(path: Path) -> dict[str, Any]:
    """Return a checkpoint that a run can be resumed from; raises CheckpointError for weights alone."""
    content = read_checkpoint(path)
    if "optimizer" not in content:
        raise CheckpointError(f"{path} holds weights alone and cannot be resumed; use {LAST} of the same run")
    for name in FIELDS.keys() & content["config"].keys():  # the settings that this version knows
        try:
            parse_value(name, content["config"][name])
        except ILL_FORMED as error:
            value = f"config.{name}, {content['config'][name]!r:.60}"
            raise CheckpointError(f"{path} cannot be resumed: it holds {value}; {error}") from None
    return content


def read_run(where: Path, warn: Callable[[str], object]) -> dict[str, Any]:
    """Return the state of a run: the .pt file if one was named, else the newest undamaged state of the folder."""
    if not where.is_dir():
        return read_last(where)
    try:
        return read_last(where / LAST)
    except (NewerFormat, UnreadableFile):
        raise
    except CheckpointError as error:
        if not (where / PREVIOUS).is_file():
            raise
        damage = str(error)
    try:
        content = read_last(where / PREVIOUS)
    except CheckpointError as error:
        lost = "no state of this run is left to go on from: resume=null trains anew"
        raise CheckpointError(f"{damage}; {error}; {lost}") from None
    # Else the next save would rename the damaged file over the good one, and a kill then would leave no usable state.
    with contextlib.suppress(OSError):  # reported when the run opens its folder
        with contextlib.suppress(FileNotFoundError):
            (where / LAST).replace(where / DAMAGED)
            damage += f" (kept as {DAMAGED})"
        (where / PREVIOUS).replace(where / LAST)
    warn(f"{damage}; going on from {where / PREVIOUS}, which was saved before it")
    return content


# The files of a run.


@dataclass(eq=False)
class Checkpointer:
    """Writes a run's files in a background thread, one list of them at a time, each complete or as it was before.

    What waits is written with the next state, in order: best.pt comes before the last.pt that refers to it, and a crash
    in between repeats an epoch. A file that cannot be written ends the run."""

    folder: Path
    settings: Settings
    state: TrainState
    split: Split
    console: Console
    record: RunRecord = field(default_factory=RunRecord)
    drawings: Mapping[str, Callable[[], object]] = field(default_factory=dict)  # by their file
    saving: Future[Any] | None = field(default=None, init=False)
    waiting: dict[str, Callable[[], object]] = field(default_factory=dict, init=False)
    saved_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.num_test = len(self.split.test)
        self.initial: HostCopy | None = self._copy_state()  # the state at this start, until a later one is on disk

    def _copy_state(self, best: HostCopy | None = None) -> HostCopy:
        return HostCopy({**self._about_run(), "split": split_names(self.split), **self.state.state_dict()}, best)

    def _copy_best(self, row: Row, best: Segmenter) -> HostCopy:
        about = {"epoch": self.state.epoch, "metrics": dict(row)}
        return HostCopy({**self._about_run(), **about, "model": network_weights(best)})

    def _about_run(self) -> dict[str, Any]:
        """What every checkpoint of the run holds."""
        return {
            "version": __version__,
            "spec": self.state.segmenter.spec.to_dict(),
            "config": self.settings.repeatable_dict(),
            "decisions": self.settings.sources_and_reasons(),
        }

    def describe_saved(self) -> str:
        """What there is to go on from."""
        state = next((file for file in (self.folder / LAST, self.folder / PREVIOUS) if file.is_file()), None)
        saved = f"the last save is {state}; to go on: {resume_command(self.folder)}"
        return "there is no state to go on from" if state is None else saved

    def write_config(self) -> None:
        """What the run is trained with, to repeat it or to go on with it."""
        header = f"{CONFIG_TITLE} To run them again: python train_unet.py {shlex.quote(str(self.folder / CONFIG_YAML))}"
        text = self.settings.to_yaml(header, resume=None, run_name=self.folder.name)
        write_text_atomically(self.folder / CONFIG_YAML, text)
        self.record.update(settings=self.settings.explained())

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
        """Save a finished epoch, whose state is final; `best` is the evaluated model if it is the best so far.

        `draw_samples` is called for the best only; what it returns is called in the background, and so is
        `make_scores`."""
        best_copy = None
        if best is not None:
            best_copy = self._copy_best(row, best)
            self.waiting[BEST] = partial(self._write_state, BEST, best_copy)
            self.waiting[VAL_SCORES] = lambda: write_text_atomically(self.folder / VAL_SCORES, make_scores())
            try:
                picture, name = draw_samples(), f"epoch_{self.state.epoch:04d}.png"
                self.waiting[SAMPLES] = lambda: self._write_picture(name, picture())
            except (RuntimeError, MemoryError, UserError) as error:  # which do not end the epoch that the picture shows
                self.console.warn(f"no picture of epoch {self.state.epoch}: {first_line(error)}")
        history = [dict(row) for row in self.state.history]
        self.waiting[METRICS_CSV] = lambda: write_metrics(self.folder / METRICS_CSV, history)
        if self.saving is None or self.saving.done():  # else an epoch is shorter than a save: the next one writes all
            self.save_state(best=best_copy)

    def _write_state(self, name: str, copy: HostCopy, previous: Path | None = None) -> None:
        write_checkpoint(self.folder / name, copy.content(), previous)
        if name == LAST:
            self.initial = None

    def _write_picture(self, name: str, picture: Pixels) -> None:
        make_own_folder(self.folder / SAMPLES)
        write_bytes_atomically(self.folder / SAMPLES / name, encode_image(picture, ".png"))

    def save_state(self, best: HostCopy | None = None) -> None:
        """Save the state as it is now, with all that waits for it. Waits for a save under way."""
        self.wait()
        write_last = partial(self._write_state, LAST, self._copy_state(best), self.folder / PREVIOUS)
        waiting, self.waiting, self.saved_at = [*self.waiting.values()], {}, time.monotonic()
        drawings = self.drawings.values()
        files: list[Callable[[], object]] = [self.record.save, *waiting, write_last, self.write_config, *drawings]
        self.saving = start_thread(partial(_write_all, files), "checkpoint", is_awaited=True)

    def save_if_due(self) -> None:
        """Within an epoch: every checkpoint_minutes, and when files wait and the disk is free."""
        if self.saving is not None and not self.saving.done():
            return
        self.wait()
        minutes, now = self.settings.taken.checkpoint_minutes, time.monotonic()
        if self.waiting or (minutes is not None and now - self.saved_at > 60 * minutes):
            self.save_state()

    def finish(self) -> None:
        """Wait until everything is written."""
        if self.waiting:
            self.save_state()
        self.wait()

    def wait(self) -> None:
        """Until the save under way is done. Raises TrainingFailed where the disk refused it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            self.attempt(saving.result)

    def attempt(self, write: Callable[[], object]) -> None:
        """Write; raises TrainingFailed where the disk refuses."""
        try:
            write()
        except OSError as error:
            path = named_file(error) or self.folder
            why = with_advice(error, self.folder)
            raise TrainingFailed(f"{path} could not be written ({why}); {self.describe_saved()}") from None

    def check_best(self) -> str | None:
        """Return what became of best.pt if it is missing or damaged: there is no best epoch then, unless the state is
        that of the best one. Raises UnreadableFile where it cannot be read: it may be whole."""
        state, best_epoch = self.state, self.state.early_stopping.best_epoch
        if best_epoch == 0 or BEST in self.waiting:
            return None
        try:
            with _reading(self.folder / BEST):
                _check_archive(self.folder / BEST)
            return None
        except UnreadableFile:
            raise
        except CheckpointError as error:
            if (state.epoch, state.batch) == (best_epoch, 0):
                self.attempt(partial(self._write_state, BEST, self._copy_best(state.history[-1], state.eval_segmenter)))
                self.console.warn(f"{error}; it is written anew from this state, which is that of the best epoch")
                return None
            state.forget_best()
            return f"{error}: the weights of epoch {best_epoch}, the best so far, are lost"

    def save_on_failure(self, state_is_whole: bool) -> None:
        """Before a run fails: save the state as it is, or, if there is nothing else to go on from, that of the
        start."""
        initial = self.initial
        try:
            if state_is_whole:
                self.save_state()
            else:
                self.waiting = {}
            self.finish()
        except TrainingFailed:
            raise
        except (RuntimeError, MemoryError) as error:  # numbers that are not finite, or no memory for a copy
            self.console.warn(f"the state could not be saved: {first_line(error)}")
        if initial is not None and not has_checkpoint(self.folder):
            self.attempt(partial(self._write_state, LAST, initial))

    def restore_last(self) -> None:
        """Load the state that was saved last, or else that of the start."""
        with contextlib.suppress(NonFinite):  # that is what it is restored from
            self.wait()
        self.waiting, initial = {}, self.initial
        # A copy, because the state that is loaded changes in place.
        content = read_run(self.folder, self.console.warn) if initial is None else HostCopy(initial.content()).content()
        self.state.load_state_dict(content)


def _write_all(files: Sequence[Callable[[], object]]) -> None:
    for write in files:
        write()


@dataclass(eq=False)
class FollowingCheckpointer:
    """What the other ranks of a torchrun job have instead: rank 0 writes for all."""

    folder: Path
    num_test = 0

    def _leave_to_rank_0(self, *_: Any, **__: Any) -> None:
        pass

    write_config = write_split = save_epoch = save_state = save_if_due = save_on_failure = _leave_to_rank_0
    restore_last = finish = wait = attempt = check_best = _leave_to_rank_0

    def describe_saved(self) -> str:
        return f"to go on: {resume_command(self.folder)}"


AnyCheckpointer = Checkpointer | FollowingCheckpointer
