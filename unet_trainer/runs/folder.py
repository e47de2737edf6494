"""Run folders under checkpoint_dir: finds one to resume, makes one for a new run. Imports no torch."""

import contextlib
import os
import re
import shlex
import stat
import tempfile
from pathlib import Path

from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.schema import Config
from unet_trainer.system.atomic_files import delete_drafts
from unet_trainer.system.input_files import open_file
from unet_trainer.system.launch import read_launch
from unet_trainer.system.os_errors import cannot, with_advice

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
SMP_WEIGHTS, SMP_CARD = "model.safetensors", "unet_trainer.json"  # of an export for segmentation-models-pytorch
DAMAGED = "damaged.pt"  # a last.pt that could not be read
VAL_SCORES = "val_scores.csv"  # of each validation image, at the best epoch
CURVES = "curves.png"
REPORT = "report.html"
RUN_JSON = "run.json"  # what the run is and what happened
SPLIT_CSV = "split.csv"  # which pairs train and which validate
CONFIG_YAML, METRICS_CSV = "config.yaml", "metrics.csv"
LOG, SAMPLES = "train.log", "samples"
CONFIG_TITLE = "Settings of this run."  # opens config.yaml
# Files that a run replaces whole, under temporary names first.
REPLACED = (
    LAST,
    PREVIOUS,
    BEST,
    SPLIT_CSV,
    CONFIG_YAML,
    METRICS_CSV,
    RUN_JSON,
    VAL_SCORES,
    CURVES,
    REPORT,
)
SAMPLE_NAMES = "epoch_*.png"
PROBE_BYTES = 1 << 16


