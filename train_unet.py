"""Train a U-Net on a folder of images and masks.

    python train_unet.py                                    the CONFIG below: the demo, out of the box
    python train_unet.py configs/fast.yaml                  a YAML file (--config FILE is the same)
    python train_unet.py configs/fast.yaml batch_size=16    and overrides, key=value
    python train_unet.py --resume [RUN or FILE]             go on: the newest run, or that one
    python train_unet.py check [CONFIG] data_dir=...        read every file, report what is wrong (--json FILE: for programs)

From Python: from train_unet import train; result = train({"data_dir": "data/mine", "use_amp": True})

configs/default.yaml lists every key with its meaning.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.atomic import write_text_atomically
from unet_trainer.config import DEMO_DIR, OTHER_TOOLS_NAMES, Config, UserError, as_dict, class_names, load_config, to_yaml
from unet_trainer.console import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TRAINING_FAILED, EXIT_USER_ERROR, Console, show_error
from unet_trainer.runs import BEST, LAST, SPLIT_TABLE, CheckpointError, find_run, new_run_folder, newest_run

if TYPE_CHECKING:  # torch takes seconds to import; a typo in the config is answered before that
    from unet_trainer.assemble import Data, Machine
    from unet_trainer.history import Row
    from unet_trainer.metrics import Scores

# What `python train_unet.py` trains. Edit it, or leave it and name a file from configs/.
CONFIG: dict[str, Any] = {
    "data_dir": "data/demo",  # your folder with images/ and masks/; the demo is made when it is missing
    "batch_size": 8,
    "use_amp": False,  # True: bfloat16, at least twice as fast on a GPU
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


class TrainingFailed(RuntimeError):
    """Training cannot go on; the message says why, what is saved and what to try."""


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


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    on_epoch: Callable[[Row], object] | None = None,
    **overrides: Any,
) -> TrainResult:
    """Trains by a config (a dict, a path to a YAML file or a Config; CONFIG when left out) plus overrides.

    `on_epoch` is called with the row of each epoch once it is saved. Raises UserError for what the user can mend and
    TrainingFailed when the numbers go bad.
    """
    config = own_config(overrides) if config is None else load_config(config, overrides)
    console = Console()
    try:
        return _train(config, console, on_epoch)
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


def _train(config: Config, console: Console, on_epoch: Callable[[Row], object] | None) -> TrainResult:
    """Config → build → resume → epochs → report."""
    started = time.perf_counter()

    from unet_trainer import assemble, checkpoint
    from unet_trainer.tables import table_text

    console.say("U-Net trainer")
    earlier_file = _checkpoint_to_resume(config)
    earlier = None if earlier_file is None else checkpoint.read_last(earlier_file)

    config, numerics = assemble.build_numerics(config, console)
    config, data = assemble.build_data(config, console, numerics.device, earlier_file.parent if earlier_file else None)
    machine = assemble.build_machine(config, numerics, data.form, len(data.train), console, resumes=earlier is not None)
    state = machine.state

    if earlier is not None and earlier_file is not None:
        run_dir = earlier_file.parent
        changes = checkpoint.compare_configs(earlier["config"], as_dict(config))
        checkpoint.compare_splits(earlier["split"], checkpoint.split_names(data.split))
        state.load_state_dict(earlier)
        if config.num_epochs < state.epoch:
            raise UserError(f"num_epochs: {config.num_epochs} is less than the {state.epoch} epochs that {run_dir} has; need more")
        console.log_to(run_dir / "train.log")
        _tell_resumed(config, earlier, machine, changes, console)
    else:
        assemble.try_machine(config, machine)
        run_dir = _start_folder(config)
        console.log_to(run_dir / "train.log")
        write_text_atomically(run_dir / SPLIT_TABLE, table_text(data.split.train, data.split.val, Path(config.data_dir)))
    console.fact("Run", str(run_dir))

    if state.epoch >= config.num_epochs or state.progress.is_out_of_patience(config.early_stopping_patience):
        _tell_finished_before(config, state.epoch, run_dir, console)
        return _report(config, machine, run_dir, console)
    if config.compile_model:
        console.say("Compiling the step (once; a minute or two) ...")
        before = time.perf_counter()
        config = assemble.compile_machine(config, machine, console)
        if config.compile_model:
            console.say(f"✓ Compiled in {time.perf_counter() - before:.0f} s")
    if earlier is None:
        _write_config(config, run_dir)
    console.fact("Start-up", f"{time.perf_counter() - started:.1f} s")
    _run_epochs(config, data, machine, run_dir, console, on_epoch)
    return _report(config, machine, run_dir, console)


def _write_config(config: Config, run_dir: Path) -> None:
    """What the run is trained with, to run again or to go on with."""
    header = f"Settings of this run. To run them again: python train_unet.py {shlex.quote(str(run_dir / 'config.yaml'))}"
    kept = dataclasses.replace(config, resume=None, run_name=run_dir.name)
    write_text_atomically(run_dir / "config.yaml", to_yaml(kept, header))


def _run_epochs(
    config: Config, data: Data, machine: Machine, run_dir: Path, console: Console, on_epoch: Callable[[Row], object] | None
) -> None:
    """Train, validate, judge, save; until the last epoch or until patience runs out."""
    state = machine.state
    on_gpu = machine.numerics.device.type == "cuda"
    while state.epoch < config.num_epochs and not state.progress.is_out_of_patience(config.early_stopping_patience):
        epoch_started = time.perf_counter()
        console.epoch_begins(state.epoch + 1, config.num_epochs)
        row = train_one_epoch(data, machine, console)
        scores = evaluate(data, machine, console, row)
        row["seconds"] = time.perf_counter() - epoch_started
        if not math.isfinite(row["val_loss"]) or not math.isfinite(row["train_loss"]):
            raise TrainingFailed(_non_finite_message(state.epoch, run_dir, config))

        # The state is final before anything is saved.
        state.epoch += 1
        state.seconds += row["seconds"]
        improved = state.progress.update(float(row[config.monitor]), state.epoch)
        state.learning_rate.end_epoch(state.progress.epochs_since_best)
        state.history.append(row)
        if improved:
            state.per_class_iou = scores.per_class_iou
        try:
            _save_epoch(config, data, machine, run_dir, row, improved)
        except OSError as error:
            raise TrainingFailed(_not_saved_message(error, state.epoch, run_dir)) from None
        console.epoch_ends(row, config.num_epochs, improved, on_gpu)
        if on_epoch is not None:
            on_epoch(dict(row))


def _save_epoch(config: Config, data: Data, machine: Machine, run_dir: Path, row: Row, improved: bool) -> None:
    """What a finished epoch leaves on disk; each file whole or as it was."""
    from unet_trainer import checkpoint
    from unet_trainer.history import write_metrics
    from unet_trainer.images import write_image

    state = machine.state
    if improved:
        checkpoint.save_best(run_dir / BEST, machine.eval_step.model, as_dict(config), state.epoch, row)
        (run_dir / "samples").mkdir(exist_ok=True)
        write_image(run_dir / "samples" / f"epoch_{state.epoch:04d}.png", machine.draw_samples(data))
    checkpoint.save_last(run_dir / LAST, state, as_dict(config), data.split)
    write_metrics(run_dir / "metrics.csv", state.history)
    _write_config(config, run_dir)  # here and not earlier: settings that fail in their first epoch are not kept


def train_one_epoch(data: Data, machine: Machine, console: Console) -> Row:
    """One pass over the training images; the part of the epoch's row that it fills."""
    import torch

    from unet_trainer.step import Totals

    state, accumulation = machine.state, machine.accumulation_steps
    device = machine.numerics.device
    num_batches = len(data.train)
    first_step = state.epoch * state.learning_rate.steps_per_epoch
    totals = Totals(machine.num_classes, device)
    machine.set_training(state.epoch)
    learning_rate = 0.0
    waited = 0.0
    started = time.perf_counter()
    with console.bar(f"Epoch {state.epoch + 1} [Train]:", num_batches) as bar:
        batches = data.train.epoch(state.epoch)
        for index in range(num_batches):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            window_start = index - index % accumulation
            window = min(accumulation, num_batches - window_start)  # the last one of an epoch may be short
            learning_rate = state.learning_rate.at(first_step + index // accumulation)
            machine.train_step(batch, totals, window, index + 1 == window_start + window, learning_rate)
            bar.tick()
            if (seen := totals.peek()) is not None:
                bar.show(*seen)
        loss, iou = totals.loss(), totals.scores().iou  # waits for the device, once an epoch
        bar.show(loss, iou)
    seconds = time.perf_counter() - started
    return {
        "epoch": state.epoch + 1,
        "train_loss": loss,
        "train_iou": iou,
        "learning_rate": learning_rate,
        "images_per_second": totals.num_images / seconds,
        "data_wait": waited / seconds,
        "skipped_steps": int(totals.num_skipped),
        # Since the start: a CUDA graph takes its memory when it is recorded, and shows nothing when it is replayed.
        "peak_memory_gb": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0,
    }


def evaluate(data: Data, machine: Machine, console: Console, row: Row) -> Scores:
    """One pass over the validation images; fills in the epoch's row."""
    from unet_trainer.step import Totals

    totals = Totals(machine.num_classes, machine.numerics.device)
    machine.eval_step.model.eval()
    with console.bar(f"Epoch {machine.state.epoch + 1} [Val]:  ", len(data.val)) as bar:
        for batch in data.val.epoch(0):
            machine.eval_step(batch, totals)
            bar.tick()
            if (seen := totals.peek()) is not None:
                bar.show(*seen)
        scores = totals.scores()
        row.update(val_loss=totals.strict_loss(), val_iou=scores.iou, val_dice=scores.dice)
        bar.show(row["val_loss"], row["val_iou"])
    return scores


def _report(config: Config, machine: Machine, run_dir: Path, console: Console) -> TrainResult:
    """Says what came of the run and writes result.json."""
    from unet_trainer.history import write_result

    state = machine.state
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
    )
    summary = dataclasses.asdict(result)
    del summary["run_dir"], summary["history"]
    write_result(run_dir / "result.json", summary)
    console.say()
    if result.stopped_early:
        console.say(f"Stopped early: no better {config.monitor} in {config.early_stopping_patience} epochs")
    if has_best:
        console.say(f"Best epoch: {result.best_epoch} of {result.epochs}, val IoU {result.best_val_iou:.4f}")
    else:
        console.warn(f"{config.monitor} was no number in any epoch (does validation hold pixels that count?); there is no {BEST}")
    console.class_table(result.per_class_iou)
    console.say(f"Time: {result.seconds:.0f} s in epochs, {result.images_per_second:.0f} images/s in training")
    console.say(
        f"Weights: {run_dir / (BEST if has_best else LAST)} | table: {run_dir / 'metrics.csv'} | pictures: {run_dir / 'samples'}"
    )
    console.say(f"Next: python train_unet.py --resume {shlex.quote(str(run_dir))} num_epochs={config.num_epochs * 2}   (trains on)")
    return result


