"""A run: its parts, and what happens between two steps and after an epoch."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
from unet_trainer.training.evaluation import Evaluation, val_scores_csv
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.parallel import ALONE, Job
from unet_trainer.training.state import TrainState, counts_against_patience
from unet_trainer.training.time_budget import MAX_REPORT_SECONDS, TimeBudget, fit_into_budget, is_out_of_time

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
    custom: CustomParts = NO_PARTS
    callers_random_state: CallersRandomState = field(default_factory=CallersRandomState)
    worker_error: WorkerError | None = None  # ends the run once the accumulation group is finished
    times: EpochTimes | None = None  # of the last epoch's training
    was_advised: bool = False  # about waiting for data
    was_warned: bool = False  # that it does not learn
    is_stopped: bool = False  # by a callback
    untaught_ids: Collection[int] = ()  # class ids in validation masks and in no training mask
    lost_best: str | None = None  # why the weights of an earlier best epoch are lost
    trackers: Trackers | None = None  # of rank 0
    make_report: Callable[..., object] | None = (
        None  # writes the page of the run; None: it has one, or this is not rank 0
    )
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

    @contextlib.contextmanager
    def lent_to_caller(self) -> Iterator[None]:
        """Around the caller's code between two epochs, with its own random numbers and signal handlers."""
        with self.signals.released(), self.callers_random_state.restored():
            yield

    def connect(self) -> None:
        """Before steps that are trained: in a job, all processes average their gradients from here on."""
        if not self.processes.is_alone and not self.components.train_step.is_connected():
            saved = self.checkpointer.describe_saved()
            connect_gradients(self.settings, self.components, self.loaders, self.console, saved, self.processes)

    def begin_step(self) -> None:
        """Before an accumulation group, when its first batch is there: all processes of a job stop at the same step."""
        if not self.processes.is_alone:
            self.check_signals()
            self.checkpointer.save_if_due()

    def check_signals(self) -> None:
        """Raise Interrupted if a signal was received, by any process of a job: all call this at the same point."""
        (signal_number,) = self.processes.largest(self.signals.received or 0)
        if signal_number:
            interruption = Interrupted(signal_number)
            interruption.is_of_job = not self.processes.is_alone
            raise interruption

    def raise_if_ending(self) -> None:
        self.signals.check()
        if self.worker_error is not None:
            raise self.worker_error

    def judge(self, row: Row, scores: Scores) -> bool:
        """Completes the state after an epoch; returns whether it is the best so far. The state is final from here
        on."""
        state = self.state
        state.epoch += 1
        state.restart_epoch()
        state.seconds += row["seconds"]
        state.history.append(row)
        train_losses = column(state.history, "train_loss")
        counts = counts_against_patience(
            state.epoch, state.learning_rate, self.config.freeze_encoder_epochs, train_losses
        )
        improved = state.early_stopping.update(float(row[self.config.monitor]), state.epoch, counts)
        state.learning_rate.end = self.budget.planned_end = None
        state.learning_rate.end_epoch(state.early_stopping.epochs_since_best)
        if improved:
            state.per_class_iou, state.confusion = scores.per_class_iou, scores.confusion
        if self.settings.replans():
            fit_into_budget(self)
        return improved

    def save_epoch(self, row: Row, found: Evaluation, improved: bool) -> None:
        if self.processes.is_main:
            stages = {"train_seconds": row["seconds"] - found.seconds, "val_seconds": found.seconds}
            if (times := self.times) is not None:
                stages |= {
                    "read_seconds_per_image": times.read_seconds,
                    "augment_seconds_per_image": times.augment_seconds,
                }
            classes = dict(zip(class_names(self.config), found.scores.classes, strict=True))
            epoch = self.record.add_epoch(row, classes, found.scores.confusion, stages)
            if self.trackers is not None:
                self.trackers.log(epoch)
        best = self.state.eval_segmenter if improved else None
        counts, data_dir = found.sample_counts.numpy(), Path(self.config.data_dir)
        make_scores = partial(val_scores_csv, self.loaders.val.dataset, counts, data_dir, self.config)
        self.checkpointer.save_epoch(row, best, lambda: self.components.draw_samples(self.loaders), make_scores)

    def write_report(self, with_pictures: bool) -> None:
        """Write report.html as it stays, once. Without pictures it takes a moment: after a signal there is no time to
        predict. No error of it, of whatever kind, ends or fails a run; a signal does."""
        # one that was interrupted by a signal is not begun again
        make_report, self.make_report = (
            self.make_report,
            None,
        )
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
        except KeyboardInterrupt as interruption:
            interruption.add_note(
                f"its report is missing: python train_unet.py report {shlex.quote(str(folder))} makes it"
            )
            raise
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
    """One epoch of training, from where the state stands: hands out the batches, measures the time, shows the bar."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        state = run.state
        self.run, self.state, self.loader = run, state, run.loaders.train
        self.first_batch = state.epoch * len(self.loader)  # counted over the whole run
        self.first_step = state.epoch * state.learning_rate.steps_per_epoch
        self.meter = WaitMeter(run.components.numerics.device, state.wait_seconds)
        self.read_seconds = self.augment_seconds = 0.0
        self.num_read = 0
        self.ends_group = False
        self.learning_rate = 0.0  # of the group
        if state.batch == 0:
            run.console.epoch_begins(state.epoch + 1, run.config.num_epochs)
        run.components.set_training_mode(state.epoch)
        if not run.processes.is_alone:  # which no checkpoint holds: else all would drop the same activations
            seed = (run.config.seed * 10**6 + state.epoch) * 10**4 + run.processes.launch.rank
            seed_generators(seed % 2**63, run.components.numerics.device)
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
        self.read = self.enter_context(contextlib.closing(batches))

    def batches(self) -> Iterator[Batch]:
        """The batches from where the state stands. The gradients of a group are added up; after its last batch
        (`ends_group`) comes the optimizer step, with `learning_rate`. Then the state is consistent: it may be saved,
        and a signal may end
        the run."""
        run, state, step = self.run, self.state, self.run.components.train_step
        size, num_batches = run.config.accumulation_steps, len(self.loader)
        for start in range(state.batch, num_batches, size):
            stop = min(start + size, num_batches)
            self.learning_rate = state.next_learning_rate(size)
            for index in range(start, stop):
                batch = self.meter.wait_for(partial(next_batch, run, self.read, index))
                if index == start:
                    run.begin_step()
                    step.begin_group(stop - start, self.first_batch + start)
                self.ends_group = index + 1 == stop
                yield batch  # its step is launched now
                self.meter.step_ends()
                self.read_seconds += batch.read_seconds
                self.augment_seconds += batch.augment_seconds
                self.num_read += batch.num_images
                self.bar.tick()
                if (seen := state.metrics.peek()) is not None:
                    self.bar.show(*seen)
            state.batch = stop
            state.train_seconds, state.wait_seconds = time.perf_counter() - self.started, self.meter.seconds
            # Bad steps, signals, dead workers, a save that is due: none waits for the device. In a job, see begin_step.
            step.guard.poll()
            if run.processes.is_alone:
                run.raise_if_ending()
                run.checkpointer.save_if_due()
            if is_out_of_time(run):
                return

    def finish(self) -> Row:
        """What training fills in of the epoch's row. Waits for the device. Raises NonFinite if no step was finite."""
        run, state = self.run, self.state
        guard = run.components.train_step.guard
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
            raise NonFinite("no step of the epoch was finite", batch_number=self.first_batch)
        run.times = EpochTimes(
            images_per_second=metrics.num_images / state.train_seconds,
            data_wait=state.wait_seconds / state.train_seconds,
            read_seconds=self.read_seconds / max(1, self.num_read),
            augment_seconds=self.augment_seconds / max(1, self.num_read),
            num_workers=0 if self.loader.pool is None else self.loader.pool.num_workers,
        )
        peaks = run.processes.all_gather(peak_memory_gib(run.components.numerics.device))
        return {
            "epoch": state.epoch + 1,
            "train_loss": loss,
            "train_iou": iou,
            "learning_rate": state.learning_rate.at(self.first_step + num_steps - 1),
            "images_per_second": run.times.images_per_second,
            "data_wait": run.times.data_wait,
            "skipped_steps": int(state.metrics.num_skipped),
            "nan_steps": int(state.metrics.num_nan),
            "peak_memory_gib": sum(allocated for allocated, _ in peaks),
            "peak_reserved_gib": sum(reserved for _, reserved in peaks),
        }


def next_batch(run: Run, batches: Iterator[Batch], index: int) -> Batch:
    """The next training batch. A run that is asked to end finishes its accumulation group without the workers."""
    batch = None
    if run.worker_error is None and not run.signals.is_stopping():
        try:
            batch = next(batches, None)
        except WorkerError as error:
            run.worker_error = error
    if batch is not None:
        return batch
    is_shared = not run.processes.is_alone and run.worker_error is None  # a signal, on which all agree in begin_step
    if not run.components.train_step.mid_accumulation and not is_shared:
        run.raise_if_ending()
    return run.loaders.train.read(run.state.epoch, index)
