"""Measures the time and memory of a config's step in a process of its own, so that running out of memory cannot hurt
the run.

The child builds the real model, loss and optimizer and takes a few steps on random images. What was measured is kept in
a file, since the same step is asked for again by the next run.
"""

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import unet_trainer
from unet_trainer.config.facts import TOO_LARGE, HardwareFacts, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig, parsed
from unet_trainer.config.schema import OWN, as_dict
from unet_trainer.images.image_spec import ImageSpec
from unet_trainer.images.mask_decoding import MaskCoding
from unet_trainer.model.precision import choose_device, set_backends
from unet_trainer.model.segmenter import build_spec
from unet_trainer.system.concurrency import ReadTimeout, call_with_timeout
from unet_trainer.system.console import cause_line, silent_console
from unet_trainer.system.json_cache import from_plain, read_cache, write_cache
from unet_trainer.system.signals import end_with_parent, ending_with_this_process
from unet_trainer.training.build import build_components
from unet_trainer.training.compilation import compile_steps, is_out_of_memory, random_batches
from unet_trainer.training.state import EpochMetrics

ANSWER_SECONDS = 120.0  # for one step to be measured; more with compiling
COMPILE_SECONDS = 420.0
MAX_AGE_SECONDS = 86_400.0  # of a cost that is kept: the machine may have been busy when it was measured
MIN_SECONDS, MIN_STEPS, MAX_STEPS = 1.0, 2, 40  # of the timed steps
# The settings that the cost of a step depends on.
COST_KEYS = (
    "architecture", "encoder", "decoder_channels", "decoder_attention", "deep_supervision", "num_classes",
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

    def __init__(self, hardware: HardwareFacts, cache: Path | None = None, seconds: float = math.inf) -> None:
        self.hardware = hardware
        self.cache = cache
        self.seconds_left = seconds
        self.failure = ""  # of the last trial
        self.console, self._was_told = silent_console(), False
        self._child: subprocess.Popen[bytes] | None = None
        self._known = _read_costs(cache)

    def start(self) -> None:
        """The child imports its packages while the dataset is read. Not needed: it is started when it is asked."""
        if not self._known and self.seconds_left > 0:
            with contextlib.suppress(OSError):  # no more processes: a trial would fail too, and says so
                self._start_child()

    def __call__(self, config: ResolvedConfig) -> StepCost | None:
        key = self._key(config)
        if key not in self._known:
            started = time.monotonic()
            answer: Mapping[str, Any] = {"failure": "time_budget is too short for a trial"}
            if OWN in (config.architecture, *config.loss):
                answer = {"failure": "a custom loss or model is in this process alone"}
            elif self.seconds_left > 0:
                if not self._was_told:
                    self._was_told = True
                    self.console.say("Trying the step in a process of its own, to choose its size and plan the run ...")
                answer = self._ask(
                    {"config": as_dict(config), "image": self.image_spec.to_dict()}, config.compile_model
                )
            self.seconds_left -= time.monotonic() - started
            earlier, self.failure = self.failure, answer.get("failure", "")
            if self.failure:
                if answer.get("out_of_memory"):
                    return TOO_LARGE
                if self.failure != earlier:
                    self.console.note(f"the step could not be tried ({self.failure}); the plan is a guess")
                return None
            self._known[key] = time.time(), dict(answer)
            write_cache(self.cache, self._known)
        return StepCost(**self._known[key][1])

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

    def _ask(self, request: Mapping[str, Any], compiles: bool) -> dict[str, Any]:
        """Sends a request to the child; an answer that does not come in time ends the child."""
        try:
            child = self._start_child()
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            limit = min(COMPILE_SECONDS if compiles else ANSWER_SECONDS, self.seconds_left)
            if (line := call_with_timeout(child.stdout.readline, limit)).endswith(b"\n"):
                return json.loads(line)
            failure = "the process of the trial ended"
        except ReadTimeout:
            failure = "it took too long"
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no more threads
            failure = str(error)
        self.close()
        return {"failure": failure}

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


def measure_step(config: ResolvedConfig, image_spec: ImageSpec) -> StepCost:
    """Takes steps of a config on random images; raises what they raise."""
    device = choose_device(config.device)
    set_backends(config.allow_tf32, config.deterministic)
    spec = build_spec(config, image_spec, MaskCoding(tuple(range(max(2, config.num_classes)))))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    components = build_components(config, spec, device, 1, silent_console(), resumes=True)
    components.set_training_mode(config.freeze_encoder_epochs)
    batch, eval_batch = random_batches(config, components, None)
    if config.compile_model:
        failure, _ = compile_steps(components, batch, eval_batch)
        if failure is not None:
            raise RuntimeError(failure)
    step, metrics = components.train_step, EpochMetrics(config.num_classes, device)

    def train() -> None:
        step.begin_group(1, 0)
        step(batch, metrics)
        step.optimizer_step(metrics, learning_rate=0.0)

    seconds = _time(train, device, warm_up=3 if device.type == "cuda" else 1)
    eval_metrics = components.eval_step.new_metrics()
    components.eval_step.segmenter.eval()
    eval_seconds = _time(lambda: components.eval_step(eval_batch, eval_metrics), device, warm_up=1)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return StepCost(seconds, eval_seconds / len(eval_batch.images), memory)


def _time(call: Any, device: torch.device, warm_up: int) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warm_up):
        call()
    wait()
    started, num_steps = time.perf_counter(), 0
    while num_steps < MAX_STEPS and (num_steps < MIN_STEPS or time.perf_counter() - started < MIN_SECONDS):
        call()
        num_steps += 1
    wait()
    return (time.perf_counter() - started) / num_steps


def main() -> None:
    """The child: a request a line, an answer a line."""
    end_with_parent()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # libraries that print must not disturb the answers
        for line in sys.stdin:
            request = json.loads(line)
            try:
                # Value by value: the draft of a config may hold pairs of settings that a config would be refused for.
                resolved = ResolvedConfig(**parsed(request["config"]))
                answer = asdict(measure_step(resolved, ImageSpec.from_dict(request["image"])))
            except Exception as error:  # out of memory above all; whatever it is, the run goes on without the figure
                answer = {
                    "failure": f"{type(error).__name__}: {cause_line(error)}"[:300],
                    "out_of_memory": is_out_of_memory(error),
                }
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
