"""Config → settings: inspects the device, measures the data, tries the step, and says what was taken and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from unet_trainer.config.data_choices import describe_symmetry
from unet_trainer.config.facts import HardwareFacts, Measurements, StepCost
from unet_trainer.config.resolve import MeasureStep, resolve
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import FIELDS, Config, class_names, id_names
from unet_trainer.config.training_choices import (
    choose_number_format,
)
from unet_trainer.datasets.class_statistics import absent_classes, class_shares, describe_classes
from unet_trainer.datasets.dataset_report import CheckedDataset, describe_sizes
from unet_trainer.datasets.image_kind import IMAGENET_REASON
from unet_trainer.datasets.measurements import MAX_PAIRS, measure_dataset
from unet_trainer.datasets.splits import describe_split
from unet_trainer.model.precision import (
    choose_device,
    cpu_computes_bfloat16,
    inspect_hardware,
    local_device,
)
from unet_trainer.model.pretrained import TIME_LIMIT, choose_encoder_weights
from unet_trainer.system.console import Console, counted
from unet_trainer.system.findings import Finding
from unet_trainer.system.processes import ALONE, Launch
from unet_trainer.system.resources import count_cores, free_host_memory
from unet_trainer.training.config_review import review
from unet_trainer.training.step_probe import StepProbe
from unet_trainer.training.time_budget import TimeBudget

MAX_HINTS = 3
FETCH_SHARE = 0.1  # of a time budget, that encoder weights may take to arrive
MAX_SHOWN = 60  # characters of a value in the list of decisions; config.yaml has all of it


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
) -> Settings:
    """Decides what the config leaves open, and says it. A resumed run has its settings: nothing is measured for them."""
    budget = budget or TimeBudget(config.time_budget)
    cache = Path(config.checkpoint_dir) / ".cache"
    needs_measuring = depends_on_measurements(config) and not resumes
    facts = dataset.facts(measure(config, dataset, console) if needs_measuring else None)
    look_for_weights = partial(find_weights, console=console, budget=budget)
    with StepProbe(dataset.image_spec, hardware, cache / "step_costs.json", budget.trial_seconds()) as probe:
        settings = resolve(config, hardware, facts, announced(probe, console), look_for_weights, budget.lost_to_training)
        cost = known_cost(probe, settings.taken)
    say_precision(settings, hardware, console)
    _say_dataset(settings.taken, dataset, console)
    if facts.measurements is not None and settings.decisions["augmentation"].source != "decided":
        console.fact("Found", describe_symmetry(facts.measurements, settings.taken.fit))
    _say_decisions(settings, console)
    if not resumes:
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
