"""What is wrong with the model of a run, why, and the settings to try: a table of condition → sentence → advice."""

import math
import shlex
from collections.abc import Callable, Collection, Sequence

import torch

from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import id_names
from unet_trainer.data.pairs import first_few
from unet_trainer.model.baselines import Confusion, best_baseline
from unet_trainer.model.metrics import compute_scores
from unet_trainer.runs.folder import SAMPLES
from unet_trainer.runs.record import MIN_GAIN
from unet_trainer.runs.tables import Row, column
from unet_trainer.system.console import counted

# Gains are shares of what lies between the baseline and an IoU of 1.
MIN_TRAIN_GAIN = 0.1  # training below it has not learned: augmentation and crops shift its IoU a little
LARGE_TRAIN_GAIN = 0.5  # validation with less than half of such a gain is far behind
LOST_IOU = 0.1  # below it nine of ten pixels that are of the class, or predicted as it, are wrong
RARE_SHARE = 0.05  # of the pixels
ENOUGH_STEPS = 1000  # below it, training longer is the first thing to try
HARD_CLASS_LOSSES = {"focal", "tversky", "lovasz"}
FOREGROUND_WEIGHT = 5.0  # to try where foreground is rare
LOST_CLASS_WEIGHT = 2.5  # and for one of several classes: more costs the others too much
OTHER_IMAGES = (
    "validation images may be of another kind than those trained on (another camera, patient or mask coding): compare "
    "the pictures in samples/, or try another split (seed, or a split_file)"
)

Problem = tuple[str, list[str]]  # what is wrong; likely causes and settings to try


def find_problems(
    config: ResolvedConfig,
    was_open: Callable[[str], bool],
    confusion: Confusion,
    history: Sequence[Row],
    num_steps: int,
    untaught_ids: Collection[int] = (),
    largest_side: float = math.inf,
) -> list[Problem]:
    """All that makes the model of the best epoch useless, or less than it could be. Advice is given once.

    `untaught_ids`: class ids in no training mask. `largest_side`: √(height × width) of the largest training image.
    """
    names, present = id_names(config), [class_id for class_id, row in enumerate(confusion) if sum(row)]
    command = f"python train_unet.py check {_setting('data_dir', config.data_dir)}"
    masks_are_wrong = f"masks may be read with the wrong mask_values: {command}"
    if len(present) == 1:
        problem = f"every validation pixel is {names[present[0]]}: val IoU says nothing about the model"
        images = "validation needs images with each class: a larger val_fraction, another seed, or a split_file"
        return [(problem, [images, masks_are_wrong])]
    if (baseline := best_baseline(confusion, config.num_classes, names)) is None:
        return []

    iou = compute_scores(torch.tensor(confusion), config.num_classes).iou
    train_iou = max(filter(math.isfinite, column(history, "train_iou")), default=0.0)
    gain, train_gain = ((value - baseline.iou) / (1 - baseline.iou) for value in (iou, train_iou))
    is_useless, has_learned = gain < MIN_GAIN, train_gain >= MIN_TRAIN_GAIN
    lost = lost_classes(confusion, names, config.num_classes == 1, untaught_ids)
    is_frequent = config.num_classes == 1 and sum(confusion[1]) >= RARE_SHARE * sum(map(sum, confusion))
    steps, overfitting = _more_steps(config, num_steps, len(history)), _against_overfitting(config, was_open)
    problems: list[Problem] = []
    useless = f"this model is of no use: its val IoU is {iou:.3f}, and {baseline.prediction} everywhere gives"
    if is_useless and has_learned:
        learned = f"Training did learn (train IoU {train_iou:.3f}): the model knows its training images only"
        problems.append((f"{useless} {baseline.iou:.3f}. {learned}", [*steps, *overfitting]))
    elif is_useless:
        lower = _setting("learning_rate", float(f"{config.learning_rate / 10:.1g}"))
        or_auto = "" if was_open("learning_rate") else ", or learning_rate=auto"
        masks = f"masks may not match their images: the pictures in {SAMPLES}/ show them side by side; or"
        rate = f"another learning rate may suit these data: {lower}{or_auto}"
        not_learned = f"Training did not learn either (train IoU {train_iou:.3f} at best)"
        problems.append((f"{useless} {baseline.iou:.3f}. {not_learned}", [*steps, f"{masks} {masks_are_wrong}", rate]))
    elif train_gain >= LARGE_TRAIN_GAIN and gain < 0.5 * train_gain:
        far_behind = f"val IoU {iou:.4f} is far below the train IoU of {train_iou:.4f}"
        problems.append((f"{far_behind}: the model knows its training images only", [*steps, *overfitting]))
    if lost and not (is_useless and is_frequent):
        advice = [*([] if problems else steps), *_for_rare_classes(config, lost, largest_side)]
        problems.append((f"classes that the model hardly finds: {first_few([*lost.values()])}", advice))
    if untaught_ids:
        untaught = first_few(names[class_id] for class_id in sorted(untaught_ids))
        more_images = "add training images with them, or choose with split_file=FILE.csv"
        problems.append((f"classes in no training mask, which the model cannot find: {untaught}", [more_images]))
    return problems


