"""Turns a Config into the parts of a run: device, data, model, steps. Says what it chose for the user, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from unet_trainer.augment import build_augmentation
from unet_trainer.checkpoint import TrainState
from unet_trainer.config import DEMO_DIR, Config, UserError
from unet_trainer.console import Console
from unet_trainer.dataset import Batch, Loader, SegmentationDataset, choose_num_workers, count_cores
from unet_trainer.demo import ensure_demo
from unet_trainer.guard import MAX_BAD_STEPS
from unet_trainer.images import DataError, Pixels
from unet_trainer.losses import WeightedLoss
from unet_trainer.masks import MaskCoding, build_coding
from unet_trainer.memory import is_out_of_memory, one_line, shrink
from unet_trainer.model import Ema, build_model, set_training
from unet_trainer.pairs import Split, build_split
from unet_trainer.pictures import sample_sheet
from unet_trainer.precision import (
    build_scaler,
    choose_device,
    choose_precision,
    cpu_computes_bfloat16,
    inspect_hardware,
    set_backends,
)
from unet_trainer.progress import Progress
from unet_trainer.scan import MAX_WEIGHT, Scan, balanced_weights, class_shares, refuse_misfits, scan_pairs, where_values_are
from unet_trainer.schedule import build_learning_rate, build_optimizer
from unet_trainer.step import (
    EvalStep,
    Numerics,
    Totals,
    TrainStep,
    build_forward,
    compile_steps,
    leaving_no_trace,
    predict,
    try_steps,
)

NUM_SAMPLES = 4  # validation images shown in samples/


@dataclass(frozen=True)
class Data:
    """The pairs of a run and the loaders over them."""

    split: Split
    train: Loader
    val: Loader
    val_dataset: SegmentationDataset

    def sample_batch(self) -> tuple[list[Pixels], list[Pixels]]:
        """A few validation pairs, spread over the set; the same in every epoch."""
        indices = np.unique(np.linspace(0, len(self.val_dataset) - 1, NUM_SAMPLES).round().astype(int))
        pairs = [self.val_dataset[0, int(index)] for index in indices]
        return [image for image, _ in pairs], [mask for _, mask in pairs]


@dataclass(frozen=True)
class Machine:
    """The parts that learn."""

    state: TrainState
    train_step: TrainStep
    eval_step: EvalStep
    loss: WeightedLoss
    numerics: Numerics
    num_classes: int
    accumulation_steps: int
    freeze_encoder_epochs: int

    def set_training(self, epoch: int) -> None:
        """Training mode for the epoch (counted from 0)."""
        set_training(self.state.model, encoder_frozen=epoch < self.freeze_encoder_epochs)

    def phases(self) -> list[Callable[[], None]]:
        """What puts the model into each mode that it will train in from here on: the encoder frozen, and not."""
        epochs = [self.state.epoch] + ([self.freeze_encoder_epochs] if self.state.epoch < self.freeze_encoder_epochs else [])
        return [partial(self.set_training, epoch) for epoch in epochs]

    def split_batches(self, num_parts: int) -> None:
        """From here on a batch goes through the model in so many pieces."""
        self.train_step.num_parts = self.eval_step.num_parts = num_parts

    def shrink(self, config: Config, reason: str, console: Console, kept: str) -> Config:
        """After memory ran out: smaller parts, or the end."""
        return shrink(config, reason, self.numerics.device, self.split_batches, console, kept)

    def fit_into_memory(self, config: Config, attempt: Callable[[Config], Config], console: Console, kept: str) -> Config:
        """Tries what the run will do, in smaller parts where memory runs out and on_oom allows it."""
        while True:
            try:
                return attempt(config)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = one_line(error)
            config = self.shrink(config, reason, console, kept)  # not in the handler, where the error still holds memory

    def draw_samples(self, data: Data) -> Pixels:
        images, truths = data.sample_batch()
        ids = predict(self.eval_step.model, torch.from_numpy(np.stack(images)), self.numerics).to("cpu", torch.uint8).numpy()
        return sample_sheet(images, truths, list(ids))


def build_numerics(config: Config, console: Console) -> tuple[Config, Numerics]:
    """Device and precision as the hardware allows; the config comes back with what was chosen."""
    device = choose_device(config.device)
    set_backends(config.allow_tf32, config.deterministic, search_kernels=config.compile_model)
    hardware = inspect_hardware(device)
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


def build_data(config: Config, console: Console, device: torch.device) -> tuple[Config, Data]:
    """Finds, reads and checks every pair; the config comes back with the mask values that were chosen."""
    data_dir = Path(config.data_dir)
    if data_dir == Path(DEMO_DIR) and ensure_demo(data_dir):
        console.say(f"Made the demo dataset in {data_dir}")
    split = build_split(config)
    pairs = (*split.train, *split.val)
    with console.bar("Reading every pair once:", len(pairs), keep=False) as bar:
        scan = scan_pairs(pairs, count_cores(), bar.tick)
    try:
        coding = build_coding(config.mask_values, config.num_classes, config.ignore_value, scan.counts)
    except DataError as error:
        raise DataError(f"{error}\n  {where_values_are(pairs, scan)}") from None
    refuse_misfits(pairs, scan, coding)
    size = image_shape(config)
    _tell_data(config, split, scan, coding, size, console)
    if len(split.train) < config.batch_size:
        raise UserError(
            f"batch_size: {config.batch_size} is more than the {len(split.train)} training images; need at most {len(split.train)}"
        )
    augmentation = build_augmentation(config.augmentation, size)
    num_workers = choose_num_workers(config.num_workers, count_cores(), device.type == "cpu")
    pin_memory = device.type == "cuda"
    train_dataset = SegmentationDataset(split.train, coding, size, augmentation, config.seed)
    val_dataset = SegmentationDataset(split.val, coding, size, None, config.seed)
    data = Data(
        split,
        Loader(train_dataset, config.batch_size, num_workers, shuffle=True, pin_memory=pin_memory, timeout=config.worker_timeout),
        Loader(val_dataset, config.batch_size, num_workers, shuffle=False, pin_memory=pin_memory, timeout=config.worker_timeout),
        val_dataset,
    )
    config = dataclasses.replace(config, mask_values=coding.mask_values, ignore_value=coding.ignore_value)
    return _weigh_classes(config, scan, coding, console), data


def _weigh_classes(config: Config, scan: Scan, coding: MaskCoding, console: Console) -> Config:
    """class_weights: auto → the numbers, so that config.yaml and a resumed run have the same."""
    if config.class_weights != "auto":
        return config
    shares = class_shares(scan, coding, max(2, config.num_classes))
    weights = balanced_weights(shares)
    if config.num_classes == 1:
        weights = (round(min(weights[1] / weights[0], MAX_WEIGHT), 4),)  # foreground against background
    console.fact("Weights", ", ".join(f"{name} {weight:g}" for name, weight in zip(class_names(config), weights, strict=True)))
    return dataclasses.replace(config, class_weights=weights)


def _tell_data(config: Config, split: Split, scan: Scan, coding: MaskCoding, size: tuple[int, int], console: Console) -> None:
    sizes = ", ".join(f"{width}×{height}" for (height, width), _ in scan.sizes.most_common(3)) + (
        ", …" if len(scan.sizes) > 3 else ""
    )
    console.fact(
        "Data", f"{config.data_dir}: {len(split.train)} train, {len(split.val)} val ({split.rule}); {sizes} → {size[1]}×{size[0]}"
    )
    names = class_names(config)
    shown = ["background", *names] if config.num_classes == 1 else names
    shares = class_shares(scan, coding, len(shown))
    table = [
        f"{coding.describe(index)} → {name} {share:.1%}" for index, (name, share) in enumerate(zip(shown, shares, strict=True))
    ]
    why = f" ({coding.reason})" if config.mask_values == "auto" else ""
    console.fact("Masks", ", ".join(table[:8]) + (", …" if len(table) > 8 else "") + f" of pixels{why}")
    absent = [name for name, share in zip(shown, shares, strict=True) if share == 0]
    if absent:
        console.warn(f"no pixel of {', '.join(absent)} in any mask; is num_classes or mask_values right?")


def image_shape(config: Config) -> tuple[int, int]:
    """Height and width of a batch."""
    return config.image_size if isinstance(config.image_size, tuple) else (config.image_size, config.image_size)


def class_names(config: Config) -> list[str]:
    """A name for each class that is reported."""
    if config.class_names is not None:
        return list(config.class_names)
    return ["foreground"] if config.num_classes == 1 else [f"class {index}" for index in range(config.num_classes)]


def build_machine(config: Config, numerics: Numerics, num_batches: int, console: Console, resumes: bool = False) -> Machine:
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
    effective = config.batch_size * config.accumulation_steps
    console.fact(
        "Batch", f"{config.batch_size} × {config.accumulation_steps} = {effective} effective, {num_batches} batches an epoch"
    )
    max_bad_steps = 1 if config.on_nan == "stop" else MAX_BAD_STEPS
    return Machine(
        state=TrainState(model, optimizer, scaler, learning_rate, progress, ema, Totals(config.num_classes, device)),
        train_step=TrainStep(
            build_forward(model, loss, numerics),
            model,
            optimizer,
            scaler,
            device,
            config.grad_clip,
            ema,
            config.batch_parts,
            max_bad_steps,
        ),
        eval_step=EvalStep(build_forward(eval_model, loss, numerics), eval_model, device, config.batch_parts),
        loss=loss,
        numerics=numerics,
        num_classes=config.num_classes,
        accumulation_steps=config.accumulation_steps,
        freeze_encoder_epochs=config.freeze_encoder_epochs,
    )


def try_machine(config: Config, machine: Machine) -> Config:
    """One step forward and back on a made-up batch: what the model cannot run is told before the run has a folder."""
    totals = Totals(config.num_classes, machine.numerics.device)
    try:
        with leaving_no_trace(machine.train_step):
            try_steps(machine.train_step, machine.eval_step, _made_up_batch(config), totals, machine.phases())
    except (ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        settings = ", ".join(f"{name}: {getattr(config, name)}" for name in ("architecture", "encoder", "batch_size", "image_size"))
        raise UserError(f"the model cannot run with {settings}: {reason.strip()[:300]}") from None
    return config


def compile_machine(config: Config, machine: Machine, console: Console) -> Config:
    """Compiles the steps of every phase before the first epoch; where that fails, says so and leaves them as they are."""
    batch = _made_up_batch(config)
    failure = compile_steps(machine.train_step, machine.eval_step, batch, config.num_classes, machine.phases())
    if failure is None:
        return config
    console.warn(f"compile_model: compiling failed, training goes on uncompiled ({failure})")
    return dataclasses.replace(config, compile_model=False)


def _made_up_batch(config: Config) -> Batch:
    height, width = image_shape(config)
    images = torch.randint(
        0, 256, (config.batch_size, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return Batch(images, torch.zeros(config.batch_size, height, width, dtype=torch.uint8), config.batch_size)
