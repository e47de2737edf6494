"""Config → settings: inspects the device, measures the data, tries the step, and says what was taken and why."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from unet_trainer.config.auto import resolve
from unet_trainer.config.auto_training import choose_number_format
from unet_trainer.config.facts import DatasetFacts, HardwareFacts, Measurements
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import Config, id_names
from unet_trainer.data.dataset_notices import describe_classes, describe_sizes
from unet_trainer.data.dataset_report import CheckedDataset
from unet_trainer.data.mask_evidence import class_shares, class_table
from unet_trainer.data.measurements import measure_dataset
from unet_trainer.data.scan import IMAGENET_REASON, brightness_share
from unet_trainer.data.splits import describe_split
from unet_trainer.model.precision import choose_device, cpu_computes_bfloat16, inspect_hardware, local_device
from unet_trainer.model.pretrained import TIME_LIMIT, choose_encoder_weights, is_here, why_offline
from unet_trainer.system.console import Console, counted, cut
from unet_trainer.system.launch import ALONE, Launch
from unet_trainer.system.resources import free_disk, free_host_memory
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.initial_model import InitialModel
from unet_trainer.training.time_budget import TimeBudget
from unet_trainer.training.trials import StepProbe

FETCH_SHARE, TRIAL_SHARE = 0.1, 0.15  # of a time budget, that encoder weights, and trials of the step, may take
MAX_SHOWN = 61  # characters of a value in the list of decisions; config.yaml has all of it
# With a time budget they are not printed: the epochs are planned anew, from the time of the step as it is trained.
FOLLOW_THE_TIME = ("num_epochs", "warmup_epochs", "ema_decay", "early_stopping_patience")


def build_hardware(config: Config, console: Console, launch: Launch = ALONE) -> HardwareFacts:
    """The device that the config names, ready to compute; under torchrun this process's own."""
    device = choose_device(local_device(config.device, launch))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of what ran before in this process
    host_memory = free_host_memory()
    hardware = dataclasses.replace(
        inspect_hardware(device),
        free_memory=torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory,
        host_memory=host_memory,
        disk=free_disk(Path(config.checkpoint_dir)),
        has_slow_bfloat16=device.type == "cpu" and not cpu_computes_bfloat16(),
        num_processes=launch.world_size,
        num_local_processes=launch.local_world_size,
    )
    cores = f", {counted(hardware.num_cores, 'core')}" if device.type == "cpu" else ""
    console.fact("Device", f"{device} ({hardware.name}{cores}), torch {torch.__version__}")
    return hardware


