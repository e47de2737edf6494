"""python train_unet.py bench: the same training in several precisions, each in a process of its own, as a table.

Every row is an ordinary run of the script with a few settings changed. It measures what the user gets: loader, validation and
checkpoints included.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import CommandParser, Script, add_config_words, read_config_words
from unet_trainer.config.choices import REFERENCE_BATCH, wanted_batch_size
from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.config.facts import DatasetFacts
from unet_trainer.config.load import load_config
from unet_trainer.config.parsers import implied_num_classes
from unet_trainer.config.schema import Config, as_dict, as_shape, is_demo_dir, to_yaml
from unet_trainer.system.atomic_files import write_bytes_atomically, write_text_atomically
from unet_trainer.system.console import EXIT_DONE, Console, first_line
from unet_trainer.system.input_files import read_json
from unet_trainer.system.os_errors import cannot, named_file
from unet_trainer.system.signals import ending_with_this_process
from unet_trainer.training.history import read_metrics
from unet_trainer.training.run_folder import new_run_folder

if TYPE_CHECKING:  # a typo is answered before torch is loaded
    from unet_trainer.loading.dataset import Batch
    from unet_trainer.training.build import Components

LARGE = 4  # times batch_size, in the row that uses the memory that mixed precision saves
IOU_TOLERANCE = 0.01  # a faster row wins only if its IoU is at most this much lower
NUM_EPOCHS, QUICK_EPOCHS = 5, 2
TERMINATE_SECONDS = 20  # for a run to finish its step and save
NO_DATA_SIZE = (512, 512)  # of images, where the config leaves it to the data
NUM_ROUNDS = 5
ROUND_SECONDS = 0.3
NUM_WARM_UP = 10  # on a GPU: kernels are searched, memory is allocated, CUDA graphs are recorded
EPOCH_LINE = re.compile(r"^Epoch \d+/\d+ ")


@dataclass(frozen=True)
class Trial:
    """One row of the table: its name and the settings that it changes."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a trial; `failure` says why there are no figures."""

    trial: Trial
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser("train_unet.py bench", description="Trains in several precisions and compares them.")
    add_config_words(parser)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="fewer rows and epochs")
    extent.add_argument("--step", action="store_true", help="no training: the config's step alone, on a batch on the device")
    given = parser.parse_intermixed_args(arguments)
    config = read_config_words(given.words, script.config, "bench")
    console = Console()
    if given.step:
        time_step(*build_step(config, console), console)
        return EXIT_DONE
    from unet_trainer.datasets.demo import ensure_demo
    from unet_trainer.model.precision import choose_device, cpu_computes_bfloat16, inspect_hardware

    if is_demo_dir(config.data_dir):
        ensure_demo(Path(config.data_dir))
    device = choose_device(config.device)
    on_gpu = device.type != "cpu"
    has_bfloat16 = inspect_hardware(device).has_bfloat16 if on_gpu else cpu_computes_bfloat16()
    if config.batch_size == "auto":
        config = dataclasses.replace(config, batch_size=wanted_batch_size(0, on_cpu=not on_gpu))
    bench(config, choose_trials(int(config.batch_size), on_gpu, has_bfloat16, given.quick), script.path, given.quick, console)
    return EXIT_DONE


def choose_trials(batch_size: int, on_gpu: bool, has_bfloat16: bool, quick: bool) -> list[Trial]:
    """The rows that make sense on this hardware, the baseline first."""
    plain = {"use_amp": False, "compile_model": False, "channels_last": False}
    amp = {"use_amp": True, "amp_dtype": "bfloat16" if has_bfloat16 else "float16", "compile_model": False, "channels_last": True}
    rows: list[tuple[str, dict[str, Any], bool, bool]] = [  # and whether it suits the hardware, and --quick has it
        ("Baseline (float32)", plain, True, True),
        ("float32 + compiled", {**plain, "compile_model": True}, not on_gpu, True),
        ("AMP", amp, on_gpu or has_bfloat16, True),
        ("AMP + large batch", {**amp, "batch_size": batch_size * LARGE}, on_gpu, False),
        ("AMP + compiled", {**amp, "compile_model": True}, on_gpu, True),
        ("AMP float16 + compiled", {**amp, "amp_dtype": "float16", "compile_model": True}, on_gpu and has_bfloat16, False),
    ]
    return [Trial(name, settings) for name, settings, suits, is_quick in rows if suits and (is_quick or not quick)]


