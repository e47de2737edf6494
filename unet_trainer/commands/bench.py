"""python train_unet.py bench: trains in several precisions, each in a separate process, and prints a table.

Every row is an ordinary run with loader, validation and checkpoints; `--step` times the training step alone."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, read_config_words
from unet_trainer.config.auto_training import wanted_batch_size
from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.config.facts import DatasetFacts
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config, as_dict, as_shape, implied_num_classes, to_yaml
from unet_trainer.runs.folder import RUN_JSON, new_run_folder
from unet_trainer.runs.record import read_run_file
from unet_trainer.runs.tables import read_metrics
from unet_trainer.system.atomic_files import write_bytes_atomically, write_text_atomically
from unet_trainer.system.console import Console, aligned, cause_line
from unet_trainer.training.early_checks import check_before_imports

SCRIPT = Path(__file__).parents[2] / "train_unet.py"  # pip installs it next to the package too
NUM_EPOCHS = 5  # the first one, which starts workers and kernels, does not count


def main(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    parser = CommandParser("bench", "Trains in several precisions and compares them.")
    parser.add_argument("--step", action="store_true", help="no training: time the config's step alone, on random data")
    options = parser.parse_intermixed_args(arguments)
    config, console = read_config_words(options.words, script_config, "bench"), Console()
    if options.step:
        return time_step(config, console)
    check_before_imports(config)
    from unet_trainer.data.find import find_dataset
    from unet_trainer.model.precision import choose_device, cpu_computes_bfloat16, inspect_hardware

    find_dataset(config, console)  # reports data that no row could train on
    device = choose_device(config.device)
    on_gpu = device.type != "cpu"
    has_bfloat16 = inspect_hardware(device).has_bfloat16 if on_gpu else cpu_computes_bfloat16()
    batch_size = wanted_batch_size(0, not on_gpu) if config.batch_size == "auto" else config.batch_size
    rows = choose_rows(batch_size, on_gpu, has_bfloat16)
    return bench(dataclasses.replace(config, batch_size=batch_size), rows, console)


def choose_rows(batch_size: int, on_gpu: bool, has_bfloat16: bool) -> dict[str, dict[str, Any]]:
    """Return the settings that each row changes, the baseline first; mixed precision where the device computes it."""
    plain: dict[str, Any] = {"use_amp": False, "compile_model": False}
    if not (on_gpu or has_bfloat16):
        return {"float32": plain, "float32 + compiled": plain | {"compile_model": True}}
    amp = plain | {"use_amp": True, "amp_dtype": "bfloat16" if has_bfloat16 else "float16"}
    larger = {"AMP + larger batch": amp | {"batch_size": 4 * batch_size}} if on_gpu else {}
    return {"float32": plain, "AMP": amp, **larger, "AMP + compiled": amp | {"compile_model": True}}


def bench(config: Config, rows: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Train each row and print the table. Raises UserError if no row could be trained."""
    folder = new_run_folder(Path(config.checkpoint_dir), "bench")
    console.say(f"Bench: {len(rows)} runs of {NUM_EPOCHS} epochs on {config.data_dir}, in {folder}")
    figures: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    for name, changes in rows.items():
        try:
            figures[name] = train_row(name, changes, config, folder)
            console.note(f"{name}: {figures[name]['images_per_second']:.0f} images/s")
        except TrainingFailed as error:
            failures.append(f"{name}: {error}")
            console.note(f"{name} failed: {error}")
    if not figures:
        raise UserError(f"no run of the bench succeeded; see {folder} ({failures[0]})")
    console.say("\n".join(["", *table_lines(figures), *failures]))


