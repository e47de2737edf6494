"""Config → settings: inspects the device, measures the data, tries the step, and says what was taken and why."""

import contextlib
import dataclasses
import math
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from unet_trainer.config import choices
from unet_trainer.config.choices import choose_number_format, describe_symmetry
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig, Settings, resolve
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import FIELDS, Config, class_names, id_names
from unet_trainer.datasets.dataset_report import CheckedDataset, describe_sizes
from unet_trainer.datasets.mask_evidence import absent_classes, class_shares, describe_classes
from unet_trainer.datasets.measurements import measure_dataset
from unet_trainer.datasets.scan import IMAGENET_REASON
from unet_trainer.datasets.splits import describe_split
from unet_trainer.model.precision import choose_device, cpu_computes_bfloat16, inspect_hardware, local_device
from unet_trainer.model.pretrained import TIME_LIMIT, choose_encoder_weights, is_here, why_offline
from unet_trainer.system.console import Console, Finding, counted
from unet_trainer.system.distributed import ALONE, Launch
from unet_trainer.system.resources import free_host_memory
from unet_trainer.training.initial_model import InitialModel
from unet_trainer.training.step_probe import StepProbe
from unet_trainer.training.time_budget import TimeBudget

MAX_HINTS = 3
FETCH_SHARE = 0.1  # of a time budget, that encoder weights may take to arrive
MAX_SHOWN = 60  # characters of a value in the list of decisions; config.yaml has all of it
MIN_STEPS = 1000  # of the optimizer: with fewer a model is seldom done learning
MUCH_LARGER = 1.5  # an image enlarged by this factor


def build_hardware(config: Config, console: Console, launch: Launch = ALONE.launch) -> HardwareFacts:
    """The device that the config names, ready to compute; under torchrun this process's own."""
    device = choose_device(local_device(config.device, launch))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of what ran before in this process
    host_memory = free_host_memory()
    hardware = dataclasses.replace(
        inspect_hardware(device),
        free_memory=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory,
        host_memory=host_memory,
        has_slow_bfloat16=device.type == "cpu" and not cpu_computes_bfloat16(),
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
    if (
        asked.use_amp
        and number_format != asked.amp_dtype
        and not (asked.use_amp == "auto" and number_format == "float32")
    ):
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
    probe: StepProbe | None = None,
    initial: InitialModel | None = None,
) -> Settings:
    """Decides what the config leaves open, and says it. A resumed run has its settings: nothing is measured for them.

    A preview fetches no weights and gives no hints. `initial`: the model that init_from names.
    """
    from_model = {} if initial is None else initial.settings(config) | initial.normalisation(config, dataset.image_spec)
    budget = budget or TimeBudget(config.time_budget)
    probe = probe or build_probe(config, hardware, budget)
    probe.image_spec, probe.console = dataset.image_spec, console
    is_measured = "auto" in (config.fit, config.image_size) or config.augmentation in ("auto", "default", "strong")
    facts = dataset.facts(measure(config, dataset, console) if is_measured and not resumes else None)

    def find_weights(encoder: str) -> tuple[str | None, str]:
        if not is_preview:
            return choose_encoder_weights(encoder, console.say, min(TIME_LIMIT, FETCH_SHARE * budget.seconds))
        if is_here(encoder, "imagenet"):
            return "imagenet", "on this machine"
        if (failure := why_offline()) is not None:
            return None, f"none on this machine, and {failure}: random ones"
        return (
            "imagenet",
            "not on this machine: a run fetches them, for a minute at most, and else begins with random ones",
        )

    with contextlib.closing(probe):
        settings = resolve(config, hardware, facts, probe, find_weights, budget.lost_to_training, from_model)
        cost = known_cost(probe, settings.taken)
    if cost is not None:
        budget.eval_share = cost.eval_seconds * settings.taken.batch_size / cost.seconds
    say_precision(settings, hardware, console)
    statistics_reason = from_model["image_mean"][1] if "image_mean" in from_model else dataset.statistics_reason
    _say_dataset(settings.taken, dataset, "as the run began" if resumes else statistics_reason, console)
    if facts.measurements is not None and settings.decisions["augmentation"].source != "decided":
        console.fact("Found", describe_symmetry(facts.measurements, settings.taken.fit))
    if lines := settings.describe():
        console.say("Decided from the data and this machine (a value in the config is always kept):")
    for name, value, reason in lines:
        console.say(f"  {name}: {value if len(value) <= MAX_SHOWN else f'{value[:MAX_SHOWN]}…'}  ({reason})")
    if not (resumes or is_preview):
        for hint in review(settings, hardware, facts, cost)[:MAX_HINTS]:
            console.note(f"{hint.title}: {hint.detail} → {hint.fix}")
    if config.num_workers == "auto":
        num_workers = settings.taken.num_workers
        who = (
            f"{counted(num_workers, 'worker')} beside the training process"
            if num_workers
            else "the training process alone"
        )
        console.fact("Loader", f"{who} (num_workers: auto, {counted(hardware.num_cores, 'core')})")
    if config.class_weights == "auto" and settings.taken.class_weights is not None:
        weights = zip(class_names(settings.taken), settings.taken.class_weights, strict=True)
        console.fact("Weights", ", ".join(f"{name} {weight:g}" for name, weight in weights))
    return settings


