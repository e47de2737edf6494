"""python train_unet.py bench: the same training in several precisions, each in a process of its own, as a table.

Every row is an ordinary run of the script with a few settings changed. It measures what the user gets: loader,
validation and checkpoints included.
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
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, read_config_words
from unet_trainer.config.choices import REFERENCE_BATCH, wanted_batch_size
from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.config.facts import DatasetFacts
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config, as_dict, as_shape, implied_num_classes, to_yaml
from unet_trainer.system.atomic_files import write_bytes_atomically, write_text_atomically
from unet_trainer.system.console import Console, aligned, first_line
from unet_trainer.system.input_files import read_json
from unet_trainer.system.os_errors import cannot, named_file
from unet_trainer.system.signals import ending_with_this_process
from unet_trainer.training.history import read_metrics
from unet_trainer.training.run_folder import new_run_folder

if TYPE_CHECKING:  # a typo is answered before torch is loaded
    from unet_trainer.loading.dataset import Batch
    from unet_trainer.training.build import Components

SCRIPT = Path(__file__).parents[2] / "train_unet.py"  # pip installs it beside the package too
LARGE = 4  # times batch_size, in the row that uses the memory that mixed precision saves
IOU_TOLERANCE = 0.01  # a faster row wins only if its IoU is at most this much lower
NUM_EPOCHS, QUICK_EPOCHS = 5, 2
TERMINATE_SECONDS = 20  # for a run to finish its step and save
NO_DATA_SIZE = (512, 512)  # of images, where the config leaves it to the data
NUM_ROUNDS = 5
ROUND_SECONDS = 0.3  # of each of them, about
NUM_WARM_UP = 10  # on a GPU: kernels are searched, memory is allocated, CUDA graphs are recorded
EPOCH_LINE = re.compile(r"^Epoch \d+/\d+ ")


Trials = Mapping[str, Mapping[str, Any]]  # name of a row of the table → the settings that it changes
Row = dict[str, Any]  # as bench.json has it: trial, figures unless it failed, failure, settings


def main(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    parser = CommandParser("bench", "Trains in several precisions and compares them.")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="fewer rows and epochs")
    extent.add_argument(
        "--step", action="store_true", help="no training: the config's step alone, on a batch on the device"
    )
    given = parser.parse_intermixed_args(arguments)
    config = read_config_words(given.words, script_config, "bench")
    console = Console()
    if given.step:
        time_step(*build_step(config, console), console)
        return
    from unet_trainer.datasets.dataset_report import find_dataset
    from unet_trainer.model.precision import choose_device, cpu_computes_bfloat16, inspect_hardware

    find_dataset(config, console)  # what no row could train on is told at once
    device = choose_device(config.device)
    on_gpu = device.type != "cpu"
    has_bfloat16 = inspect_hardware(device).has_bfloat16 if on_gpu else cpu_computes_bfloat16()
    if config.batch_size == "auto":
        config = dataclasses.replace(config, batch_size=wanted_batch_size(0, on_cpu=not on_gpu))
    bench(
        config, choose_trials(int(config.batch_size), on_gpu, has_bfloat16, given.quick), SCRIPT, given.quick, console
    )


def choose_trials(batch_size: int, on_gpu: bool, has_bfloat16: bool, quick: bool) -> Trials:
    """The rows that make sense on this hardware, the baseline first."""
    plain = {"use_amp": False, "compile_model": False, "channels_last": False}
    amp = {
        "use_amp": True,
        "amp_dtype": "bfloat16" if has_bfloat16 else "float16",
        "compile_model": False,
        "channels_last": True,
    }
    rows: list[tuple[str, dict[str, Any], bool, bool]] = [  # and whether it suits the hardware, and --quick has it
        ("Baseline (float32)", plain, True, True),
        ("float32 + compiled", {**plain, "compile_model": True}, not on_gpu, True),
        ("AMP", amp, on_gpu or has_bfloat16, True),
        ("AMP + large batch", {**amp, "batch_size": batch_size * LARGE}, on_gpu, False),
        ("AMP + compiled", {**amp, "compile_model": True}, on_gpu, True),
        (
            "AMP float16 + compiled",
            {**amp, "amp_dtype": "float16", "compile_model": True},
            on_gpu and has_bfloat16,
            False,
        ),
    ]
    return {name: settings for name, settings, suits, is_quick in rows if suits and (is_quick or not quick)}


def bench(config: Config, trials: Trials, script: Path, quick: bool, console: Console) -> list[Row]:
    """Runs every trial, prints the table, writes bench.json and bench.png. Raises UserError where none could run."""
    num_epochs = QUICK_EPOCHS if quick else NUM_EPOCHS
    try:
        folder = new_run_folder(Path(config.checkpoint_dir), "bench")
    except OSError as error:
        raise cannot(f"checkpoint_dir: {named_file(error) or config.checkpoint_dir}", "be written", error) from None
    console.say(f"Bench: {len(trials)} runs of {num_epochs} epochs on {config.data_dir}, in {folder}")
    rows: list[Row] = []
    with console.bar("Training:", len(trials) * num_epochs) as bar:
        for name, settings in trials.items():
            figures, failure = _run(name, settings, config, num_epochs, script, folder, bar.tick)
            rows.append({"trial": name, **figures, "failure": failure, "settings": dict(settings)})
            said = "failed ({failure})" if failure else "{images_per_second:.0f} images/s, val IoU {val_iou:.4f}"
            console.note(f"{name}: {said.format(**rows[-1])}")
    good = [row for row in rows if not row["failure"]]
    if not good:
        raise UserError(f"no run of the bench succeeded; see {folder} ({rows[0]['failure']})")
    # The fastest of those whose IoU is within the tolerance of the first one's, or of all if that has none (NaN).
    close = [row for row in good if row["val_iou"] >= good[0]["val_iou"] - IOU_TOLERANCE] or good
    winner = max(close, key=lambda row: row["images_per_second"])
    console.say()
    for line in table_lines(rows):
        console.say(line)
    console.say(f"\nFastest at the same IoU: {winner['trial']}. Its lines for your config:")
    for name, value in winner["settings"].items():
        console.say(f"  {name}: {json.dumps(value).strip(chr(34))}")
    _write(folder, config, rows, winner["trial"])
    console.say(f"Table: {folder / 'bench.json'} | picture: {folder / 'bench.png'}")
    return rows


def _run(
    trial: str,
    changes: Mapping[str, Any],
    config: Config,
    num_epochs: int,
    script: Path,
    folder: Path,
    tick: Callable[[], object],
) -> tuple[dict[str, float], str]:
    """One trial in a process of its own, whose output goes into a file beside its run: its figures, or why there are
    none."""
    name = re.sub(r"\W+", "_", trial).strip("_").lower()
    warmup = "auto" if config.warmup_epochs == "auto" else min(config.warmup_epochs, num_epochs / 2)
    settings = {
        **as_dict(config),
        **{"num_epochs": num_epochs, "time_budget": None, "warmup_epochs": warmup, "early_stopping_patience": None},
        **{"resume": None, "checkpoint_dir": str(folder), "run_name": name},
        **changes,
    }
    asked, path, lines = load_config(settings), folder / f"{name}.yaml", list[str]()
    write_text_atomically(path, to_yaml(asked, f"python train_unet.py {path}"))
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
        except BaseException:  # it finishes its step and saves, and is killed if that takes too long
            child.terminate()
            try:
                child.communicate(timeout=TERMINATE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    if child.returncode != 0:
        errors = (
            [line for line in lines if line.startswith("Error: ")] or [line for line in lines if line] or ["no output"]
        )
        return {}, errors[-1].removeprefix("Error: ")
    return _read_figures(folder / name, asked, lines)


def _read_figures(run_dir: Path, asked: Config, lines: Sequence[str]) -> tuple[dict[str, float], str]:
    """Of a run that is finished, which said these lines."""
    # Keys that it could not follow, as when compiling failed: it went on, and its figures are not those of the row.
    result, taken = read_json(run_dir / "result.json"), load_config(run_dir / "config.yaml")
    pairs = {
        "amp_dtype": (result["number_format"], asked.amp_dtype if asked.use_amp else "float32"),
        "compile_model": (result["is_compiled"], asked.compile_model),
        "batch_size": (taken.batch_size, asked.batch_size),
        "batch_parts": (taken.batch_parts, asked.batch_parts),
    }
    if changed := [key for key, (found, wanted) in pairs.items() if found != wanted]:
        reasons = (line.removeprefix("Warning: ") for line in lines if line.startswith(f"Warning: {changed[0]}: "))
        return {}, next(reasons, f"it did not run with the {', '.join(changed)} of its row")
    rows = read_metrics(run_dir / "metrics.csv")
    settled = rows[1:] or rows  # the first epoch starts workers and kernels
    return {
        "seconds_per_epoch": median(row["seconds"] for row in settled),
        "images_per_second": median(row["images_per_second"] for row in settled),
        "allocated_gib": max(row["peak_memory_gib"] for row in rows),
        "reserved_gib": max(row["peak_reserved_gib"] for row in rows),
        "data_wait": mean(row["data_wait"] for row in settled),
        "val_iou": rows[-1]["val_iou"],
        "seconds_in_all": sum(row["seconds"] for row in rows),
    }, ""


def table_lines(rows: Sequence[Row]) -> list[str]:
    first = next(row["images_per_second"] for row in rows if not row["failure"])
    table = [("", "s/epoch", "images/s", "speed-up", "memory GiB", "reserved", "data wait", "val IoU")]
    for row in rows:
        if row["failure"]:
            table.append((row["trial"], *"–––––––"))
            continue
        speed = (
            f"{row['seconds_per_epoch']:.2f}",
            f"{row['images_per_second']:.0f}",
            f"{row['images_per_second'] / first:.2f}×",
        )
        memory = (f"{row[key]:.2f}" if row[key] else "–" for key in ("allocated_gib", "reserved_gib"))
        table.append((row["trial"], *speed, *memory, f"{row['data_wait']:.0%}", f"{row['val_iou']:.4f}"))
    return [
        *aligned(table, to_the_right=True),
        *(f"{row['trial']}: {row['failure']}" for row in rows if row["failure"]),
    ]


def _write(folder: Path, config: Config, rows: Sequence[Row], winner: str) -> None:
    from unet_trainer.images.drawing import bar_chart
    from unet_trainer.images.image_decoding import encode_image

    settings = {name: as_dict(config)[name] for name in ("data_dir", "image_size", "batch_size", "encoder")}
    write_text_atomically(
        folder / "bench.json", json.dumps({**settings, "rows": rows, "winner": winner}, indent=2) + "\n"
    )
    good = [row for row in rows if not row["failure"]]
    charts = [("images/s", [row["images_per_second"] for row in good])]
    if any(memory := [row["allocated_gib"] for row in good]):
        charts.append(("peak memory, GiB", memory))
    write_bytes_atomically(
        folder / "bench.png", encode_image(bar_chart([row["trial"] for row in good], charts), ".png")
    )


# --step: the training step alone, on a batch that is on the device. No loader can be faster.


def build_step(config: Config, console: Console) -> tuple[Components, Batch]:
    """The step of a config without its data, on random RGB images, to be timed."""
    import torch

    from unet_trainer.config.resolved_config import resolve
    from unet_trainer.datasets.scan import IMAGENET_REASON
    from unet_trainer.images.image_spec import RGB_8BIT
    from unet_trainer.images.mask_decoding import MaskCoding
    from unet_trainer.model.precision import set_backends
    from unet_trainer.model.segmenter import build_spec
    from unet_trainer.training.build import build_components_with_weights
    from unet_trainer.training.compilation import compile_components, random_batches
    from unet_trainer.training.initial_model import read_initial_model
    from unet_trainer.training.settings import build_hardware, say_precision

    hardware = build_hardware(config, console)
    size = NO_DATA_SIZE if config.image_size == "auto" else as_shape(config.image_size)
    num_classes = implied_num_classes(config) or 1
    facts = DatasetFacts(
        3, RGB_8BIT.mean, RGB_8BIT.std, IMAGENET_REASON, "auto", None, "", (1.0,), [size], num_classes=num_classes
    )
    batch_size = REFERENCE_BATCH if config.batch_size == "auto" else config.batch_size
    compiles = hardware.kind == "cuda" if config.compile_model == "auto" else config.compile_model
    weights = None if config.encoder_weights == "auto" else config.encoder_weights
    step: dict[str, Any] = {
        "image_size": size,
        "batch_size": batch_size,
        "compile_model": compiles,
        "encoder_weights": weights,
    }
    data: dict[str, Any] = {"in_channels": 3, "class_weights": None, "num_epochs": 1, "time_budget": None}
    initial = None if config.init_from is None else read_initial_model(config.init_from, Path(config.checkpoint_dir))
    from_model = {} if initial is None else initial.settings(config)
    settings = resolve(dataclasses.replace(config, **step, **data), hardware, facts, from_model=from_model)
    set_backends(config.allow_tf32, config.deterministic)
    say_precision(settings, hardware, console)
    spec = build_spec(settings.taken, RGB_8BIT, MaskCoding(tuple(range(max(2, settings.taken.num_classes)))))
    components = build_components_with_weights(settings, spec, torch.device(hardware.device), 1, console)
    if settings.taken.compile_model:
        console.say("Compiling the step ...")
        compile_components(settings, components, None, console, "nothing was begun")
    return components, random_batches(settings.taken, components, None)[0]


def time_step(components: Components, batch: Batch, console: Console) -> None:
    """Times forward, loss, IoU counts, backward, the check for finite numbers and the optimizer; prints images per
    second."""
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
        take_steps(NUM_WARM_UP if on_gpu else 1)
        count = max(1, round(ROUND_SECONDS / take_steps(1)))
        times = [take_steps(count) for _ in range(NUM_ROUNDS)]
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingFailed(f"{out_of_memory_message(first_line(error), device)}. Try a smaller batch_size") from None
    seconds, size = median(times), batch.num_images
    spread = f"{size / max(times):.0f} to {size / min(times):.0f} in {NUM_ROUNDS} rounds"
    memory = f", {peak_memory_gib(device)[0]:.2f} GiB at the peak" if on_gpu else ""
    console.say(
        f"The step alone: {size / seconds:.0f} images/s at batch {size} ({1000 * seconds:.2f} ms; {spread}){memory}"
    )
