"""A run: its parts, and what happens between two steps and after an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.training_choices import choose_ema_decay, choose_patience, choose_warmup, wanted_views
from unet_trainer.loading.dataset import Batch
from unet_trainer.loading.wait_advice import EpochTimes, advise
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.model.metrics import Scores
from unet_trainer.reports.gallery import MAX_SECONDS, NUM_PICTURES
from unet_trainer.reports.run_report import REPORT, write_report
from unet_trainer.runs.event_log import EventLog, finite
from unet_trainer.runs.following_checkpointer import AnyCheckpointer
from unet_trainer.runs.history import Row, column
from unet_trainer.runs.host_copy import HostCopy
from unet_trainer.runs.run_summary import read_epoch
from unet_trainer.runs.tracker_queue import TrackerQueue
from unet_trainer.system.console import Console, counted, first_line
from unet_trainer.system.processes import ALONE, Processes
from unet_trainer.system.resources import count_cores
from unet_trainer.system.signals import Signals
from unet_trainer.system.throttled_task import ThrottledTask
from unet_trainer.training.components import Components, Loaders
from unet_trainer.training.early_stopping import counts_against_patience
from unet_trainer.training.epoch_records import epoch_facts, val_scores_csv
from unet_trainer.training.evaluation import Evaluation
from unet_trainer.training.out_of_memory import peak_memory_gib
from unet_trainer.training.rank_state import average_statistics
from unet_trainer.training.state import EpochMetrics, TrainState
from unet_trainer.training.time_budget import TimeBudget

NUM_RECENT = 5  # epochs whose time tells that of the next ones
REPLAN_SHARE = 0.03  # a plan that is off by less stays as it is, until its last epochs
NOTED_SHARE = 0.2  # one that is off by more is told
EVAL_SHARE = 0.3  # of the time of a training sample, that a validation sample takes: about, before the first validation
MIN_BATCHES = 5  # that tell the time of the next ones: the first ones wait for the workers
MIN_PART = 0.2  # of an epoch, that is worth a validation


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
    val_seconds: float | None = None  # that the last validation took
    planned_end: int | None = None  # step at which the time ends the last epoch, as planned between epochs
    num_cut: int = 0  # batches of epochs that the time has ended
    worker_error: WorkerError | None = None  # ends the run once the accumulation group is finished
    times: EpochTimes | None = None  # of the last epoch's training
    was_advised: bool = False  # about waiting for data
    events: EventLog = field(default_factory=EventLog)
    curves: ThrottledTask | None = None  # draws curves.png
    lost_best: str | None = None  # why the weights of an earlier best epoch are lost
    trackers: list[TrackerQueue] = field(default_factory=list)
    has_report: bool = False
    processes: Processes = ALONE  # that share the work

    @property
    def config(self) -> ResolvedConfig:
        return self.settings.taken

    @property
    def state(self) -> TrainState:
        return self.components.state

    def is_finished(self) -> bool:
        """All epochs are done, or patience has run out."""
        patience = self.config.early_stopping_patience
        return self.state.epoch >= self.config.num_epochs or self.state.early_stopping.is_out_of_patience(patience)

    def next_batch(self, batches: Iterator[Batch], index: int) -> Batch:
        """The next training batch. A run that is asked to end finishes its accumulation group without the workers."""
        batch = None
        if self.worker_error is None and not self.signals.is_stopping():
            try:
                batch = next(batches, None)
            except WorkerError as error:
                self.worker_error = error
        if batch is not None:
            return batch
        step = self.components.train_step
        if not step.mid_accumulation and not (step.sync is not None and step.sync.num_owed):
            self._raise_if_ending()
        return self.loaders.train.read(self.state.epoch, index, self.signals.is_stopping)

    def begin_step(self, batch: int) -> None:
        """Before an accumulation group, when its first batch is there: the processes of a job agree that all go on, or that rank 0
        saves. From here on each owes the others its part of the step, in a large job of the next few."""
        sync = self.components.train_step.sync
        if sync is None or sync.num_owed:
            return
        is_due = self.processes.agree(self.checkpointer.is_due())
        if is_due:
            self.state.gather_ranks(self.processes)
        num_left = -(-(len(self.loaders.train) - batch) // self.config.accumulation_steps)
        sync.num_owed = min(sync.steps_per_vote, num_left)
        if is_due:
            self.checkpointer.save_state()

    def between_steps(self) -> None:
        """Checks for bad steps, signals and dead workers, and saves if a save is due. Never waits for the device. In a job that
        happens when the next step begins: here the others would not learn of it."""
        self.components.train_step.guard.poll()
        if self.processes.is_alone:
            self._raise_if_ending()
            self.checkpointer.save_if_due()

    def end_training(self) -> EpochMetrics:
        """Of all processes, once an epoch is trained; they have the same batch norm statistics from here on."""
        metrics = self.state.metrics.summed(self.processes)
        average_statistics(self.state, self.processes)
        if not self.processes.is_alone:
            self.components.train_step.guard.is_saved = False  # it has the statistics from before
        return metrics

    def peak_memory_gib(self) -> tuple[float, float]:
        """Allocated and reserved, summed over all processes."""
        peaks = self.processes.gather(peak_memory_gib(self.components.numerics.device))
        return sum(allocated for allocated, _ in peaks), sum(reserved for _, reserved in peaks)

    def _raise_if_ending(self) -> None:
        self.signals.check()
        if self.worker_error is not None:
            raise self.worker_error

    def judge(self, row: Row, scores: Scores) -> bool:
        """Completes the state after an epoch; returns whether it is the best so far. The state is final from here on."""
        state = self.state
        state.begin_next_epoch()
        state.seconds += row["seconds"]
        state.history.append(row)
        train_losses = column(state.history, "train_loss")
        counts = counts_against_patience(state.epoch, state.learning_rate, self.config.freeze_encoder_epochs, train_losses)
        improved = state.early_stopping.update(float(row[self.config.monitor]), state.epoch, counts)
        state.learning_rate.end = self.planned_end = None
        state.learning_rate.end_epoch(state.early_stopping.epochs_since_best)
        if improved:
            state.per_class_iou, state.confusion = scores.per_class_iou, scores.confusion
        if self.settings.replans():
            self.fit_into_budget()
        return improved

    def fit_into_budget(self) -> None:
        """Plans the number of epochs again from the time that epochs take, so that the schedule ends with the time budget; the last
        one may be a part of an epoch."""
        state, planned = self.state, self.config.num_epochs
        seconds = mean(column(state.history[1:][-NUM_RECENT:] or state.history, "seconds"))
        val_seconds = seconds if self.val_seconds is None else self.val_seconds
        left = self.processes.broadcast(self.budget.left() - self._end_seconds(self.val_seconds or 0.0))
        whole, rest = divmod(max(0.0, left), seconds)
        part = (rest - val_seconds) / (seconds - val_seconds) if rest > val_seconds and self.processes.is_alone else 0.0
        samples = len(self.loaders.train.dataset)
        most = math.ceil(wanted_views(samples // self.config.whole_repeats) * self.config.epoch_parts / samples)
        possible = max(state.epoch, min(most, state.epoch + int(whole) + (part >= MIN_PART)))
        is_near = abs(possible - planned) <= REPLAN_SHARE * planned and planned - state.epoch > 2
        if is_near and state.epoch > 1 and possible != planned:
            return
        if part >= MIN_PART and possible < most:
            self.planned_end = state.learning_rate.end = int((possible - 1 + part) * state.learning_rate.steps_per_epoch)
        if possible == planned:
            return
        if abs(possible - planned) > NOTED_SHARE * planned:
            self.console.note(f"time_budget: there is time for {counted(possible, 'epoch')} ({planned} were planned)")
        self.settings.change(f"as many as {self.settings.asked.time_budget} have time for", num_epochs=possible)
        state.learning_rate.num_epochs = possible
        if abs(possible - planned) > NOTED_SHARE * planned:
            self._follow_plan(possible)
        self.checkpointer.write_config()

    def is_out_of_time(self) -> bool:
        """After a step: whether the rest of the time budget is needed for validation and the report. Where there is no time for the
        whole epoch, the learning rate falls within the part that there is time for. The processes of a job train whole epochs."""
        state, num_batches = self.state, len(self.loaders.train)
        if not (self.settings.replans() and self.processes.is_alone) or state.batch == num_batches:
            return False
        if state.batch < MIN_BATCHES and self.budget.left() > 0:
            return False
        seconds = state.train_seconds / state.batch
        val_seconds = self.val_seconds
        if val_seconds is None:
            val_seconds = EVAL_SHARE * seconds / self.config.batch_size * len(self.loaders.val.dataset)
        left = self.budget.left() - val_seconds - self._end_seconds(val_seconds)
        possible = state.batch + max(0, int(left / seconds))
        rate, is_last = state.learning_rate, state.epoch + 1 == self.config.num_epochs
        end = state.epoch * rate.steps_per_epoch + -(-possible // self.config.accumulation_steps)
        rate.end = end if possible < num_batches else None if is_last else self.planned_end
        if left > 0:
            return False
        self.num_cut += num_batches - state.batch
        about = f"the rest of the time is for validation (about {val_seconds:.0f} s) and the report"
        self.console.note(f"time_budget: epoch {state.epoch + 1} ends after {state.batch} of {num_batches} batches; {about}")
        return True

    def _end_seconds(self, val_seconds: float) -> float:
        """Of the end of the run, where pictures are predicted as in validation."""
        return self.budget.end_seconds(NUM_PICTURES * val_seconds / max(1, len(self.loaders.val.dataset.pairs)))

    def _follow_plan(self, num_epochs: int) -> None:
        """Warm-up, patience and average for another number of epochs, where they were left open."""
        state, asked = self.state, self.settings.asked
        if asked.early_stopping_patience == "auto":
            patience, reason = choose_patience(num_epochs)
            self.settings.change(reason, early_stopping_patience=patience)
        if asked.warmup_epochs == "auto":
            warmup, reason = choose_warmup(num_epochs)
            self.settings.change(reason, warmup_epochs=warmup)
            state.learning_rate.num_warmup_steps = round(warmup * state.learning_rate.steps_per_epoch)
        if asked.ema_decay == "auto" and state.ema is not None:
            decay, reason = choose_ema_decay(state.learning_rate.num_steps)
            self.settings.change(reason, ema_decay=decay)
            state.ema.decay = decay
            self.components.train_step.launcher.clear()  # a recorded graph holds the old one

    def save_epoch(self, row: Row, found: Evaluation, improved: bool) -> None:
        self.state.gather_ranks(self.processes)
        if self.processes.is_main:
            facts = epoch_facts(row, found, improved, self.times, self.config)
            self.events.add("epoch", **facts)
            for tracker in self.trackers:
                tracker.log(read_epoch(finite(facts)))
        best = self.state.eval_segmenter if improved else None
        self.checkpointer.save_epoch(row, best, lambda: self.components.draw_samples(self.loaders), self._image_scores(found))
        if self.curves is not None:
            self.curves.request()

    def write_report(self, with_pictures: bool) -> None:
        """report.html, once. Without pictures it takes a moment: after a signal there is no time to predict. No error of it, of
        whatever kind, ends or fails a run."""
        if self.has_report:
            return
        self.has_report = True  # one that was interrupted by a signal is not begun again
        device = str(self.components.numerics.device)
        seconds = min(MAX_SECONDS, self.budget.left())
        try:
            write_report(self.checkpointer.folder, with_pictures and seconds > 0, device, max_seconds=seconds)
        except Exception as error:
            self.console.warn(f"{REPORT} could not be written: {type(error).__name__}: {first_line(error)}")

    def _image_scores(self, found: Evaluation) -> Callable[[], Callable[[], str]]:
        """Copies the counts to the host if they are wanted; the function that is returned then makes the table of them."""

        def copy() -> Callable[[], str]:
            counts = HostCopy(found.sample_counts)
            return lambda: val_scores_csv(
                self.loaders.val.dataset, counts.content().numpy(), Path(self.config.data_dir), self.config
            )

        return copy

    def say_epoch(self, row: Row, improved: bool) -> None:
        """The epoch's line; how many pieces workers failed to read; and once, advice if the model waits for data."""
        on_gpu = self.components.numerics.device.type == "cuda"
        self.console.epoch_ends(row, self.config.num_epochs, improved, on_gpu)
        for tracker in self.trackers:
            if (problem := tracker.take_problem()) is not None:
                self.console.warn(problem)
        num_failed, reason = self.loaders.take_failures()
        if num_failed:
            self.console.warn(
                f"workers could not fill {counted(num_failed, 'part')} of a batch in this epoch ({reason}); "
                "the training process read them instead, which is slower"
            )
        for notice in self.loaders.take_notices():
            self.console.warn(notice)
        in_job = self.processes.launch.local_world_size > 1  # the advice counts the cores of one process
        if self.times is None or self.was_advised or self.state.epoch < 2 or in_job:  # the first epoch starts the workers
            return
        advice = advise(self.times, count_cores(), self.config.cache, on_cpu=not on_gpu)
        if advice is not None:
            self.console.note(advice)
            self.was_advised = True
