"""The checkpoint format: complete, verified, harmless."""

import collections
import functools
import io
import os
import pickle
import random
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from helpers.hostile import Call
from helpers.steps import small_components
from unet_trainer.config.errors import CheckpointError, NonFinite
from unet_trainer.training import checkpoint_file
from unet_trainer.training.checkpoint_file import (
    FORMAT,
    HashedFile,
    SaveError,
    read_checkpoint,
    read_last,
    read_run,
    write_checkpoint,
)

# The least that a checkpoint holds which a run can be resumed from.
CONTENT = {**small_components().state.state_dict(), "split": {"train": [], "val": []}}
CONTENT |= {"config": {}, "decisions": {}, "model": {}}
CONTENT["random_state"] = torch.zeros(8, dtype=torch.uint8)


@pytest.fixture
def small(tmp_path):
    """A checkpoint of a few hundred bytes of tensors, so that it can be read a thousand times."""
    path = tmp_path / "last.pt"
    write_checkpoint(path, {**CONTENT, "model": {"w": torch.arange(50.0), "n": torch.tensor(3)}})
    return path


def test_flipped_bits_and_truncations_are_all_found(small, tmp_path):
    """torch.load accepts a flipped bit in a tensor without a word, and a zip's checksums leave its headers out."""
    content = small.read_bytes()
    chooser = random.Random(0)
    damaged = tmp_path / "damaged.pt"
    missed, messages = [], []
    for number in range(300):
        changed = bytearray(content)
        position = chooser.randrange(len(content))
        if number % 5 == 0:
            del changed[position:]
        else:
            changed[position] ^= 1 << chooser.randrange(8)
        damaged.write_bytes(changed)
        try:
            read_last(damaged)
        except CheckpointError as error:
            messages.append(str(error))
        else:
            missed.append(position)
    assert missed == []
    assert all("damaged.pt is " in message and "\n" not in message for message in messages)


class Attributes(Call):
    """Sets attributes on what a call gives."""

    def __reduce__(self):
        return (*self.call, {"canary": "set"})


def hostile_things(canary):
    touch = f"open({str(canary)!r}, 'w').close()"
    command = f"touch {canary}"
    return [
        Call(os.system, command),
        Call(os.execv, "/bin/sh", ["sh", "-c", command]),
        Call(subprocess.Popen, ["touch", str(canary)]),
        Call(eval, touch),
        Call(open, str(canary), "w"),
        Call(Path.touch, canary),
        Call(getattr, Path, "touch"),
        Call(functools.partial, os.system, command),
        Call(pickle.loads, pickle.dumps(Call(os.system, command))),
        Call(torch.load, str(canary)),
        Attributes(collections.OrderedDict),
        Call(bytearray, 10**12),
        {Call(os.getcwd): 1},
    ]


@pytest.mark.parametrize("number", range(len(hostile_things(Path("canary")))))
def test_a_hostile_file_is_refused_in_one_line_and_nothing_of_it_runs(number, tmp_path):
    """With a valid digest, so that it is the content that is refused."""
    canary, file = tmp_path / "canary", tmp_path / "hostile.pt"
    thing = hostile_things(canary)[number]
    with file.open("wb") as stream:
        hashed = HashedFile(stream)
        torch.save({"format": FORMAT, "config": {}, "model": {}, "optimizer": thing}, hashed)
        hashed.finish()
    with pytest.raises(CheckpointError, match=r"hostile\.pt is not a checkpoint that can be read") as caught:
        read_last(file)
    assert "\n" not in str(caught.value)
    assert not canary.exists()
    assert not hasattr(Path, "canary")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    ("name", "content", "compression", "message"),
    [
        ("another", bytes(20_000_000), zipfile.ZIP_DEFLATED, "pt is not a checkpoint: it unpacks to more than it is"),
        ("archive/data.pkl", b"", zipfile.ZIP_STORED, "it holds two entries of one name"),
    ],
)
def test_a_zip_bomb_and_two_entries_of_one_name_are_refused(name, content, compression, message, small):
    changed, archive = small.with_name("changed.pt"), io.BytesIO(small.read_bytes())
    with zipfile.ZipFile(archive, "a") as opened:
        opened.comment = b""
        opened.writestr(name, content, compression)
    changed.write_bytes(archive.getvalue())
    with pytest.raises(CheckpointError, match="its digest is missing"):
        read_last(changed)
    with changed.open("wb") as stream:
        hashed = HashedFile(stream)
        hashed.write(archive.getvalue())
        hashed.finish()
    assert changed.stat().st_size < 50_000
    with pytest.raises(CheckpointError, match=message):
        read_last(changed)


