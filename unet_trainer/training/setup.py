"""Config → a run that is ready for its first epoch, new or resumed. Under torchrun rank 0 decides, and the others take
what it has decided and loaded: `broadcast` returns rank 0's value, in a plain process the value itself."""

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unet_trainer import __version__
from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.facts import HardwareFacts, StepCost
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.safe_yaml import value_text
from unet_trainer.config.schema import Config, as_dict, class_names, id_names
from unet_trainer.data.dataset_notices import describe_sizes
from unet_trainer.data.dataset_report import CheckedDataset
from unet_trainer.data.formats.table import split_csv_text
from unet_trainer.data.mask_evidence import class_table, has_background, ignored_share
from unet_trainer.loading.augmentation import check_parameters
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.model.precision import set_backends
from unet_trainer.model.random_state import CallersRandomState
from unet_trainer.model.segmenter import SegmenterSpec, build_spec
from unet_trainer.runs import folder as run_folder
from unet_trainer.runs.curves import MAX_CURVES_SHARE, MAX_REPORT_SHARE, REPORT_SECONDS, PacedWriter, write_curves
from unet_trainer.runs.folder import LOG, SPLIT_CSV, has_checkpoint
from unet_trainer.runs.trackers import Trackers
from unet_trainer.system.atomic_files import write_text_atomically
from unet_trainer.system.console import Console, counted, first_line
from unet_trainer.system.os_errors import cannot, named_file
from unet_trainer.system.resources import total_host_memory
from unet_trainer.training import build, resume
from unet_trainer.training.checkpoint import ILL_FORMED, AnyCheckpointer, Checkpointer, FollowingCheckpointer, read_run
from unet_trainer.training.extension import NO_PARTS, CustomParts
from unet_trainer.training.initial_model import read_initial_model
from unet_trainer.training.memory import fit_into_memory
from unet_trainer.training.parallel import Job, broadcast_state, choose_backend, device_id
from unet_trainer.training.reporting import Reporter
from unet_trainer.training.run import Run
from unet_trainer.training.schedule import fit_into_budget, plan_run
from unet_trainer.training.session import Session
from unet_trainer.training.settings import build_hardware, build_settings
from unet_trainer.training.state import TrainState
from unet_trainer.training.time_budget import TimeBudget
from unet_trainer.training.trials import QUICK_SECONDS, compile_components, random_batches, time_steps, try_components

# What the other ranks need of a checkpoint before the state itself is sent.
FACTS_OF_CHECKPOINT = ("config", "decisions", "split", "learning_rate")
# Settings that may differ between machines: where things lie there, and what rank 0 alone reads.
OF_A_MACHINE = {
    "data_dir", "image_dir", "mask_dir", "split_file", "checkpoint_dir", "device", "num_workers", "resume", "init_from",
}  # fmt: skip
# Of what decides the numbers of a run.
PACKAGES = ("segmentation-models-pytorch", "timm", "albumentations", "numpy", "opencv-python-headless")


