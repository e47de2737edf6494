"""Config → a run that is ready for its first epoch, new or resumed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet_trainer.config.dump import as_dict
from unet_trainer.config.errors import UserError
from unet_trainer.config.facts import HardwareFacts
from unet_trainer.config.resolved_config import Settings
from unet_trainer.config.schema import Config
from unet_trainer.datasets.dataset_report import CheckedDataset
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.model.precision import set_backends
from unet_trainer.model.segmenter import build_spec
from unet_trainer.runs.checkpoint_file import ILL_FORMED
from unet_trainer.runs.checkpointer import Checkpointer
from unet_trainer.runs.curves import write_curves
from unet_trainer.runs.errors import CheckpointError
from unet_trainer.runs.event_log import EventLog
from unet_trainer.runs.following_checkpointer import AnyCheckpointer, FollowingCheckpointer
from unet_trainer.runs.resume_checks import compare_configs, compare_splits, keep_decided, keep_reasons, split_names
from unet_trainer.runs.run_folder import (
    CURVES,
    LOG,
    SPLIT_CSV,
    check_may_write,
    find_resume_source,
    folder_of,
    has_checkpoint,
    start_folder,
    sweep,
)
from unet_trainer.runs.tracker_queue import TrackerQueue, build_trackers
from unet_trainer.runs.trackers import chosen_trackers
from unet_trainer.system.console import Console, counted, first_line
from unet_trainer.system.os_errors import named_file, reason
from unet_trainer.system.processes import Processes
from unet_trainer.system.throttled_task import ThrottledTask
from unet_trainer.training.best_weights import look_for_best
from unet_trainer.training.build import build_dataset, build_loaders, compile_components, try_components
from unet_trainer.training.joint_start import (
    adapt_to_world_size,
    begin_sync,
    build_joint_components,
    check_same_config,
    check_same_dataset,
    connect,
    read_earlier,
    say_job,
    share_best,
    share_state,
    take_settings,
)
from unet_trainer.training.resume_messages import adapt_to_changes, say_already_finished, say_resumed
from unet_trainer.training.run import Run
from unet_trainer.training.run_facts import data_facts, machine_facts, model_facts
from unet_trainer.training.session import Session
from unet_trainer.training.settings import build_hardware, build_settings
from unet_trainer.training.state import TrainState
from unet_trainer.training.time_budget import TimeBudget


def set_up(config: Config, session: Session) -> Run:
    """Checkpoint → device → data → settings → loaders → model → folder → compiled steps."""
    budget = TimeBudget(config.time_budget, session.started)
    console, signals, processes = session.console, session.signals, session.processes
    check_same_config(processes, config)
    trackers = chosen_trackers(config) if processes.is_main else []
    checkpoint_dir = Path(config.checkpoint_dir)
    source, folder = map(_path, processes.share("source", lambda: _find_source(config, checkpoint_dir)))
    if folder is not None and processes.is_main:
        session.lock.acquire(folder, console.note)
    earlier = None if source is None else read_earlier(processes, source, console.warn)
    if earlier is not None:
        config = keep_decided(config, earlier["config"])

    hardware = build_hardware(config, console, processes.launch)
    device = torch.device(hardware.device)
    say_job(processes, device, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)), config.resume, console)
    with processes.in_turn("dataset"):  # the others find what the first one has read
        dataset = build_dataset(config, console, folder)
    check_same_dataset(processes, dataset, config.data_dir)
    make_settings = partial(build_settings, config, hardware, dataset, console, earlier is not None, budget)
    settings = take_settings(processes, "settings", make_settings, device)
    set_backends(config.allow_tf32, config.deterministic, search_kernels=settings.taken.compile_model)
    loaders = build_loaders(settings.taken, dataset, device, console, processes)
    session.on_exit(loaders.close)
    connect(processes, loaders, device, config.process_timeout)
    spec = build_spec(settings.taken, dataset.image_spec, dataset.coding, dataset.has_background(settings.taken))
    resumes = earlier is not None
    settings, components = build_joint_components(processes, settings, spec, device, len(loaders.train), console, resumes)
    state = components.state

    changes: list[str] = []
    if earlier is not None:
        changes = compare_configs(earlier["config"], settings.repeatable_dict(), as_dict(config))
        compare_splits(earlier["split"], split_names(dataset.split), _split_table(folder))
        keep_reasons(settings, earlier["config"], earlier["decisions"])
        _load_state(state, earlier, settings, source, processes)
    else:
        share_state(state, processes)
        try_components(settings, components, loaders, console, processes)
    is_new = folder is None
    if folder is None:
        if source is not None:
            console.note(f"{source} lies in no run's folder: a new run goes on from it")
        folder = Path(processes.share("folder", lambda: str(_begin_folder(config, checkpoint_dir, session))))
    checkpointer: AnyCheckpointer = FollowingCheckpointer(folder)
    if processes.is_main:
        start = _start_facts(settings, hardware, dataset, state, earlier is not None)
        _open_folder(folder, settings, console, session.events, start)
    state.gather_ranks(processes)  # the checkpointer keeps the state as it is now
    if processes.is_main:
        checkpointer = Checkpointer(folder, settings, state, dataset.split, console, session.lock.is_ours, session.events)
    budget.seconds_before = state.seconds + state.train_seconds
    run = Run(settings, loaders, components, checkpointer, console, signals, budget, events=session.events, processes=processes)
    if processes.is_main:
        run.curves = ThrottledTask("curves", partial(write_curves, folder))
        session.on_exit(partial(_finish_curves, run.curves, console))
        session.on_exit(partial(run.write_report, with_pictures=False))  # unless the end has written the whole of it
        run.trackers = build_trackers(trackers, folder, as_dict(settings.taken), state.epoch, session.events)
        session.on_exit(partial(_finish_trackers, run.trackers, console))
    if earlier is not None:
        adapt_to_world_size(settings.taken, earlier["world_size"], processes.launch, state, console)
        adapt_to_changes(settings.taken, earlier["config"], state, console)
        if state.batch > len(loaders.train):
            raise CheckpointError(f"{source} is no state that can be gone on from: batch is {state.batch} of {len(loaders.train)}")
        say_resumed(settings.taken, earlier["config"], state, changes, earlier["format"], console)
        if isinstance(checkpointer, Checkpointer):
            run.lost_best = look_for_best(checkpointer, state, console)
        share_best(state, processes)
        if run.lost_best is not None and not run.is_finished():
            console.warn(f"{run.lost_best}; the best of the epochs to come takes their place")
        if settings.replans() and state.history and earlier["config"].get("time_budget") != config.time_budget:
            run.fit_into_budget()
    console.fact("Run", str(folder))
    if run.is_finished():
        say_already_finished(settings.taken, state, checkpointer.resume_command, console)
        return run

    # The workers read while the step is compiled. Signals are deferred, because an exception raised during a fork is lost. An
    # error of the workers is raised again when the epoch begins, where Recovery handles it.
    with signals.deferred(), contextlib.suppress(WorkerError):
        loaders.train.prepare(state.epoch, state.batch)
    signals.check()
    if settings.taken.compile_model:
        _compile(run)
    begin_sync(components, processes)
    if is_new:
        checkpointer.write_config()
        checkpointer.write_split()
    startup_seconds = processes.broadcast(time.perf_counter() - session.started)
    console.fact("Start-up", f"{startup_seconds:.1f} s")
    for tracker in run.trackers:
        tracker.start()
    session.events.add("ready", startup_seconds=startup_seconds)
    return run


def _find_source(config: Config, checkpoint_dir: Path) -> tuple[str | None, str | None]:
    """What to resume from, and the run's folder that it lies in."""
    source = find_resume_source(config.resume, config.run_name, checkpoint_dir)
    folder = None if source is None else folder_of(source)
    return None if source is None else str(source), None if folder is None else str(folder)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _begin_folder(config: Config, checkpoint_dir: Path, session: Session) -> Path:
    folder = start_folder(config.resume, config.run_name, checkpoint_dir)
    session.lock.acquire(folder, session.console.note)
    if has_checkpoint(folder):
        raise UserError(f"{folder} was begun by another process in the meantime; the same command goes on with it")
    return folder


