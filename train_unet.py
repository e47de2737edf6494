"""Train a U-Net on a folder of images and masks.

    python train_unet.py                                    the CONFIG below: the demo, out of the box
    python train_unet.py configs/fast.yaml                  a YAML file (--config FILE is the same)
    python train_unet.py configs/fast.yaml batch_size=16    and overrides, key=value
    python train_unet.py --resume [RUN or FILE]             go on: the newest run, or that one
    python train_unet.py check [CONFIG] data_dir=...        read every file, report what is wrong (--json FILE: for programs)
    python train_unet.py bench [CONFIG] [--quick]           float32, mixed precision, compiled: what is fastest on this machine
                                                            (--step: the step alone, without a loader)

From Python: from train_unet import train; result = train({"data_dir": "data/mine", "use_amp": True})

configs/default.yaml lists every key with its meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.atomic import sweep_drafts
from unet_trainer.bottleneck import EpochTimes, advise
from unet_trainer.command_line import read_bench_command, read_check_command, read_command_line
from unet_trainer.config import DEMO_DIR, Config, UserError, as_dict, class_names, load_config
from unet_trainer.console import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TRAINING_FAILED, EXIT_USER_ERROR, Console, counted, show_error
from unet_trainer.lock import FolderLock
from unet_trainer.runs import BEST, LAST, TrainingFailed, find_origin, has_checkpoint, start_folder
from unet_trainer.signals import Interrupted, Signals, leave

if TYPE_CHECKING:  # torch takes seconds to import; a typo in the config is answered before that
    from collections.abc import Iterator

    from unet_trainer.dataset import Batch
    from unet_trainer.hands import WorkerError
    from unet_trainer.history import Row
    from unet_trainer.keeper import Keeper
    from unet_trainer.machine import Data, Machine
    from unet_trainer.metrics import Scores

# What `python train_unet.py` trains. Edit it, or leave it and name a file from configs/.
CONFIG: dict[str, Any] = {
    "data_dir": "data/demo",  # your folder with images/ and masks/; the demo is made when it is missing
    "batch_size": 8,
    "use_amp": False,  # True: bfloat16, faster on a GPU and in about half the memory
    "amp_dtype": "bfloat16",
    "compile_model": False,  # True: faster still, after a minute of compiling
    "early_stopping_patience": None,  # 10: stop when val IoU has not improved for 10 epochs
}
# What the demo adds where CONFIG says nothing: a small model for a CPU, done in a minute or two. Your own data get the defaults
# of configs/default.yaml.
DEMO: dict[str, Any] = {
    "run_name": "demo",
    "image_size": 96,
    "encoder": "tu-mobilenetv3_small_050",
    "decoder_channels": [96, 48, 32, 16, 8],
    "num_epochs": 7,
    "learning_rate": 4e-3,
}


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. `history` has a dict for each epoch, with the columns of metrics.csv."""

    run_dir: Path
    best_epoch: int
    best_val_iou: float
    per_class_iou: dict[str, float | None]
    epochs: int
    stopped_early: bool
    seconds: float
    images_per_second: float
    history: list[Row]
    unwritten: list[str] = field(default_factory=list)  # best.pt, last.pt: what the disk did not take (on_save_error: continue)


@dataclass
class Run:
    """A run under way."""

    config: Config
    data: Data
    machine: Machine
    keeper: Keeper
    console: Console
    signals: Signals
    broken: WorkerError | None = None  # why the run must end once the step is finished
    times: EpochTimes | None = None  # of the last epoch's training
    advice: str | None = None  # that was given about them


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    on_epoch: Callable[[Row], object] | None = None,
    **overrides: Any,
) -> TrainResult:
    """Trains by a config (a dict, a path to a YAML file or a Config; CONFIG when left out) plus overrides.

    `on_epoch` is called with the row of each epoch once it is saved. Raises UserError for what the user can mend,
    TrainingFailed when training cannot go on, and Interrupted (a KeyboardInterrupt) after SIGINT or SIGTERM, with the state saved.
    """
    config = own_config(overrides) if config is None else load_config(config, overrides)
    console = Console()
    try:
        with Signals() as signals, FolderLock() as lock:
            return _train(config, console, on_epoch, signals, lock)
    except TrainingFailed as error:
        console.log_only(f"Error: {error}")  # whoever catches it shows it
        raise
    except KeyboardInterrupt:
        _tell_interrupted(console)
        raise


