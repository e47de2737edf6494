"""Config → settings: inspects the device, measures the data, tries the step, and says what was taken and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from unet_trainer.config import choices
from unet_trainer.config.choices import choose_number_format, describe_symmetry
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements, StepCost
from unet_trainer.config.parsers import seconds_of
from unet_trainer.config.resolve import MeasureStep, decoded_bytes, resolve
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import FIELDS, Config, class_names, id_names
from unet_trainer.datasets.dataset_report import CheckedDataset, describe_sizes
from unet_trainer.datasets.image_kind import IMAGENET_REASON
from unet_trainer.datasets.mask_evidence import absent_classes, class_shares, describe_classes
from unet_trainer.datasets.measurements import MAX_PAIRS, measure_dataset
from unet_trainer.datasets.splits import describe_split
from unet_trainer.model.precision import (
    choose_device,
    cpu_computes_bfloat16,
    inspect_hardware,
    local_device,
)
from unet_trainer.model.pretrained import TIME_LIMIT, choose_encoder_weights, is_here
from unet_trainer.system.console import Console, Finding, counted
from unet_trainer.system.distributed import ALONE, Launch
from unet_trainer.system.resources import count_cores, free_host_memory
from unet_trainer.training.step_probe import StepProbe
from unet_trainer.training.time_budget import TimeBudget

MAX_HINTS = 3
FETCH_SHARE = 0.1  # of a time budget, that encoder weights may take to arrive
MAX_SHOWN = 60  # characters of a value in the list of decisions; config.yaml has all of it
MIN_STEPS = 1000  # of the optimizer: with fewer a model is seldom done learning
MUCH_LARGER = 1.5  # an image enlarged by this factor
MUCH_WEIGHT = 2.5  # times the spread of class weights that auto takes
LARGE_TURN = 45  # degrees
MIN_EPOCHS_TO_CACHE = 10
MAX_EMA_SHARE = 1 / 3  # of the run, that the average may span
UPSIDE_DOWN = ("VerticalFlip", "D4", "Flip", "SquareSymmetry")  # albumentations' names
QUARTER_TURNS = ("RandomRotate90", "D4", "Transpose", "SquareSymmetry")
TURNS = {"Rotate": ("limit", 90), "SafeRotate": ("limit", 90), "ShiftScaleRotate": ("rotate_limit", 45), "Affine": ("rotate", 0)}


def build_hardware(config: Config, console: Console, launch: Launch = ALONE.launch) -> HardwareFacts:
    """The device that the config names, ready to compute; under torchrun this process's own."""
    device = choose_device(local_device(config.device, launch))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of what ran before in this process
    hardware = inspect_hardware(device)
    host_memory = free_host_memory()
    free_memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory
    is_slow = device.type == "cpu" and not cpu_computes_bfloat16()
    hardware = dataclasses.replace(
        hardware,
        free_memory=free_memory,
        host_memory=host_memory,
        has_slow_bfloat16=is_slow,
        num_processes=launch.world_size,
        num_local_processes=launch.local_world_size,
    )
    cores = f", {counted(hardware.num_cores, 'core')}" if device.type == "cpu" else ""
    console.fact("Device", f"{device} ({hardware.name}{cores}), torch {torch.__version__}")
    return hardware


def say_precision(settings: Settings, hardware: HardwareFacts, console: Console) -> None:
    config, number_format, asked = settings.taken, settings.taken.number_format, settings.asked
    reason = settings.decisions["amp_dtype" if config.use_amp else "use_amp"].reason
    if not reason:
        reason = choose_number_format(config.amp_dtype, hardware)[1] if config.use_amp else "use_amp is false"
    if asked.use_amp and number_format != asked.amp_dtype and not (asked.use_amp == "auto" and number_format == "float32"):
        console.warn(reason)
    if number_format != "float32":
        console.say(f"Mixed Precision Training: {number_format}")
        console.say(f"✓ AMP enabled with {number_format}: {reason}")
        if hardware.has_slow_bfloat16:
            console.warn("this CPU has no bfloat16 instructions: it works, several times slower than use_amp=false")
        return
    tf32 = " with TF32 matrix products" if hardware.kind == "cuda" and config.allow_tf32 else ""
    console.say(f"Mixed Precision Training: off, float32{tf32} ({reason})")


