"""Run folders: what lies in one, which one a word means, and one for a new run. Imports no torch."""

import contextlib
import itertools
import os
import re
import shlex
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unet_trainer.config.errors import CheckpointError, UserError
from unet_trainer.config.schema import Config
from unet_trainer.system.atomic_files import delete_drafts, make_own_folder
from unet_trainer.system.input_files import open_file
from unet_trainer.system.launch import read_launch
from unet_trainer.system.os_errors import cannot, with_advice

LAST, PREVIOUS, BEST = "last.pt", "previous.pt", "best.pt"
STATES = (LAST, PREVIOUS)  # to resume from
SMP_WEIGHTS, SMP_CARD = "model.safetensors", "unet_trainer.json"  # of an export for segmentation-models-pytorch
WEIGHTS = (BEST, LAST, PREVIOUS, SMP_WEIGHTS)
DAMAGED = "damaged.pt"  # a last.pt that could not be read
RUN_JSON, METRICS_CSV, VAL_SCORES = "run.json", "metrics.csv", "val_scores.csv"
CONFIG_YAML, SPLIT_CSV = "config.yaml", "split.csv"  # the settings; which pairs train and which validate
LOG, CURVES, REPORT, SAMPLES, SAMPLE_NAMES = "train.log", "curves.png", "report.html", "samples", "epoch_*.png"
CUSTOM = {"loss": rb"^loss: \{.*\bown: ", "model": rb"^architecture: own\b"}  # in config.yaml
RUN_FILES = (RUN_JSON, *STATES, BEST, METRICS_CSV)  # a folder with one of them is a run's
# Files that a run replaces whole, under temporary names first.
REPLACED = (*RUN_FILES, SPLIT_CSV, CONFIG_YAML, VAL_SCORES, CURVES, REPORT)
NUM_NAMED = 5  # runs that an error names
PROBE_BYTES = 1 << 16


def resume_command(folder: Path, setting: str = "") -> str:
    """The command that goes on with the run, and with a setting (key=value); with a custom loss or model, in Python."""
    with contextlib.suppress(OSError), open_file(folder / CONFIG_YAML) as file:
        config = file.read(1 << 16)
        custom = [f"{name}=..." for name, pattern in CUSTOM.items() if re.search(pattern, config, re.MULTILINE)]
        if custom:
            key, _, value = setting.partition("=")
            plain = {"null": "None"}.get(value, value if value.isdigit() else repr(value))
            arguments = [*custom, f"resume={str(folder)!r}", *([f"{key}={plain}"] if setting else [])]
            return f"train(..., {', '.join(arguments)}) in Python"
    launch, start = read_launch(), "python"
    if launch.is_torchrun:
        num_machines = launch.world_size // max(1, launch.local_world_size)
        several = f"--nnodes={num_machines} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT"
        machines = "--standalone" if num_machines <= 1 else several
        start = f"torchrun {machines} --nproc-per-node={launch.local_world_size}"
    return f"{start} train_unet.py --resume {shlex.quote(str(folder))} {setting}".rstrip()


def written_at(folder: Path, files: Sequence[str] = RUN_FILES) -> float | None:
    """When the last of these files was written; None: the folder has none of them, and is not a run's."""
    times = []
    for name in files:
        with contextlib.suppress(OSError):
            status = (folder / name).stat()
            times += [status.st_mtime] if stat.S_ISREG(status.st_mode) else []
    return max(times, default=None)


