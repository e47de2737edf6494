"""The checkpoint file format: how a file is written, verified and read.

A checkpoint holds tensors and primitives only, is written whole or not at all, carries a digest of its every byte, and
is loaded with weights_only=True after a check of what its pickle names. Whether it fits a model is checked by what it
is
loaded into: see TrainState.load_state_dict.
"""

import contextlib
import hashlib
import math
import os
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.utils._pytree import tree_leaves

from unet_trainer.config.errors import CheckpointError, NewerFormat, NonFinite, UnreadableFile
from unet_trainer.config.schema import FIELDS, parse_value
from unet_trainer.system.atomic_files import write_atomically
from unet_trainer.system.console import first_line
from unet_trainer.system.input_files import NO_FILE, ZIP_START, check_zip, open_file
from unet_trainer.system.os_errors import explain, with_advice
from unet_trainer.system.resources import free_disk
from unet_trainer.training.run_folder import DAMAGED, LAST, PREVIOUS

FORMAT = 4

DIGEST = b"sha256:"  # opens the zip's comment, which holds the digest of all bytes before it
NUM_DIGEST_BYTES = len(DIGEST) + 64
# What a pickle of tensors and primitives may name. torch's own list is longer, and was bypassed twice.
SAFE_GLOBALS = {
    "torch._utils _rebuild_tensor_v2",
    "collections OrderedDict",
    *(
        f"torch {kind}Storage"
        for kind in ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Byte", "Char", "Bool")
    ),
}
# Pickle opcodes that name or build things, and that torch.save does not use for tensors and primitives.
UNSAFE_OPCODES = {"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "BUILD", "PERSID"}


# What content of other types or keys than a run saves raises.
ILL_FORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError)


class SaveError(OSError):
    """A checkpoint could not be written. The file that it was to replace is as it was."""

    def __init__(self, path: Path, num_bytes: int, error: OSError) -> None:
        (why, self.advice), needed = explain(error, path), ""
        if self.advice.startswith("make room"):
            needed = f": {num_bytes / 1e6:.1f} MB are needed"
            with contextlib.suppress(OSError):
                needed += f", {free_disk(path.parent) / 1e6:.1f} MB are free there"
        super().__init__(f"{path} could not be written ({why}){needed}")
        self.errno = error.errno


def write_checkpoint(path: Path, content: Mapping[str, Any], previous: Path | None = None) -> None:
    """Writes a draft, verifies it and renames it; `previous` then names the file that it replaced.

    Raises SaveError, or NonFinite for weights that are NaN or infinite. The content is a copy on the host, as HostCopy
    makes it, so that the file loads on any machine.
    """
    stored = {"format": FORMAT, **content}
    bad = _first_non_finite(stored)
    if bad is not None:
        raise NonFinite(f"the weights ({bad}) are not finite and were not saved as {path}")
    num_bytes = 0

    def write(file: BinaryIO) -> None:
        nonlocal num_bytes
        hashed = HashedFile(file)
        torch.save(stored, hashed)  # type: ignore[arg-type] # write and flush are all that torch.save calls
        num_bytes = hashed.num_bytes
        hashed.finish()

    try:
        write_atomically(path, write, verify=_check_digest, previous=previous)
    except OSError as error:
        needed = num_bytes or sum(leaf.nbytes for leaf in tree_leaves(stored) if torch.is_tensor(leaf))
        raise SaveError(path, needed, error) from None


def _first_non_finite(content: Mapping[str, Any]) -> str | None:
    weights = [*(content.get("model") or {}).items(), *((content.get("ema") or {}).get("model") or {}).items()]
    floats = [(name, tensor) for name, tensor in weights if tensor.is_floating_point() and tensor.numel()]
    # One call for all: this runs beside the training loop, and each call into torch contends for the GIL.
    largest = torch._foreach_norm([tensor for _, tensor in floats], torch.inf) if floats else []
    if all(math.isfinite(value) for value in torch.tensor(largest).tolist()):
        return None
    return next(name for name, tensor in floats if not tensor.isfinite().all())


class HashedFile:
    """File object for torch.save that appends a zip comment with the digest of every byte before it.

    The zip's own checksums leave its headers out. An OSError is kept until torch.save is done, which would replace it
    with an error of its own; the remaining bytes are still counted, to say how much space is needed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = NUM_DIGEST_BYTES
        self.tail = b""  # the last two bytes so far: at the end, the length of the comment
        self.error: OSError | None = None

    def write(self, part: bytes | memoryview) -> int:
        part = memoryview(part)
        self.num_bytes += len(part)
        ending = self.tail + bytes(part[-2:])
        self._write_through(ending[:-2])
        self._write_through(part[:-2])
        self.tail = ending[-2:]
        return len(part)

    def _write_through(self, part: bytes | memoryview) -> None:
        self.sha256.update(part)
        if self.error is None:
            try:
                self.file.write(part)
            except OSError as error:
                self.error = error

    def flush(self) -> None:
        """Required by torch.save; write_atomically flushes the file."""

    def finish(self) -> None:
        self._write_through(NUM_DIGEST_BYTES.to_bytes(2, "little"))
        if self.error is not None:
            raise self.error
        self.file.write(DIGEST + self.sha256.hexdigest().encode())


def _check_digest(path: Path) -> None:
    """Raises CheckpointError unless the bytes of the file match the digest at its end; OSError."""
    total = hashlib.sha256()
    with open_file(path) as file:
        num_bytes = max(0, os.fstat(file.fileno()).st_size - NUM_DIGEST_BYTES)
        while num_bytes and (chunk := file.read(min(num_bytes, 1 << 20))):
            total.update(chunk)
            num_bytes -= len(chunk)
        comment = file.read(NUM_DIGEST_BYTES)
    if not comment.startswith(DIGEST):
        raise CheckpointError(f"{path} is not a checkpoint of this trainer, or was cut off: its digest is missing")
    if comment != DIGEST + total.hexdigest().encode():
        raise CheckpointError(f"{path} is damaged: its bytes do not match its digest")


def has_digest(path: Path) -> bool:
    """Whether it is a checkpoint of this trainer by its end, which tells whether it is whole. Raises OSError."""
    with open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - NUM_DIGEST_BYTES))
        return file.read(len(DIGEST)) == DIGEST


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Around reading a checkpoint: an OSError becomes CheckpointError or, where the file may be whole,
    UnreadableFile."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        if error.errno in NO_FILE:
            raise CheckpointError(f"{path} is not a file") from None
        raise UnreadableFile(f"{path} cannot be read ({with_advice(error)})") from None


def verify_checkpoint(path: Path) -> None:
    """Raises CheckpointError unless every byte is as it was written, UnreadableFile where the system does not let us
    read it."""
    with _reading(path):
        _check_digest(path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint of ours, every byte verified; raises CheckpointError."""
    try:
        with _reading(path):
            _check_digest(path)
            _check_archive(path)
            content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a hostile file can make a loader fail in any way
        raise CheckpointError(f"{path} is not a checkpoint that can be read ({first_line(error)})") from None
    number = content.get("format") if isinstance(content, dict) else None
    if type(number) is not int or not isinstance(content.get("config"), dict) or number < FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this trainer (format {FORMAT})")
    if number > FORMAT:
        raise NewerFormat(f"{path} was written by a newer version (format {number}); this one reads format {FORMAT}")
    return content


