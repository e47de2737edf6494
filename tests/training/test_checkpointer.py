"""A run in its folder: what is saved when, in which order, and what is restored."""

import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from helpers.small_runs import ROW, SCORES, finish_epochs, make_run, said
from helpers.steps import make_batch, make_settings, same, silent_console, small_components, take_step
from unet_trainer.config.errors import TrainingFailed
from unet_trainer.datasets.pairs import Pair
from unet_trainer.datasets.splits import Split
from unet_trainer.training import checkpoint_file
from unet_trainer.training import checkpointer as module
from unet_trainer.training.checkpoint_file import read_checkpoint, read_last, read_run
from unet_trainer.training.checkpointer import Checkpointer
from unet_trainer.training.result import report

FULL = OSError(28, "No space left on device")
PAIRS = tuple(Pair(name, Path(f"{name}.png"), Path(f"{name}.png")) for name in "abc")
SPLIT = Split(PAIRS[:2], PAIRS[2:], "")


@pytest.fixture
def settings():
    return make_settings(ema_decay=0.9)


@pytest.fixture
def components(settings):
    return small_components(settings=settings)


@pytest.fixture
def checkpointer(components, settings, tmp_path):
    return Checkpointer(tmp_path, settings, components.state, SPLIT, silent_console())


def save_epoch(checkpointer, best=None):
    """An epoch; `best`: its evaluated model, if it is the best so far."""
    checkpointer.save_epoch(dict(ROW), best, lambda: lambda: np.zeros((4, 4, 3), np.uint8), lambda: "image,iou\n")


def end_epoch(components, epoch):
    components.state.epoch = epoch
    components.state.history = [{**ROW, "epoch": number + 1} for number in range(epoch)]


def weights(components):
    return [value.clone() for value in components.state.segmenter.network.state_dict().values()]


def saved_epoch(folder):
    return read_run(folder, pytest.fail)["epoch"]


def test_a_file_that_cannot_be_written_ends_the_run(checkpointer, monkeypatch):
    monkeypatch.setattr(checkpoint_file, "write_atomically", mock.Mock(side_effect=FULL))
    checkpointer.save_state()
    why = r"last\.pt could not be written \(No space left on device\): .* MB are needed, .*; there is no state to go on from"
    with pytest.raises(TrainingFailed, match=why):
        checkpointer.finish()


def test_where_memory_ran_out_a_state_that_cannot_be_copied_is_told_and_that_of_the_start_is_saved(
    checkpointer, components, tmp_path, monkeypatch
):
    end_epoch(components, 1)
    why = "DefaultCPUAllocator: not enough memory"
    monkeypatch.setattr(module, "HostCopy", mock.Mock(side_effect=RuntimeError(why)))
    checkpointer.save_on_failure(state_is_whole=True)
    assert (saved_epoch(tmp_path), (tmp_path / "best.pt").exists()) == (0, False)
    assert said(checkpointer) == f"Warning: the state could not be saved: {why}\n"


@pytest.fixture
def slow_disk(monkeypatch):
    """Checkpoints are written only once the test allows it."""
    may_write = threading.Event()
    write = module.write_checkpoint

    def slow(*arguments, **options):
        assert may_write.wait(30)
        write(*arguments, **options)

    monkeypatch.setattr(module, "write_checkpoint", slow)
    return may_write


def fall_behind(checkpointer, components):
    """The second epoch, the best so far, ends while the state of the first is still being written."""
    end_epoch(components, 1)
    save_epoch(checkpointer)
    take_step(components.train_step, make_batch(2, side=32))
    end_epoch(components, 2)
    save_epoch(checkpointer, components.state.eval_segmenter)


def test_an_epoch_shorter_than_a_save_is_saved_as_soon_as_the_disk_is_free(
    checkpointer, components, slow_disk, tmp_path, monkeypatch
):
    fall_behind(checkpointer, components)
    copies = []
    copy_state = Checkpointer._copy_state
    monkeypatch.setattr(Checkpointer, "_copy_state", lambda self, *more: (copies.append(1), copy_state(self, *more))[1])
    checkpointer.save_if_due()
    assert copies == []  # the disk is busy: a copy would only wait, to be replaced by a newer one
    slow_disk.set()
    checkpointer.writer.wait()
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()  # it is written together with the state that refers to it
    components.state.batch = 3
    checkpointer.save_if_due()
    checkpointer.writer.wait()
    assert read_checkpoint(tmp_path / "best.pt")["epoch"] == 2
    assert copies == [1]
    assert (saved_epoch(tmp_path), read_run(tmp_path, pytest.fail)["batch"]) == (2, 3)
    checkpointer.save_if_due()
    assert copies == [1]


def test_restoring_the_last_state_saves_nothing_of_the_epoch_since(checkpointer, components, slow_disk, tmp_path):
    before = weights(components)
    fall_behind(checkpointer, components)
    assert not same(before, weights(components))
    slow_disk.set()
    checkpointer.restore_last()
    assert same(before, weights(components))
    assert components.state.epoch == 1
    checkpointer.finish()
    assert saved_epoch(tmp_path) == 1
    assert not (tmp_path / "best.pt").exists()


def test_a_state_is_not_written_without_the_best_weights_that_it_refers_to(
    checkpointer, components, tmp_path, monkeypatch
):
    write = module.write_checkpoint

    def refuse_best(path, *more, **others):
        if path.name == "best.pt":
            raise FULL
        write(path, *more, **others)

    checkpointer.save_state()
    checkpointer.finish()
    monkeypatch.setattr(module, "write_checkpoint", refuse_best)
    end_epoch(components, 1)
    save_epoch(checkpointer, components.state.eval_segmenter)
    with pytest.raises(TrainingFailed, match="could not be written"):
        checkpointer.finish()
    assert (saved_epoch(tmp_path), (tmp_path / "best.pt").exists()) == (0, False)


@pytest.mark.parametrize("what", ["is another folder now", "is gone"])
def test_a_folder_that_is_lost_gets_nothing_and_the_state_is_saved_beside_it(what, components, settings, tmp_path):
    folder, elsewhere = tmp_path / "run", tmp_path / "run-2"  # never the same name: another process may begin there
    made = Checkpointer(folder, settings, components.state, SPLIT, silent_console(), is_ours=lambda: False)
    if what == "is another folder now":
        folder.mkdir()
    with pytest.raises(TrainingFailed) as caught:
        save_epoch(made, components.state.eval_segmenter)
    assert str(caught.value) == (
        f"{folder} {what}, deleted, moved or taken by another process; the state is saved as {elsewhere / 'last.pt'}; "
        f"to go on: python train_unet.py --resume {elsewhere}"
    )
    assert read_last(elsewhere / "last.pt")["epoch"] == read_checkpoint(elsewhere / "best.pt")["epoch"]
    assert not folder.exists() or list(folder.iterdir()) == []


@pytest.fixture
def run(tiny_data, tmp_path):
    return make_run(tiny_data, tmp_path / "run", num_epochs=3)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


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
    damage(best)
    damaged = f"{best} is damaged: its bytes do not match its digest"
    assert run.checkpointer.check_best() == f"{damaged}: the weights of epoch 1, the best so far, are lost"
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
