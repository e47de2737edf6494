"""The result of a run: as an object, in run.json, and as the last lines that the user reads."""

import math
import shlex
import signal

import pytest
import torch

from helpers.small_runs import ROW, finish_epochs, make_run, said
from helpers.steps import make_settings
from unet_trainer.config.load import load_config
from unet_trainer.model.baselines import Baseline, best_baseline
from unet_trainer.model.metrics import compute_scores
from unet_trainer.runs.findings import find_problems
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.result import build_result, report


@pytest.fixture
def run(tiny_data, tmp_path):
    """Three epochs of three; the second was the best."""
    made = make_run(tiny_data, tmp_path / "run", num_epochs=3)
    finish_epochs(made, [0.25, 0.75, 0.5], rates=[10.0, 20.0, 20.0])
    return made


def test_the_result_is_that_of_the_best_epoch(run):
    result = build_result(run)
    assert (result.best_epoch, result.best_val_iou, result.epochs, result.stopped_early) == (2, 0.75, 3, False)
    assert (result.run_dir, result.seconds) == (run.checkpointer.folder, 6.0)
    assert result.per_class_iou == {"foreground": 0.5}
    assert result.images_per_second == pytest.approx(15.0)  # as many images in each epoch: 3 / (1/10 + 1/20 + 1/20)
    assert (result.number_format, result.is_compiled) == ("float32", False)
    assert [row["epoch"] for row in result.history] == [1, 2, 3]


def test_without_a_best_epoch_the_result_is_that_of_the_last(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_epochs=2)
    finish_epochs(run, [math.nan, math.nan])
    result = build_result(run)
    assert (result.best_epoch, result.per_class_iou) == (2, {"foreground": None})
    assert math.isnan(result.best_val_iou)
    report(run)
    assert "Warning: val_iou was no number in any epoch" in said(run)
    assert f"Weights: {run.checkpointer.folder / 'last.pt'} | " in said(run)
    # The folder would mean best.pt.
    assert f"Next: python train_unet.py evaluate {run.checkpointer.folder / 'last.pt'} " in said(run)
    written = run.reporter.record.content.result
    assert (written["best_val_iou"], written["baseline_iou"]) == (None, None)
    assert written["warnings"][0].startswith("val_iou was no number in any epoch")


def test_a_useless_model_is_told_after_the_table_and_in_run_json(tiny_data, tmp_path):
    run = make_run(tiny_data, tmp_path / "run", num_epochs=2)
    nothing_found = compute_scores(torch.tensor([[6, 0], [3, 0]]), 1)
    finish_epochs(run, [0.0, 0.0], nothing_found, train_iou=0.1)
    result = report(run)
    assert result.baseline_iou == pytest.approx(1 / 3)
    (warning,) = result.warnings
    assert warning.startswith(
        "this model is of no use: its val IoU is 0.000, and all foreground everywhere gives 0.333."
    )
    assert "\n  - 10 optimizer steps may be too few: num_epochs=200\n" in warning  # 5 in an epoch
    assert f"  foreground  0.0000\nWarning: {warning}\nTime: " in said(run)
    written = run.reporter.record.content.result
    assert (written["baseline_iou"], written["warnings"]) == (pytest.approx(1 / 3), [warning])


def test_the_last_lines_name_what_is_there_and_the_next_command(run):
    report(run)
    folder = run.checkpointer.folder
    assert said(run).replace(str(folder), "RUN").splitlines()[-9:] == [
        "Best epoch: 2 of 3, val IoU 0.7500 (all foreground everywhere would give 0.3333)",
        "  class       IoU",
        "  foreground  0.5000",
        "Time: 6 s in epochs, 15 images/s in training",
        "Weights: RUN/best.pt | report: RUN/report.html | curves: RUN/curves.png | pictures: RUN/samples",
        "Next: python train_unet.py evaluate RUN   (scores of each class and image)",
        "      python train_unet.py predict RUN IMAGES --out predictions",
        "      python train_unet.py try RUN   (a page in the browser)",
        "      python train_unet.py --resume RUN num_epochs=6   (trains on)",
    ]


