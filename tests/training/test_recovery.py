"""What happens when an epoch cannot be finished. How it looks to a user is tested in test_trouble.py."""

from __future__ import annotations

import math
import signal
import weakref

import pytest
import torch

from helpers.small_runs import make_run, said
from helpers.steps import everything, same, take_step
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.images.file_bytes import DataError
from unet_trainer.loading.worker_backends import WorkerError
from unet_trainer.runs.checkpoint_file import read_last
from unet_trainer.runs.errors import NonFinite, TrainingFailed
from unet_trainer.runs.event_log import read_events
from unet_trainer.system.signals import Interrupted
from unet_trainer.training import recovery
from unet_trainer.training.recovery import Recovery


@pytest.fixture
def run(tiny_data, tmp_path):
    """At batch 3 of its first epoch, after one step; nothing is saved yet."""
    made = make_run(tiny_data, tmp_path / "run", on_nan="recover", on_oom="shrink")
    made.initial_state = everything(made.components)
    take_step(made.components.train_step, made.loaders.train.read(0, 0), metrics=made.state.metrics)
    made.state.batch = 3
    return made


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand much more")


def bad_steps(batch_number=4):
    return NonFinite("8 steps in a row were not finite", batch_number)


def fail(error):
    raise error


def recover(run, error):
    """An epoch that ends with this error."""
    with Recovery(run):
        fail(error)


def saved(run):
    run.checkpointer.finish()
    return read_last(run.checkpointer.folder / "last.pt")


def is_anything_saved(run):
    return (run.checkpointer.folder / "last.pt").exists()


def same_weights(run, content):
    return same(run.state.segmenter.network.state_dict().values(), content["model"].values())


def test_an_epoch_that_is_finished_needs_none(run):
    with Recovery(run):
        pass
    assert (run.state.batch, said(run).count("Warning")) == (3, 0)
    assert not is_anything_saved(run)


def test_the_first_time_numbers_are_not_finite_the_run_goes_back_with_a_tenth_of_the_rate(run):
    recover(run, bad_steps())
    assert (run.state.batch, run.state.num_rollbacks, run.state.learning_rate.factor) == (0, 1, 0.1)
    assert same(everything(run.components), run.initial_state)
    assert "8 steps in a row were not finite from step 5 on (epoch 1, batch 5 of 5)" in said(run)
    assert "Going back to the start, with 0.1 of the learning rate" in said(run)
    content = saved(run)  # so that a restart does not begin with the rate that failed
    assert (content["num_rollbacks"], content["learning_rate"]["factor"]) == (1, 0.1)
    assert not (run.checkpointer.folder / "config.yaml").exists()


def test_it_goes_back_to_the_last_saved_state(run):
    run.checkpointer.save_state()
    before = everything(run.components)
    take_step(run.components.train_step, run.loaders.train.read(0, 3))
    run.state.batch = 4
    recover(run, bad_steps())
    assert run.state.batch == 3
    assert same(everything(run.components), before)
    assert "Going back to batch 3 of epoch 1" in said(run)


@pytest.mark.parametrize(("on_nan", "num_rollbacks"), [("recover", 1), ("stop", 0)])
def test_the_second_time_or_with_on_nan_stop_training_ends(on_nan, num_rollbacks, run):
    run.settings.change("a test", on_nan=on_nan)
    run.state.num_rollbacks = num_rollbacks
    with pytest.raises(
        TrainingFailed,
        match=r"the validation loss is not finite in epoch 1\. Try a lower learning_rate, grad_clip=1\.0; .*last\.pt",
    ):
        recover(run, NonFinite("the validation loss is not finite", val_batch=0))
    assert same(run.initial_state[:5], list(saved(run)["model"].values())[:5])  # that of the start: nothing else was saved


def test_a_lower_precision_is_one_of_the_things_to_try(run):
    run.settings.change("a test", on_nan="stop", use_amp=True)
    with pytest.raises(TrainingFailed, match=r"grad_clip=1\.0, use_amp=false; "):
        recover(run, bad_steps())


def test_the_files_and_the_layer_are_named(run):
    with torch.no_grad():
        run.state.segmenter.network.encoder[0].weight[0, 0, 0, 0] = math.nan
    recover(run, bad_steps(1))
    names = ", ".join(str(file) for file in run.loaders.train.files(0, 1))
    assert (
        "8 steps in a row were not finite from step 2 on (epoch 1, batch 2 of 5): the weights encoder.0.weight are not finite; "
        "the first layer whose output is not finite is encoder.0; "
    ) in said(run)
    assert f"(images of the batch: {names})" in said(run)


