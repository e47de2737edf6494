"""The result of a run: as an object, as result.json, and as the last lines on the console."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import harmonic_mean, median_low
from typing import Any

from unet_trainer.config.schema import class_names, id_names
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.history import Row, column, write_result
from unet_trainer.runs.run_folder import BEST, CURVES, LAST, REPORT, resume_command
from unet_trainer.system.console import Console, counted
from unet_trainer.training.best_weights import look_for_best
from unet_trainer.training.early_stopping import EarlyStopping
from unet_trainer.training.resume_messages import longer
from unet_trainer.training.run import Run
from unet_trainer.training.verdict import judge_model


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. `history` has a dict for each epoch, with the columns of metrics.csv."""

    run_dir: Path
    best_epoch: int
    best_val_iou: float
    per_class_iou: dict[str, float | None]
    epochs: int
    stopped_early: bool
    seconds: float
    images_per_second: float
    history: list[Row]
    unwritten: list[str] = field(default_factory=list)  # best.pt, last.pt: could not be written (on_save_error: continue)
    number_format: str = "float32"  # that the forward pass was computed in
    is_compiled: bool = False
    baseline_iou: float | None = None  # best IoU of predicting one class everywhere; None: not known
    missing: list[str] = field(default_factory=list)  # best.pt: was deleted or damaged after it was written
    warnings: list[str] = field(default_factory=list)  # what is wrong with the model, and what to try


def build_result(run: Run) -> TrainResult:
    """The result of a run that has ended."""
    config, state = run.config, run.state
    has_best = state.early_stopping.best_epoch > 0
    baseline = _baseline(run)
    best = state.history[state.early_stopping.best_epoch - 1] if has_best else state.history[-1]
    per_class = state.per_class_iou if has_best else [None] * len(class_names(config))
    return TrainResult(
        run_dir=run.checkpointer.folder,
        best_epoch=int(best["epoch"]),
        best_val_iou=float(best.get("val_iou", math.nan)),
        per_class_iou=dict(zip(class_names(config), per_class, strict=True)),
        epochs=state.epoch,
        stopped_early=state.epoch < config.num_epochs,
        seconds=round(state.seconds, 3),
        images_per_second=harmonic_mean(column(state.history, "images_per_second") or [0.0]),
        history=state.history,
        unwritten=run.checkpointer.unwritten(),
        number_format=config.number_format,
        is_compiled=config.compile_model,
        baseline_iou=None if baseline is None else baseline.iou,
        missing=[BEST] if not has_best and run.lost_best is not None else [],
        warnings=_warnings(run),
    )


def _baseline(run: Run) -> Baseline | None:
    return best_baseline(run.state.confusion, run.config.num_classes, id_names(run.config))


def _warnings(run: Run) -> list[str]:
    config, state = run.config, run.state
    best_epoch = state.early_stopping.best_epoch
    num_steps = state.epoch * state.learning_rate.steps_per_epoch - run.num_cut // config.accumulation_steps
    if best_epoch == 0 and run.lost_best is not None:
        return [f"{run.lost_best}; {LAST} holds those of the last epoch"]
    if best_epoch == 0:
        return [f"{config.monitor} was no number in any epoch (does validation hold pixels that count?); there is no {BEST}"]
    sizes = [size.image for size in run.loaders.train.dataset.sizes]
    native_size = median_low(height for height, _ in sizes), median_low(width for _, width in sizes)
    findings = judge_model(run.settings, state.confusion, state.history, best_epoch, num_steps, native_size)
    return [finding.text for finding in findings]


def result_dict(result: TrainResult) -> dict[str, Any]:
    """The content of result.json: everything but the rows of metrics.csv."""
    content = asdict(result)
    del content["run_dir"], content["history"]
    return content


def report(run: Run) -> TrainResult:
    """Looks whether the weights are there, writes result.json, says the result and writes report.html."""
    if isinstance(run.checkpointer, Checkpointer):  # of a torchrun job one process writes
        run.lost_best = look_for_best(run.checkpointer, run.state, run.console) or run.lost_best
    result = build_result(run)
    run.checkpointer.attempt(lambda: write_result(result.run_dir / "result.json", result_dict(result)))
    say_result(result, run.config.monitor, run.state.early_stopping, _baseline(run), longer(run.config), run.console)
    run.events.add("end", how="stopped early" if result.stopped_early else "finished")
    if run.processes.is_main:
        run.write_report(with_pictures=True)
    return result


def say_result(
    result: TrainResult, monitor: str, stopping: EarlyStopping, baseline: Baseline | None, to_train_on: str, console: Console
) -> None:
    folder = result.run_dir
    has_best = stopping.best_epoch > 0
    console.say()
    if result.stopped_early:
        console.say(f"Stopped early: no better {monitor} in {_describe_patience(stopping)}")
    if has_best:
        compared = "" if baseline is None else f" ({baseline.prediction} everywhere would give {baseline.iou:.4f})"
        console.say(f"Best epoch: {result.best_epoch} of {result.epochs}, val IoU {result.best_val_iou:.4f}{compared}")
    console.class_table(result.per_class_iou)
    for warning in result.warnings:
        console.warn(warning)
    console.say(f"Time: {result.seconds:.0f} s in epochs, {result.images_per_second:.0f} images/s in training")
    if result.unwritten:
        names = " and ".join(str(folder / name) for name in result.unwritten)
        console.warn(f"{names} could not be written: what was trained since is lost, unless an older file there is of use")
        return
    weights = folder / (BEST if has_best else LAST)
    console.say(f"Weights: {weights} | report: {folder / REPORT} | curves: {folder / CURVES} | pictures: {folder / 'samples'}")
    model = shlex.quote(str(folder if has_best else weights))
    console.say(f"Next: python train_unet.py evaluate {model}   (scores of each class and image)")
    console.say(f"      python train_unet.py predict {model} IMAGES --out predictions")
    console.say(f"      python train_unet.py try {model}   (a page in the browser)")
    console.say(f"      {resume_command(folder)} {to_train_on}   (trains on)")


def _describe_patience(stopping: EarlyStopping) -> str:
    """The epochs without improvement, and how many of them counted."""
    epochs = counted(stopping.epochs_since_best, "epoch")
    if stopping.patience_used == stopping.epochs_since_best:
        return epochs
    return f"{epochs}, {stopping.patience_used} of which counted against early_stopping_patience"
