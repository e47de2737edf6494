"""A run between two steps and after an epoch."""

from types import SimpleNamespace

import pytest

from helpers.small_runs import ROW, SCORES, evaluation_of, make_run, said
from helpers.small_runs import judge_epochs as epochs_of
from helpers.steps import KnownCosts, same, take_step
from unet_trainer.config.facts import StepCost
from unet_trainer.training import time_budget
from unet_trainer.training.checkpoint import read_checkpoint, read_last
from unet_trainer.training.schedule import fit_into_budget, is_out_of_time


@pytest.fixture
def run(tiny_data, tmp_path):
    return make_run(tiny_data, tmp_path / "run", num_epochs=3)


# A budget of time


def budgeted_run(data_dir, folder, monkeypatch, repeats=1, planned=20, **settings):
    """A run of 100 s in steps of a second, 5 an epoch for each repeat; the report takes no time."""
    monkeypatch.setattr(time_budget, "END_SHARE", 0.0)
    KnownCosts(StepCost(seconds=1.0, eval_seconds=0.0, memory=0)).install(monkeypatch)
    run = make_run(data_dir, folder, num_epochs="auto", time_budget="100s", repeats=repeats, **settings)
    assert (run.config.num_epochs, len(run.loaders.train)) == (planned, 5 * repeats)
    return run


def test_a_plan_that_was_a_guess_is_made_from_the_time_of_the_first_batches(tiny_data, tmp_path, monkeypatch):
    run = budgeted_run(tiny_data, tmp_path / "run", monkeypatch, learning_rate=0.5, warmup_epochs="auto")
    run.budget.val_seconds = 1.2
    fit_into_budget(run, epoch_seconds=21.2)
    assert (run.config.num_epochs, run.state.learning_rate.num_epochs) == (5, 5)  # the last one a part
    assert run.state.learning_rate.num_warmup_steps == 1
    fit_into_budget(run, epoch_seconds=2001.2)
    assert run.config.num_epochs == 1


def test_slow_epochs_shorten_the_plan_and_the_schedule(tiny_data, tmp_path, monkeypatch):
    run = budgeted_run(tiny_data, tmp_path / "run", monkeypatch, learning_rate=0.5)
    epochs_of(run, 10.0)  # 90 s are left
    assert run.config.num_epochs == run.state.learning_rate.num_epochs == 10
    assert run.state.learning_rate.num_steps == 50
    assert run.state.learning_rate.at(25) == pytest.approx(0.25)  # half of the cosine
    run.checkpointer.write_config()
    written = (run.checkpointer.folder / "config.yaml").read_text()
    assert "\nnum_epochs: auto  # here 10: as many as 100s have time for\n" in written
    epochs_of(run, *[10.0] * 8)
    assert not run.is_finished()
    epochs_of(run, 10.0)
    assert run.is_finished()


def train_batches(run, num_batches, seconds=1.0):
    """As the loop of an epoch, with steps that take so long; returns the number of batches that were trained."""
    for batch in range(run.state.batch + 1, num_batches + 1):
        run.budget.now += seconds
        run.state.batch, run.state.train_seconds = batch, batch * seconds
        if is_out_of_time(run):
            return batch
    return num_batches


@pytest.fixture
def long_epoch(tiny_data, tmp_path, monkeypatch):
    """A run of 100 s whose epochs of 200 batches would take longer, and whose validation took 20 s."""
    settings = {"repeats": 40, "planned": 1, "learning_rate": 0.5, "warmup_epochs": 0}
    run = budgeted_run(tiny_data, tmp_path / "run", monkeypatch, **settings)
    run.budget.val_seconds = 20.0
    return run


@pytest.mark.parametrize(
    ("seconds", "trained"),
    [(1.0, 80), (30.0, 3)],  # where 10 s are left, there is no time for the validation
    ids=["slow", "so slow that few steps tell their time"],
)
def test_an_epoch_that_there_is_no_time_for_ends_in_time_for_validation(seconds, trained, long_epoch):
    assert train_batches(long_epoch, 200, seconds) == trained
    epochs_of(long_epoch, 20.0)  # the validation
    assert (long_epoch.is_finished(), long_epoch.config.num_epochs) == (True, 1)


