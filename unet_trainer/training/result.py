"""The result of a run: as an object, in run.json, and as the last lines on the console."""

import math
import shlex
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import harmonic_mean

import torch

from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import OWN, class_names, id_names
from unet_trainer.datasets.pairs import first_few
from unet_trainer.model.baselines import Baseline, Confusion, best_baseline
from unet_trainer.model.metrics import compute_scores
from unet_trainer.runs.folder import BEST, CURVES, LAST, REPORT, SAMPLES, resume_command
from unet_trainer.runs.record import NO_USE
from unet_trainer.runs.tables import Row, column
from unet_trainer.system.console import counted
from unet_trainer.training.resume import longer
from unet_trainer.training.run import Run

# Gains are shares of what lies between the baseline and an IoU of 1.
MIN_GAIN = 0.01  # a model below it is no better than the baseline
MIN_TRAIN_GAIN = 0.1  # training below it has not learned: augmentation and crops shift its IoU a little
LARGE_TRAIN_GAIN = 0.5  # validation with less than half of such a gain is far behind
LOST_IOU = 0.1  # below it nine of ten pixels that are of the class, or predicted as it, are wrong
RARE_SHARE = 0.05  # of the pixels
ENOUGH_STEPS = 1000  # below it, training longer is the first thing to try
MIN_STEPS = (
    100  # with fewer, the statistics of batch normalisation lag behind the weights, and validation behind training
)
HARD_CLASS_LOSSES = {"focal", "tversky", "lovasz"}
FOREGROUND_WEIGHT = 5.0  # to try where foreground is rare
LOST_CLASS_WEIGHT = 2.5  # and for one of several classes: more costs the others too much


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
    number_format: str = "float32"  # that the forward pass was computed in
    is_compiled: bool = False
    baseline_iou: float | None = None  # best IoU of predicting one class everywhere; None: not known
    missing: list[str] = field(default_factory=list)  # best.pt: was deleted or damaged after it was written
    warnings: list[str] = field(default_factory=list)  # what is wrong with the model, and what to try
    init_from: str | None = None  # what the network had of the model that it began with


def build_result(run: Run) -> TrainResult:
    """The result of a run that has ended."""
    config, state = run.config, run.state
    has_best = state.early_stopping.best_epoch > 0
    baseline = _baseline(run)
    best = state.history[state.early_stopping.best_epoch - 1] if has_best else state.history[-1]
    per_class = state.per_class_iou if has_best else [None] * len(class_names(config))
    warnings = [
        f"{config.monitor} was no number in any epoch (does validation hold pixels that count?); there is no {BEST}"
    ]
    if has_best:
        num_cut = run.budget.num_cut // config.accumulation_steps
        # of epochs rolled back, it may be too many
        num_steps = max(1, state.epoch * state.learning_rate.steps_per_epoch - num_cut)
        _, largest_side = state.segmenter.spec.source_sides or (0.0, math.inf)
        findings = judge_model(run.settings, state.confusion, state.history, num_steps, run.untaught_ids, largest_side)
        warnings = ["\n  - ".join([problem, *advice]) for problem, advice in findings]
    elif run.lost_best is not None:
        warnings = [f"{run.lost_best}; {LAST} holds those of the last epoch"]
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
        number_format=config.number_format,
        is_compiled=config.compile_model,
        baseline_iou=None if baseline is None else baseline.iou,
        missing=[BEST] if not has_best and run.lost_best is not None else [],
        warnings=warnings,
        init_from=run.settings.decisions["init_from"].reason or None,
    )


def _baseline(run: Run) -> Baseline | None:
    return best_baseline(run.state.confusion, run.config.num_classes, id_names(run.config))


def report(run: Run, close: Callable[[], object] = lambda: None) -> TrainResult:
    """Checks that the weights are there, records the result, writes report.html, closes what the run had open, and says
    the result: the last lines tell what there is and what to do with it. After a signal too, which leaves a finished
    run without its report."""
    run.lost_best = run.checkpointer.check_best() or run.lost_best
    run.record.end("stopped early" if run.state.epoch < run.config.num_epochs else "finished")
    result = build_result(run)
    content = {name: value for name, value in asdict(result).items() if name not in ("run_dir", "history")}
    run.record.update(result=content)
    try:
        if run.processes.is_main:
            run.signals.check()  # one that came with the last step
            run.write_report(with_pictures=True)
        close()
    finally:
        say_result(run, result)
    return result


