"""Train a U-Net on a folder of images and masks.

    python train_unet.py                                    CONFIG in train_unet.py: the demo, out of the box
    python train_unet.py configs/fast.yaml                  a YAML file (--config FILE is the same)
    python train_unet.py configs/fast.yaml batch_size=16    and overrides, key=value
    python train_unet.py --resume [RUN or FILE]             continue: the newest run, or that one
    python train_unet.py check [CONFIG] data_dir=...        read every file; what is wrong, and the settings that train
                                                            (--write FILE: as a config, --json FILE: for programs)
    torchrun --nproc-per-node=8 train_unet.py CONFIG ...    on several GPUs or machines: docs/scaling.md
    python train_unet.py bench [CONFIG]                     float32, mixed precision, compiled: what is fastest here
                                                            (--step: the step alone, without a loader)
    python train_unet.py doctor [CONFIG] data_dir=...       this machine, and what a run would take (--write FILE)
    python train_unet.py evaluate RUN|FILE [data_dir=...]   scores at native resolution, intervals (--compare RUN)
    python train_unet.py predict RUN IMAGE|FOLDER --out DIR masks by a trained model (--overlay, --polygons, ...)
    python train_unet.py export RUN [--format FORMAT]       the model for other programs: onnx, pt2, smp (--out PATH)
    python train_unet.py try [RUN or FILE]                  a page in the browser: drop an image, see its prediction
    python train_unet.py shard data_dir=... --out DIR|URL   the data as tar shards; data_dir=DIR|URL trains from them
    python train_unet.py runs [FOLDER]                      the runs: state, best IoU, epochs (--json: for programs)
    python train_unet.py report [RUN]                       one page about a run: scores, curves, images, settings
                                                            (while it goes on, RUN/report.html reloads itself)
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

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import unet_trainer
from unet_trainer.commands.command_line import exit_codes, find_command, read_training_command
from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.config.load import check_url, load_config, load_with_demo
from unet_trainer.config.schema import Config
from unet_trainer.runs.folder import check_init_from
from unet_trainer.system.console import EXIT_DONE, EXIT_TRAINING_FAILED
from unet_trainer.system.signals import Interrupted, Signals, exit_process
from unet_trainer.training.early_checks import check_before_imports
from unet_trainer.training.extension import Callback, CustomParts, collect_callbacks

if TYPE_CHECKING:  # torch takes seconds to import; a typo in the config is answered before that
    from unet_trainer.config.overrides import Overrides
    from unet_trainer.data.formats.given import Pairs
    from unet_trainer.model.custom import CustomLoss, CustomModel
    from unet_trainer.runs.tables import Row
    from unet_trainer.training.extension import TrainResult
    from unet_trainer.training.run import Run

__all__ = ["CONFIG", "Interrupted", "TrainingFailed", "UserError", "follow", "main", "train"]

# What `python train_unet.py` trains. Edit it, or leave it and name a file from configs/. auto: chosen from your data,
# this machine and the time you give; the choice and its reason are printed and written into the run's config.yaml.
CONFIG: dict[str, Any] = {
    "data_dir": "data/demo",  # your folder with images/ and masks/; the demo is made when it is missing
    "time_budget": None,  # "10m" or "2h": the best model that so much time allows
    "batch_size": "auto",
    "use_amp": "auto",  # True: bfloat16, faster on a GPU and in about half the memory
    "amp_dtype": "bfloat16",
    "compile_model": "auto",  # True: faster still, after a minute of compiling
    "early_stopping_patience": "auto",  # 10: stop when val IoU has not improved for 10 epochs
}


def script_config(overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """CONFIG plus overrides; while data_dir is the demo's, what they leave open comes from configs/demo.yaml."""
    beside_script = Path(__file__).parent / "configs" / "demo.yaml"  # pip installs it in the package
    installed = Path(unet_trainer.__file__).parent / "configs" / "demo.yaml"
    return load_with_demo(CONFIG, overrides, beside_script if beside_script.is_file() else installed)


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    on_epoch: Callable[[Row], object] | None = None,
    *,
    loss: CustomLoss | Mapping[str, float] | str | None = None,
    model: CustomModel | None = None,
    train_data: Pairs | None = None,
    val_data: Pairs | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: Unpack[Overrides],
) -> TrainResult:
    """Train by a config (a dict, a path to a YAML file or a Config; CONFIG when left out) plus overrides.

    `on_epoch` is called with the row of each epoch once it is saved; True ends the run. Custom parts
    (docs/extending.md):
    `loss`: logits of every class id, N,K,H,W, and masks of ids, N,H,W, 255 where ignored → scalar.
    `model`: a torch.nn.Module, or a function from a SegmenterSpec to one: images N,C,H,W → logits N,num_classes,H,W.
    `train_data`, `val_data`: anything with a length that gives (image, mask) for an index; without `val_data`,
    `train_data` is split.
    `callbacks`: see unet_trainer.Callback.

    Raises UserError for what the user can fix, TrainingFailed when training cannot continue, and Interrupted
    (a KeyboardInterrupt) after SIGINT or SIGTERM, with the state saved.
    """
    custom = CustomParts(loss, model, train_data, val_data, collect_callbacks(callbacks, on_epoch))
    return finish(train_epochs(config, custom, overrides))


def finish(epochs: Generator[Row, None, TrainResult]) -> TrainResult:
    while True:
        try:
            next(epochs)
        except StopIteration as end:
            return end.value


