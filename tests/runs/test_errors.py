"""Errors of a run: whose they are, and what they carry."""

from __future__ import annotations

from unet_trainer.config.errors import UserError
from unet_trainer.runs.errors import CheckpointError, NewerFormat, NonFinite, TrainingFailed


def test_a_checkpoint_that_cannot_be_used_is_an_error_of_the_user():
    assert issubclass(CheckpointError, UserError)
    assert issubclass(NewerFormat, CheckpointError)


def test_training_that_cannot_go_on_is_no_error_of_the_user():
    assert not issubclass(TrainingFailed, UserError)
    assert not issubclass(NonFinite, UserError)


def test_numbers_that_are_not_finite_know_their_batch():
    in_training = NonFinite("8 steps in a row were not finite", batch_number=3)
    assert (str(in_training), in_training.batch_number, in_training.val_batch) == ("8 steps in a row were not finite", 3, None)
    in_validation = NonFinite("the validation loss is not finite", val_batch=0)
    assert (in_validation.batch_number, in_validation.val_batch) == (None, 0)
    in_weights = NonFinite("the weights are not finite")
    assert (in_weights.batch_number, in_weights.val_batch) == (None, None)
