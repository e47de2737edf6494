"""best.pt is looked for on resume and at the end: written anew where the state is the best one, told as lost where it is not."""

from __future__ import annotations

import math

import pytest
import torch

from helpers.small_runs import ROW, make_run, said
from unet_trainer.model.metrics import compute_scores
from unet_trainer.runs import checkpoint_file
from unet_trainer.runs.checkpoint_file import read_checkpoint
from unet_trainer.runs.errors import UnreadableFile
from unet_trainer.training.best_weights import look_for_best
from unet_trainer.training.result import report

SCORES = compute_scores(torch.tensor([[5, 1], [1, 2]]), 1)


def after(run, values):
    """After epochs with these val_iou, best.pt as the run writes it."""
    for index, value in enumerate(values):
        row = {**ROW, "epoch": index + 1, "val_iou": value}
        if run.judge(row, SCORES):
            run.checkpointer.write_best(row, run.state.eval_segmenter)
    return run


@pytest.fixture
def run(tiny_data, tmp_path):
    return make_run(tiny_data, tmp_path / "run", num_epochs=3)


def look(run):
    return look_for_best(run.checkpointer, run.state, run.console)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILED = {"is missing": lambda path: path.unlink(), "is damaged: its bytes do not match its digest": damage}


def test_weights_that_are_whole_are_left_as_they_are(run):
    before = (after(run, [0.5, 0.25]).checkpointer.folder / "best.pt").read_bytes()
    assert look(run) is None
    assert (run.checkpointer.folder / "best.pt").read_bytes() == before


def test_a_run_without_a_best_epoch_needs_none(run):
    assert look(after(run, [math.nan])) is None
    assert not (run.checkpointer.folder / "best.pt").exists()


@pytest.mark.parametrize("what", SPOILED)
def test_a_state_that_is_the_best_one_gives_its_weights_again(what, run):
    path = after(run, [0.25, 0.5]).checkpointer.folder / "best.pt"
    SPOILED[what](path)
    assert look(run) is None
    assert read_checkpoint(path)["epoch"] == 2
    assert f"Warning: {path} {what}; it is written anew from this state" in said(run)


@pytest.mark.parametrize("what", SPOILED)
def test_weights_of_an_earlier_epoch_are_told_as_lost_and_the_next_epoch_is_the_best(what, run):
    path = after(run, [0.5, 0.25]).checkpointer.folder / "best.pt"
    SPOILED[what](path)
    assert look(run) == f"{path} {what}: the weights of epoch 1, the best so far, are lost"
    state = run.state
    assert (state.early_stopping.best_epoch, state.per_class_iou, state.confusion) == (0, [], [])
    assert run.judge({**ROW, "epoch": 3, "val_iou": 0.125}, SCORES)


def test_weights_that_cannot_be_read_may_be_whole_and_are_left_alone(run, monkeypatch):
    path = after(run, [0.5, 0.25]).checkpointer.folder / "best.pt"
    before = path.read_bytes()

    def fail(path):
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint_file, "_verify", fail)
    with pytest.raises(UnreadableFile, match=r"best\.pt cannot be read \(Input/output error; the disk or its connection fails"):
        look(run)
    assert (path.read_bytes(), run.state.early_stopping.best_epoch) == (before, 1)


def test_a_run_that_ends_without_its_best_weights_says_so_and_names_the_last_ones(run):
    path = after(run, [0.5, 0.25, 0.25]).checkpointer.folder / "best.pt"
    path.unlink()
    result = report(run)
    assert result.missing == ["best.pt"]
    assert (
        f"Warning: {path} is missing: the weights of epoch 1, the best so far, are lost; last.pt holds those of the last epoch"
        in said(run)
    )
    assert f"Weights: {path.parent / 'last.pt'} | " in said(run)
    assert str(path) not in said(run).split("Weights: ")[1]