def follow(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    loss: CustomLoss | Mapping[str, float] | str | None = None,
    model: CustomModel | None = None,
    train_data: Pairs | None = None,
    val_data: Pairs | None = None,
    callbacks: Sequence[Callback] = (),
    **overrides: Unpack[Overrides],
) -> Generator[Row, None, TrainResult]:
    """Train and yield a row after each epoch: `for row in follow(config): ...`.

    Leaving the loop cancels the run; its state is saved."""
    custom = CustomParts(loss, model, train_data, val_data, collect_callbacks(callbacks))
    return (yield from train_epochs(config, custom, overrides, is_followed=True))


def train_epochs(
    config: Config | Mapping[str, Any] | str | Path | None,
    custom: CustomParts,
    overrides: Mapping[str, Any],
    is_followed: bool = False,
    started: float | None = None,
) -> Generator[Row, None, TrainResult]:
    """The result; the rows of the epochs if it `is_followed`. `started`: when the command was given, if before now."""
    started = time.perf_counter() if started is None else started
    overrides = {**overrides, **custom.loss_setting}
    if config is None and custom.model is None and custom.train_data is None:  # the demo's settings do not fit these
        config, overrides = script_config(overrides), {}
    config = custom.complete(load_config(CONFIG if config is None else config, overrides))

    from unet_trainer.training.session import Session

    with Session(started) as session:
        if session.launch.is_main:
            check_before_imports(config)
            check_init_from(config)
        check_url("data_dir", config.data_dir)
        session.console.say("U-Net trainer")  # torch takes seconds to import

        from unet_trainer.reports.run_report import write_report
        from unet_trainer.runs.folder import BEST
        from unet_trainer.training.pilots import try_learning_rates, warn_if_not_learning
        from unet_trainer.training.recovery import recover
        from unet_trainer.training.result import report
        from unet_trainer.training.run import validate
        from unet_trainer.training.schedule import fit_into_budget
        from unet_trainer.training.setup import set_up

        session.connect()
        run = set_up(config, session, write_report, custom)
        run.call("on_start", run.checkpointer.folder, run.config)
        with run.signals.deferred():  # a step is finished and its state saved before a signal ends the run
            while not run.is_finished():
                try:
                    try_learning_rates(run)
                    row = train_one_epoch(run)
                    found = validate(run, row)
                    improved = run.judge(row, found.scores)
                    if run.settings.replans():
                        fit_into_budget(run)
                    run.save_epoch(row, found, improved)
                    run.say_epoch(row, improved)
                    warn_if_not_learning(run)
                    if is_followed or custom.callbacks or run.is_finished():
                        run.checkpointer.finish()
                except (Exception, Interrupted) as error:  # not a second Ctrl-C, which waits for nothing
                    recover(run, error)
                    continue  # with smaller parts of a batch
                if improved:
                    run.call("on_checkpoint", run.checkpointer.folder / BEST)
                run.is_stopped = run.call("on_epoch", dict(row))
                if is_followed:
                    with run.signals.released(), run.callers_random_state.restored():
                        yield dict(row)
        result = report(run, session.close_parts)
        run.call("on_end", result)
        return result


def train_one_epoch(run: Run) -> Row:
    """One pass over the training images, from where the state stands; the part of the epoch's row that it fills."""
    from unet_trainer.training.run import TrainingEpoch
    from unet_trainer.training.schedule import is_out_of_time

    state, step, is_alone = run.state, run.components.train_step, run.processes.is_alone
    num_batches, size = len(run.loaders.train), run.config.accumulation_steps
    with TrainingEpoch(run) as epoch:
        for start in range(state.batch, num_batches, size):
            learning_rate, stop = state.next_learning_rate(size), min(start + size, num_batches)
            for index in range(start, stop):  # their gradients are added up
                batch = epoch.next_batch(index)
                if index == start:
                    if not is_alone:  # all processes stop at the same step
                        run.check_signals()
                        run.checkpointer.save_if_due()
                    step.begin_group(stop - start, state.epoch * num_batches + start)
                step(batch, state.metrics)
                if index + 1 == stop:
                    step.optimizer_step(state.metrics, learning_rate)
                epoch.step_ends(batch)
            epoch.group_ends(stop)  # the state is consistent: it may be saved, and the run end
            step.guard.poll()  # raises if too many steps were bad; nothing here waits for the device
            if is_alone:
                run.raise_if_ending()
                if stop < num_batches:  # the end of the epoch is judged before it is saved
                    run.checkpointer.save_if_due()
            if is_out_of_time(run):
                break
        return epoch.finish()


def train_by_command(config: Config, started: float) -> TrainResult:
    """`started`: before the config was read, which may import torch: seconds of a time budget."""
    return finish(train_epochs(config, CustomParts(), {}, started=started))


@exit_codes
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: trains, or runs the command that the first argument names. Returns the exit code."""
    started, words = time.perf_counter(), sys.argv[1:] if arguments is None else arguments
    with Signals():  # SIGTERM tidies up as Ctrl-C does
        if (command := find_command(words)) is not None:
            return command(words[1:], script_config) or EXIT_DONE
        config = read_training_command(words, __doc__, script_config)
    result = train_by_command(config, started)
    return EXIT_TRAINING_FAILED if result.missing else EXIT_DONE


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # main() handles it from here on
    exit_process(main())