def set_up(config: Config, session: Session, make_report: Callable[..., object], custom: CustomParts = NO_PARTS) -> Run:
    """Checkpoint → device → data → settings → loaders → model → folder → compiled steps. `make_report`: writes the
    page of the run."""
    budget = TimeBudget(config.time_budget, session.started)
    console, processes = session.console, session.processes
    check_same(processes, config_facts(config), "", "the same config, the same command and the same packages")
    check_parameters(config.augmentation)
    earlier, source, folder = _find_earlier(config, session), None, None
    if earlier is not None:
        source, folder = earlier["source"], earlier["folder"] and Path(earlier["folder"])
        config = resume.keep_decided(config, earlier["config"])
    initial = None
    if processes.is_main and earlier is None and config.init_from is not None:
        initial = read_initial_model(config.init_from, Path(config.checkpoint_dir))
        initial.settings(config)  # what contradicts it is refused before the data is read

    hardware = build_hardware(config, console, processes.launch)
    device = torch.device(hardware.device)
    callers_random_state = CallersRandomState(device)
    session.on_end(callers_random_state.restore)
    _say_job(processes, device, config.resume, console)
    with processes.main_process_first():  # the others find what the first one has read
        dataset = build.build_dataset(config, console, folder)
    check_same(processes, dataset_facts(dataset), f"data_dir: {config.data_dir}: ", "the same files")
    resumes, made = earlier is not None, None
    if processes.is_main:
        made = build_settings(config, hardware, dataset, console, resumes, budget, False, custom, initial)
    settings = share_settings(processes, made, device, config.checkpoint_dir)
    set_backends(config.allow_tf32, config.deterministic)
    spec = _build_spec(settings.taken, dataset, processes, earlier)
    loaders = build.build_loaders(settings.taken, dataset, device, console, processes, spec.tile)
    session.on_exit(loaders.close)
    if not processes.is_alone and loaders.pool is not None:
        loaders.pool.start()  # before the process groups are made: NCCL is not fork-safe
    processes.connect(device)
    # Rank 0 loads pretrained weights, or does without; the others build the same model and get its state.
    parts = (spec, device, len(loaders.train), console)
    if processes.is_main:
        components = build.build_components(settings.taken, *parts, resumes, processes, custom, initial)
        if components.initial_weights:
            settings["init_from"] = settings["init_from"]._replace(reason=components.initial_weights)
        share_settings(processes, settings, device, config.checkpoint_dir)
    else:
        settings = share_settings(processes, None, device, config.checkpoint_dir)
        components = build.build_components(settings.taken, *parts, True, processes, custom)
    initial = None  # its weights take memory
    state, changes = components.state, list[str]()
    if earlier is not None:
        changes = resume.compare_configs(earlier["config"], settings.repeatable_dict(), as_dict(config))
        table = folder / SPLIT_CSV if folder is not None and (folder / SPLIT_CSV).is_file() else None
        resume.compare_splits(earlier["split"], resume.split_names(dataset.split), table)
        resume.keep_reasons(settings, earlier["config"], earlier["decisions"])
        _load_state(state, earlier, settings, processes)
    else:
        broadcast_state(state, processes)
        try_components(settings, components, loaders, console, processes)
    is_new = folder is None
    if folder is None:
        if source is not None:
            console.note(f"{source} is not in a run folder: a new run continues from it")
        folder = Path(processes.broadcast(str(_begin_folder(config, session)) if processes.is_main else ""))
    record = session.record
    checkpointer: AnyCheckpointer = FollowingCheckpointer(folder)
    curves = PacedWriter(partial(write_curves, folder), MAX_CURVES_SHARE)
    draw = partial(make_report, folder, with_pictures=False, is_running=True)
    live_report = PacedWriter(draw, MAX_REPORT_SHARE, REPORT_SECONDS)
    if processes.is_main:
        resumed_after = {"epoch": state.epoch, "batch": state.batch} if resumes else None
        about = start_facts(hardware, settings, dataset, state.segmenter.network)
        _open_folder(folder, session, {"resumed_after": resumed_after, **about})
        before = [lambda: record.update(settings=settings.explained()), record.save]
        after = [curves.write, live_report.write]
        names = resume.split_names(dataset.split)
        checkpointer = Checkpointer(folder, settings, state, names, console, before, after)
    budget.seconds_before = state.seconds + state.train_seconds
    reporter = Reporter(console, record, processes.is_main)
    run = Run(settings, loaders, components, checkpointer, reporter, session.signals, budget, processes)
    run.callers_random_state, run.callbacks = callers_random_state, custom.callbacks
    run.num_test = len(dataset.split.test)
    run.untaught_ids = dataset.ids_in(dataset.split.val) - dataset.ids_in(dataset.split.train)
    if processes.is_main:
        reporter.make_report, reporter.live_report = partial(make_report, model=custom.model), live_report
        reporter.curves = curves
        session.on_exit(partial(reporter.finish, folder, str(device)))
    if earlier is not None:
        _resume(run, earlier, changes)
    console.fact("Run", str(folder))
    if run.is_finished():
        resume.say_already_finished(settings.taken, state, folder, console)
        return run
    plan_run(run, _get_ready(run))
    if is_new:
        checkpointer.attempt(checkpointer.write_config)
    if is_new and processes.is_main:
        text = split_csv_text(dataset.split, Path(config.data_dir))
        checkpointer.attempt(partial(write_text_atomically, folder / SPLIT_CSV, text))
    startup_seconds = processes.broadcast(time.perf_counter() - session.started)
    console.fact("Start-up", f"{startup_seconds:.1f} s")
    if processes.is_main:
        reporter.trackers = Trackers(settings.taken, folder, state.epoch, record, console.warn)
    record.update(startup_seconds=startup_seconds)
    return run


def _build_spec(
    config: ResolvedConfig, dataset: CheckedDataset, processes: Job, earlier: Mapping[str, Any] | None
) -> SegmenterSpec:
    """Of the model; a resumed run keeps the tile that its best epoch was found with."""
    image_spec = dataset.image_spec = replace(dataset.image_spec, mean=config.image_mean, std=config.image_std)
    train_sizes, val_sizes = dataset.sizes_of(dataset.split.train), dataset.sizes_of(dataset.split.val)
    shares = dataset.class_shares
    is_background = has_background(id_names(config), shares)
    spec = build_spec(config, image_spec, dataset.coding, is_background, train_sizes, shares)
    if earlier is not None:
        resume.compare_depths(earlier["depth"], spec.image.depth)
        return replace(spec, tile=earlier["tile"])
    tile = build.choose_tile(spec, val_sizes, config.batch_size) if processes.is_main else None
    return replace(spec, tile=processes.broadcast(tile))


