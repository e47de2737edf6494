"""python train_unet.py doctor: what this machine can do, and what a run would take; and check, of the data."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import CommandParser, ScriptConfig, file_header, read_config_words
from unet_trainer.config.auto_training import COMPILE_SECONDS
from unet_trainer.config.errors import UserError
from unet_trainer.config.parsers import describe_seconds
from unet_trainer.config.schema import Config
from unet_trainer.system.atomic_files import CHECK_JSON, check_output, write_output
from unet_trainer.system.console import EXIT_DONE, EXIT_USER_ERROR, Console, counted, first_line
from unet_trainer.system.resources import ROOT, count_cores, free_disk, read_if_there, total_host_memory
from unet_trainer.training.early_checks import check_checkpoint_dir

if TYPE_CHECKING:  # a typo in the config is answered before torch and OpenCV are loaded
    from unet_trainer.config.facts import HardwareFacts, StepCost
    from unet_trainer.config.resolved_config import ResolvedConfig, Settings
    from unet_trainer.training.trials import StepProbe

GIB = 2**30
FIX_TORCH = "install one that is built with CUDA: https://pytorch.org/get-started/locally"
FIX_DRIVER = "check that nvidia-smi lists it and update its driver; in a container, start it with --gpus all"


def check(arguments: Sequence[str], script_config: ScriptConfig) -> int:
    parser = CommandParser("check", "Reads every file of a dataset and reports what is wrong.", shared="json write")
    options = parser.parse_intermixed_args(arguments)
    config = read_config_words(options.words, script_config, "check")
    for option, path, kind in (("--write", options.write, None), ("--json", options.json, CHECK_JSON)):
        if path is not None:
            check_output(option, path, kind)
    check_checkpoint_dir(config)  # which the contact sheet is written to

    from unet_trainer.commands.data_check import check_data  # loads numpy and OpenCV

    return EXIT_DONE if check_data(config, Console(), options.json, options.write) else EXIT_USER_ERROR


def main(arguments: Sequence[str], script_config: ScriptConfig) -> None:
    parser = CommandParser("doctor", "Prints what this machine can do, and what a run would take.", shared="write")
    options = parser.parse_intermixed_args(arguments)
    config, console = read_config_words(options.words, script_config, "doctor"), Console()
    if options.write is not None:
        check_output("--write", options.write, None)
    settings = examine(config, console)
    if options.write is not None:
        header = file_header(options.write, "doctor", settings.taken.data_dir)
        text = settings.to_yaml(header, resume=None, encoder_weights=config.encoder_weights)
        write_output("--write", options.write, text)
        console.say(f"Written: {options.write}. It trains as it is.")


def examine(config: Config, console: Console) -> Settings:
    """Print all and return the settings of a run. Raises UserError for what would end one."""
    from unet_trainer.training import pilots, time_budget
    from unet_trainer.training.build import build_dataset, build_datasets
    from unet_trainer.training.initial_model import read_initial_model
    from unet_trainer.training.settings import build_settings
    from unet_trainer.training.trials import StepProbe

    budget, hardware = time_budget.TimeBudget(config.time_budget), say_machine(config, console)
    initial = None if config.init_from is None else read_initial_model(config.init_from, Path(config.checkpoint_dir))
    dataset = build_dataset(config, console, None)
    settings = build_settings(config, hardware, dataset, console, False, budget, is_preview=True, initial=initial)
    taken = settings.taken
    train, val = build_datasets(taken, dataset)
    probe = StepProbe(dataset.image_spec, console)
    # A trial has no time budget, which goes with num_epochs: auto only.
    cost = try_step(probe, dataclasses.replace(taken, time_budget=None), console)
    batch_seconds, val_seconds = time_budget.step_seconds(taken, cost, time_budget.time_samples(train, val))
    num_batches = len(train) // taken.epoch_parts // taken.batch_size
    epoch_seconds, number = num_batches * batch_seconds + len(val) * val_seconds, counted(taken.num_epochs, "epoch")
    num_steps = taken.num_epochs * -(-num_batches // taken.accumulation_steps)
    trials = pilots.is_open(settings) * time_budget.pilot_seconds(num_steps, taken.accumulation_steps * batch_seconds)
    seconds = COMPILE_SECONDS * bool(taken.compile_model) + trials + taken.num_epochs * epoch_seconds
    if settings.replans():
        seconds, number = min(budget.seconds, budget.lost_to_training() + seconds), "as many epochs as fit"
    epochs = f"{number} of {describe_seconds(epoch_seconds)}"
    console.say("A run would take:")
    console.fact("Time", time_budget.describe_run(seconds, epochs, trials, taken))
    console.fact("Step", f"{1000 * cost.seconds:.0f} ms, {taken.batch_size / cost.seconds:.3g} images/s in the model")
    if cost.memory:
        console.fact("Memory", f"{cost.memory / GIB:.1f} of {hardware.free_memory / GIB:.1f} GiB free on the GPU")
    return settings


def try_step(probe: StepProbe, config: ResolvedConfig, console: Console) -> StepCost:
    """Return the cost of a step, uncompiled if compiling fails. Raises UserError."""
    cost = probe(config)
    if cost is None and config.compile_model:  # training would go on uncompiled
        console.warn(f"compile_model: the step cannot be compiled here ({probe.failure})")
        cost = probe(dataclasses.replace(config, compile_model=False))
    if cost is None or not cost.is_possible:
        fix = "need a smaller batch_size or image_size, or batch_parts: 2"
        raise UserError(f"batch_size: a step of {config.batch_size} could not be taken ({probe.failure}); {fix}")
    return cost


def say_machine(config: Config, console: Console) -> HardwareFacts:
    """Print device, precision, cores, memory, disk and versions, and why torch does not use a GPU that is there."""
    import torch

    from unet_trainer.config.auto_training import choose_number_format
    from unet_trainer.training.settings import build_hardware
    from unet_trainer.training.setup import package_versions

    if config.device != "cpu" and (problem := unusable_gpu(torch)):
        console.warn(problem)
    hardware, versions = build_hardware(config, console), package_versions()
    console.fact("Precision", "use_amp: true computes in {}: {}".format(*choose_number_format("bfloat16", hardware)))
    console.fact("Cores", f"{count_cores()} of the machine's {os.cpu_count()}")
    gpu = f", {hardware.free_memory / GIB:.1f} GiB on the GPU" if hardware.kind == "cuda" else ""
    console.fact("Memory", f"{hardware.host_memory / GIB:.1f} of {total_host_memory() / GIB:.1f} GiB free{gpu}")
    console.fact("Disk", f"{free_disk(Path(config.checkpoint_dir)) / GIB:.1f} GiB free for {config.checkpoint_dir}")
    console.fact("Versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
        console.warn("a checkpoint can make this torch run code (CVE-2026-24747): python -m pip install 'torch>=2.10'")
    return hardware


def unusable_gpu(torch: Any) -> str:
    """Return why torch cannot use the NVIDIA GPU of this machine; "" if it can, or there is none."""
    failure, hidden = "", os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `init` raises what `is_available` warns of
            if torch.cuda.is_available() or not has_nvidia_gpu():
                return ""
            torch.cuda.init()
    except Exception as error:  # a broken driver may raise anything; that is what is reported
        failure = first_line(error)
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides the NVIDIA GPU; unset it"
    fix = FIX_TORCH if torch.version.cuda is None else FIX_DRIVER
    return f"torch {torch.__version__} cannot use the NVIDIA GPU of this machine ({failure}); {fix}"


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """Return whether its driver is installed, or the PCI bus lists a display of NVIDIA."""
    folders = (root / "sys/bus/pci/devices").glob("*")
    texts = [(read_if_there(folder / "vendor").strip(), read_if_there(folder / "class")) for folder in folders]
    return any(text[0] == "0x10de" and text[1].startswith("0x03") for text in texts) or bool(shutil.which("nvidia-smi"))
