"""Measures the time and memory of a config's step in a process of its own, so that running out of memory cannot hurt
the run.

The child builds the real model, loss and optimizer and takes a few steps on random images. What was measured is kept in
a file, since the same step is asked for again by the next run. Where there is no time for a child, or it does not
answer, this process takes the steps: a plan is never a guess.
"""

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

import unet_trainer
from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig, parsed
from unet_trainer.config.schema import OWN, as_dict
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.loading.dataset import Batch
from unet_trainer.model.precision import choose_device, set_backends
from unet_trainer.model.segmenter import build_spec
from unet_trainer.system.concurrency import ReadTimeout, call_with_timeout
from unet_trainer.system.console import cause_line, silent_console
from unet_trainer.system.json_cache import from_plain, read_cache, write_cache
from unet_trainer.system.signals import end_with_parent, ending_with_this_process
from unet_trainer.training.build import Components, build_components
from unet_trainer.training.compilation import compile_steps, is_out_of_memory, random_batches, release_device_memory
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.state import EpochMetrics

ANSWER_SECONDS = 120.0  # for one step to be measured; more with compiling
COMPILE_SECONDS = 420.0
MAX_AGE_SECONDS = 86_400.0  # of a cost that is kept: the machine may have been busy when it was measured
MIN_CHILD_SECONDS = 10.0  # for trials: with fewer, most of them would go into starting the child
MIN_SECONDS, MIN_STEPS, MAX_STEPS = 1.0, 2, 40  # of the timed steps
QUICK_SECONDS = 0.2  # of those in this process
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
    """Calls with a config return the cost of its step, or None where memory does not hold it or the trial fails.

    `image_spec` has to be set before the first call; `console` may be, to tell of trials. `seconds`: that all of them
    may take."""

    image_spec: ImageSpec
    custom: CustomParts = NO_PARTS  # of the caller; such a step is tried in this process

    def __init__(self, hardware: HardwareFacts, cache: Path | None = None, seconds: float = math.inf) -> None:
        self.hardware = hardware
        self.cache = cache
        self.seconds_left = seconds
        self.has_child = seconds >= MIN_CHILD_SECONDS
        self.failure = ""  # of the last trial
        self.console, self._was_told = silent_console(), False
        self._child: subprocess.Popen[bytes] | None = None
        self._known = _read_costs(cache)

    def start(self) -> None:
        """The child imports its packages while the dataset is read. Not needed: it is started when it is asked."""
        if not self._known and self.has_child:
            with contextlib.suppress(OSError):  # no more processes: a trial would fail too, and says so
                self._start_child()

    def __call__(self, config: ResolvedConfig) -> StepCost | None:
        key = self._key(config)
        if key not in self._known:
            started = time.monotonic()
            answer = self._measure(config)
            self.seconds_left -= time.monotonic() - started
            earlier, self.failure = self.failure, answer.get("failure", "")
            if self.failure:
                if answer.get("out_of_memory"):
                    return TOO_LARGE
                if self.failure != earlier:
                    self.console.note(f"the step could not be tried ({self.failure}); the plan is a guess")
                return None
            if _is_own(config):  # which another run has another of
                return StepCost(**answer)
            self._known[key] = time.time(), answer
            write_cache(self.cache, self._known)
        return StepCost(**self._known[key][1])

    def _measure(self, config: ResolvedConfig) -> dict[str, Any]:
        """The cost as plain values, or the failure."""
        if self.seconds_left <= 0:
            return {"failure": "time_budget is too short for one more trial"}
        if self.has_child and not _is_own(config):
            if not self._was_told:
                self._was_told = True
                self.console.say("Trying the step in a process of its own, to choose its size and plan the run ...")
            request = {"config": as_dict(config), "image": self.image_spec.to_dict()}
            if (answer := self._ask(request, config.compile_model)) is not None:
                return answer
        answer = _answer(partial(measure_step, config, self.image_spec, QUICK_SECONDS, self.custom))
        release_device_memory(choose_device(config.device), is_compiled=False)
        return answer

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

    def _ask(self, request: Mapping[str, Any], compiles: bool) -> dict[str, Any] | None:
        """Sends a request to the child; without an answer in time the child ends."""
        # A child that was killed, hangs or prints nonsense; RuntimeError: no more threads.
        with contextlib.suppress(ReadTimeout, OSError, ValueError, RuntimeError):
            child = self._start_child()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            limit = min(COMPILE_SECONDS if compiles else ANSWER_SECONDS, self.seconds_left)
            if (line := call_with_timeout(child.stdout.readline, limit)).endswith(b"\n"):
                return json.loads(line)
        self.close()
        return None

    def _start_child(self) -> subprocess.Popen[bytes]:
        if self._child is None or self._child.poll() is not None:
            root = str(Path(unet_trainer.__file__).parents[1])
            paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            self._child = subprocess.Popen(
                [sys.executable, "-m", "unet_trainer.training.step_probe"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=ending_with_this_process({**os.environ, "PYTHONPATH": paths}),
                start_new_session=True,  # Ctrl-C is for the run, which ends the child itself
            )
        return self._child

    def close(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        with contextlib.suppress(OSError):
            child.communicate()  # closes the pipes


def _read_costs(path: Path | None) -> dict[str, tuple[float, dict[str, Any]]]:
    """By key, when each cost was measured, and the cost."""
    known = {}
    with contextlib.suppress(ValueError, TypeError):
        for key, (measured_at, cost) in read_cache(path).items():
            numbers = asdict(from_plain(StepCost, cost))
            is_cost = numbers["seconds"] > 0 and all(number >= 0 for number in numbers.values())
            if is_cost and 0 <= time.time() - measured_at <= MAX_AGE_SECONDS:
                known[key] = measured_at, cost
    return known


def _is_own(config: ResolvedConfig) -> bool:
    """Whether its loss or network is in this process alone."""
    return OWN in (config.architecture, *config.loss)


def _answer(measure: Callable[[], StepCost]) -> dict[str, Any]:
    """The cost as plain values, or the failure."""
    try:
        return asdict(measure())
    except Exception as error:  # out of memory above all; whatever it is, the run goes on without the figure
        failure = f"{type(error).__name__}: {cause_line(error)}"[:300]
        return {"failure": failure, "out_of_memory": is_out_of_memory(error)}


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


def _measure_request(request: Mapping[str, Any]) -> StepCost:
    # Value by value: the draft of a config may hold pairs of settings that a config would be refused for.
    resolved = ResolvedConfig(**parsed(request["config"]))
    return measure_step(resolved, ImageSpec.from_dict(request["image"]))


def main() -> None:
    """The child: a request a line, an answer a line."""
    end_with_parent()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # libraries that print must not disturb the answers
        for line in sys.stdin:
            request = json.loads(line)
            answer = _answer(partial(_measure_request, request))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
