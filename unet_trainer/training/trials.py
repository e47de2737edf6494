"""Steps that are tried before a run: whether the model can run, whether memory holds its batches, how long a step
takes. The real model, loss and optimizer take them, on random images; nothing of them stays."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from unet_trainer.config.errors import UserError
from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import OWN
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.images.tiling import Size
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.precision import choose_device, set_backends
from unet_trainer.model.random_state import unchanged
from unet_trainer.model.segmenter import build_spec
from unet_trainer.system.console import Console, cause_line, first_line, silent_console
from unet_trainer.training.build import Components, Loaders, build_components, eval_batch_size
from unet_trainer.training.compilation import compile_steps
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.memory import (
    OutOfMemory,
    fit_into_memory,
    is_out_of_memory,
    release_device_memory,
    unless_out_of_memory,
)
from unet_trainer.training.parallel import ALONE, GradientSync, Job
from unet_trainer.training.state import EpochMetrics
from unet_trainer.training.step import Group

SHORT_SECONDS = 10.0  # for all trials: with fewer, each takes QUICK_SECONDS
MIN_SECONDS, MIN_STEPS, MAX_STEPS = 1.0, 2, 40  # of the timed steps
QUICK_SECONDS = 0.2
MIN_EVAL_PIXELS = 2**26  # of a validation; for fewer, compiling it takes longer than it saves in a hundred
SLOW_SECONDS = 2.0  # the first step counts where it takes so long: what it does once takes less


def take_steps(components: Components, batch: Batch, eval_batch: Batch, num_times: int = 1) -> None:
    """The steps that the run will take: training with the encoder frozen, if it will be, and not; then evaluation. At a
    rate of 0, so that the optimizer's memory is tried too."""
    train_step, eval_step = components.train_step, components.eval_step
    metrics = EpochMetrics(train_step.segmenter.spec.num_classes, train_step.device)
    now, thawed = components.state.epoch, components.freeze_encoder_epochs
    for epoch in (now, thawed) if now < thawed else (now,):
        components.set_training_mode(epoch)
        for _ in range(num_times):
            train_step(Group([batch], 1, 0), 0.0, metrics)
    eval_metrics = eval_step.new_metrics()
    eval_step.segmenter.eval()
    for _ in range(num_times):
        eval_step(eval_batch, eval_metrics)
    metrics.loss()  # waits for the device


def random_batches(config: ResolvedConfig, components: Components, loaders: Loaders | None) -> tuple[Batch, Batch]:
    """One like the training batches and one like the largest evaluation batch; without loaders, masks have the images'
    size."""
    spec = components.state.segmenter.spec.image
    dataset = None if loaders is None else loaders.val.dataset
    train_batch = _random_batch(config.shape, spec, config.batch_size)
    eval_size = config.shape if dataset is None else dataset.tiling.size
    eval_batch = _random_batch(eval_size, spec, eval_batch_size(config, components.numerics.device, dataset))
    if dataset is not None and dataset.mask_sizes is not None:
        num_images, size = eval_batch.num_images, dataset.batch_mask_size
        masks = torch.zeros(num_images, *size, dtype=torch.uint8)
        eval_batch = eval_batch._replace(masks=masks, mask_sizes=(size,) * num_images)
    return train_batch, eval_batch


