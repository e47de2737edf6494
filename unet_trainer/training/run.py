"""The parts of a run, and its epochs as the loop in train_unet.py has them: the groups of batches, the validation, the
row of metrics.csv. Decides nothing: what ends or changes a run is in the script."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.loader import EpochTimes
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.model.metrics import Scores
from unet_trainer.model.random_state import CallersRandomState, seed_generators
from unet_trainer.runs.tables import Row, column
from unet_trainer.system.console import Console
from unet_trainer.system.signals import Interrupted, Signals
from unet_trainer.training.async_device import WaitMeter
from unet_trainer.training.build import Components, Loaders
from unet_trainer.training.checkpoint import AnyCheckpointer
from unet_trainer.training.evaluation import EvalMetrics, Evaluation, evaluate, val_scores_csv
from unet_trainer.training.extension import Callback
from unet_trainer.training.memory import peak_memory_gib
from unet_trainer.training.parallel import ALONE, Job, average_statistics
from unet_trainer.training.reporting import Reporter
from unet_trainer.training.state import TrainState, counts_against_patience
from unet_trainer.training.step import Group
from unet_trainer.training.time_budget import TimeBudget
from unet_trainer.training.trials import connect_gradients


@dataclass
class Run:
    """Everything that belongs to one run."""

    settings: Settings
    loaders: Loaders
    components: Components
    checkpointer: AnyCheckpointer
    reporter: Reporter
    signals: Signals
    budget: TimeBudget = field(default_factory=TimeBudget)
    processes: Job = ALONE  # that share the work
    callers_random_state: CallersRandomState = field(default_factory=CallersRandomState)
    callbacks: Sequence[Callback] = ()  # the user's
    untaught_ids: Collection[int] = ()  # class ids in validation masks and in no training mask
    num_test: int = 0  # images that neither train nor validate
    is_stopped: bool = False  # by a callback
    lost_best: str | None = None  # why the weights of an earlier best epoch are lost

    @property
    def config(self) -> ResolvedConfig:
        return self.settings.taken

    @property
    def state(self) -> TrainState:
        return self.components.state

    @property
    def console(self) -> Console:
        return self.reporter.console

    def is_finished(self) -> bool:
        """All epochs are done, patience has run out, or a callback stops it."""
        patience, stopping = self.config.early_stopping_patience, self.state.early_stopping
        is_out_of_patience = patience is not None and stopping.patience_used >= patience
        return self.is_stopped or is_out_of_patience or self.state.epoch >= self.config.num_epochs

    def connect(self) -> None:
        """Before steps that are trained: in a job, all processes average their gradients from here on."""
        if not self.processes.is_alone and not self.components.train_step.is_connected():
            saved = self.checkpointer.describe_saved()
            connect_gradients(self.settings, self.components, self.loaders, self.console, saved, self.processes)

    def check_signals(self) -> None:
        """Raise Interrupted if a signal was received, by any process of a job: all call this at the same point."""
        (signal_number,) = self.processes.largest(self.signals.received or 0)
        if signal_number:
            raise Interrupted(signal_number)

    def judge(self, row: Row, scores: Scores) -> bool:
        """Completes the state after an epoch, final from here on; returns whether it is the best so far."""
        state, rate = self.state, self.state.learning_rate
        state.epoch += 1
        state.restart_epoch()
        state.seconds += row["seconds"]
        state.history.append(row)
        train_losses = column(state.history, "train_loss")
        counts = counts_against_patience(state.epoch, rate, self.config.freeze_encoder_epochs, train_losses)
        improved = state.early_stopping.update(float(row[self.config.monitor]), state.epoch, counts)
        rate.end = self.budget.planned_end = None
        rate.end_epoch(state.early_stopping.epochs_since_best)
        if improved:
            state.per_class_iou, state.confusion = scores.per_class_iou, scores.confusion
        return improved

    def call(self, moment: str, *arguments: Any) -> bool:
        """Calls the user's callbacks, on rank 0; whether any asks to stop, on every rank."""
        stops = False
        if self.callbacks and self.processes.is_main:
            with self.callers_random_state.restored():
                for callback in self.callbacks:
                    answer = getattr(callback, moment)(*arguments)
                    stops |= moment == "on_epoch" and bool(answer)
        return self.processes.broadcast(stops) if self.callbacks and moment == "on_epoch" else False

    def save_epoch(self, row: Row, found: Evaluation, improved: bool) -> None:
        best = self.state.eval_segmenter if improved else None
        counts, data_dir = found.sample_counts.numpy(), Path(self.config.data_dir)
        make_scores = partial(val_scores_csv, self.loaders.val.dataset, counts, data_dir, self.config)
        self.checkpointer.save_epoch(row, best, lambda: self.components.draw_samples(self.loaders), make_scores)


