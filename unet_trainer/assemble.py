"""Turns a Config into the parts of a run: device, data, model, steps. Says what it chose for the user, and why."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from unet_trainer.augment import build_augmentation
from unet_trainer.cache import fill_cache
from unet_trainer.checkpoint import TrainState
from unet_trainer.config import DEMO_DIR, FIELDS, Config, UserError, class_names, image_shape
from unet_trainer.console import Console, counted
from unet_trainer.crew import Crew, choose_num_workers
from unet_trainer.dataset import Batch, SegmentationDataset
from unet_trainer.demo import ensure_demo
from unet_trainer.forms import RGB, ImageForm, show_kind
from unet_trainer.framing import Framing, RandomCrops, Resized, choose_crops_per_image, cover
from unet_trainer.guard import MAX_BAD_STEPS
from unet_trainer.images import DataError
from unet_trainer.layers import use_fast_layers
from unet_trainer.loader import Loader
from unet_trainer.losses import WeightedLoss
from unet_trainer.machine import Data, Machine
from unet_trainer.masks import IGNORED
from unet_trainer.memory import is_out_of_memory, one_line
from unet_trainer.model import Ema, build_model, check_encoder_name
from unet_trainer.pairs import Found
from unet_trainer.precision import (
    build_scaler,
    choose_device,
    choose_precision,
    cpu_computes_bfloat16,
    inspect_hardware,
    set_backends,
)
from unet_trainer.progress import Progress
from unet_trainer.runs import SPLIT_TABLE
from unet_trainer.scan import MAX_WEIGHT, balanced_weights, class_ids, class_shares, count_cores, file_stamp
from unet_trainer.schedule import build_learning_rate, build_optimizer
from unet_trainer.step import (
    EvalStep,
    Numerics,
    Totals,
    TrainStep,
    build_forward,
    compile_steps,
    leaving_no_trace,
    try_steps,
)
from unet_trainer.survey import Survey, absent_classes, build_survey, describe_classes, find_dataset, show_sizes
from unet_trainer.tables import read_table


def build_numerics(config: Config, console: Console) -> tuple[Config, Numerics]:
    """Device and precision as the hardware allows; the config comes back with what was chosen."""
    device = choose_device(config.device)
    set_backends(config.allow_tf32, config.deterministic, search_kernels=config.compile_model)
    hardware = inspect_hardware(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of what ran before in this process
    precision = choose_precision(config.use_amp, config.amp_dtype, hardware)
    cores = count_cores()
    console.fact(
        "Device", f"{device} ({hardware.name}{f', {cores} cores' if device.type == 'cpu' else ''}), torch {torch.__version__}"
    )
    if precision.fell_back:
        console.warn(precision.reason)
    if precision.uses_amp:
        console.say(f"Mixed Precision Training: {precision.format}")
        console.say(f"✓ AMP enabled with {precision.format}: {precision.reason}")
        if device.type == "cpu" and not cpu_computes_bfloat16():
            console.warn("this CPU has no bfloat16 instructions: it works, several times slower than use_amp=false")
    else:
        tf32 = " with TF32 matrix products" if device.type == "cuda" and config.allow_tf32 else ""
        console.say(f"Mixed Precision Training: off, float32{tf32} ({precision.reason})")
        if device.type == "cuda" and not config.use_amp and (hardware.has_bfloat16 or hardware.has_float16):
            console.say("  use_amp=true trains faster in about half the memory")
    amp_dtype = precision.format if precision.format != "float32" else config.amp_dtype
    config = dataclasses.replace(config, use_amp=precision.uses_amp, amp_dtype=amp_dtype)
    return config, Numerics(device, precision, config.channels_last)


def build_data(config: Config, console: Console, device: torch.device, run_dir: Path | None = None) -> tuple[Config, Data]:
    """Finds, reads and checks every pair; the config comes back with what was chosen. A run that goes on keeps its split."""
    check_encoder_name(config.encoder)  # before minutes are spent on reading
    data_dir = Path(config.data_dir)
    if data_dir == Path(DEMO_DIR) and ensure_demo(data_dir):
        console.say(f"Made the demo dataset in {data_dir}")
    earlier = None if run_dir is None else _earlier_split(config, run_dir, console)
    survey = build_survey(config, console, earlier)
    if survey.refusal:
        raise DataError(f"{survey.refusal}\nTo see all of it: python train_unet.py check data_dir={shlex.quote(config.data_dir)}")
    assert survey.coding is not None  # or there is a refusal
    assert survey.form is not None
    assert survey.split is not None
    coding, form, split = survey.coding, survey.form, survey.split
    config = dataclasses.replace(
        config,
        mask_values=coding.mask_values,
        ignore_value=coding.ignore_value,
        in_channels=form.channels,
        image_mean=form.mean,
        image_std=form.std,
    )
    train_framing, val_framing = _build_framings(config, survey)
    _tell_data(config, survey, train_framing, console)
    if len(train_framing) < config.batch_size:
        most = len(train_framing)
        raise UserError(f"batch_size: {config.batch_size} is more than the {most} training images; need at most {most}")
    augmentation = build_augmentation(config.augmentation, image_shape(config), form)
    num_workers = choose_num_workers(config.num_workers, count_cores(), device.type == "cpu")
    train_dataset = SegmentationDataset(split.train, coding, form, train_framing, augmentation, config.seed, config.resize_masks)
    val_dataset = SegmentationDataset(split.val, coding, form, val_framing, None, config.seed, config.resize_masks)
    if config.cache != "none":
        _fill_caches(config, survey, (train_dataset, val_dataset), console)
    if config.num_workers == "auto":
        who = f"{counted(num_workers, 'worker')} beside the training process" if num_workers else "the training process alone"
        console.fact("Loader", f"{who} (num_workers: auto, {counted(count_cores(), 'core')})")
    crew = Crew(num_workers, device) if num_workers else None
    build_loader = partial(Loader, crew=crew, timeout=config.worker_timeout)
    data = Data(
        split,
        form,
        build_loader(train_dataset, config.batch_size, shuffle=True),
        build_loader(val_dataset, _eval_batch_size(config, device), shuffle=False),
        val_dataset,
        crew,
    )
    return _weigh_classes(config, survey, console), data


def _eval_batch_size(config: Config, device: torch.device) -> int:
    """Without gradients twice the images take less memory than a training batch does."""
    return config.batch_size * (2 if device.type == "cuda" else 1)


def _fill_caches(config: Config, survey: Survey, datasets: Sequence[SegmentationDataset], console: Console) -> None:
    """Decodes every pair into memory or into a file; what there is no room for is read from its files as before."""
    assert config.cache != "none"
    num_cached = num_bytes = 0
    for dataset in datasets:
        form, framing = dataset.form, dataset.framing
        facts, _ = survey.facts_of(dataset.pairs)
        sizes = [framing.size if isinstance(framing, Resized) else image.size for image in facts]
        stamp = [dataset.coding, form.channels, form.is_8bit, type(framing).__name__, framing.size, config.resize_masks]
        files = [path for pair in dataset.pairs for path in (pair.image, pair.mask)]
        stamp += [(str(file.absolute()), file_stamp(file)) for file in files]
        with console.bar("Decoding every pair once:", len(sizes), keep=False) as bar:
            dataset.cache = fill_cache(
                [(*size, form.channels) for size in sizes],
                1 if form.is_8bit else 4,
                dataset.decode,
                config.cache,
                Path(config.checkpoint_dir) / ".cache",
                stamp,
                count_cores(),
                bar.tick,
            )
        num_cached += len(dataset.cache)
        num_bytes += dataset.cache.content.numel()
    num_pairs = sum(len(dataset.pairs) for dataset in datasets)
    where = "memory" if config.cache == "ram" else f"{Path(config.checkpoint_dir) / '.cache'}"
    console.fact("Cache", f"{num_cached} of {num_pairs} pairs in {where}, {num_bytes / 2**30:.2f} GiB")
    if num_cached < num_pairs:
        console.warn(f"there is no room for {counted(num_pairs - num_cached, 'pair')}; these are read from files in every epoch")


def _earlier_split(config: Config, run_dir: Path, console: Console) -> Found | None:
    """The split that the run began with, from its split.csv; files that came since are left out."""
    table = run_dir / SPLIT_TABLE
    if not table.is_file():
        return None
    try:
        earlier = read_table(table, Path(config.data_dir))
    except DataError as error:
        raise DataError(f"the run cannot go on with the images it began with; put them back, or start a new run\n{error}") from None
    try:
        now = find_dataset(config)
    except DataError:
        return earlier  # what came since may not pair up yet
    known = {pair.image for pair in earlier.pairs}
    added = [pair for pair in now.pairs if pair.image not in known]
    if added:
        console.note(
            f"not in {table}, which the run began with, and left out: {counted(len(added), 'pair')}, e.g. {added[0].image}"
        )
    return dataclasses.replace(earlier, rule=f"as the run began, {table}")


def _build_framings(config: Config, survey: Survey) -> tuple[Framing, Framing]:
    """How samples are cut for training and for validation."""
    assert survey.split is not None
    assert survey.coding is not None
    size = image_shape(config)
    if config.fit == "resize":
        return Resized(size, len(survey.split.train)), Resized(size, len(survey.split.val))
    images, masks = survey.facts_of(survey.split.train)
    val_images, _ = survey.facts_of(survey.split.val)
    shares = class_shares(masks, survey.coding, max(2, config.num_classes))
    common = int(np.argmax(shares))
    rare_ids = [[class_id for class_id in class_ids(mask, survey.coding) if class_id not in (common, IGNORED)] for mask in masks]
    sizes = [image.size for image in images]
    per_image = choose_crops_per_image(sizes, size) if config.crops_per_image == "auto" else config.crops_per_image
    crops = RandomCrops(size, len(sizes), per_image, rare_ids, config.rare_class_crops, config.seed)
    return crops, cover([image.size for image in val_images], size)


def _weigh_classes(config: Config, survey: Survey, console: Console) -> Config:
    """class_weights: auto → the numbers, so that config.yaml and a resumed run have the same."""
    if config.class_weights != "auto":
        return config
    assert survey.coding is not None
    shares = class_shares(survey.masks, survey.coding, max(2, config.num_classes))
    weights = balanced_weights(shares)
    if config.num_classes == 1:
        weights = (round(min(weights[1] / weights[0], MAX_WEIGHT), 4),)  # foreground against background
    console.fact("Weights", ", ".join(f"{name} {weight:g}" for name, weight in zip(class_names(config), weights, strict=True)))
    return dataclasses.replace(config, class_weights=weights)


def _tell_data(config: Config, survey: Survey, train_framing: Framing, console: Console) -> None:
    assert survey.split is not None
    assert survey.kind is not None
    split, (height, width) = survey.split, image_shape(config)
    console.fact("Data", f"{config.data_dir}: {len(split.train)} train, {len(split.val)} val ({split.rule})")
    how = f"→ {width}×{height}"
    if isinstance(train_framing, RandomCrops):
        how = f"→ {train_framing.per_image} crops of {width}×{height} each in training, windows at native resolution in validation"
    numbers = (
        f"normalised with mean {_numbers(config.image_mean)}, std {_numbers(config.image_std)} ({survey.form_reason})"
        if survey.form_reason != "ImageNet's, for 8-bit RGB"
        else "normalised with ImageNet's statistics"
    )
    console.fact("Images", f"{show_kind(survey.kind)}; {show_sizes(survey.images)} {how}; {numbers}")
    console.fact("Masks", describe_classes(config, survey))
    for notice in survey.notices:
        console.note(notice)
    idle = [name for name in ("crops_per_image", "rare_class_crops") if getattr(config, name) != FIELDS[name].default]
    if config.fit == "resize" and idle:
        console.note(f"{' and '.join(idle)} {'is' if len(idle) == 1 else 'are'} for fit: crop; with fit: resize there are no crops")
    absent = absent_classes(config, survey)
    if absent:
        console.warn(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")


def _numbers(values: Sequence[float] | str) -> str:
    shown = ", ".join(f"{value:g}" for value in values[:4] if not isinstance(value, str))
    return shown + (", …" if len(values) > 4 else "")


def build_machine(
    config: Config, numerics: Numerics, form: ImageForm, num_batches: int, console: Console, resumes: bool = False
) -> Machine:
    """Model, loss, optimizer and the two steps, all from the seed. A run that resumes has its weights and fetches none."""
    if config.encoder_weights == "imagenet" and not resumes:
        console.say(f"Fetching imagenet weights for {config.encoder} (once; kept in the download cache)")
    torch.manual_seed(config.seed)
    device = numerics.device
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = (
        build_model(dataclasses.replace(config, encoder_weights=None) if resumes else config).to(device).to(memory_format=layout)
    )
    assert config.class_weights != "auto"  # decided with the data
    loss = WeightedLoss(config.loss, config.num_classes, config.class_weights).to(device)
    ema = None if config.ema_decay is None else Ema(model, config.ema_decay)
    optimizer = build_optimizer(config, model)
    scaler = build_scaler(config, numerics.precision, device)
    learning_rate = build_learning_rate(config, -(-num_batches // config.accumulation_steps))
    progress = Progress(higher_is_better=config.monitor != "val_loss", min_delta=config.early_stopping_min_delta)
    eval_model = model if ema is None else ema.model
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    weights = "weights of the checkpoint" if resumes else config.encoder_weights or "random weights"
    console.fact("Model", f"{config.architecture}, {config.encoder}, {num_parameters / 1e6:.1f} M parameters, {weights}")
    effective = f"{config.batch_size} × {config.accumulation_steps} = {config.batch_size * config.accumulation_steps} effective"
    console.fact("Batch", f"{effective}, {counted(num_batches, 'batch', 'batches')} an epoch")
    max_bad_steps = 1 if config.on_nan == "stop" else MAX_BAD_STEPS
    return Machine(
        state=TrainState(model, optimizer, scaler, learning_rate, progress, ema, Totals(config.num_classes, device)),
        train_step=TrainStep(
            build_forward(model, loss, numerics, form),
            model,
            optimizer,
            scaler,
            device,
            config.grad_clip,
            ema,
            config.batch_parts,
            max_bad_steps,
        ),
        eval_step=EvalStep(build_forward(eval_model, loss, numerics, form), eval_model, device, config.batch_parts),
        loss=loss,
        numerics=numerics,
        num_classes=config.num_classes,
        accumulation_steps=config.accumulation_steps,
        freeze_encoder_epochs=config.freeze_encoder_epochs,
        form=form,
    )


def try_machine(config: Config, machine: Machine) -> Config:
    """One step forward and back on a made-up batch: what the model cannot run is told before the run has a folder."""
    totals = Totals(config.num_classes, machine.numerics.device)
    try:
        with leaving_no_trace(machine.train_step):
            batch, eval_batch = _made_up_batches(config, machine)
            try_steps(machine.train_step, machine.eval_step, batch, totals, machine.phases(), eval_batch)
    except (ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        settings = ", ".join(f"{name}: {getattr(config, name)}" for name in ("architecture", "encoder", "batch_size", "image_size"))
        raise UserError(f"the model cannot run with {settings}: {one_line(error)[:300]}") from None
    return config


def compile_machine(config: Config, machine: Machine, console: Console) -> Config:
    """Compiles the steps of every phase before the first epoch; where that fails, says so and leaves them as they are."""
    if machine.numerics.device.type == "cuda":
        for model in (machine.state.model, machine.eval_step.model):
            use_fast_layers(model)
    batch, eval_batch = _made_up_batches(config, machine)
    failure = compile_steps(machine.train_step, machine.eval_step, batch, config.num_classes, machine.phases(), eval_batch)
    if failure is None:
        return config
    console.warn(f"compile_model: compiling failed, training goes on uncompiled ({failure})")
    return dataclasses.replace(config, compile_model=False)


def build_step(config: Config, console: Console) -> tuple[Machine, Batch]:
    """The step of a config without its data, on made-up RGB images, to be timed."""
    config, numerics = build_numerics(dataclasses.replace(config, in_channels=3, class_weights=None), console)
    machine = build_machine(config, numerics, RGB, 1, console)
    if config.compile_model:
        console.say("Compiling the step ...")
        compile_machine(config, machine, console)
    return machine, _made_up_batch(config, RGB, config.batch_size)


def _made_up_batches(config: Config, machine: Machine) -> tuple[Batch, Batch]:
    """One of training's size and one of evaluation's."""
    sizes = config.batch_size, _eval_batch_size(config, machine.numerics.device)
    return _made_up_batch(config, machine.form, sizes[0]), _made_up_batch(config, machine.form, sizes[1])


def _made_up_batch(config: Config, form: ImageForm, batch_size: int) -> Batch:
    height, width = image_shape(config)
    shape = (batch_size, height, width, form.channels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if not form.is_8bit:
        images = images / 255 * (form.high - form.low) + form.low
    return Batch(images, torch.zeros(batch_size, height, width, dtype=torch.uint8), batch_size)
