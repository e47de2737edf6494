"""python train_unet.py doctor: one page on what this machine and this data can do, and what a run would do; and check,
of the data.

Machine, data, the settings that a run would take with their reasons, its time and memory, and what in the config could
be better."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import (
    CommandParser,
    ScriptConfig,
    file_header,
    read_config_words,
    train_command,
)
from unet_trainer.config.choices import COMPILE_GAIN, COMPILE_SECONDS, describe_seconds
from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config
from unet_trainer.system.atomic_files import CHECK_JSON, check_output, write_output
from unet_trainer.system.console import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    Console,
    Finding,
    Level,
    counted,
    finding_lines,
    first_line,
)
from unet_trainer.system.resources import (
    ROOT,
    count_cores,
    free_disk,
    free_host_memory,
    read_if_there,
    total_host_memory,
)
from unet_trainer.training.early_checks import check_checkpoint_dir

if TYPE_CHECKING:  # a typo in the config is answered before torch and OpenCV are loaded
    from unet_trainer.config.facts import HardwareFacts, StepCost
    from unet_trainer.config.resolved_config import ResolvedConfig, Settings
    from unet_trainer.datasets.dataset_report import CheckedDataset
    from unet_trainer.loading.dataset import SegmentationDataset
    from unet_trainer.training.time_budget import Forecast, SampleCost

NUM_SAMPLES, SAMPLE_SECONDS = 32, 4.0  # that are prepared to time the loader
GIB = 2**30
OWN_MEMORY = 0.7 * GIB  # of a GPU, that a process takes by being there
OLDEST_TORCH = (2, 10)
ALBUMENTATIONS = "2.0.8"
INSTALL_PAGE = "https://pytorch.org/get-started/locally"
MEND_DRIVER = (
    "if nvidia-smi does not list it: restart, or install the driver (https://www.nvidia.com/drivers); "
    f"if the driver is too old for this torch: a newer one, or a torch for an older CUDA ({INSTALL_PAGE}); "
    "in a container: start it with --gpus all"
)
OVER_BUDGET = 1.2  # a run that takes so many times its budget is told


@dataclass
class Page:
    """Prints findings under headings as they come, and keeps them, with warnings and notes, for --json."""

    console: Console
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.console.on_message = lambda kind, text: self.findings.setdefault("messages", []).append(
            Finding("warning" if kind == "warning" else "ok", kind, text)
        )

    def show(self, section: str, findings: Sequence[Finding]) -> None:
        self.findings.setdefault(section, []).extend(findings)
        for line in finding_lines(findings):
            self.console.say(line)

    def levels(self) -> list[Level]:
        return [finding.level for findings in self.findings.values() for finding in findings]

    @contextlib.contextmanager
    def catching(self, section: str) -> Iterator[None]:
        """What would end a run with a message is a line of the page here."""
        try:
            yield
        except UserError as error:
            title, colon, detail = str(error).partition(": ")
            is_key = bool(colon) and title.isidentifier()
            self.show(section, [Finding("problem", title if is_key else section, detail if is_key else str(error))])


def check(arguments: Sequence[str], script_config: ScriptConfig) -> int:
    parser = CommandParser("check", "Reads every file of a dataset and reports what is wrong.", shared="json write")
    given = parser.parse_intermixed_args(arguments)
    config = read_config_words(given.words, script_config, "check")
    check_outputs(given)
    check_checkpoint_dir(config)  # which the contact sheet is written to

    from unet_trainer.commands.data_check import (
        check_data,
    )  # numpy and OpenCV: a typo is answered before they are loaded

    is_good = check_data(config, Console(), given.json, given.write)
    return EXIT_DONE if is_good else EXIT_USER_ERROR


def check_outputs(given: argparse.Namespace) -> None:
    """Raises UserError where --write or --json would replace another file, before minutes are spent on measuring."""
    if given.write is not None:
        check_output("--write", given.write, None)
    if given.json is not None:
        check_output("--json", given.json, CHECK_JSON)


def main(arguments: Sequence[str], script_config: ScriptConfig) -> int:
    parser = CommandParser(
        "doctor", "Says what this machine and this data can do, and what a run would do.", shared="json write"
    )
    parser.add_argument(
        "--budget", metavar="TIME", help="time that the run may take, e.g. 2h; the same as time_budget=2h"
    )
    parser.add_argument("--fast", action="store_true", help="compile nothing: the time is then an estimate")
    given = parser.parse_intermixed_args(arguments)
    words = list(given.words)
    if given.budget is not None:
        words.append(f"time_budget={given.budget}")
        if not any(word.startswith("num_epochs=") for word in words):
            words.append("num_epochs=auto")  # the budget decides it, whatever the file says
    config = read_config_words(words, script_config, "doctor")
    check_outputs(given)
    page = Page(Console())
    settings = examine(config, page, is_fast=given.fast)
    if given.write is not None and settings is None:
        page.console.say(f"--write: {given.write} was not written, because there are no settings for this data.")
    elif given.write is not None and settings is not None:
        header = file_header(given.write, "doctor", settings.taken.data_dir)
        write_output(
            "--write", given.write, settings.to_yaml(header, resume=None, encoder_weights=config.encoder_weights)
        )
        page.console.say(f"Written: {given.write}. It runs as it is: {train_command(given.write)}")
    code = EXIT_USER_ERROR if "problem" in page.levels() else EXIT_DONE
    if given.json is not None:
        findings = {section: [dataclasses.asdict(one) for one in found] for section, found in page.findings.items()}
        content = {"ok": code == EXIT_DONE, "findings": findings, **page.content}
        write_output("--json", given.json, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")
    return code


def examine(config: Config, page: Page, is_fast: bool) -> Settings | None:
    """Prints the page; returns the settings of a run, or None where the data or the device stand in the way."""
    page.console.say("Looking at this machine ...")
    from unet_trainer.datasets.dataset_report import build_dataset_report
    from unet_trainer.training.setup import package_versions

    machine = machine_findings(Path(config.checkpoint_dir), config.device != "cpu")
    page.console.say("\nMachine")
    page.show("machine", machine)
    page.content["machine"] = {"cores": count_cores(), "memory": total_host_memory(), "versions": package_versions()}
    started = time.perf_counter()  # what a run would do before it trains
    settings = dataset = None
    page.console.say(f"\nData: {config.data_dir}")
    with page.catching("data"):
        dataset = build_dataset_report(config, page.console).checked()
    if dataset is not None:
        with page.catching("run"):
            settings = _examine_run(config, dataset, page, is_fast, started)
    levels = page.levels()
    problems = f"Not ready: {counted(levels.count('problem'), 'problem')} (✗) to solve first"
    warnings = f", {counted(levels.count('warning'), 'warning')}" if "warning" in levels else ""
    page.console.say(f"\n{problems if 'problem' in levels else 'Ready to train'}{warnings}.")
    return settings


def _examine_run(config: Config, dataset: CheckedDataset, page: Page, is_fast: bool, started: float) -> Settings:
    """What a run would take, how long it would last, and what could be better."""
    from unet_trainer.training.build import build_datasets
    from unet_trainer.training.settings import build_hardware, build_probe, build_settings, known_cost, measure, review
    from unet_trainer.training.time_budget import TimeBudget

    hardware = build_hardware(config, page.console)
    budget = TimeBudget(config.time_budget, started)
    settings = build_settings(config, hardware, dataset, page.console, budget=budget, is_preview=True)
    taken, start_seconds = settings.taken, 0.0 if config.time_budget is None else budget.lost_to_training()
    page.content["settings"] = settings.explained()
    page.content["config"] = settings.repeatable_dict()
    with contextlib.closing(build_probe(config, hardware)) as probe:
        probe.image_spec = dataset.image_spec
        if taken.compile_model and not is_fast:
            page.console.say("Compiling the step, to time it (a minute or two; --fast estimates it instead) ...")
        cost, compile_seconds, failure, compile_failure = try_step(probe, taken, is_fast)
        eager_cost = known_cost(probe, taken)
    if cost is not None:
        page.console.say("\nTime and memory")
        is_estimate = is_fast and taken.compile_model
        datasets = build_datasets(taken, dataset)
        _say_forecast(settings, hardware, cost, is_estimate, datasets, page, start_seconds + compile_seconds)
    page.console.say("\nYour settings")
    facts = dataset.facts(measure(config, dataset, page.console))
    findings = review(settings, hardware, facts, eager_cost, failure, compile_failure)
    page.show("review", findings or [Finding("ok", "Settings", "nothing in them is wasteful or risky here")])
    return settings


def try_step(probe: Any, taken: ResolvedConfig, is_fast: bool) -> tuple[StepCost | None, float, str, str]:
    """Takes the step of the run as it will be taken: compiled, unless that would take too long. Its cost, the seconds
    of compiling, why it failed, and why compiling did: the cost is that of the uncompiled step then."""
    compiles = taken.compile_model
    # A trial has no time budget, which goes with num_epochs: auto only.
    tried = dataclasses.replace(taken, compile_model=compiles and not is_fast, time_budget=None)
    started, was_known = time.perf_counter(), probe.knows(tried)
    cost, compile_failure = probe(tried), ""
    if cost is None and tried.compile_model:  # training would go on uncompiled
        compile_failure = probe.failure
        cost = probe(dataclasses.replace(tried, compile_model=False))
    if cost is None or not cost.is_possible:
        return None, 0.0, probe.failure, ""
    seconds = COMPILE_SECONDS if was_known or is_fast else time.perf_counter() - started
    if compiles and is_fast:
        left = 1 - COMPILE_GAIN
        cost = dataclasses.replace(cost, seconds=left * cost.seconds, eval_seconds=left * cost.eval_seconds)
    return cost, seconds if compiles else 0.0, "", compile_failure


def _say_forecast(
    settings: Settings,
    hardware: HardwareFacts,
    cost: StepCost,
    is_estimate: bool,
    datasets: tuple[SegmentationDataset, SegmentationDataset],
    page: Page,
    start_seconds: float,
) -> None:
    from unet_trainer.training.pilots import is_open
    from unet_trainer.training.time_budget import SampleCost, forecast

    taken, (train, val) = settings.taken, datasets
    read, augment = _mean_seconds(train, range(0, len(train), max(1, len(train) // NUM_SAMPLES)))
    val_read, _ = _mean_seconds(val, range(len(val)))  # tiles of one image follow each other, and it is read once
    sample = SampleCost(read, augment, val_read)
    if taken.cache != "none":  # it is filled first
        start_seconds += sum(len(one.pairs) for one in datasets) * read / hardware.num_cores
    found = forecast(taken, len(train), len(val), cost, sample, hardware.num_cores, start_seconds, is_open(settings))
    page.show("run", forecast_findings(found, settings, hardware, cost, sample, is_estimate))
    measured = {"step": dataclasses.asdict(cost), "sample": dataclasses.asdict(sample), "start_seconds": start_seconds}
    page.content["forecast"] = {**dataclasses.asdict(found), "is_estimate": is_estimate, **measured}


def _mean_seconds(dataset: SegmentationDataset, indices: Sequence[int]) -> tuple[float, float]:
    """Of reading and of augmenting a sample, in this process."""
    started, times = time.perf_counter(), []
    for index in indices[:NUM_SAMPLES]:
        times.append(dataset.timed_sample((0, index))[2:])
        if time.perf_counter() - started > SAMPLE_SECONDS:
            break
    settled = times[1:] or times  # the first one loads code
    return sum(read for read, _ in settled) / len(settled), sum(augment for _, augment in settled) / len(settled)


def forecast_findings(
    found: Forecast, settings: Settings, hardware: HardwareFacts, cost: StepCost, sample: SampleCost, is_estimate: bool
) -> list[Finding]:
    from unet_trainer.training.pilots import has_time

    taken, rate = settings.taken, settings.taken.batch_size / cost.seconds
    per_epoch = (
        f"{found.seconds_per_epoch:.1f} s"
        if found.seconds_per_epoch < 10
        else describe_seconds(found.seconds_per_epoch)
    )
    detail = f"about {describe_seconds(found.seconds)}: {counted(found.num_epochs, 'epoch')} of {per_epoch}"
    if settings.replans():  # the number that was planned from the step alone is among the settings
        detail = f"about {describe_seconds(found.seconds)}, with as many epochs of {per_epoch} as there is time for"
    detail += f", {rate:.{0 if rate >= 10 else 1}f} images/s in the model"
    detail += f"; up to {describe_seconds(found.pilot_seconds)} of it try learning rates" if found.pilot_seconds else ""
    detail += "; a lower one gets twice the epochs" if found.pilot_seconds and has_time(settings) else ""
    detail += "; an estimate from the uncompiled step (--fast)" if is_estimate else ""
    detail += "; early stopping may end it sooner" if taken.early_stopping_patience is not None else ""
    findings = [Finding("ok", "Time", detail)]
    if found.seconds > OVER_BUDGET * settings.budget():
        detail += f"; more than time_budget: {taken.time_budget}, since a run starts up and validates once at least"
        findings = [
            Finding("warning", "Time", detail, "a longer time_budget, a smaller image_size or a smaller encoder")
        ]
    if found.memory:
        detail = (
            f"{found.memory / 2**30:.1f} GiB of the {hardware.free_memory / 2**30:.1f} GiB that are free on the GPU"
        )
        findings.append(Finding("ok", "Memory", detail))
    loading = taken.batch_size * (sample.augment_seconds + (0.0 if taken.cache != "none" else sample.read_seconds))
    if hardware.kind != "cpu" and loading / max(1, taken.num_workers) > 1.1 * cost.seconds:
        times = (
            f"reading {sample.read_seconds * 1e3:.0f} ms and augmenting {sample.augment_seconds * 1e3:.0f} ms an image"
        )
        detail = f"the GPU would wait: {times}, {counted(taken.num_workers, 'worker')}"
        findings.append(
            Finding("warning", "Loading", detail, "more cores" + ("" if taken.cache != "none" else ", or cache: ram"))
        )
    return findings


# The machine: what it can do for training, what is in the way, and what to do about it. Every probe returns what it
# could find: a broken driver is a finding, not a crash.


def machine_findings(checkpoint_dir: Path, wants_gpu: bool) -> list[Finding]:
    """`wants_gpu`: a GPU that cannot be used is a problem; else the config says device: cpu."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before this adds to it
    import torch

    from unet_trainer.training.setup import package_versions

    found = device_findings(torch, "problem" if wants_gpu else "warning")
    found += [cores_finding(load), memory_finding(), disk_finding(checkpoint_dir)]
    return found + version_findings(package_versions())


