"""python train_unet.py doctor: one page on what this machine and this data can do, and what a run would do.

Machine, data, the settings that a run would take with their reasons, its time and memory, and what in the config could be better.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unet_trainer.commands.command_line import (
    CommandParser,
    Script,
    add_config_words,
    check_may_write,
    file_header,
    read_config_words,
    train_command,
)
from unet_trainer.config.choices import COMPILE_GAIN, COMPILE_SECONDS, describe_seconds
from unet_trainer.config.errors import UserError
from unet_trainer.config.schema import Config, is_demo_dir
from unet_trainer.system.atomic_files import check_output, write_output
from unet_trainer.system.console import EXIT_DONE, EXIT_USER_ERROR, Console, Finding, counted, finding_lines, has_problem

if TYPE_CHECKING:  # a typo in the config is answered before torch and OpenCV are loaded
    from unet_trainer.config.facts import HardwareFacts, StepCost
    from unet_trainer.config.resolved_config import ResolvedConfig, Settings
    from unet_trainer.datasets.dataset_report import CheckedDataset
    from unet_trainer.loading.dataset import SegmentationDataset
    from unet_trainer.training.time_budget import Forecast, SampleCost

NUM_SAMPLES, SAMPLE_SECONDS = 32, 4.0  # that are prepared to time the loader
OVER_BUDGET = 1.2  # a run that takes so many times its budget is told


@dataclass
class Page:
    """Prints findings under headings as they come, and keeps them, with warnings and notes, for --json."""

    console: Console
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.console.on_message = lambda kind, text: self._keep(
            "messages", [Finding("warning" if kind == "warning" else "ok", kind, text)]
        )

    def heading(self, text: str) -> None:
        self.console.say()
        self.console.say(text)

    def show(self, section: str, findings: Sequence[Finding]) -> None:
        self._keep(section, findings)
        for line in finding_lines(findings):
            self.console.say(line)

    def _keep(self, section: str, findings: Sequence[Finding]) -> None:
        self.findings.setdefault(section, []).extend(findings)

    def all_findings(self) -> list[Finding]:
        return [finding for findings in self.findings.values() for finding in findings]

    @contextmanager
    def catching(self, section: str) -> Iterator[None]:
        """What would end a run with a message is a line of the page here."""
        try:
            yield
        except UserError as error:
            title, colon, detail = str(error).partition(": ")
            is_key = bool(colon) and title.isidentifier()
            self.show(section, [Finding("problem", title if is_key else section, detail if is_key else str(error))])


def main(arguments: Sequence[str], script: Script) -> int:
    parser = CommandParser(
        "train_unet.py doctor", description="Says what this machine and this data can do, and what a run would do."
    )
    add_config_words(parser)
    parser.add_argument("--budget", metavar="TIME", help="time that the run may take, e.g. 2h; the same as time_budget=2h")
    parser.add_argument("--write", metavar="FILE", type=Path, help="write the settings there as a config that runs as it is")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything there as well, for programs")
    parser.add_argument("--fast", action="store_true", help="compile nothing: the time is then an estimate")
    given = parser.parse_intermixed_args(arguments)
    words = list(given.words)
    if given.budget is not None:
        words.append(f"time_budget={given.budget}")
        if not any(word.startswith("num_epochs=") for word in words):
            words.append("num_epochs=auto")  # the budget decides it, whatever the file says
    config = read_config_words(words, script.config, "doctor")
    check_may_write(given.write)
    if given.json is not None:
        check_output("--json", given.json)
    page = Page(Console())
    settings = examine(config, page, is_fast=given.fast)
    if given.write is not None and settings is None:
        detail = f"{given.write} was not written: there are no settings for this data"
        page.show("config", [Finding("problem", "--write", detail)])
    elif given.write is not None and settings is not None:
        header = file_header(given.write, "doctor", settings.taken.data_dir)
        write_output("--write", given.write, settings.to_yaml(header, resume=None, encoder_weights=config.encoder_weights))
        page.console.say(f"Written: {given.write}. It runs as it is: {train_command(given.write)}")
    code = EXIT_USER_ERROR if has_problem(page.all_findings()) else EXIT_DONE
    if given.json is not None:
        findings = {section: [dataclasses.asdict(one) for one in found] for section, found in page.findings.items()}
        content = {"ok": code == EXIT_DONE, "findings": findings, **page.content}
        write_output("--json", given.json, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")
    return code


def examine(config: Config, page: Page, is_fast: bool) -> Settings | None:
    """Prints the page; returns the settings of a run, or None where the data or the device stand in the way."""
    from unet_trainer.commands.machine import installed_versions, machine_findings
    from unet_trainer.system.resources import count_cores, total_host_memory

    page.console.say("Looking at this machine ...")
    machine = machine_findings(Path(config.checkpoint_dir), config.device != "cpu")
    page.heading("Machine")
    page.show("machine", machine)
    page.content["machine"] = {"cores": count_cores(), "memory": total_host_memory(), "versions": installed_versions()}
    started = time.perf_counter()  # what a run would do before it trains
    settings = dataset = None
    page.heading(f"Data: {config.data_dir}")
    with page.catching("data"):
        dataset = _check_data(config, page.console)
    if dataset is not None:
        with page.catching("run"):
            settings = _examine_run(config, dataset, page, is_fast, started)
    levels = [finding.level for finding in page.all_findings()]
    warnings = f", {counted(levels.count('warning'), 'warning')}" if "warning" in levels else ""
    page.console.say()
    if "problem" in levels:
        page.console.say(f"Not ready: {counted(levels.count('problem'), 'problem')} (✗) to solve first{warnings}.")
    else:
        page.console.say(f"Ready to train{warnings}.")
    return settings


def _check_data(config: Config, console: Console) -> CheckedDataset:
    from unet_trainer.datasets.dataset_report import build_dataset_report
    from unet_trainer.datasets.demo import ensure_demo
    from unet_trainer.datasets.shards import find_place

    data_dir = Path(config.data_dir)
    if is_demo_dir(data_dir) and ensure_demo(data_dir):
        console.say("  (the built-in demo, made now)")
    if find_place(config.data_dir) is None and not data_dir.exists():
        raise UserError(f"data_dir: {data_dir} does not exist; need a folder with images/ and masks/")
    return build_dataset_report(config, console).checked()


def _examine_run(config: Config, dataset: CheckedDataset, page: Page, is_fast: bool, started: float) -> Settings:
    """What a run would take, how long it would last, and what could be better."""
    from unet_trainer.training.build import build_datasets
    from unet_trainer.training.settings import build_hardware, build_settings, known_cost, measure, review
    from unet_trainer.training.step_probe import StepProbe
    from unet_trainer.training.time_budget import TimeBudget

    hardware = build_hardware(config, page.console)
    budget = TimeBudget(config.time_budget, started)
    settings = build_settings(config, hardware, dataset, page.console, budget=budget, is_preview=True)
    taken, start_seconds = settings.taken, 0.0 if config.time_budget is None else budget.lost_to_training()
    page.content["settings"] = settings.explained()
    page.content["config"] = settings.repeatable_dict()
    with StepProbe(dataset.image_spec, hardware, Path(config.checkpoint_dir) / ".cache/step_costs.json") as probe:
        if taken.compile_model and not is_fast:
            page.console.say("Compiling the step, to time it (a minute or two; --fast estimates it instead) ...")
        trial = try_step(probe, taken, is_fast)
        eager_cost = known_cost(probe, taken)
    if trial.cost is not None:
        page.heading("Time and memory")
        _say_forecast(settings, hardware, trial, trial.cost, build_datasets(taken, dataset), page, start_seconds)
    page.heading("Your settings")
    facts = dataset.facts(measure(config, dataset, page.console))
    findings = review(settings, hardware, facts, eager_cost, trial.failure, trial.compile_failure)
    page.show("review", findings or [Finding("ok", "Settings", "nothing in them is wasteful or risky here")])
    return settings


@dataclass(frozen=True)
class Trial:
    """The cost of the step of a run, and where it comes from."""

    cost: StepCost | None
    compile_seconds: float = 0.0
    is_estimate: bool = False
    failure: str = ""
    compile_failure: str = ""  # the cost is that of the uncompiled step then


def try_step(probe: Any, taken: ResolvedConfig, is_fast: bool) -> Trial:
    """Takes the step of the run as it will be taken: compiled, unless that would take too long."""
    compiles = taken.compile_model
    # A trial has no time budget, which goes with num_epochs: auto only.
    tried = dataclasses.replace(taken, compile_model=compiles and not is_fast, time_budget=None)
    started, was_known = time.perf_counter(), probe.knows(tried)
    cost, compile_failure = probe(tried), ""
    if cost is None and tried.compile_model:  # training would go on uncompiled
        compile_failure = probe.failure
        cost = probe(dataclasses.replace(tried, compile_model=False))
    if cost is None or not cost.is_possible:
        return Trial(None, failure=probe.failure)
    if compile_failure or not compiles:
        return Trial(cost, time.perf_counter() - started if compiles else 0.0, compile_failure=compile_failure)
    if is_fast:
        left = 1 - COMPILE_GAIN
        cost = dataclasses.replace(cost, seconds=left * cost.seconds, eval_seconds=left * cost.eval_seconds)
    return Trial(cost, COMPILE_SECONDS if was_known or is_fast else time.perf_counter() - started, is_fast)


def _say_forecast(
    settings: Settings,
    hardware: HardwareFacts,
    trial: Trial,
    cost: StepCost,
    datasets: tuple[SegmentationDataset, SegmentationDataset],
    page: Page,
    start_seconds: float,
) -> None:
    from unet_trainer.training.time_budget import SampleCost, forecast

    taken, (train, val) = settings.taken, datasets
    read, augment = _mean_seconds(train, range(0, len(train), max(1, len(train) // NUM_SAMPLES)))
    val_read, _ = _mean_seconds(val, range(len(val)))  # tiles of one image follow each other, and it is read once
    sample = SampleCost(read, augment, val_read)
    start_seconds += trial.compile_seconds
    if taken.cache != "none":  # it is filled first
        start_seconds += sum(len(one.pairs) for one in datasets) * read / hardware.num_cores
    found = forecast(taken, len(train), len(val), cost, sample, hardware.num_cores, start_seconds)
    page.show("run", forecast_findings(found, settings, hardware, cost, sample, trial.is_estimate))
    measured = {"step": dataclasses.asdict(cost), "sample": dataclasses.asdict(sample), "start_seconds": start_seconds}
    page.content["forecast"] = {**dataclasses.asdict(found), "is_estimate": trial.is_estimate, **measured}


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
    taken, rate = settings.taken, settings.taken.batch_size / cost.seconds
    per_epoch = f"{found.seconds_per_epoch:.1f} s" if found.seconds_per_epoch < 10 else describe_seconds(found.seconds_per_epoch)
    detail = f"about {describe_seconds(found.seconds)}: {counted(found.num_epochs, 'epoch')} of {per_epoch}"
    if settings.replans():  # the number that was planned from the step alone is among the settings
        detail = f"about {describe_seconds(found.seconds)}, with as many epochs of {per_epoch} as there is time for"
    detail += f", {rate:.{0 if rate >= 10 else 1}f} images/s in the model"
    detail += "; an estimate from the uncompiled step (--fast)" if is_estimate else ""
    detail += "; early stopping may end it sooner" if taken.early_stopping_patience is not None else ""
    findings = [Finding("ok", "Time", detail)]
    if found.seconds > OVER_BUDGET * settings.budget():
        detail += f"; more than time_budget: {taken.time_budget}, since a run starts up and validates once at least"
        findings = [Finding("warning", "Time", detail, "a longer time_budget, a smaller image_size or a smaller encoder")]
    if found.memory:
        detail = f"{found.memory / 2**30:.1f} GiB of the {hardware.free_memory / 2**30:.1f} GiB that are free on the GPU"
        findings.append(Finding("ok", "Memory", detail))
    loading = taken.batch_size * (sample.augment_seconds + (0.0 if taken.cache != "none" else sample.read_seconds))
    if hardware.kind != "cpu" and loading / max(1, taken.num_workers) > 1.1 * cost.seconds:
        times = f"reading {sample.read_seconds * 1e3:.0f} ms and augmenting {sample.augment_seconds * 1e3:.0f} ms an image"
        detail = f"the GPU would wait: {times}, {counted(taken.num_workers, 'worker')}"
        findings.append(Finding("warning", "Loading", detail, "more cores" + ("" if taken.cache != "none" else ", or cache: ram")))
    return findings