def say_result(run: Run, result: TrainResult) -> None:
    folder, stopping, console = result.run_dir, run.state.early_stopping, run.console
    has_best, baseline, num_test = stopping.best_epoch > 0, _baseline(run), run.checkpointer.num_test
    console.say()
    if result.stopped_early:
        epochs, counting = counted(stopping.epochs_since_best, "epoch"), stopping.patience_used
        how = (
            f", {counting} of which counted against early_stopping_patience"
            if counting < stopping.epochs_since_best
            else ""
        )
        why = "by a callback" if run.is_stopped else f"no better {run.config.monitor} in {epochs}{how}"
        console.say(f"Stopped early: {why}")
    if has_best:
        score = f"val loss {result.history[result.best_epoch - 1]['val_loss']:.4f}"
        if baseline is not None:
            score = (
                f"val IoU {result.best_val_iou:.4f} ({baseline.prediction} everywhere would give {baseline.iou:.4f})"
            )
        console.say(f"Best epoch: {result.best_epoch} of {result.epochs}, {score}")
    console.class_table(result.per_class_iou)
    for warning in result.warnings:
        console.warn(warning)
    console.say(f"Time: {result.seconds:.0f} s in epochs, {result.images_per_second:.0f} images/s in training")
    weights = folder / (BEST if has_best else LAST)
    # a signal or an error may have left it out
    report = f" | report: {folder / REPORT}" if (folder / REPORT).is_file() else ""
    console.say(f"Weights: {weights}{report} | curves: {folder / CURVES} | pictures: {folder / 'samples'}")
    model = shlex.quote(str(folder if has_best else weights))
    if run.config.architecture == OWN:
        console.say(f"Next: load({str(folder)!r}, model=...) in Python, see docs/extending.md")
    else:
        console.say(f"Next: python train_unet.py evaluate {model}   (scores of each class and image)")
        if num_test:
            kept = f"{counted(num_test, 'test image')}, kept from training"
            console.say(f"      python train_unet.py evaluate {model} --split test   ({kept})")
        console.say(f"      python train_unet.py predict {model} IMAGES --out predictions")
        console.say(f"      python train_unet.py try {model}   (a page in the browser)")
    console.say(f"      {resume_command(folder, longer(run.config))}   (trains on)")