def device_findings(torch: Any, level: Level) -> list[Finding]:
    """`torch` is the module, or a stand-in for it; `level` that of a GPU that cannot be used."""
    failure = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `init` raises what `is_available` warns of
            if torch.cuda.is_available():
                return [
                    finding
                    for index in range(torch.cuda.device_count())
                    for finding in gpu_findings(torch, index, level)
                ]
            if torch.backends.mps.is_available():
                return [Finding("ok", "GPU", f"Apple GPU (mps), torch {torch.__version__}")]
            torch.cuda.init()
    except Exception as error:  # a broken driver may raise anything; that is what is reported
        failure = first_line(error)
    return [no_gpu_finding(f"torch {torch.__version__}", torch.version.cuda, failure, level)]


def gpu_findings(torch: Any, index: int, level: Level) -> list[Finding]:
    """Of one GPU that torch finds: a small calculation, and its memory."""
    hip = torch.version.hip
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index) + ("" if hip else f", compute capability {major}.{minor}")
    build = f"torch {torch.__version__} for {f'ROCm {hip}' if hip else f'CUDA {torch.version.cuda}'}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(8, device=f"cuda:{index}").sum().item()
    except Exception as error:  # as above
        fix = f"this torch may not be built for it: {INSTALL_PAGE} has builds for older and newer GPUs; or device: cpu"
        return [Finding(level, "GPU", f"{name} cannot compute with {build}: {first_line(error)}", fix)]
    findings = [Finding("ok", "GPU", f"{name}; {total / GIB:.1f} GiB, {free / GIB:.1f} GiB free; {build}")]
    if (used := total - free - OWN_MEMORY) > GIB:
        detail = f"other processes use about {used / GIB:.1f} GiB of its memory, and perhaps of its time"
        findings.append(Finding("warning", "GPU in use", detail, "nvidia-smi lists them; end them, or use another GPU"))
    return findings