def find_runs(checkpoint_dir: Path, files: Sequence[str] = RUN_FILES) -> list[Path]:
    """The folders of runs that hold one of the files, newest first. Raises CheckpointError."""
    try:
        folders = [path for path in checkpoint_dir.iterdir() if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint_dir: {checkpoint_dir} cannot be read ({with_advice(error)})") from None
    times = {folder: time for folder in folders if (time := written_at(folder, files)) is not None}
    return sorted(times, key=lambda folder: (times[folder], folder.name), reverse=True)


def newest_run(checkpoint_dir: Path) -> Path:
    """The folder of the run that was saved last."""
    if found := find_runs(checkpoint_dir, STATES):
        return found[0]
    raise CheckpointError(f"nothing to go on from: no {LAST} under {checkpoint_dir}")


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a state to resume from, after a crash previous.pt alone. Raises CheckpointError."""
    try:
        return any((folder / name).is_file() for name in STATES)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({with_advice(error)})") from None


def describe_saved(folder: Path | None) -> str:
    """What there is to go on from. None: the run has no folder yet."""
    if folder is None or not has_checkpoint(folder):
        return "nothing is saved"
    return f"to go on where the state was saved: {resume_command(folder)}"


def find_run(name: str, checkpoint_dir: Path) -> Path:
    """What there is to go on from: the folder of a run, by its name or path, or a .pt file."""
    candidates = (Path(name), checkpoint_dir / name)
    for candidate in candidates:
        if has_checkpoint(candidate) or candidate.is_file():
            return candidate
    if folder := next(filter(Path.is_dir, candidates), None):
        raise CheckpointError(f"{folder} has no {LAST}; there is nothing to go on from: give its own command again")
    raise CheckpointError(f"no run {name}; {_list_runs(checkpoint_dir, STATES)}")


def find_shown_run(name: str | None, checkpoint_dir: Path) -> Path:
    """The folder of a run to look at, by its path, its name or a file in it. Without a name the run that was saved
    last, or where none has saved anything the one that was written to last. Raises UserError."""
    if name is None:
        found = [*find_runs(checkpoint_dir, STATES)[:1], *find_runs(checkpoint_dir)]
        if not found:
            raise UserError(f"checkpoint_dir: {checkpoint_dir} holds no runs; python train_unet.py starts one")
        return found[0]
    candidates = [Path(name), checkpoint_dir / name]
    candidates += [candidate.parent for candidate in candidates if candidate.is_file()]
    for candidate in candidates:
        if written_at(candidate) is not None:
            return candidate
    raise UserError(f"no run {name}; {_list_runs(checkpoint_dir)}")


def _list_runs(checkpoint_dir: Path, files: Sequence[str] = RUN_FILES) -> str:
    runs = [folder.name for folder in find_runs(checkpoint_dir, files)]
    return f"{checkpoint_dir} holds {', '.join(runs[:NUM_NAMED]) or 'no runs'}"


def find_resume_source(resume: str | None, run_name: str, checkpoint_dir: Path) -> Path | None:
    """What to resume from, if anything: a run's folder, or the .pt file that was named."""
    if resume is None:
        return None
    if resume != "auto":
        return find_run(resume, checkpoint_dir)
    folder = checkpoint_dir / run_name
    return folder if has_checkpoint(folder) else None


def folder_of(source: Path) -> Path | None:
    """The folder of the run that a resume source names; None for a file elsewhere: a new run begins from it."""
    if source.is_dir():
        return source
    return source.parent if all((source.parent / name).is_file() for name in (RUN_JSON, SPLIT_CSV)) else None


def check_init_from(config: Config) -> None:
    """Raises UserError where a new run would not find the model to begin with. A run that is resumed has its own."""
    checkpoint_dir = Path(config.checkpoint_dir)
    if config.init_from is not None and not find_resume_source(config.resume, config.run_name, checkpoint_dir):
        find_initial_model(config.init_from, checkpoint_dir)


def find_initial_model(name: str, checkpoint_dir: Path) -> Path:
    """The file that init_from means: of a run's folder or name, of an exported folder, or itself. Raises UserError."""
    if Path(name).suffix in (".onnx", ".pt2"):
        raise UserError(f"init_from: {name} is an export for other programs; name its run")
    for place in (Path(name), checkpoint_dir / name):
        for path in (place, *(place / file for file in WEIGHTS)):
            if os.path.isfile(path):  # noqa: PTH113 (False for a name that no file can have)
                return path
    need = f"need a run, a .pt, .pth or .safetensors file, or a folder with {BEST}, {LAST} or {SMP_WEIGHTS}"
    raise UserError(f"init_from: there is no model in {name}; {need}; {_list_runs(checkpoint_dir, STATES)}")


def shown_model(path: Path) -> str:
    """How the user knows a file of weights: by the folder of its run or export, or by its own name."""
    return str(path.parent if path.name in WEIGHTS else path)


def new_run_folder(checkpoint_dir: Path, run_name: str) -> Path:
    """checkpoint_dir/run_name, numbered when it exists: a new run never writes into an old one's folder."""
    # here: below, a broken link would look like a name that is taken, for ever
    checkpoint_dir.mkdir(parents=True, exist_ok=True)
    base = re.sub(r"-\d+$", "", run_name)  # the settings of fast-2, run again, make fast-3
    for name in itertools.chain([run_name], (f"{base}-{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            (checkpoint_dir / name).mkdir()
            break
    return checkpoint_dir / name


def start_folder(resume: str | None, run_name: str, checkpoint_dir: Path) -> Path:
    """A folder for a new run. With resume: auto the name is kept, or the next start would not find it."""
    try:
        if resume != "auto":
            return new_run_folder(checkpoint_dir, run_name)
        (checkpoint_dir / run_name).mkdir(parents=True, exist_ok=True)
        return checkpoint_dir / run_name
    except OSError as error:
        raise cannot(f"checkpoint_dir: {checkpoint_dir}", "be written to", error, checkpoint_dir) from None


def check_may_write(folder: Path) -> None:
    """Before an epoch is trained: raises UserError for a folder that takes no files, or has a link in place of ours."""
    try:
        make_own_folder(folder / SAMPLES)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        where = folder / SAMPLES if error.filename == str(folder / SAMPLES) else folder
        raise cannot(str(where), "be written to", error, folder) from None


def sweep(folder: Path) -> None:
    """Delete what killed writers left behind. Raises OSError."""
    delete_drafts(folder, REPLACED)
    delete_drafts(folder / SAMPLES, [SAMPLE_NAMES])
