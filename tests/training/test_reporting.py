"""What a run says of itself while it goes on: that it does not learn."""

import math

import pytest

from train_unet import train
from unet_trainer.model.baselines import Baseline
from unet_trainer.training import reporting

pytestmark = pytest.mark.usefixtures("small_network")


def test_a_run_that_does_not_learn_says_once_what_to_change_and_trains_on(tiny_config, monkeypatch, capsys):
    for name, value in (("STUCK_STEPS", 1), ("STUCK_EPOCHS", 1), ("LOSS_SHARE", 0.0)):
        monkeypatch.setattr(reporting, name, value)
    config = tiny_config | {"num_epochs": 3, "learning_rate": 0.04}
    train(config, run_name="learns", num_epochs=2)
    assert "does not learn" not in capsys.readouterr().out
    monkeypatch.setattr(reporting, "best_baseline", lambda *_: Baseline("all foreground", 2.0))
    assert train(config).epochs == 3
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "does not learn" in line)
    assert line.startswith("Warning: training does not learn: train IoU ")
    assert line.endswith(
        " after 1 epoch, all foreground everywhere gives 2.0000. Try learning_rate=0.01; see in the samples whether "
        "the masks fit the images; try augmentation=none"
    )


@pytest.mark.parametrize(
    ("ious", "losses", "expected"),
    [
        ([0.02, 0.05, 0.03, 0.04], [1.4, 1.3, 1.2, 1.2], True),
        ([0.02, 0.05], [1.4, 1.3], False),  # too early to tell
        ([0.02, 0.05, 0.11, 0.04], [1.4, 1.3, 1.2, 1.2], False),
        ([0.02, 0.05, 0.06, 0.08], [1.4, 1.3, 1.2, 1.1], False),  # below the constant prediction, and learning
        ([0.02, 0.4, 0.5, 0.02, 0.01, 0.0], [1.4, 0.9, 0.7, 1.3, 1.4, 1.4], True),  # fell to nothing
        ([0.09, 0.02, 0.01, 0.0], [1.7, 1.2, 1.2, 1.2], True),  # from everything to nothing: the loss falls
        ([math.nan] * 3, [1.4, 1.4, 1.4], False),
    ],
)
def test_training_is_stuck_below_a_constant_prediction_with_a_loss_that_does_not_fall(ious, losses, expected):
    rows = [{"train_iou": iou, "train_loss": loss} for iou, loss in zip(ious, losses, strict=True)]
    assert reporting.is_stuck(rows, Baseline("all foreground", 0.1)) is expected