def build_settings(
    config: Config,
    hardware: HardwareFacts,
    dataset: CheckedDataset,
    console: Console,
    resumes: bool = False,
    budget: TimeBudget | None = None,
    is_preview: bool = False,
) -> Settings:
    """Decides what the config leaves open, and says it. A resumed run has its settings: nothing is measured for them.

    A preview fetches no weights and gives no hints.
    """
    budget = budget or TimeBudget(config.time_budget)
    cache = Path(config.checkpoint_dir) / ".cache"
    needs_measuring = depends_on_measurements(config) and not resumes
    facts = dataset.facts(measure(config, dataset, console) if needs_measuring else None)
    look_for_weights = weights_here if is_preview else partial(find_weights, console=console, budget=budget)
    with StepProbe(dataset.image_spec, hardware, cache / "step_costs.json", budget.trial_seconds()) as probe:
        settings = resolve(config, hardware, facts, announced(probe, console), look_for_weights, budget.lost_to_training)
        cost = known_cost(probe, settings.taken)
    say_precision(settings, hardware, console)
    _say_dataset(settings.taken, dataset, console)
    if facts.measurements is not None and settings.decisions["augmentation"].source != "decided":
        console.fact("Found", describe_symmetry(facts.measurements, settings.taken.fit))
    _say_decisions(settings, console)
    if not (resumes or is_preview):
        _say_hints(review(settings, hardware, facts, cost), console)
    if config.num_workers == "auto":
        num_workers = settings.taken.num_workers
        who = f"{counted(num_workers, 'worker')} beside the training process" if num_workers else "the training process alone"
        console.fact("Loader", f"{who} (num_workers: auto, {counted(hardware.num_cores, 'core')})")
    if config.class_weights == "auto" and settings.taken.class_weights is not None:
        weights = zip(class_names(settings.taken), settings.taken.class_weights, strict=True)
        console.fact("Weights", ", ".join(f"{name} {weight:g}" for name, weight in weights))
    return settings


def depends_on_measurements(config: Config) -> bool:
    """Whether a setting is open that what lies in the images and masks decides."""
    return "auto" in (config.fit, config.image_size) or config.augmentation in ("auto", "default", "strong")


def measure(config: Config, dataset: CheckedDataset, console: Console) -> Measurements:
    _, masks = dataset.facts_of(dataset.split.train)
    common_id = int(np.argmax(class_shares(masks, dataset.coding, dataset.num_ids)))
    cache = Path(config.checkpoint_dir) / ".cache"
    with console.bar("Measuring structures and symmetry:", min(len(masks), MAX_PAIRS), keep=False) as bar:
        return measure_dataset(dataset.split.train, dataset.coding, dataset.num_ids, common_id, count_cores(), bar.tick, cache)


def find_weights(encoder: str, console: Console, budget: TimeBudget) -> tuple[str | None, str]:
    """The weights of encoder_weights: auto, fetched if that is quick."""
    return choose_encoder_weights(encoder, console.say, min(TIME_LIMIT, FETCH_SHARE * budget.seconds))


def weights_here(encoder: str) -> tuple[str | None, str]:
    """As find_weights, without fetching any."""
    if is_here(encoder, "imagenet"):
        return "imagenet", "on this machine"
    return None, "none on this machine: a run tries to fetch them, for a minute at most, and else begins with random ones"


def known_cost(probe: StepProbe, config: ResolvedConfig) -> StepCost | None:
    """The cost of the uncompiled step, if it was measured before."""
    eager = dataclasses.replace(config, compile_model=False)
    return probe(eager) if probe.knows(eager) else None


def _say_hints(hints: Sequence[Finding], console: Console) -> None:
    """Those worth most."""
    for hint in hints[:MAX_HINTS]:
        console.note(f"{hint.title}: {hint.detail} → {hint.fix}")


def announced(probe: StepProbe, console: Console) -> MeasureStep:
    """The probe, announced once: it takes seconds."""
    was_said = False

    def call(config: ResolvedConfig) -> StepCost | None:
        nonlocal was_said
        if not was_said and not probe.knows(config) and probe.seconds_left > 0:
            console.say("Trying the step in a process of its own, to choose its size and plan the run ...")
            was_said = True
        cost = probe(config)
        if cost is None:
            console.note(f"the step could not be tried ({probe.failure}); the plan is a guess")
        return cost

    return call


def _say_decisions(settings: Settings, console: Console) -> None:
    lines = settings.describe()
    if lines:
        console.say("Decided from the data and this machine (a value in the config is always kept):")
    for name, value, reason in lines:
        shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}…"
        console.say(f"  {name}: {shown}  ({reason})")


