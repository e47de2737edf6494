"""Checkpoints: complete, verified, harmless; what a run saves when, in which order, and what is restored."""

import functools
import io
import os
import pickle
import random
import shutil
import threading
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from helpers.hostile import Call
from helpers.runs import flip_a_bit
from helpers.small_runs import ROW, SCORES, finish_epochs, make_run, said
from helpers.steps import make_batch, make_settings, same, small_components, take_step
from unet_trainer.config.errors import CheckpointError, NonFinite, TrainingFailed
from unet_trainer.system.console import Console
from unet_trainer.training import checkpoint
from unet_trainer.training.checkpoint import (
    FORMAT,
    Checkpointer,
    read_checkpoint,
    read_last,
    read_run,
    write_checkpoint,
)
from unet_trainer.training.result import report

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


def test_flipped_bits_and_truncations_are_found_or_change_nothing(small, tmp_path):
    """torch.load accepts a flipped bit in a tensor without a word. A date in a header of the zip may be another one."""
    content, before = small.read_bytes(), repr(read_last(small))
    chooser = random.Random(0)
    damaged = tmp_path / "damaged.pt"
    messages = []
    for number in range(300):
        changed = bytearray(content)
        position = chooser.randrange(len(content))
        if number % 5 == 0:
            del changed[position:]
        else:
            changed[position] ^= 1 << chooser.randrange(8)
        damaged.write_bytes(changed)
        try:
            assert repr(read_last(damaged)) == before
        except CheckpointError as error:
            messages.append(str(error))
    assert len(messages) > 150
    assert all("damaged.pt is " in message and "\n" not in message for message in messages)