def _checkpoint_to_resume(config: Config) -> Path | None:
    if config.resume is None:
        return None
    if config.resume != "auto":
        return find_run(config.resume, Path(config.checkpoint_dir))
    last = Path(config.checkpoint_dir) / config.run_name / LAST
    return last if last.exists() else None


def _start_folder(config: Config) -> Path:
    """A folder for a new run. With resume: auto the name is kept, or the next start would not find it."""
    try:
        if config.resume == "auto":
            folder = Path(config.checkpoint_dir) / config.run_name
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        return new_run_folder(Path(config.checkpoint_dir), config.run_name)
    except OSError as error:
        raise UserError(f"checkpoint_dir: {config.checkpoint_dir} cannot be written to ({error.strerror})") from None


def _tell_resumed(config: Config, earlier: Mapping[str, Any], machine: Machine, changes: Sequence[str], console: Console) -> None:
    state = machine.state
    console.say(
        f"Resuming after epoch {state.epoch}; best {config.monitor} so far "
        f"{state.progress.best_value:.4f} (epoch {state.progress.best_epoch})"
    )
    for change in changes:
        console.note(f"changed since then: {change}")
    horizon = earlier["config"]["num_epochs"]
    if horizon != config.num_epochs and state.epoch < config.num_epochs:
        rate = state.learning_rate.at(state.epoch * state.learning_rate.steps_per_epoch)
        how = (
            "stays" if config.scheduler in ("constant", "plateau") else f"now spans {config.num_epochs} epochs instead of {horizon}"
        )
        console.note(f"the {config.scheduler} schedule {how}; the learning rate goes on at {rate:.2e}")


