"""A run: its parts, and what happens between two steps and after an epoch."""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unet_trainer.config.errors import NonFinite
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import class_names
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.loader import EpochTimes, advise
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.model.metrics import Scores
from unet_trainer.model.random_state import CallersRandomState, seed_generators
from unet_trainer.runs.curves import PacedWriter
from unet_trainer.runs.folder import REPORT
from unet_trainer.runs.record import RunRecord
from unet_trainer.runs.tables import Row, column
from unet_trainer.runs.trackers import Trackers
from unet_trainer.system.console import Console, first_line
from unet_trainer.system.resources import count_cores
from unet_trainer.system.signals import Interrupted, Signals
from unet_trainer.training.async_device import WaitMeter
from unet_trainer.training.build import Components, Loaders
from unet_trainer.training.checkpoint import AnyCheckpointer
from unet_trainer.training.compilation import connect_gradients, peak_memory_gib
from unet_trainer.training.evaluation import EvalMetrics, Evaluation, evaluate, val_scores_csv
from unet_trainer.training.extension import Callback
from unet_trainer.training.parallel import ALONE, Job
from unet_trainer.training.state import TrainState, counts_against_patience
from unet_trainer.training.time_budget import MAX_REPORT_SECONDS, TimeBudget

NUM_WARM_UP = 1  # epochs that start the workers: their times give no advice


@dataclass
class Run:
    """Everything that belongs to one run."""

    settings: Settings
    loaders: Loaders
    components: Components
    checkpointer: AnyCheckpointer
    console: Console
    signals: Signals
    budget: TimeBudget = field(default_factory=TimeBudget)
    record: RunRecord = field(default_factory=RunRecord)
    processes: Job = ALONE  # that share the work
    callers_random_state: CallersRandomState = field(default_factory=CallersRandomState)
    worker_error: WorkerError | None = None  # ends the run once the accumulation group is finished
    times: EpochTimes | None = None  # of the last epoch's training
    was_advised: bool = False  # about waiting for data
    was_warned: bool = False  # that it does not learn
    is_stopped: bool = False  # by a callback
    untaught_ids: Collection[int] = ()  # class ids in validation masks and in no training mask
    lost_best: str | None = None  # why the weights of an earlier best epoch are lost
    callbacks: Sequence[Callback] = ()  # the user's
    trackers: Trackers | None = None  # of rank 0
    make_report: Callable[..., object] | None = None  # writes the page of the run; None: it is written, or not rank 0
    live_report: PacedWriter | None = None  # writes it while the run goes on

    @property
    def config(self) -> ResolvedConfig:
        return self.settings.taken

    @property
    def state(self) -> TrainState:
        return self.components.state

    def is_finished(self) -> bool:
        """All epochs are done, patience has run out, or a callback stops it."""
        patience = self.config.early_stopping_patience
        is_out_of_patience = patience is not None and self.state.early_stopping.patience_used >= patience
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

    def raise_if_ending(self) -> None:
        self.signals.check()
        if self.worker_error is not None:
            raise self.worker_error

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
        if self.processes.is_main:
            stages = {"train_seconds": row["seconds"] - found.seconds, "val_seconds": found.seconds}
            if (times := self.times) is not None:
                stages["read_seconds_per_image"] = times.read_seconds
                stages["augment_seconds_per_image"] = times.augment_seconds
            classes = dict(zip(class_names(self.config), found.scores.classes, strict=True))
            epoch = self.record.add_epoch(row, classes, found.scores.confusion, stages)
            if self.trackers is not None:
                self.trackers.log(epoch)
        best = self.state.eval_segmenter if improved else None
        counts, data_dir = found.sample_counts.numpy(), Path(self.config.data_dir)
        make_scores = partial(val_scores_csv, self.loaders.val.dataset, counts, data_dir, self.config)
        self.checkpointer.save_epoch(row, best, lambda: self.components.draw_samples(self.loaders), make_scores)

    def write_report(self, with_pictures: bool) -> None:
        """Write report.html as it stays, once: a report that a signal interrupted is not begun again. Without pictures
        it takes a moment. No error of it, of whatever kind, ends or fails a run; a signal does."""
        make_report, self.make_report = self.make_report, None
        if make_report is None:
            return
        if self.live_report is not None:
            self.live_report.stop()
        folder, device = self.checkpointer.folder, str(self.components.numerics.device)
        seconds = min(MAX_REPORT_SECONDS, self.budget.picture_seconds())
        try:
            if with_pictures:
                self.console.say("Making the report ...")
            make_report(folder, with_pictures and seconds > 0, device, max_seconds=seconds, console=self.console)
        except Exception as error:
            self.console.warn(f"{REPORT} could not be written: {type(error).__name__}: {first_line(error)}")

    def say_epoch(self, row: Row, improved: bool) -> None:
        """The epoch's line; what reading has noticed; and once, advice if the model waits for data."""
        on_gpu = self.components.numerics.device.type == "cuda"
        self.console.epoch_ends(row, self.config.num_epochs, improved, on_gpu)
        for text in self.loaders.take_notices():
            self.console.warn(text)
        in_job = self.processes.launch.local_world_size > 1  # the advice counts the cores of one process
        if self.times is None or self.was_advised or self.state.epoch <= NUM_WARM_UP or in_job:
            return
        advice = advise(self.times, count_cores(), self.config.cache, on_cpu=not on_gpu)
        if advice is not None:
            self.console.note(advice)
            self.was_advised = True