class TrainingEpoch(contextlib.ExitStack):
    """One epoch of training, from where the state stands: its groups of batches, the bar, and what is measured."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        state, device, num_processes = run.state, run.components.numerics.device, run.processes.launch.world_size
        self.run, self.state, self.loader = run, state, run.loaders.train
        self.meter = WaitMeter(device, state.wait_seconds)
        self.totals = np.zeros(3)  # of the batches: seconds of reading and of augmenting, images
        self.failure: WorkerError | None = None
        if state.batch == 0:
            run.console.epoch_begins(state.epoch + 1, run.config.num_epochs)
        run.components.set_training_mode(state.epoch)
        if not run.processes.is_alone:  # which no checkpoint holds: else all would drop the same activations
            seed = (run.config.seed * 10**6 + state.epoch) * 10**4 + run.processes.launch.rank
            seed_generators(seed % 2**63, device)
        run.connect()
        self.loader.prepare(state.epoch, state.batch)
        run.loaders.val.prepare(0)
        if state.epoch + 1 != run.config.num_epochs:  # planned too, so that the workers never idle in between
            self.loader.prepare(state.epoch + 1)
        self.started = time.perf_counter() - state.train_seconds
        num_images = run.config.batch_size * num_processes
        label = f"Epoch {state.epoch + 1} [Train]:"
        bar = run.console.bar(label, len(self.loader), num_done=state.batch, images_per_tick=num_images)
        self.bar = self.enter_context(bar)
        # The processes of a job end at the same step, whatever each is waiting for.
        is_stopping = run.signals.is_stopping if run.processes.is_alone else lambda: False
        batches = self.loader.epoch(state.epoch, state.batch, is_stopping)
        self.batches = self.enter_context(contextlib.closing(batches))

    def groups(self) -> Iterator[Group]:
        """The batches of each step. Ends early if a signal comes while it waits for the first batch of a step; the rest
        of a step is read without workers that were stopped or failed (in a job, a failed worker ends the process)."""
        size, num_batches = self.run.config.accumulation_steps, len(self.loader)
        for start in range(self.state.batch, num_batches, size):
            if (first := self._next(start, must_be_there=False)) is None:
                return
            stop = min(start + size, num_batches)
            yield Group(self._batches(first, start, stop), stop - start, self.state.epoch * num_batches + start)
            self.meter.step_ends()  # with the move of the weights
            if self.failure is not None:  # of the workers, within the group
                raise self.failure

    def _batches(self, first: Batch, start: int, stop: int) -> Iterator[Batch]:
        for index in range(start, stop):
            batch = first if index == start else self._next(index, must_be_there=True)
            assert batch is not None
            yield batch  # from here on, its step is launched
            self.meter.step_ends()
            self.totals += batch.read_seconds, batch.augment_seconds, batch.num_images
            self.bar.tick()
            if (seen := self.state.metrics.peek()) is not None:
                self.bar.show(*seen)

    def _next(self, index: int, must_be_there: bool) -> Batch | None:
        return self.meter.wait_for(partial(self._read, index, must_be_there))

    def _read(self, index: int, must_be_there: bool) -> Batch | None:
        try:
            batch = next(self.batches, None)
        except WorkerError as error:
            if not (must_be_there and self.run.processes.is_alone):
                raise
            batch, self.failure = None, error
        return self.loader.read(self.state.epoch, index) if batch is None and must_be_there else batch

    def advance(self, group: Group) -> None:
        """The weights have seen the group."""
        self.state.batch += group.size
        self.state.train_seconds = time.perf_counter() - self.started
        self.state.wait_seconds = self.meter.seconds

    def num_finite_steps(self) -> int:
        """Waits for the device."""
        num_steps = -(-self.state.batch // self.run.config.accumulation_steps)
        return num_steps - int(self.state.metrics.num_nan)

    def row(self) -> Row:
        """What training fills in of the epoch's row. Waits for the device, and for the other processes."""
        run, state = self.run, self.state
        metrics = state.metrics.summed(run.processes.all_gather)
        average_statistics(state, run.processes)  # all processes of a job have the same from here on
        if not run.processes.is_alone:
            run.components.train_step.guard.is_saved = False  # it has the statistics from before
        loss, iou = metrics.loss(), metrics.scores().iou
        self.bar.show(loss, iou)
        state.train_seconds, state.wait_seconds = time.perf_counter() - self.started, self.meter.finish()
        read_seconds, augment_seconds, _ = (self.totals / max(1, self.totals[2])).tolist()
        times = EpochTimes(
            images_per_second=metrics.num_images / state.train_seconds,
            data_wait=state.wait_seconds / state.train_seconds,
            read_seconds=read_seconds,
            augment_seconds=augment_seconds,
            num_workers=0 if self.loader.pool is None else self.loader.pool.num_workers,
        )
        run.reporter.times = times
        peaks = run.processes.all_gather(peak_memory_gib(run.components.numerics.device))
        rate, num_steps = state.learning_rate, -(-state.batch // run.config.accumulation_steps)
        return {
            "epoch": state.epoch + 1,
            "train_loss": loss,
            "train_iou": iou,
            "learning_rate": rate.at(state.epoch * rate.steps_per_epoch + num_steps - 1),
            "images_per_second": times.images_per_second,
            "data_wait": times.data_wait,
            "skipped_steps": int(state.metrics.num_skipped),
            "nan_steps": int(state.metrics.num_nan),
            "peak_memory_gib": sum(allocated for allocated, _ in peaks),
            "peak_reserved_gib": sum(reserved for _, reserved in peaks),
        }


def validate(run: Run, row: Row) -> Evaluation:
    """One pass over the validation images; fills in the rest of the epoch's row."""
    started, loader = time.perf_counter(), run.loaders.val
    num_images = loader.batches.batch_size * run.processes.launch.world_size
    with run.console.bar(f"Epoch {run.state.epoch + 1} [Val]:  ", len(loader), images_per_tick=num_images) as bar:

        def on_batch(metrics: EvalMetrics) -> None:
            bar.tick()
            if (seen := metrics.peek()) is not None:
                bar.show(*seen)

        found = evaluate(run.components.eval_step, loader, on_batch, run.signals.is_stopping, run.processes.all_gather)
        bar.show(found.loss, found.scores.iou)
    row |= {"val_loss": found.loss, "val_iou": found.scores.iou, "val_dice": found.scores.dice}
    run.budget.val_seconds = time.perf_counter() - started
    row["seconds"] = run.state.train_seconds + run.budget.val_seconds
    row |= run.processes.broadcast(row)  # times differ; all judge by the same row
    return found