def _start_facts(
    settings: Settings, hardware: HardwareFacts, dataset: CheckedDataset, state: TrainState, resumes: bool
) -> dict[str, Any]:
    """What opens the events of a start."""
    return {
        "resumed_after": {"epoch": state.epoch, "batch": state.batch} if resumes else None,
        "machine": machine_facts(hardware),
        "model": model_facts(settings.taken, state.segmenter.network),
        "data": data_facts(settings.taken, dataset),
    }


def _split_table(folder: Path | None) -> Path | None:
    """The table of the run's split, if it has one."""
    return folder / SPLIT_CSV if folder is not None and (folder / SPLIT_CSV).is_file() else None


def _load_state(
    state: TrainState, earlier: Mapping[str, Any], settings: Settings, source: Path | None, processes: Processes
) -> None:
    try:
        if processes.is_main:
            state.load_state_dict(earlier)
    except ILL_FORMED as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{source} is no state that can be gone on from: {text}") from None
    share_state(state, processes)
    if settings.replans():  # goes on with the plan as it was
        planned = max(state.epoch, earlier["learning_rate"].get("num_epochs", settings.taken.num_epochs))
        settings.change("as planned before the run was interrupted", num_epochs=planned)
        state.learning_rate.num_epochs = planned
    num_epochs = settings.taken.num_epochs
    if num_epochs < state.epoch:
        raise UserError(f"num_epochs: {num_epochs} is less than the {counted(state.epoch, 'epoch')} that {source} has; need more")


def _open_folder(folder: Path, settings: Settings, console: Console, events: EventLog, start: Mapping[str, Any]) -> None:
    """Before an epoch is trained: raises UserError for a folder that takes no files."""
    warning = check_may_write(folder, lasts=settings.taken.on_save_error == "continue")
    try:
        sweep(folder)
        console.log_to(folder / LOG)
        events.open(folder, **start)
    except OSError as error:
        where = named_file(error) or folder
        raise UserError(f"{where} cannot be written to ({reason(error, folder)}); a run needs its folder") from None
    if warning is not None:
        console.warn(f"{warning}; training goes on (on_save_error: continue)")


def _finish_curves(curves: ThrottledTask, console: Console) -> None:
    """Draws them as they are at the end, however the run ended."""
    curves.request()
    curves.finish()
    if (error := curves.take_error()) is not None:
        console.warn(f"{CURVES} could not be drawn: {first_line(error)}")


def _finish_trackers(trackers: Sequence[TrackerQueue], console: Console) -> None:
    for tracker in trackers:
        missing = tracker.finish()
        for problem in (tracker.take_problem(), missing):
            if problem is not None:
                console.warn(problem)


def _compile(run: Run) -> None:
    started = time.perf_counter()
    run.console.say("Compiling the step (once; a minute or two) ...")
    saved = run.checkpointer.describe_saved()
    compile_components(run.settings, run.components, run.loaders, run.console, saved, run.processes)
    if run.config.compile_model:
        run.console.say(f"✓ Compiled in {time.perf_counter() - started:.0f} s")