def bench(config: Config, trials: Sequence[Trial], script: Path, quick: bool, console: Console) -> list[Outcome]:
    """Runs every trial, prints the table, writes bench.json and bench.png. Raises UserError where none could run."""
    num_epochs = QUICK_EPOCHS if quick else NUM_EPOCHS
    try:
        folder = new_run_folder(Path(config.checkpoint_dir), "bench")
    except OSError as error:
        raise cannot(f"checkpoint_dir: {named_file(error) or config.checkpoint_dir}", "be written", error) from None
    console.say(f"Bench: {len(trials)} runs of {num_epochs} epochs on {config.data_dir}, in {folder}")
    outcomes = []
    with console.bar("Training:", len(trials) * num_epochs) as bar:
        for trial in trials:
            outcomes.append(_run(trial, config, num_epochs, script, folder, bar.tick))
            found = outcomes[-1]
            figures = "{images_per_second:.0f} images/s, val IoU {val_iou:.4f}"
            console.note(f"{trial.name}: {f'failed ({found.failure})' if found.failure else figures.format(**found.figures)}")
    good = [outcome for outcome in outcomes if not outcome.failure]
    if not good:
        raise UserError(f"no run of the bench succeeded; see {folder} ({outcomes[0].failure})")
    console.say()
    for line in table_lines(outcomes):
        console.say(line)
    winner = choose_winner(good)
    console.say()
    console.say(f"Fastest at the same IoU: {winner.trial.name}. Its lines for your config:")
    for name, value in winner.trial.settings.items():
        console.say(f"  {name}: {json.dumps(value).strip(chr(34))}")
    _write(folder, config, outcomes, winner)
    console.say(f"Table: {folder / 'bench.json'} | picture: {folder / 'bench.png'}")
    return outcomes


