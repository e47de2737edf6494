"""python train_unet.py bench --step: times the training step alone, on a batch that is on the device. No loader can be faster."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from unet_trainer.config.choices import REFERENCE_BATCH
from unet_trainer.config.facts import DatasetFacts
from unet_trainer.config.parsers import implied_num_classes
from unet_trainer.config.resolve import resolve
from unet_trainer.config.schema import Config, as_shape
from unet_trainer.datasets.scan import IMAGENET_REASON
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.network import check_encoder_name
from unet_trainer.model.precision import set_backends
from unet_trainer.model.segmenter import build_spec
from unet_trainer.system.console import Console, first_line
from unet_trainer.training.build import Components, build_components_with_weights
from unet_trainer.training.compilation import (
    compile_components,
    is_out_of_memory,
    out_of_memory_message,
    peak_memory_gib,
    random_batches,
)
from unet_trainer.training.errors import TrainingFailed
from unet_trainer.training.settings import build_hardware, say_precision
from unet_trainer.training.state import EpochMetrics

NO_DATA_SIZE = (512, 512)  # of images, where the config leaves it to the data
NUM_ROUNDS = 5
ROUND_SECONDS = 0.3
NUM_WARM_UP = 10  # on a GPU: kernels are searched, memory is allocated, CUDA graphs are recorded


def build_step(config: Config, console: Console) -> tuple[Components, Batch]:
    """The step of a config without its data, on random RGB images, to be timed."""
    if config.encoder != "auto":
        check_encoder_name(config.encoder)
    hardware = build_hardware(config, console)
    size = NO_DATA_SIZE if config.image_size == "auto" else as_shape(config.image_size)
    num_classes = implied_num_classes(config.class_names, config.class_weights, config.mask_values) or 1
    facts = DatasetFacts(3, RGB_8BIT.mean, RGB_8BIT.std, IMAGENET_REASON, "auto", None, "", (1.0,), [size], num_classes=num_classes)
    batch_size = REFERENCE_BATCH if config.batch_size == "auto" else config.batch_size
    compiles = hardware.kind == "cuda" if config.compile_model == "auto" else config.compile_model
    weights = None if config.encoder_weights == "auto" else config.encoder_weights
    step: dict[str, Any] = {"image_size": size, "batch_size": batch_size, "compile_model": compiles, "encoder_weights": weights}
    data: dict[str, Any] = {"in_channels": 3, "class_weights": None, "num_epochs": 1, "time_budget": None}
    settings = resolve(dataclasses.replace(config, **step, **data), hardware, facts)
    set_backends(config.allow_tf32, config.deterministic, search_kernels=settings.taken.compile_model)
    say_precision(settings, hardware, console)
    spec = build_spec(settings.taken, RGB_8BIT, MaskCoding(tuple(range(max(2, settings.taken.num_classes)))))
    components = build_components_with_weights(settings, spec, torch.device(hardware.device), 1, console)
    if settings.taken.compile_model:
        console.say("Compiling the step ...")
        compile_components(settings, components, None, console, "nothing was begun")
    return components, random_batches(settings.taken, components, None)[0]


def time_step(components: Components, batch: Batch, console: Console) -> None:
    """Times forward, loss, IoU counts, backward, the check for finite numbers and the optimizer; prints images per second."""
    device, step = components.numerics.device, components.train_step
    batch = batch._replace(images=batch.images.to(device), masks=batch.masks.to(device))
    components.set_training_mode(0)
    metrics = EpochMetrics(components.state.segmenter.spec.num_classes, device)

    def take_steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step.begin_group(1, 0)
            step(batch, metrics)
            step.optimizer_step(metrics, learning_rate=1e-4)
        metrics.loss()  # waits for the device
        return (time.perf_counter() - started) / count

    on_gpu = device.type == "cuda"
    try:
        times = rounds(take_steps, NUM_WARM_UP if on_gpu else 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingFailed(f"{out_of_memory_message(first_line(error), device)}. Try a smaller batch_size") from None
    seconds, size = median(times), batch.num_images
    spread = f"{size / max(times):.0f} to {size / min(times):.0f} in {NUM_ROUNDS} rounds"
    memory = f", {peak_memory_gib(device)[0]:.2f} GiB at the peak" if on_gpu else ""
    console.say(f"The step alone: {size / seconds:.0f} images/s at batch {size} ({1000 * seconds:.2f} ms; {spread}){memory}")


def rounds(take_steps: Callable[[int], float], num_warm_up: int) -> list[float]:
    """Seconds of a step in each of NUM_ROUNDS rounds of about ROUND_SECONDS."""
    take_steps(num_warm_up)
    count = max(1, round(ROUND_SECONDS / take_steps(1)))
    return [take_steps(count) for _ in range(NUM_ROUNDS)]