def _random_batch(size: Size, spec: ImageSpec, batch_size: int) -> Batch:
    shape = (batch_size, *size, spec.channels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if not spec.is_8bit:
        images = images / 255 * (spec.high - spec.low) + spec.low
    return Batch(images, torch.zeros(batch_size, *size, dtype=torch.uint8), batch_size)


def try_components(
    settings: Settings, components: Components, loaders: Loaders, console: Console, processes: Job = ALONE
) -> None:
    """A model that cannot run, or that memory cannot hold, is reported before the run has a folder. Raises UserError or
    TrainingFailed."""

    def try_once() -> None:
        config = settings.taken
        try:
            with components.restoring():
                take_steps(components, *random_batches(config, components, loaders))
        except (ValueError, RuntimeError) as error:
            # the traceback leads to the caller's code
            if is_out_of_memory(error) or OWN in (config.architecture, *config.loss):
                raise
            names = ("architecture", "encoder", "batch_size", "image_size")
            described = ", ".join(f"{name}: {getattr(config, name)}" for name in names)
            raise UserError(f"the model cannot run with {described}: {first_line(error)[:300]}") from None

    fit_into_memory(try_once, settings, components, console, "nothing was begun", processes)


def connect_gradients(
    settings: Settings, components: Components, loaders: Loaders | None, console: Console, saved: str, processes: Job
) -> None:
    """In a job: the gradients of the parameters that are trained from here on are averaged. All processes at once."""
    step = components.train_step
    step.connect(None)

    def take_step() -> None:
        batch, _ = random_batches(settings.taken, components, loaders)
        step(Group([batch], 1, 0), 0.0, EpochMetrics(step.segmenter.spec.num_classes, step.device))

    def try_once() -> None:
        spare = [torch.empty_like(weight) for weight in step.parameters for _ in range(2)]  # what averages will take
        take_step()
        del spare

    with components.restoring():
        fit_into_memory(try_once, settings, components, console, saved, processes)
        step.connect(GradientSync(processes, step, settings.taken.gradient_compression))
        with processes.exchange():
            for _ in range(2):
                take_step()


def compile_components(
    settings: Settings, components: Components, loaders: Loaders, console: Console, saved: str, processes: Job = ALONE
) -> None:
    """Compiles the steps of every phase before the first epoch. If that fails, in any process, warns and leaves them
    uncompiled in all: compiled and uncompiled steps round differently, and all processes must keep the same weights."""
    val = loaders.val.dataset
    with_eval = len(val) * math.prod(val.tiling.size) >= MIN_EVAL_PIXELS

    def compile_once() -> tuple[str | None, Callable[[], None]]:
        batches = random_batches(settings.taken, components, loaders)
        return compile_steps(components, lambda times: take_steps(components, *batches, times), with_eval)

    failure, undo = fit_into_memory(compile_once, settings, components, console, saved, processes)
    failures = [one for one in processes.all_gather(failure) if one is not None]
    if failures:
        if failure is None:
            undo()
        console.warn(f"compile_model: compiling failed, training continues uncompiled ({failures[0]})")
        settings.change(f"compiling failed ({failures[0]})", compile_model=False)


class StepProbe:
    """Config → cost of its step: TOO_LARGE where memory does not hold it, None where the trial fails. Configs differ
    in model and batch alone. `seconds`: that all trials may take."""

    def __init__(
        self, image_spec: ImageSpec, console: Console, seconds: float = math.inf, custom: CustomParts = NO_PARTS
    ) -> None:
        self.image_spec, self.console, self.custom = image_spec, console, custom
        self.seconds_left = seconds
        self.failure = ""  # of the last trial
        self._known: dict[tuple[Any, ...], StepCost | None] = {}

    def __call__(self, config: ResolvedConfig) -> StepCost | None:
        key = config.encoder, config.decoder_channels, config.batch_size, config.compile_model
        if key not in self._known:
            started, earlier = time.monotonic(), self.failure
            cost = self._known[key] = self._measure(config)
            self.seconds_left -= time.monotonic() - started
            if cost is None and self.failure != earlier:
                self.console.note(f"the step could not be tried ({self.failure}); the plan is a guess")
        return self._known[key]

    def _measure(self, config: ResolvedConfig) -> StepCost | None:
        if self.seconds_left <= 0:
            self.failure = "time_budget is too short for one more trial"
            return None
        if not self._known:
            self.console.say("Trying the step, to choose its size and plan the run ...")
        self.failure = ""
        seconds = MIN_SECONDS if self.seconds_left >= SHORT_SECONDS else QUICK_SECONDS
        try:
            with unchanged():
                found = unless_out_of_memory(lambda: measure_step(config, self.image_spec, seconds, self.custom))
            if isinstance(found, OutOfMemory):
                self.failure = found.reason
                return TOO_LARGE
            return found
        except Exception as error:  # whatever it is, the run goes on without the figure
            self.failure = f"{type(error).__name__}: {cause_line(error)}"[:300]
            return None
        finally:
            release_device_memory(choose_device(config.device), config.compile_model)


def measure_step(
    config: ResolvedConfig,
    image_spec: ImageSpec,
    seconds: float = MIN_SECONDS,
    custom: CustomParts = NO_PARTS,
    is_batch_on_device: bool = False,
) -> StepCost:
    """Takes steps of a config on random images; raises what they raise. `seconds`: of timed steps, about.
    `is_batch_on_device`: no step waits for a copy of its batch."""
    device = choose_device(config.device)
    set_backends(config.allow_tf32, config.deterministic)
    spec = build_spec(config, image_spec, MaskCoding(tuple(range(max(2, config.num_classes)))))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    components = build_components(config, spec, device, 1, silent_console(), resumes=True, custom=custom)
    batch, eval_batch = random_batches(config, components, None)
    if is_batch_on_device:
        batch = batch._replace(images=batch.images.to(device), masks=batch.masks.to(device))
    if config.compile_model:
        failure, _ = compile_steps(components, lambda times: take_steps(components, batch, eval_batch, times))
        if failure is not None:
            raise RuntimeError(failure)
    return time_steps(components, batch, eval_batch, seconds)


def time_steps(components: Components, batch: Batch, eval_batch: Batch, seconds: float) -> StepCost:
    """Takes steps of training, at a rate of 0, and of validation; in a job by itself. Changes the state."""
    step, device = components.train_step, components.numerics.device
    components.set_training_mode(max(components.state.epoch, components.freeze_encoder_epochs))  # eval mode recompiles
    metrics, eval_metrics = EpochMetrics(step.segmenter.spec.num_classes, device), components.eval_step.new_metrics()
    step.is_trial = True
    try:
        step_seconds = _time(
            lambda: step(Group([batch], 1, 0), 0.0, metrics), device, seconds, warm_up=3 if device.type == "cuda" else 1
        )
        components.eval_step.segmenter.eval()
        eval_seconds = _time(lambda: components.eval_step(eval_batch, eval_metrics), device, seconds, warm_up=1)
    finally:
        step.is_trial = False
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return StepCost(step_seconds, eval_seconds / len(eval_batch.images), memory)


def _time(call: Callable[[], object], device: torch.device, seconds: float, warm_up: int) -> float:
    """Seconds of a call, from calls that take so many in all; from the first ones where these take long."""
    mean = 0.0
    for least, most, limit in ((warm_up, warm_up, 0.0), (MIN_STEPS, MAX_STEPS, seconds)):
        if mean > SLOW_SECONDS:
            break
        started, num_calls = time.perf_counter(), 0
        while num_calls < most and (num_calls < least or time.perf_counter() - started < limit):
            call()
            num_calls += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        mean = (time.perf_counter() - started) / num_calls
    return mean
