"""Train a U-Net on a folder of images and masks.

    python train_unet.py                                    CONFIG in train_unet.py: the demo, out of the box
    python train_unet.py configs/fast.yaml batch_size=16    a YAML file (--config FILE is the same) and overrides
    python train_unet.py --resume [RUN or FILE]             continue: the newest run, or that one
    torchrun --nproc-per-node=8 train_unet.py CONFIG ...    on several GPUs or machines: docs/scaling.md

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
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from unet_trainer.commands.command_line import exit_codes, find_command, read_training_command
from unet_trainer.config.errors import NonFinite, TrainingFailed, UserError
from unet_trainer.config.load import check_url, load_config, load_with_demo
from unet_trainer.config.schema import Config
from unet_trainer.runs.folder import BEST, check_init_from
from unet_trainer.system.console import EXIT_DONE, EXIT_TRAINING_FAILED
from unet_trainer.system.signals import Interrupted, Signals, exit_process
from unet_trainer.training.early_checks import check_before_imports
from unet_trainer.training.extension import finish, split_keywords

if TYPE_CHECKING:  # torch takes seconds to import; a typo in the config is answered before that
    from unet_trainer.config.overrides import Keywords
    from unet_trainer.runs.tables import Row
    from unet_trainer.training.evaluation import Evaluation
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


def train_epochs(
    config: Config | Mapping[str, Any] | str | Path | None,
    keywords: Mapping[str, Any],
    is_followed: bool = False,
    started: float | None = None,
) -> Generator[Row, None, TrainResult]:
    """The result; the rows of the epochs if it `is_followed`. `started`: when the command was given, if before now."""
    started = time.perf_counter() if started is None else started
    custom, overrides = split_keywords(keywords)
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
        from unet_trainer.training.result import report
        from unet_trainer.training.setup import set_up

        session.connect()
        run = set_up(config, session, write_report, custom)  # what is decided is decided before the first epoch
        run.call("on_start", run.checkpointer.folder, run.config)
        with run.signals.deferred():  # a step is finished and its state saved before a signal ends the run
            try:
                yield from epochs(run, is_followed)
            except (Exception, Interrupted) as error:  # not a second Ctrl-C, which waits for nothing
                end_with_state_saved(run, error)
        result = report(run, session.close_parts)
        run.call("on_end", result)
        return result


def epochs(run: Run, is_followed: bool) -> Generator[Row, None, None]:
    """Train, validate, save, hand out the row; until the epochs are done, patience runs out or a callback asks."""
    from unet_trainer.training.memory import OutOfMemory, can_shrink, unless_out_of_memory
    from unet_trainer.training.pilots import try_learning_rates
    from unet_trainer.training.recovery import shrink_batches
    from unet_trainer.training.schedule import fit_into_budget

    def try_and_train() -> tuple[Row, Evaluation]:
        try_learning_rates(run, run.check_signals)  # before the first step of a run; nothing later
        return train_one_epoch(run)

    while not run.is_finished():
        done = unless_out_of_memory(try_and_train)
        if isinstance(done, OutOfMemory):
            if not (can_shrink(run.config) and run.processes.is_alone):
                raise MemoryError(done.reason)
            shrink_batches(run, done.reason)  # smaller parts of a batch, from the last whole state on
            run.checkpointer.save_state()
            continue
        row, found = done
        improved = run.judge(row, found.scores)  # the state is final from here on
        if run.settings.replans():
            fit_into_budget(run)
        run.reporter.record_epoch(run.config, row, found)
        run.save_epoch(row, found, improved)
        run.reporter.say_epoch(run.config, run.state, row, improved, run.loaders.take_notices())
        if is_followed or run.callbacks or run.is_finished():
            run.checkpointer.finish()
        if improved:
            run.call("on_checkpoint", run.checkpointer.folder / BEST)
        run.is_stopped = run.call("on_epoch", dict(row))
        if is_followed:
            with run.signals.released(), run.callers_random_state.restored():
                yield dict(row)


def train_one_epoch(run: Run) -> tuple[Row, Evaluation]:
    """One pass over the training images, from where the state stands, and one over those of validation."""
    from unet_trainer.training.run import TrainingEpoch, validate
    from unet_trainer.training.schedule import is_out_of_time
    from unet_trainer.training.step import MAX_BAD_STEPS

    state, step, num_batches = run.state, run.components.train_step, len(run.loaders.train)
    many_bad = f"{MAX_BAD_STEPS} steps in a row were not finite"
    with TrainingEpoch(run) as epoch:
        for group in epoch.groups():  # of accumulation_steps batches, whose gradients are added up
            step(group, state.next_learning_rate(run.config.accumulation_steps), state.metrics)
            epoch.advance(group)
            if (first := step.guard.first_of_many_bad()) is not None:  # a moment ago: nothing waits for the device
                raise NonFinite(many_bad, batch_number=first)
            run.check_signals()
            if state.batch < num_batches:  # the end of the epoch is judged before it is saved
                run.checkpointer.save_if_due()
            if is_out_of_time(run):
                break
        run.check_signals()
        if (first := step.guard.first_of_many_bad(waits=True)) is not None:
            raise NonFinite(many_bad, batch_number=first)
        row = epoch.row()
        if not epoch.num_finite_steps():
            raise NonFinite("no step of the epoch was finite", batch_number=state.epoch * num_batches)
    found = validate(run, row)
    run.check_signals()  # it may have ended early
    if found.first_bad_batch is not None:
        raise NonFinite("the validation loss is not finite", val_batch=found.first_bad_batch)
    return row, found


def end_with_state_saved(run: Run, error: BaseException) -> NoReturn:
    """Save the state, as far as it is whole and may come to another end; raise the message for the user.

    Interrupted: a signal. NonFinite: numbers that stayed bad. UserError: a file became unreadable. MemoryError: memory
    ran out. TrainingFailed: the disk refused a save. Anything else is a bug, whose traceback is shown."""
    from unet_trainer.loading.worker_pool import WorkerError
    from unet_trainer.training.memory import is_out_of_memory
    from unet_trainer.training.recovery import explained, find_cause

    cause, saves = find_cause(run, error), run.checkpointer
    is_foreseen = isinstance(error, Interrupted | UserError | WorkerError) or is_out_of_memory(error)
    # A process of a job that fails alone saves nothing: its GPU may wait for the others.
    may_save = run.processes.is_alone or isinstance(error, NonFinite | Interrupted)
    # The end of an epoch that is not finite would come again: the last save is before it.
    is_at_end = isinstance(error, NonFinite) and run.state.batch == len(run.loaders.train)
    try:
        if may_save and not isinstance(error, TrainingFailed):
            saves.save_on_failure(run.components.train_step.is_whole and not is_at_end)
        else:
            saves.wait()
    except Exception:
        if is_foreseen or cause:
            raise  # else it would hide a bug
    message = explained(run, error, cause)
    if message is error:
        raise error  # with its own cause
    raise message from None


def script_config(overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """CONFIG plus overrides; while data_dir is the demo's, what they leave open comes from configs/demo.yaml."""
    return load_with_demo(CONFIG, overrides)


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    on_epoch: Callable[[Row], object] | None = None,
    **keywords: Unpack[Keywords],
) -> TrainResult:
    """Train by a config (a dict, a path to a YAML file or a Config; CONFIG when left out) plus settings as keywords.

    `on_epoch` is called with the row of each epoch once it is saved; True ends the run. Other keywords
    (docs/extending.md):
    `loss`: logits of every class id, N,K,H,W, and masks of ids, N,H,W, 255 where ignored → scalar.
    `model`: a torch.nn.Module, or a function from a SegmenterSpec to one: images N,C,H,W → logits N,num_classes,H,W.
    `train_data`, `val_data`: anything with a length that gives (image, mask) for an index; without `val_data`,
    `train_data` is split.
    `callbacks`: see unet_trainer.Callback.

    Raises UserError for what the user can fix, TrainingFailed when training cannot continue, and Interrupted
    (a KeyboardInterrupt) after SIGINT or SIGTERM, with the state saved.
    """
    return finish(train_epochs(config, {**keywords, "on_epoch": on_epoch}))


def follow(
    config: Config | Mapping[str, Any] | str | Path | None = None, **keywords: Unpack[Keywords]
) -> Generator[Row, None, TrainResult]:
    """Train as `train` and yield a row after each epoch: `for row in follow(config): ...`.

    Leaving the loop cancels the run; its state is saved."""
    return (yield from train_epochs(config, keywords, is_followed=True))


def train_by_command(config: Config, started: float) -> TrainResult:
    """`started`: before the config was read, which may import torch: seconds of a time budget."""
    return finish(train_epochs(config, {}, started=started))


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
