"""Checkpoints: complete, verified, harmless; and what may change between two starts."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from conftest import TINY_MODEL
from unet_trainer import assemble, checkpoint
from unet_trainer.config import as_dict, load_config
from unet_trainer.console import Console
from unet_trainer.dataset import Batch
from unet_trainer.forms import RGB
from unet_trainer.pairs import Pair
from unet_trainer.runs import CheckpointError
from unet_trainer.splits import Split
from unet_trainer.step import Totals

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
    machine = assemble.build_machine(config, numerics, RGB, 4, Console(io.StringIO()))
    machine.set_training(0)
    return config, machine


def take_step(machine, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8, generator=generator)
    machine.train_step(Batch(images, (images[..., 0] > 128).byte(), 2), Totals(1, CPU), 1, True, 1e-3)


@pytest.fixture
def saved(tmp_path):
    """A checkpoint after one step, and the machine that wrote it."""
    config, machine = make_machine()
    take_step(machine)
    machine.state.epoch = 3
    machine.state.history = [{"epoch": 3, "val_iou": 0.5}]
    machine.state.progress.update(0.5, 3)
    checkpoint.save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
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
    checkpoint.save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    _, other = make_machine()
    other.state.load_state_dict(checkpoint.read_last(tmp_path / "last.pt"))
    averages = other.state.ema.model.state_dict()
    assert all(torch.equal(value, averages[name]) for name, value in machine.state.model.state_dict().items())


def test_scaler_state_comes_back(tmp_path):
    config, machine = make_machine()
    machine.state.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    machine.state.scaler.scale(torch.ones(()))
    checkpoint.save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    other = torch.amp.GradScaler("cpu", init_scale=65536.0)
    machine.state.scaler = other
    machine.state.load_state_dict(checkpoint.read_last(tmp_path / "last.pt"))
    assert other.get_scale() == 128.0


def plain(value):
    """Tensors as bytes, so that contents can be compared whole."""
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_every_flipped_bit_is_found(saved, tmp_path):
    """torch.load accepts a flipped bit in a tensor without a word."""
    path, _ = saved
    content = path.read_bytes()
    chooser = random.Random(0)
    damaged = tmp_path / "damaged.pt"
    original = checkpoint.read_last(path)
    missed = []
    for _ in range(60):
        position, bit = chooser.randrange(len(content)), chooser.randrange(8)
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        damaged.write_bytes(changed)
        try:
            found = checkpoint.read_last(damaged)
        except CheckpointError:
            continue
        if pickle.dumps(plain(found)) != pickle.dumps(plain(original)):
            missed.append(position)
    assert missed == []


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_cut_off_file_is_refused(saved, tmp_path, share):
    path, _ = saved
    content = path.read_bytes()
    cut = tmp_path / "cut.pt"
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.pt is no checkpoint that can be read"):
        checkpoint.read_last(cut)


def test_a_hostile_pickle_is_refused_and_not_run(tmp_path):
    canary = tmp_path / "canary"

    class Hostile:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    torch.save({"format": checkpoint.FORMAT, "config": {}, "optimizer": Hostile()}, tmp_path / "hostile.pt")
    with pytest.raises(CheckpointError, match=r"hostile\.pt is no checkpoint that can be read"):
        checkpoint.read_last(tmp_path / "hostile.pt")
    assert not canary.exists()


def test_other_files_are_refused_by_name(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"foreign\.pt is no checkpoint of this trainer"):
        checkpoint.read_checkpoint(tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*missing\.pt"):
        checkpoint.read_checkpoint(tmp_path / "missing.pt")
    config, machine = make_machine()
    checkpoint.save_best(tmp_path / "best.pt", machine.eval_step.model, as_dict(config), 1, {"val_iou": 0.5})
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
        checkpoint.save_last(path, machine.state, {}, SPLIT)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["last.pt"]


def test_prefixes_of_compiled_models_never_reach_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: torch._dynamo.disable(function))  # wraps, in no time
    config, machine = make_machine()
    plain_names = list(machine.state.model.state_dict())
    assemble.compile_machine(config, machine, Console(io.StringIO()))
    take_step(machine)
    checkpoint.save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
    assert list(checkpoint.read_last(tmp_path / "last.pt")["model"]) == plain_names


def test_scaler_settings_are_those_of_this_start(tmp_path):
    config, machine = make_machine()
    machine.state.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    machine.state.scaler.scale(torch.ones(()))
    checkpoint.save_last(tmp_path / "last.pt", machine.state, as_dict(config), SPLIT)
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