def judge_model(
    settings: Settings,
    confusion: Confusion,
    history: Sequence[Row],
    num_steps: int,
    untaught_ids: Collection[int] = (),
    largest_side: float = math.inf,
) -> list[tuple[str, list[str]]]:
    """All that makes the model of the best epoch useless, or less than it could be: each problem with its likely
    causes and the settings to try. Advice is given once. `untaught_ids`: in no training mask; `largest_side`: √(height
    × width) of the largest training image."""
    config = settings.taken
    names = id_names(config)
    check = (
        "masks may be read with the wrong mask_values: python train_unet.py check "
        f"{_setting('data_dir', config.data_dir)}"
    )
    present = [class_id for class_id, row in enumerate(confusion) if sum(row)]
    baseline = best_baseline(confusion, config.num_classes, names)
    if len(present) == 1:
        advice = [
            "validation needs images with each class: a larger val_fraction, another seed, or a split_file",
            check,
        ]
        return [(f"every validation pixel is {names[present[0]]}: val IoU says nothing about the model", advice)]
    if baseline is None:
        return []
    iou = compute_scores(torch.tensor(confusion), config.num_classes).iou
    train_iou = max(filter(math.isfinite, column(history, "train_iou")), default=0.0)
    gain, train_gain = ((value - baseline.iou) / (1 - baseline.iou) for value in (iou, train_iou))
    few_steps: list[str] = []
    if num_steps < ENOUGH_STEPS:
        per_epoch = -(-num_steps // max(1, len(history)))
        more = _setting("num_epochs", max(2 * config.num_epochs, math.ceil(ENOUGH_STEPS / per_epoch)))
        if config.time_budget is not None:  # it decides the number of epochs
            more = longer(config)
        few_steps = [f"{counted(num_steps, 'optimizer step')} may be too few: {more}"]
    lost = _lost_classes(confusion, names, first=1 if config.num_classes == 1 else 0)
    lost = {class_id: text for class_id, text in lost.items() if class_id not in untaught_ids}
    findings: list[tuple[str, list[str]]] = []
    if gain < MIN_GAIN:
        problem = f"{NO_USE}: its val IoU is {iou:.3f}, and {baseline.prediction} everywhere gives {baseline.iou:.3f}"
        if train_gain >= MIN_TRAIN_GAIN:
            problem += f". Training did learn (train IoU {train_iou:.3f})"
            advice = []
            if num_steps >= MIN_STEPS:
                problem += ": the model knows its training images only"
                advice = _overfitting_advice(settings)
        else:
            problem += f". Training did not learn either (train IoU {train_iou:.3f} at best)"
            pairs = f"masks may not match their images: the pictures in {SAMPLES}/ show them side by side"
            lower = _setting("learning_rate", float(f"{config.learning_rate / 10:.1g}"))
            other = "" if settings.was_open("learning_rate") else ", or learning_rate=auto"
            advice = [f"{pairs}; or {check}", f"another learning rate may suit these data: {lower}{other}"]
        findings.append((problem, few_steps + advice))
    elif train_gain >= LARGE_TRAIN_GAIN and gain < 0.5 * train_gain:
        problem = (
            f"val IoU {iou:.4f} is far below the train IoU of {train_iou:.4f}: the model knows its training images only"
        )
        findings.append((problem, few_steps + _overfitting_advice(settings)))
    is_rare = config.num_classes > 1 or gain >= MIN_GAIN or sum(confusion[1]) < RARE_SHARE * sum(map(sum, confusion))
    if lost and is_rare:
        problem = f"classes that the model hardly finds: {first_few(list(lost.values()))}"
        findings.append((problem, few_steps + _rare_class_advice(config, lost, largest_side)))
    if untaught_ids:
        untaught = first_few(names[class_id] for class_id in sorted(untaught_ids))
        advice = ["add training images with them, or choose with split_file=FILE.csv"]
        findings.append((f"classes in no training mask, which the model cannot find: {untaught}", advice))
    given: set[str] = set()
    for index, (problem, advice) in enumerate(findings):
        findings[index] = problem, [line for line in advice if line not in given]
        given.update(advice)
    return findings


def _lost_classes(confusion: Confusion, names: Sequence[str], first: int) -> dict[int, str]:
    """Each class, from `first` on, that occurs in truth and is hardly found: its share, and what it is taken for."""
    num_pixels = sum(map(sum, confusion))
    lost = {}
    for class_id, row in list(enumerate(confusion))[first:]:
        in_truth, hits, predicted = sum(row), row[class_id], sum(counts[class_id] for counts in confusion)
        if in_truth == 0 or hits / (in_truth + predicted - hits) >= LOST_IOU:
            continue
        other = max(range(len(row)), key=lambda index: row[index])
        taken_for = "" if other == class_id else f", {row[other] / in_truth:.0%} of them taken for {names[other]}"
        found = f"{hits / in_truth:.1%} of them found" if predicted else "never predicted"
        lost[class_id] = f"{names[class_id]} ({in_truth / num_pixels:.2g} of the validation pixels{taken_for}; {found})"
    return lost


def _overfitting_advice(settings: Settings) -> list[str]:
    ideas = []
    if settings.taken.augmentation in ("none", "default"):
        ideas.append(_setting("augmentation", "strong"))
    is_random = settings.taken.encoder_weights is None and settings.taken.init_from is None
    if is_random and not settings.was_open("encoder_weights"):  # auto has looked for them
        ideas.append(_setting("encoder_weights", "imagenet"))
    return [
        f"overfitting: {', '.join([*ideas, 'more training images'])}",
        "validation images may be of another kind than those trained on (another camera, patient or mask coding): "
        "compare the "
        "pictures in samples/, or try another split (seed, or a split_file)",
    ]


def _rare_class_advice(config: ResolvedConfig, lost: Container[int], largest_side: float) -> list[str]:
    weights = [LOST_CLASS_WEIGHT if class_id in lost else 1.0 for class_id in range(config.num_classes)]
    crops = _setting("rare_class_crops", 0.5)
    is_smaller = config.fit == "resize" and largest_side > math.sqrt(math.prod(config.shape))
    ideas = {
        f"small objects vanish when images are made smaller: {_setting('fit', 'crop')} {crops}": is_smaller,
        f"more crops around rare classes: {crops}": config.fit == "crop" and config.rare_class_crops < 0.5,
        "a rare class weighs little in the loss: "
        + _setting("class_weights", weights if config.num_classes > 1 else [FOREGROUND_WEIGHT]): config.class_weights
        is None,
        f"a loss for rare classes: {_setting('loss', {'dice': 1, 'focal': 1})}": not HARD_CLASS_LOSSES
        & config.loss.keys(),
    }
    return [idea for idea, applies in ideas.items() if applies]


def _setting(name: str, value: object) -> str:
    """key=value for the command line."""
    return shlex.quote(f"{name}={value_text(value)}")
