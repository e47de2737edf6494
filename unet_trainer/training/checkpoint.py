"""Checkpoints: how the state of a run is written, verified, read and restored, with the other files that a run saves.

last.pt is the state, previous.pt the one before it, best.pt the weights of the best epoch: tensors and primitives only,
written whole or not at all. Whether a state fits a model is checked by TrainState.load_state_dict.
"""

import contextlib
import copy
import math
import os
import pickle
import shlex
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet_trainer import __version__
from unet_trainer.config.errors import CheckpointError, NonFinite, TrainingFailed, UnreadableFile, UserError
from unet_trainer.config.resolved_config import Settings
from unet_trainer.config.schema import FIELDS, parse_value
from unet_trainer.images.image_decoding import Pixels, encode_image
from unet_trainer.model.segmenter import Segmenter, network_weights
from unet_trainer.runs import folder as run_folder
from unet_trainer.runs.folder import BEST, LAST, PREVIOUS, resume_command
from unet_trainer.runs.tables import Row, write_metrics
from unet_trainer.system.atomic_files import atomic_open, make_own_folder, write_bytes_atomically, write_text_atomically
from unet_trainer.system.concurrency import start_thread
from unet_trainer.system.console import Console, first_line
from unet_trainer.system.input_files import NO_FILE, check_zip, open_file
from unet_trainer.system.os_errors import named_file, with_advice
from unet_trainer.training.async_device import HostCopy
from unet_trainer.training.state import TrainState

FORMAT = 4
# What content of other types or keys than a run saves raises.
ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError)


class ForeignCheckpoint(CheckpointError):
    """A whole file of torch.save that this version has not written."""


def write_checkpoint(path: Path, content: Mapping[str, Any], previous: Path | None = None) -> None:
    """Write a file of copies on the host and verify it before it gets its name; `previous` then names the file that it
    replaced. Raises OSError, and NonFinite for weights that are NaN or infinite."""
    if (bad := _first_non_finite(content)) is not None:
        raise NonFinite(f"the weights ({bad}) are not finite and were not saved as {path}")
    with atomic_open(path, verify=check_archive, previous=previous) as file:
        try:
            torch.save({"format": FORMAT, **content}, file)
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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What is wrong with the file becomes CheckpointError; UnreadableFile where the file may be whole."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, MemoryError) as error:
        if getattr(error, "errno", None) in NO_FILE:
            raise CheckpointError(f"{path} is not a file") from None
        raise UnreadableFile(f"{path} cannot be read ({with_advice(error)})") from None
    except pickle.UnpicklingError:
        reason = "it holds more than tensors and primitives"
        raise ForeignCheckpoint(f"{path} is not a checkpoint that can be read ({reason})") from None
    except Exception as error:  # a hostile file can make a reader fail in any way
        raise CheckpointError(f"{path} is not a checkpoint, or is cut off or damaged ({first_line(error)})") from None


def check_archive(path: Path) -> None:
    """Raise CheckpointError unless the file is a zip whose parts have the checksums that it states."""
    with _reading(path), open_file(path) as file:
        check_zip(file)
        with zipfile.ZipFile(file) as archive:
            if (damaged := archive.testzip()) is not None:
                raise CheckpointError(f"{path} is damaged: the checksum of {damaged} in it is wrong")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of this trainer; raises CheckpointError."""
    check_archive(path)
    with _reading(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is not int or number != FORMAT or not isinstance(content.get("config"), dict):
        raise ForeignCheckpoint(f"{path} is not a checkpoint of this version of the trainer (format {FORMAT})")
    return content


def model_weights(path: Path, content: Mapping[str, Any], raw: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights that a checkpoint's model is used with: averaged ones where there are some, unless `raw`.
    Raises CheckpointError, and ValueError for what no run has saved."""
    averaged = (content.get("ema") or {}).get("model")
    if raw and "optimizer" not in content and content["config"].get("ema_decay") is not None:
        raise CheckpointError(f"{path} holds averaged weights alone; the raw ones are in {LAST} of the same run")
    weights = dict(content["model"] if raw or averaged is None else averaged)
    if not all(isinstance(name, str) and torch.is_tensor(tensor) for name, tensor in weights.items()):
        raise ValueError("its weights are no tensors by name")
    if (bad := first_non_finite(weights)) is not None:
        raise ValueError(f"{bad} is not finite")
    return weights


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
    """Return the state to resume a run from: the .pt file if one was named, else the newest undamaged state of the
    folder. Set-up loads it into a TrainState."""
    if not where.is_dir():
        return read_last(where)
    last, previous = where / LAST, where / PREVIOUS
    try:
        return read_last(last)
    except (ForeignCheckpoint, UnreadableFile):
        raise
    except CheckpointError as error:
        damage = str(error)
    try:
        content = read_last(previous)
    except CheckpointError as error:
        lost = "no state of this run is left to go on from: resume=null trains anew"
        raise CheckpointError(f"{damage}; {error}; {lost}") from None
    # Else the next save would rename the damaged file over the good one, and a kill then would leave no usable state.
    with contextlib.suppress(OSError):  # reported when the run opens its folder
        if os.path.lexists(last):
            last.replace(where / run_folder.DAMAGED)
            damage += f" (kept as {run_folder.DAMAGED})"
        previous.replace(last)
    warn(f"{damage}; going on from {previous}, which was saved before it")
    return content


