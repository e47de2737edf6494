"""The result of a run: as an object, in run.json, and as the last lines on the console."""

import math
import shlex
from collections.abc import Callable
from dataclasses import asdict
from statistics import harmonic_mean

from unet_trainer.config.schema import OWN, class_names, id_names
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.runs.findings import find_problems, longer
from unet_trainer.runs.folder import BEST, CURVES, LAST, REPORT, SAMPLES, resume_command
from unet_trainer.runs.tables import column
from unet_trainer.system.console import counted
from unet_trainer.training.extension import TrainResult
from unet_trainer.training.run import Run
from unet_trainer.training.time_budget import MAX_REPORT_SECONDS


def build_result(run: Run) -> TrainResult:
    """The result of a run that has ended."""
    config, state = run.config, run.state
    has_best, baseline = state.early_stopping.best_epoch > 0, _baseline(run)
    best = state.history[state.early_stopping.best_epoch - 1] if has_best else state.history[-1]
    names = class_names(config)
    return TrainResult(
        run_dir=run.checkpointer.folder,
        best_epoch=int(best["epoch"]),
        best_val_iou=float(best.get("val_iou", math.nan)),
        per_class_iou=dict(zip(names, state.per_class_iou if has_best else [None] * len(names), strict=True)),
        epochs=state.epoch,
        stopped_early=state.epoch < config.num_epochs,
        seconds=round(state.seconds, 3),
        images_per_second=harmonic_mean(column(state.history, "images_per_second") or [0.0]),
        history=state.history,
        number_format=config.number_format,
        is_compiled=config.compile_model,
        baseline_iou=None if baseline is None else baseline.iou,
        missing=[BEST] if not has_best and run.lost_best is not None else [],
        warnings=_warnings(run),
        init_from=run.settings["init_from"].reason or None,
    )


def _baseline(run: Run) -> Baseline | None:
    return best_baseline(run.state.confusion, run.config.num_classes, id_names(run.config))


def _warnings(run: Run) -> list[str]:
    """What is wrong with the model, each with what to try."""
    config, state = run.config, run.state
    if run.lost_best is not None and not state.early_stopping.best_epoch:
        return [f"{run.lost_best}; {LAST} holds those of the last epoch"]
    if not state.early_stopping.best_epoch:
        why = "was no number in any epoch (does validation hold pixels that count?)"
        return [f"{config.monitor} {why}; there is no {BEST}"]
    # of epochs that were trained again, num_cut may be too many
    num_cut = run.budget.num_cut // config.accumulation_steps
    num_steps = max(1, state.epoch * state.learning_rate.steps_per_epoch - num_cut)
    _, largest_side = state.segmenter.spec.source_sides or (0.0, math.inf)
    known = (config, run.settings.was_open, state.confusion, state.history, num_steps, run.untaught_ids, largest_side)
    return ["\n  - ".join([problem, *advice]) for problem, advice in find_problems(*known)]


def report(run: Run, close: Callable[[], object] = lambda: None) -> TrainResult:
    """Record the result, write the report, close what the run had open, and print the result: after a signal too."""
    run.lost_best = run.checkpointer.check_best() or run.lost_best
    run.reporter.record.end("stopped early" if run.state.epoch < run.config.num_epochs else "finished")
    result = build_result(run)
    run.reporter.record.update(
        result={key: value for key, value in asdict(result).items() if key not in ("run_dir", "history")}
    )
    try:
        if run.processes.is_main:
            run.signals.check()  # one that came with the last step
            seconds = min(MAX_REPORT_SECONDS, run.budget.picture_seconds())
            run.reporter.write_report(run.checkpointer.folder, str(run.components.numerics.device), seconds)
        close()
    finally:
        say_result(run, result)
    return result


def say_result(run: Run, result: TrainResult) -> None:
    """The last lines name what there is and what to do with it."""
    folder, stopping, console, baseline = result.run_dir, run.state.early_stopping, run.console, _baseline(run)
    console.say()
    if result.stopped_early:
        why = f"no better {run.config.monitor} in {counted(stopping.epochs_since_best, 'epoch')}"
        console.say(f"Stopped early: {'by a callback' if run.is_stopped else why}")
    if stopping.best_epoch:
        score = f"val loss {result.history[result.best_epoch - 1]['val_loss']:.4f}"
        if baseline is not None:
            everywhere = f"{baseline.prediction} everywhere would give {baseline.iou:.4f}"
            score = f"val IoU {result.best_val_iou:.4f} ({everywhere})"
        console.say(f"Best epoch: {result.best_epoch} of {result.epochs}, {score}")
    console.class_table(result.per_class_iou)
    for warning in result.warnings:
        console.warn(warning)
    console.say(f"Time: {result.seconds:.0f} s in epochs, {result.images_per_second:.0f} images/s in training")
    weights = folder / (BEST if stopping.best_epoch else LAST)
    # a signal or an error may have left it out
    page = f" | report: {folder / REPORT}" if (folder / REPORT).is_file() else ""
    console.say(f"Weights: {weights}{page} | curves: {folder / CURVES} | pictures: {folder / SAMPLES}")
    model, test = shlex.quote(str(folder if stopping.best_epoch else weights)), run.num_test
    commands = [f"python train_unet.py evaluate {model}   (scores of each class and image)"]
    if test:
        kept = f"{counted(test, 'test image')}, kept from training"
        commands.append(f"python train_unet.py evaluate {model} --split test   ({kept})")
    commands.append(f"python train_unet.py predict {model} IMAGES --out predictions")
    commands.append(f"python train_unet.py try {model}   (a page in the browser)")
    if run.config.architecture == OWN:
        commands = [f"load({str(folder)!r}, model=...) in Python, see docs/extending.md"]
    commands.append(f"{resume_command(folder, longer(run.config))}   (trains on)")
    console.say("Next: " + "\n      ".join(commands))