def say_precision(settings: Settings, hardware: HardwareFacts, console: Console) -> None:
    config, requested = settings.taken, settings.requested
    reason = settings["amp_dtype" if config.use_amp else "use_amp"].reason
    if not reason:
        reason = choose_number_format(config.amp_dtype, hardware)[1] if config.use_amp else "use_amp is false"
    if (requested.use_amp is True and not config.use_amp) or (
        config.use_amp and config.amp_dtype != requested.amp_dtype
    ):
        console.warn(reason)
    if config.use_amp:
        console.say(f"Mixed Precision Training: {config.amp_dtype}")
        console.say(f"✓ AMP enabled with {config.amp_dtype}: {reason}")
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
    custom: CustomParts = NO_PARTS,
    initial: InitialModel | None = None,
) -> Settings:
    """Decides what the config leaves open, and says it. A resumed run has its settings: nothing is measured for them.
    A preview fetches no weights. `initial`: the model that init_from names."""
    from_model = {} if initial is None else initial.settings(config) | initial.normalisation(config, dataset.image_spec)
    budget, measured = budget or TimeBudget(config.time_budget), None
    if "auto" in (config.fit, config.image_size, config.augmentation) and not resumes:
        train, coding, num_ids = dataset.split.train, dataset.coding, dataset.coding.num_ids
        background = int(np.argmax(class_shares(dataset.facts_of(train)[1], coding, num_ids)))
        measured = measure_dataset(train, coding, num_ids, background, console)

    def find_weights(encoder: str) -> tuple[str | None, str]:
        if not is_preview:
            return choose_encoder_weights(encoder, console.say, min(TIME_LIMIT, FETCH_SHARE * budget.seconds))
        failure = None if is_here(encoder, "imagenet") else why_offline()
        return ("imagenet", "from this machine, or fetched") if failure is None else (None, f"{failure}: random ones")

    probe = StepProbe(dataset.image_spec, console, TRIAL_SHARE * budget.seconds, custom)
    facts = dataset_facts(dataset, measured)
    settings = resolve(config, hardware, facts, probe, find_weights, budget.lost_to_training, from_model)
    say_precision(settings, hardware, console)
    statistics_reason = from_model["image_mean"][1] if "image_mean" in from_model else dataset.statistics_reason
    _say_dataset(settings.taken, dataset, "as the run began" if resumes else statistics_reason, console)
    planned = FOLLOW_THE_TIME if settings.replans() else ()
    if lines := [line for line in settings.describe() if line[0] not in planned]:
        console.say("Decided from the data and this machine (a value in the config is always kept):")
    for name, value, reason in lines:
        console.say(f"  {name}: {cut(value, MAX_SHOWN)}  ({reason})")
    if settings["monitor"].is_decided:
        console.note(f"monitor: {settings['monitor'].value}: {settings['monitor'].reason}")
    return settings


def dataset_facts(dataset: CheckedDataset, measurements: Measurements | None = None) -> DatasetFacts:
    """What `resolve` decides from."""
    spec, coding, classes, split = dataset.image_spec, dataset.coding, dataset.classes, dataset.split
    train_images, _ = dataset.facts_of(split.train)
    are_blocks = any(pair.box for pair in split.train)
    return DatasetFacts(
        channels=spec.channels,
        mean=spec.mean,
        std=spec.std,
        statistics_reason=dataset.statistics_reason,
        mask_values=coding.mask_values,
        ignore_value=coding.written_ignore_value,
        mask_reason=coding.reason,
        class_shares=dataset.class_shares,
        train_sizes=[image.size for image in train_images],
        val_sizes=dataset.sizes_of(split.val),
        bytes_per_value=1 if spec.is_8bit else 4,
        measurements=measurements,
        num_classes=classes.num_classes,
        num_classes_reason=classes.num_classes_reason,
        class_names=classes.class_names,
        mask_tolerance=coding.tolerance,
        are_blocks=are_blocks,
        has_val_classes=bool(dataset.ids_in(split.val) - ({0} if classes.num_classes == 1 else set())),
        # Blocks of one image have its light: what differs between them is what they show.
        brightness_share=0.0 if are_blocks else brightness_share(train_images, spec.channels),
    )


def _say_dataset(config: ResolvedConfig, dataset: CheckedDataset, statistics_reason: str, console: Console) -> None:
    (height, width), names = config.shape, id_names(config)
    how = f"→ {width}×{height}"
    if config.fit == "crop":
        crops = f"{config.crops_per_image} crops of {width}×{height} each in training"
        how = f"→ {crops}, tiles at native resolution in validation"
    statistics = "normalised with ImageNet's statistics"
    if statistics_reason != IMAGENET_REASON:
        mean, std = (", ".join(f"{one:g}" for one in values) for values in (config.image_mean, config.image_std))
        statistics = f"normalised with mean {mean}, std {std} ({statistics_reason})"
    console.fact("Data", f"{config.data_dir}: {describe_split(dataset.split)} ({dataset.split.rule})")
    console.fact("Images", f"{dataset.kind}; {describe_sizes(dataset.images)} {how}; {statistics}")
    console.fact("Masks", describe_classes(dataset.masks, dataset.coding, names))
    for notice in dataset.notices:
        console.note(notice)
    if absent := [row.name for row in class_table(dataset.masks, dataset.coding, names) if row.share == 0]:
        console.warn(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")