class TrainingEpoch(contextlib.ExitStack):
    """Of one epoch of training, from where the state stands: the batches, the time, the bar."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        state, device = run.state, run.components.numerics.device
        self.run, self.state, self.loader = run, state, run.loaders.train
        self.meter = WaitMeter(device, state.wait_seconds)
        self.totals = np.zeros(3)  # of the batches: seconds of reading and of augmenting, images
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
        num_images = run.config.batch_size * run.processes.launch.world_size
        label = f"Epoch {state.epoch + 1} [Train]:"
        bar = run.console.bar(label, len(self.loader), num_done=state.batch, images_per_tick=num_images)
        self.bar = self.enter_context(bar)
        batches = self.loader.epoch(state.epoch, state.batch, run.signals.is_stopping)
        self.batches = self.enter_context(contextlib.closing(batches))

    def next_batch(self, index: int) -> Batch:
        return self.meter.wait_for(partial(self._read, index))

    def _read(self, index: int) -> Batch:
        """A run that is asked to end finishes its accumulation group without the workers."""
        run = self.run
        if run.worker_error is None and not run.signals.is_stopping():
            try:
                if (batch := next(self.batches, None)) is not None:
                    return batch
            except WorkerError as error:
                run.worker_error = error
        is_shared = not run.processes.is_alone and run.worker_error is None  # a signal, see check_signals
        if not run.components.train_step.mid_accumulation and not is_shared:
            run.raise_if_ending()
        return self.loader.read(self.state.epoch, index)

    def step_ends(self, batch: Batch) -> None:
        """The step of the batch is launched."""
        self.meter.step_ends()
        self.totals += batch.read_seconds, batch.augment_seconds, batch.num_images
        self.bar.tick()
        if (seen := self.state.metrics.peek()) is not None:
            self.bar.show(*seen)

    def group_ends(self, num_batches: int) -> None:
        """The weights have seen so many batches of the epoch."""
        self.state.batch, self.state.wait_seconds = num_batches, self.meter.seconds
        self.state.train_seconds = time.perf_counter() - self.started

    def finish(self) -> Row:
        """What training fills in of the epoch's row. Waits for the device. Raises NonFinite if no step was finite."""
        run, state, guard = self.run, self.state, self.run.components.train_step.guard
        guard.check()
        metrics = state.metrics.summed(run.processes)
        state.average_statistics(run.processes)  # all processes of a job have the same from here on
        if not run.processes.is_alone:
            guard.is_saved = False  # it has the statistics from before
        loss, iou = metrics.loss(), metrics.scores().iou
        self.bar.show(loss, iou)
        state.train_seconds, state.wait_seconds = time.perf_counter() - self.started, self.meter.finish()
        num_steps = -(-state.batch // run.config.accumulation_steps)
        if not math.isfinite(loss) or int(metrics.num_nan) == num_steps:
            raise NonFinite("no step of the epoch was finite", batch_number=state.epoch * len(self.loader))
        read_seconds, augment_seconds, _ = (self.totals / max(1, self.totals[2])).tolist()
        run.times = EpochTimes(
            images_per_second=metrics.num_images / state.train_seconds,
            data_wait=state.wait_seconds / state.train_seconds,
            read_seconds=read_seconds,
            augment_seconds=augment_seconds,
            num_workers=0 if self.loader.pool is None else self.loader.pool.num_workers,
        )
        peaks = run.processes.all_gather(peak_memory_gib(run.components.numerics.device))
        rate = state.learning_rate
        return {
            "epoch": state.epoch + 1,
            "train_loss": loss,
            "train_iou": iou,
            "learning_rate": rate.at(state.epoch * rate.steps_per_epoch + num_steps - 1),
            "images_per_second": run.times.images_per_second,
            "data_wait": run.times.data_wait,
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
            if run.processes.is_alone:  # the processes of a job wait for each other at the end
                run.signals.check()

        found = evaluate(run.components.eval_step, loader, on_batch, run.signals.is_stopping, run.processes)
        run.check_signals()  # it may have ended early
        bar.show(found.loss, found.scores.iou)
    if found.first_bad_batch is not None:
        raise NonFinite("the validation loss is not finite", val_batch=found.first_bad_batch)
    row |= {"val_loss": found.loss, "val_iou": found.scores.iou, "val_dice": found.scores.dice}
    run.budget.val_seconds = time.perf_counter() - started
    row["seconds"] = run.state.train_seconds + run.budget.val_seconds
    row |= run.processes.broadcast(row)  # times differ; all judge by the same row
    return found