def lost_classes(
    confusion: Confusion, names: Sequence[str], is_binary: bool, untaught_ids: Collection[int]
) -> dict[int, str]:
    """Each class that occurs in truth and training masks and is hardly found: its share, and what it is taken for."""
    num_pixels = sum(map(sum, confusion))
    lost = {}
    for class_id, row in list(enumerate(confusion))[is_binary:]:
        in_truth, hits, predicted = sum(row), row[class_id], sum(counts[class_id] for counts in confusion)
        if class_id in untaught_ids or in_truth == 0 or hits / (in_truth + predicted - hits) >= LOST_IOU:
            continue
        other = max(range(len(row)), key=lambda index: row[index])
        taken_for = "" if other == class_id else f", {row[other] / in_truth:.0%} of them taken for {names[other]}"
        found = f"{hits / in_truth:.1%} of them found" if predicted else "never predicted"
        lost[class_id] = f"{names[class_id]} ({in_truth / num_pixels:.2g} of the validation pixels{taken_for}; {found})"
    return lost


def longer(config: ResolvedConfig) -> str:
    """The setting with which a run trains for twice as long."""
    if config.time_budget is not None:
        return f"time_budget={math.ceil(2 * seconds_of(config.time_budget) / 60)}m"
    return f"num_epochs={2 * config.num_epochs}"


def _more_steps(config: ResolvedConfig, num_steps: int, num_epochs: int) -> list[str]:
    per_epoch = -(-num_steps // max(1, num_epochs))
    more = _setting("num_epochs", max(2 * config.num_epochs, math.ceil(ENOUGH_STEPS / per_epoch)))
    if config.time_budget is not None:  # it decides the number of epochs
        more = longer(config)
    return [f"{counted(num_steps, 'optimizer step')} may be too few: {more}"] if num_steps < ENOUGH_STEPS else []


def _against_overfitting(config: ResolvedConfig, was_open: Callable[[str], bool]) -> list[str]:
    is_random = config.encoder_weights is None and config.init_from is None
    ideas = [_setting("augmentation", "strong")] if config.augmentation in ("none", "default") else []
    if is_random and not was_open("encoder_weights"):  # auto has looked for them
        ideas.append(_setting("encoder_weights", "imagenet"))
    return [f"overfitting: {', '.join([*ideas, 'more training images'])}", OTHER_IMAGES]


def _for_rare_classes(config: ResolvedConfig, lost: Collection[int], largest_side: float) -> list[str]:
    weights = [LOST_CLASS_WEIGHT if class_id in lost else 1.0 for class_id in range(config.num_classes)]
    weights = weights if config.num_classes > 1 else [FOREGROUND_WEIGHT]
    crop, crops = _setting("fit", "crop"), _setting("rare_class_crops", 0.5)
    loss = _setting("loss", {"dice": 1, "focal": 1})
    is_smaller = config.fit == "resize" and largest_side > math.sqrt(math.prod(config.shape))
    ideas = {
        f"small objects vanish when images are made smaller: {crop} {crops}": is_smaller,
        f"more crops around rare classes: {crops}": config.fit == "crop" and config.rare_class_crops < 0.5,
        f"a rare class weighs little in the loss: {_setting('class_weights', weights)}": config.class_weights is None,
        f"a loss for rare classes: {loss}": not HARD_CLASS_LOSSES & config.loss.keys(),
    }
    return [idea for idea, applies in ideas.items() if applies]


def _setting(name: str, value: object) -> str:
    """key=value for the command line."""
    return shlex.quote(f"{name}={value_text(value)}")