def package_versions() -> dict[str, str]:
    versions = {"unet_trainer": __version__, "torch": str(torch.__version__)}  # torch's with its build
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def start_facts(
    hardware: HardwareFacts, settings: Settings, dataset: CheckedDataset, network: torch.nn.Module
) -> dict[str, dict[str, Any]]:
    """What the run records of itself at its start, as plain values; see record for their types."""
    config = settings.taken
    machine = {
        "device": hardware.device,
        "name": hardware.name,
        "cores": hardware.num_cores,
        "memory_gib": round(total_host_memory() / 2**30, 1),
        "free_device_memory_gib": round(hardware.free_memory / 2**30, 1) if hardware.kind == "cuda" else None,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": package_versions(),
    }
    split, names = dataset.split, id_names(config)
    data = {
        "data_dir": config.data_dir,
        "num_train": len(split.train),
        "num_val": len(split.val),
        "num_test": len(split.test),
        "split": split.rule,
        "images": str(dataset.kind),
        "sizes": describe_sizes(dataset.images),
        "model_size": list(config.shape),
        "fit": config.fit,
        "classes": [
            {"name": row.name, "values": row.values, "share": row.share}
            for row in class_table(dataset.masks, dataset.coding, names)
        ],
        "ignored_share": ignored_share(dataset.masks, dataset.coding),
        "notices": list(dataset.notices),
    }
    model = {
        "architecture": config.architecture,
        "encoder": config.encoder,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "init_from": settings["init_from"].reason or None,
        "ids": names,
        "classes": class_names(config),
    }
    return {"machine": machine, "model": model, "data": data}


def _find_earlier(config: Config, session: Session) -> dict[str, Any] | None:
    """What to resume from (`source`), the run folder that it lies in, and its content: some facts of it on other ranks
    than 0, since checkpoint_dir need not be on their machine."""
    content, facts = dict[str, Any](), None
    checkpoint_dir = Path(config.checkpoint_dir)
    if session.processes.is_main and (
        source := run_folder.find_resume_source(config.resume, config.run_name, checkpoint_dir)
    ):
        if (folder := run_folder.folder_of(source)) is not None:
            session.lock.acquire(folder, session.console.note)
        content = read_run(source, session.console.warn)
        try:
            spec = SegmenterSpec.from_dict(content["spec"])
        except ILL_FORMED as error:
            problem = f"what it says of its model cannot be right ({error})"
            raise CheckpointError(f"{source} cannot be resumed: {problem}") from None
        facts = {name: content.get(name) for name in FACTS_OF_CHECKPOINT}
        facts |= {"world_size": content["num_processes"], "tile": spec.tile, "depth": spec.image.depth}
        facts |= {"source": str(source), "folder": folder and str(folder)}
    facts = session.processes.broadcast(facts)
    return None if facts is None else {**content, **facts}


def check_same(processes: Job, own: Mapping[str, str], place: str, need: str) -> None:
    """Raises UserError if a fact of this process is another than rank 0's, which all would take in silence."""
    first, here = processes.broadcast(own), socket.gethostname()
    if others := [
        f"{place}{name}: {own[name]} on {here}, {first.get(name)} for rank 0"
        for name in own
        if own[name] != first.get(name)
    ]:
        raise UserError(f"{'; '.join(others)}; all machines need {need}")


def config_facts(config: Config) -> dict[str, str]:
    """What all processes must have in common. With other packages, which have other bits, weights would drift apart."""
    shared = {name: value_text(value) for name, value in as_dict(config).items() if name not in OF_A_MACHINE}
    return shared | package_versions()


def dataset_facts(dataset: CheckedDataset) -> dict[str, str]:
    """Of the files, which samples are numbered by."""
    names = resume.split_names(dataset.split)
    digest = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
    files = f"{len(names['train'])} train, {len(names['val'])} validate (digest {digest})"
    coding = str(dataset.coding.to_dict())
    return {"files": files, "values of masks": coding, "pixels of images": str(dataset.image_spec)}