@dataclass(eq=False)
class Checkpointer:
    """Writes a run's files in a background thread, each complete or as it was before; an error ends the run.

    What waits is written with the next state, in order: best.pt comes before the last.pt that refers to it, and a crash
    in between repeats an epoch."""

    folder: Path
    settings: Settings
    state: TrainState
    split: Mapping[str, Sequence[str]]  # names of what trains and of what validates
    console: Console
    before: Sequence[Callable[[], object]] = ()  # what is written first, and last, whenever the state is saved
    after: Sequence[Callable[[], object]] = ()

    def __post_init__(self) -> None:
        self.saving: Future[Any] | None = None
        self.waiting: dict[str, Callable[[], object]] = {}
        self.saved_at = time.monotonic()
        self.initial: HostCopy | None = self._copy_state()  # the state at this start, until a later one is on disk

    def _copy_state(self) -> HostCopy:
        return self._copy({"split": self.split, **self.state.state_dict()})

    def _copy_best(self, row: Row, best: Segmenter) -> HostCopy:
        return self._copy({"epoch": self.state.epoch, "metrics": dict(row), "model": network_weights(best)})

    def _copy(self, content: Mapping[str, Any]) -> HostCopy:
        """With what every checkpoint of the run holds."""
        about = {"version": __version__, "spec": self.state.segmenter.spec.to_dict()}
        about |= {"config": self.settings.repeatable_dict(), "decisions": self.settings.sources_and_reasons()}
        return HostCopy({**about, **content})

    def describe_saved(self) -> str:
        return run_folder.describe_saved(self.folder)

    def write_config(self) -> None:
        """What the run is trained with, to repeat it or to go on with it."""
        path = self.folder / run_folder.CONFIG_YAML
        header = f"Settings of this run. To run them again: python train_unet.py {shlex.quote(str(path))}"
        write_text_atomically(path, self.settings.to_yaml(header, resume=None, run_name=self.folder.name))

    def save_epoch(
        self,
        row: Row,
        best: Segmenter | None,
        draw_samples: Callable[[], Callable[[], Pixels]],
        make_scores: Callable[[], str],
    ) -> None:
        """Hand over a finished epoch. It is written now, or with the next save if one is under way (`finish` waits for
        all). `best`: the evaluated model if it is the best so far; then the samples are drawn too."""
        history = [dict(row) for row in self.state.history]
        if best is not None:
            self.waiting[BEST] = partial(self._write_state, BEST, self._copy_best(row, best))
            self.waiting["scores"] = lambda: write_text_atomically(self.folder / run_folder.VAL_SCORES, make_scores())
            try:
                self.waiting["samples"] = partial(self._write_picture, self.state.epoch, draw_samples())
            except (RuntimeError, MemoryError, UserError) as error:  # which do not end the epoch that the picture shows
                self.console.warn(f"no picture of epoch {self.state.epoch}: {first_line(error)}")
        self.waiting["metrics"] = lambda: write_metrics(self.folder / run_folder.METRICS_CSV, history)
        if self.saving is None or self.saving.done():  # else an epoch is shorter than a save: the next one writes all
            self.save_state()

    def save_if_due(self) -> None:
        """Within an epoch: every checkpoint_minutes, and when files wait and the disk is free."""
        if self.saving is not None and not self.saving.done():
            return
        self.wait()
        minutes = self.settings.taken.checkpoint_minutes
        if self.waiting or (minutes is not None and time.monotonic() - self.saved_at > 60 * minutes):
            self.save_state()

    def save_state(self) -> None:
        """Save the state as it is now, with all that waits for it. Waits for a save under way."""
        self.wait()
        write_last = partial(self._write_state, LAST, self._copy_state(), self.folder / PREVIOUS)
        files: list[Callable[[], object]] = [
            *self.before,
            *self.waiting.values(),
            write_last,
            self.write_config,
            *self.after,
        ]
        self.waiting, self.saved_at = {}, time.monotonic()
        self.saving = start_thread(lambda: [write() for write in files], "checkpoint", is_awaited=True)

    def _write_state(self, name: str, content: HostCopy, previous: Path | None = None) -> None:
        write_checkpoint(self.folder / name, content.content(), previous)
        if name == LAST:
            self.initial = None

    def _write_picture(self, epoch: int, draw: Callable[[], Pixels]) -> None:
        make_own_folder(self.folder / run_folder.SAMPLES)
        path = self.folder / run_folder.SAMPLES / f"epoch_{epoch:04d}.png"
        write_bytes_atomically(path, encode_image(draw(), ".png"))

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
        """Write; raises TrainingFailed where the disk refuses, or gives back something else."""
        try:
            write()
        except (OSError, CheckpointError) as error:
            what = f"{named_file(error) or self.folder} could not be written ({with_advice(error, self.folder)})"
            raise TrainingFailed(f"{what}; {self.describe_saved()}") from None

    def check_best(self) -> str | None:
        """Return what became of best.pt if it is missing or damaged: there is no best epoch then, unless the state is
        that of the best one. Raises UnreadableFile where it cannot be read: it may be whole."""
        state, best_epoch = self.state, self.state.early_stopping.best_epoch
        if best_epoch == 0 or BEST in self.waiting:
            return None
        try:
            check_archive(self.folder / BEST)
        except UnreadableFile:
            raise
        except CheckpointError as error:
            if (state.epoch, state.batch) != (best_epoch, 0):
                state.forget_best()
                return f"{error}: the weights of epoch {best_epoch}, the best so far, are lost"
            self.attempt(partial(self._write_state, BEST, self._copy_best(state.history[-1], state.eval_segmenter)))
            self.console.warn(f"{error}; it is written anew from this state, which is that of the best epoch")
        return None

    def save_on_failure(self, state_is_whole: bool) -> None:
        """Before a run fails: save the state as it is, or, where there is nothing to go on from, that of the start."""
        initial = self.initial
        try:
            if state_is_whole:
                self.save_state()
            self.wait()
        except TrainingFailed:
            raise
        except (RuntimeError, MemoryError) as error:  # numbers that are not finite, or no memory for a copy
            self.console.warn(f"the state could not be saved: {first_line(error)}")
        if initial is not None and not run_folder.has_checkpoint(self.folder):
            self.attempt(partial(self._write_state, LAST, initial))

    def go_back_to_last_save(self) -> None:
        """Within a run: load the state that was saved last, or else that of the start."""
        with contextlib.suppress(NonFinite):  # of weights that were not saved
            self.wait()
        self.waiting, initial = {}, self.initial
        saved = read_run(self.folder, self.console.warn) if initial is None else initial.content()
        self.state.load_state_dict(copy.deepcopy(saved))  # what is loaded changes in place


@dataclass(eq=False)
class FollowingCheckpointer:
    """What the other ranks of a torchrun job have instead: rank 0 writes for all."""

    folder: Path

    def _leave_to_rank_0(self, *_: Any, **__: Any) -> None:
        pass

    write_config = save_epoch = save_state = save_if_due = save_on_failure = _leave_to_rank_0
    go_back_to_last_save = finish = wait = attempt = check_best = _leave_to_rank_0

    def describe_saved(self) -> str:
        return f"to go on: {resume_command(self.folder)}"


AnyCheckpointer = Checkpointer | FollowingCheckpointer
