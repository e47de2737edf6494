"""What a run shows of itself: lines on the console, its record, trackers, curves, and the report's page. Of a job's
other processes nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import class_names, id_names
from unet_trainer.loading.loader import EpochTimes, advise
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.runs.curves import PacedWriter
from unet_trainer.runs.folder import CURVES, REPORT
from unet_trainer.runs.record import RunRecord
from unet_trainer.runs.tables import Row, column
from unet_trainer.runs.trackers import Trackers
from unet_trainer.system.console import Console, counted, first_line
from unet_trainer.system.os_errors import with_advice
from unet_trainer.system.resources import count_cores
from unet_trainer.training.evaluation import Evaluation
from unet_trainer.training.state import TrainState

NUM_WARM_UP = 1  # epochs that start the workers: their times give no advice
# Training does not learn if its IoU stays below that of a constant prediction (all foreground, or the most frequent
# class) and its loss hardly falls: where most pixels are foreground, a model that does learn is below the constant one
# for a while. A learning rate that is too high for the data and augmentation that is too strong both look like this.
TRIED_SHARE = 0.1  # of the epochs, after which a run should have begun to learn
STUCK_EPOCHS = 3  # in a row: a single one may be an accident
STUCK_STEPS = 300  # a good run of tiles with defects had passed the baseline by then
LOSS_SHARE = 0.8  # of the first epoch's loss: 0.85 to 0.89 on those tiles, 0.71 at a rate that learns
NOTHING_SHARE = 0.25  # of the baseline's IoU: background everywhere has a lower loss than random weights


class Reporter:
    """`is_shown`: this process writes; one of a job's others does not."""

    def __init__(self, console: Console, record: RunRecord | None = None, is_shown: bool = True) -> None:
        self.console, self.record, self.is_shown = console, record or RunRecord(), is_shown
        self.times: EpochTimes | None = None  # of the last epoch's training
        self.trackers: Trackers | None = None
        self.make_report: Callable[..., object] | None = None  # writes the page; None: it is written, or not here
        self.live_report: PacedWriter | None = None  # writes it while the run goes on
        self.curves: PacedWriter | None = None
        self.was_advised = self.was_warned = False  # about waiting for data; that it does not learn

    def record_epoch(self, config: ResolvedConfig, row: Row, found: Evaluation) -> None:
        if not self.is_shown:
            return
        stages = {"train_seconds": row["seconds"] - found.seconds, "val_seconds": found.seconds}
        if self.times is not None:
            stages["read_seconds_per_image"] = self.times.read_seconds
            stages["augment_seconds_per_image"] = self.times.augment_seconds
        classes = dict(zip(class_names(config), found.scores.classes, strict=True))
        epoch = self.record.add_epoch(row, classes, found.scores.confusion, stages)
        if self.trackers is not None:
            self.trackers.log(epoch)

    def say_epoch(
        self, config: ResolvedConfig, state: TrainState, row: Row, improved: bool, notices: Sequence[str] = ()
    ) -> None:
        """The epoch's line, and `notices` of reading; once each, advice if the model waits for data, and a warning if
        it does not learn."""
        on_gpu = state.device.type == "cuda"
        self.console.epoch_ends(row, config.num_epochs, improved, on_gpu)
        for text in notices:
            self.console.warn(text)
        in_job = state.launch.local_world_size > 1  # the advice counts the cores of one process
        if self.times is not None and not self.was_advised and state.epoch > NUM_WARM_UP and not in_job:
            advice = advise(self.times, count_cores(), config.cache, on_cpu=not on_gpu)
            self.was_advised = advice is not None
            if advice is not None:
                self.console.note(advice)
        num_steps = state.epoch * state.learning_rate.steps_per_epoch
        may_tell = num_steps >= STUCK_STEPS and state.epoch >= TRIED_SHARE * config.num_epochs
        baseline = best_baseline(state.confusion, config.num_classes, id_names(config))
        if baseline is None or self.was_warned or not may_tell or not is_stuck(state.history, baseline):
            return
        self.was_warned = True
        best = max(column(state.history, "train_iou")[-STUCK_EPOCHS:])
        constant = f"{baseline.prediction} everywhere gives {baseline.iou:.4f}"
        fixes = f"Try learning_rate={config.learning_rate / 4:.2g}; see in the samples whether the masks fit the images"
        after = f"train IoU {best:.4f} after {counted(state.epoch, 'epoch')}"
        self.console.warn(f"training does not learn: {after}, {constant}. {fixes}; try augmentation=none")

    def write_report(self, folder: Path, device: str, seconds: float) -> None:
        """Write report.html as it stays, once: a report that a signal interrupted is not begun again. Without `seconds`
        for pictures it takes a moment. No error of it, of whatever kind, ends or fails a run; a signal does."""
        make_report, self.make_report = self.make_report, None
        if make_report is None:
            return
        if self.live_report is not None:
            self.live_report.stop()
        try:
            if seconds > 0:
                self.console.say("Making the report ...")
            make_report(folder, seconds > 0, device, max_seconds=seconds, console=self.console)
        except Exception as error:
            self.console.warn(f"{REPORT} could not be written: {type(error).__name__}: {first_line(error)}")

    def finish(self, folder: Path, device: str) -> None:
        """What is sent, written and drawn at the end, however the run ended."""
        try:
            if self.trackers is not None:
                self.trackers.finish()
            self.write_report(folder, device, 0.0)  # unless the end has written the whole of it
        finally:
            if self.curves is not None:
                self.curves.write(is_last=True)
                if (error := self.curves.error) is not None:
                    why = with_advice(error) if isinstance(error, OSError) else first_line(error)
                    self.console.warn(f"{CURVES} could not be drawn: {why}")


def is_stuck(history: Sequence[Row], baseline: Baseline) -> bool:
    ious, losses = column(history, "train_iou"), column(history, "train_loss")
    if len(history) < STUCK_EPOCHS:
        return False
    best, has_fallen = max(ious[-STUCK_EPOCHS:]), min(losses[-STUCK_EPOCHS:]) < LOSS_SHARE * losses[0]
    return best < baseline.iou * (NOTHING_SHARE if has_fallen else 1)