def test_a_signal_that_came_with_the_last_step_ends_the_run_before_its_report(run):
    run.signals.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        report(run)
    assert "Making the report" not in said(run)
    assert f"Weights: {run.checkpointer.folder / 'best.pt'} | curves: " in said(run)  # the report is not promised
    assert "Next: python train_unet.py evaluate" in said(run)
    assert run.reporter.record.content.last_end == "finished"
    assert run.reporter.record.content.result["epochs"] == 3


# 30% foreground. Rows truth, columns prediction.
GOOD = [[68, 2], [2, 28]]  # IoU 28 / 32
ALL_FOREGROUND = [[0, 70], [0, 30]]  # IoU 0.3
ALL_BACKGROUND = [[70, 0], [30, 0]]
ENOUGH = 1000  # steps in an epoch


def rows(train_iou):
    return [{**ROW, "epoch": index + 1, "train_iou": value} for index, value in enumerate(train_iou)]


def problems_of(settings, *given, **named):
    return find_problems(settings.taken, settings.was_open, *given, **named)


def judge(confusion, history, steps_per_epoch=ENOUGH, **settings):
    resolved = make_settings(**{"image_size": 512, "augmentation": "default", **settings})
    return problems_of(resolved, confusion, history, len(history) * steps_per_epoch)


def test_a_good_run_is_not_warned_about():
    assert judge(GOOD, rows([0.5, 0.8, 0.9])) == []
    three = [[68, 2, 0], [2, 18, 0], [1, 0, 9]]
    assert judge(three, rows([0.5, 0.8, 0.9]), num_classes=3) == []


def test_training_that_did_not_learn_points_to_steps_masks_and_rate():
    history = rows([0.2, 0.32])
    ((problem, advice),) = judge(ALL_FOREGROUND, history, steps_per_epoch=10, num_epochs=2, data_dir="my data")
    assert problem == (
        "this model is of no use: its val IoU is 0.300, and all foreground everywhere gives 0.300. "
        "Training did not learn either (train IoU 0.320 at best)"
    )
    assert advice == [
        "20 optimizer steps may be too few: num_epochs=100",
        "masks may not match their images: the pictures in samples/ show them side by side; or masks may be read with "
        "the wrong mask_values: python train_unet.py check 'data_dir=my data'",
        "another learning rate may suit these data: learning_rate=0.0001, or learning_rate=auto",
    ]


def test_training_that_learned_points_to_overfitting_and_the_split():
    ((problem, advice),) = judge(ALL_FOREGROUND, rows([0.5, 0.9]))
    assert problem.endswith("Training did learn (train IoU 0.900): the model knows its training images only")
    assert advice[0] == "overfitting: augmentation=strong, encoder_weights=imagenet, more training images"
    assert "another kind" in advice[1]


def test_a_foreground_that_is_rare_and_never_predicted_is_told_with_how_to_find_it():
    ((problem, _),) = judge(ALL_BACKGROUND, rows([0.0]))  # 30% is not rare
    assert "of no use" in problem
    _, (problem, advice) = judge([[990, 0], [10, 0]], rows([0.0]))
    assert problem.endswith(
        "foreground (0.01 of the validation pixels, 100% of them taken for background; never predicted)"
    )
    assert advice == [
        "small objects vanish when images are made smaller: fit=crop rare_class_crops=0.5",
        "a rare class weighs little in the loss: 'class_weights=[5.0]'",
        "a loss for rare classes: 'loss={dice: 1, focal: 1}'",
    ]