def train_row(name: str, changes: Mapping[str, Any], config: Config, folder: Path) -> dict[str, float]:
    """Train in a separate process and return its figures. Raises TrainingFailed."""
    run_name = re.sub(r"\W+", "_", name).lower()
    always = {"num_epochs": NUM_EPOCHS, "time_budget": None, "warmup_epochs": "auto", "early_stopping_patience": None}
    own, path = {"resume": None, "checkpoint_dir": str(folder), "run_name": run_name}, folder / f"{run_name}.yaml"
    requested = load_config({**as_dict(config), **always, **own, **changes})
    write_text_atomically(path, to_yaml(requested, f"python train_unet.py {path}"))
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = subprocess.run([sys.executable, SCRIPT, path], **streams)
    write_bytes_atomically(folder / f"{run_name}.log", child.stdout)
    lines = [line for line in child.stdout.decode(errors="replace").splitlines() if line.strip()] or ["no output"]
    if child.returncode:
        reasons = [line for line in lines if line.startswith("Error: ")] or lines
        raise TrainingFailed(reasons[-1].removeprefix("Error: "))
    result = read_run_file(folder / run_name / RUN_JSON).result
    actual = as_dict(load_config(folder / run_name / "config.yaml"))
    actual |= {"amp_dtype": result["number_format"], "compile_model": result["is_compiled"]}
    wanted = as_dict(requested) | ({} if requested.use_amp else {"amp_dtype": "float32"})
    for key in ("amp_dtype", "compile_model", "batch_size", "batch_parts"):
        if actual[key] != wanted[key]:  # as when compiling failed: the figures are not those of the row
            warnings = (line.removeprefix("Warning: ") for line in lines if line.startswith(f"Warning: {key}: "))
            raise TrainingFailed(next(warnings, f"it did not run with the {key} of its row"))
    epochs = read_metrics(folder / run_name / "metrics.csv")
    last = {"memory": max(epoch["peak_memory_gib"] for epoch in epochs), "val_iou": epochs[-1]["val_iou"]}
    return last | {key: median(epoch[key] for epoch in epochs[1:]) for key in ("seconds", "images_per_second")}


def table_lines(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    table = [("", "s/epoch", "images/s", "speed-up", "memory GiB", "val IoU")]
    first = next(iter(figures.values()))["images_per_second"]
    for name, row in figures.items():
        speed = f"{row['images_per_second']:.0f}", f"{row['images_per_second'] / first:.2f}×"
        memory = f"{row['memory']:.2f}" if row["memory"] else "–"
        table.append((name, f"{row['seconds']:.2f}", *speed, memory, f"{row['val_iou']:.4f}"))
    return aligned(table, to_the_right=True)


def time_step(config: Config, console: Console) -> None:
    """Time forward, loss, IoU counts, backward and the optimizer on random RGB images; print images per second."""
    from unet_trainer.config.auto import resolve
    from unet_trainer.images.image_spec import RGB_8BIT
    from unet_trainer.training.initial_model import read_initial_model
    from unet_trainer.training.memory import is_out_of_memory
    from unet_trainer.training.settings import build_hardware, say_precision
    from unet_trainer.training.trials import measure_step

    hardware = build_hardware(config, console)
    size = (512, 512) if config.image_size == "auto" else as_shape(config.image_size)
    changes: dict[str, Any] = {"image_size": size, "in_channels": 3, "class_weights": None, "encoder_weights": None}
    changes |= {"num_epochs": 1, "time_budget": None}
    if config.batch_size == "auto":
        changes["batch_size"] = wanted_batch_size(0, hardware.kind == "cpu")
    if config.compile_model == "auto":
        changes["compile_model"] = hardware.kind == "cuda"
    statistics, num_classes = (RGB_8BIT.mean, RGB_8BIT.std, ""), implied_num_classes(config) or 1
    data = DatasetFacts(3, *statistics, "auto", None, "", (1.0,), [size], num_classes=num_classes)
    initial = None if config.init_from is None else read_initial_model(config.init_from, Path(config.checkpoint_dir))
    from_model = {} if initial is None else initial.settings(config)
    settings = resolve(dataclasses.replace(config, **changes), hardware, data, from_model=from_model)
    say_precision(settings, hardware, console)
    try:
        cost = measure_step(settings.taken, RGB_8BIT, is_batch_on_device=True)
    except (RuntimeError, MemoryError) as error:
        fix = ". Try a smaller batch_size" if is_out_of_memory(error) else ""
        raise TrainingFailed(f"the step could not be taken ({cause_line(error)}){fix}") from error
    speed = f"{settings.taken.batch_size / cost.seconds:.0f} images/s at batch {settings.taken.batch_size}"
    memory = f", {cost.memory / 2**30:.2f} GiB" if cost.memory else ""
    console.say(f"The step alone: {speed} ({1000 * cost.seconds:.2f} ms){memory}")
