"""Learning rates are tried before the first epoch, and the run is then one that began with the rate that was taken."""

import os
import signal

import pytest

from helpers.runs import assert_same_run, train_until
from helpers.steps import KnownCosts
from train_unet import train
from unet_trainer.config.auto_training import StepPlan, num_pilot_steps
from unet_trainer.config.facts import StepCost
from unet_trainer.reports.run_report import render_report
from unet_trainer.runs.record import Trial, read_run_summary
from unet_trainer.training import pilots

pytestmark = pytest.mark.usefixtures("small_network")


@pytest.fixture
def recipe(monkeypatch, tiny_config):
    """A config whose learning rate is decided, of runs whose pilots take three steps and end with the second rate."""
    monkeypatch.setattr(pilots, "num_pilot_steps", lambda num_steps: 3)
    monkeypatch.setattr(pilots, "is_better", lambda lower, higher: higher.learning_rate == 0.03)
    monkeypatch.setattr("unet_trainer.config.auto_training.choose_learning_rate", lambda *_, **__: (0.03, "tried"))
    return tiny_config | {"learning_rate": "auto", "augmentation": "strong", "num_epochs": 2}


def test_the_run_is_one_that_began_with_the_rate_that_was_taken(recipe, capsys):
    recipe |= {"num_workers": 2, "accumulation_steps": 2, "cutmix": 0.5}
    tried = train(recipe, run_name="tried")
    said = capsys.readouterr().out
    fresh = train(recipe, run_name="fresh", learning_rate=0.01)
    assert_same_run(tried.run_dir, fresh.run_dir)
    assert said.count("train IoU 0.") >= 3
    assert said.count("← taken") == 1
    written = (tried.run_dir / "config.yaml").read_text()
    assert "learning_rate: 0.01  # decided: pilots of 3 steps: train IoU 0." in written
    assert "Learning rates" not in capsys.readouterr().out  # one that is set is not tried


def test_a_lower_rate_gets_more_epochs_where_there_is_time(recipe, monkeypatch, capsys):
    monkeypatch.setattr(pilots, "has_time", lambda settings: True)
    longer = train(recipe, run_name="longer")
    monkeypatch.undo()
    assert "  num_epochs 4: 2 times 2: the lower learning rate needs more steps" in capsys.readouterr().out
    fresh = train(recipe, run_name="fresh", learning_rate=0.01, num_epochs=4)
    assert_same_run(longer.run_dir, fresh.run_dir)
    config = (longer.run_dir / "config.yaml").read_text()
    assert "num_epochs: 4  # decided: 2 times 2: the lower learning rate needs more steps" in config


def test_what_was_tried_is_in_the_report_and_is_not_tried_again_by_a_resumed_run(recipe, monkeypatch):
    run_dir = train(recipe, run_name="whole").run_dir
    train_until(1, recipe, run_name="cut")
    monkeypatch.setattr(pilots, "_train", None)
    cut = train(recipe, run_name="cut", resume="auto").run_dir
    assert_same_run(cut, run_dir)
    summary = read_run_summary(run_dir)
    tried = [(one.learning_rate, one.steps, one.is_chosen) for one in summary.trials]
    assert tried == [(0.03, 3, False), (0.01, 3, True), (0.0033, 3, False)]
    page = render_report(summary)
    assert "Learning rates that were tried" in page
    assert page.count(">taken<") == 1


def test_a_run_that_is_interrupted_while_rates_are_tried_tries_them_when_it_goes_on(recipe, monkeypatch):
    KnownCosts(StepCost(seconds=0.1, eval_seconds=0.01, memory=0)).install(monkeypatch)
    monkeypatch.setattr("unet_trainer.config.auto_training.plan_steps", lambda *_: StepPlan(2, 1, "planned"))
    monkeypatch.setattr(pilots, "has_time", lambda settings: settings.was_open("num_epochs"))
    recipe |= {"num_epochs": "auto", "ema_decay": "auto"}
    whole = train(recipe, run_name="whole")
    assert len(whole.history) == 4
    original = pilots._train

    def interrupt(run, *given):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(run, *given)

    monkeypatch.setattr(pilots, "_train", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, run_name="cut")
    monkeypatch.setattr(pilots, "_train", original)
    cut = whole.run_dir.with_name("cut")
    resumed = train(recipe, run_name="cut", resume=str(cut))
    assert_same_run(resumed.run_dir, whole.run_dir)
    assert read_run_summary(cut).trials == read_run_summary(whole.run_dir).trials != []
    for name in ("early_stopping_patience", "warmup_epochs", "ema_decay"):
        assert read_run_summary(cut).value(name) == read_run_summary(whole.run_dir).value(name)


@pytest.mark.parametrize(("num_steps", "expected"), [(6000, 300), (2000, 100), (1900, 0), (10, 0)])
def test_pilots_take_a_share_of_the_run_or_there_are_none(num_steps, expected):
    assert num_pilot_steps(num_steps) == expected


@pytest.mark.parametrize(
    ("higher", "lower", "expected"),
    [
        (0.40, 0.42, False),  # nearly as fast
        (0.00, 0.31, True),
        (0.00, 0.03, False),  # neither has learned anything
        (0.50, 0.56, False),
    ],
)
def test_a_lower_rate_is_taken_if_it_learns_clearly_more(higher, lower, expected):
    assert pilots.is_better(Trial(0.0007, lower, 3, False), Trial(0.002, higher, 3, False)) is expected
