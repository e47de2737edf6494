"""How the processes of a torchrun job begin together: rank 0 decides, and the others take what it has decided and loaded.

Each function does nothing, or no more than rank 0 would, where there is one process.
"""

from __future__ import annotations

import hashlib
import io
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from unet_trainer.config.dump import as_dict, value_text
from unet_trainer.config.errors import UserError
from unet_trainer.config.resolved_config import ResolvedConfig, Settings
from unet_trainer.config.schema import Config
from unet_trainer.datasets.dataset_report import CheckedDataset
from unet_trainer.model.segmenter import SegmenterSpec
from unet_trainer.runs.checkpoint_file import read_run
from unet_trainer.runs.resume_checks import split_names
from unet_trainer.system.console import Console, counted
from unet_trainer.system.distributed import choose_backend
from unet_trainer.system.processes import Launch, Processes
from unet_trainer.training.build import build_components, build_components_with_weights
from unet_trainer.training.components import Components, Loaders
from unet_trainer.training.gradient_sync import GradientSync
from unet_trainer.training.run_facts import package_versions
from unet_trainer.training.state import TrainState

# What the others need of a checkpoint before the state itself is sent.
FACTS_OF_CHECKPOINT = ("config", "decisions", "format", "split", "learning_rate")
# What each machine may have its own of: where things lie there, and what rank 0 alone reads.
OF_A_MACHINE = frozenset(["data_dir", "image_dir", "mask_dir", "split_file", "checkpoint_dir", "device", "num_workers", "resume"])


