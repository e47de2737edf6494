"""Checkpoints: complete, verified, harmless; and what may change between two starts."""

from __future__ import annotations

import builtins
import collections
import functools
import hashlib
import importlib
import io
import operator
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

from helpers.project import TINY_MODEL
from unet_trainer.config.dump import as_dict
from unet_trainer.config.load import load_config
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.splits import Split
from unet_trainer.images.image_spec import RGB_8BIT
from unet_trainer.loading.dataset import Batch
from unet_trainer.runs import checkpoint_file as checkpoint
from unet_trainer.runs.errors import CheckpointError, NonFinite
from unet_trainer.runs.host_copy import HostCopy
from unet_trainer.system import atomic_files as atomic
from unet_trainer.system.console import Console
from unet_trainer.training import build as assemble
from unet_trainer.training.state import EpochMetrics

CPU = torch.device("cpu")
SPLIT = Split(
    (Pair("a", Path("a.png"), Path("a.png")), Pair("b", Path("b.png"), Path("b.png"))),
    (Pair("c", Path("c.png"), Path("c.png")),),
    "",
)


def make_machine(**settings):
    settings = {"image_size": 32, "batch_size": 2, "device": "cpu", "ema_decay": 0.9, "in_channels": 3, **settings}
    config = load_config({**TINY_MODEL, **settings})
    config, numerics = assemble.build_numerics(config, Console(io.StringIO()))
    machine = assemble.build_machine(config, numerics, RGB_8BIT, 4, Console(io.StringIO()))
    machine.set_training_mode(0)
    return config, machine