def build_probe(config: Config, hardware: HardwareFacts, budget: TimeBudget | None = None) -> StepProbe:
    seconds = math.inf if budget is None else budget.trial_seconds()
    return StepProbe(hardware, Path(config.checkpoint_dir) / ".cache/step_costs.json", seconds)


def measure(config: Config, dataset: CheckedDataset, console: Console) -> Measurements:
    _, masks = dataset.facts_of(dataset.split.train)
    common_id = int(np.argmax(class_shares(masks, dataset.coding, dataset.num_ids)))
    cache = Path(config.checkpoint_dir) / ".cache"
    return measure_dataset(dataset.split.train, dataset.coding, dataset.num_ids, common_id, console, cache)


def known_cost(probe: StepProbe, config: ResolvedConfig) -> StepCost | None:
    """The cost of the uncompiled step, if it was measured before."""
    eager = dataclasses.replace(config, compile_model=False)
    return probe(eager) if probe.knows(eager) else None


def _say_dataset(config: ResolvedConfig, dataset: CheckedDataset, statistics_reason: str, console: Console) -> None:
    split, (height, width) = dataset.split, config.shape
    console.fact("Data", f"{config.data_dir}: {describe_split(split)} ({split.rule})")
    how = f"→ {width}×{height}"
    if config.fit == "crop":
        how = (
            f"→ {config.crops_per_image} crops of {width}×{height} each in training, tiles at native resolution "
            "in validation"
        )
    statistics = "normalised with ImageNet's statistics"
    if statistics_reason != IMAGENET_REASON:
        mean, std = (
            ", ".join(f"{value:g}" for value in values[:4]) + (", …" if len(values) > 4 else "")
            for values in (config.image_mean, config.image_std)
        )
        statistics = f"normalised with mean {mean}, std {std} ({statistics_reason})"
    console.fact("Images", f"{dataset.kind}; {describe_sizes(dataset.images)} {how}; {statistics}")
    console.fact("Masks", describe_classes(dataset.masks, dataset.coding, id_names(config)))
    for notice in dataset.notices:
        console.note(notice)
    neutral = {"crops_per_image": 1, "rare_class_crops": FIELDS["rare_class_crops"].default}
    unused = [name for name, value in neutral.items() if getattr(config, name) != value]
    if config.fit == "resize" and unused:
        console.note(f"{' and '.join(unused)}: for fit: crop alone; with fit: resize there are no crops")
    absent = absent_classes(dataset.masks, dataset.coding, id_names(config))
    if absent:
        console.warn(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")


# What a setting of the user is compared with, those worth most first, and what speaks against it.
COMPARED: dict[str, tuple[dict[str, Any], str]] = {
    "use_amp": ({"use_amp": "auto"}, "not the fastest number format of this device"),
    "image_size": (
        {"image_size": "auto", "fit": "auto"},
        "thin structures are lost, or images are enlarged for nothing",
    ),
    "num_epochs": ({"num_epochs": "auto", "repeats": "auto"}, "too few optimizer steps to learn much"),
    "num_workers": ({"num_workers": "auto"}, "more processes than cores take memory and save no time"),
    "compile_model": ({"compile_model": "auto"}, "not the fastest step"),
}


def review(
    settings: Settings,
    hardware: HardwareFacts,
    facts: DatasetFacts,
    cost: StepCost | None = None,
    failure: str = "",
    compile_failure: str = "",
) -> list[Finding]:
    """What the user's settings cost, those worth most first: each is compared with what `auto` would take in its place,
    all else as it is. `cost` is that of the uncompiled step, where it is known; the failures are why it could not be
    tried or
    compiled."""
    asked, taken = settings.asked, settings.taken
    given = {
        name for name in FIELDS if asked.sources.get(name) not in (None, "demo") and getattr(asked, name) != "auto"
    }
    findings: list[Finding] = []
    size, limit = taken.batch_size, choices.MEMORY_SHARE * hardware.free_memory
    fix = f"batch_size: {max(1, size // 2)} with accumulation_steps: {2 * taken.accumulation_steps}, or batch_parts: 2"
    if failure:
        findings.append(Finding("problem", "batch_size", f"a step of {size} could not be taken ({failure})", fix))
    elif "batch_size" in given and hardware.kind != "cpu" and cost and cost.memory > limit:
        used, free = (number / 2**30 for number in (cost.memory, hardware.free_memory))
        findings.append(
            Finding("warning", "batch_size", f"{size} takes {used:.1f} GiB of the {free:.1f} GiB that are free", fix)
        )
    if compile_failure:
        detail = f"the step cannot be compiled here ({compile_failure}): training would go on uncompiled"
        findings.append(Finding("warning", "compile_model", detail, "compile_model: false"))
    decided = dataclasses.replace(
        asked, **{name: getattr(taken, name) for name in FIELDS if getattr(asked, name) == "auto"}
    )
    for name, (changes, problem) in COMPARED.items():
        if not given & changes.keys() or (name == "compile_model" and compile_failure):
            continue
        other = resolve(dataclasses.replace(decided, **changes), hardware, facts, lambda config: cost)
        if _is_better(name, taken, other.taken, hardware, facts, cost):
            shown, instead = (value_text(getattr(config, name)) for config in (taken, other.taken))
            reason = other.decisions[name].reason
            detail = f"{shown}: {problem}; auto takes {instead}{reason and f' ({reason})'}"
            fix = ", ".join(
                f"{key}: {value_text(value)}" for key, value in changes.items() if key == name or key in given
            )
            findings.append(Finding("warning", name, detail, fix))
    return findings


def _is_better(
    name: str,
    now: ResolvedConfig,
    other: ResolvedConfig,
    hardware: HardwareFacts,
    facts: DatasetFacts,
    cost: StepCost | None,
) -> bool:
    """Whether the other value is worth a hint."""
    if name == "num_workers":
        return now.num_workers > hardware.num_cores
    if name == "num_epochs":
        num_steps = count_steps(now, hardware, facts)
        return num_steps < MIN_STEPS and count_steps(other, hardware, facts) >= 1.5 * num_steps
    if name != "image_size":
        is_unknown = name == "compile_model" and cost is None and hardware.kind == "cuda"
        return getattr(now, name) != getattr(other, name) and not is_unknown
    native = [int(median(size[axis] for size in facts.train_sizes)) for axis in (0, 1)]
    if math.prod(now.shape) >= MUCH_LARGER**2 * math.prod(native):
        return math.prod(other.shape) < math.prod(now.shape)
    scale = min(have / whole for have, whole in zip(now.shape, native, strict=True))
    is_thin = facts.measurements is not None and 0 < facts.measurements.thickness * scale < choices.MIN_THICKNESS
    return (
        is_thin
        and now.fit == "resize"
        and scale < 1
        and (other.fit == "crop" or math.prod(other.shape) > math.prod(now.shape))
    )


def count_steps(config: ResolvedConfig, hardware: HardwareFacts, facts: DatasetFacts) -> int:
    """Optimizer steps of the run."""
    num_samples = len(facts.train_sizes) * (config.crops_per_image if config.fit == "crop" else 1)
    batches = max(1, int(num_samples * config.repeats) // (config.batch_size * hardware.num_processes))
    return config.num_epochs * math.ceil(batches / config.accumulation_steps)