def say_job(processes: Processes, device: torch.device, max_restarts: int, resume: str | None, console: Console) -> None:
    """Who takes part; and what is likely a mistake."""
    launch = processes.launch
    if processes.is_alone:
        return
    num_machines = -(-launch.world_size // launch.local_world_size)
    backend = choose_backend(device, launch.local_world_size)
    on = counted(num_machines, "machine")
    console.fact("Processes", f"{launch.world_size} on {on}, gradients averaged by {backend}; this is rank {launch.rank}")
    if device.type == "cuda" and backend == "gloo":
        num_gpus = torch.cuda.device_count()
        console.warn(f"{launch.local_world_size} processes share {counted(num_gpus, 'GPU')}: gradients go through the host (gloo)")
    if max_restarts and resume != "auto":
        console.note(f"torchrun may restart the job {counted(max_restarts, 'time')}; only with resume=auto it goes on where it was")


def check_same_config(processes: Processes, config: Config) -> None:
    """Raises UserError if this process was started with other settings than rank 0, whose settings all would take in silence."""
    if processes.is_alone:
        return
    own = {name: value_text(value) for name, value in as_dict(config).items() if name not in OF_A_MACHINE}
    own |= package_versions()  # other kernels, other bits: the weights would drift apart
    first = processes.share("config", lambda: own)
    here = socket.gethostname()
    others = [f"{name}: {own[name]} on {here}, {first.get(name)} for rank 0" for name in own if own[name] != first.get(name)]
    if others:
        raise UserError(f"{'; '.join(others)}; all machines need the same config, the same command and the same packages")


def read_earlier(processes: Processes, source: Path, warn: Callable[[str], object]) -> dict[str, Any]:
    """The checkpoint on rank 0, its facts on the others: checkpoint_dir need not be on their machine."""
    content = read_run(source, warn) if processes.is_main else {}
    facts = {name: content.get(name) for name in FACTS_OF_CHECKPOINT} | {"world_size": len(content.get("ranks") or [0])}
    return {**processes.share("checkpoint", lambda: facts), **content}


def check_same_dataset(processes: Processes, dataset: CheckedDataset, data_dir: str) -> None:
    """Raises UserError if this machine's files are others than those of rank 0: samples go by their number."""
    names = split_names(dataset.split)
    facts = {"names of files": names, "values of masks": dataset.coding.to_dict(), "pixels of images": dataset.image_spec}
    own = {what: hashlib.sha256(repr(fact).encode()).hexdigest() for what, fact in facts.items()}
    here = {part: len(pairs) for part, pairs in names.items()}
    digests, there = processes.share("dataset digest", lambda: (own, here))
    if others := [what for what in own if own[what] != digests[what]]:
        counts = f"{_counts(here)}, against {_counts(there)}" if here != there else f"other {' and '.join(others)}"
        where = f"{data_dir} on {socket.gethostname()}"
        raise UserError(f"data_dir: {where} is not what rank 0 has there ({counts}); all machines need the same files")


def _counts(parts: Mapping[str, int]) -> str:
    return f"{parts['train']} images train and {parts['val']} validate"


def take_settings(processes: Processes, name: str, make: Callable[[], Settings], device: torch.device) -> Settings:
    """Those that rank 0 makes, with this process's own device."""
    made = make() if processes.is_main else None
    content: dict[str, Any] = processes.share(name, lambda: {} if made is None else made.to_dict())
    if made is not None:
        return made
    settings = Settings.from_dict(content)
    settings.change("this process's", device=str(device))
    return settings


def build_joint_components(
    processes: Processes,
    settings: Settings,
    spec: SegmenterSpec,
    device: torch.device,
    num_batches: int,
    console: Console,
    resumes: bool,
) -> tuple[Settings, Components]:
    """Rank 0 loads pretrained weights, or does without; the others build the same model and get its state."""
    components = None
    if processes.is_main:
        components = build_components_with_weights(settings, spec, device, num_batches, console, resumes, processes.launch)
    settings = take_settings(processes, "settings with weights", lambda: settings, device)
    if components is None:
        components = build_components(settings.taken, spec, device, num_batches, console, True, processes.launch)
    return settings, components


def connect(processes: Processes, loaders: Loaders, device: torch.device, timeout: float) -> None:
    """The groups are made once the workers are forked: NCCL is not fork-safe."""
    if not processes.is_alone and loaders.pool is not None:
        loaders.pool.start()
    processes.connect(device, timeout)


def share_state(state: TrainState, processes: Processes) -> None:
    """Rank 0's state on all of them, sent over the network: weights, optimizer, position, history."""
    if processes.launch.world_size == 1:
        return
    content = b""
    if processes.is_main:
        memory = io.BytesIO()
        torch.save(state.state_dict(), memory)
        content = memory.getvalue()
    content = processes.broadcast(content)
    if not processes.is_main:
        state.load_state_dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def share_best(state: TrainState, processes: Processes) -> None:
    """Which epoch is the best so far: rank 0 alone looks whether its weights are still there."""
    best = processes.broadcast((state.early_stopping.state_dict(), state.per_class_iou, state.confusion))
    if not processes.is_main:
        saved, state.per_class_iou, state.confusion = best
        state.early_stopping.load_state_dict(saved)


def begin_sync(components: Components, processes: Processes) -> None:
    """From here on steps are taken together: not before, since trials of a step are each process's own."""
    if processes.is_alone:
        return
    step = components.train_step
    sync = GradientSync(processes, step.parameters)
    sync.check_layout()
    components.state.gather_ranks(processes)
    step.sync = sync


def adapt_to_world_size(config: ResolvedConfig, before: int, launch: Launch, state: TrainState, console: Console) -> None:
    """Goes on with another number of processes than the checkpoint's: finds the place in the epoch, and says what changes."""
    if before == launch.world_size:
        return
    size = config.batch_size * config.accumulation_steps
    rate = ", and so is the learning rate (scale_lr)" if config.scale_lr else "; learning_rate stays"
    console.note(
        f"changed since then: {counted(before, 'process', 'processes')} → {launch.world_size}. The effective batch is "
        f"{size * launch.world_size} instead of {size * before}{rate}. The order of the samples stays that of the seed; sums "
        "are taken in another order, so the bits are not those of a run that kept its processes"
    )
    if not state.batch:
        return
    num_samples, per_batch = state.batch * config.batch_size * before, config.batch_size * launch.world_size
    batch, left = divmod(num_samples, per_batch)
    if left or batch % config.accumulation_steps:
        state.restart_epoch()
        console.note(f"epoch {state.epoch + 1} begins anew: its {num_samples} samples so far end within a step of today's size")
    else:
        state.batch = batch