def _say_dataset(config: ResolvedConfig, dataset: CheckedDataset, console: Console) -> None:
    split, (height, width) = dataset.split, config.shape
    console.fact("Data", f"{config.data_dir}: {describe_split(split)} ({split.rule})")
    how = f"→ {width}×{height}"
    if config.fit == "crop":
        how = f"→ {config.crops_per_image} crops of {width}×{height} each in training, tiles at native resolution in validation"
    statistics = "normalised with ImageNet's statistics"
    if dataset.statistics_reason != IMAGENET_REASON:
        mean, std = _numbers(config.image_mean), _numbers(config.image_std)
        statistics = f"normalised with mean {mean}, std {std} ({dataset.statistics_reason})"
    console.fact("Images", f"{dataset.kind}; {describe_sizes(dataset.images)} {how}; {statistics}")
    console.fact("Masks", describe_classes(dataset.masks, dataset.coding, id_names(config)))
    for notice in dataset.notices:
        console.note(notice)
    unused = [
        name
        for name, neutral in (("crops_per_image", 1), ("rare_class_crops", FIELDS["rare_class_crops"].default))
        if getattr(config, name) != neutral
    ]
    if config.fit == "resize" and unused:
        verb = "is" if len(unused) == 1 else "are"
        console.note(f"{' and '.join(unused)} {verb} for fit: crop; with fit: resize there are no crops")
    absent = absent_classes(dataset.masks, dataset.coding, id_names(config))
    if absent:
        console.warn(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values[:4]) + (", …" if len(values) > 4 else "")


@dataclass(frozen=True)
class _Case:
    """What the checks look at."""

    settings: Settings
    hardware: HardwareFacts
    facts: DatasetFacts
    cost: StepCost | None  # of the uncompiled step
    failure: str  # why the step could not be measured
    compile_failure: str  # why it could not be compiled

    @property
    def taken(self) -> ResolvedConfig:
        return self.settings.taken

    def gave(self, name: str) -> bool:
        """Whether the value is the user's. The values of the built-in demo are the script's own."""
        asked = self.settings.asked
        return asked.sources.get(name) not in (None, "demo") and getattr(asked, name) != "auto"

    @property
    def num_samples(self) -> int:
        """Training samples of one pass."""
        return len(self.facts.train_sizes) * (self.taken.crops_per_image if self.taken.fit == "crop" else 1)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the run."""
        batches = max(1, int(self.num_samples * self.taken.repeats) // (self.taken.batch_size * self.hardware.num_processes))
        return self.taken.num_epochs * math.ceil(batches / self.taken.accumulation_steps)

    @property
    def median_size(self) -> tuple[int, int]:
        height, width = (int(median(size[axis] for size in self.facts.train_sizes)) for axis in (0, 1))
        return height, width


def review(
    settings: Settings,
    hardware: HardwareFacts,
    facts: DatasetFacts,
    cost: StepCost | None = None,
    failure: str = "",
    compile_failure: str = "",
) -> list[Finding]:
    """The findings, those worth most first. `cost` is that of the uncompiled step, where it is known."""
    case = _Case(settings, hardware, facts, cost, failure, compile_failure)
    return [finding for check in CHECKS if (finding := check(case)) is not None]


def _memory(case: _Case) -> Finding | None:
    size = case.taken.batch_size
    limit = choices.MEMORY_SHARE * case.hardware.free_memory
    fix = f"batch_size: {max(1, size // 2)} with accumulation_steps: {2 * case.taken.accumulation_steps}, or batch_parts: 2"
    if case.failure:
        return Finding("problem", "batch_size", f"a step of {size} could not be taken ({case.failure})", fix)
    if not case.gave("batch_size") or case.hardware.kind == "cpu" or case.cost is None or case.cost.memory <= limit:
        return None
    used, free = (number / 2**30 for number in (case.cost.memory, case.hardware.free_memory))
    return Finding("warning", "batch_size", f"{size} takes {used:.1f} GiB of the {free:.1f} GiB that are free", fix)


def _mixed_precision(case: _Case) -> Finding | None:
    if case.gave("use_amp") and case.taken.use_amp and case.hardware.has_slow_bfloat16:
        detail = f"true is several times slower here: {case.hardware.name} has no bfloat16 instructions"
        return Finding("warning", "use_amp", detail, "use_amp: auto")
    if not case.gave("use_amp") or case.taken.use_amp or not choices.choose_use_amp(case.hardware)[0]:
        return None
    detail = f"false leaves the 16-bit units of {case.hardware.name} unused: it would train faster, in about half the memory"
    return Finding("warning", "use_amp", detail, "use_amp: true")


def _thin_structures(case: _Case) -> Finding | None:
    measured, config = case.facts.measurements, case.taken
    if measured is None or config.fit != "resize" or not (case.gave("fit") or case.gave("image_size")):
        return None
    scale = min(have / whole for have, whole in zip(config.shape, case.median_size, strict=True))
    if not 0 < measured.thickness * scale < choices.MIN_THICKNESS or scale >= 1:
        return None
    height, width = case.median_size
    name = "image_size" if case.gave("image_size") else "fit"
    value = value_text(list(config.shape)) if name == "image_size" else "resize"
    detail = (
        f"{value}: structures {measured.thickness:.1f} pixels thin in images of {width}×{height} shrink to "
        f"{measured.thickness * scale:.1f} pixels, and below {choices.MIN_THICKNESS:.0f} the model loses them"
    )
    wanted = choices.MIN_THICKNESS / measured.thickness
    if choices.choose_fit(measured, case.facts.train_sizes)[0] == "crop" or wanted > 1:
        return Finding("warning", name, detail, "fit: crop with image_size: auto")
    sides = [math.ceil(side * wanted / choices.STRIDE) * choices.STRIDE for side in case.median_size]
    return Finding("warning", name, detail, f"image_size: {value_text(sides)}")


def _symmetry(case: _Case) -> Finding | None:
    measured, asked = case.facts.measurements, case.settings.asked.augmentation
    if measured is None or not case.gave("augmentation") or isinstance(asked, str):
        return None
    in_views = case.taken.fit == "crop"
    has_up = not measured.keeps_labels("vertical_flip", in_views)
    has_turn = has_up or not measured.keeps_labels("quarter_turn", in_views)
    unfit = [
        name
        for name, parameters in _transforms(asked)
        if (has_up and name in UPSIDE_DOWN)
        or (has_turn and (name in QUARTER_TURNS or _largest_turn(name, parameters) > LARGE_TURN))
        or (measured.has_sides and name == "HorizontalFlip")
    ]
    if not unfit:
        return None
    names = ", ".join(dict.fromkeys(unfit))
    found = choices.describe_symmetry(measured, case.taken.fit).rpartition("; ")[0]
    return Finding("warning", "augmentation", f"{names} makes images unlike this data: {found}", "augmentation: auto")


def _transforms(items: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and parameters of every transform in a list, those of groups included."""
    for item in items:
        name, parameters = next(iter(item.items())) if isinstance(item, dict) and item else (item, None)
        parameters = parameters if isinstance(parameters, dict) else {}
        yield str(name), parameters
        inner = parameters.get("transforms")
        if isinstance(inner, list | tuple):
            yield from _transforms(inner)