def _tell_finished_before(config: Config, epoch: int, run_dir: Path, console: Console) -> None:
    command = f"python train_unet.py --resume {shlex.quote(str(run_dir))}"
    if epoch >= config.num_epochs:
        console.note(
            f"this run had finished its {config.num_epochs} epochs; to train on: {command} num_epochs={config.num_epochs * 2}"
        )
    else:
        console.note(f"this run had stopped early after epoch {epoch}; to train on: {command} early_stopping_patience=null")


def _tell_interrupted(console: Console) -> None:
    run_dir = None if console.log is None else console.log.parent
    if run_dir is not None and (run_dir / LAST).exists():
        console.say(
            f"Interrupted. To go on after the last finished epoch: python train_unet.py --resume {shlex.quote(str(run_dir))}"
        )
    else:
        console.say("Interrupted before an epoch was finished; nothing is saved")


def _non_finite_message(epoch: int, run_dir: Path, config: Config) -> str:
    saved = f"the state after epoch {epoch} is in {run_dir / 'last.pt'}" if epoch else "no epoch was finished"
    ideas = ["a lower learning_rate", "grad_clip: 1.0"]
    ideas += ["use_amp: false"] if config.use_amp else []
    return f"the loss is no longer a finite number in epoch {epoch + 1}; {saved}. Try {', '.join(ideas)}"