def own_config(overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """CONFIG plus overrides; with what the demo adds while data_dir is the demo's."""
    given = overrides if isinstance(overrides, Mapping) else dict(override.partition("=")[::2] for override in overrides)
    is_demo = str({**CONFIG, **given}.get("data_dir", DEMO_DIR)) == DEMO_DIR
    return load_config({**(DEMO if is_demo else {}), **CONFIG}, overrides)


def _train(
    config: Config, console: Console, on_epoch: Callable[[Row], object] | None, signals: Signals, lock: FolderLock
) -> TrainResult:
    """Config → build → resume → epochs → report."""
    started = time.perf_counter()

    from unet_trainer import assemble, checkpoint, resuming
    from unet_trainer.hands import WorkerError
    from unet_trainer.keeper import Keeper

    console.say("U-Net trainer")
    checkpoint_dir = Path(config.checkpoint_dir)
    origin = find_origin(config.resume, config.run_name, checkpoint_dir)
    earlier_folder = origin if origin is None or origin.is_dir() else origin.parent
    if earlier_folder is not None:
        lock.take(earlier_folder, console.note)
    earlier = None if origin is None else checkpoint.read_run(origin, console.warn)

    config, numerics = assemble.build_numerics(config, console)
    config, data = assemble.build_data(config, console, numerics.device, earlier_folder)
    machine = assemble.build_machine(config, numerics, data.form, len(data.train), console, resumes=earlier is not None)
    state = machine.state

    changes: list[str] = []
    if earlier is not None and earlier_folder is not None:
        folder = earlier_folder
        changes = checkpoint.compare_configs(earlier["config"], as_dict(config))
        checkpoint.compare_splits(earlier["split"], checkpoint.split_names(data.split))
        state.load_state_dict(earlier)
        if config.num_epochs < state.epoch:
            raise UserError(
                f"num_epochs: {config.num_epochs} is less than the {counted(state.epoch, 'epoch')} that {folder} has; need more"
            )
    else:
        try_steps = partial(assemble.try_machine, machine=machine)
        config = machine.fit_into_memory(config, try_steps, console, "nothing was begun")
        folder = start_folder(config.resume, config.run_name, checkpoint_dir)
        lock.take(folder, console.note)
        if has_checkpoint(folder):
            raise UserError(f"{folder} was begun by another process in the meantime; the same command goes on with it")
    _open_folder(folder, console)
    keeper = Keeper(folder, config, state, data.split, console)
    run = Run(config, data, machine, keeper, console, signals)
    if earlier is not None:
        resuming.adapt_to_changes(config, earlier["config"], state, console)
        resuming.tell_resumed(config, earlier["config"], state, changes, console)
    console.fact("Run", str(folder))
    if _is_finished(run):
        resuming.tell_finished_before(config.num_epochs, state, keeper.resume_command, console)
        return _report(run)
    # An error is told when the epoch is begun, and there is something to save. A fork would swallow what a signal raises.
    with signals.patiently(), contextlib.suppress(WorkerError):
        data.train.prepare(state.epoch, state.batch)  # the workers read while the step is compiled
    signals.check()
    if config.compile_model:
        console.say("Compiling the step (once; a minute or two) ...")
        before = time.perf_counter()
        compile_steps = partial(assemble.compile_machine, machine=machine, console=console)
        _change_config(run, machine.fit_into_memory(config, compile_steps, console, keeper.describe()))
        if run.config.compile_model:
            console.say(f"✓ Compiled in {time.perf_counter() - before:.0f} s")
    if earlier is None:
        keeper.write_config()
        keeper.write_split()
    console.fact("Start-up", f"{time.perf_counter() - started:.1f} s")
    _run_epochs(run, on_epoch)
    return _report(run)


def _run_epochs(run: Run, on_epoch: Callable[[Row], object] | None) -> None:
    """Until the last epoch, until patience runs out, or until something ends it, with the state saved."""
    with run.signals.patiently():
        try:
            run.signals.check()
            while not _is_finished(run):
                _try_epoch(run, on_epoch)
        except Interrupted:
            _keep_what_there_is(run)
            raise
        except UserError as error:  # a file that went bad
            _keep_what_there_is(run)
            raise UserError(f"{error}; {run.keeper.describe()}") from None
        except TrainingFailed:  # said and saved where it was raised
            raise
        except Exception:  # of whatever kind: what was trained is kept
            with contextlib.suppress(Exception):
                _keep_what_there_is(run)
            raise
        finally:
            run.data.close()


def _keep_what_there_is(run: Run) -> None:
    run.keeper.keep_what_there_is(state_is_whole=not run.machine.train_step.is_open)


def _is_finished(run: Run) -> bool:
    state, config = run.machine.state, run.config
    return state.epoch >= config.num_epochs or state.progress.is_out_of_patience(config.early_stopping_patience)


def _try_epoch(run: Run, on_epoch: Callable[[Row], object] | None) -> None:
    """An epoch, or what is left of it; and what happens when it cannot be finished."""
    from unet_trainer.guard import NonFinite
    from unet_trainer.hands import WorkerError
    from unet_trainer.memory import is_out_of_memory, one_line
    from unet_trainer.recovery import make_do_with_less, roll_back

    try:
        _run_epoch(run, on_epoch)
        return
    except NonFinite as trouble:
        roll_back(run.config, run.machine, run.data, run.keeper, run.console, trouble)
        return
    except WorkerError as error:
        _keep_what_there_is(run)
        raise TrainingFailed(f"{error}. Try fewer num_workers, or num_workers=0; {run.keeper.describe()}") from None
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = one_line(error)
    # Not in the handler, where the error still holds the memory of the step.
    _change_config(run, make_do_with_less(run.config, run.machine, run.keeper, run.console, reason))


def _run_epoch(run: Run, on_epoch: Callable[[Row], object] | None) -> None:
    """Train, validate, judge, save."""
    state, config = run.machine.state, run.config
    if state.batch == 0:
        run.console.epoch_begins(state.epoch + 1, config.num_epochs)
    row = train_one_epoch(run)
    validation_started = time.perf_counter()
    scores = evaluate(run, row)
    row["seconds"] = state.train_seconds + time.perf_counter() - validation_started

    # The state is final before anything is saved.
    state.begin_next_epoch()
    state.seconds += row["seconds"]
    improved = state.progress.update(float(row[config.monitor]), state.epoch)
    state.learning_rate.end_epoch(state.progress.epochs_since_best)
    state.history.append(row)
    if improved:
        state.per_class_iou = scores.per_class_iou
    best_model = run.machine.eval_step.model if improved else None
    run.keeper.save_epoch(row, best_model, lambda: run.machine.draw_samples(run.data))
    run.console.epoch_ends(row, config.num_epochs, improved, run.machine.numerics.device.type == "cuda")
    _advise(run)
    if on_epoch is not None or _is_finished(run):
        run.keeper.finish()
    if on_epoch is not None:
        on_epoch(dict(row))


def _advise(run: Run) -> None:
    """Once, from the second epoch on: the first one starts the workers."""
    from unet_trainer.scan import count_cores

    if run.times is None or run.advice is not None or run.machine.state.epoch < 2:
        return
    run.advice = advise(run.times, count_cores(), run.config.cache, run.machine.numerics.device.type == "cpu")
    if run.advice is not None:
        run.console.note(run.advice)


def train_one_epoch(run: Run) -> Row:
    """One pass over the training images, from where the state stands; the part of the epoch's row that it fills."""
    import torch

    from unet_trainer.guard import NonFinite

    data, machine = run.data, run.machine
    state, step, accumulation = machine.state, machine.train_step, machine.accumulation_steps
    device = machine.numerics.device
    num_batches = len(data.train)
    first_step = state.epoch * state.learning_rate.steps_per_epoch
    machine.set_training(state.epoch)
    data.train.prepare(state.epoch, state.batch)
    data.val.prepare(0)  # the workers go on with what comes next, without a gap
    if state.epoch + 1 < run.config.num_epochs:
        data.train.prepare(state.epoch + 1)
    read_seconds = augment_seconds = num_seen = 0.0
    started = time.perf_counter() - state.train_seconds
    with (
        run.console.bar(f"Epoch {state.epoch + 1} [Train]:", num_batches, num_done=state.batch) as bar,
        contextlib.closing(data.train.epoch(state.epoch, state.batch, run.signals.is_stopping)) as batches,
    ):
        for index in range(state.batch, num_batches):
            asked = time.perf_counter()
            batch = _next_batch(run, batches, index)
            state.wait_seconds += time.perf_counter() - asked
            window_start = index - index % accumulation
            window = min(accumulation, num_batches - window_start)  # the last one of an epoch may be short
            closes_window = index + 1 == window_start + window
            step.guard.batch_number = state.epoch * num_batches + index
            step(batch, state.totals, window, closes_window, state.learning_rate.at(first_step + index // accumulation))
            read_seconds += batch.stages[0]
            augment_seconds += batch.stages[1]
            num_seen += batch.num_images
            bar.tick()
            if (seen := state.totals.peek()) is not None:
                bar.show(*seen)
            if closes_window:
                state.batch = index + 1
                state.train_seconds = time.perf_counter() - started
                _look_up(run)
        step.guard.check()
        loss, iou = state.totals.loss(), state.totals.scores().iou  # waits for the device, once an epoch
        bar.show(loss, iou)
    state.train_seconds = time.perf_counter() - started
    if not math.isfinite(loss):
        raise NonFinite("no step of the epoch was finite", batch_number=state.epoch * num_batches)
    on_gpu = device.type == "cuda"
    run.times = EpochTimes(
        state.totals.num_images / state.train_seconds,
        state.wait_seconds / state.train_seconds,
        read_seconds / max(1.0, num_seen),
        augment_seconds / max(1.0, num_seen),
        data.train.num_workers,
    )
    return {
        "epoch": state.epoch + 1,
        "train_loss": loss,
        "train_iou": iou,
        "learning_rate": state.learning_rate.at(first_step + (num_batches - 1) // accumulation),
        "images_per_second": state.totals.num_images / state.train_seconds,
        "data_wait": state.wait_seconds / state.train_seconds,
        "skipped_steps": int(state.totals.num_skipped),
        "nan_steps": int(state.totals.num_nan),
        # Since the start: a CUDA graph takes its memory when it is recorded, and shows nothing when it is replayed.
        "peak_memory_gb": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0,
        "peak_reserved_gb": torch.cuda.max_memory_reserved(device) / 2**30 if on_gpu else 0.0,
    }


def _next_batch(run: Run, batches: Iterator[Batch], index: int) -> Batch:
    """The next one. Where the run is to end within an accumulation window, its last batches are read without the workers."""
    from unet_trainer.hands import WorkerError

    batch = None
    if run.broken is None and not run.signals.is_stopping():
        try:
            batch = next(batches, None)
        except WorkerError as error:
            run.broken = error
    if batch is not None:
        return batch
    if not run.machine.train_step.is_open:
        _leave_if_asked(run)
    return run.data.train.read(run.machine.state.epoch, index)


def _look_up(run: Run) -> None:
    """Between two steps: is it time to save, to leave or to worry? Nothing of it waits for the device."""
    run.machine.train_step.guard.look()
    _leave_if_asked(run)
    run.keeper.save_state_if_due()


def _leave_if_asked(run: Run) -> None:
    run.signals.check()
    if run.broken is not None:
        raise run.broken


def evaluate(run: Run, row: Row) -> Scores:
    """One pass over the validation images; fills in the epoch's row."""
    from unet_trainer.guard import NonFinite
    from unet_trainer.step import Totals

    data, machine = run.data, run.machine
    totals = Totals(machine.num_classes, machine.numerics.device)
    machine.eval_step.model.eval()
    with (
        run.console.bar(f"Epoch {machine.state.epoch + 1} [Val]:  ", len(data.val)) as bar,
        contextlib.closing(data.val.epoch(0, is_stopping=run.signals.is_stopping)) as batches,
    ):
        for batch in batches:
            machine.eval_step(batch, totals)
            bar.tick()
            if (seen := totals.peek()) is not None:
                bar.show(*seen)
            run.signals.check()
        run.signals.check()
        scores = totals.scores()
        row.update(val_loss=totals.strict_loss(), val_iou=scores.iou, val_dice=scores.dice)
        bar.show(row["val_loss"], row["val_iou"])
    if not math.isfinite(row["val_loss"]):
        raise NonFinite("the validation loss is not finite", val_batch=int(totals.first_bad) // data.val.batches.batch_size)
    return scores


def _report(run: Run) -> TrainResult:
    """Says what came of the run and writes result.json."""
    from unet_trainer.history import write_result

    config, state, console, run_dir = run.config, run.machine.state, run.console, run.keeper.folder
    has_best = state.progress.best_epoch > 0
    best = state.history[state.progress.best_epoch - 1] if has_best else state.history[-1]
    per_class = state.per_class_iou if has_best else [None] * len(class_names(config))
    result = TrainResult(
        run_dir=run_dir,
        best_epoch=int(best["epoch"]),
        best_val_iou=float(best["val_iou"]),
        per_class_iou=dict(zip(class_names(config), per_class, strict=True)),
        epochs=state.epoch,
        stopped_early=state.epoch < config.num_epochs,
        seconds=round(state.seconds, 3),
        images_per_second=len(state.history) / sum(1 / row["images_per_second"] for row in state.history),
        history=state.history,
        unwritten=run.keeper.unwritten(),
    )
    summary = dataclasses.asdict(result)
    del summary["run_dir"], summary["history"]
    run.keeper.attempt(lambda: write_result(run_dir / "result.json", summary))
    console.say()
    if result.stopped_early:
        console.say(f"Stopped early: no better {config.monitor} in {counted(config.early_stopping_patience or 0, 'epoch')}")
    if has_best:
        console.say(f"Best epoch: {result.best_epoch} of {result.epochs}, val IoU {result.best_val_iou:.4f}")
    else:
        console.warn(f"{config.monitor} was no number in any epoch (does validation hold pixels that count?); there is no {BEST}")
    console.class_table(result.per_class_iou)
    console.say(f"Time: {result.seconds:.0f} s in epochs, {result.images_per_second:.0f} images/s in training")
    if result.unwritten:
        names = " and ".join(str(run_dir / name) for name in result.unwritten)
        console.warn(f"{names} could not be written: what was trained since is lost, unless an older file there is of use")
        return result
    console.say(
        f"Weights: {run_dir / (BEST if has_best else LAST)} | table: {run_dir / 'metrics.csv'} | pictures: {run_dir / 'samples'}"
    )
    console.say(f"Next: python train_unet.py --resume {shlex.quote(str(run_dir))} num_epochs={config.num_epochs * 2}   (trains on)")
    return result


def _change_config(run: Run, config: Config) -> None:
    run.config = run.keeper.config = config


def _open_folder(folder: Path, console: Console) -> None:
    try:
        sweep_drafts(folder)
        console.log_to(folder / "train.log")
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be written to ({error.strerror}); a run needs its folder") from None


def _tell_interrupted(console: Console) -> None:
    folder = None if console.log is None else console.log.parent
    if folder is not None and has_checkpoint(folder):
        console.say(f"Interrupted. To go on where the state was saved: python train_unet.py --resume {shlex.quote(str(folder))}")
    else:
        console.say("Interrupted before anything was saved")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ? and trains on
    try:
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        if arguments[:1] == ["check"]:
            return _check(arguments[1:])
        if arguments[:1] == ["bench"]:
            return _bench(arguments[1:])
        if train(read_command_line(arguments, __doc__, own_config)).unwritten:
            return EXIT_TRAINING_FAILED
    except UserError as error:
        show_error(str(error))
        return EXIT_USER_ERROR
    except TrainingFailed as error:
        show_error(str(error))
        return EXIT_TRAINING_FAILED
    except Interrupted as interruption:
        show_error(f"interrupted by {interruption}")
        return 128 + interruption.signal_number
    except KeyboardInterrupt:
        show_error("interrupted")
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _check(arguments: Sequence[str]) -> int:
    config, json_file = read_check_command(arguments, own_config)
    from unet_trainer.check import check_data

    return EXIT_DONE if check_data(config, Console(), json_file) else EXIT_USER_ERROR


def _bench(arguments: Sequence[str]) -> int:
    config, quick, step_alone = read_bench_command(arguments, own_config)
    if step_alone:
        from unet_trainer.assemble import build_step
        from unet_trainer.stopwatch import time_step

        console = Console()
        time_step(*build_step(config, console), console)
        return EXIT_DONE
    from unet_trainer.bench import bench, choose_trials
    from unet_trainer.demo import ensure_demo
    from unet_trainer.precision import choose_device, cpu_computes_bfloat16, inspect_hardware

    if config.data_dir == DEMO_DIR:
        ensure_demo(Path(DEMO_DIR))
    device = choose_device(config.device)
    on_gpu = device.type != "cpu"
    has_bfloat16 = inspect_hardware(device).has_bfloat16 if on_gpu else cpu_computes_bfloat16()
    bench(config, choose_trials(config.batch_size, on_gpu, has_bfloat16, quick), Path(__file__), quick, Console())
    return EXIT_DONE


if __name__ == "__main__":
    leave(main())
