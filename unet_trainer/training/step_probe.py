"""Measures the time and memory of a config's step before the run has a network: the real model, loss and optimizer
take a few steps on random images, and are gone.

What was measured is kept in a file for a day, since the same step is asked for again by the next run.
"""

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig
from unet_trainer.config.schema import OWN, as_dict
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.precision import choose_device, set_backends
from unet_trainer.model.random_state import unchanged
from unet_trainer.model.segmenter import build_spec
from unet_trainer.system.console import cause_line, silent_console
from unet_trainer.system.json_cache import from_plain, read_cache, write_cache
from unet_trainer.training.build import Components, build_components
from unet_trainer.training.compilation import compile_steps, is_out_of_memory, random_batches, release_device_memory
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.state import EpochMetrics

MAX_AGE_SECONDS = 86_400.0  # of a cost that is kept: the machine may have been busy when it was measured
SHORT_SECONDS = 10.0  # for all trials: with fewer, each takes QUICK_SECONDS
MIN_SECONDS, MIN_STEPS, MAX_STEPS = 1.0, 2, 40  # of the timed steps
QUICK_SECONDS = 0.2
SLOW_SECONDS = 2.0  # the first step counts where it takes so long: what it does once takes less
# The settings that the cost of a step depends on.
COST_KEYS = (
    "architecture", "encoder", "decoder_channels", "decoder_attention", "num_classes",
    "in_channels",
    "image_size", "batch_size", "batch_parts", "loss", "optimizer", "grad_clip", "use_amp", "amp_dtype",
    "compile_model",
    "channels_last", "allow_tf32", "deterministic", "normalize",
)  # fmt: skip


class StepProbe:
    """Calls with a config return the cost of its step, or None where the trial fails.

    `image_spec` has to be set before the first call; `console` may be, to tell of trials. `seconds`: that all of them
    may take."""

    image_spec: ImageSpec
    custom: CustomParts = NO_PARTS  # of the caller

    def __init__(self, hardware: HardwareFacts, cache: Path | None = None, seconds: float = math.inf) -> None:
        self.hardware = hardware
        self.cache = cache
        self.seconds_left = seconds
        self.failure = ""  # of the last trial
        self.console, self._was_told = silent_console(), False
        self._known = _read_costs(cache)

    def __call__(self, config: ResolvedConfig) -> StepCost | None:
        """The cost; TOO_LARGE where memory does not hold the step."""
        key = self._key(config)
        if key in self._known:
            return self._known[key][1]
        started, earlier = time.monotonic(), self.failure
        cost = self._measure(config)
        self.seconds_left -= time.monotonic() - started
        if cost is None and self.failure != earlier:
            self.console.note(f"the step could not be tried ({self.failure}); the plan is a guess")
        if cost is not None and cost.is_possible and not _is_own(config):  # of which another run has another
            self._known[key] = time.time(), cost
            write_cache(self.cache, {key: (since, asdict(cost)) for key, (since, cost) in self._known.items()})
        return cost

    def _measure(self, config: ResolvedConfig) -> StepCost | None:
        self.failure = ""
        if self.seconds_left <= 0:
            self.failure = "time_budget is too short for one more trial"
            return None
        if not self._was_told:
            self._was_told = True
            self.console.say("Trying the step, to choose its size and plan the run ...")
        seconds = MIN_SECONDS if self.seconds_left >= SHORT_SECONDS else QUICK_SECONDS
        cost = None
        try:
            with unchanged():
                cost = measure_step(config, self.image_spec, seconds, self.custom)
        except Exception as error:  # out of memory above all; whatever it is, the run goes on without the figure
            self.failure = f"{type(error).__name__}: {cause_line(error)}"[:300]
            cost = TOO_LARGE if is_out_of_memory(error) else None
        release_device_memory(choose_device(config.device), config.compile_model)  # the error held the step's memory
        return cost

    def knows(self, config: ResolvedConfig) -> bool:
        """Whether the cost is known from an earlier trial."""
        return self._key(config) in self._known

    def _key(self, config: ResolvedConfig) -> str:
        settings = {name: value for name, value in as_dict(config).items() if name in COST_KEYS}
        settings["averages"] = config.ema_decay is not None
        machine = [
            self.hardware.name,
            self.hardware.num_cores,
            self.hardware.device,
            torch.__version__,
            self.image_spec.is_8bit,
        ]
        return hashlib.sha256(json.dumps([settings, machine], sort_keys=True).encode()).hexdigest()[:24]


def _read_costs(path: Path | None) -> dict[str, tuple[float, StepCost]]:
    """By key, when each cost was measured, and the cost."""
    known = {}
    with contextlib.suppress(ValueError, TypeError):
        for key, (measured_at, content) in read_cache(path).items():
            cost = from_plain(StepCost, content)
            is_cost = cost.seconds > 0 and all(number >= 0 for number in asdict(cost).values())
            if is_cost and 0 <= time.time() - measured_at <= MAX_AGE_SECONDS:
                known[key] = measured_at, cost
    return known


def _is_own(config: ResolvedConfig) -> bool:
    """Whether its loss or network is the caller's."""
    return OWN in (config.architecture, *config.loss)


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
    """Seconds of a call, from calls that take so many in all."""

    def time_calls(least: int, most: int, seconds: float) -> float:
        started, num_calls = time.perf_counter(), 0
        while num_calls < most and (num_calls < least or time.perf_counter() - started < seconds):
            call()
            num_calls += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - started) / num_calls

    first = time_calls(warm_up, warm_up, 0.0)
    return first if first > SLOW_SECONDS else time_calls(MIN_STEPS, MAX_STEPS, seconds)