def test_advice_fits_images_that_were_not_made_smaller_and_classes_that_nothing_teaches():
    settings = make_settings(image_size=512, num_classes=3, class_names=["sky", "road", "cow"])
    confusion, history = [[600, 380, 0], [10, 0, 0], [10, 0, 0]], rows([0.9])
    found = dict(problems_of(settings, confusion, history, ENOUGH, untaught_ids={2}, largest_side=512.0))
    assert not any("made smaller" in line for advice in found.values() for line in advice)
    (about_road,) = (problem for problem in found if "hardly finds" in problem)
    assert "cow" not in about_road
    assert "a rare class weighs little in the loss: 'class_weights=[1.0, 2.5, 1.0]'" in found[about_road]
    assert found["classes in no training mask, which the model cannot find: cow"] == [
        "add training images with them, or choose with split_file=FILE.csv"
    ]


def test_every_setting_that_is_advised_can_be_given_on_the_command_line():
    confusion, history = [[980, 0, 0], [10, 0, 0], [10, 0, 0]], rows([0.9] * 6)
    findings = judge(confusion, history, num_classes=3, steps_per_epoch=50, image_size=[64, 32])
    findings += judge(confusion, rows([0.3]), num_classes=3, data_dir="some where")
    lines = [line.replace(", or ", " ") for _, advice in findings for line in advice]
    words = [word.rstrip(",") for line in lines for word in shlex.split(line)]
    settings = [word for word in words if "=" in word]
    assert {word.partition("=")[0] for word in settings} == {
        *("num_epochs", "fit", "rare_class_crops", "class_weights", "loss", "learning_rate"),
        *("augmentation", "encoder_weights", "data_dir"),
    }
    for setting in settings:
        load_config({"num_classes": 3}, [setting])


def test_classes_that_are_not_found_are_named_with_what_they_are_taken_for():
    confusion = [
        [5000, 0, 0, 0, 0],
        [0, 3000, 0, 0, 0],
        [180, 20, 0, 0, 0],  # 200 of 10000 pixels, never predicted
        [0, 1779, 0, 21, 0],  # 21 / 1800 = 0.0117
        [0, 0, 0, 0, 0],  # does not occur
    ]
    names = ["sky", "road", "cow", "sea", "sand"]
    ((problem, advice),) = judge(confusion, rows([0.5]), num_classes=5, class_names=names)
    assert problem == (
        "classes that the model hardly finds: cow (0.02 of the validation pixels, 90% of them taken for sky; never predicted), "
        "sea (0.18 of the validation pixels, 99% of them taken for road; 1.2% of them found)"
    )
    # auto has decided on none
    assert "a rare class weighs little in the loss: 'class_weights=[1.0, 1.0, 2.5, 2.5, 1.0]'" in advice


@pytest.mark.parametrize(
    ("confusion", "num_classes", "name"),
    [([[70, 0], [0, 0]], 1, "background"), ([[0, 0], [3, 9]], 1, "foreground"), ([[0, 0], [0, 9]], 2, "class 1")],
)
def test_validation_with_one_class_only_says_nothing_about_the_model(confusion, num_classes, name):
    ((problem, advice),) = judge(confusion, rows([0.9]), num_classes=num_classes)
    assert problem == f"every validation pixel is {name}: val IoU says nothing about the model"
    assert "val_fraction" in advice[0]


# Predictions that need no model: their IoU by hand

TWO = ("background", "foreground")


@pytest.mark.parametrize("confusion", [[[68, 2], [2, 28]], [[70, 0], [30, 0]]])
def test_the_baseline_of_one_class_is_all_foreground_whatever_was_predicted(confusion):
    assert best_baseline(confusion, 1, TWO) == Baseline("all foreground", 0.3)
    assert best_baseline([[65, 5], [0, 0]], 1, TWO) is None  # there is nothing to score


def test_the_baseline_of_many_classes_is_the_most_frequent_one_over_those_that_occur():
    confusion = [[10, 0, 0, 0], [5, 50, 5, 0], [0, 0, 30, 0], [0, 0, 0, 0]]  # truth 10, 60, 30, 0
    assert best_baseline(confusion, 4, ("sky", "road", "cow", "sea")) == Baseline("all road", 0.6 / 3)
    assert best_baseline([[0, 0], [0, 0]], 1, TWO) is best_baseline([], 1, TWO) is None
