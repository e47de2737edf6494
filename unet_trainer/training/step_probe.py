"""Measures the time and memory of a config's step before the run has a network: the real model, loss and optimizer
take a few steps on random images, and are gone."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from unet_trainer.config.facts import TOO_LARGE, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.precision import choose_device, set_backends
from unet_trainer.model.random_state import unchanged
from unet_trainer.model.segmenter import build_spec
from unet_trainer.system.console import Console, cause_line, silent_console
from unet_trainer.training.build import Components, build_components
from unet_trainer.training.compilation import compile_steps, is_out_of_memory, random_batches, release_device_memory
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.state import EpochMetrics

SHORT_SECONDS = 10.0  # for all trials: with fewer, each takes QUICK_SECONDS
MIN_SECONDS, MIN_STEPS, MAX_STEPS = 1.0, 2, 40  # of the timed steps
QUICK_SECONDS = 0.2
SLOW_SECONDS = 2.0  # the first step counts where it takes so long: what it does once takes less


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
        self.failure, cost = "", None
        seconds = MIN_SECONDS if self.seconds_left >= SHORT_SECONDS else QUICK_SECONDS
        try:
            with unchanged():
                return measure_step(config, self.image_spec, seconds, self.custom)
        except Exception as error:  # out of memory above all; whatever it is, the run goes on without the figure
            self.failure = f"{type(error).__name__}: {cause_line(error)}"[:300]
            cost = TOO_LARGE if is_out_of_memory(error) else None
        finally:
            release_device_memory(choose_device(config.device), config.compile_model)
        return cost


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
        failure, _ = compile_steps(components, batch, eval_batch)
        if failure is not None:
            raise RuntimeError(failure)
    return time_steps(components, batch, eval_batch, seconds)


def time_steps(components: Components, batch: Batch, eval_batch: Batch, seconds: float) -> StepCost:
    """Takes steps of training, at a rate of 0, and of validation; in a job by itself. Changes the state."""
    step, device = components.train_step, components.numerics.device
    components.set_training_mode(max(components.state.epoch, components.freeze_encoder_epochs))  # eval mode recompiles
    metrics, eval_metrics = EpochMetrics(step.segmenter.spec.num_classes, device), components.eval_step.new_metrics()

    def train() -> None:
        step.begin_group(1, 0)
        step(batch, metrics)
        step.optimizer_step(metrics, learning_rate=0.0)

    step.is_trial = True
    try:
        step_seconds = _time(train, device, seconds, warm_up=3 if device.type == "cuda" else 1)
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
