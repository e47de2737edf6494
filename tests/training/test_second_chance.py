"""A run that does not learn begins again with a gentler recipe, once, and then ends."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from helpers.runs import stop_after, timeless_rows, weights_digest
from train_unet import train
from unet_trainer.config.choices import choose_learning_rate
from unet_trainer.config.resolved_config import Decision
from unet_trainer.model.baselines import Baseline
from unet_trainer.training import second_chance
from unet_trainer.training.checkpoint_file import read_run
from unet_trainer.training.history import read_events

pytestmark = pytest.mark.usefixtures("small_network")

AUGMENTATION = ({"HorizontalFlip": {"p": 0.5}}, {"Affine": {"rotate": [-90, 90], "p": 0.9}})
GENTLE = [{"HorizontalFlip": {"p": 0.5}}]


@pytest.fixture
def recipe(monkeypatch, tiny_config):
    """A config whose learning rate and augmentation are decided, of runs that are judged after their first epoch."""
    monkeypatch.setattr(second_chance, "MIN_STEPS", 1)
    monkeypatch.setattr(second_chance, "NUM_EPOCHS", 1)
    monkeypatch.setattr(second_chance, "LOSS_SHARE", 0.0)
    monkeypatch.setattr("unet_trainer.config.choices.AUGMENTED_PASSES", 0)
    monkeypatch.setattr("unet_trainer.config.choices.choose_augmentation", lambda *_: (AUGMENTATION, "measured"))
    monkeypatch.setattr("unet_trainer.config.choices.choose_learning_rate", lambda *_, **__: (0.04, "tried"))
    return tiny_config | {"learning_rate": "auto", "augmentation": "auto", "num_epochs": 4}


@pytest.fixture
def first_fails(monkeypatch):
    """Whatever is trained first is judged not to learn."""

    def judge(run):
        baseline = Baseline("all foreground", 0.0 if run.state.num_restarts else 2.0)
        monkeypatch.setattr(second_chance, "best_baseline", lambda *_: baseline)
        original(run)

    original = second_chance.begin_again_if_stuck
    monkeypatch.setattr(second_chance, "begin_again_if_stuck", judge)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_second_attempt_is_a_run_that_began_with_the_gentler_recipe(num_workers, recipe, first_fails, capsys):
    recipe["num_workers"] = num_workers
    again = train(recipe, run_name="again")
    fresh = train(recipe, run_name="fresh", learning_rate=0.01, augmentation=GENTLE)
    assert weights_digest(again.run_dir) == weights_digest(fresh.run_dir)
    assert timeless_rows(again.run_dir) == timeless_rows(fresh.run_dir)
    (event,) = (one for one in read_events(again.run_dir) if one["kind"] == "rollback")
    assert "did not learn with learning_rate 0.04 and augmentation HorizontalFlip, Affine" in event["text"]
    assert "Beginning again with learning_rate 0.01 and augmentation HorizontalFlip" in capsys.readouterr().out
    assert "training did not learn with learning_rate 0.04" in (again.run_dir / "config.yaml").read_text()


def test_a_run_that_was_interrupted_after_it_began_again_resumes_to_the_same_bits(recipe, first_fails, monkeypatch):
    whole = train(recipe, run_name="whole")
    with pytest.raises(KeyboardInterrupt):
        train(recipe, on_epoch=stop_after(2), run_name="cut")
    cut = whole.run_dir.with_name("cut")
    assert read_run(cut, print)["num_restarts"] == 1
    monkeypatch.setattr(second_chance, "begin_again", None)  # not a second time
    resumed = train(recipe, run_name="cut", resume=str(cut))
    assert weights_digest(resumed.run_dir) == weights_digest(whole.run_dir)


def test_a_run_that_never_learns_ends_early_and_says_why(recipe, monkeypatch, capsys):
    monkeypatch.setattr(second_chance, "best_baseline", lambda *_: Baseline("all foreground", 2.0))
    result = train(recipe, num_epochs=10)
    assert (result.stopped_early, result.epochs) == (True, 4)
    assert "does not learn with the gentler recipe either" in capsys.readouterr().out


def test_a_run_that_learns_and_one_whose_recipe_was_set_go_on(recipe, monkeypatch):
    monkeypatch.setattr(second_chance, "begin_again", None)
    assert train(recipe, run_name="learns", num_epochs=2).epochs == 2
    monkeypatch.setattr(second_chance, "best_baseline", lambda *_: Baseline("all foreground", 2.0))
    assert train(recipe, run_name="set", learning_rate=1e-3, augmentation="none").epochs == 4


@pytest.mark.parametrize(
    ("ious", "losses", "expected"),
    [
        ([0.02, 0.05, 0.03, 0.04], [1.4, 1.3, 1.2, 1.2], True),
        ([0.02, 0.05], [1.4, 1.3], False),  # too early to tell
        ([0.02, 0.05, 0.11, 0.04], [1.4, 1.3, 1.2, 1.2], False),
        ([0.02, 0.05, 0.06, 0.08], [1.4, 1.3, 1.2, 1.1], False),  # below the constant prediction, and learning
        ([0.02, 0.4, 0.5, 0.02, 0.01, 0.0], [1.4, 0.9, 0.7, 1.3, 1.4, 1.4], True),  # fell to nothing
        ([math.nan] * 3, [1.4, 1.4, 1.4], False),
    ],
)
def test_training_is_stuck_below_a_constant_prediction_with_a_loss_that_does_not_fall(ious, losses, expected):
    rows = [{"train_iou": iou, "train_loss": loss} for iou, loss in zip(ious, losses, strict=True)]
    assert second_chance.is_stuck(rows, Baseline("all foreground", 0.1)) is expected


@pytest.mark.parametrize(
    ("decided", "augmentation", "in_job", "expected"),
    [
        (["learning_rate"], AUGMENTATION, False, {"learning_rate": 5e-4}),
        (["augmentation"], AUGMENTATION, False, {"augmentation": tuple(GENTLE)}),
        (["augmentation"], AUGMENTATION[1:], False, {"augmentation": "none"}),
        (["augmentation"], "default", False, {"augmentation": "none"}),
        (["augmentation", "learning_rate"], AUGMENTATION, True, {"learning_rate": 5e-4}),
        (["augmentation"], "none", False, {}),
        (["augmentation"], AUGMENTATION[:1], False, {}),
    ],
)
def test_only_what_was_decided_is_changed(decided, augmentation, in_job, expected):
    rate, _ = choose_learning_rate("adamw", 16)

    taken = SimpleNamespace(learning_rate=rate, augmentation=augmentation)
    decisions = {name: Decision("decided" if name in decided else "file") for name in ("learning_rate", "augmentation")}
    settings = SimpleNamespace(taken=taken, decisions=decisions)
    assert second_chance.gentler(settings, can_change_samples=not in_job) == expected