def _not_saved_message(error: OSError, epoch: int, run_dir: Path) -> str:
    kept = f"{LAST} there still holds an earlier epoch, whole" if (run_dir / LAST).exists() else "nothing was saved before"
    return f"epoch {epoch} could not be saved in {run_dir} ({error.strerror}); {kept}. Make room and resume, or set checkpoint_dir"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ? and trains on
    try:
        arguments = list(sys.argv[1:] if arguments is None else arguments)
        if arguments[:1] == ["check"]:
            return _check(arguments[1:])
        train(_read_command_line(arguments))
    except UserError as error:
        show_error(str(error))
        return EXIT_USER_ERROR
    except TrainingFailed as error:
        show_error(str(error))
        return EXIT_TRAINING_FAILED
    except KeyboardInterrupt:
        show_error("interrupted")
        return EXIT_INTERRUPTED
    return EXIT_DONE


def _check(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("train_unet.py check", description="Reads every file of a dataset and reports what is wrong.")
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, and settings that override it")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report there as well, for programs")
    given = parser.parse_intermixed_args(arguments)
    files, overrides = _sort_words(given.words)
    config = load_config(Path(files[0]), overrides) if files else own_config(overrides)
    from unet_trainer.check import check_data

    return EXIT_DONE if check_data(config, Console(), given.json) else EXIT_USER_ERROR


def _sort_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Config files (one at most) and key=value overrides."""
    overrides = [word for word in words if _is_override(word)]
    files = [word for word in words if not _is_override(word)]
    if len(files) > 1:
        raise UserError(f"got {len(files)} config files ({', '.join(files)}); need one, and key=value for the rest")
    return files, overrides


def _read_command_line(arguments: Sequence[str]) -> Config:
    """The config that a training command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CONFIG | key=value", help="a YAML file, and settings that override it")
    parser.add_argument("--config", metavar="FILE", help="the YAML file, if not given by position")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="RUN", help="go on with the newest run, or with a run's name, folder or .pt file"
    )
    given, unknown = parser.parse_known_intermixed_args(arguments)
    words = given.words + [word for word in unknown if not word.startswith("-")]  # left over behind an unknown option
    options = [word for word in unknown if word.startswith("-")]
    if given.resume is not None and (_is_override(given.resume) or given.resume.endswith((".yaml", ".yml"))):
        words.append(given.resume)  # --resume key=value: the newest run, with an override
        given.resume = ""
    if options:
        raise UserError("; ".join(_unknown_option(option) for option in options))
    files, overrides = _sort_words([*words, *([given.config] if given.config else [])])
    if given.resume is None:
        return load_config(Path(files[0]), overrides) if files else own_config(overrides)
    return load_config(*_resume_source(given.resume, files, overrides))


def _resume_source(run: str, files: Sequence[str], overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """--resume: the named config, or else the run's own; and where to go on from."""
    own = dict(override.split("=", 1) for override in overrides)
    checkpoint_dir = Path(own.get("checkpoint_dir") or (load_config(Path(files[0])) if files else own_config()).checkpoint_dir)
    file = find_run(run, checkpoint_dir) if run else newest_run(checkpoint_dir)
    if not files and not (file.parent / "config.yaml").is_file():
        raise CheckpointError(f"{file.parent} has no config.yaml; name the config: python train_unet.py CONFIG --resume {file}")
    return Path(files[0]) if files else file.parent / "config.yaml", [*overrides, f"resume={file}"]


def _is_override(word: str) -> bool:
    return "=" in word and word.partition("=")[0].strip().replace("-", "_").isidentifier()


def _unknown_option(option: str) -> str:
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    name = OTHER_TOOLS_NAMES.get(name, name)
    return f"{option}: unknown option" + (f"; settings are given as {name}=VALUE" if name else "")


if __name__ == "__main__":
    sys.exit(main())