@pytest.mark.parametrize(
    "thing",
    [
        Call(os.system, "touch canary"),
        Call(eval, "open('canary', 'w').close()"),
        Call(Path.touch, Path("canary")),
        Call(getattr, Path, "touch"),
        Call(functools.partial, os.system, "touch canary"),
        Call(pickle.loads, pickle.dumps(Call(os.system, "touch canary"))),
        Call(torch.load, "canary"),
        Call(bytearray, 10**12),
        {Call(os.getcwd): 1},
    ],
)
def test_a_hostile_file_is_refused_in_one_line_and_nothing_of_it_runs(thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "hostile.pt"
    torch.save({"format": FORMAT, "config": {}, "model": {}, "optimizer": thing}, file)
    with pytest.raises(CheckpointError, match=r"hostile\.pt (is not a checkpoint that can be read|cannot)") as caught:
        read_last(file)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hostile.pt"]


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize(
    ("name", "content", "compression", "message"),
    [
        ("another", bytes(20_000_000), zipfile.ZIP_DEFLATED, "it unpacks to more than it is"),
        ("archive/data.pkl", b"", zipfile.ZIP_STORED, "it holds two entries of one name"),
    ],
)
def test_a_zip_bomb_and_two_entries_of_one_name_are_refused(name, content, compression, message, small):
    with zipfile.ZipFile(small, "a") as opened:
        opened.writestr(name, content, compression)
    assert small.stat().st_size < 50_000
    with pytest.raises(CheckpointError, match=message):
        read_last(small)


@pytest.mark.parametrize(("part", "value"), [("model", float("nan")), ("ema", float("inf"))])
def test_weights_that_are_not_finite_are_never_saved(part, value, small):
    before = small.read_bytes()
    weights = {"empty": torch.zeros(0), "count": torch.tensor(3), "bad": torch.tensor([[0.0, value]])}
    content = {**CONTENT, part: weights if part == "model" else {"model": weights}}
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
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_checkpoint(small, content, previous=small.with_name("previous.pt"))
        assert caught.value.filename == str(small)
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
    assert previous.read_bytes() == first


def test_a_state_of_another_version_is_not_taken_for_damaged(small, monkeypatch):
    shutil.copy(small, small.with_name("previous.pt"))
    monkeypatch.setattr(checkpoint, "FORMAT", FORMAT + 1)
    write_checkpoint(small, CONTENT)
    monkeypatch.undo()
    newer = small.read_bytes()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of this version of the trainer \(format 4\)"):
        read_run(small.parent, lambda text: None)
    assert small.read_bytes() == newer


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_a_folder_or_a_pipe_is_no_checkpoint_and_reading_does_not_hang(make, small):
    small.rename(small.with_name("previous.pt"))
    make(small)
    said = []
    assert torch.equal(read_run(small.parent, said.append)["model"]["w"], torch.arange(50.0))
    assert f"{small} is not a file (kept as damaged.pt); going on from" in said[0]
    assert small.is_file()


def test_a_file_that_reads_back_wrong_does_not_replace_a_good_one(small, monkeypatch):
    before = small.read_bytes()
    save = torch.save

    def flip(content, sink):
        save(content, sink)
        sink.seek(sink.tell() // 2)
        sink.write(b"\xff" * 64)
        sink.seek(0, 2)

    monkeypatch.setattr(torch, "save", flip)
    with pytest.raises(CheckpointError, match="damaged"):
        write_checkpoint(small, CONTENT | {"model": {"w": torch.zeros(1000)}})
    assert small.read_bytes() == before


def test_other_files_are_refused_by_name(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    for number in ("4", 3):
        write_checkpoint(tmp_path / f"{number!r}.pt", {**CONTENT, "format": number})
    for name in ("foreign.pt", "'4'.pt", "3.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} is not a checkpoint of this version of the trainer"):
            read_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"missing\.pt is missing"):
        read_checkpoint(tmp_path / "missing.pt")
    write_checkpoint(tmp_path / "best.pt", {"config": {}, "epoch": 1, "metrics": {"val_iou": 0.5}, "model": {}})
    with pytest.raises(CheckpointError, match=r"best\.pt holds weights alone"):
        read_last(tmp_path / "best.pt")


@pytest.fixture
def components():
    return small_components(ema_decay=0.9)


@pytest.fixture
def checkpointer(components, tmp_path):
    split = {"train": ["a", "b"], "val": ["c"]}
    return Checkpointer(tmp_path, make_settings(ema_decay=0.9), components.state, split, Console(io.StringIO()))


def save_epoch(checkpointer, number, is_best=False):
    """Of the run's state, as that of its `number`th epoch."""
    state = checkpointer.state
    state.epoch, state.history = number, [{**ROW, "epoch": epoch} for epoch in range(1, number + 1)]
    best = state.eval_segmenter if is_best else None
    checkpointer.save_epoch(dict(ROW), best, lambda: lambda: np.zeros((4, 4, 3), np.uint8), lambda: "image,iou\n")


def what_is_saved(folder):
    """The epoch of the state, and whether there are best weights."""
    return read_run(folder, pytest.fail)["epoch"], (folder / "best.pt").exists()


def test_where_memory_ran_out_a_state_that_cannot_be_copied_is_told_and_that_of_the_start_is_saved(
    checkpointer, tmp_path, monkeypatch
):
    checkpointer.state.batch = 1
    copy = mock.Mock(side_effect=RuntimeError("DefaultCPUAllocator: not enough memory"))
    monkeypatch.setattr(checkpoint, "HostCopy", copy)
    checkpointer.save_on_failure(state_is_whole=True)
    assert read_run(tmp_path, pytest.fail)["batch"] == 0
    assert said(checkpointer) == "Warning: the state could not be saved: DefaultCPUAllocator: not enough memory\n"


@pytest.fixture
def slow_disk(monkeypatch):
    """Checkpoints are written only once the test allows it."""
    may_write = threading.Event()
    write = checkpoint.write_checkpoint

    def slow(*arguments, **options):
        assert may_write.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(checkpoint, "write_checkpoint", slow)
    return may_write


@pytest.fixture
def behind(checkpointer, components, slow_disk):
    """The second epoch, the best so far, ended while the state of the first is still being written."""
    save_epoch(checkpointer, 1)
    take_step(components.train_step, make_batch(2, side=32))
    save_epoch(checkpointer, 2, is_best=True)
    return checkpointer


def test_an_epoch_shorter_than_a_save_is_saved_as_soon_as_the_disk_is_free(behind, slow_disk, tmp_path, monkeypatch):
    copy_state = mock.Mock(side_effect=behind._copy_state)
    monkeypatch.setattr(behind, "_copy_state", copy_state)
    behind.save_if_due()
    assert copy_state.call_count == 0  # the disk is busy: a copy would only wait, to be replaced by a newer one
    slow_disk.set()
    behind.saving.result()
    assert what_is_saved(tmp_path) == (1, False)  # best.pt is written together with the state that refers to it
    behind.state.batch = 3
    behind.save_if_due()
    behind.saving.result()
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    assert read_run(tmp_path, pytest.fail)["batch"] == 3
    behind.save_if_due()
    assert copy_state.call_count == 1


def test_restoring_the_last_state_saves_nothing_of_the_epoch_since(behind, slow_disk, tmp_path):
    slow_disk.set()
    trained = [value.clone() for value in behind.state.segmenter.state_dict().values()]
    behind.go_back_to_last_save()
    assert not same(trained, behind.state.segmenter.state_dict().values())
    assert behind.state.epoch == 1
    behind.finish()
    assert what_is_saved(tmp_path) == (1, False)


def test_a_file_that_cannot_be_written_ends_the_run_and_no_state_refers_to_it(checkpointer, tmp_path, monkeypatch):
    write = checkpoint.write_checkpoint

    def refuse_best(path, *more, **others):
        if path.name == "best.pt":
            raise OSError(28, "No space left on device")
        write(path, *more, **others)

    checkpointer.save_state()
    checkpointer.finish()
    monkeypatch.setattr(checkpoint, "write_checkpoint", refuse_best)
    save_epoch(checkpointer, 1, is_best=True)
    with pytest.raises(
        TrainingFailed,
        match=r"could not be written \(No space left .*; make room\); to go on where the state was saved: ",
    ):
        checkpointer.finish()
    assert what_is_saved(tmp_path) == (0, False)


@pytest.fixture
def run(tiny_data, tmp_path):
    return make_run(tiny_data, tmp_path / "run", num_epochs=3)


def test_a_state_that_is_the_best_one_gives_its_weights_again(run):
    finish_epochs(run, [0.25, 0.5])
    best = run.checkpointer.folder / "best.pt"
    best.unlink()
    assert run.checkpointer.check_best() is None
    assert read_checkpoint(best)["epoch"] == 2
    assert f"Warning: {best} is missing; it is written anew from this state" in said(run)


def test_weights_of_an_earlier_epoch_are_told_as_lost_and_the_next_epoch_is_the_best(run):
    finish_epochs(run, [0.5, 0.25])
    best = run.checkpointer.folder / "best.pt"
    flip_a_bit(best)
    lost = run.checkpointer.check_best()
    assert lost.startswith(f"{best} is damaged: the checksum of ")
    assert lost.endswith(": the weights of epoch 1, the best so far, are lost")
    state = run.state
    assert (state.early_stopping.best_epoch, state.per_class_iou, state.confusion) == (0, [], [])
    assert run.judge({**ROW, "epoch": 3, "val_iou": 0.125}, SCORES)


def test_a_run_that_ends_without_its_best_weights_says_so_and_names_the_last_ones(run):
    finish_epochs(run, [0.5, 0.25, 0.25])
    best = run.checkpointer.folder / "best.pt"
    best.unlink()
    result = report(run)
    assert result.missing == ["best.pt"]
    lost = "the weights of epoch 1, the best so far, are lost; last.pt holds those of the last epoch"
    assert f"Warning: {best} is missing: {lost}" in said(run)
    assert f"Weights: {best.with_name('last.pt')} | " in said(run)
    assert str(best) not in said(run).split("Weights: ")[1]