def test_the_step_is_counted_in_groups_of_batches(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", accumulation_steps=2)
    recover(run, bad_steps(5 + 2))  # the third batch of the second epoch
    assert "from step 5 on (epoch 2, batch 3 of 5)" in said(run)  # an epoch has three steps


def test_numbers_that_belong_to_no_batch_are_told_as_they_are(run):
    recover(run, NonFinite("the weights (a) are not finite"))
    assert "Warning: the weights (a) are not finite. Going back to" in said(run)


def test_a_group_that_was_begun_is_dropped_with_its_gradients(run):
    step = run.components.train_step
    step.begin_group(2, 3)
    step(run.loaders.train.read(0, 3), run.state.metrics)
    recover(run, NonFinite("the weights (a) are not finite"))
    assert not step.mid_accumulation
    assert all(parameter.grad is None for parameter in step.parameters)


def test_an_explanation_for_which_there_is_no_memory_is_left_out(run, monkeypatch):
    monkeypatch.setattr(recovery, "explain", lambda *arguments: fail(out_of_memory()))
    recover(run, NonFinite("a step was not finite", batch_number=1))
    assert "a step was not finite from step 2 on (epoch 1, batch 2 of 5). Going back" in said(run)


def test_a_run_that_recovered_is_not_ended_by_the_bad_steps_from_before(run, monkeypatch):
    """The copy of their count is still under way when the state is restored."""
    monkeypatch.setattr("unet_trainer.training.async_reader.READ_SECONDS", 0.0)
    step = run.components.train_step
    batch = run.loaders.train.read(0, 0)
    bad = batch._replace(images=batch.images.float() * math.nan)
    for _ in range(step.max_bad_steps):
        take_step(step, bad)
    step.guard.poll()
    recover(run, bad_steps())
    for _ in range(4):
        run.between_steps()
    step.guard.check()


@pytest.mark.parametrize("error", [out_of_memory(), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_with_less_memory_it_goes_on_in_smaller_parts_from_where_it_is(error, run):
    before = everything(run.components)
    recover(run, error)
    step = run.components.train_step
    assert run.config.batch_parts == step.num_parts == run.components.eval_step.num_parts == 2
    assert same(everything(run.components), before)
    assert "Note: going on from batch 3 of epoch 1" in said(run)
    assert "a batch of 2 goes through the model in 2 parts (batch_parts): batch norm statistics" in said(run)
    assert (saved(run)["batch"], saved(run)["config"]["batch_parts"]) == (3, 2)
    assert load_config(run.checkpointer.folder / "config.yaml").batch_parts == 2


def test_a_group_that_memory_interrupted_is_begun_anew_from_the_last_saved_state(run):
    run.components.train_step.begin_group(2, 3)
    run.components.train_step(run.loaders.train.read(0, 3), run.state.metrics)
    recover(run, out_of_memory())
    assert not run.components.train_step.mid_accumulation
    assert same(everything(run.components), run.initial_state)
    assert (run.state.batch, run.state.metrics.num_images) == (0, 0)
    assert "going on from the start" in said(run)


def test_with_on_oom_stop_the_state_is_saved_and_training_ends(run):
    run.settings.change("a test", on_oom="stop")
    with pytest.raises(TrainingFailed, match=r"^out of memory \(.*\)\. Try batch_size=1 .*; .*last\.pt is whole; to go on: "):
        recover(run, out_of_memory())
    assert saved(run)["batch"] == 3
    assert same_weights(run, saved(run))


def test_where_parts_cannot_get_smaller_the_state_is_saved_and_training_ends(run):
    recover(run, out_of_memory())  # two parts of one image
    take_step(run.components.train_step, run.loaders.train.read(0, 4))
    run.state.batch = 5
    with pytest.raises(TrainingFailed, match="or a smaller encoder"):
        recover(run, out_of_memory())
    assert saved(run)["batch"] == 5
    assert same_weights(run, saved(run))


@pytest.mark.parametrize("is_chained", [False, True])
def test_the_memory_of_the_failed_step_is_freed_before_parts_get_smaller(is_chained, run, monkeypatch):
    """Local variables of its frames, also of an error that was raised while another was handled."""
    alive, was_alive = [], []

    def allocate():
        activations = torch.zeros(1000)
        alive.append(weakref.ref(activations))
        raise out_of_memory()

    def step():
        gradients = torch.zeros(1000)
        alive.append(weakref.ref(gradients))
        try:
            allocate()
        except torch.OutOfMemoryError as error:
            if is_chained:
                raise RuntimeError("CUDA error: out of memory") from error
            raise

    shrink = recovery.shrink
    monkeypatch.setattr(
        recovery, "shrink", lambda *arguments: (was_alive.extend(ref() is not None for ref in alive), shrink(*arguments))[1]
    )
    with Recovery(run):
        step()
    assert was_alive == [False, False]


@pytest.mark.parametrize("text", ["worker process 12 died (SIGKILL)", "no batch in 5 s; perhaps in reading out of memory/1.png"])
def test_workers_that_fail_end_the_run_with_the_state_saved(text, run):
    with pytest.raises(TrainingFailed) as caught:
        recover(run, WorkerError(text))
    assert str(caught.value) == (
        f"{text}. See whether the disk is there; {run.checkpointer.folder / 'last.pt'} is whole; "
        f"to go on: python train_unet.py --resume {run.checkpointer.folder}"
    )
    assert caught.value.__suppress_context__
    assert (saved(run)["batch"], run.config.batch_parts) == (3, 1)


def test_a_signal_ends_the_run_with_the_state_saved(run):
    error = Interrupted(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        recover(run, error)
    assert caught.value is error
    assert saved(run)["batch"] == 3


def test_a_file_that_became_unreadable_ends_the_run_with_the_state_saved(run):
    with pytest.raises(UserError, match=r"^a\.png: changed since the run began; .*last\.pt is whole; to go on: "):
        recover(run, DataError("a.png: changed since the run began"))
    assert saved(run)["batch"] == 3


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), RuntimeError("shapes do not match"), OSError("a bug")])
def test_a_bug_ends_the_run_with_the_state_saved(error, run):
    with pytest.raises(type(error)) as caught:
        recover(run, error)
    assert caught.value is error
    assert saved(run)["batch"] == 3


def test_a_bug_is_not_hidden_by_an_error_while_saving(run, monkeypatch):
    monkeypatch.setattr(run.checkpointer, "save_on_failure", lambda state_is_whole: fail(TrainingFailed("the disk is full")))
    with pytest.raises(ZeroDivisionError):
        recover(run, ZeroDivisionError())


@pytest.mark.parametrize("error", [ZeroDivisionError(), Interrupted(signal.SIGINT), WorkerError("died"), UserError("changed")])
def test_a_state_in_the_middle_of_a_group_is_never_saved(error, run):
    run.components.train_step.begin_group(2, 3)
    expected = (TrainingFailed, UserError, ZeroDivisionError, Interrupted)
    with pytest.raises(expected):
        recover(run, error)
    assert saved(run)["batch"] == 0  # that of the start
    assert saved(run)["totals"]["num_images"] == 0


def test_an_error_that_was_handled_where_it_was_raised_passes(run):
    error = TrainingFailed("last.pt could not be written (out of memory)")
    with pytest.raises(TrainingFailed) as caught:
        recover(run, error)
    assert caught.value is error
    assert not is_anything_saved(run)
    assert run.config.batch_parts == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_a_second_ctrl_c_waits_for_nothing(error, run, monkeypatch):
    monkeypatch.setattr(run.checkpointer, "save_on_failure", lambda state_is_whole: pytest.fail("it was saved"))
    with pytest.raises(type(error)):
        recover(run, error)
    assert not is_anything_saved(run)


def test_what_was_undone_is_among_the_events_with_the_state_that_it_goes_on_from(run):
    folder = run.checkpointer.folder
    run.events.open(folder)
    run.checkpointer.save_state()
    recover(run, bad_steps())
    recover(run, out_of_memory())
    rollback, shrink = [event for event in read_events(folder) if event["kind"] in ("rollback", "shrink")]
    assert (rollback["epoch"], rollback["batch"]) == (0, 3)
    assert rollback["text"].startswith("8 steps in a row were not finite from step 5 on")
    assert (shrink["epoch"], shrink["batch"], shrink["batch_parts"]) == (0, 3, 2)
    assert shrink["text"] == "CUDA out of memory. Tried to allocate 2.00 GiB"