@pytest.mark.parametrize(("part", "value"), [("model", float("nan")), ("ema", float("inf"))])
def test_weights_that_are_not_finite_are_never_saved(part, value, small):
    before = small.read_bytes()
    weights = {"good": torch.zeros(2), "empty": torch.zeros(0), "count": torch.tensor(3)}
    weights["bad"] = torch.tensor([[0.0, value]])
    content = {**CONTENT, "ema": {"model": {}}} | ({part: weights} if part == "model" else {part: {"model": weights}})
    with pytest.raises(NonFinite, match=r"the weights \(bad\) are not finite and were not saved as .*last\.pt"):
        write_checkpoint(small, content)
    assert small.read_bytes() == before


class FullDisk(io.FileIO):
    """Takes so many bytes and no more."""

    free_bytes = 0

    def write(self, part):
        taken = min(len(part), self.free_bytes)
        super().write(memoryview(part)[:taken])
        self.free_bytes -= taken
        if taken < len(part):
            raise OSError(28, "No space left on device")
        return taken


def test_a_disk_that_fills_up_at_any_point_of_a_save_loses_no_checkpoint(small, monkeypatch):
    before, size, content = small.read_bytes(), small.stat().st_size, read_checkpoint(small)
    monkeypatch.setattr(Path, "open", lambda path, mode, *more: FullDisk(path, mode))
    for free_bytes in [*range(0, size, -(-size // 48)), size - 1]:
        monkeypatch.setattr(FullDisk, "free_bytes", free_bytes)
        with pytest.raises(SaveError) as caught:
            write_checkpoint(small, content, previous=small.with_name("previous.pt"))
        why = f"{small} could not be written (No space left on device): 0.0 MB are needed, "
        assert str(caught.value).startswith(why)
        assert small.read_bytes() == before
        assert [entry.name for entry in small.parent.iterdir()] == ["last.pt"]


def test_a_kill_during_the_save_after_a_damaged_state_leaves_the_good_one(small, monkeypatch):
    """The save must not rename the damaged file over the good one."""
    previous = small.with_name("previous.pt")
    first = small.read_bytes()
    write_checkpoint(small, CONTENT, previous=previous)
    bad = small.read_bytes()[:-100]
    small.write_bytes(bad)
    previous.write_bytes(bad)
    with pytest.raises(CheckpointError, match="no state of this run is left to go on from: resume=null trains anew"):
        read_run(small.parent, lambda text: None)
    previous.write_bytes(first)
    read_run(small.parent, lambda text: None)
    assert (small.read_bytes(), small.with_name("damaged.pt").read_bytes(), previous.exists()) == (first, bad, False)
    replace = Path.replace

    def killed(draft, target):
        if target == small:
            raise SystemExit
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(SystemExit):
        write_checkpoint(small, CONTENT, previous=previous)
    assert small.read_bytes() == previous.read_bytes() == first


def test_a_state_of_a_newer_version_is_not_taken_for_damaged(small, monkeypatch):
    shutil.copy(small, small.with_name("previous.pt"))
    monkeypatch.setattr(checkpoint_file, "FORMAT", FORMAT + 1)
    write_checkpoint(small, CONTENT)
    monkeypatch.undo()
    newer = small.read_bytes()
    with pytest.raises(CheckpointError, match=r"was written by a newer version \(format 5\); this one reads format 4"):
        read_run(small.parent, lambda text: None)
    assert small.read_bytes() == newer


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_folder_or_a_pipe_is_no_checkpoint_and_reading_does_not_hang(make, small):
    small.rename(small.with_name("previous.pt"))
    make(small)
    said = []
    assert torch.equal(read_run(small.parent, said.append)["model"]["w"], torch.arange(50.0))
    assert f"{small} is not a file; going on from" in said[0]
    assert small.is_file()


def test_a_file_that_reads_back_wrong_does_not_replace_a_good_one(small, monkeypatch):
    before = small.read_bytes()
    finish = HashedFile.finish

    def flip(hashed):
        finish(hashed)
        hashed.file.seek(40)
        hashed.file.write(b"\xff")

    monkeypatch.setattr(HashedFile, "finish", flip)
    with pytest.raises(CheckpointError, match="do not match its digest"):
        write_checkpoint(small, {"config": {}, "model": {}})
    assert small.read_bytes() == before


def test_other_files_are_refused_by_name(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    for number in ("4", 3):
        write_checkpoint(tmp_path / f"{number!r}.pt", {**CONTENT, "format": number})
    ending = rf" \(format {FORMAT}\)$"
    for name, why in (("foreign.pt", ", or was cut off"), ("'4'.pt", ending), ("3.pt", ending)):
        with pytest.raises(CheckpointError, match=f"{name} is not a checkpoint of this trainer{why}"):
            read_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"missing\.pt is missing"):
        read_checkpoint(tmp_path / "missing.pt")
    write_checkpoint(tmp_path / "best.pt", {"config": {}, "epoch": 1, "metrics": {"val_iou": 0.5}, "model": {}})
    with pytest.raises(CheckpointError, match=r"best\.pt holds weights alone"):
        read_last(tmp_path / "best.pt")
