"""Train a U-Net on a folder of images and masks.

    python train_unet.py                                    the CONFIG below: the demo, out of the box
    python train_unet.py configs/fast.yaml                  a YAML file (--config FILE is the same)
    python train_unet.py configs/fast.yaml batch_size=16    and overrides, key=value
    python train_unet.py --resume [RUN or FILE]             go on: the newest run, or that one
    python train_unet.py check [CONFIG] data_dir=...        read every file, report what is wrong, and the settings that train
                                                            (--write FILE: as a config, --json FILE: for programs)
    torchrun --nproc-per-node=8 train_unet.py CONFIG ...    the same on several GPUs or machines: docs/scaling.md
    python train_unet.py bench [CONFIG] [--quick]           float32, mixed precision, compiled: what is fastest on this machine
                                                            (--step: the step alone, without a loader)
    python train_unet.py doctor [CONFIG] [--budget 2h]      this machine, this data and what a run would do (--write FILE)
    python train_unet.py evaluate RUN or FILE [data_dir=..] scores at native resolution, with intervals (--compare OTHER RUN)
    python train_unet.py predict RUN IMAGE|FOLDER --out DIR what a trained model sees (--overlay, --polygons, --tta, ...)
    python train_unet.py export RUN [--format onnx|pt2|smp] the trained model as a file for other programs (--out PATH)
    python train_unet.py try [RUN or FILE]                  a page in the browser: drop an image, see what the model makes of it
    python train_unet.py shard data_dir=... --out DIR|URL   the data as tar shards; data_dir=DIR|URL trains from them
    python train_unet.py runs [FOLDER]                      the runs that there are: state, best IoU, epochs (--json: for programs)
    python train_unet.py report [RUN]                       one page about a run: scores, curves, images, settings
    python train_unet.py watch [RUN ...]                    the same in the browser while the run goes on
    python train_unet.py compare RUN RUN [--html FILE]      runs beside each other, with paired intervals

From Python: from train_unet import train; result = train({"data_dir": "data/mine", "use_amp": True})

configs/default.yaml lists every key with its meaning.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # Ctrl-C during the imports below would be a traceback
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import Script, run_command_line
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.safe_yaml import NULLS
from unet_trainer.config.schema import DEMO_DIR, Config, is_demo_dir
from unet_trainer.loading.wait_advice import EpochTimes
from unet_trainer.runs.errors import TrainingFailed
from unet_trainer.system.signals import Interrupted, exit_process

if TYPE_CHECKING:  # torch takes seconds to import; a typo in the config is answered before that
    from unet_trainer.runs.history import Row
    from unet_trainer.training.evaluation import EvalMetrics, Evaluation
    from unet_trainer.training.result import TrainResult
    from unet_trainer.training.run import Run

__all__ = ["CONFIG", "Interrupted", "TrainingFailed", "UserError", "main", "train"]

# What `python train_unet.py` trains. Edit it, or leave it and name a file from configs/. auto: decided from your data, this machine
# and the time you give; the choice and its reason are printed and written into the run's config.yaml.
CONFIG: dict[str, Any] = {
    "data_dir": "data/demo",  # your folder with images/ and masks/; the demo is made when it is missing
    "time_budget": None,  # "10m" or "2h": the best model that so much time allows
    "batch_size": "auto",
    "use_amp": "auto",  # True: bfloat16, faster on a GPU and in about half the memory
    "amp_dtype": "bfloat16",
    "compile_model": "auto",  # True: faster still, after a minute of compiling
    "early_stopping_patience": "auto",  # 10: stop when val IoU has not improved for 10 epochs
}
# What the demo takes where CONFIG says auto or nothing: a small model for a CPU, done in a minute or two.
DEMO: dict[str, Any] = {
    "run_name": "demo",
    "image_size": 96,
    "fit": "resize",
    "augmentation": "default",
    "cutmix": 0,
    "cache": "none",
    "encoder": "tu-mobilenetv3_small_050",
    "encoder_weights": None,
    "decoder_channels": [96, 48, 32, 16, 8],
    "loss": {"dice": 1.0, "cross_entropy": 1.0},
    "class_weights": None,
    "decoder_attention": "none",
    "deep_supervision": 0,
    "batch_size": 8,
    "num_epochs": 7,
    "learning_rate": 4e-3,
    "weight_decay": 1e-4,
    "warmup_epochs": 0,
    "ema_decay": None,
    "early_stopping_patience": None,
    "use_amp": False,
    "compile_model": False,
}


def script_config(overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """CONFIG plus overrides; with what the demo takes for what is open while data_dir is the demo's."""
    given = overrides if isinstance(overrides, Mapping) else dict(override.partition("=")[::2] for override in overrides)
    is_demo = is_demo_dir(str({**CONFIG, **given}.get("data_dir", DEMO_DIR)))
    demo = {name: value for name, value in DEMO.items() if CONFIG.get(name, "auto") == "auto"} if is_demo else {}
    if str({**CONFIG, **given}.get("time_budget") or "null").lower() not in NULLS:
        demo.pop("num_epochs", None)  # the time decides it
    return load_config({**CONFIG, **demo}, overrides)


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    on_epoch: Callable[[Row], object] | None = None,
    **overrides: Any,
) -> TrainResult:
    """Trains by a config (a dict, a path to a YAML file or a Config; CONFIG when left out) plus overrides.

    `on_epoch` is called with the row of each epoch once it is saved. Raises UserError for what the user can mend,
    TrainingFailed when training cannot go on, and Interrupted (a KeyboardInterrupt) after SIGINT or SIGTERM, with the state saved.
    """
    config = script_config(overrides) if config is None else load_config(config, overrides)

    from unet_trainer.training.session import Session

    with Session() as session:
        session.console.say("U-Net trainer")  # torch takes seconds to import

        with session.importing():
            from unet_trainer.training.recovery import Recovery
            from unet_trainer.training.result import report
            from unet_trainer.training.setup import set_up

        run = set_up(config, session)
        with run.signals.deferred():  # a step is finished and its state saved before a signal ends the run
            while not run.is_finished():
                with Recovery(run):  # non-finite numbers, out of memory, dead workers, signals: see there
                    row = train_one_epoch(run)
                    found = validate(run, row)
                    improved = run.judge(row, found.scores)
                    run.save_epoch(row, found, improved)
                    run.say_epoch(row, improved)
                    if on_epoch is not None or run.is_finished():
                        run.checkpointer.finish()
                    if on_epoch is not None and run.processes.is_main:
                        on_epoch(dict(row))
        return report(run)