def _largest_turn(name: str, parameters: dict[str, Any]) -> float:
    """Degrees."""
    if name not in TURNS:
        return 0.0
    key, default = TURNS[name]
    given = parameters.get(key, default)
    numbers = given if isinstance(given, list | tuple) else [given]
    return max((abs(number) for number in numbers if isinstance(number, int | float)), default=0.0)


def _class_weights(case: _Case) -> Finding | None:
    given = case.taken.class_weights
    wanted, _ = choices.choose_class_weights(case.facts.class_shares, case.taken.num_classes)
    if not case.gave("class_weights") or given is None or case.taken.num_classes == 1:
        return None
    ratio = max(given) / min(given)
    wanted_ratio = 1.0 if wanted is None else max(wanted) / min(wanted)
    if ratio <= MUCH_WEIGHT * wanted_ratio:
        return None
    detail = (
        f"weights that differ by a factor of {ratio:.0f} cost the common classes more than they give the rare ones: full "
        f"balance took mean IoU from 0.67 to 0.62 on a street set; auto takes "
        + ("none" if wanted is None else f"a factor of {wanted_ratio:.1f}")
    )
    return Finding("warning", "class_weights", detail, "class_weights: auto")


def _few_steps(case: _Case) -> Finding | None:
    config, num_steps = case.taken, case.num_steps
    if not case.gave("num_epochs") or num_steps >= MIN_STEPS:
        return None
    few = f"{counted(config.num_epochs, 'epoch')} are {counted(num_steps, 'optimizer step')}, too few to learn much"
    if case.hardware.kind == "cpu" and case.cost is None:  # what there is time for is not known
        return Finding("warning", "num_epochs", few, "num_epochs: auto")
    budget = choices.CPU_BUDGET if case.hardware.kind == "cpu" else None
    if config.time_budget is not None:
        budget = seconds_of(config.time_budget)
    num_val = len(case.facts.val_sizes)
    plan = choices.plan_steps(case.num_samples, config.batch_size, config.accumulation_steps, case.cost, num_val, budget)
    batches = max(1, int(case.num_samples * plan.repeats) // config.batch_size)
    planned = plan.num_epochs * math.ceil(batches / config.accumulation_steps)
    if planned < 1.5 * num_steps:
        return None
    return Finding("warning", "num_epochs", f"{few}; auto takes {planned:,}", "num_epochs: auto")


def _average(case: _Case) -> Finding | None:
    decay = case.taken.ema_decay
    if not case.gave("ema_decay") or decay is None:
        return None
    span, wanted = 1 / (1 - decay), choices.choose_ema_decay(case.num_steps)[0]
    if span <= MAX_EMA_SHARE * case.num_steps or decay <= wanted:  # of a few steps, half is the least
        return None
    detail = f"{decay:g} averages over {span:,.0f} steps of a run of {case.num_steps:,}: the average still holds untrained weights"
    return Finding("warning", "ema_decay", detail, f"ema_decay: {wanted}")


def _enlarged(case: _Case) -> Finding | None:
    config, size = case.taken, case.median_size
    if not case.gave("image_size"):
        return None
    factor = math.sqrt(math.prod(config.shape) / math.prod(size))
    if factor < MUCH_LARGER:
        return None
    height, width = size
    how = "enlarges" if config.fit == "resize" else "pads"
    detail = (
        f"{value_text(list(config.shape))} {how} images of {width}×{height}: {factor**2:.1f} times the work and memory, and no "
        "more to see"
    )
    sides = [max(choices.MIN_SIDE, math.ceil(side / choices.STRIDE) * choices.STRIDE) for side in size]
    return Finding("warning", "image_size", detail, f"image_size: {value_text(sides)}")


def _workers(case: _Case) -> Finding | None:
    cores = case.hardware.num_cores
    if not case.gave("num_workers") or case.taken.num_workers <= cores:
        return None
    wanted = choices.choose_num_workers(cores, on_cpu=case.hardware.kind == "cpu")
    detail = f"{case.taken.num_workers} processes share {cores} core{'s' if cores > 1 else ''}: they take memory and save no time"
    return Finding("warning", "num_workers", detail, f"num_workers: {wanted}")


def _compiling(case: _Case) -> Finding | None:
    if case.compile_failure:
        detail = f"the step cannot be compiled here ({case.compile_failure}): training would go on uncompiled"
        return Finding("warning", "compile_model", detail, "compile_model: false")
    if not case.gave("compile_model") or (case.cost is None and case.hardware.kind == "cuda"):
        return None
    pays, reason = choices.choose_compile(case.hardware, case.cost, case.num_steps)
    if pays == case.taken.compile_model:
        return None
    if pays:
        return Finding("warning", "compile_model", f"false: compiling {reason}", "compile_model: true")
    return Finding("warning", "compile_model", f"true costs more than it saves here: {reason}", "compile_model: false")


def _cache(case: _Case) -> Finding | None:
    config = case.taken
    if not case.gave("cache") or config.cache != "none" or config.num_epochs < MIN_EPOCHS_TO_CACHE:
        return None
    num_bytes = decoded_bytes(config.fit, config.image_size, case.facts)
    choice, reason = choices.choose_cache(num_bytes, case.hardware.host_memory, config.num_epochs)
    if choice != "ram":
        return None
    return Finding("warning", "cache", f"none decodes every file {config.num_epochs} times; it fits ({reason})", "cache: ram")


def _float16(case: _Case) -> Finding | None:
    if not case.gave("amp_dtype") or case.taken.number_format != "float16" or not case.hardware.has_bfloat16:
        return None
    detail = f"float16 needs loss scaling and may overflow; {case.hardware.name} has bfloat16, as fast and without either"
    return Finding("warning", "amp_dtype", detail, "amp_dtype: bfloat16")


def _deterministic(case: _Case) -> Finding | None:
    if not case.gave("deterministic") or not case.taken.deterministic or case.hardware.kind != "cuda":
        return None
    detail = "true costs about 12 % of the speed; the seed alone already fixes split, order, weights and augmentation"
    return Finding("warning", "deterministic", detail, "deterministic: false, unless the bits must be the same")


# Those worth most first.
CHECKS: Sequence[Callable[[_Case], Finding | None]] = (
    _memory,
    _mixed_precision,
    _thin_structures,
    _symmetry,
    _few_steps,
    _class_weights,
    _average,
    _enlarged,
    _workers,
    _compiling,
    _cache,
    _float16,
    _deterministic,
)