def _check_archive(path: Path) -> None:
    """Raises unless the zip is uncompressed, has no entry twice, and its pickle names tensors and primitives only."""
    with open_file(path) as file:
        if file.read(len(ZIP_START)) != ZIP_START:  # torch would take it for its old format
            raise zipfile.BadZipFile("File is not a zip file")
        try:
            names = check_zip(file)
        except ValueError as error:
            raise CheckpointError(f"{path} is not a checkpoint: {error}") from None
    with open_file(path) as file, zipfile.ZipFile(file) as archive:
        for name in names:
            for opcode, argument, _ in pickletools.genops(archive.read(name)) if name.endswith(".pkl") else ():
                if opcode.name in UNSAFE_OPCODES or (opcode.name == "GLOBAL" and argument not in SAFE_GLOBALS):
                    why = f"more than tensors and primitives ({argument if opcode.name == 'GLOBAL' else opcode.name})"
                    raise CheckpointError(f"{path} is not a checkpoint that can be read: {why}")


def model_weights(path: Path, content: Mapping[str, Any], raw: bool = False) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint's model is used with: averaged ones where there are some, unless `raw`. Raises
    CheckpointError, and ValueError for what no run has saved."""
    averaged = (content.get("ema") or {}).get("model")
    if raw and "optimizer" not in content and content["config"].get("ema_decay") is not None:
        raise CheckpointError(f"{path} holds averaged weights alone; the raw ones are in {LAST} of the same run")
    weights = content["model"] if raw or averaged is None else averaged
    if not isinstance(weights, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in weights.items()
    ):
        raise ValueError("its weights are no tensors by name")
    bad = next(
        (name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()), None
    )
    if bad is not None:
        raise ValueError(f"{bad} is not finite")
    return dict(weights)


def read_last(path: Path) -> dict[str, Any]:
    """A checkpoint that a run can be resumed from; raises CheckpointError for weights alone."""
    content = read_checkpoint(path)
    if "optimizer" not in content:
        raise CheckpointError(f"{path} holds weights alone and cannot be resumed; use {LAST} of the same run")
    place = "config"
    try:  # what is used before there is a model: the settings that this version knows, the split, the processes
        for name in FIELDS.keys() & content["config"].keys():
            place = f"config.{name}, {content['config'][name]!r:.60}"
            parse_value(name, content["config"][name])
        place = "split or num_processes"
        names = [name for part in ("train", "val") for name in content["split"][part]]
        if not all(isinstance(name, str) for name in names) or content["num_processes"] < 1:
            raise ValueError("no names of files, or no number of processes")
    except ILL_FORMED as error:
        raise CheckpointError(f"{path} cannot be resumed: it holds {place}; {error}") from None
    return content


def read_run(where: Path, tell: Callable[[str], object]) -> dict[str, Any]:
    """The state of a run: the .pt file if one was named, else the newest undamaged state of the folder."""
    if not where.is_dir():
        return read_last(where)
    try:
        return read_last(where / LAST)
    except (NewerFormat, UnreadableFile):
        raise
    except CheckpointError as error:
        if not (where / PREVIOUS).is_file():
            raise
        damage = str(error)
    try:
        content = read_last(where / PREVIOUS)
    except CheckpointError as error:
        raise CheckpointError(
            f"{damage}; {error}; no state of this run is left to go on from: resume=null trains anew"
        ) from None
    tell(f"{damage}; going on from {where / PREVIOUS}, which was saved before it{_move_damaged_aside(where)}")
    return content


def _move_damaged_aside(folder: Path) -> str:
    """Renames last.pt to damaged.pt and previous.pt to last.pt.

    Otherwise the next save would rename the damaged last.pt over the good previous.pt, and a kill at that moment would
    leave no usable state.
    """
    kept = ""
    with contextlib.suppress(OSError):  # told when the run opens its folder
        if os.path.lexists(folder / LAST):
            (folder / LAST).replace(folder / DAMAGED)
            kept = f" (the other is kept as {DAMAGED})"
        (folder / PREVIOUS).replace(folder / LAST)
    return kept