def no_gpu_finding(torch: str, cuda: str | None, failure: str, level: Level) -> Finding:
    """Why torch finds no GPU. `torch`: its name and version; `cuda`: the version that it is built for; `failure`: what
    it says."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_nvidia_gpu():
        detail = "none: training runs on the CPU, in float32 and with a smaller model, many times slower than on a GPU"
        return Finding("ok", "GPU", detail)
    if cuda is None:
        detail = f"there is an NVIDIA GPU, and {torch} is built without CUDA: training would run on the CPU"
        return Finding(level, "GPU", detail, f"install a torch with CUDA: {INSTALL_PAGE}")
    if hidden is not None and hidden.strip() in ("", "-1"):
        detail = f"hidden by CUDA_VISIBLE_DEVICES={hidden!r}: training would run on the CPU"
        return Finding("warning", "GPU", detail, "unset CUDA_VISIBLE_DEVICES")
    return Finding(
        level, "GPU", f"there is an NVIDIA GPU, and {torch} (CUDA {cuda}) cannot use it ({failure})", MEND_DRIVER
    )


def has_nvidia_gpu(root: Path = ROOT) -> bool:
    """Whatever torch finds: its driver is installed, or the PCI bus lists it."""
    folders = (root / "sys/bus/pci/devices").glob("*")
    texts = ((read_if_there(folder / "vendor"), read_if_there(folder / "class")) for folder in folders)
    on_bus = any(vendor.strip() == "0x10de" and kind.startswith("0x03") for vendor, kind in texts)  # NVIDIA, a display
    return on_bus or shutil.which("nvidia-smi") is not None


def cores_finding(load: float) -> Finding:
    """`load`: processes that want to run, on average over the last minute."""
    cores, machine_cores = count_cores(), os.cpu_count() or 1
    detail = counted(cores, "core")
    if cores < machine_cores:
        detail += f" of the {machine_cores} that the machine shows (a container or an affinity limits them)"
    if load > 0.6 * machine_cores:
        detail += f"; other programs keep {min(load, machine_cores):.1f} of {machine_cores} busy"
        return Finding("warning", "Cores", detail, "times that are measured now hold under that load only")
    return Finding("ok", "Cores", detail)


def memory_finding() -> Finding:
    free = free_host_memory()
    detail = f"{free / GIB:.1f} of {total_host_memory() / GIB:.1f} GiB free"
    if free < 2 * GIB:
        return Finding(
            "warning", "Memory", detail, "end other programs, or take a smaller batch_size and num_workers: 0"
        )
    return Finding("ok", "Memory", detail)


def disk_finding(folder: Path) -> Finding:
    """Writes a file into the folder and deletes it again, and the folder too if it was not there."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    free = free_disk(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"{folder} cannot be written to ({error.strerror or error})"
        return Finding("problem", "Disk", detail, "checkpoint_dir: a folder that you may write to")
    finally:
        for place in made:
            with contextlib.suppress(OSError):
                place.rmdir()
    level: Level = "ok" if free >= 5 * GIB else "warning" if free >= GIB // 2 else "problem"
    fix = "make room, or another checkpoint_dir: a run keeps three checkpoints, up to 1 GB each with a large encoder"
    return Finding(level, "Disk", f"{folder}: {free / GIB:.1f} GiB free", "" if level == "ok" else fix)


def version_findings(versions: Mapping[str, str]) -> list[Finding]:
    """Versions, and those known to be bad."""
    short = {"segmentation-models-pytorch": "smp", "opencv-python-headless": "opencv"}
    shown = [f"{short.get(name, name)} {version}" for name, version in versions.items()]
    found = [Finding("ok", "Versions", ", ".join([f"Python {platform.python_version()}", *shown]))]
    torch, albumentations = versions.get("torch", ""), versions.get("albumentations", ALBUMENTATIONS)
    if torch and tuple(int(number) for number in re.findall(r"\d+", torch)[:2]) < OLDEST_TORCH:
        detail = f"{torch} can be made to run code by a checkpoint that it loads (CVE-2026-24747)"
        found.append(Finding("problem", "torch", detail, "python -m pip install -U 'torch>=2.10'"))
    if albumentations != ALBUMENTATIONS:
        detail = (
            f"{albumentations}; this trainer is tested with {ALBUMENTATIONS}, the last version under the MIT licence"
        )
        found.append(
            Finding("warning", "albumentations", detail, f"python -m pip install albumentations=={ALBUMENTATIONS}")
        )
    return found