def _say_job(processes: Job, device: torch.device, resume: str | None, console: Console) -> None:
    """Who takes part; and what is likely a mistake."""
    if processes.is_alone:
        return
    world_size, device_ids = processes.launch.world_size, processes.all_gather(device_id(device))
    backend, num_machines = choose_backend(device_ids), -(-world_size // processes.launch.local_world_size)
    console.fact("Processes", f"{world_size} on {counted(num_machines, 'machine')}, gradients averaged by {backend}")
    if device.type == "cuda" and backend == "gloo":
        gpus = counted(len(set(device_ids)), "GPU")
        console.warn(f"{world_size} processes share {gpus}: gradients go through the host (gloo)")
    max_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if max_restarts and resume != "auto":
        console.note(f"torchrun may restart the job {counted(max_restarts, 'time')}; it resumes only with resume=auto")


def share_settings(processes: Job, made: Settings | None, device: torch.device, checkpoint_dir: str) -> Settings:
    """Those that rank 0 has made, with this process's own device and folder: for the cache of its machine."""
    content: dict[str, Any] = processes.broadcast({} if made is None else made.to_dict())
    if made is not None:
        return made
    settings = Settings.from_dict(content)
    settings.change("this process's", device=str(device), checkpoint_dir=checkpoint_dir)
    return settings


def _load_state(state: TrainState, earlier: Mapping[str, Any], settings: Settings, processes: Job) -> None:
    try:
        if processes.is_main:
            state.load_state_dict(earlier)
    except ILL_FORMED as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{earlier['source']} cannot be resumed: {text}") from None
    broadcast_state(state, processes)
    if not processes.is_main and earlier["world_size"] != processes.launch.world_size:
        state.metrics.reset()  # rank 0 has the counts; of as many processes, its counts stand for those of each
    if settings.replans():  # goes on with the plan as it was
        planned = max(state.epoch, earlier["learning_rate"]["num_epochs"])
        settings.change("as planned before the run was interrupted", num_epochs=planned)
        state.learning_rate.num_epochs = planned


def _begin_folder(config: Config, session: Session) -> Path:
    folder = run_folder.start_folder(config.resume, config.run_name, Path(config.checkpoint_dir))
    session.lock.acquire(folder, session.console.note)
    if has_checkpoint(folder):
        raise UserError(f"{folder} was begun by another process in the meantime; the same command resumes it")
    return folder


def _open_folder(folder: Path, session: Session, start: Mapping[str, Any]) -> None:
    """Before an epoch is trained: raises UserError for a folder that takes no files."""
    run_folder.check_may_write(folder)
    try:
        run_folder.sweep(folder)
        session.console.log_to(folder / LOG)
        session.record.open(folder, **start)
    except OSError as error:
        raise cannot(str(named_file(error) or folder), "be written to", error, folder) from None


def _resume(run: Run, earlier: Mapping[str, Any], changes: Sequence[str]) -> None:
    """Adapts the loaded state to what has changed since, and says where the run goes on."""
    config, state, console = run.config, run.state, run.console
    resume.adapt_to_world_size(config, earlier["world_size"], run.processes.launch, state, console)
    resume.adapt_to_changes(config, earlier["config"], state, console)
    if state.batch > len(run.loaders.train):
        problem = f"batch is {state.batch} of {len(run.loaders.train)}"
        raise CheckpointError(f"{earlier['source']} cannot be resumed: {problem}")
    resume.say_resumed(config, earlier["config"], state, changes, console)
    run.lost_best = run.checkpointer.check_best()
    if run.processes.broadcast(run.lost_best is not None):  # rank 0 alone checks whether the weights are still there
        state.forget_best()
    if run.lost_best is not None and not run.is_finished():
        console.warn(f"{run.lost_best}; the best of the epochs to come takes their place")
    if run.settings.replans() and state.history and earlier["config"].get("time_budget") != config.time_budget:
        fit_into_budget(run)


def _get_ready(run: Run) -> StepCost:
    """Starts the workers, which read while the step is compiled; returns what the step takes."""
    components = run.components
    shared = (run.settings, components, run.console, run.checkpointer.describe_saved(), run.processes)

    def time_once() -> StepCost:
        with components.restoring(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a compiler's advice, where parts of a batch are compiled anew
            return time_steps(components, *random_batches(run.config, components, run.loaders), QUICK_SECONDS)

    components.set_training_mode(run.state.epoch)
    cost = None if run.config.compile_model else fit_into_memory(time_once, *shared)
    # An exception that is raised during a fork is lost; an error of the workers is raised again when the epoch begins.
    with run.signals.deferred(), contextlib.suppress(WorkerError):
        run.loaders.train.prepare(run.state.epoch, run.state.batch)
    run.signals.check()
    run.connect()
    if cost is None:
        started = time.perf_counter()
        run.console.say("Compiling the step (once; a minute or two) ...")
        compile_components(run.settings, components, run.loaders, *shared[2:])
        if run.config.compile_model:  # it may have failed
            run.console.say(f"✓ Compiled in {time.perf_counter() - started:.0f} s")
        cost = fit_into_memory(time_once, *shared)
    return cost