def resume_command(folder: Path, setting: str = "") -> str:
    """As this process was started, under torchrun or not. A run with a custom loss or model is resumed from Python.
    `setting`: key=value, to go on with."""
    with contextlib.suppress(OSError), open_file(folder / CONFIG_YAML) as file:
        config = file.read(1 << 16)
        parts = {"loss": rb"^loss: \{.*\bown: ", "model": rb"^architecture: own\b"}
        arguments = [f"{name}=..." for name, pattern in parts.items() if re.search(pattern, config, re.MULTILINE)]
        if arguments:
            name, _, value = setting.partition("=")
            plain = {"null": "None"}.get(value, value if value.isdigit() else repr(value))
            arguments += [f"resume={str(folder)!r}", *([f"{name}={plain}"] if setting else [])]
            return f"train(..., {', '.join(arguments)}) in Python"
    launch, start = read_launch(), "python"
    if launch.is_torchrun:
        num_machines = launch.world_size // max(1, launch.local_world_size)
        machines = (
            "--standalone"
            if num_machines <= 1
            else f"--nnodes={num_machines} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        )
        start = f"torchrun {machines} --nproc-per-node={launch.local_world_size}"
    return f"{start} train_unet.py --resume {shlex.quote(str(folder))} {setting}".rstrip()


def find_run(name: str, checkpoint_dir: Path) -> Path:
    """What RUN on the command line means: the folder of a run, by its name or path, or a .pt file."""
    candidates = (Path(name), checkpoint_dir / name)
    for candidate in candidates:
        if has_checkpoint(candidate) or candidate.is_file():
            return candidate
    for candidate in candidates:
        if candidate.is_dir():
            raise CheckpointError(
                f"{candidate} has no {LAST}; there is nothing to go on from: give its own command again"
            )
    raise CheckpointError(f"no run {name}; {_list_runs(checkpoint_dir)}")


def _list_runs(checkpoint_dir: Path) -> str:
    runs = [folder.name for folder in _by_age(checkpoint_dir)]
    return f"{checkpoint_dir} holds {', '.join(runs[:5]) or 'no runs'}"


def check_init_from(config: Config) -> None:
    """Raises UserError where a new run would not find the model to begin with. A run that is resumed has its own."""
    checkpoint_dir = Path(config.checkpoint_dir)
    if config.init_from is None or find_resume_source(config.resume, config.run_name, checkpoint_dir) is not None:
        return
    find_initial_model(config.init_from, checkpoint_dir)


def find_initial_model(name: str, checkpoint_dir: Path) -> Path:
    """The file that init_from means: of a run's folder or name, of an exported folder, or itself. Raises UserError."""
    need = f"need a run, a .pt, .pth or .safetensors file, or a folder with {SMP_WEIGHTS}"
    if Path(name).suffix in (".onnx", ".pt2"):
        raise UserError(f"init_from: {name} is an export for other programs; name its run")
    places = (Path(name), checkpoint_dir / name)
    for place in places:
        for path in (place, *(place / file for file in (BEST, LAST, PREVIOUS, SMP_WEIGHTS))):
            if os.path.isfile(path):  # noqa: PTH113 (False for a name that no file can have)
                return path
    if folder := next(filter(os.path.isdir, places), None):
        raise UserError(f"init_from: {folder} holds no {BEST}, {LAST} or {SMP_WEIGHTS}; {need}")
    raise UserError(f"init_from: there is no run or file {name}; {need}; {_list_runs(checkpoint_dir)}")


def shown_model(path: Path) -> str:
    """How the user knows a file of weights: by the folder of its run or export, or by its own name."""
    return str(path.parent if path.name in (BEST, LAST, PREVIOUS, SMP_WEIGHTS) else path)


def find_resume_source(resume: str | None, run_name: str, checkpoint_dir: Path) -> Path | None:
    """What to resume from, if anything: a run's folder, or the .pt file that was named."""
    if resume is None:
        return None
    if resume != "auto":
        return find_run(resume, checkpoint_dir)
    folder = checkpoint_dir / run_name
    return folder if has_checkpoint(folder) else None


def folder_of(source: Path) -> Path | None:
    """The folder of the run that a resume source names; None for a file that lies elsewhere, in a folder that no run
    wrote: a new run begins from it."""
    if source.is_dir():
        return source
    with contextlib.suppress(OSError), open_file(source.parent / CONFIG_YAML) as file:
        if (
            file.read(1000).decode(errors="replace").startswith(f"# {CONFIG_TITLE}")
            and (source.parent / SPLIT_CSV).is_file()
        ):
            return source.parent
    return None


def newest_run(checkpoint_dir: Path) -> Path:
    """The folder of the run that was saved last."""
    found = _by_age(checkpoint_dir)
    if not found:
        raise CheckpointError(f"nothing to go on from: no {LAST} under {checkpoint_dir}")
    return found[0]


def begun_later(found: Path, checkpoint_dir: Path) -> Path | None:
    """A run that began after the last save of this one, and has saved nothing."""
    saved = max(path.stat().st_mtime for path in found.iterdir() if path.name in (LAST, PREVIOUS))
    configs = sorted(checkpoint_dir.glob(f"*/{CONFIG_YAML}"))
    return next(
        (path.parent for path in configs if path.stat().st_mtime > saved and not has_checkpoint(path.parent)), None
    )


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a state to resume from. A crash within a save may leave previous.pt alone.
    Raises CheckpointError where that cannot be told."""
    try:
        return (folder / LAST).is_file() or (folder / PREVIOUS).is_file()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({with_advice(error)})") from None


def _by_age(checkpoint_dir: Path) -> list[Path]:
    """The folders of runs, the one that was saved last first. Raises CheckpointError where the folder cannot be
    read."""
    try:
        next(checkpoint_dir.iterdir(), None)  # glob takes a folder that it may not read for an empty one
        files = sorted(
            (path for name in (LAST, PREVIOUS) for path in checkpoint_dir.glob(f"*/{name}")),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint_dir: {checkpoint_dir} cannot be read ({with_advice(error)})") from None
    return list(dict.fromkeys(path.parent for path in files))


def new_run_folder(checkpoint_dir: Path, run_name: str) -> Path:
    """checkpoint_dir/run_name, numbered when it exists: a new run never writes into an old one's folder."""
    # here: below, a broken link would look like a name that is taken, for ever
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    base, number = re.sub(r"-\d+$", "", run_name), 1  # the settings of fast-2, run again, make fast-3
    folder = checkpoint_dir / run_name
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1
        folder = checkpoint_dir / f"{base}-{number}"


def start_folder(resume: str | None, run_name: str, checkpoint_dir: Path) -> Path:
    """A folder for a new run. With resume: auto the name is kept, or the next start would not find it."""
    try:
        if resume == "auto":
            folder = checkpoint_dir / run_name
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        return new_run_folder(checkpoint_dir, run_name)
    except OSError as error:
        raise cannot(f"checkpoint_dir: {checkpoint_dir}", "be written to", error, checkpoint_dir) from None


def check_may_write(folder: Path) -> None:
    """Before an epoch is trained: raises UserError for a folder that does not take files of ours."""
    for name, is_right in ((LOG, stat.S_ISREG), (RUN_JSON, stat.S_ISREG), (SAMPLES, stat.S_ISDIR)):
        with contextlib.suppress(OSError):
            mode = (folder / name).lstat().st_mode
            if stat.S_ISLNK(mode):
                target = (folder / name).readlink()
                raise UserError(
                    f"{folder / name} is a link to {target}; a run writes into its own folder alone: delete the link"
                )
            if not is_right(mode) and not stat.S_ISDIR(mode):
                raise UserError(f"{folder / name} is no ordinary file or folder; a run needs that name: delete it")
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise cannot(str(folder), "be written to", error, folder) from None


def sweep(folder: Path) -> None:
    """Deletes what killed writers left behind. Raises OSError."""
    delete_drafts(folder, REPLACED)
    if (folder / SAMPLES).is_dir() and not (folder / SAMPLES).is_symlink():
        delete_drafts(folder / SAMPLES, [SAMPLE_NAMES])
