"""What happens when an epoch cannot be finished. How it looks to a user is tested in test_trouble.py."""

import math
from pathlib import Path

import pytest
import torch

from helpers.small_runs import make_run
from helpers.steps import everything, make_batch, same, small_components, take_step
from train_unet import end_with_state_saved
from unet_trainer.config.errors import NonFinite, TrainingFailed
from unet_trainer.loading.worker_pool import WorkerError
from unet_trainer.training import recovery
from unet_trainer.training.checkpoint import read_last


@pytest.fixture
def run(tiny_data, tmp_path):
    """At batch 3 of its first epoch, after one step; nothing is saved yet."""
    made = make_run(tiny_data, tmp_path / "run", on_oom="shrink")
    made.initial_state = everything(made.components)
    take_step(made.components.train_step, made.loaders.train.read(0, 0), metrics=made.state.metrics)
    made.state.batch = 3
    return made


def fail(error):
    raise error


def saved(run):
    run.checkpointer.finish()
    return read_last(run.checkpointer.folder / "last.pt")


def test_the_end_of_an_epoch_that_is_not_finite_is_not_saved(run):
    """A resumed run would come to the same end."""
    run.state.batch = len(run.loaders.train)
    with pytest.raises(TrainingFailed, match=r"the validation loss is not finite in epoch 1\. Try"):
        end_with_state_saved(run, NonFinite("the validation loss is not finite", val_batch=0))
    assert same(run.initial_state[:5], list(saved(run)["model"].values())[:5])  # that of the start


def test_a_bug_is_not_hidden_by_an_error_while_saving(run, monkeypatch):
    full = TrainingFailed("the disk is full")
    monkeypatch.setattr(run.checkpointer, "save_on_failure", lambda state_is_whole: fail(full))
    with pytest.raises(ZeroDivisionError):
        end_with_state_saved(run, ZeroDivisionError())


def test_an_error_of_the_callers_code_keeps_its_cause(run):
    error = ValueError("of a callback")
    error.__cause__ = KeyError("why")
    with pytest.raises(ValueError, match="of a callback") as caught:
        end_with_state_saved(run, error)
    assert isinstance(caught.value.__cause__, KeyError)


def test_memory_that_runs_out_between_epochs_is_explained_and_the_state_saved(run):
    with pytest.raises(TrainingFailed, match=r"out of memory \(CUDA out of memory\)\. Try .*; to go on"):
        end_with_state_saved(run, torch.OutOfMemoryError("CUDA out of memory"))
    assert saved(run)["batch"] == 3


@pytest.mark.parametrize("error", [ZeroDivisionError(), WorkerError("died")])
def test_a_state_in_the_middle_of_a_group_is_never_saved(error, run):
    run.components.train_step.is_whole = False
    with pytest.raises((TrainingFailed, ZeroDivisionError)):
        end_with_state_saved(run, error)
    assert saved(run)["batch"] == 0  # that of the start
    assert saved(run)["totals"]["num_images"] == 0


def test_a_pixel_is_named_by_its_file():
    components = small_components(loss={"bce": 1.0, "dice": 1.0})
    batch = make_batch(2, side=32)
    images = batch.images.float()
    images[1, 5, 6, 0] = math.inf
    files = [Path("images/a.tif"), Path("images/b.tif")]
    model = components.state.segmenter, components.loss, components.numerics
    assert recovery.explain(*model, batch._replace(images=images), files) == (
        "images/b.tif holds pixels that are NaN or infinite; the first layer whose output is not finite is encoder.0; "
        "the loss term bce, dice is not finite"
    )