def train_one_epoch(run: Run) -> Row:
    """One pass over the training images, from where the state stands; the part of the epoch's row that it fills."""
    from unet_trainer.runs.errors import NonFinite
    from unet_trainer.training.step import accumulation_groups
    from unet_trainer.training.wait_meter import WaitMeter

    config, state, loader, step = run.config, run.state, run.loaders.train, run.components.train_step
    first_batch, first_step = state.epoch * len(loader), state.epoch * state.learning_rate.steps_per_epoch
    read_seconds = augment_seconds = num_read = 0.0
    if state.batch == 0:
        run.console.epoch_begins(state.epoch + 1, config.num_epochs)
    run.components.set_training_mode(state.epoch)
    run.loaders.prepare(state.epoch, state.batch, is_last=state.epoch + 1 == config.num_epochs)
    meter = WaitMeter(step.device, state.wait_seconds)
    started = time.perf_counter() - state.train_seconds
    with (
        run.console.bar(f"Epoch {state.epoch + 1} [Train]:", len(loader), num_done=state.batch) as bar,
        contextlib.closing(loader.epoch(state.epoch, state.batch, run.signals.is_stopping)) as batches,
    ):
        for group in accumulation_groups(state.batch, len(loader), config.accumulation_steps):
            for index in group:
                batch = meter.wait_for(partial(run.next_batch, batches, index))
                meter.step_begins()
                if index == group.start:
                    run.begin_step(index)
                    step.begin_group(len(group), first_batch + index)
                step(batch, state.metrics)
                if index == group[-1]:
                    step.optimizer_step(state.metrics, state.learning_rate.at(first_step + index // config.accumulation_steps))
                meter.step_ends()
                read_seconds += batch.read_seconds
                augment_seconds += batch.augment_seconds
                num_read += batch.num_images
                bar.tick()
                if (seen := state.metrics.peek()) is not None:
                    bar.show(*seen)
            state.batch = group.stop
            state.train_seconds, state.wait_seconds = time.perf_counter() - started, meter.seconds
            run.between_steps()
            if run.is_out_of_time():
                break
        step.guard.check()
        metrics = run.end_training()  # waits for the device, once an epoch
        loss, iou = metrics.loss(), metrics.scores().iou
        bar.show(loss, iou)
    state.train_seconds, state.wait_seconds = time.perf_counter() - started, meter.finish()
    num_steps = -(-state.batch // config.accumulation_steps)
    if not math.isfinite(loss) or int(metrics.num_nan) == num_steps:
        raise NonFinite("no step of the epoch was finite", batch_number=first_batch)
    run.times = EpochTimes(
        images_per_second=metrics.num_images / state.train_seconds,
        data_wait=state.wait_seconds / state.train_seconds,
        read_seconds=read_seconds / max(1.0, num_read),
        augment_seconds=augment_seconds / max(1.0, num_read),
        num_workers=loader.num_workers,
    )
    memory, reserved = run.peak_memory_gib()
    return {
        "epoch": state.epoch + 1,
        "train_loss": loss,
        "train_iou": iou,
        "learning_rate": state.learning_rate.at(first_step + num_steps - 1),
        "images_per_second": run.times.images_per_second,
        "data_wait": run.times.data_wait,
        "skipped_steps": int(state.metrics.num_skipped),
        "nan_steps": int(state.metrics.num_nan),
        "peak_memory_gib": memory,
        "peak_reserved_gib": reserved,
    }


def validate(run: Run, row: Row) -> Evaluation:
    """One pass over the validation images; fills in the rest of the epoch's row."""
    from unet_trainer.runs.errors import NonFinite
    from unet_trainer.training.evaluation import evaluate

    started = time.perf_counter()
    with run.console.bar(f"Epoch {run.state.epoch + 1} [Val]:  ", len(run.loaders.val)) as bar:

        def on_batch(metrics: EvalMetrics) -> None:
            bar.tick()
            if (seen := metrics.peek()) is not None:
                bar.show(*seen)
            run.signals.check()

        found = evaluate(run.components.eval_step, run.loaders.val, on_batch, run.signals.is_stopping, run.processes)
        run.signals.check()  # it may have ended early
        bar.show(found.loss, found.scores.iou)
    if found.first_bad_batch is not None:
        raise NonFinite("the validation loss is not finite", val_batch=found.first_bad_batch)
    row |= {"val_loss": found.loss, "val_iou": found.scores.iou, "val_dice": found.scores.dice}
    run.val_seconds = time.perf_counter() - started
    row["seconds"] = run.state.train_seconds + run.val_seconds
    row |= run.processes.broadcast(row)  # times differ; all judge by the same row
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_command_line(sys.argv[1:] if arguments is None else arguments, Script(Path(__file__), __doc__, script_config, train))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main() handles it from here on
    exit_process(main())