def take_step(machine, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    machine.train_step(Batch(images, (images[..., 0] > 128).byte(), 2), EpochMetrics(1, CPU), 1, True, 1e-3)


def save_last(path, state, config, split, previous=None):
    checkpoint.write_checkpoint(path, checkpoint.last_content(state, config, split), previous)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint after one step, and the machine that wrote it."""
    config, machine = make_machine()
    take_step(machine)
    machine.state.epoch = 3
    machine.state.history = [{"epoch": 3, "val_iou": 0.5}]
    machine.state.progress.update(0.5, 3)
    save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    return tmp_path / "last.pt", machine


def test_everything_comes_back(saved):
    path, machine = saved
    _, other = make_machine()
    other.state.load_state_dict(checkpoint.read_last(path))
    for one, two in ((machine.state.model, other.state.model), (machine.state.ema.model, other.state.ema.model)):
        assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    assert other.state.ema.num_updates == 1
    assert other.state.epoch == 3
    assert other.state.history == [{"epoch": 3, "val_iou": 0.5}]
    assert (other.state.progress.best_value, other.state.progress.best_epoch) == (0.5, 3)
    take_step(machine, seed=1)
    take_step(other, seed=1)  # the optimizer's moments came along: the next step is the same
    assert all(torch.equal(value, other.state.model.state_dict()[name]) for name, value in machine.state.model.state_dict().items())


def test_settings_of_the_optimizer_are_those_of_this_start(saved):
    path, _ = saved
    _, other = make_machine(weight_decay=0.5)
    other.state.load_state_dict(checkpoint.read_last(path))
    assert [group["weight_decay"] for group in other.state.optimizer.param_groups] == [0.5, 0.0]


def test_ema_switched_on_at_resume_begins_with_the_weights(tmp_path):
    config, machine = make_machine(ema_decay=None)
    take_step(machine)
    save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    _, other = make_machine()
    other.state.load_state_dict(checkpoint.read_last(tmp_path / "last.pt"))
    averages = other.state.ema.model.state_dict()
    assert all(torch.equal(value, averages[name]) for name, value in machine.state.model.state_dict().items())


def test_scaler_state_comes_back(tmp_path):
    config, machine = make_machine()
    machine.state.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    machine.state.scaler.scale(torch.ones(()))
    save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    other = torch.amp.GradScaler("cpu", init_scale=65536.0)
    machine.state.scaler = other
    machine.state.load_state_dict(checkpoint.read_last(tmp_path / "last.pt"))
    assert other.get_scale() == 128.0


@pytest.fixture
def small(tmp_path):
    """A checkpoint of a few hundred bytes of tensors, so that it can be read a thousand times."""
    path = tmp_path / "last.pt"
    checkpoint.write_checkpoint(path, {"config": {}, "optimizer": {}, "model": {"w": torch.arange(50.0), "n": torch.tensor(3)}})
    return path


def test_a_thousand_flipped_bits_and_truncations_are_all_found(small, tmp_path):
    """torch.load accepts a flipped bit in a tensor without a word, and a zip's checksums leave its headers out."""
    content = small.read_bytes()
    chooser = random.Random(0)
    damaged = tmp_path / "damaged.pt"
    missed, messages = [], []
    for number in range(1000):
        changed = bytearray(content)
        position = chooser.randrange(len(content))
        if number % 5 == 0:
            del changed[position:]
        else:
            changed[position] ^= 1 << chooser.randrange(8)
        damaged.write_bytes(changed)
        try:
            checkpoint.read_last(damaged)
        except CheckpointError as error:
            messages.append(str(error))
        else:
            missed.append(position)
    assert missed == []
    assert all("damaged.pt is " in message and "\n" not in message for message in messages)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_cut_off_file_is_refused(saved, tmp_path, share):
    path, _ = saved
    content = path.read_bytes()
    cut = tmp_path / "cut.pt"
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.pt is (no checkpoint that can be read|damaged)"):
        checkpoint.read_last(cut)


class Call:
    """Pickles as a call, which a trusting loader would make."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Attributes(Call):
    """Sets attributes on what a call gives."""

    def __reduce__(self):
        return (*self.call, {"canary": "set"})


def hostile_things(canary):
    touch = f"open({str(canary)!r}, 'w').close()"
    command = f"touch {canary}"
    return [
        Call(os.system, command),
        Call(os.popen, command),
        Call(os.mkdir, str(canary)),
        Call(os.execv, "/bin/sh", ["sh", "-c", command]),
        Call(subprocess.run, ["touch", str(canary)]),
        Call(subprocess.Popen, ["touch", str(canary)]),
        Call(subprocess.check_output, ["touch", str(canary)]),
        Call(eval, touch),
        Call(exec, touch),
        Call(compile, touch, "a", "exec"),
        Call(open, str(canary), "w"),
        Call(Path.touch, canary),
        Call(Path.write_text, canary, "x"),
        Call(shutil.copy, __file__, str(canary)),
        Call(__import__, "antigravity"),
        Call(importlib.import_module, "this"),
        Call(getattr, Path, "touch"),
        Call(setattr, Path, "canary", 1),
        Call(map, os.system, [command]),
        Call(functools.partial, os.system, command),
        Call(operator.methodcaller, "touch"),
        Call(pickle.loads, pickle.dumps(Call(os.system, command))),
        Call(torch.load, str(canary)),
        Call(torch.save, {}, str(canary)),
        Call(torch.hub.load, "a/b", "c"),
        Call(numpy.load, str(canary), None, True),
        Call(builtins.breakpoint),
        Call(sys.exit, 1),
        Attributes(dict),
        Attributes(collections.OrderedDict),
        Call(bytearray, 10**12),
        [Call(os.system, command)] * 3,
        {Call(os.getcwd): 1},
    ]


NUM_HOSTILE = len(hostile_things(Path("canary")))
assert NUM_HOSTILE >= 30


@pytest.mark.parametrize("number", range(NUM_HOSTILE))
def test_a_hostile_file_is_refused_in_one_line_and_nothing_of_it_runs(number, tmp_path):
    """Signed as our own are, so that it is the content that is refused."""
    canary, file = tmp_path / "canary", tmp_path / "hostile.pt"
    thing = hostile_things(canary)[number]
    with file.open("wb") as stream:
        signed = checkpoint.SignedFile(stream)
        torch.save({"format": checkpoint.FORMAT, "config": {}, "model": {}, "optimizer": thing}, signed)
        signed.finish()
    with pytest.raises(CheckpointError, match=r"hostile\.pt is no checkpoint that can be read") as caught:
        checkpoint.read_last(file)
    assert "\n" not in str(caught.value)
    assert not canary.exists()
    assert not hasattr(Path, "canary")


def rewrite(path, change):
    """The entries of a zip, changed, in a zip of their own."""
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    changed = path.with_name("changed.pt")
    with zipfile.ZipFile(changed, "w") as archive:
        change(archive, entries)
    return changed


def test_a_zip_bomb_is_refused_before_it_is_unpacked(small):
    def pack(archive, entries):
        for name, content in entries:
            archive.writestr(name, content, zipfile.ZIP_STORED)
        archive.writestr("last/data/9", bytes(200_000_000), zipfile.ZIP_DEFLATED)

    bomb = rewrite(small, pack)
    assert bomb.stat().st_size < 500_000
    with pytest.raises(CheckpointError, match=r"changed\.pt is no checkpoint: it unpacks to more than it is"):
        checkpoint.read_last(bomb)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_two_entries_of_one_name_are_refused_because_two_readers_may_differ_on_them(small):
    def twice(archive, entries):
        for name, content in [*entries, entries[0]]:
            archive.writestr(name, content, zipfile.ZIP_STORED)

    with pytest.raises(CheckpointError, match="it holds two entries of one name"):
        checkpoint.read_last(rewrite(small, twice))


def test_a_file_without_its_digest_is_not_trusted(small):
    def same(archive, entries):
        for name, content in entries:
            archive.writestr(name, content, zipfile.ZIP_STORED)

    with pytest.raises(CheckpointError, match="its digest is missing"):
        checkpoint.read_last(rewrite(small, same))


def test_a_checkpoint_of_the_first_version_goes_on(tmp_path, saved):
    """Written as it was written then: no digest, no position, the scheduler and the rows with fewer entries."""
    path, machine = saved
    content = checkpoint.read_last(path)
    for name in ("batch", "totals", "train_seconds", "wait_seconds", "num_rollbacks"):
        del content[name]
    del content["learning_rate"]["factor"]
    content["ema"]["num_updates"] = 1
    torch.save({**content, "format": 1}, tmp_path / "old.pt")
    _, other = make_machine()
    other.state.load_state_dict(checkpoint.read_last(tmp_path / "old.pt"))
    assert (other.state.epoch, other.state.batch, other.state.learning_rate.factor) == (3, 0, 1.0)
    assert other.state.history == [{"epoch": 3, "val_iou": 0.5, "nan_steps": 0, "peak_reserved_gib": 0.0}]
    take_step(machine, seed=1)
    take_step(other, seed=1)
    assert all(torch.equal(value, other.state.model.state_dict()[name]) for name, value in machine.state.model.state_dict().items())


def test_a_checkpoint_of_a_later_version_is_refused_with_the_reason(small, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 9)
    checkpoint.write_checkpoint(small, {"config": {}, "model": {}})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="was written by a newer version \\(format 9\\); this one reads up to 2"):
        checkpoint.read_checkpoint(small)


@pytest.mark.parametrize("part", ["model", "ema"])
def test_weights_that_are_not_finite_are_never_saved(part, saved):
    path, machine = saved
    before = path.read_bytes()
    model = machine.state.model if part == "model" else machine.state.ema.model
    with torch.no_grad():
        next(model.parameters())[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFinite, match=r"are not finite and were not saved as .*last\.pt"):
        save_last(path, machine.state, {}, SPLIT)
    assert path.read_bytes() == before


class FullDisk(io.FileIO):
    """Takes so many bytes and no more."""

    room = 0

    def write(self, part):
        taken = min(len(part), self.room)
        super().write(memoryview(part)[:taken])
        self.room -= taken
        if taken < len(part):
            raise OSError(28, "No space left on device")
        return taken


def test_a_disk_that_fills_up_at_any_of_fifty_bytes_loses_no_checkpoint(small, monkeypatch):
    before, size = small.read_bytes(), small.stat().st_size
    for room in [*range(0, size, -(-size // 48)), size - 1]:
        monkeypatch.setattr(FullDisk, "room", room)
        monkeypatch.setattr(os, "fdopen", lambda handle, mode: FullDisk(handle, mode))
        with pytest.raises(checkpoint.SaveError) as caught:
            checkpoint.write_checkpoint(small, checkpoint.read_checkpoint(small), previous=small.with_name("previous.pt"))
        monkeypatch.undo()
        assert str(caught.value).startswith(f"{small} could not be written (No space left on device): 0.0 MB are needed, ")
        assert small.read_bytes() == before
        assert [entry.name for entry in small.parent.iterdir()] == ["last.pt"]


def test_the_state_before_is_kept_and_used_when_the_last_one_is_bad(small):
    previous = small.with_name("previous.pt")
    first = small.read_bytes()
    checkpoint.write_checkpoint(small, {"config": {}, "optimizer": {}, "model": {}, "epoch": 2}, previous=previous)
    assert previous.read_bytes() == first
    said = []
    assert checkpoint.read_run(small.parent, said.append)["epoch"] == 2
    assert said == []
    small.write_bytes(small.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"last\.pt"):  # named by the user: that one or none
        checkpoint.read_run(small, said.append)
    assert torch.equal(checkpoint.read_run(small.parent, said.append)["model"]["w"], torch.arange(50.0))
    assert len(said) == 1
    assert str(small) in said[0]
    assert f"going on from {previous}, which was saved before it (the other is kept as damaged.pt)" in said[0]


def test_a_kill_in_the_save_after_a_bad_state_leaves_the_good_one(small, monkeypatch):
    """The save must not give the bad file the name of the good one."""
    previous = small.with_name("previous.pt")
    first, content = small.read_bytes(), {"config": {}, "optimizer": {}, "model": {}}
    checkpoint.write_checkpoint(small, content, previous=previous)
    bad = small.read_bytes()[:-100]
    small.write_bytes(bad)
    checkpoint.read_run(small.parent, lambda text: None)
    assert (small.read_bytes(), small.with_name("damaged.pt").read_bytes(), previous.exists()) == (first, bad, False)
    keep = atomic._keep

    def killed(*arguments):
        keep(*arguments)
        raise SystemExit

    monkeypatch.setattr(atomic, "_keep", killed)
    with pytest.raises(SystemExit):
        checkpoint.write_checkpoint(small, content, previous=previous)
    assert small.read_bytes() == previous.read_bytes() == first


def test_two_bad_states_are_both_named(small):
    shutil.copy(small, small.with_name("previous.pt"))
    for name in ("last.pt", "previous.pt"):
        small.with_name(name).write_bytes(small.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"last\.pt is .*; .*previous\.pt is "):
        checkpoint.read_run(small.parent, lambda text: None)
    assert sorted(entry.name for entry in small.parent.iterdir()) == ["last.pt", "previous.pt"]


def test_a_state_of_a_newer_version_is_no_bad_one(small, monkeypatch):
    shutil.copy(small, small.with_name("previous.pt"))
    monkeypatch.setattr(checkpoint, "FORMAT", checkpoint.FORMAT + 1)
    checkpoint.write_checkpoint(small, {"config": {}, "optimizer": {}, "model": {}})
    monkeypatch.undo()
    newer = small.read_bytes()
    with pytest.raises(CheckpointError, match="written by a newer version"):
        checkpoint.read_run(small.parent, lambda text: None)
    assert small.read_bytes() == newer


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_no_state_and_is_not_waited_for(make, small):
    small.rename(small.with_name("previous.pt"))
    make(small)
    said = []
    assert torch.equal(checkpoint.read_run(small.parent, said.append)["model"]["w"], torch.arange(50.0))
    assert f"{small} is no file; going on from" in said[0]
    assert small.is_file()


def test_a_file_that_reads_back_wrong_does_not_take_the_place_of_a_good_one(small, monkeypatch):
    before = small.read_bytes()
    finish = checkpoint.SignedFile.finish

    def flip(signed):
        finish(signed)
        signed.file.seek(40)
        signed.file.write(b"\xff")

    monkeypatch.setattr(checkpoint.SignedFile, "finish", flip)
    with pytest.raises(CheckpointError, match="do not match its digest"):
        checkpoint.write_checkpoint(small, {"config": {}, "model": {}})
    assert small.read_bytes() == before


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_digest_is_of_every_byte_however_they_come(size, tmp_path):
    """The two bytes that a zip ends with become the length of the comment."""
    archive = io.BytesIO()
    torch.save({"w": torch.arange(300.0)}, archive)
    whole = archive.getvalue()
    with (tmp_path / "signed.pt").open("wb") as stream:
        signed = checkpoint.SignedFile(stream)
        for start in range(0, len(whole), size):
            assert signed.write(whole[start : start + size]) == len(whole[start : start + size])
        signed.finish()
    found = (tmp_path / "signed.pt").read_bytes()
    assert len(found) == signed.num_bytes
    body, comment = found[: -checkpoint.NUM_DIGEST_BYTES], found[-checkpoint.NUM_DIGEST_BYTES :]
    assert body == whole[:-2] + checkpoint.NUM_DIGEST_BYTES.to_bytes(2, "little")
    assert comment == b"sha256:" + hashlib.sha256(body).hexdigest().encode()
    with zipfile.ZipFile(tmp_path / "signed.pt") as readable:
        assert readable.comment == comment
    assert torch.equal(torch.load(tmp_path / "signed.pt", weights_only=True)["w"], torch.arange(300.0))


def test_a_checkpoint_is_written_with_few_calls(tmp_path, monkeypatch):
    """It is written beside the training loop, and every call is a fight for the interpreter."""
    state = {f"layer{number}": torch.rand(50) for number in range(400)}
    sizes = []
    write = checkpoint.SignedFile.write
    monkeypatch.setattr(checkpoint.SignedFile, "write", lambda self, part: (sizes.append(len(part)), write(self, part))[1])
    checkpoint.write_checkpoint(tmp_path / "last.pt", HostCopy({"config": {}, "model": state}).content())
    assert len(sizes) < 60
    found = checkpoint.read_checkpoint(tmp_path / "last.pt")["model"]
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_names_lose_every_prefix_however_nested():
    tensors = {"module._orig_mod.module.encoder.w": 1, "_orig_mod.decoder._orig_mod.b": 2, "head.module.w": 3}
    assert checkpoint.bare_names(tensors) == {"encoder.w": 1, "decoder.b": 2, "head.module.w": 3}


def test_other_files_are_refused_by_name(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"foreign\.pt is no checkpoint of this trainer"):
        checkpoint.read_checkpoint(tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*missing\.pt"):
        checkpoint.read_checkpoint(tmp_path / "missing.pt")
    config, machine = make_machine()
    checkpoint.write_checkpoint(
        tmp_path / "best.pt", checkpoint.best_content(machine.eval_step.model, as_dict(config), 1, {"val_iou": 0.5})
    )
    with pytest.raises(CheckpointError, match=r"best\.pt holds weights alone"):
        checkpoint.read_last(tmp_path / "best.pt")


def test_a_failed_save_leaves_the_old_checkpoint_intact(saved, monkeypatch):
    path, machine = saved
    before = path.read_bytes()

    def broken_save(content, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", broken_save)
    with pytest.raises(OSError, match="No space left"):
        save_last(path, machine.state, {}, SPLIT)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["last.pt"]


def test_prefixes_of_compiled_models_never_reach_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: torch._dynamo.disable(function))  # wraps, in no time
    config, machine = make_machine()
    plain_names = list(machine.state.model.state_dict())
    assemble.compile_machine(config, machine, Console(io.StringIO()))
    take_step(machine)
    save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    assert list(checkpoint.read_last(tmp_path / "last.pt")["model"]) == plain_names


def test_scaler_settings_are_those_of_this_start(tmp_path):
    config, machine = make_machine()
    machine.state.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    machine.state.scaler.scale(torch.ones(()))
    save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    machine.state.scaler = torch.amp.GradScaler("cpu", growth_interval=100, backoff_factor=0.25)
    machine.state.load_state_dict(checkpoint.read_last(tmp_path / "last.pt"))
    scaler = machine.state.scaler
    assert (scaler.get_scale(), scaler.get_growth_interval(), scaler.get_backoff_factor()) == (128.0, 100, 0.25)


def test_another_monitor_is_refused_and_another_loss_where_the_loss_is_monitored():
    before = as_dict(load_config({}))
    with pytest.raises(CheckpointError, match="monitor: val_iou in the checkpoint, val_loss now; it decides which epoch was best"):
        checkpoint.compare_configs(before, as_dict(load_config({"monitor": "val_loss"})))
    assert checkpoint.compare_configs(before, as_dict(load_config({"loss": "dice"})))
    before = as_dict(load_config({"monitor": "val_loss"}))
    with pytest.raises(CheckpointError, match=r"loss: .* it decides which epoch was best"):
        checkpoint.compare_configs(before, as_dict(load_config({"monitor": "val_loss", "loss": "dice"})))


def test_a_change_that_makes_the_result_meaningless_is_refused_by_name():
    before = as_dict(load_config({}))
    now = as_dict(load_config({"encoder": "resnet18", "num_classes": 3, "learning_rate": 0.5}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.compare_configs(before, now)
    message = str(caught.value)
    assert "encoder: resnet34 in the checkpoint, resnet18 now" in message
    assert "num_classes: 1 in the checkpoint, 3 now" in message
    assert "learning_rate" not in message


def test_harmless_changes_are_told_and_machine_settings_are_not():
    before = as_dict(load_config({}))
    now = as_dict(load_config({"learning_rate": 0.5, "num_workers": 3, "checkpoint_dir": "elsewhere"}))
    assert checkpoint.compare_configs(before, now) == ["learning_rate: 0.001 → 0.5"]


def test_another_split_is_refused_by_example():
    before = {"train": ["a", "b"], "val": ["c"]}
    checkpoint.compare_splits(before, {"train": ["b", "a"], "val": ["c"]})
    same_names = {"train": ["0", "1"], "val": ["0", "1"]}  # train/images/0.png and val/images/0.png
    checkpoint.compare_splits(same_names, same_names)
    for now, words in (
        ({"train": ["a", "c"], "val": ["b"]}, "1 images trained on would now validate, e.g. b"),
        ({"train": ["a", "b"], "val": ["c", "d"]}, "1 validation images differ, e.g. d"),
        ({"train": ["a", "b", "e"], "val": ["c"]}, "1 training images differ, e.g. e"),
    ):
        with pytest.raises(CheckpointError, match=words):
            checkpoint.compare_splits(before, now)


def test_weights_load_without_trusting_the_file(saved, tmp_path):
    """Tensors and primitives only: torch's restricted loader takes all of it."""
    path, _ = saved
    shutil.copy(path, tmp_path / "copy.pt")
    content = torch.load(tmp_path / "copy.pt", weights_only=True)
    assert content["split"] == {"train": ["a", "b"], "val": ["c"]}