def _run(trial: Trial, config: Config, num_epochs: int, script: Path, folder: Path, tick: Callable[[], object]) -> Outcome:
    """One trial in a process of its own; its output goes into a file beside its run."""
    name = re.sub(r"\W+", "_", trial.name).strip("_").lower()
    warmup = "auto" if config.warmup_epochs == "auto" else min(config.warmup_epochs, num_epochs / 2)
    settings = {
        **as_dict(config),
        **{"num_epochs": num_epochs, "time_budget": None, "warmup_epochs": warmup, "early_stopping_patience": None},
        **{"resume": None, "checkpoint_dir": str(folder), "run_name": name},
        **trial.settings,
    }
    path = folder / f"{name}.yaml"
    write_text_atomically(path, to_yaml(load_config(settings), f"python train_unet.py {path}"))
    lines: list[str] = []
    command, environment = [sys.executable, str(script), str(path)], ending_with_this_process(os.environ)
    with (
        (folder / f"{name}.log").open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                log.write(line)
                lines.append(line.strip())
                if EPOCH_LINE.match(line):
                    tick()
        except BaseException:
            _terminate(child)
            raise
    if child.returncode != 0:
        errors = [line for line in lines if line.startswith("Error: ")] or [line for line in lines if line] or ["no output"]
        return Outcome(trial, failure=errors[-1].removeprefix("Error: "))
    if changed := _changed_keys(load_config(settings), folder / name):
        reasons = (line.removeprefix("Warning: ") for line in lines if line.startswith(f"Warning: {changed[0]}: "))
        return Outcome(trial, failure=next(reasons, f"it did not run with the {', '.join(changed)} of its row"))
    return _read_outcome(trial, folder / name)


def _terminate(child: subprocess.Popen[str]) -> None:
    """Ends the run: it finishes its step and saves, and is killed if that takes too long."""
    child.terminate()
    try:
        child.communicate(timeout=TERMINATE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def _changed_keys(asked: Config, run_dir: Path) -> list[str]:
    """Keys that the run could not follow, as when compiling failed: it went on, and its figures are not those of the row."""
    result, taken = read_json(run_dir / "result.json"), load_config(run_dir / "config.yaml")
    pairs = {
        "amp_dtype": (result["number_format"], asked.amp_dtype if asked.use_amp else "float32"),
        "compile_model": (result["is_compiled"], asked.compile_model),
        "batch_size": (taken.batch_size, asked.batch_size),
        "batch_parts": (taken.batch_parts, asked.batch_parts),
    }
    return [name for name, (found, wanted) in pairs.items() if found != wanted]


def _read_outcome(trial: Trial, run_dir: Path) -> Outcome:
    rows = read_metrics(run_dir / "metrics.csv")
    settled = rows[1:] or rows  # the first epoch starts workers and kernels
    figures = {
        "seconds_per_epoch": median(row["seconds"] for row in settled),
        "images_per_second": median(row["images_per_second"] for row in settled),
        "allocated_gib": max(row["peak_memory_gib"] for row in rows),
        "reserved_gib": max(row["peak_reserved_gib"] for row in rows),
        "data_wait": mean(row["data_wait"] for row in settled),
        "val_iou": rows[-1]["val_iou"],
        "seconds_in_all": sum(row["seconds"] for row in rows),
    }
    return Outcome(trial, figures)


def choose_winner(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of those whose IoU is within the tolerance of the baseline's, or of all if that has none (NaN)."""
    least = outcomes[0].figures["val_iou"] - IOU_TOLERANCE
    close = [outcome for outcome in outcomes if outcome.figures["val_iou"] >= least]
    return max(close or outcomes, key=lambda outcome: outcome.figures["images_per_second"])


def table_lines(outcomes: Sequence[Outcome]) -> list[str]:
    first = next(outcome.figures["images_per_second"] for outcome in outcomes if not outcome.failure)
    header = ("", "s/epoch", "images/s", "speed-up", "memory GiB", "reserved", "data wait", "val IoU")
    rows: list[Sequence[str]] = [header]
    for one in outcomes:
        if one.failure:
            rows.append((one.trial.name, *["–"] * (len(header) - 1)))
            continue
        seconds, rate, *memory, data_wait, iou, _ = one.figures.values()
        memory_texts = [f"{gib:.2f}" if gib else "–" for gib in memory]
        texts = (f"{seconds:.2f}", f"{rate:.0f}", f"{rate / first:.2f}×", *memory_texts, f"{data_wait:.0%}", f"{iou:.4f}")
        rows.append((one.trial.name, *texts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    failures = [f"{outcome.trial.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]
    return [*lines, *failures]


def _write(folder: Path, config: Config, outcomes: Sequence[Outcome], winner: Outcome) -> None:
    from unet_trainer.images.drawing import bar_chart
    from unet_trainer.images.image_decoding import encode_image

    rows = [
        {"trial": one.trial.name, **one.figures, "failure": one.failure, "settings": dict(one.trial.settings)} for one in outcomes
    ]
    settings = {name: as_dict(config)[name] for name in ("data_dir", "image_size", "batch_size", "encoder")}
    report = {**settings, "rows": rows, "winner": winner.trial.name}
    write_text_atomically(folder / "bench.json", json.dumps(report, indent=2) + "\n")
    good = [outcome for outcome in outcomes if not outcome.failure]
    charts = [("images/s", [outcome.figures["images_per_second"] for outcome in good])]
    if any(memory := [outcome.figures["allocated_gib"] for outcome in good]):
        charts.append(("peak memory, GiB", memory))
    picture = encode_image(bar_chart([outcome.trial.name for outcome in good], charts), ".png")
    write_bytes_atomically(folder / "bench.png", picture)


# --step: the training step alone, on a batch that is on the device. No loader can be faster.


def build_step(config: Config, console: Console) -> tuple[Components, Batch]:
    """The step of a config without its data, on random RGB images, to be timed."""
    import torch

    from unet_trainer.config.resolve import resolve
    from unet_trainer.datasets.scan import IMAGENET_REASON
    from unet_trainer.images.image_spec import RGB_8BIT
    from unet_trainer.images.mask_decoding import MaskCoding
    from unet_trainer.model.precision import set_backends
    from unet_trainer.model.segmenter import build_spec
    from unet_trainer.training.build import build_components_with_weights
    from unet_trainer.training.compilation import compile_components, random_batches
    from unet_trainer.training.settings import build_hardware, say_precision

    hardware = build_hardware(config, console)
    size = NO_DATA_SIZE if config.image_size == "auto" else as_shape(config.image_size)
    num_classes = implied_num_classes(config.class_names, config.class_weights, config.mask_values) or 1
    facts = DatasetFacts(3, RGB_8BIT.mean, RGB_8BIT.std, IMAGENET_REASON, "auto", None, "", (1.0,), [size], num_classes=num_classes)
    batch_size = REFERENCE_BATCH if config.batch_size == "auto" else config.batch_size
    compiles = hardware.kind == "cuda" if config.compile_model == "auto" else config.compile_model
    weights = None if config.encoder_weights == "auto" else config.encoder_weights
    step: dict[str, Any] = {"image_size": size, "batch_size": batch_size, "compile_model": compiles, "encoder_weights": weights}
    data: dict[str, Any] = {"in_channels": 3, "class_weights": None, "num_epochs": 1, "time_budget": None}
    settings = resolve(dataclasses.replace(config, **step, **data), hardware, facts)
    set_backends(config.allow_tf32, config.deterministic, search_kernels=settings.taken.compile_model)
    say_precision(settings, hardware, console)
    spec = build_spec(settings.taken, RGB_8BIT, MaskCoding(tuple(range(max(2, settings.taken.num_classes)))))
    components = build_components_with_weights(settings, spec, torch.device(hardware.device), 1, console)
    if settings.taken.compile_model:
        console.say("Compiling the step ...")
        compile_components(settings, components, None, console, "nothing was begun")
    return components, random_batches(settings.taken, components, None)[0]


def time_step(components: Components, batch: Batch, console: Console) -> None:
    """Times forward, loss, IoU counts, backward, the check for finite numbers and the optimizer; prints images per second."""
    from unet_trainer.training.compilation import is_out_of_memory, out_of_memory_message, peak_memory_gib
    from unet_trainer.training.state import EpochMetrics

    device, step = components.numerics.device, components.train_step
    batch = batch._replace(images=batch.images.to(device), masks=batch.masks.to(device))
    components.set_training_mode(0)
    metrics = EpochMetrics(components.state.segmenter.spec.num_classes, device)

    def take_steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step.begin_group(1, 0)
            step(batch, metrics)
            step.optimizer_step(metrics, learning_rate=1e-4)
        metrics.loss()  # waits for the device
        return (time.perf_counter() - started) / count

    on_gpu = device.type == "cuda"
    try:
        times = rounds(take_steps, NUM_WARM_UP if on_gpu else 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingFailed(f"{out_of_memory_message(first_line(error), device)}. Try a smaller batch_size") from None
    seconds, size = median(times), batch.num_images
    spread = f"{size / max(times):.0f} to {size / min(times):.0f} in {NUM_ROUNDS} rounds"
    memory = f", {peak_memory_gib(device)[0]:.2f} GiB at the peak" if on_gpu else ""
    console.say(f"The step alone: {size / seconds:.0f} images/s at batch {size} ({1000 * seconds:.2f} ms; {spread}){memory}")


def rounds(take_steps: Callable[[int], float], num_warm_up: int) -> list[float]:
    """Seconds of a step in each of NUM_ROUNDS rounds of about ROUND_SECONDS."""
    take_steps(num_warm_up)
    count = max(1, round(ROUND_SECONDS / take_steps(1)))
    return [take_steps(count) for _ in range(NUM_ROUNDS)]
