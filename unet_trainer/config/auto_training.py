"""How long and how a model is trained: rules from the number of images, the cost of a step and the time to epochs,
batch size, learning rate and the like. Pure functions; docs/quality.md has their figures.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from unet_trainer.config.facts import HardwareFacts, NumberFormat, StepCost
from unet_trainer.config.parsers import describe_seconds

RARE_CLASS = 0.001  # share of the pixels; classes that are less rare gain nothing by weights
REFERENCE_BATCH = 16  # that the learning rate and the number of steps were found at
NUM_VIEWS = 96_000  # augmented images that a model sees in training: 6,000 steps of the reference batch
MIN_PASSES, MAX_VIEWS = 40, 4_000_000  # over a large dataset; of a huge one
NUM_EPOCHS = 100  # of a run, about, each with a validation
MIN_VALIDATIONS = 8  # or best.pt is no choice, unless they exceed their share of the time
VALIDATION_SHARE = 0.1  # of the time, about
MIN_STEPS_PER_EPOCH = 10
MIN_PART = 0.2  # of an epoch, that is worth a validation
SHORT_BUDGET = 30.0  # seconds: shorter epochs are not worth their ends
SPARE_STEPS = 1.5  # of a single epoch that the time will end: the machine may become faster than in the trial
COMPILE_SECONDS = 60.0  # of compiling a step on a GPU
MAX_PILOTS = 3  # learning rates that are tried, see training.pilots


class StepPlan(NamedTuple):
    """Epochs of a run, how often each has each image (below 1: the share of them that it has), and why."""

    num_epochs: int
    repeats: float
    reason: str
    share: float = 1.0  # of the epochs' steps, that there is time for: the last epoch may end early


def plan_steps(
    num_samples: int,
    batch_size: int,
    accumulation_steps: int,
    cost: StepCost | None,
    num_val: int,
    budget: float | None,
    repeats: float | None = None,
    may_end_early: bool = False,
) -> StepPlan:
    """Enough views (augmented images) to learn from, within a budget of seconds, in epochs that are as short as leaves
    validation its share of the time, about NUM_EPOCHS at most. `cost`: of a step that memory holds. `may_end_early`: an
    epoch that there is no time for ends before its last batch."""
    views, is_limited, steps_in_time = wanted_views(num_samples), False, 0.0
    reason = f"{views:,} augmented images, {views / num_samples:,.0f} passes"
    if cost is not None and budget is not None:
        affordable = affordable_views(batch_size, cost, num_val, budget)
        steps_in_time = max(accumulation_steps, (budget - num_val * cost.eval_seconds) / cost.seconds)
        if is_limited := affordable < views:
            views, reason = affordable, f"{affordable:,} augmented images are what {describe_seconds(budget)} allow"
    steps, most = max(1, views // batch_size), NUM_EPOCHS
    if cost is not None and (val_seconds := num_val * cost.eval_seconds):
        share = steps * cost.seconds * VALIDATION_SHARE / (1 - VALIDATION_SHARE)
        most = min(max(1, round(share / val_seconds)), NUM_EPOCHS)
    parts = 1 if budget is not None and budget < SHORT_BUDGET else MIN_VALIDATIONS
    least = max(min(MIN_STEPS_PER_EPOCH, steps // parts), accumulation_steps)

    def steps_of(repeats: float) -> int:
        return max(1, int(num_samples * repeats) // batch_size)

    def epochs_of(repeats: float) -> int:
        passes = steps / steps_of(repeats)
        if is_limited:  # no more epochs than there is time for
            return max(1, math.ceil(passes - MIN_PART) if may_end_early else int(passes))
        return max(1, round(passes))

    if repeats is None:
        # Where no step was timed, the first epochs tell how many there can be.
        per_epoch = least if cost is None and budget is not None else max(math.ceil(steps / most), least)
        passes = per_epoch * batch_size / num_samples
        is_long = num_samples >= MIN_STEPS_PER_EPOCH * batch_size  # a pass: one more of them may be too many
        repeats = max(1, round(passes) if is_limited and is_long else math.ceil(passes))
        if steps_in_time and passes < 2 / 3:
            # A pass is longer than a good epoch; each of its parts has a batch at least.
            repeats = 1 / max(1, min(math.ceil(1 / passes), num_samples // batch_size))
        while epochs_of(repeats) < min(MIN_VALIDATIONS, most) and steps_of(repeats) > least:
            less = repeats - 1 if repeats > 1 else 1 / (round(1 / repeats) + 1)
            if num_samples * less < batch_size:
                break
            repeats = less
        if is_limited and 1 in (most, epochs_of(repeats)):
            spare = SPARE_STEPS if may_end_early else 1
            in_time = steps_in_time * batch_size * spare
            repeats = math.ceil(in_time / num_samples) if in_time > num_samples else 1 / (num_samples // in_time)
            return StepPlan(1, repeats, f"{reason}: one epoch, as long as there is time", 1 / spare)
    num_epochs, steps_per_epoch = epochs_of(repeats), steps_of(repeats)
    share = min(1.0, steps / (num_epochs * steps_per_epoch)) if is_limited and may_end_early else 1.0
    num_steps = math.ceil(share * num_epochs * steps_per_epoch)
    return StepPlan(num_epochs, repeats, f"{reason}; {num_steps:,} steps of {batch_size}", share)


def wanted_views(num_samples: int) -> int:
    """Augmented images that a model is trained on if time allows."""
    return min(max(NUM_VIEWS, MIN_PASSES * num_samples), MAX_VIEWS)


def affordable_views(batch_size: int, cost: StepCost, num_val: int, budget: float) -> int:
    """Augmented images that fit into the budget, with one validation at least."""
    per_validation = num_val * cost.eval_seconds
    for_validation = max(per_validation, min(NUM_EPOCHS * per_validation, VALIDATION_SHARE * budget))
    return max(batch_size, int((budget - for_validation) / cost.seconds) * batch_size)


def wanted_batch_size(num_samples: int, on_cpu: bool) -> int:
    """The reference batch; half of it on a CPU, where steps are few; twice it where there are many images."""
    if on_cpu:
        return REFERENCE_BATCH // 2
    return REFERENCE_BATCH if MIN_PASSES * num_samples <= 4 * NUM_VIEWS else 2 * REFERENCE_BATCH


def choose_number_format(amp_dtype: NumberFormat, hardware: HardwareFacts) -> tuple[NumberFormat, str]:
    """The format of mixed precision: what was asked for if the hardware has it, else the next best."""
    if hardware.has_bfloat16 if amp_dtype == "bfloat16" else hardware.has_float16:
        return amp_dtype, f"{hardware.name} computes in it"
    found: NumberFormat = "float16" if hardware.has_float16 else "float32"
    needs = ", which needs Ampere or newer" if amp_dtype == "bfloat16" and hardware.kind == "cuda" else ""
    return found, f"{hardware.name} has no fast {amp_dtype}{needs}; {found} instead"


def choose_class_weights(class_shares: Sequence[float], num_classes: int) -> tuple[tuple[float, ...] | None, str]:
    if num_classes == 1:
        return None, "one class: the overlap loss counts its pixels alone"
    present = [share for share in class_shares if share > 0]
    if min(present, default=1.0) >= RARE_CLASS:
        return None, f"no class has less than {RARE_CLASS:.1%} of the pixels, and the overlap loss weighs classes alike"
    # By the rarity itself common classes would lose more than the rare ones gain; beyond 2.5 few pixels would dominate.
    rarities = [median(present) / share if share > 0 else 1.0 for share in class_shares]
    weights = (round(min(max(rarity**0.25, 1 / 2.5), 2.5), 3) for rarity in rarities)
    return tuple(weights), "rare classes weigh more, by the fourth root of their rarity"


def choose_learning_rate(optimizer: str, batch_size: int) -> tuple[float, str]:
    """By the square root of the batch, from what was found at the reference batch."""
    base = {"adamw": 2e-3, "adam": 1e-3, "sgd": 5e-2}[optimizer]
    return float(f"{base * math.sqrt(batch_size / REFERENCE_BATCH):.2g}"), f"{optimizer}, effective batch {batch_size}"


def num_pilot_steps(num_steps: int) -> int:
    """Of each learning rate that a run of so many steps tries; 0: none is tried."""
    most = min(300, int(0.15 * num_steps) // MAX_PILOTS)  # 15 % of the run for all
    return most if most >= 100 else 0


def choose_ema_decay(num_steps: int) -> tuple[float, str]:
    return round(min(1 - 10 / max(num_steps, 20), 0.9999), 5), "averages over about a tenth of the run"


def choose_warmup(num_epochs: int, is_trained: bool = False) -> tuple[float, str]:
    """`is_trained`: the run begins with a trained model."""
    usual, least = 0.03 * num_epochs, min(1.0, num_epochs / 4)
    if is_trained and usual < least:
        return least, "large first steps would spoil a trained model"
    return float(f"{usual:.2g}"), "3% of the epochs"


def choose_patience(num_epochs: int) -> tuple[int | None, str]:
    patience = max(5, round(0.3 * num_epochs))
    if patience >= num_epochs:
        return None, "too few epochs to stop early"
    return patience, "30% of the run, 5 at least, once the learning rate is low"


def choose_compile(hardware: HardwareFacts, cost: StepCost | None, num_steps: int) -> tuple[bool, str]:
    if hardware.kind != "cuda" or cost is None:
        return False, "pays on NVIDIA and AMD GPUs, where the time of a step is known"
    saved = cost.seconds / 2 * num_steps  # half of each step's time
    return saved > COMPILE_SECONDS, f"saves {saved:.0f} s of {num_steps:,} steps, takes {COMPILE_SECONDS:.0f} s"


def choose_cache(num_bytes: int, hardware: HardwareFacts, num_reads: float, num_crops: int) -> tuple[str, str]:
    """`num_reads`: times that an image is read in the run; `num_crops`: of these, in an epoch for its crops."""
    if num_reads < 2:
        return "none", "each image is read once"
    size = f"{num_bytes / 2**30:.2f} GiB decoded, {hardware.host_memory / 2**30:.0f} GiB of memory free"
    if hardware.host_memory and num_bytes <= hardware.host_memory / 4:
        return "ram", size
    if num_crops > 1 and num_bytes <= min(2**36, hardware.disk / 4):  # 64 GiB are not taken without being asked
        return "disk", f"{size}: on the disk an image is decoded once, not for each of its {num_crops} crops"
    return "none", size