def test_in_the_last_epoch_the_rate_falls_over_a_part_of_another_one_if_there_is_time_for_that(long_epoch):
    """200 batches in 50 s leave 30 s: 10 to train 40 more, 20 to validate; and 8 and 20 s, which are worth no validation."""
    train_batches(long_epoch, 199, seconds=0.25)
    assert long_epoch.state.learning_rate.num_steps == 240
    long_epoch.state.batch, long_epoch.budget.now = 0, 2.0
    train_batches(long_epoch, 199, seconds=0.25)
    assert long_epoch.state.learning_rate.num_steps == 200


def test_in_an_epoch_that_ends_early_the_learning_rate_falls_to_its_end(long_epoch):
    rate = long_epoch.state.learning_rate
    train_batches(long_epoch, 4)
    assert rate.at(40) > 0.4  # too few batches tell the time of the next ones
    train_batches(long_epoch, 40)
    assert rate.at(40) == pytest.approx(0.25)  # half of 80 steps
    assert rate.at(79) < 0.001
    epochs_of(long_epoch, 20.0)
    assert rate.num_steps == rate.num_epochs * 200


@pytest.mark.parametrize(
    ("val_seconds", "num_epochs", "num_steps"),
    [
        (18.0, 2, 10),  # of 60 s an epoch takes 40: 2 s to train in are not worth a validation
        (4.0, 3, 12),  # 16 of the 36 s that an epoch trains
        (0.0, 3, 12),  # 20 of 40
    ],
)
def test_the_last_epoch_may_be_a_part_of_one(tiny_data, tmp_path, monkeypatch, val_seconds, num_epochs, num_steps):
    run = budgeted_run(tiny_data, tmp_path / "run", monkeypatch)
    run.budget.val_seconds = val_seconds
    epochs_of(run, 40.0)
    assert (run.config.num_epochs, run.state.learning_rate.num_steps) == (num_epochs, num_steps)
    train_batches(run, 5, seconds=1.0)  # an epoch that is whole keeps the plan
    assert run.state.learning_rate.num_steps == num_steps
    epochs_of(run, 60.0)
    assert run.is_finished()


def test_without_a_budget_and_in_a_job_epochs_are_whole(long_epoch, tiny_data, tmp_path):
    plain = make_run(tiny_data, tmp_path / "plain", num_epochs=2, repeats=40)
    assert train_batches(plain, 200, seconds=1e9) == 200
    long_epoch.processes = SimpleNamespace(is_alone=False)
    assert train_batches(long_epoch, 200) == 200


@pytest.mark.parametrize("improved", [False, True])
def test_the_evaluated_model_is_saved_if_the_epoch_was_the_best(improved, tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", ema_decay=0.9)
    take_step(run.components.train_step, run.loaders.train.read(0, 0))
    run.judge(dict(ROW), SCORES)
    run.reporter.record_epoch(run.config, dict(ROW), evaluation_of(run, SCORES))
    run.save_epoch(dict(ROW), evaluation_of(run, SCORES), improved)
    run.checkpointer.finish()
    folder = run.checkpointer.folder
    assert (folder / "best.pt").exists() is improved
    assert (folder / "samples" / "epoch_0001.png").exists() is improved
    if improved:
        saved = list(read_checkpoint(folder / "best.pt")["model"].values())
        assert same(saved, run.state.ema.segmenter.network.state_dict().values())
        assert not same(saved, run.state.segmenter.network.state_dict().values())
    assert same(read_last(folder / "last.pt")["model"].values(), run.state.segmenter.network.state_dict().values())


def test_an_epoch_is_told_and_parts_that_workers_failed_to_read(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_workers=1, num_epochs=3)
    run.reporter.say_epoch(run.config, run.state, dict(ROW), True, run.loaders.take_notices())
    assert "Epoch 1/3  train loss 1.0000" in said(run)
    assert "GPU memory" not in said(run)
    assert "could not fill" not in said(run)
    run.loaders.pool.num_failed, run.loaders.pool.failure_reason = 1, "MemoryError"
    run.reporter.say_epoch(run.config, run.state, dict(ROW), True, run.loaders.take_notices())
    assert "Warning: workers could not fill 1 part of a batch in this epoch (MemoryError); the training" in said(run)
